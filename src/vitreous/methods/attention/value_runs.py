"""How the values of a layer reach the output of its block: the block's input, its output projection and a second run.

o_i = Σ_j Σ_h A^h_ij W_O^h v_j^h + b          is added to the tokens; norms, an MLP and whatever else follow

The block itself is run again with another attention output, so nothing needs to be known about its structure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from vitreous.capture.attention import Attention, near, widen
from vitreous.capture.capture import Capture, Enough, ModuleNames
from vitreous.errors import CaptureError, Unsupported
from vitreous.models.layout import Layout
from vitreous.trace.trace import Trace
from vitreous.types import Heads, Tokens

Names = list[list[tuple[str | None, str | None]]]  # of the weight and the bias of each projection, by layer
ADD = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}


@dataclass(frozen=True, eq=False)
class Projection:
    """The output projection: the linear map applied to the concatenated heads of an attention."""

    weight: Tensor | None  # W_O [D H·d]; None: the heads are added to the tokens as they are
    bias: Tensor | None = None

    def __call__(self, heads: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape D"]:
        """W_O·x, without the bias."""
        return heads if self.weight is None else heads @ self.weight.mT.to(heads.dtype)

    def by_head(self, values: Float[Tensor, "*shape H d"]) -> Float[Tensor, "*shape H D"]:
        """W_O^h v^h of every head, without the bias."""
        assert self.weight is not None
        weight = widen(self.weight).reshape(-1, *values.shape[-2:])  # [D H d]
        return torch.einsum("...hd,Dhd->...hD", values, weight)


@dataclass(frozen=True, eq=False)
class Layer:
    """One recorded layer."""

    attention: Attention
    projections: list[Projection]  # linear maps applied directly to the attention's output; usually one
    exact: bool  # whether the forward pass was in at least float32
    block: Block | None = None

    @property
    def projection(self) -> Projection | None:
        return self.projections[0] if len(self.projections) == 1 else None


class Block:
    """A recorded call of a block: its input, its output, and how to run it again."""

    def __init__(self, module: nn.Module, axis: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.axis = module, axis
        self.args, self.kwargs = args, kwargs
        self.given: Tensor = first(args or tuple(kwargs.values())).clone()  # the block may overwrite its input
        self.left: Tensor = self.given  # the output

    @property
    def entered(self) -> Tokens:
        return self.tokens(self.given)

    @property
    def out(self) -> Tokens:
        return self.tokens(self.left)

    def leave(self, out: Any) -> None:
        self.left = first(out).clone()

    def tokens(self, stream: Tensor) -> Tokens:
        """Convert from the block's axes to [B N D], at least float32."""
        stream = stream.movedim(self.axis, 0)
        return widen(stream.reshape(len(stream), -1, stream.shape[-1]))

    def run(self, tokens: Tokens) -> Float[Tensor, "J N D"]:
        """Run the module on other tokens."""
        shape = list(self.given.movedim(self.axis, 0).shape)
        stream = tokens.reshape(len(tokens), *shape[1:]).movedim(0, self.axis)
        stream = stream.clone(memory_format=torch.contiguous_format)  # the block may overwrite it
        if self.args:
            return self.tokens(first(self.module(stream, *self.args[1:], **self.kwargs)))
        return self.tokens(first(self.module(**{**self.kwargs, next(iter(self.kwargs)): stream})))


def first(out: Any) -> Tensor:
    """The tokens among the arguments or results of a block."""
    return out[0] if isinstance(out, tuple | list) else out  # type: ignore[no-any-return]


