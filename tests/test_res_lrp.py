"""Relevance at residual additions: reference maps, a second implementation in plain matrices, and what must hold."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Oracle, Run, off
from machine import ROUNDING, rare
from oracles import lrp as plain_lrp
from test_lrp import aim, entering, exact, goal, some, under
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace
from vitreous.errors import Unsupported
from vitreous.methods.lrp.propagate import token_relevance
from vitreous.trace.rules.gradient import ATTN_LRP, CP_LRP
from vitreous.trace.rules.mode import Table
from vitreous.trace.rules.residual import ResidualSum, residual_table, shares
from vitreous.trace.target import Class

TABLES = {"attn": ATTN_LRP, "cp": CP_LRP}


def residual(gamma: float = 1.0, base: Table = ATTN_LRP) -> Table:
    return residual_table(base, gamma, 1, 0)


def found(table: Table) -> int:
    """The number of residual additions in what ran under a table."""
    rule = table.rules["add"]
    assert isinstance(rule, ResidualSum)
    return len(rule.sums)


# --------------------------------------------------------------------------------------------------- reference maps


@pytest.fixture(scope="module")
def deit64(deit: Model) -> Model:
    return Model(exact(deit.net), name="deit64", labels=deit.labels)


CASES = [(image, table, double) for image in Oracle.IMAGES for table in TABLES for double in (False, True)]
QUICK = [CASES[0], CASES[3]]


@pytest.mark.parametrize(("image", "table", "double"), [*QUICK, *rare(*(case for case in CASES if case not in QUICK))])
def test_oracle(deit: Model, deit64: Model, oracle: Oracle, image: str, table: str, double: bool) -> None:
    model, maps, sums = (deit64, 1e-6, 1e-6) if double else (deit, 3e-3, 1e-4)
    trace = Trace(model, oracle.input(image))
    for target in oracle.targets(image):

        def stored(variant: str, target: int = target) -> np.ndarray:
            return oracle("reslrp", f"{image}/{target}/{table}_{variant}")

        for gamma, name in ((1.0, "gamma1"), (0.25, "gamma0.25")):
            made = vitreous.explain(model, trace, "res_lrp", target, table=table, gamma=gamma)
            assert off(made.map[0], stored(name)) < maps
            if gamma == 1:
                assert off(made.notes["amplification"][0], stored("amplification")) < sums
        every = token_relevance(trace, Class(target), residual_table(TABLES[table], 1.0, 1, 0)).sum(-1)[0]
        assert off(every.float(), stored("gamma1_tokens")) < maps
        plain = vitreous.explain(model, trace, "res_lrp", target, table=table, gamma=0)
        assert off(plain.notes["amplification"][0], stored("amplification_gamma0")) < sums


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", plain_lrp.READERS)
def test_plain_matrices(name: str, table: str) -> None:
    net = exact(zoo.network(name))
    model = Model(net, name=name, layout=zoo.model(name).layout_at(zoo.ZOO[name].size))
    plain, images = plain_lrp.read(name, net), zoo.images(name, 2).double()
    rules = residual_table(TABLES[table], 0.5, 2, model.layout_at(zoo.ZOO[name].size).batch_axis)
    ours = token_relevance(Trace(model, images), goal(name), rules)
    for tokens, got in zip(entering(model, images), ours, strict=True):
        assert off(got, plain_lrp.relevance(plain, tokens, 2, constant=table == "cp", residual=0.5)) < 1e-6
    assert found(rules) == 6


# -------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("gamma", [0.25, 1.0, 4.0])
def test_the_shares_sum_to_one_and_are_bounded(gamma: float) -> None:
    a, b = some(2000), -some(2000) + 1e-3 * some(2000, seed=2)  # sums that nearly cancel
    one, other = (part * share for part, share in zip((a, b), shares(a, b, gamma)))
    assert off(one + other, a + b) < 1e-12
    assert ((one.abs() + other.abs()) <= (1 + 2 / gamma) * (a + b).abs() * (1 + 1e-9)).all()
    plain = (a.abs() + b.abs()) / (a + b).abs()
    assert plain.max() > 100 * (1 + 2 / gamma), "without the rule there is no such bound"


def test_a_sum_of_zero_passes_its_gradient_on() -> None:
    a, b = torch.tensor([2.0, 0.0, 3.0]), torch.tensor([-2.0, 0.0, 0.0])
    one, other = shares(a, b, 1.0)
    assert torch.equal(one, torch.ones(3)) and torch.equal(other, torch.tensor([1.0, 1.0, 0.5]))


@pytest.mark.parametrize("name", ["timm ViT", "timm DINOv3", "timm Swin", "sequence first"])
@pytest.mark.parametrize(("table", "plain"), [("attn", "attn_lrp"), ("cp", "cp_lrp")])
def test_without_gamma_it_is_the_plain_rule(name: str, table: str, plain: str) -> None:
    model, images = zoo.model(name), zoo.images(name, 2)
    ours = vitreous.explain(model, images, "res_lrp", aim(name), table=table, gamma=0, wrt="image").map
    assert off(ours, vitreous.explain(model, images, plain, aim(name), wrt="image").map) < 1e-5
    other = vitreous.explain(model, images, "res_lrp", aim(name), table=table, gamma=1, wrt="image").map
    assert off(other, ours) > 1e-3


# ------------------------------------------------------------------------------------- what is a residual addition

X, W = some(5, 8), some(8, 8, seed=3)
SCALE = torch.tensor(0.3, dtype=X.dtype)


def overwritten(x: Tensor) -> Tensor:
    y = x * 1
    y += F.linear(y, W)
    return y


def added(x: Tensor) -> Tensor:
    y = x * 1
    return y.add_(F.linear(y, W), alpha=2)


def windowed(x: Tensor) -> Tensor:
    """The branch is shifted, cut and put together again."""
    made = F.linear(x.roll(1, 0).view(5, 2, 4).flatten(1), W).view(5, 8)
    return x + torch.cat([made[:2], made[2:]]).contiguous()


RESIDUAL: dict[str, tuple[Any, Tensor, float]] = {  # a function, the weight of its branch, α
    "x + f(x)": (lambda x: x + F.linear(x, W), W, 1),
    "f(x) + x": (lambda x: F.linear(x, W) + x, W, 1),
    "x += f(x)": (overwritten, W, 1),
    "torch.add": (lambda x: torch.add(x, F.linear(x, W), alpha=2), W, 2),
    "add_": (added, W, 2),
    "by keyword": (lambda x: torch.add(input=x, other=F.linear(x, W)), W, 1),
    "layer scale": (lambda x: x + SCALE * F.linear(x, W), W * SCALE, 1),
    "dropout": (lambda x: x + F.dropout(F.linear(x, W), 0.5, training=False), W, 1),
    "sum": (lambda x: sum([x, F.linear(x, W)]), W, 1),
}


@pytest.mark.parametrize("spelling", RESIDUAL)
def test_residual_additions_in_any_spelling(spelling: str) -> None:
    function, weight, alpha = RESIDUAL[spelling]
    table = residual()
    y, (grad,), g = under(table, function, X)
    assert torch.allclose(y, function(X.clone()))
    assert found(table) == 1
    one, other = plain_lrp.through_residual(X, alpha * X @ weight.T, y.detach() * g, 1.0)
    expected = one + plain_lrp.through_linear(X, weight, torch.zeros(8, dtype=X.dtype), other)
    assert off(X * grad, expected) < 1e-8


def rotary(x: Tensor) -> Tensor:
    q = F.linear(x, W)
    turned = torch.stack([-q[..., 1::2], q[..., ::2]], -1).reshape(q.shape)
    return q * W[0].cos() + turned * W[0].sin()


OTHER: dict[str, Any] = {
    "position": lambda x: x + W[:5],
    "rotary embedding": rotary,
    "gelu written out": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
    "broadcast": lambda x: x + F.linear(x, W).mean(-1, keepdim=True),
    "two classifiers": lambda x: (F.linear(x, W) + F.linear(x, W.T)) / 2,
    "projected shortcut": lambda x: F.linear(x, W) + F.linear(F.gelu(F.linear(x, W.T)), W),
    "difference": lambda x: x - F.linear(x, W),
    "bias of scores": lambda x: (x @ x.mT + W[:5, :5]).softmax(-1) @ x,
}


@pytest.mark.parametrize("kind", OTHER)
def test_other_sums_keep_the_plain_rule(kind: str) -> None:
    table = residual()
    y, (grad,), _ = under(table, OTHER[kind], X)
    same, (expected,), _ = under(ATTN_LRP, OTHER[kind], X)
    assert torch.equal(y, same) and off(grad, expected) < 1e-12
    assert found(table) == 0


def test_windows_are_put_together_before_the_sum() -> None:
    table = residual()
    y, _, _ = under(table, windowed, X)
    assert found(table) == 1 and torch.allclose(y, windowed(X))


class InPlace(nn.Module):
    """A block that overwrites its tokens."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.block.attn(self.block.norm1(x))
        x += self.block.mlp(self.block.norm2(x))
        return x


