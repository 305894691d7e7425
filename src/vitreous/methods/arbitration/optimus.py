from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Any

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import widen
from vitreous.capture.shown import Shown
from vitreous.errors import OptionError, TargetError, Unsupported
from vitreous.metrics.case import Case, measure
from vitreous.registry import METHODS, METRICS, Metric, Noted, method
from vitreous.trace.apply import refuse
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map, Scores

CHANCE = 0.05  # how often the best of as many random maps may count as better than random
Fused = Float[Tensor, "B K N M"]  # K ways to fuse the heads


@method(
    cite="mylonas2022attention",
    targeted=True,
    attention=True,
    alone=True,
    costly=True,
    cheap={"single_heads": False, "methods": False, "controls": 3},
)
def optimus(
    trace: Trace,
    target: Target,
    *,
    metric: Annotated[
        str, Field(description="the faithfulness metric that decides, see: vitreous metrics")
    ] = "token_deletion",
    single_heads: Annotated[bool, Field(description="try each head alone as well")] = True,
    methods: Annotated[
        bool, Field(description="try the maps of all methods that cost a few forward passes as well")
    ] = True,
    controls: Annotated[int, Field(ge=3, description="random maps that are scored beside")] = 16,
    seed: Annotated[int, Field(ge=0, description="of the random maps")] = 0,
) -> Noted:
    """The most faithful of many maps, chosen for each image by a metric: those of its attention and of quick methods;
    at a high cost.

    argmax faithfulness over heads {mean, (∇A ⊙ A)⁺, each} × layers {each, mean, product} × rows {ρᵀA, column mean, max}
    and over every quick method for a class, with its defaults and the options that advise tries
    """
    judge = find_judge(metric)
    fixed = target.fix(trace.output)
    names, made = candidates(trace, fixed, single_heads)  # [B C h w]
    if methods:
        others = quick_maps(trace, fixed)
        names, made = [*names, *others], torch.cat([made, *(one[:, None].to(made) for one in others.values())], 1)
    streams = trace.generators(seed)
    chance = torch.stack([torch.rand(controls, *trace.layout.cells, generator=stream) for stream in streams])
    found = [choose(trace, i, fixed, judge, names, made[i], chance[i].to(made)) for i in range(len(trace))]
    notes = {key: [one.notes[key] for one in found] for key in found[0].notes}
    return Noted(torch.stack([one.map for one in found]), notes)


@dataclass(frozen=True)
class Best:
    """One image's best map and how it was found."""

    map: Float[Tensor, "*frames h w"]
    notes: dict[str, Any]


def find_judge(name: str) -> Metric:
    judge = METRICS[name]
    if judge.family != "faithfulness" or judge.again:
        able = [m.name for m in METRICS.values() if m.family == "faithfulness" and not m.again]
        raise OptionError(f"optimus.metric={name!r} does not measure faithfulness; use one of {', '.join(able)}")
    return judge


# ---------------------------------------------------------------------------------------------------- making them


def candidates(trace: Trace, target: Target, single_heads: bool) -> tuple[list[str], Float[Tensor, "B C *frames h w"]]:
    """Every map and its name, all from one run."""
    record, _ = trace.followed()  # the one forward pass that everything below uses
    weighted = Readings(trace)

    def visit(layer: Shown) -> None:
        tokens = trace.layout.tokens
        whole = trace.readout.new_zeros(len(trace), tokens, tokens)
        for images, rows, _, product in layer.chunks:
            whole[images, rows] = product.clamp_min(0).mean(1).to(whole)
        weighted.add(whole[:, None])

    trace.follow(target, visit)
    plain = Readings(trace)
    for layer in reversed(record.layers):
        a = layer.weights.detach()
        mean = a.mean(1, keepdim=True)
        plain.add(torch.cat([mean, a], 1) if single_heads else mean)
    heads = ["gradient", "mean", *(f"head {h}" for h in range(plain.ways - 1))]
    layers = [*(f"layer {n}" for n in range(trace.layout.layers)), "mean of layers", "product of layers"]
    names = [f"{h}, {n}, {row}" for h in heads for n in layers for row in ("read-out row", "column mean", "column max")]
    rows = torch.cat([weighted.result(), plain.result()], 1).flatten(1, 3)  # [B C N]
    return names, trace.map(rows.flatten(0, 1)).reshape(len(trace), -1, *trace.layout.cells)


