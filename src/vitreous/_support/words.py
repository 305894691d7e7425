"""Numbers as text, numbers as JSON values, and names without their spelling."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np


def percent(share: float | np.floating[Any]) -> str:
    """0.4%, 12%."""
    return f"{share:.1%}" if 0 < share < 0.00995 else f"{share:.0%}"


def number(value: float, digits: int = 2) -> str:
    """0.44, −0.10, 0.00 for a tiny negative value; a dash for NaN."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−") if math.isfinite(value) else "–"


def span(ends: Sequence[float] | np.ndarray, digits: int = 2) -> str:
    """An interval: [0.10, 0.32]; [undefined] if an end is not finite."""
    known = all(math.isfinite(end) for end in ends)
    return f"[{number(ends[0], digits)}, {number(ends[1], digits)}]" if known else "[undefined]"


def share(part: float) -> str:
    """12 %, 99.9 %: 100 % and 0 % only for exactly all and none."""
    if part in (0, 1):
        return f"{100 * part:.0f} %"
    percent = min(max(100 * part, 0.1), 99.9)
    return f"{percent:.0f} %" if 1 <= percent <= 99 else f"{percent:.1f} %"


def count_of(count: int, thing: str) -> str:
    """1 image, 1,200 images."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def spoken(names: Sequence[str], word: str = "and") -> str:
    """a, b and c."""
    return f" {word} ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def finite(value: Any) -> Any:
    """Convert a number or an array to JSON values: floats or lists of them, None for NaN and infinity."""
    if isinstance(value, np.ndarray) and value.ndim:
        return [finite(one) for one in value]
    return float(value) if math.isfinite(value) else None


@lru_cache(2**16)
def plain(text: str) -> str:
    """Lower case, one space for each run of spaces, underscores and hyphens: Egyptian_Mau is egyptian mau."""
    return " ".join(re.split(r"[\s_\u2010-\u2015-]+", unicodedata.normalize("NFC", text).casefold())).strip()
