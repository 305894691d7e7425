"""Views of a notebook without a browser: messages in, responses out."""

from __future__ import annotations

import gc
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machine import PATIENCE
from PIL import Image

for needed in ("fastapi", "anywidget"):
    pytest.importorskip(needed, reason="views need pip install 'vitreous[notebook]'")
import zoo

import vitreous
from vitreous import METHODS, Attribution, Model
from vitreous._support.progress import steps
from vitreous.notebook.widget import View
from vitreous.registry import method
from vitreous.trace.trace import Trace
from vitreous.types import Map
from vitreous.web.schema import MapMeta


class Talk:
    """What the notebook's side of a view says and hears."""

    def __init__(self, view: View, name: str = "v") -> None:
        self.view, self.name, self.number = view, name, 0
        self.heard: list[tuple[dict[str, Any], list[bytes]]] = []
        self.change = threading.Condition()
        view.send = self.take

    def take(self, told: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        with self.change:
            self.heard.append((json.loads(json.dumps(told)), [bytes(one) for one in buffers or []]))
            self.change.notify_all()

    def say(self, kind: str, body: bytes = b"", **told: Any) -> int:
        self.number += 1
        said = {"kind": kind, "view": self.name, "number": self.number, "headers": {}, "method": "GET", **told}
        self.view._handle_custom_msg(said, [memoryview(body)] if body else [])
        return self.number

    def wait(self, number: int, *kinds: str, count: int = 1) -> list[tuple[dict[str, Any], list[bytes]]]:
        def found() -> list[tuple[dict[str, Any], list[bytes]]]:
            return [one for one in self.heard if one[0].get("number") == number and one[0]["kind"] in kinds]

        with self.change:
            assert self.change.wait_for(lambda: len(found()) >= count, PATIENCE), self.heard
            return found()

    def ask(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, dict[str, str], bytes]:
        headers = {} if body is None else {"content-type": "application/json"}
        sent = b"" if body is None else json.dumps(body).encode()
        verb = method or ("GET" if body is None else "POST")
        number = self.say("ask", sent, path=f"/api/{path}", method=verb, headers=headers)
        told, buffers = self.wait(number, "answer")[0]
        return told["status"], told["headers"], buffers[0]

    def json(self, path: str, body: Any = None) -> Any:
        status, _, held = self.ask(path, body)
        assert status < 300, held
        return json.loads(held)

    def job(self, path: str, body: Any) -> tuple[str, list[dict[str, Any]]]:
        """Start a job and hear it to its end."""
        job = self.json(path, body)["job"]
        number = self.say("listen", path=f"/api/jobs/{job}/events")
        self.wait(number, "lost")
        return job, [told for told, _ in self.heard if told.get("number") == number and told["kind"] == "event"]


@pytest.fixture(scope="module")
def model() -> Model:
    return zoo.model("timm ViT")


@pytest.fixture
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 90, 3), np.uint8))


@pytest.fixture
def talk(model: Model, photo: Image.Image) -> Iterator[Talk]:
    view = vitreous.view(model, photo, methods=["rollout", vitreous.methods.gae(start_layer=1)], targets=[1, "top-1"])
    yield Talk(view)
    view.close()


@pytest.fixture
def slow() -> Iterator[None]:
    """A method that never ends by itself."""

    def dawdle(trace: Trace, target: vitreous.Target) -> Map:
        """Nothing, slowly."""
        for _ in steps(range(100_000), 100_000, "dawdling"):
            threading.Event().wait(0.01)
        return torch.zeros(len(trace), *trace.layout.grid)

    with METHODS.temporary():
        method(family="control")(dawdle)
        yield


def place(view: View) -> dict[str, str]:
    told = dict(pair.split("=", 1) for pair in view.address.lstrip("#").split("&"))
    return {"model": told["model"], "image": told["image"]}


# ------------------------------------------------------------------------------------------------------------- a model


@pytest.mark.slow
def test_the_address_says_what_is_shown(talk: Talk) -> None:
    assert talk.view.address.endswith("&method=rollout&method=gae;start_layer=1&target=1&target=top-1")
    assert vitreous.view.__doc__ and talk.view.height == 640


