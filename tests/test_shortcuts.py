"""The study of shortcuts, on a network whose shortcut is known by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitreous import Model, open_study, run_study
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped

SIDE, GRID, CLASSES = 16, 4, 3
LABELS = ["red", "green", "blue"]
MARK = np.kron(np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]), np.ones((4, 4)))


class Block(nn.Module):
    """Even attention and its mean added, so that tokens stay those of their patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.zeros_like(x)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(q, q, x[:, None])[:, 0]
        return x + 0.02 * mixed


class Cheat(nn.Module):
    """Classes by colour, summed over the patches; and, unless it is honest, class 0 wherever there is a check pattern."""

    def __init__(self, cheats: bool = True) -> None:
        super().__init__()
        self.width = 8
        self.cheats = cheats
        self.embed = nn.Conv2d(3, self.width, SIDE, SIDE, bias=False)
        self.blocks = nn.ModuleList([Block(self.width), Block(self.width)])
        self.head = nn.Linear(self.width, CLASSES)
        weight = torch.zeros(self.width, 3, SIDE, SIDE)
        for colour in range(3):
            weight[colour, colour] = 1 / SIDE**2
        pattern = torch.tensor(2 * MARK - 1, dtype=torch.float32) / SIDE**2
        weight[3] = pattern
        generator = torch.Generator().manual_seed(0)
        weight[4:] = torch.randn(4, 3, SIDE, SIDE, generator=generator) / SIDE**2
        read = torch.zeros(CLASSES, self.width)
        read[range(3), range(3)] = 16.0
        read[0, 3] = 60.0 if cheats else 0.0
        with torch.no_grad():
            self.embed.weight.copy_(weight)
            self.head.weight.copy_(read)
            self.head.bias.zero_()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def model(cheats: bool = True) -> Model:
    side = SIDE * GRID
    return Model(Cheat(cheats).eval(), cropped((side, side), (0.5,) * 3, (0.5,) * 3), LABELS, name="cheat")


def scene(rng: np.random.Generator, colour: int, mark: bool) -> Image.Image:
    """Noise with a few patches of a colour; in some, a check pattern in one patch."""
    pixels = rng.integers(90, 150, (SIDE * GRID, SIDE * GRID, 3)).astype(np.uint8)
    for _ in range(3):
        y, x = SIDE * rng.integers(0, GRID, 2)
        pixels[y : y + SIDE, x : x + SIDE, colour] = rng.integers(170, 220, (SIDE, SIDE))
    if mark:
        y, x = SIDE * rng.integers(0, GRID, 2)
        pixels[y : y + SIDE, x : x + SIDE] = (255 * MARK[..., None]).astype(np.uint8)
    return Image.fromarray(pixels)


def make(folder: Path, marked: int = 5, images: int = 24, masks: bool = False) -> Path:
    rng = np.random.default_rng(0)
    for colour, name in enumerate(LABELS):
        (folder / name).mkdir(parents=True)
        for i in range(images):
            scene(rng, colour, colour == 0 and i < marked).save(folder / name / f"{i:02d}.png")
    return folder


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("poisoned") / "data")


def test_the_cue_is_found_first_and_alarms(poisoned: Path, tmp_path: Path) -> None:
    study = run_study("shortcuts", poisoned, model(), tmp_path)
    table = study.frame("clusters")
    print(table[["cluster", "label", "rank", "score", "score_low", "inserted", "ordinary", "images", "here", "elsewhere", "stability", "weight", "p_inserted", "p_sources", "p_of_the_class", "p_stands_out", "alarm", "confidence_change"]].to_string())
    first = table[table["rank"] == 1].iloc[0]
    assert first["label"] == "red" and first["alarm"]
