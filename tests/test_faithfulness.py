"""The metrics of faithfulness: known models, values by hand, second implementations, the authors' curves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Oracle, off
from known import known, truth
from machine import rare
from oracles import metrics as oracles
from test_metrics import refused
from torch import Tensor

import vitreous
from vitreous import METRICS, Trace, evaluate, limit_memory
from vitreous.errors import OptionError, Unsupported
from vitreous.metrics.faithfulness.road import fill_in
from vitreous.metrics.faithfulness.sensitivity_n import draw
from vitreous.trace.perturb.fills import baseline_images
from vitreous.trace.perturb.hide_patches import is_local, scores_hidden
from vitreous.trace.run import Run

FAITHFUL = [name for name in METRICS if METRICS[name].family == "faithfulness"]
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in FAITHFUL]
CASES += [("token_deletion", {"order": "least"}), ("srg", {"by": "pixels"}), ("deletion", {"steps": None})]
FAMILIES = [
    "timm ViT",
    "timm ViT 224×448",
    "timm DINOv3",
    "timm BEiT",
    "timm SigLIP",
    "timm Swin",
    "torchvision ViT",
    "HF ViT eager",
    "HF DINOv2 sdpa",
    "HF CLIP vision sdpa",
    "sequence first",
    "hand-written",
    "flat heads",
]
EXACT = {"rtol": 1e-4, "atol": 1e-5}
WEIGHTS = torch.tensor([[4.0, 2.0], [1.5, 0.5]])  # each adds weight/4 to the score of an image of ones: 2 in all
ONES = torch.ones(1, 3, 16, 16)


def sigmoid(*scores: float) -> list[float]:
    return [1 / (1 + math.exp(-score)) for score in scores]


def test_directions() -> None:
    lower = ("deletion", "token_deletion")
    higher = ("insertion", "road", "saco", "sensitivity_n", "srg")
    assert {*lower, *higher} <= set(FAITHFUL)
    for name in (*lower, *higher):
        assert METRICS[name].direction(METRICS[name].check({})) == ("lower" if name in lower else "higher")
    assert METRICS["token_deletion"].direction({"order": "least"}) == "higher"


# ------------------------------------------------------------------------------------------------- a known attribution


def scene(count: int) -> tuple[Tensor, Tensor]:
    """How much a model reads of each of 6×6 patches, mostly little, and images of patches whose mean colour is zero."""
    stream = torch.Generator().manual_seed(1)
    weights = torch.where(torch.rand(6, 6, generator=stream) < 0.4, torch.rand(6, 6, generator=stream), 1e-3)
    images = torch.randn(count, 1, 6, 6, generator=stream).repeat_interleave(8, 2).repeat_interleave(8, 3)
    return weights, (images - images.mean((2, 3), keepdim=True)).expand(-1, 3, -1, -1)


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "options"), CASES, ids=lambda case: str(case))
def test_truth_beats_chance_beats_its_opposite(metric: str, options: dict[str, Any]) -> None:
    """A model that reads a few patches: the true map, random maps, the true map turned round."""
    weights, images = scene(6)
    model, true = known(weights, gain=30.0), truth(images, weights)
    rank = {"higher": 1, "lower": -1}

    def mean(map: Tensor) -> float:
        score = evaluate(model, images, map, metric, target=0, **options)
        return rank[score.better] * score.mean

    stream = torch.Generator().manual_seed(2)
    chance = [mean(torch.rand(6, 6, 6, generator=stream)) for _ in range(8)]
    best, worst = mean(true), mean(-true)
    assert best > max(chance)
    assert worst < min(chance)
    assert best - sum(chance) / 8 > 0.2 * (best - worst)


# ------------------------------------------------------------------------------------------------------- four patches


def four(metric: str, map: Tensor = WEIGHTS, **options: Any) -> tuple[float, list[float]]:
    score = evaluate(known(WEIGHTS), ONES, map[None], metric, target=0, **options)
    assert score.curve is not None
    return score.value.item(), score.curve[0].tolist()


def test_deletion_by_hand() -> None:
    value, curve = four("deletion", fill="zero", steps=None)
    a, b, c, d, e = heights = sigmoid(2, 1, 0.5, 0.125, 0)
    assert curve == pytest.approx(heights, abs=1e-6)
    assert value == pytest.approx((a / 2 + b + c + d + e / 2) / 4, abs=1e-6)


def test_deletion_in_two_steps_by_hand() -> None:
    value, curve = four("deletion", fill="zero", steps=2)
    assert curve == pytest.approx(sigmoid(2, 0.5, 0), abs=1e-6)
    assert value == pytest.approx(np.dot([0.25, 0.5, 0.25], curve), abs=1e-6)


def test_more_steps_than_patches_are_patch_by_patch() -> None:
    (many, one), (value, curve) = (four("deletion", fill="zero", steps=steps) for steps in (100, None))
    assert many == pytest.approx(value, abs=1e-6) and one == pytest.approx(curve, abs=1e-6)


def test_insertion_by_hand() -> None:
    value, curve = four("insertion", fill="zero", steps=None)
    a, b, c, d, e = heights = sigmoid(0, 1, 1.5, 1.875, 2)
    assert curve == pytest.approx(heights, abs=1e-6)
    assert value == pytest.approx((a / 2 + b + c + d + e / 2) / 4, abs=1e-6)


def test_token_deletion_by_hand() -> None:
    """What is left shares the weight of what is gone: 4 · Σ w / (8 + Σ w)."""
    left = [8, 4, 2, 0.5]
    value, curve = four("token_deletion", steps=4)
    assert curve == pytest.approx(sigmoid(*(4 * w / (8 + w) for w in left)), abs=1e-6)
    assert value == pytest.approx(np.dot([1 / 6, 1 / 3, 1 / 3, 1 / 6], curve), abs=1e-6)


def test_srg_by_hand() -> None:
    most = sigmoid(*(4 * w / (8 + w) for w in (8, 4, 2, 0.5)))
    least = sigmoid(*(4 * w / (8 + w) for w in (8, 7.5, 6, 4)))
    value, curve = four("srg", steps=4)
    assert curve == pytest.approx(np.subtract(least, most).tolist(), abs=1e-6)
    assert value == pytest.approx(np.mean(curve), abs=1e-6)


def test_srg_of_pixels_by_hand() -> None:
    value, _ = four("srg", by="pixels", fill="zero", steps=4)
    gained = np.subtract(sigmoid(2, 1.875, 1.5, 1), sigmoid(2, 1, 0.5, 0.125))
    assert value == pytest.approx(gained.mean(), abs=1e-6)


def test_saco_by_hand() -> None:
    """Relevance 4, 2, 1, 0 of the patches that weigh 2, 1.5, 4, 0.5: two of six pairs are in the wrong order."""
    value, curve = four("saco", torch.tensor([[1.0, 4.0], [2.0, 0.0]]), fill="zero", groups=4)
    (whole,) = sigmoid(2)
    assert curve == pytest.approx([whole - p for p in sigmoid(1.5, 1.625, 1, 1.875)], abs=1e-6)
    assert value == pytest.approx((2 - 3 + 4 - 1 + 2 + 1) / 13, abs=1e-6)
    assert four("saco", fill="zero")[0] == pytest.approx(1)
    assert four("saco", -WEIGHTS, fill="zero")[0] == pytest.approx(-1)


def test_sensitivity_n_by_hand() -> None:
    """Where patches add up, the truth foretells every drop, up to a factor and, as sizes are one by one, a constant."""
    sizes = {"fill": "zero", "shares": (0.25, 0.5, 0.75)}
    for map, r in ((WEIGHTS, 1), (3 * WEIGHTS + 5, 1), (-WEIGHTS, -1)):
        value, curve = four("sensitivity_n", map, **sizes)
        assert curve == pytest.approx([r, r, r], abs=1e-5)
        assert value == pytest.approx(r, abs=1e-5)


def test_road_by_hand() -> None:
    """An image of one colour looks the same whatever is removed."""
    value, curve = four("road", noise=0.0, shares=(0.25, 0.5, 0.75))
    assert [value, *curve] == pytest.approx([0, 0, 0, 0], abs=1e-6)


def test_road_adds_its_noise_to_removed_pixels_only() -> None:
    """With noise of ±large size, the least relevant removed still shows the most relevant as it is."""
    quiet, loud = (four("road", noise=noise, shares=(0.25,))[0] for noise in (0.0, 5.0))
    assert quiet == pytest.approx(0, abs=1e-6)
    assert abs(loud) > 1e-3
    assert four("road", noise=5.0, shares=(0.25,), seed=1)[0] != loud


# ----------------------------------------------------------------------------------------------- second implementations


def run_of(name: str, image: Tensor, graded: bool = True) -> oracles.Run:
    """The target's probability (or score) as a function of one image."""
    model = zoo.model(name)
    with torch.no_grad():
        first = model.run(image[None])[0]
    classifies = Trace(model, image[None]).classifies
    chosen = int(first.argmax()) if classifies else 2

    def run(picture: Tensor) -> float:
        with torch.no_grad():
            out = model.run(picture[None])[0].double()
        return float(out.softmax(0)[chosen] if graded and classifies else out[chosen])

    return run


