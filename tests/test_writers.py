"""`Attribution.log`: TensorBoard, Weights & Biases and MLflow, stand-ins with their interfaces, and the real ones."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from PIL import Image

import vitreous
from vitreous import Attribution, Model
from vitreous.errors import ModelError, OptionError
from vitreous.plot.logged import unique

NAMES = ("one.jpg", "two (2).jpg", "one.jpg")
REAL = pytest.mark.filterwarnings("ignore")  # what other packages warn of
KEYS = {f"gae/{key}{end}" for key in ("entropy", "gini", "share") for end in ("_mean", "/one.jpg", "/two_2_.jpg")}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitreous.plot.figure.DPI", 50)


@pytest.fixture
def found(tmp_path: Path) -> Attribution:
    """Maps of two files."""
    files = []
    for number, name in enumerate(NAMES[:2]):
        values = np.random.default_rng(number).integers(0, 255, (70, 90, 3), dtype=np.uint8)
        Image.fromarray(values).save(tmp_path / name)
        files.append(tmp_path / name)
    return vitreous.explain(Model(zoo.network("timm ViT"), name="vit"), files, "gae", [3, 1])


class Board:
    """As a SummaryWriter of TensorBoard."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int | None]] = {}
        self.images: dict[str, tuple[tuple[int, ...], int | None]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.scalars[tag] = scalar_value, global_step

    def add_image(self, tag: str, img: np.ndarray, global_step: int | None = None, dataformats: str = "CHW") -> None:
        assert dataformats == "HWC" and img.dtype == np.uint8 and img.shape[2] == 3
        self.images[tag] = img.shape, global_step


class Runs:
    """As a run of wandb: rows of a history."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((data, step))

    def define_metric(self, name: str) -> None:
        raise AssertionError("not called")


class Client:
    """As a client of MLflow."""

    def __init__(self) -> None:
        self.metrics: dict[tuple[str, str], tuple[float, int | None]] = {}
        self.images: list[tuple[str, dict[str, Any]]] = []

    def log_metric(self, run_id: str, key: str, value: float, timestamp: Any = None, step: int | None = None) -> None:
        self.metrics[run_id, key] = value, step

    def log_image(self, run_id: str, image: Image.Image, artifact_file: Any = None, **more: Any) -> None:
        self.images.append((run_id, {"artifact_file": artifact_file, **more}))


class Flow:
    """As the module mlflow."""

    def __init__(self) -> None:
        self.inner = Client()

    def log_metric(self, key: str, value: float, step: int | None = None) -> None:
        self.inner.log_metric("active", key, value, step=step)

    def log_image(self, image: Image.Image, artifact_file: Any = None, **more: Any) -> None:
        self.inner.log_image("active", image, artifact_file, **more)

    def active_run(self) -> None:
        raise AssertionError("not called")


# ------------------------------------------------------------------------------------------------------------ stand-ins


def test_numbers_and_figures_of_each_map(found: Attribution) -> None:
    board = Board()
    found.log(board, step=3)
    assert set(board.scalars) == KEYS and {step for _, step in board.scalars.values()} == {3}
    assert set(board.images) == {"gae/one.jpg", "gae/two_2_.jpg"}
    assert all(shape[0] > 50 and step == 3 for shape, step in board.images.values())
    model = Model(zoo.network("timm ViT"))
    for key in ("entropy", "gini"):
        measured = vitreous.evaluate(model, found.views.sources, found, key).value  # type: ignore[union-attr]
        logged = [board.scalars[f"gae/{key}/{tag}"][0] for tag in ("one.jpg", "two_2_.jpg")]
        assert logged == pytest.approx(measured.tolist(), abs=1e-6), "what the metric says of a map of patches"
        assert board.scalars[f"gae/{key}_mean"][0] == pytest.approx(float(measured.mean()), abs=1e-6)
    assert board.scalars["gae/share/one.jpg"][0] == pytest.approx(found.probabilities[0])


def test_the_most_is_a_limit_and_the_mean_is_of_all(found: Attribution) -> None:
    board = Board()
    found.log(board, "validation/gae", most=1)
    assert list(board.images) == ["validation/gae/one.jpg"]
    assert "validation/gae/gini/two_2_.jpg" not in board.scalars
    both, alone = Board(), board.scalars["validation/gae/gini_mean"][0]
    found.log(both)
    assert alone == both.scalars["gae/gini_mean"][0] and both.scalars["gae/gini/one.jpg"][0] != alone
    for empty in (lambda: found.log(board, most=0), lambda: found[:0].log(board)):
        with pytest.raises(OptionError, match="there is nothing to log"):
            empty()


def test_a_map_without_a_target_has_no_share_and_nan_is_left_out(found: Attribution) -> None:
    board = Board()
    aimless = vitreous.explain(Model(zoo.network("timm ViT")), zoo.images("timm ViT"), "rollout")
    aimless.log(board, step=1)
    assert not any("share" in tag for tag in board.scalars) and "rollout/gini/image_2" in board.scalars
    broken = Board()
    replace(found, map=torch.full_like(found.map, torch.nan)).log(broken)
    assert all(math.isfinite(value) for value, _ in broken.scalars.values())
    assert "gae/share/one.jpg" in broken.scalars and "gae/gini/one.jpg" not in broken.scalars


def test_a_run_of_wandb_gets_one_row(found: Attribution, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(Image=lambda image: ("an image", image.size))
    monkeypatch.setitem(sys.modules, "wandb", made)
    run = Runs()
    found.log(run, step=7)
    ((row, step),) = run.rows
    assert step == 7 and set(row) == KEYS | {"gae/one.jpg", "gae/two_2_.jpg"} and row["gae/one.jpg"][0] == "an image"
    run.Image = lambda image: "of the module"  # type: ignore[attr-defined]
    found.log(run)
    assert run.rows[1][0]["gae/one.jpg"] == "of the module"


def test_mlflow_its_runs_and_its_clients(found: Attribution, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, client = Flow(), Client()
    found.log(flow, step=2)
    assert {key for _, key in flow.inner.metrics} == KEYS
    assert flow.inner.images[0] == ("active", {"artifact_file": None, "key": "gae/one.jpg", "step": 2})
    found.log((client, "abc"))
    assert {run for run, _ in client.metrics} == {"abc"}
    assert client.images[1] == ("abc", {"artifact_file": "gae/two_2_.jpg.png"})
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client))
    found.log(SimpleNamespace(info=SimpleNamespace(run_id="of the run")), step=1)
    assert ("of the run", "gae/gini_mean") in client.metrics
    with pytest.raises(OptionError, match=r"does not know the run; give both: log\(\(client, run_id\)\)"):
        found.log(client)


@pytest.mark.parametrize("wrong", [None, "runs/", {}, open, Board], ids=str)
def test_other_writers_are_refused(wrong: Any, found: Attribution) -> None:
    with pytest.raises(OptionError, match="is not a writer that vitreous knows; give a SummaryWriter"):
        found.log(wrong)


def test_a_missing_package_is_named(found: Attribution, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModelError, match=r"this needs wandb: pip install 'vitreous\[wandb\]'"):
        found.log(Runs())


def test_tags_are_such_as_every_writer_takes() -> None:
    assert unique(NAMES) == ["one.jpg", "two_2_.jpg", "one.jpg_2"]
    assert unique(["a", "a_2", "a", "?"]) == ["a", "a_2", "a_3", "image"]


# -------------------------------------------------------------------------------------------------------- the real ones


@REAL
def test_tensorboard_reads_what_was_logged(found: Attribution, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "runs")) as writer:
        found.log(writer, step=5)
        found.log(writer, step=6)
    read = EventAccumulator(str(tmp_path / "runs"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == KEYS and set(read.Tags()["images"]) == {"gae/one.jpg", "gae/two_2_.jpg"}
    assert [event.step for event in read.Scalars("gae/gini_mean")] == [5, 6]
    assert read.Images("gae/one.jpg")[0].width > 50


@REAL
@pytest.mark.slow
@pytest.mark.process
def test_wandb_offline_keeps_what_was_logged(
    found: Attribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="vitreous", dir=str(tmp_path)) as run:
        found.log(run, step=1)
        found.log(wandb, "by the module", step=2)
        run.log({"end": 1}, step=3)  # a row is kept when the next one begins
        summary = dict(run.summary)
    assert summary["gae/gini_mean"] == summary["by the module/gini_mean"]
    assert KEYS <= set(summary) and len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.png"))) == 4


@REAL
@pytest.mark.slow
def test_mlflow_keeps_what_was_logged(found: Attribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        found.log(mlflow, step=1)
        found.log(mlflow, "without a step")
    client = mlflow.MlflowClient()
    found.log(run, "by its run", step=2)
    found.log((client, run.info.run_id), "by a client", step=3)
    kept = client.get_run(run.info.run_id).data.metrics
    for name in ("gae", "without a step", "by its run", "by a client"):
        assert kept[f"{name}/gini_mean"] == pytest.approx(kept["gae/gini_mean"])
    assert len(list((tmp_path / "mlruns").glob("**/artifacts/**/*.png"))) == 8
