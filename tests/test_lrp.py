"""Relevance propagation: the authors' numbers, a second implementation in plain matrices, and what must hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Oracle, off
from machine import ROUNDING, rare
from oracles import lrp as plain_lrp
from oracles import transformer_attribution as plain_chefer
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace
from vitreous.capture.capture import ModuleNames
from vitreous.errors import Unsupported
from vitreous.methods.attention_gradient.transformer_attribution import relevances
from vitreous.methods.lrp.propagate import token_relevance
from vitreous.trace.last_block import narrowing
from vitreous.trace.parse_target import parse
from vitreous.trace.rules.cast import Cast
from vitreous.trace.rules.gradient import ATTN_LRP, CP_LRP
from vitreous.trace.rules.mode import Rules, RuleWarning, Table, spelled
from vitreous.trace.rules.relevance import Chefer
from vitreous.trace.target import Class, Neuron, Target

CASES = [(name, which) for name in Oracle.IMAGES for which in (0, 1)]
TABLES = {"attn_lrp": ATTN_LRP, "cp_lrp": CP_LRP}
LRP = ["attn_lrp", "cp_lrp", "transformer_attribution"]


def aim(name: str, unit: int = 2) -> Any:
    return f"neuron:{unit}" if zoo.model(name).classifier is False else unit


def goal(name: str, unit: int = 2) -> Target:
    return Neuron(unit) if zoo.model(name).classifier is False else Class(unit)


def exact(net: nn.Module) -> nn.Module:
    """A copy in float64."""
    return copy.deepcopy(net).double()


# ------------------------------------------------------------------------------------------------ the authors' maps


@pytest.fixture(scope="module")
def deit64(deit: Model) -> Model:
    return Model(exact(deit.net), name="deit64", labels=deit.labels)


@pytest.mark.parametrize("image", [Oracle.IMAGES[0], *rare(*Oracle.IMAGES[1:])])
@pytest.mark.parametrize(("precision", "pixels", "tokens"), [("float32", 5e-4, 5e-5), ("float64", 2e-7, 2e-7)])
@pytest.mark.parametrize(("method", "key"), [("attn_lrp", "attnlrp"), ("cp_lrp", "cplrp")])
def test_lrp_oracle(
    deit: Model,
    deit64: Model,
    oracle: Oracle,
    image: str,
    precision: str,
    pixels: float,
    tokens: float,
    method: str,
    key: str,
) -> None:
    model = deit if precision == "float32" else deit64
    trace = Trace(model, oracle.input(image))
    for target in oracle.targets(image):
        ours = vitreous.explain(model, trace, method, target, wrt="image").map[0]
        assert off(ours, oracle("lrp_attn", f"{image}/{target}/{key}")) < pixels
        expected = oracle("lrp_attn", f"{image}/{target}/{key}_tokens")
        every = token_relevance(trace, Class(target), TABLES[method]).sum(-1)[0]
        assert off(every.float(), expected) < tokens
        patches = vitreous.explain(model, trace, method, target).map[0]
        assert off(patches, expected[1:].reshape(14, 14)) < tokens


@pytest.mark.parametrize(("image", "which"), [*CASES[:2], *rare(*CASES[2:])])
def test_transformer_attribution_oracle(deit: Model, oracle: Oracle, image: str, which: int) -> None:
    """On a float32 model, to what only float64 reaches; single layers and the product without gradients too."""
    target = oracle.targets(image)[which]
    trace = Trace(deit, oracle.input(image))

    def check(ours: Tensor, variant: str) -> None:
        ours = ours if ours.shape == (14, 14) else ours[0, 1:].reshape(14, 14)
        assert off(ours.float(), oracle("transformer_attribution", f"{image}/{target}/{variant}")) < 1e-6

    check(vitreous.explain(deit, trace, "transformer_attribution", target).map[0], "transformer_attribution")
    with torch.no_grad():
        parts = [next(iter(layer.chunks())) for layer in relevances(trace, Class(target))]
    shown = [ra[0].double().clamp_min(0).mean(0) for _, ra, _ in parts]
    wanted = [(ra * da)[0].clamp_min(0).mean(0) for _, ra, da in parts]
    rolled = torch.eye(197, dtype=torch.float64)
    for one in shown:
        rolled = rolled + one @ rolled
    check(rolled, "rollout")
    check(shown[-1], "last_layer")
    check(shown[1], "second_layer")
    check(wanted[-1], "last_layer_ablation")
    check(wanted[1], "second_layer_ablation")


# ---------------------------------------------------------------------------------------------- in plain matrices


def entering(model: Model, images: Tensor) -> Tensor:
    """What enters the first block, [B N D]."""
    taken: list[Tensor] = []
    block = model.module.get_submodule(model.layout_at(tuple(images.shape[-2:])).blocks[0])
    hook = block.register_forward_pre_hook(
        lambda m, args, kwargs: taken.append([*args, *kwargs.values()][0]), with_kwargs=True
    )
    with torch.no_grad():
        model.run(images)
    hook.remove()
    return taken[0].movedim(1, 0) if taken[0].shape[0] != len(images) else taken[0]


@pytest.fixture(params=plain_lrp.READERS)
def written_out(request: pytest.FixtureRequest) -> tuple[str, Model, Tensor, plain_lrp.Plain]:
    name = request.param
    net = exact(zoo.network(name))
    layout = zoo.model(name).layout_at(zoo.ZOO[name].size)
    return name, Model(net, name=name, layout=layout), zoo.images(name, 2).double(), plain_lrp.read(name, net)


@pytest.mark.parametrize("method", TABLES)
def test_lrp_in_plain_matrices(written_out: Any, method: str) -> None:
    name, model, images, plain = written_out
    ours = token_relevance(Trace(model, images), goal(name), TABLES[method])
    for tokens, got in zip(entering(model, images), ours, strict=True):
        assert off(got, plain_lrp.relevance(plain, tokens, 2, constant=method == "cp_lrp")) < 1e-6


@pytest.mark.parametrize("start_layer", [0, 1])
def test_transformer_attribution_in_plain_matrices(written_out: Any, start_layer: int) -> None:
    name, model, images, plain = written_out
    trace = Trace(model, images)
    ours = vitreous.explain(model, trace, "transformer_attribution", aim(name), start_layer=start_layer).map
    rows = [plain_chefer.attribution(plain, tokens, 2, start_layer) for tokens in entering(model, images)]
    assert off(ours, trace.map(torch.stack(rows))) < 1e-5


def under(table: Table, function: Any, *inputs: Tensor, seed: int = 0) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """y under a table, the gradients of Σ y·g, and g."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    with Rules(table, ModuleNames(None)):
        y = function(*leaves)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)
    return y, torch.autograd.grad(y, leaves, g), g


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = some(5, 8)
SPELT: dict[str, Any] = {
    "F.gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "torch._C._nn.gelu": torch._C._nn.gelu,
    "F.silu in place": lambda x: F.silu(x * 1, inplace=True),
    "relu_": lambda x: (x * 1).relu_(),
    "Tensor.tanh": Tensor.tanh,
    "F.elu": F.elu,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swish in place": lambda x: (y := x * 1).mul_(y.sigmoid()),
    "new gelu": lambda x: 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0)))),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("spelling", SPELT)
