"""What is said about the similarity of heads and saliency: known answers, second computations, no collisions."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from machine import rare
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy import stats

import vitreous
from vitreous._support.words import share
from vitreous.errors import InputError
from vitreous.evaluation.study import similarity_measures
from vitreous.evaluation.study.similarity_findings import pick_groups, similarity_findings
from vitreous.evaluation.study.similarity_measures import (
    depth_correlations,
    fall_test,
    heads_test,
    holm,
    mean_intervals,
    measure,
    unusually_low,
)
from vitreous.plot.figure import png_bytes
from vitreous.plot.similarity import Group, class_figure, layer_figure

NAN = float("nan")


def scores(images: int = 40, layers: int = 6, heads: int = 4, *, noise: float = 0.03, seed: int = 0) -> np.ndarray:
    """Falling with depth, each head at its own height."""
    chance = np.random.default_rng(seed)
    fall, own = np.linspace(0.7, 0.3, layers)[:, None], 0.02 * np.arange(heads)
    return (fall + own + chance.normal(0, noise, (images, layers, heads))).astype(np.float32)


def nobody(values: np.ndarray) -> list[None]:
    return [None] * len(values)


def collisions(figure: Figure) -> list[tuple[str, str]]:
    """Texts that touch each other or a picture of the sheet, or leave it."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    seen = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    boxes = [(t.get_text(), ink(t, renderer)) for t in seen]
    boxes += [("picture", image.get_window_extent(renderer)) for image in figure.axes[0].images]
    page = figure.bbox
    out = [(n, "edge") for n, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > page.x1 or b.y1 > page.y1]
    return out + [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if touching(a, b)]


def ink(text: Text, renderer: Any) -> Any:
    """A text's box; of digits on their end, which have no descenders, only as wide as a digit is tall (0.73 em)."""
    box = text.get_window_extent(renderer)
    spare = box.width - 0.73 * text.get_fontsize() * renderer.dpi / 72
    return box.padded(-spare / 2, 0) if text.get_rotation() else box


def touching(a: Any, b: Any) -> bool:
    return bool(a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1)


# -------------------------------------------------------------------------------------------------------------- depth


def test_scores_that_fall_exactly() -> None:
    values = np.tile(np.linspace(0.9, 0.1, 9)[:, None], (20, 1, 3))
    found = measure(values)
    assert (found.rho, found.curve, found.falling) == pytest.approx((-1, -1, 1))
    assert found.rho_ends.tolist() == pytest.approx([-1, -1])
    assert found.clear == (8, 0)
    assert found.step_ends == pytest.approx(np.full((2, 8), -0.1))
    assert found.falls == "holds"
    assert found.trend < 1e-10


def test_scores_that_rise_exactly() -> None:
    found = measure(np.tile(np.linspace(0.1, 0.9, 9)[:, None], (20, 1, 3)))
    assert (found.rho, found.falling, found.clear, found.falls) == (pytest.approx(1), 0, (0, 8), "does not hold")
    assert found.trend > 1 - 1e-10


def test_depth_correlations_one_at_a_time() -> None:
    curves = np.random.default_rng(2).integers(0, 5, (30, 7)).astype(float)  # with equals
    for row, rho in zip(curves, depth_correlations(curves), strict=True):
        assert rho == pytest.approx(stats.spearmanr(np.arange(7), row).statistic)


def test_no_correlation_without_an_order() -> None:
    assert np.isnan(depth_correlations(np.ones((3, 5)))).all()
    assert np.isnan(depth_correlations(np.random.rand(3, 2))).all()


def test_page_by_its_formula() -> None:
    layers = np.random.default_rng(3).normal(size=(25, 6)) - 0.3 * np.arange(6)
    n, k = layers.shape
    ranks = np.array([stats.rankdata(row[::-1]) for row in layers])
    total = float((ranks.sum(0) * np.arange(1, k + 1)).sum())
    z = (total - n * k * (k + 1) ** 2 / 4) / np.sqrt(n * k**2 * (k + 1) * (k**2 - 1) / 144)
    assert fall_test(layers) == pytest.approx(stats.norm.sf(z))


