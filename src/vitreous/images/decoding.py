"""Decode JPEG files on a GPU and prepare them there, while the model computes; what it refuses is left to Pillow.

The decoder is nvJPEG, through torchvision. Everything after it has the same bits as the preprocessing on a CPU.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
from PIL import Image, features
from torch import Tensor

from vitreous.errors import OptionError, one_line
from vitreous.images.jpeg import Header
from vitreous.images.preprocess import Preprocess
from vitreous.images.readers import Batch, Loaded, Reader, arrived
from vitreous.images.scaling import Scaling

DECODERS = ("auto", "cpu", "gpu")
AHEAD = 2  # batches that are prepared ahead
GREY = 120  # of the image with which a decoder is tried
Decode = Callable[[Sequence[Tensor], torch.device], Sequence[Tensor]]


def nvjpeg(files: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The pixels of JPEG files, uint8 [3 Y X].

    torchvision decodes on a stream of its own into memory of the current one, and does not wait for it.
    """
    import torchvision.io  # which has this operation; its own function warns that it may be gone one day

    torch.cuda.current_stream(device).synchronize()
    try:
        decoded: Sequence[Tensor] = torch.ops.image.decode_jpegs_cuda(
            list(files), torchvision.io.ImageReadMode.RGB.value, device
        )
    except RuntimeError:
        torch.cuda.synchronize(device)  # what it has begun
        raise
    return decoded


def choose_scaling(asked: str, steps: Preprocess, device: torch.device) -> Scaling | None:
    """How JPEG files become a model's input on its GPU; None if Pillow decodes them.

    "auto" takes the GPU if it can, "gpu" raises an error if it cannot.
    """
    if asked not in DECODERS:
        raise OptionError(f"unknown decoder {asked!r}; known: {', '.join(DECODERS)}")
    if asked == "cpu":
        return None
    reason = why_not(device)
    found = Scaling.of(steps, device) if reason is None and steps.channels == 3 else None
    if found is None and asked == "gpu":
        reason = reason or "the model's preprocessing is not a resize, a centre crop and a normalisation of torchvision"
        raise OptionError(f"decode=gpu: {reason}; leave it out to decode on the CPU")
    return found


def why_not(device: torch.device) -> str | None:
    """Why JPEG files cannot be decoded on a device; None if they can."""
    if device.type != "cuda":
        return f"the model is on {device.type}, not on an NVIDIA GPU"
    held = io.BytesIO()
    Image.new("RGB", (64, 48), (GREY,) * 3).save(held, "JPEG")
    try:
        pixels = nvjpeg([torch.frombuffer(bytearray(held.getvalue()), dtype=torch.uint8)], device)[0]
        good = pixels.shape == (3, 48, 64) and bool(((pixels.int() - GREY).abs() <= 2).all())
    except (RuntimeError, ImportError, AttributeError) as error:
        return f"torchvision has no decoder for it ({one_line(error, 120)})"
    return None if good else "the decoder of torchvision returns a wrong image"


def decoding_by() -> dict[str, str]:
    """The programs that decode images where a GPU does, by kind of file."""
    turbo = features.version("libjpeg_turbo")
    return {
        "baseline JPEG": f"nvJPEG (CUDA {torch.version.cuda}, torchvision {version('torchvision')})",
        "other": f"Pillow {version('pillow')} (libjpeg-turbo {turbo})",
    }


@dataclass(frozen=True, eq=False)
class Decoder:
    """Makes images on a GPU of the files that a reader has read."""

    reader: Reader
    device: torch.device
    scaling: Scaling
    decode: Decode = nvjpeg

    def __call__(self, stream: Iterator[Loaded]) -> Iterator[Loaded]:
        """The stream with all images on the device, decoded in a thread while the model computes."""
        first = next(stream, None)  # here, so that worker processes are started by this thread
        for part, there in ahead(self.decoded(chain([] if first is None else [first], stream))):
            yield part if there is None else arrived(part, there)

    def decoded(self, stream: Iterable[Loaded]) -> Iterator[tuple[Loaded, torch.cuda.Event | None]]:
        """Each part of the stream, and the event that says when its images are there."""
        aside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        for part in stream:
            with torch.cuda.stream(aside):
                self.fill(part)
            yield part, None if aside is None else aside.record_event()

    def fill(self, part: Loaded) -> None:
        """Put the images of the files into a part; those that the decoder refuses are read by Pillow."""
        numbers, headers = list(part.files), [header for header, _ in part.files.values()]
        made: list[Batch] = []
        if part.held is not None:
            files = torch.split_with_sizes(torch.as_tensor(part.held), [length for _, length in part.files.values()])
            made, part.held = self.batches(numbers, files, headers), None
        refused = set(numbers).difference(*(batch.numbers for batch in made))
        if refused:
            add(part, replace(self.reader, packed=False, sends="")[sorted(refused)])
        for batch in part.batches:
            images = torch.as_tensor(batch.images)
            pinned = images.pin_memory() if self.device.type == "cuda" else images
            made.append(replace(batch, images=pinned.to(self.device, non_blocking=True)))
        part.batches[:] = joined(made)

    def batches(self, numbers: list[int], files: Sequence[Tensor], headers: Sequence[Header]) -> list[Batch]:
        """Decode files at once; if that fails in halves, so that only what cannot be decoded is missing."""
        try:
            pixels = self.decode(files, self.device)
            if any(image.shape != (3, *header.size) for image, header in zip(pixels, headers)):
                raise RuntimeError("the decoder takes another size from the header")
            return [Batch(numbers, self.scaling(pixels, headers), [None] * len(numbers))]
        except RuntimeError:  # a file that it does not take, or too little memory
            half = len(numbers) // 2
            parts = (slice(half), slice(half, None)) if half else ()
            return [batch for part in parts for batch in self.batches(numbers[part], files[part], headers[part])]


def add(part: Loaded, more: Loaded) -> None:
    """Put what was read later to the rest."""
    part.batches += more.batches
    part.failed |= more.failed
    part.photos |= more.photos
    part.hashes |= more.hashes
    part.gone = part.gone or more.gone


def joined(batches: Sequence[Batch]) -> list[Batch]:
    """Batches of one size as one."""
    sizes: dict[tuple[int, ...], list[Batch]] = {}
    for batch in batches:
        sizes.setdefault(tuple(batch.images.shape[1:]), []).append(batch)
    return [same[0] if len(same) == 1 else together(same) for same in sizes.values()]


def together(batches: Sequence[Batch]) -> Batch:
    numbers = [number for batch in batches for number in batch.numbers]
    masks = [mask for batch in batches for mask in batch.masks]
    return Batch(numbers, torch.cat([torch.as_tensor(batch.images) for batch in batches]), masks)


def ahead(stream: Iterator[Any]) -> Iterator[Any]:
    """Take items from a stream in a thread, a few ahead."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="vitreous-decode")
    try:
        waiting = deque(thread.submit(next, stream, None) for _ in range(AHEAD))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, stream, None))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)
