"""Concepts: built, stored, used, refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from conftest import Run, off
from machine import ROUNDING
from PIL import Image

import vitreous
from vitreous import Concept, Trace
from vitreous.errors import EmptyMap, InputError, TargetError
from vitreous.models.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(random.integers(0, 255, (80, 90, 3), dtype=np.uint8)).save(tmp_path / f"example {i}.png")
    return tmp_path


def test_it_is_the_mean_embedding(folder: Path) -> None:
    model = zoo.model("timm ViT")
    concept = Concept.from_images(model, folder, name="noise")
    paths = sorted(folder.glob("*.png"))
    net = zoo.network("timm ViT")
    with torch.no_grad():
        z = net.forward_head(net.forward_features(model.prepare(paths)), pre_logits=True)
    assert torch.allclose(concept.vector, z.mean(0), atol=1e-5)
    assert concept.examples == ("example 0.png", "example 1.png", "example 2.png")
    assert torch.allclose(Concept.from_images(model, paths).vector, concept.vector)
    one = Concept.from_images(model, [Image.open(paths[0])]).vector
    assert torch.allclose(one, z[0], atol=1e-5)


def test_oracle_vectors(deit: vitreous.Model, oracle: object) -> None:
    from conftest import off

    for name in ("dog", "cat"):
        stored = oracle("inputs", f"_concept/{name}/images_uint8")  # type: ignore[operator]
        images = [Image.fromarray(x if x.shape[-1] == 3 else x.transpose(1, 2, 0)) for x in stored]
        mean, std = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        tensor = torch.stack(
            [
                (torch.from_numpy(np.asarray(i).copy()).float() / 255 - torch.tensor(mean)) / torch.tensor(std)
                for i in images
            ]
        )
        concept = Concept.from_images(deit, tensor.permute(0, 3, 1, 2))
        assert off(concept.vector, oracle("cdam", f"_concept/{name}/vector_f64")) < 1e-4  # type: ignore[operator]


@pytest.mark.parametrize("similarity", ["dot", "cosine", "l2"])
def test_similarities(similarity: str) -> None:
    trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT"))
    z = trace.any_finished().embedding.detach()
    c = torch.randn(32, generator=torch.Generator().manual_seed(0))
    expected = {"dot": z @ c, "cosine": torch.cosine_similarity(z, c[None]), "l2": -(z - c).norm(dim=-1)}[similarity]
    assert torch.allclose(trace.score(Concept(c, similarity)), expected, atol=1e-5)  # type: ignore[arg-type]


def test_the_images_own_embedding_has_a_gradient_of_zero_not_nan() -> None:
    trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT")[:1])
    concept = Concept(trace.cut(seen=False).embedding.detach()[0], "l2")  # of the very run that cdam differentiates
    with pytest.raises(EmptyMap, match="zero everywhere"):
        vitreous.explain(trace.model, trace, "cdam", concept)


@pytest.mark.parametrize(
    "name", ["timm SigLIP", "HF CLIP vision sdpa", "torchvision ViT", "open_clip ViT-B-32", "timm BEiT"]
)
def test_backbones_and_classifiers_are_explained(name: str) -> None:
    model, images = zoo.model(name), zoo.images(name)
    concept = Concept.from_images(model, images[:2])
    for method in ("cdam", "gae", "gradcam", "legrad", "gradient"):
        assert vitreous.explain(model, images, method, concept).map.abs().max() > 0


def test_saved_and_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.model("timm ViT")
    concept = Concept.from_images(model, folder, "cosine", name="noise")
    file = concept.save(folder / "deep" / "noise.safetensors")
    again = Concept.load(file)
    assert torch.equal(again.vector, concept.vector)
    assert (again.similarity, again.name, again.model, again.examples) == (
        "cosine",
        "noise",
        concept.model,
        concept.examples,
    )
    assert [p.name for p in file.parent.iterdir()] == ["noise.safetensors"]
    expected = vitreous.explain(model, zoo.images("timm ViT"), "cdam", concept).map
    by_path = vitreous.explain(model, zoo.images("timm ViT"), "cdam", f"concept:{file}")
    assert off(by_path.map, expected) <= ROUNDING
    assert by_path.target == "concept:noise"
    monkeypatch.chdir(folder)
    concept.save(Path("vitreous-concepts") / "noise.safetensors")
    found = vitreous.explain(model, zoo.images("timm ViT"), "cdam", "concept:noise")
    assert off(found.map, expected) <= ROUNDING
    with pytest.raises(TargetError, match="no concept 'nois' here; did you mean noise"):
        vitreous.explain(model, zoo.images("timm ViT"), "cdam", "concept:nois")


def test_another_model_is_refused(folder: Path) -> None:
    concept = Concept.from_images(zoo.model("timm ViT"), folder, name="noise")
    with pytest.raises(TargetError, match="'noise' was built on another model than"):
        vitreous.explain(zoo.model("torch.compile"), zoo.images("timm ViT"), "cdam", concept)


def test_the_same_weights_in_another_precision_are_the_same_model() -> None:
    net = zoo.ZOO["timm ViT"].make().eval()
    net.load_state_dict(zoo.network("timm ViT").state_dict())
    same = fingerprint(zoo.model("timm ViT"))
    assert fingerprint(vitreous.Model(net)) == same
    assert fingerprint(vitreous.Model(net.bfloat16())) == same
    with torch.no_grad():
        net.head.weight[0, 0] += 1
    assert fingerprint(vitreous.Model(net)) != same


def test_bad_examples_and_files(tmp_path: Path) -> None:
    model = zoo.model("timm ViT")
    with pytest.raises(InputError, match="no images in this folder"):
        Concept.from_images(model, tmp_path)
    with pytest.raises(InputError, match="at least one example"):
        Concept.from_images(model, [])
    (tmp_path / "bad.png").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"bad\.png"):
        Concept.from_images(model, tmp_path)
    with pytest.raises(TargetError, match="is not a concept file"):
        Concept.load(tmp_path / "bad.png")
    with pytest.raises(TargetError, match="unknown similarity 'dots'"):
        Concept(torch.zeros(3), "dots")  # type: ignore[arg-type]
    for wrong in (torch.zeros(1, 3), torch.full((3,), torch.nan), np.arange(3)):
        with pytest.raises(TargetError, match="one vector of finite numbers"):
            Concept(wrong)  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="has 3 numbers, the model's embedding 32"):
        vitreous.explain(model, zoo.images("timm ViT"), "cdam", Concept(torch.zeros(3)))
    with pytest.raises(TargetError, match="no single embedding"):
        Concept.from_images(zoo.model("timm DeiT distilled"), zoo.images("timm DeiT distilled"))


def test_command_line(run: Run, folder: Path, cat: Path) -> None:
    assert "no concepts" in run("concept", "list").out
    assert "3 images, cosine" in run("concept", "build", "noise", folder, "--similarity", "cosine").out
    assert Concept.load("vitreous-concepts/noise.safetensors").similarity == "cosine"
    assert run("concept", "list").out == "noise  3 images, cosine\n"
    assert run("explain", cat, "--method", "cdam", "--target", "concept:noise,282").code == 0
    with np.load("vitreous-out/cat.npz") as stored:
        assert {"cdam@concept:noise", "cdam@282"} <= set(stored)
    (folder / "empty").mkdir()
    (folder / "bad.png").write_bytes(b"nothing")
    for words, said in {
        ("empty",): "no images in this folder",
        ("nowhere.png",): "no such file",
        ("",): "an empty name is not an image",
        ("bad.png",): "bad.png",
        (cat, "--similarity", "near"): "--similarity near: must be one of dot, cosine, l2",
    }.items():
        assert said in run("concept", "build", "other", *words).error
    assert "is not a plain name" in run("concept", "build", "", cat).error
    assert "an empty name" in run("explain", "").error
    assert [p.name for p in Path("vitreous-concepts").iterdir()] == ["noise.safetensors"], "nothing half-written"
