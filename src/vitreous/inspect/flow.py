"""What one patch reads, and who reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from vitreous._support.arrays import plain
from vitreous._support.words import percent
from vitreous.errors import OptionError
from vitreous.inspect.view import AnyModel, Seen, View, looking, numbers, span
from vitreous.models.layout import Layout
from vitreous.trace.tokens import one_head, one_token, read_by, readout_name, reads, token_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Place = tuple[int, int]  # row and column of a patch, from 0
Pixel = tuple[float | int, float | int]  # x and y
PARTS = ("itself", "neighbours", "other patches")


@dataclass(frozen=True, eq=False, kw_only=True)
class Flow(View):
    """A row and a column of A, for one layer or for all.

    reads     Aᵢⱼ, over the patches j: what the patch i takes from each
    read_by   Aⱼᵢ, over the patches j: what each takes from the patch i
    """

    name = "flow"
    patch: Place | None  # None: the tokens that the classifier reads
    layers: tuple[int, ...]
    head: str | int  # a number, or "mean"
    who: str  # "patch 7,7", or what the read-out is
    parts: tuple[str, ...]  # the patch itself, its up to 8 neighbours, other patches, then CLS, registers …
    sizes: Float[np.ndarray, "P"]  # their shares of all tokens: what even attention would give
    reads: Float[np.ndarray, "L h w"]
    read_by: Float[np.ndarray, "L h w"]
    reads_parts: Float[np.ndarray, "L P"]  # shares of what it reads; they sum to one
    read_by_parts: Float[np.ndarray, "L P"]  # shares of what is read of it
    read_by_all: Float[np.ndarray, "L"]  # Σⱼ Aⱼᵢ: 1 is as much as a token is read on average

    @property
    def where(self) -> str:
        """Which layer and head."""
        head = "mean of the heads" if self.head == "mean" else f"head {self.head}"
        return f"{span(list(self.layers), 'layer', 'layers')}, {head}"

    @property
    def said(self) -> str:
        last = self.reads_parts[-1]
        shares = ", ".join(f"{name} {percent(share)}" for name, share in zip(self.parts, last))
        times = f"{self.read_by_all[-1]:.2g}"
        return f"{self.who} reads in layer {self.layers[-1]}: {shares}; it is read {times} times as much as the average"

    @property
    def details(self) -> dict[str, Any]:
        names = ("patch", "layers", "parts", "reads_parts", "read_by_parts", "read_by_all")
        return {name: plain(getattr(self, name)) for name in names}

    def figure(self, *, cells: bool = False) -> Figure:
        """Both maps over the image with the patch marked, and the shares; a strip for each where layers are many."""
        from vitreous.plot.patch_flow import patch_flow, patch_strips

        return patch_flow(self, cells=cells) if len(self.layers) == 1 else patch_strips(self, cells=cells)


def flow(
    model: AnyModel,
    image: Any,
    *,
    patch: Place | None = None,
    at: Pixel | None = None,
    layer: int | None = -1,
    head: str | int = "mean",
) -> Flow:
    """What a patch reads (its row of A) and who reads it (its column), in one layer or in all (None).

    `patch`: row and column; `at`: a pixel (x, y) of the image; neither: the tokens that the classifier reads.
    """
    if patch is not None and at is not None:
        raise OptionError("give patch=(row, column) or at=(x, y), not both")
    with looking(model, image, "flow") as seen:
        trace, layout = seen.trace, seen.trace.layout
        place = patch_at(seen, at) if at is not None else patch
        weights = trace.readout if place is None else one_token(trace, token_of(layout, place))
        chosen = range(len(trace.attention)) if layer is None else [trace.layer_number(layer)]
        layers = [one_head(trace.layer(i) if layer is not None else trace.attention[i], head) for i in chosen]
        rows = torch.stack([reads(one, weights.to(one.wide)) for one in layers])  # [L M]
        columns = torch.stack([read_by(one, weights.to(one.wide)) for one in layers])  # [L N]
        parts = divide(layout, place)
        whole = columns.sum(1)
        return Flow(
            **seen.about,
            patch=place,
            layers=tuple(chosen),
            head=head if head == "mean" else int(head),
            who=readout_name(layout) if place is None else f"patch {place[0]},{place[1]}",
            parts=tuple(parts),
            sizes=np.array([len(tokens) / layout.tokens for tokens in parts.values()], np.float32),
            reads=numbers(trace.map(rows)),
            read_by=numbers(trace.map(columns)),
            reads_parts=shares(rows / rows.sum(1, keepdim=True), parts),
            read_by_parts=shares(columns / whole[:, None].clamp_min(1e-30), parts),
            read_by_all=numbers(whole),
        )


def shares(rows: torch.Tensor, parts: dict[str, list[int]]) -> Float[np.ndarray, "L P"]:
    """How much of each row lies in each part."""
    return numbers(torch.stack([rows[:, tokens].sum(1) for tokens in parts.values()], 1))


def divide(layout: Layout, place: Place | None) -> dict[str, list[int]]:
    """All tokens, by what they are to this patch; the read-out has no neighbours."""
    names = token_names(layout)
    patches = layout.patch_tokens
    special: dict[str, list[int]] = {}
    for token, name in names.items():
        special.setdefault("registers" if name.startswith("register") else name, []).append(token)
    if place is None:
        return {"patches": list(patches), **special}
    (h, w), (row, column) = layout.grid, place
    around = [(y, x) for y in range(row - 1, row + 2) for x in range(column - 1, column + 2)]
    near = [layout.token(y, x) for y, x in around if 0 <= y < h and 0 <= x < w and (y, x) != place]
    own = token_of(layout, place)
    far = [token for token in patches if token != own and token not in near]
    found = dict(zip(PARTS, ([own], near, far)))
    return {name: tokens for name, tokens in found.items() if tokens} | special


def token_of(layout: Layout, place: Place) -> int:
    (h, w), (row, column) = layout.grid, place
    if not (0 <= row < h and 0 <= column < w):
        raise OptionError(f"patch {row},{column} is out of range: there are rows 0 to {h - 1} and columns 0 to {w - 1}")
    return layout.token(row, column)


def patch_at(seen: Seen, at: Pixel) -> Place:
    """The patch that holds a pixel of the image as it was given."""
    (width, height), (left, top, right, bottom) = seen.picture
    x, y = at
    if not (0 <= x < width and 0 <= y < height):
        raise OptionError(f"at {x:g},{y:g} is out of range: the image has {width}×{height} pixels")
    h, w = seen.trace.layout.grid
    row, column = (y - top) / (bottom - top) * h, (x - left) / (right - left) * w
    if not (0 <= row < h and 0 <= column < w):
        seen_part = f"x from {max(0, left):.0f} to {right:.0f} and y from {max(0, top):.0f} to {bottom:.0f}"
        raise OptionError(f"at {x:g},{y:g} is cut off before the model: it sees {seen_part}")
    return int(row), int(column)
