"""What can be seen when one model meets one batch of images: recorded on first need, shared by all methods."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import ROWS, Attention, same, widen
from vitreous.capture.attention_backward import Follower, Visitor, shown
from vitreous.capture.capture import Capture, Enough, Former
from vitreous.capture.narrowed_block import Fold, Tail, entering, own_thread
from vitreous.errors import CaptureError, OptionError, Unsupported
from vitreous.models.model import Model, capturing, refuse_infinite
from vitreous.trace.last_block import folds, tails
from vitreous.trace.target import Target
from vitreous.types import HeadRows, Images, Map, Output, Row, Scores

Edit = Callable[[Tensor], Tensor]
UNSEEN = 2**30  # the number of an attention that is kept
MOST_FORMED = 2**26  # numbers, of one N×N for each layer and image


@dataclass(frozen=True, eq=False)
class Record:
    """One run."""

    images: Images
    layers: tuple[Attention, ...]
    pool: Attention | None
    output: (
        Float[Tensor, "rows C"] | None
    )  # None: the run ended at the last layer's attention, nothing later was asked for
    embedding: Tensor | None  # what the classifier read; the output itself where there is none
    entry: Tensor | None = None  # T, where gradients begin: the tokens that enter a layer's attention
    since: int = 0  # the first layer in `layers`


class Trace:
    """The output, the attention of every layer, the read-out, gradients, and runs with something changed."""

    def __init__(self, model: Model, images: Any) -> None:
        self.model = model
        self.images: Images = model.prepare(images)
        self.size: tuple[int, int] = (self.images.shape[-2], self.images.shape[-1])
        self.layout = model.layout_at(self.size)
        self._record: Record | None = None
        self._cuts: dict[tuple[int, bool], Record] = {}
        self._followed: dict[bool, tuple[Record, Follower]] = {}
        self._kept: dict[str, tuple[Record, Any]] = {}
        self.ends: dict[Hashable, tuple[Tensor, ...]] = {}  # outputs and embeddings of variants, for other targets
        self._sum = later(self.images.sum()) if self.images.is_cuda and not capturing(self.images) else None
        self.autocast = torch.is_autocast_enabled(self.images.device.type)

    def __len__(self) -> int:
        return len(self.images)

    def refuse_infinite(self) -> None:
        """Raise if an image on a GPU holds what is no number; asked once, behind the first run."""
        if self._sum is not None and not capturing(self.images):
            refuse_infinite(self._sum())
            self._sum = None

    # ------------------------------------------------------------------------------------------------- recording

    def record(self, *, whole: bool = False, grad: bool = False, since: int = 0) -> Record:
        """The recorded run, of layer `since` and later; made again, once, when more is asked of it than it holds."""
        kept = self._record
        short = kept is None or kept.since > since or (whole and kept.output is None)
        if kept is None or short or (grad and not kept.images.requires_grad):
            images = self.images.detach().clone().requires_grad_() if grad else self.images
            kept = self._record = self.run(images, whole=whole, grad=grad, since=since)
        return kept

    @property
    def fresh(self) -> bool:
        """Has nothing been recorded yet?"""
        return not (self._record or self._cuts or self._followed or self._kept or self.ends)

    def fork(self) -> Trace:
        """The same recorded run for someone else: what they add (graphs for gradients) goes with them."""
        other = Trace(self.model, self.images)
        other._record = self._record
        return other

    def cut(self, layer: int = -1, *, seen: bool = True) -> Record:
        """A run that is differentiable only from the tokens that enter a layer's attention (`entry`).

        `seen`: with the attention from there on, which costs a little more.
        """
        number = self.layer_number(layer)
        if not self.layout.entries:
            raise Unsupported(f"{self.model.name} shows no tokens entering an attention; this method needs them")
        if (number, True) in self._cuts:
            return self._cuts[number, True]
        if (number, seen) not in self._cuts:
            way: dict[str, Any] = {"tail": tails(self)} if seen else self.unseen()
            self._cuts[number, seen] = self.run(self.images, cut=number, **way)
        return self._cuts[number, seen]

    def unseen(self) -> dict[str, Any]:
        """How to run to the output for the least, where no attention is asked for."""
        return {"since": UNSEEN, "tail": tails(self), "fold": folds(self)}

    def any_whole(self) -> Record:
        """A run with an output, whichever there is."""
        followed = [run for run, _ in self._followed.values()]
        kept = (self._record, *followed, *self._cuts.values(), *(run for run, _ in self._kept.values()))
        runs = [run for run in kept if run is not None and run.output is not None]
        return runs[0] if runs else self.record(whole=True)

    def plain(self) -> Record:
        """A run for its output, for the least: whichever there is, or one that shows no attention."""
        if self.fresh and not self.layout.pooled:
            return self.kept("plain", lambda: (self.run(self.images, **self.unseen()), None))[0]
        return self.any_whole()

    def kept(self, name: str, make: Callable[[], tuple[Record, Any]]) -> tuple[Record, Any]:
        """A run that methods make in a way of their own, with what else they know of it: made once."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def run(
        self,
        images: Images,
        *,
        whole: bool = True,
        grad: bool = False,
        cut: int | None = None,
        edit: Edit = same,
        enter: Edit | None = None,
        count: int | None = None,
        extend: Callable[[tuple[Tensor, ...]], Tensor] | None = None,
        follower: Follower | None = None,
        since: int = 0,
        tail: bool = False,
        tokens: int | None = None,
        fold: Fold | None = None,
        former: Former | None = None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Record:
        """A new run.

        `cut`: differentiable from this layer's entry, which `edit` may change. `enter`: what enters this layer's block
        (without `cut`: the first) is changed, perhaps to another number of images (`count`). `extend`: rows to add
        behind the last block's, made of what leaves every block; then no gradient passes from one block to the next.
        `tail`: the last block computes only what the head reads (of so many `tokens`), with `fold` without its keys and
        values; its attention is then not seen. `former` makes O of every attention but the last. `within`: makes a
        context of hooks of our own, which are no reason to run all of the network as a stranger's would be.
        """
        device, layout = self.images.device.type, self.layout
        entry = None if cut is None else layout.entries[cut]
        rows, output = count or len(images), None
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=self.autocast))
            still = stack.enter_context(self.model.still())
            most = None if whole or grad or cut is not None or still.hooked else layout.calls
            stack.enter_context(within())
            if enter is not None:
                stack.enter_context(entering(self.block(cut or 0), enter))
            if extend is not None:
                for hook in self._extend_hooks(extend):
                    stack.callback(hook.remove)
            end = stack.enter_context(self._tail(tokens, fold)) if tail and not still.hooked else None
            stack.enter_context(suppress(Enough))
            seen = stack.enter_context(
                Capture(still.names, rows, most, entry, edit, follower, since, end, former=former)
            )
            output = self.model.run(images)
        self.refuse_infinite()
        layers = tuple(call for call in seen.calls if layout.is_layer(call, rows))
        pools = [call for call in seen.calls if layout.pooled and layout.is_pool(call, rows)]
        head = seen.linear if self.model.classifier is not False else None  # a backbone's last layer is no classifier
        embedding = head[0] if head is not None and head[1] is output else output
        return Record(images, layers, pools[-1] if pools else None, output, embedding, seen.leaf, since)

    def _tail(self, tokens: int | None, fold: Fold | None) -> Tail:
        """The last block for what is read, where some tokens may have been cut out."""
        layout, read = self.layout, self.read_tokens
        assert read is not None
        gone = layout.tokens - (tokens or layout.tokens)
        read = [token if token < layout.prefix else token - gone for token in read]
        block = self.block(layout.layers - 1)
        return Tail(block, read, layout.tokens - gone, layout.prefix, layout.patches - gone, self.batch_axis, fold)

    def _extend_hooks(self, extend: Callable[[tuple[Tensor, ...]], Tensor]) -> list[Any]:
        """Hooks on the blocks that take what leaves them, part them for the gradient, and add rows behind the last."""
        blocks = [self.block(i) for i in range(self.layout.layers)]
        taken: list[Tensor] = []  # [B N D] each
        sent: list[Tensor] = []

        def check(module: nn.Module, args: Any, kwargs: Any) -> None:
            got = args[0] if args else next(iter(kwargs.values()))
            if sent and got is not sent[-1]:
                raise Unsupported(f"{self.model.name} does not hand its tokens from block to block; this needs that")

        def note(module: nn.Module, args: Any, out: Any) -> Any:
            stream = out[0] if isinstance(out, tuple) else out
            taken.append(stream.movedim(self.batch_axis, 0))
            if len(taken) < len(blocks):
                onward = stream.detach().requires_grad_()
            else:
                onward = torch.cat([stream, extend(tuple(taken)).movedim(0, self.batch_axis)], self.batch_axis)
            sent.append(onward)
            return (onward, *out[1:]) if isinstance(out, tuple) else onward

        unique = list(dict.fromkeys(blocks))
        before = [block.register_forward_pre_hook(own_thread(check), with_kwargs=True) for block in unique]
        return before + [block.register_forward_hook(own_thread(note)) for block in unique]

    @property
    def batch_axis(self) -> int:
        """Of the model's own tokens."""
        return 1 if self.layout.sequence_first else 0

    def block(self, layer: int) -> nn.Module:
        """The module that holds a layer."""
        blocks = self.layout.blocks
        if len(blocks) != self.layout.layers:
            raise Unsupported(f"{self.model.name} does not hold its layers in modules of their own; this needs them")
        return self.model.module.get_submodule(blocks[layer])

    # -------------------------------------------------------------------------------------------- what was seen

    @property
    def output(self) -> Output:
        output = self.any_whole().output
        assert output is not None
        return output.detach().float()

    @property
    def classifies(self) -> bool:
        """Is the output class scores? Where the model does not say, a final linear layer does."""
        known = self.model.classifier
        if known is None:
            record = self.any_whole()
            known = self.model.classifier = record.embedding is not record.output
        return known

    @property
    def attention(self) -> tuple[Attention, ...]:
        """One per layer, first to last."""
        layers = self.record().layers
        if not layers:
            raise self.no_layers()
        return layers

    def formed(self, former: Former) -> tuple[Attention, ...]:
        """The same; where nothing was recorded yet and A is small, `former` makes O of every layer but the last."""
        layout, count = self.layout, len(self)
        small = layout.tokens <= ROWS and layout.layers * count * layout.tokens**2 <= MOST_FORMED
        if self._record is None and small and not self.images.is_cuda and layout.calls == layout.layers:
            self._record = self.run(self.images, whole=False, former=former)
        return self.attention

    def no_layers(self) -> CaptureError:
        tokens = self.layout.tokens
        return CaptureError(f"{self.model.name}: no layer attends over {tokens} tokens; check the layout given by hand")

    def layer_number(self, index: int) -> int:
        """A layer's number from 0; −1, −2 … count from the end."""
        count = self.layout.layers
        if count == 0 and self.layout.obstacle is None:
            raise self.no_layers()
        if count == 0:
            raise Unsupported(f"{self.model.name} shows no tokens entering an attention; this method needs them")
        if not -count <= index < count:
            raise OptionError(f"layer {index} is out of range: {self.model.name} has layers 0 to {count - 1}")
        return index % count

    def layer(self, index: int) -> Attention:
        """A layer's attention; what comes before it is not kept."""
        number = self.layer_number(index)
        record = self.record(since=number if self.layout.calls == self.layout.layers else 0)
        if len(record.layers) != self.layout.layers - record.since:
            return self.attention[number]
        return record.layers[number - record.since]

    def verify(self, tolerance: float | None = None) -> None:
        """Raise unless A·V, recomputed, is every layer's own output."""
        for layer in self.attention:
            layer.verify(tolerance)

    @property
    def readout(self) -> Row:
        """ρ: how much the head reads of each token, [B N], each row sums to one."""
        pool = self.any_whole().pool if self.layout.pooled else None
        if pool is not None:
            return pool.weights.detach().mean((1, 2)).expand(len(self), -1)
        layout = self.layout
        return read_weights(layout.tokens, layout.readout, layout.share, self.images.device).expand(len(self), -1)

    @property
    def read_tokens(self) -> list[int] | None:
        """The tokens where ρ is not zero; None: all."""
        read = self.layout.readout
        return None if self.layout.pooled or len(read) * 2 > self.layout.tokens else list(read)

    def read_layer(self, layer: Attention) -> HeadRows:
        """ρᵀA of every head; no other row of A is formed."""
        if self.read_tokens is not None and len(self.read_tokens) == 1 and not layer.fusible:
            return layer.rows(self.read_tokens)[:, :, 0]
        return layer.read(self.readout.to(layer.wide), self.read_tokens)

    def map(self, values: Row) -> Map:
        """One value per token to a map."""
        return self.layout.to_map(values)

    def to_patches(self, tokens: Tensor) -> Float[Tensor, "B h w D"]:
        """Tokens [B N D] as they lie in the image, without CLS and registers ([B h w D] stays)."""
        if tokens.ndim == 4:
            return tokens
        count, (h, w) = tokens.shape[1], self.layout.grid
        if count == self.layout.tokens:
            return placed(tokens, self.layout.prefix, h, w)
        for extra in range(9):  # special tokens in front, as few as will do
            for scale in (1, 2, 4, 8, 16, 32):  # later stages merge patches
                size = -(-h // scale), -(-w // scale)
                if count == size[0] * size[1] + extra:
                    return placed(tokens, extra, *size)
        raise Unsupported(f"{self.model.name} has {count} tokens in this layer, which do not fit its {h}×{w} patches")

    # -------------------------------------------------------------------------------------------------- gradients

    def score(self, target: Target, record: Record | None = None) -> Scores:
        """The one number per image that a target asks for."""
        record = record or self.any_whole()
        return score_of(target, record)

    def grads(self, target: Target) -> tuple[Tensor, ...]:
        """∂y/∂O of every layer, in the axes of its `node`; zeros where the output does not depend on a layer."""
        record = self.record(whole=True, grad=True)
        return gradients(self.score(target, record), [layer.node for layer in record.layers])

    def followed(self, *, seen: bool = True) -> tuple[Record, Follower]:
        """A run whose backward shows A and ∂y/∂A of every layer; `seen`: it also holds the last layer's attention."""
        if True in self._followed:
            return self._followed[True]
        if seen not in self._followed:
            fold = None if seen or not self.layout.entries else folds(self)
            run = self._follow(fold)
            if fold is not None and not (len(run[0].layers) == self.layout.layers - 1 and is_followed(run[0])):
                run = self._follow(None)  # not all layers have their own backward
            self._followed[seen] = run
        return self._followed[seen]

    def _follow(self, fold: Fold | None) -> tuple[Record, Follower]:
        follower = Follower(self.layout.tokens)
        if not self.layout.entries:  # nowhere to cut: the whole run is differentiated
            return self.record(whole=True, grad=True), follower
        first = self.layer_number(0)
        return self.run(self.images, cut=first, follower=follower, tail=tails(self), fold=fold), follower

    def follow(self, target: Target, visit: Visitor) -> None:
        """Show A and A ⊙ ∂y/∂A of every layer to `visit`, by rows, from the last layer to the first."""
        record, follower = self.followed(seen=False)
        y = self.score(target, record)
        if is_followed(record):
            follower.visitor = visit
            assert record.entry is not None
            gradients(y, [record.entry])
            return
        for layer, grad in reversed(list(zip(record.layers, gradients(y, [one.node for one in record.layers])))):
            visit(shown(layer, grad))

    def entry_grad(self, target: Target, layer: int = -1) -> tuple[Tensor, Tensor]:
        """T, the tokens that enter a layer's attention, and ∂y/∂T ([B N D] or [B h w D]); costs the rest only."""
        record = self.cut(layer, seen=False)
        assert record.entry is not None
        (grad,) = gradients(self.score(target, record), [record.entry])
        return self.batch_first(record.entry.detach()), self.batch_first(grad)

    def batch_first(self, tokens: Tensor) -> Tensor:
        return widen(tokens.movedim(self.batch_axis, 0))

    def pixels(self) -> Record:
        """A run that is differentiable from the pixels on."""
        kept = self._record
        if kept is not None and kept.output is not None and kept.images.requires_grad:
            return kept
        return self.kept("pixels", lambda: (self._from_pixels(self.images), None))[0]

    def _from_pixels(self, images: Images) -> Record:
        leaf = images.detach().clone().requires_grad_()
        return self.run(leaf, grad=True, **self.unseen())

    def input_grads(self, target: Target, versions: Iterable[Images]) -> Iterator[Tensor]:
        """∂y/∂x at each of several versions of the batch (the target must be fixed), many at a time if they are small.

        They are taken from `versions` when they are needed.
        """
        count, left = len(self), iter(versions)
        most = max(1, batch_size(self.layout.footprint[1], self.images.device) // count)

        def grads(part: slice) -> Tensor:
            record = self._from_pixels(torch.cat(some[part]))
            y = self.score(target.of_rows(list(range(count)) * (part.stop - part.start)), record)
            (grad,) = gradients(y, [record.images], keep=False)
            return widen(grad).reshape(-1, count, *grad.shape[1:])

        while some := list(islice(left, most)):
            for grad in in_batches(grads, len(some), len(some)):
                yield from grad

    # ----------------------------------------------------------------------------------------------------- chance

    def generators(self, seed: int) -> list[torch.Generator]:
        """One random stream per image."""
        return [torch.Generator().manual_seed(key) for key in self.keys(seed).tolist()]

    def keys(self, seed: int) -> Int[Tensor, "B"]:
        """A number for each image: it depends on the image and the seed, not on batch, device or precision."""
        coarse = (
            self.images.to(torch.bfloat16).contiguous().view(torch.int16).flatten(1)
        )  # the same for every precision
        odd = torch.arange(1, 2 * coarse.shape[1], 2, device=coarse.device) * 0x9E3779B1
        marks = [(bits.long() * odd).sum() for bits in coarse]  # whole numbers: exact in any order, on any device
        return (torch.stack(marks) ^ (seed * 0xC2B2AE35) % 2**63) & (2**63 - 1)


@lru_cache(maxsize=16)
def read_weights(
    tokens: int, readout: tuple[int, ...], share: tuple[float, ...] | None, device: torch.device
) -> Float[Tensor, "N"]:
    """ρ of one image; brought to a device once."""
    weights = torch.zeros(tokens)
    weights[list(readout)] = torch.tensor(share or [1 / len(readout)] * len(readout))
    return weights.to(device)


def later(value: Tensor) -> Callable[[], Tensor]:
    """What a GPU computes, to be asked for when it has got more to do: nothing behind it is waited for."""
    copied, there = value.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()

    def ask() -> Tensor:
        there.synchronize()
        return copied

    return ask


def placed(tokens: Tensor, start: int, h: int, w: int) -> Float[Tensor, "B h w D"]:
    return tokens[:, start : start + h * w].reshape(len(tokens), h, w, -1)


def first_rows(record: Record, count: int) -> Record:
    """What a run said of its first images, without its layers and its graph."""
    assert record.output is not None and record.embedding is not None
    output = record.output[:count].detach()
    embedding = output if record.embedding is record.output else record.embedding[:count].detach()
    return Record(record.images, (), None, output, embedding)


def is_followed(record: Record) -> bool:
    """Does the backward of all layers show their attention?"""
    return record.entry is not None and all(layer.followed for layer in record.layers)


def score_of(target: Target, record: Record, rows: slice = slice(None)) -> Scores:
    """The target's score, with the graph of the run behind it."""
    assert record.output is not None and record.embedding is not None
    with torch.enable_grad():
        return widen(target(record.output[rows], record.embedding[rows]))


def gradients(y: Scores | list[Scores], wrt: Sequence[Tensor], keep: bool = True) -> tuple[Tensor, ...]:
    """∂Σy/∂ each; `keep`: the graph stays, so that another target can be asked about."""
    ends = y if isinstance(y, list) else [y]
    if not all(end.requires_grad for end in ends):
        raise Unsupported(
            "the model runs without gradients (torch.inference_mode in its forward?); try attention or rollout"
        )
    found = torch.autograd.grad(ends, wrt, [torch.ones_like(end) for end in ends], retain_graph=keep, allow_unused=True)
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, wrt))
