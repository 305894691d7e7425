"""Every kind of target on the page, in a real browser: by mouse and by keyboard, wide and narrow, light and dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import detectors
import pages
import pytest
import vlms
import zoo
from pages import LABELS, decided, maps, photo, shot
from test_dense import Segmenter
from test_discover import latents_of

import vitreous
from vitreous import Model
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped
from vitreous.web.engine import Engine, Source

pytestmark = [pytest.mark.browser, pytest.mark.slow]
METHOD = "method=input_x_gradient"
ASKED = "question=what is this ?"
SIZES = {"wide": (1440, 900), "narrow": (390, 844)}


def speaker() -> Model:
    found = vitreous.load(f"hf/{vlms.saved('llava')}")
    found.name = "llava"
    return found


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    vit = Model(decided(zoo.network("timm ViT")), labels=LABELS, name="vit")
    segmenter = Model(Segmenter().eval(), cropped((64, 64), *IMAGENET), ["cat", "dog", "bird"], name="segmenter")
    detector = Model(detectors.detr(), cropped(detectors.LARGE, *IMAGENET), name="detr")
    models = [(model, Source("x/y")) for model in (vit, segmenter, detector, speaker())]
    latents = latents_of(vit, zoo.images("timm ViT", 2))
    with pages.serving(Engine(models, pages.FREE, [latents])) as home:
        yield home


def targets(page: Any) -> list[str]:
    return page.evaluate("() => new URLSearchParams(location.hash.slice(1)).getAll('target')")


def until_target(page: Any, pattern: str) -> None:
    """Wait until the last target of the address is like this."""
    found = "new URLSearchParams(location.hash.slice(1)).getAll('target').at(-1) ?? ''"
    page.wait_for_function(f"(p) => new RegExp(p).test({found})", arg=pattern)


def pressed(page: Any, selector: str) -> int:
    return page.locator(f'{selector}[aria-pressed="true"]').count()


def others(page: Any) -> str:
    page.locator(".others summary").click()
    return page.locator(".others").inner_text()


def drag(page: Any, *points: tuple[float, float]) -> None:
    """Draw on the photo; points are shares of it."""
    box = page.locator(".well .map").bounding_box()
    for number, (x, y) in enumerate(points):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=4)
        if number == 0:
            page.mouse.down()
    page.mouse.up()


def test_only_what_the_model_answers_is_offered(visit: Callable[..., Any]) -> None:
    page = visit(f"model=vit&{METHOD}")
    assert page.locator("#rail h2", has_text="Concepts found").count() == 1
    assert page.get_by_role("group", name="Regions").count() == 0
    told = others(page)
    assert "Boxes of detections: this model is no detector" in told and "Words of an answer: " in told
    assert "Classes" not in told
    page.locator("#model").select_option("segmenter")
    page.get_by_role("group", name="Regions").wait_for()
    told = page.locator(".others").inner_text()
    assert "Texts: " in told and "Regions" not in told and "found in another model" in told


def test_regions_by_mouse(visit: Callable[..., Any]) -> None:
    page = visit(f"model=segmenter&{METHOD}&target=top-1")
    page.locator(".well .map").click(position={"x": 40, "y": 60})
    until_target(page, r"^top-1@\d+,\d+$")
    drag(page, (0.2, 0.2), (0.6, 0.7))
    until_target(page, r"^top-1@\d+,\d+,\d+,\d+$")
    page.get_by_label("Class there").select_option("1")
    page.get_by_role("button", name="Free-hand").click()
    drag(page, (0.2, 0.2), (0.8, 0.3), (0.5, 0.8), (0.2, 0.25))
    until_target(page, r"^1@mask:[0-9a-f]{24}$")
    maps(page, 4)
    assert page.locator(".grid .map .marks").count() == 4 and page.locator(".well .map > .marks").count() == 1
    assert "dog in the drawn region" in page.locator(".chips").inner_text()
    shot(page, "targets-regions")
    page.locator(".samples button").nth(1).click()  # another image has no such places
    page.wait_for_function("() => !location.hash.includes('mask')")
    maps(page, 1)


def test_regions_by_keyboard(visit: Callable[..., Any]) -> None:
    page = visit(f"model=segmenter&{METHOD}&target=top-1")
    page.locator(".well .map").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    until_target(page, r"^top-1@\d+,\d+$")
    for key in ("Shift+ArrowRight", "Shift+ArrowDown", "Enter"):
        page.keyboard.press(key)
    until_target(page, r"^top-1@\d+,\d+,\d+,\d+$")
    patches = page.get_by_role("button", name="Patches", exact=True)
    patches.focus()
    page.keyboard.press("Enter")
    page.locator(".well .map").focus()
    for key in ("Space", "ArrowUp", "Space", "Enter"):
        page.keyboard.press(key)
    until_target(page, r"^top-1@mask:[0-9a-f]{24}$")
    assert page.evaluate("() => document.getElementById('live').textContent").endswith("added as a target")
    link = page.get_by_role("button", name="+ where it is predicted")
    link.focus()
    page.keyboard.press("Enter")
    until_target(page, r"^top-1@predicted$")
    maps(page, 5)


def test_detections_by_mouse_and_keyboard(visit: Callable[..., Any]) -> None:
    page = visit(f"model=detr&{METHOD}&target=top-1")
    rows = page.get_by_role("group", name="Detections").locator("button")
    rows.first.wait_for()
    assert "query" in rows.first.inner_text() and "%" in rows.first.inner_text()
    assert page.locator(".boxes .box").count() == rows.count()
    page.locator(".chip", has_text="query").wait_for()  # top-1 is a detection, not a class
    rows.nth(1).focus()
    page.keyboard.press("Enter")
    until_target(page, r"^\d@query:\d$")
    assert pressed(page, ".boxes .box") == 1 and pressed(page, "#rail .tool .bar") == 1
    page.locator(".boxes .box").nth(2).dispatch_event("click")
    page.wait_for_function("() => location.hash.split('query:').length === 3")
    maps(page, 3)
    assert page.locator(".grid .map .marks").count() == 3
    shot(page, "targets-detections")


def test_words_of_an_answer(visit: Callable[..., Any]) -> None:
    page = visit(f"model=llava&{METHOD}&{ASKED}")
    words = page.get_by_role("group", name="Words of the answer").locator("button")
    maps(page, 4)
    assert pressed(page, ".words button") == 4
    assert "llava answers: " in page.locator("#explain .lead").inner_text()
    page.locator("#question").fill("what is this ?")
    page.locator("#answer").fill("a red dog on the sofa")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#explain .lead').textContent.includes('a red dog on')")
    assert words.all_inner_texts() == ["a", "red", "dog", "on", "the", "sofa", "the whole answer"]
    words.nth(5).focus()
    page.keyboard.press("Enter")
    until_target(page, "^word:5$")
    words.nth(0).click()
    page.wait_for_function("() => !location.hash.includes('word:0')")
    maps(page, 4)
    assert "“sofa”" in page.locator(".chips").inner_text()
    shot(page, "targets-words")
    page.reload()
    maps(page, 4)
    assert "“sofa”" in page.locator(".chips").inner_text()
    page.expected.append("422")
    page.locator("#find").fill("token:zebra")
    page.keyboard.press("Enter")
    page.get_by_text("the answer has no word 'zebra'").wait_for()


def test_latents_by_mouse_and_keyboard(visit: Callable[..., Any]) -> None:
    page = visit(f"model=vit&{METHOD}&target=top-1")
    listed = page.get_by_role("group", name="Latents that are most active").locator("button")
    listed.first.click()
    until_target(page, r"^latent:noise#\d+$")
    page.get_by_text("Activation of #").wait_for()
    assert "highest at the" in page.locator(".active .map").get_attribute("aria-label")
    page.get_by_label("Number of a latent").fill("99")
    page.keyboard.press("Enter")
    page.get_by_text("noise has latents 0 to 23.").wait_for()
    assert len(targets(page)) == 2
    listed.nth(1).focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash.split('latent:').length === 3")
    maps(page, 3)
    shot(page, "targets-latents")


def test_contrasts_by_a_control(visit: Callable[..., Any]) -> None:
    page = visit(f"model=vit&{METHOD}&target=top-1")
    page.get_by_text("Contrast two targets").click()
    chosen = page.locator(".contrast select")
    one, other = (chosen.nth(i).locator("option").nth(i).get_attribute("value") for i in (0, 1))
    chosen.nth(0).select_option(one)
    chosen.nth(1).select_option(one)
    page.get_by_role("button", name="Add the contrast").click()
    page.get_by_text("Choose two different targets.").wait_for()
    chosen.nth(1).select_option(other)
    page.get_by_role("button", name="Add the contrast").focus()
    page.keyboard.press("Enter")
    until_target(page, f"^{one}-{other}$")
    maps(page, 2)
    assert "rather than" in page.locator(".grid tbody th").last.inner_text()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("model", ["vit", "segmenter", "detr", "llava"])
def test_looks(visit: Callable[..., Any], model: str, scheme: str, size: str) -> None:
    wide, high = SIZES[size]
    page = visit(f"model={model}&{METHOD}&{ASKED}&image=sample:cat", wide=wide, high=high, color_scheme=scheme)
    if size == "narrow":
        page.locator("#sheet").click()
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.locator(".others").scroll_into_view_if_needed()
    page.wait_for_timeout(300)
    shot(page, f"targets-{model}-{scheme}-{size}")


def test_an_upload_keeps_what_fits(visit: Callable[..., Any]) -> None:
    page = visit(f"model=segmenter&{METHOD}&target=1@predicted&target=top-1@200,100")
    page.set_input_files("#file", photo())
    page.wait_for_function("() => /image=[0-9a-f]{32}/.test(location.hash)")
    page.wait_for_function("() => !location.hash.includes('200')")
    assert targets(page) == ["1@predicted"]
