"""Compare what vitreous computes with a second way to compute it: plain torch, brute force, other batches."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitreous._support.memory import out_of_memory
from vitreous.api import explain
from vitreous.capture.attention import widen
from vitreous.errors import ModelError, Unsupported, VitreousError, explained
from vitreous.inspect.check.result import State, Verified
from vitreous.models.layout import Layout
from vitreous.models.model import Model
from vitreous.trace.perturb.drop_tokens import scores_without
from vitreous.trace.perturb.fills import filled
from vitreous.trace.perturb.hide_patches import scores_hidden
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace

STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of finite differences, relative to the image
FINE = (1e-7, 1e-8, 1e-9, 1e-10)  # further steps where float64 allows them
SLOPE = 0.1  # what finite differences may be off: networks are curved, and outputs rounded
NEAR = 0.9  # cells that the centre of a change may lie from its patch; a stem of convolutions shifts it by half a cell
WEAK = 0.05  # strength of a change, relative to the image: a strong one moves every token of a deep network
CONTRAST = 1.5  # of the cell that moves most to the median, from which on its place means something
RANKED = 0.7  # share of the cells that a changed patch's cell has to exceed in the last layer


def plain(model: Model, images: Tensor, grad: bool = False) -> Tensor:
    """The network's own output, without anything of ours around it."""
    with model.still(), torch.inference_mode(False), torch.set_grad_enabled(grad):
        return model.run(images)


def alone(model: Model, images: Tensor) -> Tensor:
    """The same, each image by itself."""
    return torch.cat([plain(model, image[None]) for image in images])


@dataclass(frozen=True)
class Subject:
    """What is verified: a model, two images, and the score that is explained."""

    model: Model
    images: Tensor
    target: Target  # fixed on the images
    output: Tensor  # of plain runs, each image alone

    @property
    def layout(self) -> Layout:
        return self.model.layout_at((self.images.shape[-2], self.images.shape[-1]))

    def trace(self) -> Trace:
        """A new trace, with nothing recorded."""
        return Trace(self.model, self.images)

    def score(self, images: Tensor, row: int) -> Tensor:
        """The score of variants of one image, each run alone."""
        output = alone(self.model, images)
        return widen(self.target.of_rows([row] * len(images))(output, output))

    def limit(self, exact: float) -> float:
        """The error that rounding explains: `exact` in single precision."""
        wide = (torch.float64, torch.float32)  # maps and scores are float32 in both
        return exact if self.model.dtype in wide else min(0.2, exact * 300)


@dataclass(frozen=True)
class Finding:
    """The error of one comparison; None if there is nothing to compare with, and `note` says why."""

    error: float | None
    limit: float = 0.0
    note: str = ""
    unit: str = ""  # of the error, if it is not relative
    each: tuple[float, ...] = ()


def verify(subject: Subject) -> Iterator[Verified]:
    """All comparisons, one after the other; none of them raises."""
    steps: list[tuple[str, Callable[[Subject], Finding]]] = [
        ("output depends on the image", output_moves),
        ("two runs of the same images", same_again),
        ("an image alone and in a batch", batch_of_two),
        ("A·V = O in every layer", attention_products),
        ("gradient and torch.autograd", plain_gradient),
        ("gradient of one image and finite differences", single_gradient),
        ("patches and their tokens, first layer", first_tokens),
        ("patches and their tokens, last layer", last_tokens),
        ("token_ablation and removing the token", removed_tokens),
        ("occlusion and painting over the pixels", painted_pixels),
    ]
    for what, compare in steps:
        yield verified(what, subject, compare)


def verified(what: str, subject: Subject, compare: Callable[[Subject], Finding]) -> Verified:
    try:
        found = compare(subject)
    except VitreousError as refusal:
        return Verified(what, "unknown", note=explained(refusal))
    except Exception as crash:
        if out_of_memory(crash):
            return Verified(what, "unknown", note="there is too little memory for this comparison")
        return Verified(what, "bug", note=explained(crash), traceback=traceback.format_exc())
    if found.error is None:
        return Verified(what, "unknown", note=found.note)
    state: State = "right" if found.error <= found.limit else "wrong"  # NaN is wrong
    return Verified(what, state, found.error, found.limit, found.note, found.unit, found.each)


def worst(errors: Sequence[float]) -> float:
    """The largest error; NaN if one is."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def difference(one: Tensor, other: Tensor) -> float:
    """max |a − b| / max |b|."""
    one, other = widen(one.detach()), widen(other.detach())
    return float((one - other).abs().max() / other.abs().max().clamp_min(torch.finfo(other.dtype).tiny))


# ------------------------------------------------------------------------------------------------------ the network


def output_moves(subject: Subject) -> Finding:
    """An output that is NaN or the same for two images makes every map meaningless."""
    if not subject.output.isfinite().all():
        return Finding(float("nan"), 0.0, "the output is NaN or infinite")
    if len(subject.output) < 2 or difference(subject.output[:1], subject.output[1:2]) > 1e-6:
        return Finding(0.0)
    return Finding(1.0, 0.0, "the output is the same for both images: untrained weights that are zero?")


def same_again(subject: Subject) -> Finding:
    error, limit = difference(alone(subject.model, subject.images), subject.output), subject.limit(1e-5)
    return Finding(error, limit, "the network is random or keeps a state" if error > limit else "")


def batch_of_two(subject: Subject) -> Finding:
    """What methods are given for a batch, and the network's own outputs."""
    error, limit = difference(subject.trace().output, subject.output), subject.limit(1e-3)
    return Finding(error, limit, "the images of a batch influence each other" if error > limit else "")