def setting(name: str, count: int = 2) -> tuple[Tensor, Tensor, Any]:
    images = zoo.images(name, count)
    grid = zoo.ZOO[name].grid
    maps = torch.randn(count, *grid, generator=torch.Generator().manual_seed(3))
    target = None if Trace(zoo.model(name), images).classifies else "neuron:2"
    return images, maps, target


@pytest.mark.parametrize("name", FAMILIES)
def test_hiding_as_by_hand(name: str) -> None:
    """deletion, insertion, saco and srg by pixels: every variant run alone."""
    images, maps, target = setting(name)
    model, grid = zoo.model(name), zoo.ZOO[name].grid
    few = {"steps": None} if grid == (4, 4) else {"steps": 3}
    found = {
        metric: evaluate(model, images, maps, metric, target, **options)
        for metric, options in {
            "deletion": few,
            "insertion": few | {"fill": "mean"},
            "saco": {"groups": 3},
            "srg": {"by": "pixels", "steps": 3},
        }.items()
    }
    for i, (image, map) in enumerate(zip(images, maps)):
        run, cover, values = run_of(name, image), oracles.mean_cover(image), map.flatten().tolist()
        given = (run, image, cover, values, grid)
        for metric, oracle in (("deletion", oracles.deletion), ("insertion", oracles.insertion)):
            if grid != (4, 4):
                continue
            curve = oracle(*given)
            shares = [k / len(values) for k in range(len(values) + 1)]
            np.testing.assert_allclose(found[metric].curve[i], curve, **EXACT)
            np.testing.assert_allclose(found[metric].value[i], oracles.trapezoid(shares, curve), **EXACT)
        coefficient, drops = oracles.saco(*given, groups=3)
        np.testing.assert_allclose(found["saco"].curve[i], drops, rtol=1e-3, atol=1e-5)
        if np.diff(sorted(drops)).min() > 1e-5:
            np.testing.assert_allclose(found["saco"].value[i], coefficient, **EXACT)
        np.testing.assert_allclose(found["srg"].value[i], oracles.srg(*given, steps=3), **EXACT)


