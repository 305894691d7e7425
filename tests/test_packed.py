"""Networks that take patches: SigLIP 2 NaFlex, Qwen vision, Pixtral; any resolution, no padding in any map."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import zoo
from PIL import Image
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace
from vitreous.errors import ModelError, Unsupported
from vitreous.models.libraries import packed

transformers = zoo.library("transformers", "hf")
pytestmark = pytest.mark.filterwarnings("ignore:.*preprocessing is assumed")
SIZE = (32, 48)  # 4×6 patches


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def images(count: int = 2, size: tuple[int, int] = SIZE) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(3))


def made(kind: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    net = kind._from_config(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    return net  # type: ignore[no-any-return]


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
QWEN = {"depth": 3, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
SIZES = {"hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 64}


def siglip2() -> nn.Module:
    return made(transformers.Siglip2VisionModel, transformers.Siglip2VisionConfig(**SMALL, num_patches=16))


def siglip2_classes() -> nn.Module:
    seen = transformers.Siglip2VisionConfig(**SMALL, num_patches=16).to_dict()
    config = transformers.Siglip2Config(vision_config=seen, text_config={"num_hidden_layers": 1})
    config.num_labels = 7
    return made(transformers.Siglip2ForImageClassification, config)


def qwen2() -> nn.Module:
    from transformers.models.qwen2_vl import configuration_qwen2_vl as configuration
    from transformers.models.qwen2_vl import modeling_qwen2_vl as modeling

    config = configuration.Qwen2VLVisionConfig(**QWEN, embed_dim=32, hidden_size=48, mlp_ratio=2)
    return made(modeling.Qwen2VisionTransformerPretrainedModel, config)


def qwen25(window: int = 32) -> nn.Module:
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as configuration
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    config = configuration.Qwen2_5_VLVisionConfig(**QWEN, **SIZES, window_size=window, fullatt_block_indexes=[2])
    return made(modeling.Qwen2_5_VisionTransformerPretrainedModel, config)


def qwen3() -> nn.Module:
    from transformers.models.qwen3_vl import configuration_qwen3_vl as configuration
    from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

    more: dict[str, Any] = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return made(modeling.Qwen3VLVisionModel, configuration.Qwen3VLVisionConfig(**QWEN, **SIZES, **more))


def pixtral() -> nn.Module:
    return made(transformers.PixtralVisionModel, transformers.PixtralVisionConfig(**SMALL, image_size=64))


def naflex() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_classes": 7, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    return timm.create_model("naflexvit_base_patch16_siglip", **sizes).eval()  # type: ignore[no-any-return]


TOWERS: list[Callable[[], nn.Module]] = [siglip2, siglip2_classes, qwen2, qwen25, qwen3, pixtral, naflex]
QUICK = (siglip2_classes, qwen25)
towers = pytest.mark.parametrize(
    "make",
    [make if make in QUICK else pytest.param(make, marks=pytest.mark.slow) for make in TOWERS],
    ids=[make.__name__ for make in TOWERS],
)
METHODS = ("attention", "rollout", "grad_rollout", "norm_attention", "attn_lrp", "gradcam", "transformer_attribution")


def target(model: Model, size: tuple[int, int] = SIZE) -> Any:
    return 1 if model.classifies(model.layout_at(size)) else "neuron:1"


# ------------------------------------------------------------------------------------------ what the network is given


@pytest.mark.slow
@pytest.mark.parametrize("make", [siglip2, qwen2, pixtral], ids=lambda make: make.__name__)
def test_the_processors_own_pixels_are_put_back_in_place(make: Callable[[], nn.Module]) -> None:
    """What a network is given for an image is what its own processor gives it."""
    net = make()
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (50, 70, 3), dtype=np.uint8))
    model = Model(net)
    x, theirs = model.prepare([image]), packed.usual(net)(images=image, return_tensors="pt")
    if make is pixtral:
        expected = net(pixel_values=theirs["pixel_values"], image_sizes=theirs["image_sizes"])
        assert torch.equal(x, theirs["pixel_values"])
        assert off(model.run(x), expected.last_hidden_state.mean(1)) < 1e-5
    elif make is siglip2:
        assert off(model.run(x), net(**theirs).pooler_output) < 1e-5, "padding says nothing"
    else:
        patches, grid = packed.blocks_of_pixels(x, 8, 2, 2)
        assert torch.equal(patches, theirs["pixel_values"]) and [1, *grid] == theirs["image_grid_thw"][0].tolist()
        expected = net(patches, grid_thw=theirs["image_grid_thw"]).pooler_output.mean(0, keepdim=True)
        assert off(model.run(x), expected) < 1e-5


@towers
def test_gradients_reach_the_pixels(make: Callable[[], nn.Module]) -> None:
    model, x = Model(make()), images(1)
    found = vitreous.explain(model, x, "gradient", target(model), reduce="sum").map
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model.run(leaf)[:, 1].sum(), [leaf])
    assert off(found, grad.sum(1)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("make", [siglip2, qwen2, naflex], ids=lambda make: make.__name__)
def test_gradients_are_finite_differences(make: Callable[[], nn.Module]) -> None:
    """Of networks that compute everything in double precision."""
    model, x = Model(make().double()), images(1).double()
    found = vitreous.explain(model, x, "input_x_gradient", target(model)).map
    index, step = 1, 1e-5
    y, column = 13, 29
    moved = [x.clone(), x.clone()]
    moved[0][0, :, y, column] += step * x[0, :, y, column]
    moved[1][0, :, y, column] -= step * x[0, :, y, column]
    with torch.no_grad():
        slope = (model.run(moved[0])[0, index] - model.run(moved[1])[0, index]) / (2 * step)
    assert abs(float(slope) - float(found[0, y, column])) < 1e-4 * float(found.abs().max())


@towers
def test_two_images_are_explained_as_one_by_one(make: Callable[[], nn.Module]) -> None:
    model, x = Model(make()), images()
    for method in ("rollout", "gae", "gradient"):
        both = vitreous.explain(model, x, method, target(model)).map
        each = [vitreous.explain(model, x[i : i + 1], method, target(model)).map for i in range(2)]
        assert off(both, torch.cat(each)) < 1e-5


@towers
def test_a_changed_patch_moves_its_cell(make: Callable[[], nn.Module]) -> None:
    """What the first layer's values at a cell are made of is that cell of the image."""
    model, x = Model(make()), images(1)
    layout = model.layout_at(SIZE)
    assert layout.grid == (4, 6) and layout.obstacle is None
    moved = x.clone()
    moved[:, :, 16:24, 32:40] += 1  # row 2, column 4
    values = [Trace(model, one).attention[0].v.transpose(1, 2).flatten(2) for one in (x, moved)]
    change = layout.to_map((values[1] - values[0]).norm(dim=-1))
    assert (change > 1e-6).nonzero().tolist() == [[0, 2, 4]]


