"""Patch features: the tokens of the patches as they leave a block, on the patch grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.capture.narrowed_block import own_thread
from vitreous.trace.run import Run
from vitreous.trace.trace import Trace

Keep = Callable[[int, Tensor], None]  # receives a layer and a tensor of it, [B N D] or [B h w D]


def watch_blocks(trace: Trace, keep: Keep) -> ExitStack:
    """A context in which the tokens that leave each block are shown."""

    def note(layer: int, module: nn.Module, args: Any, out: Any) -> None:
        keep(layer, (out[0] if isinstance(out, tuple) else out).movedim(trace.batch_axis, 0))

    stack = ExitStack()
    for layer in range(trace.layout.layers):
        hook = own_thread(partial(note, layer))
        stack.callback(trace.block(layer).register_forward_hook(hook).remove)
    return stack


def patch_features(trace: Trace, layers: Sequence[int]) -> dict[int, Tensor]:
    """The patch tokens [B h w D] as they leave each of these blocks, by one forward pass; −1 is the last block."""
    asked = [trace.layer_number(layer) for layer in layers]
    taken: dict[int, Tensor] = {}

    def keep(layer: int, tokens: Tensor) -> None:
        if layer in asked:
            taken[layer] = trace.to_patches(tokens).clone()  # a later block may add to it in place

    with torch.no_grad():
        trace.run(trace.images, Run.to_output().unseen().inside(partial(watch_blocks, trace, keep)))
    return {layer: taken[number] for layer, number in zip(layers, asked)}
