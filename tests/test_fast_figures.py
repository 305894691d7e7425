"""Figures drawn as pixels look as matplotlib draws the same sheet, take a fraction of its time, and carry a mark."""

from __future__ import annotations

import io
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from machine import rare
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from test_plot import TOP, attribution, matrix, signed

from vitreous._support import marks
from vitreous.plot import figure as module
from vitreous.plot.figure import attribution_figure, explanation_figure, png_bytes, rendered, save_figure
from vitreous.plot.gif import gif_bytes
from vitreous.plot.letters import BODY, SMALL, Style, line_of, width_of
from vitreous.plot.png import ROWS, png_file
from vitreous.plot.raster import SHARE, drawn
from vitreous.plot.sheet import DPI, Sheet, Words

SHEETS = {
    "one map": lambda: explanation_figure([[signed()]], top=TOP, rows=["bull mastiff 0.62"]),
    "methods and targets": lambda: explanation_figure(matrix(3, 2), top=TOP, rows=["boxer 0.1", "Ålesund 0.2"]),
    "cells": lambda: explanation_figure([[attribution()]], cells=True),
    "several images": lambda: attribution_figure(signed(count=3)),
    "a map alone": lambda: attribution_figure(attribution(views=None)),
}


def pixels(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"), np.float32)


def by_matplotlib(sheet: Sheet) -> np.ndarray:
    _ = sheet.figure  # a sheet that has a figure is drawn by it
    return pixels(png_bytes(sheet))


@pytest.mark.parametrize("name", ["one map", "a map alone", *rare("methods and targets", "cells", "several images")])
def test_the_same_look_as_by_matplotlib(name: str) -> None:
    sheet = SHEETS[name]()
    quick = pixels(png_bytes(sheet))
    slow = by_matplotlib(sheet)
    assert quick.shape == slow.shape
    assert np.abs(quick - slow).mean() < 2
    blurred = [shrunk(image) for image in (quick, slow)]  # text may stand half a pixel aside, at full contrast
    assert np.abs(blurred[0] - blurred[1]).max() < 60
    moved = np.roll(quick, 4, 1)  # the limits would see a figure that is off by four pixels
    assert np.abs(moved - slow).mean() > 2 or np.abs(shrunk(moved) - blurred[1]).max() > 60


def shrunk(image: np.ndarray) -> np.ndarray:
    high, wide = image.shape[0] // 4 * 4, image.shape[1] // 4 * 4
    return np.asarray(image[:high, :wide].reshape(high // 4, 4, wide // 4, 4, 3).mean((1, 3)))


@pytest.mark.parametrize("name", ["one map", *rare("methods and targets")])
def test_text_stands_within_a_pixel_of_its_place(name: str) -> None:
    """The middle of the ink of every line."""
    sheet = SHEETS[name]()
    quick = pixels(png_bytes(sheet))
    slow = by_matplotlib(sheet)
    lines = [piece for piece in sheet.pieces if isinstance(piece, Words)]
    assert len(lines) > 10
    for said in lines:
        wide = width_of(said.words, said.style, DPI)
        x, y = said.x * DPI - SHARE[said.align] * wide, said.y * DPI
        around = slice(round(y) - 17, round(y) + 18), slice(max(0, round(x) - 4), round(x + wide) + 6)
        (qx, qy), (sx, sy) = middle(quick[around]), middle(slow[around])
        assert abs(qx - sx) < 1.5 and abs(qy - sy) < 1, said.words


def middle(image: np.ndarray) -> tuple[float, float]:
    """Of the ink, on white or on a bar."""
    ink = 255 - image.mean(-1)
    ink = np.where(ink < 45, 0, ink)
    across, down = (np.average(np.arange(ink.shape[axis]), weights=ink.sum(1 - axis)) for axis in (1, 0))
    return float(across), float(down)


@pytest.mark.parametrize("words", ["boxer", "Ålesund", "−0.051", "…", "fi ffi AVA"])
def test_what_is_measured_is_what_is_drawn(words: str) -> None:
    for style in (BODY, SMALL, Style(10.0, bold=True)):
        ink = np.asarray(line_of(words, style, DPI).mask).any(0).nonzero()[0]
        assert ink[0] >= 3 and 0 <= ink[-1] - ink[0] < width_of(words, style, DPI) + 1
        assert abs(ink[-1] - 3 - width_of(words, style, DPI)) < 4.5


def test_other_resolutions_have_the_same_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = SHEETS["one map"]()
    small, large = drawn(sheet, 50), drawn(sheet, 200)
    assert abs(large.width - 4 * small.width) < 4
    reduced = large.resize(small.size, Image.Resampling.BOX)
    assert np.abs(np.asarray(reduced, np.float32) - np.asarray(small, np.float32)).mean() < 6
    monkeypatch.setattr(module, "DPI", 50)
    assert pixels(png_bytes(sheet)).shape[:2] == small.size[::-1]


def test_transparent_images_show_the_paper() -> None:
    sheet = Sheet(1, 1)
    sheet.box(0.0, 0.0, 1.0, 1.0, "#FF0000")
    sheet.image(np.zeros((4, 4, 4), np.uint8), 0.0, 0.0, 1.0, 1.0)
    sheet.image(np.full((4, 4), 255, np.uint8), 0.5, 0.0, 0.5, 1.0)
    image = drawn(sheet, 100)
    assert image.getpixel((20, 20)) == (255, 0, 0) and image.getpixel((70, 20)) == (255, 255, 255)


def test_a_figure_that_was_drawn_on_keeps_what_was_drawn() -> None:
    sheet = SHEETS["a map alone"]()
    before = drawn(sheet)
    sheet.axes.plot([0, sheet.width], [0, sheet.height], color="red")
    after = pixels(png_bytes(sheet))
    assert np.abs(after - np.asarray(before, np.float32)).max() > 200
    assert png_bytes(sheet.figure) == png_bytes(sheet)


def test_pixels_are_three_times_as_quick_as_matplotlib() -> None:
    """In turns, so that both meet the same machine; a quiet one shows five times."""
    quick, slow = [], []
    for _ in range(4):
        for times, figure in ((quick, False), (slow, True)):
            begun = time.perf_counter()
            sheet = SHEETS["one map"]()
            if figure:
                _ = sheet.figure
                with_matplotlib(sheet)
            else:
                png_bytes(sheet)
            times.append(time.perf_counter() - begun)
    assert min(slow) > 3 * min(quick), (quick, slow)


def with_matplotlib(sheet: Sheet) -> None:
    """As figures were saved before."""
    sheet.figure.savefig(io.BytesIO(), format="png", dpi=DPI, facecolor="white")


def test_many_threads_draw_the_same() -> None:
    sheets = [explanation_figure([[signed(seed=seed)]], top=TOP, rows=[f"row {seed}"]) for seed in range(3)]
    alone = [drawn(sheet, 50).tobytes() for sheet in sheets]
    width_of.cache_clear()
    line_of.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda sheet: drawn(sheet, 50).tobytes(), sheets * 4)) == alone * 4


# Marks


@pytest.mark.parametrize("told", [None, {"identity": "abc", "maps": {"gae": {"target": "Ålesund (β)"}}}])
@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "svg", "pdf"])
def test_every_figure_tells_what_made_it(tmp_path: Path, ending: str, told: dict[str, object] | None) -> None:
    for figure in (sheet := SHEETS["a map alone"](), sheet.figure):
        path = tmp_path / f"map.{ending}"
        save_figure(figure, path, told)
        assert marks.read_mark(path) == marks.marked(told)
        assert ending in ("svg", "pdf") or marks.is_ours(path)