class Projections(TorchFunctionMode):
    """Records what uses the output of each attention directly: a linear layer, or an addition to the tokens."""

    def __init__(self, seen: Capture, layout: Layout | None = None) -> None:
        super().__init__()
        self.seen, self.layout = seen, layout
        self.found: dict[Attention, list[Projection]] = {}
        self._flat: tuple[Attention, Tensor] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.seen.calls and func is F.linear:
            self.linear(*args, **kwargs)
        elif self.seen.calls and func in ADD and any(self.reads(x) for x in args):
            self.add(Projection(None))
        return func(*args, **kwargs)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Handle a call of F.linear."""
        if self.reads(x):
            self.add(Projection(weight, bias))

    def add(self, projection: Projection) -> None:
        self.found.setdefault(self.seen.calls[-1], []).append(projection)

    def reads(self, x: Any) -> bool:
        """Whether this is the output of the last attention, heads concatenated."""
        call = self.seen.calls[-1]
        if self._flat is None or self._flat[0] is not call:
            staged = self.layout is not None and self.layout.is_layer(call, self.seen.images)
            arranged = self.layout.arranged(call, self.seen.images) if staged and self.layout else call
            self._flat = call, side_by_side(arranged.out)
        flat = self._flat[1]
        if self.layout is not None and self.layout.stages:
            return isinstance(x, Tensor) and x.ndim > 0 and x is not call.node and has_rows(x, flat)
        if not isinstance(x, Tensor) or x.numel() != flat.numel() or x.dtype != flat.dtype:
            return False
        b, n, _ = flat.shape
        if x.shape[-1] != flat.shape[-1]:
            return False
        return torch.equal(x.reshape(flat.shape), flat) or torch.equal(x.reshape(n, b, -1).transpose(0, 1), flat)


def has_rows(x: Tensor, flat: Float[Tensor, "B N width"]) -> bool:
    """Whether these are rows of the other, in any order, all of them or without padding."""
    width = flat.shape[-1]
    if x.shape[-1] != width or x.dtype != flat.dtype or not 0 < x.numel() <= flat.numel():
        return False
    return all(bool(torch.isin(x[..., i], flat[..., i]).all()) for i in (0, width // 2, width - 1))


def side_by_side(heads: Heads) -> Float[Tensor, "B N width"]:
    return heads.transpose(1, 2).flatten(2)


def need_blocks(trace: Trace, method: str, remedy: str) -> None:
    """Raise unless every layer is in a separate module."""
    if len(trace.layout.blocks) != trace.layout.layers:
        if trace.layout.flat:
            said = f"{method} runs single blocks again; {trace.model.name} {trace.layout.no_blocks}"
            raise Unsupported(f"{said}. Try {remedy}.")
        raise Unsupported(
            f"{method} needs each layer in a separate module, and {trace.model.name} has no such modules. Try {remedy}."
        )


def need_chain(trace: Trace, layers: dict[int, Layer], method: str, remedy: str) -> None:
    """Raise unless each recorded block is given all tokens, as the one before it returned them."""
    blocks = [layer.block for _, layer in sorted(layers.items()) if layer.block is not None]
    whole = all(block.entered.shape[1] == trace.layout.tokens for block in blocks)
    if not whole or not all(near(one.left, other.given) for one, other in pairwise(blocks)):
        said = f"{trace.model.name} does not pass its tokens from block to block"
        raise Unsupported(f"{said} (are they added outside of them?), which {method} needs. Try {remedy}.")


def record(
    trace: Trace, rows: Sequence[int], numbers: list[int] | None = None, projections: bool = True
) -> dict[int, Layer]:
    """Record each layer's attention, its output projection (`projections`), and the blocks with these `numbers`.

    `rows`: of which images. Layers before the first of `numbers` are not kept.
    """
    names = trace.facts.get(projections_at(trace)) if projections and not numbers else None
    if names is not None and list(rows) == list(range(len(trace))) and trace.surgery is None:
        return recorded(trace, names)
    images = trace.images[list(rows)]
    layout, device = trace.layout, trace.images.device.type
    since = min(numbers) if numbers and layout.calls == layout.layers else 0
    modules = {i: trace.block(i) for i in numbers or ()}
    blocks: dict[int, Block] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=trace.autocast))
        still = stack.enter_context(trace.model.still())
        last = None if still.hooked or not modules else max(modules)
        for number, module in modules.items():
            for hook in watch(module, number, blocks, trace.batch_axis, ends=number == last):
                stack.callback(hook.remove)
        stack.enter_context(suppress(Enough))
        seen = Capture(still.names, len(images), since=since)
        readers = Projections(seen, layout)
        if projections:
            stack.enter_context(readers)
        stack.enter_context(seen)
        trace.model.run(images, *([trace.inputs.rows(rows)] if trace.inputs else []))
    calls = [call for call in seen.calls if layout.is_layer(call, len(images))]
    if not calls:
        raise trace.no_layers()
    if projections and since == 0:
        trace.facts.note(projections_at(trace), names_of_projections(trace, [readers.found.get(c, []) for c in calls]))
    exact = calls[0].v.dtype == calls[0].wide
    return {
        i: Layer(layout.arranged(call, len(images)), readers.found.get(call, []), exact, blocks.get(i))
        for i, call in enumerate(calls, since)
    }


def projections_at(trace: Trace) -> Hashable:
    return "the output projections", trace.extent


def names_of_projections(trace: Trace, found: list[list[Projection]]) -> Names | None:
    """The projections of each layer by the names of their parameters; None if one has none, or is not a parameter."""
    names = {id(parameter): name for name, parameter in trace.model.module.named_parameters()}
    each = [[(named(one.weight, names), named(one.bias, names)) for one in some] for some in found]
    known = all(each) and not any("" in pair for some in each for pair in some)
    return each if known else None


def named(parameter: Tensor | None, names: dict[int, str]) -> str | None:
    """The name of a parameter, "" if it has none; None if there is none."""
    return None if parameter is None else names.get(id(parameter), "")


def recorded(trace: Trace, names: Names) -> dict[int, Layer]:
    """The layers that the trace has recorded, with the projections that an earlier run of this network has shown."""
    layers = trace.attention

    def parameter(name: str | None) -> Tensor | None:
        return None if name is None else trace.model.module.get_parameter(name)

    exact = layers[0].v.dtype == layers[0].wide
    return {
        i: Layer(layer, [Projection(parameter(weight), parameter(bias)) for weight, bias in some], exact)
        for i, (layer, some) in enumerate(zip(layers, names, strict=True))
    }


def watch(module: nn.Module, number: int, blocks: dict[int, Block], axis: int, ends: bool) -> list[Any]:
    """Hooks that record the call of a block, and end the forward pass after it if nothing later is needed."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        blocks[number] = Block(module, axis, args, kwargs)

    def leave(_: nn.Module, args: Any, out: Any) -> None:
        blocks[number].leave(out)
        if ends:
            raise Enough

    return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]


