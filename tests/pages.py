"""A real browser and a real server for the tests of the page."""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "multipart"):
    pytest.importorskip(needed, reason="the tests of the page need a server: pip install 'vitreous[web]'")
sync = pytest.importorskip("playwright.sync_api", reason="the browser tests need Playwright: pip install playwright")

import numpy as np
import torch
import uvicorn
from machine import PATIENCE, until
from PIL import Image

import vitreous
from vitreous import METHODS
from vitreous._support.progress import steps
from vitreous.cli.serve import listen
from vitreous.registry import method
from vitreous.trace.trace import Trace
from vitreous.types import Map
from vitreous.web.app import create_app
from vitreous.web.engine import Engine
from vitreous.web.limits import Limits

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
LABELS = ["tabby, tabby cat", "tiger cat", "cat bear", "dog", "sea cat", "lynx", "zebra"]
SHOTS = os.environ.get("VITREOUS_SCREENSHOTS")  # a folder for those who want to look at the page
LONG = 100_000  # steps of a job that no test waits for
FREE = Limits(rate=1e6, burst=10**6, seconds=PATIENCE, patience=PATIENCE, grace=1.0, job_seconds=PATIENCE)
DONE = "#explain .grid td:not(.waiting) .legend span:last-child:not(:empty)"
Visit = Callable[..., Any]


@contextmanager
def dawdling() -> Iterator[None]:
    """A method that takes its time, `dawdle`."""

    def dawdle(trace: Trace, target: vitreous.Target, *, times: int = LONG) -> Map:
        """Nothing, slowly."""
        for _ in steps(range(times), times, "dawdling"):
            time.sleep(0.01)
        return torch.zeros(len(trace), *trace.layout.grid)

    with METHODS.temporary():
        method(family="control")(dawdle)
        yield


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The address of a server on a port of its own."""
    engine.warm()
    config = uvicorn.Config(create_app(engine), log_level="error", ws="none", timeout_graceful_shutdown=1)
    server, listening = uvicorn.Server(config), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until(lambda: server.started or not thread.is_alive(), "the start of the server")
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join()
    listening.close()


@contextmanager
def browsing() -> Iterator[Any]:
    """Chromium; without one, the tests are skipped."""
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        pytest.skip("the browser tests need Chromium: apt-get install -y chromium")
    with sync.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def visiting(browser: Any, site: str) -> Iterator[Visit]:
    """Opens pages; at the end nothing may have failed in them, and nothing may have been asked of other servers."""
    contexts, wrong, expected = [], [], []

    def watch(page: Any) -> None:
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda said: said.type in ("error", "warning") and wrong.append(f"console: {said.text}"))
        page.on("request", lambda asked: asked.url.startswith((site, "blob:", "data:")) or wrong.append(asked.url))

    def open_page(address: str = "", *, wide: int = 1280, high: int = 800, ready: str = DONE, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": wide, "height": high}, accept_downloads=True, **options)
        context.set_default_timeout(1000 * PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.expected = expected
        watch(page)
        page.goto(f"{site}#{address}")
        page.wait_for_selector(ready)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [said for said in wrong if not any(part in said for part in expected)] == []


def decided(network: torch.nn.Module) -> torch.nn.Module:
    """The same network with clear opinions, so that a patch less can be seen in its percentages."""
    network = deepcopy(network)
    for name, weights in network.named_parameters():
        if name.startswith("head"):
            weights.data.mul_(8)
    return network


def shot(page: Any, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def photo(seed: int = 0, size: int = 96) -> dict[str, Any]:
    """An image as a file that a user picks."""
    noise = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    held = io.BytesIO()
    Image.fromarray(noise).resize((size, size)).save(held, "PNG")
    return {"name": f"photo{seed}.png", "mimeType": "image/png", "buffer": held.getvalue()}


def export(page: Any, kind: str) -> None:
    """Choose one of the actions of the Export menu."""
    page.click("#export")
    page.click(f"#{kind}")


def pixels(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.evaluate("c => c.toDataURL()"))


def changes(page: Any, selector: str, before: str) -> None:
    """Wait until a canvas shows something else."""
    page.wait_for_function("([s, b]) => document.querySelector(s).toDataURL() !== b", arg=[selector, before])


def maps(page: Any, count: int) -> None:
    """Wait until so many maps are drawn."""
    page.wait_for_function("([s, n]) => document.querySelectorAll(s).length === n", arg=[DONE, count])


def findings(page: Any) -> list[str]:
    """What axe-core finds in a page, whatever its impact."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    page.wait_for_timeout(300)  # transitions
    return [
        f"{one['impact']} {one['id']}: {one['help']}: {node['html'][:120]}: {[why['message'] for why in node['any']]}"
        for one in axe.Axe().run(page).response["violations"]
        for node in one["nodes"]
    ]
