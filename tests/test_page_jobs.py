"""The page when a view is left, by every way: its job ends on the server. And addresses that were changed at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import pages
import pytest
import zoo
from machine import until
from pages import LABELS, decided, maps, shot
from test_video import build

from vitreous import Model
from vitreous.web.engine import Engine, Source
from vitreous.web.jobs import Job

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.filterwarnings("ignore::vitreous.errors.ModelWarning")]
SLOW = "method=dawdle&target=top-1"
RUNS = "#explain .progress:not([hidden])"
TABS = ("explain", "compare", "attention", "concepts", "faithfulness", "inside", "features")


@dataclass
class Site:
    home: str
    engine: Engine

    @property
    def running(self) -> list[Job]:
        """The jobs that have begun and not ended."""
        return [job for job in self.engine.jobs.known.values() if job.began is not None and not job.ended]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    names = ["timm ViT", "timm Swin"]
    models = [Model(decided(zoo.network(name)), labels=LABELS, name=name.replace(" ", "-")) for name in names]
    models.append(Model(build("videomae", frames=8), labels=["run", "jump", "swim", "read", "cook"], name="tiny-video"))
    limits = replace(pages.FREE, patience=10.0)  # for a job whose page went before it listened
    engine = Engine([(model, Source("x/y")) for model in models], limits)
    with pages.dawdling(), pages.serving(engine) as home:
        yield Site(home, engine)


@pytest.fixture
def visit(browser: Any, site: Site) -> Iterator[pages.Visit]:
    with pages.visiting(browser, site.home) as open_page:
        yield open_page


# ------------------------------------------------------------------------------------------------------ ways of leaving


def tab(page: Any, site: Site) -> None:
    page.click("#tab-attention")


def tab_by_keyboard(page: Any, site: Site) -> None:
    page.focus("#tab-explain")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => document.body.dataset.tab === 'inside'")


def other_image(page: Any, site: Site) -> None:
    page.click('#rail [title="rocket"]')


def other_model(page: Any, site: Site) -> None:
    page.select_option("#model", "timm-Swin")


def other_method(page: Any, site: Site) -> None:
    page.evaluate("location.hash = 'method=cdam&target=top-1'")


def back(page: Any, site: Site) -> None:
    page.go_back()


def elsewhere(page: Any, site: Site) -> None:
    page.goto("about:blank")


def reload(page: Any, site: Site) -> None:
    page.reload()


def closed(page: Any, site: Site) -> None:
    page.close()


def lost(page: Any, site: Site) -> None:
    page.context.close()


def cancel(page: Any, site: Site) -> None:
    page.locator("#explain .progress button").click()


LEAVING = (back, tab, tab_by_keyboard, other_image, other_model, other_method, elsewhere, reload, closed, lost, cancel)
AGAIN = (other_image, other_model, reload)


@pytest.mark.parametrize("leave", LEAVING)
def test_leaving_a_view_ends_its_job(visit: Callable[..., Any], site: Site, leave: Callable[[Any, Site], None]) -> None:
    """The job would take a quarter of an hour; it ends within a few steps of ten milliseconds."""
    page = visit("method=cdam&target=top-1")
    maps(page, 1)
    until(lambda: not site.running, "nothing runs")
    page.evaluate(f"location.hash = '{SLOW}'")
    page.wait_for_selector(RUNS)
    until(lambda: site.running, "the job begins")
    (job,) = site.running
    leave(page, site)
    until(lambda: job.ended, "the job ends")
    assert job.events[-1][0] == "cancelled"
    if leave in AGAIN:
        until(lambda: site.running, "the same question of what came instead")
    page.context.close()
    until(lambda: not site.running, "nothing goes on")


@pytest.mark.parametrize("shown", ["compare", "faithfulness"])
def test_leaving_another_view_ends_its_jobs(visit: Callable[..., Any], site: Site, shown: str) -> None:
    page = visit(f"{SLOW}&tab={shown}&by=dawdle&models=timm-ViT;timm-Swin", ready=f"#{shown}:visible")
    until(lambda: site.running, "a job begins")
    page.click("#tab-attention")
    until(lambda: not site.running, "the jobs end")
    assert not [job for job in site.engine.jobs.known.values() if not job.ended], "none waits"


def test_curves_go_on_with_the_maps_of_explain(visit: Callable[..., Any], site: Site) -> None:
    page = visit(SLOW, ready=RUNS)
    until(lambda: site.running, "the job begins")
    (job,) = site.running
    for name in ("faithfulness", "explain"):
        page.click(f"#tab-{name}")
        page.wait_for_timeout(300)
        assert site.running == [job]
    page.click("#tab-features")
    until(lambda: job.ended, "the job ends")


# ----------------------------------------------------------------------------------------------------------- addresses

GARBAGE = (
    *("", "nonsense", "-1", "1e9", "NaN", "0.5", "%", "ünïcode ☃", "<b>x</b>", "../../etc/passwd", "null", "a;b;c"),
    *("9" * 40, "constructor", "__proto__", "x" * 900),
)
KNOWN: dict[str, tuple[str, ...]] = {
    "tab": TABS,
    "model": ("timm-ViT", "timm-Swin", "tiny-video", "gone"),
    "image": ("sample:cat", "sample:rocket", "0" * 32, "sample:nobody"),
    "method": ("cdam", "rollout;discard=0.9", "rollout;discard=7", "gae;nothing=1", "attention;layer=99", "cdam;=;;="),
    "target": ("top-1", "top-99", "3", "3-6", "999", "dog", "unicorn", "word:1", "answer", "1@mask:" + "0" * 24),
    "patch": ("0", "5", "100000", "2.5"),
    "layer": ("0", "-1", "99", "-99", "1.5"),
    "head": ("mean", "0", "99", "-1"),
    "frame": ("0", "3", "99", "-2", "1.5"),
    "tour": ("0", "3", "8", "9", "-1", "2.5"),
    "models": ("timm-ViT;timm-Swin", "gone;timm-ViT", "timm-ViT", "tiny-video;timm-ViT", ";;"),
    "images": ("sample:cat;sample:rocket", "sample:nobody;sample:cat", "0" * 32, ";"),
    "by": ("cdam", "rollout", "gone"),
    "aim": ("first", "own", "3", "unicorn"),
    "one": ("0.0", "9.9", "x"),
    "other": ("0.1", "1.1", "-1.-1"),
    "of": ("shares", "maps"),
    "measure": ("correlation", "distance"),
    "direction": ("reads", "read_by"),
    "discard": ("0.5", "2", "-1"),
    "heads": ("mean", "max", "median"),
    "residual": ("0.5", "7"),
    "basis": ("image", "shared"),
    "metric": ("deletion", "insertion"),
    "subject": ("top-1", "3"),
    "opacity": ("0", "900"),
    "limits": ("100", "-5", "0"),
    "threshold": ("0", "500"),
    "ramp": ("magma", "viridis"),
    "cells": ("true", "maybe"),
    "same": ("true",),
    "question": ("what?",),
    "answer": ("a cat",),
}


def changed_address(chance: random.Random) -> str:
    """Some keys of the address with values that exist, that once existed, or that never did."""
    pairs = [("tab", chance.choice(TABS))]
    for key in chance.sample([*KNOWN], chance.randrange(1, 7)):
        for _ in range(chance.choice([1, 1, 2, 3])):
            pairs.append((key, chance.choice(GARBAGE if chance.random() < 0.25 else KNOWN[key])))
    if chance.random() < 0.1:
        pairs.append((chance.choice(GARBAGE), chance.choice(GARBAGE)))
    return "&".join(f"{quote(key)}={quote(value, safe=':;=,')}" for key, value in pairs)


SETTLED = """() => {
  const shown = [...document.querySelectorAll('#stage > section')].filter((one) => !one.hidden);
  return shown.length === 1 && shown[0].innerText.trim().length > 20 && document.querySelector('#rail img')
    && !document.querySelector('.progress:not([hidden])');
}"""


CHECKED = ("/api/predict", "/api/target", "/api/snippet", "/view")  # what a link names is asked for there, and mended


def refused(got: Any) -> bool:
    """Whether a view asked for what is not there, though the link was mended; 415: a model of videos in Compare."""
    path = got.url.partition("?")[0]
    return got.status >= 500 or (got.status in (400, 404, 422) and not path.endswith(CHECKED))


@pytest.mark.parametrize("seed", range(4))
def test_no_address_leaves_the_page_empty(visit: Callable[..., Any], site: Site, seed: int) -> None:
    """25 addresses, changed at random, opened as a link, and gone to within the page."""
    chance = random.Random(seed)
    page = visit()
    page.expected.extend(["status of 404", "status of 415", "status of 422"])  # a browser says so of each answer
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("response", lambda got: refused(got) and wrong.append(f"{got.status} {got.url} {got.request.post_data}"))
    for number in range(25):
        address = changed_address(chance)
        if number % 3 == 0:
            page.goto("about:blank")
        page.goto(f"{site.home}#{address}")
        page.wait_for_selector("body[data-tab]")
        page.wait_for_timeout(400)
        page.wait_for_function(SETTLED)
        assert wrong == [], address
        assert page.locator("#notice p").count() <= 1, address
        assert page.locator("#rail .bars, #rail .problem, #rail .list").count(), address
    shot(page, f"address-{seed}")
