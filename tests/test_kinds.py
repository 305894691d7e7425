"""Every method on other kinds of network, against autograd and against the plain network that computes the same."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import DIFFERENCES, ROUNDING, rare
from test_methods import CHEAP, IN_MODULES
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, Model, Trace
from vitreous.errors import Unsupported

GRID = (4, 5)  # of patches of 16 pixels
ROWS = list(range(20))
COLUMNS = [row * 5 + column for column in range(5) for row in range(4)]
PERMUTED = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()


class Linear(nn.Module):
    """Linear attention: queries over channels, keys over tokens; the heads are as wide as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 120), nn.Linear(40, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 20)).permute(2, 0, 3, 1, 4)
        return x + self.out((q.softmax(-1) @ (k.softmax(-2).mT @ v)).transpose(1, 2).flatten(2))


class Vit(nn.Module):
    """Three blocks over patches in any order; with `cls`, a first token that is read, else the mean of all."""

    def __init__(
        self,
        order: list[int] = ROWS,
        channels: int = 3,
        outputs: int = zoo.CLASSES,
        cls: bool = False,
        depth: int = 3,
        block: Callable[[], nn.Module] = zoo.Block,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place, self.first = nn.Parameter(torch.randn(1, 20, 32) / 2), nn.Parameter(torch.randn(1, int(cls), 32))
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        torch.manual_seed(1)
        self.cut = nn.Conv2d(channels, 32, 16, 16)
        self.head = nn.Linear(32, zoo.CLASSES)
        self.head.weight.data = 3 * self.head.weight.data[:outputs]
        self.head.bias.data = self.head.bias.data[:outputs]
        self.order, self.cls = order, cls

    def tokens(self, x: Tensor) -> Tensor:
        patches = (self.cut(x).flatten(2).mT + self.place)[:, self.order]
        return torch.cat([self.first.expand(len(x), -1, -1), patches], 1)

    def through(self, x: Tensor) -> list[Tensor]:
        """The tokens before the blocks and behind each."""
        every = [x]
        for block in self.blocks:
            every.append(block(every[-1]))
        return every

    def read(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0] if self.cls else x.mean(1))

    def forward(self, x: Tensor) -> Any:
        return self.read(self.through(self.tokens(x))[-1])


class Penultimate(Vit):
    """The last block runs, and nobody reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.through(self.tokens(x))[-2])


class Shallow(Vit):
    """The network that Penultimate is."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[-1]


