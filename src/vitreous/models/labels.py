"""Names of classes: read from files, and found by any of their names."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from vitreous._support.words import plain
from vitreous.errors import ModelError, one_line, one_of

EXACT, WORDS, BEGINNING, INSIDE = range(4)  # how well a text fits a name, the best first


def name_classes(labels: Sequence[str] | Mapping[int, str]) -> dict[int, str]:
    pairs = labels.items() if isinstance(labels, Mapping) else enumerate(labels)
    return {int(index): str(label) for index, label in pairs}


def read_labels(path: str | Path) -> dict[int, str]:
    """Read labels from a file: one per line, or JSON (a list, {"0": "cat"} or {"cat": 0})."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        return json_labels(json.loads(text)) if str(path).lower().endswith(".json") else name_classes(lines_of(text))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such labels file") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        hint = 'one label per line, or JSON: a list, {"0": "cat"} or {"cat": 0}'
        raise ModelError(f"{path}: contains no labels ({one_line(error, 80)}); write {hint}") from None


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.rstrip().splitlines()]


def json_labels(found: Any) -> dict[int, str]:
    """A list, a dictionary either way round, or ImageNet's {"0": ["n01440764", "tench"]}."""
    if isinstance(found, dict) and all(isinstance(value, int) for value in found.values()):
        found = {index: label for label, index in found.items()}
    if not isinstance(found, dict | list):
        raise TypeError(f"a JSON {type(found).__name__}")
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    return {int(index): str(label[-1] if isinstance(label, list) else label) for index, label in pairs}


def find_exact(text: str, labels: Mapping[int, str]) -> int | None:
    """The class that has this among its names."""
    return ClassNames(labels).find(text)


class ClassNames:
    """Classes by any of their names: as written but for the case, else with hyphens and underscores for spaces."""

    def __init__(self, labels: Mapping[int, str]) -> None:
        self._labels = labels

    @cached_property
    def _written(self) -> dict[str, int]:
        return self._by(str.lower)

    @cached_property
    def _plain(self) -> dict[str, int]:
        return self._by(plain)

    def _by(self, spelled: Callable[[str], str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for number, label in self._labels.items():
            for name in (label, *label.split(",")):
                found.setdefault(spelled(name.strip()), number)
        return found

    def written(self, text: str) -> int | None:
        return self._written.get(text.strip().lower())

    def find(self, text: str) -> int | None:
        found = self.written(text)
        return self._plain.get(plain(text)) if found is None and plain(text) else found


def names(label: str) -> list[str]:
    return [plain(part) for part in label.split(",")]


def fit(text: str, name: str) -> int | None:
    """How well a text fits a name: the whole of it, whole words, the beginning of a word, inside a word; or not."""
    asked, held = plain(text), plain(name)
    if not asked or asked not in held:
        return None
    if asked == held:
        return EXACT
    if re.search(rf"(?<!\w){re.escape(asked)}(?!\w)", held):
        return WORDS
    return BEGINNING if re.search(rf"(?<!\w){re.escape(asked)}", held) else INSIDE


def fitting(text: str, labels: Mapping[int, str]) -> list[tuple[int, int, str]]:
    """How well each class fits a text, its number, and the name that fits best; the best first."""
    found = []
    for number, label in labels.items():
        parts = [part.strip() for part in label.split(",")]
        fits = [(grade, i) for i, part in enumerate(parts) if (grade := fit(text, part)) is not None]
        whole = fit(text, label)
        if fits:
            grade, i = min(fits)
            found.append((grade, number, parts[i]))
        elif whole is not None:  # words on both sides of a comma
            found.append((whole, number, label))
    return sorted(found)


def suggest(text: str, labels: Mapping[int, str], most: int = 3) -> str:
    """`; did you mean a, b or c?`: names that hold the text, whole words first, then names of similar spelling."""
    held = list(dict.fromkeys(name for _, _, name in fitting(text, labels)))[:most]
    every = {plain(part): part.strip() for label in labels.values() for part in label.split(",")}
    close = [every[low] for low in difflib.get_close_matches(plain(text), list(every), n=most, cutoff=0.5)]
    found = list(dict.fromkeys((*held, *close)))[:most]
    return f"; did you mean {one_of(found)}?" if found else ""
