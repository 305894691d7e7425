"""Numbers from a few images: intervals that cover, ranks, verdicts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vitreous._support import statistics as statistic
from vitreous._support.statistics import Moments, Summary, intervals, resampled_means, summarise
from vitreous.errors import OptionError

NAN = float("nan")


def summary(*values: object, better: tuple[str, ...] = ("higher",), judged: tuple[bool, ...] | None = None) -> Summary:
    """Methods random, m1, m2 …, each with a row of values for each metric."""
    table = np.array(values, dtype=np.float64)
    table = table[:, None] if table.ndim == 2 else table
    methods = ["random", *(f"m{i}" for i in range(1, len(table)))]
    return summarise(table, methods, [f"k{k}" for k in range(table.shape[1])], better, judged=judged)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- bootstrap


def test_resampled_means_one_at_a_time() -> None:
    values = np.random.default_rng(1).normal(size=(3, 7))
    values[1, 2] = values[2, :5] = NAN
    found = resampled_means(values, seed=5, times=50)
    chance = np.random.default_rng(5)
    assert found.shape == (50, 3)
    for row in found:
        drawn = np.repeat(np.arange(7), chance.multinomial(7, np.full(7, 1 / 7)))
        for series, mean in zip(values, row):
            kept = [series[i] for i in drawn if not np.isnan(series[i])]
            assert np.isnan(mean) if not kept else mean == pytest.approx(sum(kept) / len(kept))


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).normal(size=(2, 9))
    whole = resampled_means(values, seed=3, times=40)
    monkeypatch.setattr(statistic, "AT_ONCE", 9 * 7)
    np.testing.assert_allclose(resampled_means(values, seed=3, times=40), whole, rtol=1e-12)


def test_intervals_cover_the_truth_nineteen_times_of_twenty() -> None:
    chance = np.random.default_rng(0)
    low, high = intervals(chance.normal(2.0, 3.0, size=(400, 60)))
    assert 0.91 < ((low < 2) & (high > 2)).mean() < 0.98
    exact = 2 * 1.96 * 3 / np.sqrt(60)
    assert np.mean(high - low) == pytest.approx(exact, rel=0.05)


def test_no_interval_from_one_image() -> None:
    low, high = intervals(np.array([[1.0, NAN], [1.0, 2.0], [NAN, NAN]]))
    assert np.isnan(low).tolist() == [True, False, True] and (low[1], high[1]) == (1, 2)
    assert intervals(np.zeros((2, 0))).shape == (2, 2)


# ---------------------------------------------------------------------------------------------------------- comparing


def test_comparisons_are_paired() -> None:
    """Images differ much, the methods on each hardly: only pairs can tell."""
    hard = np.random.default_rng(0).normal(size=40) * 10
    found = summary(hard, hard + 0.1 + 0.01 * np.sin(np.arange(40)))
    assert found.low[1, 0] < found.high[0, 0]  # the intervals overlap
    assert found.effect[1, 0] == 1 and found.gain[1, 0] == pytest.approx(0.1, abs=0.01)


def test_direction_turns_gains_ranks_and_verdicts() -> None:
    much, little = np.linspace(0.8, 0.9, 10), np.linspace(0.1, 0.2, 10)
    up, down = (summary(much, little, better=(side,)) for side in ("higher", "lower"))
    assert up.effect[1, 0] == -1 and down.effect[1, 0] == 1
    assert up.gain[1, 0] == -down.gain[1, 0] == pytest.approx(-0.7)
    assert up.rank[:, 0].tolist() == [1, 2] and down.rank[:, 0].tolist() == [2, 1]
    assert up.verdict(1) == "worse than random on k0" and down.verdict(1) == "better than random on k0"
    assert [up.methods[m] for m in down.order] == ["m1", "random"]


def test_equals_share_their_rank_and_nothing_has_none() -> None:
    found = summary([1.0, 1], [3, 3], [3, 3], [NAN, NAN], [0, 0])
    assert found.rank[:, 0].tolist()[:3] == [3, 1.5, 1.5]
    assert np.isnan(found.rank[3, 0]) and found.rank[4, 0] == 4
    assert found.order == [1, 2, 0, 4, 3]


def test_what_is_not_a_number_is_dropped_in_pairs() -> None:
    control = [NAN, 0, 0, 0, 0, 0, 0]
    found = summary(control, [9.0, NAN, 1, 1, 1, 1, 1])
    assert found.count[:, 0].tolist() == [6, 6] and found.pairs[1, 0] == 5
    assert found.gain[1, 0] == 1 and found.mean[1, 0] == pytest.approx(14 / 6)


def test_the_mean_rank_counts_what_judges() -> None:
    values = [[[0.0] * 6, [9.0] * 6], [[1.0] * 6, [0.0] * 6]]
    both = ("higher", "higher")
    assert summary(*values, better=both).mean_rank.tolist() == [1.5, 1.5]
    judged = summary(*values, better=both, judged=(True, False))
    assert judged.mean_rank.tolist() == [2, 1] and judged.verdict(1) == "better than random on k0"
    assert summary(*values, better=both, judged=(False, False)).judged == (True, True)  # nothing else to go by


def test_verdicts() -> None:
    low, high = np.arange(6.0), np.arange(6.0) + 5
    wild = np.array([-9.0, 9, -9, 9, -9, 9])
    three = ("higher",) * 3
    control = [low, low, low]
    assert summary(control, [high] * 3, better=three).verdict(1) == "better than random on all 3 metrics"
    mixed = summary(control, [high, low - 5, low + wild], better=three)
    assert mixed.verdict(1) == "better than random on 1 of 3 metrics; worse on k1; not distinguishable on k2"
    assert (
        summary(control, [low + wild] * 3, better=three).verdict(1) == "not distinguishable from random on this model"
    )
    assert summary(control, [[NAN] * 6] * 3, better=three).verdict(1) == "could not be measured"
    few = summary([low[:4]], [high[:4]])
    assert few.verdict(1) == "too few images to tell (4)" and few.effect[1, 0] == 0
    assert few.verdict(0).startswith("the control")
    five = ("higher",) * 5
    many = summary([low] * 5, [high, *[low + wild] * 4], better=five)
    assert many.verdict(1) == "better than random on 1 of 5 metrics; not distinguishable on 4 others"


def test_a_method_is_as_good_as_itself() -> None:
    values = np.random.default_rng(0).normal(size=30)
    assert summary(values, values).verdict(1) == "not distinguishable from random on this model"


def test_there_must_be_a_control() -> None:
    with pytest.raises(OptionError, match="random is not among the methods"):
        summarise(np.zeros((1, 1, 3)), ["gae"], ["k"], ["higher"])


def test_the_same_seed_gives_the_same() -> None:
    values = np.random.default_rng(0).normal(size=(3, 2, 25))
    names = ["random", "a", "b"], ["k", "l"], ["higher", "lower"]
    one, same, other = (summarise(values, *names, seed=seed) for seed in (0, 0, 1))  # type: ignore[arg-type]
    assert (one.low == same.low).all() and (one.gain_high == same.gain_high).all()
    assert (one.low != other.low).any() and (one.mean == other.mean).all()


@pytest.mark.parametrize(
    ("means", "said"),
    [((0.1, 0.4), "0.123"), ((10.0, 400.0), "0"), ((0.0001, 0.0003), "0.123456"), ((1e-9, 2e-9), "1.23e-01")],
)
def test_values_have_the_digits_that_tell_methods_apart(means: tuple[float, float], said: str) -> None:
    assert summary([means[0]] * 2, [means[1]] * 2).spell(0.123456, 0) == said


# -------------------------------------------------------------------------------------------------------------- curves


def test_moments_are_those_of_all_curves() -> None:
    curves = np.random.default_rng(0).normal(5, 2, size=(40, 3)).astype(np.float32)
    curves[3, 1] = NAN
    kept = Moments([0.0, 0.5, 1.0])
    for part in (curves[:7], curves[7:8], curves[8:]):
        kept.add(part)
    assert kept.count.tolist() == [40, 39, 40]
    np.testing.assert_allclose(kept.mean, np.nanmean(curves.astype(np.float64), 0), rtol=1e-12)
    column = curves[:, 0].astype(np.float64)
    exact = stats.t.interval(0.95, 39, column.mean(), stats.sem(column))
    np.testing.assert_allclose(kept.interval[:, 0], exact, rtol=1e-12)


def test_one_curve_has_no_interval() -> None:
    kept = Moments([0.0, 1.0])
    kept.add(np.ones((1, 2)))
    assert kept.mean.tolist() == [1, 1] and np.isnan(kept.interval).all()
