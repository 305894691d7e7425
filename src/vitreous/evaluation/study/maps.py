"""`study maps`: any methods on a whole data set, their raw maps stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitreous._support.memory import out_of_memory
from vitreous.attribute import attribute
from vitreous.errors import OptionError, Unsupported
from vitreous.evaluation.study.findings import Findings, Table
from vitreous.evaluation.study.kind import Kind, Outcome, Rows, Scene, Settings
from vitreous.models.model import Model
from vitreous.plot.colour import is_control
from vitreous.registry import METHODS
from vitreous.trace.apply import faults, is_aimed, why_not
from vitreous.trace.shared import Chosen, in_groups, pays
from vitreous.trace.trace import Trace

if TYPE_CHECKING:
    import pyarrow


USUAL = ("attention", "rollout", "gae", "cdam")


@dataclass(frozen=True)
class Maps(Kind):
    """One map for each image, target and method."""

    name = "maps"
    summary = "Compute maps of a whole data set and store them."
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def make(cls, methods: str | Sequence[str] | None = None, settings: Settings | None = None) -> Maps:
        return cls(pick_methods(methods, USUAL, settings or {}))

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        return self.chosen

    @property
    def targeted(self) -> bool:  # type: ignore[override]
        return any(METHODS[name].targeted for name in self.chosen)

    def columns(self) -> dict[str, pyarrow.DataType]:
        return {}

    def check(self, model: Model) -> list[str]:
        return check_methods(self.chosen, model)

    def begin(self, trace: Trace) -> None:
        if pays(self.declarations, alone=True):
            trace.share()
        if trace.shared is None:
            trace.whole()

    def work(self, scene: Scene) -> dict[str, Outcome]:
        return self.work_all([scene])[0]

    def work_all(self, scenes: Sequence[Scene]) -> list[dict[str, Outcome]]:
        """Methods that read the same forward pass together; maps that do not depend on the target are made once."""
        trace, found = scenes[0].trace, [dict[str, Outcome]() for _ in scenes]
        for group in in_groups(self.declarations):
            for scene, made in zip(scenes, found):
                for name in group:
                    once = made is not found[0] and not is_aimed(trace.model, METHODS[name])
                    made[name] = found[0][name] if once else self.one(scene, name)
            trace.release()
        return [{name: made[name] for name in self.chosen} for made in found]

    @property
    def declarations(self) -> Chosen:
        return {name: (METHODS[name], values) for name, values in self.chosen.items()}

    def one(self, scene: Scene, name: str) -> Outcome:
        return run_method(scene, name, self.chosen[name])

    def findings(self, study: Rows) -> Findings:
        return summary(study, self)


def pick_methods(
    given: str | Sequence[str] | None, usual: Sequence[str], settings: Settings
) -> dict[str, dict[str, Any]]:
    """The chosen methods with all their options, checked; options for a method that was not chosen are an error."""
    from vitreous.evaluation.plan import listed

    words = list(usual) if given is None else listed(given)
    names = list(METHODS) if words == ["all"] else [METHODS[name].name for name in words]
    for name in settings:
        if name not in names:
            raise OptionError(f"options for {name}: it is not among the methods asked for ({', '.join(names)})")
    return {name: METHODS[name].check(dict(settings.get(name, {}))) for name in dict.fromkeys(names)}


def check_methods(chosen: Collection[str], model: Model) -> list[str]:
    """Notes about methods that cannot work on this model; an error if none can."""
    reasons = {name: why_not(model.layout, model.name, METHODS[name.partition(" ")[0]]) for name in chosen}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    if all(name in refused or is_control(name) for name in chosen) and refused:
        raise Unsupported(next(iter(refused.values())))
    return [f"without {name}: {reason}" for name, reason in refused.items()]


def run_method(scene: Scene, name: str, values: Mapping[str, Any]) -> Outcome:
    """One method's maps of a batch, or why there are none; out-of-memory errors are passed on."""
    declared = METHODS[name]
    try:
        target = scene.target if is_aimed(scene.trace.model, declared) else None
        made = attribute(scene.trace, declared, target, dict(values), strict=False)
        return Outcome(map=made.map.cpu().numpy(), errors=faults(declared, made.map))
    except Exception as error:
        if out_of_memory(error) and len(scene.trace) > 1:
            raise
        return Outcome(error=error)


def summary(study: Rows, kind: Kind) -> Findings:
    """How many maps each method has, and how many failed."""
    counts = study.counts()
    rows = [(name, str(done), str(failed)) for name, (done, failed) in counts.items()]
    done = sum(done for done, _ in counts.values())
    return Findings(
        f"{done} maps of {study.images} images, {len(kind.methods)} method{'s' if len(kind.methods) > 1 else ''}.",
        tables=[Table("What is stored", ("method", "maps", "failed"), rows)],
        numbers={"maps": {name: done for name, (done, _) in counts.items()}},
    )
