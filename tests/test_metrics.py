"""The battery: every metric on every model. Then the value of each that asks nothing of faithfulness."""

from __future__ import annotations

import copy
import json
import math
import threading
import zlib
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Run, off
from known import known
from machine import ROUNDING
from scipy import stats
from test_methods import state
from torch import Tensor, nn

import vitreous
from vitreous import METRICS, Attribution, Model
from vitreous.errors import InputError, OptionError, TargetError, Unsupported
from vitreous.metrics.case import Case, Measured, Score, make_case, measure
from vitreous.metrics.correlation import correlation, rank_correlation
from vitreous.metrics.localisation.mask_iou import above_mean
from vitreous.metrics.sanity.copies import copy_of
from vitreous.metrics.sanity.parameter_randomisation import depths, parts_of
from vitreous.registry import METHODS
from vitreous.trace.target import Class
from vitreous.trace.trace import Trace

CHEAP: dict[str, dict[str, Any]] = {  # what the battery runs in place of costly defaults
    "deletion": {"steps": 3},
    "insertion": {"steps": 3},
    "max_sensitivity": {"samples": 2},
    "parameter_randomisation": {"stages": 2},
    "road": {"shares": (0.5,)},
    "saco": {"groups": 3},
    "sensitivity_n": {"shares": (0.4,), "subsets": 4},
    "srg": {"steps": 2},
    "token_deletion": {"steps": 3},
}
DROPS = ("token_deletion", "srg", "token_shortcut")  # take tokens out of the sequence
CLOSED = ("timm Swin", "timm XCiT")  # … which these do not allow


def refused(metric: str, name: str) -> type[Exception] | None:
    """What a metric says of a model on which it cannot work."""
    if metric == "class_contrast" and zoo.model(name).classifier is False:
        return TargetError
    if metric == "reparametrisation" and name == "flat heads":  # it has no norm
        return Unsupported
    return Unsupported if metric in DROPS and name in CLOSED else None


ALONE = [name for name, one in METRICS.items() if not one.others]  # test_grid_pg has what needs several images
GRIDS = ("timm ViT", "timm ViT 224×448")
MAPS_ONLY = ("complexity", "localisation")  # families that never run the model: two grids are enough


def is_quick(metric: str, name: str) -> bool:
    return name in GRIDS if METRICS[metric].family in MAPS_ONLY else zoo.is_quick(metric, name)


PAIRS = [
    pytest.param(metric, name, marks=[] if is_quick(metric, name) else [pytest.mark.slow])
    for metric in ALONE
    for name in zoo.ZOO
]


def aim(name: str = "timm ViT") -> Any:
    return "neuron:1" if zoo.model(name).classifier is False else 1


@cache
def explained(name: str, method: str = "input_x_gradient") -> Attribution:
    return vitreous.explain(zoo.model(name), zoo.images(name), method, aim(name))