@pytest.mark.slow
def test_the_page_comes_when_a_display_opens(talk: Talk) -> None:
    talk.say("open")
    ((told, (html,)),) = talk.heard
    assert told == {"kind": "page", "view": "v"} and b'import "vitreous/framed.js"' in html


def test_a_question_is_answered_like_the_server_does(talk: Talk, model: Model, photo: Image.Image) -> None:
    told = talk.json("info")
    assert [one["name"] for one in told["models"]] == [model.name] and len(told["samples"]) == 1
    classes = talk.json("predict", {**place(talk.view), "top": 1})["classes"]
    trace = Trace(model, [photo])
    assert classes[0]["index"] == int(trace.output[0].argmax())
    status, headers, held = talk.ask(f"images/{place(talk.view)['image']}/view")
    assert (status, headers["content-type"]) == (200, "image/webp")
    assert Image.open(io.BytesIO(held)).size == model.preprocess.view(photo).size


def test_a_job_streams_its_maps(talk: Talk, model: Model, photo: Image.Image) -> None:
    asked = {**place(talk.view), "methods": [{"name": "rollout"}, {"name": "gae"}], "targets": ["1"]}
    _, told = talk.job("explain", asked)
    names = [one["name"] for one in told]
    assert names.count("map") == 2 and names[-1] == "done"
    meta = next(one["data"] for one in told if one["name"] == "map")
    _, headers, held = talk.ask(f"maps/{meta['id']}")
    assert headers["x-shape"] == "4,4"
    expected = vitreous.explain(model, photo, "rollout")
    assert np.allclose(np.frombuffer(held, "<f4").reshape(4, 4), expected.map[0], atol=1e-6)
    second, first = sorted(talk.view.maps(), key=lambda one: one.method)
    assert (first.method, second.method, second.target) == ("rollout", "gae", "1")
    assert first.seen().size == expected.seen().size and torch.allclose(first.map, expected.map, atol=1e-6)


@pytest.mark.slow
def test_errors_are_sentences(talk: Talk) -> None:
    status, headers, held = talk.ask("predict", {"image": "0" * 32})
    assert status == 404 and headers["content-type"] == "application/problem+json"
    assert "this image is not here" in json.loads(held)["detail"]
    assert talk.ask("nothing")[0] == 404
    assert talk.ask("explain", {"image": 1})[0] == 422


def started(talk: Talk) -> tuple[Any, int]:
    asked = {**place(talk.view), "methods": [{"name": "dawdle"}], "targets": ["1"]}
    job = talk.json("explain", asked)["job"]
    number = talk.say("listen", path=f"/api/jobs/{job}/events")
    talk.wait(number, "event")
    engine = talk.view._bridge.app.state.engine  # type: ignore[attr-defined]
    return engine.jobs.find(job), number


def ends(job: Any) -> str:
    for _ in range(1000):
        if job.ended:
            return str(job.events[-1][0])
        threading.Event().wait(0.02)
    pytest.fail("the job goes on")


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("how", ["close", "delete"])
@pytest.mark.slow
def test_a_display_that_goes_cancels_its_jobs(talk: Talk, how: str) -> None:
    job, _ = started(talk)
    if how == "close":
        talk.say("close", view="another")
        talk.ask("concepts")
        assert not job.stopped.is_set(), "that of another display goes on"
        talk.say("close")
    else:
        assert talk.ask(f"jobs/{job.id}", method="DELETE")[0] == 204
    assert ends(job) == "cancelled"


@pytest.mark.usefixtures("slow")
@pytest.mark.slow
def test_closing_the_widget_ends_everything(model: Model, photo: Image.Image) -> None:
    one, other = (Talk(vitreous.view(model, photo)) for _ in range(2))
    job, _ = started(one)
    one.view.close()
    assert ends(job) == "cancelled"
    engine = one.view._bridge.app.state.engine  # type: ignore[attr-defined]
    assert engine.ended(PATIENCE)
    heard = len(one.heard)
    one.say("ask", path="/api/info")
    assert other.json("info")["models"], "views are independent"
    assert len(one.heard) == heard
    one.view.close()
    other.view.close()


