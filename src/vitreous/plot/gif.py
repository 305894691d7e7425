"""Animations as GIF files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from vitreous._support import marks


def gif_bytes(
    frames: Sequence[Image.Image], milliseconds: Sequence[int], told: Mapping[str, Any] | None = None
) -> bytes:
    """An animation that never ends. Each frame has 256 colours of its own; dithering would flicker.

    `told`: what its mark says of what made it.
    """
    first, *rest = [frame.convert("RGB").quantize(256, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    times = list(milliseconds)
    mark = marks.pixels("gif", told)
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=times, loop=0, optimize=False, **mark)
    return buffer.getvalue()
