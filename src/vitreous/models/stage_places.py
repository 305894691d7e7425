"""Where in the image the tokens of every layer lie, in a model whose layers differ in their tokens.

In the graph of one run in which every query is given its own value only, so that attention mixes no tokens: those of
the first layer by the pixels that they are made of, others by the tokens of the layer before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.capture.capture import Capture, ModuleNames
from vitreous.capture.entries import AtEntries, Entry, Unfrozen
from vitreous.capture.survey import Met
from vitreous.capture.unfused import PRODUCTS
from vitreous.models.slot_tokens import Pairs, centres
from vitreous.models.stages import Rows, Slots, covered, scale_of
from vitreous.models.survey_run import Network, noise_images
from vitreous.models.token_places import Grid, Places

NEAR, MOST = 0.9, 0.9  # cells from its place, for so many: what overlaps much is measured roughly
LEAST = 0.25  # of the distance between places that must be left


@dataclass(frozen=True, eq=False)
class Step:
    """One attention call: the tokens that enter it, and those that its slots are made of (None: overlapping ones)."""

    call: Attention
    met: Met
    rows: Rows
    queries: Pairs | None
    keys: Pairs | None


class Unplaced(Exception):
    """Why a layer's tokens cannot be placed, as the end of a sentence."""


def query_of(call: Attention) -> Tensor | None:
    """Q in the graph, [B H n d]."""
    if call.q is not None:
        return call.q
    if call.factors is None or call.factors[0].ndim != call.node.ndim:
        return None
    folded = call.fold(call.factors[0])
    return folded if folded.shape[:3] == call.shape[:3] else None


class Unmixed(Capture):
    """A capture in which every query is given the value of its own token, or nothing where it has none."""

    def __init__(self, steps: Sequence[Step], names: ModuleNames, images: int) -> None:
        super().__init__(names, images)
        self.steps = {step.call.number: step for step in steps}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self.seen
        out = super().__torch_function__(func, types, args, kwargs)
        return self.own(out) if func in PRODUCTS and self.seen > before else out

    def attend(self, *args: Any, **options: Any) -> Tensor:
        return self.own(super().attend(*args, **options))

    def own(self, out: Tensor) -> Tensor:
        """What the attention that was just recorded returns instead."""
        assert self.last is not None
        found, step = torch.zeros_like(out), self.steps.get(self.last.number)
        values = None if step is None else own_values(step, self.last, self.images)
        if values is not None:
            folded = self.last.fold(found)
            folded.copy_(values.reshape(folded.shape))
        return found


class Entered(AtEntries):
    """Keeps the tokens of every norm and linear call."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[Entry, Tensor] = {}

    def met(self, entry: Entry, tokens: Tensor) -> Tensor:
        self.tokens[entry] = tokens
        return tokens


def own_values(step: Step, call: Attention, images: int) -> Tensor | None:
    """The value of each query's own token, in the axes of the attention; the query where values are pooled."""
    query, values, rows = query_of(call), call.v, step.rows
    if step.queries is None or step.keys is None or len(step.keys.slot) > step.keys.slot.max() + 1:
        return query if query is not None and query.shape[-1] == values.shape[-1] else None
    slot_of = torch.full((1 + max(step.queries.last, step.keys.last),), -1, device=values.device)
    slot_of[step.keys.token] = step.keys.slot
    asked, kept = step.call.shape[2:]
    index = torch.full((rows.windows * asked,), -1, device=values.device)
    index[step.queries.slot] = slot_of[step.queries.token]
    apart = rows.arrange(values, images).reshape(images, rows.windows, rows.heads, kept, -1)
    flat = apart.transpose(2, 3).flatten(1, 2)  # [B W·m H d]
    own = flat[:, index.clamp_min(0)] * (index >= 0).to(flat)[:, None, None]  # [B W·n H d]
    own = own.reshape(images, rows.windows, asked, rows.heads, -1).transpose(2, 3)  # [B W H n d]
    return own if rows.heads_inside else own.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Placed:
    """The grid of a layer's tokens, and the place of each token."""

    grid: Grid
    special: int
    place: Tensor  # [N]
    queries: Slots | None = None  # of slots that pool overlapping tokens
    keys: Slots | None = None
    fresh: bool = False  # its special tokens are not those of the layer before: the text of a language model

    def lines(self) -> tuple[Tensor, Tensor]:
        """The row and the column of each token; NaN of special tokens."""
        cell = (self.place - self.special).double()
        cell[cell < 0] = torch.nan
        return (cell / self.grid[1]).floor(), cell % self.grid[1]


