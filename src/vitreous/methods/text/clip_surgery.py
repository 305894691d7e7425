from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import Attention, widen
from vitreous.capture.capture import NORMS, Capture, Enough
from vitreous.errors import OptionError, TargetError, Unsupported
from vitreous.methods.attention.value_runs import Block, again
from vitreous.methods.common import check_start
from vitreous.methods.text.token_runs import Make, Readings, Recorded, Reformed, read_alone, recorded, scored
from vitreous.registry import method
from vitreous.trace.concept import Text
from vitreous.trace.run import Finished
from vitreous.trace.target import Each, Target
from vitreous.trace.text import embed_text
from vitreous.trace.trace import Trace
from vitreous.types import Heads, Map, Tokens

SHARPNESS = 2.0  # of the softmax over texts
CLOSE = 1e-4


@method(cite="li2023closer", targeted=True, attention=True, level=True)
def clip_surgery(
    trace: Trace,
    target: Target,
    *,
    prompts: Annotated[
        str, Field(description="texts, separated by |: what they and the target have in common is subtracted")
    ] = "",
    empty: Annotated[
        bool, Field(description="without prompts: subtract the similarity to the empty text, if the target is a text")
    ] = True,
    start_layer: Annotated[
        int | None, Field(ge=0, description="the first layer with value–value attention; none: the middle one")
    ] = None,
) -> Map:
    """How much each patch alone resembles a text, values attending to values; use it to find what a text names.

    s_jt = y_t(x + Σ_l W_O softmax(vvᵀ/√d)v + b_O)_j, x what enters layer `start_layer`; s_jt − s_j"", or, with
    `prompts`, w_t s_jt − mean_t w_t s_jt, w = softmax_t(2 y_t(image)), divided by its mean
    """
    start = trace.layout.layers // 2 if start_layer is None else start_layer
    check_start(trace, start)
    known = recorded(trace, "clip_surgery", start)

    def run() -> tuple[Finished, Any]:
        tokens = known.blocks[0].entered
        for block in known.blocks:
            tokens = tokens + added(trace, block, values_to_values)
        return known.run, read_alone(trace, known, tokens)

    found: Readings = trace.kept(f"clip_surgery since {start}", run)[1]
    fixed, texts = target.fix(trace.output), texts_of(target, len(trace))
    if prompts:
        return among(trace, known, found, fixed, texts, [text.strip() for text in prompts.split("|")])
    scores = scored(trace, found, fixed)
    if empty and any(text is not None for text in texts):
        is_text = torch.tensor([text is not None for text in texts], device=scores.device)
        scores = scores - is_text[:, None, None] * scored(trace, found, empty_text(trace))
    return scores


# ------------------------------------------------------------------------------------------------------------ the texts


def texts_of(target: Target, count: int) -> list[str | None]:
    """The text of each image; None where the target is none."""
    each = list(target.targets) if isinstance(target, Each) else [target] * count
    return [one.prompt if isinstance(one, Text) else None for one in each]


def empty_text(trace: Trace) -> Target:
    try:
        return Text("", embed_text(trace.model, ""))
    except TargetError as error:
        raise OptionError(
            f"clip_surgery subtracts the empty text ({error}); for the similarity alone set clip_surgery.empty=false"
        ) from error


def among(
    trace: Trace, known: Recorded, found: Readings, target: Target, texts: list[str | None], prompts: list[str]
) -> Map:
    """Feature surgery: the weighted similarity less its mean over the target and the prompts, each text once."""
    if None in texts:
        raise TargetError(f"clip_surgery.prompts are compared with a text, and {target} is none; leave them out")
    others = [Text(prompt, embed_text(trace.model, prompt)) for prompt in dict.fromkeys(prompts)]
    every = [target, *others]
    maps = torch.stack([scored(trace, found, one) for one in every])  # [T B h w]
    own = torch.stack([widen(one(known.run.output, known.run.embedding)) for one in every])  # [T B]
    counts = torch.tensor([[True] * len(texts), *([text != one.prompt for text in texts] for one in others)])
    counts = counts.to(own.device)
    weights = (SHARPNESS * own).masked_fill(~counts, -torch.inf).softmax(0) * counts.sum(0)
    weighted = maps * weights[..., None, None]
    return weighted[0] - weighted.sum(0) / counts.sum(0)[:, None, None]


# ----------------------------------------------------------------------------------------------------------- the tokens


def values_to_values(call: Attention) -> Heads:
    """softmax(vvᵀ/√d)·v."""
    return F.scaled_dot_product_attention(call.v, call.v, call.v)


def nothing(call: Attention) -> Heads:
    return torch.zeros_like(call.out)


class Sums(TorchFunctionMode):
    """Sees what a block has added to its tokens wherever a norm reads them after the attention.

    The run ends as soon as `wanted` accepts one of these sums, given its number.
    """

    def __init__(self, seen: Capture, block: Block, wanted: Callable[[int, Tokens], bool]) -> None:
        super().__init__()
        self.seen, self.block, self.wanted = seen, block, wanted
        self.count = 0
        self.found: Tokens | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in NORMS and self.seen.calls and args[0].shape == self.block.given.shape:
            more = self.block.tokens(args[0]) - self.block.entered
            if self.wanted(self.count, more):
                self.found = more
                raise Enough
            self.count += 1
        return func(*args, **(kwargs or {}))


def added(trace: Trace, block: Block, make: Make) -> Tokens:
    """What a block adds to its tokens by another attention, before its MLP; a LayerScale is part of it.

    That is read where, without any attention, all tokens are as they entered, but for one vector (the bias).
    """

    def run(form: Make, wanted: Callable[[int, Tokens], bool]) -> Sums:
        with again(trace, block) as names:
            seen = Reformed(names, trace, form)
            sums = Sums(seen, block, wanted)
            with suppress(Enough), sums, seen:
                block.run(block.entered)
        return sums

    def unmoved(number: int, more: Tokens) -> bool:
        least = CLOSE * block.entered.abs().max()
        return bool((more - more.mean(1, keepdim=True)).abs().max() <= least)

    bare = run(nothing, unmoved)
    if bare.found is None:
        said = "clip_surgery needs blocks that add their attention to the tokens and then normalise them"
        raise Unsupported(f"{said}, and those of {trace.model.name} do not. Try maskclip or grad_eclip.")
    found = run(make, lambda number, more: number == bare.count).found
    assert found is not None
    return found
