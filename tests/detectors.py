"""Tiny random detectors whose weights matter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

tf.logging.set_verbosity_error()
CLASSES, QUERIES = 4, 7
WIDE = (64, 96)  # of the images of a plain ViT
LARGE = (128, 192)  # of the images of a CNN with tokens of 32 × 32 pixels
NAMES = {0: "cat", 1: "dog", 2: "cup", 3: "tree"}


def lively(net: nn.Module, seed: int = 0) -> Any:
    """The network with weights that make its parts matter."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim > 1 and (p.std() < 0.04 or "query" in name or "token" in name):
                p.copy_(torch.randn(p.shape, generator=random) * (0.4 if p.ndim == 2 else 0.2))
            elif p.ndim == 1 and "bias" in name:
                p.copy_(torch.randn(p.shape, generator=random) * 0.1)
    return net.eval()


def backbone(kind: Any = tf.ResNetConfig, out: tuple[str, ...] = ("stage4",)) -> Any:
    return kind(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic", out_features=list(out)
    )


def encoder_decoder(config: Any, **other: Any) -> Any:
    small = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    given = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    mine = {"backbone_config": backbone(), "d_model": 32, "num_queries": QUERIES, "id2label": NAMES}
    return config(**{**given, **small, **heads, **mine, **other})


def detr(**other: Any) -> Any:
    torch.manual_seed(0)
    return lively(tf.DetrForObjectDetection(encoder_decoder(tf.DetrConfig, **other)))


def conditional_detr() -> Any:
    torch.manual_seed(0)
    return lively(tf.ConditionalDetrForObjectDetection(encoder_decoder(tf.ConditionalDetrConfig)))


def table_transformer() -> Any:
    torch.manual_seed(0)
    return lively(tf.TableTransformerForObjectDetection(encoder_decoder(tf.TableTransformerConfig)))


def yolos(**other: Any) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    image = {"image_size": list(WIDE), "patch_size": 16, "num_detection_tokens": QUERIES, "id2label": NAMES}
    return lively(tf.YolosForObjectDetection(tf.YolosConfig(**{**size, **image, **other})))


def rt_detr() -> Any:
    torch.manual_seed(0)
    stages = backbone(tf.RTDetrResNetConfig, ("stage2", "stage3", "stage4"))
    encoder = {"encoder_hidden_dim": 32, "encoder_in_channels": [16] * 3, "encoder_ffn_dim": 32}
    decoder = {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 32, "decoder_in_channels": [32] * 3}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    rest = {"num_queries": QUERIES, "id2label": NAMES, "num_denoising": 0, "anchor_image_size": None}
    config = tf.RTDetrConfig(backbone_config=stages, **encoder, **decoder, **heads, **rest)
    return lively(tf.RTDetrForObjectDetection(config))


def owl_vit(kind: str = "OwlViT") -> tuple[Any, Callable[[Tensor], Any]]:
    """The network, and its forward pass with two texts."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vision = {**size, "image_size": 64, "patch_size": 16}
    text = {**size, "vocab_size": 50, "max_position_embeddings": 8}
    config = getattr(tf, f"{kind}Config")(text_config=text, vision_config=vision, projection_dim=32)
    net = lively(getattr(tf, f"{kind}ForObjectDetection")(config))
    texts = torch.tensor([[1, 2, 3, 49], [4, 5, 6, 49]])
    return net, lambda images: net(pixel_values=images, input_ids=texts.repeat(len(images), 1))


class Own(nn.Module):
    """A detector of one's own in the manner of DETR's first code: tokens come first, `pred_logits` and `pred_boxes`."""

    def __init__(self, width: int = 16, classes: int = CLASSES) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 2, 32, 0.0), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(width, 2, 32, 0.0), 2)
        self.queries = nn.Parameter(torch.randn(QUERIES, 1, width))
        self.places = nn.Parameter(torch.randn(24, 1, width))
        self.classes, self.boxes = nn.Linear(width, classes + 1), nn.Linear(width, 4)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        tokens = self.cut(images).flatten(2).permute(2, 0, 1) + self.places
        found = self.decoder(self.queries.expand(-1, len(images), -1), self.encoder(tokens)).transpose(0, 1)
        return {"pred_logits": self.classes(found), "pred_boxes": self.boxes(found).sigmoid()}


def own() -> Any:
    torch.manual_seed(0)
    return lively(Own())


def with_attentions(net: Any, images: Tensor) -> Any:
    """What the network itself returns, with its attentions in the autograd graph."""
    eager = copy.deepcopy(net)
    eager.set_attn_implementation("eager")
    with torch.enable_grad():
        return eager(pixel_values=images, output_attentions=True)
