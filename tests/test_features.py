"""Patch features: at their true places, the model's own, one basis for all images, plain cosines; or a refusal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_packed
import test_video
import torch
import windowed
import zoo
from conftest import Run, off
from PIL import Image
from test_plot import collisions, words
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace, inspect
from vitreous.errors import InputError, OptionError, Unsupported
from vitreous.inspect import stream
from vitreous.inspect.basis import Basis, Covariance
from vitreous.models.stages import covering
from vitreous.trace.block_places import answers
from vitreous.trace.features import final_norm, patch_features

pytestmark = pytest.mark.filterwarnings("ignore::vitreous.errors.ModelWarning")
NO_BLOCKS = ("flat heads",)
OVERLAPPING = "timm XCiT"  # its patches are made by convolutions that overlap
NO_MODULES = ("MaxViT", "Twins", "LeViT", "HF PVT")  # several layers share a module, or a layer has none
DEGENERATE = {"Hiera": 4, "HF Hiera": 4, "MViTv2": 4, "MViTv2 with CLS": 4}  # layers of 2×2 tokens


# --------------------------------------------------------------------------------------------------------- the places


def found_at(model: Model, image: Tensor, cell: tuple[int, int], layer: int = 0, of: str = "tokens") -> float:
    """How far, in cells of the layer's grid, the feature that changes most lies from the patch that was changed."""
    layout = model.layout_at(tuple(image.shape[-2:]))
    other = image.clone()
    where = layout.where(*cell)
    other[where] = torch.randn(other[where].shape, generator=torch.Generator().manual_seed(1)).to(other)
    one, two = (patch_features(Trace(model, x), [layer], of)[layer][0] for x in (image, other))
    change = (two - one).double().norm(dim=-1)
    row, column = divmod(int(change.argmax()), change.shape[1])
    true = [int(covering(fine, own)[i]) for i, fine, own in zip(cell, layout.grid, change.shape)]
    return max(abs(row - true[0]), abs(column - true[1]))


