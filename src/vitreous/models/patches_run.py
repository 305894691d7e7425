"""Where the tokens of the layout run come from: the patches of its first attention, and those of later stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.capture.capture import Capture, Enough
from vitreous.capture.survey import Met, Survey
from vitreous.models.layout import Layout, Order
from vitreous.models.survey_run import Network, Seen, noise_images, surveyed
from vitreous.models.token_places import Grid, Places, coded, coded_places, cut_places, even
from vitreous.types import Extent


def find_places(model: Network, seen: Seen, number: int, size: Extent) -> Places | None:
    """Where the tokens of an attention come from; by a further run to this attention where patches overlap."""
    call, met = seen.calls[number], seen.survey.entries[number]
    tokens = entering(call, met, seen.count)
    if len(size) == 3 and call.shape[0] != seen.count and call.shape[0] % seen.count == 0:  # windows in the batch
        tokens = call.v.transpose(1, 2).flatten(2).reshape(seen.count, -1, call.shape[1] * call.v.shape[-1])
    found = cut_places(tokens, seen.images) if seen.images.requires_grad and len(tokens) == seen.count else None
    if found is not None or seen.count == 1 or len(size) == 3:
        return found
    counts = tokens.shape[1]
    grids = [grid for grid in candidates(seen.survey, size, seen.images.shape[-3]) if grid[0] * grid[1] <= counts]
    if not grids:
        return None
    fine = max(grids, key=math.prod)
    tries = (run_coded(model, coded(seen.images, fine, centred), number) for centred in (True, False))
    places = (coded_places(again, fine, grids, (size[-2], size[-1])) for again in tries if again is not None)
    return next((one for one in places if one is not None), None)


def run_coded(model: Network, images: Tensor, number: int) -> Tensor | None:
    """The tokens of an attention for these images, [V N D]; the run ends there."""
    with model.still() as still, torch.inference_mode(False), torch.no_grad(), suppress(Enough):
        with Capture(still.names, len(images), since=number, most=number + 1) as again:
            model.run(images)
    right = bool(again.calls) and again.calls[0].shape[0] == len(images)
    return entering(again.calls[0], None, len(images)) if right else None


def entering(call: Attention, met: Met | None, count: int) -> Tensor:
    """The tokens that an attention reads, [B N D]: those that enter it, else (also where it pads them) its values."""
    tokens = None
    if met is not None and count in met.tokens.shape[:2]:
        tokens = met.tokens.flatten(1, 2) if met.tokens.ndim == 4 else met.tokens
        tokens = tokens if tokens.shape[0] == count else tokens.transpose(0, 1)
    b, _, n, m = call.shape
    if tokens is None or (b == count and call.node.ndim <= 4 and tokens.shape[1] not in (n, m)):
        return call.v.transpose(1, 2).flatten(2)
    return tokens


def candidates(survey: Survey, size: Extent, channels: int) -> list[Grid]:
    """Grids that the model may have cut the image into: of its convolutions, the last first, or of rows of pixels."""
    grids = survey.cut.grids[::-1]
    for count, width in survey.cut.rows:  # patches cut by reshaping, embedded by a linear layer
        side = math.isqrt(width // channels)
        if side and width == channels * side * side and count == (size[-2] // side) * (size[-1] // side):
            grids.append((size[-2] // side, size[-1] // side))
    return list(dict.fromkeys(grids))


def placed(seen: Seen, first: Attention | None, places: Places | None, size: Extent) -> Layout:
    """The patches, and how many other tokens there are."""
    if places is None:
        grids = candidates(seen.survey, size, seen.images.shape[-3])
        grid = next((grid for grid in grids if grid[0] * grid[1] > 1), (1, 1))
        times = even(size[0], next(iter(seen.survey.cut.frames[::-1]), size[0])) if len(size) == 3 else ()
        patch = (size[-2] // grid[0], size[-1] // grid[1])
        return Layout(grid, patch, readout=(), frames=len(times) or 1, times=times)
    prefix, count = min(places.tokens), len(places.tokens)
    tokens = max(first.shape[3] if first is not None else 0, max(places.tokens) + 1)
    plain = places.tokens == tuple(range(prefix, prefix + count))
    return Layout(
        places.grid,
        places.patch,
        prefix,
        readout=(),
        suffix=tokens - prefix - count,
        order=None if plain else places.tokens,
        rows=places.rows,
        columns=places.columns,
        frames=len(places.times) or 1,
        times=places.times,
    )


def find_orders(model: Network, layout: Layout, survey: Survey, size: Extent) -> dict[int, Order]:
    """How the tokens of each stage lie in the image, by their number, in a model whose layers differ."""
    grids = stages(layout.grid, candidates(survey, size, model.channels))
    orders: dict[int, Order] = {}
    for centred in (True, False):
        images = coded(noise_images(model, size), layout.grid, centred)
        tried: set[int] = set()
        for tokens in tokens_of(surveyed(model, images, grad=False).survey, len(images)):
            if tokens.shape[1] not in tried and tokens.shape[1] not in orders:
                tried.add(tokens.shape[1])
                found = coded_places(tokens, layout.grid, grids, (size[0], size[1]))
                orders |= {} if found is None else {tokens.shape[1]: (found.grid, found.tokens)}
        if tried <= set(orders):
            break
    return orders


def tokens_of(survey: Survey, images: int) -> Iterator[Tensor]:
    """The tokens that enter each layer, [B N D]."""
    for met in survey.ways:
        if met is not None and images in met.tokens.shape[:2]:
            axis = 0 if met.tokens.ndim == 4 or met.tokens.shape[0] == images else 1
            yield met.tokens.movedim(axis, 0).flatten(1, -2)


def stages(grid: Grid, others: Sequence[Grid]) -> list[Grid]:
    """The grids that later stages may have, which merge patches."""
    halved = [(-(-h // scale), -(-w // scale)) for h, w in (grid, *others) for scale in (1, 2, 4, 8, 16, 32)]
    return [found for found in dict.fromkeys(halved) if found[0] * found[1] > 1]
