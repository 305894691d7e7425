"""Checkpoints people have: files, folders and objects, opened without running anything that lies in them."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import socket
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from conftest import Run, off
from machine import ROUNDING, rare
from test_load import SMALL, equal, hf_config, refusal, saved, small
from torch import nn

import vitreous
from vitreous import Model, ModelWarning
from vitreous.errors import ModelError, WeightsError
from vitreous.models.checkpoint import fit_names
from vitreous.models.checkpoints.pickles import Inert, read_pickle

transformers = pytest.importorskip("transformers", reason="folders of Hugging Face: pip install 'vitreous[hf]'")


def loaded(*args: Any, **options: Any) -> tuple[Model, list[str]]:
    """A model, and what Python users are warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = vitreous.load(*args, **options)
    assert all(issubclass(one.category, ModelWarning) for one in caught)
    said = [str(one.message) for one in caught]
    assert set(said) <= set(model.notes)
    return model, said


# ------------------------------------------------------------------------------------------ what a model says of itself


def test_a_model_says_where_it_came_from(tiny: Model, tmp_path: Path) -> None:
    assert tiny.spec == "embedded/vitreous_tiny"
    assert [file.name for file in tiny.weights] == ["vitreous_tiny.safetensors"]
    assert tiny.notes == ()
    random = vitreous.load(SMALL, weights="random")
    assert (random.spec, random.weights, random.notes) == (f"timm/{SMALL}", (), ())
    mine = Model(random.net)
    assert (mine.spec, mine.weights, mine.notes) == (None, (), ())
    path = saved(random.net.state_dict(), tmp_path / "mine.pth")
    assert vitreous.load(SMALL, path).weights == (path,)


# ------------------------------------------------------------------------------------------------------------ Lightning


class Odd:
    """An object of a class that only the training program has."""

    def __init__(self) -> None:
        self.inner = {"lr": 0.1}


class OddDict(dict[str, Any]):
    """Like the dictionaries of settings that some trainers use."""


def lightning(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What Lightning's Trainer writes, with settings of all kinds."""
    return {
        "epoch": 3,
        "global_step": np.int64(100),
        "pytorch-lightning_version": "2.5.0",
        "state_dict": state,
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": np.float32(0.5), "path": Path("a/b")}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": np.float64(0.1)}]}],
        "hyper_parameters": {
            "args": argparse.Namespace(lr=0.1, out=Path("x")),
            "odd": Odd(),
            "settings": OddDict(a=1),
            "make": partial(nn.Linear, 3),
            "criterion": nn.CrossEntropyLoss(),
            "dtype": np.dtype("float32"),
            "kind": torch.float16,
            **more,
        },
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
    }


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{key}": value for key, value in state.items()}


@pytest.mark.parametrize("prefix", ["model.vit.", *rare("net.", "model.", "backbone.", "a.b.c.", "")])
@pytest.mark.parametrize("legacy", [False, *rare(True)], ids=["zip", "legacy"])
def test_lightning(prefix: str, legacy: bool, tmp_path: Path) -> None:
    net, path = small(3), tmp_path / "epoch=3.ckpt"
    extra = {"loss_fn.weight": torch.ones(3), "val_metrics.total": torch.ones(1)}
    content = lightning(prefixed(net.state_dict(), prefix) | extra)
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    model, said = loaded(SMALL, path)
    assert equal(model.net, net)
    assert said == [f"{path}: ignored loss_fn.weight, val_metrics.total, which VisionTransformer does not have"]
    assert model.run(torch.zeros(1, 3, 160, 160)).shape == (1, 3)


def test_what_trainers_store_becomes_inert(tmp_path: Path) -> None:
    content = read_pickle(saved(lightning({"a": torch.arange(3.0)}), tmp_path / "w.ckpt"))
    assert torch.equal(content["state_dict"]["a"], torch.arange(3.0))
    assert all(isinstance(content["hyper_parameters"][key], Inert) for key in ("odd", "settings", "make", "criterion"))
    assert content["hyper_parameters"]["kind"] == torch.float16


@pytest.mark.slow
def test_lightning_in_the_real_package(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

    class Module(pl.LightningModule):
        def __init__(self, lr: float = 0.1, where: Any = Path("x"), arch: str = SMALL) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net, self.loss = small(3), nn.CrossEntropyLoss(torch.ones(3))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(2, 3, 160, 160), torch.tensor([0, 1]))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_steps=1, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    for model, said in (loaded(SMALL, tmp_path / "last.ckpt"), loaded(tmp_path / "last.ckpt")):
        assert equal(model.net, module.net)
        assert len(said) == 1 and "ignored loss.weight, which" in said[0]
    given = vitreous.load(module)
    assert given.net is module.net


