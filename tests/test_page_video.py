"""The page with a model of videos in a real browser: the scrubber, the strip of tubelets, closed tabs, exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest
import zoo
from pages import LABELS, changes, decided, export, maps, photo, pixels, shot
from PIL import Image
from test_video import build
from test_web_video import packed

from vitreous import Attribution, Model
from vitreous.web.engine import Engine, Source

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::vitreous.errors.ModelWarning")]
TWO = "method=gae&method=gradient&target=1"
CANVAS = ".grid .map canvas"


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    video = Model(build("videomae", frames=8), labels=["run", "jump", "swim", "read", "cook"], name="tiny-video")
    image = Model(decided(zoo.network("timm ViT")), labels=LABELS, name="tiny-image")
    with pages.serving(Engine([(video, Source("hf/tiny")), (image, Source("x/y"))], pages.FREE)) as home:
        yield home


def clip(kind: str = "gif", count: int = 12) -> dict[str, Any]:
    """A clip as a file that a user picks."""
    return {"name": f"walk.{kind}", "mimeType": f"image/{kind}", "buffer": packed(kind, count)}


def told(page: Any) -> str:
    return str(page.locator("#clip .told").inner_text())


def frame_is(page: Any, number: int) -> None:
    page.wait_for_function("n => document.querySelector('#frame').value === String(n)", arg=number)
    page.wait_for_function(
        "n => [...document.querySelectorAll('.grid .map img, .well .map img')]"
        ".every(i => i.src.includes(`frame=${n}`))",
        arg=number,
    )


def test_first_visit_explains_a_clip_and_the_scrubber_moves_all_maps(visit: pages.Visit) -> None:
    page = visit(TWO)
    maps(page, 2)
    page.wait_for_function("() => document.querySelector('#clip .told').textContent.includes('in the clip')")
    assert told(page) == "Frame 1 of 8 · tubelet 1 of 4 (frames 1–2) · frame 2 of 24 in the clip"
    first, second = (page.locator(CANVAS).nth(i).evaluate("c => c.toDataURL()") for i in range(2))
    page.focus("#frame")
    page.keyboard.press("ArrowRight")  # the same tubelet, another frame
    frame_is(page, 1)
    assert page.locator(CANVAS).nth(0).evaluate("c => c.toDataURL()") == first
    changes(page, ".grid td:nth-of-type(2) canvas", second)  # a map of pixels has one for each frame
    page.keyboard.press("End")
    frame_is(page, 7)
    changes(page, CANVAS, first)
    assert "tubelet 4 of 4 (frames 7–8)" in told(page)
    assert "tubelet 4 of 4" in page.locator("#frame").evaluate("e => e.ariaValueText")
    page.wait_for_function("() => location.hash.includes('frame=7')")
    page.keyboard.press("Home")
    frame_is(page, 0)
    shot(page, "video-light")


@pytest.mark.slow
def test_the_strip_lists_every_tubelet_with_its_share(visit: pages.Visit) -> None:
    page = visit(TWO)
    maps(page, 2)
    page.wait_for_selector(".moment >> nth=3")
    shares = [float(one.rstrip("%")) for one in page.locator(".moment small").all_inner_texts()]
    assert len(shares) == 4 and abs(sum(shares) - 100) < 1.5
    page.locator(".moment").nth(2).click()
    frame_is(page, 4)
    assert page.locator(".moment").nth(2).get_attribute("aria-pressed") == "true"
    assert "frames 5–6" in page.locator(".moment").nth(2).get_attribute("aria-label")
    page.locator(".moment").nth(1).focus()
    page.keyboard.press("Enter")
    frame_is(page, 2)
    page.locator(".grid .map").nth(1).click()  # the map of pixels: a part for each frame
    page.wait_for_selector(".moment >> nth=7")
    assert "gradient" in page.locator("#clip > .quiet").inner_text()


@pytest.mark.slow
def test_values_under_the_cross_hair_are_those_of_the_frame(visit: pages.Visit, site: str) -> None:
    page = visit("method=gae&target=1&patch=4&frame=5")
    maps(page, 1)
    page.wait_for_selector(".grid .badge:visible")
    number = page.evaluate("""async () => {
      const api = await import('/api.js');
      const asked = { image: 'sample:pan-cat', methods: [{ name: 'gae', options: {} }], targets: ['1'] };
      const start = api.job('explain', asked);
      return await new Promise((resolve) => start((name, told) => name === 'map' && resolve(told.id)));
    }""")
    values = page.evaluate(f"async () => [...await (await import('/api.js')).map('{number}')]")
    shown = page.evaluate(f"async () => (await import('/ui.js')).number({values[2 * 9 + 4]})")
    assert page.locator(".grid .badge").inner_text() == shown  # frame 5 is in the third tubelet
    page.keyboard.press("Escape")


@pytest.mark.slow
def test_play_and_pause_by_mouse_and_by_keyboard(visit: pages.Visit) -> None:
    page = visit(TWO)
    maps(page, 2)
    page.wait_for_timeout(400)
    assert page.input_value("#frame") == "0"  # nothing moves by itself
    page.click("#play")
    page.wait_for_function("() => document.querySelector('#frame').value !== '0'")
    assert page.inner_text("#play") == "Pause"
    page.focus("#frame")
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Play"
    stopped = page.input_value("#frame")
    page.wait_for_timeout(500)
    assert page.input_value("#frame") == stopped
    page.wait_for_function(f"() => location.hash.includes('frame={stopped}') || '{stopped}' === '0'")
    page.focus("#play")
    page.keyboard.press("Space")
    page.wait_for_function("s => document.querySelector('#frame').value !== s", arg=stopped)
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Play"


@pytest.mark.slow
def test_tabs_that_cannot_show_clips_say_why(visit: pages.Visit) -> None:
    page = visit(TWO)
    maps(page, 2)
    for name in ("attention", "concepts", "inside", "features"):
        page.click(f"#tab-{name}")
        said = page.locator(f"#{name} > .why")
        assert "tiny-video takes videos, and the" in said.inner_text() and "works with images" in said.inner_text()
        assert page.locator(f"#tab-{name}").get_attribute("title") == said.inner_text().rstrip(".")
        assert page.locator(f"#{name} > *:visible").count() == 1
    shot(page, "video-closed")
    page.select_option("#model", "tiny-image")
    page.wait_for_selector("#features .legend span:last-child:not(:empty)")
    assert page.locator(".why").count() == 0 and page.locator("#clip").is_hidden()


@pytest.mark.slow
def test_another_kind_of_model_falls_back_to_a_sample_of_its_kind(visit: pages.Visit) -> None:
    page = visit(TWO)
    maps(page, 2)
    page.select_option("#model", "tiny-image")
    page.wait_for_function("() => location.hash.includes('image=sample:cat')")
    assert "takes images, and cat-pan is a clip" in page.inner_text("#notice")
    maps(page, 2)
    page.select_option("#model", "tiny-video")
    page.wait_for_function("() => location.hash.includes('image=sample:pan-cat')")
    assert "takes videos, and cat is a single image" in page.inner_text("#notice")
    maps(page, 2)


@pytest.mark.slow
def test_links_of_other_kinds_and_frames_are_mended(visit: pages.Visit) -> None:
    page = visit(f"model=tiny-video&image=sample:pan-coffee&frame=5&{TWO}")
    frame_is(page, 5)
    assert page.inner_text("#notice") == ""
    page = visit(f"model=tiny-video&image=sample:pan-coffee&frame=99&{TWO}")
    assert "there is no frame 99" in page.inner_text("#notice")
    frame_is(page, 0)
    page = visit(f"model=tiny-video&image=sample:cat&{TWO}")
    assert "cat is a single image" in page.inner_text("#notice")
    assert "sample:pan-cat" in page.url


@pytest.mark.slow
def test_uploads_of_clips_and_of_still_images(visit: pages.Visit) -> None:
    page = visit(TWO)
    page.set_input_files("#file", clip())
    page.wait_for_function("() => /image=[0-9a-f]{32}/.test(location.hash)")
    maps(page, 2)
    page.wait_for_function("() => document.querySelector('#clip .told').textContent.includes('of 12 in the clip')")
    before = page.url
    page.set_input_files("#file", photo())
    page.wait_for_selector("#rail .problem")
    assert "is a single image, and the model takes videos" in page.inner_text("#rail .problem")
    assert page.url == before
    page.expected.append("status of 415")
    page.set_input_files("#file", {"name": "x.gif", "mimeType": "image/gif", "buffer": b"GIF89a"})
    page.wait_for_function("() => /x.gif/.test(document.querySelector('#rail .problem')?.textContent)")


@pytest.mark.slow
def test_exports_of_a_clip(visit: pages.Visit, tmp_path: Path) -> None:
    page = visit(TWO)
    maps(page, 2)
    kept = {}
    for name in ("npz", "film", "figure", "png"):
        with page.expect_download() as coming:
            export(page, name)
        kept[name] = tmp_path / coming.value.suggested_filename
        coming.value.save_as(kept[name])
    assert Attribution.load(kept["npz"], "gae@1").map.shape == (1, 4, 3, 3)
    assert Attribution.load(kept["npz"], "gradient@1").map.shape == (1, 8, 24, 24)
    with Image.open(kept["film"]) as film:
        assert film.format == "GIF" and film.n_frames == 8 and film.width > film.height
    with Image.open(kept["png"]) as drawn, Image.open(kept["figure"]) as figure:
        assert "vitreous view" in drawn.text and figure.width > 500
    page.select_option("#model", "tiny-image")
    page.wait_for_function("() => !document.querySelector('#film')")


@pytest.mark.slow
def test_curves_and_the_eraser_follow_the_frame(visit: pages.Visit) -> None:
    page = visit(f"tab=faithfulness&{TWO}", ready="#faithfulness .curve")
    page.wait_for_selector("#faithfulness .bars.traced .bar")
    page.wait_for_function("() => /takes videos/.test(document.querySelector('#faithfulness').textContent)")
    eraser = page.locator("#eraser")
    eraser.focus()
    page.keyboard.press("Space")
    page.wait_for_function(
        "() => document.querySelector('#faithfulness').textContent.includes('1 of 36 patches removed')"
    )
    before = pixels(page, "#eraser canvas")
    page.focus("#frame")
    page.keyboard.press("End")
    changes(page, "#eraser canvas", before)  # the hole is in another tubelet
    eraser.focus()
    page.keyboard.press("Space")
    page.wait_for_function(
        "() => document.querySelector('#faithfulness').textContent.includes('2 of 36 patches removed')"
    )
    shot(page, "video-faithfulness")


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("wide", [1440, 390])
def test_nothing_is_wider_than_the_page(visit: pages.Visit, theme: str, wide: int) -> None:
    page = visit(TWO, wide=wide, high=900 if wide > 400 else 844, color_scheme=theme)
    maps(page, 2)
    page.wait_for_selector(".moment >> nth=3")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = page.locator("#clip").bounding_box()
    first = page.locator(".grid .map").first.bounding_box()
    assert box["y"] + box["height"] <= first["y"]  # the controls cover no map
    shot(page, f"video-{wide}-{theme}")
