"""Where the time of a study goes, from JPEG files to Parquet, and how far the GPU's decoder is from Pillow.

python benchmarks/decoding.py DATA --device cuda --weights FILE      every stage alone, then the whole study, under 90 s
python benchmarks/decoding.py DATA --images 64 --batch 16            on a CPU Pillow stands in for the decoder

DATA holds JPEG files, each of which is used as often as needed.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import vitreous
from vitreous.evaluation.study.maps import Maps
from vitreous.evaluation.study.shard import Tally, as_table, encode
from vitreous.images.dataset import Data, read_data
from vitreous.images.decoding import Decoder, nvjpeg, why_not
from vitreous.images.jpeg import read_header
from vitreous.images.readers import Reader, in_processes, usual_workers
from vitreous.images.scaling import Scaling
from vitreous.models.model import Model
from vitreous.trace.apply import images_at_once

Pixels = list[Tensor]  # uint8 [3 Y X]


def main() -> None:
    given = parse()
    model = vitreous.load(given.model, given.weights, given.device)
    reason, batch = why_not(model.device), given.batch or images_at_once(model)
    decode = nvjpeg if reason is None else by_pillow
    workers = usual_workers(model.device.type) if given.workers is None else given.workers
    data = repeated(read_data(given.data), given.images)
    said = "nvJPEG" if reason is None else f"Pillow in its place: {reason}"
    print(f"{model.name} on {model.device}, {len(data)} images, batches of {batch}, {workers} workers; {said}")
    held = [one.image.read_bytes() for one in data.samples[:batch]]
    files = [file for file in held if read_header(file) is not None]
    size = np.mean(list(map(len, held)))
    print(f"{len(files)} of the first {len(held)} files are for the decoder; {size:.0f} bytes each on average")
    scaling = Scaling.of(model.preprocess, model.device)
    assert scaling is not None and files, "neither the preprocessing nor the files are for the decoder"
    stages(model, scaling, decode, data, files, batch, workers)
    differences(model, scaling, decode, files[: given.compared])
    for asked in ("cpu", "gpu") if reason is None else ("cpu",):
        tell(
            f"the whole study, decode={asked}", len(data), lambda asked=asked: study(model, data, batch, workers, asked)
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", default="random")
    parser.add_argument("--device")
    parser.add_argument("--images", type=int, default=24576)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--compared", type=int, default=64, help="images whose pixels and maps are compared")
    return parser.parse_args()


def repeated(data: Data, images: int) -> Data:
    chosen = [data.samples[i % len(data)] for i in range(images)]
    return Data(data.source, tuple(replace(s, name=f"{i:06d}/{s.name}") for i, s in enumerate(chosen)))


def by_pillow(files: Sequence[Tensor], device: torch.device) -> Pixels:
    opened = [Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB") for file in files]
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(device) for image in opened]


def as_tensors(files: Sequence[bytes]) -> list[Tensor]:
    return [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]


def tell(stage: str, images: int, work: Callable[[], Any]) -> Any:
    """Run something once and print its rate."""
    begun = now()
    made = work()
    print(f"{stage:44s} {images / (now() - begun):9.0f} images/s", flush=True)
    return made


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def stages(
    model: Model, scaling: Scaling, decode: Any, data: Data, files: list[bytes], batch: int, workers: int
) -> None:
    """Every stage alone; those of one batch after a first run that is not counted."""
    samples = dict(enumerate(data.samples[: 16 * batch]))
    groups = [list(samples)[start : start + batch] for start in range(0, len(samples), batch)]
    packed = Reader(samples, model.preprocess, hashed=True, packed=True)
    plain = replace(packed, packed=False)
    tell("read files and check their headers", len(samples), lambda: list(in_processes(packed, groups, workers)))
    few = groups[: max(1, len(groups) // 4)]
    some = sum(map(len, few))
    tell("read and prepare by Pillow", some, lambda: list(in_processes(plain, few, workers)))
    given, headers = as_tensors(files), [header for file in files if (header := read_header(file)) is not None]
    decoder = Decoder(packed, model.device, scaling, decode)
    tell(
        "read, decode and prepare in a thread",
        len(samples),
        lambda: list(decoder(in_processes(packed, groups, workers))),
    )
    pixels = warm("decode", len(files), lambda: decode(given, model.device))
    images = warm("resize, crop and normalise", len(files), lambda: scaling(pixels, headers))
    made = warm("method alone", len(files), lambda: vitreous.explain(model, images, "attention").map)
    kind, first = Maps.make("attention"), made[0].cpu().numpy()
    rows = [{"model": "m", "image": str(i), "method": "attention", "map": first + i} for i in range(batch)]
    warm("table and Parquet", batch, lambda: encode(as_table(kind, rows, Tally()), {"study": "x", "shard": 0}))


def warm(stage: str, images: int, work: Callable[[], Any]) -> Any:
    work()
    return tell(stage, images, work)


def differences(model: Model, scaling: Scaling, decode: Any, files: list[bytes]) -> None:
    """Pixels, inputs and maps of both decoders."""
    headers = [header for file in files if (header := read_header(file)) is not None]
    one, two = by_pillow(as_tensors(files), model.device), decode(as_tensors(files), model.device)
    apart = torch.cat([(a.int() - b.int()).abs().flatten() for a, b in zip(one, two)]).float()
    many = (apart > 8).float().mean()
    print(f"pixels of 0…255: mean difference {apart.mean():.3f}, largest {apart.max():.0f}, more than 8 in {many:.2%}")
    inputs = [scaling(pixels, headers) for pixels in (one, two)]
    print(f"inputs, in standard deviations: mean difference {(inputs[0] - inputs[1]).abs().mean():.4f}")
    maps = [vitreous.explain(model, given, "attention").map.flatten(1) for given in inputs]
    largest = (maps[0] - maps[1]).abs().amax(1) / maps[0].abs().amax(1)
    alike = [np.corrcoef(a, b)[0, 1] for a, b in zip(*(found.cpu().numpy() for found in maps))]
    most, usual = largest.max(), largest.median()
    print(f"maps: largest difference {most:.2%} of the map's maximum, {usual:.2%} in the median image")
    print(f"maps: lowest correlation {min(alike):.4f}")


def study(model: Model, data: Data, batch: int, workers: int, decode: str) -> None:
    how: dict[str, Any] = {"methods": "attention", "batch": batch, "workers": workers, "decode": decode}
    with tempfile.TemporaryDirectory() as folder:
        vitreous.run_study("maps", data, model, folder, **how)


if __name__ == "__main__":
    main()
