"""Preprocessing: from an image to a model's input, and back to colours for drawing.

Three channels are red, green and blue, and a transform takes a PIL image; others are `Bands`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitreous._support.precision import doubled
from vitreous.errors import InputError, InputWarning, ModelError, ModelWarning, one_line, warn_caller
from vitreous.images.bands import Bands, count, picked, stretched, usual_bands
from vitreous.images.edges import MIDDLE, ends, refined
from vitreous.images.steps import applied, known_box

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
UNKNOWN = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
BICUBIC = Image.Resampling.BICUBIC
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the image


@dataclass(frozen=True, eq=False)
class Preprocess:
    """A callable from image to tensor, with the mean and standard deviation that undo it, one for each channel."""

    transform: Callable[[Any], Any]
    mean: Sequence[float | int]
    std: Sequence[float | int]
    bands: tuple[int, ...] | None = None  # the channels that are shown, in grey or as red, green and blue
    known: bool = True  # mean and std undo it
    own: bool = False  # a user's, whose steps nothing else can stand in for
    varies: bool = False  # what it makes of an image may have any size
    assumed: bool = False  # neither given nor stored with the model: what is usual

    def __call__(self, image: Image.Image | Bands) -> Float[Tensor, "channels Y X"]:
        if isinstance(image, Bands) and self.channels == 3:
            return self._deep(image)
        if not isinstance(image, Bands) and self.channels != 3:
            raise InputError(f"the model takes {count(self.channels)}, which an RGB image does not have")
        return checked(applied(self.transform, image), self.channels)

    @property
    def channels(self) -> int:
        return len(self.mean)

    def _deep(self, image: Bands) -> Tensor:
        """Three channels of more than 8 bits, which the transform of a PIL image does not take."""
        left, top, right, bottom = self.box(image.size)
        if not self.known or min(left, top) < -1 or right > image.width + 1 or bottom > image.height + 1:
            raise InputError("this preprocessing normalises or pads each image by itself; give images of 8 bits")
        inside = max(left, 0.0), max(top, 0.0), min(right, image.width), min(bottom, image.height)
        return normalised(image.resize(self.size[::-1], BICUBIC, box=inside), self.mean, self.std)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of the input it makes."""
        blank = Image.new("RGB", (320, 320)) if self.channels == 3 else flat(self.channels, 320, 0)
        shape = self(blank).shape
        return shape[-2], shape[-1]

    def colours(self, x: Float[Tensor, "channels Y X"]) -> np.ndarray:
        """The image that this input shows, [Y X 3] in 0…1."""
        mean, std = (torch.tensor(tuple(c), dtype=torch.float32)[:, None, None] for c in (self.mean, self.std))
        rgb = x.detach().float().cpu() * std + mean
        if self.channels != 3 or self.bands is not None:
            return self._shown(rgb)
        if rgb.min() < -0.2 or rgb.max() > 1.2:  # normalised in some other way: use the full range
            rgb = (rgb - rgb.min()) / (rgb.max() - rgb.min()).clamp_min(1e-12)
        return rgb.clamp(0, 1).permute(1, 2, 0).numpy()

    def _shown(self, values: Tensor) -> np.ndarray:
        """The chosen channels; stretched by their percentiles if they are not in 0…1."""
        chosen = values[list(self.bands or usual_bands(self.channels))].numpy()
        if not self.known or chosen.min() < -0.2 or chosen.max() > 1.2:
            chosen = np.stack([stretched(plane) for plane in chosen])
        return np.stack([*chosen] if len(chosen) == 3 else [*chosen] * 3, -1).clip(0, 1)

    @cached_property
    def _boxes(self) -> dict[tuple[int, int], Box | None]:
        return {}

    def box(self, size: tuple[int, int]) -> Box:
        """The part of an image of this (width, height) that the model sees; larger than the image if it is padded."""
        return self.located(size) or (0.0, 0.0, float(size[0]), float(size[1]))

    def located(self, size: tuple[int, int]) -> Box | None:
        """The same; None if the input is not an upright rectangle of the image, e.g. because it is mirrored."""
        if size not in self._boxes:
            known = known_box(self.transform, size) if self.channels == 3 else None
            find = find_box if self.channels == 3 else find_band_box
            self._boxes[size] = known or find(self, size)
        return self._boxes[size]

    def view(self, image: Image.Image | Bands, most: int = 1024) -> Image.Image:
        """The part of an image that the model sees, in the image's resolution (at most `most` pixels per side)."""
        image = image.shown(self.bands) if isinstance(image, Bands) else image
        image = picked(image, self.bands) if self.bands is not None and self.channels == 3 else image
        left, top, right, bottom = self.box(image.size)
        scale = min(1.0, most / max(right - left, bottom - top))
        size = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
        if min(left, top) < -1 or right > image.width + 1 or bottom > image.height + 1:
            return image.crop((round(left), round(top), round(right), round(bottom))).resize(size, BICUBIC)
        inside = max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)
        return image.resize(size, BICUBIC, box=inside)


