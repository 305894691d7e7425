"""The engine for one machine: processes read images, this process computes and a thread writes, all at once."""

from __future__ import annotations

import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from types import TracebackType

import pyarrow

from vitreous.evaluation.study.plan import Recipe, Shard
from vitreous.evaluation.study.shard import run_shard
from vitreous.evaluation.study.store import Store
from vitreous.images.decoding import Decoder, choose_scaling
from vitreous.images.readers import Loaded, Reader, in_processes, sent, still_there, usual_workers
from vitreous.images.samples import Sample
from vitreous.models.model import Model

Tick = Callable[[int], None]
WAITING = 2  # finished shards that may wait for the disk


def ignore(more: int) -> None: ...


def run_local(
    recipe: Recipe,
    shards: Sequence[Shard],
    store: Store,
    *,
    device: str | None = None,
    workers: int | None = None,
    loaded: Model | None = None,
    tick: Tick = ignore,
) -> None:
    """Compute and store shards; `tick` is called with the number of images done since the last call."""
    with Writer(store) as writer:
        for number, mine in groupby(shards, lambda shard: shard.model):
            last = loaded is not None and number == len(recipe.sources) - 1
            model = loaded if last and loaded is not None else recipe.sources[number].load(device)
            for shard, table in compute(recipe, model, list(mine), workers, tick):
                writer.put(shard.number, table)


def compute(
    recipe: Recipe, model: Model, shards: list[Shard], workers: int | None, tick: Tick = ignore
) -> Iterator[tuple[Shard, pyarrow.Table]]:
    """Compute the shards of one model in order; readers run ahead across shard borders."""
    groups = [shard.groups(recipe.batch) for shard in shards]
    shown = frozenset().union(*(shard.shown for shard in shards))
    scaling = choose_scaling(recipe.decoders[shards[0].model], model.preprocess, model.device)
    reader = Reader(
        Numbered(shards),
        model.preprocess,
        shown,
        masked=recipe.kind.masked,
        hashed=True,
        packed=scaling is not None,
    )
    count = usual_workers(model.device.type) if workers is None else workers
    each = [numbers for mine in groups for numbers in mine]
    if len(each) <= 1:
        count = 0  # a process would take longer to start than to read a batch
    read = in_processes(reader, each, count)
    ready = sent(read, model.device) if scaling is None else Decoder(reader, model.device, scaling)(read)
    stream = told(still_there(ready), each, tick)
    for shard, mine in zip(shards, groups):
        yield shard, run_shard(recipe, model, shard, islice(stream, len(mine)))


class Numbered(Mapping[int, Sample]):
    """The images of shards by their numbers; each is made when it is asked for."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards, self._firsts = shards, [shard.first for shard in shards]

    def __getitem__(self, number: int) -> Sample:
        at = bisect_right(self._firsts, number) - 1
        if at < 0 or number - self._firsts[at] >= len(self.shards[at]):
            raise KeyError(number)
        return self.shards[at].samples[number - self._firsts[at]]

    def __iter__(self) -> Iterator[int]:
        return (shard.first + i for shard in self.shards for i in range(len(shard)))

    def __len__(self) -> int:
        return sum(map(len, self.shards))


def told(stream: Iterator[Loaded], groups: list[list[int]], tick: Tick) -> Iterator[Loaded]:
    """The stream, with `tick` called for each finished batch."""
    for loaded, numbers in zip(stream, groups):
        yield loaded
        tick(len(numbers))


class Writer:
    """Writes tables in a thread; an error there is raised at the next table."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.error: BaseException | None = None
        self._tables: queue.Queue[tuple[int, pyarrow.Table] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="vitreous-write", daemon=True)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write what was finished, even after an error elsewhere."""
        if self._thread.ident is not None:
            self._tables.put(None)
            self._thread.join()
        if self.error is not None and kind is None:
            raise self.error

    def put(self, number: int, table: pyarrow.Table) -> None:
        if self._thread.ident is None:  # only now, so that readers were forked before there is a thread
            self._thread.start()
        if self.error is not None:
            raise self.error
        self._tables.put((number, table))

    def _work(self) -> None:
        while (item := self._tables.get()) is not None:
            if self.error is None:
                try:
                    self.store.write(*item)
                except BaseException as error:
                    self.error = error
