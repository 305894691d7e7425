"""Animations as GIF files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from vitreous._support.marks import pixels


def gif_bytes(
    frames: Sequence[Image.Image], milliseconds: Sequence[int], told: Mapping[str, Any] | None = None
) -> bytes:
    """An animation that never ends. Each frame has 256 colours of its own; dithering would flicker."""
    first, *rest = [frame.convert("RGB").quantize(256, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    how: dict[str, Any] = {"duration": list(milliseconds), "loop": 0, "optimize": False, **pixels("gif", told)}
    first.save(buffer, "GIF", save_all=True, append_images=rest, **how)
    return buffer.getvalue()
