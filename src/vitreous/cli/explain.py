"""`vitreous explain`: explain images; writes a figure and the raw maps of each and prints a summary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import typer

from vitreous.api import attribute_by_default
from vitreous.attribute import attribute_all
from vitreous.attribution import Attribution
from vitreous.cli.alike import Plan, explain_alike
from vitreous.cli.arguments import Beside, PlaceOfMaps, Settings, pick_methods
from vitreous.cli.clips import check_film, find_sources, find_videos, with_frames
from vitreous.cli.explained import Explanation, Form, Grid, Writer, called
from vitreous.cli.results import (
    BATCH,
    SHOWN,
    Batch,
    Found,
    Summary,
    check_out,
    named_file,
    names_file,
    tell_notes,
    work_through,
)
from vitreous.cli.values import NUMBERS
from vitreous.errors import EmptyMap, OptionError, TargetError, Unsupported, one_of
from vitreous.images.beside import read_inputs
from vitreous.images.pictures import Picture
from vitreous.models.inputs import Inputs
from vitreous.models.model import Model
from vitreous.models.output import Form as Shape
from vitreous.models.output import Meaning
from vitreous.registry import Method
from vitreous.trace.apply import as_inputs, images_at_once, is_aimed, read_by, read_target
from vitreous.trace.detection import best_detections
from vitreous.trace.parse_target import parse
from vitreous.trace.region import predicted_shares, widest
from vitreous.trace.shared import pays
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views
from vitreous.types import Box

SEVERAL = r",\s*(?=[^,]*@|[^\W\d])"  # between targets at places: a comma inside a place is before a number


def run(
    *,
    sources: list[str],
    load: Callable[[], Model],
    methods: str | None,
    target: str | None,
    settings: Settings,
    beside: Beside,
    cells: bool,
    place: PlaceOfMaps,
    frames: int | None = None,
) -> None:
    limit, out, formats = place.limit, place.out, place.formats
    overwrite, as_json = place.overwrite, place.as_json
    plan, given = make_plan(methods, settings), find_sources(sources, limit)
    check_early(out, given, formats)
    model = with_frames(load(), frames)
    folder, found, kinds = where_to(out, given if model.frames is None else find_videos(sources, limit), formats)
    check_film(kinds, model)
    if beside.like is not None:
        own = found.names[found.files[0]] if folder != out else None
        explain_alike(model, plan, found.files, beside, target, folder, kinds, overwrite, as_json, own)
    inputs = read_beside(model, beside.inputs, len(found.files))
    targets = None if target is None else split_targets(target, model)
    summary = Summary.of(model, folder, found)
    size = 1 if any(m.alone for m in plan.methods) else min(BATCH, images_at_once(model))
    order = {file: number for number, file in reversed([*enumerate(found.files)])}

    def work(batch: Batch) -> None:
        try:
            explain_pictures(batch)
        except EmptyMap as error:  # of one image: the others are explained without it
            if len(batch) == 1:
                summary.failed.append({"image": str(batch[0][0]), "reason": f"{batch[0][0]}: {error}"})
            for one in batch if len(batch) > 1 else ():
                work([one])

    def explain_pictures(batch: Batch) -> None:
        numbers = [order[file] for file, _ in batch]
        images = [p.image if isinstance(p, Picture) else p for _, p in batch]
        writer.make_way(model.device)
        trace = Trace(model, images, inputs and inputs.of_images(numbers))
        views = Views([p for _, p in batch], model.preprocess, count=model.frames)
        grid = explain_batch(trace, plan, targets, views, summary)
        for i, (file, _) in enumerate(batch):
            rows = [[cell and cell[i] for cell in row] for row in grid]
            aimed = any(cell is not None and cell.target is not None for row in rows for cell in row)
            heads = row_heads(trace, targets, i) if aimed else []
            writer.add(Explanation(file, rows, heads, best(trace, i)), found.names[file])

    def stopped() -> None:
        writer.stop()
        report(summary, writer, as_json)

    with Writer(summary, Form(kinds, overwrite, cells, indexed=folder == out)) as writer:
        work_through(found.files, summary, size, work, stopped, as_json, writer.finish)
    if target is not None and plan.methods and not any(is_aimed(model, m) for m in plan.methods):
        summary.notes[f"--target {target}: {one_of(m.name for m in plan.methods)} does not depend on a target"] = None
    report(summary, writer, as_json)
    raise typer.Exit(summary.code)


def check_early(out: Path, given: Found, formats: tuple[str, ...]) -> None:
    """Raise before the model is loaded if nothing can be written there; several images may be the frames of a video."""
    frames = len(given.files) > 1 and names_file(out)
    check_out(out.parent if frames else named_file(out, given, formats)[0])


def where_to(out: Path, found: Found, formats: tuple[str, ...]) -> tuple[Path, Found, tuple[str, ...]]:
    """The folder, the images with the names of their results, and the kinds of file; of one file, also the numbers."""
    folder, found, kinds = named_file(out, found, formats)
    check_out(folder)
    named = folder != out and NUMBERS in formats
    return folder, found, tuple(dict.fromkeys([*kinds, NUMBERS])) if named else kinds


def read_beside(model: Model, file: Path | None, images: int) -> Inputs | None:
    """What the network gets beside the images; the model then knows of what kind it is."""
    if file is None:
        return None
    given = as_inputs(model, read_inputs(file, images), images)
    model.arguments.sample(given)
    return given


def make_plan(methods: str | None, settings: Settings) -> Plan:
    chosen, everything = ([], False) if methods is None else pick_methods(methods)
    values = {m.name: m.check(settings.get(m.name, {})) for m in chosen}
    for name in settings:
        if name not in values:
            told = (
                f"not among the chosen methods (--method {methods})" if chosen else f"not chosen: add --method {name}"
            )
            raise OptionError(f"--set {name}.…: {name} is {told}")
    return Plan(chosen, everything, values)


def explain_batch(trace: Trace, plan: Plan, targets: list[str] | None, views: Views, summary: Summary) -> Grid:
    """Maps of targets × methods; a method without a target appears in the first row only."""
    if not plan.methods:
        made, instead = attribute_by_default(trace, [None] if targets is None else list(targets), views)
        summary.methods[made[0].method] = None
        if instead is not None:
            summary.notes[instead] = None
        return [[one] for one in made[: None if made[0].target is not None else 1]]
    aimed = [is_aimed(trace.model, one) for one in plan.methods]
    if pays({one.name: (one, plan.values[one.name]) for one in plan.methods}):
        trace.share()
    if not any(aimed):
        trace.whole()  # the figure shows the best classes, so the forward pass must reach the output
    asked = [targets if by_target else None for by_target in aimed]
    columns = [attempt(trace, one, some, plan, views, summary) for one, some in zip(plan.methods, asked)]
    return [list(row) for row in zip_longest(*columns)]


def attempt(
    trace: Trace, one: Method, targets: list[str] | None, plan: Plan, views: Views, summary: Summary
) -> Sequence[Attribution | None]:
    """The maps of one method for each target; with --method all, an unsupported method leaves a note instead."""
    asked: list[Any] = [None] if targets is None else targets
    try:
        made = attribute_all(trace, one, asked, plan.values[one.name], views)
    except (Unsupported, TargetError, EmptyMap) as error:
        spoils = isinstance(error, EmptyMap) and len(trace) > 1  # a method, for the other images too
        if not plan.everything or spoils or (isinstance(error, TargetError) and targets is not None):
            raise
        summary.notes[f"without {one.name}: {error}"] = None
        return [None] * len(asked)
    summary.methods[one.name] = None
    return made


def split_targets(text: str, model: Model) -> list[str]:
    """One target, or several separated by commas (a label may itself contain a comma)."""
    outputs = count_outputs(model)
    try:
        parse(text, model, outputs)
        return [text]
    except TargetError:
        if "," not in text:
            raise
    parts = [part.strip() for part in re.split(SEVERAL if "@" in text else ",", text) if part.strip()]
    for part in parts:
        parse(part, model, outputs)
    return list(dict.fromkeys(parts))


def count_outputs(model: Model) -> int:
    if model.outputs is None:
        _ = model.layout  # the layout run is one forward pass
    return model.outputs or 0


def row_heads(trace: Trace, targets: list[str] | None, index: int) -> list[str]:
    """The target of each row of the figure for one image."""
    if targets is None and not trace.classifies:
        return []
    asked: Sequence[str | None] = targets or [None]
    own = [read_by(trace, one) for one in asked]
    return [read_target(seen, one).title(seen.model, seen.output, index) for seen, one in own]


def best(trace: Trace, index: int, count: int = 5) -> list[dict[str, Any]]:
    """The best classes of one image, or its largest values; empty for a model without a classifier."""
    if not trace.classifies:
        return []
    model = trace.model
    if model.detections is not None:
        return [told_detection(trace, index, *one) for one in best_detections(trace.output[index], model, count)]
    if model.form is Shape.DENSE:
        return [told_area(trace, index, number) for number in widest(trace.output[index], model, count)]
    what = ("output", "value") if model.meaning is Meaning.VALUE else ("class", "probability")
    found = model.meaning.best(trace.output[index], count)
    return [{what[0]: number, "label": model.label(number), what[1]: share} for number, share in found]


def told_area(trace: Trace, index: int, number: int) -> dict[str, Any]:
    """One class with the share of the image where it is predicted; of a value, its mean."""
    share = float(predicted_shares(trace.output[index], trace.model)[number])
    what = ("output", "value") if trace.model.meaning is Meaning.VALUE else ("class", "area")
    return {what[0]: number, "label": trace.model.label(number), what[1]: share}


def told_detection(trace: Trace, index: int, cls: int, query: int, share: float, box: Box) -> dict[str, Any]:
    """One detection; its box is left, top, right, bottom in pixels of the image, where that is known."""
    told = {"class": cls, "label": trace.model.label(cls), "probability": share, "query": query}
    seen = trace.crops[index].seen
    if seen is None:
        return told
    (left, top, right, bottom), (y0, x0, y1, x1) = seen, box
    wide, high = right - left, bottom - top
    sides = (left + x0 * wide, top + y0 * high, left + x1 * wide, top + y1 * high)
    return {**told, "box": [round(side, 1) for side in sides]}


# ----------------------------------------------------------------------------------------------------- printing results


def report(summary: Summary, writer: Writer, as_json: bool) -> None:
    """Print the best classes, the files written and what failed."""
    if as_json:
        shown = {
            "model": summary.model,
            "weights": list(map(str, summary.weights)),
            "methods": list(summary.methods),
            "images": summary.done,
        }
        files = {kind: str(file) for file in writer.files for kind in ("index", "summary") if file.stem.endswith(kind)}
        typer.echo(json.dumps({**shown, **files, "failed": summary.failed, "notes": list(summary.notes)}, indent=2))
    elif summary.done:
        show_done(summary, writer)
    tell_notes(summary, as_json)


def show_done(summary: Summary, writer: Writer) -> None:
    """Print one line per image, or two if paths are long, so that no path is broken."""
    shown = [(first_file(entry), entry) for entry in summary.done[:SHOWN]]
    width = max(len(file) for file, _ in shown)
    for file, entry in shown:
        said = seen(entry)
        typer.echo(f"{file:<{width}}  {said}" if width <= 40 else f"{file}\n    {said}")
        for name, notes in entry["notes"].items():
            typer.echo(f"    {name}: {', '.join(f'{key} {short(value)}' for key, value in notes.items())}")
    if len(summary.done) > SHOWN:
        typer.echo(f"… and {len(summary.done) - SHOWN} more in {summary.out}")
    count, failed = len(summary.done), len(summary.failed)
    pictures = f"{count} image{'s' if count > 1 else ''}" + (f" of {count + failed}" if failed else "")
    where = "the .npz beside each figure" if count > 1 else summary.done[0].get("maps")
    maps = f"; raw maps: {where}" if {"maps", "figure"} <= set(summary.done[0]) else ""
    typer.echo(f"\n{pictures} explained by {summary.model_and_weights} with {', '.join(summary.methods)}{maps}")
    if writer.held > 1 and writer.files:
        typer.echo(f"all {writer.held} results of this folder: {writer.files[0]}")


def first_file(entry: dict[str, Any]) -> str:
    """The figure of an image; without one its maps, or the image itself."""
    return str(entry.get("figure", entry.get("maps", entry["image"])))


def short(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(short, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def seen(entry: dict[str, Any]) -> str:
    top = entry["top"][:3]
    return ", ".join(
        f"{called(t)} " + (f"{t['value']:.4g}" if "value" in t else f"{t.get('probability', t.get('area')):.0%}")
        for t in top
    )
