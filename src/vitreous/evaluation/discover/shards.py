"""Results of a long run, stored group by group, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitreous._support.files import write_whole
from vitreous._support.progress import steps
from vitreous.images.readers import Loaded, Reader, in_threads

Made = dict[str, Tensor]
Make = Callable[[Loaded], Made]


@dataclass(eq=False)
class Shards:
    """A folder of results of one plan; None: nothing is stored."""

    folder: Path | None
    plan: dict[str, Any]
    failed: dict[int, str] = field(default_factory=dict)  # images that cannot be read, by number

    @property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(self.plan, sort_keys=True).encode(), digest_size=8).hexdigest()

    def file(self, what: str, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{what}-{number:06}.safetensors"

    def over(self, what: str, reader: Reader, groups: Sequence[list[int]], make: Make) -> Iterator[Made]:
        """What `make` gives for each group of images; groups that are stored are not read again."""
        kept = {i: found for i in range(len(groups)) if (found := self.read(what, i)) is not None}
        left = [i for i in range(len(groups)) if i not in kept]
        loads = in_threads(reader, [groups[i] for i in left])
        count = sum(map(len, groups))
        for i in steps(range(len(groups)), count, what, lambda i: len(groups[i])):
            if i in kept:
                yield kept.pop(i)
                continue
            loaded = next(loads)
            self.failed |= loaded.failed
            made = make(loaded)
            self.write(what, i, made, loaded.failed)
            yield made

    def each(self, what: str, items: Sequence[Any], make: Callable[[Any], Made]) -> Iterator[Made]:
        """The same for work that reads no images, or reads them itself."""
        for i, item in steps(enumerate(items), len(items), what):
            found = self.read(what, i)
            if found is None:
                found = make(item)
                self.write(what, i, found, {})
            yield found

    def read(self, what: str, number: int) -> Made | None:
        from safetensors import SafetensorError, safe_open

        file = self.file(what, number)
        if file is None or not file.is_file():
            return None
        try:
            with safe_open(str(file), "pt") as stored:
                told = stored.metadata() or {}
                found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118, it is no mapping
        except SafetensorError:
            return None
        if told.get("plan") != self.digest:
            return None
        self.failed |= {int(number): said for number, said in json.loads(told["failed"]).items()}
        return found

    def write(self, what: str, number: int, made: Made, failed: dict[int, str]) -> None:
        from safetensors.torch import save

        file = self.file(what, number)
        if file is not None:
            told = {"plan": self.digest, "failed": json.dumps(failed)}
            numbers = {name: value.detach().cpu().contiguous() for name, value in made.items()}
            write_whole(file, save(numbers, told))

    def drop(self) -> None:
        """Remove what was stored, once the results are written."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def joined(parts: Sequence[Made]) -> Made:
    """The rows of all groups, one after the other."""
    there = [part for part in parts if part]
    return {name: torch.cat([part[name].cpu() for part in there]) for name in there[0]} if there else {}
