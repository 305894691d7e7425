"""Callbacks that explain images during training: training is as without them, and the files say how the maps move."""

from __future__ import annotations

import csv
import os
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from PIL import Image
from test_writers import Board, Client, Runs
from torch import nn

import vitreous
from vitreous import Model, lightning_callback, trainer_callback
from vitreous._support.marks import is_ours
from vitreous.bridges.training import KEPT, Due, unused
from vitreous.errors import InputError, ModelError, OptionError
from vitreous.metrics.correlation import rank_correlation

STEPS = 6
TYPED = os.environ.get("VITREOUS_TYPES") == "all"  # then the checks themselves draw from `random`
REAL = pytest.mark.filterwarnings("ignore")  # what other packages warn of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitreous.plot.figure.DPI", 50)


class Trained(nn.Module):
    """As a LightningModule: the network is an attribute; with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        torch.manual_seed(3)
        small = {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 4}
        self.net = timm.create_model("vit_tiny_patch16_224", **small, drop_rate=0.2, proj_drop_rate=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(2):
        values = np.random.default_rng(number).integers(0, 255, (70, 90, 3), dtype=np.uint8)
        Image.fromarray(values).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


def data() -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(5)
    return torch.randn(8, 3, 64, 64, generator=chance), torch.randint(4, (8,), generator=chance)


Hook = Callable[[str, nn.Module, int], None]


def train(hook: Hook | None = None) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """The weights and what was drawn at random in a plain loop; `hook` is called as a trainer calls its callbacks."""
    owner, (x, y) = Trained(), data()
    optimiser = torch.optim.AdamW(owner.parameters(), 1e-2)  # before the seeds: it may import, and imports may draw
    owner.train()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    call = hook or (lambda moment, net, step: None)
    call("start", owner, 0)
    drawn = []
    for step in range(1, STEPS + 1):
        chosen = torch.randperm(8)[:4]
        drawn.append(torch.tensor([0.0 if TYPED else random.random(), np.random.rand()]))
        F.cross_entropy(owner(x[chosen]), y[chosen]).backward()
        call("gradients", owner, step)
        optimiser.step()
        optimiser.zero_grad()
        call("step", owner, step)
        if step % 3 == 0:
            call("epoch", owner, step)
    call("end", owner, STEPS)
    return {**owner.state_dict(), **{f"drawn {i}": numbers for i, numbers in enumerate(drawn)}}, owner


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


# --------------------------------------------------------------------------------------------------------- stand-ins


class Logger:
    """As a logger of Lightning."""

    def __init__(self, experiment: Any = None, run_id: str | None = None) -> None:
        self.experiment, self.run_id = experiment, run_id
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows[step] = metrics


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the class that Lightning asks for, and no other."""
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Callback=Callback))
    monkeypatch.delitem(sys.modules, "pytorch_lightning")


class Callback:
    """As that of Lightning."""


def lightning_hook(callback: Any, folder: Path, loggers: list[Logger], zero: bool = True) -> Hook:
    trainer = SimpleNamespace(
        is_global_zero=zero, global_step=0, current_epoch=0, log_dir=None, default_root_dir=folder, loggers=loggers
    )

    def hook(moment: str, owner: nn.Module, step: int) -> None:
        trainer.global_step, trainer.current_epoch = step, (step - 1) // 3 if step else 0
        {
            "start": lambda: callback.on_train_start(trainer, owner),
            "gradients": lambda: None,
            "step": lambda: callback.on_train_batch_end(trainer, owner, None, None, step),
            "epoch": lambda: callback.on_train_epoch_end(trainer, owner),
            "end": lambda: callback.on_train_end(trainer, owner),
        }[moment]()

    return hook


def hf_hook(callback: Any, folder: Path, zero: bool = True) -> Hook:
    args = SimpleNamespace(output_dir=str(folder), report_to=[])
    names = {"start": "on_train_begin", "step": "on_step_end", "epoch": "on_epoch_end", "end": "on_train_end"}

    def hook(moment: str, owner: nn.Module, step: int) -> None:
        state = SimpleNamespace(is_world_process_zero=zero, global_step=step, epoch=step / 3)
        if moment in names:
            getattr(callback, names[moment])(args, state, None, model=owner, processing_class=None)

    return hook


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "maps.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------------------------------------- nothing disturbed