# ------------------------------------------------------------------------------------------- pickles are never executed


class Trap:
    """A pickle that runs something when it is opened."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def write(path: str) -> None:
    """A function of this module: harmless by its name, and importable."""
    Path(path).write_text("run")


TRAPS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda trap: Trap(os.system, f"touch {trap}"),
    "eval": lambda trap: Trap(eval, f"open({str(trap)!r}, 'w').close()"),
    "own function": lambda trap: Trap(write, str(trap)),
    "nested torch.load": lambda trap: Trap(
        torch.storage._load_from_bytes, pickle_bytes(Trap(os.system, f"touch {trap}"))
    ),
    "numpy": lambda trap: Trap(np.save, str(trap), np.zeros(1)),
}


def pickle_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", ["os.system", "own function", *rare(*TRAPS)])
@pytest.mark.parametrize("where", ["beside", *rare("alone", "inside")])
def test_nothing_in_a_pickle_runs(kind: str, where: str, legacy: bool, tmp_path: Path) -> None:
    net, path, trap = small(3), tmp_path / "evil.ckpt", tmp_path / "trap"
    evil, state = TRAPS[kind](trap), net.state_dict()
    content = {
        "alone": evil,
        "beside": {"state_dict": state, "hyper_parameters": {"x": evil}},
        "inside": {"state_dict": {**state, "x": evil}},
    }[where]
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    for options in ({"weights": path}, {"spec": path}):
        with suppress(ModelError):
            assert equal(vitreous.load(**{"spec": SMALL, **options}).net, net)
    assert not list(tmp_path.glob("trap*"))
    torch.load(path, weights_only=False)
    assert list(tmp_path.glob("trap*")), "the trap works"


def test_a_pickle_cannot_change_what_it_names(tmp_path: Path) -> None:
    """BUILD sets attributes of whatever a file names: of functions of torch, too."""

    class Sets:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (), (None, {"changed": 1})

    stream = io.BytesIO()
    stream.write(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x07\x00\x00\x00changedK\x01sb.")
    path = tmp_path / "w.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/data.pkl", stream.getvalue())
        archive.writestr("w/version", "3")
    with pytest.raises(WeightsError):
        vitreous.load(SMALL, path)
    assert not hasattr(torch._utils._rebuild_tensor_v2, "changed")


# ------------------------------------------------------------------------------------------------------- whole networks


@pytest.mark.parametrize(
    "wrap", [lambda net: net, *rare(lambda net: {"model": net, "epoch": 3})], ids=["alone", "in a dict"]
)
@pytest.mark.parametrize("legacy", [False, *rare(True)], ids=["zip", "legacy"])
def test_a_whole_network_needs_trust(wrap: Any, legacy: bool, tmp_path: Path) -> None:
    net, path = small(3), tmp_path / "whole.pt"
    torch.save(wrap(net), path, _use_new_zipfile_serialization=not legacy)
    for args in ((SMALL, path), (path,)):
        said = refusal(*args, kind=WeightsError)
        assert said.startswith(
            f"{path}: is a whole network pickled by torch.save(model) (timm.models.vision_transformer"
        )
        assert "opening it runs any code that lies in it; save model.state_dict() instead" in said
        assert said.endswith("say trust_pickle=True (--trust-pickle)")
        model = vitreous.load(*args, trust_pickle=True)
        assert equal(model.net, net) and not model.net.training
        assert model.weights == (path,) and model.size == (160, 160)


@pytest.mark.slow
def test_trust_on_the_command_line(tmp_path: Path, run: Run, cat: Path) -> None:
    path = saved(small(3), tmp_path / "whole.pt")
    for args in (["--weights", path], ["--model", path], ["--model", SMALL, "--weights", path]):
        assert "--trust-pickle" in run("explain", cat, *args, "--method", "attention", "--out", "maps").error
        assert run("explain", cat, *args, "--trust-pickle", "--method", "attention", "--out", "maps").code == 0


@pytest.mark.slow
def test_trust_changes_nothing_for_a_state(tmp_path: Path) -> None:
    net = small(3)
    path = saved({"state_dict": net.state_dict()}, tmp_path / "w.pth")
    assert equal(vitreous.load(SMALL, path, trust_pickle=True).net, net)


# --------------------------------------------------------------------------------------------------- names and averages


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: f"model.module.vit._orig_mod.{key}",
        *rare(
            lambda key: f"module.{key}",
            lambda key: f"_orig_mod.module.{key}",
            lambda key: f"net._orig_mod.{key}",
            lambda key: key.replace("blocks.", "blocks._orig_mod.").replace("attn.", "attn.module."),
            lambda key: f"_forward_module.model.{key}",
        ),
    ],
)
def test_wrappers_anywhere_in_the_names(rename: Callable[[str], str], tmp_path: Path) -> None:
    net = small(3)
    path = saved({"state_dict": {rename(key): value for key, value in net.state_dict().items()}}, tmp_path / "w.pth")
    model, said = loaded(SMALL, path)
    assert equal(model.net, net) and not said


@pytest.mark.parametrize(
    ("main", "other"),
    [
        ("model", "model_ema"),
        *rare(
            ("state_dict", "state_dict_ema"),
            ("model", "ema"),
            ("teacher", "student"),
            ("model_state_dict", "ema_state_dict"),
        ),
    ],
)
def test_an_average_is_chosen_by_name(main: str, other: str, tmp_path: Path) -> None:
    first, second = small(3), small(3)
    path = saved({other: prefixed(second.state_dict(), "module."), main: first.state_dict()}, tmp_path / "w.pth")
    model, said = loaded(SMALL, path)
    assert equal(model.net, first)
    assert said == [f"{path}: {main} is used; it also holds {other}: w.pth#{other}"]
    chosen, said = loaded(SMALL, f"{path}#{other}")
    assert equal(chosen.net, second) and not said
    assert chosen.weights == (path,)
    assert equal(loaded(SMALL, f"{path}#{main}")[0].net, first)
    assert f"has no 'emma'; it has {other}, {main}" in refusal(SMALL, f"{path}#emma", kind=WeightsError)


def test_an_average_among_the_names_of_one_state(tmp_path: Path) -> None:
    """As where a LightningModule holds the network and its average as two parts."""
    first, second = small(3), small(3)
    state = prefixed(first.state_dict(), "net.") | prefixed(second.state_dict(), "ema_net.module.")
    path = saved({"state_dict": state}, tmp_path / "w.ckpt")
    model, said = loaded(SMALL, path)
    assert equal(model.net, first)
    assert said == [f"{path}: it also holds ema_net; to use it write {path}#ema_net"]
    chosen, said = loaded(SMALL, f"{path}#ema_net")
    assert equal(chosen.net, second) and not said


@pytest.mark.slow
def test_an_average_alone_is_used(tmp_path: Path) -> None:
    net = small(3)
    assert equal(loaded(SMALL, saved({"model_ema": net.state_dict(), "epoch": 1}, tmp_path / "w.pth"))[0].net, net)


@pytest.mark.slow
def test_safetensors_by_any_name(tmp_path: Path) -> None:
    net = small(3)
    safetensors.torch.save_file(prefixed(net.state_dict(), "model."), tmp_path / "w.bin")
    assert equal(vitreous.load(SMALL, tmp_path / "w.bin").net, net)


@pytest.mark.slow
def test_several_networks_without_a_main_one(tmp_path: Path) -> None:
    path = saved({"left": small(3).state_dict(), "right": small(3).state_dict()}, tmp_path / "w.pth")
    assert refusal(SMALL, path, kind=WeightsError).endswith("choose one: w.pth#left or w.pth#right")
    vitreous.load(SMALL, f"{path}#right")


@pytest.mark.slow
def test_a_number_sign_may_be_part_of_a_name(tmp_path: Path) -> None:
    net = small(3)
    assert equal(vitreous.load(SMALL, saved(net.state_dict(), tmp_path / "run#3.pth")).net, net)


def test_blocks_too_many_are_not_left_out_silently(tmp_path: Path) -> None:
    state = small(3).state_dict()
    deeper = state | {key.replace("blocks.0.", "blocks.9."): value for key, value in state.items()}
    said = refusal(SMALL, saved(deeper, tmp_path / "w.pth"), kind=WeightsError)
    assert "unexpected blocks.9." in said and "blocks, the network" in said


@pytest.mark.slow
def test_a_second_classifier_is_not_left_out_silently(tmp_path: Path) -> None:
    state = small(3).state_dict() | {"head_dist.weight": torch.zeros(3, 64), "head_dist.bias": torch.zeros(3)}
    assert "unexpected head_dist.weight" in refusal(SMALL, saved(state, tmp_path / "w.pth"), kind=WeightsError)


@pytest.mark.slow
def test_a_distilled_checkpoint_names_what_is_too_much(tmp_path: Path) -> None:
    net = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, img_size=64)
    said = refusal("deit_tiny_patch16_224", saved(net.state_dict(), tmp_path / "w.pth"), kind=WeightsError)
    assert "unexpected dist_token, head_dist.weight, head_dist.bias" in said


def test_the_best_prefix_wins() -> None:
    own = {"a.weight", "a.bias", "norm.weight"}
    state = {f"{prefix}{key}": torch.zeros(1) for prefix in ("x.y.", "z.") for key in own}
    del state["z.norm.weight"]
    named = fit_names(own, state)
    assert named.state.keys() == own and set(named.left) == {"z.a.weight", "z.a.bias"}


# ---------------------------------------------------------------------------------------------------------- input sizes


def test_a_checkpoint_decides_its_input_size(tmp_path: Path) -> None:
    """P0-4: trained at 96 pixels, loaded into an architecture of 160."""
    net = small(3, img_size=96)
    path = saved(net.state_dict(), tmp_path / "w.pth")
    model, said = loaded(SMALL, path)
    assert model.size == (96, 96) and equal(model.net, net)
    assert said == [
        f"{path}: its position grid is 6×6, so the model takes images of 96×96, not 160×160; "
        "another size is chosen with img_size (--img-size)"
    ]


@pytest.mark.slow
def test_the_command_line_says_a_note_once(tmp_path: Path, run: Run, cat: Path) -> None:
    path = saved(small(3, img_size=96).state_dict(), tmp_path / "w.pth")
    said = loaded(SMALL, path)[1]
    done = run("explain", cat, "--model", SMALL, "--weights", path, "--method", "attention", "--out", "maps")
    assert done.code == 0 and done.err.count(f"note: {said[0]}\n") == 1, "once, and no warning beside it"


def test_a_size_that_is_asked_for_is_resampled_and_said(tmp_path: Path) -> None:
    path = saved(small(3, img_size=96).state_dict(), tmp_path / "w.pth")
    model, said = loaded(SMALL, path, img_size=160)
    assert model.size == (160, 160) and not said, "no warning of what was asked for"
    assert model.notes == (f"{path}: its position grid of 6×6 is resampled to 10×10 for images of 160×160",)
    same, said = loaded(SMALL, path, img_size=96)
    assert same.size == (96, 96) and not same.notes


@pytest.mark.slow
def test_the_embedded_model_at_another_size_says_so(tiny: Model, tmp_path: Path) -> None:
    assert vitreous.load(img_size=160).notes == (
        "vitreous_tiny: its position grid of 14×14 is resampled to 10×10 for images of 160×160",
    )
    assert vitreous.load(img_size=224).notes == ()
    net = timm.create_model("deit_tiny_patch16_224", img_size=96, num_classes=3)
    model, said = loaded(None, saved(net.state_dict(), tmp_path / "w.pth"))
    assert model.size == (96, 96) and "6×6" in said[0]


@pytest.mark.slow
def test_a_grid_that_is_no_square(tmp_path: Path) -> None:
    path = saved(small(3, img_size=(64, 128)).state_dict(), tmp_path / "w.pth")
    said = refusal(SMALL, path, kind=WeightsError)
    assert "its position grid has 32 places, which is no square" in said and said.endswith("(--img-size HxW)")
    assert "64×64 does not fit" in refusal(SMALL, path, img_size=64, kind=WeightsError)
    assert vitreous.load(SMALL, path, img_size=(64, 128)).size == (64, 128)


@pytest.mark.slow
def test_input_sizes_of_torchvision(tmp_path: Path) -> None:
    tiny = {"patch_size": 16, "num_layers": 1, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 3}
    path = saved(torchvision.models.VisionTransformer(96, **tiny).state_dict(), tmp_path / "w.pth")

    def make(name: str, weights: Any = None, image_size: int = 224, num_classes: int = 3) -> nn.Module:
        return torchvision.models.VisionTransformer(image_size, **tiny)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchvision.models, "get_model", make)
        model, said = loaded("torchvision/vit_b_16", path)
        assert model.size == (96, 96) and "6×6" in said[0]
        larger, said = loaded("torchvision/vit_b_16", path, img_size=128)
        assert larger.size == (128, 128) and not said and "6×6 is resampled to 8×8" in larger.notes[0]


@pytest.mark.slow
def test_tables_of_distances_tell_the_size_too(tmp_path: Path) -> None:
    """BEiT has no positions, but a table of the distances between them."""
    small_beit = {"embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
    make = timm.create_model
    net = make("beit_base_patch16_224", img_size=96, **small_beit)
    path = saved(net.state_dict(), tmp_path / "w.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", lambda name, **more: make(name, **{**small_beit, **more}))
        model, said = loaded("beit_base_patch16_224", path)
        assert model.size == (96, 96) and equal(model.net, net) and "6×6" in said[0]
        larger, said = loaded("beit_base_patch16_224", path, img_size=128)
        assert larger.size == (128, 128) and not said and "6×6 is resampled to 8×8" in larger.notes[0]


@pytest.mark.slow
def test_patches_must_fill_the_image(tmp_path: Path, run: Run, cat: Path, hf_folder: Path) -> None:
    """P2: --img-size 225 with patches of 16."""
    said = "img_size 225 is not a multiple of its patches of 16 pixels; try 224 or 240"
    assert refusal(img_size=225) == f"vitreous_tiny: {said}"
    assert refusal(SMALL, "random", img_size=225) == f"{SMALL}: {said}"
    assert said in refusal(f"hf/{hf_folder}", img_size=225)
    assert "img_size 64×100 is not a multiple of its patches of 16 pixels; try 64×96 or 80×112" in refusal(
        SMALL, "random", img_size=(64, 100)
    )
    assert said in refusal("xcit_nano_12_p16_224", "random", img_size=225), "of a stem of several convolutions"
    assert said in refusal("torchvision/vit_b_16", "random", img_size=225)
    assert said in run("explain", cat, "--img-size", "225").error


# -------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A classifier of three animals, as save_pretrained and the Trainer write it."""
    return animals(tmp_path / "animals")


