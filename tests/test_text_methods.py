"""grad_eclip, clip_surgery and maskclip: the authors' numbers, and the formulas written out plainly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Oracle, off
from oracles import text as plain
from test_capture import Elsewhere
from torch import Tensor, nn

import vitreous
from vitreous import Concept, Model, Trace
from vitreous._support.memory import limit_memory
from vitreous.cli.arguments import parse_settings
from vitreous.errors import OptionError, TargetError, Unsupported
from vitreous.methods.text.grad_eclip import last_attention
from vitreous.models.libraries import open_clip as library
from vitreous.trace.concept import Text
from vitreous.trace.target import Contrast

SINGLE, DOUBLE = (torch.float32, 5e-5), (torch.float64, 2e-7)


# ----------------------------------------------------------------------------------------------- the authors' numbers


@pytest.fixture(scope="session")
def stored(oracle: Oracle) -> dict[str, np.ndarray]:
    with np.load(oracle.folder / "clip.npz") as file:
        return dict(file)


def clip_of(stored: dict[str, np.ndarray], dtype: torch.dtype) -> Model:
    open_clip = zoo.library("open_clip", "clip")
    tower = {"layers": 4, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 64}
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
    net = open_clip.CLIP(embed_dim=64, vision_cfg=tower, text_cfg=text, quick_gelu=True).eval().to(dtype)
    state = {name[len("_state/any/") :]: torch.from_numpy(v) for name, v in stored.items() if name.startswith("_state")}
    net.load_state_dict(state)
    return Model(net, preprocess=None, name="tiny-clip")


def text_of(stored: dict[str, np.ndarray], number: int) -> Text:
    return Text(f"text{number}", torch.from_numpy(stored[f"_text/text{number}/vector"]))


def images_of(stored: dict[str, np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.stack([torch.from_numpy(stored[f"image{i}/any/x"]) for i in range(2)]).to(dtype)


@pytest.fixture
def spoken(stored: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """The text tower knows the three stored texts, and the empty one as the third."""
    known = {f"text{i}": text_of(stored, i).vector for i in range(3)}
    known[""] = known["text2"]
    monkeypatch.setattr(library, "text", lambda net, name: lambda prompt: known[prompt][None])


PUBLISHED: list[tuple[str, str, dict[str, Any]]] = [
    ("grad_eclip", "grad_eclip", {"heads": "one"}),
    ("grad_eclip_no_ksim", "grad_eclip", {"heads": "one", "ksim": "none"}),
    ("grad_eclip_qk", "grad_eclip", {"heads": "one", "ksim": "qk"}),
    ("grad_eclip_true_heads", "grad_eclip", {}),
    ("grad_eclip_no_ksim_true_heads", "grad_eclip", {"ksim": "none"}),
    ("grad_eclip_qk_true_heads", "grad_eclip", {"ksim": "qk"}),
    ("maskclip", "maskclip", {}),
    ("maskclip_ksim", "maskclip", {"ksim": True}),
    ("surgery_cosine", "clip_surgery", {"empty": False}),
    ("surgery_against_text2", "clip_surgery", {}),
    ("surgery", "clip_surgery", {"prompts": "text0|text1| text2"}),
]


@pytest.mark.usefixtures("spoken")
@pytest.mark.parametrize(("dtype", "limit"), [pytest.param(*SINGLE, marks=pytest.mark.slow), DOUBLE])
def test_published_maps(stored: dict[str, np.ndarray], dtype: torch.dtype, limit: float) -> None:
    model, images = clip_of(stored, dtype), images_of(stored, dtype)
    for key, method, options in PUBLISHED:
        for text in range(3 if key == "surgery" else 2):
            ours = vitreous.explain(model, images, method, text_of(stored, text), **options).map
            for image in range(2):
                assert off(ours[image], stored[f"image{image}/text{text}/{key}"]) < limit, (key, text, image)


@pytest.mark.parametrize(("dtype", "limit"), [SINGLE, DOUBLE])
def test_published_scores(stored: dict[str, np.ndarray], dtype: torch.dtype, limit: float) -> None:
    """With one head the last attention gives another score than the model's own, which stays as it is."""
    model, images, target = clip_of(stored, dtype), images_of(stored, dtype), text_of(stored, 1)
    trace = Trace(model, images)
    one, own = last_attention(trace, "one")[0], last_attention(trace, "true")[0]
    for key, run in (("score", one), ("score_true_heads", own)):
        expected = [stored[f"image{image}/text1/{key}"] for image in range(2)]
        np.testing.assert_allclose(trace.score(target, run).detach(), expected, atol=1e-5)
    for image in range(2):
        assert off(trace.output[image], stored[f"image{image}/any/embedding"]) < limit


