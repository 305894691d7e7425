"""Studies: the right rows, whatever happens on the way, and the same rows after any interruption."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import off
from machine import PATIENCE, ROUNDING
from PIL import Image

import vitreous
from vitreous import METHODS, Model, open_study, run_study
from vitreous.errors import InputError, OptionError, TargetError, Unsupported
from vitreous.evaluation.study import local, shard
from vitreous.evaluation.study.kind import HOMES, find_kind
from vitreous.evaluation.study.plan import Source, cut, plan, shard_size, weights_digest
from vitreous.evaluation.study.read import Study
from vitreous.evaluation.study.store import Store, find_store
from vitreous.images import readers as batches
from vitreous.images.dataset import Data, Sample, read_data
from vitreous.images.preprocess import IMAGENET, Preprocess
from vitreous.images.readers import Reader, in_processes, in_threads
from vitreous.models.libraries import cropped
from vitreous.registry import method


@pytest.fixture(scope="module")
def small() -> Model:
    torch.manual_seed(0)
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")


@pytest.fixture
def own() -> Iterator[None]:
    """Whatever a test declares is forgotten."""
    with METHODS.temporary():
        yield


def photo(path: Path, seed: int = 0, size: tuple[int, int] = (90, 60)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 255, (8, 12, 3), np.uint8)
    Image.fromarray(noise).resize(size).save(path)
    return path


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten pictures of two classes, one of which is broken."""
    root = tmp_path_factory.mktemp("album")
    for i in range(10):
        photo(root / ("cat" if i < 5 else "hound") / f"{i}.png", i)
    (root / "cat" / "3.png").write_bytes(b"not a picture")
    return root


def other_network() -> Any:
    """The same architecture, other weights."""
    net = copy.deepcopy(zoo.network("timm ViT"))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.1)
    return net


def names(album: Path) -> list[str]:
    return sorted(str(file.relative_to(album)) for file in album.rglob("*.png"))


def same(a: Study, b: Study) -> None:
    """The same rows with the same values, but for rounding: batches and threads may be others."""
    one, two = a.to_arrow(), b.to_arrow()
    assert one.schema.equals(two.schema)
    assert one.num_rows == two.num_rows
    for name in one.schema.names:
        left, right = one[name].to_pylist(), two[name].to_pylist()
        if not isinstance(next((x for x in left if x is not None), ""), float | list):
            assert left == right, name
        else:
            for x, y in zip(left, right):
                assert (x is None) == (y is None)
                if x is not None:
                    np.testing.assert_allclose(x, y, rtol=ROUNDING, atol=ROUNDING, err_msg=name)
    maps = list(zip(a.iter_maps(), b.iter_maps(), strict=True))
    for x, y in maps:
        assert x["image"] == y["image"] and x["method"] == y["method"]
        assert off(x["map"], y["map"]) <= ROUNDING


# ------------------------------------------------------------------------------------------------------ the right rows


def test_maps_are_those_of_explain(small: Model, album: Path, tmp_path: Path) -> None:
    study = run_study(
        "maps", album, small, tmp_path, methods="attention,gae,gradient", target=["label", "top-2"], batch=3
    )
    table = study.to_pandas()
    assert list(table["image"]) == [name for name in names(album) for _ in range(6)]
    assert list(table["asked"]) == (["label"] * 3 + ["top-2"] * 3) * 10
    assert list(table["method"]) == ["attention", "gae", "gradient"] * 20
    bad = table[table["error"].notna()]
    assert set(bad["image"]) == {"cat/3.png"} and len(bad) == 6 and "not an image" in bad["error"].iloc[0]
    maps = study.maps()
    assert len(maps) == 54 and list(maps["image"]) == [n for n in names(album) if n != "cat/3.png" for _ in range(6)]
    for row in maps.to_dict("records"):
        label = 0 if row["image"].startswith("cat") else 1
        asked = label if row["asked"] == "label" else "top-2"
        made = vitreous.explain(small, album / row["image"], row["method"], asked)
        np.testing.assert_allclose(row["map"], made.map[0].numpy(), rtol=1e-4, atol=1e-6 * made.map.abs().max())
        assert row["label"] == label and row["class"] == ("cat", "dog")[label]
        if row["asked"] == "label":
            assert row["target"] == str(label)
        if row["method"] == "gae":
            assert row["target"] == made.target
        assert row["prediction"] == vitreous.Trace(small, album / row["image"]).output.argmax().item()
    assert len(study.maps("gae", image="hound/7.png")) == 2 and len(study.maps("gae", target="1", image="hound/7.png"))
    assert study.maps("gae", image="nothing").empty


