"""A map and where it came from: the numbers stay as they are, whatever is done with them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import off
from machine import ROUNDING
from PIL import Image

import vitreous
from vitreous import Attribution, Model, registry
from vitreous._support.files import FIGURES
from vitreous.attribution import join
from vitreous.errors import InputError, OptionError, TargetError
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped
from vitreous.trace.views import Views


def made(count: int = 3, **changes: Any) -> Attribution:
    """Signed numbers far from 0…1."""
    maps = torch.linspace(-70, 130, count * 20).reshape(count, 4, 5)
    usual: dict[str, Any] = {
        "method": "rollout",
        "options": {"discard": 0.9},
        "targets": (None,) * count,
        "model": "m",
        "signed": True,
    }
    return Attribution(map=maps, **{**usual, **changes})


@pytest.fixture(scope="module")
def small() -> Model:
    """A tiny classifier that takes photos of any shape."""
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), name="small")


@pytest.fixture
def shots(tmp_path: Path, cat: Path) -> list[Path]:
    """Nineteen different photos: two batches."""
    with Image.open(cat) as photo:
        for i in range(19):
            photo.crop((4 * i, 2 * i, 4 * i + 120, 2 * i + 90)).save(tmp_path / f"{i:02}.png")
    return sorted(tmp_path.glob("*.png"))


# ---------------------------------------------------------------------------------------------- the numbers themselves


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_maps_are_float32_and_otherwise_as_the_method_made_them(dtype: torch.dtype, small: Model) -> None:
    """Nothing is normalised, clipped or made positive on the way out."""

    def raw(trace: Any, target: Any) -> Any:
        """Numbers."""
        return (torch.arange(len(trace) * 16).reshape(-1, 4, 4) * 1000 - 5000).to(dtype)

    with registry.METHODS.temporary():
        registry.method(signed=True)(raw)
        found = vitreous.explain(small, zoo.images("timm ViT"), "raw")
    assert found.map.dtype == torch.float32
    assert found.signed
    assert torch.equal(found.map, (torch.arange(48).reshape(3, 4, 4) * 1000 - 5000).to(dtype).float())
    assert found.map.min() < -4900


@pytest.mark.parametrize("size", [(8, 10), (7, 23), 12, (2, 2)])
def test_resize_is_bilinear(size: Any) -> None:
    one = made()
    shape = (size, size) if isinstance(size, int) else size
    expected = F.interpolate(one.map[:, None], shape, mode="bilinear", align_corners=False)[:, 0]
    resized = one.resize(size)
    assert torch.equal(resized.map, expected)
    assert one.map.shape == (3, 4, 5), "the original stays"
    assert resized.provenance == one.provenance


def test_images_one_by_one() -> None:
    three = made(notes={"score": [1.0, 2.0, 3.0], "best": torch.tensor([4, 5, 6]), "layers": 12, "pair": [7, 8]})
    assert len(three) == 3
    assert [len(one) for one in three] == [1, 1, 1]
    for index, one in enumerate(three):
        assert torch.equal(one.map, three.map[index : index + 1])
        assert one.provenance["notes"] == {
            "score": [1.0 + index],
            "best": [4 + index],
            "layers": 12,
            "pair": [7, 8],
        }
    assert torch.equal(three[-1].map, three.map[2:])
    with pytest.raises(IndexError):
        three[3]


def test_each_image_keeps_its_own_target() -> None:
    assert [one.target for one in made(targets=("5", "6", "7"))] == ["5", "6", "7"]
    assert [one.targets for one in made(targets=("5", "6", "7"))] == [("5",), ("6",), ("7",)]
    assert [one.target for one in made(targets=("5",) * 3)] == ["5", "5", "5"]
    assert made().targets == (None,) * 3 and made().target is None
    assert made(targets=("5-1", "6-2", "7-3")).target == "5-1;6-2;7-3"
    assert made(targets=("text:red; green; blue",) * 3).targets == ("text:red; green; blue",) * 3
    with pytest.raises(TargetError, match="2 targets for 3 maps"):
        made(targets=("1", "2"))


def test_files_of_the_first_version_keep_their_targets(tmp_path: Path) -> None:
    for joined, expected in (("5;6;7", ("5", "6", "7")), ("5", ("5",) * 3), ("text:a;b;c", ("text:a;b;c",) * 3)):
        told = {key: value for key, value in made().provenance.items() if key != "targets"} | {"target": joined}
        np.savez(tmp_path / "old.npz", map=made().map.numpy(), provenance=json.dumps(told))
        assert Attribution.load(tmp_path / "old.npz").targets == expected


def test_each_image_keeps_its_own_name(small: Model, shots: list[Path]) -> None:
    mixed = [
        shots[0],
        np.asarray(Image.open(shots[1])),
        Image.open(shots[2]),
        str(shots[3]),
        Image.new("RGB", (64, 64)),
    ]
    found = vitreous.explain(small, mixed, "rollout")
    assert found.names == ["00.png", "image 1", "02.png", "03.png", "image 4"]
    assert [one.names[0] for one in found] == found.names
    assert found[1].views is not None
    assert found[1][0].names == ["image 1"]
    assert made().names == ["image 0", "image 1", "image 2"]


# --------------------------------------------------------------------------------------------------------- provenance


def test_provenance_is_json(small: Model, cat: Path) -> None:
    found = vitreous.explain(small, cat, "rollout", discard=0.5)
    told = json.loads(json.dumps(found.provenance, allow_nan=False))
    assert told == found.provenance
    assert told["method"] == "rollout"
    assert told["options"] == {"heads": "mean", "discard": 0.5, "residual": 0.5, "start_layer": 0}, "also the defaults"
    assert told["model"] == "small"
    assert told["images"] == ["cat.jpg"]
    assert told["signed"] is False
    assert told["target"] is None
    assert told["vitreous"] == vitreous.__version__


def test_provenance_of_odd_values_is_json() -> None:
    notes = {
        "a": torch.ones(2),
        "b": np.float32(0.5),
        "c": (1, [np.arange(2)]),
        "d": {"e": torch.tensor(3)},
        "f": Path("x"),
    }
    told = made(notes=notes, options={"query": (3, 4)}).provenance
    assert json.loads(json.dumps(told)) == told
    assert told["options"] == {"query": [3, 4]}
    assert told["notes"] == {"a": [1.0, 1.0], "b": 0.5, "c": [1, [[0, 1]]], "d": {"e": 3}, "f": "x"}


def test_the_map_can_be_made_again_from_its_provenance(small: Model, cat: Path) -> None:
    found = vitreous.explain(small, cat, "attention", layer=1, heads=0, query=(1, 2))
    told = json.loads(json.dumps(found.provenance))
    again = vitreous.explain(small, cat, told["method"], told["target"], **told["options"])
    assert off(again.map, found.map) <= ROUNDING


# ------------------------------------------------------------------------------------------------------------- saving


def test_npz_round_trip(tmp_path: Path) -> None:
    one = made(targets=("5", "6", "7"), notes={"score": [1.0, 2.0, 3.0]})
    path = one.save(tmp_path / "new" / "folder" / "maps.npz")
    back = Attribution.load(path)
    assert path == tmp_path / "new" / "folder" / "maps.npz"
    assert torch.equal(back.map, one.map)
    assert back.map.dtype == torch.float32
    assert back.provenance == one.provenance
    with np.load(path, allow_pickle=False) as stored:
        assert np.array_equal(stored["map"], one.map.numpy())
    assert [p.name for p in path.parent.iterdir()] == ["maps.npz"], "no draft is left"


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made().save(tmp_path / "maps.npz")
    before = (tmp_path / "maps.npz").read_bytes()

    real = Path.write_bytes

    def interrupted(file: Path, content: bytes) -> None:
        real(file, content[: len(content) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(1).save(tmp_path / "maps.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["maps.npz"]
    assert (tmp_path / "maps.npz").read_bytes() == before


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.npz: no such file"):
        Attribution.load(tmp_path / "gone.npz")
    (tmp_path / "text.npz").write_text("text")
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    whole = made().save(tmp_path / "half.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    for name in ("text", "other", "half"):
        with pytest.raises(InputError, match=f"{name}.npz is not an .npz file of maps written by vitreous"):
            Attribution.load(tmp_path / f"{name}.npz")


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PNG", b"\x89PNG")])
def test_save_as_a_figure(ending: str, start: bytes, small: Model, cat: Path, tmp_path: Path) -> None:
    path = vitreous.explain(small, cat, "rollout").save(tmp_path / f"figure.{ending}")
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 5000


@pytest.mark.parametrize("name", ["map.txt", "map", "map.npy"])
def test_unknown_endings_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot save as") as caught:
        made().save(tmp_path / name)
    assert all(ending in str(caught.value) for ending in (".npz", *FIGURES))
    assert not list(tmp_path.iterdir())


def test_notebooks_get_a_png(small: Model, cat: Path) -> None:
    data = vitreous.explain(small, cat, "rollout")._repr_png_()
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "PNG"
        assert min(image.size) > 300
    assert made()._repr_png_().startswith(b"\x89PNG"), "also without the photos"


# ------------------------------------------------------------------------------------------------------------ drawing


def test_overlay_is_what_the_model_saw(small: Model, cat: Path) -> None:
    """A square crop of the landscape photo, in the photo's own resolution."""
    found = vitreous.explain(small, cat, "rollout")
    with Image.open(cat) as photo:
        side = min(photo.size)
        assert photo.width > photo.height
    drawn = found.overlay()
    assert drawn.size == pytest.approx((max(side, 448),) * 2, abs=2)
    assert drawn.mode == "RGB"
    assert np.array_equal(np.asarray(found.overlay(cat)), np.asarray(drawn)), "the same photo, given"
    with Image.open(cat) as photo:
        assert np.array_equal(np.asarray(found.overlay(photo)), np.asarray(drawn))
        assert np.array_equal(np.asarray(found.overlay(np.asarray(photo))), np.asarray(drawn))
    other = found.overlay(Image.new("RGB", (600, 500), "green"))
    assert other.size == pytest.approx((500, 500), rel=0.02), "600 pixels become 76, not 76.8"
    assert not np.array_equal(np.asarray(found.overlay(cells=True)), np.asarray(drawn))


