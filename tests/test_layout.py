"""What the probe finds, against the true geometry of every family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import ROUNDING
from torch import nn

import vitreous
from vitreous import Layout, Model, Trace
from vitreous.errors import ModelError, Unsupported


@pytest.mark.parametrize("name", zoo.ZOO)
def test_geometry(name: str) -> None:
    entry, layout = zoo.ZOO[name], zoo.model(name).layout_at(zoo.ZOO[name].size)
    assert layout.grid == entry.grid
    assert (layout.obstacle is None) == entry.flow
    if not entry.flow:
        return
    assert layout.prefix == entry.prefix
    assert layout.pooled == (entry.readout == "pool")
    patches = tuple(range(entry.prefix, entry.prefix + entry.grid[0] * entry.grid[1]))
    assert layout.readout == (patches if isinstance(entry.readout, str) else entry.readout)
    assert layout.patch == (entry.size[0] // entry.grid[0], entry.size[1] // entry.grid[1])
    assert len(Trace(zoo.model(name), zoo.images(name)).attention) == entry.depth


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("timm ViT", ("blocks.0", "blocks.1", "blocks.2")),
        ("HF ViT sdpa", ("vit.layers.0", "vit.layers.1", "vit.layers.2")),
        ("hand-written", ("first", "second", "third")),
        ("sequence first", ("body.layers.0", "body.layers.1", "body.layers.2")),
        ("flat heads", ()),
    ],
)
def test_blocks(name: str, blocks: tuple[str, ...]) -> None:
    assert zoo.model(name).layout_at(zoo.ZOO[name].size).blocks == blocks


def test_readout_weights() -> None:
    cls = Trace(zoo.model("timm ViT"), zoo.images("timm ViT")).readout
    assert cls[0].tolist() == [1.0] + [0.0] * 16
    both = Trace(zoo.model("timm DeiT distilled"), zoo.images("timm DeiT distilled")).readout
    assert both[0, :3].tolist() == [0.5, 0.5, 0.0]
    mean = Trace(zoo.model("timm BEiT"), zoo.images("timm BEiT")).readout
    assert torch.allclose(mean[0], torch.tensor([0.0] + [1 / 16] * 16))
    beside = Trace(zoo.model("HF DINOv2 sdpa"), zoo.images("HF DINOv2 sdpa")).readout  # CLS beside the mean of patches
    assert torch.allclose(beside[0], torch.tensor([0.5] + [0.5 / 16] * 16))


@pytest.mark.parametrize("name", ["timm SigLIP", "HF SigLIP sdpa"])
def test_pooled_readout_is_the_pools_own_row(name: str) -> None:
    trace = Trace(zoo.model(name), zoo.images(name))
    assert torch.allclose(trace.readout.sum(-1), torch.ones(3), atol=1e-5)
    assert (trace.readout[0] != trace.readout[1]).any()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("timm XCiT", "attends between channels"),
    ],
)
@pytest.mark.parametrize("method", ["attention", "rollout"])
def test_flow_methods_refuse_and_name_what_works(name: str, reason: str, method: str) -> None:
    with pytest.raises(Unsupported, match=f"{method} needs token attention; .*{reason}.*Try ") as caught:
        vitreous.explain(zoo.model(name), zoo.images(name), method)
    advised = str(caught.value).split("Try ")[1].rstrip(".").replace(" or ", ", ").split(", ")
    for other in advised:
        assert vitreous.explain(zoo.model(name), zoo.images(name), other).map.isfinite().all()


def test_a_model_without_attention_refuses() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model, images = Model(net), torch.randn(1, 3, 64, 64)
    for method in ("rollout", "gradcam", "cdam"):
        with pytest.raises(Unsupported, match=r"shows no attention.*Try .*\bgradient\b") as caught:
            vitreous.explain(model, images, method, 1)
        assert "gradcam" not in str(caught.value).split("Try ")[1]
    assert vitreous.explain(model, images, "gradient", 1).map.abs().max() > 0


def test_later_stages_of_windowed_models_are_placed() -> None:
    import timm

    options = {"img_size": (64, 128), "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
    net = timm.create_model("swinv2_tiny_window8_256", **options, num_classes=5).eval()
    for name, weight in net.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.ones_(weight)  # timm begins with zeros, so that no attention matters
    ours = vitreous.explain(Model(net), torch.randn(2, 3, 64, 128), "gradcam", 1).map
    assert ours.shape == (2, 8, 16), "4-pixel patches, merged two by two"


def test_torchscript_is_refused() -> None:
    class Small(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((1, 2, 3))[:, None]

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.trace(Small(), torch.randn(1, 3, 8, 8))
    with pytest.raises(ModelError, match=r"TorchScript.*give the nn\.Module"):
        Model(script)


def test_a_layout_given_by_hand_is_used() -> None:
    """The same tokens, told to be a 2×8 grid read by their mean."""
    net, images = zoo.network("timm ViT"), zoo.images("timm ViT")
    wide = Model(net, layout=Layout(grid=(2, 8), prefix=1, readout=tuple(range(1, 17))))
    ours = vitreous.explain(wide, images, "attention").map
    a = Trace(zoo.model("timm ViT"), images).attention[-1].weights.mean(1)
    assert ours.shape == (3, 2, 8)
    assert torch.allclose(ours.flatten(1), a[:, 1:, 1:].mean(1), atol=1e-6)


def test_a_wrong_layout_given_by_hand_says_so() -> None:
    wrong = Model(zoo.network("timm ViT"), layout=Layout(grid=(3, 3), prefix=1))
    with pytest.raises(vitreous.VitreousError, match="check the given layout"):
        vitreous.explain(wrong, zoo.images("timm ViT"), "attention")


def test_another_size_is_probed_anew() -> None:
    import timm

    net = timm.create_model("vit_tiny_patch16_224", embed_dim=32, depth=2, num_heads=2, dynamic_img_size=True)
    model = Model(net)
    assert vitreous.explain(model, torch.randn(1, 3, 224, 224), "rollout").map.shape == (1, 14, 14)
    assert vitreous.explain(model, torch.randn(1, 3, 96, 160), "rollout").map.shape == (1, 6, 10)


class Loop(nn.Module):
    """A hand-written attention that forms one head after the other, from plain parameters."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.cut, self.head, self.heads = nn.Conv2d(3, 32, 16, 16), nn.Linear(32, 5), heads
        self.maps = nn.ParameterList(nn.Parameter(torch.randn(3, 32, 32) / 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).mT
        for weights in self.maps:
            parts = [(x @ weight).chunk(self.heads, -1) for weight in weights]
            x = x + torch.cat([(q @ k.mT / 4).softmax(-1) @ v for q, k, v in zip(*parts, strict=True)], -1)
        return self.head(x.mean(1))


def test_heads_one_by_one_are_refused_by_all_flow_methods() -> None:
    torch.manual_seed(0)

    class Projected(Loop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.cut(x).flatten(2).mT
            for weights in self.maps:
                q, k, v = (nn.functional.linear(x, weight).chunk(2, -1) for weight in weights)
                x = x + torch.cat([(a @ b.mT).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)], -1)
            return self.head(x.mean(1))

    model, images = Model(Projected(2)), torch.randn(2, 3, 64, 64)
    for method in vitreous.METHODS:
        if vitreous.METHODS[method].attention:
            with pytest.raises(Unsupported, match="computes its heads one by one"):
                vitreous.explain(model, images, method, 1)


def test_layers_without_norms_and_linear_layers_are_followed() -> None:
    torch.manual_seed(0)
    model, images = Model(Loop(1)), torch.randn(2, 3, 64, 64)
    assert model.layout_at((64, 64)).layers == 2
    for method in ("attention", "rollout", "gae", "grad_rollout", "gradient"):
        assert vitreous.explain(model, images, method, 1).map.abs().max() > 0
    with pytest.raises(Unsupported, match="no visible tokens before its attention"):
        vitreous.explain(model, images, "cdam", 1)


class Nested(nn.Module):
    """Blocks as lists of an attention and an MLP, the residual outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.head = nn.Conv2d(3, 32, 16, 16), nn.Linear(32, 5)
        mlp = lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())  # noqa: E731
        attention = lambda: nn.MultiheadAttention(32, 2, batch_first=True)  # noqa: E731
        self.layers = nn.ModuleList(nn.ModuleList([attention(), mlp()]) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).mT
        for attention, mlp in self.layers:
            x = x + attention(x, x, x)[0]
            x = x + mlp(x)
        return self.head(x.mean(1))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = zoo.ZOO["timm ViT"].make(), zoo.ZOO["timm ViT"].make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x.flip(-1))


def test_what_needs_a_chain_of_blocks_says_so() -> None:
    torch.manual_seed(0)
    model, images = Model(Nested().eval(), classifier=True), torch.randn(2, 3, 64, 64)
    with pytest.raises(Unsupported, match=r"module of its own|from block to block"):
        vitreous.explain(model, images, "legrad", 1)
    for method in ("attention", "rollout", "gae", "gradient"):
        assert vitreous.explain(model, images, method, 1).map.abs().max() > 0


class Sized(nn.Module):
    """It counts its images before the blocks, so that no rows can be added behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = zoo.ZOO["timm ViT"].make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.forward_head(self.inner.forward_features(x).reshape(len(x), -1, 32))


def test_smooth_cdam_where_the_end_cannot_take_more_images() -> None:
    torch.manual_seed(0)
    model, images = Model(Sized().eval(), classifier=True), torch.randn(2, 3, 64, 64)
    ours = vitreous.explain(model, images, "cdam", 1, variant="smooth", samples=2).map
    plain = vitreous.explain(Model(model.net.inner), images, "cdam", 1, variant="smooth", samples=2).map
    assert plain.abs().max() > 0 and off(ours, plain) <= ROUNDING


def test_towers_that_are_both_read_are_refused() -> None:
    torch.manual_seed(0)
    model, images = Model(Towers().eval(), classifier=True), torch.randn(2, 3, 64, 64)
    for method in ("attention", "rollout", "gae", "legrad", "cdam", "gradcam"):
        with pytest.raises(Unsupported, match="separate passes or parallel branches"):
            vitreous.explain(model, images, method, 1)
    leaf = images.clone().requires_grad_()
    model.net(leaf)[:, 1].sum().backward()
    ours = vitreous.explain(model, images, "gradient", 1).map
    assert off(ours, leaf.grad.abs().mean(1)) <= ROUNDING


def test_checkpointed_models_are_explained_as_they_are() -> None:
    net = zoo.ZOO["timm ViT"].make().eval()
    net.load_state_dict(zoo.network("timm ViT").state_dict())
    net.set_grad_checkpointing(True)
    net.train()
    for method in ("gae", "grad_rollout", "cdam", "legrad"):
        ours = vitreous.explain(Model(net), zoo.images("timm ViT"), method, 1).map
        plain = vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT"), method, 1).map
        assert off(ours, plain) <= ROUNDING
    assert net.grad_checkpointing and net.training


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["timm DINOv3", "timm SigLIP", "timm ViT", "hand-written"])
def test_the_layout_is_the_same_without_gradients(name: str, context: Any) -> None:
    """A caller who works without gradients gets the same read-out, hence the same maps."""
    net, images = zoo.network(name), zoo.images(name)
    usual = vitreous.explain(Model(copy.deepcopy(net)), images, "rollout").map
    model = Model(copy.deepcopy(net))
    with context():
        found = model.layout_at(zoo.ZOO[name].size)
        maps = vitreous.explain(model, images, "rollout").map
    assert found.readout == zoo.model(name).layout_at(zoo.ZOO[name].size).readout
    assert off(maps, usual) <= ROUNDING