def place_tokens(
    model: Network, steps: Sequence[Step], patches: Places | None, grids: list[Grid], size: tuple[int, int]
) -> list[Placed]:
    """Where the tokens of every layer lie: those of the first by pixels, others by the tokens of the layer before."""
    image = noise_images(model, size)[:1].requires_grad_()
    entered = run_unmixed(model, image, steps)
    found: list[Placed] = []
    for step in steps:
        tokens = entered[step.met.entry]
        shapes = [grid for grid in own_grids(step.met.tokens, grids) if math.prod(grid) > 0]
        if found:
            before = [entered[one.met.entry] for one in steps[: len(found)]]
            here = place_by_earlier(by_image(tokens, 1), before, found, shapes)
            here = here and replace(here, fresh=is_fresh(here, found[-1], by_image(tokens, 1), before[-1]))
        elif patches is not None:
            here = Placed(patches.grid, *placed_at(torch.tensor(patches.tokens), by_image(tokens, 1).shape[1]))
        else:
            lines = [torch.arange(float(size[0]))[:, None].expand(size), torch.arange(float(size[1])).expand(size)]
            here = place_made(by_image(tokens, 1), image, lines, size, shapes, 1)
        here = None if here is None else pooled(step, here, shapes)
        if here is None:
            said = "merges or moves its tokens in a way that cannot be traced to the image"
            raise Unplaced(f"{said} (before {step.call.name or 'an attention'})")
        found.append(here)
    return found


def place_by_earlier(
    tokens: Tensor, entered: Sequence[Tensor], found: Sequence[Placed], shapes: list[Grid]
) -> Placed | None:
    """By the tokens of the layer before, or of an earlier one where only CLS passes through that (class attention)."""
    for before, placed in reversed(list(zip(entered, found))):
        if torch.autograd.grad(tokens.sum(), [before], retain_graph=True, allow_unused=True)[0] is None:
            continue
        lines = [in_axes(line, before) for line in placed.lines()]
        here = place_made(tokens, before, lines, placed.grid, shapes, 1)
        if here is not None:
            return here
    return None


def is_fresh(here: Placed, last: Placed, tokens: Tensor, before: Tensor) -> bool:
    """Whether no special token is made of those of the layer before."""
    if not here.special or not last.special:
        return True
    own = tokens[:, here.place < here.special]
    grad = torch.autograd.grad(own.square().sum(), [before], retain_graph=True, allow_unused=True)[0]
    return grad is None or not bool(by_image(grad, 1)[:, last.place < last.special].any())


def run_unmixed(model: Network, image: Tensor, steps: Sequence[Step]) -> dict[Entry, Tensor]:
    """The tokens of a run in which attention mixes no tokens, in its graph."""
    entered = Entered()
    with model.still() as still, torch.inference_mode(False), torch.enable_grad(), Unfrozen():
        with Unmixed(steps, still.names, len(image)), entered:
            model.run(image)
    return entered.tokens


def by_image(tokens: Tensor, images: int) -> Tensor:
    """Tokens in the axes of a model as [B N D]."""
    if tokens.ndim == 2:
        return tokens.reshape(images, -1, tokens.shape[-1])
    return tokens.movedim(0 if tokens.shape[0] == images else 1, 0).flatten(1, -2)


