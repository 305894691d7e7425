"""Vision-language models of transformers: how images and the tokens of a text enter them.

pixels      [B 3 H W]; one image of several, [B 1 3 H W] (Idefics3, SmolVLM); flattened patches in packs of merged
            cells, with the grid of each image (Qwen-VL)
text        the tokens of a prompt in which one placeholder stands for each token of the image
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitreous.errors import ModelError, one_line
from vitreous.models.libraries.packed_windows import windows_at_once

STATE = ("rope_deltas",)  # what a forward pass leaves on the network
SHOWN = 160  # characters of an error


def speaks(net: nn.Module) -> bool:
    """Whether a network answers questions about images: it sees, and it generates tokens."""
    generates = getattr(net, "can_generate", None)
    return hasattr(net, "get_image_features") and generates is not None and bool(generates())


def takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


# -------------------------------------------------------------------------------------------------------------- pixels


def pixels(net: Any, images: Tensor) -> dict[str, Tensor]:
    """The arguments by which a batch of images enters the network; differentiable."""
    if is_packed(net):
        flat, (high, wide) = patchified(images, *patch_of(net))
        grid = torch.tensor([[1, high, wide]] * len(images), device=images.device)
        return {"pixel_values": flat, "image_grid_thw": grid}
    if takes(net.get_image_features, "pixel_attention_mask"):
        return {"pixel_values": seen(images)[:, None]}
    return {"pixel_values": images}


def seen(images: Tensor) -> Tensor:
    """The same, with a speck in an image of zeros, which would count as padding and be left out."""
    blank = (images == 0).flatten(1).all(1)
    if not bool(blank.any()):
        return images
    return images + blank.to(images)[:, None, None, None] * torch.finfo(images.dtype).tiny


def patch_of(net: Any) -> tuple[int, int, int]:
    """The side of a patch, how many are merged along it, and the frames of one, where patches are packed."""
    sees = net.config.vision_config
    return sees.patch_size, sees.spatial_merge_size, sees.temporal_patch_size


def patchified(images: Tensor, side: int, merged: int, frames: int) -> tuple[Tensor, tuple[int, int]]:
    """Images [B 3 H W] as rows of patches [B·h·w 3·T·side²], in packs of merged cells, and the grid h, w."""
    count, channels, height, width = images.shape
    step = side * merged
    if height % step or width % step:
        raise ModelError(f"an image of {height}×{width} does not divide into packs of {step}×{step} pixels")
    cut = images.view(count, channels, height // step, merged, side, width // step, merged, side)
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [B rows columns merged merged 3 side side]
    cut = cut.unsqueeze(6).expand(*cut.shape[:6], frames, side, side)
    return cut.reshape(-1, channels * frames * side * side), (height // side, width // side)


def unpatchified(flat: Tensor, grid: tuple[int, int], side: int, merged: int, frames: int) -> Tensor:
    """The image [3 H W] of such rows: the first frame of each patch."""
    (high, wide), channels = grid, flat.shape[1] // (frames * side * side)
    cut = flat.view(high // merged, wide // merged, merged, merged, channels, frames, side, side)[..., 0, :, :]
    return cut.permute(4, 0, 2, 5, 1, 3, 6).reshape(channels, high * side, wide * side)


def whole(processor: Any) -> dict[str, bool]:
    """The option by which an image processor leaves an image in one piece."""
    return {"do_image_splitting": False} if hasattr(processor, "do_image_splitting") else {}


def transform(net: Any, processor: Any) -> Callable[[Image.Image], Tensor]:
    """From an image to [3 H W], by the image processor."""

    def made_by_it(image: Image.Image) -> Tensor:
        made = processor(images=image, return_tensors="pt", **whole(processor))
        values: Tensor = made["pixel_values"]
        if "image_grid_thw" in made:
            _, high, wide = made["image_grid_thw"][0].tolist()
            return unpatchified(values, (high, wide), *patch_of(net))
        while values.ndim > 3:
            values = values[0]
        return values

    return made_by_it


def own_transform(net: Any, processor: Any) -> Callable[[Image.Image], Tensor] | None:
    """The same by a processor of images and text; None if it has none for images."""
    images = getattr(processor, "image_processor", None)
    return None if images is None else transform(net, images)


# ---------------------------------------------------------------------------------------------------------------- text


def find_processor(name: str) -> Any:
    """The processor saved with a network, in a folder or in the local cache; or else its tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    for kind in (AutoProcessor, AutoTokenizer):
        try:
            if name:
                return kind.from_pretrained(name)
        except Exception:  # none was saved
            continue
    said = "the processor of this vision-language model is not known"
    raise ModelError(f"{said}; give it with the network: vitreous.ask((net, processor), image, question)")


