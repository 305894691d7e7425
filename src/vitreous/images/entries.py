"""Images inside archives: each entry only says where its image is, so it is cheap to send to another process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from vitreous.images.pictures import Stored

LABEL = ("imagenet_index", "class_index", "label", "class", "cls", "target")  # names of labels, the surest first
MASK = ("mask", "seg", "segmentation")
SHOWN = 3  # examples in an error


class Entry(NamedTuple):
    """One image, where it was found."""

    image: Stored
    name: str
    label: int | str | None = None
    mask: Stored | None = None


class Found(NamedTuple):
    """All images of a source, and the names of its classes if it numbers them."""

    entries: list[Entry]
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def read_label(text: str) -> int | str | None:
    """A class number or name; -1 means none."""
    text = text.strip()
    return (int(text) if re.fullmatch(r"\d+", text) else text) if text not in ("", "-1") else None


def some(words: Sequence[str]) -> str:
    return ", ".join(words[:SHOWN]) + (" …" if len(words) > SHOWN else "")