def test_a_late_rise_among_many_falls_keeps_the_claim_and_many_rises_break_it() -> None:
    curve = np.linspace(0.9, 0.2, 12)
    late, wavy, twice, unrelated = curve.copy(), curve.copy(), np.tile(curve[::2], 2), np.tile([0.5, 0.6], 6)
    late[-1] = late[-2] + 0.02
    wavy[1::2] += 0.1
    twice[6:] -= 0.1
    verdicts = {"holds": [late], "holds partly": [wavy, twice], "does not hold": [unrelated]}
    for verdict, lines in verdicts.items():
        for line in lines:
            values = line[:, None] + np.random.default_rng(0).normal(0, 0.005, (30, 12, 2))
            assert measure(values).falls == verdict


def test_steps_are_paired() -> None:
    """Images differ far more than layers do, yet the same step in every image is clear."""
    level = np.random.default_rng(0).normal(0, 1, (30, 1, 1))
    found = measure(np.array([0.3, 0.2, 0.21])[:, None] + np.tile(level, (1, 3, 2)))
    assert found.clear == (1, 1)
    assert np.ptp(found.layer_ends, axis=0).min() > 0.3


# -------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("heads", [3, 5, 12])
def test_friedman_as_scipy_has_it(heads: int) -> None:
    chance = np.random.default_rng(heads)
    for values in (chance.normal(size=(30, heads)), chance.integers(0, 3, (30, heads)).astype(float)):
        w, p = heads_test(values)
        theirs = stats.friedmanchisquare(*values.T)
        assert p == pytest.approx(theirs.pvalue)
        assert w == pytest.approx(theirs.statistic / (30 * (heads - 1)))


def test_two_heads_as_scipy_has_it() -> None:
    values = np.random.default_rng(1).normal((0, 0.4), 1, (30, 2))
    assert heads_test(values)[1] == pytest.approx(stats.wilcoxon(values[:, 0], values[:, 1]).pvalue)


def test_w_is_one_where_all_images_agree_and_zero_where_none_do() -> None:
    agree = np.random.default_rng(0).normal(size=(10, 1)) + np.arange(4) * 0.1
    assert heads_test(agree)[0] == pytest.approx(1)
    turns = np.array([[0.0, 1, 2], [1, 2, 0], [2, 0, 1]] * 4)
    assert heads_test(turns) == (pytest.approx(0), pytest.approx(1))
    assert heads_test(np.ones((10, 4))) == (0, 1)
    assert heads_test(np.ones((10, 2))) == (0, 1)
    assert np.isnan(heads_test(np.ones((10, 1)))).all()


def test_holm_one_at_a_time() -> None:
    p = np.random.default_rng(0).random(9) ** 4
    smaller = [[q for q in p if q <= one] for one in p]
    plain = [min(1, max((len(p) - sum(r < q for r in p)) * q for q in some)) for some in smaller]
    assert holm(p) == pytest.approx(np.array(plain))
    with_gaps = holm(np.array([NAN, 0.02, NAN, 0.01]))
    assert np.isnan(with_gaps[[0, 2]]).all()
    assert with_gaps[[1, 3]].tolist() == pytest.approx([0.02, 0.02])
    assert np.isnan(holm(np.array([NAN]))).all()


def test_heads_that_differ_by_a_constant() -> None:
    """Head 1 lies 0.2 above the others in layer 2 alone; elsewhere all are equal."""
    values = np.tile(np.random.default_rng(0).random((30, 3, 1)), (1, 1, 4))
    values[:, 2, 1] += 0.2
    found = measure(values)
    assert found.gaps == pytest.approx(np.array([0, 0, 0.2]))
    assert found.gap_ends[:, 2] == pytest.approx(np.array([0.2, 0.2]))
    assert found.best[2] == 1
    assert found.w == pytest.approx(np.array([0, 0, 1]))
    assert found.p[:2].tolist() == [1, 1] and found.p[2] < 1e-6
    assert (found.differing, found.differ) == (1, "holds partly")
    assert found.lowest[2].tolist() == [1, 0, 1, 1]


