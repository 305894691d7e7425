"""Every kind of target over the API: what a model takes is declared, and maps equal those of the library."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "multipart", "httpx"):
    pytest.importorskip(needed, reason="the tests of the server need pip install 'vitreous[web]' httpx")

import detectors
import numpy as np
import torch
import vlms
import zoo
from PIL import Image
from starlette.testclient import TestClient
from test_dense import Segmenter
from test_discover import latents_of
from test_web import CAT, FREE, HOME, LABELS, PHOTOS

import vitreous
from vitreous import Model
from vitreous.errors import OptionError, TargetError
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped
from vitreous.web.app import create_app
from vitreous.web.engine import Engine, Source
from vitreous.web.latents import load_all
from vitreous.web.regions import runs_of

pytestmark = pytest.mark.slow
METHOD = "input_x_gradient"
IMAGE = PHOTOS / "cat.jpg"


@pytest.fixture(scope="module")
def vit() -> Model:
    return Model(zoo.network("timm ViT"), labels=LABELS, name="vit")


@pytest.fixture(scope="module")
def segmenter() -> Model:
    torch.manual_seed(0)
    return Model(Segmenter().eval(), cropped((64, 64), *IMAGENET), ["cat", "dog", "bird"], name="segmenter")


@pytest.fixture(scope="module")
def detector() -> Model:
    return Model(detectors.yolos(), cropped(detectors.WIDE, *IMAGENET), name="yolos")


@pytest.fixture(scope="module")
def speaker() -> Model:
    found = vitreous.load(f"hf/{vlms.saved('llava')}")
    found.name = "llava"
    return found


@pytest.fixture(scope="module")
def latents(vit: Model) -> vitreous.Latents:
    return latents_of(vit, zoo.images("timm ViT", 2))


@pytest.fixture(scope="module")
def client(
    vit: Model, segmenter: Model, detector: Model, speaker: Model, latents: vitreous.Latents
) -> Iterator[TestClient]:
    engine = Engine([(m, Source("x/y")) for m in (vit, segmenter, detector, speaker)], FREE, [latents])
    engine.warm()
    yield TestClient(create_app(engine), base_url=HOME)
    engine.close()


def events(client: TestClient, path: str, **asked: Any) -> list[tuple[str, dict[str, Any]]]:
    job = client.post(f"/api/{path}", json={"image": CAT, **asked})
    assert job.status_code == 202, job.text
    lines = client.get(f"/api/jobs/{job.json()['job']}/events").text.splitlines()
    names = [line[7:] for line in lines if line.startswith("event: ")]
    return list(zip(names, [json.loads(line[6:]) for line in lines if line.startswith("data: ")]))


def map_of(client: TestClient, model: str, target: str, method: str = METHOD) -> tuple[dict[str, Any], np.ndarray]:
    told = events(client, "explain", model=model, methods=[{"name": method}], targets=[target])
    meta = next(data for name, data in told if name == "map")
    values = np.frombuffer(client.get(f"/api/maps/{meta['id']}").content, "<f4").reshape(meta["shape"])
    return meta, values


def same(values: np.ndarray, found: Any) -> None:
    np.testing.assert_allclose(values, found.map[0].numpy(), rtol=1e-4, atol=1e-6 * float(found.map.abs().max()))


def draw(client: TestClient, **more: Any) -> Any:
    asked = {"model": "segmenter", "image": CAT, "width": 4, "height": 4, "runs": [5, 2, 2, 2, 5], **more}
    return client.post("/api/masks", json=asked)


def answer(client: TestClient, **more: Any) -> dict[str, Any]:
    asked = {"model": "llava", "question": "what is this ?", "answer": "a red dog", **more}
    return next(data for name, data in events(client, "answers", **asked) if name == "answer")


def test_each_model_says_which_kinds_it_takes_and_why_not_the_others(client: TestClient) -> None:
    kinds = {one["name"]: one["kinds"] for one in client.get("/api/info").json()["models"]}
    taken = {name: {kind for kind, why in told.items() if why is None} for name, told in kinds.items()}
    assert taken["vit"] == {"classes", "concepts", "latents", "neurons", "contrasts"}
    assert taken["segmenter"] == {"classes", "regions", "contrasts"}
    assert taken["yolos"] == {"classes", "boxes", "contrasts"}
    assert taken["llava"] == {"words", "contrasts"}
    assert kinds["vit"]["boxes"] == "this model is no detector"
    assert "found in another model" in kinds["segmenter"]["latents"]


def test_a_drawn_region_is_the_same_as_its_mask(client: TestClient, segmenter: Model) -> None:
    held = draw(client)
    assert held.status_code == 201 and held.json()["share"] == pytest.approx(0.25)
    number = held.json()["id"]
    assert draw(client).json()["id"] == number  # the same region has the same id
    mask = Image.open(io.BytesIO(client.get(f"/api/masks/{number}.png").content))
    meta, values = map_of(client, "segmenter", f"dog@mask:{number}")
    same(values, vitreous.explain(segmenter, IMAGE, METHOD, vitreous.Region("dog", mask=mask)))
    (place,) = meta["places"]
    seen = np.repeat(np.arange(len(place["runs"])) % 2 == 1, place["runs"]).reshape(place["shape"])
    assert seen[20, 20] and seen[40, 40] and not seen[5, 5] and seen.mean() == pytest.approx(0.25, abs=0.02)
    again = client.get("/api/target", params={"model": "segmenter", "image": CAT, "q": meta["resolved"]})
    assert again.status_code == 200 and again.json()["target"] == meta["resolved"]  # as the library writes it


def test_points_boxes_and_contrasts_of_regions(client: TestClient, segmenter: Model) -> None:
    for target in ("1@200,100", "1@100,50,300,200", "cat@200,100-dog@150,90", "dog@predicted"):
        meta, values = map_of(client, "segmenter", target)
        same(values, vitreous.explain(segmenter, IMAGE, METHOD, target))
        assert len(meta["places"]) == (2 if "-" in target else 1)
    asked = {"model": "segmenter", "image": CAT, "q": "1@100,50,300,200"}
    (place,) = client.get("/api/target", params=asked).json()["places"]
    left, top, right, bottom = client.post("/api/predict", json={"model": "segmenter", "image": CAT}).json()["seen"]
    expected = [(100 - left) / (right - left), 50 / bottom, (300 - left) / (right - left), 200 / bottom]
    assert place["kind"] == "box" and top == 0 and place["sides"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"runs": [16]}, "the region is empty"),
        ({"runs": [3, 3]}, "the runs have 6 pixels"),
        ({"width": 0}, "greater than or equal to 1"),
        ({"width": 100_000}, "less than or equal to 512"),
        ({"runs": [0] * 20_001}, "at most 20000"),
        ({"runs": [-1, 17]}, "greater than or equal to 0"),
    ],
)
def test_regions_that_are_none(client: TestClient, more: dict[str, Any], said: str) -> None:
    refused = draw(client, **more)
    assert refused.status_code == 422 and said in refused.json()["detail"]


def test_no_target_names_a_file(client: TestClient, tmp_path: Path) -> None:
    mask = tmp_path / "mask.png"
    Image.new("L", (448, 298), 255).save(mask)
    for text, said in (
        (f"cat@{mask}", "files are not read here"),
        (f"cat@{tmp_path}/abcdef0123.held", "files are not read here"),
        ("cat@mask:0123456789abcdef01234567", "draw it again"),
    ):
        told = client.get("/api/target", params={"model": "segmenter", "image": CAT, "q": text})
        assert told.status_code == 422 and said in told.json()["detail"]
    gone = client.get("/api/masks/0123456789abcdef01234567.png")
    assert gone.status_code == 404 and "draw it again" in gone.json()["detail"]


def test_detections_are_listed_with_boxes_and_explained(client: TestClient, detector: Model) -> None:
    found = client.get("/api/detections", params={"model": "yolos", "image": CAT, "top": 3}).json()
    assert len(found) == 3 and found[0]["probability"] >= found[1]["probability"]
    meta, values = map_of(client, "yolos", found[1]["target"])
    expected = vitreous.explain(detector, IMAGE, METHOD, found[1]["target"])
    same(values, expected)
    assert expected.boxes is not None
    top, left, bottom, right = expected.boxes[0]
    assert meta["places"][0]["sides"] == pytest.approx([left, top, right, bottom], abs=1e-5)
    assert found[1]["box"] == pytest.approx([left, top, right, bottom], abs=1e-5)
    refused = client.get("/api/detections", params={"model": "vit", "image": CAT})
    assert refused.status_code == 422 and "no detector" in refused.json()["detail"]


def test_words_of_an_answer_are_explained(client: TestClient, speaker: Model) -> None:
    told = answer(client)
    assert [one["text"] for one in told["words"]] == ["a", "red", "dog"] and told["text"] == "a red dog"
    assert answer(client)["model"] == told["model"]
    expected = vitreous.ask(speaker, IMAGE, "what is this ?", "a red dog", METHOD)
    _, values = map_of(client, told["model"], "word:2")
    same(values, expected["dog"])
    contrast = "token:dog-token:cat@2"
    _, values = map_of(client, told["model"], contrast)
    same(values, vitreous.explain(expected.model, IMAGE, METHOD, contrast))
    own = answer(client, answer=None, most=5)
    assert 0 < len(own["words"]) <= 5 and own["text"] == vitreous.ask(speaker, IMAGE, "what is this ?", most=5).text


def test_questions_are_bounded_and_only_for_those_who_answer(client: TestClient) -> None:
    def refused(**more: Any) -> str:
        asked = {"model": "llava", "image": CAT, "question": "what is this ?", **more}
        told = client.post("/api/answers", json=asked)
        assert told.status_code == 422, told.text
        return str(told.json()["detail"])

    assert "answers no questions" in refused(model="vit")
    assert "at most 300" in refused(question="?" * 301)
    assert "the question is empty" in refused(question=" ")
    assert "1 to 64 tokens" in refused(answer="a " * 65)
    assert "less than or equal to 64" in refused(most=1000)
    unasked = client.get("/api/target", params={"model": "llava", "image": CAT, "q": "word:0"})
    assert unasked.status_code == 422 and "none was asked yet" in unasked.json()["detail"]
    lost = client.post("/api/predict", json={"model": f"llava?{'0' * 24}", "image": CAT})
    assert lost.status_code == 404 and "ask the question again" in lost.json()["detail"]
    told = client.post("/api/predict", json={"model": "llava", "image": CAT}).json()
    assert told["classes"] == [] and "ask one" in told["why"]


def test_latents_are_explained_and_their_activation_is_a_map(
    client: TestClient, vit: Model, latents: vitreous.Latents
) -> None:
    (told,) = client.get("/api/latents", params={"model": "vit", "image": CAT, "top": 3}).json()
    assert told["name"] == "noise" and told["count"] == 24 and told["why"] is None
    best = told["active"][0]
    target = f"latent:noise#{best['index']}"
    _, values = map_of(client, "vit", target)
    same(values, vitreous.explain(vit, IMAGE, METHOD, latents[best["index"]]))
    asked = {"model": "vit", "image": CAT, "name": "noise", "index": best["index"]}
    raw = client.get("/api/latents/map", params=asked)
    active = np.frombuffer(raw.content, "<f4")
    assert active.mean() == pytest.approx(best["mean"], rel=1e-4) and active.min() >= 0
    erased = client.post("/api/erase", json={"model": "vit", "image": CAT, "removed": [0], "targets": [target]})
    assert erased.status_code == 200 and erased.json()["scores"][0]["score"] is not None
    (other,) = client.get("/api/latents", params={"model": "yolos", "image": CAT}).json()
    assert "found in another model" in other["why"] and other["active"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("latent:nose#3", "did you mean noise"),
        ("latent:noise#99", "latents 0 to 23"),
        ("latent:noise", "write latent:NAME#NUMBER"),
        ("1-latent:noise#3", "another one of the same dictionary only"),
        ("latent:/etc/passwd#3", "there are no latents"),
    ],
)
def test_latents_that_are_none(client: TestClient, text: str, said: str) -> None:
    told = client.get("/api/target", params={"model": "vit", "image": CAT, "q": text})
    assert told.status_code == 422 and said in told.json()["detail"]


def test_latents_are_named_at_start(tmp_path: Path, latents: vitreous.Latents) -> None:
    file = latents.save(tmp_path / "noise.latents.safetensors")
    assert [one.name for one in load_all([tmp_path, file])] == ["noise"]
    with pytest.raises(OptionError, match="no such file or folder"):
        load_all([tmp_path / "none"])
    (tmp_path / "broken.latents.safetensors").write_bytes(b"no latents")
    with pytest.raises(TargetError, match="is not a file of latents"):
        load_all([tmp_path])


def test_copied_code_names_the_answer_and_the_region(client: TestClient) -> None:
    asked = {"image": CAT, "methods": [{"name": METHOD}]}
    told = client.post("/api/snippet", json={**asked, "model": answer(client)["model"], "targets": ["word:2"]}).json()
    assert "vitreous.ask(model, " in told["python"] and "'what is this ?', 'a red dog'" in told["python"]
    assert "vitreous ask" in told["cli"] and "--words word:2" in told["cli"]
    number = draw(client).json()["id"]
    told = client.post("/api/snippet", json={**asked, "model": "segmenter", "targets": [f"dog@mask:{number}"]}).json()
    assert f"dog@mask-{number}.png" in told["python"]


def test_runs_are_those_of_the_mask() -> None:
    mask = np.array([[True, False], [True, True]])
    assert runs_of(mask) == [0, 1, 1, 2] and runs_of(~mask) == [1, 1, 2]
