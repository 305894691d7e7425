"""Measure the stages of a model with windows, pooled keys or merged patches; see stages.py for what they are.

1. In the graph of the layout run: the tokens that the slots of every attention are made of (slot_tokens.py).
2. In one run of coded images (token_places.py) in which every query is given its own value only, so that no token
   learns of another: where in the image the tokens of every layer lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor

import torch
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.capture.attention_backward import AtEntries, Entry
from vitreous.capture.between_tokens import attends_tokens
from vitreous.capture.capture import Capture
from vitreous.capture.survey import Met
from vitreous.models.data_flow import DataFlow
from vitreous.models.slot_tokens import Pairs, rows_of, slots_of_tokens, tokens_of_slots
from vitreous.models.stages import Rows, Slots, Stage, covered
from vitreous.models.survey_run import Network, Seen, noise_images
from vitreous.models.token_places import Grid, Places, coded, coded_places, cut_places, even


@dataclass(frozen=True, eq=False)
class Step:
    """One attention call: the tokens that enter it, and those that its slots are made of (None: overlapping ones)."""

    call: Attention
    met: Met
    rows: Rows
    queries: Pairs | None
    keys: Pairs | None


@dataclass(frozen=True, eq=False)
class Found:
    """The stages, the attention calls that they are, and the patches of the first."""

    stages: tuple[Stage, ...]
    steps: tuple[Step, ...]
    placed: tuple[Placed, ...]
    patches: Places

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(step.call.number for step in self.steps)

    @property
    def orders(self) -> dict[int, tuple[Grid, tuple[int, ...]]]:
        """The grid of each layer and the token of each of its cells, by the number of tokens."""
        return {len(one.place): (one.grid, tuple(one.place.argsort()[one.special :].tolist())) for one in self.placed}


class Unplaced(Exception):
    """Why a layer's tokens cannot be placed, as the end of a sentence."""


def find_stages(
    model: Network, seen: Seen, read: list[int], flow: DataFlow, cuts: list[Grid], size: tuple[int, int]
) -> Found | str:
    """The stages of these attention calls, or why they cannot be found; `cuts`: grids that patches may be cut into."""
    try:
        steps = [step for number in read if (step := find_step(seen, number)) is not None]
        if not any(step.queries is None or step.queries.several for step in steps):
            return "attends between channels, not between tokens"
        refuse_side_reads(flow, steps)
        patches = cut_places(by_image(steps[0].met.tokens, seen.count), seen.images)
        fine = patches.grid if patches is not None else finest(steps[0].met.tokens, cuts, seen.count)
        placed = place_tokens(model, steps, fine, merged_grids(fine, cuts), size)
        if patches is None:
            patches = Places(fine, (), *(even(side, count) for side, count in zip(size, fine)))
        return Found(tuple(join(steps, placed)), tuple(steps), tuple(placed), patches)
    except Unplaced as error:
        return str(error)


def finest(tokens: Tensor, cuts: list[Grid], images: int) -> Grid:
    """The grid of the first layer's tokens."""
    count = by_image(tokens, images).shape[1]
    grids = [grid for grid in own_grids(tokens, cuts) if math.prod(grid) <= count]
    if not grids:
        raise Unplaced("makes its tokens in a way that cannot be traced to patches of the image")
    return max(grids, key=math.prod)


def merged_grids(grid: Grid, others: Sequence[Grid]) -> list[Grid]:
    """The grids that later stages may have, which merge patches."""
    scaled = [
        (up(h / scale), up(w / scale))
        for h, w in (grid, *others)
        for scale in (1, 2, 4, 8, 16, 32)
        for up in (ceil, floor)
    ]
    return [found for found in dict.fromkeys(scaled) if min(found) > 0]


# ----------------------------------------------------------------------------------- the tokens of every attention


