"""The tab Compare in a real browser: models × images, differences, agreement, several images, models that are added."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
import zoo
from pages import LABELS, changes, decided, export, photo, pixels, shot

from vitreous import Attribution, Model
from vitreous.web.engine import Allowed, Engine, Source

pytestmark = pytest.mark.browser
DONE = "#compare .grid td:not(.waiting) .legend span:last-child:not(:empty)"
DIFFERENCE = "#compare .difference .legend span:last-child:not(:empty)"
TWO = "tab=compare&models=timm-ViT;timm-Swin&images=sample:cat;sample:coffee"


def named(name: str) -> Model:
    return Model(decided(zoo.network(name)), labels=LABELS, name=name.replace(" ", "-"))


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    loaded = [(named(name), Source("x/y")) for name in ("timm ViT", "timm Swin")]
    later = Allowed("timm-DINOv2", Source("x/z"), lambda: named("timm DINOv2 registers"))
    with pages.dawdling(), pages.serving(Engine(loaded, pages.FREE, allowed=[later])) as home:
        yield home


def count(page: Any, number: int) -> None:
    page.wait_for_function("([s, n]) => document.querySelectorAll(s).length === n", arg=[DONE, number])


def test_two_models_and_two_images_side_by_side(visit: Callable[..., Any]) -> None:
    page = visit(TWO, ready=DONE, wide=1440, high=900)
    count(page, 4)
    assert page.locator("#compare .grid thead th").count() == 2 and page.locator("#compare .grid tbody th").count() == 2
    assert page.locator("#compare .said").all_inner_texts()[0].startswith("predicts ")
    label = page.locator("#compare .grid .map").first.get_attribute("aria-label")
    assert "timm-ViT" in label and "cat" in label and "highest at the" in label
    page.wait_for_selector(DIFFERENCE)
    page.wait_for_function("() => /^[−0-9.]+$/.test(document.querySelector('.matrix button').textContent)")
    shot(page, "compare-1440-light")


@pytest.mark.slow
def test_the_difference_by_mouse_and_by_keys(visit: Callable[..., Any]) -> None:
    page = visit(TWO, ready=DIFFERENCE, wide=1440, high=900)
    count(page, 4)
    before = pixels(page, ".difference canvas")
    page.locator("#compare .grid tbody tr").nth(1).locator(".mark").nth(0).click()  # A is of another image than B
    page.wait_for_selector("#compare .beside .problem")
    assert "different images" in page.locator("#compare .beside .problem").inner_text()
    page.locator("#compare .grid tbody tr").nth(1).locator(".map").nth(1).focus()
    page.keyboard.press("b")
    page.wait_for_selector(DIFFERENCE)
    changes(page, ".difference canvas", before)
    assert "one=1.0" in page.url and "other=1.1" in page.url
    assert "is B" in page.locator("#live").inner_text()
    assert page.locator("#compare .difference .legend").inner_text().count("more in") == 2
    before = pixels(page, ".difference canvas")
    page.get_by_role("button", name="Values", exact=True).click()
    changes(page, ".difference canvas", before)
    page.go_back()
    page.wait_for_function("() => !location.hash.includes('other=1.1')")


@pytest.mark.slow
def test_the_figures_by_keyboard(visit: Callable[..., Any]) -> None:
    page = visit(TWO, ready=DIFFERENCE)
    count(page, 4)
    page.wait_for_function("() => /\\d/.test(document.querySelector('.matrix button').textContent)")
    first = page.locator(".matrix button").inner_text()
    page.get_by_role("button", name="Distance").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("t => document.querySelector('.matrix button').textContent !== t", arg=first)
    assert "distance" in page.locator(".matrix button").get_attribute("aria-label")
    page.locator(".matrix button").focus()
    page.keyboard.press("Enter")
    assert page.locator('#compare .mark[aria-pressed="true"]').count() == 2


@pytest.mark.slow
def test_maps_share_a_scale_until_it_is_switched_off(visit: Callable[..., Any]) -> None:
    page = visit(TWO, ready=DONE)
    count(page, 4)
    legends = "[...document.querySelectorAll('#compare .grid .legend span:last-child')]"
    ends = f"() => new Set({legends}.map(n => n.textContent)).size"
    page.wait_for_function(f"() => ({ends})() === 1")
    page.get_by_label("One scale").uncheck()
    page.wait_for_function(f"() => ({ends})() > 1")
    assert "across=false" in page.evaluate("() => new Promise(r => setTimeout(() => r(location.hash), 400))")


@pytest.mark.slow
def test_targets_across_models(visit: Callable[..., Any]) -> None:
    page = visit(f"{TWO}&target=3", ready=DONE)
    count(page, 4)
    titles = "() => [...document.querySelectorAll('#compare .said small')].map(n => n.textContent)"
    shared = page.evaluate(titles)
    assert shared[0].split()[2] == shared[1].split()[2]  # the first model's class in both
    page.locator("#compare").get_by_label("Target").select_option("own")
    page.wait_for_function("() => location.hash.includes('aim=own')")
    count(page, 4)
    assert any("different questions" in text for text in page.locator(".beside .quiet").all_inner_texts()) or (
        page.evaluate(titles)[0].split()[2] == page.evaluate(titles)[1].split()[2]
    )
    page.locator("#compare").get_by_label("Target").select_option("3")
    page.wait_for_function(f"() => ({titles})().length === 4 && ({titles})().every(t => t.includes('dog'))")


@pytest.mark.slow
def test_methods_of_one_model_side_by_side(visit: Callable[..., Any]) -> None:
    page = visit("tab=compare&models=timm-ViT&images=sample:cat&method=gae&method=cdam&method=rollout", ready=DONE)
    count(page, 3)
    assert page.locator("#compare .grid thead th b").all_inner_texts() == ["gae", "cdam", "rollout"]
    page.wait_for_function("() => document.querySelectorAll('.matrix button').length === 3")


@pytest.mark.slow
def test_a_model_is_added(visit: Callable[..., Any]) -> None:
    page = visit(TWO, ready=DONE)
    count(page, 4)
    assert page.locator("#model optgroup option").all_inner_texts() == ["timm-DINOv2"]
    page.get_by_label("Add a model").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    count(page, 6)
    assert "timm-DINOv2" in page.url
    assert page.locator("#model optgroup").count() == 0 and page.locator("#model option").count() == 3
    assert page.locator(".matrix button").count() == 3
    page.get_by_role("button", name="Remove timm-Swin").click()
    count(page, 4)
    other = visit("tab=compare&models=timm-ViT;nobody", ready="#compare .problem")
    assert "no model nobody" in other.locator("#compare .problem").first.inner_text()


@pytest.mark.slow
def test_a_folder_of_images(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit("tab=compare&models=timm-ViT&images=sample:cat&method=gae", ready=DONE)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        (folder / f"photo{number}.png").write_bytes(photo(number)["buffer"])
    (folder / "notes.txt").write_text("no image", encoding="utf-8")
    page.expected.append("415")  # the text is refused
    page.set_input_files("#compare-folder", str(folder))
    count(page, 4)
    assert page.locator("#compare .grid tbody th").all_inner_texts()[1].startswith("photo0.png")
    said = page.locator("#compare .problem").inner_text()
    assert said.startswith("1 of 4 files was refused (notes.txt")
    page.get_by_role("button", name="Remove photo1.png").click()
    count(page, 3)
    page.set_input_files("#compare-files", [photo(number) for number in range(5, 30)])
    page.wait_for_function("() => /did not fit/.test(document.querySelector('#compare').innerText)")
    assert page.locator("#compare .grid tbody th").count() == 24


@pytest.mark.slow
def test_images_are_dropped_on_it(visit: Callable[..., Any]) -> None:
    page = visit("tab=compare&models=timm-ViT&images=sample:cat&method=gae", ready=DONE)
    held = list(photo(3)["buffer"])
    page.evaluate(
        """held => {
          const transfer = new DataTransfer();
          for (const name of ["a.png", "b.png"]) {
            transfer.items.add(new File([new Uint8Array(held)], name, {type: "image/png"}));
          }
          const told = {dataTransfer: transfer, bubbles: true, cancelable: true};
          document.getElementById("compare").dispatchEvent(new DragEvent("drop", told));
        }""",
        held,
    )
    count(page, 2)  # both files are the same image


@pytest.mark.slow
def test_leaving_the_tab_ends_its_jobs(visit: Callable[..., Any], site: str) -> None:
    page = visit(
        "tab=compare&models=timm-ViT;timm-Swin&images=sample:cat&by=dawdle", ready="#compare .progress:visible"
    )
    with page.expect_response(lambda answer: answer.request.method == "DELETE"):
        page.click("#tab-explain")
    page.wait_for_selector(pages.DONE)
    page.click("#tab-compare")
    page.wait_for_selector("#compare .progress:visible")
    page.locator("#compare .progress button").click()
    page.wait_for_function("() => document.querySelector('#compare .problem')?.textContent.startsWith('Cancelled')")


@pytest.mark.slow
def test_what_is_taken_away(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(TWO, ready=DIFFERENCE)
    count(page, 4)
    page.wait_for_function("() => /\\d/.test(document.querySelector('.matrix button').textContent)")
    with page.expect_download() as held:
        export(page, "npz")
    held.value.save_as(tmp_path / "compare.npz")
    names = [name for name in np.load(tmp_path / "compare.npz").files if "/" in name]
    assert len(names) == 4
    assert {Attribution.load(tmp_path / "compare.npz", name).model for name in names} == {"timm-ViT", "timm-Swin"}
    with page.expect_download() as held:
        export(page, "csv")
    found = list(csv.DictReader(io.StringIO(Path(held.value.path()).read_text(encoding="utf-8"))))
    assert [one["image"] for one in found] == ["cat", "coffee"]
    shown = np.mean([float(one["correlation"]) for one in found])
    assert page.locator(".matrix button").inner_text().replace("−", "-") == f"{shown:.2f}"
    with page.expect_download() as held:
        export(page, "png")
    assert Path(held.value.path()).stat().st_size > 20_000


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "high", "theme"), [(390, 844, "light"), (390, 844, "dark"), (1440, 900, "dark")])
def test_it_fits(visit: Callable[..., Any], wide: int, high: int, theme: str) -> None:
    page = visit(TWO, ready=DIFFERENCE, wide=wide, high=high, color_scheme=theme)
    count(page, 4)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    grid, beside = (page.locator(f"#compare {name}").bounding_box() for name in (".grid", ".beside"))
    assert grid["x"] + grid["width"] <= beside["x"] or grid["y"] + grid["height"] <= beside["y"], "they overlap"
    assert (grid["x"] + grid["width"] <= beside["x"]) == (wide > 1180)
    shot(page, f"compare-{wide}-{theme}")
    if wide == 390:
        page.locator("#compare .grid").scroll_into_view_if_needed()
        shot(page, f"compare-{wide}-{theme}-grid")
        page.locator("#compare .beside").scroll_into_view_if_needed()
        shot(page, f"compare-{wide}-{theme}-beside")