def said_if_assumed(steps: Preprocess, name: str) -> Preprocess:
    """The same steps, with a warning if they are assumed."""
    if steps.assumed:
        warn_caller(what_is_assumed(steps, name), ModelWarning)
    return steps


def what_is_assumed(steps: Preprocess, name: str) -> str:
    """What to say where nothing tells how the images of a model are prepared."""
    high, wide = steps.size
    mean, std = (", ".join(f"{value:.3g}" for value in values) for values in (steps.mean, steps.std))
    said = f"{name}: its preprocessing is assumed: {high}×{wide}, mean {mean}, standard deviation {std}"
    return f"{said}; if it was trained otherwise, give your own: Model(net, preprocess=…)"


def checked(x: Any, channels: int = 3) -> Tensor:
    """The result of a preprocessing; raises unless it is a float tensor [3 Y X], or of as many channels."""
    x = x[0] if isinstance(x, Tensor) and x.ndim == 4 and len(x) == 1 else x
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] != channels or not x.is_floating_point():
        said = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        given = "a PIL image" if channels == 3 else f"an array [H, W, {channels}]"
        raise ModelError(
            f"the preprocessing returns {said}; it must turn {given} into a float tensor [{channels}, H, W]"
        )
    return x


def find_box(preprocess: Preprocess, size: tuple[int, int]) -> Box | None:
    """Preprocess a colour ramp and read off where its edges are."""
    wide, high = size
    ramp = np.full((high, wide, 3), MIDDLE, np.uint8)
    ramp[:, :, 0] = ((np.arange(wide) + 0.5) / wide * 255).round()
    ramp[:, :, 1] = ((np.arange(high) + 0.5) / high * 255).round()[:, None]

    def see(image: np.ndarray) -> np.ndarray:
        return preprocess.colours(preprocess(Image.fromarray(image)))

    seen = see(ramp)  # [Y X 3]
    inside = np.abs(seen[:, :, 2] - MIDDLE / 255) < 0.02
    across, down = ends(seen[:, :, 0], inside, 0), ends(seen[:, :, 1], inside, 1)
    if across is None or down is None:
        return None
    left, right, top, bottom = across[0] * wide, across[1] * wide, down[0] * high, down[1] * high
    if preprocess.known:
        left, right = refined(see, left, right, size, 0, seen.shape[1])
        top, bottom = refined(see, top, bottom, size, 1, seen.shape[0])
    return left, top, right, bottom


def adapt(given: Any, channels: int = 3) -> Preprocess:
    """Any callable from a PIL image to a tensor; for other channels than three, from an array [Y X C] in 0…1."""
    if isinstance(given, Preprocess):
        return given
    if not callable(given):
        raise ModelError(f"a {type(given).__name__} is not a preprocessing; give a callable from PIL image to tensor")
    return measured(given) if channels == 3 else measured_bands(Called(given, channels), channels)


def measured(transform: Callable[[Image.Image], Any]) -> Preprocess:
    """Find the colours of any transform from what it makes of a black and a white image."""
    black, white = (checked(transform(Image.new("RGB", (256, 256), c))).double() for c in ("black", "white"))
    low, high = black.mean((1, 2)), white.mean((1, 2))  # [3]
    even = max(black.flatten(1).std(1).max(), white.flatten(1).std(1).max()) < 1e-3
    if not even or (high - low).min() < 1e-6:  # it normalises every image by itself
        return Preprocess(transform, *UNKNOWN, known=False)
    return Preprocess(transform, (low / (low - high)).tolist(), (1 / (high - low)).tolist())


