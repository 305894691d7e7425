"""Vision-language models word by word, and the words of a text: against the models' own calls and brute force."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vlms
import zoo
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import vitreous
from vitreous import Model, Trace
from vitreous.cli.main import app
from vitreous.errors import InputError, ModelError, OptionError, TargetError, Unsupported
from vitreous.models.libraries import vlm
from vitreous.models.speaker import Speaker, WordsModel, spell
from vitreous.trace.word import Word, parse_words

QUESTION = "what is this ?"
TOKENS = 4  # of an answer
QUICK = ["llava"]
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in vlms.KINDS]


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, vlms.SIDE, vlms.SIDE, generator=torch.Generator().manual_seed(3))


@cache
def speaker(kind: str, attention: str = "sdpa") -> Speaker:
    return Speaker(vlms.built(kind, attention=attention), vlms.tokenizer(), kind)


@cache
def answered(kind: str, attention: str = "sdpa") -> WordsModel:
    """A question with the model's own answer about the first image."""
    own = speaker(kind, attention)
    return own.model(QUESTION, own.generate(QUESTION, images(1), TOKENS))


def direct(model: WordsModel, pixels: Tensor) -> Tensor:
    """The logits of the answer, by a call of the network written out."""
    net, prompt = model.speaker.net, model.speaker.prompt(QUESTION, (vlms.SIDE, vlms.SIDE))
    ids = torch.tensor([prompt + model.answer]).expand(len(pixels), -1)
    more: dict[str, Any] = {"pixel_values": pixels}
    if "idefics" in model.name or "smol" in model.name:
        more = {"pixel_values": pixels[:, None]}
    if "qwen" in model.name:
        more = {"pixel_values": rows(pixels), "mm_token_type_ids": (ids == vlms.IMAGE).int()}
        more["image_grid_thw"] = torch.tensor([[1, vlms.SIDE // 4, vlms.SIDE // 4]] * len(pixels))
    if model.name == "paligemma":
        more["token_type_ids"] = torch.tensor([[0] * len(prompt) + [1] * len(model.answer)]).expand_as(ids)
    logits: Tensor = net(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits
    return logits[:, len(prompt) - 1 : -1]


def rows(pixels: Tensor) -> Tensor:
    """Patches of 4×4 pixels, twice for two frames, in packs of 2×2, by loops."""
    found = []
    for image in pixels:
        for y in range(0, vlms.SIDE, 8):
            for x in range(0, vlms.SIDE, 8):
                for dy, dx in ((0, 0), (0, 4), (4, 0), (4, 4)):
                    patch = image[:, y + dy : y + dy + 4, x + dx : x + dx + 4]
                    found.append(torch.stack([patch, patch], 1).flatten())
    return torch.stack(found)


# ------------------------------------------------------------------------------------------------------ questions and answers


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_that_explains_gives_the_tokens_that_were_generated(kind: str) -> None:
    model = answered(kind)
    output = model.run(images(1))
    assert output.shape == (1, TOKENS, len(vlms.NAMES))
    output[..., vlms.IMAGE] = -torch.inf  # never generated
    assert output[0].argmax(-1).tolist() == model.answer
    assert torch.allclose(model.run(images()), direct(model, images()), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_model_called_directly(kind: str) -> None:
    model, leaf = answered(kind), images().requires_grad_()
    y = direct(model, leaf)[:, 2, model.answer[2]].sum()
    (grad,) = torch.autograd.grad(y, [leaf])
    found = vitreous.explain(model, images(), "input_x_gradient", "word:2").map
    assert torch.allclose(found, (leaf.detach() * grad).sum(1), atol=1e-5)
    alone = [vitreous.explain(model, one, "input_x_gradient", "word:2").map for one in images()]
    assert torch.allclose(found, torch.cat(alone), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_occlusion_is_brute_force(kind: str) -> None:
    model = answered(kind)
    found = vitreous.explain(model, images(), "occlusion", "word:1", fill="zero").map
    layout = model.layout_at((vlms.SIDE, vlms.SIDE))
    assert found.shape[1:] == layout.grid == vlms.GRIDS[kind]
    with torch.no_grad():
        whole = direct(model, images())[:, 1, model.answer[1]]
        for row, column in ((0, 0), (1, 2), (3, 3)):
            hidden = images()
            hidden[(..., *layout.rectangle(row, column))] = 0
            drop = whole - direct(model, hidden)[:, 1, model.answer[1]]
            assert torch.allclose(found[:, row, column], drop, atol=1e-4)


def test_ask_explains_every_word_and_saves(tmp_path: Path) -> None:
    net = vlms.built("llava")
    found = vitreous.ask((net, vlms.tokenizer()), images(1), QUESTION, method="input_x_gradient", most=TOKENS)
    assert len(found) == len(found.words) == TOKENS and found.text == " ".join(found.words) and found.generated
    given = vitreous.ask((net, vlms.tokenizer()), images(1), QUESTION, found.text, "input_x_gradient", words=[1])
    assert torch.allclose(found[1].map, given[0].map, atol=1e-6) and not given.generated
    assert found[found.words[1]] is found[1]
    assert found.save(tmp_path / "a.png").stat().st_size > 1000
    found.save(tmp_path / "a.npz")
    again = vitreous.Attribution.load(tmp_path / "a.npz", f"1 {found.words[1]}")
    assert torch.equal(again.map, found[1].map.cpu()) and again.labels == found[1].labels
    with pytest.raises(OptionError, match="cannot save"):
        found.save(tmp_path / "a.txt")
    with pytest.raises(TargetError, match="no 'zebra'"):
        found["zebra"]


def test_targets_of_an_answer() -> None:
    own = speaker("llava")
    model = own.model(QUESTION, "a dog on the red sofa .")
    assert [word.text for word in model.words] == "a dog on the red sofa .".split()
    output = model.run(images())
    dog, cat = vlms.NAMES.index("dog"), vlms.NAMES.index("cat")
    for given, places, ids in (
        ("token:dog", (1,), (dog,)),
        ("token:Dog", (1,), (dog,)),
        (1, (1,), (dog,)),
        ("word:-6", (1,), (dog,)),
        ("token:cat@1", (1,), (cat,)),
        ("answer", tuple(range(7)), tuple(model.answer)),
    ):
        target = parse_words(given, model)
        assert isinstance(target, Word) and (target.places, target.ids) == (places, ids)
        assert torch.allclose(target(output, output), output[:, list(places), list(ids)].mean(1))
        again = parse_words(str(target), model)
        assert again == target and again.identity == target.identity
    rather = vitreous.explain(model, images(), "input_x_gradient", "token:dog-token:cat@1").map
    each = [vitreous.explain(model, images(), "input_x_gradient", t).map for t in ("word:1", "token:cat@1")]
    assert torch.allclose(rather, each[0] - each[1], atol=1e-5)
    default = vitreous.explain(model, images(), "input_x_gradient").targets
    assert default == ("answer", "answer")
    share = output.softmax(-1)[0, 1, dog]
    assert parse_words(1, model).title(model, output, 0) == f"dog {float(share):.0%}"
    for wrong, said in (("top-1", "token:WORD"), ("token:zebra", "no word"), ("word:9", "out of range"), (True, "not a")):
        with pytest.raises(TargetError, match=said):
            parse_words(wrong, model)
    with pytest.raises(TargetError, match="answers no question"):
        parse_words(1, model).check(Model(zoo.network("timm ViT")), 10)


def test_what_cannot_be_asked() -> None:
    own = speaker("llava")
    with pytest.raises(ModelError, match="no vision-language model"):
        vitreous.ask((zoo.network("timm ViT"), vlms.tokenizer()), images(1), QUESTION)
    with pytest.raises(ModelError, match="give it with the network"):
        Speaker(vlms.built("llava"))
    with pytest.raises(InputError, match="one image"):
        vitreous.ask(own, images(2), QUESTION)
    with pytest.raises(InputError, match="question is empty"):
        vitreous.ask(own, images(1), " ")
    with pytest.raises(InputError, match="answer is empty"):
        vitreous.ask(own, images(1), QUESTION, "")
    with pytest.raises(InputError, match="stands for the image"):
        vitreous.ask(own, images(1), QUESTION, "a <image>")
    for wrong in (0, []):
        with pytest.raises(OptionError, match="words"):
            vitreous.ask(own, images(1), QUESTION, "a dog", words=wrong)
    with pytest.raises(ModelError, match="several places"):
        vlm.expanded([4, 5, 4], 4, 3)


def test_words_of_several_tokens() -> None:
    class Pieces:
        def decode(self, ids: list[int]) -> str:
            return "".join(("Re", "d", " so", "fa", "!\n", "Yes")[i] for i in ids)

    found = spell(Pieces(), [0, 1, 2, 3, 4, 5])
    assert [(word.text, word.tokens) for word in found] == [("Red", (0, 1)), ("sofa!", (2, 3, 4)), ("Yes", (5,))]


def test_a_forward_pass_leaves_nothing_on_the_network() -> None:
    model = answered("qwen3")
    model.speaker.net.model.rope_deltas = before = torch.ones(1, 1)
    try:
        model.run(images())
        assert model.speaker.net.model.rope_deltas is before
    finally:
        model.speaker.net.model.rope_deltas = None


def test_an_image_of_zeros_is_an_image() -> None:
    model = answered("idefics3")
    assert torch.allclose(model.run(images() * 0), model.run(images() * 0 + 1e-30), atol=1e-6)


# -------------------------------------------------------------------------------------------- processors and the command


@pytest.mark.slow
def test_the_command_asks(tmp_path: Path) -> None:
    folder, photo = vlms.saved("llava"), tmp_path / "photo.png"
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(photo)
    base = ["ask", str(photo), QUESTION, "--model", f"hf/{folder}", "--out", str(tmp_path / "out"), "--most", "3"]
    done = CliRunner().invoke(app, [*base, "--method", "gradient", "--json"], catch_exceptions=False)
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and len(told["words"]) == 3 and told["generated"]
    with np.load(tmp_path / "out" / "photo.answer.npz") as file:
        assert f"0 {told['words'][0]['word']}" in file
    assert (tmp_path / "out" / "photo.answer.png").is_file()
    more = ["--answer", "a red sofa", "--words", "token:sofa", "--method", "input_x_gradient"]
    done = CliRunner().invoke(app, [*base, *more, "--format", "npz"], catch_exceptions=False)
    assert "sofa" in done.stdout and "a red sofa" in done.stdout
    loaded = vitreous.load(f"hf/{folder}")
    found = vitreous.ask(loaded, str(photo), QUESTION, "a red sofa", "gradient")
    prompt = found.model.speaker.prompt(QUESTION, (vlms.SIDE, vlms.SIDE))
    assert [vlms.NAMES[i] for i in prompt] == ["<image>"] * 16 + "what is this ? it there".split()
    assert found[0].provenance["model"] == folder.name


@pytest.mark.slow
@pytest.mark.parametrize("side", [(40, 40), (40, 72)])
def test_the_image_of_a_packed_processor_is_what_it_packs(side: tuple[int, int]) -> None:
    net = vlms.built("qwen3")
    processor = vlms.tr.Qwen2VLImageProcessor(patch_size=4, merge_size=2, min_pixels=64, max_pixels=8192)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (*side, 3), dtype=np.uint8))
    image = vlm.transform(net, processor)(photo)
    made = processor(images=photo, return_tensors="pt")
    assert torch.equal(vlm.pixels(net, image[None])["pixel_values"], made["pixel_values"])
    assert torch.equal(vlm.pixels(net, image[None])["image_grid_thw"], made["image_grid_thw"])
    with pytest.raises(ModelError, match="does not divide"):
        vlm.pixels(net, image[None, :, :-1])


# -------------------------------------------------------------------------------------------------- the words of a text


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny CLIP that spells, saved with its tokenizer."""
    transformers, folder = vlms.tr, tmp_path_factory.mktemp("clip")
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(c + "</w>" for c in letters)]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16
    )
    part = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ends = {"max_position_embeddings": 16, "eos_token_id": 1, "bos_token_id": 0}
    config = transformers.CLIPConfig(
        vision_config={**part, "image_size": 32, "patch_size": 16},
        text_config={**part, "vocab_size": len(names), **ends},
        projection_dim=16,
    )
    torch.manual_seed(0)
    net = transformers.CLIPModel(config).eval()
    for weight in net.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return vitreous.load(f"hf/{folder}")


TEXT = "a dog on red"
SPANS = ((1, 2), (2, 5), (5, 7), (7, 10))  # the letters of each word, behind the token that begins


def test_words_by_gradient_are_autograd_of_the_text_tower(clip: Model) -> None:
    found = vitreous.words(clip, images(1), TEXT)
    net: Any = clip.module
    tokenizer = vlms.tr.AutoTokenizer.from_pretrained(net.config._name_or_path)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    kept: list[Tensor] = []

    def keep(module: Any, args: Any, out: Tensor) -> Tensor:
        kept.append(out.detach().requires_grad_())
        return kept[-1]

    hook = net.text_model.embeddings.token_embedding.register_forward_hook(keep)
    out = net.get_text_features(ids)
    hook.remove()
    y = torch.cosine_similarity(getattr(out, "pooler_output", out), clip.run(images(1)))
    (grad,) = torch.autograd.grad(y.sum(), kept)
    tokens = (grad * kept[0].detach())[0].sum(-1)
    assert torch.allclose(found.values, torch.stack([tokens[a:b].sum() for a, b in SPANS]).detach(), atol=1e-6)
    assert found.words == tuple(TEXT.split()) and abs(found.similarity - float(y.detach())) < 1e-6
    assert found["dog"] == found[1]


def test_words_by_attention_are_gae_of_the_models_own_attentions(clip: Model) -> None:
    found = vitreous.words(clip, images(1), TEXT, "gae")
    net: Any = clip.module
    before = net.config._attn_implementation
    net.set_attn_implementation("eager")
    try:
        tokenizer = vlms.tr.AutoTokenizer.from_pretrained(net.config._name_or_path)
        embeds = net.text_model.embeddings.token_embedding
        hook = embeds.register_forward_hook(lambda m, a, out: out.detach().requires_grad_())
        out = net.text_model(**tokenizer(TEXT, return_tensors="pt"), output_attentions=True)
        hook.remove()
        y = torch.cosine_similarity(net.text_projection(out.pooler_output), clip.run(images(1)).detach()).sum()
        grads = torch.autograd.grad(y, out.attentions)
    finally:
        net.set_attn_implementation(before)
    count = out.attentions[0].shape[-1]
    r = torch.eye(count)
    for a, grad in zip(out.attentions, grads):
        r = r + (a * grad)[0].clamp_min(0).mean(0) @ r
    row = (r - torch.eye(count))[count - 1].detach()  # the token that ends the text is read
    assert torch.allclose(found.values, torch.stack([row[a:b].sum() for a, b in SPANS]), atol=1e-6)


def test_words_by_occlusion_are_texts_without_them(clip: Model, tmp_path: Path) -> None:
    found = vitreous.words(clip, images(1), TEXT, "occlusion")
    whole, *less = [
        float(Trace(clip, images(1)).score(vitreous.Text(text, embed(clip, text)))[0])
        for text in (TEXT, "dog on red", "a on red", "a dog red", "a dog on")
    ]
    assert torch.allclose(found.values, torch.tensor([whole - one for one in less]), atol=1e-5)
    assert found.save(tmp_path / "w.png").stat().st_size > 1000
    with np.load(found.save(tmp_path / "w.npz")) as file:
        assert file["relevance"].tolist() == found.values.tolist()


def embed(clip: Model, text: str) -> Tensor:
    from vitreous.trace.text import embed_text

    return embed_text(clip, text)


def test_what_words_cannot_do(clip: Model) -> None:
    with pytest.raises(InputError, match="no words"):
        vitreous.words(clip, images(1), "  ")
    with pytest.raises(InputError, match="longer than"):
        vitreous.words(clip, images(1), "a dog on red sofas in the sun")
    with pytest.raises(InputError, match="one image"):
        vitreous.words(clip, images(2), TEXT)
    with pytest.raises(OptionError, match="gradient, gae, occlusion"):
        vitreous.words(clip, images(1), TEXT, "rollout")  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="no text tower"):
        vitreous.words(Model(zoo.network("timm ViT")), zoo.images("timm ViT")[:1], TEXT)
    with pytest.raises(OptionError, match="cannot save"):
        vitreous.words(clip, images(1), TEXT).save("words.txt")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gradient", "gae", "occlusion"])
def test_words_of_open_clip(method: Any) -> None:
    open_clip = zoo.library("open_clip", "clip")
    tower = {"layers": 2, "width": 64, "head_width": 16, "patch_size": 16, "image_size": 32}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    torch.manual_seed(0)
    model = Model(open_clip.CLIP(embed_dim=64, vision_cfg=tower, text_cfg=text).eval(), name="tiny")
    found = vitreous.words(model, images(1), "a dog on an unbelievable sofa", method)
    assert len(found) == 6 and bool((found.values != 0).all())


def test_the_command_of_words(clip: Model, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.new("RGB", (40, 40), "red").save(photo)
    base = ["words", str(photo), TEXT, "--model", str(clip.spec), "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, base, catch_exceptions=False)
    told = json.loads(done.stdout)
    assert [one["word"] for one in told["words"]] == TEXT.split()
    assert Path(told["figure"]).is_file() and Path(told["numbers"]).is_file()
