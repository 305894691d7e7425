"""Tiny random networks that attend in windows, over pooled keys or in stages, of timm and transformers classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitreous import Model

Made = tuple[nn.Module, tuple[int, int]]  # a network and its image size


def swin(height: int = 32, width: int = 32, depths: tuple[int, ...] = (2, 2)) -> Made:
    from timm.models.swin_transformer import SwinTransformer

    size = (height, width)
    heads = tuple(2**i for i in range(1, len(depths) + 1))
    return SwinTransformer(size, 2, window_size=4, embed_dim=16, depths=depths, num_heads=heads, num_classes=5), size


def swin_v2(height: int = 32, width: int = 32) -> Made:
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    size = (height, width)
    net = SwinTransformerV2(size, 2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5)
    return net, size


def maxvit() -> Made:
    from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg

    inner = MaxxVitTransformerCfg(window_size=(4, 4), grid_size=(4, 4), dim_head=8)
    cfg = MaxxVitCfg(embed_dim=(16, 32), depths=(1, 1), block_type=("M", "M"), stem_width=16, transformer_cfg=inner)
    return MaxxVit(cfg, img_size=64, num_classes=5), (64, 64)


def hiera() -> Made:
    from timm.models.hiera import Hiera

    net = Hiera(img_size=(64, 64), embed_dim=16, num_heads=1, stages=(1, 1, 2, 1), num_classes=5)
    return net, (64, 64)


def mvit(size: int = 64, cls: bool = False) -> Made:
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    cfg = MultiScaleVitCfg(depths=(1, 1, 2, 1), embed_dim=(16, 32, 64, 64), num_heads=(1, 2, 4, 4), use_cls_token=cls)
    return MultiScaleVit(cfg, img_size=size, num_classes=5), (size, size)


def pvt(height: int = 64, width: int = 64) -> Made:
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    net = PyramidVisionTransformerV2(
        num_classes=5, depths=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32), num_heads=(1, 2, 2, 4), sr_ratios=(4, 2, 2, 1)
    )
    return net, (height, width)


def twins() -> Made:
    from timm.models.twins import Twins

    net = Twins(
        img_size=64,
        patch_size=4,
        num_classes=5,
        embed_dims=(16, 16, 32, 32),
        num_heads=(1, 2, 2, 4),
        depths=(2, 2, 2, 2),
        sr_ratios=(4, 2, 2, 1),
        wss=(4, 4, 4, 4),
    )
    return net, (64, 64)


def davit() -> Made:
    from timm.models.davit import DaVit

    net = DaVit(depths=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32), num_heads=(2, 2, 2, 4), window_size=4, num_classes=5)
    return net, (64, 64)


def sam() -> Made:
    from timm.models.vision_transformer_sam import VisionTransformerSAM

    net = VisionTransformerSAM(
        img_size=64,
        patch_size=8,
        embed_dim=32,
        depth=4,
        num_heads=2,
        num_classes=5,
        neck_chans=16,
        global_attn_indexes=(1, 3),
        window_size=3,
        use_rel_pos=True,
    )
    return net, (64, 64)


def levit() -> Made:
    from timm.models.levit import Levit

    net = Levit(img_size=128, num_classes=5, embed_dim=(32, 32, 48), key_dim=8, depth=(1, 1, 1), num_heads=(2, 2, 3))
    return net, (128, 128)


def hugging(kind: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    """A classifier of transformers."""

    def make() -> Made:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{kind}Config")(**options, num_labels=5)
        return getattr(transformers, f"{kind}ForImageClassification")(config), (size, size)

    return make


STAGED: dict[str, Callable[[], Made]] = {
    "Swin": swin,
    "Swin with padding": lambda: swin(36, 44),
    "SwinV2": swin_v2,
    "MaxViT": maxvit,
    "Hiera": hiera,
    "MViTv2": mvit,
    "MViTv2 with CLS": lambda: mvit(cls=True),
    "PVTv2": pvt,
    "PVTv2, odd size": lambda: pvt(72, 88),
    "Twins": twins,
    "DaViT": davit,
    "SAM": sam,
    "LeViT": levit,
    "HF Swin": hugging("Swin", image_size=64, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "HF Swinv2": hugging("Swinv2", image_size=64, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "HF Hiera": hugging("Hiera", image_size=[64, 64], embed_dim=16, depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8]),
    "HF PVT": hugging(
        "Pvt", 128, image_size=128, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 2, 4]
    ),
    "HF PVTv2": hugging(
        "PvtV2", image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 2, 4]
    ),
    "HF SegFormer": hugging(
        "Segformer", depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 2, 4]
    ),
}


def network(name: str, dtype: torch.dtype = torch.float32) -> Made:
    """One of them, with weights large enough that attention is not even."""
    torch.manual_seed(0)
    net, size = STAGED[name]()
    with torch.no_grad():
        for parameter in net.parameters():
            scale = 0.2 if parameter.ndim == 1 else 1.5 / max(1, parameter[0].numel()) ** 0.5
            parameter.add_(scale * torch.randn_like(parameter))
    return net.eval().to(dtype), size


def model(name: str, dtype: torch.dtype = torch.float32) -> tuple[Model, Tensor]:
    """One of them, and two images for it."""
    net, size = network(name, dtype)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(5)).to(dtype)
    return Model(net, name=name.lower()), images


@cache
def kept(name: str) -> tuple[Model, Tensor]:
    """The same in double precision, made once."""
    return model(name, torch.float64)
