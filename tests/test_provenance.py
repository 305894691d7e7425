"""Every result says what made it: the weights, the image, the target, the preprocessing, the options, the versions."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Run
from PIL import Image
from safetensors.torch import save_file

import vitreous
from vitreous import Attribution, Model
from vitreous._support.marks import read_mark
from vitreous.attribution import mark_of
from vitreous.errors import InputError, ModelWarning
from vitreous.evaluation.study.read import open_study
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped
from vitreous.version import VERSION

FIRST_RELEASE = Path(__file__).parent / "first_release"
ARCHITECTURE = "vit_tiny_patch16_224"


@pytest.fixture
def small() -> Model:
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), name="small")


@pytest.fixture
def photo(tmp_path: Path, cat: Path) -> Path:
    with Image.open(cat) as opened:
        opened.crop((0, 0, 120, 90)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# ------------------------------------------------------------------------------------------------------ what is told


def test_the_weights_file_and_its_content_are_named(tmp_path: Path, photo: Path) -> None:
    file = tmp_path / "mine.safetensors"
    save_file(vitreous.load().module.state_dict(), file)
    found = vitreous.explain(vitreous.load(weights=file), photo, "attention")
    told = found.provenance
    assert told["weights"]["files"] == [{"path": str(file), "sha256": sha(file)}]
    assert told["spec"] == "embedded/vitreous_tiny" and told["library"] == "timm"
    other = vitreous.load().module.state_dict()
    next(iter(other.values())).view(-1)[1234 % next(iter(other.values())).numel()] += 1e-3  # one number of millions
    save_file(other, tmp_path / "other.safetensors")
    changed = vitreous.explain(vitreous.load(weights=tmp_path / "other.safetensors"), photo, "attention")
    assert changed.provenance["weights"]["digest"] != told["weights"]["digest"]
    assert changed.identity != found.identity


def test_the_command_names_the_weights_that_were_given(run: Run, photo: Path, tmp_path: Path) -> None:
    save_file(vitreous.load().module.state_dict(), tmp_path / "plain.safetensors")
    words = ["explain", str(photo), "--method", "attention", "--format", "none"]
    assert "explained by vitreous_tiny with attention" in run(*words).out
    ran = run(*words, "--weights", str(tmp_path / "plain.safetensors"))
    assert "explained by vitreous_tiny (plain.safetensors) with attention" in ran.out
    told = json.loads(run(*words, "--weights", str(tmp_path / "plain.safetensors"), "--json").out)
    assert told["weights"] == [str(tmp_path / "plain.safetensors")]


def test_a_file_of_weights_that_was_replaced_has_no_hash(tmp_path: Path, photo: Path) -> None:
    file = tmp_path / "last.safetensors"
    save_file(vitreous.load().module.state_dict(), file)
    model = vitreous.load(weights=file)
    file.write_bytes(b"the next epoch")
    (told,) = vitreous.explain(model, photo, "attention").provenance["weights"]["files"]
    assert told["sha256"] is None and told["note"] == "the file has changed since it was loaded"


def test_the_image_its_path_and_its_content_are_named(small: Model, photo: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(photo.parent)
    for given in ("photo.png", Path("photo.png"), photo):
        (told,) = vitreous.explain(small, given, "attention").provenance["sources"]
        assert told == {"name": "photo.png", "path": str(photo), "sha256": sha(photo)}


def test_images_in_memory_are_identified_by_their_pixels(small: Model, photo: Path) -> None:
    with Image.open(photo) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    changed = pixels.copy()
    changed[3, 4, 0] ^= 1
    hashes = [
        vitreous.explain(small, given, "attention").provenance["sources"][0]["pixels_sha256"]
        for given in (pixels, Image.fromarray(pixels), changed, torch.zeros(1, 3, 64, 64))
    ]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_an_image_that_was_replaced_has_no_hash(small: Model, photo: Path) -> None:
    found = vitreous.explain(small, photo, "attention")
    Image.new("RGB", (80, 80), "red").save(photo)
    assert found.provenance["sources"][0]["note"] == "the file has changed since it was read"
    photo.unlink()
    assert found.provenance["sources"][0]["sha256"] is None


def test_the_target_has_its_label_and_probability(photo: Path) -> None:
    model = vitreous.load()
    trace = vitreous.Trace(model, [photo, photo])
    shares = trace.output.softmax(-1)
    found = vitreous.explain(model, trace, "gae", target=[281, "top-2"])
    second = int(shares[1].topk(2).indices[1])
    assert found.labels == ("tabby", model.label(second))
    assert found.probabilities == pytest.approx((shares[0, 281].item(), shares[1, second].item()))
    assert found.provenance["labels"] == list(found.labels)
    assert vitreous.explain(model, trace, "attention").labels == ()
    (contrast,) = vitreous.explain(model, photo, "gae", target="281-282").labels
    assert contrast is not None and contrast.startswith("tabby ") and " rather than tiger cat" in contrast


def test_input_preprocessing_options_and_versions_are_told(small: Model, photo: Path) -> None:
    told = vitreous.explain(small, photo, "rollout", discard=0.5).provenance
    assert told["options"]["discard"] == 0.5
    assert told["input"] == {"size": [64, 64], "channels": 3, "dtype": "float32"}
    assert told["preprocess"]["mean"] == pytest.approx(IMAGENET[0]) and told["preprocess"]["size"] == [64, 64]
    assert "CenterCrop" in told["preprocess"]["transform"] and " at 0x" not in told["preprocess"]["transform"]
    assert told["versions"]["vitreous"] == VERSION and told["versions"]["torch"] == torch.__version__
    json.dumps(told)


def test_weights_changed_after_the_maps_are_not_taken_for_theirs(small: Model, photo: Path) -> None:
    before = vitreous.explain(small, photo, "attention")
    first = before.provenance["weights"]["digest"]
    later = vitreous.explain(small, photo, "attention")
    with torch.no_grad():
        next(small.net.parameters()).add_(0.1)  # as an optimiser does
    assert later.provenance["weights"] == {"files": [], "digest": None, "note": later.made_by.weights["note"]}  # type: ignore[union-attr]
    after = vitreous.explain(small, photo, "attention").provenance["weights"]["digest"]
    assert first != after is not None


def test_what_identifies_a_result(small: Model, photo: Path) -> None:
    """The same question has the same identity, wherever its files lie; any other has another."""
    first = vitreous.explain(small, photo, "rollout")
    moved = photo.parent / "elsewhere" / "photo.png"
    moved.parent.mkdir()
    moved.write_bytes(photo.read_bytes())
    assert vitreous.explain(small, photo, "rollout").identity == first.identity
    assert vitreous.explain(small, moved, "rollout").identity == first.identity
    wide = Model(small.net, cropped((64, 64), *IMAGENET, crop=0.5), name="small")
    others = [
        vitreous.explain(small, photo, "attention"),
        vitreous.explain(small, photo, "rollout", discard=0.5),
        vitreous.explain(wide, photo, "rollout"),
        vitreous.explain(small, photo, "gae", target=1),
        vitreous.explain(small, photo, "gae", target=2),
    ]
    assert len({first.identity, *(one.identity for one in others)}) == 6


def test_assumed_preprocessing_is_said(photo: Path, tmp_path: Path, run: Run) -> None:
    """Neither given nor stored with the model: a warning in Python, a note on the command line, and in the result."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    net = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=64))
    with pytest.warns(ModelWarning, match="its preprocessing is assumed: 64×64, mean 0.5, 0.5, 0.5, .* give your own"):
        found = vitreous.explain(net, photo, "attention")
    assert found.provenance["preprocess"]["assumed"] is True
    net.save_pretrained(tmp_path / "folder")
    ran = run("explain", str(photo), "--model", f"hf/{tmp_path / 'folder'}", "--method", "attention", "--out", "out")
    assert ran.code == 0 and ran.err.count("its preprocessing is assumed") == 1 and "Warning" not in ran.err
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path / "folder")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = vitreous.explain(f"hf/{tmp_path / 'folder'}", photo, "attention")
    assert "assumed" not in stored.provenance["preprocess"]
    with pytest.warns(ModelWarning, match="its preprocessing is assumed"):
        Model(zoo.network("hand-written")).prepare(photo)


