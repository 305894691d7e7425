"""Published claims, judged by what a study measured: one rule, and the numbers in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitreous._support.statistics import FEW
from vitreous._support.words import count_of, number
from vitreous.evaluation.study.compared import Compared, Estimate
from vitreous.evaluation.study.comparison import Key
from vitreous.evaluation.study.published_claims import CLAIMS, CORRELATION, SEEN, SPARSITY, Claim
from vitreous.plot.cdam_by_attention import Bin

LEAST_TOKENS = 100  # fewer tell nothing


@dataclass(frozen=True)
class Verdict:
    """A published claim, and whether it holds on these images."""

    id: str
    paper: str
    claim: str
    holds: bool | None
    ours: str
    published: str

    @property
    def word(self) -> str:
        return "cannot be told here" if self.holds is None else "holds here" if self.holds else "does not hold here"

    @property
    def sentence(self) -> str:
        return f"{self.claim}: {self.word} ({self.ours}; published: {self.published})."


def verdicts_of(found: Compared) -> list[Verdict]:
    """Every claim that can be checked with the methods that were compared."""
    if not found.images:
        return []
    return [verdict_of(claim, found) for claim in CLAIMS if claim.about(found.methods)]


def verdict_of(claim: Claim, found: Compared) -> Verdict:
    holds, said = judge(claim, found), claim.sentence(found.methods)
    return Verdict(claim.id, claim.paper, said, holds, phrase(claim, found), published(claim, found.methods))


def evidence(claim: Claim, found: Compared) -> list[Estimate]:
    """The differences or the values that decide."""
    return [found.estimates[key] for key in claim.pairs(found.methods) or claim.keys(found.methods)]


# --------------------------------------------------------------------------------------------------------------- judge


def judge(claim: Claim, found: Compared) -> bool | None:
    """True if every interval lies inside the limits, False if one lies outside, else (or from a few images) None."""
    if claim.quantity == "bins":
        return is_near_zero(found, claim.limits[1])
    if claim.quantity == "dimmed":
        there = found.on_negative(claim.methods[0], claim.partner)
        if there.tokens and there.mean <= 0:  # low, but not positive
            return False
    estimates, (low, high) = evidence(claim, found), claim.limits
    enough = [one for one in estimates if one.count >= FEW]
    if any(one.high < low or one.low > high for one in enough):
        return False
    inside = len(enough) == len(estimates) and all(low < one.low and one.high < high for one in enough)
    return True if inside else None


def is_near_zero(found: Compared, limit: float) -> bool | None:
    """Attention below 1 % of the image's largest; there |cdam| below `limit` on average and for 95 % of the tokens."""
    first = found.of.bins.rows[0]
    if first.tokens < LEAST_TOKENS or first.images < FEW:
        return None
    return first.mean < limit and first.large <= limit


# -------------------------------------------------------------------------------------------------------------- phrase


def phrase(claim: Claim, found: Compared) -> str:
    """What was measured, in words."""
    if claim.quantity == "bins":
        return said_of_bins(found)
    keys, pairs, estimates = claim.keys(found.methods), claim.pairs(found.methods), evidence(claim, found)
    if claim.quantity == "same":
        said = said_of_signs(found, keys[0])
    elif claim.quantity == "dimmed":
        said = said_of_negatives(found, claim.methods[0], estimates[0])
    elif pairs:
        said = said_of_differences(found, keys, pairs)
    else:
        said = ", ".join(f"{called(key)} {one}" for key, one in zip(keys, estimates))
    if claim.rule == "falling":
        ours = sorted((key[1] for key in keys), key=lambda name: -found.estimates[claim.quantity, name].mean)
        said += f"; our order is {', '.join(ours)}"
    if claim.quantity == "r":
        pooled = ", ".join(f"{called(key)} {number(float(found.of.scaled.r[found.at(*key[1:])]))}" for key in keys)
        said += f"; pooled over all tokens {pooled}"
    least = min(one.count for one in estimates)
    return said if least >= FEW else f"{said}; too few images to tell ({least})"


def said_of_differences(found: Compared, keys: Sequence[Key], pairs: Sequence[tuple[Key, Key]]) -> str:
    """The values, and how far they are apart."""
    values = ", ".join(f"{called(key)} {number(found.estimates[key].mean)}" for key in keys)
    if len(pairs) == 1:
        return f"{values}; difference {found.estimates[pairs[0]]}"
    steps = ", ".join(f"{called(one)} − {called(other)} = {found.estimates[one, other]}" for one, other in pairs)
    return f"{values}; {steps}"


def said_of_signs(found: Compared, key: Key) -> str:
    signs = found.same_signs(*key[1:])
    return (
        f"{signs.within} within an image, {number(signs.pooled)} over all {signs.tokens:,} tokens where both "
        f"have 5 % of their largest or more, {number(signs.chance)} by chance"
    )


def said_of_negatives(found: Compared, name: str, apart: Estimate) -> str:
    there = found.on_negative(name, "gae")
    if not there.tokens:
        return f"{name} calls no token negative"
    return (
        f"on {there.tokens:,} such tokens (at −5 % or less) gae has on average {number(there.mean)} of its "
        f"largest, {percent(there.positive)} of them are positive; difference to the mean of its image {apart}"
    )


def said_of_bins(found: Compared) -> str:
    bins, first = found.of.bins, found.of.bins.rows[0]
    if not bins.tokens.any():
        return "no image has both maps, neither zero everywhere"
    if not first.tokens:
        row = next(row for row in bins.rows if row.tokens)
        return (
            f"no token has so little attention: the least is {percent(bins.lowest)} of the image's largest; on the "
            f"{row.tokens:,} tokens with {row.name}, |cdam| is on average {percent(row.mean)} of its largest, "
            f"{to_average(found, row)}"
        )
    said = (
        f"on {count_of(first.tokens, 'token')} of {count_of(first.images, 'image')} with attention below 1 % of the "
        f"image's largest, |cdam| is on average {percent(first.mean)} of its largest, {to_average(found, first)}, and "
        f"{percent(first.large)} of them have 5 % or more, as {percent(bins.large_share)} of all tokens do"
    )
    return f"too few tokens or images: {said}" if first.tokens < LEAST_TOKENS or first.images < FEW else said


def to_average(found: Compared, row: Bin) -> str:
    return f"{number(row.mean / found.of.bins.average)} times the mean over all tokens"


def published(claim: Claim, methods: Sequence[str]) -> str:
    """The numbers of the paper, where it gives some."""
    keys = claim.keys(methods)
    if claim.quantity == "sparsity":
        return ", ".join(f"{name} {SPARSITY[name]:.2f}" for _, name in keys)
    if claim.quantity == "r":
        return ", ".join(f"{called(key)} {CORRELATION[frozenset(key[1:])]:.2f}" for key in keys)
    return SEEN


def called(key: Key) -> str:
    """r(cdam, gae); the sparsity of a method by its name."""
    return f"r({', '.join(key[1:])})" if key[0] == "r" else str(key[1])


def percent(value: float) -> str:
    """12.3 %, 84 %."""
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f} %" if 0 < abs(value) < 0.2 else f"{100 * value:.0f} %"
