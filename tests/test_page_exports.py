"""Taking results away, in a real browser: figures, numbers, links with an image, and the page as one file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import zoo
from pages import DONE, LABELS, decided, export, maps, photo, shot

from vitreous import Model
from vitreous._support.marks import read_mark
from vitreous.web.engine import Engine, Source

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    model = Model(decided(zoo.network("timm ViT")), labels=LABELS, name="timm-ViT")
    with pages.serving(Engine([(model, Source("x/y"))], pages.FREE)) as home:
        yield home


def taken(page: Any, kind: str, to: Path) -> Path:
    with page.expect_download() as download:
        export(page, kind)
    download.value.save_as(to)
    return to


@pytest.mark.slow
def test_figures_are_shapes_and_text_that_need_nothing_else(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit("method=cdam&method=rollout")
    maps(page, 3)
    for tab, ready in [("explain", DONE), ("faithfulness", ".chart .band"), ("inside", ".headbar")]:
        page.click(f"#tab-{tab}")
        page.wait_for_selector(ready)
        file = taken(page, "svg", tmp_path / f"{tab}.svg")
        text = file.read_text("utf-8")
        assert re.findall(r'href="(?!#|data:)[^"]*"', text) == [] and "<script" not in text and "<text" in text
        mark = read_mark(file)
        assert mark is not None and mark["model"] == "timm-ViT" and mark["image"] == "cat"
        drawn = page.context.new_page()
        drawn.goto(file.as_uri())
        assert drawn.evaluate("document.documentElement.tagName") == "svg", "it is well-formed"
        assert drawn.locator("image").count() >= 1 and drawn.locator("text").count() > 10
        shot(drawn, f"svg-{tab}")
        drawn.close()


@pytest.mark.slow
def test_the_menu_by_keyboard_and_on_a_phone(visit: Callable[..., Any]) -> None:
    page = visit(wide=390, high=844)
    maps(page, 3)
    page.focus("#export")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.id") == "png"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.id") == "link-image"
    box = page.locator("#export-list").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["y"] >= 0
    shot(page, "menu-390")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "export" and page.locator("#export-list").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_a_saved_page_opens_without_a_server(visit: Callable[..., Any], browser: Any, tmp_path: Path) -> None:
    page = visit("method=cdam&method=rollout")
    page.set_input_files("#file", photo())
    page.wait_for_function("() => /image=[0-9a-f]{32}/.test(location.hash)")
    maps(page, 3)
    label = page.locator(".grid .map").first.get_attribute("aria-label")
    page.click("#tab-faithfulness")
    page.wait_for_selector(".chart .band")
    page.click("#tab-attention")
    page.wait_for_function("() => document.querySelector('.rollout .legend span:last-child')?.textContent")
    page.click("#tab-explain")
    file = taken(page, "page", tmp_path / "saved.html")
    assert file.stat().st_size < 42e6
    text = file.read_text("utf-8")
    assert str(Path.home()) not in text and str(tmp_path) not in text

    context = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True)
    wrong: list[str] = []
    saved = context.new_page()
    saved.on("pageerror", lambda error: wrong.append(str(error)))
    saved.on("console", lambda said: said.type in ("error", "warning") and wrong.append(said.text))
    saved.on("request", lambda asked: asked.url.startswith(("file:", "data:", "blob:")) or wrong.append(asked.url))
    saved.goto(file.as_uri())
    saved.wait_for_selector(DONE)
    maps(saved, 3)
    assert saved.locator(".grid .map").first.get_attribute("aria-label") == label
    assert "holds only what was computed" in saved.locator(".saved summary").inner_text()
    saved.locator(".grid .map").first.hover(position={"x": 30, "y": 30})
    assert saved.locator(".badge:visible").count() >= 3
    shot(saved, "saved-explain")
    saved.click("#tab-faithfulness")
    saved.wait_for_selector(".chart .band")
    saved.click("#tab-attention")
    saved.wait_for_function("() => document.querySelector('.rollout .legend span:last-child')?.textContent")
    saved.click("#tab-features")  # was not visited
    saved.wait_for_selector("#features .problem")
    assert "holds only what was computed" in saved.locator("#features .problem").first.inner_text()
    shot(saved, "saved-features")
    assert wrong == []
    context.close()


@pytest.mark.slow
def test_a_link_carries_the_image(visit: Callable[..., Any], site: str) -> None:
    page = visit("method=cdam", permissions=["clipboard-read", "clipboard-write"])
    page.set_input_files("#file", photo())
    page.wait_for_function("() => /image=[0-9a-f]{32}/.test(location.hash)")
    maps(page, 2)
    export(page, "link-image")
    page.wait_for_function("() => document.querySelector('#toast').textContent.includes('reduced')")
    link = page.evaluate("navigator.clipboard.readText()")
    assert len(link) < 96_000 and "image=" not in link
    other = visit(link.split("#")[1])
    other.wait_for_function("() => /image=[0-9a-f]{32}/.test(location.hash)")
    assert "photo=" not in other.evaluate("location.hash")
    assert "reduced to what the model sees" in other.locator("#notice").inner_text()
    maps(other, 2)
    for damaged in ("photo=webp.AAAA", "photo=exe.AAAA", "photo=webp.%3C%3E"):
        broken = visit(f"method=cdam&{damaged}")
        assert "damaged" in broken.locator("#stage .problem").first.inner_text()
    export(page, "link")
    page.wait_for_function("() => document.querySelector('#toast').textContent === 'Link copied.'")
    assert json.dumps("image=")[1:-1] in page.evaluate("navigator.clipboard.readText()")
