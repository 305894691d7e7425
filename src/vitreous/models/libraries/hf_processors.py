"""The image processors of transformers as preprocessing."""

from __future__ import annotations

from typing import Any

from vitreous.images import preprocess as generic
from vitreous.images.preprocess import IMAGENET, Preprocess
from vitreous.models.libraries import hf_video
from vitreous.models.libraries.any import Size, cropped
from vitreous.models.libraries.tasks import said_if_varying

# The defaults of their processors are another model's; the published checkpoints were trained on ImageNet's colours.
PLAIN = ("deit", "dinov2", "hiera", "swin", "vit_mae", "vit_msn", "focalnet")


def saved_processor(name: str, local: bool) -> Any:
    """The image processor in a folder or in the local cache (unless `local`, also on the hub), if there is one."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(name, local_files_only=local) if name else None
    except Exception:  # none was saved, or it needs a package that is not installed: use the usual one
        return None


def usual_processor(kind: str) -> Any:
    """The processor that transformers pairs with an architecture, with the colours its models were trained on."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as NAMES

    named = NAMES.get(kind) or ()
    names = [named.get("torchvision"), named.get("pil")] if isinstance(named, dict) else list(named)
    make = next((getattr(transformers, name) for name in names if name and hasattr(transformers, name)), None)
    try:
        if make is None or not getattr(make(), "size", None):
            return None
    except TypeError:  # it is made from a configuration of another library
        return None
    colours = {"image_mean": IMAGENET[0], "image_std": IMAGENET[1]} if kind.startswith(PLAIN) else {}
    scale = {"size": {"shortest_edge": 256}} if make.__name__.startswith("Bit") else {}
    return make(**colours, **scale)


def resized(processor: Any, size: Size) -> Preprocess:
    """A processor for another input size: the same share of the image, the same colours."""
    told = processor.to_dict()
    before, crop = dict(told["size"]), dict(told.get("crop_size") or {}) if told.get("do_center_crop") else {}
    edge = before.get("shortest_edge")
    kept = crop["height"] / (edge or before["height"]) if crop else 1.0  # of the resized image's side
    if edge and size[0] != size[1]:  # it would pad a square image
        return cropped(size, told["image_mean"], told["image_std"], kept)
    high, wide = (round(side / kept) for side in size)
    told["size"] = {"shortest_edge": min(high, wide)} if edge and crop else {"height": high, "width": wide}
    if crop:
        told["crop_size"] = {"height": size[0], "width": size[1]}
    try:
        return adapt(type(processor)(**told))
    except (AttributeError, KeyError, TypeError, ValueError):  # it takes no size of this kind
        return cropped(size, told["image_mean"], told["image_std"], told.get("crop_pct") or kept)


def adapt(given: Any, channels: int = 3) -> Preprocess:
    """Any preprocessing a user may give: a callable, an image processor, or a processor of images and text."""
    if hasattr(given, "image_processor") and not hasattr(given, "image_mean"):
        return adapt(given.image_processor, channels)
    if callable(given) and hasattr(given, "image_mean") and channels == 3:
        return said_if_varying(generic.measured(lambda image: hf_video.one_frame(given, image)))
    return generic.adapt(given, channels)
