"""Attention that is changed between softmax and values, a CLS token that enters late, and branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import zoo
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace
from vitreous.errors import ModelError, Unsupported

TOKENS = 17  # CLS and 4×4 patches
Layers = list[tuple[Tensor, slice]]  # A in the graph, and the tokens that ask


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def cait() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 64, "num_classes": 7, "embed_dim": 32, "depth": 2, "num_heads": 2}
    net = timm.create_model("cait_xxs24_224", init_values=1.0, **sizes).double().eval()
    for block in net.blocks:
        nn.init.normal_(block.attn.proj_w.weight, std=0.7)
        nn.init.normal_(block.attn.proj_w.bias, mean=0.1, std=0.02)
    return net  # type: ignore[no-any-return]


def convit() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 64, "num_classes": 7, "embed_dim": 16, "depth": 4, "num_heads": 2}
    return timm.create_model("convit_tiny", local_up_to_layer=2, **sizes).double().eval()  # type: ignore[no-any-return]


def cait_run(net: Any, x: Tensor) -> tuple[Tensor, Layers]:
    """The scores and the attention of every layer, written out again."""
    layers: Layers = []
    x = net.patch_embed(x) + net.pos_embed
    for block in net.blocks:
        attn, h = block.attn, block.norm1(x)
        q, k, v = attn.qkv(h).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhij,gh->bgij", q * attn.scale @ k.mT, attn.proj_l.weight)
        a = torch.einsum("bhij,gh->bgij", (scores + attn.proj_l.bias.view(-1, 1, 1)).softmax(-1), attn.proj_w.weight)
        a = a + attn.proj_w.bias.view(-1, 1, 1)
        layers.append((a, slice(1, None)))
        x = x + block.gamma_1 * attn.proj((a @ v).transpose(1, 2).flatten(2))
        x = x + block.gamma_2 * block.mlp(block.norm2(x))
    cls = net.cls_token.expand(len(x), -1, -1)
    for block in net.blocks_token_only:
        attn, h = block.attn, block.norm1(torch.cat([cls, x], 1))
        q, k, v = (
            m(t).unflatten(2, (attn.num_heads, -1)).transpose(1, 2)
            for m, t in zip((attn.q, attn.k, attn.v), (h[:, :1], h, h))
        )
        a = (q * attn.scale @ k.mT).softmax(-1)
        layers.append((a, slice(0, 1)))
        cls = cls + block.gamma_1 * attn.proj((a @ v).transpose(1, 2).flatten(2))
        cls = cls + block.gamma_2 * block.mlp(block.norm2(cls))
    return net.head(net.norm(torch.cat([cls, x], 1))[:, 0]), layers


def convit_run(net: Any, x: Tensor) -> tuple[Tensor, Layers]:
    layers: Layers = []
    x = net.patch_embed(x) + net.pos_embed
    for number, block in enumerate(net.blocks):
        attn, late = block.attn, number >= net.local_up_to_layer
        if number == net.local_up_to_layer:
            x = torch.cat([net.cls_token.expand(len(x), -1, -1), x], 1)
        h, heads = block.norm1(x), attn.num_heads
        if late:
            q, k, v = attn.qkv(h).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            a = (q @ k.mT * attn.scale).softmax(-1)
        else:
            q, k = attn.qk(h).unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
            v = attn.v(h).unflatten(2, (heads, -1)).transpose(1, 2)
            places = attn.pos_proj(attn.get_rel_indices(16).double()).permute(0, 3, 1, 2).softmax(-1)
            gate = attn.gating_param.sigmoid().view(1, -1, 1, 1)
            a = (1 - gate) * (q @ k.mT * attn.scale).softmax(-1) + gate * places
            a = a / a.sum(-1, keepdim=True)
        layers.append((a, slice(0 if late else 1, None)))
        x = x + attn.proj((a @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return net.head(net.norm(x)[:, 0]), layers


def whole(a: Tensor, asking: slice, silent: float) -> Tensor:
    """[B n m] among all tokens; a token that asks nothing keeps itself."""
    keys = slice(TOKENS - a.shape[2], None)
    found = silent * torch.eye(TOKENS, dtype=a.dtype).repeat(len(a), 1, 1)
    found[:, asking, :] = 0
    found[:, asking, keys] = a
    return found


def dense_rollout(layers: Layers) -> Tensor:
    carried = torch.eye(TOKENS, dtype=torch.float64)[:1].expand(len(layers[0][0]), -1, -1)
    for a, asking in reversed(layers):
        mean, here = a.detach().mean(1), torch.eye(TOKENS, dtype=torch.float64)
        step = 0.5 * here + 0.5 * whole(mean, asking, 1.0)
        carried = carried @ (step / step.sum(-1, keepdim=True))
    return carried[:, 0, 1:].reshape(-1, 4, 4)


def dense_gae(scores: Tensor, layers: Layers, target: int) -> Tensor:
    grads = torch.autograd.grad(scores[:, target].sum(), [a for a, _ in layers])
    eye = torch.eye(TOKENS, dtype=torch.float64)
    carried = eye[:1].expand(len(scores), -1, -1)
    for (a, asking), grad in reversed(list(zip(layers, grads))):
        carried = carried + carried @ whole((a.detach() * grad).clamp_min(0).mean(1), asking, 0.0)
    return carried[:, 0, 1:].reshape(-1, 4, 4)


Run = Callable[[Any, Tensor], tuple[Tensor, Layers]]
LATE = [(cait, cait_run), pytest.param(convit, convit_run, marks=pytest.mark.slow)]
CASES = pytest.mark.parametrize(("make", "run"), LATE, ids=["CaiT", "ConViT"])


@CASES
def test_the_weights_are_those_that_multiply_the_values(make: Callable[[], nn.Module], run: Run) -> None:
    net, x = make(), images()
    trace, (scores, layers) = Trace(Model(net, classifier=True), x), run(net, x)
    assert off(scores, net(x)) < 1e-12, "the network is written out rightly"
    trace.verify()
    for found, (expected, _) in zip(trace.attention, layers, strict=True):
        assert off(found.weights, expected) < 1e-12
    assert [layer.mixed for layer in trace.attention] == [True, True, False, False]
    assert trace.layout.readout == (0,) and trace.layout.mixed


@CASES
def test_maps_of_a_late_cls_are_those_of_dense_matrices(make: Callable[[], nn.Module], run: Run) -> None:
    net, x = make(), images()
    model, (scores, layers) = Model(net, classifier=True), run(net, x)
    last = layers[-1][0].mean(1)[:, 0, 1:].reshape(-1, 4, 4)
    assert off(vitreous.explain(model, x, "attention").map, last) < 1e-6
    assert off(vitreous.explain(model, x, "rollout").map, dense_rollout(layers)) < 1e-6
    assert off(vitreous.explain(model, x, "gae", 3).map, dense_gae(scores, layers, 3)) < 1e-6


@CASES
def test_one_changed_patch_moves_its_cell(make: Callable[[], nn.Module], run: Run) -> None:
    """Without mixing of tokens but by the last class attention, only the changed patch can."""
    net, x = make(), images(1)
    model = Model(net, classifier=True)
    moved = x.clone()
    moved[:, :, 16:32, 48:] += 3 * torch.randn(3, 16, 16, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    change = (vitreous.explain(model, moved, "attention").map - vitreous.explain(model, x, "attention").map).abs()
    assert int(change.flatten().argmax()) == 1 * 4 + 3


# ------------------------------------------------------------------------------------------- any way of changing it


class Changed(nn.Module):
    """An attention whose softmax is changed."""

    def __init__(self, change: Callable[[Tensor, Changed], Tensor], heads: int = 2, width: int = 32) -> None:
        super().__init__()
        self.change, self.heads = change, heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Parameter(torch.randn(heads, heads) + torch.eye(heads))
        self.linear, self.conv = nn.Linear(heads, heads), nn.Conv2d(heads, heads, 1)
        self.more = nn.Conv2d(heads, 3 * heads, 1)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        a = self.change((q @ k.mT / 4).softmax(-1), self)
        return self.proj((a @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def overwritten(a: Tensor, _: Changed) -> Tensor:
    a = a.clone()
    a[..., 0] = 0
    return a


WAYS: dict[str, Callable[[Tensor, Changed], Tensor]] = {
    "a linear layer over heads": lambda a, m: m.linear(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "a convolution over heads": lambda a, m: m.conv(a),
    "einsum with a matrix": lambda a, m: torch.einsum("bhij,hg->bgij", a, m.mix),
    "a product with a matrix": lambda a, m: (m.mix @ a.flatten(2)).view(a.shape),
    "more heads and back": lambda a, m: m.more(a).unflatten(1, (3, -1)).sum(1),
    "the mean over heads": lambda a, m: a.mean(1, keepdim=True).expand(-1, m.heads, -1, -1),
    "two softmaxes subtracted": lambda a, m: a - 0.4 * a.flip(1),
    "two softmaxes multiplied": lambda a, m: a @ a,
    "some columns overwritten": overwritten,
}


def changed(way: str) -> Model:
    torch.manual_seed(1)
    net = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=7, embed_dim=32, depth=2, num_heads=2)
    for block in net.blocks:
        block.attn = Changed(WAYS[way])
    return Model(net.double().eval(), classifier=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_softmax_is_recorded(way: str) -> None:
    model, x = changed(way), images()
    assert model.layout_at((64, 64)).obstacle is None
    trace = Trace(model, x)
    trace.verify()
    block = model.module.blocks[0]  # type: ignore[index,union-attr]
    with torch.no_grad():
        tokens = block.norm1(model.module._pos_embed(model.module.patch_embed(x)))  # type: ignore[operator]
        q, k, _ = block.attn.qkv(tokens).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        expected = WAYS[way]((q @ k.mT / 4).softmax(-1), block.attn)
    assert trace.attention[0].mixed and off(trace.attention[0].weights, expected) < 1e-12


def test_gradients_are_those_of_the_changed_weights() -> None:
    model, x = changed("a linear layer over heads"), images()
    trace = Trace(model, x)
    found = vitreous.explain(model, x, "gae", 3).map
    run = trace.differentiable()
    grads = torch.autograd.grad(run.output[:, 3].sum(), [layer.given for layer in run.layers])  # type: ignore[arg-type]
    carried = torch.eye(TOKENS, dtype=torch.float64)[:1].expand(2, -1, -1)
    for layer, grad in reversed(list(zip(run.layers, grads))):
        carried = carried + carried @ (layer.weights * grad).clamp_min(0).mean(1)
    assert off(found, carried[:, 0, 1:].reshape(-1, 4, 4).detach()) < 1e-6


@pytest.mark.parametrize("way", ["a linear layer over heads", "two softmaxes subtracted"])
def test_tokens_are_dropped_as_if_they_were_cut_out(way: str) -> None:
    model, x = changed(way), images(1)
    net: Any = model.module
    found = vitreous.explain(model, x, "token_ablation", 3, of="logit").map.flatten()
    with torch.no_grad():
        tokens, score = net._pos_embed(net.patch_embed(x)), net(x)[0, 3]
        for patch in (0, 6, 15):
            left = [i for i in range(TOKENS) if i != patch + 1]
            without = net.forward_head(net.norm(net.blocks(tokens[:, left])))[0, 3]
            assert abs(float(score - without - found[patch])) < 1e-6


def test_methods_that_need_weights_of_one_sign_say_so() -> None:
    model, x = changed("two softmaxes subtracted"), images(1)
    for method in ("attention_flow", "beyond_intuition"):
        with pytest.raises(Unsupported, match=f"{method} needs weights that are not negative.*blocks.*Try gae"):
            vitreous.explain(model, x, method, 1)
    with pytest.raises(Unsupported, match="finds no queries and keys"):
        vitreous.explain(model, x, "grad_eclip", 1)
    negative = changed("a linear layer over heads")
    for block in negative.module.blocks:  # type: ignore[union-attr]
        nn.init.constant_(block.attn.linear.bias, -1.0)  # type: ignore[union-attr,arg-type]
    with pytest.raises(Unsupported, match=r"rollout: .*sums to -.*cannot be normalised\. Try gae"):
        vitreous.explain(negative, x, "rollout")


# ------------------------------------------------------------------------------------------------ what cannot work


def deformable() -> Model:
    transformers = zoo.library("transformers", "hf")
    torch.manual_seed(0)
    stages: dict[str, Any] = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "embedding_size": 8}
    backbone = transformers.ResNetConfig(**stages, out_features=["stage2", "stage3", "stage4"])
    sizes = {
        f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")
    }
    options: dict[str, Any] = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    config = transformers.DeformableDetrConfig(**sizes, **options, backbone_config=backbone, d_model=32, num_queries=5)
    net = transformers.DeformableDetrForObjectDetection(config).eval()
    return Model(net, forward=lambda x: net(pixel_values=x).logits.mean(1), classifier=True)


def linear() -> Model:
    torch.manual_seed(0)
    return Model(timm.create_model("efficientvit_b0", num_classes=7).eval())


def channels() -> Model:
    torch.manual_seed(0)
    return Model(timm.create_model("edgenext_xx_small", num_classes=7).eval())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (channels, "attends between channels, not between tokens"),
        (linear, "multiplies queries, keys and values without a softmax .linear attention, in stages.*"),
        (deformable, "samples points that it chooses itself .deformable attention, in model.*"),
    ],
    ids=["channels", "linear", "deformable"],
)
def test_attention_without_weights_is_refused_with_the_reason(make: Callable[[], Model], reason: str) -> None:
    model, x = make(), images(1).float().repeat(1, 1, 2, 2)
    with pytest.raises(Unsupported, match=f"rollout needs token attention; .*{reason}.* Try "):
        vitreous.explain(model, x, "rollout", 1)
    assert vitreous.explain(model, x, "gradient", 1).map.shape == (1, 128, 128)
    assert vitreous.explain(model, x, "occlusion", 1).map.isfinite().all()


def test_channel_attention_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match=r"attends between channels, not between tokens\. Try "):
        vitreous.explain(zoo.model("timm XCiT"), zoo.images("timm XCiT"), "rollout")


# ------------------------------------------------------------------------------------------------------- branches


def crossvit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"patch_size": (8, 16), "embed_dim": (16, 32), "num_heads": (2, 2), "num_classes": 7}
    sizes |= {"img_size": 64, "img_scale": (1.0, 1.0), "depth": ((1, 1, 0), (1, 2, 0)), **options}
    net: Any = timm.create_model("crossvit_9_240", **sizes).double().eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return net  # type: ignore[no-any-return]


SPANS = (65, 17)  # tokens of the two branches, CLS first
STARTS = (0, 65)


def crossvit_run(net: Any, x: Tensor) -> tuple[Tensor, list[tuple[Tensor, list[int], list[int]]]]:
    """The scores, and A of every layer with its queries and keys among the tokens of both branches."""
    layers: list[tuple[Tensor, list[int], list[int]]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, asking: list[int], asked: list[int]) -> Tensor:
        q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        a = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        layers.append((a, asking, asked))
        return (a @ v).transpose(1, 2).flatten(2)

    xs = []
    for i, embed in enumerate(net.patch_embed):
        cls = getattr(net, f"cls_token_{i}").expand(len(x), -1, -1)
        xs.append(torch.cat([cls, embed(x)], 1) + getattr(net, f"pos_embed_{i}"))
    for stage in net.blocks:
        for i, blocks in enumerate(stage.blocks):
            own = list(range(STARTS[i], STARTS[i] + SPANS[i]))
            for block in blocks:
                q, k, v = block.attn.qkv(block.norm1(xs[i])).chunk(3, -1)
                xs[i] = xs[i] + block.attn.proj(attend(q, k, v, 2, own, own))
                xs[i] = xs[i] + block.mlp(block.norm2(xs[i]))
        asked = [proj(xs[i][:, :1]) for i, proj in enumerate(stage.projs)]
        made = []
        for i, (fusion, back) in enumerate(zip(stage.fusion, stage.revert_projs)):
            o = 1 - i
            tokens = torch.cat([asked[i], xs[o][:, 1:]], 1)
            h = fusion.norm1(tokens)
            keys = [STARTS[i], *range(STARTS[o] + 1, STARTS[o] + SPANS[o])]
            out = attend(fusion.attn.wq(h[:, :1]), fusion.attn.wk(h), fusion.attn.wv(h), 2, [STARTS[i]], keys)
            made.append(torch.cat([back(tokens[:, :1] + fusion.attn.proj(out)), xs[i][:, 1:]], 1))
        xs = made
    scores = [head(norm(one)[:, 0]) for one, norm, head in zip(xs, net.norm, net.head)]
    return torch.stack(scores).mean(0), layers


@pytest.mark.slow
@pytest.mark.parametrize("branch", [0, 1])
def test_a_branch_is_that_of_dense_matrices_over_both(branch: int) -> None:
    net, x = crossvit(), images()
    scores, layers = crossvit_run(net, x)
    assert off(scores, net(x)) < 1e-12, "the network is written out rightly"
    model, count = Model(net, classifier=True, branch=branch), sum(SPANS)
    side = (8, 4)[branch]
    shown = slice(STARTS[branch] + 1, STARTS[branch] + SPANS[branch])
    assert model.layout_at((64, 64)).grid == (side, side) and model.layout_at((64, 64)).readout == (0, 1)
    grads = torch.autograd.grad(scores[:, 3].sum(), [a for a, _, _ in layers])
    eye = torch.eye(count, dtype=torch.float64).repeat(2, 1, 1)
    read = (eye[:, :1] + eye[:, STARTS[1] : STARTS[1] + 1]) / 2
    gained, rolled = read, read
    for (a, asking, asked), grad in reversed(list(zip(layers, grads))):
        step, factor = torch.zeros_like(eye), eye.clone()
        rows = torch.tensor(asking)[:, None]
        step[:, rows, asked] = (a.detach() * grad).clamp_min(0).mean(1)
        factor[:, asking] *= 0.5
        factor[:, rows, asked] += 0.5 * a.detach().mean(1)
        gained, rolled = gained + gained @ step, rolled @ factor
    for method, expected in (("gae", gained), ("rollout", rolled)):
        found = vitreous.explain(model, x, method, 3).map
        assert off(found, expected[:, 0, shown].reshape(-1, side, side)) < 1e-6, method


@pytest.mark.slow
def test_the_branch_that_matters_most_is_shown_and_others_are_named() -> None:
    net = crossvit()
    layout = Model(net, classifier=True).layout_at((64, 64))
    assert layout.obstacle is not None and "runs 2 branches that exchange their CLS tokens" in layout.obstacle
    with pytest.raises(ModelError, match=r"has no branch 2: give one of 0 \(8×8 patches\), 1 \(4×4 patches\)"):
        Model(net, classifier=True, branch=2).layout_at((64, 64))
    with pytest.raises(Unsupported, match=r"runs 2 branches.*Try attention, norm_attention, rollout or gae"):
        vitreous.explain(Model(net, classifier=True), images(1), "value_zeroing", 1)


@pytest.mark.slow
@pytest.mark.parametrize("branch", [0, 1])
def test_a_changed_patch_of_a_branch_moves_its_cell(branch: int) -> None:
    net, x = crossvit(), images(1)
    model, moved, side = Model(net, classifier=True, branch=branch), x.clone(), (8, 16)[branch]
    moved[:, :, 2 * side : 3 * side, side : 2 * side] += 1  # row 2, column 1
    layout = model.layout_at((64, 64))
    number = next(i for i, a in enumerate(layout.stages) if a.queries.size == SPANS[branch])
    values = [Trace(model, one).attention[number].v.transpose(1, 2).flatten(2).norm(dim=-1) for one in (x, moved)]
    change = layout.to_map(layout.stages[number].scatter_keys((values[1] - values[0]).abs()), number)
    assert (change > 1e-9).nonzero().tolist() == [[0, 2, 1]]
