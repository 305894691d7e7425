"""Computes one shard: a table with a row for each image, target and method. Both engines run this."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitreous._support.memory import in_batches, out_of_memory
from vitreous.attribute import told_shares
from vitreous.errors import explained
from vitreous.evaluation.leaderboard import PERMANENT, label_target, pool_of
from vitreous.evaluation.study.kind import Kind, Outcome, Scene
from vitreous.evaluation.study.plan import Recipe, Shard
from vitreous.images.beside import rows_of
from vitreous.images.readers import Batch, Loaded
from vitreous.images.samples import Sample
from vitreous.metrics.case import no_target
from vitreous.metrics.pool import Pool
from vitreous.models.model import Model
from vitreous.registry import METHODS
from vitreous.trace.apply import BROKEN, choose
from vitreous.trace.placing import best_classes
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace

if TYPE_CHECKING:
    import pyarrow

NO_LABEL = "the image has no label"
Place = tuple[int, int, str]  # image, target, method
Explained = tuple[str | None, str | None, float | None]  # a target, its name and its probability


@dataclass(eq=False)
class Tally:
    """Seconds that methods took, for how many images, and what else is known of a shard."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    images: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    told: dict[str, Any] = field(default_factory=dict)
    pools: dict[str | None, Pool] = field(default_factory=dict)  # by target
    explained: tuple[Scene, list[Explained]] | None = None  # the last scene, and its targets

    def targets(self, scene: Scene) -> list[Explained]:
        """The target of each image of a scene, made once for all methods."""
        if self.explained is None or self.explained[0] is not scene:
            self.explained = scene, explained_by(scene)
        return self.explained[1]

    def add(self, method: str, outcome: Outcome, images: int) -> None:
        if np.isfinite(outcome.seconds):
            self.seconds[method] += outcome.seconds
            self.images[method] += images
        self.told |= outcome.told


def run_shard(recipe: Recipe, model: Model, shard: Shard, loaded: Iterable[Loaded]) -> pyarrow.Table:
    """Compute everything that the study asks of these images."""
    rows: dict[Place, dict[str, Any]] = {}
    tally = Tally()
    for part in loaded:
        for number, reason in part.failed.items():
            rows.update(Rows(recipe, model, shard, part, tally).failed(number, reason))
        for batch in part.batches:
            rows.update(on_batch(Rows(recipe, model, shard, part, tally), batch, tally))
    names = list(recipe.kind.methods)
    order = sorted(rows, key=lambda place: (place[0], place[1], names.index(place[2])))
    return as_table(recipe.kind, [rows[place] for place in order], tally)


@dataclass(frozen=True, eq=False)
class Rows:
    """Builds the rows of some images."""

    recipe: Recipe
    model: Model
    shard: Shard
    loaded: Loaded
    tally: Tally

    def pool(self, asked: str | None) -> Pool | None:
        """All images of the study for this target; made once for a shard."""
        data, pools = self.recipe.data, self.tally.pools
        if data and asked not in pools:
            pools[asked] = pool_of(self.model, data[self.shard.model], asked)
        return pools.get(asked)

    def beside(self, numbers: list[int]) -> dict[str, np.ndarray] | None:
        """What the network gets beside some of the images."""
        inputs, first = self.shard.inputs, self.shard.first
        return None if inputs is None else rows_of(inputs, [number - first for number in numbers])

    def sample(self, number: int) -> Sample:
        return self.shard.samples[number - self.shard.first]

    def about(self, number: int, asked: str | None, method: str) -> dict[str, Any]:
        sample = self.sample(number)
        label = sample.label if isinstance(sample.label, int) else None
        return {
            "model": self.recipe.names[self.shard.model],
            "image": sample.name,
            "image_hash": self.loaded.hashes.get(number),
            "label": label,
            "class": None if label is None else self.model.label(label),
            "asked": self.asked(number, asked),
            "method": method,
        }

    def asked(self, number: int, asked: str | None) -> str | None:
        if not self.recipe.kind.targeted or asked is not None:
            return asked
        return "label" if isinstance(self.sample(number).label, int) else "top-1"

    def failed(self, number: int, reason: str) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Add the rows of an image that cannot be read, with the reason."""
        for t, asked in enumerate(self.recipe.targets):
            for method in self.recipe.kind.methods:
                yield (number, t, method), {**self.about(number, asked, method), "error": reason}

    def made(
        self, t: int, scene: Scene, batch: Batch, method: str, outcome: Outcome
    ) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Add what one method gave for each image of a batch."""
        asked, told = self.recipe.targets[t], self.tally.targets(scene)
        best = best_classes(scene.trace) if scene.trace.classifies else [None] * len(batch)
        for i, number in enumerate(batch.numbers):
            row = self.about(number, asked, method)
            row["prediction"] = best[i]
            row["target"], row["target_label"], row["probability"] = told[i]
            row["error"] = self.why_not(number, asked, outcome, i)
            if row["error"] is None:
                row |= {name: values[i] for name, values in outcome.values.items()}
                row["map"] = None if outcome.map is None else outcome.map[i]
                row["parts"] = outcome.parts.get(i)
            if t == 0 and method == next(iter(self.recipe.kind.methods)):
                row["photo"] = self.loaded.photos.get(number)
            yield (number, t, method), row

    def why_not(self, number: int, asked: str | None, outcome: Outcome, i: int) -> str | None:
        if asked == "label" and self.sample(number).label is None:
            return NO_LABEL
        if outcome.error is not None:
            return explained(outcome.error)
        broken = outcome.map is not None and not np.isfinite(outcome.map[i]).all()
        return outcome.errors.get(i, BROKEN if broken else None)


