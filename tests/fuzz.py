"""Damaged files through every reader. As a program: in a process with limits, and what it saw as JSON."""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import random
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from damaged import WAYS, Damaged, bombs, damaged_files, flip, grow, truncate

from vitreous.errors import InputError
from vitreous.images import masks, pictures, saved_datasets, tars
from vitreous.images.dataset import Sample
from vitreous.images.preprocess import IMAGENET
from vitreous.images.readers import Reader
from vitreous.models.libraries import cropped

SECONDS = 10.0  # of this process, for one file and one reader
LONGEST = 700  # characters of a message, the path among them
MIB = 2**20
MOST_PEAK, MOST_GROWTH = 500 * MIB, 100 * MIB  # a large image may be large; nothing of it may stay
MOST_SPACE = 6 * 2**30  # addresses beyond those that the process has when it begins

Read = Callable[[Damaged, Path], object]


class TooLong(BaseException):
    """Not an Exception, so that no reader takes it for a damaged file."""


# -------------------------------------------------------------------------------------------------------------- readers


def readers() -> dict[str, Read]:
    """Every way into the library, by name."""
    found: dict[str, Read] = {"mask": lambda _, path: masks.open_mask(path, 0), "batch": as_batch}
    for channels in (1, 3, 4):
        found[f"file of {channels}"] = lambda _, path, channels=channels: pictures.open_file(path, channels)  # type: ignore[misc]
    found |= {"tar": in_a_tar, "damaged tar": in_a_damaged_tar}
    try:
        from vitreous.web.limits import Limits
        from vitreous.web.uploads import Part, open_picture
    except ImportError:
        return found
    for channels in (1, 3, 4):
        found[f"upload of {channels}"] = lambda made, _, channels=channels: open_picture(  # type: ignore[misc]
            Part(made.name, made.held), Limits(), channels
        )
    return found


def as_batch(made: Damaged, path: Path) -> None:
    """As a study reads it: whatever is wrong becomes a reason, and nothing is raised."""
    loaded = Reader({0: Sample(path, made.name, mask=path)}, cropped((32, 32), *IMAGENET), frozenset({0}), masked=True)[
        [0]
    ]
    for reason in (*loaded.failed.values(), *loaded.lost_masks.values()):
        raise InputError(reason)


def tar_of(made: Damaged) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as opened:
        for name, held in ((made.name, made.held), (f"{Path(made.name).stem}.cls", b"3"), ("b.json", b'{"label": 1}')):
            about = tarfile.TarInfo(name)
            about.size = len(held)
            opened.addfile(about, io.BytesIO(held))
    return buffer.getvalue()


def in_a_tar(made: Damaged, path: Path) -> None:
    open_tar(tar_of(made), path)


def in_a_damaged_tar(made: Damaged, path: Path) -> None:
    chance = random.Random(made.name)
    held = tar_of(made)
    if chance.random() < 0.5:
        held = chance.choice((flip, grow))(chance, held[:600]) + held[600:]
    open_tar(chance.choice((flip, grow, truncate))(chance, held), path)


def open_tar(held: bytes, path: Path) -> None:
    tar = path.with_suffix(".tar")
    tar.write_bytes(held)
    try:
        for entry in tars.read_tars([tar]).entries:
            pictures.open_stored(entry.image)  # type: ignore[arg-type]
            if entry.mask is not None:
                masks.open_mask(entry.mask, 0)
    finally:
        tar.unlink()


# ------------------------------------------------------------------------------------------------- saved data sets


def write_rows(files: Iterable[Damaged], folder: Path) -> None:
    """A data set on disk as `datasets` saves it, with these files in its rows."""
    import datasets

    rows = [{"bytes": made.held, "path": made.name} for made in files]
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"image": rows, "label": [i % 3 for i in range(len(rows))]})
    made.cast_column("image", datasets.Image(decode=False)).save_to_disk(str(folder))


def as_rows(files: Iterable[Damaged], folder: Path) -> dict[str, Read]:
    """A reader for each row of a data set of these files."""
    write_rows(files, folder)
    entries = saved_datasets.read_saved(folder).entries
    return {str(entry.image): lambda *_, row=entry.image: pictures.open_stored(row) for entry in entries}  # type: ignore[misc]


def read_rows(folder: Path) -> None:
    for entry in saved_datasets.read_saved(folder).entries:
        with suppress(InputError):
            pictures.open_stored(entry.image)  # type: ignore[arg-type]


def damaged_rows(count: int, folder: Path) -> Iterator[tuple[Damaged, Read]]:
    """The files of a data set themselves are damaged, one at a time."""
    write_rows(list(islice(damaged_files(60), 45, 60)), folder / "whole")
    chance = random.Random(0)
    for number in range(count):
        broken = folder / f"broken{number}"
        shutil.copytree(folder / "whole", broken)
        file = chance.choice(sorted(broken.iterdir()))
        way = chance.choice(WAYS)
        held = way(chance, file.read_bytes())
        file.write_bytes(held)
        yield Damaged(file.name, held, way.__name__), lambda *_, broken=broken: read_rows(broken)  # type: ignore[misc]
        shutil.rmtree(broken)


