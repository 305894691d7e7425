"""`vitreous maximize`: activation maximisation; writes a figure, the image, an animation and arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from vitreous._support.progress import show_progress
from vitreous.cli.arguments import Place
from vitreous.cli.results import Summary, check_out, placed, short, tell_notes
from vitreous.cli.values import NUMBERS
from vitreous.inspect.maximize.maximize import DECLARED, maximize
from vitreous.inspect.maximize.result import Maximized
from vitreous.models.model import Model

SHEET = "maximized"


def run(*, units: list[str], load: Callable[[], Model], options: dict[str, Any], place: Place) -> None:
    DECLARED.check(options)
    formats = place.formats
    check_out(place.out)
    model = load()
    summary = Summary(model.name, place.out, set())
    with show_progress(False if place.as_json else None):
        found = maximize(model, units, **options)
    written = write(found, formats, place.overwrite, summary)
    report(found, written, draw_sheet(found, formats, place.overwrite, summary), summary, place.as_json)
    if found.stopped:
        raise KeyboardInterrupt


def write(found: Maximized, formats: tuple[str, ...], overwrite: bool, summary: Summary) -> list[dict[str, Any]]:
    """Write the figure, the image, the film and the numbers of each unit."""
    written = []
    kinds = {NUMBERS: "numbers", "image.png": "image", "gif": "film"}
    chosen = (*formats, "image.png", "gif") if formats else ()
    for wanted, one in zip(file_names(found), found):
        files: dict[str, Path] = {}
        with placed(summary, wanted, [f".{kind}" for kind in chosen], one.mark["identity"], overwrite) as name:
            for kind in chosen:
                save = {"image.png": one.save_image, "gif": one.save_gif}.get(kind, one.save)
                files.setdefault(kinds.get(kind, "figure"), save(summary.out / f"{name}.{kind}"))
        entry = {
            "unit": one.units[0],
            "seed": one.seeds[0],
            "start": float(one.start[0]),
            "final": float(one.final[0]),
            "border_ratio": float(one.border_ratio[0]),
        }
        written.append(entry | {kind: str(path) for kind, path in files.items()})
    return written


def draw_sheet(found: Maximized, formats: tuple[str, ...], overwrite: bool, summary: Summary) -> Path | None:
    """Write a contact sheet if there are several images."""
    endings = [f".{kind}" for kind in formats if kind != NUMBERS]
    if len(found) < 2 or not endings:
        return None
    with placed(summary, SHEET, endings, found.mark["identity"], overwrite) as name:
        saved = [found.save(summary.out / f"{name}{ending}") for ending in endings]
    return saved[0]


def file_names(found: Maximized) -> list[str]:
    """class-tench, block-3-channel-7; with the seed if there are several, and a number if two names are equal."""
    names: list[str] = []
    for unit, seed in zip(found.units, found.seeds):
        name = short(re.sub(r"[^\w.]+", "-", unit).strip("-"))
        name += f"-seed-{seed}" if len(set(found.seeds)) > 1 else ""
        again = sum(other == name or other.startswith(f"{name}~") for other in names)
        names.append(f"{name}~{again + 1}" if again else name)
    return names


def report(
    found: Maximized, written: list[dict[str, Any]], sheet: Path | None, summary: Summary, as_json: bool
) -> None:
    if as_json:
        told = {"model": found.model, "options": dict(found.options), "steps_done": found.activation.shape[1]}
        told |= {"pictures": written} | ({} if sheet is None else {"sheet": str(sheet)})
        typer.echo(json.dumps({**told, "stopped": found.stopped, "notes": list(summary.notes)}, indent=2))
        return
    for title, entry in zip(found.titles, written):
        seed = f", seed {entry['seed']}" if len(set(found.seeds)) > 1 else ""
        said = f"{title}{seed}: activation {entry['start']:.3g} → {entry['final']:.3g}"
        where = next((f"{entry[what]}\n    " for what in ("figure", "image") if what in entry), "")
        typer.echo(f"{where}{said}, patch borders {entry['border_ratio']:.2f}")
    if written and "image" in written[0]:
        numbers = " and the arrays (.npz)" if "numbers" in written[0] else ""
        typer.echo(f"\nbeside each figure: the image itself (.image.png), its animation (.gif){numbers}")
    if sheet is not None:
        typer.echo(f"all together: {sheet}")
    tell_notes(summary, as_json)
    if found.stopped:
        typer.echo(f"stopped after {found.activation.shape[1]} of {found.options['steps']} steps")