def animals(folder: Path, **more: Any) -> Path:
    names = {"id2label": {0: "cat", 1: "dog", 2: "bird"}, "label2id": {"cat": 0, "dog": 1, "bird": 2}}
    config = hf_config("ViT", **{"image_size": 64, "patch_size": 16, **names})
    config.update(more)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


def of_folder(folder: Path) -> nn.Module:
    return transformers.ViTForImageClassification.from_pretrained(folder).eval()


@pytest.mark.parametrize("form", ["{}", *rare("{}/", "{}/config.json", "{}/model.safetensors", "hf/{}")])
def test_a_hugging_face_folder(form: str, hf_folder: Path) -> None:
    """P1-14: --model ./folder."""
    model, said = loaded(form.format(hf_folder))
    assert equal(model.net, of_folder(hf_folder)) and not said
    assert model.labels == {0: "cat", 1: "dog", 2: "bird"}
    assert model.weights == (hf_folder / "model.safetensors",) and model.spec == f"hf/{hf_folder}"


@pytest.mark.slow
def test_a_folder_on_the_command_line(hf_folder: Path, run: Run, cat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("--version")
    monkeypatch.chdir(hf_folder.parent)
    for name in ("./animals", "animals"):
        assert run("explain", cat, "--model", name, "--method", "attention", "--target", "dog", "--out", "m").code == 0


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_trainer(tmp_path: Path) -> None:
    for step in (500, 1000, 90):
        animals(tmp_path / "out" / f"checkpoint-{step}")
    torch.save(Trap(write, str(tmp_path / "trap")), tmp_path / "out" / "checkpoint-1000" / "training_args.bin")
    for spec in (f"{tmp_path}/out", f"hf/{tmp_path}/out"):
        model, said = loaded(spec)
        assert equal(model.net, of_folder(tmp_path / "out" / "checkpoint-1000"))
        assert said == [f"{tmp_path}/out: checkpoint-1000 is used, the newest of 3 checkpoints"]
    assert equal(loaded(tmp_path / "out" / "checkpoint-90")[0].net, of_folder(tmp_path / "out" / "checkpoint-90"))
    assert not (tmp_path / "trap").exists()


@pytest.fixture
def sharded(hf_folder: Path, tmp_path: Path) -> Path:
    of_folder(hf_folder).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    return tmp_path / "sharded"


@pytest.mark.slow
def test_shards(sharded: Path, hf_folder: Path) -> None:
    net, index = of_folder(hf_folder), "model.safetensors.index.json"
    model, _ = loaded(sharded)
    assert equal(model.net, net) and len(model.weights) > 1
    for weights in (sharded, sharded / index):
        other, said = loaded(f"hf/{hf_folder}", weights)
        assert equal(other.net, net) and not said
        assert set(other.weights) == set(sharded.glob("model-*.safetensors"))
    gone = sorted(sharded.glob("model-*.safetensors"))[0]
    gone.unlink()
    assert f"names shards that are not there: {gone.name}" in refusal(f"hf/{hf_folder}", sharded, kind=WeightsError)
    (sharded / index).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    assert "outside its folder" in refusal(f"hf/{hf_folder}", sharded, kind=WeightsError)
    (sharded / index).write_text("{")
    assert "is not an index of shards" in refusal(f"hf/{hf_folder}", sharded / index, kind=WeightsError)


def test_shards_for_timm(tmp_path: Path) -> None:
    net = small(3)
    items = list(net.state_dict().items())
    safetensors.torch.save_file(dict(items[:9]), tmp_path / "a.safetensors")
    safetensors.torch.save_file(dict(items[9:]), tmp_path / "b.safetensors")
    told = {key: "a.safetensors" if i < 9 else "b.safetensors" for i, (key, _) in enumerate(items)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": told}))
    assert equal(vitreous.load(SMALL, tmp_path).net, net)


@pytest.mark.parametrize("safe", [True, *rare(False)])
def test_a_timm_folder(safe: bool, tmp_path: Path, cat: Path) -> None:
    net = small(3, img_size=96)
    told = {"label_names": ["cat", "dog", "bird"], "label_descriptions": {"cat": "a cat, that purrs"}}
    timm.models._hub.save_for_hf(
        net, tmp_path / "mine", model_config=told, model_args={"img_size": 96}, safe_serialization=safe
    )
    model, said = loaded(tmp_path / "mine")
    assert equal(model.net, net) and not said
    assert model.labels == {0: "a cat, that purrs", 1: "dog", 2: "bird"}
    assert model.name == "mine" and model.size == (96, 96)
    assert vitreous.explain(model, cat, "attention", target="dog").map.shape == (1, 6, 6)
    assert model.weights == (tmp_path / "mine" / ("model.safetensors" if safe else "pytorch_model.bin"),)


@pytest.mark.parametrize(
    "told",
    [
        {"arch": SMALL},
        *rare(
            {"args": argparse.Namespace(model=SMALL)},
            {"hyper_parameters": {"model_name": f"timm/{SMALL}"}},
            {"hyper_parameters": {"cfg": {"backbone": f"{SMALL}.r160_in1k"}, "odd": Odd()}},
        ),
    ],
    ids=["timm's train.py", "DeiT", "Lightning", "nested"],
)
def test_a_file_that_names_its_architecture(told: dict[str, Any], tmp_path: Path) -> None:
    net = small(3)
    path = saved({"state_dict": prefixed(net.state_dict(), "model."), **told}, tmp_path / "w.ckpt")
    model, said = loaded(path)
    assert equal(model.net, net) and not said
    assert model.spec.startswith(f"timm/{SMALL}") and model.weights == (path,)


@pytest.mark.slow
def test_settings_of_omegaconf(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="OmegaConf is not installed")
    net, settings = small(3), omegaconf.OmegaConf.create({"lr": 0.1, "model": {"name": SMALL}, "sizes": [1, 2]})
    path = saved({"state_dict": net.state_dict(), "hyper_parameters": {"cfg": settings}}, tmp_path / "w.ckpt")
    assert equal(loaded(path)[0].net, net)


@pytest.mark.slow
def test_files_and_folders_that_name_nothing(tmp_path: Path) -> None:
    remedy = "name its architecture too: load(NAME, weights=FILE), on the command line -m NAME -w FILE"
    path = saved(small(3).state_dict(), tmp_path / "w.pth")
    assert refusal(path, kind=WeightsError) == f"{path}: does not say its architecture; {remedy}"
    assert refusal(tmp_path).endswith(f"does not say its architecture; {remedy}"), "the only file in it"
    saved({}, tmp_path / "v.pth")
    assert refusal(tmp_path).endswith(f"is a folder without config.json, so its architecture is not known; {remedy}")
    assert "several files of weights, v.pth, w.pth; name one" in refusal(SMALL, tmp_path, kind=WeightsError)
    (tmp_path / "config.json").write_text("{}")
    assert "config.json: says neither model_type (Hugging Face) nor architecture (timm)" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[")
    assert "config.json: is not readable" in refusal(tmp_path)
    assert refusal("./nothing") == "./nothing: no such folder or file"
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "config.json").unlink()
    assert "is neither a folder of a model nor a file of weights" in refusal(tmp_path / "notes.txt")


# --------------------------------------------------------------------------------------------- weights for Hugging Face


@pytest.mark.slow
def test_files_for_a_hugging_face_model(hf_folder: Path, tmp_path: Path) -> None:
    """In the names of the module and in those of the file, which differ; with Lightning's prefix and extra names."""
    net = of_folder(hf_folder)
    stored = safetensors.torch.load_file(hf_folder / "model.safetensors")
    for state in (dict(net.state_dict()), stored):
        path = saved(lightning(prefixed(state, "model.") | {"loss_fn.weight": torch.ones(3)}), tmp_path / "w.ckpt")
        model, said = loaded(hf_folder, path)
        assert equal(model.net, net)
        assert said == [f"{path}: ignored loss_fn.weight, which ViTForImageClassification does not have"]


@pytest.mark.slow
def test_a_file_decides_size_and_classes_of_a_hugging_face_model(hf_folder: Path, tmp_path: Path, cat: Path) -> None:
    other = of_folder(animals(tmp_path / "other", image_size=96, num_labels=5))
    path = saved(other.state_dict(), tmp_path / "w.pth")
    model, said = loaded(hf_folder, path)
    assert model.size == (96, 96) and equal(model.net, other) and "6×6" in said[0]
    assert not model.labels, "those of the folder are others"
    larger, said = loaded(hf_folder, path, img_size=64)
    assert larger.size == (64, 64) and not said and "6×6 is resampled to 4×4" in larger.notes[0]
    assert vitreous.explain(larger, cat, "attention").map.shape == (1, 4, 4)
    asked = vitreous.load(hf_folder, img_size=128)
    assert asked.notes == (f"hf/{hf_folder}: its position grid of 4×4 is resampled to 8×8 for images of 128×128",)


# ------------------------------------------------------------------------------------------------------------- adapters


@pytest.fixture
def lora(hf_folder: Path, tmp_path: Path) -> tuple[Path, nn.Module]:
    """A folder of PEFT, and the network with it."""
    peft = pytest.importorskip("peft", reason="adapters: pip install 'vitreous[peft]'")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    adapted = peft.get_peft_model(of_folder(hf_folder), config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "lora")
    return tmp_path / "lora", adapted


@pytest.mark.slow
def test_an_adapter_on_its_base(lora: tuple[Path, nn.Module], hf_folder: Path, tmp_path: Path) -> None:
    folder, adapted = lora
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = adapted(pixel_values=x).logits
    for args in ((folder,), (hf_folder, folder), (f"hf/{hf_folder}", folder)):
        model, said = loaded(*args)
        assert off(model.run(x), expected) <= ROUNDING and not said
        assert model.labels == {0: "cat", 1: "dog", 2: "bird"}
        assert model.weights == (hf_folder / "model.safetensors", folder / "adapter_model.safetensors")
    assert not equal(of_folder(hf_folder), model.net)


@pytest.mark.slow
def test_an_adapter_with_another_classifier(hf_folder: Path, tmp_path: Path) -> None:
    """A classifier of five classes on a base of three."""
    peft = pytest.importorskip("peft", reason="adapters: pip install 'vitreous[peft]'")
    net = transformers.ViTForImageClassification.from_pretrained(hf_folder, num_labels=5, ignore_mismatched_sizes=True)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["classifier"])
    adapted = peft.get_peft_model(net, config).eval()
    adapted.save_pretrained(tmp_path / "five")
    x = torch.randn(2, 3, 64, 64)
    assert off(vitreous.load(tmp_path / "five").run(x), adapted(pixel_values=x).logits.detach()) <= ROUNDING


@pytest.mark.slow
def test_adapters_that_cannot_be_used(lora: tuple[Path, nn.Module], hf_folder: Path, tmp_path: Path) -> None:
    folder, _ = lora
    shallow = animals(tmp_path / "shallow", num_hidden_layers=1)
    assert "does not fit ViTForImageClassification: unexpected" in refusal(shallow, folder)
    told = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(told | {"base_model_name_or_path": None}))
    assert "names no base model; give both" in refusal(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors or adapter_model.bin" in refusal(hf_folder, folder)


def test_adapters_need_peft(hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(hf_folder)}))
    assert refusal(tmp_path) == "this needs peft: pip install 'vitreous[peft]'"


