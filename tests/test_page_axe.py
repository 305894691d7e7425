"""Accessibility by axe-core: every tab, help, the tour and the dialogs, wide and narrow, light and dark."""

from __future__ import annotations

from collections.abc import Iterator

import pages
import pytest
import zoo
from pages import DONE, LABELS, Visit, decided, findings, photo

from vitreous import Model
from vitreous.web.engine import Engine, Source

pytestmark = pytest.mark.browser
SIZES = {"wide": (1440, 900), "narrow": (390, 844)}
READY = {  # a tab, and what is there once it is complete
    "explain": DONE,
    "compare": "#compare .map",
    "attention": "#attention .thumb[aria-pressed=true]",
    "concepts": "#concepts form",
    "faithfulness": "#faithfulness .areas b",
    "inside": "#inside .headbar",
    "features": "#features .legend span:last-child:not(:empty)",
}


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    model = Model(decided(zoo.network("timm DINOv2 registers")), labels=LABELS, name="tiny")
    with pages.serving(Engine([(model, Source("x/y"))], pages.FREE)) as home:
        yield home


def test_the_first_page_has_no_finding(visit: Visit) -> None:
    assert findings(visit(wide=1440, high=900)) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tab", READY)
def test_no_tab_has_a_finding(visit: Visit, tab: str, size: str, scheme: str) -> None:
    wide, high = SIZES[size]
    page = visit(f"tab={tab}", wide=wide, high=high, ready=READY[tab], color_scheme=scheme)
    assert findings(page) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_help_the_tour_and_dialogs_have_no_finding(visit: Visit, size: str, scheme: str) -> None:
    wide, high = SIZES[size]
    page = visit(wide=wide, high=high, color_scheme=scheme)
    page.click("#ask")
    page.locator("#help .pages button").first.click()
    page.wait_for_selector("#help .formula math")
    assert findings(page) == [], "help"
    page.keyboard.press("Escape")
    page.click("#take")
    page.wait_for_selector("#tour .task")
    assert findings(page) == [], "tour"
    page.keyboard.press("Escape")
    page.click("#tab-explain")
    page.click("#methods")
    page.locator("dialog summary").first.click()
    page.wait_for_selector("dialog .formula math")
    assert findings(page) == [], "methods"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_results_and_the_menu_have_no_finding(visit: Visit, size: str, scheme: str) -> None:
    wide, high = SIZES[size]
    page = visit("tab=faithfulness", wide=wide, high=high, ready="#counterfactual", color_scheme=scheme)
    page.get_by_role("button", name="Find", exact=True).click()
    page.wait_for_selector(".chart .band")
    page.wait_for_selector("p.extras:has-text('the decision is')")
    assert findings(page) == [], "curves and a counterfactual"
    page.click("#tab-concepts")
    page.set_input_files("#example-files", [photo(1), photo(2)])
    page.fill("#concept-name", "stripes")
    page.get_by_role("button", name="Build the concept").click()
    page.wait_for_selector(".concept .legend span:last-child:not(:empty)")
    assert findings(page) == [], "a concept"
    page.get_by_role("button", name="Delete stripes").click()
    page.click("#tab-compare")
    page.set_input_files("#compare-files", [photo(3)])
    page.wait_for_selector("#compare .difference .legend span:last-child:not(:empty)")
    page.wait_for_function("() => /\\d/.test(document.querySelector('.matrix button').textContent)")
    assert findings(page) == [], "a comparison"
    page.click("#export")
    page.wait_for_selector("#export-list:visible")
    assert findings(page) == [], "the menu of exports"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_lists_and_notices_have_no_finding(visit: Visit, size: str, scheme: str) -> None:
    wide, high = SIZES[size]
    page = visit(f"image={'0' * 32}", wide=wide, high=high, color_scheme=scheme)
    page.expected.append("status of 404")
    page.wait_for_selector("#notice:not(:empty), #stage .problem")
    assert findings(page) == [], "a link to an image that is gone"
    if size == "narrow":
        page.click("#sheet")
    page.fill("#find", "cat")
    page.wait_for_selector("[role=option]:visible")
    assert findings(page) == [], "classes that were found"
    page.expected.append("status of 422")
    page.fill("#find", "wombat")
    page.keyboard.press("Enter")
    page.wait_for_selector("#rail .problem:visible")
    assert findings(page) == [], "a class that is unknown"


@pytest.mark.slow
def test_the_page_of_a_method_has_no_finding(visit: Visit, site: str) -> None:
    page = visit()
    page.goto(f"{site}methods/gae")
    page.wait_for_selector("math")
    assert findings(page) == []


@pytest.mark.slow
def test_a_finding_would_be_seen(visit: Visit) -> None:
    page = visit()
    page.evaluate("document.querySelector('#take').textContent = ''")
    assert any("button-name" in one for one in findings(page))