def test_animations_tell_what_made_them(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "blue")]
    path = tmp_path / "film.gif"
    path.write_bytes(gif_bytes(frames, [50, 50], {"identity": "abc"}))
    assert marks.is_ours(path) and marks.read_mark(path) == marks.marked({"identity": "abc"})
    path.write_bytes(gif_bytes(frames, [50, 50]))
    assert marks.is_ours(path)


def test_pngs_are_not_larger_than_those_of_matplotlib() -> None:
    sheet = SHEETS["several images"]()
    quick = rendered(sheet, "png")
    buffer = io.BytesIO()
    sheet.figure.savefig(buffer, format="png", dpi=DPI, facecolor="white")
    assert len(quick) < 1.1 * len(buffer.getvalue())


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1), (70, 33), (9, 2 * ROWS), (9, 2 * ROWS + 1)])
def test_pngs_hold_the_very_pixels(size: tuple[int, int]) -> None:
    """Of noise, of flat colours and of what lies between, with their resolution."""
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    for values in (noise, noise // 128 * 255, np.cumsum(noise // 64, 0, np.uint8), np.full_like(noise, 255)):
        image = Image.fromarray(values)
        with Image.open(io.BytesIO(png_file(image, 200, PngInfo()))) as read:
            assert read.mode == "RGB" and np.array_equal(np.asarray(read), values)
            assert read.info["dpi"] == pytest.approx((200, 200), abs=0.01)
