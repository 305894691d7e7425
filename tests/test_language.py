"""Vision-language models word by word, and the words of a text: against the models' own calls and brute force."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

import vitreous
from vitreous import Model, Trace
from vitreous.capture.capture import Capture, ModuleNames
from vitreous.cli.main import app
from vitreous.errors import InputError, ModelError, OptionError, TargetError, Unsupported
from vitreous.models.libraries import vlm
from vitreous.models.speaker import Speaker, WordsModel, spell
from vitreous.trace.rules.gradient import CP_LRP
from vitreous.trace.rules.libra import LIBRA
from vitreous.trace.rules.mode import Rules
from vitreous.trace.word import Word, parse_words

pytestmark = pytest.mark.filterwarnings("ignore:.*maps of attention follow its main way only")  # Qwen3's DeepStack

QUESTION = "what is this ?"
TOKENS = 4  # of an answer
QUICK = ["llava"]
EVERY = [pytest.param(kind, marks=pytest.mark.slow) for kind in vlms.KINDS]
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in vlms.KINDS]


def images(count: int = 2, side: int = vlms.SIDE) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(3))


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
    net, side = model.speaker.net, pixels.shape[-1]
    prompt = model.speaker.prompt(QUESTION, (side, side))
    ids = torch.tensor([prompt + model.answer]).expand(len(pixels), -1)
    more: dict[str, Any] = {"pixel_values": pixels}
    if "idefics" in model.name or "smol" in model.name:
        more = {"pixel_values": pixels[:, None]}
    if "qwen" in model.name:
        more = {"pixel_values": rows(pixels), "mm_token_type_ids": (ids == vlms.IMAGE).int()}
        more["image_grid_thw"] = torch.tensor([[1, side // 4, side // 4]] * len(pixels))
    if model.name == "paligemma":
        more["token_type_ids"] = torch.tensor([[0] * len(prompt) + [1] * len(model.answer)]).expand_as(ids)
    logits: Tensor = net(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits
    return logits[:, len(prompt) - 1 : -1]


def rows(pixels: Tensor) -> Tensor:
    """Patches of 4×4 pixels, twice for two frames, in packs of 2×2, by loops."""
    found = []
    for image in pixels:
        for y in range(0, pixels.shape[-1], 8):
            for x in range(0, pixels.shape[-1], 8):
                for dy, dx in ((0, 0), (0, 4), (4, 0), (4, 4)):
                    patch = image[:, y + dy : y + dy + 4, x + dx : x + dx + 4]
                    found.append(torch.stack([patch, patch], 1).flatten())
    return torch.stack(found)


# ------------------------------------------------------------------------------------------ questions and answers


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_that_explains_gives_the_tokens_that_were_generated(kind: str) -> None:
    model = answered(kind)
    output = model.run(images(1))
    assert output.shape == (1, TOKENS, len(vlms.NAMES))
    output[..., vlms.IMAGE] = -torch.inf  # never generated
    assert output[0].argmax(-1).tolist() == model.answer
    assert torch.allclose(model.run(images()), direct(model, images()), atol=1e-5)


@pytest.mark.parametrize("kind", EVERY)
def test_gradients_are_those_of_the_model_called_directly(kind: str) -> None:
    model, leaf = answered(kind), images().requires_grad_()
    y = direct(model, leaf)[:, 2, model.answer[2]].sum()
    (grad,) = torch.autograd.grad(y, [leaf])
    found = vitreous.explain(model, images(), "input_x_gradient", "word:2").map
    assert torch.allclose(found, (leaf.detach() * grad).sum(1), atol=1e-5)
    alone = [vitreous.explain(model, one, "input_x_gradient", "word:2").map for one in images()]
    assert torch.allclose(found, torch.cat(alone), atol=1e-6)


@pytest.mark.parametrize("kind", EVERY)
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


def test_the_tokens_of_the_image_are_found_in_both_parts() -> None:
    layout = answered("llava").layout_at((vlms.SIDE, vlms.SIDE))
    prompt = len(speaker("llava").prompt(QUESTION, (vlms.SIDE, vlms.SIDE)))
    assert layout.orders[17] == ((4, 4), tuple(range(1, 17)))
    assert layout.orders[prompt + TOKENS] == ((4, 4), tuple(range(16)))
    assert layout.readers == tuple((prompt - 1 + i - 16,) for i in range(TOKENS))  # special tokens come first


@pytest.mark.slow
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
    assert [word.text for word in model.words] == ["a", "dog", "on", "the", "red", "sofa", "."]
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
    wrongs = {"top-1": "token:WORD", "token:zebra": "no word", "word:9": "out of range", True: "not a"}
    for wrong, said in wrongs.items():
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


# --------------------------------------------------------------------------------- attention through both parts


class Softmaxes(TorchFunctionMode):
    """Keeps every softmax of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.softmax:
            self.kept.append(out)
        return out


