"""A network that holds still while it is watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitreous.capture.capture import ModuleNames
from vitreous.models.kinds_of_module import is_compiled
from vitreous.models.libraries import CHECKPOINTING, HOOKS

FLAGS = ("training", *CHECKPOINTING)  # of a module: off while it is watched
RARE = frozenset({*CHECKPOINTING, *HOOKS, "_compiled_call_impl"})  # attributes that few modules have of their own


@dataclass(frozen=True)
class Still:
    """What is known of a network that holds still."""

    names: ModuleNames  # of its modules, by identity
    hooked: bool  # someone has hooked into it, so that every run must go to its end


@contextmanager
def hold_still(net: nn.Module, lock: AbstractContextManager[Any], wrapped: bool, eager: bool = True) -> Iterator[Still]:
    """Hold a network in eval mode, for one thread; restore everything on exit.

    `wrapped`: it is inside another module, such as that of torch.compile. `eager`: run it uncompiled.
    """
    with lock, ExitStack() as stack:
        met: set[int] = set()
        compiled, hooked = wrapped, False
        left: list[nn.Module | None] = [net]
        while left:
            module = left.pop()
            if module is None or id(module) in met:
                continue
            met.add(id(module))
            own = module.__dict__  # asked directly: this walk is part of every run
            inner = own["_modules"]
            if inner:
                left.extend(inner.values())
                compiled = compiled or "_orig_mod" in inner
            if own["_forward_hooks"] or own["_forward_pre_hooks"]:
                hooked = True
            if not own.get("training") and own.keys().isdisjoint(RARE):
                continue
            compiled = compiled or is_compiled(module)
            hooked = hooked or not HOOKS.isdisjoint(own)
            for flag in FLAGS:  # checkpointing would run parts of the network again, unwatched
                if own.get(flag) is True:
                    stack.callback(setattr, module, flag, True)
                    setattr(module, flag, False)
        if compiled and eager:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield Still(ModuleNames(net), hooked)
