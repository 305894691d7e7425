"""Tiny random models of every family, each with what the probe must find."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vitreous import Model

CLASSES = 7


@dataclass(frozen=True)
class Entry:
    """How to make a model, and its true geometry."""

    make: Callable[[], Any]
    size: tuple[int, int]
    grid: tuple[int, int]
    prefix: int
    readout: tuple[int, ...] | str  # tokens, or "patches" or "pool"
    depth: int = 3
    heads: int = 2
    flow: bool = True  # can attention be followed from token to token?
    blocks: bool = True  # are its layers modules of their own?
    channels: int = 3
    merges: bool = False  # are patches merged between its layers?
    stages: bool = False  # can attention be followed through its windows or pooled keys?


def timm(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import timm

        usual = {"img_size": 64, "num_classes": CLASSES, "embed_dim": 32, "depth": 3, "num_heads": 2}
        return timm.create_model(name, **{**usual, **options})

    return make


def unfused(name: str) -> Callable[[], Any]:
    def make() -> Any:
        net = timm(name)()
        for block in net.blocks:
            block.attn.fused_attn = False
        return net

    return make


def library(name: str, extra: str) -> Any:
    """A package, without which the tests that ask for a model of it are skipped."""
    import pytest

    return pytest.importorskip(name, reason=f"this model needs pip install 'vitreous[{extra}]'")


def hf(kind: str, head: str, attention: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        transformers = library("transformers", "hf")
        sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
        config = getattr(transformers, f"{kind}Config")(**sizes, image_size=64, patch_size=16, **options)
        config.num_labels = CLASSES
        config._attn_implementation = attention
        return getattr(transformers, f"{kind}{head}")._from_config(config)

    return make


def torchvision() -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=64, patch_size=16, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=CLASSES
    )


def open_clip() -> Any:
    open_clip = library("open_clip", "clip")
    tower = {"image_size": 128, "layers": 3, "width": 32, "head_width": 16, "patch_size": 32}
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
    return open_clip.CLIP(embed_dim=16, vision_cfg=tower, text_cfg=text)


class Block(nn.Module):
    """Attention written by hand, through einsum."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [B N H d]
        a = torch.einsum("bihd,bjhd->bhij", q, k).div(q.shape[-1] ** 0.5).softmax(dim=-1)
        x = x + self.out(torch.einsum("bhij,bjhd->bihd", a, v).flatten(2))
        return x + self.mlp(x)


