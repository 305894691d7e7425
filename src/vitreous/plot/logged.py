"""What `Attribution.log` sends to a writer: a figure of each image, and numbers on its map."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from PIL import Image

from vitreous._support.concentration import entropy, gini
from vitreous._support.writers import sink_of
from vitreous.errors import OptionError
from vitreous.plot.explained import Explained
from vitreous.plot.figure import attribution_figure, png_bytes

MEASURED = {"entropy": entropy, "gini": gini}
SMALLER = 2  # a figure for print has this many times the pixels that a page of charts shows


def log(whole: Explained, parts: Sequence[Explained], writer: Any, name: str, step: int | None) -> None:
    """Send the figures of some `parts`, one image each, their numbers, and the means over the `whole`."""
    sink = sink_of(writer)
    if not parts:
        raise OptionError("there is nothing to log: the attribution is empty, or most is less than 1")
    tags = unique(whole.names[: len(parts)])
    scalars = {f"{name}/{key}_mean": mean(values) for key, values in numbers(whole).items()}
    for key, values in numbers(whole).items():
        scalars |= {f"{name}/{key}/{tag}": value for tag, value in zip(tags, values)}
    sink.send(finite(scalars), {f"{name}/{tag}": drawn(part) for tag, part in zip(tags, parts)}, step)


def numbers(explained: Explained) -> dict[str, list[float]]:
    """Of each map: entropy and Gini index of its values, and the probability of its target where that is known."""
    values = explained.map.detach().float().flatten(1)
    broken = ~values.isfinite().all(1)
    found = {key: of(values).masked_fill(broken, torch.nan).tolist() for key, of in MEASURED.items()}
    known = getattr(explained, "probabilities", None) or ()
    return found | ({"share": [torch.nan if p is None else float(p) for p in known]} if any(known) else {})


def drawn(explained: Explained) -> Image.Image:
    """The figure of one image, in the size of a page of charts."""
    return Image.open(io.BytesIO(png_bytes(attribution_figure(explained)))).convert("RGB").reduce(SMALLER)


def unique(names: Sequence[str]) -> list[str]:
    """Names as every writer takes them: letters, digits, dots and dashes; a second of one name is called name_2."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.-]+", "_", name).strip("_") or "image"
        numbered = (f"{plain}_{number}" for number in count(2))
        found.append(plain if plain not in found else next(tag for tag in numbered if tag not in found))
    return found


def mean(values: Sequence[float]) -> float:
    return float(torch.tensor(values).nanmean())


def finite(scalars: dict[str, float]) -> dict[str, float]:
    """Without what is undefined, which some writers refuse."""
    return {tag: value for tag, value in scalars.items() if abs(value) < float("inf")}
