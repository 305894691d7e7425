"""The same network written differently: it computes the same, and a sound map stays where it is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Oracle, off
from machine import rare
from scipy import stats
from test_methods import state
from torch import Tensor, nn

import vitreous
from vitreous import Model
from vitreous.errors import Unsupported
from vitreous.metrics.sanity.copies import copy_of
from vitreous.metrics.sanity.reparametrisation import rewrite
from vitreous.metrics.sanity.rewriting import Norm, Rewriting, norms_of
from vitreous.trace.target import Class, Neuron, Target

ONE = Neuron(1)
CENTRED = vitreous.methods.cdam(baseline="mean")


def rewritten(model: Model, images: Tensor, kind: str, target: Target = ONE, seed: int = 0) -> Model:
    twin = copy_of(model)
    rewrite(twin, images, target, Rewriting(kind, 1.0, seed))
    return twin


def double(model: Model) -> Model:
    return Model(copy.deepcopy(model.module).double(), name=model.name)


def value(method: Any, kind: str = "both", name: str = "timm ViT", **options: Any) -> Tensor:
    return vitreous.evaluate(
        zoo.model(name), zoo.images(name), method, "reparametrisation", 1, kind=kind, **options
    ).value


# ---------------------------------------------------------------------------------------------------------- the proof


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shift", *rare("gain", "both")])
def test_the_real_network_computes_the_same(deit: Model, oracle: Oracle, kind: str) -> None:
    """To the last digits of float64; CDAM from zero changes with a shift, from the mean patch it does not."""
    model, x = double(deit), oracle.input("both").double()
    twin = rewritten(model, x, kind, Class(282))
    weights = dict(model.module.named_parameters())
    moved = [name for name, now in twin.module.named_parameters() if not torch.equal(now, weights[name])]
    assert len([name for name in moved if "norm" in name]) == (25 if kind == "shift" else 50)
    assert off(twin.run(x).detach(), model.run(x).detach()) < 1e-12
    zero, mean = ((given, vitreous.methods.cdam(baseline=given)) for given in ("zero", "mean"))
    changes = {
        given: off(*(vitreous.explain(one, x, method, 282).map for one in (twin, model)))
        for given, method in (zero, mean)
    }
    assert changes["mean"] < 1e-10
    assert changes["zero"] < 1e-10 if kind == "gain" else changes["zero"] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shift", "gain"])
def test_the_values_on_the_real_network(deit: Model, oracle: Oracle, kind: str) -> None:
    """In float32, rounding reads as nothing; gradcam's order stays, but its values and signs move with a shift."""
    x = oracle.input("both")

    def read(method: Any, compare: str = "order") -> float:
        return float(vitreous.evaluate(deit, x, method, "reparametrisation", 282, kind=kind, compare=compare).value)

    for method in (CENTRED, "gae", "input_x_gradient", "attn_lrp"):
        assert abs(read(method)) < 1e-3
    assert (read("cdam") > 0.05) == (kind == "shift")
    assert abs(read("gradcam")) < 1e-3
    assert (read("gradcam", "values") > 0.05) == (kind == "shift")


FIRST = ("timm ViT", "torchvision ViT")


@pytest.mark.parametrize("name", [*FIRST, *rare(*(one for one in zoo.ZOO if one not in (*FIRST, "flat heads")))])
@pytest.mark.parametrize("kind", ["shift", "gain", "both"])
def test_every_kind_of_network_computes_the_same(name: str, kind: str) -> None:
    if name in ("torch.compile",):
        model, x = zoo.model(name), zoo.images(name)
    else:
        model, x = copy_of(zoo.model(name)), zoo.images(name).double()
        model.module.double()
        for part in model.module.modules():
            if hasattr(part, "rel_indices"):  # of ConViT, kept from an earlier run in single precision
                part.rel_indices = part.rel_indices.double()
    twin = rewritten(model, x, kind)
    with torch.no_grad():
        assert off(twin.run(x), model.run(x)) < (1e-12 if x.dtype == torch.float64 else 1e-5)
    changed = [p for p, q in zip(twin.module.parameters(), model.module.parameters()) if not torch.equal(p, q)]
    assert len(changed) >= 6


