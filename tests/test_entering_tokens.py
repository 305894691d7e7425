"""Variants whose tokens are picked from those of a few images as they enter the first block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import off
from test_perturbation import Aside

import vitreous
from vitreous import Model, Trace
from vitreous.trace.perturb.drop_tokens import all_entering
from vitreous.trace.perturb.dropped_runs import kept, run_keeping
from vitreous.trace.perturb.picked_tokens import PICKED, Table, of_table, picked

FAMILIES = ["timm ViT", "timm DINOv3", "timm SigLIP", "torchvision ViT", "HF ViT eager", "sequence first"]


def test_layers_of_picked_tokens_are_computed_for_the_table() -> None:
    rows, weight, index = torch.randn(6, 4), torch.randn(3, 4), torch.tensor([[0, 5, 5], [2, 2, 1]])
    table = Table(rows)
    x = picked(table, index)
    normed = of_table(F.layer_norm, x, (4,))
    assert normed is not None and off(normed, F.layer_norm(rows[index], (4,))) < 1e-6
    out = of_table(F.linear, normed, weight)
    assert out is not None and off(out, F.linear(F.layer_norm(rows[index], (4,)), weight)) < 1e-6
    assert table.through(F.layer_norm, (4,)) is table.through(F.layer_norm, (4,)), "computed once"
    assert table.through(F.linear, weight) is not table.through(F.linear, weight.clone())
    assert of_table(F.layer_norm, x, (3, 4)) is None, "a norm of several tokens together"
    assert of_table(F.linear, rows, weight) is None
    assert hasattr(x, PICKED) and of_table(F.linear, x.add_(1), weight) is None, "overwritten"


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_may_run_in_place_of_images(name: str) -> None:
    model, images = zoo.model(name), zoo.images(name)
    trace = Trace(model, images)
    patches = trace.layout.patches
    for count in (1, patches // 2):
        order = torch.stack([torch.randperm(patches, generator=torch.Generator().manual_seed(i)) for i in range(4)])
        rows, keep = [2, 0, 1, 2], kept(trace, order[:, :count])
        whole = run_keeping(trace, rows, keep, True).output
        entering = all_entering(trace)()
        assert entering is not None
        assert off(run_keeping(trace, rows, keep, True, entering).output, whole) < 2e-6
        one = all_entering(trace, 2)()
        for _ in range(2):  # recorded, and picked
            assert off(run_keeping(trace, [2, 2], keep[[0, 3]], True, one).output, whole[[0, 3]]) < 2e-6


def test_images_run_themselves_where_tokens_do_not_tell_all() -> None:
    torch.manual_seed(2)
    model, images = Model(Aside().eval(), classifier=True), zoo.images("hand-written", 2)
    assert all_entering(Trace(model, images))() is None
    together = vitreous.evaluate(model, images, "gradient", "token_deletion", target=1, steps=3).curve
    alone = vitreous.evaluate(model, images[1:], "gradient", "token_deletion", target=1, steps=3).curve
    assert together is not None and alone is not None and off(alone[0], together[1]) < 1e-5
