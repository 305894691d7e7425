"""A vision-language model: its prompt, its answer, and the model that a question with its answer makes.

question + answer   tokens of the prompt (the image's placeholders among them) and of the answer
WordsModel          images [B 3 H W] -> logits [B P V], one row for each token of the answer, all from one run
words               the words of the answer, each one or several tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._support.memory import capturing, out_of_memory
from vitreous.errors import InputError, ModelError, VitreousError, one_line
from vitreous.images.preprocess import measured
from vitreous.models.facts import Facts, facts_of
from vitreous.models.inputs import Given, Inputs
from vitreous.models.kinds_of_module import unwrap
from vitreous.models.layout import Layout
from vitreous.models.libraries import vlm
from vitreous.models.model import Model
from vitreous.models.output import Form, see
from vitreous.types import Extent, Images

FIRST = ("What is this?", "It is a photo")  # a question and an answer with which a model can be run
PLAIN = "{image}\n{question}"  # a prompt, where neither processor nor tokenizer has a chat template


@dataclass(frozen=True)
class Spelled:
    """One word of a text: its letters, and the tokens that spell it."""

    text: str
    tokens: tuple[int, ...]  # their places in the answer
    ids: tuple[int, ...]


class WordsModel(Model):
    """A vision-language model with a fixed question and answer: images to the logits of each token of the answer."""

    def __init__(self, speaker: Speaker, question: str, answer: list[int]) -> None:
        super().__init__(
            speaker.net,
            speaker.preprocess,
            name=speaker.name,
            forward=partial(speaker.logits, question, answer),
            output="logits",
        )
        self.form = Form.WORDS
        self.speaker, self.question, self.answer = speaker, question, answer
        self.words = spell(speaker.tokenizer, answer)
        self.outputs = speaker.net.config.get_text_config().vocab_size
        self._facts = Facts()  # of this question and answer: other ones are read from other tokens
        self._facts.lock = facts_of(self.module).lock

    @property
    def facts(self) -> Facts:
        return self._facts

    def layout_at(self, size: Extent, inputs: Inputs | None = None) -> Layout:
        """The geometry at this size; the image's tokens are counted before, in a run that nothing watches."""
        self.speaker.prompt(self.question, (size[-2], size[-1]))
        return super().layout_at(size, inputs)

    def run(self, images: Images, given: Given | None = None) -> Tensor:
        """One forward pass; the logits [B P V] of the tokens of the answer."""
        try:
            output: Tensor = self._call(images, given or {})
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, VitreousError) or out_of_memory(error):
                raise
            raise ModelError(f"{self.name} cannot be run ({one_line(error)})") from error
        self.outputs = output.shape[-1]
        if self._ending is None and not capturing(images):
            self._ending = see(output.detach().flatten(0, -2))
        return output

    def label(self, index: int) -> str:
        """A token of the vocabulary."""
        return str(self.speaker.tokenizer.decode([index])).strip() or f"token {index}"


