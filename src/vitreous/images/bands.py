"""Images of any number of channels: arrays as stored, scaled to 0…1 when they are used, and shown by chosen channels.

8 and 16 bits are divided by 255 and 65535; floats are taken as they are, as values in 0…1 before normalisation.
"""

from __future__ import annotations

import io
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from vitreous.errors import InputError, InputWarning, OptionError, one_line, warn_caller

ARRAYS = frozenset({".npy", ".npz"})
KEY = "image"  # of the array in an .npz file with several
FULL = {"uint8": 255, "uint16": 65535}
ENDS = (2, 98)  # percentiles that become black and white where the range of the values says nothing
MODES = {"L": 1, "I;16": 1, "I;16L": 1, "I;16B": 1, "I;16N": 1, "F": 1, "LA": 2, "RGB": 3, "RGBA": 4}  # of Pillow
BITS = 258  # the tag of a TIFF file with the bits of each channel
MOST_PIXELS = 100_000_000
MOST_ASPECT = 50  # the short side is scaled to the model's size, so a very long image would become enormous
LEAST_SIDE = 8
UNPACKED = {8: zlib.decompressobj, 32946: zlib.decompressobj, 34925: lzma.LZMADecompressor}  # by compression of TIFF
Box = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Bands:
    """An image [Y X C] of 8 or 16 bits or floats; it can be resized and mirrored as a PIL image can."""

    array: np.ndarray

    @property
    def width(self) -> int:
        return int(self.array.shape[1])

    @property
    def height(self) -> int:
        return int(self.array.shape[0])

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def channels(self) -> int:
        return int(self.array.shape[2])

    @property
    def deep(self) -> bool:
        """Has it more than 8 bits?"""
        return self.array.dtype != np.uint8

    def band(self, number: int) -> Float[np.ndarray, "Y X"]:
        """One channel in 0…1."""
        values = self.array[:, :, number].astype(np.float32)
        return values / np.float32(FULL.get(self.array.dtype.name, 1))

    def values(self) -> Float[np.ndarray, "Y X C"]:
        """All channels in 0…1."""
        return np.stack([self.band(i) for i in range(self.channels)], -1)

    def resize(self, size: tuple[int, int], resample: Any = Image.Resampling.BICUBIC, box: Box | None = None) -> Bands:
        """A part of it at this (width, height), in floats, without rounding to 8 bits."""
        planes = [Image.fromarray(self.band(i)).resize(size, resample, box=box) for i in range(self.channels)]
        return Bands(np.stack([np.asarray(plane) for plane in planes], -1))

    def transpose(self, method: Image.Transpose) -> Bands:
        if method is not Image.Transpose.FLIP_LEFT_RIGHT:
            raise NotImplementedError(method)
        return Bands(self.array[:, ::-1])

    def shown(self, bands: Sequence[int] | None = None) -> Image.Image:
        """An RGB image of one or three channels; more than 8 bits are stretched, each channel by its percentiles."""
        chosen = [self.band(i) for i in bands or usual_bands(self.channels)]
        planes = [stretched(plane) if self.deep else plane for plane in chosen]
        rgb = np.stack(planes if len(planes) == 3 else planes * 3, -1)
        return Image.fromarray((rgb * 255).round().clip(0, 255).astype(np.uint8))


def stretched(plane: Float[np.ndarray, "Y X"]) -> Float[np.ndarray, "Y X"]:
    """Values from black at the 2nd percentile to white at the 98th."""
    low, high = np.percentile(plane, ENDS)
    low, high = (low, high) if high > low else (plane.min(), plane.max())
    return np.asarray(((plane - low) / ((high - low) or 1)).clip(0, 1), np.float32)


def usual_bands(channels: int) -> tuple[int, ...]:
    """What is shown unless something else is asked for: the first three channels, or the first one in grey."""
    return (0, 1, 2) if channels >= 3 else (0,)


def check_bands(bands: Any, channels: int) -> tuple[int, ...] | None:
    """One or three channel numbers of a model with so many channels."""
    if bands is None:
        return None
    listed = [bands] if isinstance(bands, int) else list(bands) if isinstance(bands, Sequence) else [None]
    whole = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < channels for i in listed)
    if len(listed) not in (1, 3) or not whole or isinstance(bands, str):
        last = f"0 to {channels - 1}" if channels > 1 else "0"
        raise OptionError(f"bands={bands!r}: give one channel or three of this model's {channels} ({last})")
    return tuple(listed)


