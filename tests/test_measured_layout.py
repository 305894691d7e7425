"""Layers, read-out, token order and patches are measured: unusual networks against plain ones that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import off
from machine import ROUNDING, rare
from PIL import Image
from torch import nn

import vitreous
from vitreous import Model, Trace
from vitreous.errors import InputError, ModelError, Unsupported
from vitreous.models import token_places
from vitreous.models.libraries import cropped
from vitreous.trace.perturb.hide_patches import pixels_of

SIZE = (64, 96)  # 4 × 6 patches
MAPS = ["attention", "rollout", "gae", "grad_rollout", "legrad", "cdam", "gradcam", "attn_lrp", "token_ablation"]
MAPS += ["norm_attention", "value_zeroing", "attention_flow"]


class Tokens(nn.Module):
    """A ViT whose tokens stand in any order; `order` holds the patch, row by row, or −1 for CLS, of each token."""

    def __init__(self, order: list[int], mean: bool = True, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut = nn.Conv2d(3, 32, 16, 16)
        self.cls, self.place = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(1, 25, 32) / 2)
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(depth))
        self.head = nn.Linear(32, zoo.CLASSES)
        self.order, self.mean = order, mean

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.cut(x).flatten(2).mT
        every = torch.cat([patches, self.cls.expand(len(x), -1, -1)], 1) + self.place
        return every[:, self.order]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.read(x))

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1) if self.mean else x[:, self.order.index(-1)]


ROWS = list(range(24))
COLUMNS = [row * 6 + column for column in range(6) for row in range(4)]
SHUFFLED = torch.randperm(24, generator=torch.Generator().manual_seed(3)).tolist()
ORDERS = {
    "columns": (COLUMNS, ROWS, True),
    "shuffled": (SHUFFLED, ROWS, True),
    "CLS in the middle": ([*ROWS[:10], -1, *ROWS[10:]], [-1, *ROWS], False),
    "CLS behind, shuffled": ([*SHUFFLED, -1], [-1, *ROWS], False),
}


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(5))


def same_maps(one: Model, other: Model, images: torch.Tensor, methods: list[str] = MAPS) -> None:
    for method in methods:
        ours, expected = (vitreous.explain(model, images, method, 1).map for model in (one, other))
        assert expected.abs().max() > 0 and off(ours, expected) <= ROUNDING, method


@pytest.mark.parametrize("kind", [*list(ORDERS)[1:3], *rare("columns", "CLS behind, shuffled")])
def test_tokens_in_any_order(kind: str, images: torch.Tensor) -> None:
    order, usual, mean = ORDERS[kind]
    one, other = (Model(Tokens(which, mean).eval()) for which in (order, usual))
    assert off(one.run(images).detach(), other.run(images).detach()) <= ROUNDING
    layout = one.layout_at(SIZE)
    assert layout.grid == (4, 6) and layout.patch == (16, 16) and layout.patch_tokens == [order.index(i) for i in ROWS]
    same_maps(one, other, images)
    scores = [vitreous.evaluate(model, images, "gae", "token_deletion", target=1).value for model in (one, other)]
    assert off(*scores) <= ROUNDING


class Penultimate(Tokens):
    """The last block runs, and nobody reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            before, x = x, block(x)
        return self.head(self.read(before))


def test_the_last_layer_is_the_last_that_is_read(images: torch.Tensor) -> None:
    one, other = Model(Penultimate(ROWS).eval()), Model(Tokens(ROWS, depth=3).eval())
    del other.net.blocks[2]
    assert off(one.run(images).detach(), other.run(images).detach()) <= ROUNDING
    assert one.layout_at(SIZE).layers == 2
    same_maps(one, other, images)


