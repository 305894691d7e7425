"""Models of other libraries that were once explained wrongly: each gets the right map, or a refusal that is true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import ROUNDING
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, Class, Model, Trace
from vitreous.errors import ModelError, Unsupported

pytestmark = pytest.mark.slow  # the same kinds, smaller, are in test_measured_layout and test_kinds

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
SIZES = {**SMALL, "image_size": 64, "patch_size": 16}
NETWORK_FREE = ("centre", "random")  # methods that say nothing about a network


def lively(net: Any, scale: float = 1.5) -> Any:
    """Weights large enough that tokens differ, attention is uneven and every parameter counts."""
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            drawn = torch.randn(parameter.shape, generator=made)
            if parameter.ndim > 1:
                parameter.copy_(drawn * (scale / parameter[0].numel() ** 0.5 if parameter.shape[0] > 1 else 0.3))
            else:
                parameter.add_(0.1 * drawn)
    return net.eval()


def gradient_of(model: Model, images: Tensor, target: int) -> Tensor:
    """The gradient map, summed over the channels, by autograd alone."""
    x = images.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model.run(x)[:, target].sum(), [x])
    return grad.sum(1)


def is_autograd(model: Model, images: Tensor, target: int = 0) -> None:
    found = vitreous.explain(model, images, "gradient", target, reduce="sum").map
    assert off(found, gradient_of(model, images, target)) <= ROUNDING


# --------------------------------------------------------------------------------------------------------------- Hiera


@pytest.fixture(scope="module")
def hiera() -> Model:
    import timm

    return Model(lively(timm.create_model("hiera_tiny_224", num_classes=7, embed_dim=24)))


@pytest.mark.slow
def test_hiera_keeps_its_tokens_in_units(hiera: Model) -> None:
    """The order is that in which the network's own `unroll` puts the numbers of the patches."""
    layout, net = hiera.layout_at((224, 224)), hiera.net
    assert layout.grid == (56, 56)
    numbers = net.unroll(torch.arange(3136.0).view(1, -1, 1)).flatten().long()
    grid, order = layout.orders[3136]
    assert grid == (56, 56) and list(order) == numbers.argsort().tolist()


@pytest.mark.slow
def test_a_change_of_hiera_shows_in_its_own_cell(hiera: Model) -> None:
    """The pixel in the middle of a patch is seen by the token of that patch alone."""
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))

    def tokens(images: Tensor) -> Tensor:
        trace = Trace(hiera, images)
        return trace.to_patches(trace.entry_grad(Class(0), 0)[0])[0]  # [56 56 D]

    before = tokens(images)
    for row, column in [(0, 8), (10, 20), (40, 50), (55, 55)]:
        changed = images.clone()
        changed[..., 4 * row, 4 * column] += 2
        assert (tokens(changed) - before).norm(dim=-1).nonzero().tolist() == [[row, column]]
    maps = vitreous.explain(hiera, images, "attn_lrp", 0).map
    assert maps.shape == (1, 56, 56) and maps.isfinite().all()
    is_autograd(hiera, images)


# ----------------------------------------------------------------------------------------------------- shuffled tokens


@pytest.mark.parametrize("ratio", [0.0, 0.75])
def test_every_method_refuses_a_masked_autoencoder(ratio: float) -> None:
    transformers = zoo.library("transformers", "hf")
    model = Model(lively(transformers.ViTMAEModel(transformers.ViTMAEConfig(**SIZES, mask_ratio=ratio))))
    for method, declared in METHODS.items():
        if method in NETWORK_FREE:
            continue
        with pytest.raises(ModelError, match="another result when it is run again"):
            vitreous.explain(model, IMAGES, method, "neuron:0" if declared.targeted else None)


# -------------------------------------------------------------------------------------------------------- dense outputs


def test_a_segmentation_that_reads_several_layers() -> None:
    transformers = zoo.library("transformers", "hf")
    more = {"out_indices": [1, 2, 3, 4], "use_relative_position_bias": True, "use_auxiliary_head": False}
    config = transformers.BeitConfig(**{**SIZES, "num_hidden_layers": 4}, **more)
    config.num_labels = 7
    net = lively(transformers.BeitForSemanticSegmentation(config))
    model = Model(net, forward=lambda x: net(pixel_values=x).logits.mean((2, 3)), classifier=True)
    is_autograd(model, IMAGES)
    for method in ("attention", "legrad", "token_ablation"):
        with pytest.raises(Unsupported, match=r"also reads the tokens of layers 0, 1\."):
            vitreous.explain(model, IMAGES, method, 0)
    for method in ("rollout", "gae"):
        assert vitreous.explain(model, IMAGES, method, 0).map.abs().max() > 0


