"""The image after a change: removed patches pale, hidden and exchanged ones as the model sees them, all outlined."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from vitreous.counterfactuals.change import Change, Sets
from vitreous.plot.overlay import picture
from vitreous.trace.perturb.hide_patches import pixels_of
from vitreous.trace.trace import Trace

PALE = 0.82  # how much of a removed patch is white
EDGE = (230, 97, 1)  # the orange of evidence
LEAST = 448  # pixels of the longer side


def after(trace: Trace, change: Change, sets: Sets) -> Image.Image:
    """The image after the change of one set of patches."""
    where = pixels_of(trace, sets.view(-1, *trace.layout.cells))
    seen = trace.images if change.cover is None else torch.where(where, change.cover, trace.images)
    colours = np.asarray(trace.model.preprocess.colours(seen[0].float()), np.float32) * 255
    mask = where[0, 0].cpu().numpy()
    if change.cover is None:
        colours[mask] = PALE * 255 + (1 - PALE) * colours[mask].mean(-1, keepdims=True)
    scale = max(1, round(LEAST / max(mask.shape)))
    colours, mask = (np.repeat(np.repeat(one, scale, 0), scale, 1) for one in (colours, mask))
    colours[edges(mask, max(1, max(mask.shape) // 200))] = EDGE
    return picture(colours)


def edges(mask: np.ndarray, width: int) -> np.ndarray:
    """The pixels inside a region that are near its border."""
    found = np.zeros_like(mask)
    for axis in (0, 1):
        for step in range(-width, width + 1):
            found |= mask & ~np.roll(np.pad(mask, width), step, axis)[width:-width, width:-width]
    return found
