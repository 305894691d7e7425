"""What is maximised: one number per image, anywhere in the model.

class:NAME  neuron:K  text:…  concept:NAME   of the output          block:L/channel:C           mean over the patches
token:L/T   token:L/T/channel:C              a token's norm or      head:L/H/q:C  head:L/H/k:C   mean over the patches
            T: a number, cls or row,column   one of its channels                                 of a query or a key
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitreous.capture.attention import widen
from vitreous.capture.capture import Enough
from vitreous.errors import TargetError, Unsupported
from vitreous.trace.parse_target import listed, parse
from vitreous.trace.run import Finished, Run, Stopped, score_of
from vitreous.trace.target import Target, as_target, no_classifier
from vitreous.trace.tokens import projections, token_names
from vitreous.trace.trace import Trace
from vitreous.types import Images, Scores, Tokens

KINDS = ("class", "neuron", "text", "concept", "block", "token", "head")
SHAPES = "class:NAME, neuron:K, block:L/channel:C, token:L/T, token:L/T/channel:C, head:L/H/q:C or head:L/H/k:C"
Place = int | tuple[int, int] | Literal["cls"]


@runtime_checkable
class Unit(Protocol):
    """Reads its number from a run; its text parses back to it."""

    @property
    def depth(self) -> int | None: ...  # the last block that it needs; None: the whole run

    def __call__(self, seen: Seen, rows: slice) -> Scores: ...


@dataclass(frozen=True, eq=False)
class Seen:
    """One run: its attention and output, and what left the blocks that units read."""

    trace: Trace
    record: Stopped
    blocks: dict[int, Tensor]  # [B N D] or [B h w D]

    def tokens(self, layer: int, rows: slice) -> Tokens:
        return self.blocks[layer][rows].flatten(1, -2)

    def patches(self, layer: int, rows: slice) -> Float[Tensor, "B h w D"]:
        return self.trace.to_patches(self.blocks[layer][rows])

    def heads(self, layer: int, side: Literal["q", "k"], rows: slice) -> Float[Tensor, "B H N d"]:
        """Q or K of every token, as the attention sees it."""
        queries, keys, _ = projections(self.trace, self.record.layers[layer])
        return (queries if side == "q" else keys)[rows]


@dataclass(frozen=True)
class OfOutput:
    """A class, a number of the output, a text or a concept."""

    text: str
    target: Target = field(compare=False)

    depth = None

    def __call__(self, seen: Seen, rows: slice) -> Scores:
        assert isinstance(seen.record, Finished)
        return score_of(self.target, seen.record, rows)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Channel:
    """The mean over the patches of one channel of what leaves a block."""

    layer: int
    channel: int

    @property
    def depth(self) -> int:
        return self.layer

    def __call__(self, seen: Seen, rows: slice) -> Scores:
        patches = seen.patches(self.layer, rows)
        return widen(patches[..., within(self.channel, patches.shape[-1], "channel", self)]).mean((1, 2))

    def __str__(self) -> str:
        return f"block:{self.layer}/channel:{self.channel}"


@dataclass(frozen=True)
class Token:
    """The length of one token as it leaves a block, or one of its channels."""

    layer: int
    place: Place
    channel: int | None = None

    @property
    def depth(self) -> int:
        return self.layer

    def __call__(self, seen: Seen, rows: slice) -> Scores:
        token = widen(self.find(seen, rows))
        if self.channel is None:
            norm: Scores = torch.linalg.vector_norm(token, dim=-1)
            return norm
        return token[:, within(self.channel, token.shape[-1], "channel", self)]

    def find(self, seen: Seen, rows: slice) -> Float[Tensor, "B D"]:
        if isinstance(self.place, tuple):
            patches = seen.patches(self.layer, rows)
            row, column = (within(i, n, w, self) for i, n, w in zip(self.place, patches.shape[1:3], ("row", "column")))
            return patches[:, row, column]
        tokens = seen.tokens(self.layer, rows)
        number = cls_token(seen.trace) if self.place == "cls" else self.place
        return tokens[:, within(number, tokens.shape[1], "token", self)]

    def __str__(self) -> str:
        place = ",".join(map(str, self.place)) if isinstance(self.place, tuple) else self.place
        return f"token:{self.layer}/{place}" + ("" if self.channel is None else f"/channel:{self.channel}")


@dataclass(frozen=True)
class Head:
    """The mean over the patches of one channel of a head's queries or keys."""

    layer: int
    head: int
    side: Literal["q", "k"]
    channel: int

    @property
    def depth(self) -> int:
        return self.layer

    def __call__(self, seen: Seen, rows: slice) -> Scores:
        found = seen.heads(self.layer, self.side, rows)  # [B H N d]
        one = found[:, within(self.head, found.shape[1], "head", self)]
        layout = seen.trace.layout
        patches = one[:, layout.patch_tokens]
        return patches[..., within(self.channel, one.shape[-1], "channel", self)].mean(1)

    def __str__(self) -> str:
        return f"head:{self.layer}/{self.head}/{self.side}:{self.channel}"


def title(unit: Unit, trace: Trace) -> str:
    """A unit's title: with the label where a class is given by its number."""
    numbers = unit.target.class_numbers(1) if isinstance(unit, OfOutput) else None
    if numbers and str(unit) == f"class:{numbers[0]}":
        label = trace.model.label(numbers[0])
        return str(unit) if label == f"class {numbers[0]}" else f"{unit} {label}"
    return str(unit)


def within(number: int, count: int, what: str, unit: Unit) -> int:
    if number >= count:
        raise TargetError(f"{unit}: {what} {number} is out of range: there are {what}s 0 to {count - 1}")
    return number


