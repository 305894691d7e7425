"""What the gathered scores say, in words, tables and charts, beside what was published about four methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from vitreous._support.statistics import FEW, intervals, mean_of
from vitreous.evaluation.study.comparison import NOTHING, Agreement, Key, Square
from vitreous.evaluation.study.findings import Chart, Findings, Table
from vitreous.plot.pairs import MOST_PAIRED, Bin, attention_figure, correlation_figure, pairs_figure
from vitreous.registry import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_TOKENS = 100  # fewer tell nothing
HARDLY = 0.3  # a smaller |r| is hardly a correlation (Cohen's "small")
LARGELY = 0.75  # of the signs
SPARSITY = {"cdam": 0.84, "token_ablation": 0.66, "attention": 0.54, "gae": 0.49}  # published, the sparsest first
CORRELATION = {
    frozenset(("cdam", "token_ablation")): 0.44,
    frozenset(("gae", "token_ablation")): 0.34,
    frozenset(("gae", "attention")): 0.75,
    frozenset(("cdam", "gae")): 0.47,
    frozenset(("cdam", "attention")): 0.12,
    frozenset(("token_ablation", "attention")): 0.10,
}
SOURCE = "1,000 ImageNet images, DINO ViT-S/8 with a linear head"
CAVEAT = f"Published: {SOURCE}; another model, head or data set may differ without either being wrong."


@dataclass(frozen=True)
class Estimate:
    """A mean over images and its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return spell(self.mean) + (f" [{spell(self.low)}, {spell(self.high)}]" if self.count > 1 else "")

    @property
    def numbers(self) -> dict[str, float | int | None]:
        return {"mean": known(self.mean), "low": known(self.low), "high": known(self.high), "images": self.count}


