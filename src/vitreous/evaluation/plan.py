"""What is to be measured: methods and metrics with their options, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitreous.errors import InputError, OptionError, TargetError, nearest
from vitreous.evaluation.results import Asked, Plan, describes
from vitreous.images.dataset import Data
from vitreous.registry import METHODS, METRICS, ConfiguredMethod, Metric
from vitreous.trace.apply import find_method

CONTROLS = ("random", "centre")
USUAL = ("token_deletion", "deletion", "insertion", "sparsity")
USUAL_WITH_MASKS = ("pointing_game", "energy_in_mask")

Methods = str | ConfiguredMethod | Sequence[str | ConfiguredMethod]
Settings = Mapping[str, Mapping[str, Any]]


def make_plan(
    methods: Methods | None,
    metrics: str | Sequence[str] | None,
    options: Settings,
    data: Data,
    target: Any = None,
    seed: int = 0,
) -> Plan:
    """Check what is asked for before anything runs; controls are always included."""
    if not len(data):
        raise InputError(f"{data.source}: no image is left to measure")
    if target == "label" and all(sample.label is None for sample in data.samples):
        raise TargetError(f"{data.source}: has no labels; give class folders, a CSV with a label column, or top-1")
    measured, notes = pick_metrics(metrics, data.masked)
    asked = pick_methods(methods)
    known = {one.name for one in measured} | {one for one in asked if isinstance(one, str)}
    for name in options:
        if name not in known:
            raise OptionError(f"options for {name}: it is not among the methods and metrics asked for by name")
    return Plan(
        {
            label_of(one): Asked(*find_method(one, options.get(one, {}) if isinstance(one, str) else {}))
            for one in asked
        },
        {one.name: Asked(one, one.check(options.get(one.name, {}))) for one in sorted(measured, key=describes)},
        target,
        seed,
        notes,
    )


def pick_methods(given: Methods | None) -> list[str | ConfiguredMethod]:
    """Each method once, or once with each choice of its options; the controls come first."""
    asked = [one.name for one in METHODS.values() if one.quick] if given is None else listed_methods(given)
    if asked == ["all"]:
        asked = list(METHODS)
    found: dict[str, str | ConfiguredMethod] = {}
    for one in (*CONTROLS, *asked):
        label = label_of(one)
        if not_registered(one) and found.get(label, one) != one:
            raise OptionError(f"two methods are called {label}; give each a name: from_captum(…, name=…)")
        found[label] = one
    return list(found.values())


def not_registered(one: str | ConfiguredMethod) -> bool:
    """Whether a method is known only to who made it: it cannot be found by its name."""
    return isinstance(one, ConfiguredMethod) and one.name not in METHODS


def label_of(one: str | ConfiguredMethod) -> str:
    """As it is told from the others in a table; an unknown name is refused."""
    return one.label if isinstance(one, ConfiguredMethod) else METHODS[one].name


def by_name(given: Methods | None, options: Settings) -> tuple[list[str] | None, Settings]:
    """Names, and the options of those that came with their own: for what keeps one row for each method."""
    if given is None:
        return None, options
    asked = dict.fromkeys(listed_methods(given))
    names = [one if isinstance(one, str) else one.name for one in asked]
    own = {one.name: one.options for one in asked if isinstance(one, ConfiguredMethod)}
    for one in filter(not_registered, asked):
        raise OptionError(f"a study keeps methods by their names, and {one!r} has none; use run_leaderboard")
    for name in names:
        if names.count(name) > 1 or (name in own and name in options):
            raise OptionError(f"{name} is asked for with several choices of options; give one")
    return names, {**options, **own}


def pick_metrics(given: str | Sequence[str] | None, masked: bool) -> tuple[list[Metric], tuple[str, ...]]:
    """Choose metrics by name or family; those that need masks are left out without masks unless named."""
    if given is None:
        usual = (*USUAL, *USUAL_WITH_MASKS) if masked else USUAL
        return [METRICS[name] for name in usual if name in METRICS], ()
    chosen: dict[str, Metric] = {}
    without: list[str] = []
    families = {one.family for one in METRICS.values()}
    for word in listed(given):
        if word not in METRICS and word not in (*families, "all"):
            raise OptionError(f"unknown metric {word!r}{nearest(word, [*METRICS, *families, 'all'])}")
        several = word not in METRICS
        for one in [m for m in METRICS.values() if word in (m.name, "all") or (several and word == m.family)]:
            if one.masks and not masked and not several:
                raise InputError(f"{one.name} needs to know where the object is: give masks, or a CSV with mask or box")
            if one.masks and not masked:
                without.append(one.name)
            else:
                chosen[one.name] = one
    if not chosen:
        raise InputError(f"{', '.join(without)}: all need masks; give masks, or a CSV with mask or box")
    note = f"without {', '.join(dict.fromkeys(without))}: no image has a mask"
    return list(chosen.values()), (note,) if without else ()


def listed_methods(given: Methods) -> list[str | ConfiguredMethod]:
    if isinstance(given, ConfiguredMethod):
        return [given]
    words = [given] if isinstance(given, str) else given
    return [name for word in words for name in ([word] if isinstance(word, ConfiguredMethod) else listed(word))]


def listed(given: str | Sequence[str]) -> list[str]:
    words = given.split(",") if isinstance(given, str) else given
    found = [word.strip().replace("-", "_") for word in words if word.strip()]
    if not found:
        raise OptionError("name at least one method and one metric; see: vitreous methods, vitreous metrics")
    return found
