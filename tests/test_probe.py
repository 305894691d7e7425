"""The linear probe: it learns, it resumes, it leaves the backbone alone, and every method explains it."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import zoo
from conftest import Run, off
from machine import ROUNDING
from PIL import Image
from test_methods import CHEAP, state
from torch import nn

import vitreous
from vitreous import METHODS, Concept, Model, Trace
from vitreous.errors import InputError, ModelError, OptionError, Unsupported, VitreousError, WeightsError
from vitreous.images import class_folders as imagefolder
from vitreous.images.preprocess import IMAGENET, Preprocess
from vitreous.models.fingerprint import fingerprint
from vitreous.models.libraries import cropped
from vitreous.models.probe import resume
from vitreous.models.probe.attach import Probe, Probed, attach, embed, load_probe
from vitreous.models.probe.evaluate import Evaluation, evaluate
from vitreous.models.probe.progress import Progress
from vitreous.models.probe.train import Training, train

CLASSES = ("blue", "green", "red")
LEARNED = 1e-3  # rounding, after some steps of learning have made it larger
QUICK: dict[str, Any] = {"epochs": 6, "batch": 16, "lr": 0.02, "validation": 0.25}


def paint(folder: Path, count: int, seed: int = 0) -> Path:
    """Noise with a tint, in one sub-folder per colour; one picture lies deeper."""
    random = np.random.default_rng(seed)
    for channel, name in enumerate(reversed(CLASSES)):
        for i in range(count):
            pixels = random.integers(0, 150, (36 + i, 50, 3))
            pixels[:, :, channel] += 70
            file = folder / name / ("deeper" if i == 0 else "") / f"{i:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(file)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("data"), 16)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that no probe has seen."""
    return paint(tmp_path_factory.mktemp("others"), 8, seed=1)


@pytest.fixture
def spoilt(data: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(data, tmp_path / "spoilt"))


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def refusal(call: Callable[[], Any], kind: type[VitreousError] = InputError) -> str:
    """The one line that says why not."""
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Counted:
    """A model that counts the images it runs on."""

    def __init__(self, name: str = "timm ViT") -> None:
        self.images = 0
        self.model = Model(zoo.network(name), zoo.model(name).preprocess, forward=self.run, classifier=True)

    def run(self, images: torch.Tensor) -> Any:
        assert not torch.is_grad_enabled()
        self.images += len(images)
        return self.model.module(images)


# ------------------------------------------------------------------------------------------------------------ backbones


def without_head() -> nn.Module:
    return zoo.timm("vit_tiny_patch16_224", num_classes=0)()


EXTRA: dict[str, Callable[[], Any]] = {
    "timm ViT without a head": without_head,
    "HF ViT backbone": zoo.hf("ViT", "Model", "sdpa"),
    "HF CLIP with projection": zoo.hf("CLIPVision", "ModelWithProjection", "sdpa", projection_dim=16),
}
BACKBONES = [
    *("timm ViT", "timm DINOv3", "timm SigLIP", "timm DINOv2 registers", "torchvision ViT", "open_clip ViT-B-32"),
    *("HF ViT eager", "HF DINOv2 sdpa", "HF DINOv2 registers sdpa", "HF CLIP vision sdpa", "HF SigLIP sdpa"),
    *("hand-written", "sequence first", "torch.compile", *EXTRA),
]


@cache
def backbone(name: str) -> Model:
    if name not in EXTRA:
        return zoo.model(name)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model(EXTRA[name]().eval(), name=name)


def pictures_for(name: str) -> torch.Tensor:
    return zoo.images(name if name in zoo.ZOO else "timm ViT")


def random_probe(model: Model, classes: int = 4) -> Probe:
    """A head that was not trained."""
    width = embed(model, torch.zeros(1, 3, *model.size)).shape[1]
    random = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(classes, width, generator=random), torch.randn(classes, generator=random)
    names = tuple(f"kind {i}" for i in range(classes))
    return Probe(weight, bias, names, model.name, fingerprint(model), 0.5)


@cache
def probed(name: str) -> Model:
    return attach(backbone(name), random_probe(backbone(name)))


@pytest.mark.parametrize("name", BACKBONES)
def test_logits_are_the_head_of_the_embedding(name: str) -> None:
    model, images = backbone(name), pictures_for(name)
    head = random_probe(model)
    with torch.no_grad():
        ours = probed(name).run(images)
    z = Trace(model, images).any_finished().embedding
    assert z is not None
    assert torch.allclose(ours, z.detach() @ head.weight.T + head.bias, atol=1e-5)
    trace = Trace(probed(name), images)
    assert trace.classifies
    read = trace.any_finished().embedding
    assert off(read.detach(), z.detach()) <= ROUNDING, "what the probe reads is an embedding, for concepts too"
    assert probed(name).labels == {i: f"kind {i}" for i in range(4)}
    assert probed(name).size == model.size


