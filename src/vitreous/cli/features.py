"""`vitreous inspect features`: patch features as colours, or how similar patches are to one of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitreous.cli.arguments import Cells, Images, PlaceOfImages, Source
from vitreous.cli.groups import grouped
from vitreous.cli.inspect import OneLayer, app, parse_numbers, parse_pair, report, write
from vitreous.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitreous.inspect import View
    from vitreous.models.model import Model

LAYERS = "Show only these layers: 0-5, or 0,4,-1."


@dataclass(frozen=True)
class Which:
    """Which features."""

    layer: OneLayer = "-1"
    layers: Annotated[str | None, typer.Option("--layers", help=LAYERS)] = None
    of: Annotated[str, typer.Option("--of", help="tokens that leave the block; queries, keys or values.")] = "tokens"
    norm: Annotated[
        bool | None,
        typer.Option("--norm/--no-norm", help="Apply the model's final norm; default: if it has one that fits."),
    ] = None

    @property
    def chosen(self) -> dict[str, Any]:
        option, text = ("--layer", self.layer) if self.layers is None else ("--layers", self.layers)
        return {"layers": None if text == "all" else parse_numbers(option, text), "of": self.of, "norm": self.norm}


@dataclass(frozen=True)
class Colours:
    """Components as colours."""

    foreground: Annotated[
        bool, typer.Option("--foreground", help="Part the patches by the first component; colours inside only.")
    ] = False
    basis: Annotated[
        Path | None, typer.Option("--basis", help="Use the basis of another run, a file of --save-basis.")
    ] = None
    save_basis: Annotated[
        Path | None, typer.Option("--save-basis", help="Write the basis, an .npz, for other images.")
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Also write the features themselves into the .npz.")] = False
    smooth: Annotated[bool, typer.Option("--smooth", help="Show smooth maps, not the true patches.")] = False

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value]


@dataclass(frozen=True)
class Patch:
    """One patch that others are compared with."""

    patch: Annotated[
        str | None,
        typer.Option("--patch", "-p", help="Similarity to this patch of the first image: row and column from 0: 5,7."),
    ] = None
    at: Annotated[str | None, typer.Option("--at", help="A pixel x,y of the image, in place of --patch.")] = None
    centred: Annotated[
        bool, typer.Option("--centred", help="Subtract the mean of all patches before they are compared.")
    ] = False
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Also write the similarity of every patch of the first image.")
    ] = False


@app.command()
@grouped
def features(
    images: Images,
    *,
    source: Source,
    which: Which,
    colours: Colours,
    one: Patch,
    cells: Cells = False,
    place: PlaceOfImages,
) -> None:
    """Show patch features as colours, in one basis for all images; or which patches are similar to one (--patch)."""
    chosen, asks = which.chosen, one.patch is not None or one.at is not None
    if asks and colours.given:
        raise OptionError(f"{colours.given[0]} is for colours; leave it or --patch and --at out")
    if not asks and (one.centred or one.matrix or cells):
        name = "--centred" if one.centred else "--matrix" if one.matrix else "--cells"
        raise OptionError(f"{name} is for the similarity to one patch; give --patch row,column or --at x,y too")
    if colours.save_basis is not None and colours.basis is not None:
        raise OptionError("--save-basis: the basis is given by --basis already")
    if colours.save_basis is not None and colours.save_basis.exists() and not place.overwrite:
        raise OptionError(f"--save-basis {colours.save_basis}: exists; give another name or --overwrite")

    def compare(net: Model, pictures: Any) -> tuple[View, Figure]:
        from vitreous.inspect import similarity as view

        row = None if one.patch is None else parse_pair("--patch", one.patch)
        pixel = None if one.at is None else parse_pair("--at", one.at)
        seen = view(net, pictures, **chosen, patch=row, at=pixel, centred=one.centred, matrix=one.matrix)
        return seen, seen.figure(cells=cells)

    def colour(net: Model, pictures: Any) -> tuple[View, Figure]:
        from vitreous.inspect import features as view

        more: dict[str, Any] = {"foreground": colours.foreground, "basis": colours.basis, "raw": colours.raw}
        seen = view(net, pictures, **chosen, **more)
        if colours.save_basis is not None:
            seen.basis.save(colours.save_basis)
        return seen, seen.figure(smooth=colours.smooth)

    run(images, source, place, "similarity" if asks else "features", compare if asks else colour)


def run(sources: list[str], source: Source, place: PlaceOfImages, name: str, look: Any) -> None:
    """Compute, write and report one view of all images that can be read."""
    from vitreous.cli.results import Batch, Summary, check_out, find_pictures, work_through

    formats = place.formats
    check_out(place.out)
    found = find_pictures(sources, place.limit)
    net = source.load()
    summary = Summary.of(net, place.out, found)
    readable: list[Path] = []

    def work(batch: Batch) -> None:
        readable.extend(file for file, _ in batch)

    def finish() -> None:
        if readable:
            seen, figure = look(net, [str(file) for file in readable])
            written = write(seen, figure, found.names[readable[0]], formats, place.overwrite, summary)
            entry = {"image": str(readable[0]), "images": [str(file) for file in readable]}
            summary.done.append({**entry, **written, "said": seen.said, **seen.details})

    def told() -> None:
        report(summary, name, place.as_json)

    with source.limited():
        work_through(found.files, summary, 1, work, told, place.as_json, finish)
    told()
    raise typer.Exit(summary.code)
