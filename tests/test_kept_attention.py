"""A is kept, formed for one image at a time, or formed by rows: three ways, the same maps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import vitreous
from vitreous.capture import attention, few_images

NEVER = 2**40
WAYS = {
    "kept": {"KEPT": NEVER, "LEAST": NEVER},
    "one image at a time": {"KEPT": 0, "LEAST": 0},
    "by rows": {"KEPT": 0, "LEAST": NEVER},
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("gae", {}),
    ("grad_rollout", {}),
    ("rollout", {}),
    ("rollout", {"heads": "max"}),
    ("rollout", {"discard": 0.5}),
]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def explained(
    monkeypatch: pytest.MonkeyPatch, way: str, name: str, method: str, targets: list[int], **options: Any
) -> list[Tensor]:
    for limit, value in WAYS[way].items():
        monkeypatch.setattr(few_images, limit, value)
    model, images = zoo.model(name), zoo.images(name)
    return [one.map for one in vitreous.explain_targets(model, images, method, targets, **options)]


@pytest.mark.parametrize("way", ["kept", "one image at a time"])
@pytest.mark.parametrize(("method", "options"), CALLS)
@pytest.mark.parametrize("name", ["timm ViT", "timm ViT no CLS"])
def test_maps_do_not_depend_on_how_a_is_formed(
    name: str, method: str, options: dict[str, Any], way: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LEAST", 4)
    monkeypatch.setattr(attention, "MOST", 1)  # four rows at a time
    expected = explained(monkeypatch, "by rows", name, method, [1], **options)
    found = explained(monkeypatch, way, name, method, [1], **options)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("method", ["gae", "grad_rollout"])
def test_several_targets(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained(monkeypatch, "kept", "timm ViT", method, [1, 2, 3])
    for target, one in zip((1, 2, 3), found):
        (alone,) = explained(monkeypatch, "by rows", "timm ViT", method, [target])
        torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))


def test_a_large_a_is_not_kept() -> None:
    q = torch.empty(4, 12, 400, 8)
    assert few_images.keeps(q[:1], q[:1])
    assert not few_images.keeps(q, q), "more than 2²¹ numbers"
    assert not few_images.keeps(q[:1].bfloat16(), q[:1].bfloat16()), "A is at least float32"
    long = torch.empty(1, 1, few_images.ROWS + 1, 8)
    assert not few_images.keeps(long, long), "by rows"


def test_kept_attention_is_that_of_the_kernel(threads: int) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 17, width, generator=random) for width in (8, 8, 5))  # values of another width
    a, out = few_images.attend(q, k, v, 0.3)
    torch.testing.assert_close(a, (0.3 * q @ k.mT).softmax(-1))
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3))