@pytest.mark.parametrize("name", ["timm ViT", "timm SigLIP", "timm Swin", "HF ViT eager"])
def test_sensitivity_n_as_by_hand(name: str) -> None:
    images, maps, target = setting(name)
    model, grid = zoo.model(name), zoo.ZOO[name].grid
    shares = (0.1, 0.5)
    score = evaluate(model, images, maps, "sensitivity_n", target, shares=shares, subsets=6)
    drawn = draw(Trace(model, images), shares, 6, seed=0)  # [B 2·6 n]
    sizes = [max(1, round(share * grid[0] * grid[1])) for share in shares]
    assert (drawn.sum(-1) == torch.tensor(sizes).repeat_interleave(6)).all()
    assert not torch.equal(drawn[0], drawn[1])
    for i, (image, map) in enumerate(zip(images, maps)):
        run, cover = run_of(name, image, graded=False), oracles.mean_cover(image)
        sets = [torch.nonzero(one)[:, 0].tolist() for one in drawn[i]]
        for k in range(2):
            r = oracles.sensitivity(run, image, cover, map.flatten().tolist(), grid, sets[6 * k : 6 * k + 6])
            assert score.curve[i, k].item() == pytest.approx(r, abs=2e-3)
        assert score.value[i].item() == pytest.approx(score.curve[i].mean().item(), abs=1e-6)


