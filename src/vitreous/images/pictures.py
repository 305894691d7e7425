"""Read images: a path, a PIL image or a uint8 array becomes an upright RGB image, or one clear error.

For models with another number of channels than three they become `Bands`.
"""

from __future__ import annotations

import io
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageOps, UnidentifiedImageError

from vitreous._support.files import stamp_file
from vitreous.errors import InputError, one_line
from vitreous.images import bands
from vitreous.images.bands import ARRAYS, MOST_PIXELS, Bands, check_size, read_array
from vitreous.images.listing import ENDINGS as ENDINGS
from vitreous.images.listing import find as find

TIFF = (".tif", ".tiff")
for library in ("PIL", "tifffile"):  # what they say of damaged files is in our one line; programs that log still get it
    logging.getLogger(library).addHandler(logging.NullHandler())
TAKES = "give a path, a PIL image, a uint8 array or a float tensor"


@dataclass(frozen=True, eq=False)
class Picture:
    """An upright image, RGB or of the channels that a model takes, and its name."""

    image: Image.Image | Bands
    name: str
    note: str | None = None  # what was done to it, if that may surprise
    source: Path | Stored | None = None  # where it was read
    stamp: str | None = None  # of its file at that time


class Stored(ABC):
    """An image inside something larger, such as a tar file; str() says where."""

    __slots__ = ()

    @property
    @abstractmethod
    def stamp(self) -> str:
        """Cheap to compute; changes when the image may have changed."""

    @property
    def home(self) -> Path | None:
        """The file or folder that holds it, if it is one."""
        return None

    @abstractmethod
    def read_bytes(self) -> bytes: ...


def read(source: Any, number: int = 0, channels: int = 3) -> Picture:
    """Read a path, a PIL image or a uint8 array [Y X], [Y X 1], [Y X 3], [Y X 4] or [3 Y X].

    `channels`: how many the model takes; if not three, arrays are [Y X C] or [C Y X] of 8 or 16 bits or floats.
    """
    if isinstance(source, Picture):
        return source
    if isinstance(source, str | Path):
        return open_file(Path(source), channels)
    if isinstance(source, Stored):
        return open_stored(source, channels)
    name = f"image {number}"
    if isinstance(source, Bands):
        return Picture(source, name)
    if isinstance(source, Image.Image):
        name = Path(getattr(source, "filename", "") or name).name
        return Picture(*ready(source, name, channels)) if channels != 3 else Picture(upright(source, name), name)
    if channels != 3:
        return Picture(fitting(as_array(source), name, channels), name)
    return Picture(upright(from_array(source, name), name), name)


def fitting(array: np.ndarray | None, name: str, channels: int) -> Bands:
    """An array as an image of so many channels."""
    if array is None:
        raise InputError(f"{name}: is not an array; {TAKES}")
    found = bands.of_array(array, channels, name)
    check_size(*found.size, name)
    return found


def ready(image: Image.Image, name: str, channels: int) -> tuple[Bands, str, str | None]:
    """An upright image of so many channels, its name and a note: for one channel, colours are turned to grey."""
    check_size(*image.size, name)
    note = None
    if channels == 1 and bands.MODES.get(image.mode) != 1 and image.mode != "I":
        colours = upright(image, name)
        image = colours.convert("L")
        if any(Image.Image.getextrema(part) != (0, 0) for part in differences(colours, image)):
            note = f"{name}: its colours are turned to grey, as the model takes one channel"
    try:
        if image.mode == "I" and image.format == "PNG":  # 16 bits, as older versions of Pillow read them
            image = Image.fromarray(np.asarray(image).astype(np.uint16))
        image = ImageOps.exif_transpose(image)
        return bands.of_image(image, channels, name), name, note
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name}: cannot be read, it may be truncated or corrupt ({one_line(error)})") from None


def differences(colours: Image.Image, grey: Image.Image) -> list[Image.Image]:
    return [ImageChops.difference(part, grey) for part in colours.split()]


