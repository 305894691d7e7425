"""From a picture to a model's input, as the model's own configuration says, and back again for drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from vitreous.errors import ModelError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
UNKNOWN = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
MIDDLE = 128  # blue of the ramp: what is not of this colour did not come from the picture
BICUBIC = Image.Resampling.BICUBIC
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the picture


@dataclass(frozen=True, eq=False)
class Preprocess:
    """A callable from picture to tensor, with the colours that undo it."""

    transform: Callable[[Image.Image], Any]
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 Y X"]:
        return checked(self.transform(image))

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of what comes out."""
        shape = self(Image.new("RGB", (320, 320))).shape
        return shape[-2], shape[-1]

    def colours(self, x: Float[Tensor, "3 Y X"]) -> np.ndarray:
        """The picture that this input shows, [Y X 3] in 0…1."""
        mean, std = (torch.tensor(tuple(c), dtype=torch.float32)[:, None, None] for c in (self.mean, self.std))
        rgb = x.detach().float().cpu() * std + mean
        if rgb.min() < -0.2 or rgb.max() > 1.2:  # not the colours this class knows: stretch what there is
            rgb = (rgb - rgb.min()) / (rgb.max() - rgb.min()).clamp_min(1e-12)
        return rgb.clamp(0, 1).permute(1, 2, 0).numpy()

    @cached_property
    def _boxes(self) -> dict[tuple[int, int], Box]:
        return {}

    def box(self, size: tuple[int, int]) -> Box:
        """What part of a picture of this (width, height) reaches the model; beyond the picture where it is padded."""
        if size not in self._boxes:
            self._boxes[size] = find_box(self, size)
        return self._boxes[size]

    def view(self, image: Image.Image, most: int = 1024) -> Image.Image:
        """The part of a picture that the model sees, in the picture's own resolution (at most `most` pixels a side)."""
        left, top, right, bottom = self.box(image.size)
        scale = min(1.0, most / max(right - left, bottom - top))
        size = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
        if min(left, top) < -1 or right > image.width + 1 or bottom > image.height + 1:
            return image.crop((round(left), round(top), round(right), round(bottom))).resize(size, BICUBIC)
        inside = max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)
        return image.resize(size, BICUBIC, box=inside)


def checked(x: Any) -> Tensor:
    """What a preprocessing returned, if it is one picture for a network."""
    x = x[0] if isinstance(x, Tensor) and x.ndim == 4 and len(x) == 1 else x
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] != 3 or not x.is_floating_point():
        said = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ModelError(f"the preprocessing returns {said}; it must turn a PIL image into a float tensor [3, H, W]")
    return x


def find_box(preprocess: Preprocess, size: tuple[int, int]) -> Box:
    """Send a ramp of colours through and read off where its edges lie."""
    wide, high = size
    ramp = np.full((high, wide, 3), MIDDLE, np.uint8)
    ramp[:, :, 0] = ((np.arange(wide) + 0.5) / wide * 255).round()
    ramp[:, :, 1] = ((np.arange(high) + 0.5) / high * 255).round()[:, None]
    seen = preprocess.colours(preprocess(Image.fromarray(ramp)))  # [Y X 3]
    inside = np.abs(seen[:, :, 2] - MIDDLE / 255) < 0.02
    across, down = ends(seen[:, :, 0], inside, 0), ends(seen[:, :, 1], inside, 1)
    if across is None or down is None:
        return 0.0, 0.0, float(wide), float(high)
    return across[0] * wide, down[0] * high, across[1] * wide, down[1] * high


def ends(ramp: np.ndarray, inside: np.ndarray, axis: int) -> tuple[float, float] | None:
    """Where a rising line meets the outer edges, the photo's own where they are half a pixel off; None: it is none."""
    where = np.flatnonzero(inside.mean(axis) > 0.5 * inside.mean(axis).max(initial=0.1))
    if len(where) < 2:
        return None
    line = np.array([ramp.take(i, 1 - axis)[inside.take(i, 1 - axis)].mean() for i in where])
    slope, start = np.polyfit(where, line, 1)
    if slope <= 0 or np.abs(start + slope * where - line).max() > 0.05:
        return None
    first, last = float(start - slope / 2), float(start + slope * (ramp.shape[1 - axis] - 0.5))
    return (0.0 if abs(first) < slope / 2 else first), (1.0 if abs(last - 1) < slope / 2 else last)


def adapt(given: Any) -> Preprocess:
    """What a user calls preprocessing: torchvision transforms, a Hugging Face image processor, any callable."""
    if isinstance(given, Preprocess):
        return given
    if hasattr(given, "image_processor") and not hasattr(given, "image_mean"):
        return adapt(given.image_processor)
    if not callable(given):
        raise ModelError(f"a {type(given).__name__} is not a preprocessing; give a callable from PIL image to tensor")
    if hasattr(given, "image_mean"):  # a Hugging Face image processor
        return measured(lambda image: given(images=image, return_tensors="pt")["pixel_values"])
    return measured(given)


