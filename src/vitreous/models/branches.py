"""Networks of several branches that see the image in patches of different sizes and exchange their CLS tokens.

CrossViT: each branch attends over its own tokens; then its CLS token asks the patches of the other branch. All of it is
one chain of layers over the tokens of all branches together, so it is followed like any other (stages.py). The map is
that of one branch; the CLS tokens and the patches of the others are special tokens, through which attention passes:

    places of a layer = CLS tokens, patches of the other branches, cells of the branch that is shown

Measured in one run in which attention mixes no tokens: the pixels of every patch token, and the CLS tokens that each
CLS token is made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitreous.errors import ModelError
from vitreous.models.layout import Layout
from vitreous.models.stage_places import (
    Placed,
    Step,
    Unplaced,
    by_image,
    own_grids,
    place_by_earlier,
    place_made,
    run_unmixed,
)
from vitreous.models.stages import Stage
from vitreous.models.stages_run import find_step, merged_grids, slots_at
from vitreous.models.survey_run import Network, Seen, gradient, noise_images
from vitreous.models.token_places import Grid, even


@dataclass(frozen=True, eq=False)
class Branches:
    """The attention calls of a network, the grid of each, and the CLS token that each has."""

    steps: tuple[Step, ...]
    placed: tuple[Placed, ...]
    cls: tuple[int, ...]  # which CLS token, by layer

    @property
    def grids(self) -> list[Grid]:
        """Those of the branches, in the order in which they are computed."""
        return list(dict.fromkeys(one.grid for one in self.placed))

    @property
    def tokens(self) -> int:
        """How many CLS tokens there are."""
        return max(self.cls) + 1

    def stages(self, branch: int) -> tuple[Stage, ...]:
        """The layers, as one of the branches is shown."""
        shown = self.grids[branch]
        starts, special = {}, self.tokens
        for grid in self.grids:
            if grid != shown:
                starts[grid] = special
                special += math.prod(grid)
        starts[shown] = special
        places = special + math.prod(shown)
        found = []
        for step, here, cls in zip(self.steps, self.placed, self.cls):
            place = torch.where(here.place < here.special, cls, here.place - here.special + starts[here.grid])
            _, _, n, m = step.call.shape
            queries = slots_at(step.queries, step.rows.windows, n, places, place)
            keys = slots_at(step.keys, step.rows.windows, m, places, place)
            found.append(Stage(shown, special, queries, keys, None, step.rows))
        return tuple(found)


def find_branches(
    model: Network, seen: Seen, read: list[int], ends: list[Tensor], cuts: list[Grid], size: tuple[int, int]
) -> Layout | None:
    """The layout of the branch that was asked for, or on which the output depends most; None if there are none."""
    asked: int | None = getattr(model, "branch", None)
    try:
        found = measured(model, [find_step(seen, number) for number in read], cuts, size)
    except Unplaced:
        found = None
    if found is None:
        if asked is not None:
            raise ModelError(
                f"{model.name} has no branches of different patches that can be followed; leave branch= out"
            )
        return None
    count = len(found.grids)
    if asked is not None and not 0 <= asked < count:
        listed = ", ".join(f"{i} ({h}×{w} patches)" for i, (h, w) in enumerate(found.grids))
        raise ModelError(f"{model.name} has no branch {asked}: give one of {listed}")
    weights = [weight_of(found, grid, ends) for grid in found.grids]
    branch = weights.index(max(weights)) if asked is None else asked
    stages, grid = found.stages(branch), found.grids[branch]
    lines = [even(side, lines) for side, lines in zip(size, grid)]
    patch = max(end - start for start, end in lines[0]), max(end - start for start, end in lines[1])
    told = " and ".join(f"{h}×{w}" for h, w in found.grids)
    return Layout(
        grid,
        patch,
        stages[0].special,
        read_cls(found, ends),
        rows=lines[0],
        columns=lines[1],
        numbers=tuple(read),
        calls=read[-1] + 1,
        layers=len(stages),
        mixed=any(step.call.mixed for step in found.steps),
        stages=stages,
        obstacle=f"runs {count} branches that exchange their CLS tokens ({told} patches; branch {branch} is shown)",
    )


def measured(model: Network, steps: Sequence[Step], cuts: list[Grid], size: tuple[int, int]) -> Branches | None:
    """The branches, if the layers are of patches of different sizes with one CLS token each."""
    image = noise_images(model, size)[:1].requires_grad_()
    entered = run_unmixed(model, image, steps)
    lines = [torch.arange(float(size[0]))[:, None].expand(size), torch.arange(float(size[1])).expand(size)]
    placed: list[Placed] = []
    cls: list[int] = []
    for step in steps:
        tokens, grids = by_image(entered[step.met.entry], 1), own_grids(step.met.tokens, merged_grids(cuts))
        here = place_by_earlier(tokens, [entered[one.met.entry] for one in steps], placed, grids)
        here = here or place_made(tokens, image, lines, size, grids, 1)
        if here is None or here.special != 1 or step.queries is None or step.keys is None or step.rows.windows != 1:
            return None
        placed.append(here)
        cls.append(same_cls([entered[one.met.entry] for one in steps], placed, cls))
    found = Branches(tuple(steps), tuple(placed), tuple(cls))
    return found if len(found.grids) > 1 else None


def same_cls(entered: Sequence[Tensor], placed: Sequence[Placed], cls: Sequence[int]) -> int:
    """Which CLS token the last of these layers has: that of the latest layer that it is made of, or a new one."""
    last = len(placed) - 1
    token = entered[last].reshape(len(placed[last].place), -1)[placed[last].place.argmin()]
    made = token @ torch.randn(len(token), generator=torch.Generator().manual_seed(5)).to(token)  # norms fix their sum
    for i in reversed(range(last)):
        (grad,) = torch.autograd.grad(made, [entered[i]], retain_graph=True, allow_unused=True)
        if grad is not None and bool(grad.reshape(len(placed[i].place), -1)[placed[i].place.argmin()].any()):
            return cls[i]
    return max(cls, default=-1) + 1


def weight_of(found: Branches, grid: Grid, ends: list[Tensor]) -> float:
    """How much the output depends on the patches of a branch: the size of the gradient at its first layer."""
    first = next(step for step, here in zip(found.steps, found.placed) if here.grid == grid)
    grad = gradient(ends, first.met.tokens)
    return 0.0 if grad is None else float(grad.float().norm())


def read_cls(found: Branches, ends: list[Tensor]) -> tuple[int, ...]:
    """The CLS tokens that the output depends on."""
    read = set()
    for cls in range(found.tokens):
        last = max(i for i, one in enumerate(found.cls) if one == cls)
        grad = gradient(ends, found.steps[last].call.node)
        if grad is not None and bool(grad.any()):
            read.add(cls)
    return tuple(sorted(read)) or tuple(range(found.tokens))
