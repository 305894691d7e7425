"""Value zeroing, norm-based attention and attention flow: published numbers, and every formula the slow way."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Oracle, off
from oracles import attention_flow as flow_oracle
from oracles import norm_attention as norm_oracle
from oracles import value_zeroing as zero_oracle
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import vitreous
from vitreous import Model, Trace
from vitreous.errors import OptionError, Unsupported
from vitreous.methods.attention import value_zeroing as method
from vitreous.methods.attention.attention_flow import capacities
from vitreous.methods.attention.norm_attention import norms
from vitreous.methods.attention.value_runs import record
from vitreous.methods.attention.value_zeroing import Runs, value_changes

FLOW = [name for name, entry in zoo.ZOO.items() if entry.flow and name not in ("timm ViT 224×448", "timm ConViT")]
BLOCKS = [name for name in FLOW if zoo.ZOO[name].blocks]


@pytest.fixture(scope="module")
def double(shared: Any) -> Model:
    weights = shared / "models" / "deit_tiny_patch16_224.safetensors"
    return vitreous.load("deit_tiny_patch16_224", weights=weights, dtype=torch.float64)


def whole_norms(trace: Trace, layer: Any, residual: bool) -> Tensor:
    return torch.cat([s for _, s in norms(trace, layer, residual)], 1)


# ------------------------------------------------------------------------------------------------ published numbers


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_value_zeroing_oracle(deit: Model, double: Model, oracle: Oracle, precision: str) -> None:
    model = deit if precision == "float32" else double
    raw = oracle("value_zeroing", "both/any/raw")
    trace = Trace(model, oracle.input("both"))
    layers = record(trace, range(len(trace)), list(range(12)))
    for number in range(12) if precision == "float32" else (0, 11):
        assert off(value_changes(trace, layers[number]), raw[number]) < (3e-5 if precision == "float32" else 2e-7)
    ours = vitreous.explain(model, trace, "value_zeroing").map[0]
    assert off(ours, oracle("value_zeroing", "both/any/rollout_map")) < (1e-5 if precision == "float32" else 2e-7)
    for number in (0, -1):
        row = vitreous.explain(model, trace, "value_zeroing", layer=number).map[0]
        assert off(row.flatten(), raw[number, 0, 1:]) < (1e-5 if precision == "float32" else 2e-7)


@pytest.mark.parametrize(("precision", "limit"), [("float32", 2e-5), ("float64", 2e-7)])
def test_norm_attention_oracle(deit: Model, double: Model, oracle: Oracle, precision: str, limit: float) -> None:
    trace = Trace(deit if precision == "float32" else double, oracle.input("both"))
    layers = record(trace, range(len(trace)), list(range(12)))
    norm, own = (oracle("norm_attention", f"both/any/{key}") for key in ("norm", "norm_res_diagonal"))
    for number in range(12):
        assert off(whole_norms(trace, layers[number], False)[0], norm[number]) < limit
        with_own = whole_norms(trace, layers[number], True)[0]
        assert off(with_own.diagonal(), own[number]) < limit
        assert off(with_own.fill_diagonal_(0), norm[number] * (1 - np.eye(197))) < limit


# ---------------------------------------------------------------------------------------- the formula, one at a time


@cache
def doubled(name: str) -> tuple[Model, Trace]:
    """The network in double precision for the slow way, and a trace of the usual one."""
    return Model(zoo_copy(name)), Trace(zoo.model(name), zoo.images(name))


def zoo_copy(name: str) -> nn.Module:
    return zero_oracle.doubled(zoo.model(name).module)


def slow(model: Model, trace: Trace, layer: int, image: int = 0) -> tuple[Any, Tensor, nn.Module, Any, int]:
    """What the slow ways need."""
    block = model.module.get_submodule(trace.layout.blocks[layer]) if trace.layout.blocks else model.module
    return model.run, trace.images[image : image + 1].double(), block, trace.layout, layer


@cache
def slow_changes(name: str) -> list[Tensor]:
    model, trace = doubled(name)
    return [zero_oracle.changes(*slow(model, trace, layer)) for layer in range(trace.layout.layers)]


@pytest.mark.parametrize("name", zoo.thinned("value_zeroing", BLOCKS))
def test_value_zeroing_is_one_run_a_value(name: str) -> None:
    trace = doubled(name)[1]
    read = trace.readout[0].double()
    layers = record(trace, [0], list(range(trace.layout.layers)))
    least = min(expected.amax(1).min().item() for expected in slow_changes(name))
    limit = 1e-4 + 6e-8 / least**0.5  # float32 knows unit vectors no better
    for number, expected in enumerate(slow_changes(name)):
        assert off(value_changes(trace, layers[number]), expected) < limit
        assert off(value_changes(trace, layers[number], [2]), expected[[2]]) < limit
        ours = vitreous.explain(trace.model, trace, "value_zeroing", layer=number).map[:1]
        assert off(ours, trace.map((read @ expected)[None])) < limit
    ours = vitreous.explain(trace.model, trace, "value_zeroing").map[:1]
    assert off(ours, trace.map(zero_oracle.rolled(slow_changes(name), read)[None])) < limit


@pytest.mark.parametrize("name", zoo.thinned("norm_attention", FLOW))
def test_norm_attention_is_the_length_of_what_is_taken(name: str) -> None:
    model, trace = doubled(name)
    read, depth = trace.readout[0].double(), trace.layout.layers
    projects = name != "flat heads"
    vectors = [norm_oracle.taken(*slow(model, trace, layer), projects) for layer in range(depth)]
    for residual in (False, True) if zoo.ZOO[name].blocks else (False,):
        entered = [zero_oracle.run(*slow(model, trace, layer), None)[0] if residual else None for layer in range(depth)]
        expected = [norm_oracle.norms(v, x) for v, x in zip(vectors, entered, strict=True)]
        for number in (0, -1):
            ours = vitreous.explain(trace.model, trace, "norm_attention", layer=number, residual=residual).map[:1]
            assert off(ours, trace.map((read @ expected[number])[None])) < 2e-5
        ours = vitreous.explain(trace.model, trace, "norm_attention", residual=residual).map[:1]
        assert off(ours, trace.map(norm_oracle.rolled(expected, read, not residual)[None])) < 2e-5


@pytest.mark.parametrize("name", zoo.thinned("attention_flow", FLOW))
@pytest.mark.parametrize(
    "options",
    [{}, {"heads": "max", "residual": 0.1}, {"heads": "min", "residual": 0.9, "start_layer": 1}, {"discard": 0.8}],
    ids=str,
)
def test_attention_flow_is_the_exact_one(name: str, options: dict[str, Any]) -> None:
    trace = doubled(name)[1]
    usual = {"heads": "mean", "discard": 0.0, "residual": 0.5, "start_layer": 0, **options}
    start = usual.pop("start_layer")
    pipes = [capacities(a, **usual, keep=trace.layout.readout)[0] for a in trace.attention[start:]]
    if not options:
        plain = [(np.eye(len(p)) + a.weights[0].double().mean(0).numpy()) / 2 for p, a in zip(pipes, trace.attention)]
        assert off(pipes, plain) < 1e-6
    ours = vitreous.explain(trace.model, trace, "attention_flow", **options).map[0].flatten()
    read = trace.readout[0].double().numpy()
    for patch in (0, 5, 15):
        exact = flow_oracle.flow(pipes, read, trace.layout.prefix + patch)
        assert ours[patch].item() == pytest.approx(exact, abs=2e-7)


def test_attention_flow_counts_in_small_units(double: Model, oracle: Oracle) -> None:
    """On the real network the rounded flow meets a bound that most patches attain: all that leaves them."""
    trace = Trace(double, oracle.input("both"))
    ours = vitreous.explain(double, trace, "attention_flow", start_layer=6).map[0].flatten().double()
    pipes = [(torch.eye(197) + a.weights[0].mean(0)).numpy() / 2 for a in trace.attention[6:]]
    leaving = pipes[0].sum(0)[1:].clip(max=1)
    assert (ours.numpy() <= leaving + 1e-6).all()
    assert np.isclose(ours.numpy(), leaving, atol=2e-7).mean() > 0.9


# ------------------------------------------------------------------------------------------------- blocks of all kinds


class Vit(nn.Module):
    """A network of two given blocks over 16 patches and a CLS token."""

    def __init__(self, block: type[Base]) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 32, 16, 16)
        self.cls = nn.Parameter(torch.randn(1, 1, 32))
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(32, zoo.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x[:, 0])


class Base(nn.Module):
    """Pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.extra = nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        self.scale = nn.Parameter(torch.rand(32) + 0.5)
        self.conv = nn.Conv1d(32, 32, 3, padding=1, groups=32)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Any:
        x = x + self.out(self.attend(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class PostNorm(Base):
    def forward(self, x: Tensor) -> Any:
        x = self.norm1(x + self.out(self.attend(x)))
        return self.norm2(x + self.mlp(x))


class Parallel(Base):
    def forward(self, x: Tensor) -> Any:
        y = self.norm1(x)
        return x + self.out(self.attend(y)) + self.mlp(y)


class Scaled(Base):
    def forward(self, x: Tensor) -> Any:
        x = x + self.scale * self.out(self.attend(self.norm1(x)))
        return (x + self.mlp(self.norm2(x)).mul_(self.scale), None)


class InPlace(Base):
    """Writes over what it was given."""

    def forward(self, x: Tensor) -> Any:
        x += self.out(self.attend(self.norm1(x)))
        x += self.mlp(self.norm2(x))
        return x


class WrittenOver(Base):
    """A projection that is changed in place in a way that is not linear."""

    def forward(self, x: Tensor) -> Any:
        x = x + self.out(self.attend(self.norm1(x))).tanh_()
        return x + self.mlp(self.norm2(x))


class InnerNorm(Base):
    def forward(self, x: Tensor) -> Any:
        x = x + self.out(self.norm2(self.attend(self.norm1(x))))
        return x + self.mlp(x)


class Unprojected(Base):
    def forward(self, x: Tensor) -> Any:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Adapted(Base):
    """A second branch reads the attention's output, as adapters do."""

    def forward(self, x: Tensor) -> Any:
        o = self.attend(self.norm1(x))
        x = x + self.out(o) + self.extra(o).relu()
        return x + self.mlp(self.norm2(x))


class Gated(Base):
    """The attention's output is read a second time, but by no layer."""

    def forward(self, x: Tensor) -> Any:
        o = self.attend(self.norm1(x))
        x = x + self.out(o) * o.sigmoid()
        return x + self.mlp(self.norm2(x))


class Convolved(Base):
    """Mixes tokens in its MLP, too."""

    def forward(self, x: Tensor) -> Any:
        x = x + self.out(self.attend(self.norm1(x)))
        return x + self.mlp(self.conv(self.norm2(x).mT).mT)


class Flattened(Base):
    """Its projection reads tokens without a batch axis."""

    def forward(self, x: Tensor) -> Any:
        o = self.attend(self.norm1(x))
        x = x + self.out(o.flatten(0, 1)).reshape(x.shape)
        return x + self.mlp(self.norm2(x))


KINDS = [
    Base,
    PostNorm,
    Parallel,
    Scaled,
    InPlace,
    WrittenOver,
    InnerNorm,
    Unprojected,
    Adapted,
    Gated,
    Convolved,
    Flattened,
]
FAST = {Base, PostNorm, Parallel, Scaled, WrittenOver, Convolved}  # changed behind the projection


def vit(kind: type[Base]) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model(Vit(kind).eval())


@pytest.mark.parametrize("kind", KINDS)
def test_any_block_is_run_again_as_it_is(kind: type[Base], monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = vit(kind), zoo.images("timm ViT")
    slow_model, trace = Model(zero_oracle.doubled(model.module)), Trace(model, images)
    layers = record(trace, [0], [0, 1])
    for number in (0, 1):
        expected = zero_oracle.changes(*slow(slow_model, trace, number))
        assert off(value_changes(trace, layers[number]), expected) < 1e-4
        assert off(value_changes(trace, layers[number], [3, 0]), expected[[3, 0]]) < 1e-4
        with monkeypatch.context() as small:
            small.setattr(method, "CACHE", 1)
            assert off(value_changes(trace, layers[number]), expected) < 1e-4
        with method.again(trace, layers[number].block) as names:
            runs = Runs(layers[number], layers[number].block, names)
            assert (runs.projected() is not None) == (kind in FAST)
            assert (runs.by_row([3]) is not None) == (kind is not Convolved)


def test_a_low_rank_step_saves_half_of_an_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of the MLP never meets all variants, and gives what it would."""
    model, images = vit(Scaled), zoo.images("timm ViT")[:1]
    trace = Trace(model, images)
    layer = record(trace, [0], [0])[0]
    read: list[int] = []
    plain = torch.nn.functional.linear
    with method.again(trace, layer.block) as names:
        runs = Runs(layer, layer.block, names)
        run = runs.projected()
        hook = layer.block.module.mlp[2].register_forward_pre_hook(lambda _, args: read.append(len(args[0])))
        fast = run(slice(0, 5))
        hook.remove()
        assert read == [5]
        with FlopCounterMode(display=False) as counter:
            run(slice(0, 5))
        assert counter.get_total_flops() < 2 * 5 * 17 * 48 * 32 * 1.6
        assert off(fast, runs.replaced(slice(0, 5))) < 1e-5
    assert torch.nn.functional.linear is plain


def test_what_stands_before_the_projection_is_named() -> None:
    for kind in (InnerNorm, Adapted):
        with pytest.raises(
            Unsupported, match=r"norm_attention needs an output projection .* blocks\.\d .*Try value_zeroing"
        ):
            vitreous.explain(vit(kind), zoo.images("timm ViT"), "norm_attention")


def test_without_a_projection_the_values_are_added_as_they_are() -> None:
    model, images = vit(Unprojected), zoo.images("timm ViT")
    trace = Trace(model, images)
    a, v = trace.attention[1].weights, trace.attention[1].v
    expected = torch.einsum("bhij,bhjd->bijhd", a, v).flatten(-2).norm(dim=-1)[:, 0]
    ours = vitreous.explain(model, images, "norm_attention", layer=1).map
    assert off(ours, trace.map(expected)) < 1e-5


# ------------------------------------------------------------------------------------------------------ all the rest


def test_layers_outside_modules_are_refused_with_a_remedy() -> None:
    model, images = zoo.model("flat heads"), zoo.images("flat heads")
    with pytest.raises(
        Unsupported, match=r"value_zeroing needs each layer in a separate module.*Try norm_attention or rollout"
    ):
        vitreous.explain(model, images, "value_zeroing")
    with pytest.raises(Unsupported, match="norm_attention with residual needs each layer in a separate module"):
        vitreous.explain(model, images, "norm_attention", residual=True)


@pytest.mark.parametrize("name", ["value_zeroing", "norm_attention"])
@pytest.mark.parametrize("layer", [3, -4])
def test_a_layer_that_is_not_there(name: str, layer: int) -> None:
    with pytest.raises(OptionError, match=f"layer {layer} is out of range"):
        vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT"), name, layer=layer)


@pytest.mark.parametrize("after", [1, 4])
def test_a_model_that_fails_halfway_is_left_clean(after: int) -> None:
    """In the recorded run, and in a block that is run again."""

    class Failing(Base):
        calls, limit = 0, 10**6

        def forward(self, x: Tensor) -> Any:
            Failing.calls += 1
            if Failing.calls > Failing.limit:
                raise KeyError("broken")
            return super().forward(x)

    model, images = vit(Failing), zoo.images("timm ViT")
    model.layout_at((64, 64))
    attributes = [sorted(vars(m)) for m in model.module.modules()]
    Failing.calls, Failing.limit = 0, after
    with pytest.raises(KeyError, match="broken"):
        vitreous.explain(model, images, "value_zeroing")
    assert [sorted(vars(m)) for m in model.module.modules()] == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules())
    assert torch.overrides._len_torch_function_stack() == 0
    Failing.limit = 10**6
    assert vitreous.explain(model, images, "value_zeroing").map.isfinite().all()


@pytest.mark.parametrize("name", ["timm ViT", "timm DINOv2 registers", "torchvision ViT", "HF ViT sdpa"])
def test_half_precision_blocks_are_run_again_in_float32(name: str) -> None:
    net = zoo.ZOO[name].make().eval()
    net.load_state_dict(zoo.network(name).state_dict())
    rounded = {key: t.bfloat16().to(t.dtype) for key, t in net.state_dict().items()}
    net.load_state_dict(rounded)
    images = zoo.images(name).bfloat16().float()
    exact = vitreous.explain(Model(net), images, "value_zeroing", layer=0).map
    half = vitreous.explain(Model(net.bfloat16()), images, "value_zeroing", layer=0).map
    assert off(half, exact) < 0.03


def test_autocast_of_the_caller_reaches_the_recorded_run_only() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    exact = vitreous.explain(model, images, "value_zeroing").map.flatten()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = vitreous.explain(model, images, "value_zeroing").map.flatten()
    assert not torch.equal(exact, half)
    assert torch.corrcoef(torch.stack([exact, half]))[0, 1] > 0.99


def test_small_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.model("timm DeiT distilled"), zoo.images("timm DeiT distilled")
    whole = vitreous.explain(model, images, "value_zeroing").map
    monkeypatch.setattr(method, "CACHE", 1)
    monkeypatch.setattr("vitreous.capture.attention.ROWS", 5)
    assert off(vitreous.explain(model, images, "value_zeroing").map, whole) < 1e-5
    for residual in (False, True):
        pieces = vitreous.explain(model, images, "norm_attention", residual=residual).map
        monkeypatch.setattr("vitreous.capture.attention.ROWS", 512)
        assert off(pieces, vitreous.explain(model, images, "norm_attention", residual=residual).map) < 1e-5
        monkeypatch.setattr("vitreous.capture.attention.ROWS", 5)
