"""Beyond Intuition: the authors' maps, the formula by whole matrices, its two paths, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import test_layout
import test_measured_layout
import test_value_runs as blocks
import torch
import zoo
from conftest import Oracle, off
from machine import DIFFERENCES, rare
from oracles import beyond_intuition as plain
from torch import Tensor

import vitreous
from vitreous import Model, Trace
from vitreous.errors import OptionError, Unsupported
from vitreous.methods.attention_gradient.beyond_intuition import by_head, by_token, recorded, relation
from vitreous.trace.target import Class

METHOD = "beyond_intuition"
PUBLISHED: dict[str, dict[str, Any]] = {
    "token_start6": {},
    "token_start7": {"start_layer": 7},
    "head_start4": {"variant": "head", "start_layer": 4},
}


@pytest.fixture(scope="module")
def double(deit: Model) -> Model:
    return Model(copy.deepcopy(deit.net).double())


def explained(model: Model, images: Any, target: Any = 1, **options: Any) -> Tensor:
    return vitreous.explain(model, images, METHOD, target, **{"steps": 3, **options}).map


# ------------------------------------------------------------------------------------------------ the authors' maps


@pytest.mark.parametrize("key", ["token_start6", *rare("head_start4")])
def test_oracle(deit: Model, oracle: Oracle, key: str) -> None:
    target = oracle.targets("both")[0]
    ours = vitreous.explain(deit, oracle.input("both"), METHOD, target, **PUBLISHED[key]).map[0]
    assert off(ours, oracle(METHOD, f"both/{target}/{key}")) < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "limit"), [("float32", 3e-5), ("float64", 2e-7)])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("key", PUBLISHED)
def test_oracle_in_a_batch(
    deit: Model, double: Model, oracle: Oracle, key: str, which: int, precision: str, limit: float
) -> None:
    """All images together, each with a target of its own."""
    model = deit if precision == "float32" else double
    targets = [oracle.targets(name)[which] for name in Oracle.IMAGES]
    maps = vitreous.explain(model, oracle.input(), METHOD, targets, **PUBLISHED[key]).map
    for name, target, ours in zip(Oracle.IMAGES, targets, maps):
        assert off(ours, oracle(METHOD, f"{name}/{target}/{key}")) < limit


def test_relation_oracle(double: Model, oracle: Oracle) -> None:
    """|R| alone, which the authors offer as well."""
    trace, target = Trace(double, oracle.input("both")), oracle.targets("both")[0]
    token = relation(trace, by_token(trace, recorded(trace, 5)))
    head = relation(trace, by_head(trace, Class(target), trace.cut(3), 3))
    for key, ours in (("token_start6", token), ("head_start4", head)):
        assert ours.shape == (1, 1, 197), "the row of the read-out only"
        assert off(trace.map(ours[:, 0])[0], oracle(METHOD, f"both/{target}/{key}_rollout")) < 2e-7


@pytest.mark.slow
def test_how_near_the_short_ways_are(deit: Model, oracle: Oracle) -> None:
    """As docs/limits.md says; three points of the image's own path are nearer than twenty of the tokens' path."""
    targets = [oracle.targets(name)[0] for name in Oracle.IMAGES]
    expected = [oracle(METHOD, f"{name}/{target}/token_start6") for name, target in zip(Oracle.IMAGES, targets)]

    def likeness(**options: Any) -> list[float]:
        maps = vitreous.explain(deit, oracle.input(), METHOD, targets, **options).map
        return [float(np.corrcoef(ours.flatten(), one.flatten())[0, 1]) for ours, one in zip(maps, expected)]

    tokens, three = likeness(path="tokens"), likeness(steps=3)
    assert min(tokens) > 0.85 and min(three) > 0.95
    assert sum(three) > sum(tokens)


# ------------------------------------------------------------------------------------------------------ the formula


@pytest.mark.parametrize("variant", ["token", "head"])
@pytest.mark.parametrize("start", [2, *rare(1, 3)])
@pytest.mark.parametrize("name", ["timm ViT", "timm ViT no CLS", "timm DeiT distilled"])
def test_formula_by_whole_matrices(name: str, start: int, variant: str) -> None:
    """Also where the classifier reads several tokens, or the mean of all."""
    net = zoo.ZOO[name].make()
    net.load_state_dict(zoo.network(name).state_dict())
    net, images = net.double().eval(), zoo.images(name, 2).double()
    model = Model(net)
    ours = explained(model, images, [1, 2], variant=variant, start_layer=start)
    trace, slow = Trace(model, images), copy.deepcopy(net)
    for i, target in enumerate((1, 2)):
        expected = plain.explain(slow, images[i], target, trace.readout[i].double(), variant, start, 3)
        assert off(ours[i], trace.map(expected[None])[0]) < 1e-6


@pytest.mark.parametrize("variant", ["token", *rare("head")])
@pytest.mark.parametrize(
    "name", ["timm SigLIP", "sequence first", *rare("HF DINOv2 eager", "timm DINOv3", "hand-written", "timm BEiT")]
)
def test_both_paths_have_the_same_ends(name: str, variant: str) -> None:
    """Two points are the image of zeros and the image: the same tokens in the last block, however one gets there."""
    model, images = zoo.model(name), zoo.images(name)
    target = "neuron:1" if model.classifier is False else 1
    along = [explained(model, images, target, variant=variant, steps=2, path=path) for path in ("input", "tokens")]
    assert off(along[1], along[0]) <= DIFFERENCES
    three = [explained(model, images, target, variant=variant, path=path) for path in ("input", "tokens")]
    assert off(three[1], three[0]) > 4 * DIFFERENCES, "not so in between"


def test_path_of_tokens_does_not_depend_on_the_batch() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    together = explained(model, images, [1, 2, 3], path="tokens")
    with vitreous.limit_memory("1"):
        for i in range(3):
            assert off(explained(model, images[i : i + 1], i + 1, path="tokens")[0], together[i]) <= DIFFERENCES


# ------------------------------------------------------------------------------------------------ options and refusals


def test_start_layer_counts_from_one() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")  # of three layers
    last, every = (explained(model, images, start_layer=start) for start in (3, 1))
    assert torch.equal(explained(model, images), last), "the default is the last layer where there are fewer than six"
    assert off(every, last) > 1e-3
    with pytest.raises(OptionError, match=r"start_layer=4 is out of range: timm-vit has layers 1 to 3 \(.*from 1"):
        explained(model, images, start_layer=4)
    with pytest.raises(OptionError, match="start_layer takes a whole number ≥ 1, not 0"):
        explained(model, images, start_layer=0)


def test_layers_that_are_no_modules() -> None:
    model, images = zoo.model("flat heads"), zoo.images("flat heads")
    with pytest.raises(Unsupported, match=r"variant=token needs each layer in a separate module.* Try variant=head"):
        explained(model, images)
    with pytest.raises(Unsupported, match=r"path=tokens needs each layer in a separate module.* Try path=input"):
        explained(model, images, variant="head", path="tokens")
    assert explained(model, images, variant="head").std() > 0


def test_tokens_that_run_outside_of_the_blocks() -> None:
    torch.manual_seed(0)
    model, images = Model(test_layout.Nested().eval(), classifier=True), torch.randn(2, 3, 64, 64)
    with pytest.raises(Unsupported, match=r"separate module|from block to block"):
        explained(model, images)
    assert explained(model, images, variant="head").std() > 0


class Apart(test_measured_layout.Tokens):
    """Blocks that return what is added to the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = x + 0.5 * block(x)
        return self.head(self.read(x))


def test_blocks_that_return_something_else_than_the_tokens() -> None:
    torch.manual_seed(0)
    model, images = Model(Apart(test_measured_layout.ROWS).eval()), torch.randn(2, 3, 64, 96)
    with pytest.raises(Unsupported, match=r"does not pass its tokens from block to block .* Try variant=head"):
        explained(model, images)
    assert explained(model, images, variant="head").std() > 0


def test_an_attention_without_an_output_projection() -> None:
    model, images = blocks.vit(blocks.InnerNorm), zoo.images("timm ViT")
    with pytest.raises(Unsupported, match=r"an output projection directly after the attention.* Try variant=head"):
        explained(model, images)
    assert explained(model, images, variant="head").std() > 0


def test_an_end_that_cannot_take_more_rows() -> None:
    torch.manual_seed(0)
    model, images = Model(test_layout.Sized().eval(), classifier=True), torch.randn(2, 3, 64, 64)
    with pytest.raises(Unsupported, match=r"more rows than it has images, which path=tokens needs. Try path=input"):
        explained(model, images, path="tokens")
    assert off(explained(model, images), explained(Model(model.net.inner), images)) <= DIFFERENCES
