"""Watch a network only where there is something to see, once the layout run has shown where that is.

A function mode is called for every torch function of a network. For a single image, this takes longer than many of the
functions themselves. Only a few of them are part of an attention, so the modes of a run pause between attentions:

    before the first attention    watched
    around an attention           watched, if it is recorded, or inside nn.MultiheadAttention
    between two attentions        not watched, except before the layer where gradients begin
    after the last attention      watched

Where an attention begins and ends is told by the modules that the network enters and leaves around it. A run in which
these come in another order, or without an attention between them, raises `Lost`, and is made again without pauses.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import Attention
from vitreous.capture.capture import Capture, ModuleNames
from vitreous.capture.entries import CutAt, Entry
from vitreous.capture.narrowed_block import own_thread


class Lost(BaseException):
    """Raised inside a network that runs in another way than the layout run has shown."""


class Event(NamedTuple):
    """A network enters or leaves a module."""

    module: str
    enters: bool


@dataclass(frozen=True)
class Span:
    """What happens right before and right after an attention that a module computes.

    `door`: how it is computed. Rules need `Capture`, which marks a softmax ("eager") and shows the attention inside
    nn.MultiheadAttention ("mha"). The latter is watched in every run: where nothing watches, torch may take its fast
    path, which rounds differently.
    `counts`: how many norms and linear layers were called until it ends.
    """

    module: str
    door: str
    begins: Event
    ends: Event
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Sights:
    """Where a network computes attention: a span for each call, first to last.

    `steady`: nothing in the network switches gradients off, or needs another backward than torch's (`Unfrozen`).
    """

    spans: tuple[Span, ...]
    steady: bool

    def is_between(self, entry: Entry, number: int) -> bool:
        """Whether the tokens that enter an attention are made after the attention before it."""
        kind, count = entry
        return number == 0 or count > self.spans[number - 1].counts[kind]


# ----------------------------------------------------------------------------------------------- in the layout run


class ModuleEvents(ExitStack):
    """A context that notes the modules which the current thread enters and leaves, and where attention is between.

    `counts` tells how many norms and linear layers were called so far.
    """

    def __init__(self, names: ModuleNames, counts: Callable[[], Mapping[str, int]]) -> None:
        super().__init__()
        self.names, self.counts = names, counts
        self.last = Event("", True)
        self.spans: list[Span | None] = []  # of each attention; None: no module tells where it is
        self._times: Counter[Event] = Counter()
        self._open = False  # whether the last attention has not ended yet

    def __enter__(self) -> ModuleEvents:
        super().__enter__()
        enter, leave = own_thread(partial(self.note, True)), own_thread(partial(self.note, False))
        self.callback(register_module_forward_pre_hook(enter).remove)
        self.callback(register_module_forward_hook(leave).remove)
        return self

    def note(self, enters: bool, module: nn.Module, *_: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        self.last = Event(name, enters)
        self._times[self.last] += 1
        if self._open and (span := self.spans[-1]) is not None:
            self.spans[-1] = replace(span, ends=self.last, counts=self.counts())
        self._open = False

    def attended(self, call: Attention) -> None:
        """Called for each attention. One that the network multiplies itself begins with its module."""
        begins = Event(call.name, True) if call.door == "eager" else self.last
        alone = not self._open and call.parts == 1
        self.spans.append(Span(call.name, call.door, begins, Event("", False), {}) if alone else None)
        self._open = True

    def sights(self, steady: bool) -> Sights | None:
        """All spans, if what begins and ends them happens once each; None if a run cannot pause between them."""
        spans = [span for span in self.spans if span is not None]
        events = [event for span in spans for event in (span.begins, span.ends)]
        once = all(event.module and self._times[event] == 1 for event in events)
        told = bool(spans) and len(spans) == len(self.spans) and len(set(events)) == len(events)
        return Sights(tuple(spans), steady) if told and once and not self._open else None


# ------------------------------------------------------------------------------------------------- in all later runs


class Pauses:
    """A context, entered after the modes of a run, in which these pause.

    `block`: the name of a narrowed block, and `last`: its attention. `at`: the attention before which gradients begin.
    `modules`: those of the network that were looked up before, by name.
    """

    def __init__(
        self,
        net: nn.Module,
        modules: dict[str, nn.Module],
        sights: Sights,
        seen: Capture,
        narrowed: TorchFunctionMode | None,
        block: str,
        last: int,
        cut: CutAt | None,
        at: int,
    ) -> None:
        self.net, self.modules, self.sights, self.count = net, modules, sights, len(sights.spans)
        self.seen, self.narrowed, self.block, self.last, self.cut, self.at = seen, narrowed, block, last, cut, at
        self.all = [mode for mode in (seen, narrowed, cut) if mode is not None]
        self.on = self.all  # the modes that are active, the innermost first
        self.below = 0  # how many others there are
        self.hooks: list[tuple[OrderedDict[Any, Any], tuple[int, int]]] = []  # where a hook of ours is, by which key
        self.left = 0  # the attentions before this one have ended
        self.expected = 0  # the attentions before this one must end

    def __enter__(self) -> Pauses:
        self.below = torch._C._len_torch_function_stack() - len(self.all)
        needed = [self.needed(part) for part in range(2 * self.count + 1)]
        changes = [not needed[i] == needed[i + 1] == needed[i + 2] for i in range(0, 2 * self.count, 2)] + [False]
        for number, span in enumerate(self.sights.spans):
            if changes[number]:
                self.expected = number + 1
                self.at_event(span.begins, partial(self.begin, number, needed[2 * number + 1]))
            if changes[number] or changes[number + 1]:  # before a change, the order is checked
                self.at_event(span.ends, partial(self.end, number, needed[2 * number + 2]))
        if self.narrowed is not None:
            within = self.needed(2 * self.last, True)
            self.at_event(Event(self.block, True), lambda *_: self.switch(within), first=True)
        if self.cut is not None and 0 < self.at:
            self.cut.count_from(self.sights.spans[self.at - 1].counts)
        self.replace(needed[0])
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove_hooks()
        self.replace(self.all)
        if error[0] is None and self.left < self.expected:
            raise Lost

    def at_event(self, event: Event, act: Callable[..., None], first: bool = False) -> None:
        """Add a hook, possibly before all others; not by torch's function for it, which takes five times as long."""
        module = self.modules.get(event.module)
        if module is None:
            try:
                module = self.modules[event.module] = self.net.get_submodule(event.module)
            except AttributeError:  # the network was changed
                self.remove_hooks()
                raise Lost from None
        hooks = cast("OrderedDict[Any, Any]", module._forward_pre_hooks if event.enters else module._forward_hooks)
        key = (id(self), len(self.hooks))
        hooks[key] = own_thread(act)
        if first:
            hooks.move_to_end(key, last=False)
        self.hooks.append((hooks, key))

    def remove_hooks(self) -> None:
        for hooks, key in self.hooks:
            del hooks[key]

    def needed(self, part: int, within: bool = False) -> list[TorchFunctionMode]:
        """The modes of a part of the run: 0 before the first attention, 1 in it, 2 behind it, and so on.

        `within`: the narrowed block was entered.
        """
        number, inside = part // 2, part % 2 == 1
        outside = part in (0, 2 * self.count)
        narrowed = number == self.last and (inside or within)
        door = "" if outside else self.sights.spans[number].door
        rewritten = door in ("eager", "mha")
        needed = inside and (self.seen.needs(number) or door == "mha" or (self.below > 0 and rewritten))
        seen = outside or needed or (narrowed and rewritten)
        cut = self.cut is not None and 2 * self.at <= part <= 2 * self.at + self.cut.further
        each = (self.seen, seen), (self.narrowed, narrowed), (self.cut, cut)
        return [mode for mode, on in each if mode is not None and on]

    def switch(self, modes: list[TorchFunctionMode]) -> None:
        """Change to these modes, unless the network has entered one of its own."""
        if torch._C._len_torch_function_stack() != self.below + len(self.on):
            raise Lost
        self.replace(modes)

    def replace(self, modes: list[TorchFunctionMode]) -> None:
        for _ in self.on:
            torch._C._pop_torch_function_stack()
        self.on = modes
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)

    def begin(self, number: int, inside: list[TorchFunctionMode], *_: Any) -> None:
        if number != self.left:
            raise Lost
        self.seen.seen, self.seen.module = number, self.sights.spans[number].module
        self.switch(inside)

    def end(self, number: int, behind: list[TorchFunctionMode], *_: Any) -> None:
        folded = self.narrowed is not None and number == self.last  # it may compute its attention in its own way
        if self.seen in self.on and self.seen.seen != number + 1 and not folded:
            raise Lost
        self.left = self.seen.seen = number + 1
        self.seen.module = None
        self.switch(behind)
