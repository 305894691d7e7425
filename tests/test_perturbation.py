"""Methods that change the image: the authors' numbers, each formula done slowly, and maps that memory cannot change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Oracle, off
from machine import rare
from oracles import occlusion as plain_occlusion
from oracles import rise as plain_rise
from oracles import token_ablation as plain_ablation
from oracles import vit_cx as plain_vit_cx
from torch import Tensor, nn
from torchvision.transforms.functional import gaussian_blur

import vitreous
from vitreous import Layout, Model, Trace
from vitreous._support.memory import limit_memory
from vitreous.errors import EmptyMap, OptionError, Unsupported
from vitreous.methods.perturbation import occlusion
from vitreous.methods.perturbation import vit_cx as masking
from vitreous.methods.perturbation.rise import draw
from vitreous.trace.perturb import hide_patches
from vitreous.trace.perturb.fills import stretch
from vitreous.trace.perturb.variant_runs import left_out, ways

FLOW = [name for name, entry in zoo.ZOO.items() if entry.flow and "ConViT" not in name]  # it takes no fewer tokens
SMALL_ZOO = [name for name in zoo.ZOO if "448" not in name]
SMALL_FLOW = [name for name in FLOW if "448" not in name]
CASES = [(name, which) for name in Oracle.IMAGES for which in (0, 1)]
METHODS = ("token_ablation", "occlusion", "rise", "vit_cx")
SMALL: dict[str, dict[str, Any]] = {"rise": {"masks": 20}}
UNIT = 2


def aim(name: str) -> Any:
    return f"neuron:{UNIT}" if zoo.model(name).classifier is False else UNIT


@cache
def exact(name: str) -> Model:
    """A tiny model in double precision: what falls is small beside what is left."""
    net = zoo.ZOO[name].make()
    net.load_state_dict(zoo.network(name).state_dict())
    return Model(net.double().eval(), name=name)


def pictures(name: str, count: int = 3) -> Tensor:
    return zoo.images(name, count).double()


def explained(model: Model, images: Tensor, method: str, target: Any = UNIT, **options: Any) -> Tensor:
    return vitreous.explain(model, images, method, target, **{**SMALL.get(method, {}), **options}).map


def scorer(model: Model, probability: bool = False) -> Callable[[Tensor], Tensor]:
    """The plain model's number for each image."""

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            output = model.run(images)
        return (output.softmax(-1) if probability else output)[:, UNIT]

    return run


# ------------------------------------------------------------------------------------------------ the authors' maps


@pytest.fixture(scope="module")
def double(deit: Model) -> Model:
    """The real network in double precision."""
    return Model(copy.deepcopy(deit.net).double())


@pytest.mark.parametrize(("image", "which"), [*CASES[:2], *rare(*CASES[2:])])
def test_vit_cx_oracle(deit: Model, oracle: Oracle, image: str, which: int) -> None:
    target = oracle.targets(image)[which]
    ours = vitreous.explain(deit, oracle.input(image), "vit_cx", target, noise=0.0)
    assert ours.notes["masks"].tolist() == [oracle("vitcx", f"{image}/any/n_masks")]
    assert off(ours.map[0], oracle("vitcx", f"{image}/{target}/map")) < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("image", Oracle.IMAGES)
def test_vit_cx_oracle_in_double_precision(double: Model, oracle: Oracle, image: str) -> None:
    target = oracle.targets(image)[0]
    ours = vitreous.explain(double, oracle.input(image), "vit_cx", target, noise=0.0)
    assert off(ours.map[0], oracle("vitcx", f"{image}/{target}/map")) < 1e-6


@pytest.mark.parametrize("image", Oracle.IMAGES)
def test_vit_cx_partition_oracle(deit: Model, oracle: Oracle, image: str) -> None:
    """Both the clusters and how near they are to others."""
    trace = Trace(deit, oracle.input(image))
    features = trace.to_patches(trace.cut().entry.detach()).movedim(-1, 1)[0].double()
    large = stretch(14, 224)
    single = masking.from_0_to_1(features, large, large)
    distances = masking.distances(single, large, large)
    labels = masking.clusters(distances, 0.1)
    assert partition(labels) == partition(oracle("vitcx", f"{image}/any/labels"))
    margin = float(oracle("vitcx", f"{image}/any/margin"))
    others = [len(partition(masking.clusters(distances, 0.1 + side * (margin + 1e-6)))) for side in (-1, 1)]
    assert min(others) < len(partition(labels)) or max(others) > len(partition(labels))


