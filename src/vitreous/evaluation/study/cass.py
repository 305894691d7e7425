"""`study cass`: how alike every head's attention and the saliency of the class are, over a whole data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitreous.attribution import Attribution
from vitreous.evaluation.study.columns import codes, joined, table_of
from vitreous.evaluation.study.findings import Chart, Findings
from vitreous.evaluation.study.kind import Kind, Outcome, Rows, Scene
from vitreous.evaluation.study.maps import check_methods
from vitreous.evaluation.study.similarity_findings import similarity_findings
from vitreous.images.readers import from_jpeg
from vitreous.methods.attention.head_similarity import (
    class_saliency,
    head_maps,
    pool_patches,
    similarities,
    weighted_heads,
)
from vitreous.models.model import Model
from vitreous.registry import METHODS

if TYPE_CHECKING:
    import pyarrow
    from matplotlib.figure import Figure

    from vitreous.evaluation.study.read import Example


@dataclass(frozen=True)
class Cass(Kind):
    """S_lh = cos(φ, ρᵀA⁽ˡ⁾ₕ) of every layer and head; φ is |SmoothGrad| of the class."""

    name = "cass"
    summary = "Compare every head's attention with the saliency of the class."
    space: str = "patch"
    samples: int = 16
    sigma: float = 0.15
    seed: int = 0

    @classmethod
    def make(cls, options: Mapping[str, Any]) -> Cass:
        return cls(**METHODS["cass_attention"].check(dict(options)))

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        return {"cass": self.options}

    def declared(self, method: str) -> str:
        return "cass_attention"

    def columns(self) -> dict[str, pyarrow.DataType]:
        import pyarrow as pa

        return {"cass": pa.list_(pa.float32())}

    def check(self, model: Model) -> list[str]:
        return check_methods(["cass_attention"], model)

    def work(self, scene: Scene) -> dict[str, Outcome]:
        trace, target = scene.trace, scene.target
        assert target is not None
        device = trace.images.device.type
        with torch.inference_mode(False), torch.autocast(device, enabled=False), torch.no_grad():
            phi = class_saliency(trace, target, **self.options)
            scores = similarities(trace, phi, self.space)  # [B L H]
            small = phi if self.space == "patch" else pool_patches(phi, trace.layout.cells)
            parts = {i: self.parts(trace, i, small) for i, shown in enumerate(scene.shown) if shown}
            weighted = weighted_heads(trace, scores).float().cpu().numpy()
        found = scores.float().cpu().numpy()
        errors = dict.fromkeys(np.flatnonzero(~np.isfinite(found).all((1, 2))).tolist(), "a head attends to nothing")
        return {"cass": Outcome({"cass": list(found.reshape(len(found), -1))}, weighted, parts, errors=errors)}

    def parts(self, trace: Any, index: int, phi: torch.Tensor) -> np.ndarray:
        """φ and every head's map of one image, [1 + L·H h w]."""
        heads = [head_maps(trace, layer)[index] for layer in range(len(trace.attention))]
        found: np.ndarray = torch.cat([phi[index][None].float(), *heads]).float().cpu().numpy()
        return found

    def findings(self, study: Rows) -> Findings:
        layers = study.about["layers"]
        scores, groups = scores_of(study, layers)
        found = similarity_findings(scores, groups, study.seed)
        shown = [example for example in study.examples() if example.parts is not None]
        if not shown:
            return found
        first = Chart(
            "heads",
            "All heads of one image",
            f"{shown[0].name}: every head's attention beside the saliency of the class; bars show how alike they are.",
            lambda: heads_chart(shown[0], layers, study.model),
        )
        return Findings(found.lead, found.told, found.tables, [first, *found.charts], found.numbers)


def scores_of(study: Rows, layers: int) -> tuple[np.ndarray, list[str | None]]:
    """The scores of all images [N L H] and their classes; the name of a class is kept once."""
    parts, groups, known = [], list[str | None](), dict[str | None, str | None]()
    for table in study.tables(["class", "cass"]):
        good = table.filter(table["cass"].is_valid())
        if good.num_rows:
            parts.append(table_of(good["cass"], len(good["cass"][0])))
        names, which = codes(good["class"])
        names = [known.setdefault(name, name) for name in [*names, None]]  # the last is that of −1
        groups += [names[i] for i in which]
    if not parts:
        return np.zeros((0, layers, 1), np.float32), groups
    return joined(parts).reshape(len(groups), layers, -1), groups


def heads_chart(example: Example, layers: int, model: str) -> Figure:
    from vitreous.plot.heads import heads_figure

    assert example.parts is not None
    phi, heads = example.parts[0], example.parts[1:]
    heads = heads.reshape(layers, -1, *phi.shape)
    scores = np.asarray(example.row["cass"], np.float32).reshape(layers, -1)
    weighted = Attribution(
        torch.from_numpy(np.einsum("lh,lhyx->yx", scores, heads)[None].astype(np.float32)),
        "cass_attention",
        METHODS["cass_attention"].check({}),
        (example.row["target"],),
        model,
        signed=False,
    )
    return heads_figure(heads, scores, phi, weighted, from_jpeg(example.photo), title=f"CASS: {example.title}")