class Speaker:
    """A vision-language model of transformers with its processor, or with its tokenizer alone."""

    def __init__(self, net: nn.Module, processor: Any = None, name: str | None = None) -> None:
        self.net: Any = unwrap(net)
        if not vlm.speaks(self.net):
            said = f"{type(self.net).__name__} is no vision-language model of transformers that generates text"
            raise ModelError(f"{said}, such as LLaVA, Qwen-VL, SmolVLM or PaliGemma")
        path = vlm.path_of(self.net)
        self.name = name or path or type(self.net).__name__
        self.processor = vlm.find_processor(path) if processor is None else processor
        self.tokenizer = getattr(self.processor, "tokenizer", None) or self.processor
        transform = vlm.own_transform(self.net, self.processor)
        self.preprocess = None if transform is None else measured(transform)
        self._counts: dict[tuple[int, ...], int] = {}

    @property
    def like(self) -> Tensor:
        found: Tensor = next(t for t in self.net.parameters() if t.is_floating_point())
        return found

    def model(self, question: str, answer: str | list[int]) -> WordsModel:
        """The model that this question and answer make."""
        ids = self.encoded(answer) if isinstance(answer, str) else list(answer)
        if not ids:
            raise InputError("the answer is empty: there is no word to explain")
        if vlm.placeholder(self.net) in ids:
            raise InputError("the answer contains the token that stands for the image")
        return WordsModel(self, question, ids)

    def encoded(self, answer: str) -> list[int]:
        """The tokens of a given answer."""
        return list(self.tokenizer(answer.strip(), add_special_tokens=False)["input_ids"])

    def token_of(self, word: str, begins: bool) -> int | None:
        """The first token of a word that begins an answer, or stands behind a space."""
        ids = self.tokenizer(word if begins else f" {word}", add_special_tokens=False)["input_ids"]
        return next((int(one) for one in ids if str(self.tokenizer.decode([one])).strip()), None)

    def prompt(self, question: str, size: tuple[int, int]) -> list[int]:
        """The tokens of a question about an image of this size, one placeholder for each of the image's tokens."""
        if size not in self._counts:
            blank = torch.zeros(1, 3, *size, device=self.like.device, dtype=self.like.dtype)
            self._counts[size] = vlm.image_tokens(self.net, blank)
        return vlm.expanded(
            vlm.written(self.processor, self.tokenizer, self.template(question), size),
            vlm.placeholder(self.net),
            self._counts[size],
        )

    def template(self, question: str) -> str:
        """The prompt as text: by the chat template, or the image and then the question."""
        for owner in dict.fromkeys((self.processor, self.tokenizer)):
            if getattr(owner, "chat_template", None):
                content = [{"type": "image"}, {"type": "text", "text": question}]
                asked = [{"role": "user", "content": content}]
                return str(owner.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))
        return PLAIN.format(image=self.tokenizer.convert_ids_to_tokens(vlm.placeholder(self.net)), question=question)

    def generate(self, question: str, images: Images, most: int) -> list[int]:
        """The answer to a question about one image, greedily."""
        found = vlm.generated(self.net, images, self.prompt(question, size_of(images)), most)
        if not found:
            raise ModelError(f"{self.name} answers nothing to {question!r}; give an answer to explain")
        return found

    def logits(self, question: str, answer: list[int], images: Images) -> Tensor:
        prompt = self.prompt(question, size_of(images))
        return vlm.logits(self.net, images, prompt + answer, len(prompt))


def heard(model: Model) -> Model:
    """The model; if it answers questions, one with a question and an answer, so that it can be run."""
    if isinstance(model, WordsModel) or not vlm.speaks(model.module):
        return model
    asked = Speaker(model.module, name=model.name).model(*FIRST)
    asked.spec, asked.weights, asked.notes = model.spec, model.weights, model.notes
    return asked


def size_of(images: Tensor) -> tuple[int, int]:
    return images.shape[-2], images.shape[-1]


def spell(tokenizer: Any, ids: list[int]) -> list[Spelled]:
    """The words of a text, with the tokens that spell each: a token belongs to the word that its first letter is in."""
    texts = [str(tokenizer.decode(ids[:i])) for i in range(len(ids) + 1)]
    whole, found = texts[-1], dict[int, list[int]]()
    for i, before in enumerate(texts[:-1]):
        start = min(len(before), len(whole))
        gap = len(whole[start:]) - len(whole[start:].lstrip())
        letter = start + gap if start + gap < len(whole) else start
        begin = max(whole.rfind(space, 0, letter) for space in " \n\t") + 1
        found.setdefault(begin, []).append(i)
    words = []
    for begin, tokens in found.items():
        text = (whole[begin:].split() or [""])[0]
        words.append(Spelled(text, tuple(tokens), tuple(ids[i] for i in tokens)))
    return words
