"""One model with one batch of images; forward passes are recorded when first needed and shared by all methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from vitreous.capture.attention import ROWS, Attention, widen
from vitreous.capture.attention_backward import Follower
from vitreous.capture.capture import Formed
from vitreous.capture.shown import Visitor, shown
from vitreous.errors import CaptureError, InputError, OptionError, Unsupported
from vitreous.models.decoder import HIDDEN
from vitreous.models.layout import pool_weights, read_weights
from vitreous.models.model import Model
from vitreous.models.readers import reader_weights
from vitreous.trace.big import follow_big, is_big, sparing
from vitreous.trace.crops import Crops
from vitreous.trace.last_block import keeps_apart, narrowing
from vitreous.trace.perform import Batch, block_of
from vitreous.trace.run import Finished, Narrow, Run, Stopped, gradients, is_followed, score_of
from vitreous.trace.shared import Shared, can_share, outputs, shared_by
from vitreous.trace.target import Target
from vitreous.types import HeadRows, Images, Map, Output, Row, Scores

MOST_FORMED = 2**26  # numbers in one N×N matrix per layer and image


class Trace(Batch):
    """Access to the output, the attention of every layer, the read-out, gradients, and modified forward passes."""

    def __init__(self, model: Model, images: Any, inputs: Any = None) -> None:
        super().__init__(model, images, inputs)
        self.crops = Crops(model, images)
        self.layout = model.layout_at(self.extent, self.inputs)
        self.queries: list[tuple[int, ...]] | None = None  # of a detector: those whose tokens are read (queries.py)
        self.shared: Shared | None = None  # the forward pass of many methods, if it was asked for
        self._record: Stopped | None = None
        self._cuts: dict[tuple[int, bool], Finished] = {}
        self._followed: dict[bool, tuple[Finished, Follower]] = {}
        self._kept: dict[str, tuple[Finished, Any]] = {}
        self.ends: dict[Hashable, tuple[Tensor, ...]] = {}  # of variants: what other targets can reuse
        if not keeps_apart(self):
            self.layout = model.alone_at(self.extent, self.inputs)
        if self.layout.alone and len(self) > 1:
            said = f"{model.name} mixes the images of a batch, so a trace takes one image"
            raise InputError(f"{said}; vitreous.explain runs any number, one by one")

    # ------------------------------------------------------------------------------------------------- recording

    def record(self, *, since: int = 0) -> Stopped:
        """The recorded forward pass from layer `since` on; repeated once if earlier layers are needed later."""
        if self._record is None or self._record.since > since:
            self._record = self.look(self.images, Run.to_last_attention(since=since))
        return self._record

    def whole(self) -> Finished:
        """The recorded forward pass with every layer and the output."""
        kept = self._record
        if not isinstance(kept, Finished) or kept.since > 0:
            kept = self._record = self.run(self.images, Run.to_output())
        return kept

    def differentiable(self) -> Finished:
        """The same with an autograd graph from the pixels on."""
        kept = self._record
        if not isinstance(kept, Finished) or kept.since > 0 or not kept.images.requires_grad:
            leaf = self.images.detach().clone().requires_grad_()
            kept = self._record = self.run(leaf, Run.from_pixels().of(range(len(self))))
        return kept

    def share(self) -> None:
        """Make one forward pass for many methods, with all that the model's own gradient shows; if it can be made."""
        if self.shared is None and can_share(self.model, self.layout) and not is_big(self):
            leaf, how = self.images.detach().clone().requires_grad_(), Run(grad=True, layer=self.layout.layers - 1)
            self.shared = shared_by(partial(self.run, leaf, how.of(range(len(self)))))
            self._record = self._record if self.shared is None else self.shared.run

    def release(self) -> None:
        """Let go of all forward passes; an output is kept, if there is no more to it that methods may ask for."""
        if can_share(self.model, self.layout) and not self.fresh:
            self._let_go()

    def _let_go(self) -> None:
        self._record, self.shared = outputs(self.any_finished()), None
        for passes in (self._cuts, self._followed, self._kept, self.ends):
            passes.clear()

    @property
    def fresh(self) -> bool:
        """Whether nothing has been recorded yet."""
        return not (self._record or self._cuts or self._followed or self._kept or self.ends)

    def fork(self) -> Trace:
        """A trace that shares the recorded forward pass; what is added to it, such as graphs, is not shared."""
        other = self.like(self.images)
        other._record, other.crops, other.layout, other.queries = self._record, self.crops, self.layout, self.queries
        return other

    def only(self, index: int) -> Trace:
        """A trace of one of the images; nothing is shared."""
        other = self.like(self.images[index : index + 1], [index])
        other.crops, other.layout = self.crops.of(index), self.layout
        other.queries = None if self.queries is None else self.queries[index : index + 1]
        return other

    def like(self, images: Images, rows: Sequence[int] | None = None, model: Model | None = None) -> Trace:
        """A trace of other images, or of another model, with the inputs of the images `rows`; None: of all."""
        other = Trace(model or self.model, images, self.inputs if rows is None else self.inputs.of_images(rows))
        other.autocast = self.autocast
        return other

    def cut(self, layer: int = -1, *, seen: bool = True) -> Finished:
        """A forward pass that is differentiable only from the tokens that enter a layer's attention (`entry`).

        `seen`: also record the attention from there on, which costs a little more.
        """
        number = self.layer_number(layer)
        if not self.layout.entries or self.layout.entries[number] == HIDDEN:
            raise Unsupported(f"{self.model.name} has no visible tokens before its attention, which this method needs")
        if (number, True) in self._cuts:
            return self._cuts[number, True]
        if (number, seen) not in self._cuts:
            how = Run.from_layer(number)
            how = how.narrowed(narrowing(self, fold=False)) if seen else self.least(how)
            self._cuts[number, seen] = self.run(self.images, how)
        return self._cuts[number, seen]

    def least(self, how: Run, *, proven: bool = True) -> Run:
        """The same with a narrowed last block, if no attention is needed; `proven`: see `narrowing`."""
        return how.unseen().narrowed(narrowing(self, proven=proven))

    def any_finished(self) -> Finished:
        """A forward pass with an output: any that is recorded, else a new one."""
        followed = [run for run, _ in self._followed.values()]
        kept = (self._record, *followed, *self._cuts.values(), *(run for run, _ in self._kept.values()))
        return next((run for run in kept if isinstance(run, Finished)), None) or self.whole()

    def plain(self) -> Finished:
        """A forward pass for its output only: any that is recorded, else one that keeps no attention."""
        if self.fresh and not self.layout.pooled:
            return self.kept("plain", lambda: (self.run(self.images, Run.to_output().unseen()), None))[0]
        return self.any_finished()

    def kept(self, name: str, make: Callable[[], tuple[Finished, Any]]) -> tuple[Finished, Any]:
        """A forward pass that a method makes in its own way, with the method's own records; made once per key."""
        name = name if self.queries is None else f"{name}, queries {self.queries}"
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @property
    def batch_axis(self) -> int:
        """The axis of the images in the model's token tensors."""
        return self.layout.batch_axis

    def block(self, layer: int) -> nn.Module:
        """The block module of a layer."""
        return block_of(self.model, self.layout, layer)

    # --------------------------------------------------------------------------------------- what was recorded

    @property
    def output(self) -> Output:
        return self.any_finished().output.detach().float()

    @property
    def classifies(self) -> bool:
        """Whether the outputs are classes, or values of a regression; not so those of a backbone."""
        return self.model.classifies(self.layout)

    @property
    def attention(self) -> tuple[Attention, ...]:
        """The attention of every layer, first to last."""
        layers = self.record().layers
        if not layers:
            raise self.no_layers()
        return layers

    def formed(self, make: Callable[[Attention], Tensor]) -> tuple[Attention, ...]:
        """The same; if nothing is recorded yet and A is small, `make` computes O of every layer but the last."""
        layout, count = self.layout, len(self)
        small = layout.tokens <= ROWS and not layout.stages and layout.layers * count * layout.tokens**2 <= MOST_FORMED
        if self._record is None and small and not self.images.is_cuda and layout.calls == layout.layers:
            self._record = self.look(self.images, Run.to_last_attention(forms=Formed(make)))
        return self.attention

    def no_layers(self) -> CaptureError:
        tokens = self.layout.tokens
        return CaptureError(f"{self.model.name}: no layer attends over {tokens} tokens; check the given layout")

    def layer_number(self, index: int) -> int:
        """The index of a layer; −1, −2, … count from the end."""
        count = self.layout.layers
        if count == 0 and self.layout.obstacle is None:
            raise self.no_layers()
        if count == 0:
            raise Unsupported(f"{self.model.name} has no visible tokens before its attention, which this method needs")
        if not -count <= index < count:
            raise OptionError(f"layer {index} is out of range: {self.model.name} has layers 0 to {count - 1}")
        return index % count

    def layer(self, index: int) -> Attention:
        """The attention of one layer; earlier layers are not kept."""
        number = self.layer_number(index)
        record = self.record(since=number if self.layout.calls == self.layout.layers else 0)
        if len(record.layers) != self.layout.layers - record.since:
            return self.attention[number]
        return record.layers[number - record.since]

    def verify(self, tolerance: float | None = None) -> None:
        """Raise unless A·V, recomputed, equals the output of every layer."""
        for layer in self.attention:
            layer.verify(tolerance)

    @property
    def readout(self) -> Row:
        """ρ, the read-out: the weight of each token in the classifier's input, [B N]; each row sums to one."""
        layout = self.layout
        if self.queries is not None and layout.readers:
            return reader_weights(layout.readers, layout.read_places, self.queries).to(self.images.device)
        pool = self.any_finished().pool if layout.pooled else None
        if pool is not None:
            return pool_weights(pool, layout).expand(len(self), -1)
        return read_weights(layout.read_places, layout.readout, layout.share, self.images.device).expand(len(self), -1)

    @property
    def joins(self) -> dict[int, Tensor]:
        """The weights of tokens that the classifier also reads after layers before the last, by layer."""
        places = [stage.places for stage in self.layout.stages] or [self.layout.tokens] * self.layout.layers
        return {i: read_weights(places[i], some, share, self.images.device) for i, some, share in self.layout.reads}

    @property
    def read_tokens(self) -> list[int] | None:
        """The tokens where ρ is not zero; None if all are."""
        return self.layout.read_tokens

    def read_layer(self, layer: Attention) -> HeadRows:
        """ρᵀA of every attention head; only the rows of A with a weight are formed."""
        if self.read_tokens is not None and len(self.read_tokens) == 1 and not layer.fusible:
            return layer.rows(self.read_tokens)[:, :, 0]
        return layer.read(self.readout.to(layer.wide), self.read_tokens)

    def map(self, values: Row, layer: int = 0) -> Map:
        """Convert one value per token (that enters a layer, where layers differ in their tokens) to a map."""
        return self.layout.to_map(values, layer)

    def to_patches(self, tokens: Tensor) -> Float[Tensor, "B *frames h w D"]:
        """Arrange tokens [B N D] on the patch grid, without CLS and registers ([B h w D] is unchanged)."""
        found = self.layout.to_grid(tokens)
        if found is not None:
            return found
        said = f"the {math.prod(tokens.shape[1:-1])} tokens of this layer cannot be matched with patches of the image"
        raise Unsupported(f"{self.model.name}: {said}. Try gradient, integrated_gradients or occlusion.")

    # -------------------------------------------------------------------------------------------------- gradients

    def score(self, target: Target, run: Finished | None = None) -> Scores:
        """The score of a target, one number per image."""
        return score_of(target, run or self.any_finished())

    def grads(self, target: Target, run: Finished | None = None) -> tuple[Tensor, ...]:
        """∂y/∂O of every layer, in the axes of its `node`; zeros if the score does not depend on a layer."""
        if self.shared is not None:
            return self.shared.gradients(target).layers
        record = run or self.differentiable()
        return gradients(self.score(target, record), [layer.node for layer in record.layers])

    def only_grad(self, y: Scores, wrt: Tensor) -> Tensor:
        """∂y with respect to a tensor; a trace for one map then lets go of its forward passes, but for the output."""
        (found,) = gradients(y, [wrt], keep=not self.once)
        if self.once:
            self._let_go()
        return found

    def followed(self, *, seen: bool = True) -> tuple[Finished, Follower]:
        """A forward pass whose backward visits A and ∂y/∂A of every layer; `seen`: also record the last attention."""
        if self.shared is not None:
            return self.shared.run, Follower(self.layout.tokens)
        if True in self._followed:
            return self._followed[True]
        if seen not in self._followed:
            self._followed[seen] = (None if seen else follow_big(self)) or self._follow_all(seen)
        return self._followed[seen]

    def _follow_all(self, seen: bool) -> tuple[Finished, Follower]:
        narrow = narrowing(self, fold=not seen) if self.layout.entries else None
        run = self._follow(narrow)
        folded = narrow is not None and narrow.fold is not None
        if folded and not (len(run[0].layers) == self.layout.layers - 1 and is_followed(run[0])):
            run = self._follow(Narrow())  # with a folded last block, not all layers can be visited
        return run

    def _follow(self, narrow: Narrow | None) -> tuple[Finished, Follower]:
        follower = Follower(self.layout.tokens, self.layout.numbers, bool(self.layout.stages))
        if not self.layout.entries:  # no entry to start from: differentiate the whole forward pass
            return self.differentiable(), follower
        self.layer_number(0)
        return self.run(self.images, Run.watched_backward(follower).narrowed(narrow)), follower

    def follow(self, target: Target, visit: Visitor) -> None:
        """Pass A and A ⊙ ∂y/∂A of every layer to `visit`, by rows, from the last layer to the first."""
        record, follower = self.followed(seen=False)
        if is_followed(record):
            follower.visitor = visit
            self.only_grad(self.score(target, record), record.entry)
            return
        for layer, grad in reversed(list(zip(record.layers, self.grads(target, record)))):
            visit(shown(layer, grad))

    def entry_grad(self, target: Target, layer: int = -1) -> tuple[Tensor, Tensor]:
        """T, the tokens that enter a layer's attention, and ∂y/∂T ([B N D] or [B h w D]); runs later layers only."""
        if self.shared is not None and self.layer_number(layer) == self.layout.layers - 1:
            record, grad = self.shared.run, self.shared.gradients(target).entry
        else:
            record = self.cut(layer, seen=False)
            (grad,) = gradients(self.score(target, record), [record.entry])
        return self.batch_first(record.entry.detach()), self.batch_first(grad)

    def batch_first(self, tokens: Tensor) -> Tensor:
        if self.layout.stages and tokens.ndim == 3 and tokens.shape[self.batch_axis] != len(self):
            tokens = tokens.reshape(len(self), -1, tokens.shape[-1])  # windows of a video in the batch
        flat = tokens.ndim == 2  # of a packed sequence
        return widen(tokens.reshape(len(self), -1, tokens.shape[-1]) if flat else tokens.movedim(self.batch_axis, 0))

    def pixels(self) -> Finished:
        """A forward pass that is differentiable from the pixels on."""
        kept = self._record
        if isinstance(kept, Finished) and kept.images.requires_grad:
            return kept
        return self.kept("pixels", lambda: (self.from_pixels(self.images), None))[0]

    def pixel_grad(self, target: Target) -> Images:
        """∂y/∂x."""
        if self.shared is not None:
            return self.shared.gradients(target).pixels
        record = self.pixels()
        return self.only_grad(self.score(target, record), record.images)

    def from_pixels(self, images: Images) -> Finished:
        """A forward pass of one or more versions of the batch that is differentiable from the pixels on."""
        leaf, rows = images.detach().clone().requires_grad_(), list(range(len(self))) * (len(images) // len(self))
        return self.run(leaf, sparing(self, self.least(Run.from_pixels()).of(rows)))
