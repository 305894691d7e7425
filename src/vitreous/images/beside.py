"""Arrays that travel with the images of a data set, one row for each: what a network gets beside them."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.errors import InputError, one_line

Arrays = Mapping[str, np.ndarray]


def read_inputs(given: str | Path | Mapping[str, Any], images: int) -> dict[str, np.ndarray]:
    """Arrays by name, from a file .npz or as they are; each with one row for each image, or one for all."""
    arrays = read_file(Path(given)) if isinstance(given, str | Path) else as_arrays(given)
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) not in (1, images):
            rows = "no rows" if array.ndim == 0 else f"{len(array)} rows"
            raise InputError(f"inputs[{name!r}] has {rows} for {images} images; give one row for each, or one for all")
    return arrays


def read_file(file: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        said = one_line(error, 100)
        raise InputError(f"{file}: is no file of inputs ({said}); write one: numpy.savez(FILE, name=array)") from error


def as_arrays(given: Any) -> dict[str, np.ndarray]:
    if not isinstance(given, Mapping):
        raise InputError(f"inputs= takes a dictionary {{name: array}} or a file .npz, not a {type(given).__name__}")
    return {name: np.asarray(getattr(value, "detach", lambda value=value: value)()) for name, value in given.items()}


def rows_of(inputs: Arrays, numbers: Sequence[int]) -> dict[str, np.ndarray]:
    """The rows of some of the images."""
    return {name: array if len(array) == 1 else array[list(numbers)] for name, array in inputs.items()}


def told_of(inputs: Arrays) -> str:
    """A hash of names and values."""
    seen = hashlib.blake2b(digest_size=8)
    for name, array in sorted(inputs.items()):
        seen.update(f"{name} {array.dtype} {array.shape}".encode())
        seen.update(np.ascontiguousarray(array).tobytes())
    return seen.hexdigest()
