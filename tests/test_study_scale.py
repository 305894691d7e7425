"""Studies of millions of images: gathered part by part, the numbers are those of all rows at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from machine import PATIENCE
from PIL import Image
from scipy import stats
from test_comparison import FOUR, pictures
from test_study import album, small

from vitreous import Model, run_study
from vitreous._support import statistics
from vitreous._support.statistics import Moments, in_groups, intervals, resampled_means
from vitreous.evaluation.study import similarity_measures
from vitreous.evaluation.study.comparison import Agreement
from vitreous.evaluation.study.comparison_findings import findings_of
from vitreous.evaluation.study.leaderboard import boards_of
from vitreous.evaluation.study.local import Numbered
from vitreous.evaluation.study.plan import cut
from vitreous.images.dataset import Data, Sample, read_data
from vitreous.images.samples import Samples

__all__ = ["album", "small"]  # fixtures
BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "scale.py"


def plain_means(values: np.ndarray, seed: int, times: int) -> np.ndarray:
    """Every image resampled on its own, one resample at a time."""
    chance, count = np.random.default_rng(seed), values.shape[1]
    drawn = chance.multinomial(count, np.full(count, 1 / count), size=times)
    return np.stack([[np.average(v[k := np.isfinite(v)], weights=w[k]) for v in values] for w in drawn])


# ---------------------------------------------------------------------------------------------------------- bootstrap


def test_few_images_are_resampled_one_by_one() -> None:
    values = np.random.default_rng(1).normal(size=(3, 200))
    values[1, 5] = np.nan
    np.testing.assert_allclose(resampled_means(values, 4, 30), plain_means(values, 4, 30), rtol=1e-12)


def test_groups_of_many_images_have_the_same_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the images: here they are sorted, as class folders sort them."""
    values = np.sort(np.random.default_rng(2).exponential(size=(2, 2500)))
    values[1] = -values[0] + np.linspace(0, 1, 2500)
    values[1, ::7] = np.nan
    every = intervals(values)
    monkeypatch.setattr(statistics, "GROUPS", 700)
    grouped = intervals(values)
    np.testing.assert_allclose(grouped.mean(0), every.mean(0), atol=0.1 * np.ptp(every, axis=0).min())
    np.testing.assert_allclose(np.ptp(grouped, axis=0), np.ptp(every, axis=0), rtol=0.1)
    np.testing.assert_array_equal(intervals(values), grouped)  # repeatable


def test_groups_hold_every_image_once() -> None:
    values = np.random.default_rng(3).normal(size=(2, 1000))
    values[0, :10] = np.nan
    sums, counts = in_groups(values, 0, 64)
    assert sums.shape == (64, 2) and set(counts[:, 1]) <= {15, 16} and counts.sum(0).tolist() == [990, 1000]
    np.testing.assert_allclose(sums.sum(0), np.nansum(values, 1))