EVERYWHERE = ("attention", "gae", "cdam", "gradcam", "gradient", "attn_lrp", "token_ablation", "value_zeroing")
THOROUGH = ("timm ViT", "timm SigLIP", "open_clip ViT-B-32", "HF DINOv2 sdpa")  # backbones that meet every method
PAIRS = [(m, name) for name in BACKBONES for m in METHODS if m in EVERYWHERE or name in THOROUGH]


def is_quick(method: str, name: str) -> bool:
    return name == THOROUGH[0] or zoo.is_quick(f"{method} of a probe", name)


@pytest.mark.parametrize(
    ("method", "name"),
    [pytest.param(*pair, marks=[] if is_quick(*pair) else [pytest.mark.slow]) for pair in PAIRS],
)
def test_battery(method: str, name: str) -> None:
    """A class of a probe is the concept whose direction is its row of W: every method draws the same for both.

    Not those that read the score itself or its probability: a class has a bias and rivals, a concept has none.
    """
    model, images = backbone(name), pictures_for(name)
    head, ours = random_probe(model), probed(name)
    targeted = METHODS[method].targeted
    options = CHEAP.get(method, {})
    _ = ours.layout, model.layout
    before = state(ours.net)
    maps = vitreous.explain(ours, images, method, 2 if targeted else None, **options).map
    assert state(ours.net) == before, "no side effects"
    assert maps.isfinite().all()
    assert maps.flatten(1).std(1).min() > 0, "it says something"
    if METHODS[method].level or METHODS[method].family == "arbitration":
        return
    concept = Concept(head.weight[2], "dot") if targeted else None
    expected = vitreous.explain(model, images, method, concept, **options).map
    assert off(maps, expected) <= 1e-4, f"a method that reads the score itself declares level=True; {method} does not"


@pytest.mark.parametrize(
    ("name", "layer"),
    [("timm ViT", "head"), ("torchvision ViT", "heads.head"), ("HF ViT sdpa", "classifier"), ("hand-written", "head")],
)
def test_its_own_head_as_a_probe_is_the_model_itself(name: str, layer: str) -> None:
    model, images = zoo.model(name), zoo.images(name)
    own = model.module.get_submodule(layer)
    head = replace(random_probe(model, zoo.CLASSES), weight=own.weight.detach(), bias=own.bias.detach())
    ours = attach(model, head)
    assert off(Trace(ours, images).output, Trace(model, images).output) <= ROUNDING
    for method in ("rollout", "gae", "cdam", "gradient"):
        target = 3 if METHODS[method].targeted else None
        maps = [vitreous.explain(each, images, method, target).map for each in (ours, model)]
        assert off(*maps) <= ROUNDING


def test_several_embeddings_are_refused() -> None:
    """DeiT's distilled variant averages two heads."""
    said = refusal(lambda: random_probe(zoo.model("timm DeiT distilled")), Unsupported)
    assert "no single embedding" in said


def test_side_effects_of_a_probe() -> None:
    net = zoo.ZOO["sequence first"].make().train()
    model = Model(net)
    head = random_probe(model)
    before = state(net)
    ours = attach(model, head)
    assert state(net) == before
    ours.run(zoo.images("sequence first"))  # in training mode, as it was left: with dropout
    assert state(net) | {"seed": 0} == before | {"seed": 0}
    assert ours.net.training and ours.net.head.training
    assert fingerprint(ours) != fingerprint(model)
    assert fingerprint(ours) == fingerprint(attach(model, head))


def test_copies_stand_alone() -> None:
    ours, images = probed("open_clip ViT-B-32"), zoo.images("open_clip ViT-B-32")
    other = copy.deepcopy(ours)
    assert isinstance(other.net, Probed)
    with torch.no_grad():
        expected = ours.run(images)
        for parameter in other.net.parameters():
            parameter.zero_()
        assert off(ours.run(images), expected) <= ROUNDING
        assert not other.run(images).any()


