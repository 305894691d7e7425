"""`vitreous inspect`: look inside a model; writes figures and arrays and prints a summary for each image."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitreous.cli.arguments import Cells, Images, PlaceOfImages, Source, SourceOfHead
from vitreous.cli.groups import grouped
from vitreous.cli.values import NUMBERS
from vitreous.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitreous.cli.results import Summary
    from vitreous.inspect import View
    from vitreous.models.model import Model

app = typer.Typer(help="Look inside a model: heads, layers, queries and keys, who reads whom, outlier tokens.")

SameScale = Annotated[bool, typer.Option("--same-scale", help="One colour scale for all maps.")]
OneLayer = Annotated[str, typer.Option("--layer", "-l", help="Layer from 0, or from the end by -1, -2, …; or all.")]
Fused = Annotated[str, typer.Option("--heads", help="How the heads of a layer become one: mean, min or max.")]


@app.command()
@grouped
def heads(
    images: Images,
    *,
    source: Source,
    layers: Annotated[str | None, typer.Option("--layers", help="Show only these layers: 0-5, or 0,4,-1.")] = None,
    same_scale: SameScale = False,
    cells: Cells = False,
    place: PlaceOfImages,
) -> None:
    """Show every head of every layer: where the read-out looks."""
    chosen = None if layers is None else parse_numbers("--layers", layers)

    def look(net: Model, picture: Any) -> tuple[View, Figure]:
        from vitreous.inspect import heads as view

        seen = view(net, picture, layers=chosen)
        return seen, seen.figure(same_scale=same_scale, cells=cells)

    run(images, source, place, "heads", look)


@app.command()
@grouped
def layers(
    images: Images,
    *,
    source: Source,
    heads: Fused = "mean",
    bare: Annotated[bool, typer.Option("--bare", help="Draw the maps without the image under them.")] = False,
    same_scale: SameScale = False,
    cells: Cells = False,
    place: PlaceOfImages,
) -> None:
    """Show a map for each layer, and all layers as one: mean, min, max, rollout."""

    def look(net: Model, picture: Any) -> tuple[View, Figure]:
        from vitreous.inspect import layers as view

        seen = view(net, picture, heads=heads)
        return seen, seen.figure(bare=bare, same_scale=same_scale, cells=cells)

    run(images, source, place, "layers", look)


@app.command()
@grouped
def qk(
    images: Images,
    *,
    source: SourceOfHead,
    layer: OneLayer = "-1",
    head: Annotated[str, typer.Option("--head", help="Attention head from 0; or all.")] = "0",
    channels: Annotated[str | None, typer.Option("--channels", "-c", help="Show these channels: 26,59.")] = None,
    count: Annotated[int, typer.Option(help="Without --channels, show the N best.")] = 4,
    least: Annotated[float, typer.Option(help="Count a sign only if this share of the patches has it.")] = 0.03,
    coherence: Annotated[float, typer.Option(help="Count regions only from this Moran's I on.")] = 0.3,
    likeness: Annotated[
        float,
        typer.Option(help="Correlation of signs from which regions read themselves; below its negative, each other."),
    ] = 0.2,
    centred: Annotated[
        bool, typer.Option("--centred", help="Subtract the mean from the keys, as a softmax does.")
    ] = False,
    smooth: Annotated[bool, typer.Option("--smooth", help="Show smooth maps, not the true patches.")] = False,
    place: PlaceOfImages,
) -> None:
    """Show queries and keys of a head as images, its channels ranked, and how information flows in them."""
    chosen = None if channels is None else parse_numbers("--channels", channels)
    number, one = parse_place("--layer", layer), parse_place("--head", head)

    def look(net: Model, picture: Any) -> tuple[View, Figure]:
        from vitreous.inspect import qk as view

        seen = view(
            net,
            picture,
            layer=number,
            head=one,
            channels=chosen,
            count=count,
            least=least,
            coherence=coherence,
            likeness=likeness,
            centred=centred,
        )
        return seen, seen.figure(cells=not smooth)

    run(images, source, place, "qk", look)


@app.command()
@grouped
def flow(
    images: Images,
    *,
    source: Source,
    patch: Annotated[
        str, typer.Option("--patch", "-p", help="Row and column from 0: 7,7; or readout: what the classifier reads.")
    ] = "readout",
    at: Annotated[str | None, typer.Option("--at", help="A pixel x,y of the image, in place of --patch.")] = None,
    layer: OneLayer = "-1",
    head: Annotated[str, typer.Option("--head", help="Attention head from 0; or mean.")] = "mean",
    cells: Cells = False,
    place: PlaceOfImages,
) -> None:
    """Show what a patch reads, and who reads it."""
    row = None if patch == "readout" else parse_pair("--patch", patch)
    pixel = None if at is None else parse_pair("--at", at)
    number = parse_place("--layer", layer)
    one = head if head == "mean" else parse_whole("--head", head)

    def look(net: Model, picture: Any) -> tuple[View, Figure]:
        from vitreous.inspect import flow as view

        seen = view(net, picture, patch=row, at=pixel, layer=number, head=one)
        return seen, seen.figure(cells=cells)

    run(images, source, place, "flow", look)


@app.command()
@grouped
def discard(
    images: Images,
    *,
    source: Source,
    heads: Fused = "mean",
    most: Annotated[float, typer.Option(help="Largest share to discard.", min=0.0, max=0.999)] = 0.95,
    steps: Annotated[int, typer.Option(help="Number of shares, from 0 on.", min=2, max=100)] = 20,
    residual: Annotated[float, typer.Option(help="Weight of the skip connection.", min=0.0, max=1.0)] = 0.5,
    cells: Cells = False,
    place: PlaceOfImages,
) -> None:
    """Show rollout while more and more of the smallest attentions are discarded: an animation and a sheet."""
    ratios = [most * i / (steps - 1) for i in range(steps)]

    def look(net: Model, picture: Any) -> tuple[View, Figure]:
        from vitreous.inspect import discard as view

        seen = view(net, picture, ratios=ratios, heads=heads, residual=residual)
        return seen, seen.figure(cells=cells)

    run(images, source, place, "discard", look)


@app.command()
@grouped
def registers(
    images: Images,
    *,
    source: Source,
    ratio: Annotated[float, typer.Option(help="Times the median norm from which a token is an outlier.")] = 2.0,
    layer: Annotated[
        str, typer.Option("--layer", "-l", help="Outliers after this layer; most: after the one with the most.")
    ] = "most",
    units: Annotated[int, typer.Option(help="Units to list.")] = 20,
    cells: Cells = False,
    place: PlaceOfImages,
) -> None:
    """Show outlier tokens, the attention that they take, and the MLP units behind them; all images together."""
    number = None if layer == "most" else parse_whole("--layer", layer)

    def look(net: Model, pictures: Any) -> tuple[View, Figure]:
        from vitreous.inspect import registers as view

        seen = view(net, pictures, ratio=ratio, layer=number, most=units)
        return seen, seen.figure(cells=cells)

    run(images, source, place, "registers", look, together=True)


# ------------------------------------------------------------------------------------------------------------- running

Look = Callable[["Model", Any], tuple["View", "Figure"]]


def run(
    sources: list[str], source: Source, place: PlaceOfImages, name: str, look: Look, *, together: bool = False
) -> None:
    """Compute, write and report one view of each image, or one of all."""
    from vitreous.cli.results import Batch, Summary, check_out, find_pictures, work_through

    formats = place.formats
    check_out(place.out)
    found = find_pictures(sources, place.limit)
    net = source.load()
    summary = Summary.of(net, place.out, found)

    def work(batch: Batch) -> None:
        for file, picture in batch[:1] if together else batch:
            seen, figure = look(net, [one for _, one in batch] if together else picture)
            written = write(seen, figure, found.names[file], formats, place.overwrite, summary)
            summary.done.append({"image": str(file), **written, "said": seen.said, **seen.details})

    with source.limited():
        size = max(1, len(found.files)) if together else 1
        work_through(found.files, summary, size, work, lambda: report(summary, name, place.as_json), place.as_json)
    report(summary, name, place.as_json)
    raise typer.Exit(summary.code)


def write(
    view: View, figure: Figure, name: str, formats: tuple[str, ...], overwrite: bool, summary: Summary
) -> dict[str, str]:
    """Write the arrays and the figure of one image, each atomically; returns the files by what they are."""
    from vitreous.cli.results import placed

    kinds = (*formats, "gif") if view.moves and formats else formats
    endings = [f".{view.name}.{kind}" for kind in kinds]
    files: dict[str, str] = {}
    with placed(summary, name, endings, view.mark["identity"], overwrite) as found:
        for kind, ending in zip(kinds, endings):
            what = {NUMBERS: "numbers", "gif": "animation"}.get(kind, "figure")
            path = view.save(summary.out / f"{found}{ending}", figure if what == "figure" else None)
            files.setdefault(what, str(path))
    return files


# ----------------------------------------------------------------------------------------------------- printing results


def report(summary: Summary, name: str, as_json: bool) -> None:
    """Print the files written and the main finding for each image."""
    from vitreous.cli.results import SHOWN, tell_notes

    if as_json:
        told = {"model": summary.model, "view": name, "images": summary.done}
        typer.echo(json.dumps({**told, "failed": summary.failed, "notes": list(summary.notes)}, indent=2))
    else:
        for entry in summary.done[:SHOWN]:
            typer.echo("  ".join(entry[kind] for kind in ("figure", "animation", "numbers") if kind in entry))
            typer.echo(f"    {entry['said']}")
            show_channels(entry.get("channels", []))
            show_units(entry.get("units", []))
        if len(summary.done) > SHOWN:
            typer.echo(f"… and {len(summary.done) - SHOWN} more in {summary.out}")
    tell_notes(summary, as_json)


def show_channels(channels: list[dict[str, Any]]) -> None:
    """Print a table of the channels: pattern, score and direction of the information flow."""
    from rich.console import Console
    from rich.table import Table

    if not channels:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for word in ("rank", "layer", "head", "channel"):
        table.add_column(word, justify="right")
    table.add_column("pattern", no_wrap=True)
    table.add_column("score", justify="right")
    table.add_column("information flow")
    for one in channels:
        numbers = (str(one[word]) for word in ("rank", "layer", "head", "channel"))
        table.add_row(*numbers, one["pattern"], f"{one['score']:.2f}", one["reads"])
    Console(highlight=False).print(table)


def show_units(units: list[dict[str, Any]]) -> None:
    """Print a table of MLP units: how active they are at outliers, and at other patches."""
    from rich.console import Console
    from rich.table import Table

    if not units:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for word in ("rank", "layer", "unit", "at outliers", "at others", "adds"):
        table.add_column(word, justify="right")
    for rank, one in enumerate(units):
        sizes = (f"{one[word]:.2f}" for word in ("outliers", "others", "adds"))
        table.add_row(str(rank), str(one["layer"]), str(one["unit"]), *sizes)
    Console(highlight=False).print(table)


# --------------------------------------------------------------------------------------------------- parsing options


def parse_numbers(option: str, text: str) -> list[int]:
    """Parse 0-5, 0,4,-1 or a mixture."""
    found: list[int] = []
    for part in text.split(","):
        row = re.fullmatch(r"\s*(\d+)\s*[-–]\s*(\d+)\s*", part)
        if row and int(row[1]) <= int(row[2]):
            found.extend(range(int(row[1]), int(row[2]) + 1))
        else:
            found.append(parse_whole(option, part, text))
    return found


def parse_whole(option: str, part: str, text: str | None = None) -> int:
    try:
        return int(part)
    except ValueError:
        raise OptionError(f"{option} {text or part}: {part.strip() or 'nothing'} is not a whole number") from None


def parse_place(option: str, text: str) -> int | None:
    """Parse a number, or all (None)."""
    return None if text == "all" else parse_whole(option, text)


def parse_pair(option: str, text: str) -> tuple[int, int]:
    """Parse two numbers: 7,7."""
    parts = text.split(",")
    if len(parts) != 2:
        raise OptionError(f"{option} {text}: write two numbers with a comma between them, e.g. 7,7")
    first, second = (parse_whole(option, part, text) for part in parts)
    return first, second
