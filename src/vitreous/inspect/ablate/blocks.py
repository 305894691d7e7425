"""The MLPs and the layers of a network as places of ablation: modules whose outputs hooks replace for one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.capture.narrowed_block import own_thread
from vitreous.errors import OptionError, Unsupported, one_of
from vitreous.inspect.ablate.places import Edit, Heads, Places, also, refuse_other_forms
from vitreous.inspect.outliers.mlps import Mlp, find_mlps
from vitreous.trace.run import Run
from vitreous.trace.trace import Trace


class Mlps(Places):
    """What each MLP adds to the residual stream, [B 1 …]: its second linear layer, LayerScale, a norm of its own."""

    what, one = "mlps", "MLP"

    def count(self) -> tuple[int, ...]:
        trace = self.trace
        refuse_other_forms(trace)
        need_blocks(trace, "an MLP")
        self.mlps = trace.facts.find(("mlps", trace.extent), lambda: find_mlps(trace))
        if not self.mlps:
            said = f"{trace.model.name} shows no MLP of two linear layers in its blocks"
            raise Unsupported(f"{said}. Try ablating its heads or layers.")
        self.chains = trace.facts.find(("mlp chains", trace.extent), lambda: chains_of(trace, self.mlps))
        return tuple(int(layer in self.mlps) for layer in range(trace.layout.layers))

    def edited(self, how: Run, edit: Edit, rows: int, only: int | None = None) -> Run:
        def hooks() -> ExitStack:
            stack = ExitStack()
            for layer, mlp in self.mlps.items():
                if only not in (None, layer):
                    continue
                module = self.trace.model.module.get_submodule(self.chains[layer][-1])
                hook = own_thread(partial(replaced, edit, mlp))
                stack.callback(module.register_forward_hook(hook).remove)
            return stack

        return also(how, hooks).narrowed(None)


def replaced(edit: Edit, mlp: Mlp, module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
    found = edit(mlp.layer, out.movedim(mlp.axis, 0)[:, None])
    return None if found is None else found[:, 0].movedim(0, mlp.axis).to(out.dtype)


def need_blocks(trace: Trace, what: str) -> None:
    """Raise unless every layer is in a module of its own."""
    layout = trace.layout
    if len(layout.blocks) != layout.layers or not layout.blocks:
        said = f"{trace.model.name} {layout.no_blocks}"
        raise Unsupported(f"{what} is found in the module of its layer, and {said}. Try ablating its heads.")


def chains_of(trace: Trace, mlps: dict[int, Mlp]) -> dict[int, list[str]]:
    """The modules that the output of each MLP passes before it is added to the tokens, first its linear layer."""
    names = {id(module): name for name, module in trace.model.module.named_modules()}
    calls: dict[int, list[tuple[str, Any, Any]]] = {layer: [] for layer in mlps}

    def note(layer: int, module: nn.Module, args: Any, out: Any) -> None:
        calls[layer].append((names[id(module)], args[0] if args else None, out))

    def hooks() -> ExitStack:
        stack = ExitStack()
        for layer in mlps:
            for module in trace.block(layer).modules():
                stack.callback(module.register_forward_hook(own_thread(partial(note, layer))).remove)
        return stack

    with torch.no_grad():
        trace.run(trace.images[:1], Run.to_output().of([0]).unseen().inside(hooks))
    return {layer: chain_of(mlp.name, calls[layer]) for layer, mlp in mlps.items()}


def chain_of(first: str, calls: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """A linear layer and the modules that take its output, one after the other, each called once in the block."""
    chain, now = list[str](), None
    times = Counter(name for name, _, _ in calls)
    for name, given, out in calls:
        if not isinstance(out, Tensor) or times[name] > 1:
            continue
        starts = not chain and name == first
        if starts or (now is not None and is_one(given, now) and out.shape == now.shape):
            chain.append(name)
            now = out
    return chain


def is_one(given: Any, tensor: Tensor) -> bool:
    """Whether these are the same numbers in memory."""
    return isinstance(given, Tensor) and given.data_ptr() == tensor.data_ptr() and given.shape == tensor.shape


class Layers(Places):
    """What each block changes in the residual stream, [B 1 …]; without it, the block's output is its input."""

    what, one = "layers", "layer"

    def count(self) -> tuple[int, ...]:
        trace = self.trace
        refuse_other_forms(trace)
        need_blocks(trace, "a layer")
        shapes: dict[int, tuple[Any, Any]] = {}

        def look(layer: int, before: Tensor, after: Tensor) -> None:
            shapes[layer] = before.shape, after.shape

        trace.run(trace.images[:1], also(Run.to_output().of([0]).unseen(), self.hooks(look)))
        other = [layer for layer in range(trace.layout.layers) if len(set(shapes.get(layer, (0, 1)))) > 1]
        if other:
            said = f"layer {', '.join(map(str, other))} of {trace.model.name} does not pass on tokens as it gets them"
            raise Unsupported(f"{said}, so that it cannot be skipped. Try ablating its heads or MLPs.")
        return (1,) * trace.layout.layers

    def edited(self, how: Run, edit: Edit, rows: int, only: int | None = None) -> Run:
        axis = self.trace.batch_axis

        def change(layer: int, before: Tensor, after: Tensor) -> Tensor | None:
            if only not in (None, layer):
                return None
            update = after - before
            found = edit(layer, update.movedim(axis, 0)[:, None])
            if found is None:
                return None
            other = found[:, 0].movedim(0, axis).to(before.dtype)
            if torch.is_grad_enabled():
                return before + other if other.requires_grad or bool(other.any()) else before.clone()
            kept = other == update  # exactly what it was
            return torch.where(kept, after, before + other)

        return also(how, self.hooks(change)).narrowed(None)

    def hooks(self, seen: Callable[[int, Tensor, Tensor], Tensor | None]) -> Callable[[], ExitStack]:
        """A context in which `seen` is given the tokens before and behind each block, and may replace the latter."""
        blocks = self.trace.layout.blocks

        def watched() -> ExitStack:
            stack, turns, given = ExitStack(), Counter[str](), dict[str, tuple[Tensor, Tensor, int]]()

            def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
                tokens = args[0] if args else next(iter(kwargs.values()))
                copy = tokens.clone()
                given[name] = tokens, copy, copy._version
                return ((copy, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): copy})

            def leave(name: str, module: nn.Module, args: Any, out: Any) -> Any:
                layers = [layer for layer, block in enumerate(blocks) if block == name]
                layer = layers[turns[name] % len(layers)]
                turns[name] += 1
                after = out[0] if isinstance(out, tuple) else out
                tokens, copy, version = given.pop(name)
                before = copy if copy._version == version else tokens  # unless the block added to it in place
                other = seen(layer, before, after)
                return None if other is None else (other, *out[1:]) if isinstance(out, tuple) else other

            for name in dict.fromkeys(blocks):
                module = self.trace.model.module.get_submodule(name)
                before, behind = own_thread(partial(enter, name)), own_thread(partial(leave, name))
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(behind).remove)
            return stack

        return watched


KINDS: dict[str, type[Places]] = {"heads": Heads, "mlps": Mlps, "layers": Layers}


def find_places(what: str, trace: Trace) -> Places:
    if what not in KINDS:
        raise OptionError(f"unknown part {what!r}; choose {one_of(KINDS)}")
    return KINDS[what](trace)