class Wide(TorchFunctionMode):
    """Widen half-precision parameters when they are used; their `dtype` reports the wider type."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*tree_map_only(Tensor, wide, args), **tree_map_only(Tensor, wide, kwargs or {}))


def wide(t: Any) -> Any:
    """Cast floating-point tensors to at least float32; other values are unchanged."""
    return widen(t) if isinstance(t, Tensor) and t.is_floating_point() else t


@contextmanager
def again(trace: Trace, block: Block) -> Iterator[ModuleNames]:
    """The context for running a block again: at least float32, no gradients; yields the names of the modules."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(trace.images.device.type, enabled=False))
        still = stack.enter_context(trace.model.still())
        if any(t.is_floating_point() and t.itemsize < 4 for t in block.module.state_dict().values()):
            stack.enter_context(Wide())
        yield still.names


class Swap(Capture):
    """A mode in which the attention returns another output."""

    def __init__(self, names: ModuleNames, heads: Heads) -> None:
        super().__init__(names, len(heads))
        self.heads = heads

    def keep(self, call: Attention) -> None:
        super().keep(call)
        if call.out.shape != self.heads.shape:
            return
        if call.out.data_ptr() != call.node.data_ptr():
            raise CaptureError(
                f"the attention of {call.name or 'the model'} cannot be replaced; please report this model"
            )
        call.out.copy_(self.heads)
