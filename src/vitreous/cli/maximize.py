"""`vitreous maximize`: activation maximisation; writes a figure, the image, an animation and arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from vitreous._support.progress import show_progress
from vitreous.cli.results import check_out, short
from vitreous.inspect.maximize.maximize import DECLARED, maximize
from vitreous.inspect.maximize.result import Maximized
from vitreous.models.model import Model

SHEET = "maximized.png"


def run(*, units: list[str], load: Callable[[], Model], options: dict[str, Any], out: Path, as_json: bool) -> None:
    DECLARED.check(options)
    check_out(out)
    model = load()
    with show_progress(False if as_json else None):
        found = maximize(model, units, **options)
    report(found, write(found, out), out, as_json)
    if found.stopped:
        raise KeyboardInterrupt


def write(found: Maximized, out: Path) -> list[dict[str, Any]]:
    """Write four files for each image, and a contact sheet if there are several."""
    written = []
    for name, one in zip(file_names(found), found):
        files = {
            "figure": one.save(out / f"{name}.png"),
            "image": one.save_image(out / f"{name}.image.png"),
            "film": one.save_gif(out / f"{name}.gif"),
            "numbers": one.save(out / f"{name}.npz"),
        }
        entry = {
            "unit": one.units[0],
            "seed": one.seeds[0],
            "start": float(one.start[0]),
            "final": float(one.final[0]),
            "border_ratio": float(one.border_ratio[0]),
        }
        written.append(entry | {kind: str(path) for kind, path in files.items()})
    if len(found) > 1:
        found.save(out / SHEET)
    return written


def file_names(found: Maximized) -> list[str]:
    """class-tench, block-3-channel-7; with the seed if there are several, and a number if two names are equal."""
    names: list[str] = []
    for unit, seed in zip(found.units, found.seeds):
        name = short(re.sub(r"[^\w.]+", "-", unit).strip("-"))
        name += f"-seed-{seed}" if len(set(found.seeds)) > 1 else ""
        again = sum(other == name or other.startswith(f"{name}~") for other in names)
        names.append(f"{name}~{again + 1}" if again else name)
    return names


def report(found: Maximized, written: list[dict[str, Any]], out: Path, as_json: bool) -> None:
    if as_json:
        told = {"model": found.model, "options": dict(found.options), "steps_done": found.activation.shape[1]}
        sheet = {"sheet": str(out / SHEET)} if len(written) > 1 else {}
        typer.echo(json.dumps({**told, "pictures": written, **sheet, "stopped": found.stopped}, indent=2))
        return
    for title, entry in zip(found.titles, written):
        seed = f", seed {entry['seed']}" if len(set(found.seeds)) > 1 else ""
        said = f"{title}{seed}: activation {entry['start']:.3g} → {entry['final']:.3g}"
        typer.echo(f"{entry['figure']}\n    {said}, patch borders {entry['border_ratio']:.2f}")
    typer.echo("\nbeside each figure: the image itself (.image.png), its animation (.gif) and the arrays (.npz)")
    if len(written) > 1:
        typer.echo(f"all together: {out / SHEET}")
    if found.stopped:
        typer.echo(f"stopped after {found.activation.shape[1]} of {found.options['steps']} steps")
