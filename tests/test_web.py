"""`vitreous serve`: every route against the library itself, every safety rule, and what strangers send."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "multipart", "httpx"):
    pytest.importorskip(needed, reason="the tests of the server need pip install 'vitreous[web]' httpx")

import httpx
import numpy as np
import torch
import typer
import uvicorn
import zoo
from conftest import off
from machine import PATIENCE, ROUNDING, rare, until
from PIL import Image
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

import vitreous
from vitreous import METHODS, Attribution, Concept, Model, evaluate, explain
from vitreous._support.progress import steps
from vitreous.cli.main import app as commands
from vitreous.cli.serve import listen as listen_on
from vitreous.errors import TargetError
from vitreous.images import pictures
from vitreous.registry import method
from vitreous.trace.perturb.drop_tokens import scores_keeping
from vitreous.trace.trace import Trace
from vitreous.types import Map
from vitreous.web import snippet
from vitreous.web.app import create_app
from vitreous.web.engine import Engine, Source
from vitreous.web.guard import HEADERS
from vitreous.web.limits import Limits
from vitreous.web.problems import Problem
from vitreous.web.store import Store
from vitreous.web.targets import find_concept
from vitreous.web.uploads import Part, clean, open_picture
from vitreous.web.worker import Lane

HOME = "http://127.0.0.1:8000"
CAT = "sample:cat"
LABELS = ["tabby, tabby cat", "tiger cat", "cat bear", "dog", "sea cat", "lynx", "zebra"]
PHOTOS = Path(vitreous.__file__).parent / "assets" / "photos"
FREE = Limits(rate=1e6, burst=10**6, seconds=PATIENCE, patience=PATIENCE, grace=PATIENCE, job_seconds=PATIENCE)
LONG = 100_000  # steps of a job that no test waits for
DAWDLED: list[int] = []  # the steps that were taken


def named(name: str) -> Model:
    return Model(zoo.network(name), labels=LABELS, name=name.replace(" ", "-"))


@pytest.fixture(scope="module")
def model() -> Model:
    return named("timm ViT")


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    others = ["timm DINOv2 registers", "hand-written", "timm SigLIP", "timm ViT unfused"]
    plain = [zoo.model("open_clip ViT-B-32"), zoo.model("timm Swin"), zoo.model("flat heads")]
    found = Engine([(m, Source("x/y", "/secret/folder/w.pth")) for m in (model, *map(named, others), *plain)], FREE)
    found.warm()
    yield found
    found.close()


@pytest.fixture(scope="module")
def client(engine: Engine) -> TestClient:
    return TestClient(create_app(engine), base_url=HOME)


@pytest.fixture
def dawdle() -> Iterator[str]:
    """A method that does nothing, slowly; another package might bring it."""
    DAWDLED.clear()

    def dawdle(trace: Trace, target: vitreous.Target, *, times: int = LONG) -> Map:
        """Nothing."""
        for step in steps(range(times), times, "dawdling"):
            DAWDLED.append(step)
            time.sleep(0.01)
        return torch.zeros(len(trace), *trace.layout.grid)

    with METHODS.temporary():
        method(family="control")(dawdle)
        yield "dawdle"


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[str]:
    """A real server on a port of its own."""
    config = uvicorn.Config(create_app(engine, **options), log_level="error", ws="none", timeout_graceful_shutdown=1)
    server, listening = uvicorn.Server(config), listen_on("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until(lambda: server.started or not thread.is_alive(), "the start of the server")
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@contextmanager
def small(limits: Limits, **options: Any) -> Iterator[tuple[httpx.Client, Engine]]:
    """A server with limits of its own, and a client."""
    own = Engine([(named("timm ViT"), Source())], limits)
    with serving(own, **options) as home, httpx.Client(base_url=home, timeout=PATIENCE) as visitor:
        yield visitor, own


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = re.findall(r"event: (\w+)\ndata: (.*)\n", text)
    return [(name, json.loads(data)) for name, data in found]


def finished(client: httpx.Client, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """All events of a job but progress."""
    started = client.post(path, json=body)
    assert started.status_code == 202, started.text
    text = client.get(f"/api/jobs/{started.json()['job']}/events").text
    return [(name, data) for name, data in events(text) if name not in ("progress", "queued")]


def made(client: httpx.Client, name: str, image: str = CAT, target: str = "top-1", **body: Any) -> dict[str, Any]:
    """The one map of a job."""
    asked = {"image": image, "methods": [{"name": name, "options": body.pop("options", {})}], "targets": [target]}
    (kind, meta), (last, _) = finished(client, "/api/explain", {**asked, **body})
    assert (kind, last) == ("map", "done"), meta
    return meta


def grid(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    shape = tuple(map(int, response.headers["x-shape"].split(",")))
    return np.frombuffer(response.content, "<f4", count=int(np.prod(shape))).reshape(shape)


def problem(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    told = response.json()
    assert set(told) == {"type", "title", "status", "detail"} and told["status"] == status
    assert "Traceback" not in told["detail"] and "File" not in told["detail"]
    return str(told["detail"])


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def noise(seed: int, side: int = 64) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return encoded(Image.fromarray(values))


def send(client: httpx.Client, held: bytes, name: str = "x.png") -> httpx.Response:
    return client.post("/api/images", files={"file": (name, held)})


# ------------------------------------------------------------------------------------------------------- what there is


def test_info_tells_what_the_registry_knows(client: TestClient, dawdle: str) -> None:
    told = client.get("/api/info").json()
    assert [m["name"] for m in told["methods"]] == list(METHODS)
    assert dawdle in METHODS
    shown = {m["name"]: m for m in told["methods"]}
    assert shown["cdam"]["signed"] and shown["cdam"]["targeted"] and not shown["rollout"]["targeted"]
    assert shown["rise"]["level"] and shown["random"]["control"]
    assert shown["rollout"]["options"]["discard"]["exclusiveMaximum"] == 1
    assert shown["rise"]["options"]["masks"]["maximum"] == 4000
    metrics = {m["name"]: m for m in told["metrics"]}
    assert metrics["deletion"]["usable"] and not metrics["mask_iou"]["usable"]
    models = {m["name"]: m for m in told["models"]}
    vit = models["timm-ViT"]
    assert (vit["grid"], vit["prefix"], vit["heads"], vit["classes"]) == ([4, 4], ["CLS"], [2, 2, 2], 7)
    assert vit["unsupported"] == {} and vit["classifies"]
    assert models["timm-DINOv2-registers"]["prefix"] == ["CLS", *(f"register {i}" for i in range(1, 5))]
    assert models["hand-written"]["suffix"] == ["CLS"]
    assert not models["open_clip-vit-b-32"]["classifies"] and models["open_clip-vit-b-32"]["texts"]
    assert "windows" in models["timm-swin"]["unsupported"]["attention_flow"] and models["timm-swin"]["heads"] == []
    assert {s["id"] for s in told["samples"]} >= {CAT, "sample:rocket"}


def test_labels_are_searched(client: TestClient) -> None:
    found = client.get("/api/labels", params={"q": "cat"}).json()
    assert [one["index"] for one in found] == [2, 0, 1, 4]  # begins a name, then a word
    assert client.get("/api/labels", params={"q": "Tiger CAT"}).json() == [{"index": 1, "label": "tiger cat"}]
    assert client.get("/api/labels", params={"q": "6"}).json() == [{"index": 6, "label": "zebra"}]
    assert len(client.get("/api/labels", params={"limit": 3}).json()) == 3
    problem(client.get("/api/labels", params={"model": "nobody"}), 404)


def test_openapi_and_its_page(client: TestClient) -> None:
    routes = client.get("/api/openapi.json").json()["paths"]
    assert "/api/explain" in routes and "/api/erase" in routes
    page = client.get("/api/docs")
    assert "POST /api/curves" in page.text and "<script" not in page.text and "http" not in page.text


def test_the_contract_names_every_route(client: TestClient) -> None:
    text = (Path(vitreous.__file__).parent / "web" / "API.md").read_text()
    for path in client.get("/api/openapi.json").json()["paths"]:
        assert re.sub(r"\{(map|image|concept|mask)\}", "{id}", path) in text


# ------------------------------------------------------------------------------------------------------------- explain


def test_upload_view_and_predict(client: TestClient, model: Model) -> None:
    held = (PHOTOS / "rocket.jpg").read_bytes()
    one, again = (send(client, held, f"../../etc/{name}.jpg") for name in ("a", "b"))
    assert one.status_code == 201 and one.json()["id"] == again.json()["id"]
    assert one.json()["name"] == "a.jpg"
    photo = pictures.read(PHOTOS / "rocket.jpg").image
    assert (one.json()["width"], one.json()["height"]) == photo.size
    seen = client.get(f"/api/images/{one.json()['id']}/view")
    assert "immutable" in seen.headers["cache-control"]
    shown = Image.open(io.BytesIO(seen.content))
    assert shown.format == "WEBP" and shown.size == model.preprocess.view(photo).size
    told = client.post("/api/predict", json={"image": one.json()["id"], "top": 3}).json()["classes"]
    chances = Trace(model, [photo]).output[0].softmax(-1)
    assert [c["index"] for c in told] == chances.topk(3).indices.tolist()
    assert off([c["probability"] for c in told], chances.topk(3).values) < 1e-6
    assert told[0]["label"] == model.label(told[0]["index"])


def test_a_model_without_classes_says_so(client: TestClient) -> None:
    told = client.post("/api/predict", json={"image": CAT, "model": "open_clip-vit-b-32"}).json()
    assert told["classes"] == [] and "no classifier" in told["why"]
    (name, failed), _ = finished(
        client, "/api/explain", {"image": CAT, "model": "open_clip-vit-b-32", "methods": [{"name": "cdam"}]}
    )
    assert name == "problem" and "no classifier" in failed["detail"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rollout", {"discard": 0.5}),
        ("attention", {"layer": 1, "heads": 1}),
        ("cdam", {}),
        ("gae", {}),
        ("rise", {"masks": 20}),
        ("random", {}),
    ],
)
def test_maps_are_the_librarys(client: TestClient, model: Model, name: str, options: dict[str, Any]) -> None:
    told = made(client, name, target="tiger cat", options=options)
    direct = explain(model, PHOTOS / "cat.jpg", name, target="tiger cat", **options)
    response = client.get(f"/api/maps/{told['id']}")
    assert off(grid(response), direct.map[0]) < 1e-5
    assert "immutable" in response.headers["cache-control"]
    assert told["shape"] == list(direct.map.shape[1:]) and told["signed"] == direct.signed
    assert (told["target"], told["resolved"]) == (("tiger cat", "1") if METHODS[name].targeted else (None, None))
    assert told["options"] == options and told["min"] == pytest.approx(float(direct.map.min()), abs=1e-6)
    assert not METHODS[name].targeted or told["title"].startswith("tiger cat")


def test_the_order_of_events(client: TestClient) -> None:
    asked = [{"name": "rollout"}, {"name": "cdam"}, {"name": "gradcam"}]
    found = finished(client, "/api/explain", {"image": CAT, "methods": asked, "targets": ["top-1", "zebra", "zebra"]})
    named = [(name, data.get("method"), data.get("target")) for name, data in found]
    assert named == [
        ("map", "rollout", None),
        ("map", "cdam", "top-1"),
        ("map", "gradcam", "top-1"),
        ("map", "cdam", "zebra"),
        ("map", "gradcam", "zebra"),
        ("done", None, None),
    ]


def test_a_stream_goes_on_where_it_was_left(client: TestClient) -> None:
    body = {"image": CAT, "methods": [{"name": "rollout"}, {"name": "cdam"}]}
    job = client.post("/api/explain", json=body).json()["job"]
    whole = events(client.get(f"/api/jobs/{job}/events").text)
    rest = events(client.get(f"/api/jobs/{job}/events", headers={"Last-Event-ID": "1"}).text)
    assert [name for name, _ in rest] == ["map", "done"]
    assert [e for e in whole if e[0] != "progress"][-2:] == rest
    assert events(client.get(f"/api/jobs/{job}/events", headers={"Last-Event-ID": "x"}).text)
    for heard in ("3", "99"):  # all of it: nothing to wait for
        assert client.get(f"/api/jobs/{job}/events", headers={"Last-Event-ID": heard}).status_code == 204


def test_the_same_map_is_not_made_twice(client: TestClient) -> None:
    one = made(client, "cdam", target="zebra")
    other = made(client, "cdam", target="6")
    assert other["cached"] and one["id"] == other["id"] and other["target"] == "6"
    assert made(client, "cdam", target="dog")["id"] != one["id"]


def test_one_that_fails_does_not_stop_the_others(client: TestClient) -> None:
    asked = [{"name": "attention_flow"}, {"name": "occlusion"}, {"name": "cass_attention"}]
    body = {"image": CAT, "model": "timm-swin", "methods": asked, "targets": ["0"]}
    found = finished(client, "/api/explain", body)
    assert [name for name, _ in found] == ["problem", "map", "problem", "done"]
    assert (
        found[0][1]["method"] == "attention_flow"
        and "windows" in found[0][1]["detail"]
        and found[0][1]["status"] == 422
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"methods": [{"name": "rolout"}]}, "rollout"),
        ({"methods": [{"name": "rollout", "options": {"discrad": 1}}]}, "no option"),
        ({"methods": [{"name": "rollout", "options": {"discard": 2}}]}, "discard"),
        ({"methods": [{"name": "rise", "options": {"masks": 10**9}}]}, "at most 4000"),
        ({"methods": []}, "methods"),
        ({"methods": [{"name": "cdam"}] * 16, "targets": list(range(8))}, "more than 48"),
        ({"methods": [{"name": "cdam"}], "path": "etc"}, "path"),
    ],
)
def test_what_cannot_be_asked(client: TestClient, body: dict[str, Any], said: str) -> None:
    for route in ("/api/explain", "/api/snippet"):
        if "48" not in said or route == "/api/explain":
            assert said in problem(client.post(route, json={"image": CAT, **body}), 422)


def test_files_of_numbers_and_figures(client: TestClient, model: Model, tmp_path: Path) -> None:
    maps = [made(client, "rollout"), made(client, "cdam"), made(client, "cdam", target="dog")]
    (tmp_path / "x.npz").write_bytes(client.get(f"/api/maps/{maps[1]['id']}.npz").content)
    loaded = Attribution.load(tmp_path / "x.npz")
    assert loaded.method == "cdam" and off(loaded.map, explain(model, PHOTOS / "cat.jpg", "cdam").map) < 1e-5
    drawn = client.post("/api/figure", json={"maps": [m["id"] for m in maps], "cells": True})
    assert Image.open(io.BytesIO(drawn.content)).format == "PNG"
    one = client.post("/api/figure", json={"maps": [maps[0]["id"]]})
    assert Image.open(io.BytesIO(one.content)).width < Image.open(io.BytesIO(drawn.content)).width
    problem(client.post("/api/figure", json={"maps": ["0" * 24]}), 404)
    other = made(client, "rollout", image="sample:rocket")["id"]
    assert "several images" in problem(client.post("/api/figure", json={"maps": [other, maps[0]["id"]]}), 422)


def test_all_maps_in_one_file(client: TestClient, model: Model, tmp_path: Path) -> None:
    """Each opens with its provenance, as in a file of the command line; the same method twice has two names."""
    more = {"options": {"discard": 0.5}}
    maps = [
        made(client, "rollout"),
        made(client, "rollout", **more),
        made(client, "cdam"),
        made(client, "cdam", target="dog"),
    ]
    got = client.post("/api/maps.npz", json={"maps": [m["id"] for m in maps]})
    assert got.status_code == 200 and "maps.npz" in got.headers["content-disposition"]
    (tmp_path / "x.npz").write_bytes(got.content)
    best = maps[2]["resolved"]
    names = ["rollout", "rollout:discard=0.5", f"cdam@{best}", "cdam@3"]
    with np.load(tmp_path / "x.npz") as held:
        assert sorted(held) == sorted([*names, "provenance"])
    for name, options, target in zip(names, ({}, {"discard": 0.5}, {}, {}), (None, None, "top-1", "dog")):
        found = Attribution.load(tmp_path / "x.npz", name)
        direct = explain(model, PHOTOS / "cat.jpg", name.partition("@")[0].partition(":")[0], target=target, **options)
        assert off(found.map, direct.map) < 1e-5 and found.targets == direct.targets
        assert dict(found.options) == dict(direct.options)
    told = json.loads(str(np.load(tmp_path / "x.npz")["provenance"]))["maps"]
    assert all(one["images"] == ["cat.jpg"] for one in told.values())
    paths = [file["path"] for one in told.values() for file in (*one["sources"], *one["weights"]["files"])]
    assert not any("/" in str(path) for path in paths)  # folders of the server are not for visitors
    problem(client.post("/api/maps.npz", json={"maps": ["0" * 24]}), 404)


def test_the_maps_of_the_attention_tab_in_one_file(client: TestClient, model: Model, tmp_path: Path) -> None:
    asked = {"image": CAT, "layer": 1, "head": "0", "token": "5", "discard": 0.5, "heads": "max"}
    got = client.get("/api/attention/maps.npz", params=asked)
    (tmp_path / "a.npz").write_bytes(got.content)
    photo = PHOTOS / "cat.jpg"
    for name, by, options in (
        ("attention:layer=1,heads=0,query=(1, 1)", "attention", {"layer": 1, "heads": 0, "query": (1, 1)}),
        ("rollout:discard=0.5,heads=max,residual=0.5", "rollout", {"discard": 0.5, "heads": "max"}),
        ("attention:layer=2,heads=1", "attention", {"layer": 2, "heads": 1}),
        ("attention:layer=0,heads=mean", "attention", {"layer": 0}),
    ):
        found = Attribution.load(tmp_path / "a.npz", name)
        assert off(found.map, explain(model, photo, by, **options).map) < 1e-5, name
    row = {**asked, "direction": "read_by"}
    (tmp_path / "b.npz").write_bytes(client.get("/api/attention/maps.npz", params=row).content)
    found = Attribution.load(tmp_path / "b.npz", "attended_by:layer=1,head=0,token=5")
    only = ("image", "layer", "head", "token", "direction")
    shown = grid(client.get("/api/attention/row", params={k: v for k, v in row.items() if k in only}))
    assert off(shown, found.map[0]) < 1e-5
    for wrong in ({"token": "999"}, {"layer": 99}, {"head": "99"}, {"model": "timm-swin"}):
        problem(client.get("/api/attention/maps.npz", params={**asked, **wrong}), 422)


def test_the_maps_of_the_inside_tab_in_one_file(client: TestClient, tmp_path: Path) -> None:
    asked = {"image": CAT, "layer": -1, "head": "1", "token": "3"}
    (tmp_path / "a.npz").write_bytes(client.get("/api/inside/maps.npz", params=asked).content)
    shown = grid(client.get("/api/inside/qk", params=asked))
    layers = grid(client.get("/api/inside/layers", params={"image": CAT}))
    found = Attribution.load(tmp_path / "a.npz", f"query_key:layer={len(layers) - 1},head=1,token=3")
    assert found.signed and off(shown, found.map[0]) < 1e-5
    for number, values in enumerate(layers):
        found = Attribution.load(tmp_path / "a.npz", f"attention:layer={number},heads=mean")
        assert off(values, found.map[0]) < 1e-5


def test_the_snippet_gives_the_same_maps(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Engine([(tiny, Source())], FREE)
    visitor = TestClient(create_app(own), base_url=HOME)
    held = (PHOTOS / "rocket.jpg").read_bytes()
    concept = visitor.post("/api/concepts", data={"name": "my rocket"}, files={"files": ("rocket.jpg", held)}).json()
    methods = [
        {"name": "rollout", "options": {"discard": 0.9}},
        {"name": "cdam"},
        {"name": "cdam", "options": {"split": "value"}},
    ]
    body = {"image": CAT, "methods": methods, "targets": ["tabby", f"concept:{concept['id']}"]}
    told = visitor.post("/api/snippet", json=body).json()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rocket.jpg").write_bytes(held)
    space: dict[str, Any] = {}
    exec(told["python"], space)
    found = [data for name, data in finished(visitor, "/api/explain", body) if name == "map"]
    assert len(space["maps"]) == len(found)
    for ours, theirs in zip(space["maps"], found):
        assert (ours.method, ours.target) == (theirs["method"], theirs["resolved"])
        assert off(grid(visitor.get(f"/api/maps/{theirs['id']}")), ours.map[0]) < 1e-5
    for line in told["cli"].splitlines():
        words = shlex.split(line)[1:]
        command = typer.main.get_command(commands)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words)
    own.close()


@pytest.mark.slow
def test_copied_code_makes_the_same_maps_from_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path of the weights, in quotes where the shell needs them: it runs in any folder."""
    folder = tmp_path / "it's my model"
    folder.mkdir()
    weights = load_file(PHOTOS.parent / "vitreous_tiny.safetensors")
    weights["head.bias"][:] += torch.linspace(0, 9, len(weights["head.bias"]))  # others than the packaged ones
    save_file(weights, folder / "mine.safetensors")
    monkeypatch.chdir(folder)
    own = Engine([(vitreous.load(weights="mine.safetensors"), Source(None, "mine.safetensors"))], FREE)
    visitor = TestClient(create_app(own), base_url=HOME)
    body = {"image": CAT, "methods": [{"name": "rollout"}, {"name": "cdam"}], "targets": ["top-1", "tabby"]}
    told = visitor.post("/api/snippet", json=body).json()
    found = [data for name, data in finished(visitor, "/api/explain", body) if name == "map"]
    shown = {f"{m['method']}{'' if m['resolved'] is None else '@' + m['resolved']}": m["id"] for m in found}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    python = told["python"] + "for one in maps:\n    print(one.method, one.target, float(one.map.sum()))\n"
    for words in (
        [sys.executable, "-c", python],
        ["sh", "-c", told["cli"].replace("vitreous ", f"{sys.executable} -m vitreous ", 1)],
    ):
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        if words[0] == sys.executable:
            sums = [float(grid(visitor.get(f"/api/maps/{m['id']}")).sum()) for m in found]
            assert np.allclose(
                sorted(float(line.split()[-1]) for line in ran.stdout.splitlines()), sorted(sums), rtol=1e-3
            )
    with np.load(elsewhere / "vitreous-out" / "cat.npz") as stored:
        assert sorted(stored) == sorted([*shown, "provenance"])
        for name, number in shown.items():
            assert off(grid(visitor.get(f"/api/maps/{number}")), stored[name]) < 1e-4
    own.close()


