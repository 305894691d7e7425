"""Reads a study: its tables, maps, examples and findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.errors import InputError, nearest
from vitreous.evaluation.study.findings import Findings
from vitreous.evaluation.study.kind import Kind, find_kind
from vitreous.evaluation.study.shard import schema_of
from vitreous.evaluation.study.store import Store, find_store

if TYPE_CHECKING:
    import pandas
    import pyarrow

ARRAYS = ("map", "map_shape", "parts", "parts_shape", "photo")  # columns that are not read unless they are wanted
KEYS = ("model", "image", "label", "class", "prediction", "asked", "target", "method", "error")


def open_study(path: str | Path) -> Study:
    """Open a study by its own folder, or the last one in the folder given as `--out`."""
    return Study(find_store(path))


@dataclass(frozen=True, eq=False)
class Example:
    """An example image, and the arrays that its figure needs."""

    name: str
    photo: bytes
    parts: np.ndarray | None
    row: dict[str, Any]

    @property
    def title(self) -> str:
        return f"{self.name}: {self.row['class'] or 'class ' + str(self.row['target'])}"


@dataclass(frozen=True, eq=False)
class Study:
    """The finished part of a study, for all its models or one."""

    store: Store
    model: str = ""  # all of them

    def __repr__(self) -> str:
        done, all = len(self.numbers), len(self.mine)
        state = "finished" if self.finished else f"{done} of {all} shards"
        return f"Study({self.kind.name}, {', '.join(self.models)}, {self.images} images, {state})"

    # ---------------------------------------------------------------------------------------------- what it is

    @cached_property
    def kind(self) -> Kind:
        made = find_kind(self.manifest["study"])
        return made(**self.manifest["options"])

    @property
    def manifest(self) -> dict[str, Any]:
        """Options, models, data, versions."""
        return self.store.manifest

    @property
    def folder(self) -> Path:
        return self.store.folder

    @property
    def models(self) -> list[str]:
        every = [about["name"] for about in self.manifest["models"]]
        return [name for name in every if self.model in ("", name)]

    @property
    def about(self) -> dict[str, Any]:
        """The manifest's entry of its (first) model."""
        found: dict[str, Any] = next(m for m in self.manifest["models"] if self.model in ("", m["name"]))
        return found

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self.manifest["data"]["images"])

    @property
    def seed(self) -> int:
        return int(self.manifest["choice"].get("seed", 0))

    def of(self, model: str) -> Study:
        """The part of one model."""
        names = [about["name"] for about in self.manifest["models"]]
        if model not in names:
            raise InputError(f"{self.folder}: has no model {model!r}{nearest(model, names)}")
        return replace(self, model=model)

    @property
    def mine(self) -> range:
        """The shards of this model, or of all."""
        every, count = int(self.manifest["shards"]), len(self.manifest["models"])
        if not self.model:
            return range(every)
        place = [about["name"] for about in self.manifest["models"]].index(self.model)
        return range(place * every // count, (place + 1) * every // count)

    @cached_property
    def numbers(self) -> list[int]:
        """The numbers of the finished shards."""
        return [number for number in self.store.done() if number in self.mine]

    @property
    def finished(self) -> bool:
        return len(self.numbers) == len(self.mine)

    # -------------------------------------------------------------------------------------------------- tables

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pyarrow.Table]:
        """Shard by shard, for studies that do not fit into memory."""
        from pyarrow import parquet

        for number in self.numbers:
            yield parquet.ParquetFile(self.store.file(number)).read(columns).replace_schema_metadata(None)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pyarrow.Table:
        """One row for each image, target and method, in the order of the images; maps are read by `maps`."""
        import pyarrow as pa

        schema = schema_of(self.kind)
        names = [name for name in schema.names if name not in ARRAYS]
        asked = names if columns is None else [name for name in columns if name in schema.names]
        empty = pa.schema([schema.field(name) for name in asked]).empty_table()
        table = pa.concat_tables([empty, *self.tables(asked)])
        return self.kind.complete(table) if columns is None else table

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame."""
        return self.to_arrow().to_pandas()

    def maps(
        self, method: str | None = None, *, image: str | None = None, target: str | None = None
    ) -> pandas.DataFrame:
        """The maps: one row for each image, target and method, the array [h w] in column `map`; or only some of them.

        What failed has no map. `iter_maps` gives the same rows one by one.
        """
        import pandas as pd

        rows = list(self.iter_maps(method, image=image, target=target))
        return pd.DataFrame(rows, columns=[*KEYS[:-1], "map"])

    def iter_maps(
        self, method: str | None = None, *, image: str | None = None, target: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """The maps one by one, a shard in memory at a time."""
        wanted = {"method": method, "image": image, "target": target}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        for table in self.tables([*KEYS[:-1], "map", "map_shape"]):
            arrays = zip(flat_arrays(table["map"]), table["map_shape"].to_pylist())
            for row, (flat, shape) in zip(table.select(list(KEYS[:-1])).to_pylist(), arrays):
                if shape is not None and all(str(row[name]) == str(value) for name, value in wanted.items()):
                    yield {**row, "map": flat.reshape(shape)}

    def groups(self) -> Iterator[dict[str, np.ndarray]]:
        """For each image and target, every method's scores per patch; NaN where the method failed."""
        h, w = self.about["grid"]
        for table in self.tables(["image", "asked", "target", "method", "map"]):
            found: dict[tuple[Any, ...], dict[str, np.ndarray]] = {}
            keys = zip(*(table[name].to_pylist() for name in ("image", "asked", "method")))
            for (image, asked, method), flat in zip(keys, flat_arrays(table["map"])):
                missing = np.full(h * w, np.nan, np.float32)
                found.setdefault((image, asked), {})[method] = flat if len(flat) == h * w else missing
            yield from found.values()

    def examples(self) -> list[Example]:
        """The images that are kept as examples."""
        return [Example(row["image"], row.pop("photo"), parts, row) for row, parts in self.parts() if row["photo"]]

    def parts(self) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
        """Rows of examples, with the arrays that figures need."""
        from pyarrow import compute as pc

        names = [name for name in schema_of(self.kind).names if name not in ("map", "map_shape")]
        for table in self.tables(names):
            kept = table.filter(pc.or_(table["photo"].is_valid(), table["parts_shape"].is_valid()))
            shapes = kept["parts_shape"].to_pylist()
            for row, flat, shape in zip(kept.drop_columns(["parts"]).to_pylist(), flat_arrays(kept["parts"]), shapes):
                yield row, None if shape is None else flat.reshape(shape)

    # ------------------------------------------------------------------------------------------- what they tell

    def counts(self) -> dict[str, tuple[int, int]]:
        """By method: rows with a result, and rows that failed."""
        found = {name: [0, 0] for name in self.kind.methods}
        for table in self.tables(["method", "error"]):
            for name, error in zip(table["method"].to_pylist(), table["error"].to_pylist()):
                found[name][error is not None] += 1
        return {name: (good, bad) for name, (good, bad) in found.items()}

    def failed(self) -> dict[str, str]:
        """The images with a failed row, and the first reason."""
        found: dict[str, str] = {}
        for table in self.tables(["image", "error"]):
            bad = table.filter(table["error"].is_valid())
            for image, reason in zip(bad["image"].to_pylist(), bad["error"].to_pylist()):
                found.setdefault(image, reason)
        return found

    def seconds(self) -> dict[str, tuple[float, int]]:
        """By method: seconds, and for how many images, where the study measured it."""
        found: dict[str, tuple[float, int]] = {}
        for told in self._heads():
            for name, seconds in told["seconds"].items():
                before = found.get(name, (0.0, 0))
                found[name] = before[0] + seconds, before[1] + told["images"][name]
        return found

    def told(self) -> dict[str, Any]:
        """The metadata of each shard."""
        return {name: value for told in self._heads() for name, value in told["told"].items()}

    def _heads(self) -> Iterator[dict[str, Any]]:
        from pyarrow import parquet

        for number in self.numbers:
            yield json.loads(parquet.read_schema(self.store.file(number)).metadata[b"vitreous"])

    def findings(self) -> dict[str, Findings]:
        """The findings of each model."""
        return {name: self.kind.findings(self.of(name)) for name in self.models}


def flat_arrays(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """The numbers of each row of a list column, without copying; empty where there are none."""
    found: list[np.ndarray] = []
    for chunk in column.chunks:
        values, ends = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
        found += [values[start:end] for start, end in pairwise(ends)]
    return found
