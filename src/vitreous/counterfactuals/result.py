"""A counterfactual: the patches without which a model decides otherwise, and what is certain of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitreous._support.arrays import plain
from vitreous._support.files import write_whole
from vitreous._support.marks import identity_of, marked
from vitreous.attribution import Attribution
from vitreous.plot.counterfactual import counterfactual_figure
from vitreous.plot.figure import png_bytes
from vitreous.plot.save import save_either
from vitreous.plot.sheet import Sheet


@dataclass(frozen=True)
class Named:
    """A class, with its probability before and after the change."""

    index: int
    label: str
    before: float
    after: float


@dataclass(frozen=True)
class Course:
    """The probabilities of two classes after 0, 1, 2, … patches are changed."""

    source: tuple[float, ...]  # of the class that is left
    to: tuple[float, ...]  # of the wanted class; of the best other one if any will do

    @property
    def told(self) -> dict[str, list[float]]:
        return {"from": list(self.source), "to": list(self.to)}


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """A set of patches whose removal or exchange turns a decision; where none was found, the one that comes nearest."""

    source: Named  # the class that was decided for
    to: Named  # the wanted class; the best other one if any will do
    decision: Named  # the class that is decided for after the change
    patches: tuple[int, ...]  # in the order in which they are changed; numbered row by row
    grid: tuple[int, int]
    way: str  # "tokens": removed from the sequence, "pixels": hidden, "exchange": those of another image
    why: str | None  # why they are hidden, not removed
    certified: bool  # the decision turned in a run of this set alone
    minimal: bool  # no single patch can be put back without losing that: each was run
    bound: int  # no smaller set than of so many patches turns the decision: all were run
    most: int  # patches that can be changed together
    passes: int  # images that went through the network, for the search
    path: Course  # along `patches`
    curve: Course  # along the contrast map's order of all patches
    first: int | None  # how many patches of that order turn the decision; None: none do
    map: Attribution  # the contrast map
    options: Mapping[str, Any]
    shown: Image.Image = field(repr=False)  # the image after the change
    other: str | None = None  # the name of the image with which patches are exchanged

    def __len__(self) -> int:
        return len(self.patches)

    @property
    def optimal(self) -> bool:
        """Whether an exhaustive search has shown that no smaller set turns the decision."""
        return self.certified and self.bound == len(self)

    @property
    def impossible(self) -> bool:
        """Whether an exhaustive search has shown that no set of patches turns the decision."""
        return self.bound > self.most

    @property
    def undo(self) -> tuple[int, ...]:
        """The patches in the order of putting them back: the last one first; `path`, read backwards, goes with it."""
        return self.patches[::-1]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The row and the column of each patch."""
        return [divmod(patch, self.grid[1]) for patch in self.patches]

    @property
    def told(self) -> dict[str, Any]:
        """What was found, as JSON."""
        return {
            "model": self.map.model,
            "image": self.map.names[0],
            **({} if self.other is None else {"with": self.other}),
            "from": vars(self.source),
            "to": vars(self.to),
            "decision": vars(self.decision),
            "certified": self.certified,
            "minimal": self.minimal,
            "optimal": self.optimal,
            "impossible": self.impossible,
            "bound": self.bound,
            "size": len(self),
            "patches": list(self.patches),
            "undo": list(self.undo),
            "grid": list(self.grid),
            "way": self.way,
            "why": self.why,
            "path": self.path.told,
            "curve": self.curve.told,
            "first": self.first,
            "passes": self.passes,
            "method": self.map.method,
            "options": plain(dict(self.options)),
        }

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        count = f"{len(self)} of {self.grid[0] * self.grid[1]} {'patch' if len(self) == 1 else 'patches'}"
        how = {"tokens": "removed", "pixels": "hidden", "exchange": "exchanged"}[self.way]
        left = f"{self.source.label} {self.source.before:.0%} → {self.source.after:.0%}"
        if not self.certified:
            nearest = f"{left}, {self.to.label} {self.to.before:.0%} → {self.to.after:.0%}"
            return f"Not turned to {self.to.label}; nearest with {count} {how}: {nearest}"
        sure = ", the fewest possible" if self.optimal else ", none can be put back" if self.minimal else ""
        return f"{count} {how}{sure}: {left}, {self.decision.label} → {self.decision.after:.0%}"

    @property
    def mark(self) -> dict[str, Any]:
        """What its files say of it: the provenance of the map, and a hash of what all of it follows from."""
        asked = {"from": self.source.index, "to": self.to.index, "with": self.other, "options": dict(self.options)}
        identity = identity_of({"counterfactual": plain(asked), "map": self.map.identity})
        return {"identity": identity, "maps": {"map": self.map.provenance}, "counterfactual": self.told}

    def figure(self, *, cells: bool = False) -> Sheet:
        """The image, the contrast map, the image after the change, and the two probabilities along the way."""
        return counterfactual_figure(self, cells=cells)

    def save(self, path: str | Path) -> Path:
        """Save the figure (.png, .svg, .pdf, …), the arrays (.npz) or everything as JSON, each with its provenance."""
        file = Path(path)
        if file.suffix.lower() == ".json":
            write_whole(file, json.dumps(marked(self.mark), indent=2, default=str).encode())
            return file
        return save_either(file, self.figure, self.arrays, self.mark)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The contrast map, the patches in order, and the two courses [2 n]: from, to."""
        both: Sequence[tuple[str, Course]] = (("path", self.path), ("curve", self.curve))
        courses = {name: np.asarray([course.source, course.to], np.float32) for name, course in both}
        changed = np.zeros(self.grid, bool)
        changed.reshape(-1)[list(self.patches)] = True
        map = self.map.map[0].cpu().numpy()
        return {"map": map, "changed": changed, "patches": np.asarray(self.patches, np.int64), **courses}

    def _repr_png_(self) -> bytes:
        return png_bytes(self.figure())
