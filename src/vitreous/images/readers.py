"""Read a data set in batches of preprocessed images; those that cannot be read leave a reason.

A reader turns image numbers into a batch; `in_processes` and `in_threads` read ahead while the model computes.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import shutil
import signal
import sys
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitreous._support.files import MISSING
from vitreous.errors import InputError, one_line
from vitreous.images.jpeg import Header, read_header
from vitreous.images.masks import Mask, read_mask
from vitreous.images.preprocess import Preprocess
from vitreous.images.samples import Sample

PHOTO = 224  # pixels of an example's longer side
QUALITY = 90
AHEAD = 2  # batches that each worker reads ahead
PARENT_DIED = 1  # Linux: PR_SET_PDEATHSIG
SHARED = "/dev/shm"  # where Linux keeps shared memory
REVIVALS = 3  # times that dead workers are replaced


@dataclass(frozen=True, eq=False)
class Batch:
    """Images of one size, and their masks."""

    numbers: list[int]
    images: Float[Tensor, "B channels Y X"] | Float[np.ndarray, "B channels Y X"]  # an array if it came through a pipe
    masks: list[Mask | None]

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, which: slice) -> Batch:
        return Batch(self.numbers[which], self.images[which], self.masks[which])


@dataclass(eq=False)
class Loaded:
    """The batches made of some images, and what went wrong."""

    batches: list[Batch] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)  # images that cannot be used
    lost_masks: dict[int, str] = field(default_factory=dict)
    photos: dict[int, bytes] = field(default_factory=dict)  # of the images in `shown`, what the model sees, as JPEG
    gone: str = ""  # a folder of images that has vanished: no reason of one image, the whole study has to stop
    hashes: dict[int, str] = field(default_factory=dict)  # of the content of the files
    files: dict[int, tuple[Header, int]] = field(default_factory=dict)  # JPEG files for a GPU: header and length
    held: Tensor | np.ndarray | None = None  # their bytes, one after the other


@dataclass(frozen=True, eq=False)
class Reader:
    """Opens and preprocesses samples by their numbers; keeps a small copy of those in `shown`."""

    samples: Mapping[int, Sample]
    preprocess: Preprocess
    shown: frozenset[int] = frozenset()
    masked: bool = False  # are masks wanted?
    hashed: bool = False  # are hashes of the files wanted?
    packed: bool = False  # are JPEG files left to the decoder of a GPU?
    sends: Literal["", "shared", "piped"] = ""  # how images reach another process: shared memory, or a pipe

    @property
    def room(self) -> int:
        """The bytes that a prepared image takes."""
        return 4 * self.preprocess.channels * math.prod(self.preprocess.size)

    def __getitem__(self, numbers: list[int]) -> Loaded:
        found = Loaded()
        sizes: dict[tuple[int, ...], list[tuple[int, Tensor, Mask | None]]] = defaultdict(list)
        files: list[bytes] = []
        for number in numbers:
            try:
                file = self._file(number, found) if self.packed else None
                if file is not None:
                    files.append(file)
                    continue
                image, mask = self._one(number, found)
                sizes[tuple(image.shape)].append((number, image, mask))
            except InputError as error:
                found.failed[number] = str(error)
                found.gone = found.gone or vanished(self.samples[number])
            except Exception as error:  # a user's own preprocessing may raise anything
                name = self.samples[number].name
                found.failed[number] = f"{name}: cannot be prepared for the model ({one_line(error)})"
        for same in sizes.values():
            names, images, masks = zip(*same)
            found.batches.append(Batch(list(names), self._sendable(torch.stack(images)), list(masks)))
        if files:
            found.held = self._sendable(torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8))
        return found

    def _sendable(self, images: Tensor) -> Tensor | np.ndarray:
        """Images ready to be sent: in shared memory, or through the pipe if that is refused."""
        if self.sends == "shared":
            with suppress(RuntimeError):
                images.share_memory_()  # type: ignore[no-untyped-call]
                return images
        return images.numpy() if self.sends else images

    def _file(self, number: int, found: Loaded) -> bytes | None:
        """A JPEG file that a GPU can decode, as it is; None if it is another, or larger than a prepared image."""
        sample, most = self.samples[number], self.room
        if self.masked and sample.mask is not None:
            return None
        try:
            if isinstance(sample.image, Path) and sample.image.stat().st_size > most:
                return None
            held = sample.image.read_bytes()
        except (OSError, ValueError, InputError):
            return None  # the other way says why
        header = read_header(held) if len(held) <= most else None
        if header is None:
            return None
        if self.hashed:
            found.hashes[number] = hashlib.sha256(held).hexdigest()
        self._check_unchanged(sample)
        if number in self.shown:
            found.photos[number] = as_jpeg(self.preprocess.view(sample.open().image))
        found.files[number] = header, len(held)
        return held

    def _one(self, number: int, found: Loaded) -> tuple[Tensor, Mask | None]:
        sample = self.samples[number]
        if self.hashed:
            with suppress(OSError):
                found.hashes[number] = sample.sha256
        picture = sample.open(self.preprocess.channels)
        image = self.preprocess(picture.image)  # [channels Y X]
        mask = None
        if self.masked:
            try:
                mask = read_mask(sample.mask, picture, self.preprocess, (image.shape[1], image.shape[2]))
                if mask is not None and not mask.any():
                    raise InputError("it marks nothing in the part that the model sees")
            except InputError as error:
                found.lost_masks[number] = str(error)
                mask = None
        self._check_unchanged(sample)
        if number in self.shown:
            found.photos[number] = as_jpeg(self.preprocess.view(picture.image))
        return image, mask

    def _check_unchanged(self, sample: Sample) -> None:
        if sample.seen is not None and sample.stamps != sample.seen:  # before it was read, or meanwhile
            raise InputError(f"{sample.image}: has changed since the study was begun; run it again on the new images")


def vanished(sample: Sample) -> str:
    """The folder or archive of an image, if it was there when the study was begun and is no more."""
    was_there = sample.seen is not None and not sample.seen[0].startswith(MISSING)
    return str(sample.home) if was_there and sample.home is not None and not sample.home.exists() else ""


def still_there(stream: Iterator[Loaded]) -> Iterator[Loaded]:
    """The stream, until a folder of images vanishes."""
    for loaded in stream:
        if loaded.gone:
            raise lost(loaded.gone)
        yield loaded


def lost(folder: str) -> InputError:
    remedy = "bring it back, then run the same command again to resume"
    return InputError(f"{folder}: has vanished during the run; {remedy}")


def as_jpeg(photo: Image.Image) -> bytes:
    """A small copy."""
    scale = min(1.0, PHOTO / max(photo.size))
    small = photo.resize((max(1, round(photo.width * scale)), max(1, round(photo.height * scale))))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def from_jpeg(photo: bytes) -> Image.Image:
    return Image.open(io.BytesIO(photo)).convert("RGB")


# --------------------------------------------------------------------------------------------------------- side by side


def in_processes(reader: Reader, groups: Sequence[list[int]], workers: int) -> Iterator[Loaded]:
    """Read groups of images ahead in worker processes, in order; dead workers are replaced."""
    if workers < 1 or not can_fork_or_pickle(reader):
        yield from in_threads(reader, groups, max(1, workers))
        return
    reader = replace(reader, sends="shared" if has_room(reader, max(map(len, groups)), workers) else "piped")
    done, revivals = 0, 0
    while done < len(groups):
        try:
            for loaded in start(reader, groups[done:], workers):
                yield loaded
                done += 1
        except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
            died = str(error).startswith("DataLoader worker") or not isinstance(error, RuntimeError)
            if not died or revivals == REVIVALS:
                raise
            reader, revivals = replace(reader, sends="piped"), revivals + 1


def has_room(reader: Reader, batch: int, workers: int) -> bool:
    """Is there enough shared memory for all batches in flight? In a container there often is not."""
    try:
        free = shutil.disk_usage(SHARED).free
    except OSError:
        return False
    return free > 2 * batch * reader.room * (AHEAD + 1) * workers


def start(reader: Reader, groups: Sequence[list[int]], workers: int) -> Iterator[Loaded]:
    from torch.utils.data import DataLoader

    with warnings.catch_warnings(), own_signals():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads; it only reads images
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: as requested
        loader: Any = DataLoader(
            reader,  # type: ignore[arg-type]  # only its items are used
            batch_size=None,
            sampler=groups,  # each item is a list of numbers
            num_workers=min(workers, len(groups)),
            prefetch_factor=AHEAD,
            worker_init_fn=partial(obey, os.getpid()),
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
        return iter(loader)


@contextmanager
def own_signals() -> Iterator[None]:
    """Without torch's signal handler, which would raise a worker's death in the middle of any computation."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def obey(parent: int, worker: int) -> None:
    """Leave Ctrl-C to the main process, which stops its workers; if it is killed, die with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)


def can_fork_or_pickle(reader: Reader) -> bool:
    if sys.platform == "linux":
        return True
    try:
        pickle.dumps(reader)
        return True
    except Exception:  # a preprocessing made of lambdas
        return False


def in_threads(reader: Reader, groups: Sequence[list[int]], threads: int = 1) -> Iterator[Loaded]:
    """The same in threads, for processes that may not have children; reading starts at once."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="vitreous-read")
    waiting = deque(pool.submit(reader.__getitem__, group) for group in groups[: threads * AHEAD])
    return drained(pool, waiting, reader, groups[threads * AHEAD :])


