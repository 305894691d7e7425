"""Networks of transformers that take videos: how many frames, under which name, and how frames are prepared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from vitreous.images import preprocess as generic
from vitreous.images.preprocess import IMAGENET, Preprocess
from vitreous.models.libraries.any import Size, cropped, stated_size

HALF = ((0.5,) * 3, (0.5,) * 3)
GREY = ((0.45,) * 3, (0.225,) * 3)
TWICE = ((0.75,) * 3, (0.25,) * 3)  # scaled to −1…1, and then normalised as if to 0…1
# The colours of the published checkpoints, and the share of the short side that they see.
USUAL = {"videomae": (IMAGENET, 1.0), "timesformer": (GREY, 1.0), "vivit": (TWICE, 224 / 256)}
USUAL |= {"vjepa2": (IMAGENET, 224 / 256)}


def frames(net: Any) -> int | None:
    """How many frames a network takes; None if it takes images."""
    config = getattr(net, "config", None)
    if not hasattr(net, "main_input_name") or getattr(config, "model_type", None) not in USUAL:
        return None
    found = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    return None if found is None else int(found)


def inputs(net: Any, images: Tensor) -> dict[str, Any]:
    """The input of a network under its name; V-JEPA 2 is run without its predictor, which only fills in masks."""
    if getattr(net, "main_input_name", "") != "pixel_values_videos":
        return {"pixel_values": images}
    encoder = hasattr(net, "predictor")
    return {"pixel_values_videos": images, **({"skip_predictor": True} if encoder else {})}


def own_size(net: Any) -> Size | None:
    return stated_size(getattr(net, "config", None), names=("image_size", "crop_size"))


def preprocess(net: Any, size: Size | None, saved: Any) -> Preprocess:
    """The processor saved with a network, or else the usual steps of its architecture at the network's size."""
    colours, share = USUAL[net.config.model_type]
    if saved is not None:
        made = generic.measured(lambda image: one_frame(saved, image))
        return made if size in (None, made.size) else cropped(size or made.size, made.mean, made.std, share)
    return replace(cropped(size or own_size(net) or (224, 224), *colours, crop=share), assumed=True)


def saved_processor(name: str, local: bool) -> Any:
    """The video processor, or else the image processor, in a folder or in the local cache (or on the hub)."""
    import transformers

    for kind in ("AutoVideoProcessor", "AutoImageProcessor"):
        try:
            return getattr(transformers, kind).from_pretrained(name, local_files_only=local) if name else None
        except Exception:  # none was saved, or it needs a package that is not installed
            continue
    return None


def one_frame(processor: Any, image: Any) -> Tensor:
    """What a processor makes of an image, as the only frame of a video if it takes videos."""
    made = processor([image], return_tensors="pt")
    found: Tensor = made["pixel_values_videos"] if "pixel_values_videos" in made else made["pixel_values"]
    return found.flatten(0, -4)[0] if found.ndim > 4 else found
