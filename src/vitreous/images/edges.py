"""Where the input of a model lies in an image, to a fraction of a pixel.

A ramp over the whole image has 255 steps, so that its edges are found to a few pixels of a large image. Two steep
ramps, at a quarter and at three quarters of the input, find two of its pixels in the image much closer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MIDDLE = 128  # blue of the ramps: any other value is padding
HALF = 127.5
COLUMNS = 3  # on each side of a pixel that is looked for

See = Callable[[np.ndarray], np.ndarray]  # what the model sees of an image [Y X 3], in 0…1


def ends(ramp: np.ndarray, inside: np.ndarray, axis: int) -> tuple[float, float] | None:
    """Where a rising line meets the outer edges, rounded to the image's own edges; None if it is not a line."""
    where = np.flatnonzero(inside.mean(axis) > 0.5 * inside.mean(axis).max(initial=0.1))
    if len(where) < 2:
        return None
    line = np.array([ramp.take(i, 1 - axis)[inside.take(i, 1 - axis)].mean() for i in where])
    slope, start = np.polyfit(where, line, 1)
    if slope <= 0 or np.abs(start + slope * where - line).max() > 0.05:
        return None
    first, last = float(start - slope / 2), float(start + slope * (ramp.shape[1 - axis] - 0.5))
    return (0.0 if abs(first) < slope / 2 else first), (1.0 if abs(last - 1) < slope / 2 else last)


def refined(see: See, start: float, stop: float, size: tuple[int, int], axis: int, count: int) -> tuple[float, float]:
    """The edges of the input along an axis (0: across) in pixels of an image of (width, height), found more closely.

    `count`: pixels of the input along the axis. Edges that are those of the image stay.
    """
    side, scale = size[axis], (stop - start) / count
    at = count // 4, count - 1 - count // 4
    if (start, stop) == (0.0, float(side)) or at[1] - at[0] < 2 * COLUMNS + 2:
        return start, stop
    middles = [start + (k + 0.5) * scale for k in at]
    half = max(8.0, 7 * scale)  # pixels from the middle of a steep ramp to its end
    pixels = np.arange(side) + 0.5
    image = np.full((size[1], size[0], 3), MIDDLE, np.uint8)
    for channel, middle in enumerate(middles):
        ramp = (HALF + (pixels - middle) * HALF / half).clip(0, 255).round()
        image[:, :, channel] = ramp[None] if axis == 0 else ramp[:, None]
    seen = see(image)
    inside = np.abs(seen[:, :, 2] - MIDDLE / 255) < 0.02
    found = [
        place(seen[:, :, c], inside, axis, k, middle, half, scale) for c, (k, middle) in enumerate(zip(at, middles))
    ]
    if any(abs(new - old) > 2 * scale + 2 for new, old in zip(found, middles)):
        return start, stop  # not a ramp any more: the preprocessing changes colours by themselves
    step = (found[1] - found[0]) / (at[1] - at[0])
    first = found[0] - (at[0] + 0.5) * step
    return (start if start == 0 else first), (stop if stop == side else first + count * step)


def place(seen: np.ndarray, inside: np.ndarray, axis: int, k: int, middle: float, half: float, scale: float) -> float:
    """Where pixel k of the input lies in the image, by the columns (or rows) around it."""
    found = []
    for j in range(k - COLUMNS, k + COLUMNS + 1):
        kept = inside.take(j, 1 - axis)
        values = seen.take(j, 1 - axis)[kept] * 255
        if kept.any():
            found.append(middle + (float(values.mean()) - HALF) * half / HALF - (j - k) * scale)
    return float(np.mean(found)) if found else float("inf")