def test_backbone_and_probe_side_by_side_in_threads() -> None:
    """They share one network, hence one lock."""
    model, ours, images = zoo.model("timm ViT"), probed("timm ViT"), zoo.images("timm ViT")
    jobs = [(each, method) for method in ("gae", "legrad", "smoothgrad") for each in (model, ours)]
    expected = [vitreous.explain(each, images, method, 1, **CHEAP.get(method, {})).map for each, method in jobs]
    found: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        each, method = jobs[number % len(jobs)]
        found[number] = vitreous.explain(each, images, method, 1, **CHEAP.get(method, {})).map

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2 * len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 * len(jobs)
    assert all(off(maps, expected[i % len(jobs)]) <= ROUNDING for i, maps in found.items())


def test_half_precision_and_autocast() -> None:
    net = zoo.ZOO["timm ViT"].make().eval()
    net.load_state_dict(zoo.network("timm ViT").state_dict())
    head, images = random_probe(zoo.model("timm ViT")), zoo.images("timm ViT")
    exact = vitreous.explain(probed("timm ViT"), images, "gae", 1).map
    with torch.autocast("cpu", torch.bfloat16):
        mixed = vitreous.explain(probed("timm ViT"), images, "gae", 1).map
    half = vitreous.explain(attach(Model(net.bfloat16(), name="half"), head), images, "gae", 1).map
    for maps in (mixed, half):
        assert maps.dtype == torch.float32
        assert torch.corrcoef(torch.stack([exact.flatten(), maps.flatten()]))[0, 1] > 0.9


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("name", ["timm ViT", "HF CLIP vision sdpa", "timm SigLIP"])
def test_it_learns(name: str, augment: bool, data: Path, others: Path, tmp_path: Path) -> None:
    model = zoo.model(name)
    options = {**QUICK, "epochs": 10 if augment else 30}
    report = train(model, data, tmp_path / "new" / "probe.safetensors", augment=augment, **options)
    assert files(tmp_path) == ["new/probe.safetensors"]
    assert report.classes == CLASSES
    assert (report.learned, report.validated, report.skipped, report.resumed) == (36, 12, {}, 0)
    assert len(report.epochs) == options["epochs"]
    assert report.steps == 3 * options["epochs"]
    found = evaluate(attach(model, report.out), others)
    assert found.images == 24
    assert found.accuracy >= 0.9


def test_the_backbone_stays_as_it_is(data: Path, tmp_path: Path) -> None:
    net = zoo.ZOO["sequence first"].make().train()
    net.body.layers[0].eval()
    net.head.weight.requires_grad_(False)
    before, weights = state(net), copy.deepcopy(net.state_dict())
    train(Model(net), data, tmp_path / "p", **QUICK)
    assert state(net) == before
    assert all(torch.equal(value, weights[key]) for key, value in net.state_dict().items())


def test_caller_modes_do_not_matter(data: Path, tmp_path: Path) -> None:
    train(zoo.model("timm ViT"), data, tmp_path / "a", **QUICK)
    with torch.inference_mode():
        train(zoo.model("timm ViT"), data, tmp_path / "b", **QUICK)
    assert off(load_probe(tmp_path / "b").weight, load_probe(tmp_path / "a").weight) <= LEARNED


def test_the_file(data: Path, tmp_path: Path) -> None:
    model = zoo.model("timm ViT")
    report = train(model, data, tmp_path / "p.safetensors", **QUICK, seed=4)
    with safetensors.safe_open(str(report.out), "pt") as stored:
        told = stored.metadata()
        assert set(stored.keys()) == {"weight", "bias"}
    assert json.loads(told["classes"]) == list(CLASSES)
    assert (told["backbone"], told["fingerprint"]) == (model.name, fingerprint(model))
    assert told["version"] == vitreous.__version__
    found = load_probe(report.out)
    assert (found.weight.shape, found.bias.shape) == ((3, 32), (3,))
    assert found.accuracy == report.accuracy
    images = imagefolder.open_folder(data).digest
    assert found.options == {**QUICK, "augment": True, "seed": 4, "images": images}


def by_hand(model: Model, data: Path, head: Probe, share: float) -> float:
    """The accuracy on the pictures kept for validation."""
    folder = imagefolder.open_folder(data)
    _, check = imagefolder.split(folder, share, 0)
    z = torch.cat([Trace(model, [folder.files[i]]).any_finished().embedding.detach() for i in check])
    named = (z @ head.weight.T + head.bias).argmax(1)
    return (named == torch.tensor([folder.labels[i] for i in check])).float().mean().item()