@pytest.mark.slow
def test_an_unheard_event_stream_stops(talk: Talk) -> None:
    number = talk.say("listen", path="/api/jobs/000000000000000000000000/events")
    talk.wait(number, "lost")
    talk.say("stop", number=number)
    assert talk.json("concepts") == []


@pytest.mark.slow
def test_several_images_and_models(photo: Image.Image) -> None:
    models = (
        [zoo.model("timm ViT"), zoo.model("mean pooling")] if "mean pooling" in zoo.ZOO else [zoo.model("timm ViT")]
    )
    talk = Talk(vitreous.view(models, [photo, photo.rotate(90)], tab="attention", height=300))
    told = talk.json("info")
    assert len(told["models"]) == len(models) and len(told["samples"]) == 2
    assert "tab=attention" in talk.view.address and talk.view.height == 300
    talk.view.close()


@pytest.mark.slow
def test_without_images_the_packaged_ones_are_there(model: Model) -> None:
    talk = Talk(vitreous.view(model))
    assert len(talk.json("info")["samples"]) > 1 and "image=sample:" in talk.view.address
    talk.view.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tab": "nothing"}, "tab='nothing': there are explain"),
        ({"methods": "rolout"}, "rollout"),
        ({"image": torch.rand(1, 3, 64, 64)}, "not preprocessed tensors"),
        ({"image": "nothing.jpg"}, "nothing.jpg"),
        ({"image": []}, "no images"),
    ],
)
def test_what_cannot_be_viewed_is_refused(model: Model, given: dict[str, Any], said: str) -> None:
    with pytest.raises(vitreous.VitreousError, match=said):
        vitreous.view(model, **given)


def test_a_missing_package_is_named(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "anywidget", None)
    with pytest.raises(vitreous.ModelError, match=r"pip install 'vitreous\[notebook\]'"):
        vitreous.view(model)


# ------------------------------------------------------------------------------------------------- maps without a model


@pytest.fixture(scope="module")
def found() -> Attribution:
    return vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT")[:2], "gae", [1, 2])


def shown(talk: Talk, image: str) -> list[dict[str, Any]]:
    """The maps that the page asks for, by the view's own address."""
    pairs = [pair.split("=", 1) for pair in talk.view.address.lstrip("#").split("&")]
    methods = [{"name": value.split(";")[0], "options": {}} for key, value in pairs if key == "method"]
    targets = [value for key, value in pairs if key == "target"]
    _, told = talk.job("explain", {"image": image, "methods": methods, "targets": targets})
    assert told[-1]["name"] == "done"
    return [one["data"] for one in told if one["name"] == "map"]


def test_maps_are_viewed_without_their_model(found: Attribution) -> None:
    view = found.view()
    talk = Talk(view)
    told = talk.json("info")
    assert told["models"][0]["grid"] == [4, 4] and len(told["samples"]) == 2
    for number, sample in enumerate(told["samples"]):
        (meta,) = shown(talk, sample["id"])
        assert set(meta) == set(MapMeta.model_fields)
        held = talk.ask(f"maps/{meta['id']}")[2]
        assert np.array_equal(np.frombuffer(held, "<f4").reshape(4, 4), found.map[number].numpy())
        assert meta["title"].startswith(str(found.labels[number]))
        assert talk.ask(f"images/{sample['id']}/view")[0] == 200
    assert view.maps() == [found] and view.recorded
    view.close()


@pytest.mark.slow
def test_maps_are_taken_away(found: Attribution, tmp_path: Path) -> None:
    talk = Talk(found.view())
    image = talk.json("info")["samples"][1]["id"]
    (meta,) = shown(talk, image)
    (tmp_path / "maps.npz").write_bytes(talk.ask("maps.npz", {"maps": [meta["id"]]})[2])
    again = Attribution.load(tmp_path / "maps.npz")
    assert torch.equal(again.map[0], found.map[1]) and again.method == "gae"
    drawn = talk.ask("figure", {"maps": [meta["id"]]})[2]
    assert Image.open(io.BytesIO(drawn)).format == "PNG"
    for path, body in (("attention/info", None), ("snippet", {"image": image})):
        status, _, held = talk.ask(path, body)
        assert status == 404 and "maps without their model" in json.loads(held)["detail"]
    talk.view.close()