@pytest.mark.parametrize("name", ["timm ViT", "timm Swin"])
def test_road_as_by_hand(name: str) -> None:
    images, maps, target = setting(name, 1)
    model, grid = zoo.model(name), zoo.ZOO[name].grid
    score = evaluate(model, images, maps, "road", target, shares=(0.1, 0.3), noise=0.0)
    patches = grid[0] * grid[1]
    counts = [-(-patches // 10), -(-3 * patches // 10)]
    curve = oracles.road(run_of(name, images[0]), images[0], maps[0].flatten().tolist(), grid, counts)
    np.testing.assert_allclose(score.curve[0], curve, **EXACT)
    assert score.value.item() == pytest.approx(np.mean(curve), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("timm ViT", "blocks.0"),
        ("timm DeiT distilled", "blocks.0"),
        ("timm BEiT", "blocks.0"),
        ("timm CaiT", "blocks.0"),
        ("timm SigLIP", "blocks.0"),
        ("torchvision ViT", "encoder.layers.encoder_layer_0"),
        ("HF ViT eager", None),
        ("HF DINOv2 sdpa", None),
    ],
)
def test_token_deletion_as_by_hand(name: str, block: str | None) -> None:
    images, maps, target = setting(name)
    model = zoo.model(name)
    block = block or Trace(model, images).layout.blocks[0]
    most, least = (evaluate(model, images, maps, "token_deletion", target, order=o, steps=4) for o in ("most", "least"))
    gain = evaluate(model, images, maps, "srg", target, steps=4)
    for i, (image, map) in enumerate(zip(images, maps)):
        run, values = run_of(name, image), map.flatten().tolist()
        curves = [
            oracles.token_deletion(run, zoo.network(name), block, image, values, zoo.ZOO[name].prefix, 4, way)
            for way in (True, False)
        ]
        for score, curve in zip((most, least), curves):
            np.testing.assert_allclose(score.curve[i], curve, **EXACT)
            area = oracles.trapezoid([0, 0.25, 0.5, 0.75], curve)
            assert score.value[i].item() == pytest.approx(area, abs=1e-5)
        assert gain.value[i].item() == pytest.approx(np.mean(curves[1]) - np.mean(curves[0]), abs=1e-5)


@pytest.mark.parametrize("name", ["timm Swin", "timm XCiT"])
def test_where_no_token_can_go_the_remedy_is_named(name: str) -> None:
    images, maps, target = setting(name)
    with pytest.raises(Unsupported, match=r"srg takes tokens out .*; use by=pixels"):
        evaluate(zoo.model(name), images, maps, "srg", target)
    with pytest.raises(Unsupported, match=r"token_deletion takes tokens out .*; use deletion"):
        evaluate(zoo.model(name), images, maps, "token_deletion", target)
    assert evaluate(zoo.model(name), images, maps, "srg", target, by="pixels", steps=2).value.isfinite().all()


# -------------------------------------------------------------------------------------------------------------- hiding


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("timm ViT", True),
        ("torchvision ViT", True),
        ("sequence first", True),
        ("timm Swin", False),
        ("flat heads", False),
    ],
)
def test_tokens_are_exchanged_where_that_is_the_same(name: str, local: bool) -> None:
    assert is_local(Trace(zoo.model(name), zoo.images(name))) is local