def quick_maps(trace: Trace, target: Target) -> dict[str, Map]:
    """The maps of every quick method that gives one value per patch, by name and options."""
    found = {}
    for declared in METHODS.values():
        if not declared.targeted or declared.costly or declared.alone:
            continue
        for one in (declared.configured(), *(declared.configured(**options) for options in declared.tried)):
            with suppress(Unsupported, TargetError):
                refuse(trace, declared)
                made = declared.run(trace, target, **one.values)
                values: Map = made.map if isinstance(made, Noted) else made
                if values.shape[1:] == trace.layout.cells:
                    found[one.label] = values.detach()
    return found


class Readings:
    """The candidate rows of fused attention, collected layer by layer from the last to the first."""

    def __init__(self, trace: Trace) -> None:
        self.readout = trace.readout
        self.each: list[Float[Tensor, "B K 3 M"]] = []
        self.product: Fused | None = None

    @property
    def ways(self) -> int:
        return self.each[0].shape[1]

    def add(self, a: Fused) -> None:
        """Add the preceding layer."""
        a = widen(a)
        self.each.append(self.read(a))
        step = (a + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)) / 2
        step = step / step.sum(-1, keepdim=True)
        self.product = step if self.product is None else self.product @ step

    def read(self, a: Fused) -> Float[Tensor, "B K 3 M"]:
        """The read-out row, the columns' means and the columns' maxima."""
        row = torch.einsum("bn,bknm->bkm", self.readout.to(a), a)
        return torch.stack([row, a.mean(2), a.amax(2)], 2)

    def result(self) -> Float[Tensor, "B K layers 3 M"]:
        """Each layer, their mean, their product."""
        assert self.product is not None
        each = torch.stack(self.each[::-1], 2)
        return torch.cat([each, each.mean(2, keepdim=True), self.read(self.product)[:, :, None]], 2)


# --------------------------------------------------------------------------------------------------- judging them


def choose(
    trace: Trace,
    index: int,
    target: Target,
    judge: Metric,
    names: list[str],
    maps: Float[Tensor, "C *frames h w"],
    chance: Float[Tensor, "R *frames h w"],
) -> Best:
    """The best map of one image, and whether it beats what the best of as many random maps would reach."""
    options = judge.check({})
    sign = 1 if judge.direction(options) == "higher" else -1
    scores = judged(trace, index, target, judge, torch.cat([maps, chance]))
    found, random = scores[: len(maps)], scores[len(maps) :]
    best = int((sign * found).nan_to_num(-torch.inf).argmax())
    limit = random.mean() + sign * random.std() * NormalDist().inv_cdf((1 - CHANCE) ** (1 / len(maps)))
    ranked = sorted(zip(names, found.tolist()), key=lambda one: -sign * one[1])
    notes = {
        "chosen": names[best],
        "score": float(found[best]),
        "random": float(random.mean()),
        "needed": float(limit),
        "beats_random": bool(sign * (found[best] - limit) > 0),
        "scoreboard": [{"map": name, judge.name: score} for name, score in ranked],
    }
    return Best(maps[best], notes)


def judged(trace: Trace, index: int, target: Target, judge: Metric, maps: Float[Tensor, "C *frames h w"]) -> Scores:
    """The metric of many maps of one image."""
    image, wanted = trace.images[index : index + 1], target.of_image(index)

    def run(part: slice) -> Scores:
        rows = [index] * (part.stop - part.start)
        copies = trace.like(image.expand(len(rows), *image.shape[1:]).contiguous(), rows)
        return measure(judge, Case(copies, maps[part], wanted), judge.check({})).value

    size = batch_size(trace.layout.footprint[0], image.device)
    return torch.cat(in_batches(run, len(maps), size, "optimus"))
