"""The layout run: one forward pass of two noise images in which the geometry of a model is measured, never guessed.

layers     the attentions that the output depends on, one feeding the next (data_flow.py)
patches    the pixels that each token comes from, and its place in the grid (token_places.py)
read-out   tokens of the last layer's output on which the model's output depends (non-zero gradient)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.capture.narrowed_block import Fold
from vitreous.capture.survey import Met
from vitreous.models.blocks import blocks_of
from vitreous.models.branches import find_branches
from vitreous.models.data_flow import DataFlow
from vitreous.models.decoder import entry_of, is_frozen, learning
from vitreous.models.divided import find_divided
from vitreous.models.layout import Layout
from vitreous.models.obstacles import (
    SAMPLED,
    UNREAD,
    Obstacle,
    find_obstacle,
    layer_numbers,
    other_shapes,
    read_chain,
    several_reads,
    unlike,
    without_weights,
)
from vitreous.models.output import Form
from vitreous.models.patches_run import candidates, find_orders, find_places, placed
from vitreous.models.readers import find_readers
from vitreous.models.readout import find_readout, read_from
from vitreous.models.stages_run import Found, find_stages
from vitreous.models.survey_run import Network, Seen, gradient, look, noise_images
from vitreous.models.token_places import Places
from vitreous.types import Extent

READ = (Form.DETECTIONS, Form.WORDS)  # where each query or word is read from tokens of its own


@dataclass(frozen=True, eq=False)
class Reference:
    """What the layout run gave, for another run of the same model to be compared with."""

    output: Tensor  # of the noise images
    tokens: Tensor | None = None  # that enter the last layer's attention, as the model holds them
    grad: Tensor | None = None  # of `along([output])`, for these tokens
    fold: Fold | None = None  # where the last layer's queries, keys and values seem to come from


def find_layout(model: Network, size: Extent, given: Layout | None = None) -> tuple[Layout, Reference]:
    """Run the model once on two noise images and measure; a layout given by hand is believed."""
    with torch.inference_mode(False), torch.enable_grad():  # also where the caller works without gradients
        found = measure_layout(model, size, given)
        decodes = model.form is Form.DETECTIONS or found[0].decoder is not None
        if not decodes or not is_frozen(model.module):
            return found
        with model.still(), learning(model.module):  # what is learned, such as queries, is part of the graph
            return measure_layout(model, size, given)


def measure_layout(model: Network, size: Extent, given: Layout | None) -> tuple[Layout, Reference]:
    seen = look(model, noise_images(model, size))
    survey, output = seen.survey, seen.output
    flow = DataFlow(output, [call.node for call in seen.calls], seen.images)
    linear = survey.classifier is not None and survey.classifier[1] is output
    ends = [output, survey.classifier[0]] if linear and survey.classifier is not None else [output]
    sights = None if survey.mixed else survey.events.sights(seen.steady)
    found = replace(read_geometry(model, seen, flow, ends, size, given), linear_output=linear, sights=sights)
    found = found.one_by_one() if seen.count == 1 else found
    layers = layer_numbers(seen, found)
    kept = Reference(output.detach())
    if (not layers or found.stages) and found.entries:
        all_met = [met for recent in survey.recent for met in recent] + [met for met in survey.ways if met is not None]
        met = next((met for met in all_met if met.entry == found.entries[-1]), None)
        windows = met is None or (len(size) == 3 and met.tokens.shape[0] != seen.count)  # in the batch of a video
        return found, kept if met is None or windows else replace(kept, tokens=met.tokens.detach())
    if found.obstacle is not None or not layers or given is not None:
        return found, kept
    last, met = seen.calls[layers[-1]], survey.entries[layers[-1]]
    found = replace(read_from(seen, last, gradient(ends, last.node), found), probed=output.ndim != 4)  # else, by place
    if model.form in READ and found.decoder is None:
        readers = find_readers(output, last.node, last.fold)
        found = replace(found, readers=readers or (), obstacle=None if readers else UNREAD)
    if met is None:
        return found, kept
    with torch.no_grad():
        fold = survey.projections.fold(last, found.blocks[-1]) if found.blocks else None
    grad = gradient([output], met.tokens) if met.entry[0] == "norm" else None
    return found, Reference(output.detach(), met.tokens.detach(), grad, fold)


# ------------------------------------------------------------------------------------------------- layers and tokens


def read_geometry(
    model: Network, seen: Seen, flow: DataFlow, ends: list[Tensor], size: Extent, given: Layout | None
) -> Layout:
    """Everything but the read-out."""
    survey = seen.survey
    read, separate, decoder = read_chain(seen, flow, ends, given is None)
    branch = branch_of(model, seen, flow, ends, size, read) if separate is not None and given is None else None
    if branch is not None:
        return replace(branch, footprint=footprint(seen))
    first = seen.calls[read[0]] if read else None
    places = find_places(model, seen, read[0], size) if first is not None else None
    found = given or placed(seen, first, places, size)
    obstacle, numbers, pool = (
        (None, [], None) if given is not None else find_obstacle(seen, flow, read, separate, found, places)
    )
    if obstacle is not None and survey.sampled and model.form in (Form.DENSE, Form.DETECTIONS):
        obstacle = Obstacle(SAMPLED, separate=True)
    if numbers:
        foreign = [i for i in range(len(seen.calls)) if flow.known and not flow.of_leaf(i)]
        found = replace(found, numbers=tuple(numbers), decoder=decoder, foreign=tuple(foreign))
    layers = read if obstacle else layer_numbers(seen, found)
    calls = [seen.calls[i] for i in layers]
    if obstacle is None and given is None:
        several = several_reads(seen, blocks_of(model.module, calls), len(layers), ends, found.tokens)
        obstacle, reads = (several, ()) if isinstance(several, Obstacle) else (None, several)
        found = replace(found, reads=reads)
    if obstacle is not None and not obstacle.separate and not obstacle.final and decoder is None:
        staged = find_staged(model, seen, read, flow, ends, size, places)
        unread = isinstance(staged, Found) and model.form is Form.DETECTIONS and not staged.readers(seen)
        if isinstance(staged, Found) and not unread:
            return of_stages(model, seen, staged, ends, size)
        if isinstance(staged, str) and "channels" not in obstacle.said:
            obstacle = replace(obstacle, said=f"{obstacle.said} and {staged}")
        obstacle = Obstacle(UNREAD) if unread else obstacle
    ways = survey.ways if survey.mixed else [survey.entries[i] for i in layers]
    ways = [] if obstacle is not None and obstacle.separate else ways
    found = with_layers(model, found, seen, calls, ways)
    if decoder is not None:
        found = replace(found, entries=tuple(entry_of(met) for met in ways if met) if all(ways) else ())
    if obstacle is not None:
        known = bool(found.entries) and len(size) == 2
        orders = find_orders(model, found, survey, size) if known else {}
        return replace(found, orders=orders, obstacle=obstacle.said)
    if not layers:
        return found
    pooled = pool is not None or (given is not None and is_pooled(seen, found, layers[-1]))
    split = any(call.parts > 1 for call in calls)  # no run can end between the parts of a layer
    early = not pooled and not split and decoder is None
    return replace(found, pooled=pooled, pool=pool, calls=layers[-1] + 1 if early else None)


def branch_of(
    model: Network, seen: Seen, flow: DataFlow, ends: list[Tensor], size: Extent, read: list[int]
) -> Layout | None:
    """The layout of one of several branches that exchange tokens, if the network is built so."""
    able = seen.count > 1 and not seen.survey.mixed and flow.known and len(size) == 2
    if not able or model.form is Form.DETECTIONS or without_weights(seen, flow) is not None:
        return None
    if unlike([seen.calls[i] for i in read]) is not None:
        return None
    cuts = candidates(seen.survey, size, seen.images.shape[1])
    return find_branches(model, seen, read, ends, cuts, (size[-2], size[-1]))


def with_layers(
    model: Network, found: Layout, seen: Seen, calls: list[Attention], ways: Sequence[Met | None], windows: bool = False
) -> Layout:
    """The same with the modules that hold its layers, and where the tokens that enter them are made.

    `windows`: these may share the first axis with the images.
    """
    blocks = blocks_of(model.module, calls)
    once, flat = blocks if seen.blocks.run_once(blocks) else (), seen.blocks.flat(blocks)
    return replace(
        found,
        blocks=() if flat else once,
        flat_blocks=once if flat else (),
        layers=len(ways),
        mixed=any(call.mixed for call in calls),
        entries=tuple(met.entry for met in ways if met) if all(ways) else (),
        sequence_first=is_sequence_first(ways, seen.count, windows),
        footprint=footprint(seen),
    )


def is_sequence_first(ways: Sequence[Met | None], images: int, windows: bool) -> bool:
    """Whether the first axis of the tokens is not that of the images; `windows`: they may share it with windows."""
    leading = [len(met.tokens) for met in ways if met is not None and met.tokens.ndim > 2]
    return any(size % images > 0 if windows else size != images for size in leading)


def footprint(seen: Seen) -> tuple[int, int]:
    """The bytes that one image takes: without gradients, and with."""
    memory = seen.survey.memory
    return 6 * memory.largest // seen.count, 3 * memory.made // (2 * seen.count)


def is_pooled(seen: Seen, given: Layout, last: int) -> bool:
    return any(given.is_pool(call, seen.count) for call in seen.calls[last + 1 :])


# -------------------------------------------------------------------------------------- windows and merged patches


def find_staged(
    model: Network,
    seen: Seen,
    read: list[int],
    flow: DataFlow,
    ends: list[Tensor],
    size: Extent,
    places: Places | None,
) -> Found | str | None:
    """The stages of a model whose layers differ in their tokens, or why they cannot be measured; None: not asked."""
    if not flow.known or not seen.images.requires_grad or seen.count == 1 or seen.survey.mixed or not read:
        return None
    if unlike([seen.calls[number] for number in read]) is not None:
        return None
    if len(size) == 3:
        return find_divided(model, seen, read, ends, places, size)
    grids = candidates(seen.survey, size, seen.images.shape[1])
    return find_stages(model, seen, read, flow, grids, (size[0], size[1]))


def of_stages(model: Network, seen: Seen, staged: Found, ends: list[Tensor], size: Extent) -> Layout:
    """The patches of the first layer, the stages, and the tokens of the last that the classifier reads."""
    patches, last, call = staged.patches, staged.stages[-1], staged.steps[-1].call
    grad = gradient(ends, call.node)
    shares = None
    if grad is not None:
        rows = staged.steps[-1].rows.arrange(call.fold(grad), seen.count).float().norm(dim=-1).mean(1)  # [B·W n]
        shares = last.scatter_queries(rows).mean(0).cpu()
    readout, share = find_readout(shares, Layout(last.grid, prefix=last.special))
    found = Layout(
        patches.grid,
        patches.patch,
        staged.stages[0].special,
        readout,
        share,
        rows=patches.rows,
        columns=patches.columns,
        frames=len(patches.times) or 1,
        times=patches.times,
        numbers=staged.numbers,
        stages=staged.stages,
        calls=staged.numbers[-1] + 1,
        readers=staged.readers(seen) if model.form in READ else (),
    )
    film = len(size) == 3
    calls = [step.call for step in staged.steps]
    arranged = [found.arranged(call, seen.count) for call in calls]
    told = "attends over time and over space in turn"
    told = told if film else other_shapes(arranged, found.tokens, seen.count).said
    orders = {count: (found.cells if film else grid, order) for count, (grid, order) in staged.orders.items()}
    found = with_layers(model, found, seen, calls, [step.met for step in staged.steps], windows=film)
    return replace(found, orders=orders, obstacle=told)