def find_step(seen: Seen, number: int) -> Step | None:
    """What one attention call asks and reads; None if it attends between channels: that moves nothing elsewhere."""
    call, images = seen.calls[number], seen.count
    query, where = query_of(call), f"in {call.name or 'its own code'}"
    if query is None or not query.requires_grad or not call.v.requires_grad:
        raise Unplaced(f"has queries that cannot be traced to its tokens ({where})")
    met = entering(seen.survey.recent[number], query, call.v, images)
    if met is None:
        raise Unplaced(f"has an attention whose queries and keys are made of different tokens ({where})")
    whose = [tokens_of_slots(slots, met.tokens, images) for slots in (query, call.v)]
    known = next((one for one in reversed(whose) if one is not None), None)
    if known is None and attends_tokens(call, met.tokens) is False:
        return None
    b, heads, _, _ = call.shape
    rows = rows_of(known[0]) if known is not None else Rows(b // images, heads)
    if any(one is not None and rows_of(one[0]) != rows for one in whose):
        raise Unplaced(f"has queries and keys that are grouped in different windows ({where})")
    made = [
        slots_of_tokens(rows.arrange(slots, images), met.tokens, images) if one is None else pairs(one[0], rows)
        for one, slots in zip(whose, (query, call.v))
    ]
    return Step(call, met, rows, made[0], made[1])


def query_of(call: Attention) -> Tensor | None:
    """Q in the graph, [B H n d]."""
    if call.q is not None:
        return call.q
    if call.factors is None or call.factors[0].ndim != call.node.ndim:
        return None
    folded = call.fold(call.factors[0])
    return folded if folded.shape[:3] == call.shape[:3] else None


def entering(recent: list[Met], query: Tensor, values: Tensor, images: int) -> Met | None:
    """The last tokens that both queries and values are made of: normalised ones, else those of a linear layer."""
    for kind in ("norm", "linear"):
        for met in reversed(recent):
            shape = met.tokens.shape
            if met.entry[0] != kind or len(shape) not in (3, 4) or images not in shape[: len(shape) - 2]:
                continue
            if met.tokens.requires_grad and all(depends(one, met.tokens) for one in (query, values)):
                return next(one for one in recent if one.entry[0] == kind and one.tokens is met.tokens)
    return None


def depends(made: Tensor, source: Tensor) -> bool:
    (grad,) = torch.autograd.grad(made.sum(), [source], retain_graph=True, allow_unused=True)
    return grad is not None and bool(grad.any())


def pairs(found: Tensor, rows: Rows) -> Pairs:
    """The slots [rows n] that are made of one token each."""
    flat = rows.arrange(found[:, None, :, None].transpose(0, 1), 1)[:, 0, :, 0].flatten()  # [W·n]
    slot = (flat >= 0).nonzero().flatten()
    return Pairs(slot, flat[slot])


def refuse_side_reads(flow: DataFlow, steps: Sequence[Step]) -> None:
    """Raise if the output depends on the tokens of a layer in another way than through the next layer."""
    for one, other in pairwise(steps):
        if not flow.through(one.call.number, other.call.number):
            raise Unplaced(f"reads the tokens of several stages (also those of {one.call.name or 'an earlier layer'})")


# ------------------------------------------------------------------------------------------ where their tokens lie


class Unmixed(Capture):
    """A capture in which every query is given the value of its own token, or nothing where it has none."""

    def __init__(self, steps: Sequence[Step], names: Mapping[int, str], images: int) -> None:
        super().__init__(names, images)
        self.steps = {step.call.number: step for step in steps}
        self.slots: dict[int, tuple[Tensor | None, Tensor]] = {}  # queries and values of each layer, as they came

    def keep(self, call: Attention) -> None:
        super().keep(call)
        self.slots[call.number] = query_of(call), call.v
        out = call.out
        assert out.data_ptr() == call.node.data_ptr(), "folded without a copy"
        step = self.steps.get(call.number)
        own = None if step is None else own_values(step, call.v, self.images)
        if own is None:
            out.zero_()
        else:
            out.copy_(own.reshape(out.shape))


class Entered(AtEntries):
    """Keeps the tokens of every norm and linear call."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[Entry, Tensor] = {}

    def met(self, entry: Entry, tokens: Tensor) -> Tensor:
        self.tokens[entry] = tokens
        return tokens


def own_values(step: Step, values: Tensor, images: int) -> Tensor | None:
    """The value of each query's own token, in the axes of the attention."""
    if step.queries is None or step.keys is None:
        return None
    rows, keys = step.rows, values.shape[2]
    arranged = rows.arrange(values, images)  # [B·W H m d]
    count = 1 + int(max(step.queries.token.max(), step.keys.token.max()))
    slot_of = torch.full((count,), -1, device=values.device)
    slot_of[step.keys.token] = step.keys.slot
    asked = step.call.shape[2]
    index = torch.full((rows.windows * asked,), -1, device=values.device)
    index[step.queries.slot] = slot_of[step.queries.token]
    flat = arranged.reshape(images, rows.windows, rows.heads, keys, -1).transpose(2, 3).flatten(1, 2)  # [B W·m H d]
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


def place_tokens(
    model: Network, steps: Sequence[Step], fine: Grid, grids: list[Grid], size: tuple[int, int]
) -> list[Placed]:
    """Where the tokens of every layer lie."""
    found: list[Placed | None] = [None] * len(steps)
    for centred in (True, False):
        images = coded(noise_images(model, size), fine, centred)
        entered, seen = run_unmixed(model, images, steps)
        for i, step in enumerate(steps):
            tokens = by_image(entered.tokens[step.met.entry], len(images))
            found[i] = found[i] or place_layer(step, tokens, seen.slots[step.call.number], fine, grids, size)
        if all(found):
            break
    lost = next((step.call for step, one in zip(steps, found) if one is None), None)
    if lost is not None:
        raise Unplaced(f"merges or moves its tokens in a way that cannot be traced to the image (before {lost.name})")
    return [one for one in found if one is not None]


def run_unmixed(model: Network, images: Tensor, steps: Sequence[Step]) -> tuple[Entered, Unmixed]:
    """A run of images whose tokens are not mixed by attention."""
    with model.still() as still, torch.inference_mode(False), torch.no_grad():
        with Unmixed(steps, still.names, len(images)) as seen, Entered() as entered:
            model.run(images)
    return entered, seen


def by_image(tokens: Tensor, images: int) -> Tensor:
    """Tokens in the axes of a model as [B N D]."""
    return tokens.movedim(0 if tokens.shape[0] == images else 1, 0).flatten(1, -2)


def place_layer(
    step: Step,
    tokens: Tensor,
    slots: tuple[Tensor | None, Tensor],
    fine: Grid,
    grids: list[Grid],
    size: tuple[int, int],
) -> Placed | None:
    found = coded_places(tokens, fine, own_grids(step.met.tokens, grids), size)
    if found is None:
        return None
    count, cells = tokens.shape[1], math.prod(found.grid)
    special = count - cells
    place = torch.full((count,), -1)
    place[list(found.tokens)] = special + torch.arange(cells)
    place[(place < 0).nonzero().flatten()] = torch.arange(special)
    placed = Placed(found.grid, special, place)
    pooled = [
        pooled_places(step, placed, some, fine, grids, size) if made is None else None
        for made, some in zip((step.queries, step.keys), slots)
    ]
    if any(made is None and where is None for made, where in zip((step.queries, step.keys), pooled)):
        return None
    return replace(placed, queries=pooled[0], keys=pooled[1])


def own_grids(tokens: Tensor, grids: list[Grid]) -> list[Grid]:
    return [(tokens.shape[1], tokens.shape[2]), *grids] if tokens.ndim == 4 else grids


def pooled_places(
    step: Step, placed: Placed, slots: Tensor | None, fine: Grid, grids: list[Grid], size: tuple[int, int]
) -> Slots | None:
    """The places of slots that pool overlapping tokens, all in one window: by geometry."""
    if slots is None or step.rows.windows != 1:
        return None
    flat = slots.transpose(1, 2).flatten(2)
    found = coded_places(flat, fine, grids, size)
    if found is None or flat.shape[1] - math.prod(found.grid) != placed.special:
        return None
    covers = covered(placed.grid, found.grid, placed.special, placed.special)
    slot_of = torch.full((flat.shape[1],), -1)
    slot_of[placed.special + torch.arange(len(found.tokens))] = torch.tensor(found.tokens)
    others = sorted(set(range(flat.shape[1])) - set(found.tokens))
    slot_of[: placed.special] = torch.tensor(others, dtype=torch.long)
    return Slots(1, flat.shape[1], covers.places, slot_of[covers.slot], covers.place)


# --------------------------------------------------------------------------------------------------- put together


def join(steps: Sequence[Step], placed: Sequence[Placed]) -> list[Stage]:
    """A stage for each layer."""
    stages: list[Stage] = []
    for step, here, behind in zip(steps, placed, [*placed[1:], None]):
        _, _, n, m = step.call.shape
        places = here.special + math.prod(here.grid)
        queries = here.queries or slots_at(step.queries, step.rows.windows, n, places, here.place)
        merged = None
        if behind is not None and (behind.grid, behind.special) != (here.grid, here.special):
            if behind.grid[0] > here.grid[0] or behind.grid[1] > here.grid[1] or behind.special < here.special:
                raise Unplaced(f"makes more tokens of fewer on the way (behind {step.call.name})")
            merged = covered(here.grid, behind.grid, behind.special, here.special).leaving(queries)
        keys = here.keys or slots_at(step.keys, step.rows.windows, m, places, here.place)
        stages.append(Stage(here.grid, here.special, queries, keys, merged, step.rows))
    return stages


def slots_at(made: Pairs | None, windows: int, size: int, places: int, place: Tensor) -> Slots:
    assert made is not None, "what is not made of single tokens has been placed"
    return Slots(windows, size, places, made.slot.cpu(), place[made.token.cpu()])