def partition(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == one).tolist()) for one in np.unique(labels)}


@pytest.mark.parametrize(("image", "which"), rare(("both", 0), ("dogbird", 1), ("pet1", 0)))
def test_token_ablation_oracle(deit: Model, oracle: Oracle, image: str, which: int) -> None:
    target = oracle.targets(image)[which]
    ours = explained(deit, oracle.input(image), "token_ablation", target)
    assert off(ours[0], oracle("token_ablation", f"{image}/{target}/tam")) < 3e-4


@pytest.mark.slow
def test_token_ablation_oracle_in_double_precision(double: Model, oracle: Oracle) -> None:
    target = oracle.targets("both")[0]
    ours = explained(double, oracle.input("both"), "token_ablation", target)
    assert off(ours[0], oracle("token_ablation", f"both/{target}/tam")) < 1e-6


@pytest.mark.slow
def test_real_occlusion_and_rise_find_the_animal(deit: Model, oracle: Oracle) -> None:
    """Dog above, cat below: what hides the dog harms the dog."""
    dog, cat = (slice(0, 8), slice(4, 10)), (slice(8, 14), slice(2, 13))
    image = oracle.input("both")
    rather = "{}-{}".format(*oracle.targets("both"))
    for method, options in (("occlusion", {"window": 3, "stride": 3}), ("rise", {"masks": 100})):
        map = explained(deit, image, method, rather, **options)
        patches = torch.nn.functional.adaptive_avg_pool2d(map - map.mean(), (14, 14))[0]
        assert patches[dog].mean() > 0 > patches[cat].mean()


# --------------------------------------------------------------------------------------------- tokens that are gone


class Pooled(nn.Module):
    """A ViT that ends in a pool of one's choice."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.pool, self.head = exact("timm ViT").net, pool, nn.Linear(32, zoo.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.body.forward_features(x)))


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "all tokens": lambda x: x.mean(1),
    "patches": lambda x: x[:, 1:].mean(dim=-2),
    "torch.mean": lambda x: torch.mean(x, dim=(1,)),
    "first and mean": lambda x: x[:, 0] + x[:, 1:].mean(1, keepdim=True)[:, 0],
}


@cache
def pooled(name: str) -> Model:
    return Model(Pooled(POOLS[name]).double().eval())


def slow_ablation(model: Model, images: Tensor, probability: bool = False) -> Tensor:
    layout = model.layout_at((images.shape[-2], images.shape[-1]))
    run = scorer(model, probability)
    return plain_ablation.falls(model.module, lambda: run(images), layout)


@pytest.mark.parametrize("name", zoo.thinned("token_ablation", SMALL_FLOW))
def test_token_ablation_takes_the_token_out(name: str) -> None:
    model, images = exact(name), pictures(name)
    expected = slow_ablation(model, images)
    assert expected.flatten(1).std(1).min() > 0
    assert off(explained(model, images, "token_ablation", aim(name)), expected) < 1e-6


@pytest.mark.parametrize("name", POOLS)
def test_a_mean_is_of_the_tokens_that_are_left(name: str) -> None:
    images = pictures("timm ViT")
    assert off(explained(pooled(name), images, "token_ablation"), slow_ablation(pooled(name), images)) < 1e-6


@pytest.mark.parametrize("sharp", [1.0, 40.0], ids=["soft", "sharp"])
def test_attention_without_one_token(sharp: float) -> None:
    """Also where a query looks at nothing but the token that is gone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 4, generator=generator) for _ in range(3))
    left = torch.tensor([0, 3, 8])
    ours = left_out(ways(q * sharp, k, v, None), left)
    for one, gone in zip(ours, left.tolist(), strict=True):
        others = [token for token in range(9) if token != gone]
        rest = (q * sharp).double(), k[:, :, others].double(), v[:, :, others].double()
        assert off(one, F.scaled_dot_product_attention(*rest)[0].float()) < 2e-6


