"""The Libra gradient: the authors' numbers, a second implementation in plain autograd, and what must hold."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import Oracle, off
from machine import DIFFERENCES, ROUNDING, rare
from oracles import libra as plain_libra
from oracles import lrp as plain_lrp
from test_lrp import aim, deit64, entering, exact, goal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import vitreous
from vitreous import METHODS, Model, Trace
from vitreous.errors import OptionError, Unsupported
from vitreous.methods.lrp.contributions import contributions
from vitreous.methods.lrp.propagate import image_relevance, token_relevance
from vitreous.trace.last_block import narrowing
from vitreous.trace.ruled import Ruled, received, ruled, token_grads
from vitreous.trace.rules.gradient import CP_LRP
from vitreous.trace.rules.libra import LIBRA
from vitreous.trace.target import Class

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
counting = importlib.import_module("counting")
__all__ = ["deit64"]  # a fixture

Options = dict[str, Any]
LIBRA_RULES: Options = {"rules": "libra"}
BLOCK: Options = {"at": "block"}
ALL: Options = {"at": "block", "layers": "all"}
NORM: Options = {"at": "norm", "rules": "libra"}

# ------------------------------------------------------------------------------------------------ the authors' maps

Known = tuple[str, str, str, Options, float]  # file, variant, method, options, tolerance in float32
ORACLES: list[Known] = [
    ("libra", "fullgrad_plus", "libra_fullgrad", {}, 1e-4),
    ("libra", "fullgrad_plus_bias", "libra_fullgrad", {"bias": True}, 1e-4),
    ("libra", "attcat", "attcat", {"rules": "libra", "tokens": "leaving"}, 1e-4),
    ("attcat", "attcat", "attcat", {}, 1e-3),
    ("attcat", "attcat_block_output", "attcat", {"tokens": "leaving"}, 1e-3),
    ("libra", "gae", "gae", LIBRA_RULES, 1e-4),
    ("libra", "input_x_gradient", "input_x_gradient", {"rules": "libra", "wrt": "tokens"}, 1e-4),
    ("libra", "plain_input_x_gradient", "input_x_gradient", {"wrt": "tokens"}, 1e-3),
    ("libra", "hirescam", "hirescam", {}, 4e-4),
    ("libra", "gradcam", "gradcam", BLOCK | LIBRA_RULES, 4e-4),
    ("libra", "gradcam_plus", "gradcam", ALL | LIBRA_RULES, 4e-4),
    ("libra", "xgradcam", "xgradcam", LIBRA_RULES, 4e-4),
    ("libra", "xgradcam_plus", "xgradcam", ALL | LIBRA_RULES, 4e-4),
    ("libra", "plain_gradcam", "gradcam", BLOCK, 1e-3),
    ("libra", "plain_gradcam_plus", "gradcam", ALL, 1e-3),
    ("libra", "plain_xgradcam", "xgradcam", {}, 1e-3),
    ("libra", "plain_xgradcam_plus", "xgradcam", {"layers": "all"}, 1e-3),
    ("libra", "gradcam_norm1", "gradcam", NORM, 4e-4),
    ("libra", "xgradcam_norm1", "xgradcam", NORM, 4e-3),
    ("libra", "hirescam_norm1", "hirescam", NORM, 4e-4),
]


FEW = [ORACLES[0], ORACLES[3], ORACLES[5], ORACLES[12]]


def test_some_oracles(deit: Model, oracle: Oracle) -> None:
    check_oracles(deit, oracle, "both", 1, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("image", Oracle.IMAGES)
@pytest.mark.parametrize("double", [False, True])
def test_oracles(deit: Model, deit64: Model, oracle: Oracle, image: str, double: bool) -> None:
    check_oracles(deit64 if double else deit, oracle, image, 2, ORACLES)


def check_oracles(model: Model, oracle: Oracle, image: str, count: int, known: list[Known]) -> None:
    trace = Trace(model, oracle.input(image).to(model.dtype))
    for target in oracle.targets(image)[:count]:
        for file, variant, method, options, limit in known:
            ours = vitreous.explain(model, trace, method, target, **options).map[0]
            limit = 2e-7 if model.dtype is torch.float64 else limit
            assert off(ours, oracle(file, f"{image}/{target}/{variant}")) < limit, (target, variant)


@pytest.mark.slow
def test_probabilities(deit64: Model, oracle: Oracle) -> None:
    """The authors differentiate the probability."""
    trace = Trace(deit64, oracle.input("both").double())
    target = oracle.targets("both")[0]
    probable = Class(target).graded()
    for variant, run in [
        ("fullgrad_plus", lambda: METHODS["libra_fullgrad"].run(trace, probable)),
        ("attcat", lambda: METHODS["attcat"].run(trace, probable, rules="libra", tokens="leaving")),
        ("gae", lambda: METHODS["gae"].run(trace, probable, rules="libra")),
    ]:
        with torch.no_grad():
            assert off(run()[0].float(), oracle("libra", f"both/{target}/prob_{variant}")) < 2e-7, variant


# ---------------------------------------------------------------------------------------------------- conservation


@pytest.mark.slow
@pytest.mark.parametrize("image", Oracle.IMAGES)
def test_tokens_and_biases_sum_to_the_logit(deit64: Model, oracle: Oracle, image: str) -> None:
    trace = Trace(deit64, oracle.input(image).double())
    for target in oracle.targets(image):
        parts = contributions(trace, Class(target))
        logit = float(oracle("libra", f"{image}/{target}/logit_f64"))
        assert abs(parts.score - logit) < 1e-10
        assert max(abs(parts.error(layer)) for layer in range(12)) < 1e-10
        without = parts.pairs[0][0] * parts.pairs[0][1]
        assert abs(float(without.sum()) - logit) > 0.1, "it is the biases that make it complete"


NO_DOUBLE = ("torch.compile", "timm ConViT")  # as they are, not in double precision
FLOW = [name for name, entry in zoo.ZOO.items() if entry.flow and entry.blocks and name not in NO_DOUBLE]


@pytest.mark.parametrize("name", zoo.thinned("contributions", FLOW))
def test_complete_on_every_model(name: str) -> None:
    """From every block on, with all that networks add: position embeddings, q and v biases, pools."""
    model = Model(exact(zoo.network(name)), name=name, classifier=zoo.model(name).classifier)
    trace = Trace(model, zoo.images(name, 1).double())
    parts = contributions(trace, goal(name))
    with torch.no_grad():
        expected = float(model.run(zoo.images(name, 1).double())[0, 2])
    assert abs(parts.score - expected) < 1e-9
    size = max(parts.size(), 1.0)
    assert max(abs(parts.error(layer)) for layer in range(3 if "448" not in name else 2)) < 1e-10 * size


class Odd(nn.Module):
    """A block that adds constants in ways of its own."""

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.add, self.shift = zoo.Block(), add, nn.Parameter(torch.randn(17, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.add(x, self.shift))


class OddNet(nn.Module):
    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.cls = nn.Conv2d(3, 32, 16, 16), nn.Parameter(torch.randn(1, 1, 32))
        self.blocks = nn.ModuleList(Odd(add) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, zoo.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.cut(x).flatten(2).mT], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


ODD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, c: x + c,
    "in place": lambda x, c: x.add_(c),
    "from": lambda x, c: c - x,
    "number": lambda x, c: x + 0.5,
    "alpha": lambda x, c: torch.sub(x, c, alpha=0.3),
    "where": lambda x, c: torch.where(c > 0, x, c),
    "cat": lambda x, c: torch.cat([x[..., :-1], c[:, -1:].expand(len(x), -1, -1)], -1),
}


@pytest.mark.parametrize("kind", ODD)
def test_constants_of_any_kind(kind: str) -> None:
    model = Model(OddNet(ODD[kind]).double().eval(), classifier=True)
    images = zoo.images("timm ViT", 2).double()
    parts = contributions(Trace(model, images[:1]), Class(1))
    assert max(abs(parts.error(layer)) for layer in range(3)) < 1e-11
    maps = vitreous.explain(model, images, "libra_fullgrad", 1, bias=True).map
    alone = vitreous.explain(model, images[:1], "libra_fullgrad", 1).map
    assert off(maps[:1], alone) > 1e-2, "biases matter"


def test_no_biases_where_the_sum_is_incomplete() -> None:
    """A gate with its plain gradient does not conserve."""
    net = nn.Sequential(OddNet(ODD["add"]), nn.Sigmoid()).eval()
    model, images = Model(net, classifier=True, name="gated"), zoo.images("timm ViT", 1)
    with pytest.warns(UserWarning, match="sigmoid"), pytest.raises(Unsupported, match="do not sum to its score"):
        vitreous.explain(model, images, "libra_fullgrad", 1, bias=True)
    assert vitreous.explain(model, images, "libra_fullgrad", 1).map.any()


def test_biases_that_belong_to_no_token_are_refused() -> None:
    model, images = zoo.model("timm XCiT"), zoo.images("timm XCiT", 1)
    with pytest.raises(Unsupported, match=r"cannot be matched with its tokens. Try bias=False"):
        vitreous.explain(model, images, "libra_fullgrad", 1, bias=True)


# ------------------------------------------------------------------------------------------ in plain autograd


@pytest.mark.parametrize("name", zoo.thinned("plain libra", plain_lrp.READERS))
def test_plain_second_implementation(name: str) -> None:
    model = Model(exact(zoo.network(name)), name=name, classifier=zoo.model(name).classifier)
    images = zoo.images(name, 2).double()
    net, tokens, layout = plain_lrp.read(name, model.net), entering(model, images), model.layout_at((64, 64))
    expected: dict[str, tuple[Options, Callable[[Tensor], Tensor]]] = {
        "libra_fullgrad": ({}, lambda t: plain_libra.fullgrad(net, t, 2)),
        "gae": (LIBRA_RULES, lambda t: plain_libra.gae(net, t, 2)),
        "grad_rollout": (LIBRA_RULES, lambda t: plain_libra.grad_rollout(net, t, 2)),
        "legrad": (LIBRA_RULES, lambda t: plain_libra.legrad(net, t, 2)),
        "attcat": (
            {"rules": "libra", "baseline": "mean"},
            lambda t: plain_libra.attcat(net, t, 2, False, layout.patch_tokens),
        ),
    }
    for method, (options, formula) in expected.items():
        ours = vitreous.explain(model, images, method, aim(name), **options).map
        theirs = layout.to_map(torch.stack([formula(t) for t in tokens]).detach())
        assert off(ours, theirs) < 1e-6, method
    ours = vitreous.explain(model, images, "attcat", aim(name), rules="libra", tokens="leaving").map
    theirs = layout.to_map(torch.stack([plain_libra.attcat(net, t, 2, True) for t in tokens]).detach())
    assert off(ours, theirs) < 1e-6


def test_the_last_block_is_left_in_full_where_patches_are_read_behind_it() -> None:
    """attcat of the tokens that leave the last block, where the mean of the patches is read."""
    model, images = zoo.model("timm ViT no CLS"), zoo.images("timm ViT no CLS", 2)
    trace = Trace(model, images)
    with torch.no_grad():
        found = ruled(trace, None)
        pairs = token_grads(trace, found, Class(1), found.leaving)
        parts = [share * (h * grad).sum(-1) for share, (h, grad) in zip(received(trace, found), pairs)]
    assert len(parts) == 3 and parts[-1].abs().max() > 1e-3
    ours = vitreous.explain(model, trace, "attcat", 1, tokens="leaving").map
    assert off(ours, sum(parts).view(2, 4, 4)) <= ROUNDING


def test_attention_of_all_queries_is_received_also_in_a_narrowed_block() -> None:
    trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT"))
    assert narrowing(trace, fold=False) is not None
    found = ruled(trace, LIBRA)
    assert found.narrowed
    whole = [layer.weights.mean((1, 2)) for layer in trace.attention]
    for share, expected in zip(received(trace, found), whole, strict=True):
        assert off(share.detach(), expected.detach()) <= ROUNDING
        assert torch.allclose(share.sum(1), torch.ones(3), atol=1e-5)


# ----------------------------------------------------------------------------------------------- rules and options


@pytest.mark.parametrize("name", ["timm ViT", "torchvision ViT"])
def test_it_is_the_relevance_of_cp_lrp(name: str) -> None:
    model = Model(exact(zoo.network(name)), name=name)
    trace = Trace(model, zoo.images(name).double())
    for wrt in ("image", "tokens"):
        ours = vitreous.explain(model, trace, "input_x_gradient", 2, rules="libra", wrt=wrt).map
        assert off(ours, vitreous.explain(model, trace, "cp_lrp", 2, wrt=wrt).map) < 1e-5, wrt
    ours, theirs = (token_relevance(trace, Class(2), table) for table in (LIBRA, CP_LRP))
    assert off(ours, theirs) < 1e-6
    assert off(image_relevance(trace, Class(2), None).sum(1), shipped_input_x_gradient(trace)) < 1e-6


def shipped_input_x_gradient(trace: Trace) -> Tensor:
    x = trace.images.clone().requires_grad_()
    (grad,) = torch.autograd.grad(trace.model.net(x)[:, 2].sum(), x)
    return (x.detach() * grad).sum(1)


def test_gradcam_by_default_is_that_of_the_patches_before_the_last_attention() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    trace = Trace(model, images)
    with torch.no_grad():
        tokens, grad = trace.entry_grad(Class(1))
        weight = trace.to_patches(grad).mean((1, 2))
        expected = torch.einsum("bhwd,bd->bhw", trace.to_patches(tokens), weight)
    assert torch.equal(vitreous.explain(model, trace, "gradcam", 1).map, expected)


@pytest.mark.parametrize(
    ("method", "options"),
    [("gradcam", {}), ("gradcam", ALL), ("xgradcam", {}), ("hirescam", {}), ("hirescam", {"layers": "all"})],
)
def test_a_baseline_is_subtracted_from_the_tokens_alone(method: str, options: Options) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    zero = vitreous.explain(model, images, method, 1, **options).map
    mean = vitreous.explain(model, images, method, 1, **options, baseline="mean").map
    assert off(zero, mean) > 1e-2
    if method != "hirescam":  # one weight per channel: the baseline is a constant for each image
        shift = (zero - mean).flatten(1)
        assert float((shift.amax(1) - shift.amin(1)).max()) < 1e-5 * float(zero.abs().max())
        assert mean.mean((1, 2)).abs().max() < 1e-6


def test_what_cannot_be_asked_for() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    for method in ("gradcam", "xgradcam", "hirescam"):
        with pytest.raises(OptionError, match="layers=all works with at=block only"):
            vitreous.explain(model, images, method, 1, at="norm", layers="all")
        with pytest.raises(OptionError, match="layer 3 is out of range"):
            vitreous.explain(model, images, method, 1, layer=3, at="block")


@pytest.mark.parametrize("name", ["timm ViT", "HF DINOv3 eager"])
def test_hirescam_refuses_the_plain_gradient_where_it_is_zero(name: str) -> None:
    model, images, target = zoo.model(name), zoo.images(name), aim(name)
    with pytest.raises(Unsupported, match=r"tokens and gradients are orthogonal. Use rules=libra, or at=norm"):
        vitreous.explain(model, images, "hirescam", target, rules="plain")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(Unsupported, match="orthogonal"):
        vitreous.explain(model, images, "hirescam", target, rules="plain")
    for options in ({"at": "norm"}, {"baseline": "mean"}, {"layer": 0}):
        assert vitreous.explain(model, images, "hirescam", target, rules="plain", **options).map.any()


def test_hirescam_takes_the_plain_gradient_where_patches_are_read() -> None:
    model, images = zoo.model("timm ViT no CLS"), zoo.images("timm ViT no CLS")
    trace = Trace(model, images)
    ours = vitreous.explain(model, trace, "hirescam", 1, rules="plain").map
    with torch.no_grad():
        found = ruled(trace, None)
        ((h, grad),) = token_grads(trace, found, Class(1), found.entering[-1:])
    assert off(ours, (h * grad).sum(-1).view(3, 4, 4)) <= ROUNDING


@pytest.mark.parametrize("method", ["libra_fullgrad", "xgradcam"])
def test_merged_tokens_are_not_summed(method: str) -> None:
    model, images = zoo.model("timm Swin"), zoo.images("timm Swin", 1)
    options = {} if method == "libra_fullgrad" else {"layers": "all"}
    with pytest.raises(Unsupported, match="merges its tokens on the way"):
        vitreous.explain(model, images, method, 1, **options)


class Outside(nn.Module):
    """Blocks whose residual is added outside of them, so that tokens bypass them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut = nn.Conv2d(3, 32, 16, 16)
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(3))
        self.head = nn.Linear(32, zoo.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).mT
        for block in self.blocks:
            x = x + block(x / 2)
        return self.head(x.mean(1))