# -------------------------------------------------------------------------------------------------------------- objects


@pytest.mark.slow
def test_a_pipeline(hf_folder: Path, cat: Path) -> None:
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64}, image_mean=[0.3, 0.4, 0.5])
    net = of_folder(hf_folder)
    pipeline = transformers.pipeline("image-classification", model=net, image_processor=processor, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best = pipeline(str(cat))[0]
    for given in (pipeline, (net, processor)):
        model, said = loaded(given)
        assert model.net is net and not said
        scores = model.run(model.prepare(cat)).softmax(-1)[0]
        assert model.label(int(scores.argmax())) == best["label"]
        assert off(scores.max().detach(), best["score"]) <= 1e-4
        found = vitreous.explain(given, cat, "attention")
        assert found.map.shape == (1, 4, 4)
    assert all(parameter.requires_grad for parameter in net.parameters()), "used as it is"


class LightningModule(nn.Module):
    """The name by which Lightning's class is known."""


class OneNet(LightningModule):
    def __init__(self, net: nn.Module, **attributes: Any) -> None:
        super().__init__()
        self.net, self.loss = net, nn.CrossEntropyLoss()
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    "told",
    [
        {"class_names": ["cat", "dog", "bird"]},
        {"hparams": {"class_to_idx": {"cat": 0, "dog": 1, "bird": 2}}},
        {"labels": ["wrong", "number"], "id2label": {0: "cat", 1: "dog", 2: "bird"}},
    ],
)
def test_a_lightning_module(told: dict[str, Any], cat: Path) -> None:
    net = small(3)
    module = OneNet(net, **told)
    model = vitreous.load(module)
    assert model.net is net and model.labels == {0: "cat", 1: "dog", 2: "bird"}
    assert vitreous.explain(module, cat, "attention", target="dog").map.shape == (1, 10, 10)