def test_batches_and_shards_do_not_change_values(small: Model, album: Path, tmp_path: Path) -> None:
    one = run_study("maps", album, small, tmp_path / "a", methods="gae,cdam", batch=16, workers=0)
    two = run_study("maps", album, small, tmp_path / "b", methods="gae,cdam", batch=2, shard=4, workers=2)
    assert (len(one.numbers), len(two.numbers)) == (1, 3)
    same(one, two)


def test_a_model_without_classes_has_maps_without_targets(album: Path, tmp_path: Path) -> None:
    import timm

    net = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=0, depth=2, embed_dim=24, num_heads=2)
    bare = Model(net, cropped((64, 64), *IMAGENET), name="bare")
    study = run_study("maps", album, bare, tmp_path, methods="attention,rollout")
    table = study.to_pandas()
    assert table["target"].isna().all() and table["prediction"].isna().all() and len(study.maps()) == 18
    with pytest.raises(TargetError, match="has no classifier"):
        run_study("maps", album, bare, tmp_path, methods="attention,gae")


def test_labels_that_are_missing_are_failed_rows(small: Model, album: Path, tmp_path: Path) -> None:
    data = read_data(album)
    some = Data("some", tuple(Sample(s.image, s.name, None if i % 2 else s.label) for i, s in enumerate(data.samples)))
    table = run_study("maps", some, small, tmp_path, methods="gae", target="label").to_pandas()
    without = table[table["label"].isna()]
    assert len(without) == 5 and set(without["error"][without["image"] != "cat/3.png"]) == {shard.NO_LABEL}
    usual = run_study("maps", some, small, tmp_path, methods="gae").to_pandas()
    assert list(usual["asked"]) == ["label", "top-1"] * 5 and usual["error"].notna().sum() == 1
    with pytest.raises(TargetError, match="has no labels"):
        run_study("maps", [s.image for s in data.samples], small, tmp_path, methods="gae", target="label")