def from_array(source: Any, name: str) -> Image.Image:
    """An image from a uint8 array, channels first or last."""
    array = as_array(source)
    if array is None:
        raise InputError(f"{name}: a {type(source).__name__} is not an image; {TAKES}")
    if array.dtype != np.uint8:
        hint = "give uint8 0…255, or a float tensor [B,3,H,W] that is already preprocessed"
        raise InputError(f"{name}: an array of {array.dtype} is not an image; {hint}")
    if array.ndim == 3 and array.shape[0] == 3 and array.shape[2] not in (3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise InputError(f"{name}: an array of shape {list(array.shape)} is not an image; give [Y, X, 3]")
    return Image.fromarray(np.ascontiguousarray(array))


def as_array(source: Any) -> np.ndarray | None:
    """A NumPy array from an array, a tensor on any device or nested lists; None for anything else."""
    try:
        array = np.asarray(source.detach().cpu() if hasattr(source, "detach") else source)
    except Exception:
        return None
    return array if array.dtype.kind in "biufc" and array.ndim else None


def open_file(path: Path, channels: int = 3) -> Picture:
    """Read an image file for a model of so many channels; whatever is wrong with it is one line."""
    with one_error(path):
        if path.is_dir():
            raise InputError(f"{path}: is a folder; give its images, e.g. vitreous.images.pictures.find(…)")
        if path.stat().st_size == 0 and path.is_file():
            raise InputError(f"{path}: the file is empty")
        if not path.is_file():
            raise InputError(f"{path}: is not a file")
        stamp = stamp_file(path)
        return replace(decode(path, path, path.name, channels), source=path, stamp=stamp)


def open_stored(stored: Stored, channels: int = 3) -> Picture:
    """Read an image from an archive, with the same errors as a file."""
    with one_error(stored):
        held = stored.read_bytes()
        if not held:
            raise InputError(f"{stored}: the file is empty")
        found = decode(io.BytesIO(held), stored, Path(str(stored)).name, channels)
        return replace(found, source=stored, stamp=stored.stamp)


def decode(opened: Path | io.BytesIO, where: Path | Stored, name: str, channels: int) -> Picture:
    ending = Path(name).suffix.lower()
    if ending in ARRAYS:
        return Picture(decode_array(opened, ending, str(where), channels), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(opened)
        except UnidentifiedImageError:
            if ending not in TIFF or (channels == 3 and find_spec("tifffile") is None):
                raise
            return Picture(in_range(bands.read_tiff(rewound(opened), channels, str(where)), str(where)), name)
        with image:
            if channels != 3:
                return Picture(*decode_bands(image, opened, where, name, channels))
            note = remark(image, where)
            return Picture(upright(image, str(where)), name, note)


def decode_array(
    opened: Path | io.BytesIO, ending: str, where: str, channels: int, most: int = MOST_PIXELS
) -> Image.Image | Bands:
    """An .npy or .npz file; for three channels, 8 bits are the image that they would be as an array."""
    array = read_array(opened, ending, where, most * channels)
    if channels == 3 and array.dtype == np.uint8:
        return upright(from_array(array, where), where)
    return in_range(fitting(array, where, channels), where)


def in_range(found: Bands, where: str) -> Bands:
    """Raise for red, green and blue as floats that are not in 0…1; other channels may have any values."""
    if found.channels == 3 and found.array.dtype.kind == "f" and (found.array.min() < 0 or found.array.max() > 1):
        top = f"{found.array.max():.4g}"
        raise InputError(f"{where}: colours as floats are values in 0…1, these reach {top}; divide them first")
    return found


def rewound(opened: Path | io.BytesIO) -> Path | io.BytesIO:
    if not isinstance(opened, Path):
        opened.seek(0)
    return opened


def decode_bands(
    image: Image.Image, opened: Path | io.BytesIO, where: Path | Stored, name: str, channels: int
) -> tuple[Bands, str, str | None]:
    if bands.beyond_pillow(image, channels):
        check_size(*image.size, str(where))
        return bands.read_tiff(rewound(opened), channels, str(where)), name, None
    found, _, note = ready(image, str(where), channels)
    frames = getattr(image, "n_frames", 1)
    return found, name, remark(image, where) if frames > 1 else note


@contextmanager
def one_error(where: Path | Stored) -> Iterator[None]:
    """Turn whatever goes wrong with an image into one line."""
    name = " ".join(str(where).splitlines())
    try:
        yield
    except InputError as error:
        raise InputError(" ".join(str(error).splitlines())) from None
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except PermissionError:
        raise InputError(f"{name}: cannot be read (permission denied)") from None
    except UnidentifiedImageError:
        raise InputError(f"{name}: is not an image that Pillow can read") from None
    except Image.DecompressionBombError as error:
        raise InputError(f"{name}: is too large to open safely ({one_line(error)}); shrink it first") from None
    except Exception as error:  # Pillow's readers raise all kinds of errors
        raise InputError(f"{name}: cannot be read, it may be truncated or corrupt ({one_line(error)})") from None


def remark(image: Image.Image, where: Path | Stored) -> str | None:
    """What was done to the image that may surprise."""
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a phone's JPEG with a preview behind it
        return f"{where}: has {frames} frames, the first is explained"
    if image.mode in ("I", "F"):
        return f"{where}: its 32-bit values are scaled to 0…255"
    return None


def upright(image: Image.Image, name: str) -> Image.Image:
    """Check the size, rotate as EXIF says, convert to 8 bits per channel, put transparency on white."""
    check_size(*image.size, name)
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            image = Image.fromarray(eight_bit(np.asarray(image), deep=image.mode.startswith("I;")))
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")
    except Exception as error:
        raise InputError(f"{name}: cannot be read, it may be truncated or corrupt ({one_line(error)})") from None


def eight_bit(array: np.ndarray, deep: bool) -> np.ndarray:
    """Scale 16-bit integers (`deep`) by 1/257, and 32-bit values as their range suggests, or to the full range."""
    values = np.nan_to_num(array.astype(np.float64), posinf=0, neginf=0)
    low, top = values.min(), values.max()
    if not deep and (low < 0 or top > 65535 or (top > 255 and array.dtype.kind == "f")):
        values = (values - low) / (top - low or 1.0) * 255
    elif deep or top > 255:
        values = values / 257
    elif array.dtype.kind == "f" and top <= 1:
        values = values * 255
    return values.round().clip(0, 255).astype(np.uint8)


def as_list(images: Any, channels: int = 3) -> Sequence[Any]:
    """One image or several, as a list; arrays as a model of so many channels takes them."""
    if isinstance(images, str | Path | Image.Image | Picture | Stored | Bands):
        return [images]
    if hasattr(images, "detach") or isinstance(images, np.ndarray):
        array = as_array(images)
        if array is None or array.ndim < 2:
            raise InputError(f"an array of shape {list(np.shape(images))} is not an image; give [Y, X, {channels}]")
        if channels != 3:
            grey = channels == 1 and array.ndim == 3 and 1 not in array.shape[::2] and array.shape[2] > 4  # [B Y X]
            return list(array) if array.ndim > 3 or grey else [array]
        one = array.ndim == 2 or (array.ndim == 3 and (array.shape[-1] in (1, 3, 4) or array.shape[0] == 3))
        return [array] if one else list(array)
    if isinstance(images, Iterable) and not isinstance(images, bytes):
        return list(images)
    raise InputError(f"a {type(images).__name__} is not an image; {TAKES}")