def test_pairs_stay_pairs_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant difference has an interval without width."""
    monkeypatch.setattr(statistics, "GROUPS", 32)
    first = np.random.default_rng(4).normal(size=500)
    means = resampled_means(np.stack([first, first + 2]))
    np.testing.assert_allclose(means[:, 1] - means[:, 0], 2)


def test_moments_of_parts_are_those_of_all() -> None:
    curves = np.random.default_rng(5).normal(3, 1, (50, 4))
    curves[7, 2] = np.nan
    parts, each = Moments(range(4)), Moments(range(4))
    for part in np.array_split(curves, 7):
        parts.add(part)
    for curve in curves:
        each.add(curve[None])
    for one, other in ((parts.mean, each.mean), (parts.interval, each.interval), (parts.mean, np.nanmean(curves, 0))):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    np.testing.assert_allclose(parts.error, stats.sem(curves, nan_policy="omit"), rtol=1e-12)


# -------------------------------------------------------------------------------------------------------- similarity


@pytest.mark.parametrize("ties", [False, True])
def test_rank_tests_of_parts_are_those_of_scipy(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity_measures, "AT_ONCE", 7)
    scores = np.random.default_rng(6).normal(size=(40, 5)) + np.linspace(0.3, 0, 5)
    scores = scores.round(0) if ties else scores
    w, p = similarity_measures.heads_test(scores)
    chi2, expected = stats.friedmanchisquare(*scores.T)
    assert p == pytest.approx(expected, rel=1e-9) and w == pytest.approx(chi2 / (40 * 4), rel=1e-9)
    page = stats.page_trend_test(scores[:, ::-1], method="asymptotic").pvalue
    assert similarity_measures.fall_test(scores) == pytest.approx(page, rel=1e-9)
    each = [stats.spearmanr(row, np.arange(5)).statistic for row in scores]
    np.testing.assert_allclose(similarity_measures.depth_correlations(scores), each, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- comparison


def test_images_compared_together_are_those_compared_one_by_one() -> None:
    images = np.stack(pictures(24))
    each, all_, parts = Agreement(FOUR), Agreement(FOUR), Agreement(FOUR)
    for image in images:
        each.add(image)
    all_.add_all(images)
    for part in (images[20:], images[:3], images[3:20]):
        parts.add_all(part)
    expected = findings_of(each).numbers
    for other in (all_, parts):
        assert flattened(findings_of(other).numbers) == pytest.approx(flattened(expected), rel=1e-9, abs=1e-12)
        np.testing.assert_array_equal(other.sample.tokens, each.sample.tokens)


def flattened(told: object) -> dict[str, float]:
    """Every number of something that JSON can hold, by its path."""
    found: dict[str, float] = {}

    def walk(value: object, path: str) -> None:
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in pairs:
            walk(inner, f"{path}/{key}")
        if isinstance(value, int | float):
            found[path] = float(value)

    walk(json.loads(json.dumps(told)), "")
    return found


# --------------------------------------------------------------------------------------------------------- the store


def test_what_shards_tell_is_what_all_rows_tell(small: Model, album: Path, tmp_path: Path) -> None:
    given = {"methods": "attention,gae", "target": ["label", "top-2"], "shard": 3, "batch": 3}
    study = run_study("maps", album, small, tmp_path, **given)  # type: ignore[arg-type]
    rows = study.to_pandas()
    plain = {
        name: (int(mine["error"].isna().sum()), int(mine["error"].notna().sum()))
        for name, mine in rows.groupby("method", sort=False)
    }
    assert study.counts() == plain
    assert study.failed() == dict(rows[rows["error"].notna()].groupby("image")["error"].first())
    maps = {(row["image"], row["asked"], row["method"]): row["map"].ravel() for row in study.iter_maps()}
    places = list(dict.fromkeys(zip(rows["image"], rows["asked"])))
    stacked = np.concatenate(list(study.stacks()))
    assert stacked.shape == (20, 2, 16)
    for place, stack in zip(places, stacked, strict=True):
        for method, scores in zip(("attention", "gae"), stack):
            np.testing.assert_array_equal(scores, maps.get((*place, method), np.full(16, np.nan)))
    only = list(study.iter_maps("gae", image="hound/7.png"))
    assert [row["asked"] for row in only] == ["label", "top-2"] and only[0]["image_hash"]


def test_a_board_filled_by_arrays_is_one_filled_row_by_row(small: Model, album: Path, tmp_path: Path) -> None:
    (tmp_path / "masks/cat").mkdir(parents=True)
    for i in (0, 1):
        Image.new("L", (90, 60), 255).save(tmp_path / f"masks/cat/{i}.png")
    given = {"methods": "gae", "metrics": "token_deletion,energy_in_mask,sparsity", "masks": tmp_path / "masks"}
    study = run_study("leaderboard", album, small, tmp_path / "out", **given, shard=4, batch=2)  # type: ignore[arg-type]
    ((_, board),) = boards_of(study.kind, study.of("small"))  # type: ignore[arg-type]
    rows = study.to_arrow().to_pylist()
    place = {name: i for i, name in enumerate(dict.fromkeys(row["image"] for row in rows))}
    curves: dict[tuple[str, str], list[list[float]]] = {}
    lacking: dict[str, set[str]] = {}
    for row in rows:
        m, n = board.methods.index(row["method"]), place[row["image"]]
        assert board.measured[m, n] == (row["error"] is None)
        for k, metric in enumerate(board.metrics):
            value = board.values[m, k, n]
            assert np.isnan(value) if row[metric] is None else value == row[metric]
            if row[f"{metric}_curve"] is not None:
                curves.setdefault((row["method"], metric), []).append(row[f"{metric}_curve"])
        for why in json.loads(row["missing"] or "{}").values():
            lacking.setdefault(why, set()).add(row["image"])
    assert set(board.curves) == set(curves) and lacking
    for key, each in curves.items():
        np.testing.assert_allclose(board.curves[key].mean, np.mean(each, 0), rtol=1e-6)
    known = {row["image"]: row for row in rows if row["error"] is None}
    assert board.accuracy == np.mean([row["label"] == row["prediction"] for row in known.values()])
    said = [text for text in board.failures() if not text.startswith("left out")]
    for why, images in lacking.items():
        assert any(f"{why} ({min(images)} and {len(images) - 1} more)" in text for text in said)
    assert board.skipped == {place["cat/3.png"]: next(row["error"] for row in rows if row["image"] == "cat/3.png")}


def test_failures_are_counted_where_they_are_many(small: Model, album: Path, tmp_path: Path) -> None:
    study = run_study("leaderboard", album, small, tmp_path, methods="gae", metrics="sparsity")
    ((_, board),) = boards_of(study.kind, study.of("small"))  # type: ignore[arg-type]
    board.skipped = {i: f"{i}: cannot be read" for i in range(1000)}
    assert len(board.failures()) == 51 and board.failures()[-1] == "left out: 950 images more"


# ----------------------------------------------------------------------------------------------------- many file names


def test_samples_in_columns_are_samples(album: Path) -> None:
    data = read_data(album)
    listed = list(data.samples)
    assert isinstance(data.samples, Samples) and len(data.samples) == 10
    assert listed[0] == Sample(album / "cat/0.png", "cat/0.png", "cat") == data.samples[-10]
    assert data.samples == tuple(listed) == data.samples[:] and data.samples[2:5] == listed[2:5]
    assert data.samples[::3][1].name == "cat/3.png" and data.samples != listed[1:]
    assert Samples.of(listed) == data.samples and hash(Samples.of(listed)) == hash(data.samples)
    assert Data("", tuple(listed)).fingerprint == data.fingerprint
    assert data.take(sample=4, seed=2).samples == [s for s in listed if s in data.take(sample=4, seed=2).samples]
    with pytest.raises(IndexError):
        data.samples[10]


def test_shards_find_their_images_by_number(album: Path) -> None:
    data = read_data(album)
    shards = cut(data, 0, 4, 0, ())
    found = Numbered([shards[0], shards[2]])
    assert list(found) == [0, 1, 2, 3, 8, 9] and len(found) == 6
    assert all(found[number] == data.samples[number] for number in found)
    for missing in (-1, 4, 7, 10):
        with pytest.raises(KeyError):
            found[missing]


@pytest.mark.slow
@pytest.mark.process
def test_memory_and_time_hardly_grow(tmp_path: Path) -> None:
    """Ten times the rows of a generated store: a report takes little more memory, and not ten times as long."""
    told = {}
    for rows in (20_000, 200_000):
        command = [sys.executable, str(BENCHMARK), str(tmp_path / str(rows)), "--rows", str(rows)]
        command += ["--kinds", "cass", "--steps", "report,resume"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE, check=True)
        lines = [line[line.index("{") :] for line in ran.stdout.splitlines() if "{" in line]
        told[rows] = [json.loads(line) for line in lines[1:]]
    for few, many in zip(told[20_000], told[200_000], strict=True):
        assert many["peak_mib"] < few["peak_mib"] + 300, (few, many)
        assert many["cpu"] < 5 * few["cpu"] + 5, (few, many)
