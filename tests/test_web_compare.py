"""Comparing on the server: the library's own figures, classes across models, and models that may be added."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "multipart", "httpx"):
    pytest.importorskip(needed, reason="the tests of the server need pip install 'vitreous[web]' httpx")

import httpx
import numpy as np
import zoo
from machine import PATIENCE
from scipy import stats
from starlette.testclient import TestClient

from vitreous import Attribution, Model, explain
from vitreous.cli.serve import named as allowed_name
from vitreous.errors import OptionError, Unsupported
from vitreous.evaluation.diff import measures
from vitreous.images import pictures
from vitreous.web.app import create_app
from vitreous.web.engine import ASSETS, Allowed, Engine, Source
from vitreous.web.limits import Limits

HOME = "http://127.0.0.1:8000"
FREE = Limits(
    rate=1e6, burst=10**6, seconds=PATIENCE, patience=PATIENCE, grace=PATIENCE, job_seconds=PATIENCE, own_jobs=64
)
LABELS = ["tabby, tabby cat", "tiger cat", "cat bear", "dog", "sea cat", "lynx", "zebra"]
TURNED = [*LABELS[1:], LABELS[0]]  # the same classes with other numbers
CAT, COFFEE = "sample:cat", "sample:coffee"


def named(name: str, title: str, labels: list[str] | None = None) -> Model:
    return Model(zoo.network(name), labels=labels or LABELS, name=title)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    other = [f"{label} of another list" for label in LABELS]
    models = [
        named("timm ViT", "vit"),
        named("timm Swin", "swin"),
        named("timm ViT", "turned", TURNED),
        named("timm ViT", "foreign", other),
        named("timm ViT", "poorer", [*LABELS[:6], "okapi"]),
    ]
    found = Engine([(one, Source("x/y")) for one in models], FREE)
    yield found
    found.close()


@pytest.fixture(scope="module")
def client(engine: Engine) -> TestClient:
    return TestClient(create_app(engine), base_url=HOME)


def ended(client: httpx.Client, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    started = client.post(path, json=body)
    assert started.status_code == 202, started.text
    text = client.get(f"/api/jobs/{started.json()['job']}/events").text
    return [(name, json.loads(data)) for name, data in re.findall(r"event: (\w+)\ndata: (.*)\n", text)]


def made(client: httpx.Client, model: str, image: str, target: str = "282", method: str = "attn_lrp") -> str:
    body = {"model": model, "image": image, "methods": [{"name": method}], "targets": [target]}
    (found,) = [data["id"] for name, data in ended(client, "/api/explain", body) if name == "map"]
    return str(found)


def values(client: httpx.Client, map: str) -> np.ndarray:
    answer = client.get(f"/api/maps/{map}")
    return (
        np.frombuffer(answer.content, "<f4")
        .copy()
        .reshape([int(side) for side in answer.headers["X-Shape"].split(",")])
    )


# ----------------------------------------------------------------------------------------------------------- agreement


def test_agreement_is_that_of_the_library(engine: Engine, client: TestClient) -> None:
    """Both maps made by the library itself, compared by the functions of `vitreous diff`."""
    ids = [made(client, name, CAT, "1") for name in ("vit", "turned")]
    (told,) = client.post("/api/agreement", json={"maps": ids}).json()
    image = pictures.read(ASSETS / "photos" / "cat.jpg").image
    maps = [explain(engine.models[name].model, image, "attn_lrp", target=1).map.numpy() for name in ("vit", "turned")]
    for name in ("correlation", "overlap", "distance"):
        assert told[name] == pytest.approx(float(getattr(measures, name)(*maps)[0]), abs=1e-6)
    assert told["how"] is None and told["why"] is None
    assert "tiger cat" in told["targets"] and "cat bear" in told["targets"]  # class 1 is another class there


def test_agreement_by_its_definitions(client: TestClient) -> None:
    ids = [made(client, "vit", CAT, target) for target in ("1", "2")]
    (told,) = client.post("/api/agreement", json={"maps": ids}).json()
    a, b = (values(client, one).flatten().astype(float) for one in ids)
    assert told["correlation"] == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-6)
    count = max(1, round(0.1 * len(a)))
    tops = [set(np.argsort(-one, kind="stable")[:count].tolist()) for one in (a, b)]
    assert told["overlap"] == pytest.approx(len(tops[0] & tops[1]) / len(tops[0] | tops[1]), abs=1e-6)
    assert told["distance"] == pytest.approx(np.abs(a / abs(a).sum() - b / abs(b).sum()).sum() / 2, abs=1e-6)


@pytest.mark.slow
def test_the_same_map_agrees_wholly(client: TestClient) -> None:
    ids = [made(client, "vit", CAT, "1"), made(client, "poorer", CAT, "1")]  # the same network and class
    assert ids[0] != ids[1]
    (told,) = client.post("/api/agreement", json={"maps": ids}).json()
    assert told["correlation"] == pytest.approx(1, abs=1e-6) and told["overlap"] == 1
    assert told["distance"] == pytest.approx(0, abs=1e-6) and told["targets"] is None
    answer = client.get("/api/difference", params={"one": ids[0], "other": ids[1]})
    assert answer.headers["X-Shape"] == "4,4" and np.abs(np.frombuffer(answer.content, "<f4")).max() < 1e-6


@pytest.mark.slow
def test_only_maps_of_one_image_are_compared(client: TestClient) -> None:
    ids = [made(client, "vit", CAT, "1"), made(client, "vit", COFFEE, "1")]
    assert client.post("/api/agreement", json={"maps": ids}).json() == []
    refused = client.get("/api/difference", params={"one": ids[0], "other": ids[1]})
    assert refused.status_code == 422 and "different images" in refused.json()["detail"]


@pytest.mark.slow
def test_maps_of_different_grids_meet_on_the_coarser_one(client: TestClient) -> None:
    ids = [made(client, "vit", CAT, "1"), made(client, "swin", CAT, "1")]
    fine, coarse = values(client, ids[1]), values(client, ids[0])
    assert fine.shape == (14, 14) and coarse.shape == (4, 4)
    (told,) = client.post("/api/agreement", json={"maps": ids}).json()
    assert told["grid"] == [4, 4] and "means over its cells" in told["how"]
    answer = client.get("/api/difference", params={"one": ids[0], "other": ids[1], "of": "values"})
    found = np.frombuffer(answer.content, "<f4").reshape(4, 4)
    assert found == pytest.approx(coarse - measures.on_grid(fine[None], (4, 4))[0], abs=1e-6)


@pytest.mark.slow
def test_half_the_magnitudes_of_the_difference_are_the_distance(client: TestClient) -> None:
    ids = [made(client, "vit", CAT, "1"), made(client, "swin", CAT, "1")]
    (told,) = client.post("/api/agreement", json={"maps": ids}).json()
    found = np.frombuffer(client.get("/api/difference", params={"one": ids[0], "other": ids[1]}).content, "<f4")
    assert np.abs(found).sum() / 2 == pytest.approx(told["distance"], abs=1e-6)


@pytest.mark.slow
def test_a_map_that_is_not_there(client: TestClient) -> None:
    here = made(client, "vit", CAT, "1")
    assert client.post("/api/agreement", json={"maps": [here, "0" * 24]}).status_code == 404
    assert client.post("/api/agreement", json={"maps": [here]}).status_code == 422
    assert client.post("/api/agreement", json={"maps": [here, "../x"]}).status_code == 422
    assert client.get("/api/difference", params={"one": here, "other": "0" * 24}).status_code == 404


@pytest.mark.slow
def test_too_many_pairs_are_refused(engine: Engine, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "limits", replace(FREE, pairs=2))
    ids = [made(client, "vit", CAT, target) for target in ("1", "2", "3")]
    refused = client.post("/api/agreement", json={"maps": ids})
    assert refused.status_code == 422 and "compare fewer" in refused.json()["detail"]


# ------------------------------------------------------------------------------------------------ targets across models


def match(client: TestClient, target: str, *models: str) -> list[dict[str, Any]]:
    answer = client.post("/api/match", json={"image": CAT, "models": list(models), "target": target})
    assert answer.status_code == 200, answer.text
    return list(answer.json())


def test_classes_are_matched_by_name(client: TestClient) -> None:
    vit, turned = match(client, "tiger cat", "vit", "turned")
    assert (vit["target"], turned["target"]) == ("1", "0")
    assert vit["title"].startswith("tiger cat") and turned["title"].startswith("tiger cat")
    assert [one["target"] for one in match(client, "3-0", "vit", "turned")] == ["3-0", "2-6"]


@pytest.mark.slow
def test_a_class_that_a_model_lacks_is_said(client: TestClient) -> None:
    vit, poorer, foreign = match(client, "zebra", "vit", "poorer", "foreign")
    assert vit["target"] == "6" and vit["why"] is None
    assert poorer["target"] == "6" and poorer["title"].startswith(
        "okapi"
    )  # as `vitreous diff`: all others are the same
    assert foreign["target"] is None and foreign["why"] == "foreign has no class 'zebra'"


@pytest.mark.slow
def test_what_is_no_class_is_passed_on(client: TestClient) -> None:
    assert [one["target"] for one in match(client, "neuron:2", "vit", "turned")] == ["neuron:2", "neuron:2"]


@pytest.mark.slow
def test_unknown_names_are_refused(client: TestClient) -> None:
    body = {"image": CAT, "models": ["vit", "nobody"], "target": "1"}
    assert client.post("/api/match", json=body).status_code == 404
    assert client.post("/api/match", json={**body, "models": ["vit"], "target": "no such class"}).status_code == 422
    assert client.post("/api/match", json={**body, "models": ["vit"], "image": "/etc/passwd"}).status_code == 422
    assert client.post("/api/compare/method", json={"models": ["nobody"]}).status_code == 404


@pytest.mark.slow
def test_the_method_works_on_all_models(engine: Engine, client: TestClient) -> None:
    found = client.post("/api/compare/method", json={"models": ["vit", "swin"]}).json()["method"]
    for name in ("vit", "swin"):
        assert made(client, name, CAT, "1", found)
    alone = client.post("/api/compare/method", json={"models": ["vit"]}).json()["method"]
    assert alone != found
    with pytest.raises(Unsupported):
        explain(engine.models["swin"].model, pictures.read(ASSETS / "photos" / "cat.jpg").image, alone, target=1)


# -------------------------------------------------------------------------------------------------------------- export


@pytest.mark.slow
def test_all_maps_in_one_file(client: TestClient, tmp_path: Path) -> None:
    where = [("vit", CAT), ("swin", CAT), ("vit", COFFEE), ("swin", COFFEE)]
    ids = [made(client, model, image, "1") for model, image in where]
    file = tmp_path / "compare.npz"
    file.write_bytes(client.post("/api/compare/maps.npz", json={"maps": ids}).content)
    held = [name for name in np.load(io.BytesIO(file.read_bytes())).files if "/" in name]
    assert sorted(held) == sorted(f"{image[7:]}.jpg/{model}/attn_lrp@1" for model, image in where)
    for (model, image), map in zip(where, ids):
        found = Attribution.load(file, f"{image[7:]}.jpg/{model}/attn_lrp@1")
        assert found.model == model and np.array_equal(found.map[0].numpy(), values(client, map))


# --------------------------------------------------------------------------------------------------- models added later


def adding(count: list[str], *, most: int = 8) -> Engine:
    def loader(title: str) -> Any:
        def load() -> Model:
            count.append(title)
            return named("timm ViT", "any name")

        return load

    def broken() -> Model:
        raise OptionError("there is no such file of weights")

    allowed = [Allowed(title, Source("x/z"), loader(title)) for title in ("later", "last")]
    allowed.append(Allowed("broken", Source(), broken))
    return Engine([(named("timm ViT", "vit"), Source())], replace(FREE, models=most), allowed=allowed)


@pytest.mark.slow
def test_an_allowed_model_is_added() -> None:
    count = list[str]()
    own = adding(count)
    client = TestClient(create_app(own), base_url=HOME)
    assert client.get("/api/info").json()["allowed"] == ["later", "last", "broken"]
    assert [name for name, _ in ended(client, "/api/models", {"name": "later"})][-1] == "done"
    told = client.get("/api/info").json()
    assert [one["name"] for one in told["models"]] == ["vit", "later"] and told["allowed"] == ["last", "broken"]
    assert made(client, "later", CAT, "1")
    assert [name for name, _ in ended(client, "/api/models", {"name": "later"})][-1] == "done"  # it is there
    assert count == ["later"]
    own.close()
    assert own.ended(PATIENCE)


@pytest.mark.slow
def test_nothing_but_the_list_can_be_named() -> None:
    count = list[str]()
    own = adding(count)
    client = TestClient(create_app(own), base_url=HOME)
    for name in ("vit_base_patch16_224", "/etc/passwd", "x/z", "LATER", "later "):
        refused = client.post("/api/models", json={"name": name})
        assert refused.status_code == 404 and "later, last" in refused.json()["detail"]
    assert client.post("/api/models", json={"name": ""}).status_code == 422
    assert client.post("/api/models", json={"name": "later", "weights": "w.pth"}).status_code == 422
    assert count == [] and list(own.models) == ["vit"]
    own.close()


@pytest.mark.slow
def test_a_server_without_a_list_adds_nothing(client: TestClient) -> None:
    refused = client.post("/api/models", json={"name": "vit_base_patch16_224"})
    assert refused.status_code == 404 and "--allow-model" in refused.json()["detail"]


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_said_in_words() -> None:
    own = adding([])
    client = TestClient(create_app(own), base_url=HOME)
    name, told = ended(client, "/api/models", {"name": "broken"})[-1]
    assert name == "failed" and told["detail"] == "there is no such file of weights"
    assert list(own.models) == ["vit"]
    own.close()


@pytest.mark.slow
def test_a_server_holds_so_many_models() -> None:
    own = adding([], most=2)
    client = TestClient(create_app(own), base_url=HOME)
    assert ended(client, "/api/models", {"name": "later"})[-1][0] == "done"
    refused = client.post("/api/models", json={"name": "last"})
    assert refused.status_code == 422 and "may hold 2" in refused.json()["detail"]
    own.close()


@pytest.mark.slow
def test_many_visitors_add_the_same_models_at_once() -> None:
    count = list[str]()
    own = adding(count)
    client = TestClient(create_app(own), base_url=HOME)

    def visitor(number: int) -> str:
        asked = client.get("/api/info")
        assert asked.status_code == 200
        return ended(client, "/api/models", {"name": ("later", "last")[number % 2]})[-1][0]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(visitor, range(12))) == {"done"}
    assert sorted(count) == ["last", "later"] and set(own.models) == {"vit", "later", "last"}
    assert all(made(client, name, CAT, "1") for name in own.models)
    own.close()
    assert own.ended(PATIENCE)


@pytest.mark.slow
def test_threads_of_an_added_model_outlive_the_job_that_added_it() -> None:
    """The job's cancellation must not reach what runs later on the model."""
    own = adding([])
    client = TestClient(create_app(own), base_url=HOME)
    job = client.post("/api/models", json={"name": "later"}).json()["job"]
    client.get(f"/api/jobs/{job}/events")
    own.jobs.find(job).stopped.set()
    assert made(client, "later", CAT, "1", "occlusion")
    own.close()


def test_names_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.touch()
    assert allowed_name("hf/a/b") == ("hf/a/b", "hf/a/b", None)
    assert allowed_name(f"vit_x={file}") == ("vit_x=w.safetensors", "vit_x", str(file))
    assert allowed_name(str(tmp_path / "mine")) == ("mine", str(tmp_path / "mine"), None)  # visitors learn no folder
    for wrong in ("", "=x", "vit_x=", f"vit_x={tmp_path / 'none'}"):
        with pytest.raises(OptionError, match="--allow-model"):
            allowed_name(wrong)
