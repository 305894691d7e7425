"""Models from everywhere, offline; and what is said when one cannot be had."""

from __future__ import annotations

import argparse
import builtins
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import zoo
from conftest import off
from machine import ROUNDING
from PIL import Image
from torch import nn

import vitreous
from vitreous import Model
from vitreous.errors import InputError, ModelError, WeightsError
from vitreous.models import load as sources
from vitreous.models.checkpoint import Blank
from vitreous.models.labels import read_labels
from vitreous.models.libraries import embedded

open_clip = pytest.importorskip("open_clip", reason="models come from open_clip too: pip install 'vitreous[clip]'")
transformers = pytest.importorskip("transformers", reason="and from transformers: pip install 'vitreous[hf]'")

SMALL = "test_vit"  # timm's own toy: 160×160, 1000 classes
CATS = {"tabby", "tiger cat", "Persian cat", "Siamese cat", "Egyptian cat"}


def refusal(*args: Any, kind: type[Exception] = ModelError, **options: Any) -> str:
    """The one line that says why a model cannot be loaded."""
    with pytest.raises(kind) as caught:
        vitreous.load(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def small(classes: int = 1000, **options: Any) -> nn.Module:
    return timm.create_model(SMALL, num_classes=classes, **options).eval()


def saved(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


def equal(net: nn.Module, other: nn.Module) -> bool:
    mine, theirs = net.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


# ------------------------------------------------------------------------------------------------- the embedded one


def test_embedded(tiny: Model, cat: Path) -> None:
    assert tiny.name == "vitreous_tiny"
    assert tiny.dtype == torch.float32
    assert {p.dtype for p in tiny.net.parameters()} == {torch.float32}
    assert len(tiny.labels) == 1000
    assert not tiny.net.training
    assert not any(p.requires_grad for p in tiny.net.parameters())
    assert tiny.label(tiny.run(tiny.prepare(cat)).argmax().item()) in CATS


@pytest.mark.parametrize("spec", ["vitreous_tiny", "embedded"])
def test_embedded_by_name(spec: str, tiny: Model) -> None:
    assert equal(vitreous.load(spec).net, tiny.net)


def test_embedded_at_another_size(cat: Path) -> None:
    model = vitreous.load(img_size=(160, 320))
    assert model.size == (160, 320)
    assert model.label(model.run(model.prepare(cat)).argmax().item()) in CATS


def test_embedded_random_differs(tiny: Model) -> None:
    assert not equal(vitreous.load(weights="random").net, tiny.net)


# ------------------------------------------------------------------------------------------------------------ timm


@pytest.mark.parametrize("spec", [SMALL, f"timm/{SMALL}", f"{SMALL}.r160_in1k"])
def test_timm_random(spec: str) -> None:
    model = vitreous.load(spec, weights="random")
    assert model.size == (160, 160)
    assert len(model.labels) == 1000
    assert model.label(281) == "tabby"
    assert model.classifier


@pytest.mark.parametrize("ending", ["safetensors", "pth", "pt"])
def test_timm_from_a_file(ending: str, tmp_path: Path) -> None:
    net, path = small(), tmp_path / f"weights.{ending}"
    if ending == "safetensors":
        safetensors.torch.save_file(net.state_dict(), path)
    else:
        torch.save(net.state_dict(), path)
    for weights in (path, str(path)):
        assert equal(vitreous.load(SMALL, weights=weights).net, net)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": {f"module.{key}": value for key, value in state.items()}},
        lambda state: {f"_orig_mod.module.{key}": value for key, value in state.items()},
        lambda state: {"state_dict": {f"model.net.{key}": value for key, value in state.items()}},
        lambda state: {"model": state, "args": argparse.Namespace(lr=0.1), "scale": torch.ones(1)},
        lambda state: {"model": {"state_dict": state}, "optimizer": {"lr": 1}},
    ],
    ids=["state_dict", "module.", "compiled", "lightning", "with settings", "nested"],
)
def test_wrapped_checkpoints(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    net = small()
    assert equal(vitreous.load(SMALL, weights=saved(wrap(net.state_dict()), tmp_path / "w.pth")).net, net)


def test_a_fine_tuned_head_tells_the_number_of_classes(tmp_path: Path) -> None:
    path = saved({"state_dict": {f"module.{k}": v for k, v in small(10).state_dict().items()}}, tmp_path / "ten.pth")
    model = vitreous.load(SMALL, weights=path)
    assert model.run(torch.zeros(1, 3, 160, 160)).shape == (1, 10)
    assert not model.labels, "ImageNet's names would be wrong"
    assert model.classifier
    assert model.label(3) == "class 3"


def test_half_precision_files_are_used_in_single_precision(tmp_path: Path) -> None:
    path = saved(small().half().state_dict(), tmp_path / "half.pth")
    assert vitreous.load(SMALL, weights=path).dtype == torch.float32
    assert vitreous.load(SMALL, weights=path, dtype="bfloat16").dtype == torch.bfloat16
    assert vitreous.load(SMALL, weights=path, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(("size", "grid"), [(96, (6, 6)), ((64, 128), (4, 8)), ([64, 128], (4, 8))])
def test_img_size(size: Any, grid: tuple[int, int], tmp_path: Path, cat: Path) -> None:
    """Also from a file made for another size: its position embedding is resampled."""
    path = saved(small().state_dict(), tmp_path / "w.pth")
    model = vitreous.load(SMALL, weights=path, img_size=tuple(size) if isinstance(size, list) else size)
    assert vitreous.explain(model, cat, "attention").map.shape == (1, *grid)


@pytest.mark.parametrize("size", [0, -3, (64,), (64, 0), (64, 64, 3)])
def test_img_size_must_be_one(size: Any) -> None:
    with pytest.raises((ModelError, TypeError)) as caught:
        vitreous.load(SMALL, weights="random", img_size=size)
    assert "img_size" in str(caught.value)


def test_img_size_where_the_model_has_none() -> None:
    assert refusal("test_resnet", "random", img_size=64).startswith("test_resnet does not take another img_size")
    assert "resnet18 does not take another img_size" in refusal("torchvision/resnet18", "random", img_size=64)


# ----------------------------------------------------------------------------------------------------- Hugging Face


def hf_config(kind: str, **more: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return getattr(transformers, f"{kind}Config")(**sizes, **more)


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A classifier of three animals."""
    names = {"id2label": {0: "cat", 1: "dog", 2: "bird"}, "label2id": {"cat": 0, "dog": 1, "bird": 2}}
    config = hf_config("ViT", image_size=64, patch_size=16, **names)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "animals")
    return tmp_path / "animals"


def test_hf_classifier(hf_folder: Path, cat: Path) -> None:
    model = vitreous.load(f"hf/{hf_folder}")
    assert type(model.net).__name__ == "ViTForImageClassification"
    assert model.labels == {0: "cat", 1: "dog", 2: "bird"}
    assert model.name == "animals"
    assert model.size == (64, 64), "the architecture's usual processor, at the model's own size"
    x = model.prepare(cat)
    assert off(model.run(x), model.net(pixel_values=x).logits) <= ROUNDING
    assert vitreous.explain(model, cat, "rollout", "bird").map.shape == (1, 4, 4)


def test_hf_with_its_own_processor(hf_folder: Path, cat: Path) -> None:
    size = {"height": 64, "width": 64}
    processor = transformers.ViTImageProcessor(size=size, image_mean=[0.3, 0.4, 0.5], resample=3)
    processor.save_pretrained(hf_folder)
    model = vitreous.load(f"hf/{hf_folder}")
    with Image.open(cat) as photo:
        theirs = processor(images=photo, return_tensors="pt")["pixel_values"][0]
    assert off(model.prepare(cat)[0], theirs) <= ROUNDING
    larger = vitreous.load(f"hf/{hf_folder}", img_size=(64, 128))
    assert larger.preprocess.mean == pytest.approx([0.3, 0.4, 0.5])
    assert vitreous.explain(larger, cat, "rollout").map.shape == (1, 4, 8)


def test_hf_looks_for_the_processor_on_the_hub_too(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def find(name: str, local_files_only: bool) -> Any:
        asked.append(local_files_only)
        raise OSError("none")

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", find)
    vitreous.load(f"hf/{hf_folder}")
    assert asked == [False], "a model by name may come from there"
    assert Model(transformers.ViTForImageClassification.from_pretrained(hf_folder)).size == (64, 64)
    assert asked == [False, True], "a network that is already here needs no connection"


def test_hf_clip_gives_image_features(tmp_path: Path, cat: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    text = {**sizes, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 64, "patch_size": 16}, projection_dim=24
    )
    net = transformers.CLIPModel(config).eval()
    net.save_pretrained(tmp_path / "clip")
    model = vitreous.load(f"hf/{tmp_path}/clip")
    x = model.prepare(cat)
    expected = net(input_ids=torch.ones(1, 3, dtype=torch.long), pixel_values=x).image_embeds
    assert torch.allclose(nn.functional.normalize(model.run(x), dim=-1), expected, atol=1e-6)
    assert model.classifier is False
    assert not model.labels
    larger = vitreous.load(f"hf/{tmp_path}/clip", img_size=96)
    assert vitreous.explain(larger, cat, "rollout").map.shape == (1, 6, 6)


def test_hf_backbone_is_no_classifier(hf_folder: Path, tmp_path: Path, cat: Path) -> None:
    """A backbone keeps the labels of its fine-tuning in its config; they do not name its features."""
    backbone = transformers.ViTModel.from_pretrained(hf_folder, add_pooling_layer=False)
    backbone.save_pretrained(tmp_path / "backbone")
    model = vitreous.load(f"hf/{tmp_path}/backbone")
    assert not model.labels
    assert model.classifier is False
    x = model.prepare(cat)
    assert off(model.run(x), model.net(pixel_values=x).last_hidden_state[:, 0]) <= ROUNDING, "no pooler of noise"


def test_hf_missing_weights_are_an_error(hf_folder: Path) -> None:
    """transformers itself fills them with noise and goes on."""
    path = hf_folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    del state["classifier.weight"]
    safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    assert refusal(f"hf/{hf_folder}", kind=WeightsError).endswith(
        "its weights do not fit ViTForImageClassification: missing classifier.weight"
    )


def test_hf_with_other_weights(hf_folder: Path, tmp_path: Path) -> None:
    net = transformers.ViTForImageClassification.from_pretrained(hf_folder)
    with torch.no_grad():
        net.classifier.bias.fill_(5)
    path = saved(net.state_dict(), tmp_path / "other.pth")
    assert equal(vitreous.load(f"hf/{hf_folder}", weights=path).net, net)
    assert not equal(vitreous.load(f"hf/{hf_folder}", weights="random").net, net)
    wrong = saved({"a": torch.ones(1)}, tmp_path / "wrong.pth")
    assert "missing vit." in refusal(f"hf/{hf_folder}", weights=wrong, kind=WeightsError)


def test_hf_is_loaded_quietly(hf_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    vitreous.load(f"hf/{hf_folder}")
    assert capfd.readouterr() == ("", "")


def test_hf_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(f"hf/{tmp_path}/nothing").endswith("no such folder")
    assert "no such folder or hub model, or no connection" in refusal("hf/nobody/nothing-at-all")
    assert "config.json" in refusal(f"hf/{tmp_path}")
    (tmp_path / "config.json").write_text("{ broken")
    assert f"hf/{tmp_path}: " in refusal(f"hf/{tmp_path}")


# ---------------------------------------------------------------------------------------- torchvision and open_clip


@pytest.fixture
def small_torchvision(monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    """torchvision's ViT, less of it."""

    def make(name: str, weights: Any = None, **options: Any) -> nn.Module:
        assert weights is None
        usual = {"image_size": 224, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
        return torchvision.models.VisionTransformer(**{**usual, **options}).eval()

    monkeypatch.setattr(torchvision.models, "get_model", make)
    return make


def test_torchvision(small_torchvision: Callable[..., nn.Module], tmp_path: Path, cat: Path) -> None:
    net = small_torchvision("")
    path = saved(net.state_dict(), tmp_path / "w.pth")
    model = vitreous.load("torchvision/vit_b_16", weights=path)
    assert equal(model.net, net)
    assert len(model.labels) == 1000
    assert model.label(281) == "tabby"
    with Image.open(cat) as photo:
        theirs = torchvision.models.ViT_B_16_Weights.DEFAULT.transforms()(photo.convert("RGB"))
    assert off(model.prepare(cat)[0], theirs) <= ROUNDING
    assert not equal(vitreous.load("torchvision/vit_b_16", weights="random").net, net)


def test_torchvision_fine_tuned_and_resized(
    small_torchvision: Callable[..., nn.Module], tmp_path: Path, cat: Path
) -> None:
    path = saved({"model": small_torchvision("", num_classes=10).state_dict()}, tmp_path / "ten.pth")
    model = vitreous.load("torchvision/vit_b_16", weights=path, img_size=128)
    assert model.size == (128, 128)
    assert not model.labels
    assert model.run(model.prepare(cat)).shape == (1, 10)
    assert vitreous.explain(model, cat, "rollout").map.shape == (1, 8, 8)
    assert "square images only, not 64×128" in refusal("torchvision/vit_b_16", "random", img_size=(64, 128))


def test_torchvision_preprocessing_follows_the_network(small_torchvision: Callable[..., nn.Module]) -> None:
    """vit_h_14's usual weights want 518 pixels, an untrained one is built for 224."""
    assert vitreous.load("torchvision/vit_h_14", weights="random").size == (224, 224)


@pytest.fixture(scope="module")
def small_open_clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that open_clip itself knows by name."""
    folder = tmp_path_factory.mktemp("open_clip")
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 64, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
    }
    (folder / "ViT-Test-16.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    return "ViT-Test-16"


def test_open_clip(small_open_clip: str, tmp_path: Path, cat: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = vitreous.load(f"openclip/{small_open_clip}", weights="random")
    assert capfd.readouterr() == ("", "")
    x = model.prepare(cat)
    assert off(model.run(x), model.net.encode_image(x)) <= ROUNDING
    assert model.classifier is False
    with Image.open(cat) as photo:
        theirs = open_clip.create_model_and_transforms(small_open_clip)[2](photo)
    assert off(x[0], theirs) <= ROUNDING
    path = saved(model.net.state_dict(), tmp_path / "w.pt")
    assert equal(vitreous.load(f"openclip/{small_open_clip}", weights=path).net, model.net)
    wide = vitreous.load(f"openclip/{small_open_clip}", weights="random", img_size=(64, 128))
    assert vitreous.explain(wide, cat, "rollout").map.shape == (1, 4, 8)


def test_open_clip_weights_by_tag(small_open_clip: str) -> None:
    assert "no weights 'laion9b' for ViT-B-32" in refusal("openclip/ViT-B-32:laion9b")
    assert "did you mean openai?" in refusal("openclip/ViT-B-32:opena")
    assert f"no weights for {small_open_clip}; give a file" in refusal(f"openclip/{small_open_clip}")


# ---------------------------------------------------------------------------------------------------- unknown names


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("deit_tiny_patch16_225", "did you mean deit_tiny_patch16_224"),
        ("timm/deit_tini_patch16_224", "did you mean deit_tiny_patch16_224"),
        ("torchvision/vit_b16", "did you mean vit_b_16"),
        ("openclip/ViT-B32", "did you mean ViT-B-32"),
        ("qqqqqqqqqq", "see: vitreous models"),
        ("google/vit-base-patch16-224", "is written hf/google/vit-base-patch16-224"),
        ("weights.safetensors", "there is no such file here"),
        ("", "unknown model ''"),
    ],
)
def test_unknown_names_suggest_the_nearest(spec: str, said: str) -> None:
    assert said in refusal(spec, "random")


def test_a_folder_as_a_name(tmp_path: Path) -> None:
    assert "is a folder without config.json" in refusal(str(tmp_path))


# --------------------------------------------------------------------------------------------------- bad checkpoints


def test_missing_weights_file(tmp_path: Path) -> None:
    for spec in (None, SMALL, "torchvision/vit_b_16"):
        assert (
            refusal(spec, tmp_path / "gone.pth", kind=WeightsError) == f"{tmp_path / 'gone.pth'}: no such weights file"
        )
    assert "is a folder" in refusal(SMALL, tmp_path, kind=WeightsError)


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_corrupted_weights(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"w.{ending}"
    safetensors.torch.save_file(small().state_dict(), path) if ending == "safetensors" else saved(
        {"a": torch.ones(9)}, path
    )
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"garbage" * 100, b""):
        path.write_bytes(content)
        said = refusal(SMALL, path, kind=WeightsError)
        assert said.startswith(f"{path}: is not a readable checkpoint")
        assert "weights_only" not in said, "no advice to run it as code"


class Malicious:
    """A pickle that runs a command when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: {"state_dict": {"a": torch.ones(1)}, "x": evil}])
@pytest.mark.parametrize("legacy", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(wrap: Any, legacy: bool, tmp_path: Path) -> None:
    trap, path = tmp_path / "trap", tmp_path / "evil.pth"
    torch.save(wrap(Malicious(trap)), path, _use_new_zipfile_serialization=not legacy)
    said = refusal(SMALL, path, kind=WeightsError)
    assert not trap.exists()
    assert "mkdir besides tensors and was not opened; save model.state_dict() instead" in said
    torch.load(path, weights_only=False)
    assert trap.exists(), "the trap works"


def test_a_pickled_module_is_refused_with_the_remedy(tmp_path: Path) -> None:
    said = refusal(SMALL, saved(nn.Linear(2, 2), tmp_path / "module.pth"), kind=WeightsError)
    assert "is a whole network pickled by torch.save(model) (torch.nn.modules.linear.Linear)" in said
    assert "save model.state_dict() instead" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1, 2], "is a list, not a dictionary"),
        ({"epoch": 3}, "contains no tensors (keys: epoch)"),
        ({}, "contains no tensors"),
    ],
)
def test_a_checkpoint_of_something_else(content: Any, said: str, tmp_path: Path) -> None:
    assert said in refusal(SMALL, saved(content, tmp_path / "w.pth"), kind=WeightsError)


