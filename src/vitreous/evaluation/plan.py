"""What is to be measured: methods and metrics with their options, checked before anything runs.

gae · gae:start_layer=2 · srg:of=logit:steps=5      a method or metric with options of its own, as a row or a column
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitreous.declaration import parse_value
from vitreous.errors import InputError, OptionError, TargetError, nearest
from vitreous.evaluation.results import Asked, Plan, describes
from vitreous.images.dataset import Data
from vitreous.registry import METHODS, METRICS, ConfiguredMethod, Method, Metric

CONTROLS = ("random", "centre")
USUAL = ("token_deletion", "token_deletion:of=logit", "srg", "srg:of=logit", "deletion", "insertion", "sparsity")
USUAL_WITH_MASKS = ("pointing_game", "energy_in_mask")

Methods = str | ConfiguredMethod | Sequence[str | ConfiguredMethod]
Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Column:
    """A metric with options of its own."""

    declared: Metric
    own: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def masks(self) -> bool:
        return self.declared.masks


def make_plan(
    methods: Methods | None,
    metrics: str | Sequence[str] | None,
    options: Settings,
    data: Data,
    target: Any = None,
    seed: int = 0,
) -> Plan:
    """Check what is asked for before anything runs; controls are always included.

    `options` belong to every row and column of a name; what one has of its own wins.
    """
    if not len(data):
        raise InputError(f"{data.source}: no image is left to measure")
    if target == "label" and all(sample.label is None for sample in data.samples):
        raise TargetError(f"{data.source}: has no labels; give class folders, a CSV with a label column, or top-1")
    columns, notes = pick_metrics(metrics, data.masked)
    rows = pick_methods(methods)
    known = {one.name for one in columns} | {spelled(one)[0] for one in rows if isinstance(one, str)}
    for name in options:
        if name not in known:
            raise OptionError(f"options for {name}: it is not among the methods and metrics asked for by name")
    found: dict[str, Asked[Method]] = {}
    for label, asked in (as_row(one, options) for one in rows):
        first = found.setdefault(label, asked)
        if first.declared is not asked.declared:
            raise OptionError(f"two methods are called {label}; give each a name: from_captum(…, name=…)")
        if first.values != asked.values:
            raise OptionError(f"two rows would be named {label!r}; give their options with the methods alone")
    columns.sort(key=lambda one: describes(one.declared))
    return Plan(found, dict(as_column(one, options) for one in columns), target, seed, notes)


def as_row(one: str | ConfiguredMethod, options: Settings) -> tuple[str, Asked[Method]]:
    """The label of a method, by which it is told from the others in a table, and all its options."""
    if isinstance(one, ConfiguredMethod):
        return one.label, Asked(one.method, dict(one.values))
    name, own = spelled(one)
    declared, usual = METHODS[name], options.get(name, {})
    return declared.label({**usual, **own}, usual), Asked(declared, declared.check({**usual, **own}))


def as_column(one: Column, options: Settings) -> tuple[str, Asked[Metric]]:
    declared, usual = one.declared, options.get(one.name, {})
    return declared.label({**usual, **one.own}, usual), Asked(declared, declared.check({**usual, **one.own}))


def pick_methods(given: Methods | None) -> list[str | ConfiguredMethod]:
    """Each method once, or once with each choice of its options; the controls come first."""
    asked = [one.name for one in METHODS.values() if one.quick] if given is None else listed_methods(given)
    if asked == ["all"]:
        asked = list(METHODS)
    for one in asked:
        as_row(one, {})  # raises if there is no such method
    return list(dict.fromkeys((*CONTROLS, *asked)))


def refuse_unregistered(asked: Iterable[str | ConfiguredMethod]) -> None:
    """Raise if a method is known only to who made it: a study, on other machines too, finds methods by their names."""
    for one in asked:
        if isinstance(one, ConfiguredMethod) and one.name not in METHODS:
            raise OptionError(f"a study keeps methods by their names, and {one!r} has none; use run_leaderboard")


def chosen_methods(given: Methods) -> list[str | ConfiguredMethod]:
    """Every method that is named; of a spelled choice of options, the configured method."""
    asked = listed_methods(given)
    return list(METHODS) if asked == ["all"] else [configured(one) for one in asked]


def by_name(given: Methods | None, options: Settings) -> tuple[list[str] | None, Settings]:
    """Names, and the options of those that came with their own: for what keeps one row for each method."""
    if given is None:
        return None, options
    asked = [configured(one) for one in dict.fromkeys(listed_methods(given))]
    names = [one if isinstance(one, str) else one.name for one in asked]
    own = {one.name: one.options for one in asked if isinstance(one, ConfiguredMethod)}
    refuse_unregistered(asked)
    for name in names:
        if names.count(name) > 1 or (name in own and name in options):
            raise OptionError(f"{name} is asked for with several choices of options; give one")
    return names, {**options, **own}


def pick_metrics(given: str | Sequence[str] | None, masked: bool) -> tuple[list[Column], tuple[str, ...]]:
    """Choose metrics by name or family; those that need masks are left out without masks unless named."""
    if given is None:
        usual = map(spelled, (*USUAL, *USUAL_WITH_MASKS) if masked else USUAL)
        return [Column(METRICS[name], own) for name, own in usual if name in METRICS], ()
    chosen: dict[tuple[str, str], Column] = {}
    without: list[str] = []
    families = {one.family for one in METRICS.values()}
    for word, own in map(spelled, listed(given)):
        if word not in METRICS and word not in (*families, "all"):
            raise OptionError(f"unknown metric {word!r}{nearest(word, [*METRICS, *families, 'all'])}")
        several = word not in METRICS
        for one in [m for m in METRICS.values() if word in (m.name, "all") or (several and word == m.family)]:
            if one.masks and not masked and not several:
                raise InputError(f"{one.name} needs to know where the object is: give masks, or a CSV with mask or box")
            if one.masks and not masked:
                without.append(one.name)
            else:
                chosen[one.name, repr(own)] = Column(one, own)
    if not chosen:
        raise InputError(f"{', '.join(without)}: all need masks; give masks, or a CSV with mask or box")
    note = f"without {', '.join(dict.fromkeys(without))}: no image has a mask"
    return list(chosen.values()), (note,) if without else ()


# ------------------------------------------------------------------------------------------------- how they are spelled


def spelled(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of "gae:start_layer=2"."""
    name, *parts = re.split(r":(?=\s*[\w-]+\s*=)", text)
    if ":" in name:
        raise OptionError(f"{text}: write NAME:OPTION=VALUE, e.g. rollout:discard=0.9")
    pairs = (part.partition("=") for part in parts)
    return name.strip(), {key.strip().replace("-", "_"): parse_value(value.strip()) for key, _, value in pairs}


