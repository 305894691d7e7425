"""The rows of `vitreous diff`: of each model and image the answer, the map of one shared target, and its noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous._support.memory import out_of_memory
from vitreous._support.words import finite
from vitreous.attribute import attribute, told_shares
from vitreous.errors import OptionError, TargetError, Unsupported, explained
from vitreous.evaluation.diff.augment import maps_under
from vitreous.evaluation.diff.limits import read_limits
from vitreous.evaluation.diff.pairs import Shared
from vitreous.evaluation.diff.result import Difference
from vitreous.evaluation.study.findings import Findings
from vitreous.evaluation.study.kind import Kind, Outcome, Rows, Scene
from vitreous.evaluation.study.maps import check_methods, summary
from vitreous.evaluation.study.read import Study
from vitreous.metrics.case import Case, make_case, measure
from vitreous.models.model import Model
from vitreous.models.output import Form, Meaning
from vitreous.registry import METHODS, METRICS
from vitreous.trace.apply import faults
from vitreous.trace.placing import best_classes
from vitreous.trace.target import Class, Target
from vitreous.trace.trace import Trace

if TYPE_CHECKING:
    import pyarrow

NO_CLASS = -1
PERMANENT = (Unsupported, TargetError, OptionError)


@dataclass(frozen=True)
class Diff(Kind):
    """The target is the label where it is known, else the answer of the first model; both explain the same."""

    name = "diff"
    summary = "Compare two checkpoints: the same answers, for the same reasons?"
    shard = 32
    examples = 1000
    method: str
    values: dict[str, Any] = field(default_factory=dict)
    metric: str | None = "srg"
    metric_values: dict[str, Any] = field(default_factory=dict)
    classes: Sequence[int] | None = None  # the second model's number of each class of the first; None: the same
    seen: Sequence[Sequence[float]] | None = None  # what both models see, in the view of each; None: all of it
    seed: int = 0
    aims: Sequence[int | None] = ()  # of the second model: the class to explain in each image; no option

    @property
    def options(self) -> dict[str, Any]:
        found = super().options
        del found["aims"]
        return found

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        return {self.method: self.values}

    def columns(self) -> dict[str, pyarrow.DataType]:
        import pyarrow as pa

        number = pa.float32()
        return {
            "answer": pa.string(),
            "answer_probability": number,
            "answer_map": pa.list_(number),
            "faithfulness": pa.float64(),
            "missing": pa.string(),
        }

    def check(self, model: Model) -> list[str]:
        refuse(model)
        return check_methods([self.method], model)

    def aim(self, number: int, label: int | str | None) -> int | str | None:
        aimed = self.aims[number] if self.aims else label
        return None if aimed == NO_CLASS else aimed

    def work(self, scene: Scene) -> dict[str, Outcome]:
        assert scene.target is not None
        try:
            return {self.method: self.rows(scene, scene.target)}
        except Exception as error:
            if out_of_memory(error) and len(scene.trace) > 1:
                raise
            return {self.method: Outcome(error=error)}

    def rows(self, scene: Scene, target: Target) -> Outcome:
        trace, declared = scene.trace, METHODS[self.method]
        best = best_classes(trace)
        case = make_case(trace, declared, self.values, target, self.explain(trace, target))
        noise = maps_under(trace, self.seed, lambda own: self.patches(own, target))
        made = Outcome(map=case.patches.cpu().numpy(), errors=faults(declared, case.map))
        made.parts = dict(enumerate(noise.cpu().numpy()))
        told = told_shares(Class(tuple(best)), trace.output, trace)
        made.values = {"answer": told["labels"], "answer_probability": told["probabilities"]}
        made.values["answer_map"] = self.answers(trace, target, best)
        made.values |= self.faithfulness(case)
        for i, number in enumerate(scene.numbers if self.aims else ()):
            if self.aims[number] == NO_CLASS:
                made.errors[i] = f"{trace.model.name} has no class for what the first model sees in it"
        return made

    def explain(self, trace: Trace, target: Target) -> Any:
        return attribute(trace, METHODS[self.method], target, dict(self.values), strict=False).map

    def patches(self, trace: Trace, target: Target) -> Any:
        """A map with one value for each patch, whatever the method returns."""
        return Case(trace, self.explain(trace, target), target).patches

    def answers(self, trace: Trace, target: Target, best: list[int]) -> list[np.ndarray | None]:
        """The maps of the model's own answers, where these are not the target."""
        other = [target.of_image(i).class_numbers(1) != [own] for i, own in enumerate(best)]
        if not any(other):
            return [None] * len(best)
        maps = self.patches(trace, Class(tuple(best))).cpu().numpy()
        return [one.ravel() if differs else None for one, differs in zip(maps, other)]

    def faithfulness(self, case: Case) -> dict[str, Sequence[Any]]:
        """How faithful each map is, by the metric; or why it cannot be told."""
        count = len(case.trace)
        if self.metric is None:
            return {"faithfulness": [None] * count}
        try:
            measured = measure(METRICS[self.metric], case, self.metric_values)
        except PERMANENT as error:
            return {"faithfulness": [None] * count, "missing": [explained(error)] * count}
        return {"faithfulness": finite(measured.value.double().numpy())}

    def findings(self, study: Rows) -> Findings:
        return summary(study, self)

    def together(self, studies: Sequence[Rows]) -> dict[str, Findings]:
        """The two models are compared as soon as both have rows of the same images."""
        if len(studies) != 2:
            return super().together(studies)
        one, other = studies
        assert isinstance(one, Study) and isinstance(other, Study)
        made = Difference.of(Study(one.store), self.shared, read_limits(one.folder))
        return {made.title: made.findings()}

    @property
    def shared(self) -> Shared:
        return Shared(self.classes, self.seen)

    def aimed(self, aims: Sequence[int | None]) -> Diff:
        """The same for the second model, which explains what the first did."""
        known = None if self.classes is None else list(self.classes)
        return replace(self, aims=[one if one is None or known is None else known[one] for one in aims])


def refuse(model: Model) -> None:
    """Raise unless the model gives one answer to an image: a class."""
    _ = model.layout
    said = f"vitreous diff compares the answers of image classifiers; {model.name} "
    if model.form is not Form.VECTOR:
        remedy = "compare its maps for a target instead: vitreous study maps"
        raise Unsupported(f"{said}has {model.form.value}; {remedy}")
    if model.meaning is Meaning.VALUE or (model.outputs or 0) < 2:
        what = "returns values" if model.meaning is Meaning.VALUE else "has one output"
        raise Unsupported(f"{said}{what}; compare its maps instead: vitreous study maps --target neuron:0")
