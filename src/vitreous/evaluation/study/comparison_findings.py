"""What the gathered scores of compared methods say, in words, tables and charts, beside what was published."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.figure import Figure

from vitreous._support.statistics import FEW
from vitreous._support.words import count_of, finite, number, spoken
from vitreous.evaluation.study.claim_verdicts import Verdict, percent, verdicts_of
from vitreous.evaluation.study.compared import Compared
from vitreous.evaluation.study.comparison import NOTHING, Agreement
from vitreous.evaluation.study.findings import Chart, Findings, Table
from vitreous.evaluation.study.published_claims import CAVEAT, CORRELATION, SOURCE, SPARSITY
from vitreous.plot.cdam_by_attention import attention_figure
from vitreous.plot.pairs import MOST_PAIRED, correlation_figure, pairs_figure

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


def findings_of(gathered: Agreement, configured: Sequence[str] = ()) -> Findings:
    """Everything that the gathered scores tell; `configured`: methods that had other options than the defaults."""
    found = Compared(gathered)
    verdicts = verdicts_of(found)
    return Findings(
        lead(found, verdicts),
        told(found, verdicts, configured),
        tables(found, verdicts),
        charts(found),
        {**numbers(found, verdicts), "configured": list(configured)},
    )


# --------------------------------------------------------------------------------------------------------------- words


def lead(found: Compared, verdicts: Sequence[Verdict]) -> str:
    if not found.images:
        return "No image was compared: nothing can be said."
    on = f"On {count_of(found.images, 'image')}"
    if (found.of.failed == found.images).all():
        return f"{on} no method gave a map: nothing can be said."
    parts = [part for part in (lead_sparsity(found), lead_r(found), lead_claims(verdicts)) if part]
    return f"{on}, {'; '.join(parts)}."


def lead_sparsity(found: Compared) -> str:
    known = {name: e for name in found.methods if (e := found.estimates["sparsity", name]).count}
    most = max(known, key=lambda name: known[name].mean)
    if len({estimate.mean for estimate in known.values()}) == 1:
        return f"{spoken(list(known))} {'has' if len(known) == 1 else 'have'} sparsity {known[most]}"
    return f"{most} is the sparsest ({known[most]})"


def lead_r(found: Compared) -> str:
    known = {pair: e for pair in combinations(found.methods, 2) if (e := found.estimates["r", *pair]).count}
    if not known:
        return "no two methods have maps that vary, so there is no correlation" if len(found.methods) > 1 else ""
    most, least = (pick(known, key=lambda pair: known[pair].mean) for pick in (max, min))
    if len(known) == 1:
        return f"{spoken(most)} correlate with r = {known[most]} within an image"
    return (
        f"{spoken(most)} are the most alike (r = {known[most]} within an image), "
        f"{spoken(least)} the least (r = {known[least]})"
    )


def lead_claims(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    held, fell, open_ = ([verdict.holds for verdict in verdicts].count(state) for state in (True, False, None))
    return f"of {count_of(len(verdicts), 'published claim')}, {held} held, {fell} did not, {open_} cannot be told"


def told(found: Compared, verdicts: Sequence[Verdict], configured: Sequence[str]) -> list[str]:
    if not found.images:
        return []
    said = [verdict.sentence for verdict in verdicts]
    said.append(CAVEAT if said else f"No claim is checked: they are about {spoken(list(SPARSITY))}.")
    if configured:
        said.append(f"Other options than the defaults: {', '.join(configured)}.")
    on = f"of {count_of(found.images, 'image')}"
    if failed := some(found.methods, found.of.failed):
        said.append(f"Maps that failed and are left out, {on}: {failed}.")
    if constant := some(found.methods, found.of.constant):
        said.append(f"Maps that are the same everywhere and have no r, {on}: {constant}.")
    return said


def some(methods: Sequence[str], counts: Int[np.ndarray, "M"]) -> str:
    """The methods with a count above zero, and the counts."""
    return ", ".join(f"{name} {count}" for name, count in zip(methods, counts) if count)


# -------------------------------------------------------------------------------------------------------------- tables


def tables(found: Compared, verdicts: Sequence[Verdict]) -> list[Table]:
    if not found.images:
        return []
    made = [claim_table(verdicts)]
    made += [make(found) for make in (sparsity_table, r_table, bin_table, sign_table, negative_table)]
    return [table for table in made if table.rows]


def claim_table(verdicts: Sequence[Verdict]) -> Table:
    about = (
        "A claim that one is greater than another holds where the 95 % bootstrap interval of their difference, "
        "paired by image, lies above zero, does not where it lies below, and cannot be told where zero is inside "
        f"or images are fewer than {FEW}; one with a limit likewise. cdam near zero: on tokens with less than 1 % "
        "of the image's largest attention, |cdam| is on average below 5 % of its largest, and at most 5 % of them "
        f"have more. {CAVEAT}"
    )
    rows = [(v.claim, v.word.removesuffix(" here"), v.ours, v.published) for v in verdicts]
    return Table("Published claims", ("claim", "here", "our numbers", "published"), rows, about)


def sparsity_table(found: Compared) -> Table:
    rows = []
    for name, failed, constant in zip(found.methods, found.of.failed, found.of.constant):
        mean, published = found.estimates["sparsity", name], SPARSITY.get(name, math.nan)
        rows.append((name, str(mean), number(published), f"{mean.count:,}", f"{failed:,}", f"{constant:,}"))
    about = "Share of tokens with |s| < 5 % of the map's largest s: mean over images, 95 % bootstrap interval."
    return Table("Sparsity", ("method", "sparsity", "published", "images", "failed", "constant maps"), rows, about)


def r_table(found: Compared) -> Table:
    rows = []
    for one, other in combinations(found.methods, 2):
        mean, published = found.estimates["r", one, other], CORRELATION.get(frozenset((one, other)), math.nan)
        scaled, raw = (float(pooled.r[found.at(one, other)]) for pooled in (found.of.scaled, found.of.raw))
        rows.append((f"{one}, {other}", str(mean), number(scaled), number(raw), number(published), f"{mean.count:,}"))
    about = (
        "Pearson r of per-token scores. Within an image: mean over images, 95 % bootstrap interval. Pooled: over "
        "all tokens of all images, each image's scores divided by their largest |s|; raw: as they are."
    )
    head = ("methods", "r within an image", "r pooled", "r pooled, raw", "published", "images")
    return Table("Correlation", head, rows, about)


def bin_table(found: Compared) -> Table:
    bins = found.of.bins
    rows = [
        (
            row.name,
            f"{row.tokens:,}",
            f"{row.images:,}",
            percent(row.mean),
            percent(row.most),
            percent(row.large),
            number(row.mean / bins.average),
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


def sign_table(found: Compared) -> Table:
    rows = [
        (", ".join(one.methods), str(one.within), number(one.pooled), number(one.chance), f"{one.tokens:,}")
        for one in found.all_same_signs
    ]
    about = (
        "Share of equal signs among tokens where both methods have 5 % of their image's largest |s| or more. By "
        "chance: if each gave as many signs of each kind, but anywhere."
    )
    return Table("Signs", ("methods", "within an image", "of all tokens", "by chance", "tokens"), rows, about)


def negative_table(found: Compared) -> Table:
    rows = [
        (f.method, f.negative_for, number(f.mean), number(f.mean_of_all), percent(f.positive), f"{f.tokens:,}")
        for f in found.all_on_negative
    ]
    about = "Scores relative to the largest |s| of their image, on tokens that a signed method puts at −5 % or less."
    head = ("method", "negative for", "mean there", "mean of all", "positive there", "tokens there")
    return Table("Unsigned methods on counter-evidence", head, rows, about)


# -------------------------------------------------------------------------------------------------------------- charts


def charts(found: Compared) -> list[Chart]:
    made, bins = [], found.of.bins
    if found.images and len(found.methods) > 1:
        if len(found.methods) <= MOST_PAIRED:
            made.append(Chart("pairs", "Scores of methods against each other", PAIRS, partial(draw_pairs, found)))
        made.append(Chart("correlation", "Correlation of methods", MATRIX, partial(draw_correlation, found)))
    if bins.tokens.any():
        draw = partial(attention_figure, bins.rows, bins.average, NOTHING)
        made.append(Chart("attention-and-cdam", "cdam where attention is small", BINNED, draw))
    return made


def draw_pairs(found: Compared) -> Figure:
    sparse = np.array([found.estimates["sparsity", name].mean for name in found.methods])
    both_ways = [signed or bool(below) for signed, below in zip(found.signed, found.of.negative)]
    tokens = found.of.sample.tokens
    return pairs_figure(found.methods, tokens, both_ways, found.within, found.of.scaled.r, sparse, CORRELATION)


def draw_correlation(found: Compared) -> Figure:
    return correlation_figure(found.methods, found.within, found.of.scaled.r)


# ------------------------------------------------------------------------------------------------------------- numbers


def numbers(found: Compared, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The findings as JSON can hold them."""
    pairs, bins = list(combinations(found.methods, 2)), found.of.bins
    return {
        "images": found.images,
        "methods": list(found.methods),
        "signed": dict(zip(found.methods, found.signed)),
        "failed": dict(zip(found.methods, found.of.failed.tolist())),
        "constant": dict(zip(found.methods, found.of.constant.tolist())),
        "r_within": [{"methods": list(pair), **found.estimates["r", *pair].numbers} for pair in pairs],
        "r_pooled": finite(found.of.scaled.r),
        "r_pooled_raw": finite(found.of.raw.r),
        "sparsity": {name: found.estimates["sparsity", name].numbers for name in found.methods},
        "published": {
            "source": SOURCE,
            "sparsity": SPARSITY,
            "r": [{"methods": sorted(pair), "r": r} for pair, r in CORRELATION.items()],
        },
        "claims": [asdict(verdict) for verdict in verdicts],
        "attention_and_cdam": [
            {**row.numbers, "to_average": finite(row.mean / bins.average)} for row in bins.rows if bins.tokens.any()
        ],
        "signs": [one.numbers for one in found.all_same_signs],
        "on_negative": [one.numbers for one in found.all_on_negative],
    }