def spell(value: float) -> str:
    """0.44, −0.10; a dash where there is no number."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def percent(value: float) -> str:
    """12.3 %, 84 %."""
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f} %" if 0 < abs(value) < 0.2 else f"{100 * value:.0f} %"


def known(value: float) -> float | None:
    """As JSON can hold it."""
    return float(value) if math.isfinite(value) else None


def listed(square: np.ndarray) -> list[list[float | None]]:
    return [[known(value) for value in row] for row in square]


@dataclass(frozen=True)
class Verdict:
    """A published claim, and whether it holds on these images."""

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


@dataclass(frozen=True)
class OnNegative:
    """The scores of a method on the tokens that another calls negative."""

    negative_for: str
    method: str
    mean: float
    mean_of_all: float
    positive: float  # share of those tokens
    tokens: int

    @property
    def numbers(self) -> dict[str, Any]:
        return {k: known(v) if isinstance(v, float) else v for k, v in asdict(self).items()}


def above_zero(differences: Sequence[Estimate]) -> bool | None:
    """Every interval above zero: yes; one below zero: no; else it cannot be told, nor from a few images."""
    if any(d.count >= FEW and d.high < 0 for d in differences):
        return False
    return True if all(d.count >= FEW and d.low > 0 for d in differences) else None


def findings_of(gathered: Agreement) -> Findings:
    """Everything that can be said, whatever was gathered."""
    return Told(gathered).findings


class Told:
    """All that the gathered numbers say."""

    def __init__(self, gathered: Agreement) -> None:
        self.of = gathered
        self.methods = gathered.methods
        self.images = gathered.images
        self.known = [name for name in SPARSITY if name in self.methods]  # published, the sparsest first

    @cached_property
    def estimates(self) -> Mapping[Key, Estimate]:
        """Every mean with its interval, and the paired differences that claims are about, from the same resamples."""
        series = self.of.series
        for one, other in self.differences:
            series[one, other] = series[one] - series[other]
        values = np.stack(list(series.values()))
        means, counts = mean_of(values), np.isfinite(values).sum(1)
        low, high = intervals(values, self.of.seed)
        rows = zip(means.tolist(), low.tolist(), high.tolist(), counts.tolist())
        return {key: Estimate(*row) for key, row in zip(series, rows)}

    @cached_property
    def differences(self) -> list[tuple[Key, Key]]:
        order: list[Key] = [("sparsity", name) for name in self.known]
        pairs = [*pairwise(order), *((order[0], other) for other in order[2:] if order[0][1] == "cdam")]
        if self.has("cdam", "gae", "token_ablation"):
            pairs.append((self.r("cdam", "token_ablation"), self.r("gae", "token_ablation")))
        if self.has("gae", "attention"):
            others = [name for name in ("cdam", "token_ablation") if name in self.methods]
            pairs += [(self.r("gae", "attention"), self.r(name, "attention")) for name in others]
        return pairs

    def has(self, *names: str) -> bool:
        return set(names) <= set(self.methods)

    def r(self, one: str, other: str) -> Key:
        return ("r", *sorted((one, other), key=self.methods.index))

    def pooled(self, one: str, other: str) -> float:
        return float(self.of.scaled.r[self.methods.index(one), self.methods.index(other)])

    @cached_property
    def signed(self) -> list[bool]:
        """As declared; a method that is not declared is signed if it gave a score below zero."""
        return [
            METHODS[name].is_signed(METHODS[name].check({})) if name in METHODS else bool(below)
            for name, below in zip(self.methods, self.of.negative)
        ]

    # ---------------------------------------------------------------------------------------------------------- claims

    @cached_property
    def verdicts(self) -> list[Verdict]:
        found = (
            self.sparsest,
            self.sparsity_order,
            self.nearer_to_ablation,
            self.nearest_to_attention,
            self.hardly_attention,
            self.zero_attention,
            self.same_sign,
            self.dimmed("cdam"),
            self.dimmed("token_ablation"),
        )
        return [verdict for verdict in found if verdict is not None] if self.images else []

    def judged(self, claim: str, pairs: Sequence[tuple[Key, Key]], published: str, more: str = "") -> Verdict:
        """A claim that the first of each pair is the greater."""
        apart = [self.estimates[pair] for pair in pairs]
        keys = dict.fromkeys(key for pair in pairs for key in pair)
        values = ", ".join(f"{called(key)} {spell(self.estimates[key].mean)}" for key in keys)
        steps = ", ".join(f"{called(one)} − {called(other)} = {e}" for (one, other), e in zip(pairs, apart))
        told = f"{values}; difference {apart[0]}" if len(apart) == 1 else f"{values}; {steps}"
        return Verdict(claim, above_zero(apart), told + more + few(apart), published)

    @property
    def sparsest(self) -> Verdict | None:
        others = [name for name in self.known if name != "cdam"]
        if "cdam" not in self.known or not others:
            return None
        pairs: list[tuple[Key, Key]] = [(("sparsity", "cdam"), ("sparsity", name)) for name in others]
        return self.judged(f"cdam is sparser than {spoken(others)}", pairs, self.published_sparsity)

    @property
    def sparsity_order(self) -> Verdict | None:
        if len(self.known) < 3:
            return None
        keys: list[Key] = [("sparsity", name) for name in self.known]
        ours = sorted(self.known, key=lambda name: -self.estimates["sparsity", name].mean)
        more = f"; our order is {', '.join(ours)}"
        claim = f"Sparsity falls in the order {', '.join(self.known)}"
        return self.judged(claim, list(pairwise(keys)), self.published_sparsity, more)

    @property
    def published_sparsity(self) -> str:
        return ", ".join(f"{name} {SPARSITY[name]:.2f}" for name in self.known)

    @property
    def nearer_to_ablation(self) -> Verdict | None:
        if not self.has("cdam", "gae", "token_ablation"):
            return None
        pair = self.r("cdam", "token_ablation"), self.r("gae", "token_ablation")
        claim = "cdam correlates better with token_ablation than gae does"
        return self.judged(claim, [pair], self.published_r(pair), self.over_all(pair))

    @property
    def nearest_to_attention(self) -> Verdict | None:
        others = [name for name in ("cdam", "token_ablation") if name in self.methods]
        if not self.has("gae", "attention") or not others:
            return None
        keys = [self.r(name, "attention") for name in ("gae", *others)]
        claim = f"gae correlates better with attention than {spoken(others, 'or')}"
        return self.judged(claim, [(keys[0], key) for key in keys[1:]], self.published_r(keys), self.over_all(keys))

    @property
    def hardly_attention(self) -> Verdict | None:
        names = [name for name in ("cdam", "token_ablation") if name in self.methods]
        if "attention" not in self.methods or not names:
            return None
        keys = [self.r(name, "attention") for name in names]
        found = [self.estimates[key] for key in keys]
        inside = all(e.count >= FEW and max(-e.low, e.high) < HARDLY for e in found)
        outside = any(e.count >= FEW and (e.low > HARDLY or e.high < -HARDLY) for e in found)
        told = ", ".join(f"{called(key)} {e}" for key, e in zip(keys, found)) + self.over_all(keys) + few(found)
        verb = "correlates" if len(names) == 1 else "correlate"
        claim = f"{spoken(names)} hardly {verb} with attention (|r| < {HARDLY})"
        return Verdict(claim, False if outside else True if inside else None, told, self.published_r(keys))

    def published_r(self, keys: Sequence[Key]) -> str:
        return ", ".join(f"{called(key)} {CORRELATION[frozenset(key[1:])]:.2f}" for key in keys)

    def over_all(self, keys: Sequence[Key]) -> str:
        return "; pooled over all tokens " + ", ".join(f"{called(k)} {spell(self.pooled(*k[1:]))}" for k in keys)

    @property
    def zero_attention(self) -> Verdict | None:
        """Attention below 1 % of the image's largest; there |cdam| below 5 % on average and for 95 % of the tokens."""
        if not self.has("attention", "cdam"):
            return None
        bins, first = self.of.bins, self.of.bins.rows[0]
        claim = "cdam is near zero where attention is near zero"
        published = "seen in a scatter plot, no number given"
        if not bins.tokens.any():
            return Verdict(claim, None, "no image has both maps, neither zero everywhere", published)
        if not first.tokens:
            return Verdict(claim, None, f"no token has so little attention: {self.least_attended}", published)
        told = (
            f"on {first.tokens:,} tokens of {counted(first.images, 'image')} with attention below 1 % of the image's "
            f"largest, |cdam| is on average {percent(first.mean)} of its largest, {self.to_average(first)}, and "
            f"{percent(first.large)} of them have 5 % or more, as {percent(bins.large_share)} of all tokens do"
        )
        if first.tokens < LEAST_TOKENS or first.images < FEW:
            return Verdict(claim, None, f"too few tokens or images: {told}", published)
        return Verdict(claim, first.mean < NOTHING and first.large <= NOTHING, told, published)

    def to_average(self, row: Bin) -> str:
        return f"{spell(row.mean / self.of.bins.average)} times the mean over all tokens"

    @property
    def least_attended(self) -> str:
        """What can be said in place of near-zero attention."""
        row = next(row for row in self.of.bins.rows if row.tokens)
        return (
            f"the least is {percent(self.of.bins.lowest)} of the image's largest; on the {row.tokens:,} tokens with "
            f"{row.name}, |cdam| is on average {percent(row.mean)} of its largest, {self.to_average(row)}"
        )

    @property
    def same_sign(self) -> Verdict | None:
        if not self.has("cdam", "token_ablation"):
            return None
        found = self.estimates[("same", *self.r("cdam", "token_ablation")[1:])]
        at, signs = (self.methods.index("cdam"), self.methods.index("token_ablation")), self.of.signs
        enough = found.count >= FEW
        holds = True if enough and found.low > LARGELY else False if enough and found.high < LARGELY else None
        told = (
            f"{found} within an image, {spell(signs.same[at])} over all {int(signs.tokens[at]):,} tokens where both "
            f"have 5 % of their largest or more, {spell(signs.chance[at])} by chance"
        )
        claim = f"cdam and token_ablation largely agree on the sign (share of equal signs > {LARGELY})"
        return Verdict(claim, holds, told + few([found]), "seen in a scatter plot, no number given")

    def dimmed(self, name: str) -> Verdict | None:
        """Low: surely lower than on all tokens of the image; positive: on average."""
        if not self.has(name, "gae"):
            return None
        found, there = self.estimates["dimmed", name], self.on_negative(name, "gae")
        low = above_zero([Estimate(-found.mean, -found.high, -found.low, found.count)])
        holds = False if there.tokens and there.mean <= 0 else low
        told = f"{name} calls no token negative"
        if there.tokens:
            told = (
                f"on {there.tokens:,} such tokens (at −5 % or less) gae has on average {spell(there.mean)} of its "
                f"largest, {percent(there.positive)} of them are positive; difference to the mean of its image {found}"
            )
        claim = f"gae is low but positive on tokens that {name} calls negative"
        return Verdict(claim, holds, told + few([found]), "seen in a scatter plot, no number given")

    def on_negative(self, name: str, other: str) -> OnNegative:
        at = self.methods.index(name), self.methods.index(other)
        signs, tokens = self.of.signs, int(self.of.signs.against[at])
        of_all = float(self.of.scaled.mean[at[::-1]]) if self.of.scaled.count[at] else math.nan
        if not tokens:
            return OnNegative(name, other, math.nan, of_all, math.nan, 0)
        return OnNegative(name, other, float(signs.score[at]) / tokens, of_all, float(signs.above[at]) / tokens, tokens)

    # ----------------------------------------------------------------------------------------------------------- words

    @property
    def findings(self) -> Findings:
        return Findings(self.lead, self.told, self.tables, self.charts, self.numbers)

    @property
    def lead(self) -> str:
        if not self.images:
            return "No image was compared: nothing can be said."
        on = f"On {counted(self.images, 'image')}"
        if (self.of.failed == self.images).all():
            return f"{on} no method gave a map: nothing can be said."
        parts = [part for part in (self.lead_sparsity, self.lead_r, self.lead_claims) if part]
        return f"{on}, {'; '.join(parts)}."

    @property
    def lead_sparsity(self) -> str:
        found = {name: e for name in self.methods if (e := self.estimates["sparsity", name]).count}
        most = max(found, key=lambda name: found[name].mean)
        if len({estimate.mean for estimate in found.values()}) == 1:
            return f"{spoken(list(found))} {'has' if len(found) == 1 else 'have'} sparsity {found[most]}"
        return f"{most} is the sparsest ({found[most]})"

    @property
    def lead_r(self) -> str:
        found = {pair: e for pair in combinations(self.methods, 2) if (e := self.estimates["r", *pair]).count}
        if not found:
            return "no two methods have maps that vary, so there is no correlation" if len(self.methods) > 1 else ""
        most, least = (pick(found, key=lambda pair: found[pair].mean) for pick in (max, min))
        if len(found) == 1:
            return f"{spoken(most)} correlate with r = {found[most]} within an image"
        return (
            f"{spoken(most)} are the most alike (r = {found[most]} within an image), "
            f"{spoken(least)} the least (r = {found[least]})"
        )

    @property
    def lead_claims(self) -> str:
        if not self.verdicts:
            return ""
        held, fell, open_ = ([v.holds for v in self.verdicts].count(state) for state in (True, False, None))
        return (
            f"of {counted(len(self.verdicts), 'published claim')}, {held} held, {fell} did not, {open_} cannot be told"
        )

    @property
    def told(self) -> list[str]:
        if not self.images:
            return []
        said = [verdict.sentence for verdict in self.verdicts]
        said.append(CAVEAT if said else f"No claim is checked: they are about {spoken(list(SPARSITY))}.")
        on = f"of {counted(self.images, 'image')}"
        if failed := self.some(self.of.failed):
            said.append(f"Maps that failed and are left out, {on}: {failed}.")
        if constant := self.some(self.of.constant):
            said.append(f"Maps that are the same everywhere and have no r, {on}: {constant}.")
        return said

    def some(self, counts: Int[np.ndarray, "M"]) -> str:
        return ", ".join(f"{name} {count}" for name, count in zip(self.methods, counts) if count)

    # ---------------------------------------------------------------------------------------------------------- tables

    @property
    def tables(self) -> list[Table]:
        found = (
            self.claim_table,
            self.sparsity_table,
            self.r_table,
            self.bin_table,
            self.sign_table,
            self.negative_table,
        )
        return [table for table in found if table.rows] if self.images else []

    @property
    def claim_table(self) -> Table:
        about = (
            "A claim that one is greater than another holds where the 95 % bootstrap interval of their difference, "
            "paired by image, lies above zero, does not where it lies below, and cannot be told where zero is inside "
            f"or images are fewer than {FEW}; one with a limit likewise. cdam near zero: on tokens with less than 1 % "
            "of the image's largest attention, |cdam| is on average below 5 % of its largest, and at most 5 % of them "
            f"have more. {CAVEAT}"
        )
        rows = [(v.claim, v.word.removesuffix(" here"), v.ours, v.published) for v in self.verdicts]
        return Table("Published claims", ("claim", "here", "our numbers", "published"), rows, about)

    @property
    def sparsity_table(self) -> Table:
        rows = []
        for name, failed, constant in zip(self.methods, self.of.failed, self.of.constant):
            found, published = self.estimates["sparsity", name], SPARSITY.get(name, math.nan)
            rows.append((name, str(found), spell(published), f"{found.count:,}", f"{failed:,}", f"{constant:,}"))
        about = "Share of tokens with |s| < 5 % of the map's largest s: mean over images, 95 % bootstrap interval."
        return Table("Sparsity", ("method", "sparsity", "published", "images", "failed", "constant maps"), rows, about)

    @property
    def r_table(self) -> Table:
        scaled, raw = self.of.scaled.r, self.of.raw.r
        rows = []
        for (i, one), (j, other) in combinations(enumerate(self.methods), 2):
            found, published = self.estimates["r", one, other], CORRELATION.get(frozenset((one, other)), math.nan)
            numbers = (spell(float(scaled[i, j])), spell(float(raw[i, j])), spell(published), f"{found.count:,}")
            rows.append((f"{one}, {other}", str(found), *numbers))
        about = (
            "Pearson r of per-token scores. Within an image: mean over images, 95 % bootstrap interval. Pooled: over "
            "all tokens of all images, each image's scores divided by their largest |s|; raw: as they are."
        )
        head = ("methods", "r within an image", "r pooled", "r pooled, raw", "published", "images")
        return Table("Correlation", head, rows, about)

    @property
    def bin_table(self) -> Table:
        bins = self.of.bins
        rows = [
            (
                row.name,
                f"{row.tokens:,}",
                f"{row.images:,}",
                percent(row.mean),
                percent(row.most),
                percent(row.large),
                spell(row.mean / bins.average),
            )
            for row in bins.rows
            if bins.tokens.any()
        ]
        head = ("attention", "tokens", "images", "mean |cdam|", "95th percentile", "≥ 5 %", "mean ÷ mean of all")
        about = (
            "Tokens by attention relative to the largest in their image; |cdam| relative to the largest in its image. "
            f"Of all tokens, the mean is {percent(bins.average)} and {percent(bins.large_share)} have 5 % or more."
        )
        return Table("cdam where attention is small", head, rows, about)

    @cached_property
    def sign_rows(self) -> list[tuple[str, str, Estimate, float, float, int]]:
        """Two signed methods each: equal signs within an image, of all tokens, by chance, and of how many tokens."""
        signs, pairs = self.of.signs, combinations([i for i, signed in enumerate(self.signed) if signed], 2)
        return [
            (
                self.methods[i],
                self.methods[j],
                self.estimates["same", self.methods[i], self.methods[j]],
                float(signs.same[i, j]),
                float(signs.chance[i, j]),
                int(signs.tokens[i, j]),
            )
            for i, j in pairs
        ]

    @property
    def sign_table(self) -> Table:
        rows = [
            (f"{one}, {other}", str(within), spell(pooled), spell(chance), f"{tokens:,}")
            for one, other, within, pooled, chance, tokens in self.sign_rows
        ]
        about = (
            "Share of equal signs among tokens where both methods have 5 % of their image's largest |s| or more. By "
            "chance: if each gave as many signs of each kind, but anywhere."
        )
        return Table("Signs", ("methods", "within an image", "of all tokens", "by chance", "tokens"), rows, about)

    @cached_property
    def negatives(self) -> list[OnNegative]:
        """Signed methods, each with the unsigned ones."""
        kinds = dict(zip(self.methods, self.signed))
        return [self.on_negative(one, other) for one in kinds if kinds[one] for other in kinds if not kinds[other]]

    @property
    def negative_table(self) -> Table:
        rows = [
            (f.method, f.negative_for, spell(f.mean), spell(f.mean_of_all), percent(f.positive), f"{f.tokens:,}")
            for f in self.negatives
        ]
        about = (
            "Scores relative to the largest |s| of their image, on tokens that a signed method puts at −5 % or less."
        )
        head = ("method", "negative for", "mean there", "mean of all", "positive there", "tokens there")
        return Table("Unsigned methods on counter-evidence", head, rows, about)

    # ---------------------------------------------------------------------------------------------------------- charts

    @property
    def charts(self) -> list[Chart]:
        charts = []
        if self.images and len(self.methods) > 1:
            if len(self.methods) <= MOST_PAIRED:
                charts.append(Chart("pairs", "Scores of methods against each other", PAIRS, self.draw_pairs))
            charts.append(Chart("correlation", "Correlation of methods", MATRIX, self.draw_correlation))
        if self.of.bins.tokens.any():
            charts.append(Chart("attention-and-cdam", "cdam where attention is small", BINNED, self.draw_bins))
        return charts

    @cached_property
    def within(self) -> Square:
        """The mean r within an image of each pair."""
        found = np.full((len(self.methods), len(self.methods)), np.nan)
        for (i, one), (j, other) in combinations(enumerate(self.methods), 2):
            found[i, j] = found[j, i] = self.estimates["r", one, other].mean
        return found

    def draw_pairs(self) -> Figure:
        sparse = np.array([self.estimates["sparsity", name].mean for name in self.methods])
        both_ways = [signed or bool(below) for signed, below in zip(self.signed, self.of.negative)]
        tokens = self.of.sample.tokens
        return pairs_figure(self.methods, tokens, both_ways, self.within, self.of.scaled.r, sparse, CORRELATION)

    def draw_correlation(self) -> Figure:
        return correlation_figure(self.methods, self.within, self.of.scaled.r)

    def draw_bins(self) -> Figure:
        return attention_figure(self.of.bins.rows, self.of.bins.average, NOTHING)

    @property
    def numbers(self) -> dict[str, Any]:
        pairs, bins = list(combinations(self.methods, 2)), self.of.bins
        return {
            "images": self.images,
            "methods": list(self.methods),
            "signed": dict(zip(self.methods, self.signed)),
            "failed": dict(zip(self.methods, self.of.failed.tolist())),
            "constant": dict(zip(self.methods, self.of.constant.tolist())),
            "r_within": [{"methods": list(pair), **self.estimates["r", *pair].numbers} for pair in pairs],
            "r_pooled": listed(self.of.scaled.r),
            "r_pooled_raw": listed(self.of.raw.r),
            "sparsity": {name: self.estimates["sparsity", name].numbers for name in self.methods},
            "published": {
                "source": SOURCE,
                "sparsity": SPARSITY,
                "r": [{"methods": sorted(pair), "r": r} for pair, r in CORRELATION.items()],
            },
            "claims": [asdict(verdict) for verdict in self.verdicts],
            "attention_and_cdam": [
                {**row.numbers, "to_average": known(row.mean / bins.average)} for row in bins.rows if bins.tokens.any()
            ],
            "signs": [
                {
                    "methods": [one, other],
                    "within": within.numbers,
                    "pooled": known(pooled),
                    "chance": known(chance),
                    "tokens": tokens,
                }
                for one, other, within, pooled, chance, tokens in self.sign_rows
            ],
            "on_negative": [found.numbers for found in self.negatives],
        }


PAIRS = (
    "Below the diagonal, a sample of tokens of all images by the scores of two methods, each divided by the largest "
    "|score| of its image; darker: more tokens. On the diagonal each method's scores (heights on a log scale) and its "
    "sparsity. Above, the mean r within an image, under it the r over all tokens, and what was published."
)
MATRIX = "Below the diagonal the mean r within an image, above it the r over all tokens of all images."
BINNED = (
    "Tokens by their attention, relative to the largest in their image: the mean of |cdam|, relative to its largest, "
    "and what 95 of 100 tokens stay below."
)


def called(key: Key) -> str:
    """r(cdam, gae); the sparsity of a method by its name."""
    return f"r({', '.join(key[1:])})" if key[0] == "r" else str(key[1])


def few(found: Sequence[Estimate]) -> str:
    least = min(estimate.count for estimate in found)
    return "" if least >= FEW else f"; too few images to tell ({least})"


def counted(number: int, noun: str) -> str:
    return f"one {noun}" if number == 1 else f"{number:,} {noun}s"


def spoken(names: Sequence[str], word: str = "and") -> str:
    """a, b and c."""
    return f" {word} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
