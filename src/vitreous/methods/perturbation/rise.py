from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import widen
from vitreous.registry import method
from vitreous.trace.perturb.drop_tokens import scored_as, scores_of
from vitreous.trace.perturb.fills import Fill, Stretch, enlarge, filled, for_frames, stretch
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images, Map

Cells = Bool[Tensor, "K *tubelets s s"]
Shifts = Int[Tensor, "K 2"]


@method(cite="petsiuk2018rise", targeted=True, alone=True, level=True, cheap={"masks": 16})
def rise(
    trace: Trace,
    target: Target,
    *,
    masks: Annotated[int, Field(ge=1, description="runs of each image; the published 4000 to 8000 are smoother")] = 500,
    cells: Annotated[int, Field(ge=2, description="cells of a mask, down and across")] = 7,
    keep: Annotated[float, Field(gt=0, lt=1, description="share of the cells that stay visible")] = 0.5,
    fill: Annotated[
        Fill, Field(description="what hides: the image's mean colour, its blurred self, or zeros")
    ] = "zero",
    of: Annotated[Literal["logit", "probability"], Field(description="what is averaged")] = "logit",
    seed: Annotated[int, Field(ge=0, description="another seed gives other masks")] = 0,
) -> Map:
    """The mean score over the random masks that show a pixel; for networks of which only the output is known, at
    hundreds of forward passes.

    Σ_k y(x⊙M_k + fill⊙(1 − M_k))·M_k / Σ_k M_k; M_k random cells, enlarged bilinearly and shifted by less than a cell
    """
    fixed, _ = scored_as(trace, target, of)
    cover = filled(trace, fill)
    tubelets = trace.layout.cells[:-2]  # of a video, each has cells of its own
    drawn = [draw(stream, masks, cells, keep, trace.size, tubelets) for stream in trace.generators(seed)]
    key = "rise", masks, cells, keep, fill, seed
    parts = [mean_shown(trace, i, fixed.of_image(i), cover[i : i + 1], *drawn[i], key) for i in range(len(trace))]
    return torch.stack(parts)


def draw(
    stream: torch.Generator,
    masks: int,
    cells: int,
    keep: float,
    size: tuple[int, int],
    tubelets: tuple[int, ...] = (),
) -> tuple[Cells, Shifts]:
    """Which cells of each mask are visible, and how many pixels it is shifted up and to the left."""
    visible = torch.rand(masks, *tubelets, cells, cells, generator=stream) < keep
    shifts = [torch.randint(-(-side // cells), (masks,), generator=stream) for side in size]
    return visible, torch.stack(shifts, 1)


def mean_shown(
    trace: Trace, index: int, target: Target, cover: Images, visible: Cells, shifts: Shifts, key: Hashable
) -> Float[Tensor, "*frames Y X"]:
    """The weighted mean of one image; masks are made a few at a time, once for the scores and once for the sum."""
    image = widen(trace.images[index : index + 1])
    coarse, shifts, cover = visible.to(image), shifts.to(image.device), cover.to(image)
    down, across = (stretch_shifted(visible.shape[-1], side, image) for side in trace.size)

    def shown(part: slice) -> Float[Tensor, "K *frames Y X"]:
        own = cut(down, shifts[part, 0], trace.size[0]), cut(across, shifts[part, 1], trace.size[1])
        return for_frames(trace, enlarge(coarse[part], *own))

    def pictures(part: slice) -> Images:
        return torch.lerp(cover, image, shown(part)[..., None, :, :]).to(trace.images.dtype)

    y = scores_of(trace, index, target, pictures, len(coarse), "rise", (key, index))

    def sums(part: slice) -> Float[Tensor, "2 *frames Y X"]:
        seen = shown(part)
        return torch.stack([torch.tensordot(y[part].to(seen), seen, 1), seen.sum(0)])

    size = batch_size(4 * image[0].nbytes, image.device)
    both = torch.stack(in_batches(sums, len(coarse), size)).sum(0)
    return both[0] / both[1].clamp_min(torch.finfo(both.dtype).eps)


def stretch_shifted(cells: int, side: int, like: Tensor) -> Stretch:
    """Cells upsampled to one cell more than the image, so that there is room to shift."""
    return stretch(cells, (cells + 1) * -(-side // cells)).to(like)


def cut(whole: Stretch, shifts: Int[Tensor, "K"], side: int) -> Stretch:
    """The part of the upsampled cells that each mask uses."""
    return whole[shifts[:, None] + torch.arange(side, device=shifts.device)]
