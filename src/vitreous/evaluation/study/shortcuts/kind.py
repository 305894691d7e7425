"""`study shortcuts`, first phase: the parts of every image that speak for its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous._support.memory import out_of_memory
from vitreous.errors import OptionError, Unsupported
from vitreous.evaluation.study.findings import Findings
from vitreous.evaluation.study.kind import Kind, Outcome, Rows, Scene, Settings
from vitreous.evaluation.study.maps import check_methods, pick_methods
from vitreous.evaluation.study.shortcuts.design import design_of
from vitreous.evaluation.study.shortcuts.effects import Effects
from vitreous.evaluation.study.shortcuts.options import Options, checked
from vitreous.evaluation.study.shortcuts.parts import parts_of, usual_layer
from vitreous.evaluation.study.shortcuts.tell import shortcut_findings
from vitreous.models.model import Model
from vitreous.models.output import Form, Meaning
from vitreous.registry import METHODS
from vitreous.trace.apply import class_methods
from vitreous.trace.parse_target import parse
from vitreous.trace.target import Class

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Shortcuts(Kind):
    """Spurious cues: what a class is recognised by that other images of the class do without.

    1. Each image's map of its label (or best class) gives its parts: the most relevant patches, with their features.
    2. The parts of a class are clustered; the number of clusters follows from how stable they are.
    3. A second run over the images removes each cluster's tokens, beside as many random ones, and inserts its patches
       into images of other classes, beside as many of the patches that the class is otherwise recognised by.
    4. score = mean over images x of other classes of p(class | x with the cue) − p(class | x with ordinary parts of the
       class, as many). The largest is rank 1; an alarm needs four tests at `level`, corrected over clusters.

    `study.frame("clusters")` has a row for each cluster: model, cluster, class, label, rank, score, score_low,
    score_high, p, alarm, images, parts, stability, share, accuracy_change, confidence_change (…_low, …_high, of
    removal less that of random tokens), inserted, ordinary, random, flips, here, elsewhere, outside, a_tsi, m_tsi,
    image_names, places. `study.second` holds the rows of the second run.
    """

    name = "shortcuts"
    summary = "Find spurious cues: clusters of relevant patches, removed, inserted into other classes and ranked."
    masked = True
    phases = 2
    single = True
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, methods: str | Sequence[str] | None, settings: Settings) -> Shortcuts:
        given = {name: values for name, values in settings.items() if name != cls.name}
        usual = class_methods()[0]
        chosen = pick_methods(methods, [usual.name], given)
        if len(chosen) != 1:
            raise OptionError(f"the study shortcuts takes one method, not {', '.join(chosen)}")
        declared = METHODS[next(iter(chosen))]
        if not declared.targeted or declared.family == "control":
            raise OptionError(f"{declared.name} explains no class; try {usual.name}, gae or token_ablation")
        return cls(chosen, checked(settings.get(cls.name, {})).model_dump(mode="json"))

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        return self.chosen

    @property
    def method(self) -> str:
        return next(iter(self.chosen))

    @property
    def settings(self) -> Options:
        return checked(self.own)

    def columns(self) -> dict[str, pyarrow.DataType]:
        import pyarrow as pa

        numbers = pa.list_(pa.float32())
        return {"places": pa.list_(pa.int32()), "shares": numbers, "inside": numbers, "outside": pa.float32()}

    def check(self, model: Model) -> list[str]:
        layout = model.layout
        if model.form is not Form.VECTOR:
            said = f"the study shortcuts asks for the class of a whole image, and {model.name} has {model.form.value}"
            raise Unsupported(f"{said}; study maps and study leaderboard take such models")
        if not layout.layers or len(layout.blocks) != layout.layers:
            why = layout.obstacle if not layout.layers else layout.no_blocks
            said = f"the study shortcuts clusters the patch features of a block, and {model.name} {why}"
            raise Unsupported(f"{said}; study maps stores its maps")
        if model.meaning is Meaning.VALUE and model.classifier:
            raise Unsupported(f"the study shortcuts asks for classes, and {model.name} predicts values; try study maps")
        layer = self.settings.layer
        if layer is not None and not -layout.layers <= layer < layout.layers:
            raise OptionError(f"layer {layer} is out of range: {model.name} has layers 0 to {layout.layers - 1}")
        for name in self.settings.classes or ():
            if not isinstance(parse(int(name) if name.isdigit() else name, model, model.outputs or 0), Class):
                raise OptionError(f"classes={name!r}: give names or numbers of classes")
        return check_methods(self.chosen, model)

    def layer(self, layers: int) -> int:
        given = self.settings.layer
        return usual_layer(layers) if given is None else given % layers

    def work(self, scene: Scene) -> dict[str, Outcome]:
        return {self.method: self.outcome(scene)}

    def outcome(self, scene: Scene) -> Outcome:
        """The parts of a batch, or why there are none; out-of-memory errors are passed on."""
        values, layer = dict(self.chosen[self.method]), self.layer(scene.trace.layout.layers)
        try:
            found = parts_of(scene, METHODS[self.method], values, layer, self.settings.parts)
        except Exception as error:
            if out_of_memory(error) and len(scene.trace) > 1:
                raise
            return Outcome(error=error)
        columns: dict[str, Sequence[Any]] = {"places": found.places, "shares": found.shares}
        columns |= {"inside": found.inside, "outside": found.outside}
        return Outcome(columns, np.asarray(found.map, np.float32), found.features, errors=found.errors)

    def next_phase(self, study: Rows) -> Kind | None:
        each = {name: study.of(name) for name in study.models}
        layers = {name: self.layer(rows.about["layers"]) for name, rows in each.items()}
        return Effects({name: design_of(self.settings, layers[name], rows) for name, rows in each.items()})

    def findings(self, study: Rows) -> Findings:
        return shortcut_findings(self.settings, study)
