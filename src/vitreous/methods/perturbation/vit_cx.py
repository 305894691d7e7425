from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.registry import Noted, method
from vitreous.trace.perturb.drop_tokens import scored_as, scores_of
from vitreous.trace.perturb.fills import Stretch, enlarge, for_frames, stretch
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images, Scores

FLAT = 1e-6  # a range below this share of the largest value is rounding

Coarse = Float[Tensor, "_ *tubelets h w"]  # channels or masks


@method(cite="xie2022vit", targeted=True, tokens=True, alone=True, level=True, cheap={"threshold": 0.5})
def vit_cx(
    trace: Trace,
    target: Target,
    *,
    threshold: Annotated[
        float, Field(gt=0, le=1, description="masks nearer than this cosine distance are merged")
    ] = 0.1,
    noise: Annotated[float, Field(ge=0, description="standard deviation of what hides; 0: zeros")] = 0.1,
    seed: Annotated[int, Field(ge=0, description="another seed gives other noise")] = 0,
) -> Noted:
    """The mean score over masks made of the model's own feature maps, less the harm of what hides the rest; like rise,
    with fewer forward passes.

    Σ_k s_k·M_k / Σ_k M_k / K, s_k = p(x⊙M_k + ε(1 − M_k)) − p(x + ε(1 − M_k)) + p(x); p the probability of a class (of
    other targets the score), M_k the channels of the tokens that enter the last attention, each enlarged to the image
    and from 0 to 1, merged by complete linkage of their cosine distances; masks = K
    """
    entry = trace.cut().entry
    assert entry is not None
    features = trace.to_patches(trace.batch_first(entry.detach())).movedim(-1, 1).cpu().double()  # [B D h w]
    fixed, _ = scored_as(trace, target, "logit")
    streams = trace.generators(seed)
    maps, counts = [], []
    down, across = (stretch(cells, side) for cells, side in zip(features.shape[-2:], trace.size))
    graded = fixed.graded(trace.model.meaning)
    for i in range(len(trace)):
        masks = merged(features[i], down, across, threshold)
        hiding = noise * torch.randn(trace.images.shape[1:], generator=streams[i]) if noise else None
        key = "vit_cx", i, threshold, noise, seed
        scores = mask_scores(trace, i, graded.of_image(i), masks, down, across, hiding, key)
        maps.append(for_frames(trace, mean_mask(masks, scores.to(masks), down, across)[None])[0])
        counts.append(len(masks))
    return Noted(torch.stack(maps).float().to(trace.images.device), {"masks": torch.tensor(counts)})


def merged(channels: Coarse, down: Stretch, across: Stretch, threshold: float) -> Coarse:
    """The masks of one image: sums of similar channels."""
    single = from_0_to_1(channels, down, across)
    labels = torch.from_numpy(clusters(distances(single, down, across), threshold))
    sums = single.new_zeros(int(labels.max()) if len(labels) else 0, *single.shape[1:])
    return from_0_to_1(sums.index_add_(0, labels - 1, single), down, across)


def from_0_to_1(maps: Coarse, down: Stretch, across: Stretch) -> Coarse:
    """Scale maps so that they range from 0 to 1 after upsampling; constant maps are dropped."""
    large = enlarge(maps, turns(down), turns(across)).flatten(1)
    low, width = large.amin(1), large.amax(1) - large.amin(1)
    varied = width > FLAT * large.abs().amax(1)
    each = (-1, *[1] * (maps.ndim - 1))
    return (maps[varied] - low[varied].view(each)) / width[varied].view(each)


def turns(large: Stretch) -> Stretch:
    """The pixels between which the upsampled map is linear, so that its extremes are among them."""
    seen = large > 0
    new = torch.cat([seen.new_ones(1), (seen[1:] != seen[:-1]).any(1), seen.new_ones(1)])
    return large[new[1:] | new[:-1]]


def distances(maps: Coarse, down: Stretch, across: Stretch) -> Float[Tensor, "K K"]:
    """1 − cosine of the upsampled maps, which need not be formed: ⟨U m Vᵀ, U m′ Vᵀ⟩ = ⟨UᵀU m VᵀV, m′⟩."""
    products = enlarge(maps, down.mT @ down, across.mT @ across).flatten(1) @ maps.flatten(1).mT
    norms = products.diagonal().sqrt()
    return 1 - products / (norms[:, None] * norms)


def clusters(distance: Float[Tensor, "K K"], threshold: float) -> np.ndarray:
    """The cluster of each map, from 1: complete linkage, merged below the threshold."""
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(distance) < 2:
        return np.ones(len(distance), np.int64)
    pairs = distance.numpy()[np.triu_indices(len(distance), 1)]
    found = fcluster(linkage(pairs, "complete"), np.nextafter(threshold, 0), "distance")
    return np.asarray(found, np.int64)


def mask_scores(
    trace: Trace,
    index: int,
    target: Target,
    masks: Coarse,
    down: Stretch,
    across: Stretch,
    hiding: Tensor | None,
    key: Hashable,
) -> Scores:
    """s of every mask of one image; without noise its last two terms cancel."""
    count, image = len(masks), widen(trace.images[index])
    coarse, down, across = (t.to(image) for t in (masks, down, across))
    hidden = torch.zeros_like(image) if hiding is None else hiding.to(image)

    def pictures(part: slice) -> Images:
        """The image under each mask, then for each mask the whole image with the same noise."""
        number = torch.arange(part.start, part.stop, device=image.device)
        mask = for_frames(trace, enlarge(coarse[number % count], down, across))[..., None, :, :]
        shown = torch.where((number < count).view(-1, *[1] * image.ndim), mask, 1)
        return (image * shown + hidden * (1 - mask)).to(trace.images.dtype)

    if not count:
        return image.new_zeros(0)
    if hiding is None:
        return scores_of(trace, index, target, pictures, count, "vit_cx", key)
    p = scores_of(trace, index, target, pictures, 2 * count, "vit_cx", key)
    return p[:count] - p[count:] + trace.score(target)[index].detach()


def mean_mask(masks: Coarse, scores: Scores, down: Stretch, across: Stretch) -> Float[Tensor, "*tubelets Y X"]:
    """Σ s·M / Σ M / K; upsampling is linear, so the sums are upsampled."""
    both = enlarge(torch.stack([torch.tensordot(scores, masks, 1), masks.sum(0)]), down, across)
    return both[0] / both[1].clamp_min(FLAT) / max(1, len(masks))
