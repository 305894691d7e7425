"""The box of a detection, drawn on its image."""

from __future__ import annotations

from PIL import Image, ImageDraw

from vitreous.types import Box

LINE = 200  # of this part of the longer side
INNER, OUTER = "white", "black"  # seen on any image


def outlined(image: Image.Image, box: Box | None) -> Image.Image:
    """A copy of the image with a box around a part of it; the image itself without one."""
    if box is None:
        return image
    copy, thick = image.convert("RGB"), max(1, round(max(image.size) / LINE))
    copy = copy.copy() if copy is image else copy
    top, left, bottom, right = (share * copy.size[1 - axis % 2] for axis, share in enumerate(box))
    pen = ImageDraw.Draw(copy)
    left, right = max(0, round(left)), min(copy.width - 1, round(right))
    top, bottom = max(0, round(top)), min(copy.height - 1, round(bottom))
    if left > right or top > bottom:  # it lies outside what the model saw
        return copy
    pen.rectangle((left, top, right, bottom), outline=OUTER, width=2 * thick)
    pen.rectangle((left, top, right, bottom), outline=INNER, width=thick)
    return copy
