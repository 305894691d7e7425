"""Measure the stages of a model with windows, pooled keys or merged patches; see stages.py for what they are.

1. In the graph of the layout run: the tokens that the slots of every attention are made of (slot_tokens.py).
2. Where in the image the tokens of every layer lie (stage_places.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

import torch
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.capture.survey import Met
from vitreous.errors import ModelWarning
from vitreous.models.data_flow import DataFlow
from vitreous.models.output import Form
from vitreous.models.readers import Readers, find_readers
from vitreous.models.slot_tokens import Pairs, centres, numbered, rows_of, slots_of_tokens, tokens_of_slots
from vitreous.models.stage_places import Placed, Step, Unplaced, by_image, place_tokens, query_of
from vitreous.models.stages import Rows, Slots, Stage, covered
from vitreous.models.survey_run import Network, Seen, gradient
from vitreous.models.token_places import Grid, Places, cut_places, even

ALIKE = 0.1  # of all tokens: channels are made of places that differ less


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

    def readers(self, seen: Seen) -> Readers:
        """The places behind the last layer that each word of an output [B P C] is read from."""
        step, slots = self.steps[-1], self.stages[-1].queries
        found = find_readers(seen.output, step.call.node, lambda t: step.rows.arrange(step.call.fold(t), seen.count))
        place = dict(zip(slots.slot.tolist(), slots.place.tolist()))
        return () if found is None or slots.windows > 1 else tuple(tuple(place[i] for i in some) for some in found)

    @property
    def orders(self) -> dict[int, tuple[Grid, tuple[int, ...]]]:
        """The grid of each layer and the token of each of its cells, by the number of tokens, where that tells them."""
        found: dict[int, set[tuple[Grid, tuple[int, ...]]]] = {}
        for one in self.placed:
            order = one.grid, tuple(one.place.argsort()[one.special :].tolist())
            found.setdefault(len(one.place), set()).add(order)
        return {count: next(iter(orders)) for count, orders in found.items() if len(orders) == 1}


def find_stages(
    model: Network, seen: Seen, read: list[int], flow: DataFlow, cuts: list[Grid], size: tuple[int, int]
) -> Found | str:
    """The stages of these attention calls, or why they cannot be found; `cuts`: grids that patches may be cut into."""
    try:
        steps = [step for step in (find_step(seen, number) for number in read) if not between_channels(step)]
        if not any(step.queries is None or step.queries.several for step in steps):
            return "attends between channels, not between tokens"
        check_side_reads(model, flow, steps)
        patches = cut_places(by_image(steps[0].met.tokens, seen.count), seen.images)
        grids = merged_grids(([] if patches is None else [patches.grid]) + cuts)
        placed = place_tokens(model, steps, patches, grids, size)
        if patches is None:
            grid = placed[0].grid
            patches = Places(grid, (), *(even(side, count) for side, count in zip(size, grid)))
        return Found(tuple(join(steps, placed)), tuple(steps), tuple(placed), patches)
    except Unplaced as error:
        return str(error)


def merged_grids(grids: Sequence[Grid]) -> list[Grid]:
    """These grids, and what they become where patches are merged."""
    scaled = [
        (whole(h / scale), whole(w / scale))
        for scale in (1, 2, 4, 8, 16, 32)
        for h, w in grids
        for whole in (ceil, floor)
    ]
    return [found for found in dict.fromkeys(scaled) if min(found) > 0]


# ----------------------------------------------------------------------------------- the tokens of every attention


def find_step(seen: Seen, number: int) -> Step:
    """What one attention call asks and reads."""
    call, images = seen.calls[number], seen.count
    query, where = query_of(call), f"in {call.name or 'its own code'}"
    if query is None or not query.requires_grad or not call.v.requires_grad:
        raise Unplaced(f"has queries that cannot be traced to its tokens ({where})")
    found = [entering(seen.survey.recent[number], query, call.v, images, kind) for kind in ("norm", "linear")]
    steps = (made_of(call, query, met, images, where) for met in found if met is not None)
    step = next((step for step in steps if asks_for_tokens(step, seen)), None)
    if step is None and any(found):
        raise Unplaced(f"has queries that are made of no token that enters it ({where})")
    if step is None:
        raise Unplaced(f"has an attention whose queries and keys are made of different tokens ({where})")
    return step


def made_of(call: Attention, query: Tensor, met: Met, images: int, where: str) -> Step:
    """An attention call with the tokens that its slots are made of."""
    whose = slots_made_of(query, call.v, met.tokens, images)
    known = next((one for one in reversed(whose) if one is not None), None)
    b, heads, _, _ = call.shape
    rows = rows_of(known[0]) if known is not None else Rows(b // images, heads)
    if any(one is not None and rows_of(one[0]) != rows for one in whose):
        raise Unplaced(f"has queries and keys that are grouped in different windows ({where})")
    made = [
        slots_of_tokens(rows.arrange(slots, images), met.tokens, images) if one is None else pairs(one[0], rows)
        for one, slots in zip(whose, (query, call.v))
    ]
    return Step(call, met, rows, made[0], made[1])


def asks_for_tokens(step: Step, seen: Seen) -> bool:
    """Whether every query that the output depends on is made of a token, so that others are padding."""
    grad = gradient([seen.output], step.call.node)
    if step.queries is None or grad is None:
        return True
    size = step.rows.arrange(step.call.fold(grad), seen.count).double().square().sum((1, 3))  # [B·W n]
    size = size.reshape(seen.count, -1).sum(0)
    size[step.queries.slot] = 0
    return bool((size == 0).all())


def slots_made_of(query: Tensor, values: Tensor, tokens: Tensor, images: int) -> list[Tensor | None]:
    """The tokens of query and key slots; both at once, where that is possible."""
    if query.shape[:3] == values.shape[:3]:
        both = tokens_of_slots(torch.cat([query, values], -1), tokens, images)
        if both is not None:
            return [both, both]
    return [tokens_of_slots(slots, tokens, images) for slots in (query, values)]


def between_channels(step: Step) -> bool:
    """Whether queries and keys are channels, each made of all tokens alike; that moves nothing between tokens."""
    if step.queries is not None or step.keys is not None:
        return False
    numbers = numbered(step.met.tokens, len(step.met.tokens)).double()[..., None]
    (middle,) = centres(step.call.v, step.met.tokens, [numbers / numbers.max()], 2)
    return bool((middle - middle.mean()).abs().max() < ALIKE)


def entering(recent: list[Met], query: Tensor, values: Tensor, images: int, kind: str) -> Met | None:
    """The last tokens that both queries and values are made of: normalised ones ("norm"), or those of a linear layer.

    They are [B N D], [N B D], [B h w D] or, of a packed sequence, [B·N D].
    """
    for met in reversed(recent):
        shape = met.tokens.shape
        packed = len(shape) == 2 and shape[0] > images and shape[0] % images == 0
        if met.entry[0] != kind or not (packed or (len(shape) in (3, 4) and images in shape[: len(shape) - 2])):
            continue
        first, second, *_ = by_image(met.tokens, images)
        if first.equal(second):  # of both images: a norm that is still at zero hides them
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


def check_side_reads(model: Network, flow: DataFlow, steps: Sequence[Step]) -> None:
    """Raise if the output depends on the tokens of a layer in another way than through the next layer.

    A language model that also reads inner layers of its vision tower is followed on the main way, with a warning. An
    output for each place has a read-out of its own for each target, of all layers that it reads.
    """
    numbers = [step.call.number for step in steps]
    triples = zip(steps, numbers, numbers[1:], [*numbers[2:], None])
    beside = [step.call for step, one, other, following in triples if not flow.through(one, other, following)]
    if not beside or model.form is Form.DENSE:
        return
    said = f"reads the tokens of several stages (also those of {beside[0].name or 'an earlier layer'})"
    if model.form is not Form.WORDS:
        raise Unplaced(said)
    warnings.warn(f"{model.name} {said}; maps of attention follow its main way only", ModelWarning, stacklevel=2)


# --------------------------------------------------------------------------------------------------- put together


def join(steps: Sequence[Step], placed: Sequence[Placed]) -> list[Stage]:
    """A stage for each layer."""
    stages: list[Stage] = []
    for step, here, behind in zip(steps, placed, [*placed[1:], None]):
        _, _, n, m = step.call.shape
        places = here.special + math.prod(here.grid)
        queries = here.queries or slots_at(step.queries, step.rows.windows, n, places, here.place)
        merged = None
        if behind is not None and behind.fresh and (behind.special or here.special):
            merged = covered(here.grid, behind.grid, behind.special, here.special, 0)
        elif behind is not None and (behind.grid, behind.special) != (here.grid, here.special):
            if behind.grid[0] > here.grid[0] or behind.grid[1] > here.grid[1] or behind.special < here.special:
                raise Unplaced(f"makes more tokens of fewer on the way (behind {step.call.name})")
            merged = covered(here.grid, behind.grid, behind.special, here.special).leaving(queries)
        keys = here.keys or slots_at(step.keys, step.rows.windows, m, places, here.place)
        stages.append(Stage(here.grid, here.special, queries, keys, merged, step.rows))
    return stages


def slots_at(made: Pairs | None, windows: int, size: int, places: int, place: Tensor) -> Slots:
    assert made is not None, "what is not made of single tokens has been placed"
    return Slots(windows, size, places, made.slot.cpu(), place[made.token.cpu()])