@pytest.mark.parametrize("name", ["timm ViT", "timm BEiT", "HF ViT eager"])
def test_token_ablation_of_the_probability(name: str) -> None:
    model, images = exact(name), pictures(name)
    ours = explained(model, images, "token_ablation", of="probability")
    assert off(ours, slow_ablation(model, images, probability=True)) < 1e-6
    assert off(ours, explained(model, images, "token_ablation")) > 0.1


class InPlace(zoo.Block):
    """A block that writes into the tokens it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x) - x
        return x


class Convolved(zoo.Block):
    """A block that also mixes neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.near(x.mT).mT)


def of_blocks(block: type[zoo.Block]) -> Model:
    torch.manual_seed(1)
    net = zoo.HandWritten()
    net.second, net.third = block(), block()
    return Model(net.eval(), name="odd-vit")


def test_a_model_may_write_into_its_tokens() -> None:
    """The sequence that all variants share stays as it is."""
    model, images = of_blocks(InPlace), zoo.images("hand-written")
    assert off(explained(model, images, "token_ablation"), slow_ablation(model, images)) < 1e-4
    plain = plain_occlusion.falls(scorer(model), images, images.mean((2, 3), True).expand_as(images), (4, 4), (16, 16))
    assert off(explained(model, images, "occlusion"), plain) < 1e-4


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: of_blocks(Convolved), id="convolution"),
        pytest.param(lambda: Model(Pooled(lambda x: x[:, 1:].amax(1)).double().eval(), name="max-vit"), id="maximum"),
        pytest.param(lambda: Model(Pooled(lambda x: x.sum(1) / x.shape[1]).double().eval(), name="sum-vit"), id="sum"),
    ],
)
def test_tokens_that_are_read_otherwise_cannot_be_taken_away(model: Callable[[], Model]) -> None:
    one, images = model(), zoo.images("timm ViT")
    with pytest.raises(Unsupported, match=r"-vit uses its tokens in other ways .* Try occlusion"):
        explained(one, images, "token_ablation")
    assert explained(one, images, "occlusion").isfinite().all()


# ------------------------------------------------------------------------------------------------- what hides pixels


def cover_of(images: Tensor, fill: str) -> Tensor:
    if fill == "blur":
        sigma = images.shape[-1] / 16
        side = 2 * int(2 * sigma) + 1
        return gaussian_blur(images, [side, side], [sigma, sigma])
    return images.mean((2, 3), keepdim=True).expand_as(images) if fill == "mean" else torch.zeros_like(images)