# --------------------------------------------------------------------------------------------------- where it is told


@pytest.mark.parametrize("ending", ["npz", "png", "jpg", "webp", "svg", "pdf"])
def test_every_file_says_what_made_it(ending: str, small: Model, photo: Path, tmp_path: Path) -> None:
    found = vitreous.explain(small, photo, "gae", target=1)
    mark = read_mark(found.save(tmp_path / f"a.{ending}"))
    assert mark == {"vitreous": 2, **json.loads(json.dumps(mark_of({"map": found})))}
    assert mark is not None and mark["maps"]["map"]["weights"]["digest"]


def test_a_file_brings_its_provenance_back(small: Model, photo: Path, tmp_path: Path) -> None:
    found = vitreous.explain(small, [photo, photo], "gae", target=[1, 2])
    again = Attribution.load(found.save(tmp_path / "a.npz"))
    assert torch.equal(again.map, found.map)
    assert again.provenance == json.loads(json.dumps(found.provenance))
    assert again.identity == found.identity and again.names == found.names
    assert again[1].provenance == json.loads(json.dumps(found[1].provenance))
    assert again[1].provenance["targets"] == ["2"] and len(again[1].provenance["sources"]) == 1
    assert Attribution.load(again.save(tmp_path / "b.npz")).provenance == again.provenance


