"""Watch a network only where there is something to see, once the layout run has shown where that is.

A function mode is called for every torch function of a network. For a single image, this takes longer than many of the
functions themselves. Most of them are between attentions, so the modes of a run pause there:

    before the first attention    watched
    inside an attention's module  watched, if its attention is recorded
    between two attentions        not watched, except around the layer where gradients begin
    after the last attention      watched

A run that meets other modules than expected raises `Lost`. Nothing is guessed: it is then made again without pauses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import Attention
from vitreous.capture.capture import Capture
from vitreous.capture.entries import CutAt, Entry
from vitreous.capture.narrowed_block import own_thread


class Lost(BaseException):
    """Raised inside a network that runs in another way than the layout run has shown."""


@dataclass(frozen=True)
class AttentionModules:
    """Where a network computes attention.

    `counts`: how many norms and linear layers were called before each attention. `steady`: nothing in the network
    switches gradients off, or needs another backward than torch's (`Unfrozen`).
    """

    names: tuple[str, ...]  # the module of each attention call, first to last
    counts: tuple[Mapping[str, int], ...]
    steady: bool

    def is_between(self, entry: Entry, number: int) -> bool:
        """Whether the tokens that enter an attention are made after the attention before it."""
        kind, count = entry
        return number == 0 or count > self.counts[number - 1][kind]


def attention_modules(
    calls: Sequence[Attention], counts: Sequence[Mapping[str, int]], steady: bool
) -> AttentionModules | None:
    """These calls, if each has a module of its own, none inside another; None if a run cannot pause between them."""
    names = tuple(call.name for call in calls)
    inside = any(other.startswith(f"{name}.") for name in names for other in names)
    alone = len(set(names)) == len(names) == len(counts) and all(names) and all(call.parts == 1 for call in calls)
    return AttentionModules(names, tuple(counts), steady) if names and alone and not inside else None


class Pauses(ExitStack):
    """A context, entered after the modes of a run, in which these pause.

    `last`: the attention that a narrowed block belongs to. `at`: the attention before which gradients begin.
    """

    def __init__(
        self,
        net: nn.Module,
        modules: AttentionModules,
        seen: Capture,
        narrowed: TorchFunctionMode | None,
        last: int,
        cut: CutAt | None,
        at: int,
    ) -> None:
        super().__init__()
        self.net, self.modules, self.count = net, modules, len(modules.names)
        self.seen, self.narrowed, self.last, self.cut, self.at = seen, narrowed, last, cut, at
        self.all = [mode for mode in (seen, narrowed, cut) if mode is not None]
        self.on = self.all  # the modes that are active, the innermost first
        self.below = 0  # how many others there are
        self.left = 0  # the modules up to here were left
        self.ends = 0  # the modules up to here must be left
        if cut is not None and at > 0:
            cut.count_from(at, modules.counts[at - 1])

    def __enter__(self) -> Pauses:
        super().__enter__()
        self.below = torch._C._len_torch_function_stack() - len(self.all)
        needed = [self.needed(segment) for segment in range(2 * self.count + 1)]
        for number, name in enumerate(self.modules.names):
            before, inside, behind = needed[2 * number : 2 * number + 3]
            if before == inside == behind:
                continue  # nothing changes here
            module, self.ends = self.net.get_submodule(name), number + 1
            enter, leave = partial(self.enter, number, inside), partial(self.leave, number, behind)
            self.callback(module.register_forward_pre_hook(own_thread(enter)).remove)
            self.callback(module.register_forward_hook(own_thread(leave), always_call=True).remove)
        self.replace(needed[0])
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.replace(self.all)
        self.seen.module = None
        if error[0] is None and self.left < self.ends:
            raise Lost

    def needed(self, segment: int) -> list[TorchFunctionMode]:
        """The modes of a part of the run: 0 before the first attention, 1 inside it, 2 behind it, and so on."""
        number, inside = segment // 2, segment % 2 == 1
        ends = segment in (0, 2 * self.count)
        begins = number == self.at - 1  # here the cut begins to count
        recorded = inside and (self.seen.needs(number) or begins)
        narrowed = number == self.last
        cut = self.cut is not None and 2 * self.at - 1 <= segment <= 2 * self.at + self.cut.further
        needed = (self.seen, ends or recorded or narrowed), (self.narrowed, narrowed), (self.cut, cut)
        return [mode for mode, on in needed if mode is not None and on]

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

    def enter(self, number: int, inside: list[TorchFunctionMode], module: nn.Module, args: Any) -> None:
        if number < self.left:
            raise Lost
        self.seen.seen, self.seen.module = number, self.modules.names[number]
        self.switch(inside)

    def leave(self, number: int, behind: list[TorchFunctionMode], module: nn.Module, args: Any, out: Any) -> None:
        """Called after an error, too; `out` is then None."""
        folded = self.narrowed is not None and number == self.last  # it may compute its attention in its own way
        if out is not None and self.seen in self.on and self.seen.seen != number + 1 and not folded:
            raise Lost
        self.left, self.seen.seen, self.seen.module = number + 1, number + 1, None
        self.switch(behind)
