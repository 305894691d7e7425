"""Videos as the input of a model: [B T C Y X], read from files, sampled and preprocessed frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from vitreous.errors import InputError, ModelError
from vitreous.images import videos
from vitreous.images.preprocess import Preprocess
from vitreous.types import Images

Axes = Literal["BTCHW", "BCTHW"]


def checked_axes(axes: str, frames: int | None) -> Axes:
    """The axes of a network's input; raise for others, or if they are those of videos and it takes images."""
    if axes not in ("BTCHW", "BCTHW"):
        raise ModelError(f'axes="{axes}" is not known; give "BTCHW" or "BCTHW"')
    if frames is not None and frames < 1:
        raise ModelError(f"frames={frames}: give how many frames the network takes, at least 1")
    if axes == "BCTHW" and frames is None:
        raise ModelError('axes="BCTHW" is of videos; say how many frames the network takes: Model(net, frames=16, …)')
    return cast("Axes", axes)


def not_images(given: Tensor, axes: int, channels: int, name: str) -> str:
    """What to say of a tensor that is not a batch of images, or of videos."""
    shape = tuple(given.shape)
    if axes == 5:
        count = f" of {channels} channels" if given.ndim == 5 else ""
        said = f"a tensor of shape {shape} is not a batch of videos{count}, which {name} takes"
        return f"{said}; give [B, T, {channels}, H, W]"
    count = f" of {channels} channels" if given.ndim == 4 else ""
    said = f"a tensor of shape {shape} is not a batch of images{count}; give [B, {channels}, H, W]"
    return f"{said}; if the network takes videos, say so: Model(net, frames=16)" if given.ndim == 5 else said


def prepared(given: Any, frames: int, steps: Preprocess) -> Images:
    """Videos of any form as the input of a model that takes so many frames."""
    read = [videos.read(one, frames, number) for number, one in enumerate(videos.as_list(given))]
    if not read:
        raise InputError("there are no videos to explain")
    ready = [stacked(video.frames, steps) for video in read]
    if len({x.shape for x in ready}) > 1:
        raise InputError(f"preprocessing gives these videos different sizes: {[tuple(x.shape) for x in ready]}")
    return torch.stack(ready)


def stacked(frames: Sequence[Any], steps: Preprocess) -> Tensor:
    """The preprocessed frames of one video, [T C Y X]."""
    return torch.stack([steps(frame) for frame in frames])