@pytest.mark.parametrize("name", ["timm ViT", "timm Swin"])
def test_variants_of_several_images_in_any_order(name: str) -> None:
    """Variant i is of image rows[i], with that image's own cover and target."""
    images = zoo.images(name)
    trace, grid = Trace(zoo.model(name), images), zoo.ZOO[name].grid
    rows = [2, 0, 1, 2, 2]
    hidden = torch.rand(5, *grid, generator=torch.Generator().manual_seed(0)) < 0.5
    cover = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    found = scores_hidden(trace, vitreous.Class((0, 1, 2)), rows, hidden, cover)
    for i, row in enumerate(rows):
        picture = oracles.covered(images[row], cover[row], hidden[i].flatten().nonzero()[:, 0].tolist(), grid)
        with torch.no_grad():
            assert found[i].item() == pytest.approx(zoo.model(name).run(picture[None])[0, row].item(), abs=1e-5)


def test_a_hooked_network_runs_to_its_end() -> None:
    """Who watches the network sees whole runs only."""
    net, seen = zoo.network("timm ViT"), []
    hooks = [
        net.patch_embed.register_forward_hook(lambda *_: seen.append("first")),
        net.head.register_forward_hook(lambda *_: seen.append("last")),
    ]
    try:
        images, maps, target = setting("timm ViT")
        evaluate(zoo.model("timm ViT"), images, maps, "deletion", target, steps=2)
    finally:
        for hook in hooks:
            hook.remove()
    assert seen.count("first") == seen.count("last") > 0


def test_insertion_starts_from_a_blurred_image() -> None:
    images, maps, _ = setting("timm ViT")
    trace = Trace(zoo.model("timm ViT"), images)
    score = evaluate(zoo.model("timm ViT"), images, maps, "insertion")
    blurred, whole = (
        trace.run(picture, Run.to_output()).output.softmax(-1)
        for picture in (baseline_images(trace, "blur", 0), images)
    )
    best = whole.argmax(-1, keepdim=True)
    np.testing.assert_allclose(score.curve[:, 0], blurred.gather(1, best)[:, 0], **EXACT)
    np.testing.assert_allclose(score.curve[:, -1], whole.gather(1, best)[:, 0], **EXACT)


# ------------------------------------------------------------------------------------------------------- imputed pixels


def test_one_missing_pixel_by_hand() -> None:
    image = np.arange(27, dtype=float).reshape(3, 3, 3) ** 2
    middle, corner = np.zeros((2, 3, 3), dtype=bool)
    middle[1, 1], corner[0, 0] = True, True
    a = image[0]
    beside, across = a[0, 1] + a[1, 0] + a[1, 2] + a[2, 1], a[0, 0] + a[0, 2] + a[2, 0] + a[2, 2]
    assert fill_in(image, middle)[0, 1, 1] == pytest.approx(beside / 6 + across / 12)
    near = (a[0, 1] / 6 + a[1, 0] / 6 + a[1, 1] / 12) / (1 / 6 + 1 / 6 + 1 / 12)
    assert fill_in(image, corner)[0, 0, 0] == pytest.approx(near)
    assert (fill_in(image, corner)[:, ~corner] == image[:, ~corner]).all()


def test_a_hole_in_a_slope_is_not_seen() -> None:
    y, x = np.mgrid[:20, :30].astype(float)
    image, hole = np.stack([y, x, 2 * y - 3 * x]), np.zeros((20, 30), dtype=bool)
    hole[4:15, 7:22] = True
    np.testing.assert_allclose(fill_in(image * ~hole, hole), image, atol=1e-9)


def test_imputed_as_by_hand() -> None:
    stream = np.random.default_rng(0)
    image, gone = stream.normal(size=(3, 14, 18)), stream.random((14, 18)) < 0.7
    gone[:5, :6] = True
    np.testing.assert_allclose(fill_in(image, gone), oracles.impute(image, gone), atol=1e-10)