def attention_products(subject: Subject) -> Finding:
    layout = subject.layout
    if layout.obstacle is not None and not layout.stages:
        return Finding(None, note=f"the model {layout.obstacle}")
    each = tuple(float(layer.error().max()) for layer in subject.trace().attention)
    return Finding(worst(each), subject.limit(1e-4), each=each)


def plain_gradient(subject: Subject) -> Finding:
    """∂y/∂x of the batch, by ours and by torch; where these differ, finite differences decide."""
    ours = explain(subject.model, subject.trace(), "gradient", subject.target, reduce="sum").map
    limit, error = subject.limit(1e-3), float("nan")
    try:
        leaf = subject.images.detach().clone().requires_grad_()
        with torch.enable_grad():
            output = plain(subject.model, leaf, grad=True)
            (grad,) = torch.autograd.grad(subject.target(output, output).sum(), leaf)
        error = difference(ours, widen(grad).sum(1))
        if error <= limit:
            return Finding(error, limit)
        said = f"torch.autograd differs by {error:.1e}"
    except RuntimeError as refusal:
        said = f"torch.autograd says {explained(refusal)}"
    off = worst(each := [slope_error(subject, row, map) for row, map in enumerate(ours)])
    if off <= SLOPE:
        return Finding(off, SLOPE, f"finite differences agree, {said}", each=tuple(each))
    note = f"{said}, and finite differences by {off:.1e}"
    return Finding(off if error != error else error, limit, note, each=tuple(each))


def single_gradient(subject: Subject) -> Finding:
    """∂y/∂x of each image alone: torch's own backward of one image has been wrong before."""
    if subject.model.dtype not in (torch.float32, torch.float64):
        return Finding(None, note="half precision is too coarse for finite differences")
    each = []
    for row, image in enumerate(subject.images):
        target = subject.target.of_image(row)
        ours = explain(subject.model, Trace(subject.model, image[None]), "gradient", target, reduce="sum").map
        each.append(slope_error(subject, row, ours[0]))
    return Finding(worst(each), SLOPE, each=tuple(each))


def slope_error(subject: Subject, row: int, ours: Tensor) -> float:
    """How far the slope along the gradient itself, by finite differences, is from its length."""
    image, length = subject.images[row], ours.norm()
    if not length > 0:
        return float("nan")
    found = []
    for size in (
        *STEPS,
        *(FINE if image.dtype == torch.float64 else ()),
    ):  # a long step leaves the linear part of the network, a short one drowns in rounding
        step = (ours / length).to(image) * size * image.norm()  # the same in each channel, as the map sums over them
        expected = float((ours * step.to(ours)).sum())
        up, down = subject.score(torch.stack([image + step, image - step]), row).double()
        found.append(abs(float(up - down) / 2 / expected - 1))
    return min(found)


# ------------------------------------------------------------------------------------------------------- the patches


