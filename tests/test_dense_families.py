"""Tiny random networks of transformers with an output for each place: each family against its own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="these models are those of transformers: pip install 'vitreous[hf]'")

import transformers as hf

import vitreous
from vitreous import Model, Trace
from vitreous.errors import Unsupported
from vitreous.models.output import Form, Meaning

CLASSES, SIZE = 5, 64
VIT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
POINT, TARGET = (40, 20), "1@40,20"  # x, y
FOLLOWED, LAST, NONE = "gae rollout grad_rollout", "attention gae rollout grad_rollout", ""


def awake(net: nn.Module) -> Any:
    """Weights under which outputs differ from place to place; the usual ones of transformers are nearly zero."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=draw) * 1.2 / p[0].numel() ** 0.5)
            elif name.endswith("bias"):
                p.fill_(2.0 if name == "head.conv3.bias" else 0.05)  # of a depth, which is clipped at zero
    return net.eval()


def swin() -> Any:
    heads, depths = [1, 2, 2, 2], [1, 1, 1, 1]
    return hf.SwinConfig(
        image_size=SIZE, patch_size=4, embed_dim=8, depths=depths, num_heads=heads, window_size=4, out_features=STAGES
    )


def segformer() -> Any:
    config = hf.SegformerConfig(
        num_labels=CLASSES,
        hidden_sizes=[16, 16, 16, 16],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=16,
        num_attention_heads=[1, 2, 2, 2],
    )
    return hf.SegformerForSemanticSegmentation(config)


def beit() -> Any:
    config = hf.BeitConfig(
        **VIT, image_size=SIZE, patch_size=16, num_labels=CLASSES, out_indices=[1, 2, 3, 4], pool_scales=[1, 2]
    )
    return hf.BeitForSemanticSegmentation(config)


def dpt(kind: str) -> Any:
    config = hf.DPTConfig(
        **VIT,
        image_size=SIZE,
        patch_size=16,
        num_labels=CLASSES,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        backbone_out_indices=[0, 1, 2, 3],
    )
    return getattr(hf, f"DPTFor{kind}")(config)


def depth_anything() -> Any:
    backbone = hf.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
    )
    config = hf.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=32,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        head_hidden_size=8,
    )
    return hf.DepthAnythingForDepthEstimation(config)


def upernet() -> Any:
    config = hf.UperNetConfig(backbone_config=swin(), hidden_size=16, num_labels=CLASSES, pool_scales=[1, 2])
    return hf.UperNetForSemanticSegmentation(config)


def eomt() -> Any:
    config = hf.EomtConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=16,
        num_blocks=2,
        num_queries=6,
        num_labels=CLASSES,
        num_upscale_blocks=1,
    )
    return hf.EomtForUniversalSegmentation(config)


def mask2former() -> Any:
    config = hf.Mask2FormerConfig(
        backbone_config=swin(),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=6,
        num_labels=CLASSES,
    )
    return hf.Mask2FormerForUniversalSegmentation(config)


def maskformer() -> Any:
    decoder = hf.DetrConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=6,
    )
    config = hf.MaskFormerConfig(
        backbone_config=swin(),
        decoder_config=decoder,
        fpn_feature_size=32,
        mask_feature_size=32,
        num_labels=CLASSES,
    )
    return hf.MaskFormerForInstanceSegmentation(config)


FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "SegFormer": (segformer, FOLLOWED),
    "BEiT": (beit, FOLLOWED),
    "DPT": (lambda: dpt("SemanticSegmentation"), FOLLOWED),
    "DPT depth": (lambda: dpt("DepthEstimation"), FOLLOWED),
    "Depth Anything": (depth_anything, FOLLOWED),
    "UperNet": (upernet, FOLLOWED),
    "EoMT": (eomt, LAST),
    "Mask2Former": (mask2former, NONE),
    "MaskFormer": (maskformer, NONE),
}
DEPTH = ("DPT depth", "Depth Anything")
MAPS: dict[str, Any] = {}


def made(name: str) -> tuple[Model, Tensor, str]:
    """The model, two images and a target."""
    torch.manual_seed(1)
    size = 56 if name == "Depth Anything" else SIZE
    model = MAPS[name] if name in MAPS else MAPS.setdefault(name, Model(awake(FAMILIES[name][0]())))
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))
    return model, images, TARGET.replace("1@", "value@") if name in DEPTH else TARGET


def by_hand(model: Model, images: Tensor) -> Tensor:
    """The output [B C Y X], as the library's own code for segmentation reads it."""
    raw = model.net(pixel_values=images)
    if hasattr(raw, "predicted_depth"):
        return raw.predicted_depth[:, None]
    if hasattr(raw, "masks_queries_logits"):
        classes, masks = raw.class_queries_logits.softmax(-1)[..., :-1], raw.masks_queries_logits.sigmoid()
        return torch.einsum("bqc,bqyx->bcyx", classes, masks)
    found: Tensor = raw.logits
    return found