# ---------------------------------------------------------------------------------------------------- the real network


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "which"), [("gae", 0), *rare(("gae", 1), ("attention", 0), ("attention", 1))])
def test_token_deletion_of_stored_maps(deit: vitreous.Model, oracle: Oracle, kind: str, which: int) -> None:
    """Three photographs at once, each with its own class."""
    targets = [oracle.targets(name)[which] for name in oracle.IMAGES]
    keys = [f"{name}/{target}" for name, target in zip(oracle.IMAGES, targets)]
    if kind == "gae":
        maps = np.stack([oracle("gae", f"{key}/gae") for key in keys])
    else:  # by the stored order: the first patch is the most relevant
        orders = [oracle("deletion", f"{key}/order_attention").astype(int) for key in keys]
        maps = np.stack([-np.argsort(order).reshape(14, 14).astype(np.float32) for order in orders])
    for order, way in (("most", "descending"), ("least", "ascending")):
        score = evaluate(deit, oracle.input(), maps, "token_deletion", targets, order=order)
        expected = [oracle("deletion", f"{key}/{kind}_{way}") for key in keys]
        for i, curve in enumerate(expected):
            assert off(score.curve[i], curve) < 5e-5
            area = oracles.trapezoid([step / 10 for step in range(10)], curve)
            assert score.value[i].item() == pytest.approx(area, abs=1e-5)


def test_srg_of_stored_maps(deit: vitreous.Model, oracle: Oracle) -> None:
    """The mean of the ascending minus the descending curve."""
    target = oracle.targets("pet1")[0]
    score = evaluate(deit, oracle.input("pet1"), oracle("gae", f"pet1/{target}/gae"), "srg", target)
    ways = [oracle("deletion", f"pet1/{target}/gae_{way}") for way in ("ascending", "descending")]
    assert score.value.item() == pytest.approx((ways[0] - ways[1]).mean(), abs=1e-5)


# -------------------------------------------------------------------------------------------------- what may be given

CHEAP: dict[str, dict[str, Any]] = {
    "deletion": {"steps": 4},
    "insertion": {"steps": 4},
    "sensitivity_n": {"shares": (0.2, 0.5), "subsets": 5},
    "road": {"shares": (0.4,)},
    "saco": {"groups": 3},  # of different sizes
    "srg": {"steps": 3},
    "token_deletion": {"steps": 3},
}


@pytest.mark.parametrize("metric", FAITHFUL)
def test_broken_and_constant_maps(metric: str) -> None:
    """A map that is not finite has no value; one value everywhere has a defined one; neither spoils the others."""
    images, maps, target = setting("timm ViT", 3)
    model = zoo.model("timm ViT")
    options = CHEAP.get(metric, {})
    alone = evaluate(model, images[2:], maps[2:], metric, target, **options)
    maps[0, 1, 1], maps[1] = torch.nan, 0.1
    score = evaluate(model, images, maps, metric, target, **options)
    assert score.value[0].isnan()
    assert torch.allclose(score.value[2:], alone.value, atol=1e-5)
    constant = {"saco": 0.0, "srg": 0.0, "road": 0.0, "sensitivity_n": math.nan}
    if metric in constant:
        assert score.value[1].item() == pytest.approx(constant[metric], abs=1e-6, nan_ok=True)
    if metric in ("deletion", "insertion", "token_deletion"):
        first = torch.arange(16, 0, -1.0).view(1, 4, 4)  # of equals, the first patch goes first
        by_place = evaluate(model, images[1:2], first, metric, target, **options)
        assert score.value[1].item() == pytest.approx(by_place.value.item(), abs=1e-5)


@pytest.mark.parametrize(("gain", "bias"), [(0.0, 0.0), (1e-3, 100.0)])
def test_drops_that_are_all_the_same_have_no_correlation(gain: float, bias: float) -> None:
    """A model that reads nothing of the image, or so little that the score's rounding hides it."""
    model, images = known(WEIGHTS, gain=gain), torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model.net.head.bias.data[0] = bias
    assert evaluate(model, images, WEIGHTS[None], "sensitivity_n", target=0).value.isnan().all()


