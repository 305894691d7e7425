"""The frame of a view in a browser, without JupyterLab: widget.js, and a stand-in for the notebook's model."""

from __future__ import annotations

import base64
import json
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("anywidget", reason="views need pip install 'vitreous[notebook]'")
import zoo
from pages import DONE, LABELS, browsing, decided, shot

import vitreous
from vitreous import Attribution, Model
from vitreous.notebook import widget
from vitreous.notebook.widget import View
from vitreous.web.engine import ASSETS

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PLACE = "http://notebook.test/"
SOON = 30.0  # seconds
TABS = ("compare", "attention", "concepts", "faithfulness", "inside", "features", "explain")
NOTEBOOK = """<!doctype html><body data-jp-theme-light="true"><div id="output"></div><script type="module">
import widget from "/widget.js";
const held = STATE;
const heard = {};
const text = (body) => btoa(Array.from(new Uint8Array(body), (one) => String.fromCharCode(one)).join(""));
const view = (body) => new DataView(Uint8Array.from(atob(body), (one) => one.charCodeAt(0)).buffer);
window.told = (told, bodies) => heard["msg:custom"](told, bodies.map(view));
widget.render({ el: document.getElementById("output"), model: {
  get: (key) => held[key], set: (key, value) => (held[key] = value), save_changes() {},
  on: (name, then) => (heard[name] = then), off() {},
  send: (told, _, bodies = []) => window.say(told, bodies.map(text)),
} });
</script>"""


class Shown:
    """A view in a page, and the messages between them; waiting passes them on."""

    def __init__(self, page: Any, view: View, folder: Path) -> None:
        self.page, self.view, self.folder = page, view, folder
        self.waiting: queue.Queue[tuple[dict[str, Any], list[str]]] = queue.Queue()
        self.wrong: list[str] = []
        view.send = lambda told, bodies: self.waiting.put((told, [base64.b64encode(one).decode() for one in bodies]))
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", lambda said: said.type in ("error", "warning") and self.wrong.append(said.text))
        page.expose_function("say", self.hear)
        held = {"address": view.address, "height": view.height, "recorded": view.recorded}
        script = (Path(widget.__file__).parent / "widget.js").read_text()
        html = NOTEBOOK.replace("STATE", json.dumps(held))
        page.route(PLACE, lambda route: route.fulfill(content_type="text/html", body=html))
        page.route(f"{PLACE}widget.js", lambda route: route.fulfill(content_type="text/javascript", body=script))
        page.goto(PLACE)
        self.until(lambda: len(page.frames) > 1)
        self.frame = page.frames[1]

    def hear(self, told: dict[str, Any], bodies: list[str]) -> None:
        self.view._handle_custom_msg(told, [memoryview(base64.b64decode(one)) for one in bodies])

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON
        while not reached():
            assert time.monotonic() < end and not self.wrong, self.wrong or self.page.frames[-1].inner_text("body")
            try:
                self.page.evaluate("([told, bodies]) => window.told(told, bodies)", self.waiting.get_nowait())
            except queue.Empty:
                self.page.wait_for_timeout(20)

    def see(self, what: str, count: int = 1) -> None:
        self.until(lambda: self.frame.locator(what).count() >= count)

    def export(self, name: str) -> Path:
        """The file that an entry of the menu saves."""
        files: list[Any] = []
        self.page.once("download", lambda file: files.append(file))
        self.frame.locator("#export").click()
        self.frame.locator(f"#{name}").click()
        self.until(lambda: bool(files))
        kept = self.folder / str(files[0].suggested_filename)
        files[0].save_as(kept)
        return kept


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[[View], Shown]]:
    opened: list[Shown] = []

    def one(view: View) -> Shown:
        page = browser.new_page(viewport={"width": 1200, "height": 900}, accept_downloads=True)
        page.set_default_timeout(1000 * SOON)
        opened.append(Shown(page, view, tmp_path))
        return opened[-1]

    yield one
    for shown in opened:
        shown.page.close()
        shown.view.close()
        assert shown.wrong == []


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(decided(zoo.network("timm ViT")), labels=LABELS, name="tiny")


@pytest.fixture(scope="module")
def photos() -> list[Path]:
    return sorted((ASSETS / "photos").glob("*.jpg"))[:2]


def test_every_tab_of_a_model_opens_in_a_frame(show: Callable[[View], Shown], model: Model, photos: list[Path]) -> None:
    shown = show(vitreous.view(model, photos, methods=["rollout", "gae"], targets=["top-1", "zebra"]))
    shown.see(DONE, 3)
    for tab in TABS:
        shown.frame.locator(f"#tab-{tab}").click()
        shown.see(f"#{tab}:not([hidden]) :is(canvas, svg, img)")
        assert shown.frame.locator(".problem:visible").count() == 0, tab
    assert shown.frame.locator("#link").is_hidden() and "vitreous" in shown.export("page").read_text()


def test_maps_are_drawn_and_taken_away_in_a_frame(
    show: Callable[[View], Shown], model: Model, photos: list[Path]
) -> None:
    found = vitreous.explain(model, photos, "gae", 1)
    shown = show(found.view())
    shown.see(DONE)
    shown.see("#rail img[src^='data:']", 3)
    shot(shown.page, "frame-maps")
    assert shown.frame.locator(".problem").count() == 0
    assert shown.frame.locator("#tabs").is_hidden() and shown.frame.locator("#rail .others").is_hidden()
    assert Attribution.load(shown.export("npz")).map.equal(found.map[:1])
    assert len(shown.export("csv").read_text().splitlines()) == 1 + found.map[0].numel()
    shown.frame.locator("#export").focus()
    shown.page.keyboard.press("ArrowUp")
    assert shown.frame.evaluate("document.activeElement.id") == "csv"  # the last that is offered