def configured(one: str | ConfiguredMethod) -> str | ConfiguredMethod:
    """A method with options of its own as `vitreous.methods.NAME(…)` makes it; a bare name is unchanged."""
    if isinstance(one, ConfiguredMethod):
        return one
    name, own = spelled(one)
    return METHODS[name].configured(**own) if own else METHODS[name].name


def listed_methods(given: Methods) -> list[str | ConfiguredMethod]:
    if isinstance(given, ConfiguredMethod):
        return [given]
    words = [given] if isinstance(given, str) else given
    return [name for word in words for name in ([word] if isinstance(word, ConfiguredMethod) else listed(word))]


def listed(given: str | Sequence[str]) -> list[str]:
    """Names, with their options if they have any; in names - is _."""
    words = split(given) if isinstance(given, str) else given
    parts = [word.strip().partition(":") for word in words if word.strip()]
    if not parts:
        raise OptionError("name at least one method and one metric; see: vitreous methods, vitreous metrics")
    return [name.replace("-", "_") + colon + rest for name, colon, rest in parts]


def split(text: str) -> Iterable[str]:
    """The parts between commas; the commas of a list of numbers, or in brackets, belong to a value."""
    found: list[str] = []
    for part in text.split(","):
        inside = bool(found) and found[-1].count("[") > found[-1].count("]")
        number = bool(found) and "=" in found[-1] and re.match(r"\s*[-+.\d]", part) is not None
        if inside or number:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found