@pytest.mark.usefixtures("spoken")
def test_published_picture(stored: dict[str, np.ndarray]) -> None:
    """What the authors draw is our map, scaled to 0 … 1 and enlarged."""
    model, images = clip_of(stored, torch.float64), images_of(stored, torch.float64)
    made = vitreous.explain(model, images, "clip_surgery", text_of(stored, 0), prompts="text1|text2")
    least, most = made.map.amin((1, 2), keepdim=True), made.map.amax((1, 2), keepdim=True)
    drawn = replace(made, map=(made.map - least) / (most - least)).resize(64).map
    for image in range(2):
        assert off(drawn[image], stored[f"image{image}/text0/surgery_published"]) < 1e-6


def test_a_contrast_of_texts_is_the_redundant_text(stored: dict[str, np.ndarray]) -> None:
    model, images = clip_of(stored, torch.float64), images_of(stored, torch.float64)
    target = Contrast(text_of(stored, 0), text_of(stored, 2))
    ours = vitreous.explain(model, images, "clip_surgery", target).map
    assert off(ours[1], stored["image1/text0/surgery_against_text2"]) < 2e-7


# ------------------------------------------------------------------------------------- the formulas, written plainly

NAME = "open_clip ViT-B-32"
PROMPTS = ("a dog", "a cat", "grass", "")


@cache
def vector(prompt: str, width: int = 16) -> Tensor:
    seed = torch.Generator().manual_seed(PROMPTS.index(prompt))
    return F.normalize(torch.randn(width, generator=seed), dim=0)


