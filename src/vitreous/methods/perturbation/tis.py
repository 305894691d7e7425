from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from vitreous.methods.attention.value_runs import need_blocks, need_chain, record
from vitreous.registry import Noted, method
from vitreous.trace.perturb.drop_tokens import all_entering, refuse_dropping, scored_as, scores_keeping
from vitreous.trace.perturb.dropped_runs import kept
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Scores

FLAT = 1e-6  # a range, or a distance, below this share of the largest value is rounding
ROUNDS = 100  # of k-means; it ends earlier if no channel changes its cluster
ROWS = 4096  # channels that are compared with all centroids at a time

Channels = Float[Tensor, "_ n"]  # channel maps, or centroids
Masks = Bool[Tensor, "K n"]  # which patches each mask keeps


@method(cite="englebert2023explaining", targeted=True, attention=True, alone=True, level=True, cheap={"masks": 16})
def tis(
    trace: Trace,
    target: Target,
    *,
    masks: Annotated[
        int, Field(ge=1, description="clusters of channels, one mask each; at most as many as there are channels")
    ] = 1024,
    keep: Annotated[float, Field(gt=0, lt=1, description="share of the patches that a mask keeps, at least one")] = 0.5,
    seed: Annotated[int, Field(ge=0, description="another seed gives other clusters")] = 0,
) -> Noted:
    """The mean probability over subsets of tokens that contain a patch; like rise, without images that the model has
    never seen, at half a forward pass for each.

    Σ_k p_k·M_k / Σ_k M_k, p_k the probability of a class (of other targets the score) if only the patch tokens in M_k
    run through the blocks; M_k the largest values of a centroid of the channel maps of all blocks' outputs (k-means);
    a patch in no mask gets the mean of p; masks = the number of M_k
    """
    need_blocks(trace, "tis", "token_ablation or rise")
    refuse_dropping(trace)
    fixed, _ = scored_as(trace, target, "logit")
    graded = fixed.graded(trace.model.meaning)
    maps, counts = [], []
    for index in range(len(trace)):
        drawn = masks_of(trace, index, masks, keep, seed)
        scores = mask_scores(trace, index, graded, drawn, ("tis", index, masks, keep, seed))
        maps.append(mean_kept(drawn, scores).reshape(trace.layout.cells))
        counts.append(len(drawn))
    return Noted(torch.stack(maps), {"masks": torch.tensor(counts)})


def masks_of(trace: Trace, index: int, count: int, keep: float, seed: int) -> Masks:
    """The masks of one image, which other targets reuse."""
    key = "tis masks", index, count, keep, seed
    if key not in trace.ends:
        found = centroids(channels(trace, index), count, trace.generators(seed)[index])
        trace.ends[key] = (largest(found, keep).to(trace.images.device),)
    return trace.ends[key][0]


def channels(trace: Trace, index: int) -> Channels:
    """Every channel of every block's output as a map over the patches; constant ones are left out.

    The image runs alone, so that its clusters do not depend on the rounding of a batch.
    """
    layers = record(trace, [index], list(range(trace.layout.layers)), projections=False)
    need_chain(trace, layers, "tis", "token_ablation or rise")
    outs = [layer.block.out for _, layer in sorted(layers.items()) if layer.block is not None]
    found = torch.cat([trace.to_patches(out).flatten(0, -2).mT for out in outs]).cpu().double()
    return found[found.amax(1) - found.amin(1) > FLAT * found.abs().amax(1)]


def mask_scores(trace: Trace, index: int, target: Target, masks: Masks, key: Hashable | None = None) -> Scores:
    """The score of one image with only the patches of each mask; all masks keep as many. `target`: of all images."""
    if not len(masks):
        return torch.zeros(0, device=masks.device)
    patches = masks.nonzero()[:, 1].reshape(len(masks), -1)
    rows = [index] * len(masks)
    return scores_keeping(trace, target, rows, kept(trace, patches), "tis", key, all_entering(trace, index))


def mean_kept(masks: Masks, scores: Scores) -> Float[Tensor, "n"]:
    """Σ p·M / Σ M; for a patch in no mask the mean of p."""
    shown = masks.to(scores.dtype)
    counts = shown.sum(0)
    return torch.where(counts > 0, scores @ shown / counts.clamp_min(1), scores.mean() if len(scores) else 0)


def largest(centroids: Channels, keep: float) -> Masks:
    """The patches of each centroid's largest values; of equals, the first."""
    patches = centroids.shape[1]
    order = centroids.argsort(dim=1, descending=True, stable=True)
    chosen = order[:, : max(1, int(keep * patches))]
    return torch.zeros_like(centroids, dtype=torch.bool).scatter_(1, chosen, True)


# ------------------------------------------------------------------------------------------------------------ k-means


def centroids(points: Channels, count: int, stream: torch.Generator) -> Channels:
    """At most this many different centroids; the first are different points, drawn at random."""
    found = points[torch.randperm(len(points), generator=stream)[:count]]
    labels = torch.full((len(points),), -1)
    for _ in range(ROUNDS if len(points) else 0):
        new, away = nearest(points, found)
        if torch.equal(new, labels):
            break
        labels, found = new, means(points, new, away, len(found))
    return distinct(found)


def nearest(points: Channels, centroids: Channels) -> tuple[Int[Tensor, "_"], Float[Tensor, "_"]]:
    """The nearest centroid of each point, and how far away it is."""
    parts = [torch.cdist(part, centroids).min(1) for part in torch.split(points, ROWS)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def means(points: Channels, labels: Int[Tensor, "_"], away: Float[Tensor, "_"], count: int) -> Channels:
    """The mean point of each cluster; an empty one begins again at one of the points that are farthest away."""
    sizes = labels.bincount(minlength=count)
    found = points.new_zeros(count, points.shape[1]).index_add_(0, labels, points) / sizes.clamp_min(1)[:, None]
    empty = (sizes == 0).nonzero().flatten()
    found[empty] = points[away.argsort(descending=True, stable=True)[: len(empty)]]
    return found


def distinct(centroids: Channels) -> Channels:
    """Each centroid once."""
    size = centroids.norm(dim=1)
    near = torch.cdist(centroids, centroids) <= FLAT * torch.maximum(size[:, None], size)
    return centroids[~near.tril(-1).any(1)]