class Twice(Vit):
    """The trunk runs on the mirrored image too; only its second output is explained."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": super().forward(x.flip(-1))[:, :2], "logits": super().forward(x)}


class Ensemble(nn.Module):
    """Two networks, of which one counts; the other may have one token less."""

    def __init__(self, equal: bool = True) -> None:
        super().__init__()
        self.a, self.b = Vit(cls=True), Vit(PERMUTED, cls=equal)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) + 0 * self.b(x)
        return out


class Packed(Vit):
    """All images in one sequence, one row for all."""

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.through(self.tokens(x).flatten(0, 1)[None])[-1])


class Mixing(Vit):
    """Every image feels how many others there are."""

    def tokens(self, x: Tensor) -> Tensor:
        return super().tokens(x) * len(x) ** 0.5


@dataclass(frozen=True)
class Kind:
    """A network, the plain one that computes the same for one image, and what is to be expected."""

    make: Callable[[], nn.Module]
    plain: Callable[[], nn.Module] | None = None
    size: tuple[int, int] = (64, 80)
    channels: int = 3
    flow: bool = True  # can attention be followed from token to token?
    other: tuple[str, ...] = ()  # methods for which the plain network is another
    refused: tuple[str, ...] = ()  # methods that say why they cannot


DRAWN = ("random", "occlusion", "rise", "vit_cx", "smoothgrad", "cass_attention", "optimus", "tis")  # from all pixels

ROWS_BEHIND = ("legrad", "clip_surgery", "maskclip")  # methods that run more rows behind the blocks

KINDS: dict[str, Kind] = {
    "columns": Kind(lambda: Vit(COLUMNS), Vit),
    "permuted": Kind(lambda: Vit(PERMUTED, cls=True), lambda: Vit(cls=True)),
    "penultimate": Kind(Penultimate, Shallow),
    "twice": Kind(Twice, Vit, refused=IN_MODULES),
    "ensemble": Kind(Ensemble, lambda: Vit(cls=True), refused=ROWS_BEHIND),
    "one output": Kind(lambda: Vit(outputs=1), Vit, other=("optimus", "tis", "vit_cx")),
    "sigmoid": Kind(lambda: nn.Sequential(Vit(), nn.Sigmoid())),
    "1 channel": Kind(lambda: Vit(channels=1, cls=True), channels=1),
    "4 channels": Kind(lambda: Vit(channels=4, cls=True), channels=4),
    "13 channels": Kind(lambda: Vit(channels=13), channels=13),
    "odd size": Kind(lambda: Vit(cls=True), lambda: Vit(cls=True), size=(76, 90), other=DRAWN),
    "no CLS": Kind(zoo.timm("vit_tiny_patch16_224", class_token=False, global_pool="avg", img_size=(64, 80))),
    "linear attention": Kind(lambda: Vit(block=Linear), flow=False),
    "packed": Kind(Packed, Vit),
    "mixing": Kind(Mixing, Vit),
}
FREQUENT = ("odd size",)  # tried by every quick method in the default suite
COSTLY = ("optimus", "vit_cx", "attention_flow", "rise", "occlusion", "tis")


def is_quick(method: str, kind: str) -> bool:
    return method not in COSTLY and (kind in FREQUENT or zlib.crc32(f"{method} on {kind}".encode()) % 12 == 0)


@cache
def model(kind: str, plain: bool = False) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        made = KINDS[kind].plain if plain else KINDS[kind].make
        assert made is not None
        return Model(made().eval(), classifier=True, name=kind)


def images(kind: str) -> Tensor:
    of = KINDS[kind]
    return torch.randn(2, of.channels, *of.size, generator=torch.Generator().manual_seed(7))


def explained(one: Model, given: Tensor, method: str) -> Tensor:
    target = 0 if METHODS[method].targeted else None
    return vitreous.explain(one, given, method, target, **CHEAP.get(method, {})).map


def marks(method: str, kind: str) -> list[pytest.MarkDecorator]:
    return [] if is_quick(method, kind) else [pytest.mark.slow]


@pytest.mark.filterwarnings("ignore:.*no relevance rule for torch.sigmoid")
@pytest.mark.parametrize(
    ("method", "kind"),
    [pytest.param(method, kind, marks=marks(method, kind)) for method in METHODS for kind in KINDS],
)
def test_battery(method: str, kind: str) -> None:
    of, given = KINDS[kind], images(kind)
    if METHODS[method].attention and not of.flow:
        with pytest.raises(Unsupported, match=r"no weights between tokens|between channels, not between tokens"):
            explained(model(kind), given, method)
        return
    if method in of.refused:
        with pytest.raises(Unsupported):
            explained(model(kind), given, method)
        return
    maps = explained(model(kind), given, method)
    assert tuple(maps.shape) in ((2, *GRID), (2, *of.size)), "the right grid"
    assert maps.isfinite().all() and maps.flatten(1).std(1).min() > 0, "it says something"
    alone = explained(model(kind), given[1:], method)
    assert off(alone, maps[1:]) <= DIFFERENCES, "batch-invariant"
    if of.plain is None or method in of.other:
        return
    high, wide = GRID[0] * 16, GRID[1] * 16
    expected = explained(model(kind, plain=True), given[:, :, :high, :wide], method)
    if maps.shape[1:] == of.size:  # what lies behind the last whole patch is not read
        assert not maps[:, high:].any() and not maps[:, :, wide:].any()
        maps = maps[:, :high, :wide]
    assert off(maps, expected) <= DIFFERENCES, "the map of the plain network"


@pytest.mark.parametrize("kind", KINDS)
def test_geometry(kind: str) -> None:
    layout = Trace(model(kind), images(kind)[:1]).layout  # whether images keep apart is known after a trace
    assert layout.grid == GRID and layout.patch == (16, 16) and (layout.obstacle is None) == KINDS[kind].flow
    assert model(kind).channels == KINDS[kind].channels
    assert layout.alone == (kind in ("packed", "mixing"))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_autograd(kind: str) -> None:
    for image in images(kind):
        x = image[None].clone().requires_grad_()
        out = model(kind).net(x)
        (grad,) = torch.autograd.grad((out["logits"] if isinstance(out, dict) else out)[:, 0].sum(), [x])
        found = vitreous.explain(model(kind), image[None], "gradient", 0, reduce="sum").map
        assert off(found, grad.sum(1)) <= ROUNDING


@pytest.mark.parametrize("method", ["attention", "gradcam", *rare("vit_cx")])
def test_an_ensemble_of_unequal_towers_of_which_one_counts(method: str) -> None:
    unequal = Model(Ensemble(equal=False).eval(), classifier=True)
    given = images("ensemble")
    expected = explained(model("ensemble", plain=True), given, method)
    assert off(explained(unequal, given, method), expected) <= DIFFERENCES
