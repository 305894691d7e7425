"""Attention that a model writes out: a softmax is followed to its product with values, whichever form that has.

    a @ v, bmm(a, v), matmul(input=a, other=v)       O  = A·V
    v @ a.mT (values [d M], a softmax transposed)    Oᵀ = Vᵀ·Aᵀ
    einsum("bhij,bhjd->bihd", a, v)                  operands in any order, also in a list, also with "..."
    softmax(…)[..., :-1] @ v                         a softmax with a sink, whose column is dropped

`TAG` marks a tensor that is a softmax and says where its keys are. Views of it (transposed, reshaped in front, sliced)
keep the mark; any other change makes it `mixed`: no softmax any more, but still A if it is multiplied with values, as
where heads are mixed (CaiT, DeepViT) or two softmaxes are combined (ConViT, differential attention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import ascii_letters
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous.capture.attention import folding

SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax}
MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.linalg.matmul}
ADDED = {torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_}  # β·input + α·product
PRODUCTS = MATMUL | ADDED | {torch.einsum, Tensor.__rmatmul__}
KEEPS = {F.dropout, torch.dropout, Tensor.to, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16}
KEEPS |= {Tensor.contiguous, Tensor.clone, torch.clone, torch.nan_to_num, Tensor.nan_to_num}

TAG = "_vitreous_softmax"  # attribute of a tensor: it is a softmax, or made from one (`Soft`)
FACTORS = "_vitreous_factors"  # attribute of a product: its two factors, which may be Q and Kᵀ
Fold = Callable[[Tensor], Tensor]


class Soft(NamedTuple):
    """How a tensor comes from a softmax."""

    turned: bool = False  # its keys are on the axis before the last
    part: bool = False  # some columns were dropped, so that its rows sum to less than one
    mixed: bool = False  # it was changed: its rows need not sum to one, and may have any sign
    sizes: tuple[int, int] = (0, 0)  # of the softmax: queries and keys


class Product(NamedTuple):
    """An attention, written out: A, V, and how each and the result are folded to [B H N M], [B H M d] and [B H N d]."""

    a: Tensor
    v: Tensor
    fold_a: Fold
    fold_v: Fold
    fold: Fold
    mixed: bool = False  # A is no softmax


def soft_of(value: Any) -> Soft | None:
    """How a value comes from a softmax; None if it does not."""
    found: Soft | None = getattr(value, TAG, None)
    return found


def tag_softmax(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> bool:
    """Mark the result of a softmax over the last axis, or over the one before of scores that are a product."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    axis = dim - out.ndim if isinstance(dim, int) and dim >= 0 else dim
    factors = getattr(args[0] if args else kwargs.get("input"), FACTORS, None)
    scores = factors is not None and all(is_activation(one) for one in factors)
    if axis != -1 and not (axis == -2 and scores):  # keys over their tokens: linear attention
        return False
    rows, columns = (out.shape[-2:] if out.ndim > 1 else (1, out.shape[-1]))[:: 1 if axis == -1 else -1]
    setattr(out, TAG, Soft(turned=axis == -2, sizes=(rows, columns)))
    if factors is not None:
        setattr(out, FACTORS, factors)
    return True


def tag_product(one: Tensor, other: Tensor, out: Tensor) -> None:
    """Mark the product of two softmaxes, which may be A: of the queries of one and the keys of the other."""
    setattr(out, TAG, Soft(mixed=True, sizes=(out.shape[-2], out.shape[-1])))
    scores = getattr(one, FACTORS, None), getattr(other, FACTORS, None)
    if scores[0] is not None and scores[1] is not None:
        setattr(out, FACTORS, (scores[0][0], scores[1][1]))


def is_learned(value: Any) -> bool:
    """Whether a factor is a matrix of weights."""
    return isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.ndim < 3)


def is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 2 and not isinstance(value, nn.Parameter)


def follow(func: Any, args: tuple[Any, ...], out: Any) -> None:
    """Follow scores to their softmax, and a softmax through functions that preserve it; mark changed ones."""
    out = args[0] if func is Tensor.__setitem__ else out
    for source in args if isinstance(out, Tensor) else ():
        if not isinstance(source, Tensor):
            continue
        whole = out.numel() == source.numel()
        soft = soft_of(source)
        if soft is not None:
            found = soft if func in KEEPS and whole else None if out is source else viewed(source, soft, out)
            if found is not None or whole or keeps_sizes(source, soft, out):
                setattr(out, TAG, found or Soft(mixed=True, sizes=soft.sizes))
        if hasattr(source, FACTORS) and (whole or soft_of(out) is not None):
            setattr(out, FACTORS, getattr(source, FACTORS))


def keeps_sizes(source: Tensor, soft: Soft, out: Tensor) -> bool:
    """Whether a result has another number of heads, or some of them, but all queries and keys."""
    if not out.is_floating_point() or min(soft.sizes) < 2 or out.ndim < 3:
        return False
    if out.ndim == source.ndim:
        changed = [i for i in range(out.ndim) if out.shape[i] != source.shape[i]]
        left = [size for i, size in enumerate(out.shape) if i not in changed]
        return len(changed) == 1 and all(left.count(size) >= soft.sizes.count(size) for size in soft.sizes)
    return out.ndim == source.ndim - 1 and out.shape[-2:] == source.shape[-2:]


