"""How much memory a recorded run takes."""

from __future__ import annotations

from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.trace.trace import Trace


def footprint(trace: Trace) -> int:
    """Bytes that a recorded run holds."""
    record = trace.whole()
    held: list[Tensor | None] = [trace.images, record.output, record.embedding]
    for layer in [*record.layers, *([record.pool] if record.pool is not None else [])]:
        held += tensors(layer)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t is not None}
    return sum(sizes.values())


def tensors(layer: Attention) -> list[Tensor | None]:
    factors = layer.factors or ()
    return [layer.node, layer.v, layer.q, layer.k, layer.bias, layer.given, layer.keys, *factors]