class HandWritten(nn.Module):
    """Patches cut by reshaping, the CLS token at the end, blocks that are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 16 * 16, 32)
        self.last = nn.Parameter(torch.randn(1, 1, 32))
        self.first, self.second, self.third = Block(), Block(), Block()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, _, y, x_ = x.shape
        x = x.reshape(b, 3, y // 16, 16, x_ // 16, 16).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        x = torch.cat([self.embed(x), self.last.expand(b, -1, -1)], 1)
        for block in (self.first, self.second, self.third):
            x = block(x)
        return self.head(self.norm(x[:, -1]))


class Sequence(nn.Module):
    """nn.TransformerEncoder with the sequence first and one fused batch-and-head axis left to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 32, 16, 16)
        self.cls = nn.Parameter(torch.randn(1, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).permute(2, 0, 1)  # [N B D]
        x = torch.cat([self.cls.expand(-1, x.shape[1], -1), x])
        return self.head(self.body(x)[0])


class Flat(nn.Module):
    """One fused batch-and-head axis and bmm, as in older CLIP code."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 32, 16, 16)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).mT  # [B N D]
        for qkv in self.qkv:
            b, n, _ = x.shape
            q, k, v = qkv(x).reshape(b, n, 3, 2, 16).permute(2, 0, 3, 1, 4).reshape(3, b * 2, n, 16)
            a = F.softmax(torch.bmm(q, k.transpose(1, 2)) / 4, dim=-1)
            x = x + torch.bmm(a, v).reshape(b, 2, n, 16).transpose(1, 2).reshape(b, n, 32)
        return self.head(x.mean(1))


def compiled() -> Any:
    return torch.compile(timm("vit_tiny_patch16_224")(), backend="eager")


SQUARE: dict[str, Any] = {"size": (64, 64), "grid": (4, 4)}
CLS: tuple[int, ...] = (0,)

ZOO: dict[str, Entry] = {
    "timm ViT": Entry(timm("vit_tiny_patch16_224"), **SQUARE, prefix=1, readout=CLS),
    "timm ViT unfused": Entry(unfused("vit_tiny_patch16_224"), **SQUARE, prefix=1, readout=CLS),
    "timm ViT 224×448": Entry(
        timm("vit_tiny_patch16_224", img_size=(224, 448), depth=2), (224, 448), (14, 28), 1, CLS, depth=2
    ),
    "timm ViT 13 channels": Entry(
        timm("vit_tiny_patch16_224", in_chans=13), **SQUARE, prefix=1, readout=CLS, channels=13
    ),
    "timm ViT no CLS": Entry(
        timm("vit_tiny_patch16_224", class_token=False, global_pool="avg"), **SQUARE, prefix=0, readout="patches"
    ),
    "timm DeiT distilled": Entry(timm("deit_tiny_distilled_patch16_224"), **SQUARE, prefix=2, readout=(0, 1)),
    "timm DINOv2 registers": Entry(
        timm("vit_small_patch14_reg4_dinov2", img_size=56), (56, 56), (4, 4), prefix=5, readout=CLS
    ),
    "timm DINOv3": Entry(timm("vit_small_patch16_dinov3"), **SQUARE, prefix=5, readout="patches"),
    "timm EVA-02": Entry(timm("eva02_tiny_patch14_224", img_size=56), (56, 56), (4, 4), prefix=1, readout="patches"),
    "timm BEiT": Entry(timm("beit_base_patch16_224"), **SQUARE, prefix=1, readout="patches"),
    "timm SigLIP": Entry(timm("vit_base_patch16_siglip_224"), **SQUARE, prefix=0, readout="pool"),
    "timm Swin": Entry(
        timm("swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(2, 2), num_heads=(2, 2), depth=None),
        (56, 56), (14, 14), 0, (), flow=False, merges=True, stages=True,
    ),
    "timm CaiT": Entry(
        timm("cait_xxs24_224", depth=2, mlp_ratio=2.0, init_values=1.0),
        **SQUARE,
        prefix=0,
        readout=(),
        flow=False,
        blocks=False,
    ),
    "timm ConViT": Entry(timm("convit_tiny", depth=4), **SQUARE, prefix=0, readout=(0,), depth=4),
    "timm XCiT": Entry(timm("xcit_nano_12_p16_224", embed_dim=48, depth=2), **SQUARE, prefix=0, readout=(), flow=False),
    "torchvision ViT": Entry(torchvision, **SQUARE, prefix=1, readout=CLS),
    "open_clip ViT-B-32": Entry(open_clip, (128, 128), (4, 4), prefix=1, readout=CLS),
    "hand-written": Entry(HandWritten, **SQUARE, prefix=0, readout=(16,)),
    "sequence first": Entry(Sequence, **SQUARE, prefix=1, readout=CLS),
    "flat heads": Entry(Flat, **SQUARE, prefix=0, readout="patches", blocks=False),
    "torch.compile": Entry(compiled, **SQUARE, prefix=1, readout=CLS),
}  # fmt: skip
for implementation in ("sdpa", "eager"):
    ZOO |= {
        f"HF {name} {implementation}": Entry(hf(kind, head, implementation, **more), **SQUARE, prefix=p, readout=read)
        for name, kind, head, more, p, read in [
            ("ViT", "ViT", "ForImageClassification", {}, 1, CLS),
            ("DINOv2", "Dinov2", "ForImageClassification", {}, 1, tuple(range(17))),
            ("DINOv2 registers", "Dinov2WithRegisters", "Model", {"num_register_tokens": 4}, 5, CLS),
            ("DINOv3", "DINOv3ViT", "Model", {"num_register_tokens": 4}, 5, CLS),
            ("CLIP vision", "CLIPVision", "Model", {}, 1, CLS),
            ("SigLIP", "SiglipVision", "Model", {}, 0, "pool"),
        ]
    }


REPRESENTATIVE = (  # one for each way in which attention is computed, tokens are laid out and read
    "timm ViT",  # fused attention, CLS
    "timm DINOv3",  # rotary positions, registers, the mean of the patches
    "timm SigLIP",  # an attention pool
    "timm Swin",  # windows
    "torchvision ViT",  # nn.MultiheadAttention
    "HF DINOv2 eager",  # attention written out, CLS beside the mean
    "hand-written",  # einsum, CLS at the end
    "sequence first",  # nn.TransformerEncoder
)


def is_quick(what: str, name: str) -> bool:
    """Whether the default suite tries a method or metric on this model: on the first always, on half of the other
    representative models, and on a twelfth of the others.

    Which of them is drawn for each method, so that together the methods see every model; `make test-all` tries all.
    """
    drawn = zlib.crc32(f"{what} on {name}".encode())
    return name == REPRESENTATIVE[0] or drawn % (2 if name in REPRESENTATIVE else 12) == 0


def thinned(what: str, names: Iterable[str] = ZOO) -> list[Any]:
    """Models as parameters of a test, those that are not quick marked slow."""
    import pytest

    return [pytest.param(name, marks=[] if is_quick(what, name) else [pytest.mark.slow]) for name in names]


@cache
def network(name: str) -> nn.Module:
    """The same tiny network for all tests that ask by name."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        net: nn.Module = ZOO[name].make().eval()
        for part, parameter in net.named_parameters():  # what starts at (nearly) zero would explain nothing
            small = 0 < parameter.abs().max() < 1e-2
            if (parameter.ndim > 1 and parameter.abs().max() < 1e-4) or "token" in part:
                nn.init.normal_(parameter, std=0.1)
            elif parameter.ndim == 1 and small and "bias" not in part:  # LayerScale
                nn.init.constant_(parameter, 0.3)
    return net


@cache
def model(name: str) -> Model:
    return Model(network(name), name=name.replace(" ", "-").lower())


def images(name: str, count: int = 3) -> torch.Tensor:
    return torch.randn(count, ZOO[name].channels, *ZOO[name].size, generator=torch.Generator().manual_seed(7))
