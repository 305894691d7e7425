"""Ask a vision-language model about an image, and explain each word of its answer by a map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vitreous.api import explain_targets
from vitreous.attribution import Attribution, mark_of
from vitreous.errors import InputError, OptionError, TargetError, nearest
from vitreous.models.load import load
from vitreous.models.model import Model
from vitreous.models.speaker import Speaker, WordsModel
from vitreous.plot.figure import png_bytes
from vitreous.plot.save import save_either
from vitreous.plot.sheet import Sheet
from vitreous.plot.words import answer_figure
from vitreous.registry import ConfiguredMethod
from vitreous.trace.word import parse_words

ALL = "all"
MOST = 32  # tokens of a generated answer


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to a question about an image, with a map for each of its words."""

    question: str
    text: str
    words: tuple[str, ...]  # those that are explained
    maps: tuple[Attribution, ...]  # one for each of them
    generated: bool
    model: WordsModel = field(repr=False)  # the network with this question and answer, for `vitreous.explain`

    def __len__(self) -> int:
        return len(self.maps)

    def __iter__(self) -> Iterator[Attribution]:
        return iter(self.maps)

    def __getitem__(self, word: int | str) -> Attribution:
        """The map of a word, by its number or by itself."""
        if isinstance(word, int):
            return self.maps[word]
        if word not in self.words:
            raise TargetError(f"the explained words have no {word!r}{nearest(word, self.words)}")
        return self.maps[self.words.index(word)]

    @property
    def named(self) -> dict[str, Attribution]:
        """The maps by number and word: "2 dog"."""
        return {f"{i} {word}": one for i, (word, one) in enumerate(zip(self.words, self.maps))}

    @property
    def mark(self) -> dict[str, Any]:
        """What a file of these maps says of them."""
        return {**mark_of(self.named), "question": self.question, "answer": self.text, "generated": self.generated}

    def figure(self, *, cells: bool = False) -> Sheet:
        """The question, the answer, the image, and the map of each word."""
        titles = [(one.labels[0] if one.labels else None) or word for word, one in zip(self.words, self.maps)]
        return answer_figure(self.question, self.text, self.maps, titles, self.maps[0].seen(), cells)

    def save(self, path: str | Path) -> Path:
        """Save the figure (.png, .svg, .pdf, …), or the raw maps with their provenance (.npz)."""
        arrays = {name: one.map[0].cpu().numpy() for name, one in self.named.items()}
        return save_either(path, self.figure, arrays, self.mark)

    def _repr_png_(self) -> bytes:
        return png_bytes(self.figure())


def ask(
    model: Any,
    image: Any,
    question: str,
    answer: str | None = None,
    method: str | ConfiguredMethod = "gae",
    *,
    words: int | str | Sequence[Any] = ALL,
    most: int = MOST,
    **options: Any,
) -> Answer:
    """Ask a vision-language model about an image, and explain each word of the answer by a map.

    `model`: a name ("hf/ID"), a `Model` loaded by that, or a pair (network, processor) of transformers. `answer`: the
    text to explain; without it, the model's own, generated greedily, `most` tokens at most. One run of the network over
    question and answer explains all words. `method` and `options` as in `vitreous.explain`. `words`: "all", the first
    N, or a list of targets: "token:dog" (a word of the answer), 3 (by number), "token:cat@3" (cat in the place of word
    3), "answer" (all of it).
    """
    if not question.strip():
        raise InputError("the question is empty")
    speaker, origin = speaker_of(model)
    seen = prepared(speaker, image)
    ids = speaker.generate(question, seen, most) if answer is None else speaker.encoded(answer)
    asked = speaker.model(question, ids)
    if origin is not None:
        asked.spec, asked.weights, asked.notes = origin.spec, origin.weights, origin.notes
    targets = [parse_words(one, asked) for one in chosen(asked, words)]
    maps = explain_targets(asked, one_image(image), method, targets, **options)
    text = " ".join(str(speaker.tokenizer.decode(ids)).split())
    return Answer(question, text, tuple(map(word_of, targets)), tuple(maps), answer is None, asked)


def word_of(target: Any) -> str:
    return str(getattr(target, "text", target))


def chosen(asked: WordsModel, words: int | str | Sequence[Any]) -> list[Any]:
    """The targets to explain."""
    numbers = list(range(len(asked.words)))
    if words == ALL:
        return numbers
    if isinstance(words, int):
        if words < 1:
            raise OptionError(f"words={words}: give at least one, or all")
        return numbers[:words]
    listed = [words] if isinstance(words, str) else list(words)
    if not listed:
        raise OptionError("words is empty: give all, a number of words, or a list of targets")
    return listed


def speaker_of(model: Any) -> tuple[Speaker, Model | None]:
    """The network with its processor, and the model that it was loaded as."""
    if isinstance(model, Speaker):
        return model, None
    if isinstance(model, WordsModel):
        return model.speaker, model
    if isinstance(model, tuple | list) and len(model) == 2:
        return Speaker(*model), None
    found = model if isinstance(model, Model) else load(model)
    return Speaker(found.module, name=found.name), found


def one_image(image: Any) -> Any:
    """One image, as `vitreous.explain` takes it."""
    if isinstance(image, torch.Tensor):
        return image[None] if image.ndim == 3 else image
    return [image] if not isinstance(image, list | tuple) else image


def prepared(speaker: Speaker, image: Any) -> torch.Tensor:
    """The image as the network takes it, [1 3 H W]."""
    plain = Model(speaker.net, speaker.preprocess, name=speaker.name, classifier=False)
    seen = plain.prepare(one_image(image))
    if len(seen) != 1:
        raise InputError(f"a question is about one image, not {len(seen)}; ask about each")
    return seen
