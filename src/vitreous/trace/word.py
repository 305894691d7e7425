"""Targets of a vision-language model: a word of its answer, or another word in the place of one.

"token:dog"     the word dog of the answer, where it occurs first        "word:3"   word 3 of the answer, from 0
"token:cat@3"   cat in the place of word 3, whatever was answered        "answer"   all of it
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitreous.errors import TargetError, nearest
from vitreous.models.model import Model
from vitreous.models.speaker import Spelled, WordsModel
from vitreous.trace.target import Contrast, Each, Function, Target, checked
from vitreous.types import Output, Scores

ANSWER = "answer"


@dataclass(frozen=True)
class Word(Target):
    """The mean logit of the tokens `ids` at their places in an answer."""

    text: str
    places: tuple[int, ...]
    ids: tuple[int, ...]
    written: str  # as `parse_word` reads it
    names_classes = True

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        found: Scores = output[:, list(self.places), list(self.ids)].mean(1)
        return found

    def check(self, model: Model, outputs: int) -> None:
        if not isinstance(model, WordsModel):
            raise TargetError(f"{self}: {model.name} answers no question; see vitreous.ask")
        checked(max(self.places), len(model.answer), "token of the answer")
        checked(max(self.ids), outputs, "token")

    def queries(self, images: int) -> list[tuple[int, ...]]:
        """The tokens of the answer that it reads, for each image."""
        return [self.places] * images

    def __str__(self) -> str:
        return self.written

    def title(self, model: Model, output: Output, index: int) -> str:
        shares = model.meaning.probabilities(output[index].float())
        share = shares[list(self.places), list(self.ids)].prod()
        return f"{self.text} {model.meaning.written(float(share))}"

    @property
    def identity(self) -> Hashable:
        return self.places, self.ids


def word_target(word: Spelled, number: int) -> Word:
    return Word(word.text, word.tokens, word.ids, f"word:{number}")


def whole_answer(model: WordsModel) -> Word:
    places = tuple(range(len(model.answer)))
    return Word(" ".join(word.text for word in model.words), places, tuple(model.answer), ANSWER)


def parse_words(given: Any, model: Model) -> Target:
    """Parse any target of a model that answers; None: the whole answer."""
    assert isinstance(model, WordsModel)
    if isinstance(given, Word | Function | Contrast | Each):
        given.check(model, model.outputs or 0)
        return given
    if isinstance(given, list | tuple) and given:
        return Each(tuple(parse_words(one, model) for one in given))
    if callable(given) and not isinstance(given, Target | type):
        return Function(given)
    parts = re.split(r"\s*-\s*(?=(?:token|word):)", given.strip()) if isinstance(given, str) else []
    if len(parts) == 2 and parts[0]:
        return Contrast(parse_word(parts[0], model), parse_word(parts[1], model))
    return parse_word(given, model)


def parse_word(given: Any, model: WordsModel) -> Word:
    """Parse one word: a number, "word:3", "token:dog", "token:cat@3" or "answer"."""
    if given is None or given == ANSWER:
        return whole_answer(model)
    if isinstance(given, int) and not isinstance(given, bool):
        return numbered(given, model)
    kind, _, rest = str(given).strip().partition(":")
    if kind.lower() == "word" and re.fullmatch(r"-?\d+", rest.strip()):
        return numbered(int(rest), model)
    if kind.lower() == "token" and rest.strip():
        return named(rest.strip(), model)
    said = f"{given!r} is not a target of {model.name}, which answers a question"
    raise TargetError(f"{said}; give token:WORD, word:NUMBER, token:WORD@NUMBER or answer")


def numbered(number: int, model: WordsModel) -> Word:
    count = len(model.words)
    if not -count <= number < count:
        raise TargetError(f"word {number} is out of range: the answer has words 0 to {count - 1}")
    return word_target(model.words[number % count], number % count)


def named(text: str, model: WordsModel) -> Word:
    """A word of the answer, as written or without its punctuation; or any word in the place of one."""
    word, at, number = text.rpartition("@")
    if at and word and number.isdigit():
        place = numbered(int(number), model)
        token = model.speaker.token_of(word, place.places[0] == 0)
        if token is None:
            raise TargetError(f"token:{text}: the tokenizer of {model.name} has no token for {word!r}")
        return Word(word, place.places[:1], (token,), f"token:{text}")
    for plain in (same, bare):
        for i, one in enumerate(model.words):
            if plain(one.text) == plain(text):
                return word_target(one, i)
    known = [one.text for one in model.words]
    said = nearest(text, known) or f"; it is {' '.join(known)!r}"
    raise TargetError(f"token:{text}: the answer has no word {text!r}{said}; another word in a place: token:{text}@0")


def same(text: str) -> str:
    return text


def bare(text: str) -> str:
    return re.sub(r"^\W+|\W+$", "", text).lower() or text
