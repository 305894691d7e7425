"""Rollout while more and more of the smallest attentions are set to zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from vitreous._support.progress import steps
from vitreous._support.words import percent
from vitreous.attribute import attribute
from vitreous.errors import OptionError
from vitreous.inspect.layers import check_fusion
from vitreous.inspect.view import AnyModel, View, looking, numbers
from vitreous.registry import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIOS = tuple(i / 20 for i in range(20))  # 0 … 0.95


@dataclass(frozen=True, eq=False, kw_only=True)
class Discard(View):
    """A map of rollout for each share of attention that is discarded."""

    name = "discard"
    moves = True
    heads: str
    ratios: tuple[float, ...]
    maps: Float[np.ndarray, "R h w"]

    @property
    def kept(self) -> Float[np.ndarray, "R"]:
        """The smallest share of the patches that holds half of each map."""
        shares = -np.sort(-self.maps.reshape(len(self.maps), -1).astype(np.float64), 1)
        summed = shares.cumsum(1) / np.maximum(shares.sum(1, keepdims=True), 1e-30)
        return np.asarray(((summed < 0.5).sum(1) + 1) / shares.shape[1], np.float32)

    @property
    def said(self) -> str:
        first, last = self.kept[0], self.kept[-1]
        ends = self.ratios[0], self.ratios[-1]
        return (
            f"half of the map lies on {percent(first)} of the patches where {percent(ends[0])} is discarded, "
            f"on {percent(last)} where {percent(ends[1])} is"
        )

    @property
    def details(self) -> dict[str, Any]:
        return {"ratios": list(self.ratios), "kept": self.kept.tolist()}

    def figure(self, *, cells: bool = False) -> Figure:
        """All maps on one sheet."""
        from vitreous.plot.discarded import contact_sheet

        return contact_sheet(self, cells=cells)

    def frames(self, *, cells: bool = False) -> list[Image.Image]:
        """An image for each share, all of one size and with the same colours."""
        from vitreous.plot.discarded import frames

        return frames(self, cells=cells)

    def save(self, path: str | Path, figure: Figure | None = None) -> Path:
        """An animation (.gif), a sheet of all maps (.png, .svg, …) or the numbers (.npz)."""
        file = Path(path)
        if file.suffix.lower() != ".gif":
            return super().save(file, figure)
        from vitreous.plot.discarded import save_gif

        save_gif(self.frames(), file, self.mark)
        return file


def discard(
    model: AnyModel, image: Any, *, ratios: Sequence[float | int] = RATIOS, heads: str = "mean", residual: float = 0.5
) -> Discard:
    """Rollout for each of these shares of discarded attention.

    ρᵀ Π_l (r·I + (1−r)·trim(Ā⁽ˡ⁾, share)), rows normalised
    """
    check_fusion(heads)
    declared, shares = METHODS["rollout"], tuple(sorted({float(ratio) for ratio in ratios}))
    if not shares:
        raise OptionError("ratios: name at least one share of attention to discard, e.g. 0.9")
    values = [declared.check({"heads": heads, "discard": share, "residual": residual}) for share in shares]
    with looking(model, image, "discard") as seen:
        trace = seen.trace
        maps = [attribute(trace, declared, None, one).map[0] for one in steps(values, len(values), "shares")]
        stacked = np.stack([numbers(one) for one in maps])
        return Discard(**seen.about, heads=heads, ratios=shares, maps=stacked)