def slow_occlusion(name: str, fill: str = "mean", probability: bool = False, **options: int) -> Tensor:
    model, images, entry = exact(name), pictures(name), zoo.ZOO[name]
    patch = (entry.size[0] // entry.grid[0], entry.size[1] // entry.grid[1])
    run = scorer(model, probability)
    return plain_occlusion.falls(run, images, cover_of(images, fill), entry.grid, patch, **options)


@pytest.mark.parametrize("name", zoo.thinned("occlusion", SMALL_ZOO))
def test_occlusion_paints_each_patch(name: str) -> None:
    assert off(explained(exact(name), pictures(name), "occlusion", aim(name)), slow_occlusion(name)) < 1e-6


@pytest.mark.parametrize("name", ["timm ViT", "flat heads", "sequence first"])
@pytest.mark.parametrize(
    "options",
    [
        {"fill": "zero"},
        {"fill": "blur"},
        {"window": 2},
        {"window": 3, "stride": 2},
        {"window": 2, "stride": 2, "fill": "blur"},
        {"window": 4},
    ],
    ids=str,
)
def test_occlusion_options(name: str, options: dict[str, Any]) -> None:
    ours = explained(exact(name), pictures(name), "occlusion", aim(name), **options)
    assert off(ours, slow_occlusion(name, **options)) < 1e-6


def test_occlusion_of_the_probability() -> None:
    ours = explained(exact("timm ViT"), pictures("timm ViT"), "occlusion", of="probability")
    assert off(ours, slow_occlusion("timm ViT", probability=True)) < 1e-6


def test_windows_leave_no_gaps_and_end_at_the_border() -> None:
    assert occlusion.spans(5, 2, 2).int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert occlusion.spans(3, 3, 1).int().tolist() == [[1, 1, 1]]
    assert occlusion.all_windows((4, 9), 3, 2).any(0).all()
    assert occlusion.all_windows((2, 6), 5, 5).shape == (2, 2, 6), "a window is never larger than the grid"
    with pytest.raises(OptionError, match="stride=3 leaves gaps between windows of 2"):
        explained(exact("timm ViT"), pictures("timm ViT"), "occlusion", window=2, stride=3)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each run of a model is given."""
    sizes: list[int] = []
    plain = Model.run

    def run(self: Model, images: torch.Tensor, *given: Any) -> torch.Tensor:
        sizes.append(len(images))
        return plain(self, images, *given)

    monkeypatch.setattr(Model, "run", run)
    return sizes


@pytest.mark.parametrize("name", [n for n in FLOW if n not in ("flat heads", "timm ViT 224×448", "torch.compile")])
def test_occlusion_on_tokens_is_occlusion_on_pixels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches that are embedded each on its own are embedded once; both ways give the same map."""
    model, images = exact(name), pictures(name)[:1]
    explained(model, images, "occlusion", aim(name))
    sizes = counting(monkeypatch)
    on_tokens = explained(model, images, "occlusion", aim(name))
    assert max(sizes) == 1
    monkeypatch.setattr(hide_patches, "known", lambda *_: False)
    on_pixels = explained(model, images, "occlusion", aim(name))
    assert max(sizes) == 16
    assert off(on_tokens, on_pixels) < 1e-6


class Stem(zoo.HandWritten):
    """Patches that see their neighbours before the first block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + nn.functional.avg_pool2d(x, 3, 1, 1))


class Aside(zoo.HandWritten):
    """A model that looks at the image once more, past its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.square().mean((1, 2, 3))[:, None]


class Counted(zoo.HandWritten):
    """A model that counts its images before it looks at them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.zeros(len(x), 1).expand(len(x), zoo.CLASSES)


@pytest.mark.parametrize("kind", [Stem, Aside, Counted])
def test_occlusion_where_tokens_do_not_tell_all(kind: type[nn.Module]) -> None:
    torch.manual_seed(2)
    model, images = Model(kind().eval(), classifier=True), zoo.images("hand-written")
    plain = plain_occlusion.falls(scorer(model), images, cover_of(images, "mean"), (4, 4), (16, 16))
    assert off(explained(model, images, "occlusion"), plain) < 1e-4


def test_occlusion_with_a_layout_given_by_hand() -> None:
    """Without a patch size, it follows from the grid; what is left over belongs to the last patches."""
    net = exact("timm ViT").net
    given = Model(net, layout=Layout((4, 4), prefix=1))
    ours = explained(given, pictures("timm ViT"), "occlusion")
    assert off(ours, explained(exact("timm ViT"), pictures("timm ViT"), "occlusion")) < 1e-6
    trace = Trace(given, pictures("timm ViT"))
    trace.layout = Layout((3, 3))
    hidden = hide_patches.pixels_of(trace, torch.eye(9, dtype=torch.bool).reshape(9, 3, 3))
    assert hidden.sum(0).eq(1).all(), "every pixel belongs to one patch"
    assert hidden[8, 0, 42:, 42:].all()


# ----------------------------------------------------------------------------------------------------- random masks


@pytest.mark.parametrize("name", zoo.thinned("rise", SMALL_ZOO))
def test_rise_mask_by_mask(name: str) -> None:
    model, images = exact(name), pictures(name)[:2]
    ours = explained(model, images, "rise", aim(name), masks=12)
    for image, stream, map in zip(images[:, None], Trace(model, images).generators(0), ours, strict=True):
        cells, shifts = draw(stream, 12, 7, 0.5, zoo.ZOO[name].size)
        expected = plain_rise.mean_score(scorer(model), image, torch.zeros_like(image), cells, shifts)
        assert off(map, expected) < 1e-6


@pytest.mark.parametrize(("name", "fill"), [("timm ViT 224×448", "mean"), ("timm ViT", "blur")])
def test_rise_options(name: str, fill: str) -> None:
    model, image = exact(name), pictures(name, 1)
    ours = explained(model, image, "rise", masks=5, cells=4, keep=0.7, fill=fill, of="probability", seed=3)
    drawn = draw(Trace(model, image).generators(3)[0], 5, 4, 0.7, zoo.ZOO[name].size)
    expected = plain_rise.mean_score(scorer(model, probability=True), image, cover_of(image, fill), *drawn)
    assert off(ours[0], expected) < 1e-6


def test_rise_masks_are_random_cells_and_shifts() -> None:
    cells, shifts = draw(torch.Generator().manual_seed(0), 4000, 7, 0.3, (224, 100))
    assert cells.float().mean((0, 1, 2)).item() == pytest.approx(0.3, abs=0.01)
    assert shifts[:, 0].unique().tolist() == list(range(32)), "a cell has 32 of 224 pixels"
    assert shifts[:, 1].unique().tolist() == list(range(15))


def test_seeds_give_other_masks_and_other_noise() -> None:
    model, images = exact("timm ViT"), pictures("timm ViT")
    for method in ("rise", "vit_cx"):
        assert off(explained(model, images, method, seed=1), explained(model, images, method)) > 1e-4


# ----------------------------------------------------------------------------------------------- masks from features


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", zoo.thinned("vit_cx"))
def test_vit_cx_step_by_step(name: str, noise: float) -> None:
    model, images, classifier = exact(name), pictures(name)[:1], exact(name).classifier is not False
    threshold = 0.08 if name in ("timm Swin", "timm ViT 224×448") else 0.25
    trace = Trace(model, images)
    features = trace.to_patches(trace.batch_first(trace.cut().entry.detach())).movedim(-1, 1)
    ours = vitreous.explain(model, images, "vit_cx", aim(name), noise=noise, threshold=threshold)
    for b, stream in enumerate(trace.generators(0)):
        image, hides = images[b : b + 1], noise * torch.randn(images.shape[1:], generator=stream)
        run = scorer(model, probability=classifier)
        expected, groups = plain_vit_cx.saliency(run, image, features[b], hides, threshold)
        assert ours.notes["masks"][b] == len(groups)
        assert 1 < len(groups) < features.shape[1]
        assert off(ours.map[b], expected) < 1e-6


def test_vit_cx_of_a_concept_is_of_its_score() -> None:
    """What has no probability is taken as it is."""
    model, images = exact("timm ViT"), pictures("timm ViT")
    score, chance = (explained(model, images, "vit_cx", target) for target in (f"neuron:{UNIT}", UNIT))
    assert off(score, chance) > 0.1
    mixed = explained(model, images, "vit_cx", [f"neuron:{UNIT}", UNIT, UNIT])
    assert off(mixed, torch.stack([score[0], chance[1], chance[2]])) < 1e-6


def test_channels_that_say_nothing_make_no_mask() -> None:
    large = stretch(7, 50)
    one = torch.rand(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flat = (torch.arange(40, dtype=torch.float64) / 7)[:, None, None].expand(
        -1, 7, 7
    )  # enlarged, not all are quite flat
    maps = torch.cat([flat, torch.stack([one, 5 * one - 3])])
    (mask,) = masking.merged(maps, large, large, 0.1)
    full = large @ mask @ large.mT
    assert full.min().item() == pytest.approx(0, abs=1e-12)
    assert full.max().item() == pytest.approx(1)
    assert masking.merged(flat, large, large, 0.1).shape == (0, 7, 7)


def test_an_image_without_any_mask_has_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trace, "to_patches", lambda self, tokens: torch.ones(len(tokens), 4, 4, 8))
    with pytest.raises(EmptyMap, match=r"vit_cx: the map is zero everywhere \(image 0"):
        vitreous.explain(exact("timm ViT"), pictures("timm ViT"), "vit_cx", UNIT)


def test_vit_cx_runs_each_mask_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = exact("timm ViT"), pictures("timm ViT")[:1]
    sizes = counting(monkeypatch)
    for noise, times in ((0.1, 2), (0.0, 1)):
        sizes.clear()
        ours = vitreous.explain(model, image, "vit_cx", UNIT, noise=noise)
        assert sum(sizes) == times * ours.notes["masks"][0] + 1


# ------------------------------------------------------------------------------------------------- memory and batches


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["timm ViT", "flat heads"])
def test_maps_do_not_depend_on_memory(method: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = exact(name), pictures(name)
    free = explained(model, images, method)
    sizes = counting(monkeypatch)
    with limit_memory("1"):
        assert off(explained(model, images, method), free) < 1e-6
    assert max(sizes) == 1, "one at a time"


@pytest.mark.parametrize("method", METHODS)
def test_targets_and_maps_are_each_images_own(method: str) -> None:
    model, images = exact("timm ViT"), pictures("timm ViT")
    together = explained(model, Trace(model, images), method, [3, 4, "5-6"])
    for i, target in enumerate((3, 4, "5-6")):
        assert off(explained(model, images[i : i + 1], method, target)[0], together[i]) < 1e-6
    best = Trace(model, images).output.argmax(-1).tolist()
    assert off(explained(model, images, method, None), explained(model, images, method, best)) < 1e-6


class Tight(nn.Module):
    """A part of a network that finds memory for a few images only."""

    def __init__(self, part: nn.Module, most: int) -> None:
        super().__init__()
        self.part, self.most, self.asked = part, most, []

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return self.part(x)


@pytest.mark.parametrize("method", METHODS)
def test_where_memory_runs_out_batches_are_halved(method: str) -> None:
    images = pictures("timm ViT")[:1]
    net = copy.deepcopy(exact("timm ViT").net)
    net.head = Tight(net.head, 5)
    model = Model(net)
    Trace(model, images)
    expected = explained(exact("timm ViT"), images, method)
    assert off(explained(model, images, method), expected) < 1e-6
    checks = 5  # images in the run that finds out whether tokens can be left out
    asked = [count for count in net.head.asked if count > 3 and count != checks]
    first, second, *rest = asked
    assert first >= 16 and second == first // 2 and set(rest) <= {second // 2, 4, 5}, "half as many, and half of these"


@pytest.mark.parametrize("method", METHODS)
def test_memory_for_not_even_one_is_an_error(method: str) -> None:
    net = copy.deepcopy(exact("timm ViT").net)
    net.head = Tight(net.head, 9)
    model, images = Model(net), pictures("timm ViT")[:1]
    trace = Trace(model, images)
    explained(model, trace, method)
    net.head.most = 0
    trace.ends.clear()
    with pytest.raises(torch.OutOfMemoryError):
        explained(model, trace, method)
    assert net.head.asked[-1] == 1
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "vit_cx"])
def test_probabilities_need_classes(method: str) -> None:
    """Not for vit_cx, which has no choice and takes the score of what has no probability (see above)."""
    with pytest.raises(OptionError, match="of=probability needs a class"):
        explained(exact("timm ViT"), pictures("timm ViT"), method, "neuron:1", of="probability")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["timm ViT", "timm DINOv3", "torchvision ViT"])
def test_mixed_precision_of_the_caller(method: str, name: str) -> None:
    """Under autocast the model runs in bfloat16 where torch says so; the maps stay float32 and alike."""
    model, images = zoo.model(name), zoo.images(name, 1)
    options = {"rise": {"masks": 8}, "vit_cx": {"noise": 0}}.get(method, {})
    plain = vitreous.explain(model, images, method, 1, **options).map
    with torch.autocast("cpu", torch.bfloat16):
        mixed = vitreous.explain(model, images, method, 1, **options).map
    assert mixed.dtype == torch.float32
    assert not torch.equal(mixed, plain), "it did run in another precision"
    if vitreous.METHODS[method].level:  # scores, which hardly differ from patch to patch
        assert off(mixed, plain) < 0.05
    else:
        assert torch.corrcoef(torch.stack([plain.flatten(), mixed.flatten()]))[0, 1] > 0.9
