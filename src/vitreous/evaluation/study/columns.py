"""Columns of a shard as arrays, and what its file says of them without being read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow


def codes(column: pyarrow.ChunkedArray) -> tuple[list[Any], np.ndarray]:
    """The different values of a column in the order in which they appear, and the number of each row's; −1 for null."""
    coded = whole(column).dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def whole(column: pyarrow.ChunkedArray) -> pyarrow.Array:
    """A column in one piece."""
    found = column.combine_chunks()
    return found.combine_chunks() if hasattr(found, "chunks") else found


def table_of(column: pyarrow.ChunkedArray, width: int) -> np.ndarray:
    """Lists of as many numbers each as an array [rows, width]; nulls are left out."""
    flat = whole(column).flatten().to_numpy(zero_copy_only=False)
    return np.asarray(flat.reshape(-1, width))


def statistics_of(file: Any, column: str) -> Iterator[Any]:
    """What the file itself says of a column, part by part; None where it says nothing."""
    names = [file.schema.column(i).path for i in range(len(file.schema))]
    if column in names:
        at = names.index(column)
        yield from (file.metadata.row_group(i).column(at).statistics for i in range(file.metadata.num_row_groups))


def has_values(file: Any, column: str) -> bool:
    """Whether a column may hold anything but null."""
    told = statistics_of(file, column)
    return any(one is None or not one.has_null_count or one.num_values > 0 for one in told)


def may_hold(file: Any, column: str, value: str) -> bool:
    told = statistics_of(file, column)
    return any(one is None or not one.has_min_max or one.min <= value <= one.max for one in told)


def flat_arrays(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """The numbers of each row of a list column, without copying; empty where there are none."""
    found: list[np.ndarray] = []
    for chunk in column.chunks:
        values, ends = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
        found += [values[start:end] for start, end in pairwise(ends)]
    return found


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """Arrays one below the other; each is let go once it is copied, so that all are never held twice."""
    found = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    end = len(found)
    while parts:
        last = parts.pop()
        found[end - len(last) : end] = last
        end -= len(last)
    return found