@pytest.mark.slow
def test_a_lightning_module_of_several_parts(cat: Path) -> None:
    class Two(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = small(0), nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.backbone(x))

    class NoForward(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    module = Two().eval()
    model = vitreous.load(module)
    assert model.net is module and model.size == (160, 160)
    assert vitreous.explain(module, cat, "attention").map.shape == (1, 10, 10)
    assert refusal(NoForward()).endswith("several networks (a, b); give the one to explain, e.g. module.a")


def test_other_objects(tiny: Model) -> None:
    assert vitreous.load(tiny) is tiny
    net = small(3)
    assert vitreous.load(net).net is net
    assert refusal(3).startswith("a int is not a model; give a name")
    assert "weights and img_size are for names" in refusal(net, "random")
    assert vitreous.load(net, dtype="float64").dtype == torch.float64


# -------------------------------------------------------------------------------------------------------------- offline


@pytest.fixture(params=["closed", *rare("silent")])
def no_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A hub that takes connections and never answers, or that is not there; and an empty cache."""
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if request.param == "closed":
            server.close()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("vitreous.models.libraries.hub.WAIT", 1.0)
        yield url


@pytest.mark.parametrize("spec", [f"{SMALL}.r160_in1k", "hf/google/no-such-vit", "openclip/ViT-B-32"])
def test_a_hub_that_does_not_answer(spec: str, no_hub: str) -> None:
    """P1-15: within seconds, in one line."""
    if spec.startswith("openclip"):
        pytest.importorskip("open_clip", reason="open_clip is not installed")
    start = time.monotonic()
    said = refusal(spec)
    assert time.monotonic() - start < 5
    assert f"no connection to {no_hub}" in said


@pytest.mark.slow
def test_a_cached_model_loads_without_a_hub(no_hub: str, hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    store = Path(constants.HF_HUB_CACHE) / "models--someone--animals"
    (store / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("0" * 40)
    for file in hf_folder.iterdir():
        (store / "snapshots" / ("0" * 40) / file.name).write_bytes(file.read_bytes())
    start = time.monotonic()
    model = vitreous.load("hf/someone/animals")
    assert time.monotonic() - start < 5
    assert equal(model.net, of_folder(hf_folder))
    assert model.weights == (store / "snapshots" / ("0" * 40) / "model.safetensors",)
    assert constants.HF_HUB_OFFLINE is False, "as before"


# -------------------------------------------------------------------------------------------------------- broken things


def broken(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files that are no checkpoint of the model, and what is said of each."""
    whole = saved(lightning(small(3).state_dict()), folder / "whole.ckpt").read_bytes()
    (folder / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    yield folder / "cut.ckpt", "is not a readable checkpoint"
    (folder / "empty.pth").touch()
    yield folder / "empty.pth", "it is empty"
    with zipfile.ZipFile(folder / "photos.pt", "w") as archive:
        archive.writestr("photos/a.txt", "hello")
    yield folder / "photos.pt", "is a zip archive, but not one of torch.save; give the file"
    (folder / "text.pth").write_text("these are no weights")
    yield folder / "text.pth", "is not a readable checkpoint (torch.save did not write it); give"
    yield saved([torch.ones(1), 2], folder / "list.pth"), "is a list, not a dictionary of tensors; save"
    (folder / "plain.pth").write_bytes(pickle.dumps([1, 2]))
    yield folder / "plain.pth", "is not a readable checkpoint"
    cnn = timm.create_model("test_resnet", num_classes=3)
    yield saved(cnn.state_dict(), folder / "cnn.pth"), "does not fit VisionTransformer: missing cls_token"
    deep = timm.create_model(SMALL, num_classes=3, depth=2)
    yield saved(deep.state_dict(), folder / "deep.pth"), "it has 2 blocks, the network 6: name the architecture"
    script = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    script.save(str(folder / "script.pt"))
    yield folder / "script.pt", "is a TorchScript archive"
    (folder / "bytes.safetensors").write_bytes(b"\x00" * 50)
    yield folder / "bytes.safetensors", "is not a readable checkpoint"
    yield saved({"epoch": 1}, folder / "epoch.pth"), "contains no tensors (keys: epoch); save model.state_dict()"


@pytest.mark.slow
def test_broken_things_end_in_one_line(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(broken(tmp_path))
    for path, expected in every:
        said = refusal(SMALL, path, kind=WeightsError)
        assert said.startswith(f"{path}: ") and expected in said and ";" in said, said