def test_a_detector_has_no_map_of_its_queries() -> None:
    """A map has the shape of the grid and says something, or there is none."""
    transformers = zoo.library("transformers", "hf")
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 5}
    layers = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    backbone = {"use_timm_backbone": True, "backbone": "resnet18", "use_pretrained_backbone": False}
    net = transformers.DetrForObjectDetection(transformers.DetrConfig(**sizes, **layers, **backbone)).eval()
    model = Model(net, forward=lambda x: net(pixel_values=x).logits[:, 0], classifier=True)
    images = torch.randn(1, 3, 128, 192)
    grid = model.layout_at((128, 192)).grid
    assert grid == (4, 6)
    for method in ("gradcam", "cdam", "attention", "gae", "attn_lrp"):
        try:
            found = vitreous.explain(model, images, method, 0).map
        except Unsupported:
            continue
        assert found.shape[1:] in (grid, (128, 192)) and found.any(), method
    is_autograd(model, images)


# ----------------------------------------------------------------------------------------------------- language models


def llava() -> tuple[Model, Any]:
    """One word, sixteen image tokens and two words; the output is the next word."""
    transformers = zoo.library("transformers", "hf")
    text = transformers.LlamaConfig(
        **{**SMALL, "num_hidden_layers": 2, "intermediate_size": 48}, num_key_value_heads=2, vocab_size=99
    )
    vision = transformers.CLIPVisionConfig(**SIZES)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=98)
    net = lively(transformers.LlavaForConditionalGeneration(config), scale=0.5)
    words = torch.tensor([[1, *[98] * 16, 5, 6]])

    def forward(x: Tensor) -> Tensor:
        ids = words.expand(len(x), -1)
        logits: Tensor = net(pixel_values=x, input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1]
        return logits

    return Model(net, forward=forward, classifier=True), net


def test_the_image_tokens_of_a_language_model() -> None:
    """Tokens 1 … 16 of what enters the last attention; 0, 17 and 18 are words."""
    model, _ = llava()
    trace = Trace(model, IMAGES)
    entered, grad = trace.entry_grad(Class(5), -1)
    assert entered.shape[1] == 19
    assert torch.equal(trace.to_patches(entered).flatten(1, 2), entered[:, 1:17])
    expected = (entered[:, 1:17] * grad[:, 1:17].mean(1, keepdim=True)).sum(-1).view(2, 4, 4)
    assert off(vitreous.explain(model, IMAGES, "gradcam", 5).map, expected) <= ROUNDING
    is_autograd(model, IMAGES, 5)
    maps = vitreous.explain(model, IMAGES, "gae", 5).map
    assert maps.shape == (2, 4, 4) and maps.flatten(1).std(1).min() > 0


def test_gradcam_of_a_language_model_by_hand() -> None:
    model, net = llava()
    seen: list[Tensor] = []
    hook = net.model.language_model.layers[-1].input_layernorm.register_forward_hook(lambda *a: seen.append(a[2]))
    score = model.run(IMAGES)[:, 5].sum()
    hook.remove()
    (grad,) = torch.autograd.grad(score, seen)
    tokens, grad = seen[0][:, 1:17].detach(), grad[:, 1:17]
    expected = (tokens * grad.mean(1, keepdim=True)).sum(-1).view(2, 4, 4)
    assert off(vitreous.explain(model, IMAGES, "gradcam", 5).map, expected) <= ROUNDING