def picked(image: Image.Image, bands: Sequence[int] | None) -> Image.Image:
    """An RGB image with its channels in another order, or one of them in grey."""
    if bands is None or tuple(bands) == (0, 1, 2):
        return image
    parts = image.convert("RGB").split()
    return Image.merge("RGB", [parts[i] for i in (bands if len(bands) == 3 else [*bands] * 3)])


# ------------------------------------------------------------------------------------------------------ from arrays


def of_array(array: np.ndarray, channels: int, name: str) -> Bands:
    """An array [Y X], [Y X C] or [C Y X]; the axis as long as the model has channels is that of the channels."""
    check_shape(array.shape, channels, name)
    array = array[:, :, None] if array.ndim == 2 else array
    if array.shape[0] == array.shape[2] and array.shape[1] != 1:
        said = f"the channels of an array of shape {list(array.shape)} may be its first or its last axis"
        raise InputError(f"{name}: {said}; crop or pad it to another height or width than {channels}")
    return checked(array if array.shape[2] == channels else array.transpose(1, 2, 0), name)


def check_size(wide: int, high: int, name: str) -> None:
    """Raise if an image is too large, too small or too elongated."""
    if wide * high > MOST_PIXELS:
        raise InputError(f"{name}: {wide}×{high} is more than {MOST_PIXELS // 10**6} megapixels; shrink it first")
    if min(wide, high) < LEAST_SIDE:
        raise InputError(f"{name}: {wide}×{high} pixels are too few to explain; each side needs {LEAST_SIDE}")
    if max(wide, high) > MOST_ASPECT * min(wide, high):
        raise InputError(f"{name}: {wide}×{high} is more than {MOST_ASPECT} times as long as wide; crop it first")


def check_shape(shape: Sequence[int], channels: int, name: str) -> None:
    """Raise unless an array of this shape has so many channels."""
    if (len(shape) != 2 or channels != 1) and (len(shape) != 3 or channels not in (shape[0], shape[2])):
        said = f"an array of shape {list(shape)} is not an image of {count(channels)}"
        raise InputError(f"{name}: {said}; give [Y, X, {channels}] or [{channels}, Y, X]")


def checked(array: np.ndarray, name: str) -> Bands:
    """Raise unless the numbers are 8 or 16 bits or finite floats."""
    if array.dtype.kind == "u" and array.dtype.itemsize <= 2:
        return Bands(array.astype(array.dtype.newbyteorder("="), copy=False))
    if array.dtype.kind != "f":
        remedy = "give uint8, uint16, or floats in 0…1"
        raise InputError(f"{name}: it is not known which values of {array.dtype} are black and white; {remedy}")
    if not np.isfinite(array).all():
        raise InputError(f"{name}: contains NaN or infinite values; replace them first")
    if array.shape[2] != 3 and looks_like_8_bits(array):
        said = "floats are taken for values in 0…1, these are whole numbers in 0…255"
        warn_caller(f"{name}: {said}; give uint8, or divide them by 255", InputWarning)
    return Bands(array.astype(np.float32, copy=False))


def looks_like_8_bits(array: np.ndarray) -> bool:
    """Whether floats are whole numbers in 0…255, and not only a few small ones."""
    return bool(0 <= array.min() < array.max() <= 255 and array.max() > 10 and (array == array.round()).all())


def count(channels: int) -> str:
    return f"{channels} channel{'' if channels == 1 else 's'}"


@contextmanager
def opened(source: Path | io.BytesIO, ending: str, name: str) -> Iterator[IO[bytes]]:
    """The .npy data of a file, or of the only array of an .npz file, or of the one named `image`."""
    if ending == ".npy":
        with source.open("rb") if isinstance(source, Path) else source as file:
            yield file
        return
    with zipfile.ZipFile(source) as archive:
        keys = [entry.removesuffix(".npy") for entry in archive.namelist()]
        if KEY not in keys and len(keys) != 1:
            held = ", ".join(keys[:5]) or "nothing"
            raise InputError(f"{name}: holds {held}; name the array of the image {KEY!r}: np.savez(file, {KEY}=…)")
        with archive.open(f"{KEY if KEY in keys else keys[0]}.npy") as file:
            yield file


