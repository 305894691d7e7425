"""Which method and layer: found out on the user's own model and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from conftest import Run
from known import known
from PIL import Image

import vitreous
from vitreous.cli import arguments
from vitreous.errors import OptionError
from vitreous.evaluation.advice import line_up
from vitreous.models.libraries import cropped


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    chance = np.random.default_rng(0)
    for number in range(6):
        Image.fromarray(chance.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def test_every_layer_and_worthwhile_option_is_tried() -> None:
    model = zoo.model("timm ViT")
    names = [one.label for one in line_up(model, None, thorough=False)]
    assert names[:2] == ["random", "centre"]
    for expected in ("attention layer=0", "attention layer=2", "gradcam layer=1", "rollout discard=0.9", "gae"):
        assert expected in names
    assert len(names) == len(set(names))
    assert not any("token_ablation" in name or "optimus" in name for name in names), "costly ones only on demand"
    thorough = [one.label for one in line_up(model, None, thorough=True)]
    assert set(names) < set(thorough) and "token_ablation" in thorough
    only = [one.label for one in line_up(model, ["optimus"], thorough=False)]
    assert only == ["random", "centre", "optimus"]


def test_the_ranking_is_that_of_the_metric(photos: Path) -> None:
    model = zoo.model("timm ViT")
    found = vitreous.advise(model, photos, methods=["attention", "gae"])
    assert {one.name for one in found.contenders if one.method == "gae"} == {"gae", "gae rules=libra"}
    assert [one.options["layer"] for one in found.layers("attention")] == [0, 1, 2]
    gains = [one.gain for one in found.contenders]
    assert gains == sorted(gains, reverse=True)
    files = sorted(str(p) for p in photos.iterdir())
    for one in found.contenders:
        if one.options == {"across": "mean"} or one.method == "gae":
            maps = vitreous.explain(model, files, one.method, **one.options)
            expected = vitreous.evaluate(model, files, maps, "srg", target="top-1")
            assert abs(expected.mean - one.score) < 1e-5
    control = vitreous.evaluate(model, files, "random", "srg", target="top-1")
    assert abs(control.mean - found.random) < 1e-5
    assert found.equals[0] == found.contenders[0].name


def test_a_model_that_reads_nothing_gets_no_advice(photos: Path) -> None:
    net = zoo.ZOO["timm ViT"].make().eval()
    for block in net.blocks:
        block.attn.proj.weight.data.zero_()
    found = vitreous.advise(vitreous.Model(net), photos, methods=["attention", "gae"])
    assert found.best is None and found.cheapest is None
    assert "Nothing beats random" in str(found)


def test_too_few_images_are_said_to_be_too_few(photos: Path) -> None:
    found = vitreous.advise(zoo.model("timm ViT"), [photos / "0.png", photos / "1.png"], methods=["gae"])
    assert str(found) == "2 images are too few to tell; give 5 or more."
    assert found.best is None


def test_windowed_models_are_judged_by_hiding(photos: Path) -> None:
    found = vitreous.advise(zoo.model("timm Swin"), photos, methods=["gradcam", "input_x_gradient", "rollout"])
    assert found.board.plan.metrics["srg"].values["by"] == "pixels"
    assert {one.method for one in found.contenders} == {"gradcam", "input_x_gradient", "rollout"}


def test_only_faithfulness_decides(photos: Path) -> None:
    with pytest.raises(OptionError, match="does not measure faithfulness"):
        vitreous.advise(zoo.model("timm ViT"), photos, "sparsity")


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> vitreous.Model:
    """A model that reads four patches of 36, which attention shows, in place of the embedded one."""
    weights = torch.zeros(6, 6)
    weights[0:2, 3:5] = 3
    steps = cropped((48, 48), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    model = vitreous.Model(known(weights, gain=30.0).net, steps, ["seen", "nothing"], name="reader")
    monkeypatch.setattr(arguments, "load_model", lambda *_: model)
    return model


@pytest.mark.slow
def test_the_command(run: Run, reader: vitreous.Model, photos: Path, tmp_path: Path) -> None:
    asked = ("-x", "gae,rollout", "--metric", "token_deletion")
    said = run("advise", photos, *asked, "-o", "out")
    assert said.code == 0
    assert "token_deletion ↓" in said.out and "rollout discard=0.9" not in said.out
    assert "rollout discard=0.9: the map is zero everywhere" in said.err
    found = vitreous.advise(reader, photos, "token_deletion", methods=["gae", "rollout"])
    assert found.best is not None and found.best.name == "gae" and found.best.gain_low > 0.1
    assert f"\nUse gae: {found.best.score:.3f} (" in said.out
    assert f"by token_deletion, where random maps reach {found.random:.3f}.\n" in said.out
    assert json.loads(run("advise", photos, *asked, "--json").out)["best"] == "gae"
    assert (tmp_path / "out" / "report.html").is_file()
    assert "does not measure faithfulness" in run("advise", photos / "0.png", "--metric", "gini").error
    few = run("advise", photos / "0.png", photos / "1.png", "-x", "gae", "--json")
    told = json.loads(few.out)
    assert told["metric"] == "srg" and told["images"] == 2 and told["best"] is None
    assert {one["name"] for one in told["contenders"]} == {"gae", "gae rules=libra"}
