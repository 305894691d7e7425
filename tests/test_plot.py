"""Colours mean what they say, overlays leave the photo alone where nothing is claimed, nothing in a figure collides."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machine import rare
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from vitreous.attribution import Attribution, Views
from vitreous.errors import InputError, OptionError
from vitreous.images.preprocess import Preprocess
from vitreous.plot import colour
from vitreous.plot.figure import (
    attribution_figure,
    changed_options,
    compact,
    explanation_figure,
    png_bytes,
    printable,
    save_figure,
)
from vitreous.plot.heads import ENDS, heads_figure
from vitreous.plot.overlay import LONG_SIDE, bare, base, overlay
from vitreous.plot.sheet import Sheet
from vitreous.version import VERSION

RANDOM = np.random.default_rng(0)
LABEL = "Staffordshire bullterrier, Staffordshire bull terrier"
TOP = [("bull mastiff", 0.62), (LABEL, 0.21), ("tabby, tabby cat", 0.1), ("Egyptian cat", 0.02), ("boxer", 0.001)]


def whole_picture(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((64, 64)), np.float32) / 255).permute(2, 0, 1)


def photo(width: int = 96, height: int = 96) -> Image.Image:
    pixels = RANDOM.integers(40, 216, (6, 6, 3)).astype(np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def attribution(method: str = "rollout", *, count: int = 1, seed: int = 0, **changes: Any) -> Attribution:
    maps = np.random.default_rng(seed).random((count, 14, 14), np.float32) * 0.01
    views = Views([photo() for _ in range(count)], Preprocess(whole_picture, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    made = Attribution(
        torch.from_numpy(maps), method, {}, (None,) * len(maps), "deit_tiny_patch16_224", False, views=views
    )
    return replace(made, **changes)


def signed(method: str = "cdam", **changes: Any) -> Attribution:
    made = attribution(method, **changes)
    return replace(made, signed=True, map=made.map - 0.005, targets=("top-1",) * len(made))


def luminance(rgb: np.ndarray) -> np.ndarray:
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return np.asarray(linear @ np.array([0.2126, 0.7152, 0.0722]))


def as_figure(drawn: Sheet | Figure) -> Figure:
    return drawn.figure if isinstance(drawn, Sheet) else drawn


def words(drawn: Sheet | Figure) -> list[str]:
    figure = as_figure(drawn)
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def collisions(drawn: Sheet | Figure) -> list[tuple[str, str]]:
    """Texts that touch each other or a map, or leave the sheet."""
    figure = as_figure(drawn)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    texts = [t for t in figure.findobj(Text) if t.get_text()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    boxes += [("picture", image.get_window_extent(renderer)) for image in figure.axes[0].images]
    sheet = figure.bbox
    inside = [b.x0 > 0 and b.y0 > 0 and b.x1 < sheet.x1 and b.y1 < sheet.y1 for _, b in boxes]
    outside = [(name, "edge") for (name, _), fits in zip(boxes, inside) if not fits]
    return outside + [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if touching(a, b)]


def touching(a: Any, b: Any) -> bool:
    return bool(a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1)


# Colours


def test_signed_colours_darken_from_the_middle_to_both_ends() -> None:
    colours = np.asarray(colour.SIGNED.colors)
    light = luminance(colours)
    middle = len(colours) // 2
    assert len(colours) % 2 == 1
    assert np.ptp(colours[middle]) < 0.01
    assert (np.diff(light[middle:]) < 0).all()
    assert (np.diff(light[: middle + 1]) > 0).all()
    assert light[middle] > 2 * light[-1] > 2 * light[0]  # in grey print, strong evidence and counter-evidence differ


def test_equal_steps_of_a_signed_map_look_equal() -> None:
    colours = np.asarray(colour.SIGNED.colors)
    steps = np.linalg.norm(np.diff(colours, axis=0), axis=1)
    assert steps.max() < 5 * steps.min()
    assert colours.min() >= 0
    assert colours.max() <= 1


def test_evidence_is_warm_and_counter_evidence_cool() -> None:
    assert colour.SIGNED(1.0)[0] > 0.8 > 0.2 > colour.SIGNED(1.0)[2]
    assert colour.SIGNED(0.0)[2] > 0.6 > 0.1 > colour.SIGNED(0.0)[0]


def test_unsigned_colours_brighten() -> None:
    assert (np.diff(luminance(colour.UNSIGNED(np.linspace(0, 1, 256))[:, :3])) > 0).all()
    assert (np.diff(luminance(colour.CONTROL(np.linspace(0, 1, 256))[:, :3])) > 0).all()


def test_signed_limits_are_symmetric_and_forget_the_largest_half_percent() -> None:
    values = np.linspace(-1, 3, 10_000).reshape(100, 100)
    low, high = colour.limits(values, True)
    assert -low == high == pytest.approx(np.percentile(np.abs(values), 99.5))


def test_unsigned_limits_start_at_zero_or_below() -> None:
    assert colour.limits(np.linspace(1, 2, 1001), False) == (0, pytest.approx(1.995))
    assert colour.limits(np.linspace(-1, 1, 1001), False) == (-1, pytest.approx(0.99))


DEGENERATE = {
    "zero": np.zeros((14, 14)),
    "constant": np.full((14, 14), 0.3),
    "below zero": np.full((14, 14), -0.3),
    "one patch": np.eye(1, 400, 7).reshape(20, 20),
    "one patch below zero": -np.eye(1, 400, 7).reshape(20, 20),
    "tiny": np.full((14, 14), 1e-44),
    "no number": np.full((14, 14), np.nan),
    "some numbers": np.where(np.eye(14) > 0, np.nan, 0.5),
    "infinite": np.where(np.eye(14) > 0, np.inf, 0.5),
    "one value": np.ones((1, 1)),
}


@pytest.mark.parametrize("has_sign", [True, False])
@pytest.mark.parametrize("name", DEGENERATE)
def test_any_map_has_limits_and_can_be_drawn(name: str, has_sign: bool) -> None:
    values = DEGENERATE[name].astype(np.float32)
    low, high = colour.limits(values, has_sign)
    assert low < high
    assert np.isfinite([low, high]).all()
    assert low == -high or not has_sign
    for cells in (True, False):
        assert overlay(values, photo(), has_sign, cells=cells).size == (LONG_SIDE, LONG_SIDE)
        assert bare(values, has_sign, cells=cells).size == (LONG_SIDE, LONG_SIDE)
    drawn = attribution(map=torch.from_numpy(values)[None], signed=has_sign)
    assert not collisions(attribution_figure(drawn))


def test_a_single_patch_reaches_the_end_of_the_scale() -> None:
    assert colour.limits(DEGENERATE["one patch"], False) == (0, 1)
    assert colour.limits(DEGENERATE["one patch below zero"], True) == (-1, 1)


@pytest.mark.slow
@pytest.mark.process
def test_line_colours_depend_on_the_name_alone() -> None:
    common = ["attention", "rollout", "gae", "cdam", "integrated_gradients", "attn_lrp", "token_ablation", "legrad"]
    assert len({colour.line_colour(name) for name in common}) == len(common)
    assert colour.line_colour("random") == colour.line_colour("centre") == colour.LINE_CONTROL
    assert colour.LINE_CONTROL not in colour.LINES
    assert colour.line_colour("a method of another package") in colour.LINES
    asked = "from vitreous.plot.colour import line_colour; import sys; sys.stdout.write(line_colour('rollout'))"
    elsewhere = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert elsewhere.stdout == colour.line_colour("rollout")


# Overlays


def halves(left: float, right: float) -> np.ndarray:
    return np.concatenate([np.full((14, 7), left), np.full((14, 7), right)], 1).astype(np.float32)


def test_zero_of_a_signed_map_leaves_the_photo() -> None:
    picture = photo(448, 448)
    under = base(picture)
    drawn = np.asarray(overlay(halves(0, 1), picture, True, cells=True), np.float32)
    assert np.abs(drawn[:, :224] - under[:, :224]).max() <= 0.5
    assert np.abs(drawn[:, 224:] - under[:, 224:]).mean() > 20


def test_evidence_warms_the_photo_and_counter_evidence_cools_it() -> None:
    picture = Image.new("RGB", (448, 448), (128, 128, 128))
    under = base(picture)[0, 0]
    for size in (0.2, 0.6, 1.0):
        drawn = np.asarray(overlay(halves(-size, size), picture, True, limits=(-1.0, 1.0)), np.float32)
        against, evidence = drawn[224, 60], drawn[224, 388]
        assert evidence[0] - evidence[2] > 8 > under[0] - under[2]
        assert against[2] - against[0] > 8 > under[2] - under[0]


def test_limits_of_a_signed_map_are_taken_around_zero() -> None:
    picture = photo(448, 448)
    drawn = overlay(halves(0, 1), picture, True, limits=(0.0, 2.0))
    assert drawn.tobytes() == overlay(halves(0, 1), picture, True, limits=(-2.0, 2.0)).tobytes()
    assert np.abs(np.asarray(drawn, np.float32)[:, :200] - base(picture)[:, :200]).max() <= 0.5


@pytest.mark.parametrize("control", [True, False])
def test_an_unsigned_map_covers_more_where_it_is_larger(control: bool) -> None:
    """How much of the photo is left, told by drawing the same map on black and on white."""
    ramp = np.linspace(0, 1, 28, dtype=np.float32)[None].repeat(28, 0)
    black, white = (
        np.asarray(overlay(ramp, Image.new("RGB", (448, 448), c), False, cells=True, control=control), np.float32)
        for c in ("black", "white")
    )
    left = (white - black)[8, 8::16].mean(-1)
    assert left[0] == pytest.approx(base(Image.new("RGB", (1, 1), "white")).mean(), abs=1)
    assert (np.diff(left) < 0).all()


def test_strength_is_the_most_that_is_covered() -> None:
    full = np.ones((2, 2), np.float32)
    seen = np.asarray(overlay(full, Image.new("RGB", (448, 448)), False, strength=0.5), np.float32)
    assert seen.max() == pytest.approx(0.5 * 255 * max(colour.UNSIGNED(1.0)[:3]), abs=1)


def test_the_photo_is_calmer_but_readable() -> None:
    picture = photo(448, 448)
    under, full = base(picture), np.asarray(picture, np.float32)
    assert np.ptp(under, -1).mean() < 0.5 * np.ptp(full, -1).mean()
    assert np.corrcoef(under.mean(-1).ravel(), full.mean(-1).ravel())[0, 1] > 0.9


def test_controls_are_grey() -> None:
    noise = RANDOM.random((14, 14))
    assert np.ptp(np.asarray(bare(noise, False, control=True)).astype(int), -1).max() <= 1
    assert np.ptp(np.asarray(bare(noise - 0.5, True, control=True)).astype(int), -1).max() <= 1
    assert np.ptp(np.asarray(bare(noise, False)).astype(int), -1).max() > 100
    assert colour.is_control("random")
    assert colour.is_control("centre")
    assert not colour.is_control("rollout")
    assert not colour.is_control("unheard_of")


def test_cells_are_flat_and_bilinear_is_not() -> None:
    values = RANDOM.random((4, 8)).astype(np.float32)
    flat = np.asarray(bare(values, False, cells=True))
    assert flat.shape == (224, 448, 3)
    assert len(np.unique(flat.reshape(-1, 3), axis=0)) <= 32
    assert (flat[:56, :56] == flat[0, 0]).all()
    assert len(np.unique(np.asarray(bare(values, False)).reshape(-1, 3), axis=0)) > 100


def test_small_photos_grow_and_large_ones_stay() -> None:
    values = RANDOM.random((14, 28))
    assert overlay(values, photo(100, 50), False).size == (448, 224)
    assert overlay(values, photo(600, 500), False).size == (600, 500)
    assert overlay(values, photo(100, 50).convert("L"), False).mode == "RGB"


def test_missing_numbers_show_the_photo() -> None:
    values = halves(np.nan, 1.0)
    picture = photo(448, 448)
    drawn = np.asarray(overlay(values, picture, False, cells=True), np.float32)
    assert np.abs(drawn[:, :224] - base(picture)[:, :224]).max() <= 0.5
    assert (np.asarray(bare(values, False, cells=True))[:, :224] == 255).all()


def test_a_pixel_map_keeps_its_place() -> None:
    values = np.zeros((64, 64), np.float32)
    values[10:20, 40:50] = 1
    drawn = np.asarray(bare(values, False).convert("L"), np.float32)
    y, x = np.unravel_index(drawn.argmax(), drawn.shape)
    assert 70 <= y < 140
    assert 280 <= x < 350


# Figures


def test_a_figure_tells_method_options_model_image_and_version() -> None:
    told = " | ".join(words(attribution_figure(attribution(options={"discard": 0.9, "residual": 0.5, "heads": "max"}))))
    for part in ("rollout", "discard=0.9", "heads=max", "deit_tiny_patch16_224", "image 0", f"vitreous {VERSION}"):
        assert part in told
    assert "residual" not in told
    assert "evidence" not in told


def test_a_signed_figure_says_which_side_is_which() -> None:
    figure = attribution_figure(signed(options={"variant": "smooth"}))
    assert {"evidence", "against", "target top-1 · variant=smooth"} <= set(words(figure))


def test_options_of_unknown_methods_are_all_told() -> None:
    assert changed_options(attribution("lost_method", options={"a": [1, 2], "b": 0.25})) == "a=1,2, b=0.25"
    assert changed_options(attribution("attention", options={"query": [3, 4], "layer": -1})) == "query=3,4"
    assert changed_options(attribution("attention", options={"query": "read-out"})) == ""


def test_numbers_are_compact() -> None:
    told = {0.0042: "0.0042", 1.34e-5: "1.3e-05", -12.3: "−12", 340.2: "340", 0.0: "0", -2.5e-7: "−2.5e-07", 1.0: "1"}
    assert {number: compact(number) for number in told} == told


def test_the_legend_admits_what_it_cuts_off() -> None:
    values = torch.full((1, 14, 14), 0.5)
    values[0, 0, 0] = 9.0
    assert any(word.startswith("≥ 0.7") for word in words(attribution_figure(attribution(map=values))))
    assert "0 everywhere" in words(attribution_figure(attribution(map=values * 0)))
    assert "no number in this map" in words(attribution_figure(attribution(map=values * torch.nan)))


def test_without_photos_the_map_stands_alone() -> None:
    with_photo, alone = (len(attribution_figure(a).axes.images) for a in (attribution(), attribution(views=None)))
    assert (with_photo, alone) == (3, 2)  # photo, map and legend; map and legend


@pytest.mark.parametrize("count", [2, 5, 16, 19])
def test_many_images_are_named_and_counted(count: int) -> None:
    figure = attribution_figure(signed(count=count))
    told = words(figure)
    assert sum(word.startswith("image ") for word in told) == min(count, 16)
    assert (f"… and {count - 16} more" in told) == (count > 16)
    assert any(f"{count} images" in word for word in told)
    assert not collisions(figure)


def test_each_image_has_its_own_target() -> None:
    told = words(attribution_figure(replace(signed(count=3), targets=("7", "8", "9"))))
    assert [word for word in told if "target" in word] == [f"image {i} · target {7 + i}" for i in range(3)]


def matrix(columns: int, rows: int) -> list[list[Attribution | None]]:
    names = ["attention", "transformer_attribution", "integrated_gradients", "random"]
    long = {"baseline": "blurred", "steps": 50, "something": "very long indeed"}
    made = [attribution, signed, signed, attribution]
    first = [made[c % 4](names[c % 4], seed=c, options=long if c % 2 else {}) for c in range(columns)]
    return [[a if r == 0 or a.signed else None for a in first] for r in range(rows)]


@pytest.mark.parametrize("rows", [1, 3, *rare(4)])
@pytest.mark.parametrize("columns", [1, 5, *rare(8, 12)])
def test_nothing_collides_in_an_explanation(columns: int, rows: int) -> None:
    heads = [f"{LABEL} {LABEL} 0.21", "bull mastiff 0.62", f"{LABEL.replace(' ', '_')} 0.02", "boxer 0.001"][:rows]
    figure = explanation_figure(matrix(columns, rows), photo=photo(), top=TOP, rows=heads)
    assert not collisions(figure)
    told = words(figure)
    assert told.count("attention") == -(-columns // 4)
    assert told.count("same for every target") == (rows - 1) * sum(c % 4 in (0, 3) for c in range(columns))
    lines = -(-columns // 5)
    assert sum("0.21" in word for word in told) == lines + 1  # each line's row head keeps its probability; one bar
    assert any("deit_tiny_patch16_224" in word and f"vitreous {VERSION}" in word for word in told)


@pytest.mark.parametrize("size", [(224, 448), (448, 224), (30, 400), (400, 30)])
def test_nothing_collides_for_pictures_of_any_shape(size: tuple[int, int]) -> None:
    views = Views([photo(*size)], Preprocess(whole_picture, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    wide = [[replace(a, views=views) if a else None for a in row] for row in matrix(3, 2)]
    heads = ["bull mastiff 0.62", f"{LABEL} 0.21"]
    assert not collisions(explanation_figure(wide, top=TOP, rows=heads))
    assert not collisions(explanation_figure(wide[:1], top=TOP, rows=heads))
    assert not collisions(attribution_figure(replace(signed(), views=views)))


def test_an_explanation_needs_neither_photo_nor_heads() -> None:
    loaded = attribution(views=None)
    assert len(explanation_figure([[loaded]]).axes.images) == 2
    assert len(explanation_figure([[loaded]], photo=photo()).axes.images) == 3
    assert not collisions(explanation_figure([[loaded, None]], top=TOP))
    with pytest.raises(InputError, match="no attribution"):
        explanation_figure([[None]])
    with pytest.raises(InputError, match="nothing to draw"):
        attribution_figure(attribution(map=torch.zeros(0, 14, 14), targets=()))


def test_a_shared_picture_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    look = Views.__getitem__
    monkeypatch.setattr(Views, "__getitem__", lambda views, i: looked.append(i) or look(views, i))
    one = attribution()
    explanation_figure([[one, signed(views=one.views), attribution("random", views=one.views)]])
    assert looked == [0]
    other = attribution(seed=1)
    explanation_figure([[one, other]])
    assert looked == [0, 0, 0]


def test_strange_words_are_drawn_without_a_warning() -> None:
    strange = attribution("$\\frac{a$ 𝖠", options={"name": "猫\n鳥"}, model="m_$_" * 60)
    figure = explanation_figure([[strange]], top=[("cost: $5 or $6", 1.2)], rows=["日本 0.1"])
    assert png_bytes(figure).startswith(b"\x89PNG")
    assert {"$\\frac{a$ □", "name=□ □", "cost: $5 or $6", "□□ 0.1"} <= set(words(figure))
    assert printable(" a\n b ") == "a b"
    assert not collisions(figure)


def test_a_png_has_200_dots_per_inch() -> None:
    figure = attribution_figure(attribution())
    with Image.open(io.BytesIO(png_bytes(figure))) as picture:
        assert picture.size == pytest.approx((figure.width * 200, figure.height * 200), abs=1)
        assert picture.info["dpi"] == pytest.approx((200, 200), abs=0.1)
        assert picture.convert("RGB").getpixel((1, 1)) == (255, 255, 255)


def test_controls_are_grey_in_figures() -> None:
    noise, map = attribution("random", views=None), attribution(views=None)
    strip = [np.asarray(explanation_figure([[a]]).axes.images[-1].get_array()).astype(int) for a in (noise, map)]
    assert np.ptp(strip[0], -1).max() <= 1 < np.ptp(strip[1], -1).max()


def test_figures_from_many_threads_are_the_same() -> None:
    one = signed(options={"a": 1})
    with ThreadPoolExecutor(4) as pool:
        drawn = set(pool.map(lambda _: png_bytes(attribution_figure(one)), range(6)))
    assert len(drawn) == 1


@pytest.mark.slow
@pytest.mark.process
def test_pyplot_is_never_touched() -> None:
    asked = "import sys, vitreous.plot.figure; sys.exit('matplotlib.pyplot' in sys.modules)"
    subprocess.run([sys.executable, "-c", asked], check=True)


# Heads


def all_heads(layers: int, heads: int, grid: tuple[int, int] = (14, 14), **changes: Any) -> tuple[Figure, np.ndarray]:
    """A figure of random heads, and their scores."""
    chance = np.random.default_rng(layers * heads)
    scores = chance.uniform(0.2, 0.9, (layers, heads))
    maps, saliency = chance.random((layers, heads, *grid), np.float32), chance.random(grid, np.float32)
    weighted = attribution("cass_attention", map=torch.from_numpy(chance.random((1, *grid), np.float32)), **changes)
    picture = photo(grid[1] * 8, grid[0] * 8)
    return heads_figure(maps, scores, saliency, weighted, picture, title=f"CASS: {LABEL} {LABEL} 21%"), scores


def places(figure: Figure, layers: int, heads: int) -> np.ndarray:
    """Left and upper edge of each head's map; the maps come last, layer by layer."""
    drawn = [image.get_extent() for image in figure.axes[0].images[-layers * heads :]]
    return np.array([(left, top) for left, _, _, top in drawn]).reshape(layers, heads, 2)


