"""CASS: a plain double loop finds the same scores; the command prints the heads and stores the numbers."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
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
from scipy.stats import spearmanr

import vitreous
from vitreous import Model
from vitreous.cli import arguments
from vitreous.cli.cass import correlation, depth
from vitreous.cli.main import main
from vitreous.errors import OptionError, TargetError, Unsupported
from vitreous.trace.trace import Trace

FAMILIES = [
    "timm ViT",
    "timm ViT 224×448",
    "timm DeiT distilled",
    "timm DINOv2 registers",
    "timm DINOv3",
    "timm BEiT",
    "timm SigLIP",
    "torchvision ViT",
    "hand-written",
    "flat heads",
]


def whole(name: str, count: int = 2) -> tuple[Trace, np.ndarray]:
    """A trace, and ρᵀA of every head in float64 from the whole matrices, restricted to patches, [B L H h w]."""
    entry = zoo.ZOO[name]
    trace = Trace(zoo.model(name), zoo.images(name, count))
    readout = trace.readout.numpy().astype(np.float64)
    found = np.zeros((count, entry.depth, entry.heads, *entry.grid))
    patches = entry.grid[0] * entry.grid[1]
    for layer, attention in enumerate(trace.attention):
        weights = attention.weights.detach().numpy().astype(np.float64)
        for b in range(count):
            for head in range(entry.heads):
                row = readout[b] @ weights[b, head]
                found[b, layer, head] = row[entry.prefix : entry.prefix + patches].reshape(entry.grid)
    return trace, found


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a.ravel() @ b.ravel() / (np.linalg.norm(a) * np.linalg.norm(b)))


def loop(heads: np.ndarray, phi: np.ndarray) -> np.ndarray:
    scores = np.zeros(heads.shape[:3])
    for b, layer, head in np.ndindex(*scores.shape):
        scores[b, layer, head] = cosine(heads[b, layer, head], phi[b])
    return scores


def random_saliency(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", FAMILIES)
def test_cass_is_the_cosine_of_attention_and_saliency(name: str) -> None:
    trace, heads = whole(name)
    phi = random_saliency(2, *zoo.ZOO[name].grid)
    scores = vitreous.cass(None, trace, 3, phi)
    assert scores.shape == (2, zoo.ZOO[name].depth, zoo.ZOO[name].heads)
    assert off(scores, loop(heads, phi.double().numpy())) < 2e-6
    shifted = loop(np.roll(heads, 1, -1), phi.double().numpy())
    assert off(scores, shifted) > 5e-4, "attention one patch beside would be noticed"


@pytest.mark.parametrize("name", ["timm ViT", "timm ViT 224×448", "timm SigLIP"])
def test_in_pixel_space_attention_is_upsampled(name: str) -> None:
    trace, heads = whole(name)
    size = zoo.ZOO[name].size
    phi = random_saliency(2, *size)
    large = F.interpolate(torch.from_numpy(heads).flatten(1, 2), size, mode="bilinear", align_corners=False)
    expected = loop(large.reshape(*heads.shape[:3], *size).numpy(), phi.double().numpy())
    assert off(vitreous.cass(None, trace, 3, phi, space="pixel"), expected) < 1e-5


def test_a_saliency_of_another_shape_is_refused() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 2)
    with pytest.raises(OptionError, match=r"shape \[2, 64, 64\]; \[2, 4, 4\] is needed in patch space"):
        vitreous.cass(model, images, 3, random_saliency(2, 64, 64))
    with pytest.raises(OptionError, match=r"shape \[2, 4, 4\]; \[2, 64, 64\] is needed in pixel space"):
        vitreous.cass(model, images, 3, random_saliency(2, 4, 4), space="pixel")
    with pytest.raises(OptionError, match=r"shape \[1, 4, 4\]; \[2, 4, 4\]"):
        vitreous.cass(model, images, 3, random_saliency(1, 4, 4))
    with pytest.raises(OptionError, match=r"cass_attention.samples takes a whole number ≥ 1, not 0"):
        vitreous.cass(model, images, 3, samples=0)


@pytest.mark.parametrize("name", ["timm ViT", "timm DINOv2 registers", "timm SigLIP", "flat heads"])
def test_the_saliency_is_smoothgrad_summed_over_patches(name: str) -> None:
    trace, heads = whole(name)
    grid, (y, x) = zoo.ZOO[name].grid, zoo.ZOO[name].size
    fine = vitreous.explain(None, trace, "smoothgrad", 3, samples=2, sigma=0.2, seed=4).map.double().numpy()
    phi = fine.reshape(2, grid[0], y // grid[0], grid[1], x // grid[1]).sum((2, 4))
    assert off(vitreous.cass(None, trace, 3, samples=2, sigma=0.2, seed=4), loop(heads, phi)) < 1e-5


@pytest.mark.parametrize("space", ["patch", "pixel"])
@pytest.mark.parametrize("name", ["timm ViT", "timm ViT 224×448", "timm DINOv3", "timm SigLIP"])
def test_the_weighted_map_is_the_sum_of_all_heads(name: str, space: Any) -> None:
    trace, heads = whole(name)
    scores = vitreous.cass(None, trace, 3, samples=1, space=space)
    found = vitreous.explain(None, trace, "cass_attention", 3, samples=1, space=space)
    assert torch.allclose(found.notes["cass"], scores, rtol=1e-5)
    assert off(found.map, np.einsum("blh,blhyx->byx", scores.double().numpy(), heads)) < 1e-5


@pytest.mark.parametrize("name", ["timm ViT", "torchvision ViT", "hand-written", "flat heads"])
def test_scores_depend_on_image_class_and_seed_not_on_the_batch(name: str) -> None:
    model, images = zoo.model(name), zoo.images(name, 3)
    together = vitreous.cass(model, images, [1, 2, 3], samples=2)
    for i in range(3):
        assert torch.allclose(vitreous.cass(model, images[i : i + 1], i + 1, samples=2)[0], together[i], atol=1e-5)
    assert off(vitreous.cass(model, images, [1, 2, 3], samples=2), together) <= ROUNDING
    assert not torch.allclose(together, vitreous.cass(model, images, [1, 2, 3], samples=2, seed=1), atol=1e-4)
    assert not torch.allclose(together, vitreous.cass(model, images, [3, 1, 2], samples=2), atol=1e-4)
    best = vitreous.cass(model, images, samples=2)
    assert torch.allclose(
        best, vitreous.cass(model, images, Trace(model, images).output.argmax(-1), samples=2), atol=1e-6
    )


def test_models_without_token_attention_or_classes_are_refused() -> None:
    with pytest.raises(
        Unsupported, match="cass_attention needs attention between all tokens; timm-swin attends in 7×7 windows"
    ):
        vitreous.cass(zoo.model("timm Swin"), zoo.images("timm Swin", 1))
    with pytest.raises(TargetError, match="has no classifier"):
        vitreous.cass(zoo.model("open_clip ViT-B-32"), zoo.images("open_clip ViT-B-32", 1))


# ----------------------------------------------------------------------------------------------------- the command


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`vitreous cass …` in this process, in an empty folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["vitreous", "cass", *map(str, args)])
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model(zoo.network("timm ViT"), labels=["cat", "dog, hound", *"abcde"], name="small")
    monkeypatch.setattr(arguments, "load_model", lambda *_: model)
    return model


def photo(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    return path


def test_the_embedded_model_and_a_cat(run: Run, tiny: Model, cat: Path, tmp_path: Path) -> None:
    code, out, err = run(cat, "--samples", 2, "--out", "out")
    assert (code, err) == (0, "")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["cat.cass.npz", "cat.cass.png"]
    with Image.open(tmp_path / "out" / "cat.cass.png") as figure:
        assert figure.width > 900
    expected = vitreous.explain(tiny, cat, "cass_attention", samples=2)
    scores = vitreous.cass(tiny, cat, samples=2)[0].numpy()
    with np.load("out/cat.cass.npz", allow_pickle=False) as stored:
        assert set(stored) == {"cass", "saliency", "heads", "weighted", "provenance"}
        layers, heads = stored["cass"].shape
        grid = tiny.layout.grid
        assert stored["heads"].shape == (layers, heads, *grid)
        assert all(stored[key].dtype == np.float32 for key in ("cass", "saliency", "heads", "weighted"))
        assert off(stored["cass"], scores) < 1e-5
        assert off(stored["cass"], loop(stored["heads"][None], stored["saliency"][None])[0]) < 1e-5
        assert off(stored["weighted"], expected.map[0]) < 1e-5
        mark = json.loads(str(stored["provenance"]))
        told = mark["maps"]["weighted"]
    assert told["options"] == {"space": "patch", "samples": 2, "sigma": 0.15, "seed": 0}
    assert (told["target"], told["model"], told["images"]) == (expected.target, tiny.name, ["cat.jpg"])
    best, chance = int(expected.target or -1), Trace(tiny, cat).output.softmax(-1).max().item()
    assert f"{tiny.label(best)} {chance:.0%}" in out
    assert mark["explained"] == f"{tiny.label(best)} {chance:.0%}"
    table = [line for line in out.splitlines() if line.startswith("layer ")]
    order = np.argsort(scores, axis=None)
    assert len(table) == 5
    for line, most, least in zip(table, order[::-1], order):
        for number in (most, least):
            layer, head = divmod(int(number), heads)
            assert f"layer {layer}, head {head} " in line
            assert f"{scores[layer, head]:.3f}" in line
    assert "rank correlation" in out
    assert out.rstrip().endswith("arrays: out/cat.cass.npz")


def test_json_is_for_programs(run: Run, small: Model, tmp_path: Path) -> None:
    path = photo(tmp_path / "a.png")
    asked = ("--target", "hound", "--samples", 1, "--sigma", 0.3, "--seed", 2, "--space", "pixel", "--json")
    code, out, err = run(path, *asked)
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["options"] == {"space": "pixel", "samples": 1, "sigma": 0.3, "seed": 2}
    (one,) = told["images"]
    scores = vitreous.cass(small, path, 1, samples=1, sigma=0.3, seed=2, space="pixel")[0].numpy()
    assert one["target"] == "1"
    assert one["explained"].startswith("dog ")
    ends = {key: [(e["layer"], e["head"]) for e in one[key]] for key in ("most_alike", "least_alike")}
    order = [divmod(int(i), 2) for i in np.argsort(-scores, axis=None)]
    assert ends == {"most_alike": order[:5], "least_alike": order[::-1][:5]}
    assert one["layer_means"] == pytest.approx(scores.mean(1).tolist(), rel=1e-5)
    assert one["depth_correlation"] == pytest.approx(spearmanr(range(3), scores.mean(1)).statistic)
    with np.load(one["maps"]) as stored:
        assert stored["saliency"].shape == (64, 64)
        assert stored["weighted"].shape == (4, 4)
    assert Path(one["figure"]).is_file()


def test_bad_pictures_in_a_folder_are_skipped(run: Run, small: Model, tmp_path: Path) -> None:
    photo(tmp_path / "album" / "a.png")
    photo(tmp_path / "album" / "deep" / "a.jpg")
    (tmp_path / "album" / "bad.png").write_text("no picture")
    code, out, err = run("album", "--samples", 1, "-o", "album")
    assert code == 0
    assert err.startswith("skipped: album/bad.png")
    assert err.count("\n") == 1
    assert "2 images of 3" in out
    made = sorted(str(p) for p in (tmp_path / "album").rglob("*.cass.*"))
    assert len(made) == 4
    assert len(json.loads(run("album", "--samples", 1, "-o", "album", "--json")[1])["images"]) == 2
    again = sorted(str(p) for p in (tmp_path / "album").rglob("*.cass.*"))
    assert again == made, "the figures of the first run are no pictures to compare"
    assert run("album/bad.png", "album/a.png", "--samples", 1)[0] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--samples", "0"], "cass_attention.samples takes a whole number ≥ 1, not 0"),
        (["--space", "moon"], "cass_attention.space takes patch or pixel, not 'moon'"),
        (["--target", "cta"], "unknown class 'cta'; did you mean cat"),
        (["--out", "a.png"], "--out a.png: a.png is a file, not a folder"),
        (["--nonsense"], "No such option: --nonsense"),
    ],
)
def test_errors_are_one_line(run: Run, small: Model, tmp_path: Path, words: list[str], said: str) -> None:
    photo(tmp_path / "a.png")
    code, out, err = run("a.png", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {said}")
    assert err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_swin_is_refused_on_the_command_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "load_model", lambda *_: Model(zoo.network("timm Swin"), name="swin"))
    code, _, err = run(photo(tmp_path / "a.png"))
    assert code == 2
    assert err.startswith("error: cass_attention needs attention between all tokens; swin attends in 7×7 windows. Try ")


@pytest.mark.parametrize(
    ("means", "said"),
    [
        ([0.9, 0.8, 0.7, 0.5], "falls with depth: from 0.90 in layer 0 to 0.50 in layer 3, rank correlation -1.00"),
        ([0.5, 0.6, 0.7, 0.9], "rises with depth"),
        ([0.9, 0.6, 0.7, 0.8], "does not follow depth"),
        ([0.9, 0.5, 0.7, 0.6], "tends to fall with depth"),
        ([0.5, 0.5, 0.5], "too few distinct layers"),
        ([0.5, 0.4], "too few distinct layers"),
    ],
)
def test_depth_in_words(means: list[float], said: str) -> None:
    assert said in depth({"layer_means": means, "depth_correlation": correlation(np.array(means))})
