"""The grid pointing game: mosaics of the evaluated images, and the share of a map in the right cell."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Oracle
from machine import rare
from PIL import Image
from test_leaderboard import small
from test_methods import state
from torch import Tensor

import vitreous
from vitreous import Model, run_leaderboard
from vitreous.errors import OptionError, TargetError
from vitreous.images.preprocess import IMAGENET
from vitreous.metrics import case as cases
from vitreous.metrics.case import Case, make_case, measure
from vitreous.metrics.localisation.grid_pg import compose, in_cells, mosaic, parts, spans_of
from vitreous.metrics.pool import Pool, shuffled
from vitreous.models.layout import Layout
from vitreous.registry import METHODS, METRICS
from vitreous.trace.trace import Trace

__all__ = ["small"]  # a fixture
MOSAICS = {"mosaic0": ("both", "dogbird", "pet1", "cat0"), "mosaic1": ("cat1", "pet1", "dogbird", "dog1")}


def even(cells: int, n: int) -> Tensor:
    return parts([(i, i + 1) for i in range(cells)], cells, n)


def by_hand(values: np.ndarray, cell: int, n: int) -> float:
    """Value by value, each cut into n×n equal pieces, of which every one lies in a single cell."""
    rows, columns = values.shape
    inside = total = 0.0
    for i in range(rows * n):
        for j in range(columns * n):
            value = max(0.0, float(values[i // n, j // n])) / n**2
            total += value
            inside += value * ((i // rows) * n + j // columns == cell)
    return inside / total


# --------------------------------------------------------------------------------------------------- the stored mosaics


def stored_image(oracle: Oracle, name: str) -> Tensor:
    if name in oracle.IMAGES:
        return oracle.input(name)[0]
    pixels = torch.from_numpy(oracle("inputs", f"_concept/{name[:3]}/images_uint8")[int(name[3:])])
    mean, std = (torch.tensor(some)[:, None, None] for some in IMAGENET)
    return (pixels.permute(2, 0, 1) / 255 - mean) / std


@pytest.mark.parametrize("kind", ["gae", "attcat"])
@pytest.mark.parametrize("name", MOSAICS)
def test_the_score_of_stored_maps(oracle: Oracle, name: str, kind: str) -> None:
    targets = oracle("grid_pg", f"{name}/any/targets").tolist()
    maps = torch.from_numpy(np.stack([oracle("grid_pg", f"{name}/{target}/{kind}") for target in targets]))
    expected = np.array([oracle("grid_pg", f"{name}/{target}/{kind}_score") for target in targets])
    found = in_cells(maps, torch.arange(4), even(14, 2), even(14, 2))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found, [by_hand(map.numpy(), i, 2) for i, map in enumerate(maps)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MOSAICS)
def test_stored_mosaics_are_made_again(oracle: Oracle, name: str) -> None:
    tiles = [stored_image(oracle, one) for one in MOSAICS[name]]
    expected = oracle("grid_pg", f"{name}/any/x")
    np.testing.assert_allclose(mosaic(tiles, 2, (224, 224)), expected, atol=1e-5)
    cells = torch.nn.functional.avg_pool2d(torch.stack(tiles), 2)  # the mean of each 2×2 pixels
    np.testing.assert_allclose(expected[:, 112:, :112], cells[2], atol=1e-5)


@pytest.mark.parametrize("name", ["mosaic0", *rare("mosaic1")])
def test_the_score_of_own_maps_of_stored_mosaics(deit: Model, oracle: Oracle, name: str) -> None:
    targets = oracle("grid_pg", f"{name}/any/targets").tolist()
    image = torch.from_numpy(oracle("grid_pg", f"{name}/any/x"))[None]
    maps = torch.cat([vitreous.explain(deit, image, "gae", target).map for target in targets])
    expected = [oracle("grid_pg", f"{name}/{target}/gae_score") for target in targets]
    found = in_cells(maps, torch.arange(4), even(14, 2), even(14, 2))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- shares of a cell


@pytest.mark.parametrize(("shape", "n"), [((7, 7), 2), ((14, 14), 3), ((5, 8), 2), ((8, 8), 4), ((3, 4), 3)])
def test_cells_that_cut_patches_share_them(shape: tuple[int, int], n: int) -> None:
    values = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    down, across = (even(count, n) if count % n == 0 else exact(count, n) for count in shape)
    for cell in range(n * n):
        found = in_cells(values, torch.tensor([cell]), down, across)
        assert found.item() == pytest.approx(by_hand(values[0].numpy(), cell, n), abs=1e-12)
    assert torch.allclose(down.sum(0), torch.ones(shape[0], dtype=torch.float64))


def exact(cells: int, n: int) -> Tensor:
    """Rows of n pixels each, so that borders lie between pixels."""
    return parts([(i * n, (i + 1) * n) for i in range(cells)], cells * n, n)


def test_nothing_positive_scores_nothing_and_nan_stays() -> None:
    maps = torch.stack([-torch.ones(4, 4), torch.zeros(4, 4), torch.full((4, 4), torch.nan), torch.ones(4, 4)])
    found = in_cells(maps, torch.tensor([0, 1, 2, 3]), even(4, 2), even(4, 2))
    assert found[:2].tolist() == [0, 0] and found[2].isnan() and found[3] == 0.25


def test_rows_of_a_map_are_where_the_patches_are() -> None:
    """Patches that leave a border out; pixels; a map of another grid."""
    layout = Layout((2, 2), (16, 16), rows=((3, 19), (19, 35)), columns=((0, 16), (16, 32)))
    assert spans_of(layout, torch.zeros(1, 2, 2), 0, (38, 32)) == [(3, 19), (19, 35)]
    assert spans_of(layout, torch.zeros(1, 2, 2), 1, (38, 32)) == [(0, 16), (16, 32)]
    assert spans_of(layout, torch.zeros(1, 38, 32), 0, (38, 32))[-1] == (37, 38)
    assert spans_of(layout, torch.zeros(1, 4, 4), 1, (38, 32)) == [(0, 8), (8, 16), (16, 24), (24, 32)]
    assert spans_of(Layout((2, 2), (16, 16)), torch.zeros(1, 2, 2), 0, (35, 35)) == [(0, 16), (16, 32)]
    assert spans_of(Layout((2, 2)), torch.zeros(1, 2, 2), 0, (35, 35)) == [(0, 17.5), (17.5, 35)]


def test_an_odd_size_is_filled() -> None:
    whole = mosaic([torch.full((3, 9, 9), float(i)) for i in range(9)], 3, (32, 35))
    assert whole.shape == (3, 32, 35)
    assert whole[0, 0, 0] == 0 and whole[0, 0, -1] == 2 and whole[0, -1, -1] == 8 and whole[0, 15, 15] == 4
    assert mosaic([torch.ones(3, 8, 8, dtype=torch.bfloat16)] * 4, 2, (8, 8)).dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------------------- the metric


def targets_of(name: str, count: int) -> list[str]:
    kind = "neuron:" if zoo.model(name).classifier is False else ""
    return [f"{kind}{i % 5}" for i in range(count)]


@pytest.mark.parametrize("name", zoo.thinned("grid_pg"))
def test_battery(name: str) -> None:
    images, targets = zoo.images(name, 5), targets_of(name, 5)
    before = state(zoo.network(name))
    found = vitreous.evaluate(zoo.model(name), images, "input_x_gradient", "grid_pg", targets)
    assert state(zoo.network(name)) == before, "no side effects"
    assert found.value.shape == (5,) and found.value.dtype == torch.float32
    assert ((found.value > 0) & (found.value < 1)).all() and found.curve is None


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of each image is that of its own mosaic, whatever the batch."""
    model, images, targets = zoo.model("timm ViT"), zoo.images("timm ViT", 6), [0, 1, 2, 3, 0, 1]
    pool = Pool(model, 6, lambda number: images[number : number + 1], lambda _, number: vitreous.Class(targets[number]))
    case = make_case(Trace(model, images), METHODS["gae"], METHODS["gae"].check({}), targets)
    made, cells = compose(Case(case.trace, case.map, case.target, None, case.method, pool, range(6)), pool, 2, 0)
    assert len(set(cells)) > 1
    small = torch.nn.functional.avg_pool2d(images, 2)
    for i, (whole, cell) in enumerate(zip(made, cells)):
        quarters = [whole[:, y : y + 32, x : x + 32] for y in (0, 32) for x in (0, 32)]
        who = [int((small - quarter).abs().amax((1, 2, 3)).argmin()) for quarter in quarters]
        assert who[cell] == i and len({targets[one] for one in who}) == 4, "four images of different classes"
        torch.testing.assert_close(torch.stack(quarters), small[who])
    maps = vitreous.explain(model, made, "gae", targets).map
    expected = [by_hand(map.numpy(), cell, 2) for map, cell in zip(maps, cells)]
    for size in (6, 4, 1):
        monkeypatch.setattr(cases, "images_at_once", lambda *_, size=size: size)
        found = vitreous.evaluate(model, images, "gae", "grid_pg", targets)
        np.testing.assert_allclose(found.value, expected, rtol=1e-4)
    np.testing.assert_allclose(
        vitreous.evaluate(None, Trace(model, images), "gae", "grid_pg", targets).value, expected, rtol=1e-4
    )
    other = vitreous.evaluate(model, images, "gae", "grid_pg", targets, seed=1).value
    assert not other.allclose(found.value)
    assert other.equal(vitreous.evaluate(model, images, "gae", "grid_pg", targets, seed=1).value)


