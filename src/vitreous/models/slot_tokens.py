"""Which tokens the slots of an attention are made of: measured by derivatives, for any windows, order and padding.

Forwards (`tokens_of_slots`): tokens have numbers in binary. The derivative of a slot along a random direction of all
tokens, with the signs of one digit, is plus or minus that without signs if the slot is made of one token only; the
signs spell its number.

Backwards (`slots_of_tokens`), where slots pool tokens: the same with the numbers of the slots, by gradients.

On average (`centres`), where what they are made of overlaps: the mean place of it, each part by the square of its
derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitreous.models.stages import Rows

PURE = 0.9  # how nearly a slot must be made of one token
DRAWS = 128  # random directions, each of which counts for as many as a token is wide
UNREAD = 1e-8  # of the largest energy: a smaller one is none


@dataclass(frozen=True, eq=False)
class Pairs:
    """A slot (from 0 to W·n − 1) and a token that it is made of."""

    slot: Tensor
    token: Tensor

    @property
    def last(self) -> int:
        return int(self.token.max())

    @property
    def several(self) -> bool:
        """Whether they are more than one token."""
        return bool(self.token.min() < self.token.max())


def tokens_of_slots(slots: Tensor, tokens: Tensor, images: int) -> Tensor | None:
    """The token of each slot, [B rows n] (−1: none); None if slots are made of several tokens, or mix images."""
    numbers = numbered(tokens, images)
    count = int(numbers.max()) + 1
    random = torch.Generator().manual_seed(3)
    along = torch.randn(tokens.shape, generator=random).to(tokens)
    forwards = derivative(slots, tokens)
    plain = forwards(along)
    energy = plain.square().sum(-1)
    read = energy > UNREAD * energy.max()
    found = torch.zeros_like(energy, dtype=torch.long)
    for k in range((count - 1).bit_length()):
        sign = (forwards(along * (1 - 2 * (numbers >> k & 1))[..., None]) * plain).sum(-1) / energy.clamp_min(1e-300)
        if (read & (sign.abs() < PURE)).any():
            return None
        found |= (sign < 0).long() << k
    found = torch.where(read, found, -1).reshape(images, -1, slots.shape[2])  # [B rows n]
    each = count // images
    own = torch.arange(images, device=found.device)[:, None, None]
    if not ((found < 0) | (found // each == own)).all():
        return None
    found = torch.where(found < 0, found, found % each)
    return found if (found == found[:1]).all() else None


def derivative(made: Tensor, source: Tensor) -> Callable[[Tensor], Tensor]:
    """The function from a direction of the source to the derivative of what is made of it."""
    ask = torch.zeros_like(made, requires_grad=True)
    with torch.enable_grad():
        (back,) = torch.autograd.grad(made, [source], ask, create_graph=True, retain_graph=True)
    return lambda direction: torch.autograd.grad(back, [ask], direction, retain_graph=True)[0].double()


def centres(made: Tensor, source: Tensor, weights: Sequence[Tensor], axis: int, times: int = 1) -> list[Tensor]:
    """The mean of each of some numbers of the source, for every index of one axis of what is made of it.

    `weights`: the numbers, NaN where the source does not count; NaN: made of nothing that counts. `times`: as exact.
    """
    forwards = derivative(made, source)
    random = torch.Generator().manual_seed(5)
    energy, sums = torch.zeros(()), [torch.zeros(())] * len(weights)
    others = [i for i in range(made.ndim) if i != axis % made.ndim]
    for _ in range(times * max(1, DRAWS // made.shape[-1])):
        along = torch.randn(source.shape, generator=random).to(source) * ~weights[0].isnan()
        plain = forwards(along)
        energy = energy.to(plain) + plain.square().sum(others)
        for k, weight in enumerate(weights):
            sums[k] = sums[k].to(plain) + (forwards(along * weight.nan_to_num().to(along)) * plain).sum(others)
    read = energy > UNREAD * energy.max()
    return [torch.where(read, one / energy, torch.nan) for one in sums]


def numbered(tokens: Tensor, images: int) -> Tensor:
    """A number for each token of each image, in the axes of the tokens."""
    shape = tokens.shape[:-1]
    axis = 0 if shape[0] == images else 1
    rest = [size for i, size in enumerate(shape) if i != axis]
    return torch.arange(tokens[..., 0].numel(), device=tokens.device).reshape(images, *rest).movedim(0, axis)


def rows_of(found: Tensor) -> Rows:
    """Which of the rows [rows n] are heads of one window: those with the same tokens."""
    count = len(found)
    for heads in sorted((h for h in range(1, count + 1) if count % h == 0), reverse=True):
        for inside in (True, False):
            rows = Rows(count // heads, heads, inside)
            apart = rows.arrange(found[:, None, :, None].transpose(0, 1), 1)[..., 0]  # [W H n]
            if (apart == apart[:, :1]).all():
                return rows
    raise AssertionError("every row is a window of its own at least")


def slots_of_tokens(slots: Tensor, tokens: Tensor, images: int) -> Pairs | None:
    """The slot [B·W H n d] that each token goes to; None if a token goes to several."""
    random = torch.Generator().manual_seed(4)
    weights = torch.randn(slots.shape[1:], generator=random).to(slots)
    each = (slots * weights).sum((1, 3)).reshape(images, -1)  # [B W·n]
    numbers = torch.arange(each.shape[1], device=slots.device)

    def backwards(signs: Tensor) -> Tensor:
        grad = torch.autograd.grad((each * signs).sum(), [tokens], retain_graph=True)[0].double()
        return grad.movedim(0 if grad.shape[0] == images else 1, 0).reshape(images, -1, grad.shape[-1])

    plain = backwards(torch.ones_like(each))
    energy = plain.square().sum((0, 2))
    read = energy > UNREAD * energy.max()
    found = torch.zeros_like(energy, dtype=torch.long)
    for k in range(max(1, (len(numbers) - 1).bit_length())):
        sign = (backwards((1 - 2 * (numbers >> k & 1)).to(each)) * plain).sum((0, 2)) / energy.clamp_min(1e-300)
        if (read & (sign.abs() < PURE)).any():
            return None
        found |= (sign < 0).long() << k
    token = read.nonzero().flatten()
    return Pairs(found[token], token)