class Threefold(nn.Module):
    """A norm written by hand, then three linear layers, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.place = nn.Conv2d(3, 32, 16, 16), nn.Parameter(torch.randn(1, 16, 32))
        self.q, self.k, self.v, self.head = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.before(x))

    def before(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).mT + self.place
        return x * x.square().mean(-1, keepdim=True).rsqrt()

    def behind(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


def test_gradients_of_tokens_that_three_layers_read() -> None:
    net = Threefold().eval()
    tokens, found = Trace(Model(net), IMAGES).entry_grad(Class(1), 0)
    leaf = net.before(IMAGES).detach().requires_grad_()
    (expected,) = torch.autograd.grad(net.behind(leaf)[:, 1].sum(), [leaf])
    assert torch.equal(tokens, leaf.detach())
    assert off(found, expected) <= ROUNDING


def test_packed_images_are_explained_each_alone() -> None:
    transformers = zoo.library("transformers", "hf")
    config = transformers.PixtralVisionConfig(**{**SIZES, "image_size": 96})
    model = Model(lively(transformers.PixtralVisionModel(config)))
    images = torch.randn(2, 3, 64, 96)
    assert len(model.run(images)) == 2, "packed for the network, one row for each"
    for method in ("gradient", "gradcam", "attention", "rollout", "gae"):
        target = "neuron:0" if METHODS[method].targeted else None
        both = vitreous.explain(model, images, method, target).map
        each = torch.cat([vitreous.explain(model, image[None], method, target).map for image in images])
        assert off(both, each) <= ROUNDING and both.flatten(1).any(1).all(), method
    scores = vitreous.evaluate(model, images, "gradient", "token_deletion", target="neuron:0").value
    alone = vitreous.evaluate(model, images[1:], "gradient", "token_deletion", target="neuron:0").value
    assert off(scores[1:], alone) <= 10 * ROUNDING


# ------------------------------------------------------------------------------------- no preprocessing for a tensor


def test_a_wrapped_network_is_the_network() -> None:
    transformers = zoo.library("transformers", "hf")
    args = {"img_size": 64, "embed_dim": 32, "depth": 3, "num_heads": 2}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", num_labels=7, model_args=args)
    net = lively(transformers.TimmWrapperForImageClassification(config))
    for method in ("attention", "gae", "gradient"):
        ours, expected = (vitreous.explain(one, IMAGES, method, 0).map for one in (net, net.timm_model))
        assert off(ours, expected) <= ROUNDING, method


def test_the_tower_of_sam() -> None:
    """Global attention with relative positions; the mean of the tokens is read behind convolutions."""
    transformers = zoo.library("transformers", "hf")
    sizes = {**SIZES, "num_hidden_layers": 2, "output_channels": 16, "mlp_dim": 32, "global_attn_indexes": [0, 1]}
    del sizes["intermediate_size"]
    config = transformers.SamVisionConfig(**sizes)
    config._attn_implementation = "eager"
    net = lively(transformers.SamVisionModel._from_config(config))
    model = Model(net, forward=lambda x: net(pixel_values=x).last_hidden_state.mean((2, 3)), classifier=True)
    layout = model.layout_at((64, 64))
    assert (layout.grid, layout.obstacle, layout.layers) == ((4, 4), None, 2)
    is_autograd(model, IMAGES)
    own: list[Tensor] = []
    plain = nn.functional.softmax

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        own.append(plain(*args, **kwargs))
        return own[-1]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "softmax", noted)
        model.run(IMAGES)
    assert len(own) == 2
    for layer, expected in zip(Trace(model, IMAGES).attention, own, strict=True):
        assert off(layer.weights, expected.view(2, 2, 16, 16)) <= ROUNDING


def test_a_convolutional_transformer() -> None:
    transformers = zoo.library("transformers", "hf")
    config = transformers.CvtConfig(depth=[1, 2, 3], embed_dim=[8, 16, 32], num_heads=[1, 1, 2])
    model = Model(lively(transformers.CvtForImageClassification(config)))
    is_autograd(model, IMAGES)
    maps = vitreous.explain(model, IMAGES, "attention").map
    assert maps.shape == (2, *model.layout_at((64, 64)).grid) and maps.flatten(1).std(1).min() > 0


def test_a_film_as_one_tall_image() -> None:
    transformers = zoo.library("transformers", "hf")
    config = transformers.VideoMAEConfig(**{**SIZES, "image_size": 32}, num_frames=4)
    config.num_labels = 7
    net = lively(transformers.VideoMAEForVideoClassification(config))

    def forward(x: Tensor) -> Tensor:
        logits: Tensor = net(pixel_values=x.unflatten(2, (4, 32)).movedim(2, 1)).logits
        return logits

    is_autograd(Model(net, forward=forward, classifier=True), torch.randn(2, 3, 128, 32))


# ---------------------------------------------------------------------------------------------------- one image's norm

NORMED: dict[str, tuple[dict[str, Any], int]] = {
    "xcit_nano_12_p16_224": ({"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 2}, 64),
    "levit_128s": ({}, 224),
    "efficientformer_l1": ({}, 224),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name[0] != "x")) for name in NORMED])
def test_the_gradient_of_one_image_is_its_slope(name: str) -> None:
    """Against finite differences: torch's own gradient through batch norm is wrong for one image on a CPU."""
    import timm

    options, side = NORMED[name]
    net = timm.create_model(name, num_classes=7, **options).double().eval().requires_grad_(False)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm1d):
            part.running_var.uniform_(0.5, 2)
    for part, parameter in net.named_parameters():
        if parameter.ndim == 1 and 0 < parameter.abs().max() < 1e-2 and "bias" not in part:
            parameter.fill_(0.3)
    model, images = Model(net), torch.randn(1, 3, side, side, dtype=torch.float64)
    grad = vitreous.explain(model, images, "gradient", 0, reduce="sum").map.double()
    step = 1e-6 * torch.randn(side, side, dtype=torch.float64)  # in every channel; few ReLUs change their side
    with torch.no_grad():
        expected = (net(images + step) - net(images - step))[:, 0].sum() / 2
    found = grad * step
    assert float(found.sum()) == pytest.approx(float(expected), rel=1e-4, abs=1e-4 * float(found.norm()))
    pair = torch.cat([images, torch.randn_like(images)])
    assert off(vitreous.explain(model, pair, "gradient", 0, reduce="sum").map[:1], grad) <= ROUNDING
