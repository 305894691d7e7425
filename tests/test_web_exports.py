"""Copied code and commands really run, in a folder of their own, and give what the page shows."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the page needs pip install 'vitreous[web]'")

from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import vitreous
from vitreous.cli.main import app as commands
from vitreous.web.app import create_app
from vitreous.web.engine import Engine, Source
from vitreous.web.limits import Limits

HOME = "http://127.0.0.1:8000"
PHOTOS = Path(vitreous.__file__).parent / "assets" / "photos"
FREE = Limits(rate=1e6, burst=10**6)
CAT = "sample:cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of one's own, in a folder whose name needs quotes, beside the image."""
    made = tmp_path_factory.mktemp("it's mine")
    weights = load_file(PHOTOS.parent / "vitreous_tiny.safetensors")
    save_file(weights, made / "mine.safetensors")
    (made / "photo.jpg").write_bytes((PHOTOS / "cat.jpg").read_bytes())
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    weights = str(folder / "mine.safetensors")
    made = Engine([(vitreous.load(weights=weights), Source(None, weights))], FREE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(engine: Engine) -> TestClient:
    return TestClient(create_app(engine), base_url=HOME)


@pytest.fixture(scope="module")
def shared(engine: Engine) -> TestClient:
    return TestClient(create_app(engine, hosts=["127.0.0.1", "lab.example.org"]), base_url=HOME)


def events(client: TestClient, path: str, body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    job = client.post(path, json=body).json()["job"]
    found, event = [], ""
    for line in client.get(f"/api/jobs/{job}/events").text.splitlines():
        if line.startswith("event: "):
            event = line[7:]
        elif line.startswith("data: ") and event == name:
            found.append(json.loads(line[6:]))
    return found


def grid(client: TestClient, path: str, **query: Any) -> np.ndarray:
    got = client.get(path, params={"image": CAT, **query})
    h, w = map(int, got.headers["x-shape"].split(","))
    return np.frombuffer(got.content, "<f4", h * w).reshape(h, w)


def ran(told: dict[str, str]) -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(told["python"], space)
    return space


def shell(told: dict[str, str], where: Path) -> None:
    """Run the copied commands in this fresh folder; those of vitreous without another start of Python."""
    for line in told["cli"].replace(" && \\\n", "\n").splitlines():
        if line.startswith("vitreous "):
            done = CliRunner().invoke(commands, shlex.split(line)[1:])
            assert done.exit_code == 0, done.output
        else:
            ran = subprocess.run(["sh", "-c", line], cwd=where, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_code_of_the_attention_tab(alone: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"layer": 3, "head": "1", "token": "17", "direction": "read_by"}
    rolled = {"discard": 0.5, "heads": "max", "residual": 0.4}
    told = alone.post("/api/snippet/attention", json={"image": CAT, **asked, **rolled}).json()
    space = ran(told)
    assert np.allclose(space["chosen"], grid(alone, "/api/attention/row", **asked), atol=1e-5)
    shown = alone.post("/api/rollout", json={"image": CAT, **rolled})
    assert np.allclose(space["rollout"], np.frombuffer(shown.content, "<f4").reshape(14, 14), atol=1e-5)
    shell(told, tmp_path)
    written = [path.name for path in (tmp_path / "vitreous-out").iterdir()]
    assert any("flow" in name for name in written) and any("heads" in name for name in written)


@pytest.mark.slow
def test_code_of_the_inside_tab(alone: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    body = {"image": CAT, "target": "top-1"}
    (shown,) = events(alone, "/api/inside", body, "inside")
    query = {"layer": 2, "head": "mean", "token": "5"}
    told = alone.post("/api/snippet/inside", json={**body, **query}).json()
    space = ran(told)
    assert np.allclose(space["scores"], np.array(shown["scores"]), atol=1e-5)
    assert np.allclose(space["query_key"], grid(alone, "/api/inside/qk", **query), atol=1e-4)
    shell(told, tmp_path)
    written = [path for path in (tmp_path / "vitreous-out").iterdir() if path.suffix == ".npz"]
    assert any("cass" in path.name for path in written)


@pytest.mark.slow
@pytest.mark.parametrize("among", ["image", "samples"])
def test_code_of_the_features_tab(
    alone: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, among: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = alone.post("/api/snippet/features", json={"image": CAT, "layer": 3, "among": among, "patch": 20}).json()
    space = ran(told)
    similar = grid(alone, "/api/features/similarity", layer=3, patch=20)
    assert np.allclose(space["similar"][0], similar, atol=1e-5)
    got = alone.get("/api/features", params={"image": CAT, "layer": 3, "among": among})
    assert np.allclose(space["shares"], np.frombuffer(got.content, "<f4", 3), atol=1e-5)
    shell(told, tmp_path)


@pytest.mark.slow
def test_code_of_the_faithfulness_tab(alone: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    methods = [{"name": "cdam", "options": {}}, {"name": "rollout", "options": {"discard": 0.5}}]
    maps = events(alone, "/api/explain", {"image": CAT, "methods": methods, "targets": ["top-1"]}, "map")
    asked = {"maps": [one["id"] for one in maps], "metric": "insertion", "target": "top-1", "random": 2}
    shown = events(alone, "/api/curves", asked, "curve")
    removed = [1, 2, 30]
    top = alone.post("/api/predict", json={"image": CAT}).json()["classes"]
    classes = [one["index"] for one in top]
    erased = alone.post("/api/erase", json={"image": CAT, "removed": removed, "classes": classes}).json()
    body = {"image": CAT, "methods": methods, "targets": ["top-1"], "metric": "insertion", "random": 2}
    told = alone.post("/api/snippet/curves", json={**body, "removed": removed, "classes": classes}).json()
    assert "no command" in told["cli"]
    space = ran(told)
    for ours, theirs in zip(space["curves"], shown):
        assert np.allclose(ours.curve[0], theirs["values"], atol=1e-5)
    band = np.mean([one.curve[0].numpy() for one in space["chance"]], axis=0)
    assert np.allclose(band, shown[0]["random"]["mean"], atol=1e-5)
    assert np.allclose([one.probability for one in space["erased"]], [c["probability"] for c in erased["classes"]])


@pytest.mark.slow
def test_code_of_what_would_change_it(alone: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (turned,) = events(alone, "/api/counterfactual", {"image": CAT}, "counterfactual")
    body = {"image": CAT, "methods": [{"name": "rollout"}], "random": 0, "turned": True}
    told = alone.post("/api/snippet/curves", json=body).json()
    assert list(ran(told)["turned"].patches) == turned["patches"]
    assert shlex.split(told["cli"])[:2] == ["vitreous", "counterfactual"]
    shell(told, tmp_path)


@pytest.mark.slow
def test_strangers_get_names_and_hashes_that_are_checked(
    shared: TestClient, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = (folder / "photo.jpg").read_bytes()
    image = shared.post("/api/images", files={"file": ("my photo.jpg", held)}).json()["id"]
    body = {"image": image, "methods": [{"name": "rollout"}], "targets": ["top-1"]}
    told = shared.post("/api/snippet", json=body).json()
    assert str(folder) not in told["python"] + told["cli"]
    weights = hashlib.sha256((folder / "mine.safetensors").read_bytes()).hexdigest()
    assert weights in told["python"] and hashlib.sha256(held).hexdigest() in told["cli"]
    (tmp_path / "my photo.jpg").write_bytes(held)
    (tmp_path / "mine.safetensors").write_bytes((folder / "mine.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)
    (shown,) = events(shared, "/api/explain", body, "map")
    values = np.frombuffer(shared.get(f"/api/maps/{shown['id']}").content, "<f4").reshape(14, 14)
    assert np.allclose(ran(told)["maps"][0].map[0], values, atol=1e-5)
    shell(told, tmp_path)
    assert np.allclose(np.load(tmp_path / "vitreous-out" / "my photo.npz")["rollout"], values, atol=1e-5)
    (tmp_path / "my photo.jpg").write_bytes((PHOTOS / "rocket.jpg").read_bytes())
    with pytest.raises(AssertionError, match="another file"):
        ran(told)
    with pytest.raises(AssertionError):
        shell(told, tmp_path)


def test_the_saved_page_may_load_nothing_and_tells_no_folder(shared: TestClient, folder: Path) -> None:
    html = shared.get("/api/page").text
    assert "default-src 'none'" in html and "unsafe" not in html.split("<title>")[0]
    assert str(folder) not in html and "mine.safetensors: SHA-256" in html
    assert html.count(">null</script>") == 1