def test_a_difference_that_is_sure_but_tiny_is_not_called_one() -> None:
    values = np.random.default_rng(0).normal(0, 1, (4000, 1, 3)) + np.array([0, 0.05, 0.1])
    found = measure(values)
    assert found.p[0] < 0.01
    assert found.w[0] < 0.1
    assert found.differ == "does not hold"
    told = " ".join(similarity_findings(values, nobody(values)).told)
    assert "p < 0.05 in 1 of 1 layer" in told and "negligible" in told and "does not hold here" in told


@pytest.mark.parametrize(("alike", "verdict"), [(0, "holds"), (1, "holds"), (2, "holds partly"), (5, "does not hold")])
def test_four_of_five_layers_make_the_claim(alike: int, verdict: str) -> None:
    values = scores(40, 5, 3, noise=0.01)
    values[:, :alike] = values[:, :alike, :1]
    assert measure(values).differ == verdict


def test_gap_interval_is_that_of_the_paired_difference() -> None:
    values = scores(30, 3, 4).astype(np.float64)
    found = measure(values, seed=7)
    for layer in range(3):
        apart = values[:, layer, found.best[layer]] - values[:, layer, found.worst[layer]]
        chance = np.random.default_rng(7)
        drawn = [apart @ chance.multinomial(30, np.full(30, 1 / 30)) / 30 for _ in range(2000)]
        assert found.gap_ends[:, layer] == pytest.approx(np.quantile(drawn, (0.025, 0.975)))


def test_the_head_that_is_unusually_low() -> None:
    mean = 0.5 + np.random.default_rng(0).normal(0, 0.01, (8, 12))
    mean[6, 4] = 0.2
    assert unusually_low(mean) == [(6, 4)]
    others = mean[0, 1:]
    border = others.mean() - stats.t.isf(0.05 / 12, 10) * others.std(ddof=1) * np.sqrt(1 + 1 / 11)
    for beyond, low in ((1e-5, []), (-1e-5, [(0, 0)])):
        assert unusually_low(np.array([[border + beyond, *others]])) == low
    assert unusually_low(np.full((2, 4), 0.5)) == []
    assert unusually_low(np.array([[0.5, 0.5, 0.5, 0.1]])) == [(0, 3)]
    assert unusually_low(np.array([[0.5, 0.1]])) == []
    values = np.tile(mean, (9, 1, 1)) + np.random.default_rng(0).normal(0, 0.01, (9, 1, 1))
    (said,) = [told for told in similarity_findings(values, nobody(values)).told if "Unusually" in told]
    assert "layer 6, head 4 (number 77 of 96), 0.2" in said and "lowest there in 100 % of the images" in said


# ---------------------------------------------------------------------------------------------------------- intervals


def test_many_images_have_the_bootstraps_own_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    series = np.random.default_rng(0).gamma(2, 1, (3, 4000))
    series[1, ::3] = NAN
    resampled = mean_intervals(series)
    monkeypatch.setattr(similarity_measures, "MANY", 100)
    limit = mean_intervals(series)
    assert np.abs(limit - resampled).max() < 0.06 * np.ptp(resampled, axis=0).min()
    row = series[1][np.isfinite(series[1])]
    half = 1.959964 * row.std(ddof=1) / np.sqrt(len(row))
    assert limit[:, 1] == pytest.approx([row.mean() - half, row.mean() + half])


def test_few_images_have_no_interval() -> None:
    series = np.array([[1.0, 2, 3, 4, NAN], [1, 2, 3, 4, 5]])
    assert np.isnan(mean_intervals(series)[:, 0]).all()
    assert np.isfinite(mean_intervals(series)[:, 1]).all()


@pytest.mark.parametrize(
    ("part", "said"), [(1.0, "100 %"), (0.9999, "99.9 %"), (0.5, "50 %"), (1e-9, "0.1 %"), (0.0, "0 %")]
)
def test_shares(part: float, said: str) -> None:
    assert share(part) == said


