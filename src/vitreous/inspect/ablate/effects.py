"""The effect of every ablation on a batch: truly run, and predicted to first order by one backward pass.

true        y(Õ_p) − y(O)                    a forward pass for each part p, from its layer on
predicted   Σ ∂y/∂O_p · (Õ_p − O_p)          a backward pass for all parts at once (attribution patching)
averaged    the same, the gradient taken half-way   a backward pass for each layer, whose parts all move half-way to Õ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import near, widen
from vitreous.capture.narrowed_block import entering
from vitreous.errors import ModelError
from vitreous.inspect.ablate.places import Places, also
from vitreous.inspect.ablate.sources import Source
from vitreous.models.output import Meaning, log_probabilities
from vitreous.trace.run import Finished, Run, gradients
from vitreous.trace.target import Graded, Target
from vitreous.trace.trace import Trace

SHARES = "ablations share what is before their layer"
Numbers = Float[np.ndarray, "B parts"]


@dataclass(frozen=True, eq=False)
class Measure:
    """What is read off an output: the score of the target, the log-probability of its class, the best class."""

    target: Target
    log: Target | None  # None: the target is no class

    @classmethod
    def of(cls, trace: Trace, target: Target) -> Measure:
        meaning = trace.model.meaning
        logs: dict[Meaning, Callable[[Tensor], Tensor]] = {
            Meaning.LOGITS: partial(F.log_softmax, dim=-1),
            Meaning.SIGMOID: F.logsigmoid,
            Meaning.SOFTMAX: log_probabilities,
        }
        graded = trace.classifies and target.names_classes and meaning in logs
        return cls(target, Graded(target, logs[meaning]) if graded else None)

    def both(self, run: Finished, rows: Sequence[int]) -> list[Tensor]:
        """The score and, of a class, the log-probability of each row."""
        asked = [self.target] if self.log is None else [self.target, self.log]
        output = widen(run.output)
        embedding = output if run.embedding is run.output else run.embedding
        return [widen(one.of_rows(rows)(output, embedding)) for one in asked]

    def read(self, run: Finished, rows: Sequence[int]) -> Tensor:
        """[rows 3]: score, log-probability (NaN), best class (−1)."""
        scores = self.both(run, rows)
        missing = torch.full_like(scores[0], torch.nan)
        best = run.output.argmax(1).to(scores[0]) if self.log is not None else missing * 0 - 1
        return torch.stack([scores[0], scores[1] if len(scores) > 1 else missing, best.nan_to_num(-1)], 1).double()


@dataclass(frozen=True, eq=False)
class Effects:
    """What was measured of each image and part, as it is after an ablation, not as a difference."""

    whole: Float[np.ndarray, "B 3"]  # score, log-probability and best class of the whole network
    true: Float[np.ndarray, "B parts 3"]
    control: Float[np.ndarray, "B parts 3"] | None  # the same after a step of the same length in a random direction
    predicted: Float[np.ndarray, "2 B parts"] | None  # changes of score and log-probability
    averaged: Float[np.ndarray, "2 B parts"] | None
    unchanged: Float[np.ndarray, "B"]  # |change of the score| in a run that changes nothing


def measure_effects(
    places: Places,
    trace: Trace,
    target: Target,
    source: Source,
    *,
    control: bool,
    predict: bool,
    steps: int = 0,
    seed: int = 0,
) -> Effects:
    """The effects of every ablation on the images of a trace; `steps`: at how many points gradients are averaged."""
    measure, predict = Measure.of(trace, target), predict and trace.model.has_gradients
    rows = range(len(trace))
    whole = measure.read(trace.whole(), rows).cpu().numpy()
    shares = shares_prefix(places)
    kinds = ("true", "control") if control else ("true",)
    noise = Noise(trace, seed)
    asked = [(layer, part, kind) for layer, part in places.all for kind in kinds]
    found: dict[tuple[int, int, str], np.ndarray] = {}
    for layer in dict.fromkeys(layer for layer, _, _ in asked):
        mine = [one for one in asked if one[0] == layer]
        made = ablated(places, trace, measure, source, mine, shares, noise)
        found.update(zip(mine, made))
    each = {kind: np.stack([found[layer, part, kind] for layer, part in places.all], 1) for kind in kinds}
    middle = len(places.parts) // 2
    same = ablated(places, trace, measure, source, [(middle, 0, "nothing")], shares, noise)[0]
    return Effects(
        whole,
        each["true"],
        each.get("control"),
        first_order(places, trace, measure, source) if predict else None,
        averaged(places, trace, measure, source, steps) if predict and steps else None,
        np.abs(same[:, 0] - whole[:, 0]),
    )


# ------------------------------------------------------------------------------------------------------------ true runs


class Noise:
    """Random directions, the same for an image in every batch."""

    def __init__(self, trace: Trace, seed: int) -> None:
        self.keys = trace.keys(seed).tolist()

    def like(self, values: Tensor, layer: int, part: int) -> Tensor:
        """[B …] of unit length along the last axis."""
        drawn = []
        for key in self.keys:
            generator = torch.Generator().manual_seed((key + 1_000_003 * layer + 7919 * part) % 2**63)
            drawn.append(torch.randn(values.shape[1:], generator=generator))
        return F.normalize(torch.stack(drawn), dim=-1).to(values)


def ablated(
    places: Places,
    trace: Trace,
    measure: Measure,
    source: Source,
    asked: Sequence[tuple[int, int, str]],
    shares: bool,
    noise: Noise,
) -> list[np.ndarray]:
    """[B 3] for each ablation asked for, all of one layer; as many in a forward pass as memory allows."""
    count, layer = len(trace), asked[0][0]

    def run(part: slice) -> np.ndarray:
        mine = asked[part]
        rows = list(range(count)) * len(mine)

        def edit(_: int, values: Tensor) -> Tensor:
            return swapped(values, count, layer, mine, source, noise)

        found = repeated(places, trace, layer, len(mine), shares, edit)
        return measure.read(found, rows).cpu().numpy().reshape(len(mine), count, 3)

    most = max(1, batch_size(trace.layout.footprint[0], trace.images.device) // count)
    return [one for made in in_batches(run, len(asked), most) for one in made]


def swapped(
    values: Tensor, count: int, layer: int, asked: Sequence[tuple[int, int, str]], source: Source, noise: Noise
) -> Tensor:
    """The values of a layer with one part of each `count` rows replaced."""
    values = values.clone()
    for i, (_, part, kind) in enumerate(asked):
        own = values[i * count : (i + 1) * count]
        if kind == "nothing":
            continue
        other = source.of(layer, own)[:, part]
        if kind == "control":
            length = torch.linalg.vector_norm(widen(other - own[:, part]), dim=-1, keepdim=True)
            other = own[:, part] + (noise.like(own[:, part], layer, part) * length).to(own)
        own[:, part] = other
    return values


def repeated(places: Places, trace: Trace, layer: int, times: int, shares: bool, edit: Any) -> Finished:
    """A run over the images several times, in which a layer is edited; `shares`: what is before it is run once."""
    count = len(trace)
    shared = shares and times > 1
    how = (
        also(Run.to_output().unseen(), partial(repeating, trace, layer, times)) if shared else Run.to_output().unseen()
    )
    how = places.edited(how, edit, count * times, layer).of(list(range(count)) * times)
    if shared:
        return trace.run(trace.images, replace(how, count=count * times))
    return trace.run(trace.images.repeat(times, *[1] * (trace.images.ndim - 1)), how)


def repeating(trace: Trace, layer: int, times: int) -> ExitStack:
    """A context in which a block gets its tokens several times."""
    count, axis = len(trace), trace.batch_axis

    def repeat(tokens: Tensor) -> Tensor:
        if tokens.shape[axis] != count:
            return tokens  # already one for each row
        return tokens.repeat(*(times if i == axis else 1 for i in range(tokens.ndim)))

    return entering(trace.block(layer), repeat)


def shares_prefix(places: Places) -> bool:
    """Whether blocks may be given the tokens of the same images several times; found out once for each network."""
    trace = places.trace
    layout = trace.layout
    if len(set(layout.blocks)) != layout.layers or layout.alone:
        return False

    def answer() -> bool:
        expected = trace.whole().output
        try:
            for layer in (0, layout.layers - 1):
                how = also(Run.to_output().unseen(), partial(repeating, trace, layer, 2))
                how = replace(how, count=2 * len(trace)).of(list(range(len(trace))) * 2)
                if not near(trace.run(trace.images, how).output, torch.cat([expected, expected])):
                    return False
        except (ModelError, RuntimeError, ValueError, IndexError):
            return False
        return True

    return trace.facts.find((SHARES, trace.extent), answer)


# ---------------------------------------------------------------------------------------------------------- first order


def first_order(places: Places, trace: Trace, measure: Measure, source: Source) -> np.ndarray:
    """Σ ∂y/∂O_p · (Õ_p − O_p) of every image and part, for the score and the log-probability: [2 B parts]."""
    return np.concatenate([one for _, one in sorted(sloped(places, trace, measure, source, 0.0).items())], 2)


def averaged(places: Places, trace: Trace, measure: Measure, source: Source, steps: int) -> np.ndarray:
    """The same by the mean gradient at points on the way of each layer, all its parts together, from O to Õ."""
    made = []
    for layer, count in enumerate(places.parts):
        if count:
            ways = [(step + 0.5) / steps for step in range(steps)]
            each = [sloped(places, trace, measure, source, way, layer)[layer] for way in ways]
            made.append(np.mean(each, 0))
    return np.concatenate(made, 2)


def sloped(
    places: Places, trace: Trace, measure: Measure, source: Source, way: float, only: int | None = None
) -> dict[int, np.ndarray]:
    """∂y/∂O_p · (Õ_p − O_p) of every layer, or of one, a part of the way from O to Õ; one backward pass for each y."""
    steps: dict[int, Tensor] = {}
    leaves: dict[int, Tensor] = {}

    def mark(layer: int, found: Tensor) -> Tensor:
        values = found.detach()
        steps[layer] = source.of(layer, values) - values
        leaves[layer] = torch.zeros_like(values).requires_grad_()
        begun = found if only is None else values + way * steps[layer]
        return begun + leaves[layer]

    rows = list(range(len(trace)))
    how = Run.from_pixels().unseen().of(rows)
    run = trace.run(trace.images, places.edited(how, mark, len(trace), only))
    with torch.enable_grad():
        scores = measure.both(run, rows)
    made: dict[int, list[np.ndarray]] = {layer: [] for layer in steps}
    for y in scores:
        for layer, grad in zip(leaves, gradients(y, list(leaves.values()))):
            moved = (widen(grad) * widen(steps[layer])).flatten(2).sum(-1)  # [B parts]
            made[layer].append(moved.double().cpu().numpy())
    missing = [np.full_like(one[0], np.nan) for one in made.values()]
    return {
        layer: np.stack([*one, *([none] if len(one) < 2 else [])]) for (layer, one), none in zip(made.items(), missing)
    }
