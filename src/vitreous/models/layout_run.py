"""The layout run: one forward pass of two noise images in which the geometry of a model is measured, never guessed.

layers     the attentions that the output depends on, one feeding the next (data_flow.py)
patches    the pixels that each token comes from, and its place in the grid (token_places.py)
read-out   tokens of the last layer's output on which the model's output depends (non-zero gradient)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.capture.capture import Capture, Enough
from vitreous.capture.narrowed_block import Fold
from vitreous.capture.survey import Met, Survey
from vitreous.models.blocks import blocks_of
from vitreous.models.branches import find_branches
from vitreous.models.data_flow import DataFlow
from vitreous.models.layout import Layout, Order
from vitreous.models.obstacles import (
    Obstacle,
    find_obstacle,
    layer_numbers,
    one_chain,
    other_shapes,
    several_reads,
    unlike,
    without_weights,
)
from vitreous.models.stages_run import Found, find_stages
from vitreous.models.survey_run import Network, Seen, gradient, look, noise_images, surveyed
from vitreous.models.token_places import Grid, Places, coded, coded_places, cut_places


@dataclass(frozen=True, eq=False)
class Reference:
    """What the layout run gave, for another run of the same model to be compared with."""

    output: Tensor  # of the noise images
    tokens: Tensor | None = None  # that enter the last layer's attention, as the model holds them
    grad: Tensor | None = None  # of `along([output])`, for these tokens
    fold: Fold | None = None  # where the last layer's queries, keys and values seem to come from


def find_layout(model: Network, size: tuple[int, int], given: Layout | None = None) -> tuple[Layout, Reference]:
    """Run the model once on two noise images and measure; a layout given by hand is believed."""
    with torch.inference_mode(False), torch.enable_grad():  # also where the caller works without gradients
        return measure_layout(model, size, given)


def measure_layout(model: Network, size: tuple[int, int], given: Layout | None) -> tuple[Layout, Reference]:
    seen = look(model, noise_images(model, size))
    survey, output = seen.survey, seen.output
    flow = DataFlow(output, [call.node for call in seen.calls])
    linear = survey.classifier is not None and survey.classifier[1] is output
    ends = [output, survey.classifier[0]] if linear and survey.classifier is not None else [output]
    found = replace(read_geometry(model, seen, flow, ends, size, given), linear_output=linear)
    found = found.one_by_one() if seen.count == 1 else found
    layers = layer_numbers(seen, found)
    kept = Reference(output.detach())
    if (not layers or found.stages) and found.entries:
        all_met = [met for recent in survey.recent for met in recent] + [met for met in survey.ways if met is not None]
        met = next((met for met in all_met if met.entry == found.entries[-1]), None)
        return found, kept if met is None else replace(kept, tokens=met.tokens.detach())
    if found.obstacle is not None or not layers or given is not None:
        return found, kept
    last, met = seen.calls[layers[-1]], survey.entries[layers[-1]]
    found = replace(read_from(seen, last, gradient(ends, last.node), found), probed=True)
    if met is None:
        return found, kept
    with torch.no_grad():
        fold = survey.projections.fold(last, found.blocks[-1]) if found.blocks else None
    grad = gradient([output], met.tokens) if met.entry[0] == "norm" else None
    return found, Reference(output.detach(), met.tokens.detach(), grad, fold)


# ------------------------------------------------------------------------------------------------- layers and tokens


def read_geometry(
    model: Network, seen: Seen, flow: DataFlow, ends: list[Tensor], size: tuple[int, int], given: Layout | None
) -> Layout:
    """Everything but the read-out."""
    survey = seen.survey
    read = flow.read() if flow.known else list(range(len(seen.calls)))
    chain = one_chain(read, seen, flow, ends)
    separate, read = (chain, read) if isinstance(chain, Obstacle) else (None, chain)
    branch = branch_of(model, seen, read, ends, size) if separate is not None and given is None else None
    if branch is not None:
        return replace(branch, footprint=footprint(seen))
    first = seen.calls[read[0]] if read else None
    places = find_places(model, seen, read[0], size) if first is not None else None
    found = given or placed(seen, first, places, size)
    obstacle, numbers, pool = (
        (None, [], None) if given is not None else find_obstacle(seen, flow, read, separate, found, places)
    )
    if numbers:
        found = replace(found, numbers=tuple(numbers))
    layers = read if obstacle else layer_numbers(seen, found)
    ways = survey.ways if survey.mixed else [survey.entries[i] for i in layers]
    blocks = blocks_of(model.module, [seen.calls[i] for i in layers])
    if obstacle is None and given is None:
        several = several_reads(seen, blocks, len(layers), ends, found.tokens)
        obstacle, reads = (several, ()) if isinstance(several, Obstacle) else (None, several)
        found = replace(found, reads=reads)
    closed = obstacle is None or obstacle.separate or obstacle.final
    staged = None if closed else find_staged(model, seen, read, flow, size)
    if isinstance(staged, str) and obstacle is not None:
        obstacle = obstacle if "channels" in obstacle.said else replace(obstacle, said=f"{obstacle.said} and {staged}")
    if isinstance(staged, Found):
        ways = [step.met for step in staged.steps]
        blocks = blocks_of(model.module, [step.call for step in staged.steps])
        found = of_stages(staged, ends, seen.count)
        calls = [found.arranged(step.call, seen.count) for step in staged.steps]
        obstacle = other_shapes(calls, found.tokens, seen.count)
    if obstacle is not None and obstacle.separate:
        ways = []
    once, flat = blocks if seen.blocks.run_once(blocks) else (), seen.blocks.flat(blocks)
    found = replace(
        found,
        blocks=() if flat else once,
        flat_blocks=once if flat else (),
        layers=len(ways),
        mixed=any(seen.calls[i].mixed for i in layers),
        entries=tuple(met.entry for met in ways if met) if all(ways) else (),
        sequence_first=any(is_sequence_first(met, seen.count) for met in ways),
        footprint=footprint(seen),
        obstacle=None if obstacle is None else obstacle.said,
    )
    if isinstance(staged, Found):
        return replace(found, orders=staged.orders, calls=staged.numbers[-1] + 1)
    if obstacle is not None:
        return replace(found, orders=find_orders(model, found, survey, size) if found.entries else {})
    if not layers:
        return found
    pooled = pool is not None or (given is not None and is_pooled(seen, found, layers[-1]))
    split = any(seen.calls[i].parts > 1 for i in layers)  # no run can end between the parts of a layer
    return replace(found, pooled=pooled, pool=pool, calls=None if pooled or split else layers[-1] + 1)


def branch_of(model: Network, seen: Seen, read: list[int], ends: list[Tensor], size: tuple[int, int]) -> Layout | None:
    """The layout of one of several branches, if the network has such."""
    if seen.count < 2 or not seen.images.requires_grad or seen.survey.mixed:
        return None
    if unlike([seen.calls[i] for i in read]) is not None or without_weights(seen) is not None:
        return None
    return find_branches(model, seen, read, ends, candidates(seen.survey, size, seen.images.shape[1]), size)


def is_sequence_first(met: Met | None, images: int) -> bool:
    """Whether tokens are [N B D]."""
    return met is not None and met.tokens.ndim > 2 and met.tokens.shape[0] != images


def footprint(seen: Seen) -> tuple[int, int]:
    """The bytes that one image takes: without gradients, and with."""
    memory = seen.survey.memory
    return 6 * memory.largest // seen.count, 3 * memory.made // (2 * seen.count)


def is_pooled(seen: Seen, given: Layout, last: int) -> bool:
    return any(given.is_pool(call, seen.count) for call in seen.calls[last + 1 :])


# --------------------------------------------------------------------------------------------------------- patches


def find_places(model: Network, seen: Seen, number: int, size: tuple[int, int]) -> Places | None:
    """Where the tokens of an attention come from; by a further run to this attention where patches overlap."""
    call, met = seen.calls[number], seen.survey.entries[number]
    tokens = entering(call, met, seen.count)
    found = cut_places(tokens, seen.images) if seen.images.requires_grad and len(tokens) == seen.count else None
    if found is not None or seen.count == 1:
        return found
    counts = tokens.shape[1]
    grids = [grid for grid in candidates(seen.survey, size, seen.images.shape[1]) if grid[0] * grid[1] <= counts]
    if not grids:
        return None
    fine = max(grids, key=math.prod)
    tries = (run_coded(model, coded(seen.images, fine, centred), number) for centred in (True, False))
    places = (coded_places(again, fine, grids, size) for again in tries if again is not None)
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


def candidates(survey: Survey, size: tuple[int, int], channels: int) -> list[Grid]:
    """Grids that the model may have cut the image into: of its convolutions, the last first, or of rows of pixels."""
    grids = survey.cut.grids[::-1]
    for count, width in survey.cut.rows:  # patches cut by reshaping, embedded by a linear layer
        side = math.isqrt(width // channels)
        if side and width == channels * side * side and count == (size[0] // side) * (size[1] // side):
            grids.append((size[0] // side, size[1] // side))
    return list(dict.fromkeys(grids))


def placed(seen: Seen, first: Attention | None, places: Places | None, size: tuple[int, int]) -> Layout:
    """The patches, and how many other tokens there are."""
    if places is None:
        grids = candidates(seen.survey, size, seen.images.shape[1])
        grid = next((grid for grid in grids if grid[0] * grid[1] > 1), (1, 1))
        return Layout(grid, (size[0] // grid[0], size[1] // grid[1]), readout=())
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
    )


def find_orders(model: Network, layout: Layout, survey: Survey, size: tuple[int, int]) -> dict[int, Order]:
    """How the tokens of each stage lie in the image, by their number, in a model whose layers differ."""
    grids = stages(layout.grid, candidates(survey, size, model.channels))
    orders: dict[int, Order] = {}
    for centred in (True, False):
        images = coded(noise_images(model, size), layout.grid, centred)
        tried: set[int] = set()
        for tokens in tokens_of(surveyed(model, images, grad=False).survey, len(images)):
            if tokens.shape[1] not in tried and tokens.shape[1] not in orders:
                tried.add(tokens.shape[1])
                found = coded_places(tokens, layout.grid, grids, size)
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


# -------------------------------------------------------------------------------------- windows and merged patches


def find_staged(
    model: Network, seen: Seen, read: list[int], flow: DataFlow, size: tuple[int, int]
) -> Found | str | None:
    """The stages of a model whose layers differ in their tokens, or why they cannot be measured; None: not asked."""
    if not flow.known or not seen.images.requires_grad or seen.count == 1 or seen.survey.mixed or not read:
        return None
    if unlike([seen.calls[number] for number in read]) is not None:
        return None
    return find_stages(model, seen, read, flow, candidates(seen.survey, size, seen.images.shape[1]), size)


def of_stages(staged: Found, ends: list[Tensor], images: int) -> Layout:
    """The patches of the first layer, and the tokens of the last that the classifier reads."""
    patches, last, call = staged.patches, staged.stages[-1], staged.steps[-1].call
    behind = Layout(last.grid, prefix=last.special)
    grad = gradient(ends, call.node)
    size = None
    if grad is not None:
        rows = staged.steps[-1].rows.arrange(call.fold(grad), images).float().norm(dim=-1).mean(1)  # [B·W n]
        size = last.scatter_queries(rows).mean(0).cpu()
    readout, share = find_readout(size, behind)
    return Layout(
        patches.grid,
        patches.patch,
        staged.stages[0].special,
        readout,
        share,
        rows=patches.rows,
        columns=patches.columns,
        numbers=staged.numbers,
        stages=staged.stages,
    )


# -------------------------------------------------------------------------------------------------------- read-out


def read_from(seen: Seen, last: Attention, grad: Tensor | None, layout: Layout) -> Layout:
    """The same with its read-out; `grad`: of the output, for that of the last layer's attention."""
    if layout.reads:
        *earlier, (_, tokens, shares) = layout.reads
        return replace(layout, readout=tokens, share=shares, reads=tuple(earlier))
    readout, share = find_readout(None if grad is None else last.fold(grad).float().norm(dim=-1).mean((0, 1)), layout)
    if not layout.pooled or layout.pool is None:
        return replace(layout, readout=readout, share=None if layout.pooled else share)
    pool = seen.calls[layout.pool]
    if pool.shape[3] != len(readout):
        return replace(
            layout, readout=readout, obstacle="reads its tokens through an attention that could not be followed"
        )
    size = gradient([seen.output], pool.node)
    weights = None if size is None else pool.fold(size).float().norm(dim=-1).mean((0, 1))
    even = weights is None or bool((weights - weights.mean()).abs().max() < 1e-3 * weights.mean()) or len(weights) == 1
    queries = None if even or weights is None else tuple((weights / weights.sum()).tolist())
    return replace(layout, readout=readout, queries=queries)


def find_readout(size: Tensor | None, layout: Layout) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """The tokens that the output (or what its classifier reads) depends on, and their weights where they differ.

    `size`: of the gradient for each token behind the last attention; None: unknown.
    """
    everything = tuple(range(layout.tokens))
    if size is None:
        return ((0,) if layout.prefix else everything), None
    read = tuple(size.nonzero().flatten().tolist())
    patches = layout.patch_tokens
    apart = [i for i in read if i not in patches]
    both = apart and len(read) > len(apart)
    if both and size[apart].mean() > layout.patches**0.5 * size[patches].mean():
        whole = 1 / (len(apart) + 1)  # a CLS token beside the mean of the patches weighs as much as all of them
        return read, tuple(whole if i in apart else whole / (len(read) - len(apart)) for i in read)
    return (read or everything), None