class Twice(nn.Module):
    """A trunk that runs twice; the first result is returned and not explained."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"features": self.trunk(x.flip(-1))[:, :1], "logits": self.trunk(x)}


def test_a_trunk_that_runs_twice(images: torch.Tensor) -> None:
    trunk = Tokens(ROWS).eval()
    same_maps(Model(Twice(trunk)), Model(trunk), images, ["attention", "rollout", "gae", "cdam", "gradcam", "attn_lrp"])


class Ensemble(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.a, self.b, self.weight = Tokens(ROWS), Tokens(SHUFFLED), weight
        nn.init.normal_(self.b.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.weight * self.b(x)


def test_an_ensemble_of_which_one_part_counts(images: torch.Tensor) -> None:
    net = Ensemble(0.0).eval()
    same_maps(Model(net, classifier=True), Model(net.a), images, ["attention", "rollout", "gae", "cdam", "gradcam"])
    both = Model(Ensemble(1.0).eval(), classifier=True)
    with pytest.raises(Unsupported, match="separate passes or parallel branches"):
        vitreous.explain(both, images, "gae", 1)


class SeveralBlocks(Tokens):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, read = self.tokens(x), []
        for block in self.blocks:
            x = block(x)
            read.append(self.read(x))
        return self.head(read[0] + read[2])


def test_tokens_of_several_blocks_are_followed_from_each(images: torch.Tensor) -> None:
    """Both are read with the same weight, so that maps are the mean of those from either."""
    net = SeveralBlocks(ROWS).eval()
    model = Model(net)
    layout = model.layout_at(SIZE)
    ((layer, tokens, weights),) = layout.reads
    assert layer == 0 and tokens == layout.readout == tuple(ROWS) and layout.layers == 3
    assert off(torch.tensor([weights, layout.share]), torch.full((2, 24), 1 / 48)) <= ROUNDING
    full, first = Tokens(ROWS).eval(), Tokens(ROWS, depth=1).eval()
    full.load_state_dict(net.state_dict())
    first.load_state_dict(net.state_dict(), strict=False)
    each = [vitreous.explain(Model(one), images, "rollout").map for one in (full, first)]
    assert off(vitreous.explain(model, images, "rollout").map, (each[0] + each[1]) / 2) <= ROUNDING
    trace = Trace(model, images)
    grads = trace.grads(vitreous.Class(1))
    gains = [
        (layer.weights * layer.weights_grad(grad)).clamp_min(0).mean(1) for layer, grad in zip(trace.attention, grads)
    ]
    whole, found = torch.eye(24).expand(2, 24, 24), torch.zeros(2, 24)
    for number, gain in enumerate(gains):
        whole = whole + gain @ whole
        if number in (0, 2):
            found = found + (whole - torch.eye(24)).mean(1) / 2
    assert off(vitreous.explain(model, images, "gae", 1).map.flatten(1), found.detach()) <= 1e-4
    assert vitreous.explain(model, images, "grad_rollout", 1).map.abs().max() > 0
    for method in ("attention", "cdam", "legrad"):
        with pytest.raises(Unsupported, match=r"also reads the tokens of layers 0\. Try .*gae"):
            vitreous.explain(model, images, method, 1)


class Outside(Tokens):
    """The residual stream runs outside of the blocks, whose outputs are all added to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = x + (block(x) - x)
        return self.head(self.read(x))


def test_a_stream_outside_of_the_blocks_is_not_taken_for_many_reads(images: torch.Tensor) -> None:
    same_maps(Model(Outside(ROWS).eval()), Model(Tokens(ROWS).eval()), images, ["attention", "rollout", "gae", "cdam"])


# ------------------------------------------------------------------------------------- what does not repeat or mixes


class Mixing(Tokens):
    """Each image feels how many others there are."""

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        return super().tokens(x) * len(x) ** 0.5


def test_images_that_influence_each_other_are_run_one_by_one(images: torch.Tensor) -> None:
    model = Model(Mixing(ROWS).eval())
    for method in ("gradient", "gae", "token_ablation", "rise"):
        options: dict[str, Any] = {"masks": 20} if method == "rise" else {}
        both = vitreous.explain(model, images, method, 1, **options).map
        each = torch.cat([vitreous.explain(model, image[None], method, 1, **options).map for image in images])
        assert off(both, each) <= ROUNDING, method
    with pytest.raises(InputError, match="mixes the images of a batch"):
        Trace(model, images)