# ---------------------------------------------------------------------------------------------- what is not normalised

WHOLE = 2**-10  # how far from a whole number a rounded one may be
DARK = 10.0  # resampled values in 0…255 are told by a brighter one
LEAST = 0.1  # black lies so far below zero if a preprocessing normalises
LEVELS = 8  # of an image: a constant one may have any value
FULL = (0.02, 0.98)  # between these values and the ends of 0…1 lie some of each channel
MOST = 0.4  # the standard deviation above which a bright normalised image may fill 0…1


def unnormalised(images: Float[Tensor, "B channels Y X"], steps: Preprocess) -> str | None:
    """The range of a float tensor that this preprocessing did not make: 0…255 or 0…1; None where it may have made it.

    Values in 0…255 are far above white, or whole numbers above it. Values in 0…1 are pixels if they are whole 255ths
    that would not be pixels of 8 bits had they been normalised, or if they fill 0…1 in each channel and normalised
    ones hardly can.
    """
    values = doubled(images)
    mean, std = (torch.tensor(tuple(c), dtype=torch.float64, device=values.device) for c in (steps.mean, steps.std))
    mean, std, high = mean[:, None, None], std[:, None, None], float(values.max())
    white = float(((1 - mean) / std).max())
    if high > max(1.5 * white, 1.5):
        return "0…255" if high > max(3 * white, DARK) or is_whole(values) else None
    if high > 1 or not steps.known or steps.assumed or float((mean / std).min()) < LEAST:
        return None
    if torch.finfo(images.dtype).eps * 255 < WHOLE and is_whole(values * 255):
        levels = len(np.unique((values * 255).round().cpu().numpy()))
        return "0…1" if levels >= LEVELS and not is_whole((values * std + mean) * 255) else None
    fills = (values.amin((0, 2, 3)) < FULL[0]) & (values.amax((0, 2, 3)) > FULL[1])
    return "0…1" if bool(fills.all()) and float(std.max()) < MOST else None


def refuse_infinite(value: Tensor | float) -> None:
    if not math.isfinite(value):
        raise InputError("the image tensor contains NaN or infinite values")


def is_whole(values: Tensor) -> bool:
    return bool(((values - values.round()).abs() < WHOLE).all())


def check_values(images: Tensor, steps: Callable[[], Preprocess], name: str) -> None:
    """Refuse NaN and infinity; warn, at the line of the caller, of floats that count as preprocessed but are not."""
    low, high = (float(end) for end in images.detach().aminmax())  # NaN if there is one
    refuse_infinite(high if math.isfinite(low) else low)
    if not 0 <= low < high <= 255:
        return
    with suppress(ModelError):  # without a preprocessing nothing is known
        found = unnormalised(images.detach(), steps())
        if found is not None:
            said = f"a float tensor counts as preprocessed, but values in {found} are not what {name} takes"
            warn_caller(f"{said}; give uint8 0…255, or float tensors made by model.preprocess(image)", InputWarning)


# ------------------------------------------------------------------------------------------------------ other channels


def normalised(image: Bands, mean: Sequence[float | int], std: Sequence[float | int]) -> Float[Tensor, "channels Y X"]:
    x = torch.from_numpy(image.values()).permute(2, 0, 1)
    mean_, std_ = (torch.tensor(tuple(c), dtype=torch.float32)[:, None, None] for c in (mean, std))
    return (x - mean_) / std_


@dataclass(frozen=True)
class Scaled:
    """Scale the short side (bicubic), crop the centre (or squeeze the whole image) and normalise.

    Sides are whole pixels after scaling, as they are for RGB images.
    """

    size: tuple[int, int]  # height, width
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0  # the share of the scaled image that is kept
    whole: bool = False  # the image is squeezed into the shape of the input

    def __call__(self, image: Bands) -> Tensor:
        (wide, high), (y, x) = image.size, self.size
        down, across = (math.floor(side / self.crop + 1e-6) for side in self.size)
        if not self.whole:
            scale = max(across / wide, down / high)
            across, down = max(across, int(wide * scale + 1e-6)), max(down, int(high * scale + 1e-6))
        left, top = round((across - x) / 2), round((down - y) / 2)
        box = left * wide / across, top * high / down, (left + x) * wide / across, (top + y) * high / down
        return normalised(image.resize((x, y), BICUBIC, box=box), self.mean, self.std)