def tower_order(kind: str, side: int) -> list[tuple[int, int]]:
    """The row and column of each token of a tower of so many patches a side, written out; (−1, −1): CLS."""
    if "qwen" not in kind:
        plain = [(row, column) for row in range(side) for column in range(side)]
        return [(-1, -1), *plain] if kind == "llava" else plain
    window = 4 if kind == "qwen2_5" else side  # patches along a window
    return [
        (wy + cy + y, wx + cx + x)
        for wy in range(0, side, window)
        for wx in range(0, side, window)
        for cy in range(0, min(window, side - wy), 2)
        for cx in range(0, min(window, side - wx), 2)
        for y in range(2)
        for x in range(2)
    ]


class Reference:
    """A model called directly, with attention written out, and its maps by matrices over all tokens."""

    def __init__(self, kind: str, word: int, side: int = vlms.SIDE) -> None:
        self.model, self.side = answered(kind, "eager"), side * vlms.GRIDS[kind][0] // vlms.SIDE
        self.order, self.merge = tower_order(kind, self.side), 1 if kind in ("llava", "paligemma") else 2
        self.model.speaker.prompt(QUESTION, (side, side))  # the image's tokens are counted once, by another run
        with Softmaxes() as seen:
            output = direct(self.model, images(1, side).requires_grad_())
        y = output[0, word, self.model.answer[word]]
        every = torch.autograd.grad(y, seen.kept, allow_unused=True)
        read = [a for a, grad in zip(seen.kept, every) if grad is not None]
        grads = [grad for grad in every if grad is not None]
        self.tokens = read[-1].shape[-1]  # of the language model
        parts = list(zip(read, grads))
        self.words = parts[-2:]
        self.tower = list(self.joined(parts[:-2]))
        self.start = self.tokens - len(self.model.answer) + word - 1  # the token before the word

    def joined(self, parts: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows of a layer as one matrix."""
        left, count = list(parts), len(self.order)
        while left:
            some = [left.pop(0)]
            while sum(a.shape[-1] for a, _ in some) < count:
                some.append(left.pop(0))
            whole = []
            for each in zip(*some):
                dense = torch.zeros(1, each[0].shape[1], count, count)
                at = 0
                for part in each:
                    n = part.shape[-1]
                    dense[:, :, at : at + n, at : at + n] = part
                    at += n
                whole.append(dense)
            yield whole[0], whole[1]

    def down(self, row: Tensor) -> Tensor:
        """From the tokens of the language model, of which the image's are the first, to those of the tower."""
        found = torch.zeros(len(self.order))
        for i, (y, x) in enumerate(self.order):
            if y >= 0:
                found[i] = row[y // self.merge * (self.side // self.merge) + x // self.merge] / self.merge**2
        return found

    def map(self, row: Tensor) -> Tensor:
        found = torch.zeros(self.side, self.side)
        for value, (y, x) in zip(row, self.order):
            if y >= 0:
                found[y, x] = value
        return found.detach()

    def carried(self, step: Callable[[Tensor, Tensor, Tensor], Tensor], row: Tensor) -> Tensor:
        for a, grad in reversed(self.words):
            row = step(row, a[0], grad[0])
        row = self.down(row)
        for a, grad in reversed(self.tower):
            row = step(row, a[0], grad[0])
        return self.map(row)

    def rollout(self) -> Tensor:
        start = torch.zeros(self.tokens).index_fill(0, torch.tensor(self.start), 1)
        return self.carried(lambda row, a, _: 0.5 * row + 0.5 * row @ a.mean(0), start)

    def grad_rollout(self) -> Tensor:
        def step(row: Tensor, a: Tensor, grad: Tensor) -> Tensor:
            mixed = 0.5 * torch.eye(len(row)) + 0.5 * (a * grad).mean(0).clamp_min(0)
            return row @ (mixed / mixed.sum(-1, keepdim=True))

        start = torch.zeros(self.tokens).index_fill(0, torch.tensor(self.start), 1)
        return self.carried(step, start)

    def gae(self) -> Tensor:
        """ρ itself is at a token of the text, which the tower does not have."""
        start = torch.zeros(self.tokens).index_fill(0, torch.tensor(self.start), 1)
        return self.carried(lambda row, a, grad: row + row @ (a * grad).clamp_min(0).mean(0), start)

    def norm_attention(self) -> Tensor:
        """S_ij = ‖Σ_h A_ij W_O v_j‖, rows normalised, (S + I)/2."""
        trace, net = Trace(self.model, images(1)), self.model.speaker.net
        lengths = []
        for number, (a, _) in enumerate(self.tower + self.words):
            call = trace.attention[number]
            own = net.get_submodule(call.name)
            out = next(getattr(own, name) for name in ("o_proj", "out_proj", "proj") if hasattr(own, name))
            v = call.v.transpose(0, 1).flatten(1, 2)  # [H N d]
            parts = torch.einsum("hnm,hmd,Dhd->nmD", a[0], v, out.weight.unflatten(1, (len(v), -1)))
            s = parts.norm(dim=-1)
            lengths.append(0.5 * s / s.sum(-1, keepdim=True) + 0.5 * torch.eye(len(s)))
        row = torch.zeros(self.tokens).index_fill(0, torch.tensor(self.start), 1)
        for matrix in lengths[: len(self.tower) - 1 : -1]:
            row = row @ matrix
        row = self.down(row)
        for matrix in lengths[len(self.tower) - 1 :: -1]:
            row = row @ matrix
        return self.map(row)

    def attention(self) -> Tensor:
        return self.map(self.down(self.words[-1][0][0].mean(0)[self.start]))


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_the_models_own(kind: str, attention: str) -> None:
    """Of both parts; in windows too, which are put together."""
    model, plain = answered(kind, attention), Reference(kind, 1)
    trace = Trace(model, images(1))
    trace.verify()
    layout = trace.layout
    assert len(trace.attention) == len(plain.tower) + len(plain.words)
    for number, (a, _) in enumerate(plain.tower + plain.words):
        found = trace.attention[number].weights
        if layout.stage(number).windows > 1:
            n = found.shape[-1]
            found = torch.block_diag(*found.mean(1))
            assert n * layout.stage(number).windows == len(found)
            assert torch.allclose(found, a[0].mean(0), atol=1e-5)
        else:
            assert torch.allclose(found, a, atol=1e-5)


@pytest.mark.parametrize("kind", EVERY)
def test_output_attentions_are_what_is_recorded(kind: str) -> None:
    model = answered(kind, "eager")
    net, prompt = model.speaker.net, model.speaker.prompt(QUESTION, (vlms.SIDE, vlms.SIDE))
    ids = torch.tensor([prompt + model.answer])
    given = {**vlm.text_inputs(net, ids, len(prompt)), **vlm.pixels(net, images(1))}
    with torch.no_grad():
        own = net(**given, output_attentions=True, use_cache=False).attentions
    found = Trace(model, images(1)).attention[-len(own) :]
    for a, layer in zip(own, found):
        assert torch.allclose(layer.weights, a, atol=1e-5)


@pytest.mark.parametrize("method", ["rollout", "gae", "grad_rollout", "attention", "norm_attention"])
@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_those_of_matrices_over_all_tokens(kind: str, method: str) -> None:
    for word in (0, 2):
        expected = getattr(Reference(kind, word), method)()
        found = vitreous.explain(answered(kind), images(1), method, f"word:{word}").map[0]
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()) + 1e-7)


