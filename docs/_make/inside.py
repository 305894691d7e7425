"""Pictures from inside the embedded model, for the gallery."""

from __future__ import annotations

from pathlib import Path

import vitreous
from _make.cache import kept
from _make.figures import CAT, model
from _make.places import PHOTOS

VIEWS = {
    "heads": "where CLS looks in every attention head",
    "layers": "layer by layer, and all layers combined",
    "qk": "queries and keys, channel by channel",
    "flow": "what one patch reads, and which patches read it",
    "discard": "rollout while the smallest attention weights are dropped",
}
UNITS = ("class:tabby", "class:espresso")
STEPS = 96


def view(name: str) -> Path:
    """One of `vitreous.inspect`, as it saves itself."""
    look = getattr(vitreous.inspect, name)
    return kept(f"inside/{name}.png", lambda file: look(model(), str(PHOTOS / CAT)).save(file))


def dream() -> Path:
    """A picture that the model takes for a class, from noise."""
    return kept("inside/maximize.png", lambda file: vitreous.maximize(model(), list(UNITS), steps=STEPS).save(file))
