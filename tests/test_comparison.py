"""Every number of `compare` a second time in plain numpy, every verdict both ways, and charts that can be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
import zoo
from machine import rare
from test_plot import collisions, words

import vitreous
from vitreous._support.statistics import intervals
from vitreous._support.words import number
from vitreous.errors import InputError
from vitreous.evaluation.study.claim_verdicts import percent
from vitreous.evaluation.study.comparison import FINE, SAMPLE, Agreement, Pooled, Sample, quantile, sparsity
from vitreous.evaluation.study.comparison_findings import findings_of
from vitreous.evaluation.study.findings import Findings
from vitreous.evaluation.study.published_claims import CORRELATION, SPARSITY
from vitreous.plot.cdam_by_attention import Bin, attention_figure
from vitreous.plot.figure import png_bytes
from vitreous.plot.pairs import correlation_figure, pairs_figure

FOUR = ("attention", "cdam", "gae", "token_ablation")
NAN = float("nan")
Make = Callable[[np.random.Generator], np.ndarray]


def told(images: Sequence[np.ndarray], methods: Sequence[str] = FOUR, seed: int = 0) -> Findings:
    gathered = Agreement(methods, seed)
    for image in images:
        gathered.add(image)
    return findings_of(gathered)


def pictures(count: int = 12, tokens: int = 49) -> list[np.ndarray]:
    """Related maps of two unsigned and two signed methods; one method failed once, another was constant once."""
    chance = np.random.default_rng(3)
    made = []
    for i in range(count):
        attention, other = chance.random(tokens) ** 3, chance.random(tokens)
        cdam = attention * chance.normal(0.3, 1, tokens)
        tam = cdam + chance.normal(size=tokens)
        made.append(np.stack([attention, cdam, attention + other, tam]) * 10.0 ** (i % 3))
    made[1][2] = NAN
    made[4][1] = 0.3
    made[5][3, 7] = np.inf
    return made


def there(images: Sequence[np.ndarray], *rows: int) -> list[np.ndarray]:
    return [image for image in images if np.isfinite(image[list(rows)]).all()]


def scaled(image: np.ndarray, row: int) -> np.ndarray:
    return np.asarray(image[row] / np.abs(image[row]).max())


# ------------------------------------------------------------------------------------------------------------- numbers


def test_r_within_an_image() -> None:
    images = pictures()
    found = told(images).numbers["r_within"]
    for (i, j), row in zip(combinations(range(4), 2), found, strict=True):
        each = [np.corrcoef(x[i], x[j])[0, 1] for x in there(images, i, j) if np.ptp(x[i]) > 0 and np.ptp(x[j]) > 0]
        assert row["methods"] == [FOUR[i], FOUR[j]]
        assert row["images"] == len(each) == 12 - (i == 2 or j == 2) - (i == 1 or j == 1) - (i == 3 or j == 3)
        assert row["mean"] == pytest.approx(np.mean(each), abs=1e-12)
        assert row["low"] < row["mean"] < row["high"]
        error = np.std(each, ddof=1) / np.sqrt(len(each))
        assert row["high"] - row["low"] == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_intervals_are_the_bootstrap_of_the_package() -> None:
    """With all images there: those of `statistic.intervals`, up to the order of images."""
    images = [x for x in pictures(40) if np.isfinite(x).all() and np.ptp(x[1]) > 0]
    gathered = Agreement(FOUR)
    for image in images:
        gathered.add(image)
    series = gathered.series["r", "cdam", "token_ablation"]
    assert sorted(series) == pytest.approx(sorted(np.corrcoef(x[1], x[3])[0, 1] for x in images))
    low, high = intervals(series[None], 0)
    row = findings_of(gathered).numbers["r_within"][4]
    assert row["methods"] == ["cdam", "token_ablation"]
    assert (row["low"], row["high"]) == pytest.approx((low[0], high[0]), abs=1e-12)


@pytest.mark.parametrize("kind", ["r_pooled", "r_pooled_raw"])
def test_pooled_r(kind: str) -> None:
    images = pictures()
    found = told(images).numbers[kind]
    for i, j in combinations(range(4), 2):
        both = there(images, i, j)
        one, other = (np.concatenate([scaled(x, k) if kind == "r_pooled" else x[k] for x in both]) for k in (i, j))
        assert found[i][j] == found[j][i] == pytest.approx(np.corrcoef(one, other)[0, 1], abs=1e-12)


def test_pooled_sums_stand_far_from_zero() -> None:
    """Sums of squares would lose all digits; images have different numbers of tokens."""
    chance, kept = np.random.default_rng(0), Pooled(2)
    images = [chance.normal(size=(2, n)) @ np.eye(n) + 1e5 for n in (5, 17, 1, 40)]
    for image in images:
        image[1] += 0.7 * image[0]
        kept.add(image[None], np.array([[True, True]]))
    exact = np.corrcoef(*(np.concatenate([x[k] - (1e5, 1.7e5)[k] for x in images]) for k in (0, 1)))[0, 1]
    assert kept.r[0, 1] == pytest.approx(exact, abs=1e-7)
    assert kept.mean[0, 1] == pytest.approx(np.concatenate([x[0] for x in images]).mean())


def test_sparsity_is_that_of_the_metric() -> None:
    chance = np.random.default_rng(0)
    maps = np.stack(
        [chance.normal(size=(4, 4)) ** 3, -(chance.random((4, 4)) ** 4), chance.random((4, 4)) ** 4, 0 * np.eye(4)]
    )
    maps = maps.astype(np.float32)
    model, image = zoo.model("timm ViT"), zoo.images("timm ViT")[:1]
    measured = [vitreous.evaluate(model, image, torch.from_numpy(m[None]), "sparsity", 1).value.item() for m in maps]
    assert sparsity(maps.reshape(4, 16)).tolist() == pytest.approx(measured)
    assert len(set(measured)) > 2


def test_sparsity_is_the_mean_over_images() -> None:
    images = pictures()
    found = told(images).numbers["sparsity"]
    for row, name in enumerate(FOUR):
        each = [(np.abs(x[row]) < 0.05 * x[row].max()).mean() for x in there(images, row)]
        assert found[name]["mean"] == pytest.approx(np.mean(each))
        assert found[name]["images"] == len(each)


def test_cdam_by_attention() -> None:
    images = pictures(30, 100)
    rows = told(images).numbers["attention_and_cdam"]
    both = there(images, 0, 1)
    attention, cdam = (np.concatenate([np.abs(scaled(x, k)) for x in both]) for k in (0, 1))
    ends = [0, 0.01, 0.05, 0.2, 0.5, 1.1]
    assert sum(row["tokens"] for row in rows) == len(attention) == 3000
    for row, low, high in zip(rows, ends, ends[1:]):
        inside = (attention >= low) & (attention < high)
        assert row["tokens"] == inside.sum() > 50
        assert row["images"] == sum(
            ((s := scaled(x, 0)) >= low).any() and ((s >= low) & (s < high)).any() for x in both
        )
        assert row["mean"] == pytest.approx(cdam[inside].mean())
        assert row["share_5_percent"] == pytest.approx((cdam[inside] >= 0.05).mean())
        assert row["to_average"] == pytest.approx(cdam[inside].mean() / cdam.mean())
        around = np.quantile(cdam[inside], (0.93, 0.97))
        assert around[0] - 1 / FINE <= row["percentile_95"] <= around[1] + 1 / FINE


def test_a_quantile_from_a_histogram() -> None:
    values = np.random.default_rng(0).beta(0.4, 3, 50_000)
    levels = np.histogram(values, FINE, (0, 1))[0]
    for part in (0.05, 0.5, 0.95, 1.0):
        assert quantile(levels, part) == pytest.approx(np.quantile(values, part), abs=1 / FINE)
    assert np.isnan(quantile(levels * 0, 0.95))


def test_signs() -> None:
    images = pictures()
    (found,) = told(images).numbers["signs"]
    both = there(images, 1, 3)
    each, pooled = [], []
    for x in both:
        one, other = scaled(x, 1), scaled(x, 3)
        strong = (np.abs(one) >= 0.05) & (np.abs(other) >= 0.05)
        each.append((np.sign(one) == np.sign(other))[strong].mean())
        pooled.append(np.stack([one, other])[:, strong] > 0)
    up = np.concatenate(pooled, 1)
    assert found["methods"] == ["cdam", "token_ablation"]
    assert found["within"]["mean"] == pytest.approx(np.mean(each))
    assert found["pooled"] == pytest.approx((up[0] == up[1]).mean())
    assert found["tokens"] == up.shape[1]
    one, other = up.mean(1)
    assert found["chance"] == pytest.approx(one * other + (1 - one) * (1 - other))


def test_unsigned_methods_on_what_signed_ones_call_negative() -> None:
    images = pictures()
    found = {(row["negative_for"], row["method"]): row for row in told(images).numbers["on_negative"]}
    assert set(found) == {(s, u) for s in ("cdam", "token_ablation") for u in ("attention", "gae")}
    for (one, other), row in found.items():
        i, j = FOUR.index(one), FOUR.index(other)
        both = there(images, i, j)
        on = np.concatenate([scaled(x, j)[scaled(x, i) <= -0.05] for x in both])
        assert row["tokens"] == len(on)
        assert row["mean"] == pytest.approx(on.mean())
        assert row["positive"] == (on > 0).mean()
        assert row["mean_of_all"] == pytest.approx(np.concatenate([scaled(x, j) for x in both]).mean())


def test_failed_and_constant_maps_are_counted() -> None:
    found = told(pictures())
    assert found.numbers["failed"] == {"attention": 0, "cdam": 0, "gae": 1, "token_ablation": 1}
    assert found.numbers["constant"] == {"attention": 0, "cdam": 1, "gae": 0, "token_ablation": 0}
    assert "Maps that failed and are left out, of 12 images: gae 1, token_ablation 1." in found.told
    assert "Maps that are the same everywhere and have no r, of 12 images: cdam 1." in found.told


def test_a_constant_map_in_single_precision_is_constant() -> None:
    image = np.stack([np.full(196, 1 / 3), np.random.default_rng(0).random(196)]).astype(np.float32)
    image[0, 5] = np.nextafter(image[0, 5], np.float32(1))
    found = told([image], ("a", "b")).numbers
    assert found["constant"] == {"a": 1, "b": 0} and found["r_within"][0]["images"] == 0


def test_methods_of_other_packages_are_signed_if_a_score_is_negative() -> None:
    images = [np.random.default_rng(i).random((3, 9)) * [[1], [-1], [1]] for i in range(3)]
    assert told(images, ("mine", "yours", "cdam")).numbers["signed"] == {"mine": False, "yours": True, "cdam": True}


# --------------------------------------------------------------------------------------------------- order and sample


def flat(value: object) -> list[object]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in flat(v)]
    return [x for v in value for x in flat(v)] if isinstance(value, list) else [value]


def test_the_order_of_images_does_not_matter() -> None:
    images = pictures(20)
    one, other = told(images).numbers, told(images[::-1]).numbers
    for a, b in zip(flat({**one, "claims": 0}), flat({**other, "claims": 0}), strict=True):
        assert a == (pytest.approx(b, abs=1e-9) if isinstance(b, float) else b)
    assert [claim["holds"] for claim in one["claims"]] == [claim["holds"] for claim in other["claims"]]


def test_the_sample_is_bounded_fair_and_repeatable() -> None:
    images = [np.random.default_rng(i).normal(size=(2, 400)) for i in range(120)]
    forth, back, seeded = Agreement(("a", "b")), Agreement(("a", "b")), Agreement(("a", "b"), seed=1)
    for x, y in zip(images, images[::-1]):
        forth.add(x)
        back.add(y)
        seeded.add(x)
    tokens = forth.sample.tokens
    assert tokens.shape == (2, SAMPLE)
    assert (tokens == back.sample.tokens).all() and not (tokens == seeded.sample.tokens).all()
    origin = {float(v): i for i, x in enumerate(images) for v in scaled(x, 0).astype(np.float32)}
    from_each = np.bincount([origin[float(v)] for v in tokens[0] if abs(v) < 1], minlength=120)
    assert from_each.min() > 100 and from_each.max() < 240  # of 400 each; 167 on average


def test_few_tokens_are_all_kept() -> None:
    kept, chance = Sample(1, most=10), np.random.default_rng(0)
    kept.add(np.arange(4.0)[None], chance.random(4))
    assert sorted(kept.tokens[0]) == [0, 1, 2, 3]
    lots = chance.random(40)
    kept.add(np.arange(4.0, 44.0)[None], lots)
    assert kept.tokens.shape == (1, 10)


# ------------------------------------------------------------------------------------------------------------ verdicts


def claim(findings: Findings, start: str) -> dict[str, object]:
    (found,) = [c for c in findings.numbers["claims"] if c["claim"].startswith(start)]
    return found


def world(make: Make, count: int = 30) -> list[np.ndarray]:
    return [make(np.random.default_rng(i)) for i in range(count)]


def sparse(chance: np.random.Generator, share: float, tokens: int = 100) -> np.ndarray:
    """Scores of which about this share is nothing."""
    return np.where(chance.random(tokens) < share, 0.001, 1.0) * chance.uniform(0.5, 1, tokens)


@pytest.mark.parametrize(
    ("shares", "sparsest", "order"),
    [
        ((0.5, 0.8, 0.4, 0.6), True, True),
        ((0.4, 0.8, 0.6, 0.5), True, False),
        ((0.8, 0.5, 0.4, 0.6), False, False),
        ((0.5, 0.6, 0.4, 0.6), None, None),
    ],
)
def test_sparsity_verdicts(shares: tuple[float, ...], sparsest: bool | None, order: bool | None) -> None:
    found = told(world(lambda chance: np.stack([sparse(chance, share) for share in shares])))
    assert claim(found, "cdam is sparser than token_ablation, attention and gae")["holds"] is sparsest
    said = claim(found, "Sparsity falls in the order cdam, token_ablation, attention, gae")
    assert said["holds"] is order
    assert said["published"] == "cdam 0.84, token_ablation 0.66, attention 0.54, gae 0.49"


def noisy(chance: np.random.Generator, scores: np.ndarray, noise: float) -> np.ndarray:
    return np.asarray(scores + noise * chance.normal(size=scores.shape))


@pytest.mark.parametrize(("cdam", "gae", "expected"), [(0.5, 2.0, True), (2.0, 0.5, False), (1.0, 1.0, None)])
def test_who_is_nearer_to_token_ablation(cdam: float, gae: float, expected: bool | None) -> None:
    def make(chance: np.random.Generator) -> np.ndarray:
        tam = chance.normal(size=100)
        return np.stack([noisy(chance, tam, cdam), noisy(chance, tam, gae), tam])

    found = claim(told(world(make), ("cdam", "gae", "token_ablation")), "cdam correlates better with token_ablation")
    assert found["holds"] is expected


def test_differences_are_paired_by_image() -> None:
    """r differs much between images, between methods hardly: only pairs can tell."""

    def make(chance: np.random.Generator) -> np.ndarray:
        tam, noise = chance.normal(size=400), chance.normal(size=400) * chance.uniform(0.2, 4)
        return np.stack([tam + noise, tam + 1.1 * noise, tam])

    found = told(world(make, 12), ("cdam", "gae", "token_ablation"))
    near, far = (
        next(r for r in found.numbers["r_within"] if r["methods"] == [m, "token_ablation"]) for m in ("cdam", "gae")
    )
    assert near["low"] < far["high"]
    assert claim(found, "cdam correlates better")["holds"] is True


@pytest.mark.parametrize(("gae", "cdam", "expected"), [(0.5, 3.0, True), (3.0, 0.5, False), (1.0, 1.0, None)])
def test_who_is_nearest_to_attention(gae: float, cdam: float, expected: bool | None) -> None:
    def make(chance: np.random.Generator) -> np.ndarray:
        attention = chance.random(100)
        return np.stack(
            [attention, noisy(chance, attention, cdam), noisy(chance, attention, gae), chance.normal(size=100)]
        )

    found = claim(told(world(make)), "gae correlates better with attention than cdam or token_ablation")
    assert found["holds"] is expected


@pytest.mark.parametrize(("part", "expected"), [(0.0, True), (2.0, False), (-2.0, False), (0.314, None)])
def test_hardly_correlated_with_attention(part: float, expected: bool | None) -> None:
    def make(chance: np.random.Generator) -> np.ndarray:
        attention = chance.normal(size=200)
        return np.stack([attention, noisy(chance, part * attention, 1), chance.normal(size=200)])

    found = claim(
        told(world(make, 20), ("attention", "cdam", "token_ablation")), "cdam and token_ablation hardly correlate"
    )
    assert found["holds"] is expected
    alone = told([image[:2] for image in world(make, 20)], ("attention", "cdam"))
    assert claim(alone, "cdam hardly correlates with attention")["holds"] is expected


def by_attention(chance: np.random.Generator, leak: float, floor: float = 0.0) -> np.ndarray:
    """cdam is attention with signs, and noise of a size everywhere."""
    attention = np.maximum(chance.random(200) ** 4, floor)
    return np.stack([attention, attention * chance.choice([-1, 1], 200) + leak * chance.normal(size=200)])


@pytest.mark.parametrize(("leak", "expected"), [(0.0, True), (0.001, True), (0.02, True), (0.05, False), (0.3, False)])
def test_cdam_where_attention_is_near_zero(leak: float, expected: bool) -> None:
    found = told(world(lambda chance: by_attention(chance, leak)), ("attention", "cdam"))
    first = found.numbers["attention_and_cdam"][0]
    rule = first["mean"] < 0.05 and first["share_5_percent"] <= 0.05
    said = claim(found, "cdam is near zero where attention is near zero")
    assert said["holds"] is rule is expected
    assert f"{first['tokens']:,} tokens of 30 images" in str(said["ours"])


def test_a_low_mean_is_not_enough() -> None:
    """One near-zero token of ten has a large cdam: 4 % on average, but not near zero."""

    def make(chance: np.random.Generator) -> np.ndarray:
        attention = np.where(np.arange(200) < 100, 0.001, 1.0)
        return np.stack([attention, np.where(np.arange(200) < 100, np.where(np.arange(200) % 10, 0, 0.4), 1.0)])

    found = told(world(make), ("attention", "cdam"))
    assert found.numbers["attention_and_cdam"][0]["mean"] == pytest.approx(0.04)
    assert claim(found, "cdam is near zero")["holds"] is False


def test_attention_that_is_never_near_zero() -> None:
    found = told(world(lambda chance: by_attention(chance, 0.0, floor=0.1)), ("attention", "cdam"))
    said = claim(found, "cdam is near zero")
    assert said["holds"] is None
    assert str(said["ours"]).startswith("no token has so little attention: the least is 10.")
    assert "tokens with 5–20 %" in str(said["ours"])


def test_a_few_near_zero_tokens_tell_nothing() -> None:
    found = told(world(lambda chance: by_attention(chance, 0.0), 4), ("attention", "cdam"))
    assert claim(found, "cdam is near zero")["holds"] is None
    assert "too few tokens or images" in str(claim(found, "cdam is near zero")["ours"])


@pytest.mark.parametrize(("flipped", "expected"), [(0.05, True), (0.5, False), (0.25, None)])
def test_agreement_of_signs(flipped: float, expected: bool | None) -> None:
    def make(chance: np.random.Generator) -> np.ndarray:
        cdam = chance.normal(size=100)
        return np.stack([cdam, np.where(chance.random(100) < flipped, -cdam, cdam)])

    said = claim(told(world(make), ("cdam", "token_ablation")), "cdam and token_ablation largely agree on the sign")
    assert said["holds"] is expected


@pytest.mark.parametrize(("there", "expected"), [(0.1, True), (0.9, False), (-0.1, False), (0.5, None)])
@pytest.mark.parametrize("name", ["cdam", "token_ablation"])
def test_gae_on_counter_evidence(name: str, there: float, expected: bool | None) -> None:
    def make(chance: np.random.Generator) -> np.ndarray:
        scores = chance.normal(size=100)
        return np.stack([scores, np.where(scores < 0, there, 0.5) + chance.uniform(-0.05, 0.05, 100)])

    said = claim(told(world(make), (name, "gae")), f"gae is low but positive on tokens that {name} calls negative")
    assert said["holds"] is expected


def test_a_few_images_decide_nothing() -> None:
    found = told(pictures()[:4])
    assert {c["holds"] for c in found.numbers["claims"]} == {None}
    assert all("too few" in str(c["ours"]) for c in found.numbers["claims"])
    assert found.lead.endswith("of 9 published claims, 0 held, 0 did not, 9 cannot be told.")


def test_words_name_numbers_the_published_ones_and_the_doubt() -> None:
    found = told(world(lambda chance: np.stack([sparse(chance, share) for share in (0.5, 0.8, 0.4, 0.6)])))
    assert found.lead.startswith("On 30 images, cdam is the sparsest (0.7")
    assert any(s.startswith("cdam is sparser than") and "holds here (cdam 0.7" in s for s in found.told)
    assert any("DINO ViT-S/8" in s and "may differ" in s for s in found.told)
    rows = {row[0]: row for row in next(t for t in found.tables if t.title == "Sparsity").rows}
    assert {name: rows[name][2] for name in SPARSITY} == {n: f"{v:.2f}" for n, v in SPARSITY.items()}
    rows = {row[0]: row for row in next(t for t in found.tables if t.title == "Correlation").rows}
    assert {frozenset(name.split(", ")): float(row[4]) for name, row in rows.items()} == CORRELATION


def test_other_methods_have_no_claims() -> None:
    found = told(world(lambda chance: chance.normal(size=(3, 49))), ("rollout", "legrad", "random"))
    assert found.numbers["claims"] == []
    assert found.told == ["No claim is checked: they are about cdam, token_ablation, attention and gae."]


@pytest.mark.parametrize("methods", [*combinations(FOUR, 2), *combinations(FOUR, 3), FOUR[::-1]])
def test_any_of_the_published_methods_may_be_missing(methods: tuple[str, ...]) -> None:
    images = [image[[FOUR.index(name) for name in methods]] for image in pictures()]
    found = told(images, methods)
    named = {name for c in found.numbers["claims"] for name in FOUR if name in c["claim"]}
    assert named <= set(methods)
    assert bool(found.numbers["claims"]) == (set(methods) != {"attention", "gae"})


def test_numbers_in_words() -> None:
    assert [number(x) for x in (0.444, -0.1, -0.001, 1.0, NAN)] == ["0.44", "−0.10", "0.00", "1.00", "–"]
    assert [percent(x) for x in (0.0, 0.012, 0.5, 1.0, NAN)] == ["0 %", "1.2 %", "50 %", "100 %", "–"]


# ---------------------------------------------------------------------------------------------------------- degenerate

DEGENERATE: dict[str, list[np.ndarray]] = {
    "no image": [],
    "one image": pictures()[:1],
    "all failed": [np.full((4, 9), NAN)] * 6,
    "all constant": [np.full((4, 9), 0.3)] * 6,
    "all zero": [np.zeros((4, 9))] * 6,
    "below zero": [-np.random.default_rng(i).random((4, 9)) for i in range(6)],
    "one token": [np.ones((4, 1))] * 6,
    "tiny": [np.random.default_rng(i).random((4, 9)) * 1e-300 for i in range(6)],
    "huge": [np.random.default_rng(i).random((4, 9)) * 1e300 for i in range(6)],
    "the same image": pictures()[:1] * 6,
    "half failed": [np.where(np.arange(4)[:, None] % 2, NAN, image) for image in pictures()],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEGENERATE)
@pytest.mark.parametrize("methods", [2, *rare(1, 4)])
def test_anything_can_be_told_and_drawn(name: str, methods: int) -> None:
    found = told([image[:methods] for image in DEGENERATE[name]], FOUR[:methods])
    json.dumps(found.numbers, allow_nan=False)
    assert found.lead.endswith(".")
    for table in found.tables:
        assert all(len(row) == len(table.head) for row in table.rows)
        assert not any("nan" in cell or "inf" in cell for row in table.rows for cell in row)
    assert not any("nan" in sentence for sentence in (found.lead, *found.told))
    for chart in found.charts:
        assert png_bytes(chart.draw()).startswith(b"\x89PNG")
    if name == "no image":
        assert found.lead == "No image was compared: nothing can be said." and not found.charts
    if name == "all failed":
        assert found.lead == "On 6 images no method gave a map: nothing can be said."
    if name == "all constant" and methods > 1:
        assert "no two methods have maps that vary" in found.lead


def test_wrong_input_is_refused() -> None:
    with pytest.raises(InputError, match="name each method once"):
        Agreement(("cdam", "cdam"))
    with pytest.raises(InputError, match="none"):
        Agreement(())
    with pytest.raises(InputError, match=r"maps \[3, 9\]: give \[2, tokens\]"):
        Agreement(("cdam", "gae")).add(np.zeros((3, 9)))
    with pytest.raises(InputError, match="tokens"):
        Agreement(("cdam", "gae")).add(np.zeros((2, 0)))


# -------------------------------------------------------------------------------------------------------------- charts

MANY = (*FOUR, "integrated_gradients", "transformer_attribution", "random", "rollout", "legrad", "value_zeroing")


def charts(count: int) -> Findings:
    def make(chance: np.random.Generator) -> np.ndarray:
        return np.asarray(chance.normal(size=(count, 49)) + chance.normal(size=49))

    return told(world(make, 6), MANY[:count])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 5, 8, 10])
def test_nothing_collides(count: int) -> None:
    found = charts(count)
    names = [chart.name for chart in found.charts]
    assert names == (["pairs"] if count <= 8 else []) + ["correlation", "attention-and-cdam"]
    for chart in found.charts:
        assert not collisions(chart.draw()), chart.name


def test_pairs_tell_both_r_and_the_published_one() -> None:
    found = charts(4)
    shown = words(found.charts[0].draw())
    assert [shown.count(word) for word in ("within an image", "all tokens", *FOUR)] == [6, 6, 1, 1, 1, 1]
    assert {f"published {r:.2f}" for r in CORRELATION.values()} <= set(shown)
    for row in found.numbers["r_within"]:
        assert number(row["mean"]) in shown
    for row in found.numbers["sparsity"].values():
        assert f"sparsity {number(row['mean'])}" in shown


def test_the_matrix_has_one_r_on_each_side() -> None:
    within, pooled = np.full((2, 2), -0.25), np.full((2, 2), 0.75)
    shown = words(correlation_figure(("cdam", "gae"), within, pooled))
    assert shown.count("−0.25") == shown.count("0.75") == 1
    assert shown.count("cdam") == shown.count("gae") == 2


def test_charts_of_nothing_are_refused() -> None:
    square = np.zeros((9, 9))
    with pytest.raises(InputError, match="9 methods"):
        pairs_figure(list("abcdefghi"), np.zeros((9, 5)), [True] * 9, square, square, np.zeros(9), {})
    with pytest.raises(InputError, match="no method"):
        correlation_figure((), np.zeros((0, 0)), np.zeros((0, 0)))
    with pytest.raises(InputError, match="no token"):
        attention_figure([Bin(0.0, 1.0, 0, 0, NAN, NAN, NAN)], 0.0, 0.05)


def test_bins_are_named() -> None:
    ends = (0.0, 0.01, 0.05, 0.5, 1.0)
    named = [Bin(low, high, 1, 1, 0.1, 0.2, 0.5).name for low, high in pairwise(ends)]
    assert named == ["< 1 %", "1–5 %", "5–50 %", "> 50 %"]
