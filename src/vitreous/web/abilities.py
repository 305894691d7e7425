"""What a model can do, for lists on the page."""

from __future__ import annotations

from vitreous.models.model import Model
from vitreous.registry import METHODS
from vitreous.trace.apply import default_methods, why_not
from vitreous.trace.trace import Trace


def heads_of(trace: Trace) -> list[int]:
    """The number of heads of each layer; none where attention cannot be followed."""
    return [layer.shape[1] for layer in trace.attention] if trace.layout.obstacle is None else []


def unsupported(model: Model) -> dict[str, str]:
    said = {name: why_not(model.layout, model.name, declared) for name, declared in METHODS.items()}
    return {name: why for name, why in said.items() if why is not None}


def first_methods(trace: Trace) -> list[str]:
    """Attention, and the default map for a class, as far as the model supports them."""
    able = [one for one in default_methods(trace, []) if why_not(trace.layout, trace.model.name, one) is None]
    chosen = [one for one in able if not one.targeted][:1] + [one for one in able if one.targeted][:1]
    return [one.name for one in chosen]


def takes_text(model: Model) -> bool:
    return model.library.text(model.module, model.name) is not None