def test_methods_that_know_no_class_and_large_grids() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 10)
    names = [f"neuron:{i}" for i in range(5)]
    flat = vitreous.evaluate(model, images[:5], "attention", "grid_pg", names).value
    assert ((flat > 0) & (flat < 1)).all()
    with pytest.raises(TargetError, match=r"grid_pg puts 9 images of different classes together; the 5 image\(s\)"):
        vitreous.evaluate(model, images[:5], "gae", "grid_pg", names, n=3)
    with pytest.raises(OptionError, match=r"grid_pg\.n takes a whole number"):
        vitreous.evaluate(model, images, "gae", "grid_pg", n=1)


def test_what_cannot_be_composed_is_said() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 5)
    with pytest.raises(TargetError, match=r"the 1 image\(s\) of this evaluation have 1; give images of more classes"):
        vitreous.evaluate(model, images[:1], "gae", "grid_pg")
    with pytest.raises(TargetError, match=r"the 5 image\(s\) of this evaluation have 1"):
        vitreous.evaluate(model, images, "gae", "grid_pg", target=2)
    with pytest.raises(OptionError, match="give a method's name"):
        vitreous.evaluate(model, images, torch.rand(5, 4, 4), "grid_pg")
    with pytest.raises(OptionError, match="needs other images of the same evaluation"):
        measure(METRICS["grid_pg"], make_case(Trace(model, images), METHODS["gae"], {}, [0, 1, 2, 3, 4]), {})
    backbone = Model(zoo.network("timm ViT"), classifier=False)
    with pytest.raises(TargetError, match="has no classifier, so there is no score to measure"):
        vitreous.evaluate(backbone, images, "attention", "grid_pg")


