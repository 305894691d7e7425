"""Animations as GIF files."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image


def gif_bytes(frames: Sequence[Image.Image], milliseconds: Sequence[int]) -> bytes:
    """An animation that never ends. Each frame has 256 colours of its own; dithering would flicker."""
    first, *rest = [frame.convert("RGB").quantize(256, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    times = list(milliseconds)
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=times, loop=0, optimize=False)
    return buffer.getvalue()