def test_several_models(small: Model, album: Path, tmp_path: Path) -> None:
    other = Model(other_network(), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")
    study = run_study("cass", album, [small, other], tmp_path, options={"cass": {"samples": 2}}, shard=4, batch=4)
    assert study.models == ["small", "small (2)"] and study.finished and len(study.numbers) == 6
    for model, name in ((small, "small"), (other, "small (2)")):
        part = study.of(name)
        alone = run_study("cass", album, model, tmp_path / "alone", options={"cass": {"samples": 2}}, batch=4)
        scores = zip(part.to_arrow()["cass"].to_pylist(), alone.to_arrow()["cass"].to_pylist(), strict=True)
        assert all(x is y is None or off(x, y) <= ROUNDING for x, y in scores)
        assert set(part.to_pandas()["model"]) == {name}
    assert set(study.findings()) == {"small", "small (2)"}
    with pytest.raises(InputError, match="has no model 'smal'; did you mean"):
        study.of("smal")


def test_cass_is_cass(small: Model, album: Path, tmp_path: Path) -> None:
    study = run_study("cass", album, small, tmp_path, options={"cass": {"samples": 3, "space": "pixel"}}, seed=4)
    table = study.to_pandas()
    good = table[table["error"].isna()]
    assert len(good) == 9 == len(list(study.iter_maps()))
    for row in good.to_dict("records"):
        label = int(row["image"].startswith("hound"))
        want = vitreous.cass(small, album / row["image"], label, samples=3, space="pixel", seed=4)
        np.testing.assert_allclose(row["cass"], want.flatten(), rtol=1e-4, atol=1e-6)
    options = {"samples": 3, "space": "pixel", "seed": 4}
    for one in study.iter_maps():  # the heads' maps, weighted by their scores
        label = int(one["image"].startswith("hound"))
        weighted = vitreous.explain(small, album / one["image"], "cass_attention", label, **options).map[0]
        np.testing.assert_allclose(one["map"], weighted, rtol=1e-4, atol=1e-7)
    example = study.examples()[0]
    assert example.name == "cat/0.png" and example.photo[:2] == b"\xff\xd8" and example.parts is not None
    heads = [vitreous.explain(small, album / example.name, "attention", layer=0, heads=h).map[0] for h in range(2)]
    np.testing.assert_allclose(example.parts[1], heads[0], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(example.parts[2], heads[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("aggregate", ["mean", "min", "max", "rollout"])
def test_spread_is_the_entropy_of_attention(small: Model, album: Path, tmp_path: Path, aggregate: str) -> None:
    study = run_study("spread", album, small, tmp_path, options={"spread": {"aggregate": aggregate}})
    table = study.to_pandas()
    good = table[table["error"].isna()]
    for row in good.to_dict("records"):
        across = {} if aggregate == "rollout" else {"across": aggregate}
        map = vitreous.explain(small, album / row["image"], "rollout" if not across else "attention", **across)
        share = (map.map[0] / map.map[0].sum()).double().numpy()
        assert row["entropy"] == pytest.approx(-(share * np.log(share)).sum(), rel=1e-4)
        last = vitreous.explain(small, album / row["image"], "attention").map[0].double().numpy()
        last /= last.sum()
        assert row["layer_entropy"][-1] == pytest.approx(-(last * np.log(last)).sum(), rel=1e-4)
    assert sorted(set(good["level"])) == [1, 2, 3, 4] and table["level"].isna().sum() == 1
    assert good.groupby("level")["entropy"].max()[1] <= good.groupby("level")["entropy"].min()[2]
    assert table["target"].isna().all() and set(table["method"]) == {"attention"}


def test_compare_gathers_every_method(small: Model, album: Path, tmp_path: Path) -> None:
    study = run_study("compare", album, small, tmp_path, methods="attention,cdam,gradient", target="top-1")
    table, maps = study.to_pandas(), study.maps()
    assert {map.shape for map in maps["map"]} == {(4, 4)}
    pixels = vitreous.explain(small, album / "cat/0.png", "gradient").map[0].reshape(4, 16, 4, 16).mean((1, 3))
    np.testing.assert_allclose(study.maps("gradient")["map"][0], pixels, rtol=1e-4, atol=1e-9)
    first = study.maps("cdam")["map"][0]
    assert table[table["method"] == "cdam"]["sparsity"].iloc[0] == pytest.approx(
        (np.abs(first) < 0.05 * first.max()).mean()
    )
    groups = list(study.groups())
    assert len(groups) == 10 and np.isnan(groups[3]["cdam"]).all()  # the broken picture
    r = [np.corrcoef(g["attention"], g["cdam"])[0, 1] for i, g in enumerate(groups) if i != 3]
    assert any(
        f"{np.mean(r):.2f}".lstrip("-") in " ".join(row) for t in study.findings()["small"].tables for row in t.rows
    )
    with pytest.raises(OptionError, match="cdam alone cannot be compared"):
        run_study("compare", album, small, tmp_path, methods="cdam")


def test_compare_takes_a_centred_cdam(small: Model, album: Path, tmp_path: Path) -> None:
    """The findings say so."""
    given = {"methods": "attention,cdam", "target": "top-1"}
    centred = run_study("compare", album, small, tmp_path, options={"cdam": {"baseline": "mean"}}, **given)
    expected = vitreous.explain(small, album / "cat/0.png", "cdam", baseline="mean").map[0]
    np.testing.assert_allclose(centred.maps("cdam")["map"][0], expected, rtol=1e-4, atol=1e-7)
    told = centred.findings()["small"]
    assert "Other options than the defaults: cdam baseline=mean." in told.told
    assert told.numbers["configured"] == ["cdam baseline=mean"]
    usual = run_study("compare", album, small, tmp_path, **given)
    assert usual.findings()["small"].numbers["configured"] == []


def test_leaderboard_is_that_of_evaluate(small: Model, album: Path, tmp_path: Path) -> None:
    settings = {"token_deletion": {"steps": 4}}
    study = run_study(
        "leaderboard",
        album,
        small,
        tmp_path,
        methods="gae",
        metrics="token_deletion,sparsity",
        options=settings,
        shard=4,
    )
    board = vitreous.run_leaderboard(small, album, "gae", "token_deletion,sparsity", options=settings)
    table = study.to_pandas()
    for m, name in enumerate(board.methods):
        rows = table[table["method"] == name].set_index("image")
        for n, sample in enumerate(board.data.samples):
            for k, metric in enumerate(board.metrics):
                want = board.values[m, k, n]
                got = rows[metric][sample.name]
                assert np.isnan(want) == np.isnan(got) and (np.isnan(want) or got == pytest.approx(want, rel=1e-4))
    from vitreous.evaluation.study.leaderboard import boards_of

    ((_, again),) = boards_of(study.kind, study.of("small"))
    np.testing.assert_allclose(again.summary().mean, board.summary().mean, rtol=1e-4)
    np.testing.assert_allclose(again.summary().low, board.summary().low, rtol=1e-4)
    for key, curve in board.curves.items():
        np.testing.assert_allclose(again.curves[key].mean, curve.mean, rtol=1e-4)
    assert again.accuracy == board.accuracy and set(again.skipped.values()) == set(board.skipped.values())
    assert set(again.costs()) == {"random", "centre", "gae"}


def test_masks_go_with_their_pictures(small: Model, album: Path, tmp_path: Path) -> None:
    """In worker processes too; a mask that cannot be used leaves its reason."""
    for name in names(album):
        mask = Image.new("L", (90, 60))
        mask.paste(255, (20, 10, 70, 50))
        (tmp_path / "masks" / name).parent.mkdir(parents=True, exist_ok=True)
        mask.save(tmp_path / "masks" / name)
    (tmp_path / "masks" / "hound/9.png").write_bytes(b"not a mask")
    given: dict[str, Any] = {"methods": "gae", "metrics": "energy_in_mask", "masks": tmp_path / "masks"}
    study = run_study("leaderboard", album, small, tmp_path / "out", **given, batch=2, shard=4, workers=2)
    board = vitreous.run_leaderboard(small, album, "gae", "energy_in_mask", masks=tmp_path / "masks")
    table = study.to_pandas()
    mine = table[table["method"] == "gae"].set_index("image")
    for n, sample in enumerate(board.data.samples):
        np.testing.assert_allclose(mine["energy_in_mask"][sample.name], board.values[2, 0, n], rtol=1e-4)
    assert np.isfinite(mine["energy_in_mask"]).sum() == 8 and "no mask" in mine["missing"]["hound/9.png"]


@pytest.mark.usefixtures("own")
def test_what_fails_fails_alone(small: Model, album: Path, tmp_path: Path) -> None:
    bright = max(
        (s for s in read_data(album).samples if "3" not in s.name), key=lambda s: small.prepare([s.image]).mean().item()
    )
    level = small.prepare([bright.image]).mean().item()

    @method()
    def picky(trace: Any, target: Any) -> Any:
        """Fails where a bright image is in the batch."""
        if any(image.mean().item() >= level - 1e-6 for image in trace.images):
            raise ZeroDivisionError("too bright")
        return trace.images.mean((1, 2, 3))[:, None, None].expand(-1, 4, 4)

    @method()
    def broken(trace: Any, target: Any) -> Any:
        """No number."""
        return torch.full((len(trace), 4, 4), torch.nan)

    table = run_study("maps", album, small, tmp_path, methods="picky,attention,broken").to_pandas()
    bad = table[table["error"].notna()].set_index(["image", "method"])["error"]
    assert bad[bright.name, "picky"] == "ZeroDivisionError: too bright"
    assert {key for key in bad.index if key[1] == "picky"} == {(bright.name, "picky"), ("cat/3.png", "picky")}
    assert {key[0] for key in bad.index if key[1] == "attention"} == {"cat/3.png"}
    assert set(bad[[key for key in bad.index if key[1] == "broken" and key[0] != "cat/3.png"]]) == {shard.BROKEN}


@pytest.mark.usefixtures("own")
def test_too_little_memory_halves_the_batch(small: Model, album: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    @method()
    def greedy(trace: Any, target: Any) -> Any:
        """Takes two images at most."""
        seen.append(len(trace))
        if len(trace) > 2:
            raise MemoryError
        return torch.ones(len(trace), 4, 4)

    table = run_study("maps", album, small, tmp_path, methods="greedy", batch=8).to_pandas()
    assert table["error"].notna().sum() == 1 and 2 in seen and max(seen) == 7


def test_pictures_of_several_sizes(album: Path, tmp_path: Path) -> None:
    """A preprocessing that keeps the shape of each picture."""
    import timm
    from torchvision import transforms as T

    torch.manual_seed(0)
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=24, num_heads=2, num_classes=3, dynamic_img_size=True
    )
    keep = T.Compose([T.Resize(64), T.ToTensor()])
    wide = Model(net, keep, ["a", "b", "c"], name="wide")
    for i, size in enumerate([(64, 64), (96, 64), (64, 64), (64, 96)]):
        photo(tmp_path / "in" / f"{i}.png", i, size)
    maps = run_study("maps", tmp_path / "in", wide, tmp_path / "out", methods="attention").maps()
    assert [map.shape for map in maps["map"]] == [(4, 4), (4, 6), (4, 4), (6, 4)]


def test_what_no_method_can_do_is_said_before(album: Path, tmp_path: Path) -> None:
    swin = zoo.model("timm Swin")
    for kind in ("cass", "spread"):
        with pytest.raises(Unsupported, match="needs attention between all tokens"):
            run_study(kind, album, swin, tmp_path)
    with pytest.raises(Unsupported, match="attention_flow needs attention between all tokens"):
        run_study("maps", album, swin, tmp_path, methods="attention_flow,random")
    assert not list(tmp_path.iterdir())
    found = run_study("maps", album, swin, tmp_path, methods="attention_flow,gradient", limit=2).to_pandas()
    assert list(found["error"].notna()) == [True, False, True, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "cas"}, "unknown study 'cas'; did you mean cass"),
        ({"kind": "cass", "methods": "gae"}, "has its own method"),
        ({"kind": "cass", "metrics": "srg"}, "measures no metrics"),
        ({"kind": "cass", "options": {"gae": {}}}, "options for gae: the study cass has none but its own"),
        ({"kind": "cass", "options": {"cass": {"samples": 0}}}, "samples"),
        ({"kind": "spread", "options": {"spread": {"aggregate": "sum"}}}, "give mean, min, max or rollout"),
        ({"kind": "spread", "options": {"spread": {"colour": 1}}}, "no option 'colour'"),
        ({"kind": "maps", "methods": "gae", "options": {"rollout": {}}}, "rollout: it is not among the methods"),
        ({"kind": "maps", "engine": "spark"}, "unknown engine 'spark'; known: local, ray"),
        ({"kind": "maps", "target": []}, "at least one target"),
        ({"kind": "maps", "model": []}, "at least one model"),
    ],
)
def test_what_is_wrong_is_said(small: Model, album: Path, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        run_study(**{"data": album, "model": small, "out": tmp_path, **given})
    assert not list(tmp_path.iterdir())


def test_choices_are_the_same_every_time(small: Model, album: Path, tmp_path: Path) -> None:
    some = [run_study("maps", album, small, tmp_path, methods="attention", sample=4, seed=3) for _ in range(2)]
    assert some[0].folder == some[1].folder and some[0].images == 4
    other = run_study("maps", album, small, tmp_path, methods="attention", sample=4, seed=5)
    assert set(other.to_pandas()["image"]) != set(some[0].to_pandas()["image"])
    first = run_study("maps", album, small, tmp_path, methods="attention", limit=2)
    assert list(first.to_pandas()["image"]) == names(album)[:2]
    with pytest.raises(InputError, match="no image is left"):
        run_study("maps", Data("nothing", ()), small, tmp_path, methods="attention")


# ----------------------------------------------------------------------------------------------- stored, found, resumed


def test_a_study_is_the_same_study_only_when_everything_is(small: Model, album: Path, tmp_path: Path) -> None:
    def go(model: Model = small, data: Path = album, **more: Any) -> Study:
        return run_study("maps", data, model, tmp_path / "out", **{"methods": "rollout", **more})

    first = go()
    assert go().folder == first.folder
    other = [go(options={"rollout": {"discard": 0.5}}), go(methods="rollout,gae"), go(target="top-2", methods="gae")]
    net = other_network()
    other.append(go(Model(net, cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")))
    with torch.no_grad():
        next(iter(net.blocks[1].mlp.parameters()))[3, 5] += 1e-4  # one number of one layer
    other.append(go(Model(net, cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")))
    assert len({study.folder for study in (first, *other)}) == 6
    assert open_study(tmp_path / "out").folder == other[-1].folder  # the last one worked on
    assert go().folder == first.folder == open_study(tmp_path / "out").folder
    assert open_study(other[0].folder).manifest["options"]["chosen"]["rollout"]["discard"] == 0.5
    moved = tmp_path / "moved"
    shutil.copytree(album, moved)  # with the times of the files
    assert go(data=moved).folder == first.folder
    photo(moved / "cat/0.png", 77)
    assert go(data=moved).folder != first.folder


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ran: list[int] = []
    true = local.run_shard

    def counted(recipe: Any, model: Any, one: Any, loaded: Any) -> Any:
        ran.append(one.number)
        return true(recipe, model, one, loaded)

    monkeypatch.setattr(local, "run_shard", counted)
    return ran


def test_only_what_is_missing_is_computed(
    small: Model, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(out: Path) -> Study:
        return run_study("maps", album, small, out, methods="attention,gae", shard=2, batch=2)

    whole, ran = go(tmp_path / "whole"), count_runs(monkeypatch)
    again = go(tmp_path / "again")
    assert ran == [0, 1, 2, 3, 4]
    ran.clear()
    assert go(tmp_path / "again").finished and ran == []
    store = again.store
    store.file(1).unlink()  # lost
    store.file(2).write_bytes(store.file(2).read_bytes()[:-300])  # cut short
    store.file(3).write_bytes(b"")  # as after a power cut
    store.file(4).write_bytes(whole.store.file(0).read_bytes())  # another shard under this name
    draft = store.shards / ".0123.part"
    draft.write_bytes(b"half")
    assert open_study(tmp_path / "again").numbers == [0] and not open_study(tmp_path / "again").finished
    assert "1 of 5 shards" in repr(open_study(tmp_path / "again"))
    same(go(tmp_path / "again"), whole)
    assert ran == [1, 2, 3, 4] and not draft.exists()


def test_a_study_stays_cut_as_it_was_begun(
    small: Model, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another day there may be less memory for a batch: the rows that are there still count."""
    first = run_study("maps", album, small, tmp_path, methods="attention,gae", batch=2, shard=4)
    first.store.file(1).unlink()
    ran = count_runs(monkeypatch)
    again = run_study("maps", album, small, tmp_path, methods="attention,gae", batch=5, shard=5)
    assert again.folder == first.folder and ran == [1] and again.finished
    assert (again.manifest["batch"], again.manifest["shard"], again.manifest["shards"]) == (2, 4, 3)
    monkeypatch.undo()
    same(again, run_study("maps", album, small, tmp_path / "whole", methods="attention,gae", batch=2, shard=4))


HOLDER = """
import sys
from vitreous.evaluation.study.store import find_store
with find_store(sys.argv[1]).locked():
    print("locked", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.process
def test_two_runs_do_not_work_on_one_study(small: Model, album: Path, tmp_path: Path) -> None:
    study = run_study("maps", album, small, tmp_path, methods="attention")
    command = [sys.executable, "-c", HOLDER, str(study.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match="another run is working on this study"):
            run_study("maps", album, small, tmp_path, methods="attention")
        holder.communicate("done\n", timeout=PATIENCE)
    assert run_study("maps", album, small, tmp_path, methods="attention").finished


FORKING = """
import os, sys, time
from vitreous.evaluation.study.store import find_store
lock = find_store(sys.argv[1]).locked()
lock.__enter__()
if os.fork() == 0:  # a reader that outlives the run
    print(os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_reader_that_outlives_a_killed_run_does_not_hold_its_lock(small: Model, album: Path, tmp_path: Path) -> None:
    study = run_study("maps", album, small, tmp_path, methods="attention")
    command = [sys.executable, "-c", FORKING, str(study.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        reader = int(holder.stdout.readline())
        try:
            with pytest.raises(InputError, match="another run is working on this study"):
                run_study("maps", album, small, tmp_path, methods="attention")
            holder.kill()
            holder.wait(PATIENCE)
            assert run_study("maps", album, small, tmp_path, methods="attention").finished
        finally:
            os.kill(reader, signal.SIGKILL)


def test_a_stop_keeps_what_is_finished(
    small: Model, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = local.run_shard

    def stopping(recipe: Any, model: Any, one: Any, loaded: Any) -> Any:
        if one.number == 3:
            raise KeyboardInterrupt
        return true(recipe, model, one, loaded)

    monkeypatch.setattr(local, "run_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_study("maps", album, small, tmp_path / "a", methods="gae", shard=2, batch=2, workers=1)
    assert open_study(tmp_path / "a").numbers == [0, 1, 2]
    assert not [t for t in threading.enumerate() if t.name.startswith("vitreous-write")]
    monkeypatch.undo()
    whole = run_study("maps", album, small, tmp_path / "b", methods="gae", shard=2, batch=2)
    same(run_study("maps", album, small, tmp_path / "a", methods="gae", shard=2, batch=2), whole)


def test_a_disk_that_refuses_is_told_and_later_forgiven(
    small: Model, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, count = Store.write_bytes, 0

    def refusing(self: Store, number: int, content: bytes) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise OSError(28, "No space left on device", str(self.file(number)))
        true(self, number, content)

    monkeypatch.setattr(Store, "write_bytes", refusing)
    with pytest.raises(OSError, match="No space left"):
        run_study("maps", album, small, tmp_path / "a", methods="gae", shard=2, batch=2)
    assert open_study(tmp_path / "a").numbers == [0, 1]
    monkeypatch.undo()
    whole = run_study("maps", album, small, tmp_path / "b", methods="gae", shard=2, batch=2)
    same(run_study("maps", album, small, tmp_path / "a", methods="gae", shard=2, batch=2), whole)


def test_what_is_no_study_is_refused(tmp_path: Path, small: Model, album: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        open_study(tmp_path / "nothing")
    with pytest.raises(InputError, match="holds no study; make one: vitreous study"):
        open_study(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file, not a study"):
        open_study(tmp_path / "file")
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        open_study(tmp_path)
    (tmp_path / "study.json").write_text('{"id": 1}')
    with pytest.raises(InputError, match="is not the manifest of a study"):
        open_study(tmp_path)
    study = run_study("maps", album, small, tmp_path / "out", methods="attention", limit=2)
    (study.folder / "study.json").unlink()
    with pytest.raises(InputError, match=r"study\.json: no such file; the study is not there or was moved in part"):
        open_study(tmp_path / "out")


def test_a_manifest_tells_what_is_needed_to_do_it_again(small: Model, album: Path, tmp_path: Path) -> None:
    study = run_study("cass", album, small, tmp_path, limit=4, options={"cass": {"samples": 2}})
    told = json.loads((study.folder / "study.json").read_text())
    assert told["options"] == {"space": "patch", "samples": 2, "sigma": 0.15, "seed": 0}
    assert told["models"][0]["weights"] == weights_digest(small) and told["models"][0]["layers"] == 3
    assert told["data"] == {"fingerprint": read_data(album).take(4).fingerprint, "images": 4}
    assert told["choice"] == {"limit": 4, "sample": None, "seed": 0} and torch.__version__.startswith(
        told["versions"]["torch"]
    )
    assert told["vitreous"] == vitreous.__version__ and told["begun"]
    assert find_store(tmp_path).manifest == told


def test_shards_grow_with_the_data() -> None:
    assert shard_size(64, 16, 500) == 64 and shard_size(16, 16, 500) == 16 and shard_size(64, 48, 500) == 48
    assert shard_size(64, 16, 1_281_167) == 1280 and shard_size(64, 100, 10**8) == 2000
    data = Data("", tuple(Sample(Path(str(i)), str(i)) for i in range(50)))
    parts = cut(data, 1, 16, 3, find_kind("spread")().shown_images("a model", len(data)))
    assert [(p.number, p.model, p.first, len(p)) for p in parts] == [
        (3, 1, 0, 16),
        (4, 1, 16, 16),
        (5, 1, 32, 16),
        (6, 1, 48, 2),
    ]
    assert sum(len(p.shown) for p in parts) == 24 and 0 in parts[0].shown and 49 in parts[-1].shown
    assert parts[1].groups(10) == [list(range(16, 26)), list(range(26, 32))]


# -------------------------------------------------------------------------------------------------------------- reading


def test_readers_give_the_same_in_processes_and_threads(
    small: Model, album: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = dict(enumerate(read_data(album).samples))
    reader = Reader(samples, small.preprocess, frozenset({1}))
    groups = [[0, 1, 2], [3, 4], [5], [6, 7, 8, 9]]
    monkeypatch.setattr(batches, "has_room", lambda *_: False)
    piped = list(in_processes(reader, groups, 2))
    monkeypatch.undo()
    assert all(isinstance(b.images, np.ndarray) for loaded in piped for b in loaded.batches)
    for made in (
        piped,
        list(in_processes(reader, groups, 2)),
        list(in_threads(reader, groups, 2)),
        [reader[g] for g in groups],
    ):
        assert [n for loaded in made for b in loaded.batches for n in b.numbers] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        images = np.concatenate([b.images for loaded in made for b in loaded.batches])
        want = small.prepare([s.image for i, s in samples.items() if i != 3]).numpy()
        np.testing.assert_allclose(images, want, atol=ROUNDING)
        assert [list(loaded.failed) for loaded in made] == [[], [3], [], []] and list(made[0].photos) == [1]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's own, while it buries the dead
@pytest.mark.slow
def test_dead_readers_are_replaced(small: Model, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "killed"

    class Fatal(Reader):
        def __getitem__(self, numbers: list[int]) -> Any:
            if numbers == [4, 5] and not flag.exists():
                flag.write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(numbers)

    samples = dict(enumerate(read_data(album).samples))
    groups = [[0, 1], [2], [4, 5], [6, 7]]
    made = list(in_processes(Fatal(samples, small.preprocess), groups, 1))
    assert flag.exists()
    assert [b.numbers for loaded in made for b in loaded.batches] == groups

    class Doomed(Reader):
        def __getitem__(self, numbers: list[int]) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(batches, "REVIVALS", 1)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(in_processes(Doomed(samples, small.preprocess), groups, 1))


def test_shared_memory_is_used_where_there_is_room(small: Model, album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader({}, small.preprocess)
    need = 2 * 8 * 12 * 64 * 64 * 3 * 2
    for free, room in ((need + 1, True), (need, False)):
        monkeypatch.setattr(batches.shutil, "disk_usage", lambda _, free=free: type("", (), {"free": free}))
        assert batches.has_room(reader, 8, 2) == room
    monkeypatch.undo()
    monkeypatch.setattr(batches, "SHARED", "/nowhere")
    assert not batches.has_room(reader, 8, 2)


def test_a_preprocessing_that_raises_fails_its_picture(small: Model, album: Path) -> None:
    def odd(image: Image.Image) -> Any:
        raise KeyError("colour")

    loaded = Reader(dict(enumerate(read_data(album).samples)), Preprocess(odd, *IMAGENET))[[0]]
    assert loaded.failed == {0: "cat/0.png: cannot be prepared for the model ('colour')"}


# ------------------------------------------------------------------------------------------------- what is worst of all

KILLED = Path(__file__).parent / "killed.py"


@pytest.mark.slow
@pytest.mark.process
def test_killed_at_random_and_resumed(album: Path, tmp_path: Path) -> None:
    """Killed again and again, at moments that chance chooses; then the rows are those of a run in peace."""
    ran = subprocess.run(
        [sys.executable, str(KILLED), str(album), str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["kills"] >= 4 and told["between"] >= 2, told  # some fell between shards, or this shows nothing
    for number in range(told["rounds"]):
        same(open_study(tmp_path / f"killed{number}"), open_study(tmp_path / "peace"))


APART = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]  # file systems that nobody else sees


@pytest.mark.slow
@pytest.mark.process
def test_a_full_file_system(album: Path, tmp_path: Path) -> None:
    """A file system of a few kilobytes: the study stops with one line, and goes on when there is room."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    try:
        subprocess.run([*APART, f"mount -t tmpfs -o size=64k tmpfs {disk}"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system lets no test mount a file system of its own; the test with a file limit stands in")
    command = f"{sys.executable} -m vitreous study maps {album} -x attention,gae --shard 2 --batch 2 --out {disk}"
    script = (
        f"mount -t tmpfs -o size=64k tmpfs {disk} && {{ {command}; echo first $?; find {disk} -name '*.part' | wc -l; "
        f"mount -o remount,size=64m {disk}; {command}; echo second $?; cp -r {disk} {kept}; }}"
    )
    ran = subprocess.run([*APART, script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "first 2" in ran.stdout and "second 0" in ran.stdout, ran.stdout + ran.stderr
    assert "No space left on device" in ran.stderr and "run the same command again to resume" in ran.stderr
    assert "Traceback" not in ran.stderr
    whole = run_study("maps", album, None, tmp_path / "whole", methods="attention,gae", shard=2, batch=2)
    same(open_study(kept), whole)


@pytest.mark.slow
@pytest.mark.process
def test_files_that_may_not_grow(album: Path, tmp_path: Path) -> None:
    """The system's own limit on a file's size, which shared memory meets as well: one line, and later it goes on."""
    args = f"study maps {album} -x attention,gradient --shard 2 --batch 2 --workers 1 --out {tmp_path / 'out'}"
    command = f"{sys.executable} -m vitreous {args}"
    limited = ["bash", "-c", f"ulimit -f 64; {command}"]
    ran = subprocess.run(limited, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 2 and ran.stderr.endswith(".parquet: File too large\n"), ran.stderr
    assert "stopped: 0 of 5 shards" in ran.stderr and "Traceback" not in ran.stderr
    assert not list(tmp_path.rglob("*.part"))
    again = run_study("maps", album, None, tmp_path / "out", methods="attention,gradient", shard=2, batch=2)
    assert again.finished and again.to_pandas()["error"].notna().sum() == 2


def test_kinds_are_all_there() -> None:
    for name in HOMES:
        assert find_kind(name).name == name and find_kind(name).summary.endswith(".")


def test_a_plan_takes_names_and_files(album: Path) -> None:
    planned, model = plan(
        find_kind("spread")(), [Source("deit_tiny_patch16_224", "random", dtype="bfloat16")], read_data(album)
    )
    assert model.dtype == torch.bfloat16 and planned.manifest["models"][0]["dtype"] == "bfloat16"
    assert planned.id == planned.manifest["id"] and planned.recipe.names == ("deit_tiny_patch16_224",)


def test_cass_reads_rows_only(small: Model, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer's N×N attention is ever made."""
    from vitreous.capture.attention import Attention

    read: list[tuple[int, ...]] = []
    true = Attention.rows

    def rows(self: Attention, which: Any) -> Any:
        found = true(self, which)
        read.append(tuple(found.shape))
        return found

    def whole(*_: Any) -> None:
        raise AssertionError("the whole attention was made")

    _ = small.layout  # its probe verifies everything once
    monkeypatch.setattr(Attention, "rows", rows)
    monkeypatch.setattr(Attention, "weights", property(whole))
    study = run_study("cass", album, small, tmp_path, options={"cass": {"samples": 1}}, batch=4)
    assert study.to_pandas()["error"].notna().sum() == 1  # the broken picture alone
    assert read and all(shape[2] == 1 for shape in read)  # [B H rows M]
