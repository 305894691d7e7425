"""Help that teaches, in a real browser: a “?” on each view, typeset formulas, the keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pages
import pytest
import zoo
from pages import DONE, LABELS, Visit, decided, shot

from vitreous import METHODS, METRICS
from vitreous.models.model import Model
from vitreous.web.engine import Engine, Source
from vitreous.web.statics import FOLDER

pytestmark = pytest.mark.browser
TABS = ("explain", "compare", "attention", "concepts", "faithfulness", "inside", "features")
VIEWS = {  # the “?” of each part of a tab
    "explain": {"explain"},
    "compare": {"compare"},
    "attention": {"attention", "rollout"},
    "concepts": {"concepts"},
    "faithfulness": {"curves", "eraser", "counterfactual"},
    "inside": {"inside", "layers", "qk"},
    "features": {"features"},
}


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    model = Model(decided(zoo.network("timm ViT")), labels=LABELS, name="timm-ViT")
    with pages.serving(Engine([(model, Source("x/y"))], pages.FREE)) as home:
        yield home


def texts() -> dict[str, dict[str, Any]]:
    """As the page has them."""
    found = re.search(r"TEXTS =\n(\{.*?\n\});", (FOLDER / "texts.js").read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_every_text_says_what_it_shows_and_when_not_to_believe_it() -> None:
    known = texts()
    assert {*known} >= {key for keys in VIEWS.values() for key in keys} | {"compare", "targets", "regions", "video"}
    for one in known.values():
        assert all(len(one[part]) > 30 for part in ("shows", "believe", "doubt"))
        methods = [] if one.get("methods", []) == "shown" else one.get("methods", [])
        assert {*methods} <= {*METHODS} and {*one.get("metrics", [])} <= {*METRICS}


def test_help_opens_beside_the_map_and_gives_the_focus_back(visit: Visit) -> None:
    page = visit("method=gae&target=top-1", wide=1440, high=900)
    page.focus(".asks[data-help=explain]")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "help-title"
    panel, grid = (page.locator(one).bounding_box() for one in ("#help", "#explain table"))
    assert panel["x"] >= grid["x"] + grid["width"] - 1, "the panel covers the maps"
    page.locator("#help .pages button", has_text="gae").click()
    page.wait_for_selector("#help .formula math")
    boxes = "#help .formula math *"
    assert page.locator(boxes).first.evaluate("n => n.namespaceURI") == "http://www.w3.org/1998/Math/MathML"
    assert "Chefer" in page.inner_text("#help") and "Known limits" in page.inner_text("#help")
    shot(page, "help-method")
    page.keyboard.press("Escape")
    assert page.is_hidden("#help")
    assert page.evaluate("document.activeElement.dataset.help") == "explain"


@pytest.mark.slow
@pytest.mark.parametrize("tab", TABS)
def test_a_question_mark_on_each_view(visit: Visit, tab: str) -> None:
    page = visit(f"tab={tab}", ready=f"#{tab} .asks")
    page.wait_for_function("n => document.querySelectorAll(n).length", arg=f"#{tab} .asks[data-help]")
    for key in VIEWS[tab]:
        page.locator(f"#{tab} .asks[data-help={key}]").click()
        assert page.inner_text("#help h2") == texts()[key]["title"]
        assert texts()[key]["doubt"] in page.inner_text("#help")
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.dataset.help") == key


@pytest.mark.slow
def test_the_question_key_asks_about_what_has_the_focus(visit: Visit) -> None:
    page = visit("tab=faithfulness", ready="#eraser")
    page.focus("#eraser")
    page.keyboard.press("?")
    assert page.inner_text("#help h2") == "Eraser"
    assert "Space" in page.inner_text("#help .keys")
    page.keyboard.press("?")
    assert page.is_hidden("#help") and page.evaluate("document.activeElement.id") == "eraser"
    page.focus("#find")
    page.keyboard.type("what?")
    assert page.is_hidden("#help") and page.input_value("#find") == "what?"
    page.focus("#tab-faithfulness")
    page.keyboard.press("?")
    assert page.inner_text("#help h2") == "Curves"


@pytest.mark.slow
def test_methods_in_the_list_unfold_their_formula(visit: Visit) -> None:
    page = visit()
    page.click("#methods")
    entry = page.locator("[data-method=rollout]")
    entry.locator("summary").focus()
    page.keyboard.press("Enter")
    entry.locator(".formula math msub").first.wait_for()
    assert "Abnar" in entry.inner_text()
    shot(page, "methods-dialog")


@pytest.mark.slow
def test_the_column_of_a_method_leads_to_its_help(visit: Visit) -> None:
    page = visit("method=gae&target=top-1", ready=DONE)
    page.locator(".column .asks").click()
    page.wait_for_selector("#help .formula math")
    assert page.inner_text("#help h2") == "gae"


# ---------------------------------------------------------------------------------------------------------------- tour


def told(page: Any, step: int) -> str:
    """What a step says, once its numbers are there."""
    page.wait_for_function("n => document.querySelector('#tour header p')?.textContent === `Tour, ${n} of 8`", arg=step)
    page.wait_for_selector("#tour .task")
    return str(page.inner_text("#tour .words"))


@pytest.mark.slow
def test_the_tour_goes_on_and_back_by_keys_and_by_mouse(visit: Visit) -> None:
    page = visit()
    page.locator("#offer button", has_text="Take the tour").click()
    assert "layers" in told(page, 1) and page.evaluate("document.activeElement.id") == "tour-title"
    assert page.is_visible("#attention .toured") and "tour=1" in page.evaluate("location.hash")
    page.keyboard.press("ArrowRight")
    told(page, 2)
    page.click("#tour footer button:has-text('Back')")
    told(page, 1)
    page.keyboard.press("Escape")
    assert page.is_hidden("#tour") and page.evaluate("document.activeElement.id") == "take"
    assert "tour=" not in page.evaluate("location.hash") and page.locator(".toured").count() == 0
    home = page.url.partition("#")[0]
    page.goto("about:blank")
    page.goto(home)
    page.wait_for_selector(DONE)
    assert page.locator("#offer").count() == 0, "it is offered once"


@pytest.mark.slow
def test_every_step_tells_the_numbers_of_this_run(visit: Visit) -> None:
    page = visit(wide=390, high=844)
    page.click("#take")
    for step in range(1, 9):
        assert re.search(r"\d", told(page, step)), step
        assert "Try it" in page.inner_text("#tour .task")
        assert page.locator("#tour .problem").count() == 0
        box, panel = page.locator(".toured").bounding_box(), page.locator("#tour").bounding_box()
        assert box["y"] < panel["y"], "the place lies behind the panel"
        page.click("#tour footer .strong")
    assert page.is_hidden("#tour")


@pytest.mark.slow
def test_the_tour_can_be_resumed_by_link_and_tells_what_the_page_shows(visit: Visit) -> None:
    page = visit("tour=8", ready="#tour .task")
    said = told(page, 8)
    now = page.locator("#faithfulness .traced .value").first.inner_text().split(" → ")[-1]
    assert f"has {now} now" in said


@pytest.mark.slow
def test_a_step_that_the_model_cannot_do_says_so(browser: Any) -> None:
    swin = Model(decided(zoo.network("timm Swin")), labels=LABELS, name="swin")
    with pages.serving(Engine([(swin, Source("x/y"))], pages.FREE)) as home, pages.visiting(browser, home) as opened:
        page = opened("tour=1", ready="#tour .words")
        page.wait_for_function("document.querySelector('#tour .words').textContent.includes('left out')")
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelector('#tour header p').textContent.includes('2 of 8')")