def test_training_is_bit_for_bit_as_without_it(lightning: None, photos: Path, tmp_path: Path) -> None:
    plain, _ = train()
    callback = lightning_callback(photos, "gae", every_steps=3, network="net")
    watched, owner = train(lightning_hook(callback, tmp_path, []))
    assert differing(plain, watched) == []
    assert all(module.training for module in owner.modules())
    assert len(callback.watch.rows) == 2 * 3


@pytest.mark.slow
def test_training_is_as_without_a_callback_that_draws_at_random(photos: Path, tmp_path: Path) -> None:
    plain, _ = train()
    noisy = trainer_callback(photos, "smoothgrad", samples=2, every_steps=2, network="net")
    theirs, _ = train(hf_hook(noisy, tmp_path))
    assert differing(plain, theirs) == [] and len(noisy.watch.rows) == STEPS + 2


def test_gradients_modes_and_contexts_are_left_alone(lightning: None, photos: Path, tmp_path: Path) -> None:
    """Also between accumulated gradients, inside autocast and inference mode, and of a frozen and an eval part."""
    callback = lightning_callback(photos, "gae", network="net")
    owner = Trained().train()
    owner.net.blocks[0].eval()
    owner.net.patch_embed.requires_grad_(False)
    x, y = data()
    F.cross_entropy(owner(x), y).backward()
    hook = lightning_hook(callback, tmp_path, [])

    def state() -> list[Any]:
        told: list[Any] = [(m.training, len(m._forward_hooks)) for m in owner.modules()]
        return [*told, *[(p.requires_grad, p._version, id(p.grad)) for p in owner.parameters()]]

    grads = [None if p.grad is None else p.grad.clone() for p in owner.parameters()]
    before, chance = state(), torch.get_rng_state()
    hook("start", owner, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hook("step", owner, 1)
        hook("epoch", owner, 3)
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    with torch.inference_mode():
        hook("epoch", owner, 6)
        assert torch.is_inference_mode_enabled()
    assert state() == before and torch.equal(torch.get_rng_state(), chance)
    for parameter, kept in zip(owner.parameters(), grads):
        assert parameter.grad is None if kept is None else torch.equal(parameter.grad, kept)
    maps = [found.map for _, found in callback.watch.looks]
    assert len(maps) == 3 and torch.equal(maps[0], maps[1]) and torch.equal(maps[0], maps[2]), "in full precision"


@pytest.mark.slow
def test_only_the_first_process_explains(lightning: None, photos: Path, tmp_path: Path) -> None:
    for hook, callback in (
        (lightning_hook(one := lightning_callback(photos, "gae"), tmp_path, [Logger()], zero=False), one),
        (hf_hook(two := trainer_callback(photos, "gae"), tmp_path, zero=False), two),
    ):
        train(hook)
        assert callback.watch.rows == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]


@pytest.mark.slow
def test_what_goes_wrong_is_a_warning(lightning: None, photos: Path, tmp_path: Path) -> None:
    plain, _ = train()
    callback = lightning_callback(photos, "gae", "class 99", network="net", every_steps=3)
    with pytest.warns(RuntimeWarning) as told:
        watched, _ = train(lightning_hook(callback, tmp_path, [Logger()]))
    assert [str(one.message).partition(" (")[0] for one in told] == [
        f"vitreous: no maps at step {n}" for n in (0, 3, 6)
    ]
    assert "unknown class 'class 99'" in str(told[0].message)
    assert differing(plain, watched) == [] and not (tmp_path / "vitreous").exists()


