"""The work of `vitreous counterfactual`: a figure, the arrays and a JSON file for each image, and a summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from vitreous.cli.answers import chosen_options
from vitreous.cli.arguments import PlaceOfImages
from vitreous.cli.results import Batch, Found, Summary, find_pictures, named_file, placed, tell_notes, work_through
from vitreous.counterfactuals.find import check, counterfactual
from vitreous.counterfactuals.result import Counterfactual
from vitreous.errors import OptionError, TargetError
from vitreous.models.model import Model
from vitreous.registry import METHODS

ENDING = ".counterfactual"
NOT_TURNED = 1  # the exit code if an image has no counterfactual


def run(
    *,
    sources: list[str],
    load: Callable[[], Model],
    method: str | None,
    settings: list[str],
    asked: dict[str, Any],
    how: dict[str, Any],
    place: PlaceOfImages,
) -> None:
    check(**how, places=asked["places"], other=asked["other"])
    if method is None and settings:
        raise OptionError(f"--set {settings[0]}: name the method: --method NAME")
    name = None if method is None else METHODS[method.strip().replace("-", "_")].name
    options = {} if name is None else chosen_options(name, settings)
    found = find_pictures(sources, place.limit)
    out, found, formats = named_file(place.out, found, place.formats)
    named = out != place.out  # --out is a file
    model = load()
    summary = Summary.of(model, out, found)
    made: list[Counterfactual] = []

    def work(batch: Batch) -> None:
        for file, image in batch:
            try:
                one = counterfactual(model, [image], method=name, **asked, **how, **options)
            except TargetError as error:  # of this image: its decision is another, or the wanted one already
                if len(found.files) == 1:
                    raise
                summary.failed.append({"image": str(file), "reason": f"{file}: {error}"})
                continue
            made.append(one)
            files = write(one, file, found, summary, formats, named, place.overwrite)
            summary.done.append({**one.told, "image": str(file), **files})

    def finish() -> None:
        report(made, summary, place.as_json)

    work_through(found.files, summary, 1, work, finish, place.as_json, finish)
    code = summary.code or (0 if all(one.certified for one in made) else NOT_TURNED)
    if code:
        raise typer.Exit(code)


def write(
    one: Counterfactual,
    file: Path,
    found: Found,
    summary: Summary,
    formats: tuple[str, ...],
    named: bool,
    overwrite: bool,
) -> dict[str, str]:
    """Write the files of one image, by what they are: the figure, the arrays, and all that was found as JSON."""
    kinds = formats if named else (*formats, "json") if formats else ()
    endings = [f".{kind}" if named else f"{ENDING}.{kind}" for kind in kinds]
    files: dict[str, str] = {}
    if not endings:
        return files
    words = {"npz": "numbers", "json": "json"}
    with placed(summary, found.names[file], endings, one.mark["identity"], overwrite) as own:
        for kind, ending in zip(kinds, endings):
            files.setdefault(words.get(kind, "figure"), str(one.save(summary.out / f"{own}{ending}")))
    return files


def report(made: list[Counterfactual], summary: Summary, as_json: bool) -> None:
    """JSON for programs, a few lines for one image, or a table for several."""
    if as_json:
        told = {"model": summary.model, "images": summary.done, "failed": summary.failed, "notes": list(summary.notes)}
        typer.echo(json.dumps(told, indent=2))
    elif len(made) == 1:
        (one,), (entry,) = made, summary.done
        typer.echo(f"{one.sentence}\n")
        for line in details(one):
            typer.echo(f"    {line}")
        typer.echo(f"\n{', '.join(entry[k] for k in ('figure', 'numbers', 'json') if k in entry)}")
    elif made:
        table(made)
    tell_notes(summary, as_json)


def details(one: Counterfactual) -> list[str]:
    """What is certain of one result."""
    places = ", ".join(f"{row + 1}/{column + 1}" for row, column in one.places[:12])
    more = " …" if len(one) > 12 else ""
    how = {"tokens": "their tokens are removed from the sequence", "exchange": f"exchanged with {one.other}"}
    found = [
        f"patches (row/column, in order): {places}{more}" if one.patches else "no patch brings it nearer",
        how.get(one.way, f"their pixels get the mean colour, because {one.why}"),
        f"certified: {said(one.certified)} · minimal: {said(one.minimal)} · optimal: {said(one.optimal)}",
    ]
    if one.impossible:
        found.append("all sets were run: none turns the decision")
    elif not one.optimal and one.bound > 1:
        found.append(f"no set of fewer than {one.bound} turns the decision: all were run")
    first = "never turns it" if one.first is None else f"turns it with {one.first}"
    return [*found, f"the order of {one.map.method} alone {first} · {one.passes} runs"]


def said(true: bool) -> str:
    return "yes" if true else "no"


def table(made: list[Counterfactual]) -> None:
    """One line for each image."""
    rows = [("image", "from", "to", "patches", "p(from)", "p(to)", "certified", "minimal", "optimal")]
    for one in made:
        left, got = one.source, one.decision if one.certified else one.to
        shares = f"{left.before:.2f} → {left.after:.2f}", f"{got.before:.2f} → {got.after:.2f}"
        sure = (said(one.certified), said(one.minimal), said(one.optimal))
        rows.append((one.map.names[0], left.label, got.label, str(len(one)), *shares, *sure))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip())