def test_views_and_maximized_images_say_what_made_them(small: Model, photo: Path, tmp_path: Path) -> None:
    view = vitreous.inspect.heads(small, photo)
    for ending in ("npz", "png"):
        mark = read_mark(view.save(tmp_path / f"heads.{ending}"))
        assert mark is not None and mark["view"] == "heads" and mark["weights"]["digest"] and mark["identity"]
        assert mark["sources"] == [{"name": "photo.png", "path": str(photo), "sha256": sha(photo)}]
    made = vitreous.maximize(small, "class:1", steps=1)
    files = [made.save(tmp_path / "m.npz"), made.save(tmp_path / "m.png"), made.save_image(tmp_path / "i.png")]
    for file in (*files, made.save_gif(tmp_path / "m.gif")):
        mark = read_mark(file)
        assert mark is not None and mark["units"] == ["class:1"] and mark["weights"]["digest"] and mark["identity"]


def test_show_prints_what_made_a_result(run: Run, small: Model, photo: Path, tmp_path: Path) -> None:
    file = vitreous.explain(small, photo, "gae", target=1).save(tmp_path / "a.png")
    shown = run("show", str(file))
    assert shown.code == 0
    for part in ("1 map", str(photo), sha(photo), "gae", "class 1", "0.485", torch.__version__, "digest"):
        assert part in shown.out, part
    assert json.loads(run("show", str(file), "--json").out) == read_mark(file)


def test_show_refuses_what_vitreous_did_not_write(run: Run, photo: Path, tmp_path: Path) -> None:
    assert "does not say what made it" in run("show", str(photo)).err
    assert "no such file" in run("show", str(tmp_path / "none.png")).err
    (tmp_path / "b.png").write_bytes(b"rubbish")
    assert "cannot be read" in run("show", str(tmp_path / "b.png")).err


# ----------------------------------------------------------------------------------------------------------- versions


def test_files_of_the_first_release_open(run: Run) -> None:
    """They were written by that release itself."""
    batch = Attribution.load(FIRST_RELEASE / "attribution.npz")
    assert batch.map.shape == (2, 14, 14) and batch.targets == ("281", "285") and batch.names == ["cat.jpg"] * 2
    assert batch.version == "0.1.0" and batch.provenance["method"] == "gae" and batch.identity
    one = Attribution.load(FIRST_RELEASE / "explained.npz", "gae@281")
    assert one.map.shape == (1, 14, 14) and one.target == "281"
    assert torch.allclose(one.map[0], batch.map[0])
    assert "3 maps" in run("show", str(FIRST_RELEASE / "explained.npz")).out


def test_a_study_of_the_first_release_opens() -> None:
    study = open_study(FIRST_RELEASE / "study")
    rows = study.to_pandas()
    assert list(rows["method"]) == ["gae", "rollout"] and rows["error"].isna().all()
    assert all(np.isfinite(row["map"]).all() and row["map"].shape == (14, 14) for row in study.iter_maps())


def test_a_file_of_a_later_format_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", map=np.zeros((1, 2, 2)), provenance=json.dumps({"vitreous": 3, "maps": {}}))
    with pytest.raises(InputError, match="written by a newer version of vitreous"):
        Attribution.load(tmp_path / "a.npz")


# ------------------------------------------------------------------------------------------------- as a Python object


def test_slices_and_iteration(small: Model, photo: Path) -> None:
    found = vitreous.explain(small, [photo] * 5, "gae", target=[0, 1, 2, 3, 0])
    assert len(found[1:3]) == 2 and found[1:3].targets == ("1", "2") == found[1:3].targets
    assert torch.equal(found[::2].map, found.map[::2]) and found[::2].labels == found.labels[::2]
    assert found[::2].probabilities == found.probabilities[::2] and len(found[::2].provenance["sources"]) == 3
    assert found[-1].targets == ("0",) and len(found[5:]) == 0
    assert [one.target for one in found] == ["0", "1", "2", "3", "0"]
    assert found[np.int64(1)].target == "1"
    with pytest.raises(IndexError):
        found[5]
    with pytest.raises(TypeError):
        found["gae"]  # type: ignore[index]


def test_slices_keep_the_names_of_unnamed_images(small: Model) -> None:
    found = vitreous.explain(small, torch.zeros(5, 3, 64, 64), "attention")
    assert found[1::2].names == ["image 1", "image 3"] and found[1::2][1].names == ["image 3"]


def test_numpy_takes_it_as_an_array(small: Model, photo: Path) -> None:
    found = vitreous.explain(small, [photo] * 2, "attention")
    array = np.asarray(found)
    assert array.shape == tuple(found.map.shape) and array.dtype == np.float32
    assert np.array_equal(array, found.map.numpy())
    assert np.asarray(found, dtype=np.float64).dtype == np.float64 and np.mean(found) == np.mean(array)


def test_its_representation_is_one_line(small: Model, photo: Path) -> None:
    found = vitreous.explain(small, [photo] * 5, "gae", target=1)
    said = repr(found)
    assert "\n" not in said and "tensor" not in said and len(said) < 200
    for part in ("gae", "small", "5 maps", "4×4", "class 1", "photo.png"):
        assert part in said, part
    assert "1 map " in repr(found[0])
