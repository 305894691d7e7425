from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool
from pydantic import Field
from torch import Tensor

from vitreous.metrics.case import Case, Measured
from vitreous.metrics.faithfulness.curves import Scale, Share, first, least_first
from vitreous.registry import metric
from vitreous.trace.perturb.dropped_runs import lean_run
from vitreous.trace.perturb.hide_patches import pixels_of
from vitreous.trace.perturb.variant_scores import scores_each
from vitreous.trace.run import Finished
from vitreous.trace.trace import Trace
from vitreous.types import Images

NEAR = 1e-7  # the error of what is solved step by step, as a share


@metric(better="higher", cite="rong2022consistent")
def road(
    case: Case,
    *,
    shares: Annotated[tuple[Share, ...], Field(min_length=1, description="shares of the patches that are removed")] = (
        0.2,
        0.4,
        0.6,
        0.8,
    ),
    noise: Annotated[float, Field(ge=0, description="standard deviation of what is added to removed pixels")] = 0.01,
    seed: Annotated[int, Field(ge=0, description="another seed gives other noise")] = 0,
    of: Scale = "probability",
) -> Measured:
    """How much more removing the most relevant patches hurts than removing the least (remove and debias); patches are
    inpainted, so no hole gives them away.

    mean over s of (y(target) without the ⌈n·s⌉ least relevant patches − without the most relevant)/2, y the probability
    or what `of` says; a removed pixel is the weighted mean of its neighbours (1/6 each beside, 1/12 each across), all
    of them solved at once, plus noise
    """
    patches = case.order.shape[1]
    counts = [min(math.ceil(round(share * patches, 6)), patches - 1) for share in shares]
    hidden = torch.cat([first(order, counts) for order in (least_first(case), case.order)], 1)
    rows = [image for image in range(len(hidden)) for _ in range(hidden.shape[1])]
    missing = pixels_of(case.trace, hidden.reshape(len(rows), *case.trace.layout.cells))[..., 0, :, :]
    hiss = noise * unit_noise(case.trace, seed)

    def pictures(part: slice) -> Images:
        index = rows[part]
        return impute(case.trace.images[index], missing[part], hiss[index])

    def run(part: slice) -> Finished:
        return lean_run(case.trace, pictures(part), rows=rows[part])

    key = ("road", *counts, noise, seed)
    scores = scores_each(case.trace, case.scored(of), rows, run, "road", key=key, ends=case.ends)
    least, most = scores.view(len(hidden), 2, len(counts)).unbind(1)
    curve = (least - most) / 2
    return Measured(curve.mean(1), curve, shares)


def unit_noise(trace: Trace, seed: int) -> Images:
    """Standard normal noise from a stream of each image's own."""
    drawn = [torch.randn(trace.images.shape[1:], generator=stream) for stream in trace.generators(seed)]
    return torch.stack(drawn).to(trace.images.device)


def impute(images: Images, missing: Bool[Tensor, "V *frames Y X"], noise: Images) -> Images:
    """Each image with its missing pixels made of those around them, and noise on top."""
    planes = images.double().movedim(-3, 1).cpu().numpy()  # [V channels (T) Y X]
    made = [fill_in(image, gone) for image, gone in zip(planes, missing.cpu().numpy())]
    smooth = torch.from_numpy(np.stack(made)).movedim(1, -3).to(noise)
    return torch.where(missing[..., None, :, :], smooth + noise, images).to(images.dtype)


def fill_in(image: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """The image [3 Y X] with x_i Σ_j w_ij = Σ_j w_ij x_j for every pixel that is gone: a sparse linear system.

    The pixels of a video [3 T Y X] also have neighbours in time; its system is solved step by step, as its factors
    would not fit into memory.
    """
    from scipy.sparse.linalg import cg, splu

    weights, sums = neighbours(*gone.shape)
    gone, values = gone.ravel(), image.reshape(len(image), -1).copy()
    rows = weights[gone]
    system = sums[gone][:, gone] - rows[:, gone]
    given = rows[:, ~gone] @ values[:, ~gone].T
    if image.ndim == 4:
        values[:, gone] = [cg(system, side, rtol=NEAR)[0] for side in given.T]
        return values.reshape(image.shape)
    factors = splu(system.tocsc(), permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True}, diag_pivot_thresh=0.0)
    values[:, gone] = factors.solve(given).T
    return values.reshape(image.shape)


@lru_cache(maxsize=4)
def neighbours(*shape: int) -> tuple[Any, Any]:
    """How much each pixel weighs for each other [YX YX], and the sums of its rows on a diagonal."""
    from scipy.sparse import diags_array, eye_array, kron

    *frames, height, width = shape
    down, across = (diags_array([np.ones(side - 1)] * 2, offsets=[-1, 1]) for side in (height, width))
    beside = kron(eye_array(height), across) + kron(down, eye_array(width))
    weights = (beside / 6 + kron(down, across) / 12).tocsr()
    for count in frames:
        then = diags_array([np.ones(count - 1)] * 2, offsets=[-1, 1]) / 6 if count > 1 else eye_array(1) * 0
        weights = (kron(eye_array(count), weights) + kron(then, eye_array(height * width))).tocsr()
    return weights, diags_array(weights.sum(1)).tocsr()