# ----------------------------------------------------------------------------------------------------------- findings


def test_findings_hold_what_was_measured() -> None:
    values = scores()
    found = similarity_findings(values, nobody(values))
    assert found.lead.startswith("Over 40 images, similarity falls almost monotonically with depth (rank correlation −")
    assert "in 6 of 6 layers, by up to 0.0" in found.lead
    (table,) = found.tables
    assert {len(row) for row in table.rows} == {len(table.head)}
    mean = values.astype(np.float64).mean(0)
    for layer, row in enumerate(table.rows):
        assert row[:2] == (f"layer {layer}", f"{mean[layer].mean():.3f}")
        assert row[3] == f"{mean[layer].argmax()} ({mean[layer].max():.3f})"
        assert row[5].startswith(f"{np.ptp(mean[layer]):.3f} [")
    stored = json.loads(json.dumps(found.numbers, allow_nan=False))
    assert np.array(stored["mean"]) == pytest.approx(mean)
    assert stored["falls_with_depth"] == stored["heads_differ"] == "holds"
    assert stored["depth"]["clear_falls"] == 5


def test_seeds_decide_and_order_of_calls_does_not() -> None:
    values = scores()
    one, again, other = (similarity_findings(values, nobody(values), seed).numbers for seed in (1, 1, 2))
    assert one == again != other


def test_images_without_a_score_are_left_out_and_counted() -> None:
    values = scores(20)
    spoilt = values.copy()
    spoilt[3], spoilt[7, 2, 1], spoilt[9, 0, 0] = NAN, NAN, np.inf
    kept = np.delete(values, [3, 7, 9], 0)
    found, plain = similarity_findings(spoilt, ["a"] * 20), similarity_findings(kept, ["a"] * 17)
    assert found.told == ["3 images left out, as a score of each is NaN.", *plain.told]
    assert found.numbers == {**plain.numbers, "left_out": 3}


