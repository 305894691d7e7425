"""What all studies share: a kind defines what is computed for a batch and what the rows of all batches show."""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from vitreous._support.arrays import plain
from vitreous.errors import OptionError, nearest
from vitreous.images.masks import Mask
from vitreous.metrics.pool import Pool
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace

if TYPE_CHECKING:
    import pyarrow

    from vitreous.evaluation.study.findings import Findings
    from vitreous.models.model import Model

HOMES = {  # imported when they are used
    "cass": "vitreous.evaluation.study.cass.Cass",
    "spread": "vitreous.evaluation.study.spread.Spread",
    "compare": "vitreous.evaluation.study.compare.Compare",
    "leaderboard": "vitreous.evaluation.study.leaderboard.Leaderboard",
    "maps": "vitreous.evaluation.study.maps.Maps",
    "shortcuts": "vitreous.evaluation.study.shortcuts.kind.Shortcuts",
}
SECOND = {"effects": "vitreous.evaluation.study.shortcuts.effects.Effects"}  # second phases of others
OWN = {  # with a command of their own
    "ablate": "vitreous.inspect.ablate.study.Ablate",
    "diff": "vitreous.evaluation.diff.kind.Diff",
}
Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Scene:
    """One batch: its images, what is explained in them, where the object is, and which are kept as examples."""

    trace: Trace
    target: Target | None  # fixed
    masks: Sequence[Mask | None]
    shown: Sequence[bool]
    timed: bool = False  # is it worth a little more work to learn what methods cost?
    pool: Pool | None = None  # all images of the study, if the kind needs others than those of the batch
    numbers: Sequence[int] = ()  # which of them these are
    model: str = ""  # its name in the study


@dataclass(eq=False)
class Outcome:
    """The result of one method on one batch."""

    values: dict[str, Sequence[Any]] = field(default_factory=dict)  # by column, one for each image
    map: np.ndarray | None = None  # [B h w]
    parts: dict[int, np.ndarray] = field(default_factory=dict)  # of examples, what the figures need, [… h w]
    error: Exception | None = None  # it failed on the whole batch
    errors: dict[int, str] = field(default_factory=dict)  # … or on some images
    seconds: float = float("nan")  # of the batch
    told: dict[str, Any] = field(default_factory=dict)  # of the whole shard, as JSON can hold it


@runtime_checkable
class Rows(Protocol):
    """The finished rows of one model in a study (`vitreous.Study`): what a kind asks of them."""

    @property
    def model(self) -> str: ...
    @property
    def about(self) -> dict[str, Any]: ...
    @property
    def manifest(self) -> dict[str, Any]: ...
    @property
    def images(self) -> int: ...
    @property
    def seed(self) -> int: ...
    def to_arrow(self, columns: Sequence[str] | None = None) -> pyarrow.Table: ...
    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pyarrow.Table]: ...
    def stacks(self) -> Iterator[np.ndarray]: ...
    def examples(self) -> Sequence[Any]: ...
    def parts(self) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]: ...
    def counts(self) -> dict[str, tuple[int, int]]: ...
    def seconds(self) -> dict[str, tuple[float, int]]: ...
    def told(self) -> dict[str, Any]: ...
    def of(self, model: str) -> Rows: ...
    @property
    def models(self) -> list[str]: ...
    @property
    def second(self) -> Rows | None: ...


class Kind(ABC):
    """A frozen dataclass whose fields are its options, as JSON can hold them."""

    name: ClassVar[str]
    summary: ClassVar[str]
    shard: ClassVar[int] = 64  # images whose results are stored at a time
    targeted: ClassVar[bool] = True  # does it explain something, rather than only look?
    masked: ClassVar[bool] = False
    pooled: ClassVar[bool] = False  # does it put images of different batches together?
    phases: ClassVar[int] = 1  # how often it goes through the images
    single: ClassVar[bool] = False  # does it take one target only?
    examples: ClassVar[int] = 24  # images whose photos are kept

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(dataclasses.asdict(self))  # type: ignore[call-overload]
        return found

    @property
    @abstractmethod
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        """What each image has a row for, with all options."""

    @abstractmethod
    def columns(self) -> dict[str, pyarrow.DataType]:
        """The values of a row, beside what all studies have."""

    @abstractmethod
    def work(self, scene: Scene) -> dict[str, Outcome]:
        """Every method on one batch."""

    def begin(self, trace: Trace) -> None:
        """Make the forward pass with which the work on a batch begins."""
        trace.whole()

    def work_all(self, scenes: Sequence[Scene]) -> list[dict[str, Outcome]]:
        """The same for several targets of one batch."""
        return [self.work(scene) for scene in scenes]

    @abstractmethod
    def findings(self, study: Rows) -> Findings:
        """The findings from the rows of one model."""

    def next_phase(self, study: Rows) -> Kind | None:
        """What is computed once all rows are there, in a second run over the images; None if there is nothing."""
        return None

    def shown_images(self, model: str, count: int) -> Collection[int]:
        """The numbers of the images whose photos are kept: some, from the first to the last."""
        return {round(place) for place in np.linspace(0, count - 1, min(self.examples, count))}

    def together(self, studies: Sequence[Rows]) -> dict[str, Findings]:
        """The findings of every model; a kind that compares models has its own."""
        return {study.model: self.findings(study) for study in studies}

    def aim(self, number: int, label: int | str | None) -> int | str | None:
        """The class to explain in an image whose label this is; None: the model's answer."""
        return label

    def complete(self, table: pyarrow.Table) -> pyarrow.Table:
        """Add columns that depend on all rows together."""
        return table

    def declared(self, method: str) -> str:
        """The name under which the method of a row is declared."""
        return method.partition(" ")[0]

    def check(self, model: Model) -> list[str]:
        """Raise where this cannot work on a model; otherwise return notes for the reader."""
        return []


def find_kind(name: str) -> type[Kind]:
    homes = HOMES | SECOND | OWN
    if name not in homes:
        raise OptionError(f"unknown study {name!r}{nearest(name, HOMES)}; known: {', '.join(HOMES)}")
    home, _, made = homes[name].rpartition(".")
    found: type[Kind] = getattr(importlib.import_module(home), made)
    return found
