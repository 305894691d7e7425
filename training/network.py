"""The Vision Transformer that is trained: DeiT's, with or without register tokens, opened up for the losses.

The forward pass returns the residual stream after every sublayer and the attention of the class token in every block.
Parameters have timm's names, as in

    timm.create_model("deit_tiny_patch16_224", reg_tokens=4, no_embed_class=True)

where the class token has no position embedding; `load` folds that of a plain DeiT into its class token.
Axes: B images, L blocks, H attention heads, P patches, T tokens (class token, registers, patches), D width.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from images import UsageError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PATCH = 16
HEAD_WIDTH = 64  # in DeiT-Tiny, -Small and -Base


@dataclass(frozen=True)
class Dimensions:
    """The size of a network; by default DeiT-Tiny's."""

    depth: int = 12
    width: int = 192
    grid: int = 14
    classes: int = 1000

    @property
    def heads(self) -> int:
        return self.width // HEAD_WIDTH

    @property
    def patches(self) -> int:
        return self.grid**2

    @property
    def side(self) -> int:
        """The side of the input image in pixels."""
        return self.grid * PATCH


class Pass(NamedTuple):
    """What a forward pass leaves behind."""

    logits: Tensor  # [B classes]
    patches: Tensor  # patch embeddings without positions [B P D]
    stream: list[Tensor]  # residual stream after the embedding and each of the 2 L sublayers [B T D]
    attention: list[Tensor]  # in each block, the attention of the class token [B H T]

    @property
    def blocks(self) -> list[Tensor]:
        """The residual stream before the first block and after each of the L blocks."""
        return self.stream[::2]


class PatchEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH, PATCH)

    def forward(self, images: Tensor) -> Tensor:
        """[B 3 side side] -> [B P D]. The convolution has no overlap: it is one matrix product, which is faster."""
        count, grid = len(images), images.shape[-1] // PATCH
        pixels = images.reshape(count, 3, grid, PATCH, grid, PATCH).permute(0, 2, 4, 1, 3, 5)
        return F.linear(pixels.reshape(count, grid**2, -1), self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The output [B T D] and the class token's row of the attention matrix [B H T]."""
        count, length, width = tokens.shape
        qkv = self.qkv(tokens).reshape(count, length, 3, -1, HEAD_WIDTH)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B H T 64]
        precise = torch.promote_types(query.dtype, torch.float32)
        scores = (query[:, :, :1].to(precise) * key.to(precise)).sum(-1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(count, length, width)), (scores * HEAD_WIDTH**-0.5).softmax(-1)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.fc2(F.gelu(self.fc1(tokens)))
        return output


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width)

    def forward(self, tokens: Tensor, middle: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What attention and MLP add to the stream, each [B T D], and the attention of the class token [B H T].

        The MLP reads `middle`: by default the tokens as attention leaves them.
        """
        attention, row = self.attn(self.norm1(tokens))
        if middle is None:
            middle = tokens + attention
        return attention, self.mlp(self.norm2(middle)), row


class ViT(nn.Module):
    pos_embed: Tensor
    reg_token: Tensor | None

    def __init__(self, dimensions: Dimensions, registers: int = 0) -> None:
        super().__init__()
        self.dimensions, self.registers = dimensions, registers
        width = dimensions.width
        self.patch_embed = PatchEmbedding(width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.reg_token = nn.Parameter(torch.empty(1, registers, width)) if registers else None
        self.pos_embed = nn.Parameter(torch.empty(1, dimensions.patches, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(dimensions.depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, dimensions.classes)
        self._initialise()

    def _initialise(self) -> None:
        for embedding in (self.cls_token, self.reg_token, self.pos_embed):
            if embedding is not None:
                nn.init.trunc_normal_(embedding, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    @property
    def prefix(self) -> int:
        """The number of tokens before the patches."""
        return 1 + self.registers

    def embed(self, images: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The tokens [B T D], only the patches `keep` [B K] where given, and all patch embeddings [B P D]."""
        patches = self.patch_embed(images)
        tokens = patches + self.pos_embed
        if keep is not None:
            tokens = tokens.gather(1, keep[:, :, None].expand(-1, -1, tokens.shape[-1]))
        prefix = [self.cls_token] if self.reg_token is None else [self.cls_token, self.reg_token]
        return torch.cat([*(token.expand(len(tokens), -1, -1) for token in prefix), tokens], 1), patches

    def classify(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Pass:
        tokens, patches = self.embed(images, keep)
        stream, rows = [tokens], []
        for block in self.blocks:
            attention, mlp, row = block(tokens)
            stream.append(tokens + attention)
            tokens = stream[-1] + mlp
            stream.append(tokens)
            rows.append(row)
        return Pass(self.classify(tokens), patches, stream, rows)

    def forced(self, images: Tensor, stream: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The logits and what every sublayer writes where each of them reads the given residual stream.

        The list starts with the embedded tokens. No gradient crosses from one sublayer to another.
        """
        written = [self.embed(images)[0]]
        for number, block in enumerate(self.blocks):
            attention, mlp, _ = block(stream[2 * number], stream[2 * number + 1])
            written += [attention, mlp]
        return self.classify(stream[-1]), written

    def compile_blocks(self) -> None:
        """Compile block by block: one compilation serves them all."""
        for block in self.blocks:
            block.compile(dynamic=False)


# ------------------------------------------------------------------------------------------------------ files


def dimensions_of(weights: dict[str, Tensor]) -> Dimensions:
    """The size of the network to which the weights belong; KeyError or ValueError where they are no ViT's."""
    blocks = {int(found[1]) for name in weights if (found := re.match(r"blocks\.(\d+)\.", name))}
    _, positions, width = weights["pos_embed"].shape
    return Dimensions(len(blocks), width, math.isqrt(positions), len(weights["head.bias"]))


def load(path: Path) -> ViT:
    """A network from a safetensors file with timm's names, in float32, for inference."""
    try:
        weights = {name: value.float() for name, value in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read the weights {path}: {error}") from error
    try:
        dimensions = dimensions_of(weights)
    except (KeyError, ValueError) as error:
        raise UsageError(f"{path} has no position embedding or no classifier: it is not a DeiT") from error
    if weights["pos_embed"].shape[1] == dimensions.patches + 1 and "cls_token" in weights:
        weights["cls_token"] = weights["cls_token"] + weights["pos_embed"][:, :1]
        weights["pos_embed"] = weights["pos_embed"][:, 1:]
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    net = ViT(dimensions, registers)
    expected = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UsageError(
            f"{path} is not a DeiT: {len(wrong)} tensors differ, first {name}, "
            f"whose shape is {found.get(name, 'missing')} instead of {expected.get(name, 'none')}"
        )
    net.load_state_dict(weights)
    return net.eval().requires_grad_(False)


def save(net: ViT, path: Path) -> None:
    """Write the weights in float16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half().cpu().contiguous() for name, value in net.state_dict().items()}, path)


# ------------------------------------------------------------------------------------------ finished networks


@torch.no_grad()
def mix(start: ViT, trained: ViT, share: float) -> ViT:
    """A network between two others: `share` of the trained one's weights, the rest from the start."""
    mixed = copy.deepcopy(start)
    for parameter, other in zip(mixed.parameters(), trained.parameters(), strict=True):
        parameter.lerp_(other, share)
    return mixed


@torch.no_grad()
def centre(net: ViT, batches: Iterable[Tensor]) -> ViT:
    """The same function in float64, with the tokens that enter the last attention centred on the mean patch.

    With m the mean of norm1(x) over images and patches in the last block, norm1.bias - m and qkv.bias + W m leave every
    query, key and value as they were. Methods that multiply these tokens by their gradient (CDAM) are then relative
    to an average token instead of an arbitrary zero.
    """
    centred = copy.deepcopy(net).double()
    block: Any = centred.blocks[-1]
    total, count = torch.zeros_like(block.norm1.bias), 0
    for images in batches:
        before = centred(images.double()).blocks[-2]
        patches = block.norm1(before[:, net.prefix :])
        total += patches.sum((0, 1))
        count += patches.shape[0] * patches.shape[1]
    mean = total / count
    block.attn.qkv.bias += block.attn.qkv.weight @ mean
    block.norm1.bias -= mean
    return centred
