"""The read-out: the tokens of the last layer that the output depends on, and their weights."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.models.layout import Layout
from vitreous.models.survey_run import Seen, gradient


def read_from(seen: Seen, last: Attention, grad: Tensor | None, layout: Layout) -> Layout:
    """The same with its read-out; `grad`: of the output, for that of the last layer's attention."""
    if layout.reads:
        *earlier, (_, tokens, shares) = layout.reads
        return replace(layout, readout=tokens, share=shares, reads=tuple(earlier))
    readout, share = find_readout(None if grad is None else last.fold(grad).float().norm(dim=-1).mean((0, 1)), layout)
    if not layout.pooled or layout.pool is None:
        return replace(layout, readout=readout, share=None if layout.pooled else share)
    pool = seen.calls[layout.pool]
    if pool.shape[3] != len(readout):
        return replace(
            layout, readout=readout, obstacle="reads its tokens through an attention that could not be followed"
        )
    size = gradient([seen.output], pool.node)
    weights = None if size is None else pool.fold(size).float().norm(dim=-1).mean((0, 1))
    even = weights is None or bool((weights - weights.mean()).abs().max() < 1e-3 * weights.mean()) or len(weights) == 1
    queries = None if even or weights is None else tuple((weights / weights.sum()).tolist())
    return replace(layout, readout=readout, queries=queries)


def find_readout(size: Tensor | None, layout: Layout) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """The tokens that the output (or what its classifier reads) depends on, and their weights where they differ.

    `size`: of the gradient for each token behind the last attention; None: unknown.
    """
    everything = tuple(range(layout.tokens))
    if size is None:
        return ((0,) if layout.prefix else everything), None
    read = tuple(size.nonzero().flatten().tolist())
    patches = layout.patch_tokens
    apart = [i for i in read if i not in patches]
    both = apart and len(read) > len(apart)
    if both and size[apart].mean() > layout.patches**0.5 * size[patches].mean():
        whole = 1 / (len(apart) + 1)  # a CLS token beside the mean of the patches weighs as much as all of them
        return read, tuple(whole if i in apart else whole / (len(read) - len(apart)) for i in read)
    return (read or everything), None