def frame(figure: Figure, fill: str) -> tuple[float, float]:
    """The middle of the largest box of this colour."""
    boxes = [b for b in figure.axes[0].patches if isinstance(b, Rectangle) and to_hex(b.get_facecolor()) == fill]
    return max(boxes, key=lambda box: box.get_width() * box.get_height()).get_center()


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 2), (12, 3), (12, 12), (24, 16)])
def test_every_head_has_its_place(layers: int, heads: int) -> None:
    figure, scores = all_heads(layers, heads, options={"samples": 4})
    assert len(figure.axes[0].images) == layers * heads + 5  # photo; saliency, weighted map and their legends
    assert not collisions(figure)
    found = places(figure, layers, heads)
    assert (np.diff(found[..., 0], axis=1) * 200 > 28).all()
    assert (np.diff(found[..., 1], axis=0) * 200 > 28).all()
    told = words(figure)
    assert {f"layer {layer}" for layer in range(layers)} <= set(told)
    assert {f"head {h}" for h in range(heads)} <= set(told) or {"head", *map(str, range(heads))} <= set(told)
    assert {f"{mean:.2f}" for mean in scores.mean(1)} <= set(told)
    assert any("samples=4" in word for word in told)
    assert any("deit_tiny_patch16_224" in word and f"vitreous {VERSION}" in word for word in told)


