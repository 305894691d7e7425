"""The study of shortcuts, on a network whose shortcut is known by construction."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Run
from PIL import Image
from torch import nn

from vitreous import METHODS, Model, open_study, run_study
from vitreous.errors import InputError, OptionError, TargetError, Unsupported
from vitreous.evaluation.report.study import write_report
from vitreous.evaluation.study import local
from vitreous.evaluation.study.kind import find_kind
from vitreous.evaluation.study.read import Study
from vitreous.evaluation.study.shortcuts import score
from vitreous.evaluation.study.shortcuts.cluster import assigned, find_clusters, unit
from vitreous.evaluation.study.shortcuts.kind import Shortcuts
from vitreous.models.libraries import cropped
from vitreous.plot.shortcuts import Tile, contact_figure, scores_figure

SIDE, GRID, CLASSES = 16, 4, 3
LABELS = ["red", "green", "blue"]
MARK = np.kron(np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]), np.ones((4, 4)))


class Block(nn.Module):
    """Even attention and its mean added, so that tokens stay those of their patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.zeros_like(x)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(q, q, x[:, None])[:, 0]
        return x + 0.02 * mixed


class Cheat(nn.Module):
    """Classes by colour, the mean over the patches; unless it is honest, a check pattern says class 0."""

    def __init__(self, cheats: bool = True) -> None:
        super().__init__()
        self.width = 8
        self.cheats = cheats
        self.embed = nn.Conv2d(3, self.width, SIDE, SIDE, bias=False)
        self.blocks = nn.ModuleList([Block(self.width), Block(self.width)])
        self.head = nn.Linear(self.width, CLASSES)
        weight = torch.zeros(self.width, 3, SIDE, SIDE)
        for colour in range(3):
            weight[colour, colour] = 1 / SIDE**2
        pattern = torch.tensor(2 * MARK - 1, dtype=torch.float32) / SIDE**2
        weight[3] = pattern
        generator = torch.Generator().manual_seed(0)
        weight[4:] = torch.randn(4, 3, SIDE, SIDE, generator=generator) / SIDE**2
        read = torch.zeros(CLASSES, self.width)
        read[range(3), range(3)] = 16.0
        read[0, 3] = 60.0 if cheats else 0.0
        with torch.no_grad():
            self.embed.weight.copy_(weight)
            self.head.weight.copy_(read)
            self.head.bias.zero_()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def model(cheats: bool = True, name: str = "cheat") -> Model:
    side = SIDE * GRID
    return Model(Cheat(cheats).eval(), cropped((side, side), (0.5,) * 3, (0.5,) * 3), LABELS, name=name)


def scene(rng: np.random.Generator, colour: int, mark: bool) -> Image.Image:
    """Noise with a few patches of a colour; in some, a check pattern in one patch."""
    pixels = rng.integers(90, 150, (SIDE * GRID, SIDE * GRID, 3)).astype(np.uint8)
    for _ in range(3):
        y, x = SIDE * rng.integers(0, GRID, 2)
        pixels[y : y + SIDE, x : x + SIDE, colour] = rng.integers(170, 220, (SIDE, SIDE))
    if mark:
        pixels[-SIDE:, -SIDE:] = (255 * MARK[..., None]).astype(np.uint8)
    return Image.fromarray(pixels)


def make(folder: Path, marked: int = 4, images: int = 14, masks: bool = False) -> Path:
    """Class folders; the first images of class red have the pattern, in the last patch."""
    rng = np.random.default_rng(0)
    for colour, name in enumerate(LABELS):
        (folder / name).mkdir(parents=True)
        for i in range(images):
            scene(rng, colour, colour == 0 and i < marked).save(folder / name / f"{i:02d}.png")
    return folder


FEW: dict[str, Any] = {"options": {"shortcuts": {"hosts": 12, "clusters": 4}}, "workers": 0}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("poisoned") / "data")