@pytest.mark.parametrize("name", zoo.thinned("features", [name for name in zoo.ZOO if name not in NO_BLOCKS]))
def test_a_feature_changes_most_where_the_image_does(name: str) -> None:
    model, image = zoo.model(name), zoo.images(name, 1)
    h, w = zoo.ZOO[name].grid
    for cell in ((0, 1), (h // 2, w - 1), (h - 1, 0)):
        assert found_at(model, image, cell) <= (1 if zoo.ZOO[name].merges or name == OVERLAPPING else 0)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("Swin", "Hiera") else pytest.param(name, marks=pytest.mark.slow)
        for name in windowed.STAGED
        if name not in NO_MODULES
    ],
)
def test_windowed_and_pyramid_features_lie_at_their_places(name: str) -> None:
    """In the first layer, at each cell; in every layer of a grid, where what changes can be told."""
    model, images = windowed.model(name)
    layout = model.layout_at(tuple(images.shape[-2:]))
    h, w = layout.grid
    cells = [(0, 1), (1, 0), (h // 2, w - 2), (h - 1, w // 3), (h // 3, w // 2)]
    near = [found_at(model, images[:1], cell) for cell in cells]
    reach = 2 if name == "DaViT" else 1  # convolutions before and between its attention
    assert sum(distance <= reach for distance in near) >= 4, near
    for layer in range(layout.layers):
        if DEGENERATE.get(name) == layer:
            continue
        tokens = patch_features(Trace(model, images), [layer])[layer]
        grid = layout.stages[min(layer + 1, layout.layers - 1)].grid
        assert tokens.shape[:3] in ((2, *layout.stages[layer].grid), (2, *grid)) and tokens.isfinite().all()


@pytest.mark.slow
def test_queries_keys_and_values_of_windows_lie_at_their_places() -> None:
    """Hiera's patches overlap. timm's Swin adds a mask to its scores, so that queries and keys are not visible."""
    cells = ((0, 1), (9, 4), (15, 15))
    model, images = windowed.model("Swin with padding")
    assert [found_at(model, images[:1], cell, of="values") for cell in cells] == [0, 0, 0]
    with pytest.raises(Unsupported, match="without visible queries and keys"):
        patch_features(Trace(model, images), [0], "keys")
    model, images = windowed.model("Hiera")
    for of in ("queries", "keys", "values"):
        assert max(found_at(model, images[:1], cell, of=of) for cell in cells) <= 1


@pytest.mark.parametrize(
    "make",
    [make if make is test_packed.qwen25 else pytest.param(make, marks=pytest.mark.slow) for make in test_packed.TOWERS],
    ids=lambda make: make.__name__,
)
def test_features_of_packed_sequences_lie_at_their_places(make: Callable[[], nn.Module]) -> None:
    model, image = Model(make()), test_packed.images(1)
    assert [found_at(model, image, cell) for cell in ((0, 1), (2, 4), (3, 5))] == [0, 0, 0]
    both = patch_features(Trace(model, test_packed.images(1)), [-1])[-1]
    assert both.shape[1:3] == (4, 6)


@pytest.mark.slow
def test_features_of_tubelets_lie_at_their_places() -> None:
    model, clip = test_video.model("videomae"), test_video.clips()[:1]
    layout = model.layout_at((test_video.FRAMES, test_video.SIDE, test_video.SIDE))
    other = clip.clone()
    other[layout.where(1, 2, 0)] += 1
    one, two = (patch_features(Trace(model, x), [0])[0][0] for x in (clip, other))
    assert np.unravel_index(int((two - one).norm(dim=-1).argmax()), layout.cells) == (1, 2, 0)


def test_a_wrong_place_is_seen() -> None:
    """Of the measurement itself: features that are turned, shifted by two cells or mixed do not pass."""
    cells = [(1, 2), (5, 6), (7, 0), (3, 3), (0, 7), (6, 1)]
    right = torch.zeros(7, 8, 8, 4)
    for n, (row, column) in enumerate(cells, 1):
        right[n, row, column] = 1.0
    right += 1e-3 * torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    assert answers(right, cells)
    assert not answers(right.flip(1), cells)
    assert not answers(right.roll(2, 2), cells)
    assert not answers(right.transpose(1, 2), cells)
    assert not answers(right[:, torch.randperm(8, generator=torch.Generator().manual_seed(1))], cells)


@pytest.mark.slow
def test_channels_first_and_last_are_told_apart_by_what_changes() -> None:
    """16 channels on a grid of 16×16, so that the shape does not say which axis is which."""
    for name in ("Swin", "PVTv2"):
        model, images = windowed.model(name)
        assert model.layout_at(tuple(images.shape[-2:])).grid == (16, 16)
        assert found_at(model, images[:1], (3, 12)) <= 1


# ------------------------------------------------------------------------------------------------ what the features are


def hooked(net: nn.Module, block: nn.Module, images: Tensor) -> Tensor:
    kept: list[Tensor] = []
    hook = block.register_forward_hook(lambda module, args, out: kept.append(out))
    try:
        with torch.no_grad():
            net(images)
    finally:
        hook.remove()
    return kept[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_are_those_of_a_plain_hook(dtype: torch.dtype) -> None:
    net, images = zoo.ZOO["timm ViT"].make().eval().to(dtype), zoo.images("timm ViT").to(dtype)
    taken = patch_features(Trace(Model(net), images), [0, -1])
    for layer, block in ((0, net.blocks[0]), (-1, net.blocks[-1])):
        assert torch.equal(taken[layer], hooked(net, block, images)[:, 1:].reshape(3, 4, 4, -1))


def test_features_are_the_hidden_states_of_transformers() -> None:
    net, images = zoo.network("HF DINOv2 registers sdpa"), zoo.images("HF DINOv2 registers sdpa")
    with torch.no_grad():
        own = net(images, output_hidden_states=True)
    trace = Trace(zoo.model("HF DINOv2 registers sdpa"), images)
    taken = patch_features(trace, range(3))
    for layer in range(3):
        assert off(taken[layer].flatten(1, 2), own.hidden_states[layer + 1][:, 5:]) < 1e-6
    normed = patch_features(trace, [-1], norm=final_norm(trace))[-1]
    assert off(normed.flatten(1, 2), own.last_hidden_state[:, 5:]) < 1e-6


def test_keys_are_the_models_own() -> None:
    net, images = zoo.network("timm ViT"), zoo.images("timm ViT")
    qkv = hooked(net, net.blocks[1].attn.qkv, images)[:, 1:].reshape(3, 4, 4, 3, -1)
    trace = Trace(zoo.model("timm ViT"), images)
    for number, of in enumerate(("queries", "keys", "values")):
        assert off(patch_features(trace, [1], of)[1], qkv[..., number, :]) < 1e-5


def test_the_final_norm_is_the_one_of_all_tokens() -> None:
    names = {"timm ViT": "norm", "timm DINOv2 registers": "norm", "torchvision ViT": "encoder.ln", "timm Swin": "norm"}
    for name, norm in names.items():
        assert final_norm(Trace(zoo.model(name), zoo.images(name))) is zoo.network(name).get_submodule(norm)
    for name in ("timm ViT no CLS", "HF CLIP vision sdpa", "hand-written"):  # of pooled tokens, of CLS alone
        assert final_norm(Trace(zoo.model(name), zoo.images(name))) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_features_of_float32(dtype: torch.dtype) -> None:
    net = zoo.ZOO["timm ViT"].make().eval().to(dtype)
    seen = inspect.features(Model(net), zoo.images("timm ViT").to(dtype), raw=True)
    assert seen.raw is not None and seen.raw[2][0].dtype == np.float32
    assert all(np.isfinite(array).all() for array in seen.arrays.values())


# ------------------------------------------------------------------------------------------------------- the components


@cache
def double() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    net = zoo.ZOO["timm ViT"].make().eval().double()
    return Model(net, name="double"), torch.randn(7, 3, 64, 64, generator=torch.Generator().manual_seed(3)).double()


def stacked(model: Model, images: Tensor, layer: int) -> np.ndarray:
    tokens = patch_features(Trace(model, images), [layer])[layer]
    return tokens.flatten(0, 2).numpy()


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    model, images = double()
    seen = inspect.features(model, images, layers=[1, 2], norm=False)
    for layer in (1, 2):
        rows = stacked(model, images, layer)
        away = rows - rows.mean(0)
        _, sizes, axes = np.linalg.svd(away, full_matrices=False)
        sign = np.sign(axes[:3][range(3), np.abs(axes[:3]).argmax(1)])
        own = seen.basis.layers[layer].whole
        assert off(own.axes, axes[:3] * sign[:, None]) < 1e-9 and off(own.mean, rows.mean(0)) < 1e-12
        assert off(own.share, (sizes**2 / (sizes**2).sum())[:3]) < 1e-10
        expected = (away @ (axes[:3] * sign[:, None]).T).reshape(7, 4, 4, 3)
        assert off(seen.arrays[f"components_{layer}"], expected) < 1e-6
        assert off(own.ends, np.quantile(expected.reshape(-1, 3), [0.01, 0.99], axis=0)) < 1e-6


def test_the_basis_depends_on_neither_batches_nor_the_order_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = double()
    whole = inspect.features(model, images, foreground=True)
    order = [3, 0, 6, 2, 5, 1, 4]
    for batch, kept in ((1, stream.KEPT), (2, stream.KEPT), (3, 0)):
        monkeypatch.setattr(stream, "KEPT", kept)  # 0: features are computed anew in every pass
        again = inspect.features(model, images[order], foreground=True, batch=batch)
        for one, other in zip(whole.basis.layers[2].arrays.values(), again.basis.layers[2].arrays.values()):
            assert off(other, one) < 1e-6
        assert off(again.arrays["components_2"], whole.arrays["components_2"][order]) < 1e-6


def test_covariance_is_exact_far_from_the_origin() -> None:
    random = np.random.default_rng(0)
    rows = 1e6 + random.normal(size=(500, 5)) @ random.normal(size=(5, 5))
    sums = Covariance()
    for part in np.array_split(rows, 7):
        sums.add(torch.from_numpy(part))
    assert sums.scatter is not None
    assert off(sums.scatter / 499, np.cov(rows.T)) < 1e-9 and sums.count == 500


def test_equal_patches_have_equal_colours_in_all_images() -> None:
    """In the first image a patch of the second: before positions are added nothing else differs."""
    model, images = double()
    seen = inspect.features(model, torch.cat([images[:3], images[:1]]), layers=[0])
    assert np.array_equal(seen.colours(0, 0), seen.colours(0, 3))
    assert not np.allclose(seen.colours(0, 0), seen.colours(0, 1))


def test_a_basis_is_kept_and_used_again(tmp_path: Path) -> None:
    model, images = double()
    for foreground in (False, True):
        whole = inspect.features(model, images, layers=[0, 2], foreground=foreground)
        file = whole.basis.save(tmp_path / f"{foreground}.npz")
        again = inspect.features(model, images[2:4], layers=[2], basis=file)
        assert not again.fitted and again.foreground == foreground and "a given basis" in again.said
        assert np.array_equal(again.colours(2, 0), whole.colours(2, 2), equal_nan=True)
    alone = inspect.features(model, images[2:4], layers=[2])
    assert not np.allclose(alone.colours(2, 0), inspect.features(model, images, layers=[2]).colours(2, 2))


def test_a_basis_of_something_else_is_refused(tmp_path: Path) -> None:
    model, images = double()
    file = inspect.features(model, images, layers=[2]).basis.save(tmp_path / "basis.npz")
    torch.manual_seed(5)
    other = Model(zoo.ZOO["timm ViT"].make().eval().double(), name="double")
    with pytest.raises(InputError, match=r"another model or other features.*weights"):
        inspect.features(other, images, layers=[2], basis=file)
    with pytest.raises(InputError, match=r"other features.*norm"):
        inspect.features(model, images, layers=[2], norm=False, basis=file)
    with pytest.raises(InputError, match=r"has no layer 1; it has 2"):
        inspect.features(model, images, layers=[1], basis=file)
    with pytest.raises(OptionError, match="the given basis has none"):
        inspect.features(model, images, layers=[2], basis=Basis.load(file), foreground=True)
    with pytest.raises(InputError, match="no such file"):
        Basis.load(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("nothing")
    with pytest.raises(InputError, match="is not a basis written by vitreous"):
        Basis.load(tmp_path / "text.npz")
    inspect.heads(zoo.model("timm ViT"), zoo.images("timm ViT", 1)).save(tmp_path / "heads.npz")
    with pytest.raises(InputError, match="holds no basis of features"):
        Basis.load(tmp_path / "heads.npz")
    with pytest.raises(InputError, match=r"a basis is written as \.npz"):
        Basis.load(file).save(tmp_path / "basis.txt")


class Bright(nn.Module):
    """One block whose tokens are the mean colours of the patches, so that the first component is the brightness."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 4, 8, 8)
        self.cut.weight.data.zero_()[:3] = torch.eye(3)[:, :, None, None] / 64
        self.blocks = nn.ModuleList([Attend(), Attend()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return x + 1e-3 * nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_foreground_is_the_side_that_borders_show_less(sign: float) -> None:
    torch.manual_seed(0)
    images = 0.1 * torch.randn(3, 3, 64, 64)
    images[:, :, 16:48, 24:48] += sign * torch.tensor([3.0, 2.0, 1.0])[:, None, None]
    seen = inspect.features(Model(Bright().eval(), preprocess=None), images, foreground=True, layers=[0])
    inside = np.zeros((8, 8), bool)
    inside[2:6, 3:6] = True
    for n in range(3):
        assert np.array_equal(seen.inside(0, n), inside)
        assert np.array_equal(np.isnan(seen.colours(0, n)).all(-1), ~inside)
    own = patch_features(Trace(Model(Bright().eval()), images), [0])  # any: only the shape is used
    assert own[0].shape == (3, 8, 8, 4) and seen.basis.layers[0].inside is not None


# ---------------------------------------------------------------------------------------------------------- similarity


@pytest.mark.parametrize("centred", [False, True])
def test_similarity_is_the_plain_cosine(centred: bool) -> None:
    model, images = double()
    seen = inspect.similarity(
        model, images, patch=(1, 2), layers=[0, 2], norm=False, centred=centred, matrix=True, batch=3
    )
    for layer in (0, 2):
        rows = stacked(model, images, layer)
        rows = rows - rows.mean(0) if centred else rows
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        assert off(seen.arrays[f"similarity_{layer}"], (unit @ unit[1 * 4 + 2]).reshape(7, 4, 4)) < 1e-6
        whole = (unit @ unit[:16].T).reshape(7, 4, 4, 4, 4)
        assert off(seen.arrays[f"matrix_{layer}"], whole) < 1e-6
        assert seen.maps[layer][0][1, 2] == pytest.approx(1, abs=1e-6)
    place, cosine = seen.best(2, 0)
    assert place != (1, 2) and cosine < 1
    place, cosine = seen.best(2, 4)
    assert seen.maps[2][4][place] == seen.maps[2][4].max() == np.float32(cosine)


def test_a_patch_of_merged_patches_is_the_one_that_covers_it() -> None:
    model, images = windowed.model("Swin")
    seen = inspect.similarity(model, images, patch=(5, 13), layers=[0, 3])
    assert seen.places == ((5, 13), (2, 6)) and not seen.normed
    assert seen.maps[3][0].shape == (8, 8) and seen.maps[3][0][2, 6] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_a_pixel_names_its_patch() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8))
    model = vitreous.load(None)
    seen = inspect.similarity(model, image, at=(50, 40))
    assert inspect.flow(model, image, at=(50, 40)).patch == seen.patch


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.slow
def test_what_cannot_be_placed_is_refused() -> None:
    cases: list[tuple[Model, Any, dict[str, Any], str]] = [
        (zoo.model("flat heads"), zoo.images("flat heads"), {}, "does not keep each layer in a module of its own"),
        (zoo.model("timm CaiT"), zoo.images("timm CaiT"), {"layers": [3]}, "cannot be matched with patches"),
        (zoo.model("timm XCiT"), zoo.images("timm XCiT"), {"of": "keys"}, "attends between channels"),
        (zoo.model("timm ViT no CLS"), zoo.images("timm ViT no CLS"), {"norm": True}, "has no norm of all tokens"),
        (windowed.model("Swin")[0], windowed.model("Swin")[1], {"norm": True, "layers": None}, "layers of other width"),
        (windowed.model("PVTv2")[0], windowed.model("PVTv2")[1], {"of": "keys", "layers": [0]}, "several patches each"),
    ]
    for model, images, options, said in cases:
        with pytest.raises(Unsupported, match=said):
            inspect.features(model, images, **options)
    flat = inspect.features(zoo.model("flat heads"), zoo.images("flat heads"), of="keys")
    assert flat.arrays["components_2"].shape == (3, 4, 4, 3)


def test_wrong_options_are_said() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    cases: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
        (inspect.features, {"layers": [3]}, "layer 3 is out of range"),
        (inspect.features, {"layers": []}, "layers: name at least one"),
        (inspect.features, {"of": "heads"}, "of=heads: give tokens, queries, keys or values"),
        (inspect.features, {"of": "keys", "norm": True}, "the final norm is one of tokens, not of keys"),
        (inspect.similarity, {}, "give patch="),
        (inspect.similarity, {"patch": (1, 1), "at": (1, 1)}, "give patch="),
        (inspect.similarity, {"patch": (4, 0)}, "patch 4,0 is out of range"),
    ]
    for call, options, said in cases:
        with pytest.raises(OptionError, match=said):
            call(model, images, **options)


def test_a_matrix_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vitreous.inspect.similarity"], "MOST", 1000)
    with pytest.raises(OptionError, match=r"matrix: the similarity of all patches of 3 images takes .* give fewer"):
        inspect.similarity(zoo.model("timm ViT"), zoo.images("timm ViT"), patch=(0, 0), matrix=True)


@pytest.mark.slow
def test_videos_are_refused() -> None:
    with pytest.raises(Unsupported, match="takes videos, and inspect works with images"):
        inspect.features(test_video.model("videomae"), test_video.clips())


def test_images_of_their_own_sizes_share_a_basis() -> None:
    """Of a model that takes images of any size, each in a grid of its own."""
    model = Model(test_packed.siglip2_classes())
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 255, size, np.uint8)) for size in ((48, 64, 3), (64, 40, 3))]
    seen = inspect.features(model, images)
    one, two = seen.components[2]
    assert one.shape[:2] != two.shape[:2]
    assert seen.arrays["components_2"].shape[1:3] == (max(len(one), len(two)), max(one.shape[1], two.shape[1]))
    assert not collisions(seen.figure())


def test_nothing_stays_on_the_network() -> None:
    net, images = zoo.ZOO["timm ViT"].make().eval(), zoo.images("timm ViT")
    before = {name: weight.clone() for name, weight in net.state_dict().items()}
    inspect.features(Model(net), images, foreground=True, layers=None)
    assert all(torch.equal(weight, before[name]) for name, weight in net.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


# ------------------------------------------------------------------------------------------------- figures and commands


@pytest.mark.slow
def test_figures_do_not_collide() -> None:
    model, images = double()
    for seen, many in ((images[:1], None), (images[:2], [0, 2]), (images, [-1])):
        found = inspect.features(model, seen, layers=many)
        assert not collisions(found.figure())
        assert not collisions(inspect.similarity(model, seen, patch=(2, 1), layers=many).figure(cells=True))
    assert any("one basis for 7 images (112 patches)" in said for said in words(found.figure(smooth=True)))


@pytest.fixture
def photos(cat: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(cat.read_bytes())
    Image.open(cat).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / "turned.png")
    (folder / "broken.jpg").write_bytes(b"nothing")
    return folder


@pytest.mark.slow
def test_the_command_writes_colours_and_a_basis(run: Run, photos: Path) -> None:
    said = run("inspect", "features", photos, "--layers", "3,-1", "--foreground", "--save-basis", "basis.npz", "--json")
    assert said.code == 0
    told = json.loads(said.out)
    (entry,) = told["images"]
    assert [Path(one).name for one in entry["images"]] == ["cat.jpg", "turned.png"] and len(told["failed"]) == 1
    assert set(entry["shares"]) == {"3", "11"} and len(entry["foreground"]["11"]) == 2
    assert Path(entry["figure"]).stat().st_size > 1000
    with np.load(entry["numbers"]) as stored:
        assert stored["components_11"].shape == (2, 14, 14, 3) and stored["inside_axes_3"].shape[0] == 3
        mark = json.loads(str(stored["provenance"]))
    assert (mark["view"], mark["normed"], mark["foreground"], len(mark["sources"])) == ("features", True, True, 2)
    again = run("inspect", "features", photos / "cat.jpg", "--basis", "basis.npz", "--format", "npz", "-o", "again")
    assert again.code == 0 and "a given basis" in again.out
    with np.load("again/cat.features.npz") as own, np.load(entry["numbers"]) as stored:
        assert off(own["components_11"], stored["components_11"][:1]) < 1e-4


@pytest.mark.slow
def test_the_command_writes_similarity(run: Run, photos: Path) -> None:
    said = run("inspect", "features", photos, "--patch", "5,7", "--layer", "all", "--matrix", "--centred")
    assert said.code == 0 and "patch 5,7 of cat.jpg, layer 11: cat.jpg at" in said.out
    with np.load("vitreous-out/cat.similarity.npz") as stored:
        assert stored["similarity_0"].shape == (2, 14, 14) and stored["matrix_11"].shape == (2, 14, 14, 14, 14)
        assert stored["similarity_11"][0, 5, 7] == pytest.approx(1, abs=1e-5)


def test_what_is_typed_wrong_is_said(run: Run, cat: Path, tmp_path: Path) -> None:
    (tmp_path / "there.npz").write_bytes(b"")
    for asked, said in [
        (["--patch", "5"], "--patch 5: write two numbers with a comma between them, e.g. 7,7"),
        (["--patch", "5,5", "--foreground"], "--foreground is for colours; leave it or --patch and --at out"),
        (["--matrix"], "--matrix is for the similarity to one patch; give --patch row,column or --at x,y too"),
        (["--basis", "a.npz", "--save-basis", "b.npz"], "--save-basis: the basis is given by --basis already"),
        (["--basis", "a.npz"], "a.npz: no such file"),
        (["--save-basis", "there.npz"], "--save-basis there.npz: exists; give another name or --overwrite"),
        (["--layers", "x"], "--layers x: x is not a whole number"),
    ]:
        assert run("inspect", "features", *asked, cat).error == said
