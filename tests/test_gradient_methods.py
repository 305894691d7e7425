"""Class-specific methods: the authors' numbers, and each formula written out plainly on tiny models."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Oracle, off
from machine import ROUNDING, rare
from torch import Tensor, nn

import vitreous
from vitreous import Concept, Model, Trace
from vitreous.errors import OptionError, Unsupported
from vitreous.methods.attention.head_similarity import pool_patches
from vitreous.methods.attention_gradient.cdam import mean_grad
from vitreous.methods.common import less_baseline
from vitreous.methods.gradient.smoothgrad import smooth_gradient
from vitreous.trace.concept import Text
from vitreous.trace.parse_target import parse
from vitreous.trace.run import Run
from vitreous.trace.target import Class

FLOW = [name for name, entry in zoo.ZOO.items() if entry.flow]
CASES = [(name, which) for name in Oracle.IMAGES for which in (0, 1)]


def aim(name: str, unit: int = 2) -> Any:
    return f"neuron:{unit}" if zoo.model(name).classifier is False else unit


# ------------------------------------------------------------------------------------------------ the authors' maps


@pytest.fixture(scope="module")
def traces(deit: Model, oracle: Oracle) -> dict[str, Trace]:
    return {name: Trace(deit, oracle.input(name)) for name in oracle.IMAGES}


@pytest.mark.parametrize(("image", "which"), CASES)
@pytest.mark.parametrize(
    ("method", "options", "file", "variant", "limit"),
    [
        ("gae", {}, "gae", "gae", 3e-5),
        ("grad_rollout", {}, "grad_rollout", "discard0", 3e-5),
        ("grad_rollout", {"discard": 0.9}, "grad_rollout", "discard0.9", 1e-3),
        ("cdam", {}, "cdam", "class", 3e-4),
        ("gradcam", {}, "gradcam", "raw", 2e-4),
        ("input_x_gradient", {}, "captum", "input_x_gradient", 1e-3),
        ("legrad", {}, "legrad", "map_mean", 5e-5),
        ("legrad", {"pool": "readout"}, "legrad", "map_cls", 5e-5),
    ],
)
def test_oracle(
    deit: Model,
    oracle: Oracle,
    traces: dict[str, Trace],
    image: str,
    which: int,
    method: str,
    options: dict[str, Any],
    file: str,
    variant: str,
    limit: float,
) -> None:
    target = oracle.targets(image)[which]
    ours = vitreous.explain(deit, traces[image], method, target, **options).map[0]
    assert off(ours, oracle(file, f"{image}/{target}/{variant}")) < limit


@pytest.mark.parametrize(("image", "which"), CASES)
def test_gradient_oracle(deit: Model, oracle: Oracle, traces: dict[str, Trace], image: str, which: int) -> None:
    target = oracle.targets(image)[which]
    full = oracle("captum", f"{image}/{target}/saliency")
    for how, expected in {"sum": full.sum(0), "abs-mean": abs(full).mean(0), "max-abs": abs(full).max(0)}.items():
        ours = vitreous.explain(deit, traces[image], "gradient", target, reduce=how)
        assert off(ours.map[0], expected) < 1e-3
        assert ours.signed == (how == "sum")


@pytest.mark.parametrize(
    ("image", "which"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_integrated_gradients_oracle(
    deit: Model, oracle: Oracle, traces: dict[str, Trace], image: str, which: int
) -> None:
    """The map, and what it lacks of the score; fifty runs each, so most of them only in `make test-all`."""
    target = oracle.targets(image)[which]
    found = vitreous.explain(deit, traces[image], "integrated_gradients", target)
    assert off(found.map[0], oracle("captum", f"{image}/{target}/ig_gausslegendre")) < 3e-4
    assert found.notes["completeness_error"].item() == pytest.approx(
        float(oracle("captum", f"{image}/{target}/ig_delta_gausslegendre")), abs=2e-3
    )


@pytest.mark.parametrize("image", Oracle.IMAGES)
@pytest.mark.parametrize("example", ["dog", "cat"])
@pytest.mark.parametrize(("similarity", "variant"), [("dot", "dot"), ("cosine", "cosine"), ("l2", "neg_l2")])
def test_concept_oracle(
    deit: Model, oracle: Oracle, traces: dict[str, Trace], image: str, example: str, similarity: Any, variant: str
) -> None:
    vector = torch.from_numpy(oracle("cdam", f"_concept/{example}/vector_f64")).float()
    ours = vitreous.explain(deit, traces[image], "cdam", Concept(vector, similarity)).map[0]
    assert off(ours, oracle("cdam", f"{image}/concept-{example}/{variant}")) < 3e-4


@pytest.mark.parametrize(("image", "which"), [*CASES[:2], *rare(*CASES[2:])])
def test_smoothgrad_and_cass_oracle(
    deit: Model, oracle: Oracle, traces: dict[str, Trace], image: str, which: int
) -> None:
    """With the stored noise."""
    target, trace = oracle.targets(image)[which], traces[image]
    noise = torch.from_numpy(oracle("smoothgrad", "_noise/any/unit_times_40")).float() / 40
    smooth = smooth_gradient(trace, Class(target), (unit[None] for unit in noise), 0.15)
    if which == 0:
        assert off(smooth[0], oracle("smoothgrad", f"{image}/{target}/smoothgrad_full")) < 3e-4
    pooled = pool_patches(smooth.abs().mean(1), (14, 14))
    assert off(pooled[0], oracle("smoothgrad", f"{image}/{target}/pooled")) < 3e-4
    scores = vitreous.cass(deit, trace, target, saliency=pooled)
    assert off(scores[0], oracle("smoothgrad", f"{image}/{target}/cass")) < 1e-5


def test_real_class_sensitivity(deit: Model, shared: Path) -> None:
    """Dog above, cat below: evidence for each lies more on the right animal (boxes drawn by hand, in patches)."""
    dog, cat = (slice(0, 8), slice(4, 10)), (slice(8, 14), slice(2, 13))
    trace = Trace(deit, shared / "data" / "photos" / "both.png")
    for method in ("gae", "cdam"):
        for_dog = vitreous.explain(deit, trace, method, "bull mastiff").map[0].clamp_min(0)
        for_cat = vitreous.explain(deit, trace, method, "tiger cat").map[0].clamp_min(0)
        assert for_dog[dog].sum() > for_dog[cat].sum()
        assert for_cat[cat].sum() > for_cat[dog].sum()


# ------------------------------------------------------------------------------------- the formulas, written plainly


@pytest.mark.parametrize("name", FLOW)
def test_gae_and_grad_rollout_are_the_plain_products(name: str) -> None:
    """Whole matrices, one image at a time, double precision."""
    trace = Trace(zoo.model(name), zoo.images(name))
    ours = {m: vitreous.explain(zoo.model(name), trace, m, aim(name)).map for m in ("gae", "grad_rollout")}
    target = parse(aim(name), zoo.model(name), 7)
    grads = trace.grads(target)
    layers = trace.differentiable().layers
    read, layout = trace.readout.double().numpy(), trace.layout
    start, n = layout.prefix, layout.tokens
    for b in range(len(trace)):
        relevance, product = np.eye(n), np.eye(n)
        for layer, grad in zip(layers, grads, strict=True):
            cam = (layer.weights_grad(grad) * layer.weights)[b].double().detach().numpy()
            relevance = relevance + np.maximum(cam, 0).mean(0) @ relevance
            step = (np.maximum(cam.mean(0), 0) + np.eye(n)) / 2
            product = (step / step.sum(1, keepdims=True)) @ product
        row = read[b] @ (relevance - np.eye(n))
        assert off(ours["gae"][b], row[start : start + layout.patches].reshape(layout.grid)) < 1e-4
        row = read[b] @ product
        assert off(ours["grad_rollout"][b], row[start : start + layout.patches].reshape(layout.grid)) < 1e-5


@pytest.mark.parametrize("kind", ["ViT", "DINOv2", "DINOv2 registers", "DINOv3", "CLIP vision", "SigLIP"])
def test_attention_gradients_are_autograds_own(kind: str) -> None:
    """∂y/∂A from the library's eager attention, against ours under sdpa with the same weights."""
    eager, images = copy.deepcopy(zoo.network(f"HF {kind} eager")), zoo.images(f"HF {kind} eager")  # it keeps hooks
    out = eager(pixel_values=images.clone().requires_grad_(), output_attentions=True)
    y = vitreous.models.output.read_output(out, kind)[:, 2].sum()
    expected = torch.autograd.grad(y, out.attentions)
    fused = zoo.ZOO[f"HF {kind} sdpa"].make().eval()
    fused.load_state_dict(eager.state_dict())
    for net in (fused, eager):
        trace = Trace(Model(net), images)
        grads = trace.grads(vitreous.trace.target.Neuron(2))
        for layer, grad, own in zip(trace.differentiable().layers, grads, expected, strict=True):
            assert off(layer.weights_grad(grad).detach(), own) < 1e-4