def in_axes(line: Tensor, tokens: Tensor) -> Tensor:
    """A number for each token of one image, in the axes of the model's tokens, to be multiplied with them."""
    return line.reshape(*tokens.shape[:-1], 1)


def place_made(
    made: Tensor, source: Tensor, lines: Sequence[Tensor], fine: Grid, grids: list[Grid], axis: int
) -> Placed | None:
    """The grid on which tokens (or slots) lie, and the place of each, by the rows and columns of what they are of."""
    for times in (1, 4, 16):  # more exact, where this was not enough
        rows, columns = centres(made, source, [line.to(source.device) for line in lines], axis, times)
        located = (~rows.isnan()).nonzero().flatten().cpu()
        centre = torch.stack([rows, columns]).cpu()[:, located]  # [2 cells]
        for grid in [grid for grid in dict.fromkeys(grids) if math.prod(grid) == len(located)]:
            order = cells_at(centre, fine, grid)
            if order is not None:
                return Placed(grid, *placed_at(located[order], len(rows)))
    return None


def cells_at(centre: Tensor, fine: Grid, grid: Grid) -> Tensor | None:
    """Which of these places, given in cells of a fine grid, is that of each cell of a grid, row by row."""
    scales = torch.tensor([scale_of(count, into) for count, into in zip(fine, grid)])[:, None]
    place = (centre + 0.5) / scales  # whole numbers apart, where nothing overlaps
    phase = torch.polar(torch.ones_like(place), 2 * math.pi * place).mean(1, keepdim=True).angle() / (2 * math.pi)
    row, column = (place - phase - (place - phase).amin(1, keepdim=True).round()).round().long()
    cell = row * grid[1] + column
    by_row = torch.arange(math.prod(grid))
    order: Tensor = cell.argsort()
    if bool((column < grid[1]).all()) and cell[order].equal(by_row):
        return order
    off = [off_line(*one) for one in zip(place, (by_row // grid[1], by_row % grid[1]))]
    near = (torch.stack(off).amax(0) < NEAR).double().mean()
    return by_row if float(near) > MOST else None


def off_line(place: Tensor, line: Tensor) -> Tensor:
    """How far each place is from its line, where overlaps draw all of them towards the middle."""
    place, line = place - place.mean(), (line - line.double().mean())
    slope = (place @ line) / line.square().sum().clamp_min(1)
    return (place / slope.clamp_min(LEAST) - line).abs() if line.any() else torch.zeros_like(line)


def placed_at(tokens: Tensor, count: int) -> tuple[int, Tensor]:
    """How many special tokens there are, and the place of each token, if these are those of the cells."""
    special = count - len(tokens)
    place = torch.full((count,), -1)
    place[tokens] = special + torch.arange(len(tokens))
    place[(place < 0).nonzero().flatten()] = torch.arange(special)
    return special, place


def own_grids(tokens: Tensor, grids: list[Grid]) -> list[Grid]:
    return [(tokens.shape[1], tokens.shape[2]), *grids] if tokens.ndim == 4 else grids


def pooled(step: Step, placed: Placed, grids: list[Grid]) -> Placed | None:
    """The same with the places of slots that pool overlapping tokens, all in one window."""
    found: list[Slots | None] = []
    for made, slots in ((step.queries, query_of(step.call)), (step.keys, step.call.v)):
        where = None
        if made is None and slots is not None and step.rows.windows == 1:
            tokens = step.met.tokens
            lines = [in_axes(line, tokens[:1]).to(tokens) for line in placed.lines()]
            where = place_made(slots, tokens, lines, placed.grid, grids, 2)
        if made is None and (where is None or where.special != placed.special):
            return None
        found.append(None if where is None else covered_slots(placed, where))
    return replace(placed, queries=found[0], keys=found[1])


def covered_slots(tokens: Placed, slots: Placed) -> Slots:
    """The places that each slot covers."""
    covers = covered(tokens.grid, slots.grid, slots.special, tokens.special)
    slot_of = slots.place.argsort()  # the slot at each place
    return replace(covers, slot=slot_of[covers.slot])
