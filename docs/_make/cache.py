"""What takes long is made once, and again only when the package, its assets or these makers change."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from _make.places import CACHE, DOCS, ROOT, SOURCE

MAKERS = ("coverage", "figures", "inside", "notebook")
INPUTS = [(SOURCE, "**/*.py"), (SOURCE / "assets", "**/*"), (ROOT / "tests", "zoo.py")]
INPUTS += [(DOCS / "_make", f"{name}.py") for name in MAKERS]


@cache
def folder() -> Path:
    """The folder of everything made from the files as they are now; older ones are removed."""
    digest = hashlib.sha256()
    for base, pattern in INPUTS:
        for file in sorted(f for f in base.glob(pattern) if f.is_file() and "__pycache__" not in f.parts):
            digest.update(file.relative_to(ROOT).as_posix().encode())
            digest.update(file.read_bytes())
    here = CACHE / digest.hexdigest()[:16]
    for other in CACHE.glob("*"):
        if other != here:
            shutil.rmtree(other)
    here.mkdir(parents=True, exist_ok=True)
    return here


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """The file of this name, made by `make` where it is not there yet: whole, or not at all."""
    file = folder() / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        half = file.with_name(f"half-{file.name}")
        make(half)
        half.rename(file)
    return file


def kept_text(name: str, make: Callable[[], str]) -> str:
    """The same for a text."""
    return kept(name, lambda file: file.write_text(make(), encoding="utf-8")).read_text(encoding="utf-8")


def digest(file: Path) -> str:
    """A few letters that stand for what a file holds."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8]