def test_attention_is_the_networks_own() -> None:
    net = pixtral()
    x = images(1)
    found = Trace(Model(net), x).attention
    net.set_attn_implementation("eager")  # type: ignore[operator]
    own = net(pixel_values=x, image_sizes=[SIZE], output_attentions=True).attentions
    for layer, expected in zip(found, own, strict=True):
        assert off(layer.weights, expected) < 1e-5


# ----------------------------------------------------------------------------------------------- windows by lengths


def masked(self: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: Any = None, **_: Any) -> Tensor:
    """The attention of Qwen2.5's windows as one dense attention with a mask."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    count = len(hidden_states)
    q, k, v = self.qkv(hidden_states).unflatten(1, (3, self.num_heads, -1)).unbind(1)
    q, k = modeling.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    window = torch.bucketize(torch.arange(count), cu_seqlens[1:], right=True)
    out = F.scaled_dot_product_attention(q, k, v, window[:, None] == window, scale=self.scaling)
    return self.proj(out.transpose(1, 2).reshape(count, -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["gae", *(pytest.param(method, marks=pytest.mark.slow) for method in METHODS)])
def test_windows_in_parts_are_one_masked_attention(method: str) -> None:
    net = qwen25()
    dense: Any = copy.deepcopy(net)
    for block in dense.blocks:
        block.attn.forward = masked.__get__(block.attn)
    x = images(2, (64, 48))
    maps = [vitreous.explain(Model(one), x, method, "neuron:1").map for one in (net, dense)]
    assert maps[0].shape == (2, 8, 6) and off(*maps) < 1e-5


def test_parts_that_are_not_put_together_are_no_layer() -> None:
    trace = Trace(Model(qwen25()), images(1, (64, 48)))
    assert [layer.parts for layer in trace.attention] == [4, 4, 1]
    trace.verify()
    apart = trace.attention[0].weights[0, 0]
    assert bool((apart == 0).any()) and torch.allclose(apart.sum(-1), torch.ones(48), atol=1e-5)


# ------------------------------------------------------------------------------------------------- images of any size


def pictures(folder: Path) -> list[Path]:
    rng = np.random.default_rng(1)
    files = [folder / "wide.png", folder / "tall.png"]
    for file, size in zip(files, ((48, 96, 3), (96, 32, 3))):
        Image.fromarray(rng.integers(0, 255, size, dtype=np.uint8)).save(file)
    return files


def test_images_of_different_sizes_are_run_one_by_one(tmp_path: Path) -> None:
    model, files = Model(pixtral()), pictures(tmp_path)
    found = vitreous.explain(model, files, "rollout")
    assert [tuple(one.map.shape) for one in found] == [(1, 6, 12), (1, 12, 4)]
    assert found.map.shape == (2, 12, 12) and bool(found.map[0, 6:].isnan().all())
    for one, file in zip(found, files):
        assert torch.equal(one.map, vitreous.explain(model, file, "rollout").map)
        wide, high = one.overlay().size
        assert wide / high == pytest.approx(2 if file.stem == "wide" else 1 / 3, abs=0.01)
    assert not found.resize(24).map.isnan().any()
    found.save(tmp_path / "both.png")


def test_sizes_that_cannot_be_merged_say_what_can() -> None:
    with pytest.raises(ModelError, match=r"images of 40×48 are not made of whole units of 16 pixels.*give 32×48"):
        Model(qwen2()).layout_at((40, 48))


def test_what_needs_an_axis_of_images_says_so() -> None:
    model, x = Model(qwen2()), images(1)
    for method in ("value_zeroing", "legrad"):
        with pytest.raises(Unsupported, match=r"no axis of images in its tokens.*[Tt]ry"):
            vitreous.explain(model, x, method, "neuron:1")


def test_padding_gets_nothing() -> None:
    """A network that is given padded sequences by the user's own forward."""
    net: Any = siglip2_classes()

    def padded(x: Tensor) -> Tensor:
        patches, (h, w) = packed.rows_of_pixels(x, 8)
        mask = torch.ones(len(x), 32, dtype=torch.int32)
        mask[:, h * w :] = 0
        shapes = torch.tensor([[h, w]] * len(x))
        filled = F.pad(patches, (0, 0, 0, 32 - h * w))
        return net(pixel_values=filled, pixel_attention_mask=mask, spatial_shapes=shapes).logits  # type: ignore[no-any-return]

    x = images()
    plain, with_padding = Model(net), Model(net, forward=padded, classifier=True)
    assert with_padding.layout_at(SIZE).tokens == 32 and with_padding.layout_at(SIZE).suffix == 8
    for method in ("rollout", "gae", "gradient"):
        maps = [vitreous.explain(one, x, method, 1).map for one in (plain, with_padding)]
        assert off(maps[1], maps[0]) < 1e-5, method