def measured(transform: Callable[[Image.Image], Any]) -> Preprocess:
    """The colours come from what a black and a white picture turn into, whoever wrote the transform."""
    black, white = (checked(transform(Image.new("RGB", (256, 256), c))).double() for c in ("black", "white"))
    low, high = black.mean((1, 2)), white.mean((1, 2))  # [3]
    even = max(black.flatten(1).std(1).max(), white.flatten(1).std(1).max()) < 1e-3
    if not even or (high - low).min() < 1e-6:  # colours of its own for every picture
        return Preprocess(transform, *UNKNOWN)
    return Preprocess(transform, (low / (low - high)).tolist(), (1 / (high - low)).tolist())


def default(size: tuple[int, int], mean: Sequence[float], std: Sequence[float], crop: float = 1.0) -> Preprocess:
    """Short side to the size (bicubic), centre crop, normalise."""
    from timm.data.transforms_factory import transforms_imagenet_eval

    mean, std = tuple(mean), tuple(std)
    return adapt(transforms_imagenet_eval(size, crop_pct=crop, interpolation="bicubic", mean=mean, std=std))


def of_timm(net: nn.Module, size: tuple[int, int] | None = None) -> Preprocess:
    """timm's own evaluation transform for this model."""
    from timm.data import create_transform, resolve_data_config

    config = resolve_data_config({}, model=net)
    size = size or expected_size(net)
    if size is not None:
        config["input_size"] = (3, *size)
    return adapt(create_transform(**config))


def of_hf(net: Any, size: tuple[int, int] | None = None, local: bool = True) -> Preprocess:
    """The image processor saved with the model; else the one usual for this architecture, at the model's own size."""
    saved = saved_processor(str(getattr(net.config, "_name_or_path", "")), local)
    if saved is not None:
        return adapt(saved) if size is None else resized(saved, size)
    size = size or expected_size(net) or (224, 224)
    kind = net.config.model_type.replace("_vision_model", "").replace("_with_registers", "")
    usual = usual_processor(kind)
    return default(size, *IMAGENET) if usual is None else resized(usual, size)


def saved_processor(name: str, local: bool) -> Any:
    """The image processor in a folder or in the local cache (or, not only `local`, on the hub), if there is one."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(name, local_files_only=local) if name else None
    except Exception:  # none was saved, or it needs what is not installed: the usual one serves
        return None


def usual_processor(kind: str) -> Any:
    """The processor that transformers pairs with an architecture, with the colours its models were trained on."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as NAMES

    named = NAMES.get(kind) or ()
    names = [named.get("torchvision"), named.get("pil")] if isinstance(named, dict) else list(named)
    make = next((getattr(transformers, name) for name in names if name and hasattr(transformers, name)), None)
    if make is None or not getattr(make(), "size", None):
        return None
    colours = {"image_mean": IMAGENET[0], "image_std": IMAGENET[1]} if kind.startswith(PLAIN) else {}
    scale = {"size": {"shortest_edge": 256}} if make.__name__.startswith("Bit") else {}
    return make(**colours, **scale)


# Their processor's defaults are another model's; the published checkpoints carry ImageNet's colours.
PLAIN = ("deit", "dinov2", "hiera", "swin", "vit_mae", "vit_msn", "focalnet")


def resized(processor: Any, size: tuple[int, int]) -> Preprocess:
    """A processor for another input size: the same share of the picture, the same colours."""
    told = processor.to_dict()
    before, crop = dict(told["size"]), dict(told.get("crop_size") or {}) if told.get("do_center_crop") else {}
    edge = before.get("shortest_edge")
    kept = crop["height"] / (edge or before["height"]) if crop else 1.0  # of the resized picture's side
    if edge and size[0] != size[1]:  # it would pad a square picture
        return default(size, told["image_mean"], told["image_std"], kept)
    high, wide = (round(side / kept) for side in size)
    told["size"] = {"shortest_edge": min(high, wide)} if edge and crop else {"height": high, "width": wide}
    if crop:
        told["crop_size"] = {"height": size[0], "width": size[1]}
    return adapt(type(processor)(**told))


def of_openclip(net: Any, size: tuple[int, int]) -> Preprocess:
    """open_clip's own evaluation transform, as far as the model carries it."""
    config = getattr(net.visual, "preprocess_cfg", None) or {}
    try:
        from open_clip.transform import PreprocessCfg, image_transform_v2

        return adapt(image_transform_v2(PreprocessCfg(**{**config, "size": size}), is_train=False))
    except ImportError:
        return default(size, *CLIP)


def of_module(net: nn.Module) -> Preprocess:
    """The best that can be known about any module."""
    if hasattr(net, "pretrained_cfg"):
        return of_timm(net)
    if hasattr(net, "config") and hasattr(net.config, "model_type"):
        return of_hf(net)
    size = expected_size(net) or (224, 224)
    if hasattr(net, "encode_image") and hasattr(net, "visual"):
        return of_openclip(net, size)
    return default(size, *IMAGENET, crop=0.875 if type(net).__module__.startswith("torchvision.") else 1.0)


def expected_size(net: nn.Module) -> tuple[int, int] | None:
    """The image size that a module says it takes, if it says so anywhere."""
    places = [net, getattr(net, "patch_embed", None), getattr(net, "visual", None), getattr(net, "config", None)]
    places.append(getattr(getattr(net, "config", None), "vision_config", None))
    for place in places:
        for name in ("image_size", "img_size"):
            size = getattr(place, name, None)
            if isinstance(size, int):
                return size, size
            if isinstance(size, tuple | list) and len(size) == 2:
                return int(size[0]), int(size[1])
    return None
