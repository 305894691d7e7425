"""Inputs beside the images: they travel with the images through every method and metric."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import zoo
from conftest import off
from machine import DIFFERENCES
from test_kinds import Vit
from test_methods import CHEAP
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, Model, Trace
from vitreous.errors import Unsupported

SIZE = (64, 80)


class Table(Vit):
    """A table of four numbers: a token of its own, and beside the mean of all tokens before the classifier."""

    def __init__(self, token: bool = True, late: bool = True) -> None:
        super().__init__()
        self.token, self.late = token, late
        self.embed = nn.Linear(4, 32)
        self.last = nn.Linear(32 + 32, zoo.CLASSES)
        self.last.weight.data *= 4

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        made, tokens = self.embed(table)[:, None], self.tokens(x)
        tokens = self.through(torch.cat([made, tokens], 1) if self.token else tokens)[-1]
        read = tokens.mean(1)
        beside = made[:, 0] * torch.tanh(read) if self.late else read
        return self.last(torch.cat([read, beside], 1))


KINDS = {"both": {}, "token": {"late": False}, "late": {"token": False}}


@cache
def model(kind: str) -> Model:
    torch.manual_seed(3)
    return Model(Table(**KINDS[kind]).eval(), name=kind)


def batch(count: int = 3) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(7)
    return torch.randn(count, 3, *SIZE, generator=random), 2 * torch.randn(count, 4, generator=random)


def test_gradient_is_that_of_the_network_called_directly() -> None:
    images, table = batch()
    leaf = images.clone().requires_grad_()
    model("both").net(leaf, table)[:, 1].sum().backward()
    ours = vitreous.explain(model("both"), images, "gradient", 1, inputs={"table": table}, reduce="sum").map
    assert off(ours, leaf.grad.sum(1)) < 1e-5


def alone(kind: str, image: Tensor, row: Tensor) -> Model:
    """The same network as a function of one image, whatever its variants."""
    net = model(kind).net
    return Model(net, name=kind, forward=lambda x: net(x, row.expand(len(x), -1)), classifier=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_gives_what_each_image_gives_with_its_own_inputs(method: str, kind: str) -> None:
    images, table = batch()
    options, targets = CHEAP.get(method, {}), [1, 4, 2]
    trace = Trace(model(kind), images, {"table": table})
    try:
        maps = trace.explain(method, targets, **options).map
    except Unsupported as error:
        pytest.skip(str(error))
    for i in range(3):
        given = {"table": table[i : i + 1]}
        single = vitreous.explain(model(kind), images[i], method, targets[i], inputs=given, **options).map
        assert off(maps[i], single[0]) < DIFFERENCES, "the same alone"
        try:
            plain = vitreous.explain(alone(kind, images[i], table[i]), images[i], method, targets[i], **options).map
        except Unsupported:
            continue
        assert off(maps[i], plain[0]) < DIFFERENCES, "the same as the network with its input built in"