def test_activations_pass_all_relevance_on(spelling: str, table: Table) -> None:
    y, (grad,), g = under(table, SPELT[spelling], X)
    assert torch.allclose(y, SPELT[spelling](X.clone()))
    assert off(X * grad, y.detach() * g) < 1e-8


def test_in_place_functions_change_their_argument() -> None:
    def act(x: Tensor) -> Tensor:
        y = x * 1
        y.relu_()
        F.silu(y, inplace=True)
        return y

    y, (grad,), g = under(ATTN_LRP, act, X)
    assert torch.allclose(y, F.silu(F.relu(X)))
    assert off(X * grad, y.detach() * g) < 1e-8


def test_an_old_name_does_not_outlive_a_change_in_place() -> None:
    """x·sigmoid(x) is an activation; after x has become something else it is a product."""

    def act(x: Tensor, other: Tensor) -> Tensor:
        gate = x.sigmoid()
        y = x * 1
        y.add_(other)
        return y * gate

    other = some(5, 8, seed=2)
    _, (_, grad), g = under(ATTN_LRP, act, X, other)
    assert off(grad, g * X.sigmoid() / 2) < 1e-8


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_norms_hold_their_scale_constant(table: Table) -> None:
    weight, bias = some(8, seed=3), some(8, seed=4)
    centre = torch.eye(8, dtype=torch.float64) - 1 / 8
    sigma = (X.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    root = (X.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def by_hand(x: Tensor) -> Tensor:
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        return weight * ((x - u) / torch.sqrt(s + 1e-5)) + bias

    def rms_by_hand(x: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    groups = X.reshape(5, 2, 4)
    spread = (groups.var(-1, correction=0, keepdim=True) + 1e-5).sqrt().expand(5, 2, 4).reshape(5, 8)
    block = torch.block_diag(*[torch.eye(4) - 1 / 4] * 2).double()
    for function, scale, matrix in (
        (lambda x: F.layer_norm(x, (8,), weight, bias), sigma, centre),
        (by_hand, sigma, centre),
        (lambda x: F.rms_norm(x, (8,), weight, 1e-5), root, torch.eye(8).double()),
        (rms_by_hand, root, torch.eye(8).double()),
        (lambda x: F.group_norm(x, 2, weight, bias), spread, block),
    ):
        y, (grad,), g = under(table, function, X)
        assert torch.allclose(y, function(X))
        assert off(grad, (g * weight / scale) @ matrix) < 1e-8
    for function in (lambda x: F.normalize(x, dim=-1), lambda x: x / x.norm(dim=-1, keepdim=True)):
        y, (grad,), g = under(table, function, X)
        assert torch.allclose(y, function(X))
        assert off(grad, g / X.norm(dim=-1, keepdim=True)) < 1e-8


A, B, V = some(2, 5, 8), some(2, 8, 6, seed=5), some(2, 5, 6, seed=6)


@pytest.mark.parametrize(
    "function",
    [
        torch.matmul,
        torch.bmm,
        lambda a, b: a @ b,
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        lambda a, b: torch.baddbmm(V, a, b),
    ],
)
def test_products_of_two_signals_share_equally(function: Any) -> None:
    _, (da, db), g = under(ATTN_LRP, function, A, B)
    assert off(da, g @ B.mT / 2) < 1e-12
    assert off(db, A.mT @ g / 2) < 1e-12
    _, (da,), g = under(ATTN_LRP, lambda a: function(a, B), A)
    assert off(da, g @ B.mT) < 1e-12, "a constant takes no share"


def test_gated_layers_share_equally() -> None:
    one, other = some(5, 8), some(5, 8, seed=7)
    for table in TABLES.values():
        y, (da, db), g = under(table, lambda a, b: F.silu(a) * b, one, other)
        assert off(one * da, y.detach() * g / 2) < 1e-8
        assert off(other * db, y.detach() * g / 2) < 1e-8


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_attention_shares_twice() -> None:
    """q/4, k/4, v/2; with a constant query (a pool's) k/2, v/2: as when attention is written out."""
    q, k, v = (some(2, 3, 5, 4, seed=s) for s in (8, 9, 10))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    g = under(ATTN_LRP, F.scaled_dot_product_attention, q, k, v)[2]
    plain = torch.autograd.grad(eager(*leaves), leaves, g)
    for function in (F.scaled_dot_product_attention, eager):
        _, grads, _ = under(ATTN_LRP, function, q, k, v)
        for grad, full, share in zip(grads, plain, (4, 4, 2), strict=True):
            assert off(grad, full / share) < 1e-10
        _, grads, _ = under(ATTN_LRP, lambda k, v, f=function: f(q, k, v), k, v)
        for grad, full in zip(grads, plain[1:], strict=True):
            assert off(grad, full / 2) < 1e-10


# ---------------------------------------------------------------------------------------- twins, and what must hold


TWINS = [("timm ViT", "timm ViT unfused")]
TWINS += [(name, name.replace("sdpa", "eager")) for name in zoo.ZOO if name.endswith("sdpa")]


@pytest.mark.parametrize("method", LRP)
@pytest.mark.parametrize(("fused", "written"), TWINS)
def test_fused_and_written_attention_agree(fused: str, written: str, method: str) -> None:
    one, other = exact(zoo.network(fused)), exact(zoo.network(written))
    other.load_state_dict(one.state_dict())
    images = zoo.images(fused, 2).double()
    ours, theirs = (vitreous.explain(Model(net), images, method, aim(fused)).map for net in (one, other))
    assert off(ours, theirs) < (1e-4 if method == "transformer_attribution" else 1e-6)


SAME = ["timm ViT", "timm ViT unfused", "timm EVA-02", "timm DINOv3", "timm DINOv2 registers", "torchvision ViT"]
SAME += ["HF ViT sdpa", "HF ViT eager", "HF DINOv3 eager", "HF CLIP vision eager", "hand-written", "sequence first"]
SAME += ["timm Swin", "flat heads", "open_clip ViT-B-32"]


def without_biases(net: nn.Module) -> nn.Module:
    net = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias") and "table" not in name:
                parameter.zero_()
    return net


@pytest.mark.parametrize("name", SAME)
def test_cp_lrp_is_conserved(name: str) -> None:
    """Without biases, the relevance of all tokens (CLS and registers too) sums to the score."""
    trace = Trace(Model(without_biases(zoo.network(name)), name=name), zoo.images(name))
    total = token_relevance(trace, goal(name), CP_LRP).flatten(1).sum(1)
    y = trace.output[:, 2]
    assert ((total - y).abs() <= 1e-5 * y.abs().max()).all()


def test_conservation_needs_the_rules() -> None:
    trace = Trace(Model(without_biases(zoo.network("timm ViT"))), zoo.images("timm ViT"))
    plain = Table("plain", {}, CP_LRP.plain | frozenset(CP_LRP.rules))
    total = token_relevance(trace, Class(2), plain).flatten(1).sum(1)
    assert ((total - trace.output[:, 2]).abs() > 1e-2 * trace.output[:, 2].abs()).all()


@pytest.mark.parametrize("name", ["timm ViT", "HF ViT eager", "torchvision ViT"])
def test_the_output_is_the_models_own(name: str) -> None:
    expected = zoo.model(name).run(zoo.images(name)).detach()
    for method in LRP:
        trace = Trace(zoo.model(name), zoo.images(name))
        vitreous.explain(zoo.model(name), trace, method, aim(name))
        assert off(trace.output, expected) < 1e-6


def test_contrast_is_the_difference_of_relevances() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    for method in TABLES:
        one, other, both = (vitreous.explain(model, images, method, t).map for t in (2, 5, "2-5"))
        assert off(both, one - other) < 1e-4
    found = [relevances(Trace(model, images), parse(t, model, 7)) for t in (2, 5, "2-5")]
    for one, other, both in zip(*found, strict=True):
        assert off(both.relevance, one.relevance - other.relevance) < 1e-9
        assert both.relevance.abs().max() > 0


def test_a_concept_is_one_more_linear_layer() -> None:
    """A class is the concept of its own row of the classifier."""
    name = "timm ViT"
    net = zoo.network(name)
    trace = Trace(zoo.model(name), zoo.images(name))
    concept = vitreous.Concept(net.head.weight[2].detach().clone(), "dot")
    for layer, same in zip(relevances(trace, Class(2)), relevances(trace, concept), strict=True):
        assert off(same.relevance, layer.relevance) < 1e-6
        assert off(same.grad, layer.grad) < 1e-6


@pytest.mark.parametrize("name", ["timm ViT", "sequence first", "flat heads", "HF DINOv3 eager", "timm EVA-02"])
@pytest.mark.parametrize("method", LRP)
def test_images_of_a_batch_are_apart(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.model(name), zoo.images(name)
    whole = vitreous.explain(model, Trace(model, images), method, [1, 2, 3] if model.classifier else "neuron:1").map
    for i, target in enumerate((1, 2, 3)):
        alone = vitreous.explain(model, images[i : i + 1], method, target if model.classifier else "neuron:1").map
        assert off(whole[i], alone[0]) < 5e-5
    if method == "transformer_attribution":
        monkeypatch.setattr("vitreous.methods.attention_gradient.transformer_attribution.batch_size", lambda *_: 2)
        parts = vitreous.explain(model, Trace(model, images), method, [1, 2, 3] if model.classifier else "neuron:1").map
        assert off(parts, whole) < 5e-5


def test_any_precision_is_propagated_in_float64() -> None:
    """A bfloat16 model gives what the same weights give in float32."""
    half = zoo.ZOO["timm ViT"].make().eval().bfloat16()
    images = zoo.images("timm ViT").bfloat16()
    ours = vitreous.explain(Model(half), images, "transformer_attribution", 1).map
    expected = vitreous.explain(Model(copy.deepcopy(half).float()), images.float(), "transformer_attribution", 1).map
    assert off(ours, expected) < 1e-6


@pytest.mark.parametrize("name", ["timm ViT", "HF ViT eager", "sequence first", "timm EVA-02"])
def test_single_precision_gives_much_the_same_map(name: str) -> None:
    model, images = zoo.model(name), zoo.images(name)
    double, single = (
        vitreous.explain(model, Trace(model, images), "transformer_attribution", aim(name), precision=precision).map
        for precision in ("double", "single")
    )
    assert 1e-9 < off(single, double) < 2e-2
    assert torch.corrcoef(torch.stack([single.flatten(), double.flatten()]))[0, 1] > 0.999


@pytest.mark.parametrize(("dtype", "ran"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
def test_single_precision_of_half_models(dtype: torch.dtype, ran: torch.dtype) -> None:
    """bfloat16 stays bfloat16, in which the rules are ill-conditioned; float16, whose range is too small, does not."""
    net, seen = zoo.ZOO["timm ViT"].make().eval().to(dtype), []
    half, images = Model(net), zoo.images("timm ViT").to(dtype)
    double = vitreous.explain(half, images, "transformer_attribution", 1, precision="double").map
    net.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    single = vitreous.explain(half, images, "transformer_attribution", 1, precision="single").map
    assert set(seen) == {ran} and single.isfinite().all()
    if ran == torch.float32:
        assert torch.corrcoef(torch.stack([single.flatten(), double.flatten()]))[0, 1] > 0.999


def test_parts_of_a_batch_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the best class nor the output asks for a run of the whole batch."""
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    whole = vitreous.explain(model, images, "transformer_attribution")
    runs: list[int] = []
    run = Model.run
    monkeypatch.setattr(Model, "run", lambda self, images: runs.append(len(images)) or run(self, images))
    monkeypatch.setattr("vitreous.methods.attention_gradient.transformer_attribution.IN_CACHES", 1)
    parts = vitreous.explain(model, images, "transformer_attribution")
    assert runs == [1, 1, 1]
    assert parts.target == whole.target and off(parts.map, whole.map) < 5e-5


def test_a_cast_ignores_casts_and_leaves_whole_numbers() -> None:
    x = torch.rand(3, dtype=torch.float64)
    with Cast(torch.float64):
        assert torch.equal(x.float(), x) and torch.equal(x.to(torch.bfloat16), x)
        assert torch.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
        assert torch.arange(3).dtype == torch.int64 and x.to(torch.int64).dtype == torch.int64
        assert (torch.ones(3) + x).dtype == torch.float64


# ------------------------------------------------------------------------------------------- the rules of relevance


def carried(function: Any, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """z, the relevance of the inputs, and that of z."""
    chefer = Chefer(1, 0)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with Rules(chefer.table, ModuleNames(None)):
        z = function(*leaves)
    r = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=z.dtype)
    gradient = torch.autograd.grad(z, leaves, r, retain_graph=True)
    plain = [x.clone().requires_grad_() for x in inputs]
    for ours, expected in zip(gradient, torch.autograd.grad(function(*plain), plain, r), strict=True):
        assert off(ours, expected) < 1e-10, "the plain gradient is kept"
    with chefer.carrying_relevance():
        return z.detach(), torch.autograd.grad(z, leaves, r), r


W, BIAS = some(6, 8, seed=11), some(6, seed=12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.linear(x, W, BIAS),
        lambda x: x @ W.T,
        lambda x: torch.einsum("oi,ni->no", W, x),
        lambda x: F.conv1d(x[None, :, :].mT, W[:, :, None], BIAS)[0].T,
    ],
)
def test_linear_layers_count_what_raises_an_output(function: Any) -> None:
    _, (rx,), r = carried(function, X)
    assert off(rx, plain_chefer.through_linear(X, W, r)) < 1e-10


def test_linear_layers_read_few_rows() -> None:
    chefer, x = Chefer(1, 0), X.clone().requires_grad_()
    with Rules(chefer.table, ModuleNames(None)):
        z = F.linear(x, W, BIAS)
    r = torch.zeros_like(z)
    r[3] = 1.0
    with chefer.carrying_relevance():
        (rx,) = torch.autograd.grad(z, x, r)
    assert off(rx, plain_chefer.through_linear(X, W, r)) < 1e-10


def test_values_that_rules_keep_survive_a_change_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.linear(x, W, BIAS)
        F.relu(y, inplace=True)
        return y

    _, (rx,), r = carried(function, X)
    assert off(rx, plain_chefer.through_linear(X, W, r)) < 1e-6


def test_linear_layers_around_an_activation_are_worked_out_in_float32() -> None:
    """Those alone; the gradient is that of float64."""
    wide, back = some(24, 8, seed=21), some(8, 24, seed=22)
    active = F.gelu(X @ wide.T + 1)
    _, (rx,), r = carried(lambda x: F.linear(F.gelu(F.linear(x, wide, torch.ones(24, dtype=X.dtype))), back), X)
    expected = plain_chefer.through_linear(X, wide, plain_chefer.through_linear(active, back, r))
    assert 1e-12 < off(rx, expected) < 1e-5
    _, (rx,), r = carried(lambda x: F.linear(F.linear(x, wide), back), X)
    expected = plain_chefer.through_linear(X, wide, plain_chefer.through_linear(X @ wide.T, back, r))
    assert off(rx, expected) < 1e-10


HEADS = [some(2, 3, 5, 4, seed=seed) for seed in (31, 32, 33)]  # Q, K, V


@pytest.mark.parametrize("masked", ["no", "causal", "additive"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-3), (torch.bfloat16, 0.2)])
def test_an_attention_is_two_products_and_a_softmax(masked: str, dtype: torch.dtype, limit: float) -> None:
    """In closed form, with the model's own kernel below float64."""
    q, k, v = (t.to(dtype).double() for t in HEADS)
    bias = {"causal": torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf), "additive": some(5, 5)}
    given = {"is_causal": True} if masked == "causal" else {"attn_mask": some(5, 5)} if masked == "additive" else {}
    inputs, options = [t.to(dtype) for t in (q, k, v)], {n: o if o is True else o.to(dtype) for n, o in given.items()}
    chefer, leaves = Chefer(2, 0), [t.clone().requires_grad_() for t in inputs]
    with Rules(chefer.table, ModuleNames(None)):
        out = F.scaled_dot_product_attention(*leaves, **options)
    r = some(*out.shape).to(dtype)
    gradient = torch.autograd.grad(out, leaves, r, retain_graph=True)
    with chefer.carrying_relevance():
        found = torch.autograd.grad(out, leaves, r)
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    a = (plain[0] @ plain[1].mT / 2 + bias.get(masked, torch.zeros(5, 5)).to(dtype)).softmax(-1)
    for ours, theirs in zip(gradient, torch.autograd.grad(a @ plain[2], plain, r.double()), strict=True):
        assert off(ours.double(), theirs) < limit
    ra, rv = plain_chefer.through_product(a.detach(), v, r.double())
    rq, rk = plain_chefer.through_product(q, k.mT, ra)
    for ours, expected in zip(found, (rq, rk.mT, rv), strict=True):
        assert off(ours.double(), expected) < limit


def test_sums_products_means_and_the_rest() -> None:
    other = some(5, 8, seed=13)
    through_sum, fork = plain_chefer.through_sum, plain_chefer.through_fork
    for sign, function in ((1, torch.add), (-1, torch.sub)):
        _, found, r = carried(function, X, other)
        for ours, expected in zip(found, through_sum(X, sign * other, r), strict=True):
            assert off(ours, expected) < 1e-10
    near = 1e-7 * some(5, 8, seed=14) - X  # a sum so small that it matters how often R is divided by it
    _, found, r = carried(lambda a, b, c: (a + b) + c, X, near, other)
    first, last = through_sum(X + near, other, r)
    for ours, expected in zip(found, (*through_sum(X, near, fork(X + near, first)), last), strict=True):
        assert off(ours, expected) < 1e-6
    _, found, r = carried(torch.matmul, A, B)
    for ours, expected in zip(found, plain_chefer.through_product(A, B, r), strict=True):
        assert off(ours, expected) < 1e-10
    z, (rx,), r = carried(lambda x: x.mean(0), X)
    assert off(rx, X / 5 * plain_chefer.divide(r, z)) < 1e-10
    for same in (F.gelu, lambda x: x.softmax(-1), lambda x: F.layer_norm(x, (8,)), lambda x: x * W[0], lambda x: -x,
                 lambda x: x / 3, lambda x: 1 - x, lambda x: x + W[0], lambda x: x / x.detach().norm()):  # fmt: skip
        _, (rx,), r = carried(same, X)
        assert off(rx, r) < 1e-12
    z, (rx,), r = carried(lambda x: x * torch.sigmoid(1.702 * x), X)
    assert off(rx, r) < 1e-6


# ------------------------------------------------------------------------------------------ functions without a rule


class Odd(nn.Module):
    """A gate of its own between blocks."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.body, self.gate, self.mix = copy.deepcopy(zoo.network("timm ViT")), gate, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        z = self.body.forward_head(self.body.forward_features(x), pre_logits=True)
        return self.body.head(z * self.gate(self.mix(z)))


@pytest.mark.parametrize("method", ["attn_lrp", "cp_lrp"])
def test_functions_without_a_rule_are_named_once(method: str) -> None:
    torch.manual_seed(0)
    model, images = Model(Odd(torch.sigmoid), name="odd"), zoo.images("timm ViT")
    said = r"^odd: no relevance rule for torch\.sigmoid \(in its own code\); its plain gradient is used$"
    with pytest.warns(RuleWarning, match=said):
        vitreous.explain(model, images, method, 1)
    vitreous.explain(model, images, method, 2)


def test_unknown_functions_keep_input_times_gradient() -> None:
    torch.manual_seed(0)
    model, images = Model(Odd(lambda x: torch.logcumsumexp(x, -1)), name="odd"), zoo.images("timm ViT")
    with pytest.warns(RuleWarning, match=r"torch\.logcumsumexp \(in its own code\); input times gradient over output"):
        vitreous.explain(model, images, "transformer_attribution", 1)
    z, (rx,), r = carried(lambda x: torch.logcumsumexp(x, -1), X)
    leaf = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(torch.logcumsumexp(leaf, -1), leaf, plain_chefer.divide(r, z))
    assert off(rx, X * grad) < 1e-10


def test_what_is_only_a_denominator_needs_no_rule() -> None:
    """exp in a scale that no relevance passes through is not named."""
    model = Model(Odd(lambda x: 1 / (1 + x.var(-1, keepdim=True).exp())), name="odd")
    vitreous.explain(model, zoo.images("timm ViT"), "attn_lrp", 1)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fails = copy.deepcopy(zoo.network("timm ViT")), False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        if self.fails:
            raise RuntimeError("no")
        return out


@pytest.mark.parametrize("method", LRP)
def test_a_failed_run_leaves_nothing_behind(method: str) -> None:
    from test_methods import state

    net = Failing()
    model, images = Model(net), zoo.images("timm ViT")
    model.layout_at((64, 64))
    before, net.fails = state(net), True
    with pytest.raises(vitreous.VitreousError):
        vitreous.explain(model, images, method, 1)
    net.fails = False
    assert state(net) == before
    assert vitreous.explain(model, images, method, 1).map.isfinite().all()


def test_where_no_tokens_enter_a_block_pixels_remain() -> None:
    """A network without attention."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.GELU(), nn.Flatten(), nn.Linear(8 * 16, 7))
    model, images = Model(net, name="conv"), zoo.images("timm ViT")
    with pytest.raises(Unsupported, match="use wrt=image"):
        vitreous.explain(model, images, "attn_lrp", 1)
    assert vitreous.explain(model, images, "attn_lrp", 1, wrt="image").map.shape == (3, 64, 64)


class Stem(nn.Module):
    """A first block that reads an image [B D h w], or something that is none."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.cut, self.odd, self.head = nn.Conv2d(3, 32, 16, 16), odd, nn.Linear(32, 5)
        self.blocks = nn.ModuleList(Blocklike(odd) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x)
        x = x.flatten(2).unflatten(2, (8, -1)) if self.odd else x
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Blocklike(zoo.Block):
    def __init__(self, odd: bool) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(2).mT).mT.reshape(x.shape)


def test_first_blocks_that_read_images() -> None:
    torch.manual_seed(0)
    images = zoo.images("timm ViT")
    net, odd = Stem(False), Stem(True)
    odd.load_state_dict(net.state_dict())
    trace = Trace(Model(net), images)
    ours = vitreous.explain(trace.model, trace, "attn_lrp", 1).map
    assert off(ours, token_relevance(trace, Class(1), ATTN_LRP).sum(1)) <= ROUNDING
    with pytest.raises(Unsupported, match=r"first block of .* takes 32×8×2, which is not a patch grid; use wrt=image"):
        vitreous.explain(Model(odd), images, "attn_lrp", 1)
    whole = [vitreous.explain(Model(one), images, "attn_lrp", 1, wrt="image").map for one in (net, odd)]
    assert off(*whole) < 1e-5


def test_several_targets_share_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.model("timm ViT")
    narrowing(Trace(model, zoo.images("timm ViT")))  # found out once for a model
    runs: list[int] = []
    plain = Model.run
    monkeypatch.setattr(Model, "run", lambda self, images: runs.append(len(images)) or plain(self, images))
    for method in LRP:
        trace = Trace(model, zoo.images("timm ViT"))
        runs.clear()
        maps = [vitreous.explain(model, trace, method, target).map for target in (0, 1, "top-1", "2-3")]
        assert len(runs) == 1, method
        assert not torch.equal(maps[0], maps[1])


def test_spellings_are_one() -> None:
    for functions, name in (
        ((F.gelu, torch._C._nn.gelu), "gelu"),
        ((F.relu, torch.relu, Tensor.relu, Tensor.relu_, torch.relu_), "relu"),
        ((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.mul_), "mul"),
        ((torch.div, Tensor.__truediv__, Tensor.true_divide, Tensor.div_, Tensor.__itruediv__), "div"),
        ((torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax), "softmax"),
        (
            (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default),
            "scaled_dot_product_attention",
        ),
    ):
        assert {spelled(function)[0] for function in functions} == {name}
    assert spelled(Tensor.relu_)[1:] == (Tensor.relu, True)