ENTRIES = {
    "timm ViT": lambda net, i: net.blocks[i].norm1,
    "timm ViT unfused": lambda net, i: net.blocks[i].norm1,
    "timm ViT 224×448": lambda net, i: net.blocks[i].norm1,
    "timm DeiT distilled": lambda net, i: net.blocks[i].norm1,
    "timm DINOv2 registers": lambda net, i: net.blocks[i].norm1,
    "timm DINOv3": lambda net, i: net.blocks[i].norm1,
    "timm EVA-02": lambda net, i: net.blocks[i].norm1,
    "timm BEiT": lambda net, i: net.blocks[i].norm1,
    "timm SigLIP": lambda net, i: net.blocks[i].norm1,
    "torchvision ViT": lambda net, i: net.encoder.layers[i].ln_1,
    "open_clip ViT-B-32": lambda net, i: net.visual.transformer.resblocks[i].ln_1,
    "hand-written": lambda net, i: (net.first, net.second, net.third)[i].norm,
    "HF ViT sdpa": lambda net, i: net.vit.layers[i].layernorm_before,
    "HF ViT eager": lambda net, i: net.vit.layers[i].layernorm_before,
    "HF CLIP vision sdpa": lambda net, i: net.encoder.layers[i].layer_norm1,
}


@contextmanager
def hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def plain_entry(name: str, layer: int = -1, change: Any = None, images: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """T and ∂y/∂T by a hook on the norm before a layer's attention; `change` edits T first."""
    net, model = zoo.network(name), zoo.model(name)
    depth = zoo.ZOO[name].depth
    kept: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        kept.append((out if change is None else change(out)).detach().requires_grad_())
        return kept[-1]

    with torch.enable_grad(), hooked(ENTRIES[name](net, layer % depth), hook):
        y = model.run(zoo.images(name) if images is None else images)[:, 2].sum()
    (grad,) = torch.autograd.grad(y, kept)
    return kept[0].detach(), grad


@pytest.mark.parametrize("name", ENTRIES)
def test_cdam_and_gradcam_by_hooks(name: str) -> None:
    layout = zoo.model(name).layout_at(zoo.ZOO[name].size)
    inside = slice(layout.prefix, layout.prefix + layout.patches)
    tokens, grad = plain_entry(name)
    ours = vitreous.explain(zoo.model(name), zoo.images(name), "cdam", aim(name)).map
    assert off(ours.flatten(1), (tokens * grad)[:, inside].sum(-1)) < 1e-4
    for layer in (-1, 0):
        tokens, grad = plain_entry(name, layer)
        ours = vitreous.explain(zoo.model(name), zoo.images(name), "gradcam", aim(name), layer=layer).map
        weight = grad[:, inside].mean(1, keepdim=True)
        assert off(ours.flatten(1), (tokens[:, inside] * weight).sum(-1)) < 1e-4


@pytest.mark.parametrize("name", ENTRIES)
def test_centred_cdam_by_hooks(name: str) -> None:
    """Less the mean of the patches, without CLS and registers, image by image."""
    layout = zoo.model(name).layout_at(zoo.ZOO[name].size)
    inside = slice(layout.prefix, layout.prefix + layout.patches)
    tokens, grad = (part[:, inside] for part in plain_entry(name))
    ours = vitreous.explain(zoo.model(name), zoo.images(name), "cdam", aim(name), baseline="mean").map
    assert off(ours.flatten(1), ((tokens - tokens.mean(1, keepdim=True)) * grad).sum(-1)) < 1e-4


@pytest.mark.parametrize("baseline", ["zero", "mean"])
@pytest.mark.parametrize("name", ["timm ViT", "HF ViT sdpa", "torchvision ViT", "timm SigLIP", "open_clip ViT-B-32"])
def test_integrated_cdam_by_hooks(name: str, baseline: str) -> None:
    layout = zoo.model(name).layout_at(zoo.ZOO[name].size)
    inside = slice(layout.prefix, layout.prefix + layout.patches)
    tokens, _ = plain_entry(name)
    start = tokens[:, inside].mean(1, keepdim=True) * (baseline == "mean")
    points, weights = np.polynomial.legendre.leggauss(5)
    total = sum(
        w / 2 * plain_entry(name, change=lambda t, p=p: start + (t - start) * (p + 1) / 2)[1]
        for p, w in zip(points, weights, strict=True)
    )
    options = {"variant": "integrated", "steps": 5, "baseline": baseline}
    ours = vitreous.explain(zoo.model(name), zoo.images(name), "cdam", aim(name), **options).map
    assert off(ours.flatten(1), ((tokens - start) * total)[:, inside].sum(-1)) < 1e-4


def test_integrated_cdam_from_the_mean_adds_up() -> None:
    """All tokens together, CLS among them, give y(T) − y(T̄ everywhere)."""
    trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT"))
    tokens, grad = mean_grad(trace, Class(1), "integrated", "mean", 20, 0.1, 0)
    record = trace.cut()

    def constant(entry: Tensor) -> Tensor:
        return trace.to_patches(entry).mean((1, 2))[:, None].expand_as(entry)

    start = trace.run(trace.images, Run.from_layer(trace.layout.layers - 1, constant)).output[:, 1]
    gained = (record.output[:, 1] - start).detach()
    assert off((less_baseline(trace, tokens, "mean") * grad).sum((1, 2)), gained) < 1e-3


@pytest.mark.parametrize("name", ["timm ViT", "sequence first", "timm Swin", "flat heads"])
def test_smooth_centred_cdam_is_near_the_vanilla_one(name: str) -> None:
    model, images = zoo.model(name), zoo.images(name)
    vanilla = vitreous.explain(model, images, "cdam", aim(name), baseline="mean").map
    smooth = vitreous.explain(
        model, images, "cdam", aim(name), variant="smooth", sigma=1e-4, samples=2, baseline="mean"
    ).map
    assert off(smooth, vanilla) < 1e-2
    assert off(vanilla, vitreous.explain(model, images, "cdam", aim(name)).map) > 1e-3


@pytest.mark.parametrize("similarity", ["dot", "cosine", "l2", "text"])
def test_centred_cdam_of_a_concept_or_a_text(similarity: str) -> None:
    """The same gradient as from zero, another factor; alone as in the batch."""
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    vector = torch.linspace(-1, 1, 32)
    target = Text("a line", vector) if similarity == "text" else Concept(vector, similarity)
    tokens, grad = Trace(model, images).entry_grad(target)
    expected = ((tokens - tokens[:, 1:].mean(1, keepdim=True)) * grad).sum(-1)[:, 1:]
    ours = vitreous.explain(model, images, "cdam", target, baseline="mean").map
    assert off(ours.flatten(1), expected) < 1e-5
    assert off(vitreous.explain(model, images[1:2], "cdam", target, baseline="mean").map[0], ours[1]) < 1e-4


@pytest.mark.parametrize("name", ["timm ViT", "sequence first", "flat heads", "HF ViT eager"])
def test_integrated_cdam_has_enough_steps(name: str) -> None:
    """More of them change nothing."""
    model, images = zoo.model(name), zoo.images(name)
    few, many = (
        vitreous.explain(model, images, "cdam", aim(name), variant="integrated", steps=steps).map for steps in (24, 40)
    )
    assert off(few, many) < 1e-3


@pytest.mark.parametrize("name", ["timm ViT", "sequence first", "flat heads"])
def test_smooth_cdam_is_the_mean_over_noise(name: str) -> None:
    """Little noise gives the vanilla map; the noise is each image's own, whatever the batch and the chunks."""
    model, images = zoo.model(name), zoo.images(name)

    def smooth(x: Tensor, **options: Any) -> Tensor:
        return vitreous.explain(model, x, "cdam", aim(name), variant="smooth", **options).map

    vanilla = vitreous.explain(model, images, "cdam", aim(name)).map
    assert off(smooth(images, sigma=1e-4, samples=2), vanilla) < 1e-2
    noisy = smooth(images, sigma=0.5, samples=3)
    assert off(noisy, vanilla) > 1e-2
    assert off(smooth(images[2:], sigma=0.5, samples=3)[0], noisy[2]) < 1e-4
    assert off(smooth(images, sigma=0.5, samples=3, seed=1), noisy) > 1e-3


def test_smooth_cdam_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    whole = vitreous.explain(model, images, "cdam", 2, variant="smooth", samples=5).map
    monkeypatch.setattr("vitreous.methods.attention_gradient.cdam.COPIES", 6)
    assert off(vitreous.explain(model, images, "cdam", 2, variant="smooth", samples=5).map, whole) < 1e-5


CLS = ["timm ViT", "timm ViT unfused", "timm DINOv2 registers", "torchvision ViT", "HF ViT sdpa", "HF ViT eager"]
CLS += ["hand-written", "sequence first", "open_clip ViT-B-32"]


@pytest.mark.parametrize("name", CLS)
def test_cdam_splits_into_values_and_keys(name: str) -> None:
    trace = Trace(zoo.model(name), zoo.images(name))
    for baseline in ("zero", "mean"):
        total, value, key = (
            vitreous.explain(zoo.model(name), trace, "cdam", aim(name), split=split, baseline=baseline).map
            for split in ("total", "value", "key")
        )
        assert off(value + key, total) < 1e-4
        assert value.abs().max() > 0 and key.abs().max() > 0


def test_the_value_part_is_proportional_to_attention() -> None:
    """With one head, what passes through the values is A_i times a linear reading of T_i."""
    name = "timm ViT"
    trace = Trace(zoo.model(name), zoo.images(name))
    tokens, _ = trace.entry_grad(Class(2))
    value = vitreous.explain(zoo.model(name), trace, "cdam", 2, split="value").map.flatten(1)
    layer = trace.cut().layers[-1]
    (dout,) = torch.autograd.grad(trace.score(Class(2), trace.cut()).sum(), [layer.node], retain_graph=True)
    weight = zoo.network(name).blocks[-1].attn.qkv.weight[64:].view(2, 16, 32)  # the value projection, by heads
    reading = torch.einsum("bhd,hde,bne->bhn", dout[:, :, 0], weight, tokens)
    assert off(value, (layer.weights[:, :, 0] * reading).sum(1)[:, 1:].detach()) < 1e-4


def test_split_goes_with_the_vanilla_variant_and_token_attention() -> None:
    with pytest.raises(OptionError, match="split=value works with variant=vanilla"):
        vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT"), "cdam", 1, split="value", variant="smooth")
    with pytest.raises(Unsupported, match=r"split needs attention between all tokens; .* attends in 7×7 windows"):
        vitreous.explain(zoo.model("timm Swin"), zoo.images("timm Swin"), "cdam", 1, split="value")


@pytest.mark.parametrize("pool", ["mean", "readout"])
@pytest.mark.parametrize("name", ["timm ViT", "timm BEiT", "timm DINOv2 registers"])
def test_legrad_layer_by_layer(name: str, pool: str) -> None:
    """Each layer's score by a head of its own, differentiated alone."""
    net, images, trace = zoo.network(name), zoo.images(name), Trace(zoo.model(name), zoo.images(name))
    record = trace.differentiable()
    streams: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, i, o: streams.append(o)) for block in net.blocks]
    fresh = Trace(zoo.model(name), images)
    record = fresh.differentiable()
    for hook in hooks:
        hook.remove()
    maps = []
    for stream, layer in zip(streams, record.layers, strict=True):
        read = stream.mean(1) if pool == "mean" else torch.einsum("bn,bnd->bd", fresh.readout, stream)
        score = net.forward_head(net.norm(read[:, None].expand(-1, stream.shape[1], -1)))[:, 2]
        (grad,) = torch.autograd.grad(score.sum(), [layer.node], retain_graph=True)
        maps.append(layer.weights_grad(grad).clamp_min(0).mean((1, 2)))
    expected = trace.layout.to_map(torch.stack(maps).mean(0).detach())
    assert off(vitreous.explain(zoo.model(name), images, "legrad", aim(name), pool=pool).map, expected) < 1e-4


