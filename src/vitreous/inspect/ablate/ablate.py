"""Ablate every attention head, MLP or layer of a model on a data set, and write checkpoints without some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vitreous.errors import OptionError, one_of
from vitreous.evaluation.leaderboard import pool_of
from vitreous.evaluation.study.findings import Findings
from vitreous.evaluation.study.local import run_local
from vitreous.evaluation.study.plan import Planned, Source, plan
from vitreous.evaluation.study.read import Study
from vitreous.evaluation.study.run import as_source, as_targets, carry_out
from vitreous.images.dataset import Data, read_data
from vitreous.inspect.ablate.blocks import find_places
from vitreous.inspect.ablate.findings import Worth, worth_of
from vitreous.inspect.ablate.prune import Saved, parse_names, save_pruned
from vitreous.inspect.ablate.sources import Source as Values
from vitreous.inspect.ablate.sources import mean_values
from vitreous.inspect.ablate.study import Ablate, traces_of
from vitreous.models.model import Model
from vitreous.trace.trace import Trace

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

RANKS = ("true", "predicted", "size")
CHECKED = 8  # images on which a pruned checkpoint is compared with the ablated network


@dataclass(frozen=True, eq=False)
class Ablation:
    """What a model loses without each of its parts, on the images of a data set."""

    study: Study
    model: Model
    data: Data

    @property
    def kind(self) -> Ablate:
        made = self.study.kind
        assert isinstance(made, Ablate)
        return made

    @cached_property
    def worth(self) -> Worth:
        """The changes of every part and image."""
        return worth_of(self.kind, self.study)

    @cached_property
    def findings(self) -> Findings:
        return next(iter(self.study.findings().values()))

    @property
    def said(self) -> str:
        """The main finding, in one line."""
        return self.findings.lead

    @property
    def names(self) -> tuple[str, ...]:
        """3.1 is head 1 of layer 3; 3 is its MLP, or the layer."""
        return self.worth.names

    @property
    def failed(self) -> dict[str, str]:
        """Images that could not be read, and why."""
        return self.study.failed()

    def table(self) -> pandas.DataFrame:
        """A row for each part: mean changes with their 95 % intervals, what was predicted, and the control."""
        import pandas

        parts = self.findings.numbers["parts"]
        rows = []
        for name, values in parts.items():
            row: dict[str, Any] = {"part": name}
            for key, value in values.items():
                if isinstance(value, Mapping):
                    row |= {key: value["mean"], f"{key}_low": value["low"], f"{key}_high": value["high"]}
                else:
                    row[key] = value
            rows.append(row)
        return pandas.DataFrame(rows).set_index("part")

    def figure(self, name: str | None = None) -> Figure:
        """A chart: by default the first; their names are those of `findings.charts`."""
        charts = {chart.name: chart for chart in self.findings.charts}
        if name is not None and name not in charts:
            raise OptionError(f"there is no chart {name!r}; choose {one_of(charts)}")
        return charts[name or next(iter(charts))].draw()

    def least(self, count: int, rank: str = "true") -> list[str]:
        """The parts that are needed least: those whose loss lowers the log-probability (or score) least.

        `rank`: by the true change, the predicted one, or the mean size of what first order predicts for an image.
        """
        if rank not in RANKS:
            raise OptionError(f"rank={rank!r}: choose {one_of(RANKS)}")
        if not 0 < count < len(self.names):
            raise OptionError(f"prune={count}: {self.model.name} has {len(self.names)} {self.kind.what}")
        order = np.argsort(self.worth.importance(rank), kind="stable")
        return [self.names[i] for i in order[:count]]

    def save(
        self,
        file: str | Path,
        *,
        prune: int | None = None,
        remove: str | Sequence[str] | None = None,
        rank: str = "true",
    ) -> Saved:
        """Write a checkpoint without the `prune` parts that are needed least, or without those of `remove`."""
        if (prune is None) == (remove is None):
            raise OptionError("give either prune=COUNT or remove=NAMES, such as 3.1,5.0")
        names = self.least(prune, rank) if prune is not None else remove
        text = names if isinstance(names, str) else ",".join(names or ())
        pool = pool_of(self.model, self.data, "top-1")
        traces = traces_of(pool, CHECKED)
        with torch.inference_mode(False), torch.no_grad():
            trace = next(traces)
            places = find_places(self.kind.what, trace)
            chosen = parse_names(text, places)
            mean = Values(mean_values(places, before(trace, traces))) if self.kind.by == "mean" else None
            return save_pruned(file, trace, self.kind.what, self.kind.by, chosen, mean)


def before(first: Trace, others: Iterator[Trace]) -> Iterator[Trace]:
    yield first
    yield from others


def ablate(
    model: Model | nn.Module | str | Source | None,
    data: str | Path | Sequence[str | Path] | Data,
    what: str = "heads",
    *,
    by: str = "zero",
    target: Any = None,
    control: bool = True,
    maps: bool = False,
    points: int = 1,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    inputs: str | Path | Mapping[str, Any] | None = None,
    batch: int | None = None,
    shard: int | None = None,
    workers: int | None = None,
    device: str | None = None,
    out: str | Path = "vitreous-out",
) -> Ablation:
    """What a model loses without each of its attention heads, MLPs or layers.

    `what`: "heads", "mlps" or "layers". `by`: "zero", "mean" (over the data set, at each position) or "resample" (the
    value of another image). `control`: also a step of the same length in a random direction. `maps`: also how the
    class-specific map of each image changes, which takes a map for each part and image. `points`: how many gradients
    between O and Õ are averaged for the second prediction; 0: first order only. Results are stored below `out` as they
    come, and resumed by the same call.
    """
    planned, loaded, found = planned_ablation(
        as_source(model),
        data,
        {"what": what, "by": by, "control": control, "maps": maps, "points": points, "seed": seed},
        target,
        inputs=inputs,
        choice={"limit": limit, "sample": sample, "seed": seed},
        batch=batch,
        shard=shard,
        device=device,
    )
    study = carry_out(planned, Path(out), run_local, {"workers": workers, "device": device, "loaded": loaded})
    return Ablation(study, loaded, found)


def planned_ablation(
    source: Source,
    data: str | Path | Sequence[str | Path] | Data,
    options: Mapping[str, Any],
    target: Any,
    *,
    inputs: Any = None,
    choice: Mapping[str, Any],
    batch: int | None = None,
    shard: int | None = None,
    device: str | None = None,
) -> tuple[Planned, Model, Data]:
    """The plan of an ablation, its model and its images, everything checked before hours of work."""
    whole = data if isinstance(data, Data) else read_data(data)
    found = whole.with_inputs(inputs).take(choice["limit"], choice["sample"], choice["seed"]).stamped()
    kind, targets = Ablate.make(options), as_targets(target)
    if len(targets) > 1:
        raise OptionError("ablate measures one target at a time; give one")
    planned, model = plan(kind, [source], found, targets, batch=batch, shard=shard, device=device, choice=dict(choice))
    return planned, model, replace(planned.data[0])