def test_divided_weights_are_refused(lightning: None, photos: Path, tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """As that of torch."""

    owner = FullyShardedDataParallel(Trained())
    hook = lightning_hook(lightning_callback(photos, "gae"), tmp_path, [])
    with pytest.warns(RuntimeWarning, match=r"weights are divided among processes \(FSDP, ZeRO-3\); explain a saved"):
        hook("start", owner, 0)
    owner = nn.Sequential(Trained())
    owner[0].net.pos_embed.ds_id = 3
    with pytest.warns(RuntimeWarning, match="divided among processes"):
        lightning_hook(lightning_callback(photos, "gae"), tmp_path, [])("start", owner, 0)


# -------------------------------------------------------------------------------------------------------- what it tells


def test_the_maps_are_those_of_the_present_weights(lightning: None, photos: Path, tmp_path: Path) -> None:
    expected: list[torch.Tensor] = []
    callback = lightning_callback(photos, "gae", [2, 1], network="net", every_steps=3)
    inner = lightning_hook(callback, tmp_path, [])

    def hook(moment: str, owner: nn.Module, step: int) -> None:
        inner(moment, owner, step)
        if moment == "start" or (moment == "step" and step % 3 == 0):
            net = Trained().net
            net.load_state_dict(owner.net.state_dict())
            expected.append(vitreous.explain(Model(net), sorted(photos.iterdir()), "gae", [2, 1]).map)

    train(hook)
    looks = callback.watch.looks
    assert [step for step, _ in looks] == [0, 3, 6] and not torch.equal(expected[0], expected[2])
    for (_, found), right in zip(looks, expected):
        assert torch.allclose(found.map, right, atol=1e-6)
    rows = table(tmp_path / "vitreous")
    assert [(r["step"], r["image"], r["target"]) for r in rows[:3]] == [
        ("0", "0.png", "2"),
        ("0", "1.png", "1"),
        ("3", "0.png", "2"),
    ]
    assert rows[0]["with_first"] == rows[0]["with_previous"] == ""
    for key, other in (("with_previous", 1), ("with_first", 0)):
        assert [float(r[key]) for r in rows[4:]] == pytest.approx(
            rank_correlation(expected[2], expected[other]).tolist(), abs=1e-4
        )
    assert 0 < float(rows[0]["share"]) < 1 and 0 <= float(rows[0]["gini"]) <= 1


@pytest.mark.slow
def test_the_class_that_was_best_at_first_is_kept(lightning: None, photos: Path, tmp_path: Path) -> None:
    for target in (None, "top-1"):
        callback = lightning_callback(photos, "gae", target, network="net", every_steps=1)
        for _ in range(2):  # a trainer may train twice
            train(lightning_hook(callback, tmp_path, []))
            assert [row.step for row in callback.watch.rows[::2]] == [*range(STEPS + 1)]
        for image in ("0.png", "1.png"):
            assert len({row.target for row in callback.watch.rows if row.image == image}) == 1
    assert not [row for row in callback.watch.rows if row.target is None]


@pytest.mark.slow
def test_loggers_get_numbers_and_those_that_can_images(
    lightning: None, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Image=lambda image: image.size))
    board, runs, client = Board(), Runs(), Client()
    loggers = [Logger(), Logger(board), Logger(runs), Logger(client, "abc")]
    callback = lightning_callback(photos, "gae", network="net", every_steps=3, name="maps of training")
    train(lightning_hook(callback, tmp_path, loggers))
    for logger in loggers:
        assert set(logger.rows) == {0, 3, 6} and logger.rows[3].keys() == logger.rows[6].keys()
        assert "maps of training/with_first_mean" in logger.rows[3] and "maps of training/share/0.png" in logger.rows[0]
        assert not any("with_" in tag for tag in logger.rows[0]), "there is nothing to compare the first with"
    assert board.images["maps of training/maps"] == ((224, 2 * 224 + 4, 3), 6) and not board.scalars
    assert runs.rows[1] == ({"maps of training/maps": (452, 224), "trainer/global_step": 3}, None)
    assert client.images[2] == ("abc", {"artifact_file": None, "key": "maps of training/maps", "step": 6})


@pytest.mark.slow
def test_a_writer_for_the_trainer(photos: Path, tmp_path: Path) -> None:
    board = Board()
    train(hf_hook(trainer_callback(photos, "gae", every_steps=3, writer=board, network="net"), tmp_path))
    assert board.images["gae/maps"][1] == 6 and "gae/with_previous/1.png" in board.scalars
    with pytest.raises(OptionError, match="is not a writer that vitreous knows"):
        trainer_callback(photos, writer="tensorboard")