@pytest.mark.parametrize(("layers", "heads"), [(12, 3), (5, 8)])
def test_the_best_and_the_worst_head_are_framed(layers: int, heads: int) -> None:
    figure, scores = all_heads(layers, heads)
    found = places(figure, layers, heads)
    step = found[1, 0, 1] - found[0, 0, 1]
    for fill, best, said in zip(ENDS, (scores.argmax(), scores.argmin()), ("most", "least")):
        layer, head = np.unravel_index(best, scores.shape)
        x, y = np.subtract(frame(figure, fill), found[layer, head])
        assert 0 < x < step
        assert 0 < y < step
        assert any(word.startswith(f"{said} alike: layer {layer}, head {head} (0.") for word in words(figure))


@pytest.mark.parametrize("grid", [(14, 28), (28, 14), (3, 40), (40, 3)])
def test_heads_of_any_shape_do_not_collide(grid: tuple[int, int]) -> None:
    assert not collisions(all_heads(3, 4, grid)[0])
    assert not collisions(all_heads(12, 3, grid)[0])


def test_heads_without_a_number_are_not_marked() -> None:
    weighted, blank = attribution(), np.full((2, 2), np.nan)
    maps = np.full((2, 2, 14, 14), np.nan, np.float32)
    figure = heads_figure(maps, blank, maps[0, 0], weighted, photo(), title="nothing")
    assert not any("alike" in word for word in words(figure))
    assert not collisions(figure)
    with pytest.raises(InputError, match=r"give every head's map \[L H h w\]"):
        heads_figure(maps, blank[:1], maps[0, 0], weighted, photo(), title="wrong")