def test_copied_code_names_files_by_their_full_path(
    client: TestClient, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my weights.pth").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    own = Engine([(model, Source("./folder", "my weights.pth")), (model, Source("vit_x", "~/nowhere.pth"))], FREE)
    alone = TestClient(create_app(own), base_url=HOME)
    body = {"image": CAT, "methods": [{"name": "rollout"}]}
    told = alone.post("/api/snippet", json=body).json()
    weights = str(tmp_path / "my weights.pth")
    assert f"vitreous.load({str(tmp_path / 'folder')!r}, weights={weights!r})" in told["python"]
    line = shlex.split(told["cli"])
    assert line[line.index("--weights") + 1] == weights and line[line.index("--model") + 1] == str(tmp_path / "folder")
    assert line[2] == str(PHOTOS / "cat.jpg")
    other = alone.post("/api/snippet", json={**body, "model": "timm-ViT-2"}).json()
    assert "'vit_x', weights='~/nowhere.pth'" in other["python"], "it is not here, so nothing better is known"
    monkeypatch.setattr(snippet, "WINDOWS", True)
    assert f'--weights "{weights}"' in alone.post("/api/snippet", json=body).json()["cli"]
    shared = TestClient(create_app(own, token="t" * 16), base_url=HOME, headers={"Authorization": f"Bearer {'t' * 16}"})
    told = shared.post("/api/snippet", json=body).json()
    assert (
        str(tmp_path) not in told["python"] + told["cli"]
        and "load('folder', weights='my weights.pth')" in told["python"]
    )
    own.close()


def test_a_snippet_tells_strangers_no_folders(engine: Engine) -> None:
    """Where others reach the server, that is where it has another name or a token."""
    client = TestClient(create_app(engine, hosts=["127.0.0.1", "lab.example.org"]), base_url=HOME)
    number = send(client, noise(1), "my 'photo'.png").json()["id"]
    body = {"image": number, "methods": [{"name": "rollout"}, {"name": "rollout", "options": {"heads": "max"}}]}
    told = client.post("/api/snippet", json=body).json()
    assert "secret" not in told["python"] + told["cli"] and "weights='w.pth'" in told["python"]
    problem(client.post("/api/snippet", json={**body, "targets": ["concept:nobody"]}), 422)
    assert "\"my 'photo'.png\"" in told["python"]
    assert len(told["cli"].splitlines()) == 3, "a check of the image, and two commands"
    compile(told["python"], "snippet", "exec")


# ----------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize(
    "name", ["timm-ViT", "timm-DINOv2-registers", "hand-written", "timm-ViT-unfused", "timm-SigLIP"]
)
def test_attention_rows_and_columns(client: TestClient, engine: Engine, name: str) -> None:
    model = engine.find(name).model
    trace = Trace(model, [PHOTOS / "cat.jpg"])
    trace.whole()
    layout = trace.layout
    a = trace.attention[1].weights[0]  # [H N M]
    patch = layout.prefix + 5

    def ask(**more: Any) -> tuple[np.ndarray, np.ndarray]:
        got = client.get("/api/attention/row", params={"model": name, "image": CAT, "layer": 1, **more})
        count = int(got.headers["x-extra"])
        return grid(got), np.frombuffer(got.content, "<f4")[-count:] if count else np.zeros(0)

    def split(row: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        behind = layout.prefix + layout.patches
        return layout.to_map(row[None])[0].numpy(), torch.cat([row[: layout.prefix], row[behind:]]).numpy()

    rho = trace.readout[0]
    for asked, row in [
        ({"head": 1, "token": 5}, a[1, patch]),
        ({"head": "mean", "token": 5}, a.mean(0)[patch]),
        ({"head": 0, "token": "readout"}, rho @ a[0]),
        ({"head": 1, "token": 5, "direction": "read_by"}, a[1, :, patch]),
        ({"head": "mean", "token": "readout", "direction": "read_by"}, a.mean(0) @ rho),
    ]:
        for ours, theirs in zip(ask(**asked), split(row)):
            assert ours.shape == theirs.shape and np.abs(ours - theirs).max(initial=0) < 1e-6
    told = client.post("/api/attention", json={"model": name, "image": CAT}).json()
    assert (told["layers"], told["heads"], told["tokens"]) == (3, [2, 2, 2], layout.tokens)
    share = trace.read_layer(trace.attention[2])[0].mean(0)
    patches = float(layout.to_map(share[None]).sum())
    assert told["share"][2]["patches"] == pytest.approx(patches, abs=1e-5)
    assert sum(told["share"][0].values()) == pytest.approx(1, abs=1e-5)
    assert (told["share"][2]["registers"] > 0) == (name == "timm-DINOv2-registers")


def test_the_read_out_has_a_name(client: TestClient) -> None:
    def name(model: str) -> str:
        return str(client.post("/api/attention", json={"model": model, "image": CAT}).json()["readout"])

    assert name("timm-ViT") == "CLS" and name("hand-written") == "CLS"
    assert name("timm-SigLIP") == "an attention pool" and name("flat-heads") == "the mean of the patches"


def test_thumbnails(client: TestClient, model: Model) -> None:
    got = client.get("/api/attention/thumbs", params={"image": CAT})
    assert got.headers["x-shape"] == "6,4,4"
    top, cells = np.frombuffer(got.content[:24], "<f4"), np.frombuffer(got.content[24:], np.uint8).reshape(6, 4, 4)
    trace = Trace(model, [PHOTOS / "cat.jpg"])
    rows = torch.cat([trace.read_layer(layer)[0] for layer in trace.attention])
    maps = trace.map(rows).numpy()
    assert off(top, maps.max((1, 2))) < 1e-6
    assert np.abs(cells / 255 * top[:, None, None] - maps).max() <= top.max() / 255


def test_live_rollout(client: TestClient, model: Model) -> None:
    options = {"discard": 0.7, "heads": "max", "residual": 0.3, "start_layer": 1}
    got = client.post("/api/rollout", json={"image": CAT, **options})
    assert off(grid(got), explain(model, PHOTOS / "cat.jpg", "rollout", **options).map[0]) < 1e-5


def test_attention_that_cannot_be_followed(client: TestClient) -> None:
    for got in (
        client.post("/api/attention", json={"image": CAT, "model": "timm-swin"}),
        client.get("/api/attention/thumbs", params={"image": CAT, "model": "timm-swin"}),
        client.post("/api/rollout", json={"image": CAT, "model": "timm-swin"}),
        client.get("/api/inside/layers", params={"image": CAT, "model": "timm-swin"}),
    ):
        assert "attends in 7×7 windows" in problem(got, 422)


@pytest.mark.parametrize(
    "asked", [{"layer": 3}, {"layer": -4}, {"head": "2"}, {"token": "16"}, {"head": "x"}, {"token": "-1"}]
)
def test_rows_that_are_not_there(client: TestClient, asked: dict[str, Any]) -> None:
    problem(client.get("/api/attention/row", params={"image": CAT, **asked}), 422)


# ------------------------------------------------------------------------------------------------------------ concepts


def test_concepts(client: TestClient, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a file was looked for")

    monkeypatch.setattr(Concept, "find", refuse)
    monkeypatch.setattr(Concept, "load", refuse)
    files = [("files", (f"{name}.jpg", (PHOTOS / f"{name}.jpg").read_bytes())) for name in ("rocket", "coffee")]
    got = client.post("/api/concepts", data={"name": "my things", "similarity": "cosine"}, files=files)
    assert got.status_code == 201 and got.json()["examples"] == ["rocket.jpg", "coffee.jpg"]
    direct = Concept.from_images(model, [PHOTOS / "rocket.jpg", PHOTOS / "coffee.jpg"], "cosine")
    expected = explain(model, PHOTOS / "cat.jpg", "cdam", target=direct).map[0]
    for target in ("concept:my things", f"concept:{got.json()['id']}", "Concept: my things"):
        told = made(client, "cdam", target=target)
        assert told["title"] == "concept:my things"
        assert off(grid(client.get(f"/api/maps/{told['id']}")), expected) < 1e-5
    contrast = made(client, "cdam", target="zebra - concept:my things")
    assert contrast["title"].endswith("rather than concept:my things")
    assert got.json() in client.get("/api/concepts").json()
    assert client.delete(f"/api/concepts/{got.json()['id']}").status_code == 204
    problem(client.delete(f"/api/concepts/{got.json()['id']}"), 404)


@pytest.mark.parametrize(
    "target",
    [
        "concept:/etc/passwd",
        "concept:../x.safetensors",
        "CONCEPT:nobody",
        "1;concept:nobody",
        "concept:a - concept:b - text:c",
        "zebra - concept:nobody",
        "neuron:1 - concept:nobody - neuron:2",
        "x concept:nobody",
    ],
)
def test_targets_reach_no_file(client: TestClient, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", lambda _: pytest.fail("a file was looked for"))
    monkeypatch.setattr(Concept, "find", lambda *_: pytest.fail("a file was looked for"))
    problem(client.post("/api/explain", json={"image": CAT, "methods": [{"name": "cdam"}], "targets": [target]}), 422)


@pytest.mark.parametrize("target", ["x" * 400, "text:a dog", "text:", "concept:", "top-99", "neuron:x"])
def test_targets_that_do_not_exist(client: TestClient, target: str) -> None:
    body = {"image": CAT, "methods": [{"name": "cdam"}], "targets": ["top-1", target]}
    for route in ("/api/explain", "/api/snippet"):
        problem(client.post(route, json=body), 422)
    problem(client.get("/api/target", params={"image": CAT, "q": target}), 422)


def test_an_unknown_label_is_refused_before_a_job_begins(client: TestClient, engine: Engine) -> None:
    """It never becomes a target, and the refusal names what is meant perhaps."""
    shown = made(client, "rollout")["id"]
    before = len(engine.jobs.known)
    method = {"methods": [{"name": "cdam"}]}
    for route, body in (
        ("/api/explain", {"image": CAT, **method, "targets": ["top-1", "zebrra"]}),
        ("/api/snippet", {"image": CAT, **method, "targets": ["zebrra"]}),
        ("/api/inside", {"image": CAT, "target": "zebrra"}),
        ("/api/curves", {"maps": [shown], "target": "zebrra"}),
        ("/api/erase", {"image": CAT, "targets": ["zebrra"]}),
    ):
        said = problem(client.post(route, json=body), 422)
        assert "unknown class 'zebrra'" in said and "zebra" in said.replace("zebrra", ""), route
    said = problem(client.get("/api/target", params={"image": CAT, "q": "zebrra"}), 422)
    assert "zebra" in said.replace("zebrra", "")
    assert len(engine.jobs.known) == before


def test_what_a_target_means(client: TestClient) -> None:
    def ask(words: str) -> dict[str, str]:
        return dict(client.get("/api/target", params={"image": CAT, "q": words}).json())

    assert ask("zebra")["target"] == "6" and ask("zebra")["title"].startswith("zebra ")
    assert ask(" Dog - zebra ")["target"] == "3-6" and "rather than" in ask("dog-zebra")["title"]
    best = client.post("/api/predict", json={"image": CAT}).json()["classes"][0]["index"]
    assert ask("top-1")["target"] == str(best)


def test_a_concept_belongs_to_its_model(client: TestClient) -> None:
    held = {"files": ("a.png", noise(2))}
    number = client.post("/api/concepts", data={"name": "mine"}, files=held).json()["id"]
    body = {"image": CAT, "model": "timm-SigLIP", "methods": [{"name": "cdam"}], "targets": [f"concept:{number}"]}
    assert "was made with timm-ViT" in problem(client.post("/api/explain", json=body), 422)


@pytest.mark.parametrize("data", [{}, {"name": "../x"}, {"name": "a" * 50}, {"name": "x", "similarity": "near"}])
def test_concepts_that_cannot_be(client: TestClient, data: dict[str, str]) -> None:
    problem(client.post("/api/concepts", data=data, files={"files": ("a.png", noise(3))}), 422)


def test_a_concept_needs_examples(client: TestClient) -> None:
    got = client.post("/api/concepts", data={"name": "x"}, files={"files": ("a.png", b"GIF89a")})
    problem(got, 415)
    many = [("files", (f"{i}.png", noise(i, 8))) for i in range(40)]
    problem(client.post("/api/concepts", data={"name": "x"}, files=many), 400)
    boundary = b"--x\r\nContent-Disposition: form-data; name=name\r\n\r\nabc\r\n--x--\r\n"
    head = {"content-type": "multipart/form-data; boundary=x"}
    assert "example" in problem(client.post("/api/concepts", content=boundary, headers=head), 422)


def test_the_number_of_concepts_is_bounded() -> None:
    with small(replace(FREE, concepts=2)) as (visitor, own):
        for name in ("a", "b", "c"):
            visitor.post("/api/concepts", data={"name": name}, files={"files": ("a.png", noise(4))})
        assert [c["name"] for c in visitor.get("/api/concepts").json()] == ["b", "c"]
        with pytest.raises(TargetError):
            find_concept(own, own.find(None), "a")


# -------------------------------------------------------------------------------------------------------- faithfulness


@pytest.mark.parametrize("metric", ["deletion", "insertion", "token_deletion"])
def test_curves(client: TestClient, model: Model, metric: str) -> None:
    maps = [made(client, "cdam", target="zebra"), made(client, "rollout")]
    body = {"maps": [m["id"] for m in maps], "metric": metric, "steps": 4, "target": "zebra", "random": 3}
    *found, (last, _) = finished(client, "/api/curves", body)
    assert last == "done" and [data["map"] for _, data in found] == body["maps"]
    for (_, told), name in zip(found, ("cdam", "rollout")):
        direct = evaluate(model, PHOTOS / "cat.jpg", name, metric, target="zebra", steps=4)
        assert off(told["values"], direct.curve[0]) < 1e-5 and told["at"] == list(direct.at)
        assert told["value"] == pytest.approx(float(direct.value), abs=1e-6) and told["better"] == direct.better
    attribution = explain(model, PHOTOS / "cat.jpg", "cdam", target="zebra").map
    order = found[0][1]["order"]
    assert sorted(order) == list(range(16))
    assert attribution.flatten()[order].diff().max() <= ROUNDING * attribution.abs().max(), "the largest first"
    chance = [
        evaluate(
            model,
            PHOTOS / "cat.jpg",
            explain(model, PHOTOS / "cat.jpg", "random", seed=s).map,
            metric,
            target=6,
            steps=4,
        )
        for s in range(3)
    ]
    curves = torch.cat([one.curve for one in chance])
    band = found[0][1]["random"]
    assert off(band["mean"], curves.mean(0)) < 1e-5 and off(band["low"], curves.amin(0)) < 1e-5
    assert off(band["high"], curves.amax(0)) < 1e-5


def test_curves_that_cannot_be(client: TestClient) -> None:
    maps = [made(client, "occlusion", target="0", model=name)["id"] for name in ("timm-swin", "timm-ViT")]
    body = {"maps": maps[:1], "metric": "token_deletion"}
    (name, told), (last, _) = finished(client, "/api/curves", body)
    assert (name, told["map"], last) == ("problem", maps[0], "done") and "use deletion" in told["detail"]
    assert "several models" in problem(client.post("/api/curves", json={"maps": maps}), 422)
    (_, alone), _ = finished(client, "/api/curves", {"maps": maps[:1], "random": 0, "steps": 2})
    assert alone["random"] is None


def test_metrics_without_curves(client: TestClient) -> None:
    (name, told), _ = finished(client, "/api/curves", {"maps": [made(client, "cdam")["id"]], "metric": "gini"})
    assert name == "curve" and told["values"] is None and 0 <= told["value"] <= 1
    for metric in ("mask_iou", "max_sensitivity", "nothing"):
        problem(client.post("/api/curves", json={"maps": [made(client, "cdam")["id"]], "metric": metric}), 422)


def test_the_eraser_takes_tokens_out(client: TestClient, model: Model) -> None:
    gone = [0, 3, 7, 8]
    got = client.post(
        "/api/erase", json={"image": CAT, "removed": gone, "classes": [6, 1], "targets": ["zebra"]}
    ).json()
    assert got["way"] == "tokens" and got["why"] is None
    trace = Trace(model, [PHOTOS / "cat.jpg"])
    keep = torch.tensor([[0, *(1 + i for i in range(16) if i not in gone)]])
    for index, told in zip((6, 1), got["classes"], strict=True):
        chance = vitreous.Class(index).graded()
        assert told["probability"] == pytest.approx(float(scores_keeping(trace, chance, [0], keep)), abs=1e-6)
    assert got["scores"][0]["score"] == pytest.approx(
        float(scores_keeping(trace, vitreous.Class(6), [0], keep)), abs=1e-5
    )
    assert sum(one["probability"] for one in got["top"]) < 1.0001 and len(got["top"]) == 5
    whole = client.post("/api/erase", json={"image": CAT}).json()["top"]
    plain = client.post("/api/predict", json={"image": CAT}).json()["classes"]
    assert [one["index"] for one in whole] == [one["index"] for one in plain]
    assert off([one["probability"] for one in whole], [one["probability"] for one in plain]) <= ROUNDING


def test_the_eraser_greys_where_tokens_cannot_go(client: TestClient) -> None:
    got = client.post("/api/erase", json={"image": CAT, "model": "timm-swin", "removed": [0, 1]}).json()
    assert got["way"] == "pixels" and "uses its tokens in other ways" in got["why"]


@pytest.mark.parametrize("target", ["like:/etc/passwd", "zebra - like:/etc/passwd", "LIKE:photo.jpg"])
def test_no_target_names_a_file(client: TestClient, target: str) -> None:
    asked = {"image": CAT, "methods": [{"name": "gae"}], "targets": [target]}
    assert "files are not read" in problem(client.post("/api/explain", json=asked), 422)


def test_a_counterfactual_is_that_of_the_library(client: TestClient, model: Model) -> None:
    (kind, told), (last, _) = finished(client, "/api/counterfactual", {"image": CAT, "to": "any", "proof": 0})
    found = vitreous.counterfactual(model, PHOTOS / "cat.jpg", "any", proof=0)
    assert (kind, last) == ("counterfactual", "done")
    assert told["patches"] == list(found.patches) and told["certified"] is found.certified
    assert told["path"]["to"] == pytest.approx(list(found.path.to), abs=1e-5)
    if found.certified:
        got = client.post("/api/erase", json={"image": CAT, "removed": told["patches"]}).json()
        assert got["top"][0]["index"] == told["decision"]["index"]  # what the page shows after each click


def test_a_counterfactual_that_cannot_be_asked_begins_no_job(client: TestClient, model: Model) -> None:
    best = vitreous.Trace(model, [PHOTOS / "cat.jpg"]).output[0].argmax()
    for body, said in (
        ({"to": "zebrra"}, "did you mean"),
        ({"to": int(best)}, "already"),
        ({"to": "like:/etc/passwd"}, "files are not read"),
        ({"model": "open_clip-vit-b-32"}, "no classifier"),
    ):
        assert said in problem(client.post("/api/counterfactual", json={"image": CAT, **body}), 422)


def test_what_cannot_be_erased(client: TestClient) -> None:
    assert "out of range" in problem(client.post("/api/erase", json={"image": CAT, "removed": [16]}), 422)
    assert "at least one" in problem(client.post("/api/erase", json={"image": CAT, "removed": list(range(16))}), 422)
    assert len(client.post("/api/erase", json={"image": CAT, "removed": list(range(15))}).json()["top"]) == 5


# -------------------------------------------------------------------------------------------------------------- inside


def test_inside(client: TestClient, model: Model) -> None:
    (name, told), _ = finished(client, "/api/inside", {"image": CAT, "target": "zebra", "samples": 4})
    direct = vitreous.cass(model, PHOTOS / "cat.jpg", target="zebra", samples=4)[0]
    assert name == "inside" and off(told["scores"], direct) < 1e-4
    trace = Trace(model, [PHOTOS / "cat.jpg"])
    strip = grid(client.get("/api/inside/layers", params={"image": CAT}))
    assert off(strip, torch.cat([trace.map(trace.read_layer(layer).mean(1)) for layer in trace.attention])) < 1e-6
    layer = trace.attention[2]
    got = client.get("/api/inside/qk", params={"image": CAT, "layer": 2, "head": 1, "token": 4})
    dots = layer.q[0, 1, 5] @ layer.k[0, 1].mT * layer.scale
    assert off(grid(got), dots[1:].view(4, 4)) < 1e-5
    assert len(got.content) == 16 * 4 + 2 * 16 * 3
    colours = np.frombuffer(got.content[64:], np.uint8).reshape(2, 16, 3)
    assert colours.max() == 255 and colours.min() == 0 and not np.array_equal(colours[0], colours[1])


def test_queries_that_are_not_seen(client: TestClient) -> None:
    """Attention that is written out shows them; an einsum, whose axes may be anything, does not."""
    assert grid(client.get("/api/inside/qk", params={"image": CAT, "model": "timm-ViT-unfused"})).shape == (4, 4)
    got = client.get("/api/inside/qk", params={"image": CAT, "model": "hand-written"})
    assert "without visible queries and keys" in problem(got, 422)


# ------------------------------------------------------------------------------------------------------------ features


def shares_and_colours(response: httpx.Response) -> tuple[np.ndarray, np.ndarray]:
    h, w = map(int, response.headers["X-Shape"].split(","))
    colours = np.frombuffer(response.content[12:], np.uint8).reshape(h, w, 3)
    return np.frombuffer(response.content[:12], "<f4"), colours


def test_features_are_those_of_the_library(client: TestClient, model: Model, tmp_path: Path) -> None:
    photos = sorted(PHOTOS.glob("*.jpg"))
    for among, images in (("image", [PHOTOS / "cat.jpg"]), ("samples", photos)):
        seen = vitreous.inspect.features(model, images, layers=[1])
        asked = {"image": CAT, "layer": 1, "among": among}
        shares, colours = shares_and_colours(client.get("/api/features", params=asked))
        assert off(shares, seen.basis.layers[1].whole.share) < 1e-4
        index = [file.name for file in images].index("cat.jpg")
        assert np.abs(colours - 255 * seen.colours(1, index)).max() < 1
    similar = vitreous.inspect.similarity(model, PHOTOS / "cat.jpg", patch=(1, 2), layers=[1])
    got = client.get("/api/features/similarity", params={"image": CAT, "layer": 1, "patch": 6})
    assert off(grid(got), similar.maps[1][0]) < 1e-4
    file = tmp_path / "features.npz"
    file.write_bytes(client.get("/api/features/maps.npz", params={"image": CAT, "layer": 1, "patch": 6}).content)
    held = vitreous.Attribution.load(file, "similarity:layer=1,patch=6")
    assert held.signed and off(held.map[0], similar.maps[1][0]) < 1e-4


def test_features_of_merged_patches_have_their_own_grid(client: TestClient) -> None:
    asked = {"image": CAT, "model": "timm-swin", "layer": -1}
    assert shares_and_colours(client.get("/api/features", params=asked))[1].shape == (7, 7, 3)
    got = client.get("/api/features/similarity", params={**asked, "patch": 3 * 14 + 13})
    assert grid(got).shape == (7, 7) and grid(got)[1, 6] == pytest.approx(1, abs=1e-5)


def test_features_that_are_not_there(client: TestClient) -> None:
    asked = {"image": CAT, "layer": 3}
    assert "layer 3 is out of range" in problem(client.get("/api/features", params=asked), 422)
    got = client.get("/api/features/similarity", params={"image": CAT, "patch": 16})
    assert "patch 16 is out of range: there are patches 0 to 15" in problem(got, 422)
    assert problem(client.get("/api/features", params={"image": "0" * 32}), 404)


# ------------------------------------------------------------------------------------------------- who may ask for what


def test_every_answer_carries_the_headers(client: TestClient) -> None:
    for path in ("/", "/api/info", "/nothing", "/api/maps/" + "0" * 24):
        got = client.get(path)
        for name, value in HEADERS.items():
            assert got.headers[name] == value
        assert "unsafe" not in got.headers["content-security-policy"] and "server" not in got.headers


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example", "[::2]", "[", "x:y:z"]
)
def test_other_hosts_are_refused(client: TestClient, host: str) -> None:
    problem(client.get("/api/info", headers={"Host": host}), 421)
    problem(client.get("/", headers={"Host": host}), 421)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "LOCALHOST", "[::1]:8000"])
def test_own_names_are_known(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 200


def test_other_sites_are_refused(client: TestClient) -> None:
    body = {"image": CAT}
    for headers in (
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
    ):
        problem(client.post("/api/predict", json=body, headers=headers), 403)
    for origin in ("null", "http://[", ""):
        problem(client.post("/api/predict", json=body, headers={"Origin": origin}), 403)
    problem(client.post("/api/predict", json=body, headers={"Origin": "http://127.0.0.1:9999"}), 403)
    problem(client.get("/api/info", headers={"Sec-Fetch-Site": "cross-site"}), 403)
    for headers in ({"Sec-Fetch-Site": "same-origin", "Origin": HOME}, {"Origin": HOME}, {}):
        assert client.post("/api/predict", json=body, headers=headers).status_code == 200


def test_the_token(engine: Engine) -> None:
    token = "a-long-and-secret-token"
    visitor = TestClient(create_app(engine, token=token), base_url=HOME, follow_redirects=False)
    for got in (
        visitor.get("/"),
        visitor.get("/api/info"),
        visitor.get("/api/info", headers={"Authorization": "Bearer wrong"}),
        visitor.get("/api/info", headers={"Authorization": f"Basic {token}"}),
        visitor.get("/api/info", headers={"Cookie": f"vitreous={token}"}),
        visitor.get("/api/info", headers={"Cookie": 'vitreous="\\";'}),
        visitor.get("/?token=wrong"),
        visitor.get("/?token=%C3%A9"),
    ):
        assert "token" in problem(got, 401) and got.headers["www-authenticate"] == "Bearer"
        assert token not in got.text
    assert visitor.get("/api/info", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    entered = visitor.get(f"/?token={token}&tab=inside")
    cookie = entered.headers["set-cookie"]
    assert entered.status_code == 303 and entered.headers["location"] == "/?tab=inside"
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and token not in cookie
    assert visitor.get("/api/info").status_code == 200  # the cookie
    away = visitor.get(f"{HOME}//evil.example/?token={token}")
    assert away.headers["location"] == "/evil.example/"


def test_too_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("vitreous.web.guard.time", clock)
    with small(Limits(rate=5.0, burst=10)) as (visitor, _):
        found = [visitor.get("/api/labels") for _ in range(15)]
        assert [got.status_code for got in found[:10]] == [200] * 10
        assert "slow down" in problem(found[-1], 429) and int(found[-1].headers["retry-after"]) >= 1
        now[0] += 0.5
        found = [visitor.get("/api/labels") for _ in range(3)]
        assert [got.status_code for got in found] == [200, 200, 429], "five a second"


def test_rates_of_many_clients_are_bounded() -> None:
    from vitreous.web.guard import Rates

    rates = Rates(Limits(burst=1, rate=1.0, clients=3))
    assert [rates.take(c) > 0 for c in ("a", "a", "b", "c", "d", "a")] == [False, True, False, False, False, False]
    assert len(rates.buckets) == 3


def test_bodies_are_bounded() -> None:
    with small(replace(FREE, upload_bytes=20_000, json_bytes=500, concept_bytes=20_000)) as (visitor, _):
        assert send(visitor, noise(1, 32)).status_code == 201
        problem(send(visitor, noise(1, 128)), 413)
        problem(visitor.post("/api/predict", content=b"x" * 1000), 413)

        def endless() -> Iterator[bytes]:  # no Content-Length
            for _ in range(1000):
                yield b"--x\r\n" + b"y" * 1000

        head = {"content-type": "multipart/form-data; boundary=x"}
        with suppressed():
            problem(visitor.post("/api/images", content=endless(), headers=head), 413)
        with suppressed():
            problem(visitor.post("/api/predict", content=endless(), headers={"content-type": "application/json"}), 413)
        assert visitor.get("/api/labels").status_code == 200


@contextmanager
def suppressed() -> Iterator[None]:
    """A server may close before the client has sent everything."""
    with suppress(httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        yield


def test_a_slow_body_is_given_up() -> None:
    with small(replace(FREE, seconds=0.5)) as (visitor, _):
        address = visitor.base_url.host, visitor.base_url.port
        head = b"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
        with socket.create_connection(address) as line:
            line.sendall(head)
            line.settimeout(PATIENCE)
            assert line.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("held", "status"),
    [
        (b"", 415),
        (b"hello", 415),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n", 415),
        (b"%PDF-1.4", 415),
        (b"P6 100 100 255\n" + b"x" * 30000, 415),  # a format that is not on the list
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, 415),
    ],
)
def test_only_pictures(client: TestClient, held: bytes, status: int) -> None:
    problem(send(client, held), status)


def test_kinds_that_are_taken(client: TestClient) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        assert send(client, encoded(image, kind), f"x.{kind}").status_code == 201
    frames = io.BytesIO()
    image.save(frames, "GIF", save_all=True, append_images=[image.rotate(90), image.rotate(45)])
    assert "frames" in send(client, frames.getvalue()).json()["note"]


def test_pixels_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb, dot = encoded(Image.new("1", (9000, 9000))), encoded(Image.new("L", (2, 2)))
    assert len(bomb) < 20_000
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("it was decoded"))
    monkeypatch.setattr(pictures, "upright", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(Problem, match="megapixels"):
        open_picture(Part("bomb.png", bomb), Limits())
    with pytest.raises(Problem, match="too few"):
        open_picture(Part("dot.png", dot), Limits())


def test_names_of_files() -> None:
    assert clean("/etc/passwd") == "passwd" and clean("C:\\x\\y.jpg") == "y.jpg" and clean("") == "picture"
    assert clean("a\r\nb\0.png") == "ab.png" and len(clean("x" * 500)) == 100


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"--x",
        b"--x\r\n\r\n\r\n--x--",
        b"--y\r\n",
        b"--x\r\nContent-Disposition: form-data\r\n\r\nz\r\n--x--\r\n",
        b"\xff" * 99,
    ],
)
def test_broken_forms(client: TestClient, content: bytes) -> None:
    for head in (
        "multipart/form-data; boundary=x",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "text/plain",
    ):
        for path in ("/api/images", "/api/concepts"):
            got = client.post(path, content=content, headers={"content-type": head})
            assert problem(got, got.status_code) and got.status_code in (400, 415, 422)


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/app.py",
        "/..%2fapp.py",
        "/static/index.html",
        "/app.py",
        "//etc/passwd",
        "/index.html/",
        "/%00",
    ],
)
def test_no_path_reaches_the_file_system(client: TestClient, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a file was opened"))
    monkeypatch.setattr(io, "open", lambda *_, **__: pytest.fail("a file was opened"))
    problem(client.get(path), 404)


def test_the_page_itself(client: TestClient) -> None:
    got = client.get("/")
    assert got.status_code == 200 and got.headers["content-type"].startswith("text/html")
    assert client.get("/", headers={"If-None-Match": got.headers["etag"]}).status_code == 304
    assert client.head("/").status_code == 200


def test_things_that_are_gone(client: TestClient) -> None:
    nobody = "0" * 24
    for got in (
        client.get(f"/api/maps/{nobody}"),
        client.get(f"/api/maps/{nobody}.npz"),
        client.get(f"/api/jobs/{nobody}/events"),
        client.delete(f"/api/jobs/{nobody}"),
        client.get("/api/images/sample:nobody/view"),
        client.get(f"/api/images/{'0' * 32}/view"),
        client.post("/api/predict", json={"image": "0" * 32}),
        client.post("/api/explain", json={"image": "0" * 32, "methods": [{"name": "rollout"}]}),
        client.post("/api/predict", json={"image": CAT, "model": "/etc/passwd"[1:4]}),
        client.get("/api/nothing"),
    ):
        problem(got, 404)
    problem(client.put("/api/info"), 405)


def test_our_own_mistakes_are_a_plain_500(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("vitreous.web.info.search", fail)
    got = TestClient(create_app(engine), base_url=HOME, raise_server_exceptions=False).get("/api/labels")
    assert "secret" not in problem(got, 500) and "ZeroDivisionError" in caplog.text
    monkeypatch.setattr("vitreous.web.explain.attribute", fail)
    monkeypatch.setattr(engine, "maps", Store(10**6))
    visitor = TestClient(create_app(engine), base_url=HOME)
    found = finished(visitor, "/api/explain", {"image": CAT, "methods": [{"name": "rollout"}]})
    assert [name for name, _ in found] == ["problem", "done"] and "secret" not in str(found)


# --------------------------------------------------------------------------------------------------- queues and stores


def slow() -> dict[str, Any]:
    return {"image": CAT, "methods": [{"name": "dawdle"}, {"name": "rollout"}]}


def listen(visitor: httpx.Client, job: str, enough: Any) -> list[tuple[str, dict[str, Any]]]:
    """Events until one is enough."""
    found: list[tuple[str, dict[str, Any]]] = []
    with visitor.stream("GET", f"/api/jobs/{job}/events") as response:
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.append((name, json.loads(line[6:])))
                if enough(*found[-1]):
                    return found
    return found


def test_cancel_ends_within_a_step(dawdle: str) -> None:
    with small(FREE) as (visitor, own):
        job = visitor.post("/api/explain", json=slow()).json()["job"]
        found = listen(visitor, job, lambda name, data: name == "progress" and data["done"] > 3)
        told = found[-1][1]
        assert (told["what"], told["total"], told["step"], told["steps"]) == ("dawdling", LONG, 1, 2)
        assert told["seconds_left"] > 0.009 * (LONG - told["done"]), "no step takes less than 10 ms"
        assert visitor.delete(f"/api/jobs/{job}").status_code == 204
        taken = len(DAWDLED)
        assert events(visitor.get(f"/api/jobs/{job}/events").text)[-1][0] == "cancelled"
        assert own.jobs.find(job).ended
        assert len(DAWDLED) <= taken + 1
        assert made(visitor, "rollout")["shape"] == [4, 4]  # the model is free again
        assert visitor.delete(f"/api/jobs/{job}").status_code == 204


def test_jobs_wait_their_turn_and_questions_pass(dawdle: str) -> None:
    with small(replace(FREE, queue=2, own_jobs=100)) as (visitor, own):
        jobs = [visitor.post("/api/explain", json=slow()).json()["job"]]
        listen(visitor, jobs[0], lambda name, data: data.get("done", 0) > 0)  # it runs
        jobs += [visitor.post("/api/explain", json=slow()).json()["job"] for _ in range(2)]
        full = visitor.post("/api/explain", json=slow())
        assert "try again" in problem(full, 503) and int(full.headers["retry-after"]) >= 1
        (told,) = listen(visitor, jobs[2], lambda *_: True)
        assert told == ("queued", {"place": 2, "seconds_left": None}), "nobody knows how long the second takes"
        assert visitor.post("/api/predict", json={"image": "sample:rocket"}).status_code == 200
        assert visitor.post("/api/erase", json={"image": CAT, "removed": [1]}).status_code == 200
        assert not own.jobs.find(jobs[0]).ended, "they did not wait for it"
        visitor.delete(f"/api/jobs/{jobs[1]}")
        assert listen(visitor, jobs[1], lambda *_: False) == [("cancelled", {})]  # though it had not begun
        ((name, told),) = listen(visitor, jobs[2], lambda *_: True)
        assert name == "queued" and told["place"] == 1
        assert told["seconds_left"] > 0.005 * LONG, "as the first says of itself"
        visitor.delete(f"/api/jobs/{jobs[0]}")
        assert listen(visitor, jobs[2], lambda name, _: name == "progress")[-1][0] == "progress"
        visitor.delete(f"/api/jobs/{jobs[2]}")


def test_one_client_does_not_take_the_whole_queue(dawdle: str) -> None:
    with small(replace(FREE, own_jobs=2)) as (visitor, _):
        jobs = [visitor.post("/api/explain", json=slow()).json()["job"] for _ in range(2)]
        assert "not done yet" in problem(visitor.post("/api/explain", json=slow()), 429)
        for job in jobs:
            visitor.delete(f"/api/jobs/{job}")
        assert made(visitor, "rollout")


def test_a_job_that_nobody_hears_ends(dawdle: str) -> None:
    with small(replace(FREE, patience=0.3)) as (visitor, own):
        job = own.jobs.find(visitor.post("/api/explain", json=slow()).json()["job"])
        until(lambda: job.ended, "the end of the job")
        assert job.events[-1][0] == "cancelled"


def test_a_job_whose_page_is_gone_makes_room_for_the_next(dawdle: str) -> None:
    """A closed tab, a lost connection: the job ends a moment later, and so does one that waits behind it."""
    limits = replace(FREE, grace=0.3, own_jobs=2)
    with small(limits) as (visitor, own):
        jobs = [visitor.post("/api/explain", json=slow()).json()["job"] for _ in range(2)]
        listen(visitor, jobs[0], lambda name, data: name == "progress" and data["done"] > 0)  # … and the line is cut
        listen(visitor, jobs[1], lambda name, _: name == "queued")
        left = time.monotonic()
        until(lambda: own.jobs.find(jobs[0]).ended, "the end of the job that ran")
        assert own.jobs.find(jobs[0]).events[-1][0] == "cancelled"
        until(lambda: own.jobs.find(jobs[1]).ended, "the end of the job that waited")
        assert own.jobs.find(jobs[1]).events[-1][0] == "cancelled"
        assert made(visitor, "rollout")["shape"] == [4, 4]
        assert time.monotonic() - left < PATIENCE / 2


def test_a_job_that_was_left_while_it_waited_is_not_counted(dawdle: str) -> None:
    with small(replace(FREE, grace=0.1, own_jobs=2)) as (visitor, own):
        first, second = (visitor.post("/api/explain", json=slow()).json()["job"] for _ in range(2))
        with visitor.stream("GET", f"/api/jobs/{first}/events"):  # somebody listens to the first
            listen(visitor, second, lambda name, _: name == "queued")
            until(lambda: own.jobs.find(second).abandoned, "the second to be given up")
            third = visitor.post("/api/explain", json=slow())
            assert third.status_code == 202, third.text
            assert own.jobs.find(second).events[-1][0] == "cancelled" and not own.jobs.find(first).ended
        visitor.delete(f"/api/jobs/{third.json()['job']}")


def test_a_listener_who_comes_back_in_time_keeps_the_job(dawdle: str) -> None:
    """Browsers ask again for a stream that broke off: soon, for they are told when."""
    with small(FREE) as (visitor, own):
        job = visitor.post("/api/explain", json=slow()).json()["job"]
        for _ in range(4):
            listen(visitor, job, lambda name, data: name == "progress" and data["done"] > 0)
            time.sleep(0.1)
        with visitor.stream("GET", f"/api/jobs/{job}/events") as stream:
            assert next(stream.iter_lines()) == "retry: 300"
        assert not own.jobs.find(job).ended
        visitor.delete(f"/api/jobs/{job}")


def test_a_job_that_takes_too_long_ends(dawdle: str) -> None:
    with small(replace(FREE, job_seconds=0.3)) as (visitor, _):
        found = finished(visitor, "/api/explain", slow())
        assert found[0][0] == "problem" and "more than 0 seconds" in found[0][1]["detail"]


def test_questions_that_take_too_long() -> None:
    answered = threading.Event()
    with small(replace(FREE, seconds=1.0)) as (visitor, own):
        own.find(None).quick.submit(answered.wait)
        got = visitor.post("/api/predict", json={"image": "sample:coffee"})
        answered.set()
        assert "no answer within" in problem(got, 503) and got.headers["retry-after"]


def test_a_lane_survives_whatever_it_does() -> None:
    lane = Lane("a lane", 2, "full")

    def fail() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        lane.submit(fail).result(PATIENCE)
    assert lane.submit(lambda: 5).result(PATIENCE) == 5
    lane.give_way(1.0)
    lane.close()
    with pytest.raises(Problem, match="full"):
        lane.submit(lambda: 6)


def test_a_store_lets_go_of_the_oldest() -> None:
    store: Store[str, int] = Store(10)
    for name, size in (("a", 4), ("b", 4)):
        store.put(name, size, size)
    assert store.get("a") == 4
    store.put("c", 4, 4)  # b has not been used since
    assert store.get("b") is None and store.used == 8 and len(store) == 2
    store.put("huge", 11, 11)
    assert "huge" not in store and store.used == 8
    store.put("a", 1, 1)
    assert store.used == 5 and store.drop("a") and not store.drop("a") and store.values() == [4]


def test_traces_are_kept_under_the_limit(model: Model) -> None:
    from vitreous.web.footprint import footprint

    one = footprint(Trace(model, [PHOTOS / "cat.jpg"]))
    assert one > 3 * 17 * 32 * 4 * 4  # at least q, k, v and o of every layer
    with small(replace(FREE, traces_bytes=2 * one + 10, images_bytes=10**7)) as (visitor, own):
        before = grid(visitor.get("/api/attention/row", params={"image": CAT}))
        for name in ("rocket", "coffee"):
            visitor.post("/api/predict", json={"image": f"sample:{name}"})
        assert len(own.traces) == 2 and own.traces.used <= own.traces.limit
        assert ("timm-ViT", CAT) not in own.traces
        assert off(grid(visitor.get("/api/attention/row", params={"image": CAT})), before) <= ROUNDING
        for seed in range(30):
            send(visitor, noise(seed, 256))
        assert own.images.used <= 10**7


def test_a_trace_too_large_to_keep_still_answers() -> None:
    with small(replace(FREE, traces_bytes=1)) as (visitor, own):
        assert grid(visitor.get("/api/attention/row", params={"image": CAT})).shape == (4, 4)
        assert len(own.traces) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gae", *rare("cdam", "gradient", "attn_lrp")])
def test_gradients_are_not_kept(client: TestClient, engine: Engine, name: str) -> None:
    """The trace stays for other questions, the graph behind its gradients goes with the job."""
    served = engine.find("timm-ViT")

    def graphs() -> int:
        served.jobs.submit(lambda: None).result(PATIENCE)  # the thread has let go of what came before
        gc.collect()
        return sum(t.grad_fn is not None for t in gc.get_objects() if issubclass(type(t), torch.Tensor))

    before = graphs()
    made(client, name, target="lynx")
    assert ("timm-ViT", CAT) in engine.traces and graphs() == before


def test_the_server_holds_to_the_memory_limit(model: Model) -> None:
    with vitreous.limit_memory("100MB"):
        own = Engine([(model, Source())], FREE)
    assert own.traces.limit == 25_000_000
    from vitreous._support.memory import budget

    assert own.find(None).quick.submit(lambda: budget(torch.device("cpu"))).result(PATIENCE) == 10**8
    own.close()


def test_a_client_that_hears_the_end_may_start_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of its jobs, too: at the moment the last event is sent, the job counts no more."""
    from vitreous.web.jobs import Job

    job, heard = Job("a client", FREE), []
    monkeypatch.setattr(job, "wake", lambda: heard.append((job.events[-1][0], job.ended)))
    job.tell("map", {})
    job.end("done", {})
    assert heard == [("map", False), ("done", True)]


def test_two_clients_at_once(model: Model) -> None:
    photos = ["cat", "rocket"]
    expected = {name: explain(model, PHOTOS / f"{name}.jpg", "cdam", target="dog").map[0] for name in photos}
    with serving(Engine([(model, Source())], FREE)) as home:

        def visit(name: str) -> float:
            with httpx.Client(base_url=home, timeout=PATIENCE) as visitor:
                worst = 0.0
                for _ in range(3):
                    told = made(visitor, "cdam", image=f"sample:{name}", target="dog")
                    worst = max(worst, off(grid(visitor.get(f"/api/maps/{told['id']}")), expected[name]))
                    visitor.get("/api/attention/row", params={"image": f"sample:{name}", "token": 3})
                return worst

        with ThreadPoolExecutor(4) as pool:
            assert max(pool.map(visit, photos * 2)) < 1e-5


# ----------------------------------------------------------------------------------------------------------- strangers


def end(own: Engine) -> None:
    """Every job of a server ends, and none through a mistake of ours."""
    for job in own.jobs.known.values():
        until(lambda job=job: job.ended, "the end of the job")
        assert not [data for _, data in job.events if data.get("status") == 500], job.events
    own.close()
    assert own.ended(PATIENCE)


def drawn(told: dict[str, Any], chance: random.Random) -> Any:
    """Some value that an option's schema may or may not allow."""
    told = chance.choice(told["anyOf"]) if "anyOf" in told else told
    if "enum" in told or "const" in told:
        return chance.choice(told.get("enum") or [told["const"]])
    kind = told.get("type")
    if kind == "integer":
        return chance.choice([-1000, -64, -1, 0, 1, 2, 3, 17, 64, told.get("maximum", 64)])
    if kind == "number":
        return chance.choice([-1.0, 0.0, 1e-12, 1e-3, 0.5, 0.999999, 1.0, 2.0, 1e30])
    if kind == "boolean":
        return chance.choice([True, False])
    if kind == "array":
        return [chance.choice([0, 1, 3, 0.5, 1e9, -1]) for _ in range(chance.choice([0, 1, 2, 3]))]
    return chance.choice(["", "mean", "\0", "1"])


@pytest.mark.slow
def test_any_options() -> None:
    """No value of any option of any method or metric is a mistake of ours."""
    own = Engine([(named("timm ViT"), Source())], replace(FREE, own_jobs=10**6, queue=10**6, jobs_kept=10**6))
    visitor, chance = TestClient(create_app(own), base_url=HOME), random.Random(0)
    for name, declared in METHODS.items():
        shown = declared.schema["options"]
        for _ in range(1 if name == "optimus" else 6 if shown else 1):
            options = {key: drawn(told, chance) for key, told in shown.items() if chance.random() < 0.6}
            options = {
                key: min(value, 40) if key in ("masks", "samples", "steps") else value for key, value in options.items()
            }
            body = {"image": CAT, "methods": [{"name": name, "options": options}]}
            got = visitor.post("/api/explain", json=body)
            assert got.status_code in (202, 422), got.text
    number = made(visitor, "cdam")["id"]
    for name in vitreous.METRICS:
        got = visitor.post("/api/curves", json={"maps": [number], "metric": name, "steps": 3, "random": 1})
        assert got.status_code in (202, 422), got.text
    end(own)


def count_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files the Linux way")
def test_nothing_leaks() -> None:
    with small(replace(FREE, jobs_kept=20)) as (visitor, own):

        def visit(seed: int) -> None:
            number = send(visitor, noise(seed)).json()["id"]
            visitor.get("/api/attention/row", params={"image": number, "token": seed % 16})
            visitor.post("/api/predict", json={"image": "nonsense"})
            made(visitor, "cdam", image=number)

        for seed in range(5):
            visit(seed)
        gc.collect()
        files, threads = count_open(), threading.active_count()
        for seed in range(5, 55):  # 4 to 5 requests each
            visit(seed)
        gc.collect()
        assert count_open() <= files + 2 and threading.active_count() <= threads + 2
        assert len(own.jobs.known) <= 20
        assert not any(job.listeners for job in own.jobs.known.values())


def test_a_crowd() -> None:
    """Some of the requests that benchmarks/web.py sends for a minute."""
    with small(replace(FREE, own_jobs=1000, queue=4)) as (visitor, own):

        def visit(number: int) -> list[int]:
            chance = random.Random(number)
            with httpx.Client(base_url=visitor.base_url, timeout=PATIENCE) as mine:
                return [one_request(mine, chance) for _ in range(12)]

        with ThreadPoolExecutor(16) as pool:
            seen = {status for found in pool.map(visit, range(16)) for status in found}
        assert {200, 201, 202, 415} <= seen and {s for s in seen if s >= 500} <= {503}, seen
        assert own.images.used <= own.images.limit and own.traces.used <= own.traces.limit


def one_request(visitor: httpx.Client, chance: random.Random) -> int:
    what = chance.randrange(6)
    if what == 0:
        return send(visitor, noise(chance.randrange(50))).status_code
    if what == 1:
        return send(visitor, chance.randbytes(500)).status_code
    if what == 2:
        return visitor.post("/api/explain", content=chance.randbytes(50)).status_code
    if what == 3:
        body = {"image": CAT, "methods": [{"name": "random", "options": {"seed": chance.randrange(10**6)}}]}
        return visitor.post("/api/explain", json=body).status_code
    asked = {"image": CAT, "token": chance.randrange(16), "layer": chance.randrange(3), "direction": "read_by"}
    return visitor.get("/api/attention/row", params=asked).status_code


def test_closing_ends_everything(dawdle: str) -> None:
    own = Engine([(named("timm ViT"), Source())], FREE)
    with serving(own) as home:
        job = own.jobs.find(httpx.post(f"{home}/api/explain", json=slow(), timeout=PATIENCE).json()["job"])
    until(lambda: job.ended, "the end of the job")
    assert own.ended(PATIENCE)
    assert len(DAWDLED) < LONG
    assert not own.find(None).quick.open


# ------------------------------------------------------------------------------------------------------------- command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "needs --token"),
        (["--host", "::"], "needs --token"),
        (["--host", "example.org"], "needs --token"),
        (["--host", "0.0.0.0", "--token", "short"], "too easy to guess"),
        (["--weights", "a", "--weights", "b"], "2 --weights for 1 --model"),
        (["--model", "nonsense", "--port", "0"], "unknown model"),
        (["--host", "203.0.113.7", "--token", "x" * 20], "cannot listen"),
    ],
)
def test_what_serve_refuses(run: Any, words: list[str], said: str) -> None:
    assert said in run("serve", *words).error


