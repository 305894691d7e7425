"""What the numbers of an output mean, and the probabilities that follow from it; nothing else takes a softmax of one.

logits    scores of classes that exclude each other        p = softmax(output)
sigmoid   a score for each class by itself                 p = sigmoid(output)
softmax   probabilities: a softmax or a sigmoid ends it    p = output
value     numbers that have no probability: a regression
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitreous.errors import ModelError, one_of
from vitreous.models.dense import as_places, find_places, is_plane
from vitreous.models.detections import read_detections
from vitreous.models.failures import how_to_read
from vitreous.models.libraries import find_output
from vitreous.types import Output

Of = Literal["probability", "logit", "score"]  # by what a class is measured
AUTO = "auto"
TOLERANCE = 1e-3  # how far the sum of probabilities may be from one
FAR = 6  # operations between the output and a product with unit vectors
SAME = {
    "Alias",
    "Clone",
    "Index",
    "IndexSelect",
    "Permute",
    "ReshapeAlias",
    "Select",
    "Slice",
    "Squeeze",
    "T",
    "ToCopy",
}
SAME |= {"Transpose", "UnsafeView", "Unsqueeze", "View"}  # operations that keep the numbers


class Meaning(Enum):
    """What the numbers of an output are."""

    LOGITS = "logits"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    VALUE = "value"

    def probabilities(self, output: Tensor) -> Tensor:
        """The probability of each class, along the last axis; values, which have none, are unchanged."""
        if self is Meaning.LOGITS:
            return output.softmax(-1)
        return output.sigmoid() if self is Meaning.SIGMOID else output

    def scale(self, of: Of, exclusive: bool = True) -> Callable[[Tensor], Tensor] | None:
        """What turns an output into probabilities or logits; None if it is taken as it is.

        Of outputs that are probabilities: their log if the classes are `exclusive` (logits less a number that is the
        same for all classes), else their log-odds.
        """
        if of == "score" or self is Meaning.VALUE:
            return None
        if of == "probability":
            return self.probabilities
        if self is not Meaning.SOFTMAX:
            return None
        return log_probabilities if exclusive else log_odds

    def best(self, output: Tensor, count: int) -> list[tuple[int, float]]:
        """The classes of one image's output [C] with the highest probabilities, or the largest values, best first."""
        shares = self.probabilities(output)
        found = shares.nan_to_num(0).topk(min(count, len(shares))).indices
        return list(zip(found.tolist(), shares[found].tolist()))

    @property
    def noun(self) -> str:
        """What one of its numbers belongs to."""
        return "output" if self is Meaning.VALUE else "class"

    def written(self, number: float) -> str:
        """A probability or a value, for people."""
        return f"{number:.4g}" if self is Meaning.VALUE else f"{number:.0%}"


class Form(Enum):
    """How the output of a model is laid out."""

    VECTOR = "one vector per image"  # [B C]
    DENSE = "one vector per place"  # [B C Y X]
    DETECTIONS = "one vector and one box per query"  # [B Q C+4]; boxes: centre x, y, width, height, as shares
    WORDS = "one vector per word"  # [B P C]: logits over the vocabulary, for each position of an answer


class Laid(NamedTuple):
    """An output with its form; a `forward` of one's own may return one."""

    values: Tensor
    form: Form

    @property
    def classes(self) -> int:
        """How many classes, or numbers, it has for each image, place, query or word."""
        axis, others = {Form.VECTOR: (1, 0), Form.DENSE: (1, 0), Form.DETECTIONS: (2, 4), Form.WORDS: (2, 0)}[self.form]
        return self.values.shape[axis] - others