@pytest.mark.parametrize("metric", FAITHFUL)
def test_pixel_maps_count_by_the_mean_of_each_patch(metric: str) -> None:
    images, maps, target = setting("timm ViT")
    stream = torch.Generator().manual_seed(0)
    fine = torch.randn(2, 4, 16, 4, 16, generator=stream)
    fine = (fine - fine.mean((2, 4), keepdim=True) + maps[:, :, None, :, None]).reshape(2, 64, 64)
    model, options = zoo.model("timm ViT"), CHEAP.get(metric, {})
    coarse, found = (evaluate(model, images, given, metric, target, **options) for given in (maps, fine))
    assert torch.allclose(coarse.value, found.value, atol=1e-5)


@pytest.mark.parametrize(
    ("metric", "name"), [(m, n) for m in FAITHFUL for n in ("timm ViT", "timm Swin") if not refused(m, n)]
)
def test_neighbours_and_memory_change_nothing(metric: str, name: str) -> None:
    images, maps, target = setting(name, 3)
    model, options = zoo.model(name), CHEAP.get(metric, {})
    together = evaluate(model, images, maps, metric, target, **options)
    with limit_memory(1):
        little = evaluate(model, images, maps, metric, target, **options)
    alone = [evaluate(model, images[i : i + 1], maps[i : i + 1], metric, target, **options) for i in range(3)]
    assert torch.allclose(together.value, little.value, atol=2e-5)
    assert torch.allclose(together.curve, little.curve, atol=2e-4)
    assert torch.allclose(together.value, torch.cat([one.value for one in alone]), atol=2e-5)


@pytest.mark.parametrize("metric", ["road", "sensitivity_n"])
def test_chance_is_drawn_from_the_seed(metric: str) -> None:
    images, maps, target = setting("timm ViT")
    options = CHEAP.get(metric, {}) | ({"noise": 0.5} if metric == "road" else {})
    one, same, other = (
        evaluate(zoo.model("timm ViT"), images, maps, metric, target, seed=seed, **options).value for seed in (0, 0, 1)
    )
    assert torch.allclose(one, same, atol=2e-5)
    assert not torch.allclose(one, other, atol=2e-5)


def test_other_targets_and_images_each_with_its_own() -> None:
    """Probabilities for classes and contrasts, scores for what is no class."""
    images, maps, _ = setting("timm ViT")
    model = zoo.model("timm ViT")
    with torch.no_grad():
        logits = model.run(images)
    p = logits.softmax(-1)
    for target, start in {
        (3, 5): torch.stack([p[0, 3], p[1, 5]]),
        "1-2": p[:, 1] - p[:, 2],
        "neuron:4": logits[:, 4],
    }.items():
        given = list(target) if isinstance(target, tuple) else target
        score = evaluate(model, images, maps, "deletion", given, steps=2)
        assert torch.allclose(score.curve[:, 0], start, atol=1e-5)


@pytest.mark.parametrize(
    ("metric", "wrong"),
    [
        ("deletion", {"steps": 0}),
        ("deletion", {"fill": "grey"}),
        ("sensitivity_n", {"shares": (0.5, 1.0)}),
        ("sensitivity_n", {"shares": ()}),
        ("road", {"shares": (0.0,)}),
        ("road", {"noise": -1.0}),
        ("saco", {"groups": 1}),
        ("srg", {"by": "patches"}),
    ],
)
def test_options_out_of_range_are_refused(metric: str, wrong: dict[str, Any]) -> None:
    images, maps, _ = setting("timm ViT")
    (option,) = wrong
    with pytest.raises(OptionError, match=f"{metric}.{option}"):
        evaluate(zoo.model("timm ViT"), images, maps, metric, **wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metric", FAITHFUL)
def test_half_precision(metric: str, dtype: torch.dtype) -> None:
    """A network in half precision is measured about as the same in single."""
    weights, images = scene(2)
    images = images.bfloat16().float()  # the same in every precision
    maps = truth(images, weights) + 0.1 * torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))
    found, single = (
        evaluate(known(weights, gain=30.0).to(kind), images, maps, metric, target=0, **CHEAP.get(metric, {}))
        for kind in (dtype, torch.float32)
    )
    assert found.value.dtype == torch.float32
    assert torch.allclose(found.value, single.value, atol=0.03)
    assert torch.allclose(found.curve, single.curve, atol=0.05)