def test_the_best_epoch_is_written(data: Path, tmp_path: Path) -> None:
    """A learning rate that is far too high makes the accuracy jump about."""
    model = zoo.model("timm ViT")
    wild: dict[str, Any] = {**QUICK, "lr": 5.0, "batch": 5, "augment": False}
    report = train(model, data, tmp_path / "all", **{**wild, "epochs": 12})
    accuracies = [epoch.accuracy for epoch in report.epochs]
    assert len(set(accuracies)) > 1
    assert report.accuracy == max(accuracies) == accuracies[report.best - 1]
    assert report.best < 12, "or this test shows nothing"
    ties = [epoch for epoch in report.epochs if epoch.accuracy == report.accuracy]
    assert report.best == min(ties, key=lambda epoch: epoch.validation_loss).number
    short = train(model, data, tmp_path / "short", **{**wild, "epochs": report.best})
    assert short.best == report.best
    written = load_probe(tmp_path / "all")
    assert off(load_probe(tmp_path / "short").weight, written.weight) <= LEARNED
    assert by_hand(model, data, written, 0.25) == pytest.approx(report.accuracy)


def test_seeds(data: Path, tmp_path: Path) -> None:
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        train(zoo.model("timm ViT"), data, tmp_path / name, **QUICK, seed=seed)
    a, b, c = (load_probe(tmp_path / name).weight for name in "abc")
    assert off(b, a) <= LEARNED < off(c, a)


def test_embeddings_are_computed_once_without_augmentation(data: Path, tmp_path: Path) -> None:
    counted = Counted()
    train(counted.model, data, tmp_path / "p", **QUICK, augment=False)
    assert counted.images == 48


def test_only_the_validation_is_kept_with_augmentation(data: Path, tmp_path: Path) -> None:
    counted = Counted()
    train(counted.model, data, tmp_path / "p", **QUICK)
    assert counted.images == 12 + 6 * 36


# --------------------------------------------------------------------------------------------------------- interruption


def stop_when(reached: Callable[[Progress], bool]) -> Callable[[Progress], None]:
    def tell(at: Progress) -> None:
        if reached(at):
            raise KeyboardInterrupt

    return tell


def stop_after(epoch: int) -> Callable[[Progress], None]:
    return stop_when(lambda at: at.epoch == epoch)


def weights_of(path: Path) -> torch.Tensor:
    head = load_probe(path)
    return torch.cat([head.weight, head.bias[:, None]], 1)


@pytest.mark.parametrize("augment", [True, False])
def test_a_resumed_run_ends_with_the_same_head(augment: bool, data: Path, tmp_path: Path) -> None:
    whole = train(zoo.model("timm ViT"), data, tmp_path / "whole", **QUICK, augment=augment)
    counted, out = Counted(), tmp_path / "parts"
    for epoch in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            train(counted.model, data, out, **QUICK, augment=augment, progress=stop_after(epoch))
        assert files(tmp_path) == ["parts.embeddings", "parts.resume", "whole"]
        assert resume.unfinished(out)
    report = train(counted.model, data, out, **QUICK, augment=augment)
    assert counted.images == (12 + 6 * 36 if augment else 48), "nothing was computed twice"
    assert report.resumed == 5
    assert off(weights_of(out), weights_of(tmp_path / "whole")) <= LEARNED
    for now, then in zip(report.epochs, whole.epochs, strict=True):
        assert astuple(now) == pytest.approx(astuple(then), rel=LEARNED)
    assert report == replace(whole, out=out, backbone=report.backbone, resumed=5, epochs=report.epochs)
    assert files(tmp_path) == ["parts", "whole"]
    assert not resume.unfinished(out)