@pytest.mark.parametrize("method", ["rollout", "gae", "grad_rollout", "attention"])
@pytest.mark.parametrize("kind", ["qwen2_5", "qwen3"])
@pytest.mark.slow
def test_windows_at_the_border_are_smaller(kind: str, method: str) -> None:
    """10×10 patches in windows of 4×4: of any resolution, windows that are not full are padded by nothing."""
    expected = getattr(Reference(kind, 1, 40), method)()
    found = vitreous.explain(answered(kind), images(1, 40), method, "word:1").map[0]
    assert found.shape == expected.shape == (10, 10)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()) + 1e-7)
    both = vitreous.explain(answered(kind), images(2, 40), method, "word:1").map
    again = vitreous.explain(answered(kind), images(2, 40)[1:], method, "word:1").map
    assert torch.allclose(both[1:], again, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["rollout", "gae", "grad_rollout", "attention", "attn_lrp"])
@pytest.mark.parametrize("kind", EVERY)
def test_two_images_are_two_images(kind: str, method: str) -> None:
    both = vitreous.explain(answered(kind), images(), method, "word:1").map
    alone = torch.cat([vitreous.explain(answered(kind), one, method, "word:1").map for one in images()])
    assert torch.allclose(both, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", EVERY)
def test_words_of_one_answer_share_a_run(kind: str) -> None:
    """The words have maps of their own, and none of them costs a forward pass of its own."""
    model, calls = answered(kind), 0
    model.layout_at((vlms.SIDE, vlms.SIDE))
    trace = vitreous.Trace(model, images(1))
    first = trace.explain("gae", "word:0").map

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    hook = model.speaker.net.register_forward_hook(count)
    try:
        others = [trace.explain("gae", f"word:{i}").map for i in range(1, TOKENS)]
    finally:
        hook.remove()
    assert calls == 0
    assert all(not torch.allclose(first, other) for other in others)


@pytest.mark.parametrize("kind", EVERY)
def test_the_cell_of_a_changed_patch_moves(kind: str) -> None:
    """In the tower and in the language model, where attention in the tower is weak: keys change at that place, most."""
    net = vlms.built(kind)
    for name, weight in net.named_parameters():
        if ("vis" in name) and name.endswith(("out_proj.weight", "attn.proj.weight")):
            weight.mul_(1e-3)
    model = Speaker(net, vlms.tokenizer(), kind).model(QUESTION, answered(kind).answer)
    trace, layout = Trace(model, images(1)), model.layout_at((vlms.SIDE, vlms.SIDE))
    row, column = (1, 2) if layout.grid == (4, 4) else (2, 5)
    other = images(1)
    other[(..., *layout.rectangle(row, column))] += 1.0
    changed = Trace(model, other)
    for number in (0, layout.layers - len(model.speaker.net.model.get_decoder().layers)):
        stage = layout.stage(number)
        before, after = (one.attention[number].v for one in (trace, changed))
        size = (after - before).square().sum((1, 3))  # [W n]
        moved = trace.map(stage.scatter_keys(size), number)[0]
        cell = divmod(int(moved.argmax()), layout.grid[1])
        merge = layout.grid[0] // stage.grid[0]
        assert (cell[0] // merge, cell[1] // merge) == (row // merge, column // merge)
        if number == 0:
            assert cell == (row, column) and int((moved > 0).sum()) == 1


@pytest.mark.parametrize("kind", ["llava", "paligemma", "qwen2_5", "qwen3"])
@pytest.mark.slow
def test_relevance_is_conserved_in_the_language_model(kind: str) -> None:
    """RMS norms, gated units, rotary positions and grouped queries: Σ x·∂y/∂x = y, where attention is a constant."""
    net = vlms.built(kind, torch.float64)
    for name, weight in net.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    x = torch.randn(1, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for table in (LIBRA, CP_LRP):
        with Rules(table, ModuleNames(net)) as rules, Capture(ModuleNames(net), 1):
            y = net.lm_head(net.model.language_model(inputs_embeds=x, use_cache=False).last_hidden_state)[0, -1, 7]
        (grad,) = torch.autograd.grad(y, [x])
        assert not rules.unruled
        assert abs(float((grad * x).sum().detach() / y.detach()) - 1) < 1e-5


@pytest.mark.parametrize("kind", list(vlms.KINDS))
@pytest.mark.slow
def test_relevance_is_conserved_through_both_parts(kind: str) -> None:
    """Without biases, positions and words that add something of their own, the pixels account for the whole logit."""
    net = vlms.built(kind, torch.float64)
    net.lm_head.weight = torch.nn.Parameter(net.lm_head.weight.detach().clone(), requires_grad=False)
    for name, weight in net.named_parameters():
        own = name.endswith("bias") or "position_embedding" in name or "pos_embed" in name or "class_embed" in name
        if own or "embed_tokens" in name:
            torch.nn.init.zeros_(weight)
    model = Speaker(net, vlms.tokenizer(), kind).model(QUESTION, answered(kind).answer)
    for method, options in (("input_x_gradient", {"rules": "libra"}), ("cp_lrp", {"wrt": "image"})):
        found = vitreous.explain(model, images().double(), method, "word:1", **options).map
        logit = model.run(images().double())[:, 1, model.answer[1]]
        assert torch.allclose(found.double().flatten(1).sum(1), logit, rtol=1e-3)


@pytest.mark.parametrize("name", list(vitreous.METHODS))
@pytest.mark.parametrize("kind", ["llava", "idefics3", "qwen2_5", "qwen3"])
@pytest.mark.slow
def test_every_method_works_or_says_why_not(kind: str, name: str) -> None:
    """An image has the same map alone and in a batch, or the method names others that work."""
    declared = vitreous.METHODS[name]
    target = "word:1" if declared.targeted or declared.attention else None
    try:
        both = vitreous.explain(answered(kind), images(), name, target, **dict(declared.cheap)).map
    except Unsupported as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert "Try" in said or "try" in said or "use" in said
        return
    assert both.isfinite().all() and both.shape[0] == 2
    alone = vitreous.explain(answered(kind), images()[1:], name, target, **dict(declared.cheap)).map
    assert torch.allclose(both[1:], alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_what_words_models_refuse(kind: str) -> None:
    with pytest.raises(Unsupported, match=r"(changes its tokens|windows).* Try attention"):
        vitreous.explain(answered(kind), images(1), "attcat", "word:0")


# ------------------------------------------------------------------------------------- processors and the command


@pytest.mark.slow
def test_the_command_asks(tmp_path: Path) -> None:
    folder, photo = vlms.saved("llava"), tmp_path / "photo.png"
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(photo)
    base = ["ask", str(photo), QUESTION, "--model", f"hf/{folder}", "--out", str(tmp_path / "out"), "--max-tokens", "3"]
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
    assert [vlms.NAMES[i] for i in prompt] == ["<image>"] * 16 + ["what", "is", "this", "?", "it", "there"]
    assert found[0].provenance["model"] == folder.name


def qwen_processor() -> Any:
    pixels = vlms.tr.Qwen2VLImageProcessor(patch_size=4, merge_size=2, min_pixels=64, max_pixels=8192)
    marks = {"image_token": "<image>", "vision_start_token": "word0", "vision_end_token": "word1"}
    tokens = vlms.tokenizer()
    for name, value in marks.items():
        setattr(tokens, name, value)
    return vlms.tr.Qwen2_5_VLProcessor(pixels, tokens, vlms.tr.Qwen2VLVideoProcessor())


def idefics_processor() -> Any:
    tokens = vlms.tokenizer()
    size = {"longest_edge": vlms.SIDE}
    pixels = vlms.tr.Idefics3ImageProcessor(size=size, max_image_size=size)
    return vlms.tr.Idefics3Processor(pixels, tokens, image_seq_len=4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "make"), [("qwen2_5", qwen_processor), ("idefics3", idefics_processor)])
def test_processors_of_transformers_write_the_prompt(kind: str, make: Callable[[], Any]) -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    found = vitreous.ask((vlms.built(kind), make()), photo, QUESTION, "a dog", "gae")
    own, image = found.model.speaker, found.model.prepare([photo])
    prompt = own.prompt(QUESTION, (image.shape[-2], image.shape[-1]))
    assert prompt.count(vlms.IMAGE) == vlm.image_tokens(own.net, image)
    assert found.words == ("a", "dog") and found[0].map.shape[1:] == found.model.layout_at(image.shape[-2:]).grid


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
    tokenizer = transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
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