@pytest.mark.slow
def test_the_strip_and_the_table_are_never_replaced(lightning: None, photos: Path, tmp_path: Path) -> None:
    for folder in ("vitreous", "vitreous-2"):
        train(lightning_hook(lightning_callback(photos, "gae", network="net", every_epochs=1), tmp_path, []))
        assert [row["step"] for row in table(tmp_path / folder)] == ["0", "0", "3", "3", "6", "6"]
        assert is_ours(tmp_path / folder / "maps.png")
        with Image.open(tmp_path / folder / "maps.png") as strip:
            assert strip.width > 200 and strip.height > 150
    assert unused(tmp_path / "vitreous") == tmp_path / "vitreous-3"
    train(hf_hook(trainer_callback(photos, "gae", folder=tmp_path / "mine", network="net"), tmp_path))
    assert (tmp_path / "mine" / "maps.csv").exists() and not (tmp_path / "vitreous-3").exists()


@pytest.mark.slow
def test_a_training_that_ends_early_leaves_its_files(lightning: None, photos: Path, tmp_path: Path) -> None:
    callback = lightning_callback(photos, "gae", every_steps=2, network="net")
    inner = lightning_hook(callback, tmp_path, [])

    def hook(moment: str, owner: nn.Module, step: int) -> None:
        inner(moment, owner, step)
        if step == 3:
            callback.on_exception(None, owner, KeyboardInterrupt())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(hook)
    assert (tmp_path / "vitreous" / "maps.png").exists() and len(table(tmp_path / "vitreous")) == 4


@pytest.mark.slow
def test_a_long_training_keeps_few_maps(lightning: None, photos: Path, tmp_path: Path) -> None:
    callback = lightning_callback(photos, "gae")
    found = vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT"), "gae")
    for step in range(6 * KEPT):
        callback.watch.note(callback.watch.measured(found, step, 0.0), found)
    steps = [step for step, _ in callback.watch.looks]
    assert KEPT <= len(steps) <= 2 * KEPT and steps == sorted(set(steps))
    assert steps[0] == 0 and steps[-1] == 6 * KEPT - 1 and len(callback.watch.rows) == 18 * KEPT


def test_it_is_time() -> None:
    by_steps, by_epochs = Due(10, None), Due(None, 2)
    assert not by_steps.at_step(9) and by_steps.at_step(10) and not by_steps.at_epoch(1)
    by_steps.last = 12
    assert not by_steps.at_step(19) and by_steps.at_step(21), "also if a step is two steps of optimisers"
    assert [by_epochs.at_epoch(n) for n in (1, 2, 3, 4)] == [False, True, False, True] and not by_epochs.at_step(10)
    assert Due(None, None).at_epoch(1)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(OptionError, match="every_steps takes a whole number of at least 1, not"):
            Due(wrong, None)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- before it starts


def test_mistakes_are_told_before_training(lightning: None, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="gaee"):
        lightning_callback(photos, "gaee")
    with pytest.raises(OptionError, match="name the method that takes samples"):
        trainer_callback(photos, samples=3)
    with pytest.raises(OptionError, match="start_layer"):
        lightning_callback(photos, "gae", start_layer="x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no images in this folder"):
        lightning_callback(tmp_path / "empty")


@pytest.mark.slow
def test_the_network_is_named_or_found_by_a_function(lightning: None, photos: Path, tmp_path: Path) -> None:
    made = []
    for network in (None, "net", lambda owner: owner.net):
        callback = lightning_callback(photos, "gae", 1, network=network, preprocess=Model(Trained().net).preprocess)
        lightning_hook(callback, tmp_path, [])("start", Trained(), 0)
        made.append(callback.watch.looks[0][1].map)
    assert torch.allclose(made[0], made[1]) and torch.equal(made[1], made[2])

    class Bare(nn.Module):
        """As a LightningModule without a forward."""

        def __init__(self, *parts: nn.Module) -> None:
            super().__init__()
            self.loss, self.parts = nn.CrossEntropyLoss(), nn.ModuleList()
            for number, part in enumerate(parts):
                setattr(self, f"part{number}", part)

    callback = lightning_callback(photos, "gae", 1)
    lightning_hook(callback, tmp_path, [])("start", Bare(Trained().net), 0)
    assert torch.equal(callback.watch.looks[0][1].map, made[1])
    with pytest.warns(
        RuntimeWarning, match="Bare has no forward, and 2 parts with weights: part0, part1; say which is"
    ):
        lightning_hook(lightning_callback(photos, "gae"), tmp_path, [])("start", Bare(Trained(), Trained()), 0)
    for wrong, said in (("nets", "nets"), (lambda owner: 3, "gives a int, not a network")):
        with pytest.warns(RuntimeWarning, match=said):
            lightning_hook(lightning_callback(photos, "gae", network=wrong), tmp_path, [])("start", Trained(), 0)