def plain_gradient(name: str, images: Tensor) -> Tensor:
    x = images.clone().requires_grad_()
    (grad,) = torch.autograd.grad(zoo.model(name).run(x)[:, 2].sum(), [x])
    return grad


@pytest.mark.parametrize("name", ["timm ViT", *rare("timm Swin", "HF ViT sdpa", "timm SigLIP")])
def test_pixel_methods_are_plain_autograd(name: str) -> None:
    model, images = zoo.model(name), zoo.images(name)
    grad = plain_gradient(name, images)
    assert off(vitreous.explain(model, images, "gradient", aim(name)).map, grad.abs().mean(1)) < 1e-4
    assert off(vitreous.explain(model, images, "input_x_gradient", aim(name)).map, (images * grad).sum(1)) < 1e-4
    points = (torch.arange(100) + 0.5) / 100
    way = sum(plain_gradient(name, images * p) for p in points) / 100
    ours = vitreous.explain(model, images, "integrated_gradients", aim(name), steps=20)
    assert off(ours.map, (images * way).sum(1)) < 2e-2
    with torch.no_grad():
        gained = (model.run(images) - model.run(images * 0))[:, 2]
    assert torch.allclose(ours.map.sum((1, 2)) - ours.notes["completeness_error"], gained, atol=1e-4)
    assert ours.notes["completeness_error"].abs().max() < 0.05 * gained.abs().max()


