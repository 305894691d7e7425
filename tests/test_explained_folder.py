"""A folder of explanations is a result: written while computing, with an index and summaries that later runs add to."""

from __future__ import annotations

import csv
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Run
from machine import until
from PIL import Image
from test_plot import attribution, signed

import vitreous
from vitreous import Model
from vitreous._support import marks
from vitreous.cli import arguments, explained
from vitreous.cli.explained import Explanation, Form, Writer, agreement
from vitreous.cli.results import Summary
from vitreous.evaluation.report import folder as module
from vitreous.evaluation.report.folder import CSV, FIELDS, INDEX, PARQUET, THUMBNAIL, failed_row, rows_of, write_folder
from vitreous.images import pictures
from vitreous.images.preprocess import IMAGENET, Preprocess
from vitreous.models.libraries import cropped
from vitreous.plot import figure, panel

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FOLDER = {INDEX, CSV, PARQUET}


@pytest.fixture(scope="module")
def small() -> Model:
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")


@pytest.fixture
def here(small: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder `in` with three images, and a tiny model in place of the embedded one."""
    monkeypatch.setattr(arguments, "load_model", lambda *_: small)
    for number, name in enumerate(("ant", "bee", "cow")):
        photo(tmp_path / "in" / f"{name}.png", number)
    return tmp_path


def photo(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 255, (4, 6, 3), np.uint8)
    Image.fromarray(noise).resize((90, 60)).save(path)
    return path


def rows(folder: Path, name: str = CSV) -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def stored(folder: Path, name: str = PARQUET) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return list(parquet.read_table(folder / name).to_pylist())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------- the files of one run


def test_one_row_for_each_image_method_and_target(run: Run, here: Path, small: Model) -> None:
    shown = run("explain", "in", "-x", "gae,rollout,random", "-t", "cat,3", "-o", "out")
    assert shown.code == 0, shown.err
    assert f"all 3 results of this folder: {Path('out') / INDEX}" in shown.out
    found = rows(here / "out")
    assert list(found[0]) == list(FIELDS)
    assert len(found) == 3 * (2 + 1 + 1)  # gae for each target; the others do not depend on it
    one = next(row for row in found if row["key"] == "gae@3" and row["figure"] == "bee.png")
    assert one["image"] == str(here / "in" / "bee.png") and len(one["image_sha256"]) == 64
    assert (one["maps"], one["method"], one["target"], one["target_label"]) == ("bee.npz", "gae", "3", "b")
    assert json.loads(one["options"])["start_layer"] == 0 and one["model"] == "small" and one["weights"]
    with np.load(here / "out" / one["maps"]) as maps:
        assert float(one["min"]) == maps[one["key"]].min() and float(one["max"]) == maps[one["key"]].max()
    output = torch.softmax(vitreous.Trace(small, Image.open(here / "in" / "bee.png").convert("RGB")).output, 1)[0]
    assert float(one["predicted_probability"]) == pytest.approx(float(output.max()), rel=1e-3)
    assert one["predicted"] == small.label(int(output.argmax()))
    assert float(one["target_probability"]) == pytest.approx(float(output[3]), rel=1e-3)
    held = stored(here / "out")
    assert [row["key"] for row in held] == [row["key"] for row in found]
    assert sum(row[THUMBNAIL] is not None for row in held) == 3
    assert {row["agreement"] for row in found if row["method"] == "random"} == {""}


def test_images_that_fail_have_a_row_with_the_reason(run: Run, here: Path) -> None:
    (here / "in" / "no.jpg").write_text("nothing")
    assert run("explain", "in", "-x", "centre", "-o", "out").code == 0
    (failed,) = [row for row in rows(here / "out") if row["error"]]
    assert failed["image"] == str(here / "in" / "no.jpg") and "no.jpg" in failed["error"]
    assert "What failed (1)" in (here / "out" / INDEX).read_text("utf-8")
    photo(here / "in" / "no.jpg", 9)
    assert run("explain", "in/no.jpg", "-x", "centre", "-o", "out").code == 0
    assert not [row for row in rows(here / "out") if row["error"]]


@pytest.mark.parametrize(
    ("form", "kinds"),
    [("png", {"png"}), ("npz", {"npz"}), ("png,npz", {"png", "npz"}), ("svg, pdf", {"svg", "pdf"}), ("none", set())],
)
def test_formats(run: Run, here: Path, form: str, kinds: set[str]) -> None:
    shown = run("explain", "in/ant.png", "-x", "centre", "-o", "out", "--format", form, "--json")
    assert shown.code == 0, shown.err
    summary = {CSV, PARQUET} if form == "none" else FOLDER
    assert names(here / "out") == {f"ant.{kind}" for kind in kinds} | summary
    (entry,) = json.loads(shown.out)["images"]
    assert ("figure" in entry) == bool(kinds - {"npz"}) and ("maps" in entry) == ("npz" in kinds)
    (row,) = rows(here / "out")
    assert row["method"] == "centre" and bool(row["figure"]) == bool(kinds - {"npz"})
    for kind in kinds:
        mark = marks.read_mark(here / "out" / f"ant.{kind}")
        assert mark is not None and mark["maps"]["centre"]["method"] == "centre"


@pytest.mark.parametrize("ending", ["png", "svg", "jpg"])
def test_out_may_be_one_figure(run: Run, here: Path, ending: str) -> None:
    assert run("explain", "in/ant.png", "-x", "centre", "-o", f"new/one.{ending}").code == 0
    assert names(here / "new") == {f"one.{ending}"}
    assert run("explain", "in/ant.png", "-x", "centre", "-o", f"new/two.{ending}", "--format", "png,npz").code == 0
    assert names(here / "new") == {f"one.{ending}", f"two.{ending}", "two.npz"}
    assert "one file, but there are 3 images" in run("explain", "in", "-x", "centre", "-o", "new/x.png").error


# --------------------------------------------------------------------------------------------- several runs, one folder


def test_a_second_run_adds_to_the_folder(run: Run, here: Path) -> None:
    assert run("explain", "in/ant.png", "-x", "centre", "-o", "out").code == 0
    shown = run("explain", "in/bee.png", "in/cow.png", "-x", "random", "-o", "out", "--json")
    assert shown.code == 0
    assert json.loads(shown.out)["index"] == str(Path("out") / INDEX)
    assert [(row["figure"], row["method"]) for row in rows(here / "out")] == [
        *(("ant.png", "centre"), ("bee.png", "random"), ("cow.png", "random"))
    ]
    (here / "out" / "bee.png").unlink()
    (here / "out" / "bee.npz").unlink()
    assert run("explain", "in/ant.png", "-x", "centre", "-o", "out").code == 0
    assert [row["figure"] for row in rows(here / "out")] == ["ant.png", "cow.png"]


@pytest.mark.parametrize("lost", ["the summary", "the summary and the maps"])
def test_a_lost_summary_is_made_again_from_the_files(run: Run, here: Path, lost: str) -> None:
    assert run("explain", "in", "-x", "gae,rollout", "-o", "out").code == 0
    before = [row for row in rows(here / "out") if row["figure"] != "cow.png"]
    for name in FOLDER:
        (here / "out" / name).unlink()
    if "maps" in lost:
        for file in (here / "out").glob("*.npz"):
            file.unlink()
        before = [{**row, "maps": ""} for row in before]
    assert run("explain", "in/cow.png", "-x", "gae,rollout", "-o", "out").code == 0
    assert [row for row in rows(here / "out") if row["figure"] != "cow.png"] == before


def test_files_of_others_are_neither_listed_nor_replaced(run: Run, here: Path) -> None:
    (here / "out").mkdir()
    (here / "out" / INDEX).write_text("<p>mine</p>")
    photo(here / "out" / "mine.png", 4)
    np.savez(here / "out" / "mine.npz", provenance="{}")
    (here / "out" / ".hidden.png").write_bytes(b"")
    for _ in range(2):
        assert run("explain", "in/ant.png", "-x", "centre", "-o", "out").code == 0
        assert (here / "out" / INDEX).read_text() == "<p>mine</p>"
        assert [row["figure"] for row in rows(here / "out", f"vitreous-{CSV}")] == ["ant.png"]


@pytest.mark.parametrize("name", [INDEX, CSV, PARQUET])
def test_a_file_that_is_not_ours_is_seen(tmp_path: Path, name: str) -> None:
    assert module.may_replace(tmp_path / name)
    write_folder(tmp_path, [failed_row("a.png", "unreadable")])
    assert module.may_replace(tmp_path / name)
    (tmp_path / name).write_text("image,label\na.png,3\n")
    assert not module.may_replace(tmp_path / name)


def test_results_below_folders_and_of_the_first_release_are_listed(tmp_path: Path) -> None:
    one = attribution("rollout")
    told = {"method": "rollout", "options": {}, "target": None, "targets": [None], "model": "old", "signed": False}
    told |= {"images": ["cat.jpg"], "notes": {}, "vitreous": "0.1.0"}
    (tmp_path / "a").mkdir()
    np.savez(tmp_path / "a" / "cat.npz", rollout=one.map[0].numpy(), provenance=json.dumps({"rollout": told}))
    write_folder(tmp_path, [])
    (row,) = rows(tmp_path)
    assert (row["image"], row["maps"], row["model"], row["vitreous"]) == ("cat.jpg", "a/cat.npz", "old", "0.1.0")


# ----------------------------------------------------------------------------------------------------------- agreement


def test_agreement_is_the_mean_rank_correlation_of_the_same_target() -> None:
    base = torch.arange(16.0).reshape(1, 4, 4)
    a, b = (attribution(name, map=base, targets=("3",)) for name in ("gae", "cdam"))
    opposite, other = replace(b, map=-(base**3), method="gradcam"), replace(b, targets=("5",))
    free, control = attribution("rollout", map=base.exp()), attribution("random", map=-base)
    maps = {"a": a, "b": b, "c": opposite, "free": free, "random": control}
    told = agreement(maps)
    assert told["a"] == told["c"] == told["free"] == pytest.approx((3 * 1 + 3 * -1) / 6)
    assert told["random"] is None
    assert agreement({"a": a, "other": other}) == {"a": None, "other": None}
    assert agreement({"a": a, "other": other, "free": free}) == pytest.approx({"a": 1, "other": 1, "free": 1})
    assert agreement({"a": a}) == {"a": None} and agreement({"r": control}) == {"r": None}


def test_maps_of_different_sizes_and_without_numbers_are_compared() -> None:
    coarse = torch.arange(16.0).reshape(1, 4, 4)
    fine = coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)
    told = agreement({"a": attribution("gae", map=coarse), "b": attribution("cdam", map=fine)})
    assert told == pytest.approx({"a": 1, "b": 1})
    assert (
        agreement({"a": attribution("gae", map=coarse), "b": attribution("cdam", map=coarse * torch.nan)})["a"] is None
    )


# ---------------------------------------------------------------------------------------------- writing while computing


def explanation(number: int) -> Explanation:
    return Explanation(Path(f"{number}.png"), [[signed(seed=number)]], ["cat 0.5"], [])


@pytest.fixture
def slow_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Writer, threading.Event]]:
    """A writer whose files wait for an event."""
    go = threading.Event()
    real = explained.save_figure

    def save(*args: Any) -> None:
        go.wait(60)
        real(*args)

    monkeypatch.setattr(explained, "save_figure", save)
    monkeypatch.setattr(explained, "WAITING", 3)
    with Writer(Summary("small", tmp_path / "out", set()), Form(("png",)), threads=2) as writer:
        yield writer, go
        go.set()


def test_writing_does_not_hold_up_computing_but_memory_is_bounded(slow_writer: tuple[Writer, threading.Event]) -> None:
    writer, go = slow_writer
    with ThreadPoolExecutor(1) as other:
        for number in range(3):
            writer.add(explanation(number), str(number))  # returns though nothing is written yet
        more = other.submit(writer.add, explanation(3), "3")
        time.sleep(0.1)
        assert not more.done(), "a fourth waits for room"
        go.set()
        more.result(60)
    writer.finish()
    assert [entry["image"] for entry in writer.summary.done] == [f"{i}.png" for i in range(4)]
    assert names(writer.summary.out) == {*(f"{i}.png" for i in range(4)), *FOLDER}


@pytest.mark.parametrize(
    ("device", "threads", "kind", "waits"),
    [("cpu", 2, "png", True), ("cpu", 1, "png", False), ("cpu", 2, "npz", False), ("cuda", 2, "png", False)],
)
def test_threads_that_compute_together_wait_for_figures(
    slow_writer: tuple[Writer, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    threads: int,
    kind: str,
    waits: bool,
) -> None:
    """Each of them would wait for the one whose core is used to draw; a single one need not, nor does a GPU."""
    writer, go = slow_writer
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    writer.add(explanation(0), "0")
    writer.form = Form((kind,))
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(writer.make_way, torch.device(device))
        if waits:
            time.sleep(0.1)
            assert not waiting.done()
            go.set()
        waiting.result(60)
    assert writer.jobs[Path("0.png")].done() == waits


def test_an_interrupt_finishes_what_is_begun_and_drops_the_rest(slow_writer: tuple[Writer, threading.Event]) -> None:
    writer, go = slow_writer
    for number in range(3):
        writer.add(explanation(number), str(number))
    until(lambda: all(job.running() for job in list(writer.jobs.values())[:2]), "two begun")
    threading.Timer(0.1, go.set).start()
    writer.stop()
    assert [entry["image"] for entry in writer.summary.done] == ["0.png", "1.png"]
    kept = {name for name in names(writer.summary.out) if not name.startswith(".")}
    assert kept == {"0.png", "1.png", *FOLDER}
    assert [row["figure"] for row in rows(writer.summary.out)] == ["0.png", "1.png"]


def test_an_error_in_a_thread_is_raised_and_nothing_more_is_begun(tmp_path: Path) -> None:
    with Writer(Summary("small", tmp_path, set()), Form(("png",)), threads=1) as writer:
        (tmp_path / "1.png").mkdir()
        for number in range(2):
            one = explanation(number)
            given = one, explained.mark_of(one.maps), tmp_path, [f"{number}.png"], False, nullcontext()
            writer.submit(one.file, lambda given=given: explained.write(*given))
        until(lambda: all(job.done() for job in writer.jobs.values()), "both")
        with pytest.raises(OSError, match=r"1\.png"):
            writer.add(explanation(3), "3")
        with pytest.raises(OSError, match=r"1\.png"):
            writer.finish()
    assert not (tmp_path / "3.png").exists() and (tmp_path / "0.png").is_file()


# --------------------------------------------------------------------------------------------------------------- costs


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: Counter[str]) -> None:
    """Count the calls of a function or method meanwhile."""
    real = getattr(owner, name)

    def count(*args: Any, **more: Any) -> Any:
        calls[name] += 1
        return real(*args, **more)

    monkeypatch.setattr(owner, name, count)


@pytest.mark.parametrize(("form", "encoded"), [("png,npz", 1), ("npz", 0)])
def test_each_image_is_decoded_prepared_and_drawn_once(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, form: str, encoded: int
) -> None:
    assert run("explain", "in/ant.png", "-x", "gae,rollout", "-o", "first").code == 0  # what is found out once
    for number in range(9):
        photo(here / "in" / f"other {number}.png", number).touch()
    calls: Counter[str] = Counter()
    for owner, name in (
        (pictures, "open_file"),
        (Preprocess, "__call__"),
        (Preprocess, "view"),
        (panel, "overlay"),
        (figure, "png_file"),
        (explained, "thumbnail"),
        (explained, "write_folder"),
    ):
        counted(monkeypatch, owner, name, calls)
    assert run("explain", "in", "-x", "gae,rollout", "-o", "out", "--format", form).code == 0
    images = 12
    assert calls["open_file"] == calls["__call__"] == calls["view"] == calls["thumbnail"] == images
    assert calls["png_file"] == encoded * images and calls["write_folder"] == 1
    assert calls["overlay"] == (2 if encoded else 1) * images, "without figures, the thumbnail's map alone is drawn"


def test_the_writer_looks_once_at_each_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time of a folder grows as its images, not as their square."""
    calls: Counter[str] = Counter()
    counted(monkeypatch, Future, "exception", calls)
    with Writer(Summary("small", tmp_path, set()), Form(())) as writer:
        for number in range(60):
            writer.add(explanation(number), str(number))
            writer.jobs[Path(f"{number}.png")].result(60)
    assert calls["exception"] <= 2 * 60 and len(writer.open) <= 1


# ------------------------------------------------------------------------------------------------------------- the page


def made_up(folder: Path, count: int) -> list[dict[str, Any]]:
    """Results as rows: `even` and `odd` images with probabilities and agreements that grow."""
    made = []
    for i in range(count):
        one = signed("gae", seed=i % 7)
        told = explained.mark_of({"gae@3": one})
        label = "<b>odd</b> & co" if i % 2 else "even"
        told |= {"top": [{"label": label, "probability": (i + 0.5) / count}], "range": {}}
        told |= {"agreement": {"gae@3": None if i == 0 else i / count}}
        small = module.thumbnail(Image.fromarray(np.full((60, 90, 3), (i * 9) % 255, np.uint8)))
        made += rows_of(told, [f"image {i:04}.png"], small)
    return made


def test_the_page_is_one_file_that_works_offline(tmp_path: Path) -> None:
    made = made_up(tmp_path, 4)
    page = module.page([[row] for row in made], [])
    assert "http://" not in page and "https://" not in page and "<link" not in page
    assert "&lt;b&gt;odd&lt;/b&gt; &amp; co" in page and "<b>odd" not in page
    assert 'href="image%200001.png"' in page and page.count("data:image/webp;base64,") == 4


def test_the_page_of_a_thousand_images_is_small(tmp_path: Path) -> None:
    made = made_up(tmp_path, 50)
    page = module.page([[row] for row in made] * 20, [])
    assert len(page) < 8_000_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="the browser tests need Playwright")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("the browser tests need Chromium: apt-get install -y chromium")
    with sync.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The page of eight results whose figures are there."""
    made = made_up(tmp_path, 8)
    for row in made:
        Image.new("RGB", (400, 200), "navy").save(tmp_path / row["figure"])
    write_folder(tmp_path, made)
    return tmp_path / INDEX


def listed(page: Any) -> list[int]:
    """The images that are shown, in their order."""
    return [int(row.get_attribute("data-name").split()[1]) for row in page.query_selector_all("tbody tr:not([hidden])")]


def opened(browser: Any, index: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.goto(index.as_uri())
    return page, said


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_sorting_and_filtering_in_a_browser(browser: Any, index: Path, width: int, scheme: str) -> None:
    page, said = opened(browser, index, width, scheme)
    assert listed(page) == list(range(8)) and page.inner_text("#count") == "8 of 8"
    page.click("button[data-by=name]")
    assert listed(page) == list(range(8))[::-1]
    page.click("button[data-by=label]")
    assert listed(page) == [1, 3, 5, 7, 0, 2, 4, 6]
    page.click("button[data-by=agreement]")
    assert listed(page) == [7, 6, 5, 4, 3, 2, 1, 0]
    page.click("button[data-by=agreement]")
    assert listed(page) == [1, 2, 3, 4, 5, 6, 7, 0], "what has no number is last, either way"
    assert page.get_attribute("th:has(button[data-by=agreement])", "aria-sort") == "ascending"
    page.click("button[data-by=confidence]")
    page.fill("#confidence-from", "30")
    assert listed(page) == [7, 6, 5, 4, 3, 2]
    page.fill("#confidence-to", "70")
    assert listed(page) == [5, 4, 3, 2] and page.inner_text("#count") == "4 of 8"
    page.select_option("#class", "even")
    assert listed(page) == [4, 2]
    page.fill("#agreement-from", "0.4")
    assert listed(page) == [4]
    page.fill("#words", "no such word")
    assert listed(page) == [] and page.is_visible("#nothing")
    page.click("button[type=reset]")
    page.wait_for_function("document.querySelector('#count').textContent === '8 of 8'")
    page.fill("#agreement-to", "1")
    assert 0 not in listed(page), "a result without agreement fits no range"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == []
    shots = os.environ.get("VITREOUS_SCREENSHOTS")
    if shots:
        page.screenshot(path=Path(shots) / f"folder-{width}.png")
    page.close()


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_by_keyboard(browser: Any, index: Path) -> None:
    page, said = opened(browser, index, 1440, "light")
    page.keyboard.press("/")
    page.keyboard.type("odd")
    assert listed(page) == [1, 3, 5, 7]
    page.focus("tbody tr:not([hidden]) a")
    page.keyboard.press("Enter")
    assert page.is_visible("dialog") and page.inner_text("#place") == "1 of 4"
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#shown") == "image 0007" and page.inner_text("#place") == "4 of 4"
    page.wait_for_function("document.querySelector('dialog img').naturalWidth === 400")
    page.keyboard.press("Escape")
    assert not page.is_visible("dialog")
    assert page.evaluate("document.activeElement.closest('tr').dataset.name") == "image 0007"
    assert said == []
    page.close()


@pytest.mark.browser
@pytest.mark.slow
def test_a_thousand_images_open_quickly(browser: Any, tmp_path: Path) -> None:
    write_folder(tmp_path, made_up(tmp_path, 1000))
    begun = time.perf_counter()
    page, said = opened(browser, tmp_path / INDEX, 1440, "light")
    page.click("button[data-by=confidence]")
    assert listed(page)[0] == 999
    assert time.perf_counter() - begun < 20 and said == []  # about one second on a quiet machine
    page.close()