def test_the_callback_is_one_of_the_package_in_use(lightning: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = zoo.images("timm ViT")
    assert isinstance(lightning_callback(x), Callback)

    class Other:
        """The callback of the other package."""

    monkeypatch.setitem(sys.modules, "pytorch_lightning", SimpleNamespace(Callback=Other))
    both = lightning_callback(x)
    assert isinstance(both, Callback) and isinstance(both, Other)
    again = pickle.loads(pickle.dumps(lightning_callback(x, "gae", every_steps=3)))
    assert isinstance(again, Callback) and again.due.steps == 3 and again.watch.method == "gae"
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("vitreous.bridges.lightning.PACKAGES", ("nowhere_to_be_found",))
    with pytest.raises(ModelError, match=r"this needs lightning: pip install 'vitreous\[lightning\]'"):
        lightning_callback(x)


# -------------------------------------------------------------------------------------------------------- the real ones


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def package(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@REAL
@pytest.mark.slow
def test_lightning_trains_the_same_weights(package: Any, photos: Path, tmp_path: Path) -> None:
    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Trained().net

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    def fit(callbacks: list[Any], folder: Path) -> tuple[nn.Module, Any]:
        module = Module()
        package.seed_everything(1, verbose=False)
        loaded = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), 2, shuffle=True)
        quiet = {f"enable_{name}": False for name in ("progress_bar", "model_summary", "checkpointing")}
        logger = package.loggers.CSVLogger(folder)
        trainer = package.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=callbacks, logger=logger, default_root_dir=folder, **quiet
        )
        trainer.fit(module, loaded)
        return module, trainer

    callback = lightning_callback(photos, "gae", every_steps=2, every_epochs=1, network="net")
    (plain, _), (watched, trainer) = fit([], tmp_path / "a"), fit([callback], tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values()))
    assert [row["step"] for row in table(Path(trainer.log_dir) / "vitreous")[::2]] == ["0", "2", "4", "6", "8"]
    assert (Path(trainer.log_dir) / "vitreous" / "maps.png").exists()
    assert "gae/with_first_mean" in (Path(trainer.log_dir) / "metrics.csv").read_text()


@REAL
@pytest.mark.slow
def test_the_trainer_trains_the_same_weights(photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    import transformers
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Set(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            x, y = data()
            return {"pixel_values": x[index], "labels": y[index]}

    def fit(callbacks: list[Any], folder: Path) -> nn.Module:
        torch.manual_seed(0)
        small = {"image_size": 64, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.ViTConfig(**small, intermediate_size=48, num_labels=4, hidden_dropout_prob=0.2)
        told = {"report_to": "tensorboard", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 1}
        args = transformers.TrainingArguments(folder, num_train_epochs=2, per_device_train_batch_size=2, **told)
        net = transformers.ViTForImageClassification(config)
        transformers.Trainer(net, args, train_dataset=Set(), callbacks=callbacks).train()
        return net

    plain = fit([], tmp_path / "a")
    watched = fit([trainer_callback(photos, "gae", every_steps=3, every_epochs=1)], tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values()))
    folder = tmp_path / "b" / "vitreous"
    assert [row["step"] for row in table(folder)[::2]] == ["0", "3", "4", "6", "8"] and (folder / "maps.png").exists()
    read = EventAccumulator(str(folder))
    read.Reload()
    assert [event.step for event in read.Scalars("gae/with_first_mean")] == [3, 4, 6, 8]
    assert len(read.Images("gae/maps")) == 4 or len(read.Images("gae/maps")) == 5
