"""Two models compared on one data set: what was found, and whether it stays within the limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous._support.files import write_whole
from vitreous.evaluation.diff.junit import write_junit
from vitreous.evaluation.diff.limits import Check, Counted, Estimate, Limits, checks, count
from vitreous.evaluation.diff.page import body, scatter
from vitreous.evaluation.diff.pairs import Gathered, Shared, gather
from vitreous.evaluation.diff.told import described, lead, sentences, tables
from vitreous.evaluation.study.findings import Chart, Findings
from vitreous.evaluation.study.read import Study

if TYPE_CHECKING:
    import pandas

IMAGES = "images.parquet"
ABOUT_CHART = (
    "One point for each image: how far apart the two maps are, against what noise explains: the largest distance under "
    "A's augmentations (or the median under B's, if it is larger). Above the line the reason moved. Orange: the answer "
    "is another one."
)


@dataclass(frozen=True, eq=False)
class Difference:
    """The comparison of a model A with a model B; `passed` is what the exit code says."""

    study: Study
    gathered: Gathered
    counted: Counted
    limits: Limits
    begun: float = field(default_factory=time.time)

    @classmethod
    def of(cls, study: Study, shared: Shared, limits: Limits) -> Difference:
        one, other = (study.of(name) for name in study.models)
        found = gather(shared, one, other)
        return cls(study, found, count(found.pairs, study.seed), limits)

    def __repr__(self) -> str:
        return f"Difference({self.title}, {len(self.gathered.pairs)} images, {'passed' if self.passed else 'failed'})"

    @property
    def title(self) -> str:
        return " → ".join(self.study.models)

    @property
    def checks(self) -> list[Check]:
        return checks(self.counted, self.limits)

    @property
    def passed(self) -> bool:
        """Whether there are images to tell and no check failed."""
        return bool(self.gathered.pairs) and all(check.verdict != "failed" for check in self.checks)

    @property
    def numbers(self) -> dict[str, Any]:
        """Everything that was measured, as JSON can hold it."""
        return {
            "passed": self.passed,
            "checks": [
                {"name": one.name, "limit": one.limit, "verdict": one.verdict, **one.found.told} for one in self.checks
            ],
            **{name: told(value) for name, value in vars(self.counted).items()},
            "mcnemar": self.counted.pvalue,
            "images": len(self.gathered.pairs),
            "augmentations": self.gathered.copies,
            "limits": asdict(self.limits),
        }

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each image: both answers, and every measure of its two maps."""
        import pandas as pd

        return pd.DataFrame([pair.row() for pair in self.gathered.pairs])

    def findings(self) -> Findings:
        found, done = self.counted, self.checks
        manifest = self.study.manifest
        names = [described(one, manifest["origins"].get(one["name"], {})) for one in manifest["models"]]
        said = sentences(found, self.gathered, done, names)
        shown = tables(found, self.gathered, done)
        first = lead(done, found, len(self.gathered.pairs))
        draw = partial(scatter, self.gathered.pairs)
        charts = [Chart("distances", "Distance of the maps, and their noise", ABOUT_CHART, draw)]
        page = partial(body, self.study, self.gathered.pairs, first, said, shown, draw, ABOUT_CHART)
        return Findings(first, said, shown, charts if self.gathered.pairs else [], self.numbers, page)

    def save_junit(self, file: str | Path) -> Path:
        """Write the checks as JUnit XML."""
        write_junit(Path(file), self.title, self.checks, self.gathered.pairs, time.time() - self.begun)
        return Path(file)

    def save_images(self, folder: Path | None = None) -> Path:
        """Write the table of all images as Parquet."""
        import io

        buffer = io.BytesIO()
        self.to_pandas().to_parquet(buffer)
        place = (folder or self.study.folder) / IMAGES
        write_whole(place, buffer.getvalue())
        return place


def told(value: Any) -> Any:
    if isinstance(value, Estimate):
        return value.told
    if isinstance(value, Sequence):
        return [told(one) for one in value]
    return value
