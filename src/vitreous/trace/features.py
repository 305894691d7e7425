"""Patch features: the tokens that leave a block, or its queries, keys or values, on the patch grid."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitreous.capture.attention import widen
from vitreous.capture.narrowed_block import own_thread
from vitreous.errors import OptionError, Unsupported, one_of
from vitreous.trace.block_outputs import block_outputs, watch_blocks
from vitreous.trace.block_places import Features, on_grid
from vitreous.trace.run import Run
from vitreous.trace.tokens import projections
from vitreous.trace.trace import Trace

KINDS = ("tokens", "queries", "keys", "values")


def patch_features(
    trace: Trace, layers: Sequence[int], of: str = "tokens", norm: nn.Module | None = None
) -> dict[int, Features]:
    """The features [B h w D] of the patches in each of these layers, by one forward pass; −1 is the last layer.

    `of`: the tokens as they leave the block, or the queries, keys or values of its attention, all heads one after the
    other. `norm`: applied to the tokens, such as that of `final_norm`.
    """
    asked = [trace.layer_number(layer) for layer in layers]
    if of not in KINDS:
        raise OptionError(f"of={of}: give {one_of(KINDS)}")
    if of != "tokens":
        return {layer: projected(trace, number, of) for layer, number in zip(layers, asked)}
    taken = block_outputs(trace, trace.images, list(dict.fromkeys(asked)))
    placed = {number: on_grid(trace, number, tokens) for number, tokens in taken.items()}
    if norm is not None:
        with torch.no_grad():
            placed = {number: norm(tokens) for number, tokens in placed.items()}
    return {layer: placed[number] for layer, number in zip(layers, asked)}


# --------------------------------------------------------------------------------------------------- of the attention


def projected(trace: Trace, layer: int, of: str) -> Features:
    """The queries, keys or values of a layer, on its grid, [B h w H·d]."""
    layout = trace.layout
    if (layout.obstacle is not None and not layout.stages) or (layout.stages and layout.times):
        said = f"{trace.model.name} {layout.obstacle}, so its {of} cannot be put on the grid"
        raise Unsupported(f"{said}. Try of='tokens'.")
    seen = trace.layer(layer)
    if of == "values":
        rows = widen(seen.v)
    else:
        q, k, _ = projections(trace, seen)
        rows = q if of == "queries" else k
    flat = rows.detach().transpose(1, 2).flatten(2)  # [B·W n H·d]
    return from_slots(trace, layer, flat, of) if layout.stages else trace.to_patches(flat)


def from_slots(trace: Trace, layer: int, rows: Float[Tensor, "BW n D"], of: str) -> Features:
    """One vector for each slot of a windowed layer, put at its place; raise where a slot stands for several."""
    stage = trace.layout.stages[layer]
    slots = stage.queries if of == "queries" else stage.keys
    own = slots.slots_of_place[stage.special :]
    if int(slots.places_of_slot.max()) > 1 or not bool((own == 1).all()):
        said = f"the {of} of layer {layer} of {trace.model.name} stand for several patches each, or for none"
        raise Unsupported(f"{said}. Try of='tokens'.")
    flat = rows.reshape(len(trace), -1, rows.shape[-1])
    found = flat.new_zeros(len(trace), stage.places, flat.shape[-1])
    found[:, slots.place.to(flat.device)] = flat[:, slots.slot.to(flat.device)]
    return found[:, stage.special :].reshape(len(trace), *stage.grid, -1)


# ------------------------------------------------------------------------------------------------------ the final norm


def final_norm(trace: Trace) -> nn.Module | None:
    """The norm that the model applies to all tokens that leave its last block; None if it has none."""
    name = trace.facts.find(("final norm", trace.extent), lambda: find_norm(trace))
    return None if name is None else trace.model.module.get_submodule(name)


def find_norm(trace: Trace) -> str | None:
    """The first norm over channels that is given what the last block returned, whole."""
    layout, met, last = trace.layout, [], []

    def keep(layer: int, tokens: Tensor) -> None:
        last.append(tokens)  # kept, so that nothing else lies where it lies

    def note(name: str, module: nn.Module, args: Any) -> None:
        given = args[0] if args else None
        if not last or not isinstance(given, Tensor) or given.numel() != last[0].numel():
            return
        if given.data_ptr() == last[0].data_ptr() and given.shape[-1] == width_of(module):
            met.append(name)

    def watch() -> ExitStack:
        stack = watch_blocks(trace, keep, [layout.layers - 1])
        for name, module in trace.model.module.named_modules():
            if width_of(module) is not None:
                stack.callback(module.register_forward_pre_hook(own_thread(partial(note, name))).remove)
        return stack

    image = trace.images[:1]
    with torch.no_grad():
        trace.run(image, Run.to_output().unseen().of([0]).inside(watch))
    return met[0] if met else None


def width_of(module: nn.Module) -> int | None:
    """The channels of a norm over the last axis; None if the module is none."""
    kind, weight = type(module).__name__, getattr(module, "weight", None)
    over = "LayerNorm" in kind or "RMSNorm" in kind or "RmsNorm" in kind
    if not over or kind.endswith("2d") or not isinstance(weight, Tensor) or weight.ndim != 1:
        return None
    return len(weight)
