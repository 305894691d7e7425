"""Layers whose queries and keys are not simply the tokens: windows, pooled keys, merged patches.

An attention call has *slots*: [B·W n] for its queries, [B·W m] for its keys, in W windows. The tokens that enter the
layer have *places*: its special tokens, then the cells of its grid, row by row. `Slots` says which places each slot
stands for. A row of numbers, one for each place, is carried from the last layer to the first:

    row     = stage.gather(carried)                                 the weight of every query, [B·W n]
    carried = stage.onward(carried, kept, moved)                    of every place before the layer, [B places]

where `kept` [B·W n] is what the queries keep of the row, and `moved` [B·W m] what attention moves to the keys. In a
plain layer (`PLAIN`) slots, places and tokens are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitreous.models.token_places import Grid

Places = Float[Tensor, "B places"]  # one number for each place of the tokens that enter a layer
Behind = Float[Tensor, "B behind"]  # the same of the next layer
Queries = Float[Tensor, "BW n"]  # one for each slot
Keys = Float[Tensor, "BW m"]


@dataclass(frozen=True)
class Rows:
    """How windows and heads lie in the two leading axes of an attention, besides the images."""

    windows: int
    heads: int
    heads_inside: bool = True  # the heads of a window follow one another; else the windows of a head

    def arrange(self, t: Tensor, images: int) -> Tensor:
        """[B·… … n d] -> [B·W H n d]."""
        inner = (self.windows, self.heads) if self.heads_inside else (self.heads, self.windows)
        apart = t.reshape(images, *inner, *t.shape[2:])
        return (apart if self.heads_inside else apart.transpose(1, 2)).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Slots:
    """Pairs of a slot and a place that it stands for. A slot without a place is padding."""

    windows: int
    size: int  # slots in a window
    places: int
    slot: Tensor  # [pairs], from 0 to windows·size − 1
    place: Tensor  # [pairs]

    @property
    def count(self) -> int:
        return self.windows * self.size

    @cached_property
    def slots_of_place(self) -> Tensor:
        return torch.bincount(self.place, minlength=self.places)

    @cached_property
    def places_of_slot(self) -> Tensor:
        return torch.bincount(self.slot, minlength=self.count)

    @property
    def real(self) -> Tensor:
        """Whether each slot stands for something, [W n]."""
        return (self.places_of_slot > 0).view(self.windows, self.size)

    def leaving(self, asking: Slots) -> Slots:
        """The same without the places that ask nothing, as where a layer goes on with every second token only."""
        kept = asking.slots_of_place[self.place] > 0
        found = replace(self, slot=self.slot[kept], place=self.place[kept])
        return found if found.real.equal(self.real) else self  # else such tokens are merged too

    def gather(self, carried: Places) -> Queries:
        """From places to slots, [B places] -> [B·W n]; a place that has several slots gives each an equal share."""
        slot, place, sharing = (t.to(carried.device) for t in (self.slot, self.place, self.slots_of_place))
        share = carried / sharing.clamp_min(1)
        return added(share[:, place], slot, self.count).reshape(-1, self.size)

    def scatter(self, row: Queries) -> Places:
        """From slots to places, [B·W n] -> [B places]; a slot that stands for several places gives each its share."""
        slot, place, sharing = (t.to(row.device) for t in (self.slot, self.place, self.places_of_slot))
        share = row.reshape(-1, self.count) / sharing.clamp_min(1)
        return added(share[:, slot], place, self.places)


def added(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Σ of the values that go to each index."""
    return torch.index_add(values.new_zeros(len(values), count), 1, index, values)