def test_serve_says_that_a_port_is_taken(run: Any) -> None:
    with listen_on("127.0.0.1", 0) as taken:
        assert "choose another --port" in run("serve", "--port", taken.getsockname()[1]).error


def test_hosts() -> None:
    from vitreous.cli.serve import Place, allowed, bracketed, is_loopback

    assert [is_loopback(h) for h in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]")] == [True] * 5
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example")))
    assert allowed(Place("10.0.0.1", 1, None, ["lab"]))[-2:] == ["10.0.0.1", "lab"]
    assert bracketed("::1") == "[::1]" and bracketed("127.0.0.1") == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.process
def test_serve(tmp_path: Path) -> None:
    """The command itself, until Ctrl-C, in the middle of a job, which it does not wait for."""
    words = [sys.executable, "-m", "vitreous", "serve", "--port", "0", "--memory", "1GB"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "vitreous_tiny" in process.stdout.readline()
        home = process.stdout.readline().split()[0]
        with httpx.Client(base_url=home, timeout=PATIENCE) as visitor:
            assert "CLS" in visitor.get("/api/info").text
            body = {"image": CAT, "methods": [{"name": "rise", "options": {"masks": 4000}}], "targets": list(range(8))}
            job = visitor.post("/api/explain", json=body).json()["job"]
            heard = []
            with suppress(httpx.RemoteProtocolError), visitor.stream("GET", f"/api/jobs/{job}/events") as response:
                for line in response.iter_lines():
                    heard.append(line)
                    if line == "event: progress" and heard.count(line) == 1:
                        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert "event: progress" in heard and "event: done" not in heard
        assert process.stderr.read().strip() == "interrupted"


def test_streams_of_a_job_in_one_loop() -> None:
    from vitreous.web.jobs import Job

    job = Job("me", FREE)

    async def hear() -> list[bytes]:
        job.tell("map", {"a": 1})
        job.tell("done", {})
        return [part async for part in job.stream(0)][1:]  # the first says when to ask again

    assert [part.split(b"\n")[1] for part in asyncio.run(hear())] == [b"event: map", b"event: done"]
