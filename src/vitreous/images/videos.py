"""Read videos: a folder of frames, a GIF, a film file, an array or a list of frames becomes a few upright RGB frames.

A model takes a fixed number of frames, T. They are sampled evenly: of n frames, those in the middle of T equal parts,
frame ⌊(i + ½)·n / T⌋ for i = 0 … T − 1. A video of fewer frames than T shows some of them more than once.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous._support.files import stamp_file
from vitreous.errors import InputError
from vitreous.images import pictures
from vitreous.images.bands import ARRAYS, MOST_PIXELS, check_size, read_array
from vitreous.images.listing import ENDINGS

ANIMATED = frozenset({".gif", ".webp", ".png", ".apng"})  # that Pillow decodes
FILMS = frozenset({".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v", ".mpg", ".mpeg"})  # that need a decoder
STILL = "is a single image, and the model takes videos; give a GIF, a film or a folder of frames"
TAKES = "give a file, a folder of frames, a list of frames, a uint8 array [T, Y, X, 3] or a float tensor"


@dataclass(frozen=True, eq=False)
class Video:
    """The frames that a model is shown, and where they come from."""

    frames: tuple[Image.Image, ...]
    name: str
    picked: tuple[int, ...] = ()  # which frames of the source they are
    source: Path | None = None
    stamp: str | None = None  # of the source when it was read


def spread(count: int, frames: int) -> tuple[int, ...]:
    """The frames that are sampled, of `count`."""
    return tuple((2 * i + 1) * count // (2 * frames) for i in range(frames))


def is_video(path: Path) -> bool:
    """Whether a path looks like a video: a folder, or a file with the ending of one."""
    return path.is_dir() or path.suffix.lower() in FILMS | {".gif"}


# ------------------------------------------------------------------------------------------------------------- reading


def read(source: Any, frames: int, number: int = 0) -> Video:
    """Read a video of any form, and sample so many frames of it."""
    if isinstance(source, Video):
        chosen = spread(len(source.frames), frames)
        known = source.picked or tuple(range(len(source.frames)))
        return replace(source, frames=tuple(source.frames[i] for i in chosen), picked=tuple(known[i] for i in chosen))
    if isinstance(source, str | Path):
        return open_video(Path(source), frames)
    return of_frames(source, frames, f"video {number}")


def of_frames(source: Any, frames: int, name: str) -> Video:
    """A video in memory: frames as PIL images, paths or arrays, or one array [T Y X 3]."""
    listed = list(source) if isinstance(source, Sequence) and not isinstance(source, bytes) else None
    if listed is None:
        array = pictures.as_array(source)
        if array is None or array.ndim != 4 or array.dtype != np.uint8:
            shape = (
                f"an array of {array.dtype} {list(array.shape)}" if array is not None else f"a {type(source).__name__}"
            )
            raise InputError(f"{name}: {shape} is not a video; {TAKES}")
        listed = list(array)
    if not listed:
        raise InputError(f"{name}: has no frames")
    chosen = spread(len(listed), frames)
    read = {i: rgb(listed[i], f"{name}, frame {i}") for i in dict.fromkeys(chosen)}
    return Video(same_size([read[i] for i in chosen], name), name, chosen)


def rgb(source: Any, name: str) -> Image.Image:
    """One frame."""
    found = pictures.read(source).image if isinstance(source, str | Path | pictures.Picture) else None
    if found is None:
        image = source if isinstance(source, Image.Image) else pictures.from_array(source, name)
        found = pictures.upright(image, name)
    assert isinstance(found, Image.Image)
    return found


def same_size(frames: list[Image.Image], name: str) -> tuple[Image.Image, ...]:
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) > 1:
        told = " and ".join(f"{wide}×{high}" for wide, high in sizes[:2])
        raise InputError(f"{name}: its frames have different sizes ({told})")
    return tuple(frames)


def open_video(path: Path, frames: int) -> Video:
    """Read a file, or a folder of frames."""
    name = " ".join(str(path).splitlines())
    if path.is_dir():
        return open_folder(path, frames)
    if not path.is_file():
        raise InputError(f"{name}: no such file")
    ending, stamp = path.suffix.lower(), stamp_file(path)
    with pictures.one_error(path):
        if ending in FILMS:
            decoded, chosen, _ = film(path, str(path), frames)
        elif ending in ANIMATED:
            decoded, chosen, _ = animation(path, str(path), frames)
        elif ending in ARRAYS:
            found = of_frames(read_video_array(path, name), frames, name)
            return replace(found, name=path.name, source=path, stamp=stamp)
        else:
            raise InputError(
                f"{name}: is not a video; give a GIF, a folder of frames or one of {', '.join(sorted(FILMS))}"
            )
    return Video(same_size(decoded, name), path.name, chosen, path, stamp)


def open_folder(path: Path, frames: int) -> Video:
    """The images of a folder as the frames of one video, in the order of their names: 2 comes before 10."""
    files = frames_in(path)
    if not files:
        raise InputError(f"{path}: no images in this folder, which would be the frames of a video")
    chosen = spread(len(files), frames)
    read = {i: rgb(files[i], str(files[i])) for i in dict.fromkeys(chosen)}
    return Video(same_size([read[i] for i in chosen], str(path)), path.name, chosen, path, stamp_file(path))


def frames_in(folder: Path) -> list[Path]:
    """The images of a folder, by the numbers in their names."""
    files = [file for file in folder.iterdir() if file.is_file() and file.suffix.lower() in ENDINGS]
    return sorted(files, key=lambda file: numbered(file.name))


def numbered(name: str) -> list[tuple[int, int | str]]:
    """A key that sorts numbers by their value."""
    parts: list[str] = [""]
    for letter in name:
        if letter.isdecimal() != parts[-1][-1:].isdecimal():
            parts.append("")
        parts[-1] += letter
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


def animation(opened: Path | io.BytesIO, where: str, frames: int) -> tuple[list[Image.Image], tuple[int, ...], int]:
    """The sampled frames of a GIF or another animated image, their numbers, and how many it has."""
    with warnings.catch_warnings(), Image.open(opened) as image:
        warnings.simplefilter("ignore")
        count = getattr(image, "n_frames", 1)
        if count < 2:
            raise InputError(f"{where}: {STILL}")
        chosen, read = spread(count, frames), {}
        for i in dict.fromkeys(chosen):
            image.seek(i)
            read[i] = pictures.upright(image.copy(), where)
        return [read[i] for i in chosen], chosen, count


def read_video_array(opened: Path | io.BytesIO, where: str, most: int = 3 * MOST_PIXELS) -> np.ndarray:
    """An .npy or .npz file of at most `most` numbers: [T Y X 3] of 8 bits."""
    array = read_array(opened, Path(where).suffix.lower(), where, most, axes=4)
    if array.ndim != 4:
        raise InputError(f"{where}: {STILL}")
    return array


# ------------------------------------------------------------------------------------------------------- film files


def film(
    opened: Path | io.BytesIO,
    where: str,
    frames: int,
    *,
    reader: str | None = None,
    watch: Callable[[int, int, int], None] | None = None,
) -> tuple[list[Image.Image], tuple[int, ...], int]:
    """The sampled frames of a film file, decoded by PyAV, their numbers, and how many it has.

    `reader`: the only demuxer that is tried. `watch(width, height, number)` may raise; it sees each frame that passes.
    """
    if find_spec("av") is None:
        said = f"{where}: no decoder for {Path(where).suffix.lower()} files is installed"
        raise InputError(f"{said}: pip install 'vitreous[video]', or give a GIF or a folder of frames")
    count = 0  # what a file says of its length is not always true
    for frame in decoded(opened, where, reader):
        count += 1
        if watch is not None:
            watch(frame.width, frame.height, count)
    if count == 0:
        raise InputError(f"{where}: has no frames that can be decoded")
    chosen = spread(count, frames)
    wanted, read = set(chosen), {}
    for number, frame in enumerate(decoded(opened, where, reader)):
        if number in wanted:
            check_size(frame.width, frame.height, where)
            read[number] = turned(frame.to_image(), getattr(frame, "rotation", 0)).convert("RGB")
    return [read[i] for i in chosen], chosen, count


def decoded(opened: Path | io.BytesIO, where: str, reader: str | None = None) -> Iterator[Any]:
    """The frames of a film, as PyAV has them."""
    import av

    if isinstance(opened, io.BytesIO):
        opened.seek(0)
    with av.open(str(opened) if isinstance(opened, Path) else opened, format=reader) as held:
        if not held.streams.video:
            raise InputError(f"{where}: has no video in it")
        stream = held.streams.video[0]
        stream.thread_type = "AUTO"
        stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
        yield from held.decode(stream)


def turned(image: Image.Image, degrees: int) -> Image.Image:
    """An image turned counterclockwise, as phones note it in their films."""
    return image.rotate(degrees, expand=True) if degrees else image


# ---------------------------------------------------------------------------------------------------------- batches


def as_batch(given: Any) -> Tensor | Sequence[Any]:
    """A float tensor [B T C Y X], or a list of videos."""
    if isinstance(given, Tensor) and given.is_floating_point():
        return given[None] if given.ndim == 4 else given
    listed = as_list(given)
    if not listed:
        raise InputError("there are no videos to explain")
    ready = [isinstance(one, Tensor) and one.is_floating_point() for one in listed]
    if not any(ready):
        return listed
    if not all(ready) or len({one.shape for one in listed}) > 1:
        raise InputError("float tensors count as preprocessed; give only float tensors, all of one size")
    return torch.stack(list(listed))


def as_list(given: Any) -> Sequence[Any]:
    """One video or several, as a list. A list of images or arrays [Y X 3] is one video: its frames."""
    if isinstance(given, str | Path | Video):
        return [given]
    if hasattr(given, "detach") or isinstance(given, np.ndarray):
        return list(given) if given.ndim == 5 else [given]
    if isinstance(given, Iterable) and not isinstance(given, bytes):
        listed = list(given)
        return [listed] if listed and all(is_frame(one) for one in listed) else listed
    raise InputError(f"a {type(given).__name__} is not a video; {TAKES}")


def is_frame(one: Any) -> bool:
    return isinstance(one, Image.Image) or (isinstance(one, np.ndarray) and one.ndim in (2, 3))
