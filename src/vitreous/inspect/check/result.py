"""The result of a check, as text of 80 columns and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vitreous._support.words import count_of, finite
from vitreous.errors import one_line

WIDTH = 80
State = Literal["right", "wrong", "bug", "unknown"]
Status = Literal["works", "refused", "wrong", "bug", "not tried"]


@dataclass(frozen=True)
class Verified:
    """One comparison with another way to get the same result."""

    what: str
    state: State  # wrong: they disagree; bug: it raised; unknown: it could not be compared, see `note`
    error: float | None = None  # relative to the largest value, or in `unit`
    limit: float | None = None  # the largest error that counts as right
    note: str = ""
    unit: str = ""
    each: tuple[float, ...] = ()  # the error of each layer or patch, where there are several
    traceback: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Tried:
    """One method on this model."""

    method: str
    family: str
    status: Status
    reason: str = ""  # why it does not work
    shape: tuple[int, ...] | None = None  # of one map
    forwards: float | None = None  # seconds, in forward passes of the same images
    options: Mapping[str, Any] = field(default_factory=dict)  # those that differ from the defaults
    traceback: str | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Check:
    """What is known of one model: what the layout run found, what was verified, which methods work.

    `print(check)` shows it, `check.as_dict()` is the same for programs. `problems` is empty if nothing disagrees.
    """

    model: str
    facts: Mapping[str, Any]  # library, size, channels, precision, device, parameters, outputs, versions
    layout: Mapping[str, Any]  # the fields of the `Layout`; empty if the layout run failed
    verified: tuple[Verified, ...]
    methods: tuple[Tried, ...]
    failure: str | None = None  # why the model could not be run at all

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, one line each."""
        found = [self.failure] if self.failure else []
        found += [f"{one.what}: {told(one)}" for one in self.verified if one.state in ("wrong", "bug")]
        found += [f"{one.method}: {one.reason}" for one in self.methods if one.status in ("wrong", "bug")]
        return tuple(found)

    @property
    def right(self) -> bool:
        """Whether nothing disagrees and nothing crashed."""
        return not self.problems

    def of(self, status: Status) -> tuple[str, ...]:
        """The methods with this status."""
        return tuple(one.method for one in self.methods if one.status == status)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        given = {
            "model": self.model,
            "right": self.right,
            "problems": self.problems,
            **self.facts,
            "failure": self.failure,
            "layout": self.layout,
            "verified": [asdict(one) for one in self.verified],
            "methods": [asdict(one) for one in self.methods],
        }
        return {name: plain(value) for name, value in given.items()}

    def __str__(self) -> str:
        parts = [self.title(), self.layout_text(), self.verified_text(), self.methods_text(), self.end()]
        return "\n\n".join("\n".join(part) for part in map(list, parts) if part)

    # ----------------------------------------------------------------------------------------------------- as text

    def title(self) -> Iterator[str]:
        facts = self.facts
        yield f"{self.model} ({facts['library']})"
        size = "×".join(map(str, facts["size"]))
        words = [f"{size} images of {count_of(facts['channels'], 'channel')}"]
        words += [f"{facts['precision']} on {facts['device']}", count_of(facts["parameters"], "parameter")]
        if facts["outputs"] is not None:
            words.append(count_of(facts["outputs"], "class").replace("classs", "classes"))
            if not facts["classifier"]:
                words[-1] = f"{facts['outputs']:,} outputs that are no classes"
            words.append(str(facts["form"]))
        yield from folded(", ".join(words), 2)
        yield from folded(", ".join(f"{name} {version}" for name, version in facts["versions"].items()), 2)

    def layout_text(self) -> list[str]:
        if not self.layout:
            return []
        wide = max(map(len, self.layout)) + 4
        rows = [(name, shown(value)) for name, value in self.layout.items()]
        return ["Layout, as found by one run", *(row for n, v in rows for row in folded(v, wide, f"  {n}".ljust(wide)))]

    def verified_text(self) -> list[str]:
        if not self.verified:
            return []
        lines = ["Verified: another way gives the same, up to rounding"]
        for one in self.verified:
            head = {"right": "ok", "wrong": "WRONG", "bug": "BUG", "unknown": "–"}[one.state]
            lines += folded(f"{one.what}: {told(one)}", 9, f"  {head}".ljust(9))
        return lines

    def methods_text(self) -> list[str]:
        lines, wide = [], max((len(one.method) for one in self.methods), default=0) + 2
        works = [one for one in self.methods if one.status == "works"]
        if works:
            lines += [
                f"Methods that work: {len(works)} of {len(self.methods)}",
                f"  {'':{wide}}{'map':11}forward passes",
            ]
        for one in works:
            size, cost = "×".join(map(str, one.shape or ())), "" if one.forwards is None else f"{one.forwards:.1f}"
            used = ", ".join(f"{name}={value}" for name, value in one.options.items())
            head = f"  {one.method:{wide}}{size:11}{cost:>6}  "
            lines += folded(f"with {used}", len(head), head) if used else [head.rstrip()]
        for status, title in (
            ("wrong", "Methods that give a WRONG map"),
            ("bug", "Methods that FAIL: this is a bug of vitreous, please report it"),
            ("refused", "Methods that are refused"),
            ("not tried", "Methods that were not tried"),
        ):
            lines += self.reasons(status, title, bool(lines))
        return lines

    def reasons(self, status: str, title: str, below: bool) -> list[str]:
        """The methods of one status, those with the same reason together."""
        groups: dict[str, list[str]] = {}
        for one in self.methods:
            if one.status == status:
                groups.setdefault(one.reason.removeprefix(f"{one.method} "), []).append(one.method)
        lines = [*[""] * below, title] if groups else []
        for reason, names in groups.items():
            lines += folded(", ".join(names), 2)
            lines += folded(reason, 6)
        return lines

    def end(self) -> Iterator[str]:
        if self.right:
            yield "no disagreement found"
        for problem in self.problems:
            yield from folded(problem, 9, "problem: ")


def told(one: Verified) -> str:
    """Error, limit and note in words."""
    error = limit = ""
    if one.error is not None and (one.error or not one.unit):
        error = f"{one.error:.2f} {one.unit}" if one.unit else f"error {one.error:.1e}"
        limit = "" if one.limit is None or one.state == "right" else f" (at most {one.limit:.1g})"
    return "; ".join(part for part in (error + limit, one.note) if part) or "exact"


def folded(text: str, indent: int, head: str = "") -> list[str]:
    """Text within the width; the first line begins with `head`."""
    first = head or " " * indent
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False) or [
        first.rstrip()
    ]


def shown(value: Any) -> str:
    """A value of the layout; of a long list its ends."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {shown(part)}" for name, part in value.items()) or "–"
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [shown(part) for part in value]
        if not parts:
            return "–"
        return ", ".join(parts) if len(parts) <= 4 else f"{parts[0]}, {parts[1]}, …, {parts[-1]} ({len(parts)})"
    return one_line(ValueError(value), 200) if isinstance(value, str) else str(value)


def plain(value: Any) -> Any:
    """JSON values: lists for tuples, None for NaN and infinity, text for what JSON does not know."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(part) for part in value]
    return str(value)
