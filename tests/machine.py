"""What differs from machine to machine and must decide no test: rounding, speed, free memory, the user's settings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

# Two ways to one result (another batch, another path, another instance) agree to this, as max|a−b| / max|b|.
# float32 rounds to 6e-8, and the CPU's kernels, the batch and the threads choose the order in which terms are summed.
ROUNDING = 1e-5
DIFFERENCES = 5e-5  # the same for maps that are differences of scores: they are smaller, the rounding stays as it is

PATIENCE = 300.0  # seconds after which a test calls something hung; how fast a machine is decides nothing
FREE = 8 * 10**9  # bytes of memory that every test finds free, so that batches are as long everywhere

FOREIGN = (  # variables with which a user, or a service that runs tests, changes what programs print and whom they ask
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR", "CLICOLOR_FORCE", "GITHUB_ACTIONS"),
    *("TTY_COMPATIBLE", "TTY_INTERACTIVE", "PYTHONWARNINGS", "PYTHONIOENCODING", "MATPLOTLIBRC", "MPLBACKEND"),
    *("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    *("RAY_ADDRESS", "VITREOUS_TOKEN"),
)


def forget_user() -> None:
    """Tests, and the processes they start, see none of a user's own settings, and no network."""
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ["HF_HUB_OFFLINE"] = "1"


def rare(*cases: Any) -> list[Any]:
    """Cases of a parametrised test that only `make test-all` runs."""
    import pytest

    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def until(happened: Callable[[], object], what: str) -> None:
    """Wait for something to be true, however long it takes; only what hangs is an error."""
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE:.0f} seconds"
        time.sleep(0.02)
