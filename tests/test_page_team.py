"""The page in a real browser behind a front with two workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pages
import pytest
from pages import DONE, Visit, changes, maps, photo, pixels, shot
from test_web_team_processes import Served, started

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.process]
COMPARED = "#compare .grid td:not(.waiting) .legend span:last-child:not(:empty)"


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with started(tmp_path_factory.mktemp("team"), "--workers", "2") as served:
        yield served
        assert served.errors == ""


@pytest.fixture
def visit(browser: Any, team: Served) -> Iterator[Visit]:
    with pages.visiting(browser, team.home) as opened:
        yield opened


def own_worker(page: Any) -> str:
    (found,) = [one for one in page.context.cookies() if one["name"] == "vitreous_worker"]
    assert found["httpOnly"] and found["sameSite"] == "Strict"
    return str(found["value"])


def take_photo(page: Any, seed: int) -> None:
    """Give the page a photo; it lies with the visitor's own worker."""
    page.set_input_files("#file", photo(seed))
    page.wait_for_function("start => location.hash.includes(start)", arg=f"image=0{own_worker(page)}")
    page.wait_for_selector(DONE)


def test_two_visitors_of_a_team_work_side_by_side_and_share_a_link(visit: Visit, team: Served) -> None:
    opened = [visit(), visit()]
    workers = [own_worker(page) for page in opened]
    assert sorted(workers) == ["0", "1"], "new visitors are shared out"
    for page, worker in zip(opened, workers, strict=True):
        take_photo(page, int(worker))
    link = opened[0].url.partition("#")[2]
    opened[1].goto(f"{team.home}#{link}")
    opened[1].wait_for_selector(DONE)
    assert f"image=0{workers[0]}" in opened[1].url
    maps(opened[1], opened[0].locator(DONE).count())
    assert own_worker(opened[1]) == workers[0], "the visitor moved with the image"


def test_the_whole_way_behind_a_front(visit: Visit) -> None:
    page = visit(wide=1440, high=900)
    take_photo(page, 5)

    page.click("#tab-attention")
    page.wait_for_selector("#attention .thumb[aria-pressed=true] canvas")
    page.wait_for_function("() => document.querySelector('.main .legend span:last-child').textContent")
    before = pixels(page, ".main .map canvas")
    page.locator(".main .map").hover(position={"x": 10, "y": 10})
    changes(page, ".main .map canvas", before)

    page.click("#tab-concepts")
    page.set_input_files("#example-files", [photo(seed) for seed in (1, 2, 3)])
    page.fill("#concept-name", "stripes")
    page.get_by_role("button", name="Build the concept").click()
    page.wait_for_selector(".concept .legend span:last-child:not(:empty)")
    assert page.locator(".chip").filter(has_text="stripes").count() == 1

    page.click("#tab-compare")
    page.wait_for_selector(COMPARED)
    page.set_input_files("#compare-files", [photo(6)])
    page.wait_for_selector("#compare tbody th:has-text('photo6.png')")
    count = page.locator("#compare .grid tbody td").count()
    page.wait_for_function("([s, n]) => document.querySelectorAll(s).length === n", arg=[COMPARED, count])
    page.wait_for_function("() => /\\d/.test(document.querySelector('.matrix button').textContent)")
    shot(page, "team-compare")
    assert page.locator("#compare .problem").count() == 0
