"""`study spread`: how widely a model looks, image by image, and where in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.attribution import attribute
from vitreous.errors import OptionError, Unsupported, one_of
from vitreous.evaluation.study.columns import codes, joined, table_of
from vitreous.evaluation.study.findings import Findings
from vitreous.evaluation.study.kind import Kind, Outcome, Rows, Scene
from vitreous.evaluation.study.maps import check_methods
from vitreous.evaluation.study.spread_findings import SpreadExample, spread_findings, spread_levels
from vitreous.images.readers import from_jpeg
from vitreous.methods.attention.head_similarity import head_maps
from vitreous.models.model import Model
from vitreous.registry import METHODS
from vitreous.trace.apply import between_all

if TYPE_CHECKING:
    import pyarrow


AGGREGATES = ("mean", "min", "max", "rollout")


@dataclass(frozen=True)
class Spread(Kind):
    """H = −Σ p log p of the read-out's attention over the patches, aggregated over heads and layers."""

    name = "spread"
    summary = "Sort a data set by how widely the model looks: the entropy of its attention, in four levels."
    targeted = False
    aggregate: str = "mean"

    @classmethod
    def make(cls, options: Mapping[str, Any]) -> Spread:
        for name in options:
            if name != "aggregate":
                raise OptionError(f"the study spread has no option {name!r}; it has aggregate")
        aggregate = options.get("aggregate", "mean")
        if aggregate not in AGGREGATES:
            raise OptionError(f"aggregate={aggregate!r}: give {one_of(AGGREGATES)}")
        return cls(aggregate)

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        return {"attention": self.options}

    def columns(self) -> dict[str, pyarrow.DataType]:
        import pyarrow as pa

        return {"entropy": pa.float32(), "layer_entropy": pa.list_(pa.float32())}

    def check(self, model: Model) -> list[str]:
        said = between_all(model.layout, model.name, "study spread")
        if said is not None:
            raise Unsupported(said)
        return check_methods(["attention"], model)

    def work(self, scene: Scene) -> dict[str, Outcome]:
        trace = scene.trace
        device = trace.images.device.type
        with torch.inference_mode(False), torch.autocast(device, enabled=False), torch.no_grad():
            count = len(trace.attention)
            layers = torch.stack([head_maps(trace, i).float().mean(1) for i in range(count)], 1)  # [B L h w]
            rolled = attribute(trace, METHODS["rollout"], None, METHODS["rollout"].check({})).map
            panels = torch.cat([layers, aggregated(layers, rolled)], 1)  # [B L+4 h w]
            found = entropies(panels)  # [B L+4]
        place = count + AGGREGATES.index(self.aggregate)
        made, values = panels.cpu().numpy(), found.cpu().numpy()
        parts = {i: made[i] for i, shown in enumerate(scene.shown) if shown}
        told: dict[str, Any] = {"entropy": list(values[:, place]), "layer_entropy": list(values[:, :count])}
        return {"attention": Outcome(told, made[:, place], parts)}

    def complete(self, table: pyarrow.Table) -> pyarrow.Table:
        """Add each image's level among all images of its model."""
        import pyarrow as pa

        entropy = table["entropy"].to_numpy().astype(np.float64)
        names, which = codes(table["model"])
        levels = np.zeros(len(entropy), np.int64)
        for i in range(len(names)):
            levels[which == i] = spread_levels(entropy[which == i])
        return table.append_column("level", pa.array(levels, pa.int64(), mask=levels == 0))

    def findings(self, study: Rows) -> Findings:
        entropy, layers = entropies_of(study, study.about["layers"])
        h, w = study.about["grid"]
        examples = [
            SpreadExample(one.name, from_jpeg(one.photo), one.parts, float(one.row["entropy"]))
            for one in study.examples()
            if one.parts is not None
        ]
        return spread_findings(entropy, layers, h * w, examples)


def entropies_of(study: Rows, layers: int) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N L"]]:
    """The entropy of every image that has one, and of each layer."""
    parts, each = [np.zeros(0)], [np.zeros((0, layers))]
    for table in study.tables(["entropy", "layer_entropy"]):
        good = table.filter(table["entropy"].is_valid())
        parts.append(good["entropy"].to_numpy().astype(np.float64))
        each.append(table_of(good["layer_entropy"], layers).astype(np.float64))
    return joined(parts), joined(each)


def aggregated(layers: Float[Tensor, "B L h w"], rolled: Float[Tensor, "B h w"]) -> Float[Tensor, "B 4 h w"]:
    """Mean, minimum and maximum over the layers, and rollout."""
    return torch.stack([layers.mean(1), layers.amin(1), layers.amax(1), rolled], 1)


def entropies(maps: Float[Tensor, "B P h w"]) -> Float[Tensor, "B P"]:
    """−Σ p log p, in nats, of each map as shares of its sum."""
    shares = maps.flatten(2).double()
    shares = shares / shares.sum(-1, keepdim=True)
    found: Tensor = torch.special.entr(shares).sum(-1)
    return found.float()