@pytest.mark.parametrize("method", ["attn_lrp", "cp_lrp", "res_lrp"])
def test_blocks_that_overwrite_their_tokens(method: str) -> None:
    net = copy.deepcopy(zoo.network("timm ViT"))
    net.blocks = nn.Sequential(*map(InPlace, net.blocks))
    images = zoo.images("timm ViT")
    ours = vitreous.explain(Model(net), images, method, 2)
    expected = vitreous.explain(zoo.model("timm ViT"), images, method, 2)
    assert off(ours.map, expected.map) < ROUNDING
    if method == "res_lrp":
        assert off(ours.notes["amplification"], expected.notes["amplification"]) < ROUNDING


class Plain(nn.Module):
    """A network without residual additions."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.cut(x)).flatten(2).mean(-1))


def test_a_network_without_residual_additions_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"no residual addition x \+ f\(x\) .*; use attn_lrp or cp_lrp"):
        vitreous.explain(Model(Plain().eval()), torch.randn(1, 3, 32, 32), "res_lrp", 1, wrt="image")


# ------------------------------------------------------------------------------------------------------------ notes


@pytest.mark.parametrize("name", ["timm ViT", "timm Swin", "sequence first"])
def test_each_image_has_its_amplification(name: str) -> None:
    model, images = zoo.model(name), zoo.images(name)
    whole = vitreous.explain(model, images, "res_lrp", aim(name))
    told = whole.notes["amplification"]
    assert told.shape == (3, 2 * model.layout_at(zoo.ZOO[name].size).layers)
    assert (told >= 1 - 1e-6).all() and (told <= 3).all()
    alone = vitreous.explain(model, images[1:2], "res_lrp", aim(name)).notes["amplification"]
    assert off(alone[0], told[1]) < ROUNDING and off(told[0], told[1]) > 1e-4
    assert off(whole[1].notes["amplification"], alone) < ROUNDING


def test_the_notes_are_of_the_last_target() -> None:
    """A recorded forward pass serves every target."""
    model = zoo.model("timm ViT")
    trace = Trace(model, zoo.images("timm ViT"))
    first, second = (vitreous.explain(model, trace, "res_lrp", target).notes["amplification"] for target in (1, 2))
    fresh = vitreous.explain(model, zoo.images("timm ViT"), "res_lrp", 2).notes["amplification"]
    assert off(second, fresh) < ROUNDING < off(first, fresh)


def test_an_addition_that_the_score_does_not_read_has_none() -> None:
    rule = ResidualSum(1.0, 2, 0)
    rule.sums = [None, torch.tensor([[3.0, 4.0], [2.0, 2.0]])]
    told = rule.amplification(torch.device("cpu"))
    assert told[:, 0].isnan().all() and told[:, 1].tolist() == [1.5, 2.0]
    assert rule.by_image(torch.ones(3, 4)).isnan().all(), "three rows for two images"
    assert ResidualSum(1.0, 2, 1).by_image(torch.ones(4, 8)).isnan().all(), "of unknown order"


def test_the_command_line_writes_them(run: Run, cat: Path) -> None:
    said = run("explain", cat, "-x", "res_lrp", "--json").out
    (entry,) = json.loads(said)["images"]
    ((key, notes),) = entry["notes"].items()
    layers = vitreous.load().layout.layers
    assert key.startswith("res_lrp@") and len(notes["amplification"]) == 2 * layers
    with np.load(entry["maps"]) as stored:
        kept = json.loads(str(stored["provenance"]))["maps"][key]["notes"]["amplification"]
    assert kept == [notes["amplification"]]


@pytest.mark.slow
def test_the_command_line_prints_them(run: Run, cat: Path) -> None:
    told = vitreous.explain(vitreous.load(), cat, "res_lrp").notes["amplification"][0].tolist()
    words = run("explain", cat, "-x", "res_lrp").out.split("amplification ")[1].split()[: len(told)]
    assert [float(word) for word in words] == pytest.approx(told, rel=1e-2)


@pytest.mark.parametrize("method", ["attn_lrp", "res_lrp"])
def test_it_takes_one_forward_pass(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, runs = zoo.model("timm ViT"), zoo.images("timm ViT"), []
    vitreous.explain(model, images, method, 1)
    run = Model.run
    monkeypatch.setattr(Model, "run", lambda self, images: runs.append(len(images)) or run(self, images))
    vitreous.explain(model, images, method, 1)
    assert runs == [3]
