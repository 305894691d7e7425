"""Clips for models that take videos: uploads, whose size is checked before they are decoded, and clips of the samples.

A clip is held as the frames that a model takes, so a server whose models take 8 and 16 frames holds both.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from vitreous.errors import InputError, Unsupported
from vitreous.images import videos
from vitreous.images.bands import ARRAYS, check_size
from vitreous.images.pan import FRAMES, pan
from vitreous.images.videos import STILL, Video
from vitreous.models.model import Model
from vitreous.web.limits import FORMATS, Limits
from vitreous.web.problems import Problem
from vitreous.web.store import Store
from vitreous.web.uploads import Part, decoding, gone

ANIMATED = ("GIF", "WEBP", "PNG")  # formats with frames that follow one another
READERS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".webm": "webm", ".mkv": "matroska", ".avi": "avi"}  # FFmpeg's
TABS = {  # that show one image
    "compare": "Compare works",
    "attention": "the Attention tab works",
    "concepts": "the Concepts tab works",
    "inside": "the Inside tab works",
    "features": "the Features tab works",
    "counterfactual": "a counterfactual works",
}


@dataclass(frozen=True, eq=False)
class Clip:
    """The frames that a model takes of a clip, and how many the clip has."""

    video: Video
    count: int

    @property
    def size(self) -> tuple[int, int]:
        return self.video.frames[0].size

    @property
    def weight(self) -> int:
        """Bytes that it takes."""
        wide, high = self.size
        return 3 * wide * high * len(set(map(id, self.video.frames)))


class Clips:
    """Clips by their id; a sample is made when it is first asked for."""

    def __init__(self, photos: Mapping[str, Path], most_bytes: int) -> None:
        self.samples = {f"sample:pan-{path.stem}": path for path in photos.values()}
        self._held: Store[tuple[str, int], Clip] = Store(most_bytes)
        self._names: Store[str, str] = Store(10_000)

    def keep(self, number: str, frames: int, clip: Clip) -> None:
        self._held.put((number, frames), clip, clip.weight)
        self._names.put(number, clip.video.name)

    def find(self, number: str, frames: int) -> Clip | None:
        found = self._held.get((number, frames))
        if found is None and number in self.samples:
            photo = self.samples[number]
            made = videos.of_frames(pan(photo), frames, f"{photo.stem}-pan")
            found = Clip(made, FRAMES)
            self.keep(number, frames, found)
        return found

    def get(self, number: str, model: str, frames: int, still: str | None = None) -> Clip:
        """A clip for a model; `still`: the name of the image that has this id, if one has."""
        found = self.find(number, frames)
        if found is None and still is not None:
            raise Problem(415, f"{model} takes videos, and {still} is a single image; choose a clip, such as a GIF")
        if found is None:
            raise gone()
        return found

    def name(self, number: str) -> str | None:
        """The name of a clip that is or was held; None if there never was one."""
        return f"{self.samples[number].stem}-pan" if number in self.samples else self._names.get(number)


def usable(model: Model) -> Model:
    """The model; raise if the page cannot show what it takes."""
    if model.frames is not None and model.channels != 3:
        raise Unsupported(f"{model.name} takes videos of {model.channels} channels, and the page shows those of three")
    return model


def closed_tabs(model: Model) -> dict[str, str]:
    """The views that a model of videos does not have, each with the reason."""
    return {} if model.frames is None else {tab: refusal(model, tab) for tab in TABS}


def refusal(model: Model, tab: str) -> str:
    return f"{model.name} takes videos, and {TABS[tab]} with images; Explain and Faithfulness take videos"


def only_images(model: Model, tab: str) -> None:
    """Raise for a model of videos in a view of images."""
    if model.frames is not None:
        raise Unsupported(refusal(model, tab))


def endings() -> list[str]:
    """The endings of the files that clips are read from."""
    return [".gif", ".webp", ".png", *sorted(ARRAYS), *(READERS if find_spec("av") is not None else ())]


# ------------------------------------------------------------------------------------------------------------- uploads


def read_clip(part: Part, limits: Limits, frames: int) -> Clip:
    """Decode the frames that a model takes, after checking format, size and length; no file is written."""
    if not part.held:
        raise Problem(415, f"{part.name}: the file is empty")
    ending = Path(part.name).suffix.lower()
    open_one: Callable[[Part, Limits, int], Clip] = open_animation
    if ending in ARRAYS:
        open_one = open_array
    elif ending in videos.FILMS:
        open_one = open_film
    with decoding(part.name, "a clip", endings()):
        return open_one(part, limits, frames)


def check_extent(name: str, wide: int, high: int, count: int, frames: int, limits: Limits) -> None:
    """Raise for a clip of too many frames, or of too many pixels to keep or to decode."""
    if count > limits.frames:
        raise Problem(413, f"{name}: has more than {limits.frames:,} frames; cut it shorter")
    check_size(wide, high, name)
    if wide * high * min(count, frames) > limits.pixels:
        said = f"{min(count, frames)} frames of {wide}×{high}"
        raise Problem(413, f"{name}: {said} are more than {limits.pixels // 10**6} megapixels; shrink it first")
    if wide * high * count > limits.clip_pixels:
        said = f"{count:,} frames of {wide}×{high}"
        raise Problem(413, f"{name}: {said} are more than {limits.clip_pixels // 10**6} megapixels; cut or shrink it")


def open_animation(part: Part, limits: Limits, frames: int) -> Clip:
    with Image.open(io.BytesIO(part.held), formats=FORMATS) as image:
        moving = image.format in ANIMATED
        (wide, high), count = image.size, 1
        if image.format == "GIF":
            count, (wide, high) = measure_gif(part.held, limits.frames)
        elif moving:
            count = getattr(image, "n_frames", 1)
    if not moving or count < 2:
        raise InputError(f"{part.name}: {STILL}")
    check_extent(part.name, wide, high, count, frames, limits)
    made, chosen, count = videos.animation(io.BytesIO(part.held), part.name, frames)
    return Clip(Video(videos.same_size(made, part.name), part.name, chosen), count)


def open_array(part: Part, limits: Limits, frames: int) -> Clip:
    most = 3 * limits.pixels
    array = videos.read_video_array(io.BytesIO(part.held), part.name, most)
    count, high, wide = array.shape[:3]
    check_extent(part.name, wide, high, count, frames, limits)
    made = videos.of_frames(array, frames, part.name)
    return Clip(made, count)


def open_film(part: Part, limits: Limits, frames: int) -> Clip:
    """A film file. One demuxer is tried, by the ending, because others open further files that a film names."""
    ending = Path(part.name).suffix.lower()
    if ending not in READERS:
        raise InputError(f"{part.name}: {ending} files are not read here; give one of {', '.join(READERS)}")

    def watch(wide: int, high: int, count: int) -> None:
        check_extent(part.name, wide, high, count, frames, limits)

    held = io.BytesIO(part.held)
    made, chosen, count = videos.film(held, part.name, frames, reader=READERS[ending], watch=watch)
    return Clip(Video(videos.same_size(made, part.name), part.name, chosen), count)


def measure_gif(held: bytes, most: int) -> tuple[int, tuple[int, int]]:
    """How many frames a GIF has and how wide and high it becomes, from its blocks alone; at most one more than `most`.

    Its frames may reach beyond the size in its header.
    """
    wide, high, count = *struct.unpack_from("<HH", held, 6), 0
    at = 13 + colour_table(held[10])
    while at < len(held) and held[at] != 0x3B and count <= most:
        if held[at] == 0x21:  # an extension
            at = after_blocks(held, at + 2)
        elif held[at] == 0x2C and at + 9 < len(held):  # a frame: left, top, width, height
            left, top, across, down = struct.unpack_from("<HHHH", held, at + 1)
            wide, high = max(wide, left + across), max(high, top + down)
            at, count = after_blocks(held, at + 11 + colour_table(held[at + 9])), count + 1
        else:
            at += 1
    return count, (wide, high)


def colour_table(packed: int) -> int:
    """Bytes of the colours that follow, if any."""
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


def after_blocks(held: bytes, at: int) -> int:
    """The place after a run of data blocks, each with its length before it; a length of zero ends them."""
    while at < len(held) and held[at]:
        at += 1 + held[at]
    return at + 1
