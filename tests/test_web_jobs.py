"""Quick things never wait behind long ones; every kind of job says how long; free memory goes back."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the tests of the server need pip install 'vitreous[web]'")

from machine import PATIENCE, until
from test_web import CAT, FREE, LONG, dawdle, events, listen, made, noise, send, slow, small
from torch import Tensor

from vitreous import METHODS, Model
from vitreous.web import concepts, exports
from vitreous.web.explain import is_brief
from vitreous.web.jobs import Job
from vitreous.web.trim import Trim, found
from vitreous.web.worker import Lane

__all__ = ["dawdle"]  # a fixture
NEW = "sample:coffee"
QUICK: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hover": ("GET", "/api/attention/row", {"params": {"image": CAT, "token": 3}}),
    "hover over a new image": ("GET", "/api/attention/row", {"params": {"image": NEW, "token": 3}}),
    "classes of a new image": ("POST", "/api/predict", {"json": {"image": "sample:rocket"}}),
    "eraser": ("POST", "/api/erase", {"json": {"image": CAT, "removed": [1, 2]}}),
    "labels": ("GET", "/api/labels", {"params": {"q": "cat"}}),
    "rollout slider": ("POST", "/api/rollout", {"json": {"image": CAT, "discard": 0.5}}),
    "features": ("GET", "/api/features", {"params": {"image": CAT, "layer": 1}}),
    "similar patches": ("GET", "/api/features/similarity", {"params": {"image": CAT, "layer": 1, "patch": 2}}),
    "concepts": ("GET", "/api/concepts", {}),
    "target": ("GET", "/api/target", {"params": {"image": CAT, "q": "dog"}}),
}


def test_quick_things_never_wait_behind_long_ones(dawdle: str) -> None:
    """Another visitor's job runs on the same model, and would for a quarter of an hour."""
    with small(FREE) as (visitor, own):
        job = visitor.post("/api/explain", json=slow()).json()["job"]
        listen(visitor, job, lambda name, data: data.get("done", 0) > 0)
        for name, (verb, path, more) in QUICK.items():
            assert visitor.request(verb, path, **more).status_code == 200, name
        assert send(visitor, noise(1)).status_code == 201, "an upload"
        number = made(visitor, "gae")["id"]  # a brief job passes the long one
        assert visitor.post("/api/figure", json={"maps": [number]}).status_code == 200
        assert not own.jobs.find(job).ended, "nothing waited for it"
        visitor.delete(f"/api/jobs/{job}")


