"""What leaves the blocks of a network: the modules that hold its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.capture.narrowed_block import own_thread
from vitreous.errors import Unsupported
from vitreous.trace.run import Run
from vitreous.trace.trace import Trace

Keep = Callable[[int, Tensor], None]  # receives a layer and a tensor of it, [B N D] or [B h w D]


def watch_blocks(trace: Trace, keep: Keep, layers: Sequence[int] | None = None) -> ExitStack:
    """A context in which the tokens that leave each of these blocks (None: all) are shown."""

    def note(layer: int, module: nn.Module, args: Any, out: Any) -> None:
        first = out
        while isinstance(first, tuple | list) and first:
            first = first[0]
        if not isinstance(first, Tensor):
            said = f"block {layer} of {trace.model.name} returns a {type(first).__name__} in place of its tokens"
            raise Unsupported(f"{said}, so its patch features are not known. Try another layer or of='keys'.")
        keep(layer, first.movedim(trace.batch_axis, 0) if first.ndim > 2 else first)

    stack, names = ExitStack(), block_names(trace)
    for layer in range(trace.layout.layers) if layers is None else layers:
        hook = own_thread(partial(note, layer))
        stack.callback(trace.model.module.get_submodule(names[layer]).register_forward_hook(hook).remove)
    return stack


def block_names(trace: Trace) -> tuple[str, ...]:
    """The modules that hold the layers, one each."""
    layout = trace.layout
    for names in (layout.blocks, layout.flat_blocks):
        if names and len(names) == layout.layers:
            return names
    said = f"{trace.model.name} does not keep each layer in a module of its own, so what leaves a layer is not known"
    raise Unsupported(f"{said}. Try of='keys', of='queries' or of='values'.")


def block_outputs(trace: Trace, images: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """What leaves each of these blocks for images of the size of the trace's, with the images in the first axis."""
    taken: dict[int, Tensor] = {}

    def keep(layer: int, tokens: Tensor) -> None:
        flat = tokens.ndim == 2  # of a packed sequence
        taken[layer] = (tokens.reshape(count, -1, tokens.shape[-1]) if flat else tokens).clone()

    parts = [images[i : i + 1] for i in range(len(images))] if trace.layout.alone else [images]
    found: list[dict[int, Tensor]] = []
    for part in parts:
        count, taken = len(part), {}
        own = len(part) == len(trace)
        how = Run.to_output().unseen().inside(partial(watch_blocks, trace, keep, layers))
        with torch.no_grad():
            trace.run(part, how if own else how.of([0] * count))
        found.append(taken)
    return {layer: torch.cat([one[layer] for one in found]) for layer in layers}
