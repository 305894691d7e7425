"""Fit a dictionary of latents to patch tokens: a TopK sparse autoencoder, or semi-NMF.

sae   min ‖x̂ − D·TopK_k(relu(W·x̂ + b))‖², x̂ = (x − m)/s; ‖d_j‖ = 1, W starts as Dᵀ; a latent that no token uses any more
      begins again at what the others leave of a badly explained token
nmf   min ½‖x − D·a‖² + λ·Σa, a ≥ 0: a by projected gradients and the d_j one by one, in turn; it never grows. The mean
      stays in the tokens, and λ is small: of all cones that hold them it prefers the narrowest, whose edges are the d_j
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vitreous._support.progress import steps as told
from vitreous.errors import InputError, OptionError
from vitreous.trace.latents import KINDS, Latents, keep_largest, nonnegative

BATCH = 2048  # tokens of a step
STEPS = {"sae": 1500, "nmf": 60}
RATE = 2e-3
PENALTY = 0.05  # λ of semi-NMF, of the mean length of a token
LOOKS = 8  # times that dead latents are looked for, in the first three quarters of the steps
STABLE = 0.7  # the mean cosine of matched directions from which a latent counts as stable

Rows = Float[Tensor, "n D"]


@dataclass(frozen=True)
class Size:
    """How many latents, and how many of them a token may have at most."""

    latents: int
    k: int

    @classmethod
    def of(cls, by: str, tokens: int, width: int, latents: int | None = None, k: int | None = None) -> Size:
        """As given, or by the number of tokens: about 128 for each latent of an autoencoder, 1,000 of semi-NMF."""
        if by not in KINDS:
            raise OptionError(f"by={by!r}: must be one of {', '.join(KINDS)}")
        each, least, most = (128, 16, 8 * width) if by == "sae" else (1000, 8, 64)
        usual = 2 ** round(math.log2(max(1, tokens / each)))
        chosen = latents or max(least, min(most, usual))
        if tokens < 2 * chosen:
            said = f"{tokens} tokens are too few for {chosen} latents"
            raise InputError(f"{said}; give more images, or fewer latents (at most {tokens // 2})")
        few = 0 if by == "nmf" else k or max(2, min(32, chosen // 32 if chosen >= 128 else 4))
        if few > chosen:
            raise OptionError(f"k={few}: a token cannot have more latents than there are ({chosen})")
        return cls(chosen, few)


def fit(tokens: Rows, by: str, size: Size, seed: int = 0, steps: int | None = None) -> tuple[Latents, list[float]]:
    """The latents of these tokens, and the mean squared error after each step; the same seed gives the same."""
    if not tokens.isfinite().all():
        raise InputError("the patch tokens contain NaN or infinite values; try another dtype or layer")
    make = fit_sae if by == "sae" else fit_nmf
    with torch.inference_mode(False), torch.enable_grad():
        return make(tokens.float(), size, seed, steps or STEPS[by])


def fit_sae(tokens: Rows, size: Size, seed: int, steps: int) -> tuple[Latents, list[float]]:
    chance = torch.Generator().manual_seed(seed)
    mean = tokens.mean(0)
    scale = (tokens - mean).norm(dim=1).mean().clamp_min(1e-12)
    data = (tokens - mean) / scale
    decoder = begin(data, size.latents, chance).requires_grad_()
    encoder, bias = decoder.detach().clone().requires_grad_(), data.new_zeros(size.latents).requires_grad_()
    parts = [decoder, encoder, bias]
    adam = torch.optim.Adam(parts, lr=RATE)
    used, losses = torch.zeros(size.latents, dtype=torch.bool, device=data.device), []
    every = max(1, steps * 3 // 4 // LOOKS)
    for step in told(range(steps), steps, f"fitting {size.latents} latents"):
        for group in adam.param_groups:
            group["lr"] = RATE * min(1.0, 4 * (1 - step / steps))  # falls over the last quarter
        x = data[torch.randint(len(data), (min(BATCH, len(data)),), generator=chance).to(data.device)]
        a = keep_largest(F.relu(F.linear(x, encoder, bias)), size.k)
        rest = x - a @ decoder
        loss = rest.square().sum(1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            decoder.copy_(F.normalize(decoder, dim=1))
            used |= (a > 0).any(0)
            if (step + 1) % every == 0:
                if step < steps * 3 // 4:
                    revive(~used, rest, parts, adam, chance)
                used.zero_()
        losses.append(loss.detach())
    decoder, encoder, bias = (part.detach() for part in parts)
    found = Latents("", 0, "sae", mean, decoder, encoder, scale * bias - encoder @ mean, size.k)
    return found, (torch.stack(losses) * scale**2).tolist()


def begin(data: Rows, count: int, chance: torch.Generator) -> Float[Tensor, "K D"]:
    """Directions of random tokens, each with a little noise, so that no two are the same."""
    rows = torch.randperm(len(data), generator=chance)[:count].to(data.device)
    noise = torch.randn(count, data.shape[1], generator=chance).to(data) / data.shape[1] ** 0.5
    return F.normalize(data[rows] + 0.1 * noise, dim=1)


def revive(
    dead: Bool[Tensor, "K"], rest: Rows, parts: list[Tensor], adam: torch.optim.Adam, chance: torch.Generator
) -> None:
    """Let dead latents begin again at what is left of badly explained tokens."""
    count, sizes = int(dead.sum()), rest.square().sum(1)
    if count == 0 or float(sizes.sum()) <= 0:
        return
    rows = torch.multinomial(sizes.double().cpu(), count, replacement=True, generator=chance).to(rest.device)
    decoder, encoder, bias = parts
    length = encoder[~dead].norm(dim=1).mean() if count < len(dead) else encoder.new_ones(())
    decoder[dead] = F.normalize(rest[rows], dim=1)
    encoder[dead] = decoder[dead] * length
    bias[dead] = 0
    for part in parts:
        for name in ("exp_avg", "exp_avg_sq"):
            adam.state[part][name][dead] = 0


def fit_nmf(tokens: Rows, size: Size, seed: int, steps: int) -> tuple[Latents, list[float]]:
    chance, losses = torch.Generator().manual_seed(seed), []
    length = tokens.norm(dim=1).mean().clamp_min(1e-12)
    with torch.no_grad():
        decoder = begin(tokens / length, size.latents, chance)
        a = nonnegative(tokens, decoder, steps=20, penalty=PENALTY * length)
        for _ in told(range(steps), steps, f"fitting {size.latents} latents"):
            turned(decoder, a, tokens)
            a = nonnegative(tokens, decoder, a, 10, PENALTY * length)
            error = (tokens - a @ decoder).square().sum(1) / 2 + PENALTY * length * a.sum(1)
            losses.append(error.mean())
    return Latents("", 0, "nmf", torch.zeros_like(tokens[0]), F.normalize(decoder, dim=1)), torch.stack(losses).tolist()


def turned(decoder: Float[Tensor, "K D"], a: Float[Tensor, "n K"], tokens: Rows) -> None:
    """Move each direction to where the error is least, not longer than 1, in place; one that no token has stays."""
    gram, pull = a.mT @ a, a.mT @ tokens
    for j in range(len(decoder)):
        if gram[j, j] > 0:
            best = decoder[j] + (pull[j] - gram[j] @ decoder) / gram[j, j]
            decoder[j] = best / best.norm().clamp_min(1)


# ------------------------------------------------------------------------------------------------------------- quality


@dataclass(frozen=True, eq=False)
class Quality:
    """How well latents describe tokens they were not fitted to."""

    explained: Float[np.ndarray, "N"]  # of the variance of each image's tokens
    share: Float[np.ndarray, "K"]  # of all tokens that have each latent
    active: Float[np.ndarray, "N"]  # latents that a token has, on average (L0)

    @property
    def dead(self) -> int:
        return int((self.share == 0).sum())


def quality(latents: Latents, images: list[Rows]) -> Quality:
    """Measured image by image."""
    explained, active, share, count = [], [], np.zeros(len(latents)), 0
    mean = torch.stack([tokens.mean(0) for tokens in images]).mean(0)
    for tokens in images:
        own = latents.to(tokens.new_zeros(0))
        a = own.encode(tokens)
        rest = (tokens - own.decode(a)).square().sum()
        explained.append(1 - float(rest / (tokens - mean).square().sum().clamp_min(1e-30)))
        active.append(float((a > 0).sum(-1).float().mean()))
        share += (a > 0).sum(0).cpu().numpy()
        count += len(tokens)
    return Quality(np.array(explained), share / max(1, count), np.array(active))


# ----------------------------------------------------------------------------------------------------------- stability


@dataclass(frozen=True, eq=False)
class Stability:
    """How alike each latent is to its match in dictionaries of other seeds: the cosine of their directions."""

    mean: Float[np.ndarray, "K"]
    best: Float[np.ndarray, "K"]
    control: Float[np.ndarray, "K"]  # of matches with random directions that vary as the tokens do

    @property
    def threshold(self) -> float:
        """What counts as stable: at least 0.7, and more than 95 % of the control."""
        return max(STABLE, float(np.quantile(self.control, 0.95)))

    @property
    def stable(self) -> Bool[np.ndarray, "K"]:
        return np.asarray(self.mean >= self.threshold)


def stability(first: Latents, others: list[Latents], tokens: Rows, seed: int = 0) -> Stability | None:
    """Match the directions of the first dictionary with those of the others, one to one; None: there are no others."""
    if not others:
        return None
    found = np.stack([matched(first.decoder, other.decoder) for other in others])
    control = random_directions(tokens - first.mean.to(tokens), len(first), seed)
    return Stability(found.mean(0), found.max(0), matched(first.decoder, control))


def matched(one: Float[Tensor, "K D"], other: Float[Tensor, "J D"]) -> Float[np.ndarray, "K"]:
    """The cosine of each direction and the one it is matched with, where the sum of all is greatest."""
    cosines = (F.normalize(one, dim=1) @ F.normalize(other, dim=1).mT).double().cpu().numpy()
    rows, columns = linear_sum_assignment(-cosines)
    found = np.zeros(len(cosines))
    found[rows] = cosines[rows, columns]
    return found


def random_directions(tokens: Rows, count: int, seed: int = 0) -> Float[Tensor, "{count} D"]:
    """Random directions that vary as the tokens do, on the side where these are: random sums of them."""
    chance = torch.Generator().manual_seed(seed + 7919)
    found = torch.randn(count, len(tokens), generator=chance).to(tokens) @ tokens
    return F.normalize(torch.where((found @ tokens.mean(0) < 0)[:, None], -found, found), dim=1)