def test_overlay_of_each_image(small: Model, shots: list[Path]) -> None:
    found = vitreous.explain(small, shots[:3], "rollout")
    for index in range(3):
        assert np.array_equal(np.asarray(found.overlay(index=index)), np.asarray(found[index].overlay()))
    assert not np.array_equal(np.asarray(found.overlay(index=0)), np.asarray(found.overlay(index=1)))


def test_overlay_on_a_tensor_shows_its_colours(small: Model, cat: Path) -> None:
    x = small.prepare(cat)
    view = vitreous.explain(small, x, "rollout").seen()
    assert view.size == (64, 64)
    expected = small.preprocess.colours(x[0]) * 255
    assert np.abs(np.asarray(view) - expected).max() <= 0.5


def test_overlay_without_a_photo_asks_for_one(cat: Path) -> None:
    with pytest.raises(InputError, match=r"give one: overlay\(image\)"):
        made().overlay()
    with Image.open(cat) as photo:
        assert made().overlay(cat).size == tuple(max(448, max(photo.size)) * s // max(photo.size) for s in photo.size)


# ------------------------------------------------------------------------------------------------------ many images


@pytest.mark.parametrize("method", ["rollout", "attention", "random"])
def test_several_batches_equal_one_by_one(method: str, small: Model, shots: list[Path]) -> None:
    together = vitreous.explain(small, shots, method)
    assert together.map.shape == (19, 4, 4)
    assert together.names == [path.name for path in shots]
    for i in (0, 7, 15, 16, 18):
        alone = vitreous.explain(small, shots[i], method).map[0]
        assert off(together.map[i], alone) <= ROUNDING
    assert np.array_equal(np.asarray(together.seen(index=17)), np.asarray(vitreous.explain(small, shots[17]).seen()))


def test_several_batches_of_a_tensor(small: Model) -> None:
    x = zoo.images("timm ViT", 35)
    together = vitreous.explain(small, x, "rollout")
    assert off(together.map[20:23], vitreous.explain(small, x[20:23], "rollout").map) <= ROUNDING
    assert together.names[34] == "image 34"
    assert together.seen(index=34).size == (64, 64)


def test_mixed_inputs_are_one_batch(small: Model, shots: list[Path]) -> None:
    with Image.open(shots[0]) as opened:
        array = np.asarray(opened)
        kinds = [shots[0], str(shots[0]), opened, array, array.transpose(2, 0, 1), torch.from_numpy(array.copy())]
        maps = vitreous.explain(small, kinds, "rollout").map
    assert maps.shape == (6, 4, 4)
    assert off(maps, maps[:1].expand(6, -1, -1)) <= ROUNDING, "however it is given, it is the same picture"


def test_no_images(small: Model) -> None:
    for nothing in ([], (), np.zeros((0, 64, 64, 3), np.uint8), torch.zeros(0, 3, 64, 64)):
        with pytest.raises(InputError, match="no images"):
            vitreous.explain(small, nothing, "rollout")


@pytest.mark.parametrize("targets", [[1, 2], (1, 2, 3, 4), torch.tensor([1])])
def test_targets_must_be_as_many_as_images(targets: Any, small: Model) -> None:
    with pytest.raises(TargetError, match=rf"{len(targets)} targets for 3 images; give one, or one for each image"):
        vitreous.explain(small, zoo.images("timm ViT"), "rollout", targets)


def test_one_bad_picture_among_many_is_named(small: Model, shots: list[Path]) -> None:
    shots[3].write_bytes(b"not a picture")
    with pytest.raises(InputError, match=r"03\.png: is not an image"):
        vitreous.explain(small, shots, "rollout")


def test_joined_batches_keep_their_targets_and_notes() -> None:
    parts = [
        made(2, targets=("5", "5"), notes={"score": [1, 2], "layers": 3}),
        made(1, targets=("5",), notes={"score": [9], "layers": 3}),
    ]
    whole = join(parts)
    assert whole.target == "5", "the same for all"
    assert whole.notes == {"score": [1, 2, 9], "layers": 3}
    assert len(whole) == 3
    assert join([made(2, targets=("5", "6")), made(1, targets=("5",))]).targets == ("5", "6", "5")
    assert join([made(2), made(2)]).target is None
    assert join(parts[:1]) is parts[0]


def test_views_are_made_only_when_looked_at(small: Model, tmp_path: Path, cat: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(cat.read_bytes())
    views = Views.of(path, small)
    assert len(views) == 1
    path.unlink()
    assert views.name(0) == "photo.jpg"
    with pytest.raises(InputError, match=r"photo\.jpg: no such file"):
        views[0]


def test_controls_are_drawn_in_grey(cat: Path) -> None:
    """On a grey photo a control leaves grey, any other map colour."""
    grey = Image.new("RGB", (224, 224), (128, 128, 128))
    for method, coloured in (("random", False), ("centre", False), ("rollout", True)):
        drawn = np.asarray(vitreous.explain(zoo.model("timm ViT"), grey, method).overlay()).astype(int)
        assert (np.ptp(drawn, axis=-1).max() > 12) == coloured, method
