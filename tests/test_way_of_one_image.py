"""How many modules a reader meets who follows `vitreous explain cat.jpg --method gae` from call to call.

Counted are modules of the package with a function that is called after the imports. Files of at most 350 lines, one
file for each library and one mode for each job pull the other way, as do provenance, names that overwrite nothing and
the index of the folder, and what a network gets beside its images; the number may fall, not grow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import Run

import vitreous

MOST = 86
PACKAGE = Path(vitreous.__file__).parent


@contextmanager
def modules_met() -> Iterator[set[str]]:
    """The modules whose functions are called meanwhile; class bodies and what runs at import do not count."""
    met: set[str] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or frame.f_code.co_name == "<module>" or PACKAGE not in file.parents:
            return
        if "__qualname__" in frame.f_locals or importing(frame):
            return
        if file.suffix == ".py":  # not templates
            met.add(file.relative_to(PACKAGE).as_posix())

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield met
    finally:
        sys.setprofile(before)


def importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and PACKAGE in Path(frame.f_code.co_filename).parents:
            return True
        frame = frame.f_back
    return False


@pytest.mark.slow
def test_few_modules(run: Run, cat: Path) -> None:
    with modules_met() as met:
        run("explain", cat, "--method", "gae", "--out", "maps")
    assert Path("maps/cat.png").is_file()
    assert len(met) <= MOST, f"{len(met)} modules: {sorted(met)}"