@pytest.mark.parametrize("at_once", [True, False])
def test_points_at_once_keep_each_image_s_class(at_once: bool) -> None:
    model, images, classes = zoo.model("timm ViT"), zoo.images("timm ViT"), [1, 2, 3]
    points, weights = np.polynomial.legendre.leggauss(4)
    expected = torch.zeros_like(images)
    for point, weight in zip(points, weights):
        x = ((point + 1) / 2 * images).requires_grad_()
        y = model.net(x)[range(3), classes].sum()
        expected += weight / 2 * torch.autograd.grad(y, x)[0]
    with vitreous.limit_memory(None if at_once else 1):
        ours = vitreous.explain(model, images, "integrated_gradients", classes, steps=4).map
    assert off(ours, (images * expected).sum(1)) < 1e-5


@pytest.mark.parametrize("baseline", ["zero", "blur", "noise"])
def test_integrated_gradients_are_complete_from_every_baseline(baseline: str) -> None:
    ours = vitreous.explain(
        zoo.model("timm ViT"), zoo.images("timm ViT"), "integrated_gradients", 2, steps=40, baseline=baseline
    )
    assert ours.notes["completeness_error"].abs().max() < 1e-3


def test_smoothgrad_power_and_noise() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")

    def smooth(**options: Any) -> Tensor:
        return vitreous.explain(model, images, "smoothgrad", 2, **options).map

    grad = plain_gradient("timm ViT", images)
    assert off(smooth(samples=2, sigma=1e-5, reduce="sum"), grad.sum(1)) < 1e-2
    assert off(smooth(samples=2, sigma=1e-5, power=2, reduce="sum"), grad.square().sum(1)) < 1e-2
    assert off(smooth(samples=2), smooth(samples=2, seed=3)) > 1e-3