@pytest.mark.parametrize("variant", ["vanilla", "smooth", "integrated"])
def test_centred_cdam_does_not_see_shifts(variant: str) -> None:
    model, x = double(zoo.model("timm ViT")), zoo.images("timm ViT").double()
    twin = rewritten(model, x, "shift")
    centred, plain = (
        off(*(vitreous.explain(one, x, "cdam", 1, variant=variant, baseline=given).map for one in (twin, model)))
        for given in ("mean", "zero")
    )
    assert centred < 1e-6 and plain > 1e-2


# --------------------------------------------------------------------------------------------------------- the metric


def test_the_metric_by_hand() -> None:
    """A copy that is rewritten as the docstring says, its map, and SciPy's rank correlation."""
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    before = vitreous.explain(model, x, "cdam", 1).map
    net = copy.deepcopy(zoo.network("timm ViT"))
    twin = rewritten(model, x, "shift", Class(1), seed=3)
    for norm, reader in [("blocks.2.norm1", "blocks.2.attn.qkv"), ("norm", "head")]:
        shift, bias = net.get_parameter(f"{norm}.bias"), net.get_parameter(f"{reader}.bias")
        constant = shift.detach() - twin.module.get_parameter(f"{norm}.bias").detach()
        gain = net.get_parameter(f"{norm}.weight").detach()
        assert constant.std() == pytest.approx(float(gain.norm() / 32**0.5), rel=0.5)
        bias.data += net.get_parameter(f"{reader}.weight").detach() @ constant
        shift.data -= constant
        assert off(bias.detach(), twin.module.get_parameter(f"{reader}.bias").detach()) < 1e-5
    after = vitreous.explain(Model(net), x, "cdam", 1).map
    rho = [stats.spearmanr(a.ravel(), b.ravel())[0] for a, b in zip(before.numpy(), after.numpy())]
    assert np.allclose(value("cdam", "shift", seed=3), 1 - np.array(rho), atol=2e-3)
    far = (before - after).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
    assert torch.allclose(value("cdam", "shift", seed=3, compare="values"), far, rtol=1e-3)


def test_gains_move_by_powers_of_two() -> None:
    twin = rewritten(zoo.model("timm ViT"), zoo.images("timm ViT"), "gain")
    old, new = (dict(net.named_parameters()) for net in (zoo.network("timm ViT"), twin.module))
    factor = (new["blocks.0.norm1.weight"] / old["blocks.0.norm1.weight"]).detach()
    assert torch.equal(factor.log2(), factor.log2().round()) and factor.log2().std() == pytest.approx(1, rel=0.5)
    assert torch.equal(new["blocks.0.norm1.bias"], old["blocks.0.norm1.bias"] * factor)
    assert torch.equal(new["blocks.0.attn.qkv.weight"], old["blocks.0.attn.qkv.weight"] / factor)
    x = zoo.images("timm ViT")
    assert torch.equal(twin.run(x), zoo.model("timm ViT").run(x)), "to the last bit"


def test_options_of_the_metric() -> None:
    one, other = value("cdam", "shift"), value("cdam", "shift", seed=1)
    assert not torch.allclose(one, other) and torch.allclose(one, value("cdam", "shift"))
    little = value("cdam", "shift", scale=0.01, compare="values")
    assert (little < value("cdam", "shift", compare="values") / 10).all() and (little > 0).all()
    assert torch.allclose(value("cdam", "both"), one, atol=1e-3), "gains do not change it"
    for control in ("random", "centre"):
        assert torch.allclose(value(control), torch.zeros(3), atol=1e-6)


def test_nothing_is_left_behind() -> None:
    before = state(zoo.network("timm ViT"))
    value("cdam")
    assert state(zoo.network("timm ViT")) == before


def test_half_precision_is_measured_in_single_precision() -> None:
    """Rounding to eight bits would look like a change of the map."""
    x, net = zoo.images("timm ViT"), copy.deepcopy(zoo.network("timm ViT"))
    found = {
        method: vitreous.evaluate(Model(net.bfloat16()), x.bfloat16(), method, "reparametrisation", 1, kind="shift")
        for method in (CENTRED, "cdam")
    }
    assert found[CENTRED].value.abs().max() < 1e-3
    assert torch.allclose(found["cdam"].value, value("cdam", "shift"), atol=0.1)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        assert value(CENTRED).abs().max() < 1e-3