def test_mismatching_weights_name_the_first_keys(tmp_path: Path) -> None:
    state = small().state_dict()
    del state["cls_token"], state["norm.weight"]
    state["blocks.0.mlp.fc1.bias"] = torch.zeros(7)
    state |= {f"decoder.{i}.weight": torch.zeros(1) for i in range(5)}
    said = refusal(SMALL, saved(state, tmp_path / "w.pth"), kind=WeightsError)
    size = small().blocks[0].mlp.fc1.bias.shape[0]
    assert said == (
        f"{tmp_path / 'w.pth'}: does not fit VisionTransformer: missing cls_token, norm.weight; "
        "unexpected decoder.0.weight, decoder.1.weight, decoder.2.weight and 2 more; "
        f"of another shape blocks.0.mlp.fc1.bias [7] for [{size}]; name the architecture that it was trained with"
    )


def test_weights_of_another_model(tmp_path: Path) -> None:
    path = saved(zoo.network("torchvision ViT").state_dict(), tmp_path / "w.pth")
    said = refusal(SMALL, path, kind=WeightsError)
    assert "missing cls_token" in said
    assert "unexpected class_token" in said


# --------------------------------------------------------------------------------------------- device, dtype, network


def test_unknown_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "load", lambda *_: pytest.fail("loaded before the device was known"))
    for device in ("tpu:0", "cuda:99", "nonsense"):
        said = refusal(device=device)
        assert said.startswith(f"there is no device {device!r} here")
        assert said.endswith("try cpu")
    assert refusal(dtype="float7") == "unknown dtype 'float7'; known: float32, float64, bfloat16 or float16"