def try_saved(files: list[Damaged], count: int, folder: Path) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    faults = []
    rows = as_rows(files, folder / "rows")
    for made, read in chain(zip(files, rows.values()), damaged_rows(count, folder)):
        faulthandler.dump_traceback_later(12 * SECONDS, exit=True)
        result = outcome(read, made, folder)
        counts[result if result in ("image", "refused") else "fault"] += 1
        if result not in ("image", "refused"):
            faults.append(f"{made.name} ({made.what}), row: {result}")
    faulthandler.cancel_dump_traceback_later()
    return {"counts": dict(counts), "faults": faults}


# ---------------------------------------------------------------------------------------------------------- one by one


@contextmanager
def deadline() -> Iterator[None]:
    """Raise in whatever takes too much of the processor, here or below."""

    def stop(number: int, frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(read: Read, made: Damaged, path: Path) -> str:
    """`image`, `refused`, or what is wrong with the reader."""
    said, usual, root = io.StringIO(), logging.lastResort, logging.getLogger()
    handlers, root.handlers = root.handlers, []
    warned: list[warnings.WarningMessage] = []
    logging.lastResort = logging.StreamHandler(said)  # type: ignore[assignment]  # prints where nobody set up logging
    try:
        with warnings.catch_warnings(record=True) as caught, deadline():
            warned = caught
            warnings.simplefilter("always")
            read(made, path)
            result = "image"
    except InputError as error:
        result = refusal(str(error))
    except TooLong:
        result = f"took more than {SECONDS:.0f} seconds"
    except BaseException as error:
        detail = getattr(error, "detail", None)
        result = f"{type(error).__name__}: {error}" if detail is None else refusal(str(detail))
    finally:
        logging.lastResort, root.handlers = usual, handlers
    if warned or said.getvalue():
        return f"warned {[str(one.message) for one in warned]}, logged {said.getvalue()!r}"
    return result


def refusal(said: str) -> str:
    if len(said.splitlines()) != 1 or len(said) > LONGEST:
        return f"a message of {len(said)} characters in {len(said.splitlines())} lines: {said[:200]!r}"
    return "refused"


def try_all(files: Iterable[Damaged], folder: Path, seen: Callable[[], int] = lambda: 0) -> dict[str, Any]:
    """Every file through every reader: how often which outcome, faults by file, and the most memory for one."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    most, worst = 0, ""
    for made in files:
        path = folder / made.name
        path.write_bytes(made.held)
        for name, read in readers().items():
            result = outcome(read, made, path)
            counts[result if result in ("image", "refused") else "fault"] += 1
            if result not in ("image", "refused"):
                faults.append(f"{made.name} ({made.what}), {name}: {result}")
            used = seen()
            if used > MOST_PEAK:
                faults.append(f"{made.name} ({made.what}), {name}: {used // MIB} MiB")
            if used > most:
                most, worst = used, f"{made.name}, {name}"
        path.unlink()
    return {"counts": dict(counts), "faults": faults, "most MiB": most // MIB, "worst": worst}


# ------------------------------------------------------------------------------------------------------ in a process


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    told = Path("/proc/self/status").read_text()
    return int(told.split(f"{field}:")[1].split()[0]) * 1024


def peak() -> int:
    """How much the peak rose above what was there, since the last call."""
    found = memory("VmHWM") - Peak.before
    Path("/proc/self/clear_refs").write_text("5")
    Peak.before = memory("VmRSS")
    return found


class Peak:
    before = 0


def limit() -> None:
    import resource

    space = memory("VmSize") + MOST_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, space))


def main(count: int, seed: int) -> None:
    faulthandler.enable()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for made in bombs():  # what is imported late, and the allocator's own reserve
            try_all([made], folder)
        limit()
        peak()
        full = bytearray(100 * MIB)
        meter = peak()
        del full
        peak()
        before = memory("VmRSS")
        found = try_all(watched(damaged_files(count, seed)), folder, peak)
        found["growth MiB"] = (memory("VmRSS") - before) // MIB
    found["meter MiB"] = meter // MIB
    found["seconds"] = round(time.monotonic() - begun, 1)
    sys.stdout.write(json.dumps(found) + "\n")


def watched(files: Iterable[Damaged]) -> Iterator[Damaged]:
    """A file that hangs inside C, where no signal is heard, ends the process with a traceback."""
    for made in files:
        faulthandler.dump_traceback_later(12 * SECONDS, exit=True)
        yield made
    faulthandler.cancel_dump_traceback_later()


def main_saved(count: int, seed: int) -> None:
    faulthandler.enable()
    with tempfile.TemporaryDirectory() as name:
        found = try_saved(list(damaged_files(count, seed)), count // 5, Path(name))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    {"files": main, "rows": main_saved}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
