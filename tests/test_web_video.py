"""Models of videos behind the page's API: clips, frames, maps, exports and limits."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "multipart", "httpx"):
    pytest.importorskip(needed, reason="the tests of the server need pip install 'vitreous[web]' httpx")

import numpy as np
import torch
import zoo
from machine import PATIENCE
from PIL import Image
from starlette.testclient import TestClient
from test_video import FRAMES, SIDE, build

import vitreous
from vitreous import Attribution, Model
from vitreous.errors import Unsupported
from vitreous.images.pan import pan, save_pan
from vitreous.web.app import create_app
from vitreous.web.clips import measure_gif, read_clip, usable
from vitreous.web.engine import Engine, Source
from vitreous.web.limits import Limits
from vitreous.web.problems import Problem
from vitreous.web.uploads import Part

pytestmark = pytest.mark.filterwarnings("ignore::vitreous.errors.ModelWarning")
HOME = "http://127.0.0.1:8000"
FREE = Limits(rate=1e6, burst=10**6, seconds=PATIENCE, patience=PATIENCE, grace=PATIENCE, job_seconds=PATIENCE)
CLIP, PHOTO = "sample:pan-cat", "sample:cat"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(build("videomae"), labels=["run", "jump", "swim", "read", "cook"], name="tiny-video")


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[TestClient]:
    photos = Model(zoo.network("timm ViT"), name="tiny-image")
    engine = Engine([(model, Source("hf/tiny")), (photos, Source("x/y"))], FREE)
    with TestClient(create_app(engine), base_url=HOME, client=("10.0.0.1", 1)) as found:
        yield found


def frames(count: int = 6, side: int = 40) -> list[Image.Image]:
    """A square that crosses the image."""
    made = [np.full((side, side + 8, 3), 40, np.uint8) for _ in range(count)]
    for number, one in enumerate(made):
        one[10:20, 2 * number : 2 * number + 9] = (230, 120, 40)
    return [Image.fromarray(one) for one in made]


def packed(kind: str, count: int = 6, side: int = 40) -> bytes:
    held = io.BytesIO()
    if kind == "npy":
        np.save(held, np.stack([np.asarray(one) for one in frames(count, side)]))
    else:
        first, *rest = frames(count, side)
        first.save(held, kind.upper(), save_all=True, append_images=rest, lossless=True)
    return held.getvalue()


def send(client: TestClient, held: bytes, name: str = "clip.gif") -> Any:
    return client.post("/api/images", files={"file": (name, held)})


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    answer = client.post(f"/api/{path}", json=body)
    assert answer.status_code == 202, answer.text
    told = client.get(f"/api/jobs/{answer.json()['job']}/events").text
    blocks = [dict(line.split(": ", 1) for line in one.splitlines()) for one in told.split("\n\n") if one]
    return [(one["event"], json.loads(one["data"])) for one in blocks if "data" in one]


def found(client: TestClient, image: str, *methods: str) -> list[dict[str, Any]]:
    asked = {"image": image, "methods": [{"name": one} for one in methods], "targets": ["1"]}
    told = events(client, "explain", asked)
    assert [data for name, data in told if name in ("problem", "failed")] == []
    return [data for name, data in told if name == "map"]


# ---------------------------------------------------------------------------------------------------------------- maps


@pytest.mark.parametrize("kind", ["gif", "webp", "png", "npy"])
def test_maps_of_a_clip_are_the_librarys(client: TestClient, model: Model, kind: str, tmp_path: Path) -> None:
    told = send(client, packed(kind), f"clip.{kind}").json()
    assert told["frames"] == 6
    file = tmp_path / f"clip.{kind}"
    file.write_bytes(packed(kind))
    metas = found(client, told["id"], "gae", "gradient")
    for meta, name in zip(metas, ("gae", "gradient")):
        own = vitreous.explain(model, file, name, target=1)
        answer = client.get(f"/api/maps/{meta['id']}")
        values = np.frombuffer(answer.content, "<f4").reshape(meta["shape"])
        assert answer.headers["X-Shape"] == ",".join(map(str, own.map.shape[1:]))
        np.testing.assert_allclose(values, own.map[0].numpy(), rtol=1e-4, atol=1e-6 * float(own.map.abs().max()))
    assert metas[0]["shape"] == [2, 3, 3] and metas[0]["times"] == [[0, 2], [2, 4]]
    assert metas[1]["shape"] == [FRAMES, SIDE, SIDE] and metas[1]["times"] == [[t, t + 1] for t in range(FRAMES)]


def test_frames_are_those_that_the_model_saw(client: TestClient, model: Model) -> None:
    told = client.get(f"/api/images/{CLIP}/clip").json()
    assert told == {"name": "cat-pan", "count": 24, "picked": [3, 9, 15, 21], "times": [[0, 2], [2, 4]]}
    whole = pan("cat")
    for frame, number in enumerate(told["picked"]):
        drawn = Image.open(io.BytesIO(client.get(f"/api/images/{CLIP}/view", params={"frame": frame}).content))
        own = model.preprocess.view(whole[number])
        assert np.abs(np.asarray(drawn, float) - np.asarray(own, float)).mean() < 6  # WEBP
    assert client.get(f"/api/images/{CLIP}/view", params={"frame": FRAMES}).status_code == 422
    assert client.get(f"/api/images/{CLIP}/view").status_code == 200
    refused = client.get(f"/api/images/{PHOTO}/clip", params={"model": "tiny-image"})
    assert refused.status_code == 422 and "takes images" in refused.json()["detail"]


def test_info_says_what_a_model_of_videos_has(client: TestClient) -> None:
    info = client.get("/api/info").json()
    video, image = info["models"]
    assert (video["frames"], video["times"], video["grid"]) == (FRAMES, [[0, 2], [2, 4]], [3, 3])
    assert image["frames"] is None and image["closed"] == {}
    assert "takes videos, and the Attention tab works with images" in video["closed"]["attention"]
    assert not {"explain", "faithfulness"} & set(video["closed"])
    assert info["clips"][0] == {"id": CLIP, "name": "cat-pan", "frames": 24}
    assert ".gif" in info["endings"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("attention", {"image": CLIP}),
        ("rollout", {"image": CLIP}),
        ("inside", {"image": CLIP}),
        ("counterfactual", {"image": CLIP}),
        ("features", None),
        ("attention/thumbs", None),
        ("inside/layers", None),
    ],
)
def test_views_of_images_refuse_videos_in_a_sentence(client: TestClient, path: str, body: Any) -> None:
    address = f"/api/{path}"
    answer = client.get(address, params={"image": CLIP}) if body is None else client.post(address, json=body)
    assert answer.status_code == 422
    assert "takes videos, and" in answer.json()["detail"] and "Explain and Faithfulness" in answer.json()["detail"]


@pytest.mark.slow
def test_concepts_refuse_videos(client: TestClient) -> None:
    answer = client.post("/api/concepts", data={"name": "x"}, files={"file": ("a.gif", packed("gif"))})
    assert answer.status_code == 422 and "the Concepts tab works with images" in answer.json()["detail"]


@pytest.mark.slow
def test_curves_hide_tubelets(client: TestClient, model: Model) -> None:
    (meta,) = found(client, CLIP, "occlusion")
    told = dict(events(client, "curves", {"maps": [meta["id"]], "metric": "deletion", "steps": 4, "random": 2}))
    own = vitreous.evaluate(model, [pan("cat")], "occlusion", "deletion", target=1, steps=4)
    assert own.curve is not None
    np.testing.assert_allclose(told["curve"]["values"], own.curve[0].numpy(), rtol=1e-4, atol=1e-6)
    assert sorted(told["curve"]["order"]) == list(range(18))


@pytest.mark.slow
def test_the_eraser_removes_tubelets(client: TestClient, model: Model) -> None:
    answer = client.post("/api/erase", json={"image": CLIP, "removed": [0, 12, 17], "classes": [1]}).json()
    whole = client.post("/api/erase", json={"image": CLIP, "removed": [], "classes": [1]}).json()
    assert answer["classes"] != whole["classes"]
    refused = client.post("/api/erase", json={"image": CLIP, "removed": [18]})
    assert refused.status_code == 422 and "0 to 17" in refused.json()["detail"]


# ------------------------------------------------------------------------------------------------------------- exports


@pytest.mark.slow
def test_maps_of_a_clip_are_saved_whole(client: TestClient, model: Model, tmp_path: Path) -> None:
    metas = found(client, CLIP, "gae", "gradient")
    file = tmp_path / "maps.npz"
    file.write_bytes(client.post("/api/maps.npz", json={"maps": [one["id"] for one in metas]}).content)
    loaded = Attribution.load(file, "gae@1")
    own = vitreous.explain(model, [pan("cat")], "gae", target=1)
    torch.testing.assert_close(loaded.map, own.map, rtol=1e-4, atol=1e-7)
    assert loaded.times == ((0, 2), (2, 4)) and loaded.names == ["cat-pan"]
    assert Attribution.load(file, "gradient@1").map.shape == (1, FRAMES, SIDE, SIDE)


@pytest.mark.slow
def test_a_figure_and_a_film(client: TestClient, model: Model, tmp_path: Path) -> None:
    metas = found(client, CLIP, "gae", "gradient")
    maps = [one["id"] for one in metas]
    strip = Image.open(io.BytesIO(client.post("/api/figure", json={"maps": maps}).content))
    assert strip.format == "PNG" and strip.width > 500
    film = Image.open(io.BytesIO(client.post("/api/film", json={"maps": maps[:1]}).content))
    assert film.format == "GIF" and film.n_frames == FRAMES
    vitreous.explain(model, [pan("cat")], "gae", target=1).save(tmp_path / "own.gif")
    own = Image.open(io.BytesIO((tmp_path / "own.gif").read_bytes()))
    assert film.size == own.size
    for number in range(FRAMES):
        film.seek(number)
        own.seek(number)
        assert np.array_equal(np.asarray(film.convert("RGB")), np.asarray(own.convert("RGB")))
    (photo,) = [
        data
        for name, data in events(
            client, "explain", {"model": "tiny-image", "image": PHOTO, "methods": [{"name": "rollout"}]}
        )
        if name == "map"
    ]
    refused = client.post("/api/film", json={"maps": [photo["id"]]})
    assert refused.status_code == 422 and "a film shows the maps of a clip" in refused.json()["detail"]


@pytest.mark.slow
def test_copied_python_makes_the_same_maps(client: TestClient, model: Model, tmp_path: Path) -> None:
    asked = {"image": CLIP, "methods": [{"name": "gae"}], "targets": ["1"]}
    python = client.post("/api/snippet", json=asked).json()["python"]
    assert "pan('cat')" in python
    scope: dict[str, Any] = {}
    python = python.replace("vitreous.load('hf/tiny')", "model")
    scope["model"] = model
    exec(python, scope)
    own = vitreous.explain(model, [pan("cat")], "gae", target=1)
    assert torch.equal(scope["maps"][0].map, own.map)


@pytest.mark.slow
def test_copied_commands_make_the_same_clip(client: TestClient, model: Model, tmp_path: Path) -> None:
    asked = {"image": CLIP, "methods": [{"name": "gae"}], "targets": ["1"]}
    first, second = client.post("/api/snippet", json=asked).json()["cli"].strip().splitlines()
    assert shlex.split(first)[:2] == ["python", "-c"] and 'save_pan("cat", "cat-pan")' in first
    assert shlex.split(second)[:3] == ["vitreous", "explain", "cat-pan"]
    folder = save_pan("cat", tmp_path / "cat-pan")
    one, other = (vitreous.explain(model, given, "gae", target=1).map for given in (folder, [pan("cat")]))
    assert torch.equal(one, other)


def test_copied_commands_name_an_uploaded_clip(client: TestClient) -> None:
    image = send(client, packed("gif"), "walk.gif").json()["id"]
    told = client.post("/api/snippet", json={"image": image, "methods": [{"name": "gae"}]}).json()
    assert "'walk.gif'" in told["python"] and "explain walk.gif" in told["cli"]


# ---------------------------------------------------------------------------------------------- images and clips apart


def test_an_image_is_no_clip_and_a_clip_is_no_image(client: TestClient) -> None:
    refused = client.post("/api/predict", json={"image": PHOTO})
    assert refused.status_code == 415 and "cat.jpg is a single image" in refused.json()["detail"]
    refused = client.post("/api/predict", json={"image": CLIP, "model": "tiny-image"})
    assert refused.status_code == 415 and "cat-pan is a clip" in refused.json()["detail"]


@pytest.mark.slow
def test_an_upload_says_who_cannot_use_it(client: TestClient) -> None:
    held = io.BytesIO()
    frames()[0].save(held, "PNG")
    told = send(client, held.getvalue(), "still.png").json()
    assert told["frames"] is None and "single image" in told["refused"]["tiny-video"]
    assert client.post("/api/predict", json={"image": told["id"]}).status_code == 415
    assert client.post("/api/predict", json={"image": told["id"], "model": "tiny-image"}).status_code == 200
    told = send(client, packed("npy"), "clip.npy").json()
    assert list(told["refused"]) == ["tiny-image"]
    told = send(client, packed("gif")).json()
    assert told["refused"] == {} and "first is explained" in told["note"]


@pytest.mark.slow
def test_a_server_of_videos_alone_refuses_still_images(model: Model) -> None:
    engine = Engine([(model, Source("x"))], FREE)
    with TestClient(create_app(engine), base_url=HOME) as client:
        held = io.BytesIO()
        frames()[0].save(held, "JPEG")
        answer = send(client, held.getvalue(), "still.jpg")
        assert answer.status_code == 415 and "is a single image, and the model takes videos" in answer.json()["detail"]


def test_videos_of_other_channels_are_refused() -> None:
    four = object.__new__(Model)
    four.frames, four._channels, four.name = 4, 4, "four"
    with pytest.raises(Unsupported, match="takes videos of 4 channels"):
        usable(four)


# -------------------------------------------------------------------------------------------------------------- limits


def gif_of(count: int, wide: int = 10, high: int = 10, last: tuple[int, int] = (10, 10)) -> bytes:
    """A GIF of so many tiny frames, made of its blocks."""
    header = b"GIF89a" + wide.to_bytes(2, "little") + high.to_bytes(2, "little") + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    sizes = [(min(wide, 10), min(high, 10))] * (count - 1) + [last]
    each = [b"".join(n.to_bytes(2, "little") for n in (0, 0, *size)) for size in sizes]
    return header + b"".join(b"\x2c" + size + b"\0\x02\x02\x4c\x01\0" for size in each) + b"\x3b"


def refused(held: bytes, name: str, limits: Limits = FREE) -> tuple[int, str]:
    with pytest.raises(Problem) as caught:
        read_clip(Part(name, held), limits, FRAMES)
    return caught.value.status_code, caught.value.detail


def test_a_gif_of_a_hundred_thousand_frames_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitreous.images.videos.animation", lambda *given: pytest.fail("decoded"))
    assert refused(gif_of(100_000), "long.gif") == (413, "long.gif: has more than 2,000 frames; cut it shorter")


@pytest.mark.slow
def test_bombs_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitreous.images.videos.animation", lambda *given: pytest.fail("decoded"))
    status, said = refused(gif_of(4, last=(12_000, 12_000)), "bomb.gif")  # behind a header of 10×10
    assert status in (413, 415) and "12000×12000" in said
    assert refused(gif_of(4, 4000, 4000), "wide.gif")[0] == 413
    assert refused(gif_of(2000, 1000, 1000), "deep.gif")[0] == 413
    held = io.BytesIO()
    np.savez_compressed(held, np.zeros((200, 500, 500, 3), np.uint8))
    assert refused(held.getvalue(), "bomb.npz")[0] == 415


@pytest.mark.parametrize("kind", ["gif", "npy"])
def test_clips_of_one_pixel_are_refused(kind: str) -> None:
    held = io.BytesIO()
    if kind == "npy":
        np.save(held, np.zeros((4, 1, 1, 3), np.uint8))
    else:
        held.write(gif_of(4, 1, 1, (1, 1)))
    status, said = refused(held.getvalue(), f"dot.{kind}")
    assert status == 415 and "1×1" in said


@pytest.mark.parametrize(
    ("held", "name"),
    [
        (b"", "empty.gif"),
        (b"GIF89a", "cut.gif"),
        (b"not a clip at all", "x.mp4"),
        (b"not a clip at all", "x.mpg"),
        (packed("gif")[:300], "half.gif"),
        (b"\x93NUMPY", "x.npy"),
    ],
)
def test_damaged_clips_are_refused_in_a_sentence(held: bytes, name: str) -> None:
    status, said = refused(held, name)
    assert status == 415 and name in said


@pytest.mark.parametrize("kind", ["gif"])
def test_a_gif_is_measured_as_pillow_counts(kind: str) -> None:
    for count in (2, 7):
        image = Image.open(io.BytesIO(packed(kind, count)))
        assert measure_gif(packed(kind, count), 100) == (image.n_frames, image.size)


@pytest.mark.slow
def test_films_are_read_from_memory_where_the_decoder_is(tmp_path: Path, model: Model) -> None:
    av = pytest.importorskip("av")
    file = tmp_path / "clip.mp4"
    with av.open(str(file), "w") as made:
        stream = made.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 48, 40, "yuv420p"
        for one in frames():
            made.mux(stream.encode(av.VideoFrame.from_image(one)))
        made.mux(stream.encode())
    clip = read_clip(Part("clip.mp4", file.read_bytes()), FREE, FRAMES)
    own = vitreous.images.videos.read(file, FRAMES)
    assert clip.count == 6 and clip.video.picked == own.picked
    assert all(np.array_equal(one, other) for one, other in zip(clip.video.frames, own.frames))
    few = Limits(frames=3)
    assert refused(file.read_bytes(), "clip.mp4", few)[0] == 413
    playlist = f"#EXTM3U\n#EXTINF:1,\n{file}\n#EXT-X-ENDLIST\n".encode()  # names a file of the server
    assert refused(playlist, "clip.mp4")[0] == 415


@pytest.mark.skipif("av" in sys.modules, reason="a decoder is here")
def test_films_need_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitreous.images.videos.find_spec", lambda name: None)
    status, said = refused(b"x", "clip.mp4")
    assert status == 415 and "pip install 'vitreous[video]'" in said
