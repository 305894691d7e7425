"""Token ablation by taking the token out: the sequence gets shorter, and so does what says where its tokens are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.models.layout import Layout

ROTATIONS = ("rope", "position_embeddings")  # what blocks are given for each patch beside the tokens


def falls(net: nn.Module, run: Callable[[], Tensor], layout: Layout) -> Tensor:
    """y(all) − y(without) of each patch, [B h w]; `run` gives y [B]."""
    whole, maps = run(), []
    for patch in range(layout.patches):
        with without(net, layout, patch):
            maps.append(whole - run())
    return torch.stack(maps, 1).reshape(-1, *layout.grid)


@contextmanager
def without(net: nn.Module, layout: Layout, patch: int) -> Iterator[None]:
    """A network whose first block never gets the token of a patch."""
    kept = [i for i in range(layout.tokens) if i != layout.prefix + patch]

    def remove(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (shorter(args[0], kept, 1 - layout.sequence_first, layout.tokens), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: shorter(kwargs[first], kept, 1, layout.tokens)}

    def straighten(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {key: turned(value, patch) if key in ROTATIONS else value for key, value in kwargs.items()}

    def cut(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out.flatten(2)[:, :, kept][:, :, None]

    with ExitStack() as stack:
        if not layout.blocks:  # the one that attends in its own forward, behind a convolution
            stack.callback(net.cut.register_forward_hook(cut).remove)
        for number, name in enumerate(layout.blocks):
            block = net.get_submodule(name)
            if number == 0:
                stack.callback(block.register_forward_pre_hook(remove, with_kwargs=True).remove)
            stack.callback(block.register_forward_pre_hook(straighten, with_kwargs=True).remove)
            if getattr(getattr(block, "attn", None), "relative_position_bias_table", None) is not None:
                stack.callback(block.attn.__dict__.pop, "_get_rel_pos_bias")
                block.attn._get_rel_pos_bias = smaller(block.attn._get_rel_pos_bias(), kept)
        yield


def shorter(stream: Tensor, kept: list[int], axis: int, tokens: int) -> Tensor:
    assert stream.shape[axis] == tokens
    return stream.index_select(axis, torch.tensor(kept))


def turned(rotations: Any, patch: int) -> Any:
    """Rotations without those of a patch."""
    if isinstance(rotations, tuple):
        return tuple(turned(one, patch) for one in rotations)
    if rotations is None:
        return None
    return rotations[..., [i for i in range(rotations.shape[-2]) if i != patch], :]


def smaller(bias: Tensor, kept: list[int]) -> Callable[[], Tensor]:
    return lambda: bias[..., kept, :][..., kept]