SHAPES = [(1, 1, 1), (1, 4, 3), (2, 4, 3), (2, 2, 2), (4, 3, 2), (6, 1, 4), (6, 2, 1), (6, 3, 2), (5, 3, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("constant", [True, False])
def test_small_or_equal_scores(shape: tuple[int, int, int], constant: bool) -> None:
    images, layers, heads = shape
    values = np.full(shape, 0.3) if constant else scores(*shape)
    found = similarity_findings(values, nobody(values))
    told = " ".join([found.lead, *found.told])
    assert "nan" not in told and "nan" not in str(found.tables[0].rows)
    json.dumps(found.numbers, allow_nan=False)
    depth, differ = found.numbers["falls_with_depth"], found.numbers["heads_differ"]
    assert (depth == "cannot be told") == (images < 5 or layers < 3)
    assert (differ == "cannot be told") == (images < 5 or heads < 2)
    if images < 5:
        assert "[0" not in told and "[−" not in told
    if constant:
        assert depth != "holds" and differ != "holds"
    for chart in found.charts:
        assert not collisions(chart.draw())


def test_nothing_to_tell() -> None:
    lost = similarity_findings(np.full((4, 3, 2), NAN), [None] * 4)
    assert lost.lead == "Nothing can be told from no image: all 4 were left out, as their scores are NaN."
    assert lost.charts == () and lost.numbers == {"images": 0, "left_out": 4}
    assert "there is none" in similarity_findings(np.zeros((0, 3, 2)), []).lead
    with pytest.raises(InputError, match="3 groups for 4 images"):
        similarity_findings(np.zeros((4, 3, 2)), [None] * 3)


def test_fifty_thousand_images() -> None:
    values = (
        np.random.default_rng(0).random((50_000, 12, 12), np.float32)
        - np.linspace(0, 0.3, 12, dtype=np.float32)[:, None]
    )
    found = similarity_findings(values, [f"class {i % 1000}" for i in range(50_000)])
    assert found.numbers["falls_with_depth"] == "holds"
    assert found.numbers["heads_differ"] == "does not hold"
    assert found.numbers["depth"]["rho"] == pytest.approx(depth_correlations(values.mean(2, dtype=np.float64)).mean())


# ------------------------------------------------------------------------------------------------------------- charts


def test_classes_with_most_images_are_drawn() -> None:
    values = scores(12, 2, 2)
    groups = ["b", "a", "a", "b", None, "c", "d", "d", "d", None, None, None]
    assert [(g.name, g.images) for g in pick_groups(values, groups)] == [("d", 3), ("b", 2), ("a", 2)]
    first = pick_groups(values, groups)[0]
    assert first.mean == pytest.approx(values[6:9].astype(np.float64).mean(0))
    assert (first.samples == values[6:9]).all()
    alone = pick_groups(values, [str(i) for i in range(12)])
    assert [(g.name, g.images, len(g.samples)) for g in alone] == [("all images", 12, 12)]


def test_samples_go_evenly_through_a_class() -> None:
    values = np.arange(400.0).reshape(400, 1, 1)
    (group,) = pick_groups(values, ["a"] * 400)
    assert len(group.samples) == 50 and group.samples[0] == 0 and group.samples[-1] == 399
    (everyone,) = pick_groups(values, [None] * 400)
    assert len(everyone.samples) == 150
    assert group.samples.base is None or group.samples.base.size < values.size  # a chart does not hold all scores


NAMES = ["tench", "great white shark, white shark, man-eater, man-eating shark, Carcharodon", "$hen$ ü 鳥"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(30, 12, 12), (6, 1, 40), *rare(((6, 90, 2),), ((30, 24, 16),), ((30, 12, 3),), ((9, 48, 12),))]
)
def test_nothing_collides(shape: tuple[int, int, int]) -> None:
    values = scores(*shape)
    found = similarity_findings(values, [NAMES[i % 3] for i in range(len(values))])
    assert [chart.name for chart in found.charts] == ["similarity-by-class", "similarity-by-layer"]
    for chart in found.charts:
        figure = chart.draw()
        assert not collisions(figure)
        assert png_bytes(figure)[:4] == b"\x89PNG"


def test_the_chart_by_layer_shows_sorted_means_and_their_heads() -> None:
    mean = np.array([[0.5, 0.3, 0.4], [0.2, 0.25, 0.1]])
    figure = layer_figure(mean, np.stack([mean - 0.02, mean + 0.02]), 30)
    lines = [line.get_ydata() for line in figure.axes[1].lines if len(line.get_ydata()) == 3]
    assert np.array(lines).tolist() == np.sort(mean, 1).tolist()
    labels = [t.get_text() for t in figure.axes[0].texts]
    start = labels.index("layer 0")
    assert [label for label in labels[start:] if label.isdigit()] == ["1", "2", "0", "2", "0", "1"]
    assert "cosine of attention and saliency, mean of 30 images" in labels


def test_the_chart_by_class_shows_every_sample_and_the_mean() -> None:
    values = scores(5, 3, 2).astype(np.float64)
    figure = class_figure([Group("a", 5, values, values.mean(0))])
    drawn = [line.get_ydata() for line in figure.axes[1].lines if len(line.get_ydata()) == 6]
    assert np.array(drawn[:5]) == pytest.approx(values.reshape(5, 6))
    assert drawn[5] == pytest.approx(values.mean(0).ravel())
    assert figure.axes[1].lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InputError, match="no image"):
        class_figure([])


@pytest.mark.slow
@pytest.mark.shared
def test_the_real_model(deit: vitreous.Model, shared: Any) -> None:
    from PIL import Image

    files = sorted((shared / "data" / "pets" / "images").iterdir())[:6]
    pictures = []
    for file in files:
        with Image.open(file) as picture:
            pictures.append(picture.convert("RGB"))
    values = vitreous.cass(deit, pictures, samples=4).numpy()
    found = similarity_findings(values, nobody(values))
    assert found.numbers["falls_with_depth"] in ("holds", "holds partly")
    assert np.array(found.numbers["mean"]) == pytest.approx(values.mean(0), abs=1e-6)
    for chart in found.charts:
        assert not collisions(chart.draw())