@pytest.mark.parametrize("method", ["libra_fullgrad", "attcat", "xgradcam", "hirescam"])
def test_tokens_that_bypass_the_blocks_are_refused(method: str) -> None:
    model = Model(Outside().eval(), classifier=True, name="outside")
    with pytest.raises(Unsupported, match="outside does not pass its tokens from block to block"):
        vitreous.explain(model, zoo.images("timm ViT"), method, 1)


def test_blocks_may_change_their_input() -> None:
    """What entered is noted before."""
    images = zoo.images("timm ViT")
    for method, options in [("libra_fullgrad", {}), ("attcat", {}), ("attcat", {"tokens": "leaving"})]:
        ours, theirs = (
            vitreous.explain(Model(OddNet(ODD[kind]).eval(), classifier=True), images, method, 1, **options).map
            for kind in ("in place", "add")
        )
        assert off(ours, theirs) <= DIFFERENCES


class Gridded(nn.Module):
    """A block that takes tokens as [B h w D], or with the channels first."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.block, self.first = zoo.Block(), first

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, -1) if self.first else x
        x = self.block(x.flatten(1, 2)).view_as(x)
        return x.movedim(-1, 1) if self.first else x


class GridNet(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.head, self.first = nn.Conv2d(3, 32, 16, 16), nn.Linear(32, zoo.CLASSES), first
        self.blocks = nn.Sequential(*(Gridded(first) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.cut(x) if self.first else self.cut(x).movedim(1, -1))
        return self.head(x.mean((2, 3) if self.first else (1, 2)))


@pytest.mark.parametrize("method", ["libra_fullgrad", "attcat", "xgradcam", "hirescam"])
def test_tokens_on_a_grid(method: str) -> None:
    images = zoo.images("timm ViT")
    grid = Model(GridNet(first=False).eval(), classifier=True)
    trace = Trace(grid, images)
    maps = vitreous.explain(grid, trace, method, 1).map
    assert maps.shape == (3, 4, 4)
    with torch.no_grad():
        pairs = token_grads(trace, found := ruled(trace, LIBRA), Class(1), found.entering)
    assert pairs[0][0].shape == (3, 4, 4, 32)
    if method == "libra_fullgrad":
        assert off(maps, sum((h * grad).sum(-1) for h, grad in pairs)) <= ROUNDING
    first = Model(GridNet(first=True).eval(), classifier=True)
    with pytest.raises(Unsupported, match="takes 32×4×4, which is not a grid of tokens"):
        vitreous.explain(first, images, method, 1)


# -------------------------------------------------------------------------------------------- on every kind of model

VARIANTS: list[tuple[str, Options]] = [
    ("libra_fullgrad", {"bias": True}),
    ("libra_fullgrad", {"baseline": "mean"}),
    ("attcat", {"rules": "libra", "tokens": "leaving", "baseline": "mean"}),
    ("gae", LIBRA_RULES),
    ("grad_rollout", LIBRA_RULES),
    ("legrad", LIBRA_RULES),
    ("input_x_gradient", LIBRA_RULES),
    ("input_x_gradient", {"rules": "libra", "wrt": "tokens"}),
    ("input_x_gradient", {"wrt": "tokens"}),
    ("gradcam", LIBRA_RULES),
    ("gradcam", ALL | LIBRA_RULES | {"baseline": "mean"}),
    ("xgradcam", NORM),
    ("hirescam", {"rules": "plain", "at": "norm"}),
]
IN_MODULES = ("libra_fullgrad", "attcat", "legrad")


def is_staged(name: str) -> bool:
    return bool(zoo.model(name).layout_at(zoo.ZOO[name].size).stages)


def able(method: str, options: Options, name: str) -> bool:
    """Whether the model has what this variant needs."""
    entry = zoo.ZOO[name]
    tokens = options == {"wrt": "tokens"} and not is_staged(name)
    blocks = method in IN_MODULES or options.get("at") == "block" or tokens
    summed = method == "libra_fullgrad" or options.get("layers") == "all"
    biases = options == {"bias": True} and not entry.flow
    return not (
        (METHODS[method].attention and not (entry.flow or (METHODS[method].stages and is_staged(name))))
        or (blocks and not entry.blocks)
        or (summed and entry.merges)
        or biases
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ZOO)
@pytest.mark.parametrize(("method", "options"), VARIANTS, ids=str)
def test_every_variant_on_every_model(method: str, options: Options, name: str) -> None:
    model, images, target = zoo.model(name), zoo.images(name), aim(name)
    if not able(method, options, name):
        with pytest.raises(Unsupported):
            vitreous.explain(model, images, method, target, **options)
        return
    maps = vitreous.explain(model, images, method, target, **options).map
    assert maps.isfinite().all() and maps.flatten(1).std(1).min() > 0
    alone = vitreous.explain(model, images[1:2], method, target, **options).map
    assert off(alone[0], maps[1]) <= DIFFERENCES, "batch-invariant"


@pytest.mark.parametrize("dtype", [torch.bfloat16, *rare(torch.float16)])
@pytest.mark.parametrize(("method", "options"), VARIANTS, ids=str)
def test_half_precision(method: str, options: Options, dtype: torch.dtype) -> None:
    net = copy.deepcopy(zoo.network("timm ViT"))
    images = zoo.images("timm ViT")
    expected = vitreous.explain(zoo.model("timm ViT"), images, method, 1, **options).map
    half = vitreous.explain(Model(net.to(dtype)), images, method, 1, **options).map
    both = torch.stack([half.flatten(), expected.flatten()])
    assert float(torch.corrcoef(both)[0, 1]) > 0.95


def test_autocast_reaches_every_image() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 2)
    exact = vitreous.explain(model, images, "libra_fullgrad", 1, bias=True).map
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = vitreous.explain(model, images, "libra_fullgrad", 1, bias=True).map
        alone = vitreous.explain(model, images[:1], "libra_fullgrad", 1, bias=True).map
    assert 1e-4 < off(rounded, exact) < 0.1
    assert off(alone, rounded[:1]) <= DIFFERENCES


@pytest.mark.parametrize(("method", "options"), VARIANTS, ids=str)
def test_several_targets(method: str, options: Options) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 2)
    alone = [vitreous.explain(model, images, method, target, **options).map for target in (0, "top-1", [3, 4])]
    many = vitreous.explain_targets(model, images, method, [0, "top-1", [3, 4]], **options)
    for one, other in zip(many, alone, strict=True):
        assert off(one.map, other) < 1e-5


# ------------------------------------------------------------------------------------------------------------- cost


def test_one_forward_pass_for_all() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    trace = Trace(model, images)
    together: list[tuple[str, Options]] = [
        ("libra_fullgrad", {}),
        ("attcat", {"rules": "libra"}),
        ("attcat", {"rules": "libra", "tokens": "leaving"}),
        ("gae", LIBRA_RULES),
        ("grad_rollout", LIBRA_RULES),
        ("input_x_gradient", LIBRA_RULES),
        ("hirescam", {}),
        ("gradcam", ALL | LIBRA_RULES),
    ]
    alone = [vitreous.explain(model, images, method, 1, **options).map for method, options in together]
    with counting.counted_runs() as runs:
        shared = [vitreous.explain(model, trace, method, 1, **options).map for method, options in together]
        vitreous.explain_targets(model, trace, "libra_fullgrad", [2, 3])
    assert runs == [3]
    for one, other in zip(shared, alone, strict=True):
        assert torch.equal(one, other)


class Silent(TorchDispatchMode):
    """Fails where a number is read from a tensor, for which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "local_scalar" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("method", "options"), VARIANTS, ids=str)
def test_what_is_replayed_never_waits(method: str, options: Options) -> None:
    declared, model, images = METHODS[method], zoo.model("timm ViT"), zoo.images("timm ViT")
    values = declared.check(options)
    with torch.no_grad():
        declared.run(Trace(model, images), Class(1), **values)  # what is found out once
        trace = Trace(model, images)
        with nullcontext() if declared.can_replay(values) else pytest.raises(AssertionError), Silent():
            declared.run(trace, Class(1), **values)


def test_a_pass_keeps_no_trace() -> None:
    """So that its memory is free as soon as the trace is gone."""
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT"))
        vitreous.explain(None, trace, "gae", 1, rules="libra")
        vitreous.explain(None, trace, "libra_fullgrad", 1)
        found: Ruled = ruled(trace, LIBRA)
        gone = weakref.ref(found)
        del found, trace
        assert gone() is None
    finally:
        gc.enable()