def read_array(source: Path | io.BytesIO, ending: str, name: str, most: int, axes: int = 3) -> np.ndarray:
    """Read an .npy or .npz file of at most `most` numbers as data, never as code; `axes`: at most so many."""
    from numpy.lib import format as npy

    try:
        with opened(source, ending, name) as file:
            start = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(npy.read_magic(file))
            shape, fortran, kind = (start or npy.read_array_header_2_0)(file)
            if kind.hasobject or kind.kind not in "biuf":
                raise InputError(f"{name}: an array of {kind} is not an image; give uint8, uint16, or floats in 0…1")
            if not 2 <= len(shape) <= axes or min(shape) < 1:
                raise InputError(f"{name}: an array of shape {list(shape)} is not an image; give [Y, X] or [Y, X, C]")
            numbers = math.prod(shape)
            if numbers > most:
                raise InputError(f"{name}: {numbers:,} numbers are too many for an image; shrink it first")
            held = file.read(numbers * kind.itemsize)
        flat = np.frombuffer(held, kind, numbers)
        return flat.reshape(shape, order="F" if fortran else "C")
    except (InputError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a damaged file raises all sorts
        said = f"cannot be read as an array, it may be truncated or corrupt ({one_line(error, 80)})"
        raise InputError(f"{name}: {said}") from None


# ------------------------------------------------------------------------------------------------------ from images


def of_image(image: Image.Image, channels: int, name: str) -> Bands:
    """The channels of a PIL image that has as many as the model takes."""
    if image.mode == "I":
        raise InputError(f"{name}: has 32-bit integers of unknown range; save it as 16 bits, or as floats in 0…1")
    if MODES.get(image.mode) != channels:
        has = f"the model takes {count(channels)}, this image has {len(image.getbands())}"
        raise InputError(f"{name}: {has}; give a file with as many, e.g. an array as .npy")
    array = np.asarray(image)
    return checked(array if array.ndim == 3 else array[:, :, None], name)


def beyond_pillow(image: Image.Image, channels: int) -> bool:
    """Is it a TIFF file of which Pillow would lose channels or bits?"""
    if image.format != "TIFF" or channels == 1:
        return False
    bits = image.tag_v2.get(BITS, (8,))  # type: ignore[attr-defined]
    return MODES.get(image.mode) != channels or max(bits) > 8


def read_tiff(source: Path | io.BytesIO, channels: int, name: str) -> Bands:
    """A TIFF file whose channels Pillow does not read: several of 16 bits or floats, or more than four."""
    try:
        import tifffile
    except ImportError:
        said = f"Pillow cannot read an image of {count(channels)} from this TIFF file"
        raise InputError(f"{name}: {said}; pip install 'vitreous[tiff]', or save it as .npy") from None
    with tifffile.TiffFile(source) as file:
        first = file.series[0]
        check_shape([side for side in first.shape if side != 1], channels, name)
        for shape in (first.shape, first.keyframe.chunks):  # of the image, and of one tile or strip
            if math.prod(shape) > MOST_PIXELS * channels:
                raise InputError(f"{name}: {list(shape)} are too many numbers for an image; shrink it first")
        check_packed(first, file.filehandle, name)
        return of_array(np.squeeze(first.asarray()), channels, name)


def check_packed(series: Any, file: Any, name: str) -> None:
    """Raise for a tile or strip that unpacks to more than its size; tifffile would hold all of it."""
    for page in series.pages:
        unpack = UNPACKED.get(0 if page is None else int(page.compression))
        if unpack is None:
            continue
        most = math.prod(page.chunks) * page.dtype.itemsize
        for offset, size in zip(page.dataoffsets, page.databytecounts):
            file.seek(offset)
            if len(unpack().decompress(file.read(size), most + 1)) > most:  # type: ignore[operator]
                raise InputError(f"{name}: a part of it unpacks to more than its size; it is corrupt, save it again")
