"""attention and rollout: the authors' numbers, and the formula written out in the slowest, plainest way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Oracle, off
from machine import rare

import vitreous
from vitreous import Model, Trace
from vitreous.errors import OptionError

FLOW = [name for name, entry in zoo.ZOO.items() if entry.flow]


# ---------------------------------------------------------------------------------------------- the authors' maps


def test_attention_oracle(deit: Model, oracle: Oracle) -> None:
    trace = Trace(deit, oracle.input())
    for layer in range(12):
        for head in range(3):
            ours = vitreous.explain(deit, trace, "attention", layer=layer, heads=head).map
            for i, name in enumerate(oracle.IMAGES):
                rows = oracle("attention", f"{name}/any/cls_rows")
                assert off(ours[i].flatten(), rows[layer, head, 1:]) < 1e-4
    for i, name in enumerate(oracle.IMAGES):
        assert off(trace.attention[0].weights[i], oracle("attention", f"{name}/any/A_layer0")) < 1e-4
        assert off(trace.attention[11].weights[i], oracle("attention", f"{name}/any/A_layer11")) < 1e-4


@pytest.mark.parametrize("heads", ["mean", "min", "max"])
@pytest.mark.parametrize(("discard", "limit"), [(0, 2e-5), (0.9, 2e-3)])
def test_rollout_oracle(deit: Model, oracle: Oracle, heads: str, discard: float, limit: float) -> None:
    ours = vitreous.explain(deit, oracle.input(), "rollout", heads=heads, discard=discard).map
    for i, name in enumerate(oracle.IMAGES):
        assert off(ours[i], oracle("rollout", f"{name}/any/{heads}_discard{discard}")) < limit


@pytest.mark.parametrize("heads", ["mean", *rare("min", "max")])
@pytest.mark.parametrize("discard", [0, 0.9])
def test_rollout_oracle_in_double(shared: Any, oracle: Oracle, heads: str, discard: float) -> None:
    weights = shared / "models" / "deit_tiny_patch16_224.safetensors"
    double = vitreous.load("deit_tiny_patch16_224", weights=weights, dtype=torch.float64)
    ours = vitreous.explain(double, oracle.input(), "rollout", heads=heads, discard=discard).map
    for i, name in enumerate(oracle.IMAGES):
        assert off(ours[i], oracle("rollout", f"{name}/any/{heads}_discard{discard}")) < 2e-7


# ------------------------------------------------------------------------------------- the formula, written plainly


def plain_rollout(
    trace: Trace, fuse: str = "mean", discard: float = 0.0, residual: float = 0.5, start_layer: int = 0
) -> np.ndarray:
    """Whole matrices, one image at a time, double precision."""
    maps = []
    layout, rho = trace.layout, trace.readout.double().numpy()
    for b in range(len(trace)):
        product = np.eye(layout.tokens)
        for layer in trace.attention[start_layer:]:
            a = getattr(layer.weights[b].double().numpy(), fuse)(axis=0)
            drop = int(a.size * discard)
            if drop:
                order = np.argsort(a, axis=None)[:drop]
                kept = a.copy()
                kept.flat[order] = 0
                for i in layout.readout:
                    kept[i, i] = a[i, i]
                a = kept
            step = residual * np.eye(layout.tokens) + (1 - residual) * a
            product = (step / step.sum(1, keepdims=True)) @ product
        row = rho[b] @ product
        maps.append(row[layout.prefix : layout.prefix + layout.patches].reshape(layout.grid))
    return np.stack(maps)


@pytest.mark.parametrize("name", FLOW)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": "max", "residual": 0.3},
        {"heads": "min", "start_layer": 1},
        {"discard": 0.5},
        {"heads": "max", "discard": 0.8, "residual": 0.1},
    ],
    ids=str,
)
def test_rollout_is_the_plain_product(name: str, options: dict[str, Any]) -> None:
    trace = Trace(zoo.model(name), zoo.images(name))
    ours = vitreous.explain(zoo.model(name), trace, "rollout", **options).map
    plain = plain_rollout(trace, **{("fuse" if key == "heads" else key): value for key, value in options.items()})
    assert off(ours, plain) < (2e-3 if options.get("discard") else 1e-5)


@pytest.mark.parametrize("name", FLOW)
def test_attention_is_the_read_out_row(name: str) -> None:
    trace = Trace(zoo.model(name), zoo.images(name))
    rows = torch.stack([torch.einsum("bn,bhnm->bhm", trace.readout, layer.weights) for layer in trace.attention])

    def ours(**options: Any) -> torch.Tensor:
        return vitreous.explain(zoo.model(name), trace, "attention", **options).map

    def patches(row: torch.Tensor) -> torch.Tensor:
        return trace.layout.to_map(row)

    assert off(ours(), patches(rows[-1].mean(1))) < 1e-5
    assert off(ours(layer=0, heads="max"), patches(rows[0].amax(1))) < 1e-5
    assert off(ours(layer=1, heads="min"), patches(rows[1].amin(1))) < 1e-5
    assert off(ours(layer=-2, heads=1), patches(rows[-2][:, 1])) < 1e-5
    assert off(ours(across="mean"), patches(rows.mean(2).mean(0))) < 1e-5
    assert off(ours(across="max", heads="max"), patches(rows.amax(2).amax(0))) < 1e-5
    assert off(ours(across="min", heads=0), patches(rows[:, :, 0].amin(0))) < 1e-5


@pytest.mark.parametrize("name", ["timm DINOv2 registers", "timm ViT 224×448", "hand-written"])
def test_query_is_what_one_patch_looks_at(name: str) -> None:
    trace = Trace(zoo.model(name), zoo.images(name))
    h, w = trace.layout.grid
    ours = vitreous.explain(zoo.model(name), trace, "attention", query=(1, w - 1)).map
    row = trace.attention[-1].weights[:, :, trace.layout.prefix + w + w - 1].mean(1)
    assert off(ours, trace.layout.to_map(row)) < 1e-5
    with pytest.raises(OptionError, match=f"{h} rows and {w} columns"):
        vitreous.explain(zoo.model(name), trace, "attention", query=(h, 0))


def test_long_sequences_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.model("timm ViT 224×448"), zoo.images("timm ViT 224×448")
    whole = [vitreous.explain(model, images, "rollout", heads=heads).map for heads in ("mean", "max")]
    monkeypatch.setattr("vitreous.capture.attention.ROWS", 50)
    pieces = [vitreous.explain(model, images, "rollout", heads=heads).map for heads in ("mean", "max")]
    for a, b in zip(pieces, whole, strict=True):
        assert off(a, b) < 1e-5


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("attention", {"layer": 3}, "layer 3 is out of range: timm-vit has layers 0 to 2"),
        ("attention", {"layer": -4}, "layer -4 is out of range"),
        ("attention", {"heads": 2}, "head 2 is out of range: the layer has heads 0 to 1"),
        ("attention", {"heads": "median"}, "attention.heads takes mean, max, min or a whole number, not 'median'"),
        ("rollout", {"start_layer": 3}, "start_layer=3 is out of range"),
        ("rollout", {"discard": 1.0}, "rollout.discard takes a number ≥ 0 and < 1, not 1.0"),
        ("rollout", {"residual": -0.1}, "rollout.residual takes a number ≥ 0 and ≤ 1, not -0.1"),
        ("attention", {"layer": True}, "attention.layer takes a whole number, not True"),
        ("smoothgrad", {"sigma": float("inf")}, "smoothgrad.sigma=inf.*finite"),
        ("rollout", {"discrad": 0.5}, "rollout has no option 'discrad'; did you mean discard"),
    ],
)
def test_wrong_options_say_what_is_right(method: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT"), method, **options)


def test_an_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(OptionError, match="unknown method 'rolout'; did you mean rollout"):
        vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT"), "rolout")


# ------------------------------------------------------------------------------------------------------- controls


def test_random_depends_on_image_and_seed_alone() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    maps = vitreous.explain(model, images, "random").map
    assert torch.equal(vitreous.explain(model, images.flip(0), "random").map, maps.flip(0))
    assert not torch.equal(maps[0], maps[1])
    assert not torch.equal(vitreous.explain(model, images, "random", seed=1).map, maps)
    assert 0 <= maps.min() and maps.max() <= 1


def test_centre_is_brightest_in_the_middle() -> None:
    blob = vitreous.explain(zoo.model("timm ViT 224×448"), zoo.images("timm ViT 224×448"), "centre").map[0]
    assert torch.allclose(blob, blob.flip(0)) and torch.allclose(blob, blob.flip(1))
    assert blob.argmax() in (6 * 28 + 13, 6 * 28 + 14, 7 * 28 + 13, 7 * 28 + 14)
    y, x = (2 * 0 + 1) / 14 - 1, (2 * 3 + 1) / 28 - 1
    assert blob[0, 3].item() == pytest.approx(np.exp(-(y * y + x * x) / 0.5), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"heads": "max"}, {"discard": 0.5}, {"start_layer": 1}], ids=str)
@pytest.mark.parametrize(
    "name", ["timm ViT", "torchvision ViT", "HF ViT eager", "timm DINOv2 registers", "timm SigLIP"]
)
def test_rollout_is_the_same_whether_the_run_or_the_rollout_forms_attention(name: str, options: dict[str, Any]) -> None:
    model, images = zoo.model(name), zoo.images(name)
    trace = Trace(model, images)
    _ = trace.attention  # recorded before: A is formed again from Q and K
    again = vitreous.explain(model, trace, "rollout", **options).map
    assert off(vitreous.explain(model, images, "rollout", **options).map, again) < 1e-5


def test_a_run_whose_attention_is_formed_can_be_read_on() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    trace = Trace(model, images)
    vitreous.explain(model, trace, "rollout")
    trace.verify()
    plain = vitreous.explain(model, images, "attention").map
    assert off(vitreous.explain(model, trace, "attention").map, plain) < 1e-5