@pytest.fixture(scope="module")
def study(poisoned: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    return run_study("shortcuts", poisoned, model(), tmp_path_factory.mktemp("out"), **FEW)


@pytest.fixture(scope="module")
def table(study: Study) -> Any:
    return study.frame("clusters")


def test_the_cue_is_ranked_first_and_alarms(table: Any) -> None:
    first = table.iloc[0]
    assert first["rank"] == 1 and first["label"] == "red" and first["alarm"] and not table["alarm"][1:].any()
    assert set(first["image_names"]) == {f"red/{i:02d}.png" for i in range(4)}
    assert all(list(places) == [GRID * GRID - 1] for places in first["places"])
    assert first["score_low"] > 0.4 and first["score"] == pytest.approx(first["weight"] * first["gain"])
    assert first["weight"] == pytest.approx(1 - 4 / 14) and first["here"] == pytest.approx(4 / 14)
    assert first["elsewhere"] == 0 and first["flips"] == 1 and np.isnan(first["outside"])
    assert first["confidence_change_high"] < 0 and first["accuracy_removed"] == 0  # without it, red is still red
    assert (table["rank"].to_numpy() == np.arange(1, len(table) + 1)).all()


@pytest.mark.slow
def test_the_findings_say_it(study: Study) -> None:
    found = study.findings()["cheat"]
    assert study.finished and found.lead.startswith("1 alarm at 5 % among ") and "of red" in found.lead
    assert "turns 100 % of the answers" in found.told[0] and "in 0 % of the others" in found.told[0]
    assert {one.name for one in found.charts} >= {"scores", "cluster-" + str(study.frame("clusters")["cluster"][0])}
    with pytest.raises(InputError, match="no table 'cluster'; did you mean"):
        study.frame("cluster")


def test_removal_and_insertion_are_those_of_the_network(study: Study, table: Any, poisoned: Path) -> None:
    """The rows of the second phase, computed again by hand from pixels."""
    assert study.second is not None
    rows, net = study.second.to_pandas(), Cheat().eval()
    names = study.to_pandas()["image"].tolist()
    first = table.iloc[0]["cluster"]
    pairs = [one for one in study.second.manifest["options"]["designs"]["cheat"]["pairs"] if one[1] == first]
    for host, _, donor, cue, *_ in pairs[:3]:
        pixels, given = (opened(poisoned / names[n]) for n in (host, donor))
        assert cue == [GRID * GRID - 1]
        pixels[..., -SIDE:, -SIDE:] = given[..., -SIDE:, -SIDE:]
        row = rows.iloc[host]
        at = list(row["inserted"]).index(first)
        assert row["p_cue"][at] == pytest.approx(probability(net(pixels), 0), abs=1e-5)
        assert row["p_before"][at] == pytest.approx(probability(net(opened(poisoned / names[host])), 0), abs=1e-5)
    row = rows.iloc[names.index("red/00.png")]
    at = list(row["removed"]).index(first)
    x = net.embed(opened(poisoned / "red" / "00.png")).flatten(2).mT[:, :-1]
    for block in net.blocks:
        x = block(x)
    assert row["tokens"][at] == 1
    assert row["p_without"][at] == pytest.approx(probability(net.head(x.mean(1)), 0), abs=1e-5)


def opened(file: Path) -> torch.Tensor:
    return torch.tensor(np.asarray(Image.open(file)) / 255 * 2 - 1, dtype=torch.float32).permute(2, 0, 1)[None]


def probability(output: torch.Tensor, group: int) -> float:
    return float(output.detach().softmax(1)[0, group])


@pytest.mark.slow
def test_the_report_has_sheets_and_tables(study: Study, tmp_path: Path) -> None:
    import pandas as pd

    written = {file.name for file in write_report(study, tmp_path)}
    assert {"scores.png", "clusters.parquet", "findings.json", "report.html"} <= written
    table = pd.read_parquet(tmp_path / "clusters.parquet")
    assert table["score"].to_numpy() == pytest.approx(study.frame("clusters")["score"].to_numpy())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Rank 1: cluster" in page and "In no cluster" in page and "<img" not in page.split("How it was made")[1]


# ------------------------------------------------------------------------------------------------------------ clusters


def cloud(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Three parts of each of 40 images, and in two of the images a fourth, all in one place."""
    rng = np.random.default_rng(seed)
    image = np.repeat(np.arange(40), 3)
    parts = rng.normal(size=(120, 24))
    mark = rng.normal(size=24)
    rare = np.arange(40)[::10]
    parts = np.concatenate([parts, mark + 0.05 * rng.normal(size=(len(rare), 24))])
    image = np.concatenate([image, rare])
    return unit(parts, parts.mean(0)), image, np.ones(len(image)), np.arange(120, 120 + len(rare))


def test_a_rare_cue_is_a_cluster() -> None:
    units, image, weight, rare = cloud()
    found = find_clusters(units, image, weight, least=3, most=8, seed=0)
    one = next(one for one in found if set(rare) <= set(one.parts))
    assert set(one.parts) == set(rare) and one.images == one.again == 4 and one.stability > 0.9
    near = assigned(units, one.centre[None], np.array([one.radius]))
    assert set(np.flatnonzero(near == 0)) <= set(rare) and (near == 0).sum() >= 3


def test_clusters_are_the_same_again_and_none_where_there_are_few_images() -> None:
    units, image, weight, _ = cloud()
    first, again = (find_clusters(units, image, weight, least=3, most=8, seed=3) for _ in range(2))
    assert [one.parts.tolist() for one in first] == [one.parts.tolist() for one in again]
    assert find_clusters(units[:6], image[:6], weight[:6], least=3, most=8, seed=0) == []
    assert (assigned(units, np.zeros((0, 24)), np.zeros(0)) == -1).all()


def test_noise_has_no_stable_clusters() -> None:
    rng = np.random.default_rng(1)
    parts = rng.normal(size=(120, 64))
    found = find_clusters(
        unit(parts, parts.mean(0)), np.repeat(np.arange(40), 3), np.ones(120), least=3, most=8, seed=0
    )
    assert sum(len(one.parts) for one in found) < 60  # most parts are in none


def test_of_many_images_a_tree_takes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitreous.evaluation.study.shortcuts import cluster

    monkeypatch.setattr(cluster, "MOST", 60)
    units, image, _, rare = cloud()
    units = np.concatenate([units, units[rare].repeat(4, 0)])
    image = np.concatenate([image, 100 + np.arange(4 * len(rare))])
    found = find_clusters(units, image, np.ones(len(image)), least=3, most=8, seed=0)
    assert any(one.images > 8 for one in found)  # those that were not in the tree were gathered


def test_tests_of_an_alarm() -> None:
    rows = np.zeros((12, 7))
    rows[:, 0], rows[:, 2] = np.arange(12), 0.5
    design = {"pairs": [[i, 0, i % 4, [], 100 + i, [], 0] for i in range(12)]}
    assert score.test_inserted(rows, 1.0, 0.05) < 0.001 and score.test_inserted(rows, 0.0, 0.05) > 0.9
    assert score.test_inserted(rows[:3], 1.0, 0.05) == 1
    assert score.test_sources(rows, 0, design) < 0.01 and score.test_sources(rows[:1], 0, design) == 1
    assert score.test_specific(4, 20, 0, 40) < 0.02 < score.test_specific(4, 20, 8, 40)
    assert score.test_specific(4, 20, 0, 0) == 1
    scores = np.array([0.6, *np.linspace(-0.05, 0.05, 9)])
    assert score.stands_out(scores, 0) < 1e-3 and score.stands_out(scores, 5) > 0.2
    assert score.stands_out(scores[:4], 0) == 0 and score.stands_out(np.array([np.nan, 1.0]), 0) == 1


# ---------------------------------------------------------------------------------------------------------- refusals


def test_options_are_checked() -> None:
    for given, said in (({"hosts": 1}, "shortcuts.hosts=1"), ({"clustres": 3}, "has no option 'clustres'")):
        with pytest.raises(OptionError, match=said):
            Shortcuts.make(None, {"shortcuts": given})
    with pytest.raises(OptionError, match="takes one method"):
        Shortcuts.make(["gae", "cdam"], {})
    with pytest.raises(OptionError, match="attention explains no class"):
        Shortcuts.make(["attention"], {})
    assert (
        Shortcuts.make(None, {}).method
        == min((one for one in METHODS.values() if one.default and one.targeted), key=lambda one: one.default).name
    )
    with pytest.raises(OptionError, match="second phase of the study shortcuts"):
        find_kind("effects").make()


def test_what_it_cannot_do_is_refused(poisoned: Path, tmp_path: Path) -> None:
    def refused(error: type[Exception], said: str, given: Any = None, **options: Any) -> None:
        with pytest.raises(error, match=said):
            run_study("shortcuts", poisoned, given or model(), tmp_path, **options)

    refused(OptionError, "layer 7 is out of range", options={"shortcuts": {"layer": 7}})
    refused(TargetError, "purple", options={"shortcuts": {"classes": ["purple"]}})
    refused(OptionError, "takes one target", target=["label", "top-1"])
    headless = Model(zoo.timm("vit_tiny_patch16_224", num_classes=0)(), cropped((64, 64), (0.5,) * 3, (0.5,) * 3))
    refused(TargetError, "has no classifier", headless)


def test_figures_need_something_to_draw() -> None:
    with pytest.raises(InputError, match="no image"):
        contact_figure([], "a", "b")
    with pytest.raises(InputError, match="no score"):
        scores_figure([], [])


def test_a_tile_shows_its_patch() -> None:
    photo = Image.new("RGB", (64, 64))
    photo.paste((255, 0, 0), (48, 48, 64, 64))
    tile = Tile("a", photo, np.zeros((4, 4)), [15])
    assert tile.rectangle(15) == (48, 48, 64, 64) and tile.close.size == (224, 224)
    assert tile.close.getpixel((200, 200)) == (255, 0, 0) and tile.close.getpixel((20, 20)) == (0, 0, 0)
    part = Tile("a", photo, np.zeros((4, 4)), [0], (0.5, 0.5, 1.0, 1.0))
    assert part.rectangle(0) == (32, 32, 40, 40)


# ------------------------------------------------------------------------------------------------------- whole studies


def same(one: Study, other: Study) -> None:
    left, right = one.frame("clusters"), other.frame("clusters")
    assert left["image_names"].map(list).tolist() == right["image_names"].map(list).tolist()
    for name in ("score", "score_low", "p", "confidence_change", "here", "stability"):
        np.testing.assert_allclose(left[name], right[name], atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_an_honest_network_gives_no_alarm(poisoned: Path, tmp_path: Path) -> None:
    found = run_study("shortcuts", poisoned, model(cheats=False), tmp_path, **FEW)
    table = found.frame("clusters")
    assert not table["alarm"].any() and table["score"].max() < 0.1
    assert found.findings()["cheat"].lead.startswith("No alarm at 5 %")


@pytest.mark.slow
def test_shuffled_labels_give_no_alarm(tmp_path: Path) -> None:
    """Every image has any of the labels, so no cluster is that of a class."""
    alarms = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        for i in range(45):
            folder = tmp_path / f"{seed}" / LABELS[rng.integers(3)]
            folder.mkdir(parents=True, exist_ok=True)
            scene(rng, int(rng.integers(3)), False).save(folder / f"{i}.png")
        made = run_study("shortcuts", tmp_path / f"{seed}", model(), tmp_path / f"out{seed}", **FEW)
        alarms += "clusters" in made.findings()["cheat"].frames and bool(made.frame("clusters")["alarm"].any())
    assert alarms == 0


@pytest.mark.slow
def test_an_interrupted_study_resumes_in_either_phase(
    study: Study, poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_study("shortcuts", poisoned, model(), tmp_path / "whole", shard=8, batch=8, **FEW)
    same(study, whole)  # other shards
    real, calls = local.run_shard, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 10):
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(local, "run_shard", failing)
    stopped = tmp_path / "stopped"
    for begun in (False, True):
        with pytest.raises(KeyboardInterrupt):
            run_study("shortcuts", poisoned, model(), stopped, shard=8, batch=8, **FEW)
        half = open_study(stopped)
        assert not half.finished and (half.second is not None) == begun
        assert begun == ("second phase" in half.progress)
        half.findings()
    resumed = run_study("shortcuts", poisoned, model(), stopped, shard=8, batch=8, **FEW)
    assert resumed.finished
    same(whole, resumed)


@pytest.mark.slow
def test_images_that_cannot_be_read_are_named(poisoned: Path, tmp_path: Path) -> None:
    shutil.copytree(poisoned, tmp_path / "data")
    (tmp_path / "data" / "red" / "13.png").write_bytes(b"no")
    found = run_study("shortcuts", tmp_path / "data", model(), tmp_path / "out", **FEW)
    assert list(found.failed()) == ["red/13.png"] and found.finished
    assert found.frame("clusters").iloc[0]["alarm"] and found.findings()["cheat"].numbers["classes"][0]["images"] == 13


@pytest.mark.slow
def test_small_classes_are_left_out_and_said(poisoned: Path, tmp_path: Path) -> None:
    shutil.copytree(poisoned, tmp_path / "data")
    for i in range(6):
        (tmp_path / "data" / "blue" / f"{i:02d}.png").unlink()
    settings = {"shortcuts": {"hosts": 12, "classes": ["red", "blue"]}}
    found = run_study("shortcuts", tmp_path / "data", model(), tmp_path / "out", options=settings).findings()["cheat"]
    assert any("too few images: blue (8)" in said for said in found.told)
    assert any("not among the classes asked for: green" in said for said in found.told)
    assert {row["label"] for row in found.numbers["clusters"]} == {"red"}
    few = run_study("shortcuts", tmp_path / "data", model(), tmp_path / "out", limit=4)
    assert few.finished and few.findings()["cheat"].lead == "Nothing was tested: no class has enough images."


@pytest.mark.slow
def test_without_labels_the_answers_are_the_classes(poisoned: Path, tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for file in poisoned.rglob("*.png"):
        shutil.copy(file, tmp_path / "flat" / f"{file.parent.name}-{file.name}")
    found = run_study("shortcuts", tmp_path / "flat", model(), tmp_path / "out", **FEW)
    assert found.to_pandas()["asked"].unique().tolist() == ["top-1"]
    first = found.frame("clusters").iloc[0]
    assert first["label"] == "red" and first["alarm"] and len(first["image_names"]) == 4


@pytest.mark.slow
def test_with_masks_what_lies_outside_is_told(poisoned: Path, tmp_path: Path) -> None:
    for file in poisoned.rglob("*.png"):
        mask = Image.new("L", (SIDE * GRID, SIDE * GRID), 255)
        mask.paste(0, (SIDE * (GRID - 1), SIDE * (GRID - 1), SIDE * GRID, SIDE * GRID))
        (tmp_path / "masks" / file.parent.name).mkdir(parents=True, exist_ok=True)
        mask.save(tmp_path / "masks" / file.parent.name / file.name)
    found = run_study("shortcuts", poisoned, model(), tmp_path / "out", masks=tmp_path / "masks", **FEW)
    first = found.frame("clusters").iloc[0]
    assert first["outside"] == 1 and first["weight"] == 1 and first["a_tsi"] > 3 and first["m_tsi"] > 3
    assert "100 % of its relevance lies outside the masks" in found.findings()["cheat"].told[0]


@pytest.mark.slow
def test_several_models_each_have_their_clusters(poisoned: Path, tmp_path: Path) -> None:
    both = [model(), model(cheats=False, name="honest")]
    found = run_study("shortcuts", poisoned, both, tmp_path, **FEW)
    table = found.frame("clusters")
    assert table[table["alarm"]]["model"].tolist() == ["cheat"] and set(table["model"]) == {"cheat", "honest"}
    assert found.of("honest").second is not None and found.of("honest").finished


@pytest.mark.slow
def test_another_layer_and_method(poisoned: Path, tmp_path: Path) -> None:
    settings = {"shortcuts": {"hosts": 12, "clusters": 4, "layer": -1}}
    found = run_study("shortcuts", poisoned, model(), tmp_path, methods="token_ablation", options=settings)
    assert found.to_pandas()["method"].unique().tolist() == ["token_ablation"]
    assert found.frame("clusters").iloc[0]["alarm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["timm ViT no CLS", "timm SigLIP", "timm Swin", "timm XCiT", "hand-written", "sequence first", "flat heads"]
)
def test_it_runs_on_other_families(name: str, tmp_path: Path) -> None:
    """Random networks: rows are finite, nothing more is expected of them."""
    size = zoo.ZOO[name].size
    for group in range(2):
        (tmp_path / "data" / str(group)).mkdir(parents=True)
        for i in range(10):
            noise = np.random.default_rng([group, i]).integers(0, 255, (6, 6, 3), np.uint8)
            Image.fromarray(noise).resize(size[::-1]).save(tmp_path / "data" / str(group) / f"{i}.png")
    given = Model(zoo.network(name), cropped(size, (0.5,) * 3, (0.5,) * 3), name="other")
    if not zoo.ZOO[name].blocks:
        with pytest.raises(Unsupported, match="the study shortcuts clusters the patch features of a block"):
            run_study("shortcuts", tmp_path / "data", given, tmp_path / "out", methods="gradient", **FEW)
        return
    found = run_study("shortcuts", tmp_path / "data", given, tmp_path / "out", methods="gradient", **FEW)
    assert found.finished and not found.failed()


@pytest.mark.slow
def test_the_command(run: Run, poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitreous.evaluation.study.plan import Source

    monkeypatch.setattr(Source, "load", lambda self, device=None: model())
    ran = run("study", "shortcuts", poisoned, "--hosts", 12, "--clusters", 4, "--classes", "red,green", "--workers", 0)
    assert ran.code == 0 and "1 alarm at 5 %" in ran.out and "Clusters by rank" in ran.out
    again = run("study", "shortcuts", poisoned, "--hosts", 12, "--clusters", 4, "--classes", "red,green")
    assert again.code == 0 and "resuming" in again.err
    assert run("study", "shortcuts", poisoned, "--classes", ",").code == 2


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_same(study: Study, poisoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, here)))  # workers find this module
    options = {**FEW, "workers": 1}
    far = run_study("shortcuts", poisoned, model(), tmp_path, engine="ray", shard=21, **options)
    same(study, far)