def written(processor: Any, tokenizer: Any, text: str, size: tuple[int, int]) -> list[int]:
    """The tokens of a prompt about an image of this size, as the processor writes it."""
    if processor is tokenizer or not hasattr(processor, "image_processor"):
        return [int(token) for token in tokenizer(text)["input_ids"]]
    blank = Image.new("RGB", size[::-1])
    made = processor(text=[text], images=[blank], **whole(processor.image_processor))
    return [int(token) for token in made["input_ids"][0]]


def image_tokens(net: Any, image: Tensor) -> int:
    """How many tokens of the language model one image [1 3 H W] becomes."""
    with torch.no_grad(), unchanged(net):
        try:
            found = net.get_image_features(**pixels(net, image))
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            said = f"{type(net).__name__} does not see an image of {image.shape[-2]}×{image.shape[-1]}"
            raise ModelError(f"{said} ({one_line(error, SHOWN)})") from error
    features = getattr(found, "pooler_output", found)
    return int(features.shape[-2]) if isinstance(features, Tensor) else sum(len(one) for one in features)


def path_of(net: Any) -> str:
    """Where the network was loaded from, if that is known."""
    return str(getattr(net.config, "_name_or_path", "") or "")


def placeholder(net: Any) -> int:
    """The token that stands for one token of an image."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(getattr(net.config, name, None), int):
            return int(getattr(net.config, name))
    raise ModelError(f"{type(net).__name__} names no token that stands for an image (config.image_token_id)")


def expanded(ids: list[int], token: int, count: int) -> list[int]:
    """The prompt with `count` placeholders where it has one, or a run of them."""
    places = [i for i, one in enumerate(ids) if one == token]
    if not places:
        return [token] * count + ids
    first, last = places[0], places[-1]
    if len(places) != count and last - first + 1 != len(places):
        said = f"the prompt has {len(places)} placeholders of image tokens in several places"
        raise ModelError(f"{said}, the image {count} tokens; ask about one image, not split into tiles")
    return ids if len(places) == count else ids[:first] + [token] * count + ids[last + 1 :]


def text_inputs(net: Any, ids: Tensor, prompt: int) -> dict[str, Tensor]:
    """The arguments by which tokens [B T] enter the network, `prompt` of them before the answer."""
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if takes(net.forward, "token_type_ids"):  # a prompt that is read as a whole, an answer word by word
        found["token_type_ids"] = (torch.arange(ids.shape[1], device=ids.device) >= prompt).long().expand_as(ids)
    if takes(net.forward, "mm_token_type_ids"):
        found["mm_token_type_ids"] = (ids == placeholder(net)).int()
    return found


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """Undo what a forward pass leaves on the network."""
    before = [(part, name, vars(part)[name]) for part in net.modules() for name in STATE if name in vars(part)]
    try:
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def logits(net: Any, images: Tensor, ids: list[int], prompt: int) -> Tensor:
    """The logits [B P V] of each token of the answer, `ids[prompt:]`, given everything before it."""
    rows = torch.tensor([ids], device=images.device).expand(len(images), -1)
    places = torch.arange(prompt - 1, len(ids) - 1, device=images.device)
    given = {**text_inputs(net, rows, prompt), **pixels(net, images)}
    with unchanged(net), windows_at_once(tower_of(net)) if is_packed(net) else nullcontext():
        found: Tensor = net(**given, logits_to_keep=places, use_cache=False).logits
    return found


def is_packed(net: Any) -> bool:
    """Whether the patches of all images enter as one sequence."""
    return takes(net.get_image_features, "image_grid_thw")


def tower_of(net: Any) -> nn.Module:
    """The part that sees."""
    sees = net.config.vision_config
    found: nn.Module = next(part for part in net.modules() if getattr(part, "config", None) is sees)
    return found


def generated(net: Any, images: Tensor, ids: list[int], most: int) -> list[int]:
    """The answer to a prompt, greedily; without the token that ends it."""
    rows = torch.tensor([ids], device=images.device)
    with torch.no_grad(), unchanged(net):
        given = {**text_inputs(net, rows, len(ids)), **pixels(net, images)}
        only = {"suppress_tokens": [placeholder(net)]}  # it stands for an image, never for a word
        out = net.generate(**given, max_new_tokens=most, do_sample=False, num_beams=1, **only)
    answer: list[int] = out[0, len(ids) :].tolist()
    return without_end(answer, ends(net))


def ends(net: Any) -> set[int]:
    """The tokens that end an answer."""
    found: set[int] = set()
    for place in (getattr(net, "generation_config", None), net.config.get_text_config()):
        value = getattr(place, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return found


def without_end(answer: list[int], ending: set[int]) -> list[int]:
    return answer[: next((i for i, one in enumerate(answer) if one in ending), len(answer))]
