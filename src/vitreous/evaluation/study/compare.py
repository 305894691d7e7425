"""`study compare`: how alike the maps of different methods are, token by token, over a whole data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from vitreous.errors import OptionError
from vitreous.evaluation.study.comparison import Agreement
from vitreous.evaluation.study.comparison_findings import findings_of
from vitreous.evaluation.study.findings import Findings
from vitreous.evaluation.study.kind import Outcome, Rows, Scene, Settings
from vitreous.evaluation.study.maps import Maps, pick_methods
from vitreous.metrics.complexity.sparsity import share_of_little
from vitreous.registry import METHODS, ConfiguredMethod

if TYPE_CHECKING:
    import pyarrow


USUAL = ("attention", "cdam", "gae", "token_ablation")


@dataclass(frozen=True)
class Compare(Maps):
    """Per-token scores of several methods for the same image and target."""

    name = "compare"
    summary = "Compare methods with each other: correlations, sparsity, signs, beside published values."

    @classmethod
    def make(cls, methods: str | Sequence[str] | None = None, settings: Settings | None = None) -> Compare:
        chosen = pick_methods(methods, USUAL, settings or {})
        if len(chosen) < 2:
            raise OptionError(f"{', '.join(chosen)} alone cannot be compared; name two methods or more")
        return cls(chosen)

    def columns(self) -> dict[str, pyarrow.DataType]:
        import pyarrow as pa

        return {"sparsity": pa.float32()}

    def one(self, scene: Scene, name: str) -> Outcome:
        """One score for each patch: maps of pixels are averaged over each patch."""
        found = super().one(scene, name)
        if found.map is not None:
            found.map = by_patch(found.map, scene.trace.layout.grid)
            found.values["sparsity"] = share_of_little(torch.from_numpy(found.map).flatten(1)).tolist()
        return found

    def findings(self, study: Rows) -> Findings:
        names = list(self.methods)
        gathered = Agreement(names, study.seed)
        for stack in study.stacks():
            gathered.add_all(stack)
        configured = [ConfiguredMethod(METHODS[name], values) for name, values in self.methods.items()]
        return findings_of(gathered, [one.label for one in configured if one.options])


def by_patch(maps: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    if maps.shape[1:] == grid:
        return maps
    pooled: np.ndarray = F.interpolate(torch.from_numpy(maps)[:, None], grid, mode="area")[:, 0].numpy()
    return pooled
