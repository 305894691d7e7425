"""A result as a file: its figure, or the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitreous._support.arrays import save_arrays
from vitreous._support.files import FIGURES
from vitreous.errors import OptionError
from vitreous.plot.figure import save_figure
from vitreous.plot.sheet import Sheet


def save_either(
    path: str | Path, figure: Callable[[], Sheet], arrays: Mapping[str, Any], mark: Mapping[str, Any]
) -> Path:
    """Save a figure, or the numbers behind it (.npz), each with its mark."""
    file = Path(path)
    if file.suffix.lower() == ".npz":
        save_arrays(file, dict(arrays), dict(mark))
    elif file.suffix.lower() in FIGURES:
        save_figure(figure(), file, mark)
    else:
        raise OptionError(f"{file}: cannot save as {file.suffix or 'a file without suffix'}; use .npz or .png")
    return file