def drained(
    pool: ThreadPoolExecutor, waiting: deque[Future[Loaded]], reader: Reader, rest: Sequence[list[int]]
) -> Iterator[Loaded]:
    """Results in order; each one taken starts another."""
    more = iter(rest)
    try:
        while waiting:
            loaded = waiting.popleft().result()
            waiting.extend(pool.submit(reader.__getitem__, group) for group in islice(more, 1))
            yield loaded
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def usual_workers(device: str) -> int:
    """How many workers: few on a CPU, whose cores run the model; more for a GPU, which waits for images."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores - 2)) if device == "cuda" else max(1, min(4, cores // 4))


# ----------------------------------------------------------------------------------------------------------- to a GPU


def sent(stream: Iterator[Loaded], device: torch.device) -> Iterator[Loaded]:
    """Copy the images of a stream to a GPU, from pinned memory, while the batch before them is computed."""
    if device.type != "cuda":
        yield from stream
        return
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    before: tuple[Loaded, torch.cuda.Event] | None = None
    for part in stream:
        with torch.cuda.stream(aside):
            for i, batch in enumerate(part.batches):
                pinned = torch.as_tensor(batch.images).pin_memory()
                part.batches[i] = replace(batch, images=pinned.to(device, non_blocking=True))
            there = aside.record_event()
        if before is not None:
            yield arrived(*before)
        before = part, there
    if before is not None:
        yield arrived(*before)


def arrived(part: Loaded, there: torch.cuda.Event) -> Loaded:
    """Make the current stream wait for these images, and only for these."""
    for batch in part.batches:
        assert isinstance(batch.images, Tensor)
        here = torch.cuda.current_stream(batch.images.device)
        here.wait_event(there)
        batch.images.record_stream(here)
    return part