class Stubborn(nn.Module):
    """A half-precision network whose forward pass casts its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = copy.deepcopy(zoo.network("timm ViT")).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.bfloat16())
        return out


def test_a_network_that_runs_in_half_precision_only_is_refused() -> None:
    x = zoo.images("timm ViT")
    with pytest.raises(Unsupported, match="in single precision, in which it does not run; give it in float32"):
        vitreous.evaluate(Model(Stubborn()), x.bfloat16(), "gradient", "reparametrisation", 1)


# ----------------------------------------------------------------------------------------------- embeddings as targets


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_a_concept_keeps_its_embedding(similarity: str) -> None:
    """The last norm is the embedding, so it is left as it is; all others are rewritten."""
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    concept = vitreous.Concept.from_images(model, x[:2], similarity)
    assert vitreous.evaluate(model, x, CENTRED, "reparametrisation", concept).value.abs().max() < 1e-3
    assert vitreous.evaluate(model, x, "cdam", "reparametrisation", concept, compare="values").value.min() > 1e-2
    twin = copy_of(model)
    done = rewrite(twin, x, concept, Rewriting("both", 1.0, 0))
    assert len(done) == 6 and "norm.weight" not in [norm.gain for norm in done]
    kept = dict(zoo.network("timm ViT").named_parameters())
    assert torch.equal(twin.module.get_parameter("head.weight"), kept["head.weight"])


def test_a_model_without_classes() -> None:
    name = "timm DINOv2 registers"
    found = vitreous.evaluate(zoo.model(name), zoo.images(name), "rollout", "reparametrisation")
    assert found.value.abs().max() < 1e-3


# ------------------------------------------------------------------------------------------------ who reads which norm


class Reads(nn.Module):
    """A norm, and what reads it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.cut = nn.Conv2d(3, 8, 8, 8)
        self.norm = nn.RMSNorm(8) if how == "rms" else nn.LayerNorm(8, elementwise_affine=how != "plain")
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)
        self.wide = nn.Linear(8 * 16, 4)
        self.one, self.two = nn.Linear(8, 8, bias=how != "no bias"), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).mT
        t = self.norm(x)
        if self.how == "added":
            return self.two(self.one(t) + t).mean(1)
        if self.how == "written":
            held = torch.zeros_like(t)
            held[:] = t
            return self.two(self.one(t) + held).mean(1)
        if self.how == "twice":
            return self.two(self.one(t) + self.one(x)).mean(1)
        if self.how == "computed":
            return self.two(F.linear(t, self.one.weight * 2, self.one.bias)).mean(1)
        if self.how == "flat":
            return self.wide(t.flatten(1))
        if self.how == "mean":
            return self.two(t.mean(1))
        if self.how == "two":
            return self.two(self.one(t.transpose(0, 1).contiguous())).mean(0) + self.two(x).mean(1)
        return self.two(self.one(t).tanh()).mean(1)


def readers(how: str) -> list[Norm]:
    return norms_of(Model(Reads(how)), torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("how", "names", "shifts"),
    [
        ("layer", [("one.weight", "one.bias")], True),
        ("two", [("one.weight", "one.bias")], True),
        ("mean", [("two.weight", "two.bias")], True),
        ("no bias", [("one.weight", None)], False),
        ("rms", [("one.weight", "one.bias")], False),
    ],
)
def test_readers_are_observed(how: str, names: list[Any], shifts: bool) -> None:
    (norm,) = readers(how)
    assert norm.readers == names and norm.shifts is shifts
    assert norm.gain == "norm.weight" and norm.shift == (None if how == "rms" else "norm.bias")
    net, x = Reads(how).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    twin = rewritten(Model(net), x, "both")
    assert off(twin.run(x).detach(), net(x).detach()) < 1e-12
    assert not torch.equal(twin.module.get_parameter("norm.weight"), net.norm.weight)


@pytest.mark.parametrize("how", ["added", "written", "twice", "computed", "plain", "flat"])
def test_a_norm_that_others_read_is_left_alone(how: str) -> None:
    assert readers(how) == []
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(Unsupported, match=r"needs a norm that linear layers alone read; .* has none"):
        rewritten(Model(Reads(how)), x, "both")


def test_a_kind_that_is_not_there_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"needs a norm with a shift .* \(or try kind=gain\)"):
        rewritten(Model(Reads("rms")), torch.randn(1, 3, 32, 32), "shift")
