"""Token names, and parts of the recorded attention: one head of a layer, rows and columns of A, queries and keys."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import Attention, widen
from vitreous.errors import OptionError, Unsupported
from vitreous.models.layout import Layout
from vitreous.trace.trace import Trace
from vitreous.types import Heads, Keys

# ------------------------------------------------------------------------------------------------------------- tokens


def prefix_names(layout: Layout) -> list[str]:
    """The names of the tokens before the patches: CLS, distillation tokens (also used by the classifier), registers."""
    names = []
    for i in range(layout.prefix):
        read = i in layout.readout and len(layout.readout) <= layout.prefix
        own = i == 0 and i not in layout.added
        names.append("CLS" if own else "distillation" if read else f"register {i}")
    return names


def suffix_names(layout: Layout) -> list[str]:
    behind = layout.special[layout.prefix :]
    own = layout.prefix == len(layout.added)
    return ["CLS" if own and i == behind[-1] else f"register {i}" for i in behind]


def token_names(layout: Layout) -> dict[int, str]:
    """The tokens that are not patches."""
    return dict(zip(layout.special, prefix_names(layout) + suffix_names(layout)))


def readout_name(layout: Layout) -> str:
    """The input of the classifier, as text: "CLS", "the mean of the patches" or the like."""
    names = token_names(layout)
    if layout.pooled:
        return "an attention pool"
    read = [names.get(i, "patch") for i in layout.readout]
    special = [name for name in read if name != "patch"]
    patches = "the mean of the patches" if "patch" in read else ""
    return " and ".join([*special[:3], *([patches] if patches else [])])


def one_token(trace: Trace, token: int) -> Float[Tensor, "1 N"]:
    """A weight for each token: one for this token, zero for the others."""
    weights = torch.zeros(1, trace.layout.tokens, device=trace.images.device)
    weights[0, token] = 1
    return weights


# ---------------------------------------------------------------------------------------------------------- attention


def one_head(layer: Attention, head: str | int) -> Attention:
    """One attention head of a layer, or all ("mean")."""
    if head == "mean":
        return layer
    number = int(head)
    if not 0 <= number < layer.shape[1]:
        raise OptionError(f"head {number} is out of range: this layer has heads 0 to {layer.shape[1] - 1}")

    def cut(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[1] == 1 else t[:, number : number + 1]

    return replace(
        layer,
        v=layer.v[:, number : number + 1],
        q=cut(layer.q),
        k=cut(layer.k),
        bias=cut(layer.bias),
        given=cut(layer.given),
        factors=layer.factors and one_of(layer, number),
    )


def one_of(layer: Attention, head: int) -> tuple[Tensor, Tensor] | None:
    """The factors of the scores of one attention head, in the axes of the layer's output."""
    found = layer.projected()
    return None if found is None else (found[0][:, head : head + 1], found[1][:, head : head + 1].mT)


def reads(layer: Attention, weights: Float[Tensor, "1 N"]) -> Float[Tensor, "M"]:
    """Σᵢ wᵢ·Aᵢ, averaged over attention heads; only the rows with a weight are formed."""
    rows = weights[0].nonzero().flatten().tolist()
    return layer.read(weights, rows if len(rows) * 2 < weights.shape[1] else None).mean(1)[0]


def read_by(layer: Attention, weights: Float[Tensor, "1 N"]) -> Float[Tensor, "N"]:
    """A·w: how much each token attends to these tokens, computed a few hundred rows at a time."""
    return torch.cat([(a @ weights[0]).mean(1)[0] for _, a in layer.chunks()])


def projections(trace: Trace, layer: Attention) -> tuple[Heads, Keys, float]:
    """Queries, keys and scale as they enter the attention: after rotary embeddings and QK norms."""
    found = layer.projected()
    if found is None:
        raise Unsupported(
            f"{trace.model.name} computes its attention without visible queries and keys; use a fused one "
            "(attn_implementation='sdpa', F.scaled_dot_product_attention) or softmax(q @ k.mT) @ v"
        )
    q = widen(found[0])
    return q, widen(found[1]).expand(-1, q.shape[1], -1, -1), found[2]
