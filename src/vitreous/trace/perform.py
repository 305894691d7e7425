"""Carry out a forward pass that a `Run` describes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitreous._support.memory import capturing, later
from vitreous._support.noise import image_keys
from vitreous.capture.attention_backward import Follower
from vitreous.capture.capture import Capture, Enough, Forms
from vitreous.capture.entries import CutAt, NotedAt, Unfrozen
from vitreous.capture.narrowed_block import NarrowedBlock, entering
from vitreous.capture.pauses import Lost, Pauses, Sights
from vitreous.errors import CaptureError, ModelError, Unsupported
from vitreous.images.preprocess import refuse_infinite
from vitreous.models.decoder import learning
from vitreous.models.facts import Facts
from vitreous.models.inputs import Given, Inputs
from vitreous.models.layout import Layout
from vitreous.models.model import Model
from vitreous.trace.again import recomputing
from vitreous.trace.further_rows import extending, leaving, run_extended
from vitreous.trace.run import NO_LAYER, Finished, Narrow, Run, Stopped
from vitreous.types import Extent, Images

THROUGHOUT = "a run is watched throughout"


def perform(
    model: Model, layout: Layout, images: Images, how: Run, autocast: bool, given: Given | None = None
) -> Finished | Stopped:
    """Run the model. `given`: what each row gets beside its image; then there are as many images as rows."""
    if layout.sights is None or model.facts.knows(THROUGHOUT):
        return watched(model, layout, images, how, autocast, given)
    try:
        return watched(model, layout, images, how, autocast, given, layout.sights)
    except Lost:
        model.facts.note(THROUGHOUT, True)
    if how.forms is not None or how.change is not None:  # they have seen the beginning of this run already
        said = f"{model.name} ran its attention in another order than in its layout run"
        raise CaptureError(f"{said}; it is watched more closely from now on: ask for the same once more")
    return watched(model, layout, images, how, autocast, given)


def watched(
    model: Model,
    layout: Layout,
    images: Images,
    how: Run,
    autocast: bool,
    given: Given | None,
    sights: Sights | None = None,
) -> Finished | Stopped:
    """The same; if it is known where it computes attention (`sights`), it is not watched in between."""
    device, rows, count = images.device.type, how.count or len(images), len(images)
    output = None
    if given:
        images = images if len(how.rows or images) == count else one_each(images, how)
        rows = len(images)
    if (how.grad or how.layer is not None) and not model.has_gradients:
        raise Unsupported(f"{model.name} has int8 weights, which pass no gradient on; try attention, occlusion or rise")
    if how.layer is not None and not layout.entries:
        raise Unsupported(f"{model.name} has no visible tokens before its attention, which this method needs")
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(how.grad))
        amp = stack.enter_context(torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=autocast))
        still = stack.enter_context(model.still())
        stack.enter_context(how.within())
        if how.grad and layout.decoder is not None:
            stack.enter_context(learning(model.module))
        stack.enter_context(with_other_tokens(model, layout, how, count))
        most = layout.calls if how.ends and not still.hooked else None
        stack.enter_context(suppress(Enough))
        rest: dict[str, Any] = {"forms": how.forms, "change": how.change}
        seen = stack.enter_context(Capture(still.names, rows, since=how.since, most=most, **rest))
        narrow = None
        if how.narrow is not None and not still.hooked:
            narrow = stack.enter_context(narrowed_block(model, layout, how.narrow, how.forms))
        at = NotedAt if how.grad else CutAt
        cut = None if how.layer is None else at(layout.entries[how.layer], seen, how.edit, layout.flat)
        pauses = None if sights is None or still.hooked else pausing(model, layout, how, sights, seen, narrow, cut)
        frozen = Unfrozen() if how.grad and pauses is None else nullcontext()
        stack.enter_context(cut if cut is not None else frozen)
        again = stack.enter_context(recomputing(model, layout, amp, None if still.hooked else how.recompute, seen, cut))
        stack.enter_context(pauses or nullcontext())
        call = partial(model.run, images, given) if given else partial(model.run, images)
        output = call() if how.extend is None else run_extended(model.name, call)
    layers = tuple(layout.arranged(call, rows) for call in seen.calls if layout.is_layer(call, rows))
    known = images, layers, how.since, tuple(again.calls)
    if output is None:
        return Stopped(*known)
    if len(output) != rows and how.extend is None:
        raise ModelError(f"{model.name} returns {len(output)} rows for {rows} images")
    pools = [call for call in seen.calls if layout.pooled and layout.is_pool(call, rows)]
    head = seen.linear if model.classifier is not False else None  # the last layer of a backbone is no classifier
    return Finished(
        *known,
        output=output,
        embedding=head[0] if head is not None and head[1] is output else output,
        pool=pools[-1] if pools else None,
        decoded=tuple(call for call in seen.calls if layout.decoder is not None and layout.decoder.holds(call)),
        leaf=None if cut is None else cut.leaf,
    )


def with_other_tokens(model: Model, layout: Layout, how: Run, count: int) -> ExitStack:
    """A context in which tokens are changed where they enter or leave blocks, and rows appended, if this is asked."""
    stack = ExitStack()
    if how.enter is not None:
        stack.enter_context(entering(block_of(model, layout, how.layer or 0), how.enter))
    if how.leave is not None:
        last, times = block_of(model, layout, layout.layers - 1), layout.blocks.count(layout.blocks[-1])
        stack.callback(leaving(last, times, how.leave).remove)
    if how.extend is not None:
        if layout.blocks_since(0) == layout.layers:
            blocks = [block_of(model, layout, i) for i in range(how.extend_since, layout.layers)]
        else:
            blocks = [model.module.get_submodule(name) for name in layout.blocks]
        stack.enter_context(extending(model.name, blocks, layout.batch_axis, how.extend, count))
    return stack


def pausing(
    model: Model,
    layout: Layout,
    how: Run,
    sights: Sights,
    seen: Capture,
    narrow: NarrowedBlock | None,
    cut: CutAt | None,
) -> Pauses | None:
    """The pauses of a run; None if it is watched throughout: where its blocks are called otherwise, or again."""
    otherwise = how.recompute or how.extend or how.enter or how.leave
    differentiated = how.grad or how.layer is not None
    if otherwise is not None or (differentiated and not sights.steady):
        return None
    numbers = layout.numbers or tuple(range(len(sights.spans)))
    if cut is None or how.layer is None:
        at = NO_LAYER
    elif layout.layers == len(numbers) and sights.is_between(cut.entry, numbers[how.layer]):
        at = numbers[how.layer]
    else:
        return None
    last = NO_LAYER if narrow is None else numbers[-1]
    modules: dict[str, nn.Module] = model.facts.find("modules around attention", dict)
    block = layout.blocks[-1] if narrow is not None else ""
    return Pauses(model.module, modules, sights, seen, narrow, block, last, cut, at)


def one_each(images: Images, how: Run) -> Float[Tensor, "rows *image"]:
    """An image for each row: the blocks would get more rows than the network has inputs."""
    assert how.rows is not None
    return images.expand(len(how.rows), *images.shape[1:]) if len(images) == 1 else images[list(how.rows)]


def block_of(model: Model, layout: Layout, layer: int) -> nn.Module:
    """The block module of a layer."""
    if len(layout.blocks) != layout.layers:
        raise Unsupported(f"{model.name} {layout.no_blocks}, which this method needs; try gae, rollout or gradient")
    return model.module.get_submodule(layout.blocks[layer])


def narrowed_block(model: Model, layout: Layout, narrow: Narrow, forms: Forms | None) -> NarrowedBlock:
    """The narrowed last block; some tokens may have been cut out before."""
    read = layout.read_tokens
    assert read is not None
    gone = layout.tokens - (narrow.tokens or layout.tokens)
    return NarrowedBlock(
        block_of(model, layout, layout.layers - 1),
        [token if token < layout.prefix else token - gone for token in read],
        tokens=layout.tokens - gone,
        prefix=layout.prefix,
        patches=layout.patches - gone,
        axis=layout.batch_axis,
        fold=narrow.fold,
        show=forms.show if isinstance(forms, Follower) else None,
    )


class Batch:
    """Runs a model on images and variants of them; every row gets the inputs of the image that it belongs to."""

    layout: Layout

    def __init__(self, model: Model, images: Any, inputs: Any = None) -> None:
        self.model = model
        self.images: Images = model.prepare(images)
        self.inputs: Inputs = model.arguments.check(inputs, len(self.images), self.images)
        self.size: tuple[int, int] = (self.images.shape[-2], self.images.shape[-1])
        self.extent: Extent = (*self.images.shape[1:-3], *self.size)
        self._sum = later(self.images.float().sum()) if self.images.is_cuda and not capturing(self.images) else None
        self.autocast = torch.is_autocast_enabled(self.images.device.type)
        self.surgery: Callable[[Run], Run] | None = None  # changes every run: what a part of the network gives
        self.compiled = False  # whether runs to the output may be compiled (compiled.py)
        self.once = False  # for one map of one target: a graph is freed on its first way back

    def __len__(self) -> int:
        return len(self.images)

    @property
    def facts(self) -> Facts:
        """What was found out about the network with inputs of this kind."""
        return self.model.facts_for(self.inputs)

    def refuse_infinite(self) -> None:
        """Raise if an image on a GPU contains NaN or infinity; checked once, after the first forward pass."""
        if self._sum is not None and not capturing(self.images):
            refuse_infinite(self._sum())
            self._sum = None

    def look(self, images: Images, how: Run) -> Finished | Stopped:
        """A new forward pass, possibly stopped early."""
        how = how if self.surgery is None else self.surgery(how)
        if not self.inputs:
            seen = perform(self.model, self.layout, images, how, self.autocast)
        else:
            how, given = self._given(images, how)
            seen = perform(self.model, self.layout, images, how, self.autocast, given)
        self.refuse_infinite()
        return seen

    def _given(self, images: Images, how: Run) -> tuple[Run, Given]:
        """The same run and what its rows get; raise if it is not known which image each row belongs to."""
        count = how.count or len(images)
        if how.noise:
            return how, self.model.arguments.sample(self.inputs).rows([0] * count)
        rows = how.rows
        if rows is None and len(self) == 1 and how.extend is None:
            rows = (0,) * count
        elif rows is None and images is self.images and how.extend is None and count == len(self):
            rows = tuple(range(count))
        if rows is None:
            said = "this method makes variants of the images and does not say of which image each is (Run.of)"
            raise Unsupported(f"{said}, so it cannot take inputs. Try gradient, gae or occlusion.")
        return how.of(rows), self.inputs.rows(rows)

    def run(self, images: Images, how: Run) -> Finished:
        """A new forward pass to the output."""
        seen = self.look(images, how)
        assert isinstance(seen, Finished), "a run to the output was stopped"
        return seen

    def generators(self, seed: int) -> list[torch.Generator]:
        """One random stream per image."""
        return [torch.Generator().manual_seed(key) for key in self.keys(seed).tolist()]

    def keys(self, seed: int) -> Int[Tensor, "B"]:
        """A random key per image that depends on the image and the seed, not on batch, device or precision."""
        return image_keys(self.images, seed)
