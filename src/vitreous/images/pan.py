"""A clip of a photo: a window that moves slowly over it, for those who have no video at hand."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from vitreous.images import pictures

PHOTOS = Path(__file__).parents[1] / "assets" / "photos"
FRAMES, SIDE = 24, 256  # of the clip
PART = 0.75  # of the photo's short side that the window shows


def pan(photo: str | Path, frames: int = FRAMES) -> list[Image.Image]:
    """The frames of a clip: a square window moves over the photo from the upper left to the lower right.

    `photo`: a file, or the name of a packaged photo.
    """
    image = pictures.read(packaged(photo)).image
    assert isinstance(image, Image.Image)
    side = PART * min(image.size)
    way = [length - side for length in image.size]
    corners = [[share * n / max(frames - 1, 1) for share in way] for n in range(frames)]
    resample = Image.Resampling.BICUBIC
    return [image.resize((SIDE, SIDE), resample, box=(x, y, x + side, y + side)) for x, y in corners]


def save_pan(photo: str | Path, folder: str | Path) -> Path:
    """Write the frames of the same clip as PNG files into a folder, which stands for a video everywhere."""
    made = Path(folder)
    made.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(pan(photo)):
        frame.save(made / f"{number:03}.png")
    return made


def packaged(photo: str | Path) -> Path:
    """The file of a photo; of a name without an ending, that of the package."""
    return Path(photo) if Path(photo).suffix else PHOTOS / f"{Path(photo).name}.jpg"
