"""What a module is: quantised, compiled, wrapped."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_int8(net: nn.Module) -> bool:
    """Whether torch quantised its weights: its kernels for them have no backward."""
    return any(hasattr(module, "_packed_params") or is_quantised(module) for module in net.modules())


def is_quantised(module: Any) -> bool:
    return any(t.is_quantized for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def is_compiled(module: nn.Module) -> bool:
    own = module.__dict__
    return "_orig_mod" in own["_modules"] or own.get("_compiled_call_impl") is not None


def unwrap(net: nn.Module) -> nn.Module:
    """The network inside torch.compile and DataParallel."""
    inner = getattr(net, "_orig_mod", None)
    if inner is None and isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = net.module
    return net if inner is None else unwrap(inner)


def kinds_in(module: nn.Module) -> tuple[type, ...]:
    """The types of a module and of all modules in it; asked in every run, so `modules()` would take too long."""
    found, left = [], [module]
    while left:
        one = left.pop()
        found.append(type(one))
        left += [child for child in one.__dict__["_modules"].values() if child is not None]
    return tuple(found)
