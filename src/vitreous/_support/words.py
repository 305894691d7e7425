"""Numbers in words."""

from __future__ import annotations

from typing import Any

import numpy as np


def percent(share: float | np.floating[Any]) -> str:
    """0.4%, 12%."""
    return f"{share:.1%}" if 0 < share < 0.00995 else f"{share:.0%}"
