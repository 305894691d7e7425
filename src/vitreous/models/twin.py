"""A copy of a network that shares its weights, so that two threads can run it at the same time.

Hooks, flags, and what a module keeps of its last run then belong to one thread each, as in `nn.DataParallel`.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

from torch import nn

from vitreous.models.facts import share_facts
from vitreous.models.model import Model

OWN = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set))


def has_twin(model: Model) -> bool:
    """Whether a copy would run as the network does: there are no hooks, and modules are found by their names."""
    if model.net is not model.module or model._forward is not None or model.arguments.kind:
        return False
    with model.still() as still:
        if still.hooked:
            return False
    return not model.facts.find("modules kept elsewhere", lambda: any(map(holds_modules, model.module.modules())))


def holds_modules(module: nn.Module) -> bool:
    """Whether a module keeps others where a copy would not look for them."""
    kept = [value for name, value in module.__dict__.items() if name not in OWN]
    inside = [one for value in kept if isinstance(value, list | tuple) for one in value]
    inside += [one for value in kept if isinstance(value, dict) for one in value.values()]
    return any(isinstance(one, nn.Module | MethodType) for one in (*kept, *inside))


def twin_of(model: Model) -> Model:
    """A model of the copy, which knows what is known of the network."""
    twin = copy.copy(model)
    twin.net = twin.module = copied(model.module, {})
    share_facts(model.module, twin.module)
    return twin


def copied(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """The module and those in it, each once, with the same parameters and buffers."""
    if id(module) not in known:
        known[id(module)] = twin = module.__new__(type(module))
        own: dict[str, Any] = twin.__dict__
        own.update(module.__dict__)
        own.update({name: copy.copy(own[name]) for name in OWN})
        for name, child in own["_modules"].items():
            own["_modules"][name] = child if child is None else copied(child, known)
    return known[id(module)]