@dataclass(frozen=True, eq=False)
class Stage:
    """How the slots of one layer lie on the grid of the tokens that enter it."""

    grid: Grid
    special: int
    queries: Slots
    keys: Slots
    merged: Slots | None = None  # the places of the next layer, and those of this one that each covers; None: the same
    rows: Rows | None = None  # how its windows and heads lie in the axes of the attention call

    @property
    def places(self) -> int:
        return self.special + self.grid[0] * self.grid[1]

    @property
    def windows(self) -> int:
        return self.queries.windows

    def here(self, carried: Behind) -> Places:
        """From the places of the next layer to those of this one; what was joined is there already."""
        if self.merged is None:
            return carried
        found = self.merged.scatter(carried[:, : self.merged.count])
        return found if carried.shape[1] == self.merged.count else found + carried[:, self.merged.count :]

    def joined(self, carried: Behind, read: Float[Tensor, "*B places"]) -> Float[Tensor, "B *joined"]:
        """The weights of the places of the next layer, and of tokens of this one that are read beside it."""
        return carried + read if self.merged is None else torch.cat([carried, read.expand(len(carried), -1)], 1)

    def gather(self, carried: Behind) -> Queries:
        """The weight of every query, from that of every place of the next layer."""
        return self.queries.gather(self.here(carried))

    @property
    def repeats(self) -> bool:
        """Whether a token asks in several windows, as a CLS token that is repeated in each."""
        return bool((self.queries.slots_of_place > 1).any())

    def asked(self, carried: Behind) -> Queries:
        """As `gather`, for rows of A ⊙ ∂y/∂A: what the copies of a token gain adds up, as each has its part of ∂y."""
        times = self.queries.slots_of_place.to(carried)
        return self.queries.gather(self.here(carried) * times)

    def copies(self, like: Places) -> Queries:
        """How many slots the token of each query has."""
        return self.asked(self.queries.slots_of_place.to(like).expand_as(like))

    def passing(self, carried: Behind) -> Places:
        """What stays with tokens that ask nothing in this layer."""
        here = self.here(carried)
        return here * (self.queries.slots_of_place == 0).to(here)

    def scatter_queries(self, row: Queries) -> Places:
        return self.queries.scatter(row)

    def scatter_keys(self, row: Keys) -> Places:
        return self.keys.scatter(row)

    def onward(self, carried: Behind, kept: Queries, moved: Keys) -> Places:
        """The row before this layer, from what its queries keep and what goes to its keys."""
        return self.passing(carried) + self.scatter_queries(kept) + self.scatter_keys(moved)

    def unmoved(self, carried: Behind) -> Places:
        """The places of this layer without its attention."""
        return self.passing(carried) + self.scatter_queries(self.gather(carried))

    def at(self, cell: tuple[int, int], grid: Grid) -> Places:
        """One at the place that covers this cell of a finer grid, zero elsewhere, [1 places]."""
        row, column = (int(covering(fine, own)[i]) for i, fine, own in zip(cell, grid, self.grid))
        found = torch.zeros(1, self.places)
        if min(row, column) >= 0:
            found[0, self.special + row * self.grid[1] + column] = 1
        return found

    def pairs(self, device: torch.device) -> Bool[Tensor, "W N M"]:
        """Whether query and key are both tokens, and no padding."""
        return (self.queries.real[:, :, None] & self.keys.real[:, None, :]).to(device)

    def asking(self, count: int, like: Tensor) -> int | Float[Tensor, "BW 1"]:
        """How many of a window's `count` queries are tokens."""
        real = self.queries.real.sum(1, keepdim=True).clamp_min(1).to(like)
        return real.repeat(len(like) // len(real), 1)

    def key_mask(self, row: Keys | Queries) -> Bool[Tensor, "BW m"] | None:
        """Whether each key is a token, for as many windows as this row has; None if none is padding."""
        real = self.keys.real
        return None if real.all() else real.repeat(len(row) // len(real), 1).to(row.device)

    def own(self, special: bool, device: torch.device) -> Bool[Tensor, "W N M"]:
        """Whether query and key have a place in common; `special`: that of a special token."""
        queries, keys = self.queries, self.keys
        found = torch.zeros(queries.windows, queries.size, keys.size, dtype=torch.bool)
        left_slot, left_place = keys.slot, keys.place
        while len(left_slot):  # one slot of each place at a time
            slot_of = torch.full((self.places,), -1).scatter(0, left_place, left_slot)
            window, number = slot_of[queries.place] // keys.size, slot_of[queries.place] % keys.size
            here = (window == queries.slot // queries.size) & (slot_of[queries.place] >= 0)
            here &= (queries.place < self.special) | (not special)
            found[window[here], queries.slot[here] % queries.size, number[here]] = True
            more = slot_of[left_place] != left_slot
            left_slot, left_place = left_slot[more], left_place[more]
        return found.to(device)

    def cells(self, carried: Places, grid: Grid) -> Float[Tensor, "B cells"]:
        """The cells of a finer grid, each with its share, [B h·w]."""
        found = carried[:, self.special :]
        return found if grid == self.grid else covered(grid, self.grid, 0, 0).scatter(found)


class Plain(Stage):
    """A layer of a plain ViT: every token asks every token."""

    def __init__(self) -> None:
        """It has no slots of its own."""

    windows = 1
    repeats = False

    def gather(self, carried: Behind) -> Queries:
        return carried

    def asked(self, carried: Behind) -> Queries:
        return carried

    def scatter_queries(self, row: Queries) -> Places:
        return row

    def scatter_keys(self, row: Keys) -> Places:
        return row

    def onward(self, carried: Behind, kept: Queries, moved: Keys) -> Places:
        return kept + moved

    def unmoved(self, carried: Behind) -> Places:
        return carried

    def asking(self, count: int, like: Tensor) -> int | Float[Tensor, "BW 1"]:
        return count


PLAIN = Plain()


def covered(fine: Grid, coarse: Grid, special: int, before: int, kept: int | None = None) -> Slots:
    """The cells of a fine grid that each cell of a coarse one covers, behind `special` tokens that are as many before.

    Special tokens that are not there before are dropped; `kept`: how many are, if that is known.
    """
    kept = kept if kept is not None else special if special == before else 0
    lines = [covering(count, into) for count, into in zip(fine, coarse)]
    cells = (lines[0][:, None] * coarse[1] + lines[1][None, :]).flatten()  # of each fine cell, the coarse one
    inside = ((lines[0] >= 0)[:, None] & (lines[1] >= 0)[None, :]).flatten().nonzero().flatten()
    slot = torch.cat([torch.arange(kept), special + cells[inside]])
    place = torch.cat([torch.arange(kept), before + inside])
    return Slots(1, special + coarse[0] * coarse[1], before + fine[0] * fine[1], slot, place)


def covering(fine: int, coarse: int) -> Tensor:
    """The coarse row of every fine one; −1 where it is left over."""
    line = (torch.arange(fine) / scale_of(fine, coarse)).floor().long()
    return torch.where(line < coarse, line, -1)


def scale_of(fine: int, coarse: int) -> float:
    """How many fine rows make a coarse one: a whole number, of which the last may have fewer, or be left over."""
    for scale in sorted(range(1, fine + 1), key=lambda s: (s & (s - 1) > 0, s)):  # powers of two first
        if coarse in (fine // scale, -(-fine // scale)):
            return float(scale)
    return fine / coarse
