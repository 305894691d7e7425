"""The token shortcut index: what single tokens beside the object change, over what those on it do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from known import known
from PIL import Image
from test_leaderboard import photo, small
from test_outputs import IMAGES, MAPS, vit, without
from torch import Tensor

import vitreous
from vitreous import Model, run_leaderboard
from vitreous.errors import InputError, Unsupported
from vitreous.metrics.shortcut.token_shortcut import covered
from vitreous.trace.trace import Trace

__all__ = ["small"]  # a fixture


def masks() -> list[Tensor]:
    """The object of the first image is two patches, that of the second six."""
    found = torch.zeros(2, 64, 64, dtype=torch.bool)
    found[0, :16, 16:48] = True
    found[1, 16:48, 16:] = True
    return list(found)


@torch.no_grad()
def by_hand(net: Any, pool: str, of: str, target: int = 0) -> list[float]:
    """Token by token, out of the sequence of a plain forward pass."""

    def score(output: Tensor) -> Tensor:
        return (output.softmax(1) if of == "probability" else output)[:, target]

    every = torch.arange(16).expand(2, -1)
    whole = without(net, every, score)
    drops = [(whole - without(net, every[:, every[0] != i], score)).abs() for i in range(16)]
    found = []
    for image, mask in enumerate(masks()):
        inside = [drops[i][image].item() for i in range(16) if mask[16 * (i // 4), 16 * (i % 4)]]
        outside = [drops[i][image].item() for i in range(16) if not mask[16 * (i // 4), 16 * (i % 4)]]
        join = max if pool == "max" else np.mean
        found.append(float(join(outside) / join(inside)))
    return found


@pytest.mark.parametrize("pool", ["mean", "max"])
@pytest.mark.parametrize("of", ["probability", "logit"])
def test_by_hand(pool: str, of: str) -> None:
    net = vit(5, 2.0)
    found = vitreous.evaluate(Model(net), IMAGES, MAPS, "token_shortcut", 0, masks(), pool=pool, of=of)
    np.testing.assert_allclose(found.value, by_hand(net, pool, of), rtol=1e-3)
    assert found.better == "lower" and found.curve is None


def test_it_is_the_quotient_of_token_ablation() -> None:
    model = zoo.model("timm ViT")
    images = zoo.images("timm ViT", 2)
    drops = vitreous.explain(model, images, "token_ablation", 1, of="probability").map.abs()
    grid = torch.stack(masks())[:, ::16, ::16]
    expected = [drop[~on].mean() / drop[on].mean() for drop, on in zip(drops, grid)]
    found = vitreous.evaluate(model, images, "attention", "token_shortcut", 1, masks())
    torch.testing.assert_close(found.value, torch.stack(expected), rtol=1e-3, atol=0)


def test_known_weights() -> None:
    """A model that reads the left half only: 0 if the object is there, NaN if it is elsewhere."""
    weights = torch.zeros(4, 4)
    weights[:, :2] = 1
    model = known(weights, patch=8)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    where = torch.zeros(2, 32, 32, dtype=torch.bool)
    where[0, :, :16], where[1, :, 16:] = True, True
    for pool in ("mean", "max"):
        found = vitreous.evaluate(model, images, "attention", "token_shortcut", 0, list(where), pool=pool).value
        assert found[0].item() == pytest.approx(0, abs=1e-4)
        assert found[1].isnan() or found[1] > 1e3  # rounding may leave a trace of the tokens without weight
    half = Model(model.module.bfloat16(), preprocess=None, labels=["seen", "nothing"])
    where[0, :, 8:16] = False
    exact = vitreous.evaluate(known(weights, patch=8), images[:1], "attention", "token_shortcut", 0, [where[0]])
    rough = vitreous.evaluate(half, images[:1], "attention", "token_shortcut", 0, [where[0]])
    assert rough.value.item() == pytest.approx(exact.value.item(), rel=0.3)


def test_undefined_is_nan() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 3)
    speck = torch.zeros(64, 64, dtype=torch.bool)
    speck[3, 3] = True
    given = [None, torch.ones(64, 64, dtype=torch.bool), speck]
    found = vitreous.evaluate(model, images, "attention", "token_shortcut", 1, given).value
    assert found.isnan().all(), "no mask; nothing outside; nothing inside"
    touched = vitreous.evaluate(model, images, "attention", "token_shortcut", 1, given, cover=1e-3).value
    assert touched.isnan().tolist() == [True, True, False]


def test_how_much_of_a_patch_is_covered() -> None:
    trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT", 1))
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:16, :24] = True
    mask[60:, 63] = True
    expected = torch.zeros(16, dtype=torch.float64)
    expected[0], expected[1], expected[15] = 1, 0.5, 4 / 256
    assert covered(trace, mask).equal(expected)


def test_it_is_refused_where_no_token_can_be_dropped() -> None:
    name = "timm Swin"
    mask = torch.zeros(zoo.ZOO[name].size, dtype=torch.bool)
    mask[:8] = True
    with pytest.raises(Unsupported, match=r"token_shortcut takes tokens out of the sequence, and .*; energy_in_mask"):
        vitreous.evaluate(zoo.model(name), zoo.images(name, 1), "gradient", "token_shortcut", 1, [mask])
    with pytest.raises(InputError, match="token_shortcut needs masks"):
        vitreous.evaluate(zoo.model("timm ViT"), zoo.images("timm ViT", 1), "gae", "token_shortcut", 1)


def test_a_leaderboard_measures_it_once(small: Model, tmp_path: Path) -> None:
    """For all methods and both ways to pool; it counts for no rank."""
    for i in range(3):
        photo(tmp_path / "images" / f"{i}.png", i)
        mask = Image.new("L", (90, 60))
        mask.paste(255, (20, 10, 70, 40))
        (tmp_path / "masks").mkdir(exist_ok=True)
        mask.save(tmp_path / "masks" / f"{i}.png")
    seen: list[int] = []
    block: Any = small.module.get_submodule("blocks.1")
    hook = block.register_forward_hook(lambda _, args, out: seen.append(len(out)))

    def measured(methods: str, metrics: str) -> tuple[int, Any]:
        seen.clear()
        board = run_leaderboard(small, tmp_path / "images", methods, metrics, masks=tmp_path / "masks")
        return sum(seen), board

    both = "pointing_game,token_shortcut,token_shortcut:pool=max"
    measured("random", both)
    one, two = measured("random", "token_shortcut"), measured("centre", both)
    hook.remove()
    assert one[0] == two[0] > 3 * 16
    board = two[1]
    assert board.metrics == ["pointing_game", "token_shortcut", "token_shortcut pool=max"]
    assert board.plan.judged == [True, False, False]
    assert np.isfinite(board.values).all() and (board.values[0, 1:] == board.values[1, 1:]).all()