def test_the_best_class_stays_while_the_image_changes() -> None:
    """top-1 on noisy copies means the class of the clean image."""
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    best = Trace(model, images).output.argmax(-1).tolist()
    for method, options in (("smoothgrad", {"samples": 2}), ("integrated_gradients", {"steps": 3}), ("cdam", {})):
        ours = vitreous.explain(model, images, method, **options)
        assert off(ours.map, vitreous.explain(model, images, method, best, **options).map) <= ROUNDING
        assert ours.targets == tuple(map(str, best))


def test_several_targets_share_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.model("timm ViT")
    runs: list[int] = []
    plain = Model.run
    monkeypatch.setattr(Model, "run", lambda self, images: runs.append(len(images)) or plain(self, images))
    for method in ("cdam", "gradcam", "gae", "grad_rollout", "gradient", "input_x_gradient"):
        trace = Trace(model, zoo.images("timm ViT"))
        trace.least(Run.to_output())  # what is found out once for a model
        runs.clear()
        maps = [vitreous.explain(model, trace, method, target).map for target in (0, 1, "top-1", "2-3")]
        assert len(runs) == 1, method
        assert not torch.equal(maps[0], maps[1])


def test_contrast_is_the_difference_for_linear_methods() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    for method in ("cdam", "gradcam", "input_x_gradient"):
        one, other, both = (vitreous.explain(model, images, method, t).map for t in (2, 5, "2-5"))
        assert off(both, one - other) < 1e-4


