"""Networks of transformers that take patches instead of images: NaFlex and packed sequences, at any resolution.

    SigLIP 2 (NaFlex)         patches [B N p·p·C] row by row, a mask of those that are no padding, and the grids
    Qwen vision and the like  patches [ΣN C·t·p·p] of all images in one sequence, 2×2 together, and the grids
    Pixtral                   images [B C Y X], whose patches become one sequence with a mask between them

Images become these inputs here, by views alone, so that gradients reach the pixels. No patch is ever padded, and images
that would share a sequence are run one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitreous.errors import ModelError
from vitreous.images.preprocess import Preprocess, measured

MASKED = frozenset({"pixel_attention_mask", "spatial_shapes"})
GRIDS = ("grid_thw", "image_grid_thw")
SIZES = "image_sizes"
KINDS = {"siglip2_vision_model": "siglip2"}  # of configurations whose image processor has another name


def inputs_of(net: Any) -> frozenset[str]:
    """The arguments of the function that takes images."""
    call = net.get_image_features if hasattr(net, "get_image_features") else net.forward
    return frozenset(inspect.signature(call).parameters)


def packs(net: Any) -> bool:
    """Whether a network takes patches, or packs images into one sequence."""
    taken = inputs_of(net)
    tower = SIZES in taken and hasattr(net, "patch_conv")
    return MASKED <= taken or tower or (GRIDS[0] in taken and hasattr(net, "patch_embed"))


def run(net: Any, images: Tensor) -> Any:
    """One forward pass; of a tower without a pooler, the mean of the tokens of each image."""
    call = net.get_image_features if hasattr(net, "get_image_features") else net
    taken = inputs_of(net)
    if MASKED <= taken:
        patches, (h, w) = rows_of_pixels(images, patch_of(net))
        shapes = torch.tensor([[h, w]], device=images.device).expand(len(images), -1)
        return call(pixel_values=patches, pixel_attention_mask=None, spatial_shapes=shapes)  # nothing is padded
    return torch.cat([alone(net, call, image[None]) for image in images])


def alone(net: Any, call: Callable[..., Any], image: Tensor) -> Tensor:
    """The embedding of one image, whose sequence it does not share: the mean of its tokens, [1 D]."""
    if SIZES in inputs_of(net):
        out = call(pixel_values=image, image_sizes=[tuple(image.shape[-2:])])
        return out.last_hidden_state.mean(1)  # type: ignore[no-any-return]
    config = net.config
    patches, (h, w) = blocks_of_pixels(image, patch_of(net), config.spatial_merge_size, config.temporal_patch_size)
    out = call(patches, grid_thw=torch.tensor([[1, h, w]], device=image.device))
    found = getattr(out, "pooler_output", None)
    tokens = out.last_hidden_state if found is None else found
    return tokens.mean(0, keepdim=True)  # type: ignore[no-any-return]


def patch_of(net: Any) -> int:
    """The side of a patch."""
    config = net.config
    size = getattr(config, "patch_size", None) or getattr(getattr(config, "vision_config", None), "patch_size", None)
    if not isinstance(size, int):
        raise ModelError(f"{type(net).__name__}: its configuration states no patch size")
    return size


# ---------------------------------------------------------------------------------------------- pixels and patches


def grid_of(images: Tensor, unit: int, patch: int) -> tuple[int, int]:
    """How many patches there are, down and across."""
    h, w = images.shape[-2:]
    if h % unit or w % unit:
        down, across = (max(unit, round(side / unit) * unit) for side in (h, w))
        said = f"images of {h}×{w} are not made of whole units of {unit} pixels, which this network merges"
        raise ModelError(f"{said}; give {down}×{across}")
    return h // patch, w // patch


def rows_of_pixels(images: Tensor, patch: int) -> tuple[Tensor, tuple[int, int]]:
    """Images [B C Y X] as patches [B N p·p·C], row by row, channels last, and their grid."""
    grid = grid_of(images, patch, patch)
    cut = images.reshape(*images.shape[:2], grid[0], patch, grid[1], patch)  # [B C h p w p]
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2), grid


def blocks_of_pixels(images: Tensor, patch: int, merged: int, frames: int) -> tuple[Tensor, tuple[int, int]]:
    """Images [B C Y X] as patches [B·N C·t·p·p], those that are merged together, each image repeated as `frames`."""
    h, w = grid_of(images, patch * merged, patch)
    cut = images.reshape(*images.shape[:2], h // merged, merged, patch, w // merged, merged, patch)
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [B h/m w/m m m C p p]
    whole = cut.unsqueeze(6).expand(*cut.shape[:6], frames, *cut.shape[6:])
    return whole.flatten(5).flatten(0, 4), (h, w)


def pixels_of_rows(patches: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """The image [C Y X] of patches [N p·p·C], row by row."""
    h, w = grid
    cut = patches[: h * w].reshape(h, w, patch, patch, -1)
    return cut.permute(4, 0, 2, 1, 3).reshape(-1, h * patch, w * patch)


def pixels_of_blocks(patches: Tensor, grid: tuple[int, int], patch: int, merged: int, frames: int) -> Tensor:
    """The image [C Y X] of patches [N C·t·p·p] that are merged together."""
    h, w = grid
    cut = patches.reshape(h // merged, w // merged, merged, merged, -1, frames, patch, patch)[..., 0, :, :]
    return cut.permute(4, 0, 2, 5, 1, 3, 6).reshape(-1, h * patch, w * patch)


# -------------------------------------------------------------------------------------------------- preprocessing


def preprocess(net: Any, saved: Any) -> Preprocess:
    """The image processor's own pixels, put back in place; at the resolution that it chooses for each image."""
    processor = usual(net) if saved is None else saved
    made = measured(lambda image: pixels(processor, image))
    return replace(made, assumed=saved is None, varies=True)


def usual(net: Any) -> Any:
    """The processor that transformers pairs with the architecture, for this network's patches."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as NAMES

    config = net.config
    kind = KINDS.get(config.model_type, config.model_type.removesuffix("_vision"))
    name = dict(NAMES.get(kind) or {}).get("torchvision")
    if name is None:
        said = f"{type(net).__name__}: transformers has no image processor for {config.model_type}"
        raise ModelError(f"{said}; give float tensors [B, 3, H, W], or a preprocessing, Model(net, preprocess=…)")
    options = {"patch_size": patch_of(net)}
    for ours, theirs in (("spatial_merge_size", "merge_size"), ("temporal_patch_size", "temporal_patch_size")):
        if hasattr(config, ours):
            options[theirs] = getattr(config, ours)
    return getattr(transformers, name)(**options)


def pixels(processor: Any, image: Image.Image) -> Tensor:
    """The image [C Y X] that a processor cuts into patches."""
    made: Mapping[str, Any] = processor(images=image, return_tensors="pt")
    values = made["pixel_values"]
    if "spatial_shapes" in made:
        h, w = made["spatial_shapes"][0].tolist()
        return pixels_of_rows(values[0], (h, w), processor.patch_size)
    if "image_grid_thw" in made:
        _, h, w = made["image_grid_thw"][0].tolist()
        return pixels_of_blocks(
            values, (h, w), processor.patch_size, processor.merge_size, processor.temporal_patch_size
        )
    return values[0]  # type: ignore[no-any-return]