def viewed(source: Tensor, soft: Soft, out: Tensor) -> Soft | None:
    """What a view of a softmax is; None if it is no view, or one that takes heads or images apart."""
    if soft.mixed or out.ndim < 2 or out.dtype != source.dtype:
        return None
    if out.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        return None
    query, key = [(source.shape[i], source.stride(i)) for i in ((-1, -2) if soft.turned else (-2, -1))]
    last = [(out.shape[i], out.stride(i)) for i in (-2, -1)]
    for turned in (soft.turned, not soft.turned):
        rows, columns = last[::-1] if turned else last
        if rows[1] == query[1] and columns[1] == key[1]:
            sliced = rows[0] != query[0] or columns[0] != key[0]
            if sliced and (out.ndim != source.ndim or out.shape[:-2] != source.shape[:-2]):
                return None
            if sliced or out.numel() == source.numel():
                return Soft(turned, soft.part or columns[0] != key[0], sizes=(rows[0], columns[0]))
    return None


def operands(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The factors of a product, however they were passed."""
    given = (*args, *(kwargs[name] for name in ("input", "other", "mat2", "batch1", "batch2") if name in kwargs))
    if func is torch.einsum:
        given = given[1:]
        return tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    if func in ADDED:
        return given[1:3]
    return given[1::-1] if func is Tensor.__rmatmul__ else given[:2]


def read_product(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], factors: tuple[Any, ...], images: int
) -> Product | None:
    """The attention that a product with a softmax computes; None if it is another product."""
    softs = [soft_of(one) for one in factors]
    plain = func not in ADDED or (kwargs.get("beta", 1) == 0 and kwargs.get("alpha", 1) == 1)
    if len(factors) != 2 or all(softs) or not plain or not all(may_be_attention(one) for one in factors):
        return None
    if func is torch.einsum:
        return read_einsum(args[0] if args else kwargs.get("equation"), factors)
    (left, right), fold = factors, folding(max(one.ndim for one in factors), images)
    if softs[0] is not None:
        fits = not softs[0].turned and fitting(softs[0], left.shape[-2], left.shape[-1])
        return Product(left, right, fold, fold, fold, softs[0].mixed) if fits else None
    soft, turned = softs[1], turning(fold)
    fits = soft is not None and (soft.turned or soft.mixed) and fitting(soft, right.shape[-1], right.shape[-2])
    return Product(right, left, turned, turned, turned, soft.mixed) if fits and soft is not None else None


def may_be_attention(value: Tensor) -> bool:
    """Whether a factor is no changed softmax of anything but Q·Kᵀ."""
    soft, scores = soft_of(value), getattr(value, FACTORS, None)
    return soft is None or not soft.mixed or (scores is not None and all(map(is_activation, scores)))


def fitting(soft: Soft, queries: int, keys: int) -> bool:
    """Whether a changed softmax still has a row for each query and a column for each key."""
    return not soft.mixed or (queries, keys) == soft.sizes


def turning(fold: Fold) -> Fold:
    return lambda t: fold(t).mT


def read_einsum(equation: Any, factors: tuple[Any, ...]) -> Product | None:
    """The attention that an einsum of a softmax and values computes; None if it is another product."""
    spelled = terms_of(equation, factors)
    if spelled is None:
        return None
    *terms, result = spelled
    if soft_of(factors[1]) is not None:
        factors, terms = factors[::-1], terms[::-1]
    (a, v), soft = factors, soft_of(factors[0])
    shared = [c for c in terms[0] if c in terms[1] and c in result]
    keys = [c for c in terms[0] if c in terms[1] and c not in result]
    queries = [c for c in terms[0] if c not in terms[1] and c in result]
    width = [c for c in terms[1] if c not in terms[0] and c in result]
    counts = len(terms[0]), len(terms[1]), len(result)
    if soft is None or len(shared) not in (1, 2) or not len(keys) == len(queries) == len(width) == 1:
        return None
    if counts != (len(shared) + 2,) * 3 or not (soft.mixed or terms[0][-2 if soft.turned else -1] == keys[0]):
        return None
    if not fitting(soft, a.shape[terms[0].index(queries[0])], a.shape[terms[0].index(keys[0])]):
        return None

    def order(term: str, last: list[str]) -> Fold:
        axes = [term.index(c) for c in shared + last]
        return lambda t: t.permute(axes) if len(axes) == 4 else t.permute(axes).unsqueeze(1)

    return Product(
        a, v, order(terms[0], queries + keys), order(terms[1], keys + width), order(result, queries + width), soft.mixed
    )


def terms_of(equation: Any, factors: tuple[Any, ...]) -> list[str] | None:
    """The axes of both factors and of the result, with letters for "..."; None if it is spelled in another way."""
    if not isinstance(equation, str) or not all(isinstance(one, Tensor) for one in factors):
        return None
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2:
        return None
    free = [c for c in ascii_letters if c not in equation]
    more = [one.ndim - len(term.replace("...", "")) for term, one in zip(terms, factors)]
    if not arrow:
        once = sorted(c for c in left if c.isalpha() and left.count(c) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    most = max(count if "..." in term else 0 for term, count in zip(terms, more))
    dots = "".join(free[:most])  # axes are aligned at the right
    filled = [term.replace("...", dots[most - count :]) for term, count in zip(terms, more)]
    return [*filled, result.replace("...", dots)]