def score_by_hand(model: Model, images: Tensor) -> Tensor:
    output = by_hand(model, images)
    row, column = (int((p + 0.5) / images.shape[-1] * n) for p, n in zip(POINT[::-1], output.shape[-2:]))
    return output[:, min(1, output.shape[1] - 1), row, column]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_output_is_that_of_the_library(name: str) -> None:
    model, images, target = made(name)
    trace = Trace(model, images)
    assert model.form is Form.DENSE and torch.allclose(trace.output, by_hand(model, images), atol=1e-5)
    queries = name in ("EoMT", "Mask2Former", "MaskFormer")
    assert model.meaning is (Meaning.VALUE if name in DEPTH else Meaning.SOFTMAX if queries else Meaning.LOGITS)
    found = vitreous.explain(model, images, "gradient", target)
    leaf = images.clone().requires_grad_()
    (grad,) = torch.autograd.grad(score_by_hand(model, leaf).sum(), leaf)
    plain = vitreous.explain(model, images, "gradient", target, reduce="sum").map
    assert torch.allclose(plain, grad.sum(1), atol=1e-4 * float(grad.abs().max()))
    assert found.targets[0] == target.replace("value", "0") and found.labels[0].endswith("at 40,20")  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_occlusion_is_painting_over_the_image(name: str) -> None:
    model, images, target = made(name)
    (h, w), image = Trace(model, images).layout.grid, images[:1]
    window = max(1, h // 4)
    found = vitreous.explain(model, image, "occlusion", target, fill="zero", window=window, stride=window).map[0]
    hidden, (y, x) = image.clone(), (side * window // n for side, n in zip(image.shape[-2:], (h, w)))
    hidden[..., y : 2 * y, 2 * x : 3 * x] = 0
    fall = (score_by_hand(model, image) - score_by_hand(model, hidden)).detach()
    assert torch.allclose(found[window, 2 * window], fall[0], atol=1e-4 * float(found.abs().max()) + 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_is_followed_or_refused(name: str) -> None:
    model, images, target = made(name)
    for method in ["attention", "gae", "rollout", "grad_rollout"]:
        if method not in FAMILIES[name][1]:
            reason = "deformable" if name == "Mask2Former" else FAMILIES[name][0]().__class__.__name__
            with pytest.raises(Unsupported, match=reason):
                vitreous.explain(model, images, method, target)
            continue
        both = vitreous.explain(model, images, method, target)
        alone = vitreous.explain(model, images[1:], method, target)
        assert both.targets == (target.replace("value", "0"),) * 2
        assert torch.allclose(both.map[1:], alone.map, atol=1e-4 * float(alone.map.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SegFormer", "BEiT", "DPT", "UperNet", "EoMT"])
def test_a_rollout_of_a_place_is_highest_there(name: str) -> None:
    """Half of what a token holds stays its own, so the places of the region keep more than those far away."""
    model, images, _ = made(name)
    h, w = Trace(model, images).layout.grid
    for x, y in ((3, 3), (60, 3), (3, 60), (60, 60)):
        found = vitreous.explain(model, images[:1], "rollout", f"1@{x},{y}").map[0]
        row, column = y * h // SIZE, x * w // SIZE
        near = found[: h // 2] if row < h // 2 else found[h - h // 2 :]
        near = near[:, : w // 2] if column < w // 2 else near[:, w - w // 2 :]
        assert near.mean() > found.mean(), (x, y)


def sam() -> Model:
    vision = hf.SamVisionConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=8,
        output_channels=16,
        window_size=4,
        global_attn_indexes=[1],
        mlp_dim=64,
        num_pos_feats=8,
    )
    prompts = hf.SamPromptEncoderConfig(hidden_size=16, image_size=SIZE, patch_size=8, mask_input_channels=4)
    masks = hf.SamMaskDecoderConfig(hidden_size=16, num_attention_heads=2, mlp_dim=16, iou_head_hidden_dim=16)
    config = hf.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks)
    net = awake(hf.SamModel(config))
    return Model(net, forward=lambda x: net(pixel_values=x, input_points=prompt(len(x))))


def prompt(count: int) -> Tensor:
    return torch.tensor([[[[20.0, 20.0]]]]).expand(count, -1, -1, -1)


@pytest.mark.slow
def test_masks_for_a_prompt() -> None:
    model, images = sam(), torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    masks = model.net(pixel_values=images, input_points=prompt(2)).pred_masks
    trace = Trace(model, images)
    assert torch.allclose(trace.output, masks[:, 0], atol=1e-5) and model.meaning is Meaning.SIGMOID
    leaf = images.clone().requires_grad_()
    output = model.net(pixel_values=leaf, input_points=prompt(2)).pred_masks[:, 0]
    (grad,) = torch.autograd.grad(output[:, 2, 10, 20].sum(), leaf)  # 40 of 64 pixels is 20 of 32 places
    scale = 64 // output.shape[-1]
    found = vitreous.explain(model, images, "gradient", f"2@{20 * scale},{10 * scale}", reduce="sum").map
    assert torch.allclose(found, grad.sum(1), atol=1e-4 * float(grad.abs().max()))
    whole = vitreous.explain(model, images, "gradient", "2@predicted", reduce="sum").map
    output = model.net(pixel_values=leaf, input_points=prompt(2)).pred_masks[:, 0, 2]
    marked = output.detach() > 0  # each mask by itself
    (grad,) = torch.autograd.grad(sum(one[where].mean() for one, where in zip(output, marked)), leaf)  # type: ignore[arg-type]
    assert torch.allclose(whole, grad.sum(1), atol=1e-4 * float(grad.abs().max()))
    with pytest.raises(Unsupported, match="SamModel"):
        vitreous.explain(model, images, "gae", "2@predicted")
