"""The text side of a model that embeds images and texts in one space: its tokens, its words and its attention.

Nothing is known of the tokenizer or of the tower; everything is seen while it runs. The first table that is asked for
whole numbers that do not simply count gives the tokens, and where a text is lengthened word by word, the tokens that
stay the same tell which belong to each word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import Attention
from vitreous.capture.capture import Capture, Enough
from vitreous.errors import InputError, TargetError, Unsupported, one_line
from vitreous.models.model import Model
from vitreous.models.output import read_output

FAILS = (OSError, ImportError, RuntimeError, ValueError, IndexError)
PROBES = ("a photo", "it is not one")  # texts of other tokens
MORE = "and"  # a word behind the last, which shows where that ends


class Lookups(TorchFunctionMode):
    """Notes what each table of embeddings is asked for in a run."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.embedding and out.ndim == 3:
            self.asked.append(args[0].reshape(-1).tolist())
        return out


class Entry(TorchFunctionMode):
    """Notes the tokens of a text and lets gradients begin at their embeddings; `only`: ends the run there.

    `number`: which of the tables that are asked is that of the tokens.
    """

    def __init__(self, number: int, only: bool = False) -> None:
        super().__init__()
        self.left, self.only = number, only
        self.ids: list[int] | None = None
        self.leaf: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.embedding or self.ids is not None or out.ndim != 3:
            return out
        self.left -= 1
        if self.left >= 0:  # positions
            return out
        self.ids, self.leaf = args[0].reshape(-1).tolist(), out.detach().requires_grad_()
        if self.only:
            raise Enough
        return self.leaf


@dataclass(frozen=True, eq=False)
class TextRun:
    """One run of the text tower."""

    leaf: Tensor  # the embeddings of its tokens, [1 T D]
    layers: tuple[Attention, ...]
    embedding: Tensor  # of the text, [D]


class TextTower:
    """The text tower of a model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        embed = model.library.text(model.module, model.known_as)
        if embed is None:
            raise TargetError(f"{model.name} has no text tower; load a CLIP model (openclip/…, hf/…)")
        self.embed = embed
        self.number = self.table()

    def table(self) -> int:
        """Which of the tables that the tower asks is that of the tokens: not that of positions, which are counted."""
        seen = []
        for text in PROBES:
            try:
                with torch.no_grad(), self.model.still(), Lookups() as lookups:
                    self.embed(text)
            except FAILS as error:
                raise self.cannot(text, error) from error
            seen.append(lookups.asked)
        for number, asked in enumerate(zip(*seen)):
            if any(one != [*range(len(one))] for one in asked):
                return number
        raise Unsupported(f"{self.model.name} does not look its tokens up in a table, so words cannot be told apart")

    def cannot(self, text: str, error: Exception) -> TargetError:
        return TargetError(f"{self.model.name} cannot encode {text!r} ({one_line(error, 160)})")

    def run(self, text: str) -> TextRun:
        """The embedding of a text, with gradients from the embeddings of its tokens on."""
        entry = Entry(self.number)
        try:
            with torch.inference_mode(False), torch.enable_grad(), self.model.still() as still:
                with Capture(still.names, 1) as seen, entry:
                    out = read_output(self.embed(text), self.model.name)[0]
        except FAILS as error:
            raise self.cannot(text, error) from error
        assert entry.leaf is not None
        return TextRun(entry.leaf, tuple(seen.calls), out)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text; the run ends where they are embedded."""
        entry = Entry(self.number, only=True)
        try:
            with torch.no_grad(), self.model.still(), entry:
                self.embed(text)
        except Enough:
            pass
        except FAILS as error:
            raise self.cannot(text, error) from error
        assert entry.ids is not None
        return entry.ids

    def tokens_of(self, words: Sequence[str]) -> list[range]:
        """The tokens of each word."""
        whole = self.ids(" ".join(words))
        texts = [" ".join(words[:i]) for i in range(1, len(words))] + [" ".join([*words, MORE])]
        ends = [common(self.ids(text), whole) for text in texts]
        begin = common(self.ids(""), whole)
        spans = [range(start, end) for start, end in zip([begin, *ends], ends)]
        lost = [word for word, span in zip(words, spans) if not span]
        if not lost and self.ids(texts[-1]) == whole:
            lost = ["the last word, or what ends the text"]
        if lost:
            said = f"the text is longer than {self.model.name} reads, or its tokens join words"
            raise InputError(f"{said}: nothing is read of {' '.join(lost)!r}")
        return spans


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
