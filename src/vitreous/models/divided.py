"""Attention of videos over time and over space in turn (TimeSformer), on the grid of all tubelets.

In such a layer the batch holds windows: all tubelets of one place, or all of one frame, and with these a copy of the
special tokens (CLS), whose results are averaged. Measured, not guessed:

1. In the graph of the layout run: a query and its value are made of the token that stands at the same place of the norm
   before them.
2. In one run of coded videos in which every query is given its own value only, so that no token learns of another:
   where in the video these tokens lie. A token that does not move with any tubelet is special.
3. Copies of special tokens are equal, and the output depends on each of them equally.

A repeated special token is one place with a slot in every window; see stages.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vitreous.capture.attention import Attention, near
from vitreous.capture.capture import Capture, ModuleNames
from vitreous.capture.survey import Met
from vitreous.models.blocks import blocks_of
from vitreous.models.slot_tokens import Pairs, tokens_of_slots
from vitreous.models.stage_places import Entered, Placed, Step, Unplaced, query_of
from vitreous.models.stages import Rows, Slots, Stage
from vitreous.models.stages_run import Found, depends
from vitreous.models.survey_run import Network, Seen, gradient, noise_images
from vitreous.models.token_places import Grid, Places, coded_places, digits
from vitreous.types import Extent


def find_divided(
    model: Network, seen: Seen, read: list[int], ends: list[Tensor], places: Places | None, extent: Extent
) -> Found | str:
    """The stages of a model of videos whose layers attend in windows, or why they cannot be found."""
    try:
        if places is None or not places.times:
            raise Unplaced("makes its tokens in a way that cannot be traced to tubelets of the video")
        blocks = blocks_of(model.module, [seen.calls[number] for number in read])
        if len(seen.blocks.read(seen.output, blocks)) > 1:
            raise Unplaced("reads the tokens of several of its blocks")
        steps = [find_step(seen, number) for number in read]
        lattice = len(places.times) * places.grid[0], places.grid[1]
        placed = place_tokens(model, steps, places, lattice, extent)
        special = [copies(seen, step, where, ends) for step, where in zip(steps, placed)]
        most = max(special)
        if not set(special) <= {0, most}:
            raise Unplaced("has other special tokens in some layers than in others")
        stages = tuple(stage_of(step, where, lattice, most) for step, where in zip(steps, placed))
        return Found(stages, tuple(steps), tuple(placed), places)
    except Unplaced as error:
        return str(error)


def find_step(seen: Seen, number: int) -> Step:
    """One attention call, whose slots must be the tokens of the norm before it, one by one."""
    call, where = seen.calls[number], f"in {seen.calls[number].name or 'its own code'}"
    b, heads, n, m = call.shape
    query = query_of(call)
    if n != m or b % seen.count or query is None or not query.requires_grad or not call.v.requires_grad:
        raise Unplaced(f"has an attention whose windows cannot be told ({where})")
    met = normalised(seen.survey.recent[number], query, call.v, (b, n))
    if met is None:
        raise Unplaced(f"has queries that cannot be traced to its tokens ({where})")
    own = torch.arange(n, device=query.device)
    for slots in (query, call.v):
        found = tokens_of_slots(slots, met.tokens, b)  # every window counts as an image: none may learn of another
        if found is None or not (found == own).all():
            raise Unplaced(f"has queries and values that are made of several tokens ({where})")
    windows = b // seen.count
    same = Pairs(torch.arange(windows * n), torch.arange(windows * n))
    return Step(call, met, Rows(windows, heads), same, same)


def normalised(recent: list[Met], query: Tensor, values: Tensor, shape: tuple[int, int]) -> Met | None:
    """The last tokens of this shape that queries and values are made of."""
    for met in reversed(recent):
        fits = met.entry[0] == "norm" and met.tokens.ndim == 3 and tuple(met.tokens.shape[:2]) == shape
        if fits and met.tokens.requires_grad and all(depends(one, met.tokens) for one in (query, values)):
            return met
    return None


# ------------------------------------------------------------------------------------------------- where tokens lie


class Alone(Capture):
    """A capture in which every query is given its own value."""

    def __init__(self, steps: Sequence[Step], names: ModuleNames, images: int) -> None:
        super().__init__(names, images)
        self.numbers = {step.call.number for step in steps}

    def keep(self, call: Attention) -> None:
        super().keep(call)
        out = call.out
        assert out.data_ptr() == call.node.data_ptr(), "folded without a copy"
        if call.number in self.numbers:
            out.copy_(call.v)


def place_tokens(model: Network, steps: Sequence[Step], places: Places, lattice: Grid, extent: Extent) -> list[Placed]:
    """The tubelet of each token of every layer; the special ones come first, in their order."""
    videos = coded_tubelets(noise_images(model, extent), places, lattice)
    with model.still() as still, torch.inference_mode(False), torch.no_grad():
        with Alone(steps, still.names, len(videos)), Entered() as entered:
            model.run(videos)
    found = []
    for step in steps:
        tokens = entered.tokens[step.met.entry]
        tokens = tokens.reshape(len(videos), -1, tokens.shape[-1])
        cells = coded_places(tokens, lattice, [lattice], (extent[0] * extent[1], extent[2]))
        if cells is None:
            raise Unplaced(f"moves its tokens in a way that cannot be traced to the video (before {step.call.name})")
        count = tokens.shape[1]
        special = count - math.prod(lattice)
        place = torch.full((count,), -1)
        place[list(cells.tokens)] = special + torch.arange(math.prod(lattice))
        place[(place < 0).nonzero().flatten()] = torch.arange(special)
        found.append(Placed(lattice, special, place))
    return found


def coded_tubelets(videos: Tensor, places: Places, lattice: Grid) -> Tensor:
    """The first of two videos moved towards the second: nowhere, everywhere, and by each Gray digit of row and column.

    The rows are those of all tubelets, one below the other.
    """
    every = zip((places.times, places.rows, places.columns), (videos.shape[1], *videos.shape[-2:]))
    frame, row, column = (of_spans(spans, size, videos) for spans, size in every)
    inside = (frame >= 0)[:, None, None] & (row >= 0)[:, None] & (column >= 0)  # [T Y X]
    rows = frame[:, None, None] * places.grid[0] + row[:, None]  # [T Y 1]
    base, other = videos[:1].detach(), videos[-1:].detach()
    change = (0.05 if videos.dtype in (torch.float32, torch.float64) else 0.5) * (other - base) * inside[:, None]
    masks = []
    for line, count in ((rows, lattice[0]), (column[None, None], lattice[1])):
        gray = line ^ line >> 1
        masks += [(gray >> k & 1).to(videos)[:, None] for k in reversed(range(digits(count)))]  # [T 1 Y X]
    return torch.cat([base, base + change, *(base + change * mask for mask in masks)])


def of_spans(spans: Sequence[tuple[int, int]], size: int, like: Tensor) -> Tensor:
    """The span that each number below `size` lies in; −1: none."""
    found = torch.full((size,), -1, device=like.device)
    for number, (start, end) in enumerate(spans):
        found[start:end] = number
    return found


# -------------------------------------------------------------------------------------------------- special tokens


def copies(seen: Seen, step: Step, placed: Placed, ends: list[Tensor]) -> int:
    """How many special tokens there are, if each window has a copy of all of them."""
    windows, (_, _, n, _) = step.rows.windows, step.call.shape
    slots = (placed.place < placed.special).view(windows, n)
    each = slots[0].nonzero().flatten()
    if not (slots == slots[0]).all():
        raise Unplaced("has special tokens in some windows only")
    if windows == 1 or not len(each):
        return len(each)
    entering = step.met.tokens.detach()[:, each].reshape(seen.count, windows, -1)
    if not near(entering, entering[:, :1].expand_as(entering)):
        raise Unplaced(f"has special tokens of their own in every window (in {step.call.name})")
    grad = gradient(ends, step.call.node)
    pulls = None if grad is None else step.call.fold(grad)[:, :, each].reshape(seen.count, windows, -1)
    if pulls is None or not near(pulls, pulls[:, :1].expand_as(pulls)):
        raise Unplaced(f"reads the copies of its special tokens in different ways (in {step.call.name})")
    return len(each)


def places_of(step: Step, placed: Placed, most: int) -> Tensor:
    """The place of each slot: the copies of a special token share one."""
    windows, size = step.rows.windows, step.call.shape[2]
    own = placed.special // windows if windows > 1 else placed.special
    special = placed.place < placed.special
    number = (special.view(windows, size).cumsum(1) - 1).flatten() if own else placed.place
    return torch.where(special, number, placed.place - placed.special + most)


def stage_of(step: Step, placed: Placed, lattice: Grid, most: int) -> Stage:
    place = places_of(step, placed, most)
    slots = Slots(step.rows.windows, step.call.shape[2], most + math.prod(lattice), torch.arange(len(place)), place)
    return Stage(lattice, most, slots, slots, None, step.rows)