@pytest.fixture
def speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text tower that knows four texts."""
    monkeypatch.setattr(library, "text", lambda net, name: lambda prompt: vector(prompt)[None])


def plainly(function: Any, *given: Any) -> Tensor:
    with torch.no_grad():
        return torch.stack([function(zoo.network(NAME).visual, x, *given).reshape(4, 4) for x in zoo.images(NAME, 2)])


@pytest.mark.parametrize("heads", ["true", "one"])
@pytest.mark.parametrize("ksim", ["proj", "qk", "none"])
def test_grad_eclip(heads: str, ksim: str) -> None:
    target = Text("a dog", vector("a dog"))
    ours = vitreous.explain(zoo.model(NAME), zoo.images(NAME, 2), "grad_eclip", target, heads=heads, ksim=ksim).map
    assert off(ours, plainly(plain.eclip, vector("a dog"), 1 if heads == "one" else 2, ksim)) < 1e-4


@pytest.mark.parametrize("ksim", [False, True])
def test_maskclip(ksim: bool) -> None:
    target = Text("a dog", vector("a dog"))
    ours = vitreous.explain(zoo.model(NAME), zoo.images(NAME, 2), "maskclip", target, ksim=ksim).map
    assert off(ours, plainly(plain.maskclip, vector("a dog"), ksim)) < 1e-5


@pytest.mark.usefixtures("speaks")
def test_clip_surgery() -> None:
    """By default less the empty text; among prompts, of which each counts once; from another layer on."""
    model, images = zoo.model(NAME), zoo.images(NAME, 2)

    def ours(target: Any = "text:a dog", **options: Any) -> Tensor:
        return vitreous.explain(model, images, "clip_surgery", target, **options).map

    def similar(visual: nn.Module, image: Tensor, prompt: str, start: int) -> Tensor:
        return plain.surgery(visual, image, start)[1:] @ vector(prompt)

    def surgery(visual: nn.Module, image: Tensor, number: int) -> Tensor:
        texts = torch.stack([vector(prompt) for prompt in PROMPTS[:3]])
        return plain.among(plain.surgery(visual, image, 1), texts)[number]

    dog, cat = plainly(similar, "a dog", 1), plainly(similar, "a cat", 1)
    assert off(ours(empty=False), dog) < 1e-5
    assert off(ours(empty=False, start_layer=2), plainly(similar, "a dog", 2)) < 1e-5
    assert off(ours(), dog - plainly(similar, "", 1)) < 1e-5
    assert off(ours("text:a dog-text:a cat"), dog - cat) < 1e-5
    for prompts in ("a cat|grass", "a dog|a cat|grass|a cat"):
        assert off(ours(prompts=prompts), plainly(surgery, 0)) < 1e-5
    each = ours(["text:a dog", "text:grass"], prompts="a dog|a cat|grass")
    assert off(each[0], plainly(surgery, 0)[0]) < 1e-5 and off(each[1], plainly(surgery, 2)[1]) < 1e-5
    mixed = ours(["text:a dog", Concept(vector("a cat"), "cosine")])
    assert off(mixed[0], ours()[0]) < 1e-6 and off(mixed[1], cat[1]) < 1e-5, "only a text has an empty text"


# --------------------------------------------------------------------------------------- other networks, other targets


def last_values(name: str) -> Tensor:
    """The tokens that leave the last block of a timm network if every token attends to itself alone, [B N D]."""
    net, kept = zoo.network(name), []
    hook = net.blocks[-1].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    net(zoo.images(name, 2))
    hook.remove()
    block, x = net.blocks[-1], kept[0]
    v = block.attn.qkv(block.norm1(x)).chunk(3, -1)[2]
    x = x + block.ls1(block.attn.proj(v))
    return x + block.ls2(block.mlp(block.norm2(x)))


@torch.no_grad()
@pytest.mark.parametrize("name", ["timm ViT", "timm ViT no CLS", "timm DINOv2 registers"])
def test_maskclip_reads_each_patch_alone(name: str) -> None:
    """Whatever reads it: CLS or the mean of the patches, before or after the last norm; for a class, by its logit."""
    net, model, images = zoo.network(name), zoo.model(name), zoo.images(name, 2)
    ours = vitreous.explain(model, images, "maskclip", [3, 1])
    read = net.head(net.fc_norm(net.norm(last_values(name)[:, zoo.ZOO[name].prefix :])))
    assert off(ours.map, torch.stack([read[0, :, 3], read[1, :, 1]]).reshape(2, 4, 4)) < 1e-5
    concept = Concept(torch.randn(32), "l2")
    ours = vitreous.explain(model, images, "maskclip", concept)
    embedding = net.fc_norm(net.norm(last_values(name)[:, zoo.ZOO[name].prefix :]))
    assert off(ours.map, -(embedding - concept.vector).norm(dim=-1).reshape(2, 4, 4)) < 1e-5


@torch.no_grad()
def test_maskclip_of_transformers() -> None:
    transformers = zoo.library("transformers", "hf")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 64}, vision_config={**sizes, "image_size": 64, "patch_size": 16},
        projection_dim=16,
    )  # fmt: skip
    net = transformers.CLIPModel(config).eval()
    images, text = zoo.images("timm ViT", 2), vector("a dog")
    ours = vitreous.explain(Model(net), images, "maskclip", Text("a dog", text)).map
    x = net.vision_model(images, output_hidden_states=True).hidden_states[-2]
    layer = net.vision_model.encoder.layers[-1]
    x = x + layer.self_attn.out_proj(layer.self_attn.v_proj(layer.layer_norm1(x)))
    x = x + layer.mlp(layer.layer_norm2(x))
    read = net.visual_projection(net.vision_model.post_layernorm(x))[:, 1:]
    assert off(ours, F.cosine_similarity(read, text[None, None], dim=-1).reshape(2, 4, 4)) < 1e-5


@torch.no_grad()
def test_clip_surgery_adds_what_the_block_would_add() -> None:
    """A LayerScale is part of it; v–v attention in the last layer only; a class is read by its logit."""
    name = "timm DINOv2 registers"
    net, images, kept = zoo.network(name), zoo.images(name, 2), []
    hook = net.blocks[-1].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    net(images)
    hook.remove()
    block, x = net.blocks[-1], kept[0]
    v = block.attn.qkv(block.norm1(x)).chunk(3, -1)[2].unflatten(-1, (2, -1)).transpose(1, 2)  # [B H N d]
    mixed = (v @ v.mT / v.shape[-1] ** 0.5).softmax(-1) @ v
    x = x + block.ls1(block.attn.proj(mixed.transpose(1, 2).flatten(2)))
    read = net.head(net.fc_norm(net.norm(x)))[:, zoo.ZOO[name].prefix :, 2]
    ours = vitreous.explain(zoo.model(name), images, "clip_surgery", 2, start_layer=2).map
    assert off(ours, read.reshape(2, 4, 4)) < 1e-5


def test_grad_eclip_of_several_read_tokens() -> None:
    """The mean of the patches: every patch has a query of its own, and the gradient says how much it counts."""
    name = "timm ViT no CLS"
    model, images = zoo.model(name), zoo.images(name, 2)
    ours = vitreous.explain(model, images, "grad_eclip", 3).map
    trace = Trace(model, images)
    layer, grad = trace.attention[-1], trace.grads(vitreous.Class(3))[-1]
    proj = zoo.network(name).blocks[-1].attn.proj
    expected = torch.zeros(2, 16)
    with torch.no_grad():
        for b in range(2):
            q, k, v, g = (t[b].transpose(0, 1).flatten(1) for t in (layer.q, layer.k, layer.v, grad))
            for i in range(16):
                close = F.cosine_similarity(proj(q[i])[None], proj(k))
                expected[b] += (close - close.min()) / (close.max() - close.min()) * (v @ g[i])
    assert off(ours, expected.clamp_min(0).reshape(2, 4, 4)) < 1e-4


class Later(zoo.HandWritten):
    """What follows the blocks has a size of its own, so that it takes as many tokens as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.ones(17, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, _, y, x_ = x.shape
        x = x.reshape(b, 3, y // 16, 16, x_ // 16, 16).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        x = torch.cat([self.embed(x), self.last.expand(b, -1, -1)], 1)
        for block in (self.first, self.second, self.third):
            x = block(x)
        return self.head(self.norm(x * self.gates)[:, -1])


@pytest.mark.parametrize("method", ["maskclip", "clip_surgery"])
def test_rows_as_long_as_the_network_wants_them(method: str) -> None:
    """Few tokens at a time are tried first; a little memory changes nothing either."""
    name = "hand-written"
    net, images = Later().eval(), zoo.images(name, 2)
    net.load_state_dict({**zoo.network(name).state_dict(), "gates": torch.ones(17, 1)})
    expected = vitreous.explain(zoo.model(name), images, method, 2).map
    assert off(vitreous.explain(Model(net), images, method, 2).map, expected) < 1e-5
    with limit_memory(200_000):
        few = vitreous.explain(Model(net), images[:1], method, 2).map
    assert off(few, expected[:1]) < 1e-5


def test_what_is_kept_is_the_models_own_output() -> None:
    """An attention with one head, and rows of single tokens, are no output of the model for its images."""
    model, images = zoo.model(NAME), zoo.images(NAME, 2)
    expected = Trace(model, images).output
    for method, options in (("grad_eclip", {"heads": "one"}), ("maskclip", {}), ("clip_surgery", {})):
        trace = Trace(model, images)
        trace.explain(method, Concept(vector("a dog"), "cosine"), **options)
        assert off(trace.output, expected) < 1e-6


# ------------------------------------------------------------------------------------------------------------- refusals


class After(zoo.Block):
    """The norm follows the sum's parts, not the sum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.norm(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.mlp[1:](x)


class Gated(zoo.Block):
    """Something between the attention and its projection."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed.sigmoid() * mixed)


class Sideways(zoo.HandWritten):
    """Blocks that are given the channels of the tokens, not the tokens."""

    class Block(zoo.Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT).mT

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        b, _, y, x_ = x.shape
        x = x.reshape(b, 3, y // 16, 16, x_ // 16, 16).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        x = torch.cat([self.embed(x), self.last.expand(b, -1, -1)], 1).mT
        for block in (self.first, self.second, self.third):
            x = block(x)
        return self.head(self.norm(x.mT[:, -1]))


def built(block: type[nn.Module]) -> Model:
    net = zoo.HandWritten().eval()
    net.first, net.second, net.third = (block() for _ in range(3))
    return Model(net, name="odd")


def test_blocks_that_cannot_be_used() -> None:
    images = zoo.images("hand-written", 1)
    with pytest.raises(Unsupported, match=r"clip_surgery needs blocks that add .* Try maskclip or grad_eclip"):
        vitreous.explain(built(After), images, "clip_surgery", 1)
    assert vitreous.explain(built(After), images, "maskclip", 1).map.std() > 0
    with pytest.raises(Unsupported, match=r"odd has none; set grad_eclip\.ksim=qk"):
        vitreous.explain(built(Gated), images, "grad_eclip", 1)
    assert vitreous.explain(built(Gated), images, "grad_eclip", 1, ksim="qk").map.std() > 0
    with pytest.raises(Unsupported, match=r"maskclip\.ksim needs keys and an output projection; odd shows none"):
        vitreous.explain(built(Gated), images, "maskclip", 1, ksim=True)
    with pytest.raises(Unsupported, match=r"finds no queries and keys in odd; set grad_eclip\.ksim=none"):
        vitreous.explain(built(Elsewhere), images, "grad_eclip", 1)
    assert vitreous.explain(built(Elsewhere), images, "grad_eclip", 1, ksim="none").map.std() > 0


@pytest.mark.parametrize("method", ["maskclip", "clip_surgery"])
def test_blocks_without_tokens(method: str) -> None:
    model, images = Model(Sideways().eval(), name="odd"), zoo.images("hand-written", 1)
    said = f"{method} needs blocks that run once for each layer and are given all 17 tokens, and those of odd are not"
    with pytest.raises(Unsupported, match=said):
        vitreous.explain(model, images, method, 1)
    assert vitreous.explain(model, images, "grad_eclip", 1).map.std() > 0


def test_attention_that_is_not_of_one_head() -> None:
    images = zoo.images("timm BEiT", 1)
    with pytest.raises(Unsupported, match=r"a bias of their own; use grad_eclip\.heads=true"):
        vitreous.explain(zoo.model("timm BEiT"), images, "grad_eclip", 1, heads="one")
    with pytest.raises(Unsupported, match=r"heads=one finds no queries and keys in this model; use .*heads=true"):
        vitreous.explain(built(Elsewhere), zoo.images("hand-written", 1), "grad_eclip", 1, heads="one")


def test_texts_that_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, text = zoo.model(NAME), zoo.images(NAME, 1), Text("a dog", vector("a dog"))
    with pytest.raises(TargetError, match=r"clip_surgery\.prompts are compared with a text, and neuron:1 is none"):
        vitreous.explain(model, images, "clip_surgery", "neuron:1", prompts="a cat")
    monkeypatch.setattr(library, "text", lambda net, name: None)
    with pytest.raises(OptionError, match=r"the empty text \(.*no text tower.* set clip_surgery\.empty=false"):
        vitreous.explain(model, images, "clip_surgery", text)
    with pytest.raises(TargetError, match="no text tower"):
        vitreous.explain(model, images, "clip_surgery", text, prompts="a cat")
    with pytest.raises(OptionError, match="start_layer=3 is out of range"):
        vitreous.explain(model, images, "clip_surgery", text, start_layer=3)


def test_words_on_the_command_line() -> None:
    """An option that takes a text takes any; `true` is a word where it is a choice."""
    given = [
        "grad_eclip.heads=true",
        "grad_eclip.ksim=none",
        "clip_surgery.prompts=7, or|null",
        "maskclip.ksim=true",
    ]
    assert parse_settings(given) == {
        "grad_eclip": {"heads": "true", "ksim": "none"},
        "clip_surgery": {"prompts": "7, or|null"},
        "maskclip": {"ksim": True},
    }