def along_classes(scale: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    """Apply a function of the last axis to the classes, which come first at places: [B C Y X]."""
    return scale(output.movedim(1, -1)).movedim(-1, 1) if output.ndim == 4 else scale(output)


def log_probabilities(output: Tensor) -> Tensor:
    """ln p; of a probability that rounds to zero, that of the smallest number."""
    return output.clamp_min(torch.finfo(output.dtype).tiny).log()


def log_odds(output: Tensor) -> Tensor:
    """ln p − ln (1 − p)."""
    return log_probabilities(output) - (1 - output).clamp_min(torch.finfo(output.dtype).eps).log()


def check_kind(given: str, classifier: bool | None) -> str:
    """The given meaning, if there is such a one and it does not contradict `classifier`."""
    kinds = [AUTO, *(meaning.value for meaning in Meaning)]
    if given not in kinds:
        raise ModelError(f"output={given!r} is not a meaning of an output; choose {one_of(kinds)}")
    if given != AUTO and classifier is False:
        raise ModelError(f"classifier=False says that the output is an embedding, output={given!r} that it is not")
    return given


@dataclass(frozen=True)
class Ending:
    """What a forward pass shows of its output."""

    outputs: int
    low: float
    high: float
    sums: tuple[float, float]  # the least and the greatest sum of a row
    last: str  # "sigmoid", "cosine" (similarities to unit vectors, scaled) or anything else
    rounding: float

    @property
    def is_softmax(self) -> bool:
        """Whether the outputs of every image are at least two probabilities that sum to one."""
        near = all(abs(total - 1) <= max(TOLERANCE, 2 * self.rounding) for total in self.sums)
        return self.outputs > 1 and self.low >= 0 and near

    @property
    def is_exclusive(self) -> bool:
        """Whether the outputs, if they are probabilities, are those of classes that exclude each other."""
        return self.last != "sigmoid"

    @property
    def is_probability(self) -> bool:
        return self.is_softmax or (self.last == "sigmoid" and 0 <= self.low <= self.high <= 1)

    @property
    def classifies(self) -> bool:
        """Whether this alone shows that the outputs are classes."""
        return self.is_probability or self.last == "cosine"

    def check(self, given: str, name: str) -> None:
        """Raise if the outputs are said to be probabilities and are not."""
        if given != Meaning.SOFTMAX.value or self.is_probability:
            return
        sums, range = (
            " to ".join(dict.fromkeys(f"{x:.3g}" for x in ends)) for ends in (self.sums, (self.low, self.high))
        )
        raise ModelError(
            f"output='softmax': the outputs of {name} sum to {sums}, not to 1 (they range from {range}), "
            "and end in no sigmoid; use output='logits' or 'sigmoid' for scores, 'value' for numbers as they are"
        )


def see(output: Tensor) -> Ending:
    """Look at the outputs of a few images; with a graph, also at the last operation."""
    values = output.detach().float()
    sums = values.sum(1)
    low, high, least, most = torch.stack([values.min(), values.max(), sums.min(), sums.max()]).tolist()
    last = last_operation(output.grad_fn)
    rounding = torch.finfo(output.dtype).eps if output.is_floating_point() else 0.0
    return Ending(output.shape[1], low, high, (least, most), last, rounding)


def decide(ending: Ending, classifies: bool, told: str | None, named: bool) -> Meaning:
    """What "auto" means: what the outputs show, then what the library says (`told`), then how many there are.

    `named`: the classes have names, or the user says that there are classes.
    """
    if not classifies:
        return Meaning.VALUE  # an embedding
    if ending.is_probability:
        return Meaning.SOFTMAX
    if told is not None:
        return Meaning(told)
    if ending.outputs == 1:
        return Meaning.SIGMOID if named else Meaning.VALUE
    return Meaning.LOGITS


# ------------------------------------------------------------------------------------------------ the last operation


def last_operation(node: Any) -> str:
    """The operation that made a tensor, in lower case; "cosine" for scaled products of unit vectors."""
    while node is not None and kind_of(node) in SAME:
        node = node.next_functions[0][0]
    if node is None:
        return ""
    return "cosine" if any(is_cosine(product) for product in nearby(node, "Mm")) else kind_of(node).lower()


def kind_of(node: Any) -> str:
    """ "Softmax" for SoftmaxBackward0."""
    return re.sub(r"Backward\d*$", "", node.name()).lstrip("_")


def nearby(node: Any, kind: str) -> list[Any]:
    """The nearest operations of a kind, behind nothing but scaling and shifting."""
    found, left = [], [node]
    for _ in range(FAR):
        found += [one for one in left if kind_of(one) == kind]
        between = [one for one in left if kind_of(one) in SAME | {"Mul", "Add", "Sub", "Neg"} or is_scaled(one)]
        left = [before for one in between for before, _ in one.next_functions if before is not None]
    return found


def is_scaled(node: Any) -> bool:
    """Whether a tensor is divided by a single number, such as a temperature."""
    other = getattr(node, "_saved_other", None) if kind_of(node) == "Div" else None
    return kind_of(node) == "Div" and (other is None or other.numel() == 1)


def is_cosine(product: Any) -> bool:
    """Whether a vector that was divided by its norm is multiplied by a matrix with columns of length one."""
    matrix = product._saved_mat2
    if matrix is None or not (matrix.detach().float().norm(dim=0) - 1).abs().max() <= TOLERANCE * 10:
        return False
    begun = product.next_functions[0][0]
    return begun is not None and any(not is_scaled(one) for one in nearby(begun, "Div"))


def read_output(raw: Any, name: str, mean: bool = False) -> Output:
    """Find the scores in whatever a network returns; of tokens, the first or their mean."""
    return lay_out(raw, name, mean).values


def lay_out(raw: Any, name: str, mean: bool = False, size: tuple[int, int] | None = None) -> Laid:
    """The same with its form: one vector per image, or per place of the image, whose (height, width) is `size`."""
    hint = "say how to read it, e.g. Model(net, forward=lambda x: "
    if isinstance(raw, Laid):
        return raw
    if isinstance(raw, Mapping):
        detections = read_detections(raw)
        if detections is not None:
            return Laid(detections, Form.DETECTIONS)
        places = find_places(raw)
        found = places if places is not None else find_output(raw, mean)
        if found is None:
            keys = list(raw)[:5]
            raise ModelError(f"{name} returns a dictionary of {keys}; {hint}net(x)[{keys[0] if keys else 'key'!r}])")
        raw = found
    elif isinstance(raw, tuple | list) and raw:
        return lay_out(raw[0], name, mean, size)
    if not isinstance(raw, Tensor):
        raise ModelError(f"{name} returns a {type(raw).__name__}, not scores; {hint}…)")
    if raw.ndim == 4 or (raw.ndim == 3 and is_plane(raw, size)):
        return Laid(as_places(raw, name, size), Form.DENSE)
    if raw.ndim != 2:
        said = f"{name} returns {list(raw.shape)}, not one vector per image"
        raise ModelError(f"{said}; say how to read it, e.g. {how_to_read(raw)}")
    return Laid(raw, Form.VECTOR)