def test_questions_pass_between_the_examples_of_a_concept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that comes while the first of four examples is embedded is answered before the second one is."""
    began, asked, order = threading.Event(), threading.Event(), []
    embedded = concepts.embedded

    def slowly(model: Model, x: Tensor) -> Tensor:
        order.append("example")
        began.set()
        assert asked.wait(PATIENCE)
        return embedded(model, x)

    monkeypatch.setattr(concepts, "embedded", slowly)
    with small(FREE) as (visitor, own), ThreadPoolExecutor() as threads:
        files = [("files", (f"{seed}.png", noise(seed))) for seed in range(4)]
        made = threads.submit(visitor.post, "/api/concepts", data={"name": "noise"}, files=files)
        assert began.wait(PATIENCE)
        question = own.find(None).quick.submit(lambda: order.append("question"))
        asked.set()
        question.result(PATIENCE)
        assert made.result().status_code == 201
    assert order == ["example", "question", "example", "example", "example"]


@pytest.mark.slow
def test_a_figure_that_is_drawn_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    began, enough, drawn = threading.Event(), threading.Event(), exports.png_bytes

    def slowly(*given: Any, **more: Any) -> bytes:
        began.set()
        assert enough.wait(PATIENCE)
        return drawn(*given, **more)

    with small(FREE) as (visitor, _), ThreadPoolExecutor() as threads:
        number = made(visitor, "rollout")["id"]
        monkeypatch.setattr(exports, "png_bytes", slowly)
        figure = threads.submit(visitor.post, "/api/figure", json={"maps": [number]})
        assert began.wait(PATIENCE)
        for name, (verb, path, more) in QUICK.items():
            assert visitor.request(verb, path, **more).status_code == 200, name
        assert send(visitor, noise(2)).status_code == 201, "an upload"
        assert made(visitor, "gae")["id"], "a job"
        assert not figure.done()
        enough.set()
        assert figure.result().content.startswith(b"\x89PNG")


def test_which_methods_are_brief(dawdle: str) -> None:
    brief = {name for name, one in METHODS.items() if is_brief(one, one.check({}))}
    assert {"attention", "rollout", "gae", "cdam", "gradcam"} <= brief
    assert not brief & {"dawdle", "rise", "occlusion", "integrated_gradients", "optimus", "token_ablation"}


def test_the_time_left_is_that_of_the_whole_job() -> None:
    job = Job("x", FREE)
    job.steps, job.step = 4, 1
    assert job.estimate(None) is None, "nothing is known yet"
    assert job.estimate(2.0) == 8.0, "the others take as long"
    job.took, job.step = [1.0, 3.0], 3
    assert job.estimate(None) == 4.0 and job.estimate(0.5) == 2.5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/explain", {"image": CAT, "methods": [{"name": "rise"}, {"name": "rollout"}]}),
        ("/api/curves", {"metric": "deletion", "steps": 8}),
        ("/api/inside", {"image": CAT, "target": "top-1"}),
        ("/api/counterfactual", {"image": CAT}),
    ],
)
@pytest.mark.slow
def test_every_kind_of_job_tells_its_progress(path: str, body: dict[str, Any]) -> None:
    with small(FREE) as (visitor, _):
        if path == "/api/curves":
            body = {**body, "maps": [made(visitor, "rollout")["id"]]}
        told: list[dict[str, Any]] = []
        report = Job.report

        def heard(self: Job, progress: dict[str, Any]) -> None:
            report(self, progress)
            told.append(self.progress or {})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Job, "report", heard)
            patch.setattr("vitreous.web.jobs.OFTEN", 0.0)
            job = visitor.post(path, json=body).json()["job"]
            assert events(visitor.get(f"/api/jobs/{job}/events").text)[-1][0] == "done"
        assert any(one["seconds_left"] is not None for one in told), told


@pytest.mark.slow
def test_a_waiting_job_is_told_again_how_long(dawdle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitreous.web.jobs.AGAIN", 0.05)
    with small(FREE) as (visitor, own):
        first, second = (visitor.post("/api/explain", json=slow()).json()["job"] for _ in range(2))
        until(lambda: (own.jobs.find(first).progress or {}).get("seconds_left"), "an estimate of the first")
        heard: list[float] = []

        def enough(name: str, data: dict[str, Any]) -> bool:
            assert (name, data["place"]) == ("queued", 1)
            heard.append(data["seconds_left"])
            return len(heard) == 3

        listen(visitor, second, enough)
        assert all(0.001 * LONG < one for one in heard)
        for job in (first, second):
            visitor.delete(f"/api/jobs/{job}")


@pytest.mark.skipif(found("malloc_trim") is None, reason="needs glibc")
def test_free_memory_goes_back_while_lanes_work_and_once_after() -> None:
    lane = Lane("a lane", 4, "full")
    trim = Trim(lambda: [lane], every=0.01)
    time.sleep(0.1)
    assert trim.count == 0, "nothing was done"
    lane.submit(lambda: None).result()
    until(lambda: trim.count, "the first time")
    time.sleep(0.1)
    assert trim.count <= 2
    trim.close()
    lane.close()
    trim.thread.join()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory the Linux way")
def test_the_load_benchmark_finds_no_lost_answer(tmp_path: Path) -> None:
    """A short run; how quick the machine is, and memory before the stores are full, decide nothing."""
    script = Path(__file__).parents[1] / "benchmarks" / "web.py"
    words = ["load", "--clients", "12", "--seconds", "20", "--memory", "1GB", "--out", str(tmp_path / "web.json")]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True)
    told = json.loads((tmp_path / "web.json").read_text())
    assert told["holds"]["answers"] and told["holds"]["jobs"], done.stdout
    assert told["hovers"] > 10 and len(told["MB"]) >= 15
    assert done.returncode == (0 if all(told["holds"].values()) else 1)