def test_a_random_order_has_every_number_once() -> None:
    assert sorted(shuffled(50, random.Random(1))) == list(range(50))
    starts = [next(iter(shuffled(4, random.Random(seed)))) for seed in range(400)]
    assert min(np.bincount(starts, minlength=4)) > 60


# ------------------------------------------------------------------------------------------------------ whole data sets


@pytest.mark.slow
@pytest.mark.parametrize("target", [None, "top-1"])
def test_leaderboards_and_studies(small: Model, tmp_path: Path, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image of a data set gets the same mosaic everywhere; an image that cannot be read is in none."""
    for i in range(8):
        (tmp_path / "data" / str(i % 5)).mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 20, (64, 64, 3), np.uint8)
        Image.fromarray(noise + np.uint8(25 * i)).save(tmp_path / "data" / str(i % 5) / f"{i}.png")
    (tmp_path / "data" / "2" / "broken.png").write_bytes(b"")
    if target == "top-1":  # the tiny network has one favourite; here every brightness is a class
        answers = property(lambda trace: torch.eye(7)[[levels(one) for one in trace.images]])
        monkeypatch.setattr(Trace, "output", answers)
    board = run_leaderboard(small, tmp_path / "data", "gae", "grid_pg,sparsity", target=target)
    assert board.metrics == ["grid_pg", "sparsity"] and board.plan.judged == [True, False]
    assert np.isfinite(board.values[:, 0]).sum(1).tolist() == [8] * 3
    assert len(set(board.targets.values())) == (5 if target is None else 7)
    given: dict[str, Any] = {"methods": "gae", "metrics": "grid_pg", "target": target}
    table = vitreous.run_study("leaderboard", tmp_path / "data", small, tmp_path / "out", shard=2, **given).to_pandas()
    for m, name in enumerate(board.methods):
        rows = table[table["method"] == name].set_index("image")["grid_pg"]
        named = [rows[sample.name] for sample in board.data.samples]
        np.testing.assert_allclose(np.array(named, float), board.values[m, 0], rtol=1e-4)


def levels(image: Tensor) -> int:
    """The brightness of an image, from 0 to 6."""
    return min(6, round(((image.mean().item() * 0.225 + 0.449) * 255 - 10) / 25))
