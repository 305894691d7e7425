"""Views in a real JupyterLab: cells are run, maps are drawn, and nothing is asked of other servers."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

for needed in ("anywidget", "jupyterlab", "ipykernel", "nbformat"):
    pytest.importorskip(needed, reason="this needs pip install 'vitreous[notebook]' jupyterlab ipykernel")
import nbformat
from machine import PATIENCE
from pages import BROWSERS, DONE, shot, sync

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.slow]
ROOT = Path(__file__).parents[1]
FRAME = ".vitreous-view iframe"
MODEL = """import pages, zoo, vitreous
slowly = pages.dawdling()
slowly.__enter__()
model = vitreous.Model(pages.decided(zoo.network("timm ViT")), labels=pages.LABELS, name="tiny")
from vitreous.web.engine import ASSETS
photos = sorted((ASSETS / "photos").glob("*.jpg"))[:2]"""
CELLS = {
    "load": MODEL,
    "view": 'view = vitreous.view(model, photos, methods=["rollout", "gae"], targets=["top-1", "zebra"])\nview',
    "found": 'found = vitreous.explain(model, photos, "gae", 1)\nmaps = found.view()\nmaps',
    "address": "print(view.address)",
    "set": 'view.address = view.address.replace("rollout", "grad_rollout")',
    "maps": "print(sorted({one.method for one in view.maps()}))",
    "close": "view.close()",
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, list[str]], str]]:
    """A JupyterLab with settings of its own; gives the address of a notebook of these cells."""
    folder, port, token = tmp_path_factory.mktemp("lab"), free_port(), secrets.token_hex(16)
    home = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "RUNTIME")}
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    settings = {**home, "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "IPYTHONDIR": str(folder / "ipython")}
    settings |= {"PYTHONPATH": paths, "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "OMP_NUM_THREADS": "1"}
    (folder / "work").mkdir()
    notes = folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    notes.parent.mkdir(parents=True)
    notes.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        f"--ServerApp.root_dir={folder / 'work'}",
    ]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [
        f"--IdentityProvider.token={token}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    log = (folder / "log").open("w")
    process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log, cwd=folder)
    try:
        answers(f"http://127.0.0.1:{port}/api?token={token}", process, folder / "log")

        def notebook(name: str, cells: list[str]) -> str:
            made = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
            made.cells = [
                nbformat.v4.new_code_cell(CELLS[one])  # type: ignore[no-untyped-call]
                for one in cells
            ]
            made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
            nbformat.write(made, folder / "work" / f"{name}.ipynb")  # type: ignore[no-untyped-call]
            return f"http://127.0.0.1:{port}/lab/tree/{name}.ipynb?token={token}&reset"

        yield notebook
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def answers(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(int(PATIENCE)):
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=1).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    pytest.fail(log.read_text())


@pytest.fixture
def page() -> Iterator[Any]:
    """A browser page that may ask this computer alone, and whose errors in our code fail the test."""
    import shutil

    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no browser")
    wrong: list[str] = []
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.set_default_timeout(1000 * min(PATIENCE, 30))

        def requested(request: Any) -> None:
            if not re.match(r"(https?://127\.0\.0\.1[:/]|data:|blob:|about:)", request.url):
                wrong.append(request.url)

        def said(message: Any) -> None:
            place = message.location.get("url", "")
            ours = place.startswith(("data:", "blob:", "about:")) or "vitreous" in message.text
            if message.type == "error" and ours:
                wrong.append(f"{message.text} at {place[:80]}")

        page.on("request", requested)
        page.on("console", said)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.route(lambda url: not url.startswith("http://127.0.0.1"), lambda route: route.abort())
        yield page
        browser.close()
    assert wrong == []


def begun(page: Any) -> None:
    """Wait for the kernel, however long a busy machine takes to start it."""
    idle = "() => document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'"
    page.wait_for_function(idle, timeout=1000 * PATIENCE)


def run_cell(page: Any, number: int) -> None:
    """Run one cell and wait until it has ended."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    cell.scroll_into_view_if_needed()
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_function(
        "n => /\\[\\d+\\]/.test(document.querySelectorAll('.jp-Notebook .jp-CodeCell')[n]"
        ".querySelector('.jp-InputPrompt').textContent)",
        arg=number,
        timeout=1000 * PATIENCE,  # the first one imports
    )


def output(page: Any, number: int) -> str:
    return str(
        page.locator(".jp-Notebook .jp-CodeCell").nth(number).locator(".jp-OutputArea-output").first.inner_text()
    )


def frame(page: Any, number: int) -> Any:
    """The page in the output of a cell."""
    return page.locator(".jp-Notebook .jp-CodeCell").nth(number).frame_locator("iframe")


def drawn(page: Any, number: int, count: int) -> Any:
    found = frame(page, number)
    found.locator(DONE).nth(count - 1).wait_for()
    return found


def test_a_model_is_viewed(lab: Callable[[str, list[str]], str], page: Any) -> None:
    page.goto(lab("model", ["load", "view", "address", "set", "maps", "close"]))
    page.locator(".jp-Notebook .jp-CodeCell").nth(5).wait_for()
    begun(page)
    run_cell(page, 0)
    run_cell(page, 1)
    view = drawn(page, 1, 3)
    shot(page, "lab-model-light")

    view.locator(".grid .map").first.hover(position={"x": 20, "y": 20})
    view.locator(".grid .badge:visible").first.wait_for()
    view.locator(".grid .map").first.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    view.locator("#tab-attention").click()
    view.locator(".heads .thumb canvas").first.wait_for()
    run_cell(page, 2)
    assert "tab=attention" in output(page, 2) and "patch=" in output(page, 2)

    view.locator("#tab-faithfulness").click()
    view.locator("#faithfulness svg path").first.wait_for()
    shot(page, "lab-faithfulness")
    view.locator("#tab-explain").click()
    run_cell(page, 3)
    view.locator(".grid .name", has_text="grad_rollout").wait_for()
    drawn(page, 1, 4)
    run_cell(page, 4)
    assert "'gae', 'grad_rollout', 'rollout'" in output(page, 4)

    page.keyboard.press("Control+s")
    page.locator(".lm-TabBar-tab.jp-mod-dirty").wait_for(state="detached")
    page.reload()
    again = drawn(page, 1, 4)
    assert again.locator(".grid .name", has_text="grad_rollout").count() == 1
    run_cell(page, 5)
    page.locator(FRAME).wait_for(state="detached")


def test_maps_are_viewed_in_the_dark(lab: Callable[[str, list[str]], str], page: Any) -> None:
    page.goto(lab("maps", ["load", "found"]))
    page.locator(".jp-Notebook .jp-CodeCell").nth(1).wait_for()
    begun(page)
    run_cell(page, 0)
    run_cell(page, 1)
    view = drawn(page, 1, 1)
    shot(page, "lab-maps-light")
    assert view.locator("#tabs").is_hidden()
    view.locator("#export").focus()
    page.keyboard.press("ArrowUp")
    assert view.locator("#npz, #csv").evaluate_all("all => all.includes(document.activeElement)")
    page.keyboard.press("Escape")
    view.locator("#export").click()
    with page.expect_download() as saved:
        view.locator("#npz").click()
    assert saved.value.suggested_filename.endswith(".npz")
    view.locator("#rail .samples button").nth(1).click()
    view.locator("html[data-theme=light]").wait_for()
    page.get_by_role("menuitem", name="Settings").click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_role("menuitem", name="JupyterLab Dark", exact=True).click()
    view.locator("html[data-theme=dark]").wait_for()
    drawn(page, 1, 1)
    shot(page, "lab-maps-dark")