def test_no_download_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **options: Any) -> None:
        raise OSError("Network is\nunreachable")

    monkeypatch.setattr(timm, "create_model", offline)
    monkeypatch.setattr(torchvision.models, "get_model", offline)
    monkeypatch.setattr(open_clip, "create_model_and_transforms", offline)
    for spec in (SMALL, "torchvision/vit_b_16", "openclip/ViT-B-32"):
        assert refusal(spec) == (
            f"the weights of {spec.split('/')[-1]} could not be downloaded (Network is unreachable); "
            "give a file with weights=…, or weights='random' for untrained ones"
        )


@pytest.mark.parametrize(
    ("spec", "package", "extra"), [("hf/some/model", "transformers", "hf"), ("openclip/ViT-B-32", "open_clip", "clip")]
)
def test_missing_extras(spec: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(spec) == f"this needs {package}: pip install 'vitreous[{extra}]'"


def test_without_transformers_everything_else_works(monkeypatch: pytest.MonkeyPatch, cat: Path) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] in ("transformers", "open_clip"):
            raise ImportError(name)
        return real(name, *args, **options)

    clip = zoo.network("open_clip ViT-B-32")
    monkeypatch.setattr(builtins, "__import__", without)
    for name in [n for n in sys.modules if n.split(".")[0] in ("transformers", "open_clip")]:
        monkeypatch.delitem(sys.modules, name)
    assert vitreous.explain(Model(clip), cat, "rollout").map.shape == (1, 4, 4)
    assert vitreous.load(SMALL, "random").size == (160, 160)
    assert sources.catalogue()["openclip"] == []