def scaled(
    size: tuple[int, int],
    mean: Sequence[float | int],
    std: Sequence[float | int],
    channels: int,
    crop: float = 1.0,
    whole: bool = False,
) -> Preprocess:
    """The usual preprocessing of a model of other channels; a mean that is not one number a channel is averaged."""
    colours = [tuple(c) if len(c) == channels else (sum(c) / len(c),) * channels for c in (mean, std)]
    return Preprocess(Scaled(size, colours[0], colours[1], crop, whole), colours[0], colours[1])


def refitted(found: Preprocess, channels: int, bands: tuple[int, ...] | None) -> Preprocess:
    """The same for another number of channels, and with other channels shown; raises if it has its own way."""
    if found.channels != channels and found.own:
        said = f"the preprocessing was given for {count(found.channels)}, the images have {channels}"
        raise ModelError(f"{said}; say so with it: Model(net, preprocess, channels={channels})")
    if found.channels != channels:
        found = replace(scaled(found.size, found.mean, found.std, channels), assumed=True)
    return replace(found, bands=bands)


@dataclass(frozen=True)
class Called:
    """A user's transform: of an array [Y X C] in 0…1; if it does not take that, of a grey PIL image."""

    transform: Callable[[Any], Any]
    channels: int

    def __call__(self, image: Bands) -> Any:
        try:
            return checked(self.transform(image.values()), self.channels)
        except Exception:
            if self.channels != 1 or image.deep:
                raise
            with suppress(Exception):
                return checked(self.transform(Image.fromarray(image.array[:, :, 0])), 1)
            raise


def flat(channels: int, side: int, value: int) -> Bands:
    return Bands(np.full((side, side, channels), value, np.uint8))


def measured_bands(transform: Callable[[Bands], Any], channels: int) -> Preprocess:
    """Find mean and deviation of any transform from what it makes of a black and a white image."""
    try:
        black, white = (checked(transform(flat(channels, 256, v)), channels).double() for v in (0, 255))
    except ModelError:
        raise
    except Exception as error:
        takes = f"it must turn an array [H, W, {channels}] into a float tensor [{channels}, H, W]"
        raise ModelError(f"the preprocessing fails ({one_line(error, 80)}); {takes}") from None
    low, high = black.mean((1, 2)), white.mean((1, 2))
    even = max(black.flatten(1).std(1).max(), white.flatten(1).std(1).max()) < 1e-3
    if not even or (high - low).min() < 1e-6:  # it normalises every image by itself
        return Preprocess(transform, (0.0,) * channels, (1.0,) * channels, known=False)
    return Preprocess(transform, (low / (low - high)).tolist(), (1 / (high - low)).tolist())


def find_band_box(preprocess: Preprocess, size: tuple[int, int]) -> Box | None:
    """Preprocess grey ramps across and down and read off where their edges are."""
    wide, high = size
    across_, down_ = ((np.arange(n, dtype=np.float32) + 0.5) / n for n in size)
    ramps = [np.broadcast_to(r, (high, wide)) for r in (across_, down_[:, None], np.zeros(()), np.ones(()))]
    mean, std = (torch.tensor(tuple(c), dtype=torch.float32)[:, None, None] for c in (preprocess.mean, preprocess.std))
    planes = []
    for ramp in ramps:
        x = preprocess(Bands((ramp[:, :, None] * 255).round().astype(np.uint8).repeat(preprocess.channels, 2)))
        planes.append((x.detach().float().cpu() * std + mean).mean(0).numpy())
    inside = planes[3] - planes[2] > 0.5  # elsewhere is padding
    across, down = ends(planes[0], inside, 0), ends(planes[1], inside, 1)
    if across is None or down is None:
        return None
    return across[0] * wide, down[0] * high, across[1] * wide, down[1] * high
