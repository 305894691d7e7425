from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated, Any, Literal

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import Attention, sum_of, widen
from vitreous.capture.capture import Capture, ModuleNames
from vitreous.errors import Unsupported
from vitreous.methods.attention.value_runs import Projection, Projections, side_by_side
from vitreous.methods.text.keys import projected
from vitreous.registry import method
from vitreous.trace.last_block import narrowing
from vitreous.trace.run import Finished, Run, gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Heads, Map

ONE, OWN = "grad_eclip.heads=one", "use grad_eclip.heads=true"
Similarity = Literal["proj", "qk", "none"]


def keeps_heads(options: Mapping[str, Any]) -> bool:
    return bool(options["heads"] == "true")


@method(cite="zhao2024gradient", targeted=True, attention=True, several=keeps_heads)
def grad_eclip(
    trace: Trace,
    target: Target,
    *,
    heads: Annotated[
        Literal["true", "one"],
        Field(description="the model's own heads in the last attention, or, as its authors ran it, a single one"),
    ] = "true",
    ksim: Annotated[
        Similarity,
        Field(description="similarity of query and key that takes the place of attention, W_O applied or not; none: 1"),
    ] = "proj",
) -> Map:
    """The values of the last attention that raise the score, loosely weighted by attention; for texts, classes and
    concepts.

    (Σ_i λ_ij Σ_h ∂y/∂oʰ_i · vʰ_j)⁺, o_i the attention's output at the tokens that are read,
    λ_ij = cos(W_O q_i + b_O, W_O k_j + b_O), from 0 to 1 over the patches of an image
    """
    run, projection = last_attention(trace, heads)
    call = run.layers[-1]
    fixed = target if heads == "true" else target.fix(trace.output)
    (grad,) = gradients(trace.score(fixed, run), [call.node])
    patches = trace.layout.patch_tokens

    def part(rows: slice | list[int]) -> Tensor:
        """Σ_i over these tokens, [B P]."""
        pulls = call.weights_grad(grad, rows).sum(1)[..., patches]  # [B n P]
        if ksim != "none":
            pulls = pulls * similarity(trace, call, projection, ksim, rows)
        return pulls.sum(1)

    tokens = call.only or trace.read_tokens
    total = sum_of(part(rows) for rows in (call.spans() if tokens is None else [tokens]))
    return total.clamp_min(0).reshape(-1, *trace.layout.cells)


def similarity(
    trace: Trace, call: Attention, projection: Projection | None, kind: Similarity, rows: slice | list[int]
) -> Float[Tensor, "B n P"]:
    """λ of these tokens to every patch."""
    found = call.projected()
    if found is None:
        raise Unsupported(f"grad_eclip finds no queries and keys in {trace.model.name}; set grad_eclip.ksim=none")
    q, k, scale = found
    q = q[:, :, rows] * (scale * q.shape[-1] ** 0.5)  # so that A = softmax(q·k/√d)
    if kind == "qk":
        queries, keys = (side_by_side(widen(t.detach())) for t in (q, k))
    else:
        through = [projected(projection, t) for t in (q, k)]
        if through[0] is None or through[1] is None:
            said = "grad_eclip needs an output projection directly after the last attention"
            raise Unsupported(f"{said}, and {trace.model.name} has none; set grad_eclip.ksim=qk")
        queries, keys = through[0], through[1]
    keys = keys[:, trace.layout.patch_tokens]
    cosine = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).mT
    least, most = cosine.amin(-1, keepdim=True), cosine.amax(-1, keepdim=True)
    shares: Tensor = (cosine - least) / (most - least).clamp_min(1e-30)
    return shares


# ------------------------------------------------------------------------------------------------- the last attention


def last_attention(trace: Trace, heads: str) -> tuple[Finished, Projection | None]:
    """A forward pass that is differentiable from the last layer on, and the projection of its attention's output."""

    def run() -> tuple[Finished, Any]:
        layer = trace.layer_number(-1)
        number = trace.layer(-1).number if heads == "one" else None
        seen = Last(len(trace), last_call(trace), number)
        readers = Projections(seen)
        how = Run.from_layer(layer).narrowed(narrowing(trace, fold=False) if heads == "true" else None)
        made = trace.run(trace.images, how.inside(lambda: both(readers, seen)))
        if not made.layers:
            raise trace.no_layers()
        found = [p for call, ps in readers.found.items() if call.number == made.layers[-1].number for p in ps]
        true = made if heads == "true" else trace.any_finished()
        return true, (made, found[0] if len(found) == 1 else None)

    found: tuple[Finished, Projection | None] = trace.kept(f"grad_eclip, {heads} heads", run)[1]
    return found


def last_call(trace: Trace) -> int:
    """A number that no attention call of the last layer is below."""
    numbers, calls = trace.layout.numbers, trace.layout.calls
    return numbers[-1] if numbers else calls - 1 if calls else 0


def both(readers: Projections, seen: Capture) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(readers)
    stack.enter_context(seen)
    return stack


class Last(Capture):
    """Keeps the last attention calls; the one of this `number` attends with one head as wide as all."""

    def __init__(self, images: int, since: int, number: int | None) -> None:
        super().__init__(ModuleNames(None), images, since=since)
        self.number = number

    def keep(self, call: Attention) -> None:
        super().keep(call)
        if call.number != self.number:
            return
        if call.door != "eager":  # a fused kernel may need its own output for its gradient
            call.node = call.node.clone()
        if call.out.data_ptr() != call.node.data_ptr():
            raise Unsupported(f"{ONE} cannot replace this model's last attention; {OWN}")
        call.out.copy_(as_one_head(call))


def as_one_head(call: Attention) -> Heads:
    """The attention's output if all heads were one."""
    found = call.projected()
    if found is None:
        raise Unsupported(f"{ONE} finds no queries and keys in this model; {OWN}")
    if call.bias is not None and call.bias.shape[1] > 1:
        raise Unsupported(f"{ONE} has no single bias for heads with a bias of their own; {OWN}")
    q, k, scale = found
    b, h, n, d = q.shape
    query, key, value = (side_by_side(t.to(call.v.dtype))[:, None] for t in (q * (scale * d**0.5), k, call.v))
    one = F.scaled_dot_product_attention(query, key, value, attn_mask=call.bias)
    return one.reshape(b, n, h, -1).transpose(1, 2)