class Packed(Tokens):
    """All images in one sequence, one row for all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x).flatten(0, 1)[None]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_images_packed_into_one_sequence_are_run_one_by_one(images: torch.Tensor) -> None:
    one, other = Model(Packed(ROWS).eval()), Model(Tokens(ROWS).eval())
    same_maps(one, other, images, ["attention", "rollout", "gae", "gradient", "cdam", "token_ablation"])


class Restless(Tokens):
    """The same tokens in another order at every run; the output is the same."""

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        return super().tokens(x)[:, torch.randperm(24)]


def test_what_does_not_repeat_is_refused(images: torch.Tensor) -> None:
    model = Model(Restless(ROWS).eval())
    for _ in range(2):
        for method in ("attention", "gradient"):
            with pytest.raises(ModelError, match="another result when it is run again"):
                vitreous.explain(model, images, method, 1)


# --------------------------------------------------------------------------------------------------- patches, pools


@pytest.mark.parametrize(("size", "grid"), [((76, 90), (4, 5)), ((64, 64), (4, 4))])
def test_sizes_that_are_no_multiple_of_the_patch(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """The pixels behind the last whole patch are not read, and hiding a patch hides its own pixels."""
    torch.manual_seed(0)
    model, images = Model(Cut(grid).eval()), torch.randn(1, 3, *size)
    layout, trace = model.layout_at(size), Trace(model, images)
    assert layout.grid == grid and layout.patch == (16, 16) and layout.rows[-1] == (48, 64)
    for row, column in [(0, 0), (3, 2), (3, grid[1] - 1)]:
        hidden = torch.zeros(1, *grid, dtype=torch.bool)
        hidden[0, row, column] = True
        expected = torch.zeros(size, dtype=torch.bool)
        expected[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = True
        assert pixels_of(trace, hidden)[0, 0].equal(expected)
        changed = images + expected
        moved = [trace.batch_first(Trace(model, one).cut(0).entry.detach())[0] for one in (images, changed)]
        assert (moved[0] - moved[1]).abs().amax(1).nonzero().flatten().tolist() == [layout.token(row, column)]


def test_maps_lie_on_their_patches() -> None:
    """An image larger than its patches: overlays, sizes of maps and stored maps know where the patches end."""
    model = Model(Cut((4, 5)).eval(), cropped((76, 90), (0.5,) * 3, (0.5,) * 3))
    image = Image.fromarray(np.full((76, 90, 3), 128, np.uint8))
    found = vitreous.explain(model, image, "gradcam", 1)
    assert found.box == (0, 0, 64 / 76, 80 / 90)
    large = found.resize((152, 180)).map[0]
    assert large.shape == (152, 180) and (large[128:] == 0).all() and (large[:, 160:] == 0).all()
    inner = torch.nn.functional.interpolate(found.map[:, None], (128, 160), mode="bilinear")[0, 0]
    assert off(large[:128, :160], inner) <= ROUNDING
    drawn = np.asarray(found.overlay(cells=True).resize((90, 76), Image.Resampling.NEAREST), np.int16)
    bare = np.abs(drawn - drawn[-1, -1]).sum(-1) == 0
    assert bare[66:].all() and bare[:, 82:].all() and not bare[:62, :78].any()


class Cut(Tokens):
    """Patches of 16 pixels; a remainder of the image is not read."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__(list(range(grid[0] * grid[1])))

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.cut(x).flatten(2).mT
        return patches + self.place[:, : patches.shape[1]]


class Pool(Tokens):
    """Learned queries read all tokens but the first two, which are registers."""

    def __init__(self, queries: int, used: list[int]) -> None:
        super().__init__([-1, *ROWS])
        self.query, self.used = nn.Parameter(torch.randn(1, queries, 32)), used
        self.key = nn.Linear(32, 32)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[:, 1:]
        a = (self.query @ self.key(kept).mT / 32**0.5).softmax(-1)  # [B Q 24]
        return (a @ kept)[:, self.used].mean(1)


@pytest.mark.parametrize(("queries", "used"), [(1, [0]), (4, [0, 1, 2, 3]), (40, list(range(40))), (4, [2])])
def test_pools_of_many_queries_that_leave_tokens_out(queries: int, used: list[int], images: torch.Tensor) -> None:
    net = Pool(queries, used).eval()
    model = Model(net)
    trace = Trace(model, images)
    with torch.no_grad():
        x = net.tokens(images)
        for block in net.blocks:
            x = block(x)
        expected = (net.query @ net.key(x[:, 1:]).mT / 32**0.5).softmax(-1)[:, used].mean(1)
    assert trace.layout.layers == 3 and trace.layout.pooled
    assert off(trace.readout[:, 1:], expected) <= ROUNDING and trace.readout[:, 0].abs().max() == 0


def test_the_cost_of_the_layout_run(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    plain: Callable[..., Any] = Model.run
    monkeypatch.setattr(Model, "run", lambda self, images: counted.append(len(images)) or plain(self, images))
    model = zoo.model("timm ViT")
    model.forget()
    _ = model.layout_at((64, 64))
    assert counted == [2]
    Trace(model, zoo.images("timm ViT"))
    assert counted == [2, 1], "one image alone, compared with the pair"


@pytest.mark.parametrize(("count", "gradients"), [(2, 2), (1, 3)])
def test_a_pair_of_images_tells_the_places_of_tokens_by_two_gradients(
    count: int, gradients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of the tokens, and numbers of one image beside those of the other; of one image, one after the other."""
    calls: list[torch.Tensor] = []
    plain: Callable[..., Any] = token_places.pixel_gradient
    monkeypatch.setattr(token_places, "pixel_gradient", lambda end, x: calls.append(end) or plain(end, x))
    x = torch.randn(count, 3, 32, 48, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(0)
    tokens = nn.Conv2d(3, 8, 16, 16)(x).flatten(2).mT[:, [3, 0, 5, 1, 4, 2]]
    found = token_places.cut_places(tokens, x)
    assert found is not None and found.grid == (2, 3) and found.tokens == (1, 3, 5, 0, 4, 2)
    assert len(calls) == gradients


def test_tokens_whose_order_depends_on_the_image_have_no_places() -> None:
    x = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(0)
    tokens = nn.Conv2d(3, 8, 16, 16)(x).flatten(2).mT
    orders = ([0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 4, 5])
    assert token_places.cut_places(torch.stack([one[order] for one, order in zip(tokens, orders)]), x) is None
