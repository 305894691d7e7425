"""One differentiable forward pass that many methods share, and one backward pass for each target.

    y → x, T, O⁽¹⁾ … O⁽ᴸ⁾      all that methods with the model's own gradient ask for, found together

A method by itself runs less: its graph begins later, and its last block is narrowed. From two methods on, this pays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitreous._support.memory import out_of_memory
from vitreous.errors import InputError, VitreousError
from vitreous.models.decoder import HIDDEN
from vitreous.models.layout import Layout
from vitreous.models.model import Model
from vitreous.models.output import Form
from vitreous.registry import Method
from vitreous.trace.run import Finished, gradients, rows_of_run, score_of
from vitreous.trace.target import Class, Target, Top
from vitreous.types import Images

KEPT = 4  # targets whose gradients are kept
MODEL = "model"  # how methods call this pass in their declaration
Chosen = Mapping[str, tuple[Method, Mapping[str, Any]]]  # methods and their options by any names


def can_share(model: Model, layout: Layout) -> bool:
    """Whether one pass shows everything: a plain stack of layers, read by one classifier, that passes gradients on."""
    other = layout.obstacle or layout.stages or layout.decoder or layout.pooled or layout.flat or layout.foreign
    entered = bool(layout.entries) and layout.entries[-1] != HIDDEN
    return not other and entered and model.form is Form.VECTOR and model.has_gradients


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of one target."""

    pixels: Images  # ∂y/∂x
    entry: Tensor  # ∂y/∂T, of the tokens that enter the last layer's attention
    layers: tuple[Tensor, ...]  # ∂y/∂O of every layer


class Shared:
    """A forward pass from the pixels, in which the tokens that enter the last layer are noted."""

    def __init__(self, run: Finished) -> None:
        self.run = run
        self._found: list[tuple[Target, Gradients]] = []

    def gradients(self, target: Target) -> Gradients:
        """All gradients of a target; those of the last few targets are kept."""
        for known, found in self._found:
            if is_same(known, target):
                return found
        nodes = [layer.node for layer in self.run.layers]
        pixels, entry, *layers = gradients(score_of(target, self.run), [self.run.images, self.run.entry, *nodes])
        self._found = [(target, Gradients(pixels, entry, tuple(layers))), *self._found[: KEPT - 1]]
        return self._found[0][1]


def shared_by(run: Callable[[], Finished]) -> Shared | None:
    """The pass, if it is one that gradients pass through; networks that refuse it are run for each method alone."""
    try:
        made = run()
    except (VitreousError, RuntimeError) as error:
        if out_of_memory(error) or isinstance(error, InputError):  # an image that is not finite
            raise
        return None
    whole = made.leaf is not None and made.leaf.requires_grad and made.output.requires_grad
    return Shared(made) if whole else None


def outputs(run: Finished) -> Finished:
    """What is left of a pass without its layers and graph."""
    return rows_of_run(run, slice(None))


def is_same(one: Target, other: Target) -> bool:
    """Whether two targets are one, or are equal and of a kind that is nothing but class numbers."""
    return one is other or (type(one) is type(other) and isinstance(one, Class | Top) and one == other)


def in_groups(chosen: Chosen) -> list[list[str]]:
    """The methods in an order in which those that read the same forward pass follow one another.

    First come those of the model's own gradient, and those that only look at its attention.
    """
    groups: dict[str, list[str]] = {MODEL: []}
    for name, (declared, values) in chosen.items():
        looks = declared.attention and not declared.targeted
        graph = MODEL if looks else declared.graph_of(values) or f"only {name}"
        groups.setdefault(graph, []).append(name)
    return [names for names in groups.values() if names]


def pays(chosen: Chosen, alone: bool = False) -> bool:
    """Whether a shared pass is worth making: one method reads the model's own gradient, another this or its attention.

    `alone`: one method is enough, as where a forward pass is made for the output anyway.
    """
    reads = any(declared.graph_of(values) == MODEL for declared, values in chosen.values())
    return reads and (alone or len(in_groups(chosen)[0]) > 1)