# Files


@pytest.mark.parametrize("ending", ["png", "svg", "pdf", "jpg", "webp", "PNG"])
def test_saving_makes_the_folder_and_one_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "new" / "deep" / f"map.{ending}"
    save_figure(attribution_figure(attribution()), path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.stat().st_size > 1000
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_figure_that_cannot_be_drawn_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    figure = attribution_figure(attribution())
    monkeypatch.setattr("vitreous.plot.figure.drawn", fail)
    with pytest.raises(KeyboardInterrupt):
        save_figure(figure, tmp_path / "new" / "map.png")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("disk full")

    path = tmp_path / "map.png"
    path.write_text("old")
    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="disk full"):
        save_figure(attribution_figure(attribution()), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["map.png"]


def test_an_unknown_ending_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"use \.png"):
        save_figure(attribution_figure(attribution()), tmp_path / "map.txt")
    assert not list(tmp_path.iterdir())


def test_an_attribution_saves_and_shows_itself(tmp_path: Path) -> None:
    one = signed()
    with Image.open(one.save(tmp_path / "map.png")) as saved, Image.open(io.BytesIO(one._repr_png_())) as shown:
        assert np.array_equal(np.asarray(saved), np.asarray(shown))
    assert one.overlay().size == (LONG_SIDE, LONG_SIDE)
