"""Patch tokens of a layer: taken, and changed on their way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitreous.capture.attention import widen
from vitreous.capture.narrowed_block import own_thread
from vitreous.errors import Unsupported
from vitreous.models.layout import Layout
from vitreous.trace.run import Finished, Run, gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace

Patches = Float[Tensor, "B P D"]  # the tokens of the patches, row by row
Change = Callable[[Patches], Patches]


def grid_of(layout: Layout, count: int, name: str) -> tuple[tuple[int, ...], list[int]]:
    """The grid of the patches of a layer with this many tokens, and the token of each, row by row."""
    grid, order = layout.orders.get(count, (layout.cells, ()))
    if not order and count == layout.tokens and layout.obstacle is None:
        order = tuple(layout.patch_tokens)
    if not order:
        said = f"{name}: the {count} tokens of this layer cannot be matched with patches of the image"
        raise Unsupported(f"{said}, so it has no latents; try another layer")
    return tuple(grid), list(order)


def changing(trace: Trace, layer: int, change: Change) -> ExitStack:
    """A context in which the patch tokens that leave a layer are changed."""

    def leave(module: nn.Module, args: Any, out: Any) -> Any:
        tokens = out[0] if isinstance(out, tuple) else out
        if not isinstance(tokens, Tensor):
            raise Unsupported(f"block {layer} of {trace.model.name} returns no tensor that could be changed")
        first = tokens.movedim(trace.batch_axis, 0)
        flat = first.flatten(1, -2)
        _, order = grid_of(trace.layout, flat.shape[1], trace.model.name)
        changed = flat.clone()
        changed[:, order] = change(flat[:, order]).to(flat.dtype)
        new = changed.reshape(first.shape).movedim(0, trace.batch_axis)
        return (new, *out[1:]) if isinstance(out, tuple) else new

    stack = ExitStack()
    stack.callback(trace.block(layer).register_forward_hook(own_thread(leave)).remove)
    return stack


def run_changed(trace: Trace, layer: int, change: Change) -> Finished:
    """A forward pass with the patch tokens that leave a layer changed."""
    how = Run.to_output().unseen().inside(partial(changing, trace, layer, change))
    with torch.no_grad():
        return trace.run(trace.images, how)


def patch_gradient(trace: Trace, layer: int, target: Target) -> Patches:
    """∂y/∂x of the patch tokens x that leave a layer; zeros where the score does not depend on them."""
    added: list[Tensor] = []

    def change(patches: Patches) -> Patches:
        added.append(torch.zeros_like(patches).requires_grad_())
        return patches + added[0]

    run = trace.run(trace.images, Run.from_pixels().unseen().inside(partial(changing, trace, layer, change)))
    return widen(gradients(trace.score(target, run), added, keep=False)[0])