def cls_token(trace: Trace) -> int:
    found = [i for i, name in token_names(trace.layout).items() if name == "CLS"]
    if not found:
        raise TargetError(f"{trace.model.name} has no CLS token; give a token's number or its row,column")
    return found[0]


# ------------------------------------------------------------------------------------------------------------- reading


def look(trace: Trace, images: Images, units: Sequence[Unit], *, grad: bool) -> Scores:
    """Every unit's value on its own images: as many in a row for each unit as there are images for it."""
    each = len(images) // len(units)
    depths = [unit.depth for unit in units]
    read = {depth for depth in depths if depth is not None}
    last = None if None in depths else max(read)
    taken: dict[int, Tensor] = {}
    with trace.model.still() as still, ExitStack() as stack:
        for layer in sorted(read) if len(trace.layout.blocks) == trace.layout.layers else ():
            stop = layer == last and not still.hooked
            hook = trace.block(layer).register_forward_hook(keep(trace, taken, layer, stop))
            stack.callback(hook.remove)
        record = trace.look(images, Run.from_pixels() if grad else Run.to_output())
    seen = Seen(trace, record, taken)
    with torch.set_grad_enabled(grad):
        return torch.cat([unit(seen, slice(i * each, (i + 1) * each)) for i, unit in enumerate(units)])


def keep(trace: Trace, taken: dict[int, Tensor], layer: int, stop: bool) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that keeps a block's output, and ends the run where nothing later is needed."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        taken[layer] = (out[0] if isinstance(out, tuple) else out).movedim(trace.batch_axis, 0)
        if stop:
            raise Enough

    return hook


# ------------------------------------------------------------------------------------------------------------- parsing


def split_units(text: str) -> list[str]:
    """The units in "class:tench,token:3/2,5,block:0/channel:1"."""
    return [part.strip() for part in re.split(rf",\s*(?=(?:{'|'.join(KINDS)}):)", text) if part.strip()]


def parse_units(given: Any, trace: Trace) -> list[Unit]:
    """One unit or several, as text, class numbers, targets or units."""
    several = [given] if isinstance(given, str | int) or not isinstance(given, Sequence) else list(given)
    parts = [part for one in several for part in (split_units(one) if isinstance(one, str) else [one])]
    if not parts:
        raise TargetError(f"there is no unit to maximise; give {SHAPES}")
    return [parse_unit(part, trace) for part in parts]


def parse_unit(given: Any, trace: Trace) -> Unit:
    """Parse one unit; raises for every mistake that can be found without a run."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = f"class:{given}"
    if isinstance(given, str):
        kind, _, rest = given.strip().partition(":")
        unit = parse_text(kind.lower(), rest.strip(), given, trace)
    elif isinstance(given, OfOutput | Channel | Token | Head):
        unit = given
    elif callable(given) and not isinstance(given, type):
        target = as_target(given)
        text = str(target) if target.class_numbers(1) is None else f"class:{target}"
        unit = of_target(text, target, trace)
    else:
        raise TargetError(f"{str(given)[:60]!r} is not a unit; give {SHAPES}")
    if unit.depth is not None:
        check_layer(unit, unit.depth, trace)
    return unit


def parse_text(kind: str, rest: str, text: str, trace: Trace) -> Unit:
    """One kind of unit from what stands behind its colon; `text`: the whole, for errors."""
    if kind in ("class", "neuron", "text", "concept"):
        return of_target(f"{kind}:{rest}", rest if kind == "class" else f"{kind}:{rest}", trace)
    found = re.fullmatch(PATTERNS[kind], rest) if kind in PATTERNS else None
    if found is None:
        raise TargetError(f"{text[:60]!r} is not a unit; write {SHAPES}")
    part: dict[str, Any] = {name: int(v) if v.isdigit() else v for name, v in found.groupdict().items() if v}
    if kind == "block":
        return Channel(part["layer"], part["channel"])
    if kind == "head":
        return Head(part["layer"], part["head"], part["side"], part["channel"])
    place = (part["row"], part["column"]) if "row" in part else part["token"]
    return Token(part["layer"], place, part.get("channel"))


PATTERNS = {
    "block": r"(?P<layer>\d+)/channel:(?P<channel>\d+)",
    "token": r"(?P<layer>\d+)/(?:(?P<token>\d+|cls)|(?P<row>\d+),\s*(?P<column>\d+))(?:/channel:(?P<channel>\d+))?",
    "head": r"(?P<layer>\d+)/(?P<head>\d+)/(?P<side>[qk]):(?P<channel>\d+)",
}


def of_target(text: str, given: Any, trace: Trace) -> OfOutput:
    """A unit of the output; never a class of a model that has none."""
    if len(listed(text)) > 1:
        raise TargetError(f"{text}: is several targets; give one unit for each")
    target = parse(given, trace.model, trace.model.outputs or trace.output.shape[1])
    if target.varies:
        raise TargetError(f"{text}: is another class for every image; name the class")
    if target.names_classes and not trace.classifies:
        raise no_classifier(trace.model.name)
    return OfOutput(text, target)


def check_layer(unit: Unit, layer: int, trace: Trace) -> None:
    layout, name = trace.layout, trace.model.name
    if isinstance(unit, Head) and layout.obstacle is not None:
        raise Unsupported(f"{unit}: {name} {layout.obstacle}, so its heads have no query or key for each patch")
    what, count = ("layer", layout.layers) if isinstance(unit, Head) else ("block", len(layout.blocks))
    if not isinstance(unit, Head):
        trace.block(0)
    if layer >= count:
        raise TargetError(f"{unit}: {what} {layer} is out of range: {name} has {what}s 0 to {count - 1}")
