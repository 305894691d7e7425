"""Reads a study: its tables, maps, examples and findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous.errors import InputError, nearest
from vitreous.evaluation.study.columns import codes, flat_arrays, has_values, may_hold
from vitreous.evaluation.study.findings import Findings, joined_frames
from vitreous.evaluation.study.kind import Kind, find_kind
from vitreous.evaluation.study.provenance import Named, attribution_of, find_row, provenance_of
from vitreous.evaluation.study.shard import schema_of
from vitreous.evaluation.study.store import LATEST, Store, find_store, read_json

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from vitreous.attribution import Attribution

ARRAYS = ("map", "map_shape", "parts", "parts_shape", "photo")  # columns that are not read unless they are wanted
KEYS = (
    *("model", "image", "image_hash", "label", "class", "prediction"),
    *("asked", "target", "target_label", "probability", "method"),
)


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
    found: Sequence[int] | None = None  # the finished shards of all models, where they are known

    def __repr__(self) -> str:
        state = "finished" if self.finished else self.progress
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
        return replace(self, model=model, found=self.done)

    @property
    def mine(self) -> range:
        """The shards of this model, or of all."""
        every, count = int(self.manifest["shards"]), len(self.manifest["models"])
        if not self.model:
            return range(every)
        place = [about["name"] for about in self.manifest["models"]].index(self.model)
        return range(place * every // count, (place + 1) * every // count)

    @cached_property
    def done(self) -> Sequence[int]:
        return self.store.done() if self.found is None else self.found

    @cached_property
    def numbers(self) -> list[int]:
        """The numbers of the finished shards."""
        return [number for number in self.done if number in self.mine]

    @property
    def finished(self) -> bool:
        """Whether all is computed, in both phases where there are two."""
        if len(self.numbers) != len(self.mine):
            return False
        return self.kind.phases == 1 or self.second is None or self.second.finished

    @property
    def progress(self) -> str:
        """How much is computed: 3 of 8 shards."""
        below = "" if self.second is None else f", and of the second phase {self.second.progress}"
        return f"{len(self.numbers)} of {len(self.mine)} shards{below}"

    @cached_property
    def second(self) -> Study | None:
        """The second phase of a kind that has two, as far as it is; None before it began."""
        if self.kind.phases == 1 or not (self.folder / LATEST).is_file():
            return None
        below = Study(find_store(self.folder / str(read_json(self.folder / LATEST)["study"])))
        return below.of(self.model) if self.model else below

    # -------------------------------------------------------------------------------------------------- tables

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pyarrow.Table]:
        """Shard by shard, for studies that do not fit into memory; a column that an older study lacks is empty."""
        return (self._read(file, columns) for file in self._files())

    def _files(self) -> Iterator[pyarrow.parquet.ParquetFile]:
        from pyarrow import parquet

        return (parquet.ParquetFile(self.store.file(number)) for number in self.numbers)

    def _read(self, file: pyarrow.parquet.ParquetFile, columns: Sequence[str] | None) -> pyarrow.Table:
        import pyarrow as pa

        table = file.read(columns, use_threads=False).replace_schema_metadata(None)
        for name in self.schema.names if columns is None else columns:
            if name not in table.column_names and name in self.schema.names:
                table = table.append_column(name, pa.nulls(table.num_rows, self.schema.field(name).type))
        return table if columns is None else table.select([name for name in columns if name in table.column_names])

    @cached_property
    def schema(self) -> pyarrow.Schema:
        return schema_of(self.kind)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pyarrow.Table:
        """One row for each image, target and method, in the order of the images; maps are read by `maps`."""
        import pyarrow as pa

        schema = self.schema
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
        return pd.DataFrame(rows, columns=[*KEYS, "map"])

    def iter_maps(
        self, method: str | None = None, *, image: str | None = None, target: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """The maps one by one, a shard in memory at a time."""
        for table in self._matching(method, image, target, [*KEYS, "map", "map_shape"]):
            arrays = zip(flat_arrays(table["map"]), table["map_shape"].to_pylist())
            for row, (flat, shape) in zip(table.select(list(KEYS)).to_pylist(), arrays):
                if shape is not None:
                    yield {**row, "map": flat.reshape(shape)}

    def _matching(
        self, method: str | None, image: str | None, target: str | None, columns: Sequence[str]
    ) -> Iterator[pyarrow.Table]:
        """The rows of a method, an image and a target, or of any; shards that cannot hold the image are not read."""
        from pyarrow import compute as pc

        wanted = {"method": method, "image": image, "target": target}
        for file in self._files():
            if image is not None and not may_hold(file, "image", image):
                continue
            table = self._read(file, columns)
            for name, value in wanted.items():
                if value is not None:
                    table = table.filter(pc.equal(table[name], str(value)))
            yield table

    def stacks(self) -> Iterator[np.ndarray]:
        """Shard by shard, the scores of all methods for each image and target [images, methods, patches].

        NaN where a method failed.
        """
        (h, w), names = self.about["grid"], list(self.kind.methods)
        for table in self.tables(["image", "asked", "method", "map"]):
            image, asked, method = (codes(table[name]) for name in ("image", "asked", "method"))
            _, place = np.unique(image[1] * (len(asked[0]) + 1) + asked[1], return_inverse=True)
            stack = np.full((place.max(initial=-1) + 1, len(names), h * w), np.nan, np.float32)
            of_method = np.array([names.index(name) for name in method[0]], np.int64)[method[1]]
            flats = flat_arrays(table["map"])
            kept = [i for i, flat in enumerate(flats) if len(flat) == h * w]
            if kept:
                stack[place[kept], of_method[kept]] = np.stack([flats[i] for i in kept])
            yield stack

    def groups(self) -> Iterator[dict[str, np.ndarray]]:
        """For each image and target, every method's scores per patch; NaN where the method failed."""
        return (dict(zip(self.kind.methods, each)) for stack in self.stacks() for each in stack)

    def examples(self) -> list[Example]:
        """The images that are kept as examples."""
        return [Example(row["image"], row.pop("photo"), parts, row) for row, parts in self.parts() if row["photo"]]

    def parts(self) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
        """Rows of examples, with the arrays that figures need."""
        from pyarrow import compute as pc

        names = [name for name in self.schema.names if name not in ("map", "map_shape")]
        for file in self._files():
            if not has_values(file, "photo") and not has_values(file, "parts.list.element"):
                continue
            table = self._read(file, names)
            kept = table.filter(pc.or_(table["photo"].is_valid(), table["parts_shape"].is_valid()))
            shapes = kept["parts_shape"].to_pylist()
            for row, flat, shape in zip(kept.drop_columns(["parts"]).to_pylist(), flat_arrays(kept["parts"]), shapes):
                yield row, None if shape is None else flat.reshape(shape)

    # ---------------------------------------------------------------------------------------------- what made a row

    def provenance(self, image: Named, method: str | None = None, *, target: str | None = None) -> dict[str, Any]:
        """What made a row, as `Attribution.provenance` tells it of a map.

        `image`: its name, with the method and, if there are several, the target (as it was asked or as it came out);
        or a row of `to_pandas` or `iter_maps`.
        """
        return provenance_of(self, self.row(image, method, target=target))

    def attribution(self, image: Named, method: str | None = None, *, target: str | None = None) -> Attribution:
        """A stored map with its provenance, as `explain` returned it; its image is not read."""
        return attribution_of(self, self.row(image, method, target=target, arrays=True))

    def row(
        self,
        image: Named,
        method: str | None = None,
        *,
        target: str | None = None,
        arrays: bool = False,
    ) -> dict[str, Any]:
        """The row of an image, a method and a target, which may be left out if there is but one; `arrays`: its map."""
        return find_row(self, image, method, target, arrays)

    def rows(self, image: str, *, arrays: bool = False) -> Iterator[dict[str, Any]]:
        """Every row of an image; with its map if asked."""
        names = [*(name for name in self.schema.names if name not in ARRAYS), *(("map", "map_shape") if arrays else ())]
        for table in self._matching(None, image, None, names):
            for row in table.to_pylist():
                if arrays:
                    shape = row.pop("map_shape")
                    row["map"] = None if shape is None else np.array(row["map"], np.float32).reshape(shape)
                yield row

    # ------------------------------------------------------------------------------------------- what they tell

    def counts(self) -> dict[str, tuple[int, int]]:
        """By method: rows with a result, and rows that failed."""
        found = {name: np.zeros(2, np.int64) for name in self.kind.methods}
        for table in self.tables(["method", "error"]):
            names, which = codes(table["method"])
            bad = table["error"].is_valid().to_numpy()
            for i, name in enumerate(names):
                found[name] += np.bincount(bad[which == i], minlength=2)
        return {name: (int(good), int(bad)) for name, (good, bad) in found.items()}

    def failed(self) -> dict[str, str]:
        """The images with a failed row, and the first reason."""
        return dict(self._failed)

    @cached_property
    def _failed(self) -> dict[str, str]:
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

    def frame(self, name: str) -> pandas.DataFrame:
        """A further table of the findings, such as the clusters of `study shortcuts`, of all models."""
        return joined_frames(self.findings(), name).to_pandas()

    def findings(self) -> dict[str, Findings]:
        """The findings of each model."""
        return self.kind.together([self.of(name) for name in self.models])