def some_patches(grid: tuple[int, int]) -> list[tuple[int, int]]:
    """Three patches that no transposition, turn or reflection of the grid exchanges."""
    h, w = grid
    return list(dict.fromkeys([(h // 4, w // 2), (h // 2, w - 1 - w // 4), (h - 1 - h // 4, w // 4)]))


def repainted(image: Tensor, down: slice, across: slice, seed: int) -> Tensor:
    """The same image with a little noise added in a rectangle."""
    noise = torch.randn(image[..., down, across].shape, generator=torch.Generator().manual_seed(seed)).to(image)
    found = image.clone()
    found[..., down, across] += noise * image.float().std().clamp_min(0.1).to(image) * WEAK
    return found


def tokens_of(subject: Subject, images: Tensor, layer: int) -> Tensor:
    """The tokens that enter a layer, as methods place them: [B h w D]."""
    if not subject.layout.entries:
        raise Unsupported(f"{subject.model.name} shows no tokens before its attention")
    traces = [Trace(subject.model, image[None]) for image in images]
    return torch.cat([one.to_patches(one.batch_first(one.cut(layer).entry.detach())) for one in traces])


def first_tokens(subject: Subject) -> Finding:
    """A changed patch moves the token of its own cell, or, in an overlapping stem, those around it."""
    grid, image, each = subject.layout.grid, subject.images[:1], []
    places = some_patches(grid)
    images = [repainted(image, *subject.layout.rectangle(*place), seed) for seed, place in enumerate(places)]
    tokens = tokens_of(subject, torch.cat([image, *images]), 0)
    scale = [side / here for side, here in zip(grid, tokens.shape[1:3])]
    for place, cells in zip(places, (tokens[1:] - tokens[:1]).norm(dim=-1)):
        weight = torch.where(cells > 0.3 * cells.max(), cells, 0).square().double()
        sums = weight.sum(1), weight.sum(0)
        centre = [
            float((line * (torch.arange(len(line)).to(line) + 0.5)).sum() / line.sum()) * scale[axis] - 0.5
            for axis, line in enumerate(sums)
        ]
        each.append(max(abs(at - own) for at, own in zip(centre, place)))
    unit = "patches from a change to the tokens that move"
    return Finding(worst(each), NEAR * max(*scale, 1), "", unit, tuple(each))


def last_tokens(subject: Subject) -> Finding:
    """In the last layer everything moves; the cell of the changed pixels still moves more than most others."""
    image, size = subject.images[:1], subject.images.shape[-2:]
    h, w = tokens_of(subject, image, -1).shape[1:3]
    if h * w < 9:
        return Finding(None, note=f"its last layer has {h}×{w} cells, too few to tell")
    places = some_patches((h, w))
    spans = [[slice(at * y // n, (at + 1) * y // n) for at, n, y in zip(place, (h, w), size)] for place in places]
    images = [repainted(image, down, across, seed) for seed, (down, across) in enumerate(spans)]
    tokens = tokens_of(subject, torch.cat([image, *images]), -1)
    moved = (tokens[1:] - tokens[:1]).norm(dim=-1)
    if not (moved.flatten(1).amax(1) > CONTRAST * moved.flatten(1).median(1).values).all():
        return Finding(None, note="a change of one patch moves all cells of its last layer alike")
    each = [float((cells > cells[place]).float().mean()) for place, cells in zip(places, moved)]
    unit = "of the cells move more than the cell that was changed"
    return Finding(sum(each) / len(each), 1 - RANKED, "", unit, tuple(each))


# ------------------------------------------------------------------------------------------------------- brute force


def removed_tokens(subject: Subject) -> Finding:
    """The fall of the score when a token is taken out of the sequence before the first block."""
    layout, trace = subject.layout, subject.trace()
    if layout.obstacle is not None:
        return Finding(None, note=f"the model {layout.obstacle}")
    if len(layout.blocks) != layout.layers:
        return Finding(None, note="its layers are not modules of their own, so none can be told to leave a token out")
    tokens = [layout.token(*place) for place in some_patches(layout.grid)]
    left = torch.tensor(tokens, device=subject.images.device)
    whole = subject.score(subject.images[:1], 0)
    ours = scores_without(trace, 0, subject.target.of_image(0), left, "token_ablation")
    try:
        brute = torch.cat([without(subject, token) for token in tokens])
    except ModelError:
        return Finding(None, note="the network itself does not run with fewer tokens")
    falls, expected = widen(whole - ours), widen(whole - brute)
    scale = torch.maximum(expected.abs().max(), 0.01 * whole.abs().max()).clamp_min(1e-30)
    each = tuple(((falls - expected).abs() / scale).tolist())
    return Finding(worst(each), subject.limit(2e-3), each=each)


def without(subject: Subject, token: int) -> Tensor:
    """The score of the first image, run by the network itself with one token fewer."""
    layout, axis = subject.layout, 1 - subject.layout.batch_axis

    def drop(tokens: Any) -> Any:
        if not isinstance(tokens, Tensor) or tokens.ndim != 3 or tokens.shape[axis] != layout.tokens:
            raise ModelError("the first block takes no tokens")
        keep = [i for i in range(layout.tokens) if i != token]
        return tokens.index_select(axis, torch.tensor(keep, device=tokens.device))

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (drop(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: drop(kwargs[name])}

    block = subject.model.module.get_submodule(layout.blocks[0])
    hook = block.register_forward_pre_hook(before, with_kwargs=True)
    try:
        return subject.score(subject.images[:1], 0)
    finally:
        hook.remove()


def painted_pixels(subject: Subject) -> Finding:
    """The fall of the score when a patch is painted in the image's mean colour."""
    trace, image, places = subject.trace(), subject.images[:1], some_patches(subject.layout.grid)
    hidden = torch.zeros(len(places), *subject.layout.grid, dtype=torch.bool, device=image.device)
    images = image.repeat(len(places), 1, 1, 1)
    for i, place in enumerate(places):
        hidden[(i, *place)] = True
        down, across = subject.layout.rectangle(*place)
        images[i, :, down, across] = image[0].float().mean((1, 2)).to(image)[:, None, None]
    whole = subject.score(image, 0)
    ours = scores_hidden(trace, subject.target.of_image(0), [0] * len(places), hidden, filled(trace, "mean")[:1])
    falls, expected = widen(whole - ours), widen(whole - subject.score(images, 0))
    scale = torch.maximum(expected.abs().max(), 0.01 * whole.abs().max()).clamp_min(1e-30)
    each = tuple(((falls - expected).abs() / scale).tolist())
    return Finding(worst(each), subject.limit(2e-3), each=each)
