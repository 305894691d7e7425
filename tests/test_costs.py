"""What methods cost by operations and passes, which no other load on the machine can change."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import vitreous

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
counting, quick = (importlib.import_module(name) for name in ("counting", "quick"))


DEAR = (
    *("integrated_gradients, a step", "transformer_attribution", "token_deletion, a step"),
    *("libra_fullgrad, biases", "attcat", "gae, Libra", "xgradcam", "hirescam"),
    *("beyond_intuition, a step", "occlusion, a patch", "cp_lrp, gamma"),
)


@pytest.mark.parametrize(
    "limit",
    [pytest.param(one, marks=[pytest.mark.slow] if one.label in DEAR else []) for one in quick.LIMITS],
    ids=lambda limit: limit.label,
)
def test_limits(limit: Any) -> None:
    forwards, passes = limit.found()
    assert 0 < forwards <= limit.forwards
    assert 0 < passes <= limit.passes


def test_every_method_that_promises_a_cost_is_counted() -> None:
    rows = importlib.import_module("bench").ROWS
    promised = {row.method for row in rows if row.cpu or row.counted}
    assert promised and promised <= {limit.name for limit in quick.LIMITS}


# ------------------------------------------------------------------------------------------------- the counter itself


def test_operations_by_hand() -> None:
    """Two for each product of a multiply and an add, forward and backward."""
    net, x = nn.Linear(8, 4).requires_grad_(False), torch.randn(3, 8, requires_grad=True)
    forward = 2 * 3 * 8 * 4
    assert counting.flops(lambda: net(x)) == forward
    assert counting.flops(lambda: torch.autograd.grad(net(x).sum(), x)) == 2 * forward
    q = torch.randn(2, 3, 5, 4)
    attend = counting.flops(lambda: nn.functional.scaled_dot_product_attention(q, q, q))
    assert attend == 2 * 2 * 3 * (5 * 5 * 4) * 2


def test_operations_of_a_forward_by_hand() -> None:
    """A ViT's products: patches, 12·N·D² and 2·N²·D a block, the head."""
    model, image = quick.case(96)
    n, d, classes = 37, 192, 1000
    expected = 36 * 768 * d + 12 * (12 * n * d * d + 2 * n * n * d) + d * classes
    assert quick.forward(model, image) == 2 * expected


def test_passes_and_memory() -> None:
    model = zoo.model("timm ViT")
    images = zoo.images("timm ViT")
    vitreous.explain(model, images, "rollout")  # the layout is found out once
    with counting.counted_runs() as runs:
        vitreous.explain(model, images, "rollout")
    assert runs == [len(images)]
    with counting.peak_memory("cpu") as peak:
        for _ in range(3):
            torch.zeros(2**18) + 1  # one mebibyte and another, at the same time
    assert 2 * 2**20 <= peak.bytes < 2.1 * 2**20