# ---------------------------------------------------------------------------------------------------------- labels


NAMES = ["cat", "dog, hound", "bird"]


@pytest.mark.parametrize(
    "labels", [NAMES, tuple(NAMES), dict(enumerate(NAMES)), {0: "cat", 1: "dog, hound", 2: "bird"}], ids=str
)
def test_labels_in_python(labels: Any) -> None:
    model = vitreous.load(SMALL, weights="random", labels=labels)
    assert model.labels == {0: "cat", 1: "dog, hound", 2: "bird"}
    assert model.label(1) == "dog"
    assert Model(zoo.network("hand-written"), labels=labels).labels == model.labels


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.txt", "cat\ndog, hound\nbird\n\n"),
        ("l.txt", "\ufeffcat\r\ndog, hound\r\nbird"),
        ("l.json", json.dumps(NAMES)),
        ("l.json", json.dumps({"0": "cat", "1": "dog, hound", "2": "bird"})),
        ("l.JSON", json.dumps({"cat": 0, "dog, hound": 1, "bird": 2})),
        ("l.json", json.dumps({"0": ["n01", "cat"], "1": ["n02", "dog, hound"], "2": ["n03", "bird"]})),
    ],
)
def test_labels_from_files(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    for path in (tmp_path / name, str(tmp_path / name)):
        assert read_labels(path) == {0: "cat", 1: "dog, hound", 2: "bird"}
    if name == "l.txt":
        assert vitreous.load(SMALL, "random", labels=path).labels == read_labels(path)


def test_labels_from_bad_files(tmp_path: Path) -> None:
    assert refusal(SMALL, "random", labels=tmp_path / "gone.txt").endswith("gone.txt: no such labels file")
    for content in (b"{ broken", b'{"cat": "dog"}', b"3", b"\xff\xfe\xfa"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"bad\.json: contains no labels \(.*; write one label per line, or JSON"):
            read_labels(tmp_path / "bad.json")
    with pytest.raises(ModelError, match="contains no labels"):
        read_labels(tmp_path)


def test_labels_make_a_classifier(tmp_path: Path, small_open_clip: str) -> None:
    assert vitreous.load(f"openclip/{small_open_clip}", "random", labels=NAMES).classifier


# ---------------------------------------------------------------------------------------------------- any nn.Module


class Returns(nn.Module):
    """A network whose output is wrapped."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.wrap = zoo.HandWritten(), wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.inner(x))


X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: (y, "more"),
        lambda y: [y],
        lambda y: ({"logits": y}, None),
        lambda y: {"logits": y, "loss": None},
        lambda y: {"scores": y, "tokens": y[:, None]},
        lambda y: {"last_hidden_state": torch.stack([y, y + 1], 1), "pooler_output": None},
        lambda y: {"x_norm_clstoken": y, "x_norm_patchtokens": y[:, None]},
    ],
)
def test_outputs_that_are_understood(wrap: Any) -> None:
    net = Returns(wrap).eval()
    assert off(Model(net).run(X).detach(), net.inner(X).detach()) <= ROUNDING


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda y: y[:, None].expand(-1, 5, -1), r"Returns returns \[2, 5, 7\], not one vector per image; say how"),
        (lambda y: y[0], r"returns \[7\], not one vector"),
        (lambda y: "text", "returns a str, not scores; say how to read it"),
        (lambda y: None, "returns a NoneType, not scores"),
        (lambda y: (), "returns a tuple, not scores"),
        (lambda y: {"a": y, "b": y}, r"returns a dictionary of \['a', 'b'\]; say how to read it.*net\(x\)\['a'\]"),
        (lambda y: {}, r"returns a dictionary of \[\]"),
    ],
)
def test_outputs_that_are_not(wrap: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        Model(Returns(wrap).eval()).run(X)


def test_forward_reads_any_output() -> None:
    net = Returns(lambda y: y[:, None].expand(-1, 5, -1)).eval()
    model = Model(net, forward=lambda x: net(x)[:, 0])
    assert off(model.run(X).detach(), net.inner(X).detach()) <= ROUNDING
    assert vitreous.explain(model, X, "rollout").map.shape == (2, 4, 4)


def test_a_wrong_tensor_size_says_img_size() -> None:
    model = vitreous.load("vit_tiny_patch16_224", "random", img_size=64)
    with pytest.raises(
        ModelError, match=r"vit_tiny_patch16_224 takes 64×64 images and failed on 96×128 .*img_size=\(96, 128\)"
    ):
        vitreous.explain(model, torch.zeros(1, 3, 96, 128), "rollout")


def test_a_network_that_cannot_run_says_why() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    with pytest.raises(
        ModelError, match=r"Two.forward needs the argument y; .*Model\(net, forward=lambda x: net\(x, y=…\)\)"
    ) as caught:
        Model(Two()).run(torch.zeros(1, 3, 224, 224))
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")], ids=["DP", "compile"]
)
def test_wrappers_are_seen_through(wrap: Any) -> None:
    net = zoo.network("timm ViT")
    wrapped = wrap(net)
    model = Model(wrapped)
    assert model.net is wrapped
    assert model.module is net
    assert model.name == "vit_tiny_patch16_224"
    plain = vitreous.explain(net, X, "rollout").map
    for each in (model, Model(nn.DataParallel(wrapped))):
        assert off(vitreous.explain(each, X, "rollout").map, plain) <= ROUNDING


def test_nothing_about_the_network_changes() -> None:
    net = zoo.ZOO["timm ViT"].make().double().train()
    net.patch_embed.requires_grad_(False)

    def facts() -> Any:
        parts = [(name, m.training, sorted(vars(m)), len(m._forward_hooks)) for name, m in net.named_modules()]
        return parts, [(n, p.requires_grad, p.dtype, p.device, p._version) for n, p in net.named_parameters()]

    before = facts()
    model = Model(net)
    _ = model.layout, model.preprocess, model.labels, repr(model)
    assert model.net is net
    assert facts() == before


def test_what_is_not_a_network() -> None:
    with pytest.raises((ModelError, TypeError)):
        Model("vit_tiny_patch16_224")


def test_prepare_refuses_what_is_not_a_batch(tiny: Model) -> None:
    for bad, said in [
        (torch.zeros(1, 4, 224, 224), r"shape \(1, 4, 224, 224\)"),
        (torch.zeros(224, 224), r"shape \(224, 224\)"),
        (torch.zeros(0, 3, 224, 224), r"shape \(0, 3, 224, 224\)"),
        (torch.full((1, 3, 224, 224), torch.nan), "NaN or infinite"),
        ([], "no images"),
        (np.zeros((1, 224, 224, 3), np.float32), "float32 is not an image"),
    ]:
        with pytest.raises(InputError, match=said):
            tiny.prepare(bad)


def test_prepare_takes_a_float_tensor_as_it_is(tiny: Model) -> None:
    x = torch.randn(2, 3, 224, 224)
    assert torch.equal(tiny.prepare(x), x)
    assert torch.equal(tiny.prepare(x[0]), x[:1])


def test_pictures_that_come_out_in_different_sizes() -> None:
    keep = torchvision.transforms.v2.functional.pil_to_tensor
    model = Model(zoo.network("hand-written"), lambda image: keep(image).float())
    with pytest.raises(InputError, match="different sizes"):
        model.prepare([Image.new("RGB", (64, 64)), Image.new("RGB", (64, 80))])


def test_catalogue() -> None:
    everything, few = sources.catalogue(), sources.catalogue(everything=False)
    assert {"embedded", "timm", "torchvision", "openclip"} == everything.keys() == few.keys()
    assert "resnet18" in everything["timm"]
    assert "resnet18" not in few["timm"]
    assert "vit_base_patch16_224" in few["timm"]
    assert {name.split("_")[0] for name in few["torchvision"]} == {"swin", "vit"}
    assert "vit_b_16" in few["torchvision"]
    assert "ViT-B-32" in few["openclip"]


@pytest.mark.parametrize("name", ["test_vit", "test_vit3", "deit_tiny_patch16_224"])
def test_a_blank_network_is_the_same_once_filled(name: str) -> None:
    """Nothing but parameters is left out when a network is built for a checkpoint."""
    torch.manual_seed(0)
    net = timm.create_model(name)
    before = torch.random.get_rng_state()
    with Blank():
        blank = timm.create_model(name)
    assert torch.equal(torch.random.get_rng_state(), before), "no noise was drawn"
    for (key, mine), (_, theirs) in zip(blank.named_buffers(), net.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), key
    blank.load_state_dict(net.state_dict())
    x = torch.randn(1, 3, *net.patch_embed.img_size)
    with torch.no_grad():
        assert off(blank.eval()(x), net.eval()(x)) <= ROUNDING