def on_batch(rows: Rows, batch: Batch, tally: Tally) -> dict[Place, dict[str, Any]]:
    """Run a batch, in smaller parts where memory is short, image by image where it fails."""
    try:
        parts = in_batches(lambda part: on_part(rows, batch.part(part), tally), len(batch), len(batch))
        return {place: row for part in parts for place, row in part.items()}
    except Failed as failed:
        if len(batch) == 1:
            return dict(rows.failed(batch.numbers[0], explained(failed.error)))
        singles = [on_batch(rows, batch.part(slice(i, i + 1)), tally) for i in range(len(batch))]
        return {place: row for one in singles for place, row in one.items()}


class Failed(Exception):
    """The outcome of a batch that failed, altogether or for one method."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def on_part(rows: Rows, batch: Batch, tally: Tally) -> dict[Place, dict[str, Any]]:
    found: dict[Place, dict[str, Any]] = {}
    alone = len(batch) == 1
    try:
        trace = Trace(rows.model, torch.as_tensor(batch.images), rows.beside(batch.numbers))
        trace.crops = replace(trace.crops, prepared=True)
        rows.recipe.kind.begin(trace)
        scenes = [scene_of(rows, trace, batch, asked) for asked in rows.recipe.targets]
        for t, (scene, made) in enumerate(zip(scenes, rows.recipe.kind.work_all(scenes))):
            for method, outcome in made.items():
                if outcome.error is not None and not alone and not isinstance(outcome.error, PERMANENT):
                    raise Failed(outcome.error)
                tally.add(method, outcome, len(batch))
                found.update(rows.made(t, scene, batch, method, outcome))
    except Failed:
        raise
    except Exception as error:
        if out_of_memory(error) and not alone:
            raise
        raise Failed(error) from error
    return found


def scene_of(rows: Rows, trace: Trace, batch: Batch, asked: str | None) -> Scene:
    """One batch with one target."""
    shown = [number in rows.loaded.photos for number in batch.numbers]
    target, timed, pool = target_of(rows, trace, batch, asked), rows.shard.first == 0, rows.pool(asked)
    name = rows.recipe.names[rows.shard.model]
    return Scene(trace, target, batch.masks, shown, timed, pool, batch.numbers, name)


def target_of(rows: Rows, trace: Trace, batch: Batch, asked: str | None) -> Target | None:
    """The target of each image, resolved once; None where there is nothing to explain."""
    if not rows.recipe.kind.targeted:
        return None
    if asked not in (None, "label"):
        return choose(trace, asked, METHODS["gradient"]).fix(trace.output)
    if not trace.classifies:
        raise no_target(trace)
    aim = rows.recipe.kind.aim
    return label_target([aim(number, rows.sample(number).label) for number in batch.numbers], trace)


def explained_by(scene: Scene) -> list[Explained]:
    """What is explained in each image; the probability is that of a class."""
    count = len(scene.trace)
    if scene.target is None:
        return [(None, None, None)] * count
    told = told_shares(scene.target, scene.trace.output, scene.trace)
    nothing = (None,) * count
    names = [str(scene.target.of_image(i)) for i in range(count)]
    return list(zip(names, told.get("labels", nothing), told.get("probabilities", nothing)))


# ------------------------------------------------------------------------------------------------------------- tables


def schema_of(kind: Kind) -> pyarrow.Schema:
    """The columns of every row, the same for every shard of a study."""
    import pyarrow as pa

    word, number, numbers = pa.string(), pa.int64(), pa.list_(pa.float32())
    shape = pa.list_(pa.int32())
    keys = {"model": word, "image": word, "image_hash": word, "label": number, "class": word, "prediction": number}
    keys |= {"asked": word, "target": word, "target_label": word, "probability": pa.float32(), "method": word}
    rest = {"error": word, "map": numbers, "map_shape": shape, "parts": numbers, "parts_shape": shape}
    return pa.schema([*keys.items(), *kind.columns().items(), *rest.items(), ("photo", pa.binary())])


def as_table(kind: Kind, rows: list[dict[str, Any]], tally: Tally) -> pyarrow.Table:
    import pyarrow as pa

    schema = schema_of(kind)
    columns = {name: [row.get(name) for row in rows] for name in schema.names}
    for name in ("map", "parts"):
        arrays = columns[name]
        columns[f"{name}_shape"] = [None if array is None else list(array.shape) for array in arrays]
        columns[name] = [None if array is None else np.asarray(array, np.float32).ravel() for array in arrays]
    told = {"seconds": dict(tally.seconds), "images": dict(tally.images), "told": tally.told}
    made = pa.table({name: pa.array(columns[name], schema.field(name).type) for name in schema.names}, schema)
    return made.replace_schema_metadata({"vitreous": json.dumps(told)})


def encode(table: pyarrow.Table, told: Mapping[str, Any]) -> bytes:
    """A table as Parquet with `told` as metadata; floats are split by byte, which compresses maps best."""
    from pyarrow import parquet

    known = json.loads((table.schema.metadata or {}).get(b"vitreous", b"{}"))
    table = table.replace_schema_metadata({"vitreous": json.dumps({**known, **told})})
    words = ["model", "class", "asked", "target", "target_label", "method", "error"]
    buffer = io.BytesIO()
    parquet.write_table(
        table,
        buffer,
        compression="zstd",
        use_dictionary=words,
        use_byte_stream_split=[f"{name}.list.element" for name in ("map", "parts")],
    )
    return buffer.getvalue()