@pytest.mark.parametrize(("stage", "done"), [("embedding", 1), ("training", 1), ("training", 8)])
def test_interrupts_within_a_long_epoch(
    stage: str, done: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**QUICK, "batch": 10}
    train(zoo.model("timm ViT"), data, tmp_path / "whole", **options)
    monkeypatch.setattr(resume, "SAVE_EVERY", 0.0)
    counted = Counted()
    with pytest.raises(KeyboardInterrupt):
        train(
            counted.model,
            data,
            tmp_path / "parts",
            **options,
            progress=stop_when(lambda at: (at.stage, at.done) == (stage, done)),
        )
    train(counted.model, data, tmp_path / "parts", **options)
    assert counted.images == 12 + 6 * 36
    assert off(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole")) <= LEARNED


def test_another_run_is_not_resumed(data: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "p", zoo.model("timm ViT")
    with pytest.raises(KeyboardInterrupt):
        train(model, data, out, **QUICK, progress=stop_after(1))
    before = files(tmp_path)
    said = refusal(lambda: train(model, data, out, **{**QUICK, "lr": 0.5}, seed=2), OptionError)
    assert "another lr and seed" in said and "--fresh" in said
    assert "backbone" in refusal(lambda: train(zoo.model("timm DINOv3"), data, out, **QUICK), OptionError)
    assert files(tmp_path) == before
    report = train(model, data, out, **{**QUICK, "lr": 0.5}, resume=False)
    assert report.resumed == 0
    assert files(tmp_path) == ["p"]


def test_a_spoilt_state_is_said(data: Path, tmp_path: Path) -> None:
    (tmp_path / "p.resume").write_bytes(b"nonsense")
    assert "cannot be resumed" in refusal(lambda: train(zoo.model("timm ViT"), data, tmp_path / "p", **QUICK))


def test_more_epochs_for_an_interrupted_run(data: Path, tmp_path: Path) -> None:
    model = zoo.model("timm ViT")
    train(model, data, tmp_path / "whole", **{**QUICK, "epochs": 8})
    with pytest.raises(KeyboardInterrupt):
        train(model, data, tmp_path / "p", **QUICK, progress=stop_after(3))
    report = train(model, data, tmp_path / "p", **{**QUICK, "epochs": 8})
    assert report.resumed == 3
    assert off(weights_of(tmp_path / "p"), weights_of(tmp_path / "whole")) <= LEARNED


def test_a_failed_write_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p").write_bytes(b"what was there")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitreous._support.files.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        train(zoo.model("timm ViT"), data, tmp_path / "p", **QUICK)
    assert files(tmp_path) == ["p"]
    assert (tmp_path / "p").read_bytes() == b"what was there"


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("augment", [True, False])
def test_unreadable_pictures_are_skipped(augment: bool, spoilt: Path, tmp_path: Path) -> None:
    (spoilt / "red" / "01.png").write_bytes(b"not a picture")
    whole = (spoilt / "blue" / "02.png").read_bytes()
    (spoilt / "blue" / "02.png").write_bytes(whole[: len(whole) // 2])
    (spoilt / "green" / "notes.txt").write_text("not meant to be a picture")
    (spoilt / "green" / ".hidden.png").write_bytes(b"")
    report = train(zoo.model("timm ViT"), spoilt, tmp_path / "p", **QUICK, augment=augment)
    assert [Path(file).name for file in report.skipped] == ["02.png", "01.png"]
    assert "truncated" in report.skipped[str(spoilt / "blue" / "02.png")]
    assert report.learned + report.validated == 46
    found = evaluate(attach(zoo.model("timm ViT"), tmp_path / "p"), spoilt)
    assert (found.images, found.skipped) == (46, report.skipped)


def test_a_batch_of_unreadable_pictures(spoilt: Path, tmp_path: Path) -> None:
    for i in range(2, 16):
        (spoilt / "red" / f"{i:02}.png").write_bytes(b"")
    options = {**QUICK, "batch": 2, "epochs": 2}
    report = train(zoo.model("timm ViT"), spoilt, tmp_path / "p", **options, seed=3)
    assert len(report.skipped) == 14
    assert report.learned + report.validated == 34


def empty_class(folder: Path) -> None:
    shutil.rmtree(folder / "red")
    (folder / "red").mkdir()
    (folder / "red" / "readme.txt").write_text("nothing here")


def corrupt_class(folder: Path) -> None:
    for file in (folder / "green").rglob("*.png"):
        file.write_bytes(b"broken")


def one_class(folder: Path) -> None:
    shutil.rmtree(folder / "red")
    shutil.rmtree(folder / "green")


def no_classes(folder: Path) -> None:
    for name in CLASSES:
        shutil.rmtree(folder / name)
    Image.new("RGB", (40, 40)).save(folder / "loose.png")


def single_pictures(folder: Path) -> None:
    for name in CLASSES:
        shutil.rmtree(folder / name)
        (folder / name).mkdir()
        Image.new("RGB", (40, 40)).save(folder / name / "one.png")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (empty_class, "no images in the class folder red"),
        (corrupt_class, "no training image of class green can be read"),
        (one_class, "a single class, blue"),
        (no_classes, "no sub-folders"),
        (single_pictures, "validation needs two or more"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_bad_folders(spoil: Callable[[Path], None], said: str, spoilt: Path, tmp_path: Path) -> None:
    spoil(spoilt)
    before = files(tmp_path)
    assert said in refusal(lambda: train(zoo.model("timm ViT"), spoilt, tmp_path / "new" / "p", **QUICK))
    assert files(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_unreadable_validation(spoilt: Path, tmp_path: Path) -> None:
    folder = imagefolder.open_folder(spoilt)
    for i in imagefolder.split(folder, 0.25, 0)[1]:
        folder.files[i].write_bytes(b"")
    said = refusal(lambda: train(zoo.model("timm ViT"), spoilt, tmp_path / "p", **QUICK))
    assert "no validation image can be read" in said
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "option", [{"epochs": 0}, {"batch": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"validation": 0.0}, {"validation": 1.0}]
)
def test_bad_options(option: dict[str, Any], data: Path, tmp_path: Path) -> None:
    said = refusal(lambda: train(zoo.model("timm ViT"), data, tmp_path / "p", **option), OptionError)
    assert next(iter(option)) in said


def test_places_that_cannot_be_written(data: Path, tmp_path: Path) -> None:
    model = zoo.model("timm ViT")
    assert "is a folder" in refusal(lambda: train(model, data, tmp_path))
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(lambda: train(model, data, tmp_path / "file" / "p"))
    assert "is a file, not a folder" in refusal(lambda: train(model, tmp_path / "file", tmp_path / "p"))


def test_another_backbone_is_refused(data: Path, tmp_path: Path) -> None:
    report = train(zoo.model("timm ViT"), data, tmp_path / "p", **QUICK)
    said = refusal(lambda: attach(zoo.model("timm DINOv3"), report.out), ModelError)
    for word in ("timm-vit", "timm-dinov3", *(fingerprint(zoo.model(n)) for n in ("timm ViT", "timm DINOv3"))):
        assert word in said


def test_files_that_are_no_probes(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        return refusal(lambda: load_probe(path), WeightsError)

    assert "no such probe file" in said(tmp_path / "none")
    assert "is a folder" in said(tmp_path)
    (tmp_path / "text").write_text("hello")
    assert "is not a probe" in said(tmp_path / "text")
    safetensors.torch.save_file({"vector": torch.zeros(3)}, tmp_path / "other")
    assert "is not a probe" in said(tmp_path / "other")
    good = random_probe(zoo.model("timm ViT"))
    safetensors.torch.save_file({"weight": good.weight, "bias": good.bias}, tmp_path / "bare")
    assert "lacks 'format'" in said(tmp_path / "bare")
    replace(good, classes=("a", "b")).save(tmp_path / "short")
    assert "2 classes for 4 rows" in said(tmp_path / "short")
    good.save(tmp_path / "good")
    assert load_probe(tmp_path / "good").classes == good.classes


def test_embeddings_that_are_not_finite(data: Path, tmp_path: Path) -> None:
    steps = zoo.model("timm ViT").preprocess
    model = Model(zoo.network("timm ViT"), steps, forward=lambda x: x.flatten(1) / 0, classifier=False)
    assert "NaN or infinite" in refusal(lambda: train(model, data, tmp_path / "p", **QUICK), ModelError)
    assert files(tmp_path) == []


# --------------------------------------------------------------------------------------------- pictures and evaluation


def test_split_is_stratified() -> None:
    labels = [0] * 40 + [1] * 9 + [2] * 2 + [3]
    folder = imagefolder.ImageFolder(Path(), tuple("abcd"), tuple(Path(str(i)) for i in range(52)), tuple(labels))
    learn, check = imagefolder.split(folder, 0.1, 0)
    assert sorted(learn + check) == list(range(52))
    assert [sum(labels[i] == c for i in check) for c in range(4)] == [4, 1, 1, 0]
    assert imagefolder.split(folder, 0.1, 0) == (learn, check)
    assert imagefolder.split(folder, 0.1, 1) != (learn, check)


def test_crops() -> None:
    """Inside the picture, of the promised area and aspect, and not all alike."""
    import random

    boxes = [imagefolder.random_box(80, 60, random.Random(i)) for i in range(300)]
    sides = np.array([(right - left, bottom - top) for left, top, right, bottom in boxes])
    assert all(0 <= left < right <= 80 and 0 <= top < bottom <= 60 for left, top, right, bottom in boxes)
    shares, aspects = sides.prod(1) / 4800, sides[:, 0] / sides[:, 1]
    assert 0.08 <= shares.min() < 0.15 and 0.8 < shares.max() <= 1
    assert 3 / 4 - 1e-9 <= aspects.min() < 0.85 and 1.2 < aspects.max() <= 4 / 3 + 1e-9
    assert imagefolder.random_box(400, 10, random.Random(0)) == pytest.approx(
        (200 - 10 * 2 / 3, 0, 200 + 10 * 2 / 3, 10)
    )
    assert imagefolder.random_box(10, 400, random.Random(0)) == pytest.approx(
        (0, 200 - 10 * 2 / 3, 10, 200 + 10 * 2 / 3)
    )


def test_augmented_pictures_have_the_colours_and_size_of_the_model() -> None:
    steps = cropped((32, 48), *IMAGENET)
    flat = Image.new("RGB", (90, 70), (200, 30, 90))
    made = imagefolder.augmentation(steps, 0, 0)(flat, 0)
    assert made.shape == (3, 32, 48)
    assert torch.allclose(made, steps(flat), atol=1e-5)
    halves = Image.new("RGB", (64, 64))
    halves.paste((255, 255, 255), (32, 0, 64, 64))
    crops = [imagefolder.augmentation(steps, 0, epoch)(halves, i) for epoch in range(2) for i in range(60)]
    right = sum((x[:, :, 24:].mean() > x[:, :, :24].mean()).item() for x in crops)
    assert 40 <= right <= 80, "half are mirrored"
    assert not torch.equal(crops[0], crops[60]), "another crop in each epoch"
    assert torch.equal(crops[5], imagefolder.augmentation(steps, 0, 0)(halves, 5))


def test_preprocessing_with_colours_of_its_own() -> None:
    def stretch(image: Image.Image) -> torch.Tensor:
        x = torch.from_numpy(np.array(image.resize((16, 16)), np.float32)).permute(2, 0, 1)
        return (x - x.mean()) / (x.std() + 1)

    steps = Preprocess(stretch, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 30, 3), np.uint8))
    assert abs(imagefolder.augmentation(steps, 0, 0)(noise, 0).mean()) < 1e-5


def test_evaluation_counts(others: Path, tmp_path: Path) -> None:
    """A head that always says green."""
    model = zoo.model("timm ViT")
    head = replace(
        random_probe(model, 3), classes=CLASSES, weight=torch.zeros(3, 32), bias=torch.tensor([0.0, 1.0, 0.0])
    )
    told: list[Progress] = []
    found = evaluate(attach(model, head), others, batch=7, progress=told.append)
    assert isinstance(found, Evaluation)
    assert (found.images, found.accuracy) == (24, 1 / 3)
    assert [(s.name, s.images, s.accuracy, s.confused, s.times) for s in found.classes] == [
        ("blue", 8, 0.0, "green", 8),
        ("green", 8, 1.0, None, 0),
        ("red", 8, 0.0, "green", 8),
    ]
    assert [at.done for at in told] == [1, 2, 3, 4] and told[-1].total == 4
    shutil.copytree(others / "red", tmp_path / "red")
    part = evaluate(attach(model, head), tmp_path)
    assert [s.accuracy for s in part.classes] == [None, None, 0.0]
    shutil.copytree(others / "red", tmp_path / "reds")
    assert "did you mean red?" in refusal(lambda: evaluate(attach(model, head), tmp_path))
    shutil.rmtree(tmp_path / "reds")
    for file in tmp_path.rglob("*.png"):
        file.write_bytes(b"")
    assert "no image can be read" in refusal(lambda: evaluate(attach(model, head), tmp_path))
    assert "batch" in refusal(lambda: evaluate(attach(model, head), others, batch=0), OptionError)


# --------------------------------------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """timm's toy with weights that stay."""
    file = tmp_path_factory.mktemp("weights") / "toy.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        safetensors.torch.save_file(timm.create_model("test_vit", num_classes=5).state_dict(), file)
    return "--model", "test_vit", "--weights", str(file)


FAST = ("--epochs", 4, "--batch", 12, "--lr", 0.02, "--validation", 0.25)


def test_command_line(run: Run, weights: tuple[str, ...], data: Path, others: Path, tmp_path: Path) -> None:
    ran = run("probe", "train", data, *weights, "--out", "mine.safetensors", *FAST, "--no-augment")
    assert ran.code == 0
    said = ran.out.splitlines()
    assert said[0].startswith("mine.safetensors: 3 classes on test_vit, from 36 images; accuracy ")
    assert said[1] == f"use it: vitreous explain IMAGE {' '.join(weights)} --probe mine.safetensors"
    assert ran.err == "note: the data set is small, so training took only 12 steps; try --epochs 36\n"
    assert files(tmp_path) == ["mine.safetensors"]

    ran = run("probe", "eval", "mine.safetensors", others, *weights)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split()[:6] == ["class", "images", "accuracy", "most", "confused", "with"]
    assert [line.split()[:2] for line in ran.out.splitlines()[1:4]] == [[name, "8"] for name in CLASSES]
    assert "on 24 images, test_vit+mine" in ran.out

    told = json.loads(run("probe", "eval", "mine.safetensors", others, *weights, "--json").out)
    assert told["images"] == 24
    assert told["accuracy"] == sum(c["right"] for c in told["classes"]) / 24
    assert [c["name"] for c in told["classes"]] == list(CLASSES)

    picture = others / "red" / "01.png"
    ran = run("explain", picture, *weights, "--probe", "mine.safetensors", "-x", "gae", "--target", "red-blue")
    assert (ran.code, ran.err) == (0, "")
    assert all(name in ran.out for name in CLASSES)
    model = vitreous.load(weights[1], weights[3], probe=tmp_path / "mine.safetensors")
    assert model.labels == dict(enumerate(CLASSES))
    assert not model.net.training and not any(p.requires_grad for p in model.net.parameters())
    expected = vitreous.explain(model, picture, "gae", "red-blue").map[0]
    with np.load(tmp_path / "vitreous-out" / "01.npz") as stored:
        (name,) = (key for key in stored if key.startswith("gae"))
        assert np.allclose(stored[name], expected.numpy(), atol=1e-7)


def test_command_line_in_json(run: Run, weights: tuple[str, ...], spoilt: Path, tmp_path: Path) -> None:
    for i in range(3, 15):
        (spoilt / "red" / f"{i:02}.png").write_bytes(b"")
    ran = run("probe", "train", spoilt, *weights, *FAST, "--no-augment", "--json")
    assert ran.code == 0
    told = json.loads(ran.out)
    assert told["out"] == "probe.safetensors"
    assert told["classes"] == list(CLASSES)
    assert len(told["skipped"]) == 12
    assert ran.err.count("skipped: ") == 11 and "skipped: 12 images in all" in ran.err


def test_command_line_interrupted(
    run: Run, weights: tuple[str, ...], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("probe", "train", data, *weights, *FAST, "--no-augment", "--out", "p")
    finish = Training.finish_epoch

    def interrupted(self: Training) -> None:
        if self.at.epoch == 2:
            raise KeyboardInterrupt
        finish(self)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "finish_epoch", interrupted)
        ran = run(*words)
    assert ran.code == 130
    assert ran.err.splitlines() == ["note: run the same command again to resume from here", "interrupted"]
    assert files(tmp_path) == ["p.embeddings", "p.resume"]
    assert "another lr" in run(*words, "--lr", 0.5).error
    told = json.loads(run(*words, "--json").out)
    assert told["resumed"] == 2
    assert files(tmp_path) == ["p"]


def test_command_line_errors(run: Run, weights: tuple[str, ...], data: Path, spoilt: Path, tmp_path: Path) -> None:
    one_class(spoilt)
    kept = files(tmp_path)
    assert "no such folder" in run("probe", "train", "nowhere", *weights).error
    assert "a single class, blue" in run("probe", "train", spoilt, *weights).error
    assert "vitreous probe --help" in run("probe", "train").error
    assert "validation = 2.0" in run("probe", "train", data, *weights, "--validation", 2).error
    assert "differ on every load" in run("probe", "train", data, "--model", "test_vit", "--weights", "random").error
    assert "no such probe file" in run("probe", "eval", "none", data, *weights).error
    assert "no such probe file" in run("explain", spoilt / "blue" / "01.png", *weights, "--probe", "none").error
    assert files(tmp_path) == kept
    random_probe(zoo.model("timm ViT")).save(tmp_path / "other")
    said = run("explain", spoilt / "blue" / "01.png", *weights, "--probe", "other").error
    assert "timm-vit" in said and "test_vit" in said
    (tmp_path / "labels.txt").write_text("a\nb\n")
    picture = spoilt / "blue" / "01.png"
    said = run("explain", picture, *weights, "--probe", "other", "--labels", "labels.txt").error
    assert "brings its own labels" in said
    assert "has no class of this name" in run("probe", "eval", "other", data, *weights).error
    assert not (tmp_path / "vitreous-out").exists()


def test_the_bar_shows_how_far_it_is() -> None:
    from vitreous.cli.probe import said

    assert said(Progress("training", 1, 2, 0, 0.5, 0.75)) == "loss 0.500  accuracy 75.0%"
    assert said(Progress("embedding", 1, 2)) == ""
