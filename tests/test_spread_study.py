"""What is said about the spread of attention: levels, entropy, depth, and figures in which nothing collides."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from machine import rare
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from scipy import stats

from vitreous.errors import InputError
from vitreous.evaluation.study.spread_findings import SpreadExample, file_name, spread_findings, spread_levels
from vitreous.plot.figure import png_bytes
from vitreous.plot.spread import TOGETHER, example_figure, histogram_figure, spread_figure

NAN = float("nan")


def data(images: int = 40, layers: int = 6, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Entropies, and those of layers that narrow with depth."""
    chance = np.random.default_rng(seed)
    entropy = 5 - chance.gamma(2, 0.1, images)
    layers_of = entropy[:, None] - np.linspace(0, 1, layers) + chance.normal(0, 0.2, (images, layers))
    return entropy.astype(np.float32), layers_of.astype(np.float32)


def photo(width: int = 60, height: int = 60) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def example(name: str, entropy: float, layers: int = 3, picture: Image.Image | None = None) -> SpreadExample:
    panels = np.random.default_rng(1).random((layers + 4, 7, 7), np.float32) * 0.01
    return SpreadExample(name, picture or photo(), panels, entropy)


def collisions(figure: Figure) -> list[tuple[str, str]]:
    """Texts that touch each other or a picture of the sheet, or leave it; pictures that touch."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    seen = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in seen]
    boxes += [("picture", image.get_window_extent(renderer)) for image in figure.axes[0].images]
    page = figure.bbox
    out = [(n, "edge") for n, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > page.x1 or b.y1 > page.y1]
    return out + [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if touching(a, b)]


def touching(a: Any, b: Any) -> bool:
    return bool(a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1)


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


# ------------------------------------------------------------------------------------------------------------- levels


def test_quarters() -> None:
    entropy = np.random.default_rng(0).permutation(np.arange(100.0))
    levels = spread_levels(entropy)
    assert (levels == 1 + entropy // 25).all()


def test_each_level_by_hand() -> None:
    assert spread_levels(np.array([4.0, NAN, 1, 3, 2, 5, np.inf])).tolist() == [3, 0, 1, 2, 1, 4, 0]  # quartiles 2 3 4


def test_equals_share_the_lower_level() -> None:
    assert spread_levels(np.array([1.0, 1, 1, 1, 1, 2])).tolist() == [1, 1, 1, 1, 1, 4]
    assert spread_levels(np.full(5, 3.3, np.float32)).tolist() == [1] * 5
    assert spread_levels(np.array([7.0])).tolist() == [1]
    assert spread_levels(np.full(3, NAN)).tolist() == [0, 0, 0]
    assert spread_levels(np.zeros(0)).tolist() == []


def test_order_does_not_matter() -> None:
    chance = np.random.default_rng(1)
    entropy = chance.integers(0, 9, 50).astype(np.float32)
    order = chance.permutation(50)
    assert (spread_levels(entropy[order]) == spread_levels(entropy)[order]).all()


# ----------------------------------------------------------------------------------------------------------- findings


def test_findings_hold_what_was_measured() -> None:
    entropy, layers = data()
    found = spread_findings(entropy, layers, 196, [])
    mean = float(entropy.astype(np.float64).mean())
    assert found.lead == (
        f"Over 40 images, the attention looks at about {np.exp(mean):.0f} of 196 patches "
        f"(entropy {mean:.2f} nats, {100 * mean / np.log(196):.0f} % of what is possible)."
    )
    stored = json.loads(json.dumps(found.numbers, allow_nan=False))
    assert stored["borders"] == pytest.approx(np.percentile(entropy, (25, 50, 75)).tolist())
    rho = np.mean([stats.spearmanr(np.arange(6), row).statistic for row in layers])
    assert stored["depth"]["rho"] == pytest.approx(rho)
    assert stored["depth"]["interval"][0] < rho < stored["depth"]["interval"][1]
    assert stored["share_of_even"] == pytest.approx(mean / np.log(196))
    assert any(told.startswith("Attention narrows with depth: each image's rank correlation") for told in found.told)
    assert [one["images"] for one in stored["levels"]] == [10, 10, 10, 10]


def test_the_table_tells_each_level() -> None:
    entropy, layers = data(17)
    (table,) = spread_findings(entropy, layers, 196, [example("a", float(entropy.min()))]).tables
    levels = spread_levels(entropy)
    assert len(table.rows) == 4
    for k, row in enumerate(table.rows, 1):
        values = entropy[levels == k].astype(np.float64)
        spans = f"{values.min():.3f} – {values.max():.3f}"
        told = (f"level {k}", str(values.size), spans, f"{values.mean():.3f}", f"{np.exp(values.mean()):.0f}")
        assert row[:5] == told
        assert row[5] == ("a" if k == 1 else "–")


def test_even_attention_looks_at_every_patch() -> None:
    even = np.full(8, np.log(49))
    found = spread_findings(even, np.tile(even[:, None], (1, 4)), 49, [])
    assert "about 49 of 49 patches (entropy 3.89 nats, 100 % of what is possible)" in found.lead
    assert any("as all layers are alike" in told for told in found.told)


@pytest.mark.parametrize(
    ("slope", "said"), [(-0.5, "Attention narrows"), (0.5, "Attention widens"), (0, "does not follow depth")]
)
def test_the_way_with_depth(slope: float, said: str) -> None:
    layers = 3 + slope * np.arange(8) + np.random.default_rng(0).normal(0, 0.1, (30, 8))
    told = spread_findings(layers.mean(1), layers, 196, []).told
    assert any(said in one for one in told)
    if slope:
        assert any(f"{'below' if slope < 0 else 'above'} zero in 100 % of the images" in one for one in told)


def test_images_without_a_number_are_left_out_and_counted() -> None:
    entropy, layers = data(20)
    entropy[4], layers[6, 2] = NAN, NAN
    kept = [i for i in range(20) if i not in (4, 6)]
    found, plain = spread_findings(entropy, layers, 196, []), spread_findings(entropy[kept], layers[kept], 196, [])
    assert found.told == ["2 images left out, as their entropy is NaN.", *plain.told]
    assert found.numbers == {**plain.numbers, "left_out": 2}


def test_nothing_to_tell() -> None:
    lost = spread_findings(np.full(3, NAN), np.ones((3, 2)), 196, [example("a", NAN)])
    assert lost.lead == "Nothing can be told from no image: all 3 were left out, as their entropy is NaN."
    assert not lost.charts
    assert "there is none" in spread_findings(np.zeros(0), np.zeros((0, 2)), 196, []).lead


@pytest.mark.parametrize(("images", "layers"), [(1, 1), (1, 4), (2, 2), (3, 1), (4, 3), (6, 2), (7, 48)])
def test_few_images_or_layers(images: int, layers: int) -> None:
    entropy, by_layer = data(images, layers)
    found = spread_findings(entropy, by_layer, 1 if images == 1 else 196, [])
    told = " ".join([found.lead, *found.told])
    assert "nan" not in told and "inf" not in told
    assert ("cannot be told" in told) == (images < 5 or layers < 3)
    json.dumps(found.numbers, allow_nan=False)
    for chart in found.charts:
        assert not collisions(chart.draw())


def test_fifty_thousand_images() -> None:
    entropy, layers = data(50_000, 24)
    found = spread_findings(entropy, layers, 196, [])
    assert [one["images"] for one in found.numbers["levels"]] == pytest.approx([12_500] * 4, abs=2)
    assert not collisions(found.charts[0].draw())
    assert not collisions(found.charts[1].draw())


# ----------------------------------------------------------------------------------------------------------- examples


def test_the_three_examples_nearest_to_the_median_of_their_level() -> None:
    entropy = np.arange(100.0) / 20
    layers = np.tile(entropy[:, None], (1, 3))
    some = [example(f"{i}.jpg", i / 20) for i in (0, 11, 12, 13, 24, 25, 99)] + [example("lost", NAN)]
    found = spread_findings(entropy, layers, 196, some)
    names = [chart.name for chart in found.charts]
    start = ["spread-histogram", "spread-by-layer"]
    assert names == [*start, *(f"spread-level-1-{i}" for i in (12, 11, 13)), "spread-level-2-25", "spread-level-4-99"]
    assert [row[5] for row in found.tables[0].rows] == ["12.jpg, 11.jpg, 13.jpg", "25.jpg", "–", "99.jpg"]
    assert found.charts[2].title == "Level 1: 12.jpg"


def test_file_names_are_safe_and_different() -> None:
    used: set[str] = set()
    given = [
        "n01440764/ILSVRC_1.JPEG",
        "n01440764 ILSVRC.1.png",
        "../../etc",
        "鳥.jpg",
        "",
        "N01440764-ilsvrc_1.jpg",
        "x" * 300,
    ]
    found = [file_name("s-", name, used) for name in given]
    assert found == [
        "s-n01440764-ILSVRC_1",
        "s-n01440764-ILSVRC-1",
        "s-etc",
        "s-image",
        "s-image-2",
        "s-N01440764-ilsvrc_1-2",
        "s-" + "x" * 80,
    ]


# ------------------------------------------------------------------------------------------------------------- charts


@pytest.mark.parametrize("layers", [1, 7, 24, *rare(2, 5, 12, 13, 25, 32, 48)])
def test_maps_of_any_number_of_layers(layers: int) -> None:
    one = example("a", 4.0, layers)
    figure = example_figure(one.photo, one.panels, "Level 1: a", "told")
    assert not collisions(figure)
    said = words(figure)
    assert [w for w in said if w.startswith("layer ")] == [f"layer {i}" for i in range(layers)]
    assert [w for w in said if w in TOGETHER] == list(TOGETHER)
    assert len(figure.axes[0].images) == 1 + 2 * (layers + 4)  # the photo, each map and its legend


@pytest.mark.parametrize("size", [(400, 20), (20, 400), *rare(((90, 30),), ((30, 90),), ((3, 3),))])
def test_photos_of_any_shape(size: tuple[int, int]) -> None:
    one = example("a long name " * 30, 4.0, 12, photo(*size))
    figure = example_figure(one.photo, one.panels, f"Level 1: {one.name}", "told")
    assert not collisions(figure)
    assert [w for w in words(figure) if w in TOGETHER] == list(TOGETHER)
    assert png_bytes(figure)[:4] == b"\x89PNG"


def test_maps_without_numbers_are_drawn() -> None:
    panels = np.zeros((6, 4, 4))
    panels[1] = NAN
    said = words(example_figure(photo(), panels, "t", "told"))
    assert said.count("0 everywhere") == 5
    assert said.count("no number in this map") == 1
    with pytest.raises(InputError, match=r"\[L\+4 h w\]"):
        example_figure(photo(), np.zeros((4, 3, 3)), "t", "told")


def test_the_histogram_counts_every_image_and_names_every_level() -> None:
    entropy = data(500)[0].astype(np.float64)
    figure = histogram_figure(entropy, np.quantile(entropy, (0.25, 0.5, 0.75)), 196)
    (steps,) = figure.axes[1].patches[-1:]
    assert steps.get_data().values.sum() == 500
    assert [w for w in words(figure) if w.startswith("level")] == ["level 1", "level 2", "level 3", "level 4"]
    assert not collisions(figure)


@pytest.mark.parametrize("entropy", [[2.0] * 6, [1.0] * 9 + [2.0], [1.0, 2.0], [0.0, 5.0, 5.001, 5.002, 5.003, 5.004]])
def test_histograms_of_equals_and_of_narrow_levels(entropy: list[float]) -> None:
    values = np.array(entropy)
    figure = histogram_figure(values, np.quantile(values, (0.25, 0.5, 0.75)), 196)
    assert not collisions(figure)
    named = {int(w[-1]) for w in words(figure) if w.startswith("level")}
    assert named == set(spread_levels(values).tolist())


def test_a_line_for_each_level() -> None:
    means = {k: (np.linspace(5, 4, 6) - 0.1 * k, np.stack([np.full(6, 4.0), np.full(6, 5.0)])) for k in (1, 2, 4)}
    figure = spread_figure(means, 196)
    drawn = [line.get_ydata() for line in figure.axes[1].lines if len(line.get_ydata()) == 6]
    assert np.array(drawn) == pytest.approx(np.array([mean for mean, _ in means.values()]))
    assert [w for w in words(figure) if w.startswith("level")] == ["level 1", "level 2", "level 4"]
    assert not collisions(figure)
    with pytest.raises(InputError, match="no level"):
        spread_figure({}, 196)
