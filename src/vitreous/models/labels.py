"""Names of classes: read from files, and found by any of their names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitreous.errors import ModelError, one_line


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
    low = text.lower()
    return next((i for i, label in labels.items() if low == label.lower() or low in names(label)), None)


def names(label: str) -> list[str]:
    return [part.strip().lower() for part in label.split(",")]
