"""training/distill.py, run for a few steps on a few small pictures."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

SCRIPT = Path(__file__).parents[1] / "training" / "distill.py"
Run = Callable[..., int]


@pytest.fixture(scope="module")
def distill() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("distill", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["distill"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["distill"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures in a nested folder, and one file that only looks like one."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    rng = np.random.default_rng(0)
    for name, size in (("a.png", (40, 30)), ("more/b.jpg", (24, 50)), ("more/c.jpg", (200, 200))):
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / name)
    (folder / "broken.jpg").write_bytes(b"not a picture")
    (folder / "labels.csv").write_text("name,imagenet_index\na,281\nb.jpg,282\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    save_file(timm.create_model("deit_tiny_patch16_224").state_dict(), path)
    return path


@pytest.fixture
def run(distill: ModuleType, photos: Path, teacher: Path) -> Run:
    def call(out: Path, *more: str) -> int:
        always = ["--teacher", str(teacher), "--out", str(out), "--batch", "2", "--device", "cpu"]
        precision = torch.get_float32_matmul_precision()
        try:
            return int(distill.main([str(photos), *always, *more]))
        finally:
            torch.set_float32_matmul_precision(precision)

    return call


FOUR_STEPS = ("--epochs", "2.6")  # of three pictures, two a step


def test_two_steps_give_a_timm_model_in_half_precision(
    run: Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "student.safetensors"
    assert run(out, "--epochs", "1", "--eval", str(photos), "--labels", str(photos / "labels.csv")) == 0

    weights = load_file(out)
    assert {value.dtype for value in weights.values()} == {torch.float16}
    timm.create_model("deit_tiny_patch16_224").load_state_dict(weights, strict=True)
    assert all(value.isfinite().all() for value in weights.values())

    printed = capsys.readouterr().out
    assert "3 images, 1 unreadable files left out" in printed
    progress = re.search(r"step 2/2  kl (\S+)  hidden (\S+)  lr", printed)
    assert progress is not None
    assert all(math.isfinite(float(loss)) and float(loss) > 0 for loss in progress.groups())
    assert "132 of 196 patches: top-1" in printed


def test_a_continued_run_equals_an_uninterrupted_one(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    assert run(whole, *FOUR_STEPS) == 0
    assert run(parts, *FOUR_STEPS, "--stop-after", "2") == 0
    assert torch.load(tmp_path / "parts.ckpt", weights_only=True)["done"] == 2
    capsys.readouterr()

    assert run(parts, *FOUR_STEPS) == 0
    printed = capsys.readouterr().out
    assert "continuing at step 2 of 4" in printed and "step 4/4" in printed
    torch.testing.assert_close(load_file(parts), load_file(whole))

    assert run(parts, *FOUR_STEPS, "--lr", "0.5") == 2
    assert "was made with lr = 0.0012, now it is 0.5" in capsys.readouterr().err


@pytest.mark.parametrize("patches", [196, 132])
def test_training_lowers_the_loss(distill: ModuleType, photos: Path, teacher: Path, patches: int) -> None:
    images, readable = distill.load_images(distill.find_images(photos), distill.POOL_SIDE)
    assert sum(readable) == len(images) == 3
    recipe = distill.Recipe(1.0, None, batch=2, lr=1e-4, weight_decay=0.0, hidden=2.0, seed=0)
    distiller = distill.Distiller(images, distill.load_teacher(teacher), recipe)
    first, *_, last = [distiller.step(recipe.lr, patches, recipe.hidden, number=0) for _ in range(4)]
    assert last.classes + 2 * last.hidden < 0.9 * (first.classes + 2 * first.hidden)


def test_timing_leaves_the_student_as_it_was(distill: ModuleType, teacher: Path) -> None:
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    recipe = distill.Recipe(None, 0.5, batch=1, lr=1e-3, weight_decay=0.1, hidden=2.0, seed=0)
    distiller = distill.Distiller(images, distill.load_teacher(teacher), recipe)
    before = {name: value.clone() for name, value in distiller.student.state_dict().items()}
    distiller.plan()
    assert distiller.total > 2 and not distiller.optimiser.state
    torch.testing.assert_close(dict(distiller.student.state_dict()), before, rtol=0, atol=0)


def test_forward_is_timms(distill: ModuleType, teacher: Path) -> None:
    net = distill.load_teacher(teacher)
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    logits, stream = distill.forward(net, images)
    torch.testing.assert_close(logits, net(images))
    assert stream.shape == (12, 1, 197, 192)

    backwards = torch.arange(195, -1, -1)[None]  # the order of the patches carries nothing
    same, shuffled = distill.forward(net, images, backwards)
    torch.testing.assert_close(same, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shuffled[:, :, 1:].flip(2), stream[:, :, 1:], rtol=1e-3, atol=1e-3)


def test_schedule(distill: ModuleType) -> None:
    rates = [distill.learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] < 0.001
    kept = [distill.kept_patches(step, 100) for step in range(100)]
    assert kept[:55] == [196] * 55 and kept[55:61] == [196, 132, 196, 196, 132, 196]
    assert distill.hidden_weight(69, 100, 2.0) == 2.0 and distill.hidden_weight(70, 100, 2.0) == 0.6


def test_mistakes_are_told_in_one_line(
    distill: ModuleType, run: Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(code: int) -> str:
        printed = capsys.readouterr()
        assert code == 2 and printed.out == "" and printed.err.count("\n") == 1
        return printed.err

    out = ("--out", str(tmp_path / "student.safetensors"))
    empty, other = tmp_path / "empty", tmp_path / "other.safetensors"
    empty.mkdir()
    assert "no images under" in error(distill.main([str(empty), "--teacher", str(other), *out]))
    assert "cannot read the teacher" in error(distill.main([str(photos), "--teacher", str(other), *out]))
    save_file({"pos_embed": torch.zeros(1, 577, 192)}, other)
    assert "is not a deit_tiny_patch16_224" in error(distill.main([str(photos), "--teacher", str(other), *out]))
    assert "belong together" in error(run(tmp_path / "student.safetensors", "--eval", str(photos)))
    assert "--batch must be positive" in error(run(tmp_path / "student.safetensors", "--batch", "0"))
    (empty / "labels.csv").write_text("name,imagenet_index\nzebra,340\n", encoding="utf-8")
    labels = ("--eval", str(photos), "--labels", str(empty / "labels.csv"))
    assert "names zebra, which is not under" in error(run(tmp_path / "student.safetensors", *labels))
    assert not (tmp_path / "student.safetensors").exists()
