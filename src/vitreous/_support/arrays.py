"""Arrays in .npz files with the mark that says what made them, and values as JSON."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitreous._support.files import write_whole
from vitreous._support.marks import MEMBER, marked, upgraded
from vitreous.errors import InputError, OptionError, one_line


def save_arrays(path: Path, arrays: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Write an .npz file with its mark, atomically: an interrupt leaves no partial file."""
    write_whole(path, npz_bytes(arrays, told))


def npz_bytes(arrays: Mapping[str, Any], told: Mapping[str, Any]) -> bytes:
    """The content of an .npz file of arrays with the mark."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays, **{MEMBER: json.dumps(marked(told))})
    return buffer.getvalue()


def read_map(path: Path, name: str | None) -> tuple[np.ndarray, dict[str, Any]]:
    """The maps of one method [B … …] in a file of any version, and their provenance."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            mark = upgraded(json.loads(str(stored[MEMBER])), path)
            maps = (mark or {})["maps"]
            if "map" in maps and name is None:
                return stored["map"], maps["map"]
            name = next(iter(maps)) if name is None and len(maps) == 1 else name
            if name not in maps:
                known = list(maps)
                raise OptionError(f"{path} holds {', '.join(known)}; choose one: Attribution.load(path, {known[0]!r})")
            array = stored[name]
            return (array if name == "map" else array[None]), maps[name]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, OptionError | InputError):
            raise
        raise InputError(f"{path} is not an .npz file of maps written by vitreous ({one_line(error, 80)})") from None


def plain(value: Any) -> Any:
    """Convert a value to JSON types: tensors and arrays become lists, anything unknown its string."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