def test_a_loaded_file_is_viewed(found: Attribution, tmp_path: Path) -> None:
    talk = Talk(Attribution.load(found.save(tmp_path / "maps.npz")).view(height=250))
    assert "bare=true" in talk.view.address and talk.view.height == 250
    for sample in talk.json("info")["samples"]:
        assert len(shown(talk, sample["id"])) == 1
        assert talk.ask(f"images/{sample['id']}/view")[0] == 200
    talk.view.close()


@pytest.mark.slow
def test_several_attributions_stand_side_by_side(found: Attribution) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")[:2]
    others = vitreous.explain_targets(model, images, "gae", [3]), [vitreous.explain(model, images, "rollout")]
    talk = Talk(found.view(*others[0], *others[1]))
    maps = shown(talk, talk.json("info")["samples"][0]["id"])
    assert [(one["method"], one["resolved"]) for one in maps] == [("gae", "1"), ("rollout", None), ("gae", "3")]
    talk.view.close()


def test_maps_of_methods_of_others(found: Attribution) -> None:
    from dataclasses import replace

    talk = Talk(replace(found, method="mine", options={"steps": 3}).view())
    told = talk.json("info")
    assert told["methods"][0]["name"] == "mine"
    body = {
        "image": told["samples"][0]["id"],
        "methods": [{"name": "mine", "options": {"steps": 3}}],
        "targets": ["explained"],
    }
    assert [one["name"] for one in talk.job("explain", body)[1]] == ["map", "done"]
    body["methods"] = [{"name": "other"}]
    assert [one["name"] for one in talk.job("explain", body)[1]] == ["problem", "done"]
    talk.view.close()


def test_maps_that_do_not_belong_together_are_refused(found: Attribution) -> None:
    with pytest.raises(vitreous.InputError, match="of the same images"):
        found.view(found[0])
    with pytest.raises(vitreous.OptionError, match="viewed as they are"):
        vitreous.view(found, methods=["rollout"])
    with pytest.raises(vitreous.Unsupported, match="of a video"):
        Attribution(torch.zeros(1, 2, 3, 3), "gae", {}, (None,), "m", True).view()
    ragged = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[1.0, torch.nan], [torch.nan, torch.nan]]])
    with pytest.raises(vitreous.Unsupported, match=r"found\[0\]\.view"):
        Attribution(ragged, "gae", {}, (None, None), "m", True).view()


def test_an_image_that_cannot_be_drawn_is_refused_at_once() -> None:
    model = Model(zoo.network("timm ViT"), preprocess=lambda image: torch.zeros(1, 64, 64))
    found = vitreous.explain(model, zoo.images("timm ViT")[:1], "gae", 1)
    with pytest.raises(vitreous.ModelError, match="preprocessing"):
        found.view()


def test_the_old_view_is_deprecated(found: Attribution) -> None:
    with pytest.warns(DeprecationWarning, match="seen"):
        assert np.array_equal(np.asarray(found.view(index=1)), np.asarray(found.seen(index=1)))
    with pytest.warns(DeprecationWarning, match="seen"):
        assert found.view(Image.new("RGB", (64, 64))).size == found.seen(Image.new("RGB", (64, 64))).size


# ----------------------------------------------------------------------------------------------------- without a kernel


@pytest.mark.slow
def test_a_notebook_without_kernel_shows_a_figure_or_a_sentence(found: Attribution, model: Model) -> None:
    view = found.view()
    bundle = view._repr_mimebundle_()
    assert bundle is not None and bundle[0]["image/png"].startswith("iVBOR")
    assert "application/vnd.jupyter.widget-view+json" in bundle[0]
    live = vitreous.view(model)
    told = live._repr_mimebundle_()
    assert told is not None and "run this cell again" in told[0]["text/html"]
    view.close()
    live.close()


@pytest.mark.slow
def test_outside_of_a_notebook_a_view_says_where_it_is_shown(found: Attribution) -> None:
    view = found.view()
    assert "shown in a notebook" in repr(view)
    view.close()
    gc.collect()