def objects(name: str, count: int = 3) -> list[Tensor]:
    """A rectangle in each image."""
    high, wide = zoo.ZOO[name].size
    masks = torch.zeros(count, high, wide, dtype=torch.bool)
    for i, mask in enumerate(masks):
        mask[high // 4 : high // 2 + i, wide // 3 : wide // 2 + 2 * i] = True
    return list(masks)


def score(metric: str, maps: Attribution, name: str = "timm ViT", rows: Any = slice(None), masks: Any = None) -> Score:
    given = list(np.array(objects(name) if masks is None else masks)[rows])
    model, images = zoo.model(name), zoo.images(name)[rows]
    needed = given if METRICS[metric].masks else None
    some = replace(maps, map=maps.map[rows], targets=tuple(np.array(maps.targets, object)[rows]), views=None)
    return vitreous.evaluate(model, images, some, metric, aim(name), needed, **CHEAP.get(metric, {}))


@pytest.mark.parametrize(("metric", "name"), PAIRS)
def test_battery(metric: str, name: str) -> None:
    maps = explained(name)
    before = state(zoo.network(name))
    if error := refused(metric, name):
        with pytest.raises(error):
            score(metric, maps, name)
        assert state(zoo.network(name)) == before
        return
    try:
        found = score(metric, maps, name)
    except Unsupported as said:
        pytest.fail(f"{said}\nIf {metric} cannot work on {name}, say so in `refused` of this file")
    assert state(zoo.network(name)) == before, "no side effects"
    assert found.value.shape == (3,) and found.value.dtype == torch.float32
    assert found.value.isfinite().all()
    assert found.better == METRICS[metric].direction(found.options)
    if found.curve is not None:
        assert found.at is not None and found.curve.shape == (3, len(found.at))
        assert list(found.at) == sorted(set(found.at))
    alone = score(metric, maps, name, [1]).value[0]
    assert abs(alone - found.value[1]) <= 2e-3 * max(1, abs(alone)), "batch-invariant"


@pytest.mark.parametrize("metric", ALONE)
def test_deterministic_and_unmoved_by_the_callers_modes(metric: str) -> None:
    maps = explained("timm ViT")
    first = score(metric, maps)
    with torch.inference_mode():
        second = score(metric, maps)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=False):
        third = score(metric, maps)
    for other in (second, third):
        assert torch.allclose(other.value, first.value, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("method", ["gae", "input_x_gradient"])  # patches, pixels
@pytest.mark.parametrize("metric", ALONE)
def test_a_map_that_is_not_finite_has_no_value(metric: str, method: str) -> None:
    maps = explained("timm ViT", method)
    good = score(metric, maps)
    for bad in (torch.nan, torch.inf):
        broken = maps.map.clone()
        broken[1, 0, 0] = bad
        found = score(metric, replace(maps, map=broken))
        assert found.value.isnan().tolist() == [False, True, False]
        assert torch.allclose(found.value[::2], good.value[::2])
        assert found.curve is None or found.curve.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("value", [0.0, 0.1, -0.7])
@pytest.mark.parametrize("method", ["gae", "input_x_gradient"])
@pytest.mark.parametrize("metric", ALONE)
def test_a_constant_map_has_a_value(metric: str, method: str, value: float) -> None:
    maps = explained("timm ViT", method)
    found = score(metric, replace(maps, map=torch.full_like(maps.map, value))).value
    share = torch.stack(objects("timm ViT")).float().mean((1, 2))
    expected: dict[str, Any] = {
        "energy_in_mask": share if value > 0 else 0,
        "mask_ap": share,
        "mask_iou": 0,
        "entropy": 1,
        "gini": 0,
        "sparsity": 0,
        "parameter_randomisation": 0,
        "saco": 0,
    }
    if metric == "sensitivity_n" or (metric == "max_sensitivity" and value == 0):
        assert found.isnan().all(), "not to be told"
    elif metric in expected:
        assert torch.allclose(found, torch.as_tensor(expected[metric]).float().expand(3), atol=1e-6)
    else:
        assert found.isfinite().all(), f"if {metric} cannot tell here, say so in this test"


COARSE = {"gini": 0.06, "sparsity": 0.15}  # rounding moves the smallest values of a map
FINE = ("class_contrast", "completeness", "energy_in_mask", "entropy", "mask_ap", "mask_iou", "max_sensitivity",
        "parameter_randomisation", "pointing_game")  # fmt: skip
NEAR = {**COARSE, **dict.fromkeys(FINE, 1e-3)}


@pytest.mark.parametrize("metric", [name for name in ALONE if METRICS[name].family not in ("faithfulness", "shortcut")])
def test_half_precision(metric: str) -> None:
    """As the same network in single precision; test_faithfulness has the others, on a network that reads something."""
    net = copy.deepcopy(zoo.network("timm ViT")).bfloat16()
    masks = objects("timm ViT") if METRICS[metric].masks else None
    given = zoo.model("timm ViT"), zoo.images("timm ViT"), "input_x_gradient", metric, 1, masks
    exact = vitreous.evaluate(*given, **CHEAP.get(metric, {}))
    half = vitreous.evaluate(Model(net), *given[1:], **CHEAP.get(metric, {}))
    assert half.value.dtype == torch.float32
    assert torch.allclose(half.value, exact.value, rtol=0.05, atol=NEAR.get(metric, 0.15))


@pytest.mark.parametrize("metric", METRICS)
def test_what_is_missing_is_said(metric: str) -> None:
    declared, x = METRICS[metric], zoo.images("timm ViT")
    if declared.masks:
        with pytest.raises(InputError, match=f"{metric} needs masks"):
            vitreous.evaluate(zoo.model("timm ViT"), x, "gae", metric)
    if declared.again:
        with pytest.raises(OptionError, match="give a method's name"):
            vitreous.evaluate(zoo.model("timm ViT"), x, torch.rand(3, 4, 4), metric)
    with pytest.raises(OptionError, match="has no option"):
        vitreous.evaluate(zoo.model("timm ViT"), x, "gae", metric, masks=[None] * 3, nonsense=1)


# ------------------------------------------------------------------------------------------------------ four patches


class Reader(nn.Module):
    """Reads the mean colour of four patches: class 0 the first, class 1 the third twice and the fourth once."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 1, 16, 16, bias=False)
        self.head = nn.Linear(4, classes, bias=False)
        with torch.no_grad():
            self.cut.weight.fill_(1 / 768)
            self.head.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 0, 2, 1]])[:classes])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cut(x).flatten(1))
        return out


READER = Model(Reader(), name="reader")
CORNER = torch.zeros(32, 32, dtype=torch.bool)
CORNER[:16, :16] = True
FOUR = [[4.0, 1.0], [2.0, -1.0]]


def bright(*patches: float) -> Tensor:
    """One image whose four patches are this bright."""
    return enlarged([list(patches[:2]), list(patches[2:])])[:, None].expand(1, 3, 32, 32).contiguous()


def enlarged(values: list[list[float]]) -> Tensor:
    """Every patch as 16×16 equal pixels."""
    return torch.tensor([values]).float().repeat_interleave(16, 1).repeat_interleave(16, 2)


def value(metric: str, maps: Any, masks: Any = None, image: Tensor | None = None, **options: Any) -> float:
    image = bright(1, 1, 1, 1) if image is None else image
    return vitreous.evaluate(READER, image, maps, metric, 0, masks, **options).value.item()


@pytest.mark.parametrize(
    ("metric", "maps", "expected"),
    [
        ("entropy", FOUR, 1.75 * math.log(2) / math.log(4)),
        ("entropy", [[0, 0], [-3, 0]], 0),
        ("gini", FOUR, (-3 * 1 - 1 * 1 + 1 * 2 + 3 * 4) / (4 * 8)),
        ("gini", [[0, 0], [-3, 0]], 0.75),
        ("sparsity", [[4, 0.19], [-0.19, 0.21]], 0.5),
        ("sparsity", [[-4, 0.19], [-0.19, 3.7]], 0.0),  # literally: of max s, not of max |s|
        ("sparsity", [[-4, -0.19], [-0.19, -0.21]], 0.5),  # where nothing is positive, of max |s|
        ("completeness", [[1, 0], [0, 0]], 0),
        ("completeness", FOUR, 5),  # |6 − 1| / 1
    ],
)
def test_by_hand(metric: str, maps: Any, expected: float) -> None:
    assert value(metric, torch.tensor([maps]).float()) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("metric", "mask", "expected"),  # mask: which of the four patches are the object
    [
        ("pointing_game", "1000", 1),
        ("pointing_game", "0111", 0),
        ("energy_in_mask", "1000", 4 / 7),
        ("energy_in_mask", "1001", 4 / 7),  # what speaks against is not counted
        ("mask_iou", "1000", 1 / 2),  # above the mean of 1.5: the first and the third
        ("mask_iou", "1010", 1),
        ("mask_iou", "0101", 0),
        ("mask_iou", "1111", 1 / 2),
        ("mask_ap", "1000", 1),
        ("mask_ap", "0010", 1 / 2),
        ("mask_ap", "1100", (1 + 2 / 3) / 2),
        ("mask_ap", "0001", 1 / 4),
    ],
)
def test_localisation_by_hand(metric: str, mask: str, expected: float) -> None:
    given = enlarged([[int(mask[0]), int(mask[1])], [int(mask[2]), int(mask[3])]]) > 0
    assert value(metric, enlarged(FOUR), given) == pytest.approx(expected, abs=1e-6)


def test_area_by_hand() -> None:
    """As many pixels as the object has; equal ones by shares."""
    assert value("mask_iou", enlarged(FOUR), [CORNER], threshold="area") == 1
    two_equal = enlarged([[1.0, 1.0], [0.0, 0.0]])
    assert value("mask_iou", two_equal, [CORNER], threshold="area") == pytest.approx(0.5 / 1.5)
    flat = torch.full((1, 2, 2), 0.1)
    assert value("mask_iou", flat, [CORNER], threshold="area") == pytest.approx(0.25 / 1.75)


def test_nothing_stands_out_of_what_is_the_same_everywhere() -> None:
    """However its mean is rounded."""
    for value in torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)):
        assert not above_mean(value.expand(31, 29)).any()


# ------------------------------------------------------------------------------------------------------- localisation

LOCALISED = ("energy_in_mask", "mask_ap", "mask_iou", "pointing_game")


def second_opinion(metric: str, values: np.ndarray, mask: np.ndarray) -> float:
    """Each metric again, pixel by pixel."""
    pixels = [(float(v), bool(m)) for v, m in zip(values.ravel(), mask.ravel())]
    size = sum(m for _, m in pixels)
    if metric == "energy_in_mask":
        return sum(v for v, m in pixels if m and v > 0) / sum(v for v, _ in pixels if v > 0)
    if metric == "mask_iou":
        mean = math.fsum(v for v, _ in pixels) / len(pixels)
        both = sum(v > mean and m for v, m in pixels)
        return both / sum(v > mean or m for v, m in pixels)
    if metric == "pointing_game":
        best = [m for v, m in pixels if v == values.max()]
        return sum(best) / len(best)
    total, before = 0.0, 0
    for least in sorted({v for v, _ in pixels}, reverse=True):
        found = sum(m for v, m in pixels if v >= least)
        total += (found - before) / size * found / sum(v >= least for v, _ in pixels)
        before = found
    return total


@pytest.mark.parametrize("metric", LOCALISED)
@pytest.mark.parametrize("levels", [5, 10**6])  # many ties, hardly any
def test_localisation_against_a_second_opinion(metric: str, levels: int) -> None:
    random = torch.Generator().manual_seed(levels)
    maps = torch.randint(-levels, levels, (1, 32, 32), generator=random) / levels
    mask = torch.rand(32, 32, generator=random) > 0.7
    assert value(metric, maps, mask) == pytest.approx(second_opinion(metric, maps[0].numpy(), mask.numpy()), abs=1e-5)


@pytest.mark.parametrize("metric", LOCALISED)
def test_localisation_ranks_maps(metric: str) -> None:
    """The object itself, the object in noise, noise, all but the object."""
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT", 40)
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[16:48, 16:32] = True
    truth = torch.zeros(40, 4, 4)
    truth[:, 1:3, 1] = 1
    noise = torch.rand(40, 4, 4, generator=torch.Generator().manual_seed(0))
    found = [
        vitreous.evaluate(model, x, maps, metric, 0, [mask] * 40).mean
        for maps in (truth, truth + 1.5 * noise, noise, -truth)
    ]
    assert found[0] > found[1] > found[2] + 0.05 > found[3]


@pytest.mark.parametrize("metric", LOCALISED)
def test_methods_that_find_what_a_known_model_reads(metric: str) -> None:
    """Its object is what it reads: four patches, and of the controls none knows which."""
    weights = torch.zeros(6, 6)
    weights[0:2, 3:5] = 3
    model = known(weights)
    x = 0.5 + torch.rand(20, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    masks = [(weights > 0).repeat_interleave(8, 0).repeat_interleave(8, 1)] * 20

    def found(method: str) -> float:
        return vitreous.evaluate(model, x, method, metric, 0, masks).mean

    for method in ("attention", "input_x_gradient"):
        assert found(method) > 0.4 > max(found("random"), found("centre")) + 0.1


def test_pointing_game_points_at_the_middle_of_a_patch() -> None:
    maps = torch.tensor([[[0.0, 1], [0, 0]]])
    middle = torch.zeros(32, 32, dtype=torch.bool)
    middle[8, 24] = True
    assert value("pointing_game", maps, middle) == 1
    beside = middle.roll(3, 0).roll(4, 1)  # 5 pixels away
    assert value("pointing_game", maps, beside) == 0
    assert value("pointing_game", maps, beside, tolerance=4.9) == 0
    assert value("pointing_game", maps, beside, tolerance=5.0) == 1


def test_pointing_game_shares_equal_maxima() -> None:
    assert value("pointing_game", torch.tensor([[[1.0, 1], [0, 1]]]), CORNER) == pytest.approx(1 / 3)
    assert value("pointing_game", torch.full((1, 2, 2), 0.1), CORNER) == 0.25
    assert value("pointing_game", torch.full((1, 32, 32), 0.1), CORNER) == 0.25


def test_signed_maps_are_not_taken_as_absolute() -> None:
    maps = enlarged([[-9.0, 1.0], [0.0, 0.0]])
    for metric in LOCALISED:
        assert value(metric, maps, CORNER) <= 0.25


def test_images_without_an_object_have_no_value() -> None:
    x = bright(1, 1, 1, 1).repeat(3, 1, 1, 1)
    for metric in (name for name, one in METRICS.items() if one.masks and one.family == "localisation"):
        found = vitreous.evaluate(READER, x, enlarged(FOUR).repeat(3, 1, 1), metric, 0, [None, CORNER, CORNER & False])
        assert found.value.isnan().tolist() == [True, False, True]
        assert found.mean == pytest.approx(found.value[1].item())
        none = vitreous.evaluate(READER, x, enlarged(FOUR).repeat(3, 1, 1), metric, 0, [None] * 3)
        assert none.value.isnan().all()


# -------------------------------------------------------------------------------------------------------- complexity


@pytest.mark.parametrize("metric", ["entropy", "gini", "sparsity"])
def test_complexity_ranks_maps(metric: str) -> None:
    """One patch, a few, all."""
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    maps = torch.full((3, 16), 0.01)
    maps[0, 0], maps[1, :5], maps[2] = 1, 1, torch.linspace(0.8, 1, 16)
    found = vitreous.evaluate(model, x, maps.reshape(3, 4, 4), metric, 0).value.tolist()
    assert found == sorted(found, reverse=METRICS[metric].better == "higher") and len(set(found)) == 3


def test_gini_is_the_mean_difference() -> None:
    """½ · mean |a − b| / mean a over all pairs."""
    maps = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(3))
    a = maps.abs().flatten(1)
    expected = (a[:, :, None] - a[:, None]).abs().mean((1, 2)) / (2 * a.mean(1))
    found = vitreous.evaluate(zoo.model("timm ViT"), zoo.images("timm ViT"), maps, "gini", 0).value
    assert torch.allclose(found, expected)


def test_pixels_are_counted_by_patch() -> None:
    maps = torch.tensor([[[4.0, 0.01], [0.02, 2]]])
    for metric in ("entropy", "gini", "sparsity"):
        assert value(metric, enlarged(maps[0].tolist())) == pytest.approx(value(metric, maps), abs=1e-6)


# -------------------------------------------------------------------------------------------------------- correlation


def test_correlations_are_scipys() -> None:
    random = np.random.default_rng(0)
    a, b = random.integers(0, 9, (4, 5, 6)).astype(np.float32), random.normal(size=(4, 5, 6)).astype(np.float32)
    for ours, theirs in ((correlation, stats.pearsonr), (rank_correlation, stats.spearmanr)):
        expected = [theirs(a[i].ravel(), b[i].ravel())[0] for i in range(4)]
        assert np.allclose(ours(torch.from_numpy(a), torch.from_numpy(b)), expected, atol=1e-6)


@pytest.mark.parametrize("measure", [correlation, rank_correlation])
def test_correlation_of_flat_and_broken_maps(measure: Any) -> None:
    flat, other, some = torch.full((1, 2, 2), 0.1), torch.full((1, 2, 2), 7.0), torch.tensor([FOUR])
    assert measure(flat, other).item() == 1
    assert measure(flat, some).item() == measure(some, flat).item() == 0
    assert measure(some, 3 * some + 1).item() == pytest.approx(1)
    assert measure(some, -some).item() == pytest.approx(-1)
    assert measure(some, some * torch.nan).isnan().all()


# ----------------------------------------------------------------------------------------------------- discrimination


def test_class_contrast_of_a_reader() -> None:
    """Its two classes read other patches: x·w₀ = (1, 0, 0, 0) and x·w₁ = (0, 0, 2, 1) on an even image."""
    expected = 1 - abs(np.corrcoef([1, 0, 0, 0], [0, 0, 2, 1])[0, 1])
    assert value("class_contrast", "input_x_gradient") == pytest.approx(expected, abs=1e-5)
    for method in ("random", "centre"):
        assert value("class_contrast", method) == pytest.approx(0, abs=1e-6)


def test_class_contrast_takes_the_two_best_whatever_the_target() -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    top = Trace(model, x).output.topk(2).indices
    one, two = (vitreous.explain(model, x, "gae", top[:, i].tolist()).map for i in (0, 1))
    expected = [1 - abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) for a, b in zip(one.numpy(), two.numpy())]
    for target in (None, 3, top[:, 0].tolist(), "2-1"):
        found = vitreous.evaluate(model, x, "gae", "class_contrast", target).value
        assert np.allclose(found, expected, atol=1e-5)
    assert vitreous.evaluate(model, x, "rollout", "class_contrast").value.abs().max() < 1e-6


def test_class_contrast_of_a_map_that_is_flat() -> None:
    """Unlike every map that is not."""
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    maps = vitreous.explain(model, x, "gae")  # of the best class, so that it is used as it is
    assert (vitreous.evaluate(model, x, replace(maps, map=maps.map * 0 + 0.1), "class_contrast").value == 1).all()


def test_class_contrast_needs_two_classes() -> None:
    with pytest.raises(TargetError, match="compares two classes; lone has one"):
        vitreous.evaluate(Model(Reader(1), name="lone"), bright(1, 1, 1, 1), "gradient", "class_contrast", 0)


# ------------------------------------------------------------------------------------------------------------- sanity


def test_completeness_knows_who_keeps_the_promise() -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    kept, rough = (
        vitreous.explain(model, x, "integrated_gradients", 1, steps=steps, baseline="zero") for steps in (60, 2)
    )
    found = [vitreous.evaluate(model, x, maps, "completeness").value for maps in (kept, rough)]
    assert found[0].max() < 1e-3 < found[1].max()
    assert vitreous.evaluate(model, x, "gae", "completeness", 1).value.min() > 1e-2


def test_completeness_from_a_blurred_image() -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    maps = vitreous.explain(model, x, "integrated_gradients", 1, steps=60, baseline="blur")
    assert vitreous.evaluate(model, x, maps, "completeness", baseline="blur").value.max() < 1e-3
    assert vitreous.evaluate(model, x, maps, "completeness").value.max() > 1e-2


def test_completeness_where_nothing_was_gained() -> None:
    assert math.isnan(value("completeness", torch.tensor([FOUR]), image=bright(0, 1, 1, 1)))


def test_parameter_randomisation_ranks_methods() -> None:
    """What ignores the network is not changed by it; a shuffled class weight reads another patch."""
    for method in ("centre", "random"):
        assert value("parameter_randomisation", method) == pytest.approx(1, abs=1e-6)
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    assert vitreous.evaluate(model, x, "gradient", "parameter_randomisation", 1).value.max() < 0.9


def test_parameter_randomisation_step_by_step() -> None:
    """The same by hand: a copy, shuffled part by part under the names it has, and SciPy's rank correlation."""
    name, seed = "timm ViT", 5
    model, x = zoo.model(name), zoo.images(name)
    found = vitreous.evaluate(model, x, "gae", "parameter_randomisation", 1, stages=9, seed=seed)
    assert found.at == (1, 2, 3, 4, 5)
    before = vitreous.explain(model, x, "gae", 1).map
    net = copy.deepcopy(zoo.network(name))
    weights = dict(net.named_parameters())
    for stage, start in enumerate([("head.", "norm."), ("blocks.2.",), ("blocks.1.",), ("blocks.0.",), ("",)]):
        for part in [part for part in weights if part.startswith(start)]:
            old = weights.pop(part)
            order = torch.randperm(
                old.numel(), generator=torch.Generator().manual_seed(seed ^ zlib.crc32(part.encode()))
            )
            old.data = old.data.flatten()[order].reshape(old.shape)
        after = vitreous.explain(Model(net), x, "gae", 1).map
        rho = [abs(stats.spearmanr(a.ravel(), b.ravel())[0]) for a, b in zip(before.numpy(), after.numpy())]
        assert found.curve is not None and np.allclose(found.curve[:, stage], rho, atol=2e-3)
    assert found.curve is not None and torch.allclose(found.value, found.curve.mean(1))
    few = vitreous.evaluate(model, x, "gae", "parameter_randomisation", 1, stages=2, seed=seed)
    assert few.curve is not None and torch.allclose(few.curve, found.curve[:, [0, 4]], atol=2e-3)
    other = vitreous.evaluate(model, x, "gae", "parameter_randomisation", 1, stages=2, seed=6)
    assert not torch.allclose(few.value, other.value)


def test_depths() -> None:
    assert depths(14, 4) == [1, 5, 10, 14]
    assert depths(14, 1) == [14]
    assert depths(3, 100) == [1, 2, 3]
    assert depths(1, 4) == [1]


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_weight_that_counts_is_in_one_part(name: str) -> None:
    """Shuffling all parts changes the output; a weight in no part does not matter."""
    twin, x = copy_of(zoo.model(name)), zoo.images(name)
    blocks = twin.layout_at(zoo.ZOO[name].size).blocks
    parts = parts_of(twin, x[:1], blocks)
    named = [weight for part in parts for weight in part]
    assert len(set(named)) == len(named) and all(parts)
    assert len(parts) >= max(zoo.ZOO[name].depth, 2)
    if zoo.ZOO[name].flow and zoo.ZOO[name].blocks:
        for number, block in enumerate(blocks[::-1], 1):
            assert any(weight.startswith(f"{block}.") for weight in parts[number])
    expected = Trace(twin, x).output
    for weight, parameter in twin.module.named_parameters():
        if weight not in named:
            nn.init.normal_(parameter)
    assert off(Trace(twin, x).output, expected) <= ROUNDING


def test_the_head_is_what_comes_after_the_blocks() -> None:
    """open_clip keeps its last projection beside its position embedding."""
    name = "open_clip ViT-B-32"
    blocks = zoo.model(name).layout_at(zoo.ZOO[name].size).blocks
    parts = parts_of(zoo.model(name), zoo.images(name)[:1], blocks)
    assert parts[0] == ["visual.ln_post.weight", "visual.ln_post.bias", "visual.proj"]
    assert {"visual.class_embedding", "visual.positional_embedding", "visual.conv1.weight"} <= set(parts[-1])
    flat = parts_of(zoo.model("flat heads"), zoo.images("flat heads")[:1], ())
    assert [part[0] for part in flat] == ["head.weight", "qkv.2.weight", "qkv.1.weight", "qkv.0.weight", "cut.weight"]


def test_a_forward_of_ones_own_runs_the_copy() -> None:
    net, x = copy.deepcopy(zoo.network("timm ViT")), zoo.images("timm ViT")
    given = x, "gradient", "parameter_randomisation", 1
    expected = vitreous.evaluate(Model(net), *given).value
    for forward in (lambda x: net(x), net.forward):
        assert off(vitreous.evaluate(Model(net, forward=forward), *given).value, expected) < 1e-3, "ranks may change"
    hidden = {"net": net}
    with pytest.raises(Unsupported, match="runs another network"):
        vitreous.evaluate(Model(net, forward=lambda x: hidden["net"](x)), *given)


def test_a_probe_is_shuffled_to_the_bottom() -> None:
    from vitreous.models.fingerprint import fingerprint
    from vitreous.models.probe.attach import Probe, attach

    net = copy.deepcopy(zoo.network("timm ViT"))
    backbone = Model(net, forward=lambda x: net(x))
    random = torch.Generator().manual_seed(0)
    probe = Probe(torch.randn(2, 32, generator=random), torch.zeros(2), ("a", "b"), "x", fingerprint(backbone), 1.0)
    twin = copy_of(attach(backbone, probe))
    parts = parts_of(twin, zoo.images("timm ViT")[:1], twin.layout_at((64, 64)).blocks)
    assert "head.weight" in parts[0] and len(parts) == 5


def test_a_concept_of_the_model_is_asked_of_the_copy() -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    concept = vitreous.Concept.from_images(model, x[:2])
    found = vitreous.evaluate(model, x, "gradient", "parameter_randomisation", concept, stages=2)
    assert found.value.isfinite().all() and found.value.max() < 1


def test_the_network_is_never_another_while_a_copy_is_shuffled() -> None:
    """Also not for another thread, nor after an error."""
    net, x = zoo.network("timm ViT"), zoo.images("timm ViT")
    expected, seen, done = net(x).detach(), [], threading.Event()
    before = state(net)

    def watch() -> None:
        while not done.is_set():
            seen.append(off(net(x).detach(), expected))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        while len(seen) < 5 and watcher.is_alive():  # at least once, and until enough was seen meanwhile
            vitreous.evaluate(zoo.model("timm ViT"), x, "gae", "parameter_randomisation", 1)
    finally:
        done.set()
        watcher.join()
    assert len(seen) >= 5 and max(seen) <= ROUNDING

    def fail(trace: Trace, target: Any) -> Tensor:
        raise RuntimeError("no map")

    case = Case(Trace(zoo.model("timm ViT"), x), explained("timm ViT").map, Class(1), None, fail)
    with pytest.raises(RuntimeError, match="no map"):
        measure(METRICS["parameter_randomisation"], case, {"stages": 2, "seed": 0})
    assert state(net) == before


def test_what_cannot_be_copied_is_said() -> None:
    net = Reader()
    net.cache = net.cut.weight * 2  # type: ignore[assignment]  # not a leaf: torch refuses to copy it
    with pytest.raises(Unsupported, match="stubborn cannot be copied"):
        vitreous.evaluate(Model(net, name="stubborn"), bright(1, 1, 1, 1), "gradient", "parameter_randomisation", 0)


# --------------------------------------------------------------------------------------------------------- robustness


def test_max_sensitivity_of_a_reader() -> None:
    """s = x·w, so that the change is δ·w: all noise of a stream, drawn again."""
    image = bright(3, 1, -1, 0)
    found = value("max_sensitivity", "input_x_gradient", image=image, samples=4, radius=0.1, seed=2)
    trace, worst = Trace(READER, image), 0.0
    for sample in range(4):
        (stream,) = trace.generators(2 * 4 + sample)
        noise = 0.1 * 4 * (2 * torch.rand(3, 32, 32, generator=stream) - 1)
        change = noise[:, :16, :16].sum(0) / 768
        worst = max(worst, float(change.norm() / (3 * 3 * 16 / 768)))
    assert found == pytest.approx(worst, rel=1e-4)
    assert value("max_sensitivity", "gradient", image=image) < 1e-5, "a linear model has one gradient"
    assert value("max_sensitivity", "random", image=image) > 0.5, "another image is other noise"


def test_max_sensitivity_grows_with_radius_and_samples() -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")

    def found(**options: Any) -> Tensor:
        return vitreous.evaluate(model, x, "gradient", "max_sensitivity", **options).value

    assert (found(radius=0.2, samples=3) > found(radius=0.01, samples=3)).all()
    small, large = found(samples=2), found(samples=12)
    assert (large >= (1 - ROUNDING) * small).all(), "the first samples are among the others"


def test_max_sensitivity_keeps_each_images_class() -> None:
    """Noise that changes the best class does not change what is explained; many samples at a time are the same."""
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    best = Trace(model, x).output.argmax(1).tolist()
    given = {"samples": 3, "radius": 2.0}
    free = vitreous.evaluate(model, x, "gradient", "max_sensitivity", **given)
    named = vitreous.evaluate(model, x, "gradient", "max_sensitivity", best, **given)
    assert torch.allclose(free.value, named.value, rtol=1e-4)
    asked: list[int] = []

    def method(trace: Trace, target: Any) -> Tensor:
        asked.append(len(trace))
        return vitreous.explain(model, trace, "gradient", target).map

    gradient, aims = METHODS["gradient"], [0, 1, 2]
    case = replace(make_case(Trace(model, x), gradient, gradient.check({}), aims), method=method)
    at_once: Measured = measure(METRICS["max_sensitivity"], case, {**given, "seed": 0})
    assert asked == [9]
    with vitreous.limit_memory(1):
        one_by_one = measure(METRICS["max_sensitivity"], case, {**given, "seed": 0})
    assert asked == [9, 3, 3, 3]
    assert torch.allclose(at_once.value, one_by_one.value, rtol=1e-4)
    expected = vitreous.evaluate(model, x, "gradient", "max_sensitivity", aims, **given)
    assert torch.allclose(at_once.value, expected.value, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:a float tensor counts as preprocessed")
def test_max_sensitivity_of_what_is_zero() -> None:
    def zero(trace: Trace, target: Any) -> Tensor:
        return torch.zeros(len(trace), 2, 2)

    case = Case(Trace(READER, bright(1, 2, 3, 4)), torch.zeros(1, 2, 2), Class(0), None, zero)
    options = METRICS["max_sensitivity"].check({})
    assert measure(METRICS["max_sensitivity"], case, options).value.item() == 0
    changed = replace(case, method=lambda trace, target: zero(trace, target) + 1)
    assert measure(METRICS["max_sensitivity"], changed, options).value.isnan().all()


# ------------------------------------------------------------------------------------------------------------ listing


def test_metrics_are_listed(run: Run) -> None:
    result = run("metrics")
    assert result.code == 0
    assert all(name in result.out for name in METRICS)
    assert {one.family for one in METRICS.values()} <= set(result.out.splitlines())
    assert max(map(len, result.out.splitlines())) <= 80
    assert result.out.rstrip().endswith("vitreous metrics NAME")


def test_one_metric(run: Run) -> None:
    result = run("metrics", "pointing-game")
    assert "pointing_game: Whether the highest value of a map lies on the object;" in result.out
    assert "higher is better; needs masks or boxes" in result.out
    assert "tolerance" in result.out and "Top-down neural" in result.out
    assert "lower is better; runs the method again" in run("metrics", "max_sensitivity").out
    assert run("metrics", "pointing_gam").error.startswith("unknown metric 'pointing_gam'; did you mean pointing_game")


def test_metrics_as_json(run: Run) -> None:
    told = json.loads(run("metrics", "--json").out)
    assert told == json.loads(json.dumps([one.schema for one in METRICS.values()]))
    assert [one["better"] for one in json.loads(run("metrics", "gini", "--json").out)] == ["higher"]


def test_a_metric_that_reads_no_score_needs_no_target() -> None:
    """A backbone has no classes: sparsity needs none, deletion says what to give."""
    model, images = zoo.model("HF DINOv3 sdpa"), zoo.images("HF DINOv3 sdpa")
    assert model.classifier is False
    assert vitreous.evaluate(model, images, "attention", "sparsity").value.isfinite().all()
    masks = [np.eye(64, dtype=bool)] * len(images)
    assert vitreous.evaluate(model, images, "rollout", "pointing_game", masks=masks).value.isfinite().all()
    for method, metric in (("attention", "token_deletion"), ("gae", "sparsity")):
        with pytest.raises(TargetError, match="no classifier"):
            vitreous.evaluate(model, images, method, metric)