@pytest.mark.parametrize("method", ["gae", "cdam", "gradcam", "gradient", "attention", "rollout", "legrad"])
def test_autocast_is_the_models_affair(method: str) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    exact = vitreous.explain(model, images, method, 1).map
    with torch.autocast("cpu", torch.bfloat16):
        mixed = vitreous.explain(model, images, method, 1).map
    assert mixed.dtype == torch.float32
    assert not torch.equal(mixed, exact)
    assert torch.corrcoef(torch.stack([mixed.flatten(), exact.flatten()]))[0, 1] > 0.9


@pytest.mark.parametrize("method", ["gae", *rare("cdam", "rollout", "legrad", "gradient", "attention")])
def test_a_trace_frees_its_memory_at_once(method: str) -> None:
    """No cycle holds a tensor of it until the garbage collector comes."""
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    vitreous.explain(model, images, method, 1)  # what is found out once for a model stays
    gc.collect()
    gc.disable()
    try:
        before = len(tensors())
        trace = Trace(model, images)
        vitreous.explain(model, trace, method, 1)
        assert len(tensors()) > before
        del trace
        assert len(tensors()) == before
    finally:
        gc.enable()


def tensors() -> list[Tensor]:
    """All that are alive."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def test_only_the_last_block_is_differentiated_for_cdam_and_gradcam() -> None:
    net, images = copy.deepcopy(zoo.network("timm ViT")), zoo.images("timm ViT")
    model, seen = Model(net), []
    Trace(model, images).least(Run.to_output())  # what is found out once for a model

    def watched(number: int, run: Any) -> Any:
        def forward(x: Tensor) -> Tensor:
            out: Tensor = run(x)
            seen.append((number, x.requires_grad, out.requires_grad))
            return out

        return forward

    for number, block in enumerate(net.blocks):
        block.forward = watched(number, block.forward)
    trace = Trace(model, images)
    for method in ("cdam", "gradcam"):
        vitreous.explain(model, trace, method, 1)
    assert seen == [(0, False, False), (1, False, False), (2, False, True)], "one run for both"
    run = trace.cut()
    assert not run.images.requires_grad and run.entry is not None and run.entry.grad_fn is None
    assert [layer.name for layer in run.layers] == ["blocks.2.attn"]


def test_a_gpu_with_too_little_memory_gets_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.model("timm ViT"), torch.randn(7, 3, 64, 64)
    expected = vitreous.explain(model, images, "cdam", [0, 1, 2, 3, 4, 5, 6]).map
    sizes: list[int] = []
    plain = Model.run

    def run(self: Model, x: Tensor) -> Tensor:
        sizes.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return plain(self, x)

    monkeypatch.setattr(Model, "run", run)
    assert off(vitreous.explain(model, images, "cdam", [0, 1, 2, 3, 4, 5, 6]).map, expected) < 1e-5
    assert sizes == [7, 3, 1, 1, 1, 1, 1, 1, 1]


class Frozen(nn.Module):
    """A head on a backbone that is run without gradients, as many fine-tuned models are."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.body, self.context, self.head = zoo.network("timm ViT"), context, nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            z = self.body.forward_head(self.body.forward_features(x), pre_logits=True)
        return self.head(z)


@pytest.mark.parametrize("method", ["gae", "cdam", "gradcam", "gradient", "legrad", "grad_rollout"])
def test_frozen_parts_are_differentiated_all_the_same(method: str) -> None:
    torch.manual_seed(0)
    frozen = Frozen(torch.no_grad)
    free = Frozen(torch.enable_grad)
    free.load_state_dict(frozen.state_dict())
    images = zoo.images("timm ViT")
    ours, expected = (vitreous.explain(Model(net), images, method, 1).map for net in (frozen, free))
    assert ours.abs().max() > 0
    assert off(ours, expected) <= ROUNDING


def test_inference_mode_inside_a_model_is_said() -> None:
    model, images = Model(Frozen(torch.inference_mode)), zoo.images("timm ViT")
    assert vitreous.explain(model, images, "rollout").map.isfinite().all()
    with pytest.raises(vitreous.VitreousError, match=r"nference|without gradients"):
        vitreous.explain(model, images, "gradient", 1)
