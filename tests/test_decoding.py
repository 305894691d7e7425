"""JPEG files decoded beside the model: the same images as by Pillow. A decoder of the CPU stands in for a GPU's."""

from __future__ import annotations

import io
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from test_study import small
from torch import Tensor
from torchvision import transforms

import vitreous
from vitreous import Model, run_study
from vitreous.errors import OptionError
from vitreous.evaluation.study import local
from vitreous.evaluation.study.maps import Maps
from vitreous.evaluation.study.plan import BY_GPU, Source, plan
from vitreous.images import decoding, pictures
from vitreous.images.dataset import read_data
from vitreous.images.decoding import Decoder, ahead, choose_scaling
from vitreous.images.jpeg import ORIENTATION, Header, read_header
from vitreous.images.preprocess import IMAGENET, Preprocess, adapt
from vitreous.images.readers import Loaded, Reader, in_threads
from vitreous.images.resampling import Frame, resampled
from vitreous.images.scaling import Scaling, in_parts
from vitreous.models.libraries import cropped

__all__ = ["small"]  # a fixture
CPU = torch.device("cpu")
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def by_pillow(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """In place of `nvjpeg`: [3 Y X] as stored, not turned."""
    opened = [Image.open(io.BytesIO(file.numpy().tobytes())) for file in files]
    return [torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous() for image in opened]


def by_torchvision(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [torch.ops.image.decode_jpeg(file, 3, False) for file in files]


def noise(high: int, wide: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (high, wide, 3), np.uint8)


def smooth(seed: int = 0, size: tuple[int, int] = (90, 60)) -> Image.Image:
    return Image.fromarray(noise(8, 12, seed)).resize(size, Image.Resampling.BICUBIC)


def jpeg(image: Image.Image | None = None, **options: Any) -> bytes:
    held = io.BytesIO()
    (image or smooth()).save(held, "JPEG", **options)
    return held.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return jpeg(exif=exif)


# ----------------------------------------------------------------------------------------------------------- resizing


@pytest.mark.parametrize("filter", FILTERS)
def test_images_of_all_sizes_are_resized_with_the_bits_of_pillow(filter: str) -> None:
    sizes = {(40, 57): (24, 34), (57, 40): (34, 24), (20, 20): (27, 27), (24, 24): (24, 24), (31, 200): (24, 159)}
    images = [noise(*size, seed) for seed, size in enumerate(sizes)]
    frames, start, expected = [], 0, []
    for image, (size, scaled) in zip(images, sizes.items()):
        top, left = (round((side - 20) / 2) for side in scaled)
        frames.append(Frame(start, (1, 3 * size[1], 3), size, scaled, (top, left)))  # channels last
        whole = np.asarray(Image.fromarray(image).resize(scaled[::-1], FILTERS[filter]))
        expected.append(whole[top : top + 20, left : left + 20].transpose(2, 0, 1))
        start += image.size
    made = resampled(torch.from_numpy(np.concatenate([image.ravel() for image in images])), frames, (20, 20), filter)
    assert made.dtype == torch.uint8 and np.array_equal(made.numpy(), np.stack(expected))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_exif_says(orientation: int) -> None:
    held = turned(orientation)
    header = read_header(held)
    assert header is not None and header.orientation == orientation
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(held))).convert("RGB")
    first, steps = header.steps()
    frame = Frame(first, steps, header.upright, header.upright, (0, 0))
    pixels = by_pillow([torch.frombuffer(bytearray(held), dtype=torch.uint8)], CPU)[0]
    made = resampled(pixels.flatten(), [frame], header.upright, "bicubic")[0]
    assert np.array_equal(made.permute(1, 2, 0).numpy(), np.asarray(expected))


def steps(*first: Any) -> Preprocess:
    return adapt(transforms.Compose([*first, transforms.ToTensor(), transforms.Normalize(*IMAGENET)]))


def test_a_preprocessing_is_followed_only_if_it_gives_the_same_bits() -> None:
    resize, crop = transforms.Resize(40, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(32)
    assert Scaling.of(cropped((32, 32), *IMAGENET, 0.9), CPU) is not None
    assert Scaling.of(steps(resize, crop), CPU) is not None
    other = (
        steps(transforms.Resize((40, 36)), crop),
        steps(resize, transforms.RandomCrop(32)),
        steps(resize, crop, transforms.GaussianBlur(3)),
        steps(resize, transforms.CenterCrop(50)),  # padded
        steps(resize, crop, transforms.RandomHorizontalFlip(1.0)),
        steps(transforms.Resize(40, transforms.InterpolationMode.NEAREST), crop),
        adapt(lambda image: torch.zeros(3, 8, 8) + np.asarray(image).mean() / 255),
    )
    assert [Scaling.of(one, CPU) for one in other] == [None] * len(other)


def test_tall_images_are_resized_in_smaller_parts() -> None:
    headers = [Header((size, 10)) for size in (1 << 14, 1 << 14, 1 << 14, 8, 8, 1 << 15)]
    assert in_parts(headers) == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)]
    assert in_parts(headers[:1]) == [slice(0, 1)]


# -------------------------------------------------------------------------------------------------------------- files


def mpf() -> bytes:
    held = jpeg()
    return held[:2] + b"\xff\xe2\x00\x08MPF\x00\x00\x00" + held[2:]


LEFT: dict[str, Callable[[], bytes]] = {
    "progressive": lambda: jpeg(progressive=True),
    "grey": lambda: jpeg(smooth().convert("L")),
    "CMYK": lambda: jpeg(smooth().convert("CMYK")),
    "red, green and blue": lambda: jpeg(keep_rgb=True, subsampling=0),
    "truncated": lambda: jpeg()[:-40],
    "without its end": lambda: jpeg()[:-2],
    "with something behind": lambda: jpeg() + b"\0",
    "two images": mpf,
    "PNG": lambda: b"\x89PNG\r\n\x1a\n" + bytes(40),
    "empty": bytes,
    "too long": lambda: jpeg(Image.new("RGB", (600, 9))),
    "too small": lambda: jpeg(Image.new("RGB", (7, 7))),
    "high": lambda: jpeg(Image.new("RGB", (40, 81))),
    "too large": lambda: jpeg(Image.new("RGB", (2100, 2100)), quality=10),
}


@pytest.mark.parametrize("kind", LEFT)
def test_other_files_are_left_to_pillow(kind: str) -> None:
    assert read_header(LEFT[kind]()) is None


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"subsampling": 1}, {"optimize": True}, {"quality": 30}])
def test_usual_files_are_taken(options: dict[str, Any]) -> None:
    assert read_header(jpeg(**options)) == Header((60, 90))


def test_what_pillow_refuses_is_never_taken() -> None:
    """Or a decoder might make an image of a damaged file, where there was an error before."""
    whole, chance = jpeg(smooth(size=(40, 32))), random.Random(0)
    taken = refused = 0
    for case in range(600):
        held = bytearray(whole)
        if case % 3 == 0:
            del held[chance.randrange(len(held)) :]
        for _ in range(chance.choice((1, 3)) if case % 3 else 0):
            held[chance.randrange(len(held) if case % 3 == 1 else whole.index(b"\xff\xda") + 14)] = chance.randrange(
                256
            )
        header = read_header(bytes(held))
        try:
            image = pictures.upright(Image.open(io.BytesIO(held)), "damaged")
        except Exception:
            refused += 1
            assert header is None, case
        else:
            taken += header is not None
            assert header is None or header.upright == image.size[::-1]
    assert taken > 100 and refused > 200


# ------------------------------------------------------------------------------------------------------------ studies


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for the decoder and for Pillow, and two that nothing reads."""
    root = tmp_path_factory.mktemp("mixed")
    for i in range(6):
        (root / f"{i}.jpg").write_bytes(jpeg(smooth(i, (90 + i, 70))))
    (root / "rotated.jpg").write_bytes(turned(6))
    for name in ("progressive", "grey", "CMYK", "truncated", "empty"):
        (root / f"{name}.jpg").write_bytes(LEFT[name]())
    smooth(9).save(root / "other.png")
    Image.fromarray(noise(40, 50)[:, :, 0].astype(np.uint16) * 200).save(root / "deep.png")
    return root


def loaded(stream: Iterator[Loaded]) -> tuple[dict[int, Tensor], list[dict[int, Any]]]:
    parts = list(stream)
    images = {n: torch.as_tensor(x) for part in parts for one in part.batches for n, x in zip(one.numbers, one.images)}
    return images, [
        {k: v for part in parts for k, v in getattr(part, name).items()} for name in ("failed", "hashes", "photos")
    ]


def test_the_same_images_as_without_the_decoder(small: Model, mixed: Path) -> None:
    samples = dict(enumerate(read_data(mixed).samples))
    groups = [list(samples)[:9], list(samples)[9:]]
    reader = Reader(samples, small.preprocess, frozenset({0, 7}), hashed=True, packed=True)
    seen: list[int] = []
    refused = len(samples[3].image.read_bytes())

    def decode(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        if refused in map(len, files):
            raise RuntimeError("this file is not supported")
        seen.append(len(files))
        return by_pillow(files, device)

    scaling = Scaling.of(small.preprocess, CPU)
    assert scaling is not None
    images, told = loaded(Decoder(reader, CPU, scaling, decode)(in_threads(reader, groups)))
    plain = Reader(samples, small.preprocess, frozenset({0, 7}), hashed=True)
    expected, told_before = loaded(in_threads(plain, groups))
    assert told == told_before and len(told[0]) == 2 and len(told[1]) == 14 and len(told[2]) == 2
    assert sorted(images) == sorted(expected) and all(torch.equal(images[n], expected[n]) for n in images)
    assert sum(seen) == 6, "of 7 files that the decoder might take"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device of the model could decode."""
    monkeypatch.setattr(decoding, "why_not", lambda device: None)
    monkeypatch.setattr(local, "Decoder", partial(Decoder, decode=by_torchvision))


@pytest.mark.usefixtures("beside")
def test_a_study_with_a_decoder_is_another_and_says_so(small: Model, mixed: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"methods": "attention", "batch": 4, "shard": 4, "workers": 0}
    plain = run_study("maps", mixed, small, tmp_path, **given)
    study = run_study("maps", mixed, small, tmp_path, decode="gpu", **given)
    assert study.folder != plain.folder and study.manifest["models"][0]["decoder"] == "gpu"
    assert (
        f"small: {BY_GPU}"
        in plan(Maps.make("attention"), [Source(ready=small)], read_data(mixed), decode="gpu")[0].notes
    )
    one, two = plain.to_pandas(), study.to_pandas()
    names = ["image", "image_hash", "prediction", "error"]
    assert one[names].equals(two[names]) and one["error"].notna().sum() == 2
    before = {row["image"]: row["map"] for row in plain.iter_maps("attention")}
    for row in study.iter_maps("attention"):
        assert np.allclose(row["map"], before[row["image"]], rtol=1e-2), "both decoders are libjpeg"
    told = study.attribution("0.jpg", "attention").provenance["decoder"]
    assert told["baseline JPEG"].startswith("nvJPEG") and told["other"].startswith("Pillow")
    assert "decoder" not in plain.provenance("0.jpg", "attention")
    study.attribution("0.jpg", "attention").save(tmp_path / "map.npz")
    assert vitreous.Attribution.load(tmp_path / "map.npz").provenance["decoder"] == told
    (study.folder / "shards/00001.parquet").unlink()
    again = run_study("maps", mixed, small, tmp_path, decode="gpu", **given)
    assert again.folder == study.folder and again.to_pandas().equals(two)
    assert json.loads((plain.folder / "study.json").read_text())["id"] != study.manifest["id"]


def test_who_decodes_is_chosen_before_anything_runs(
    small: Model, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"methods": "attention", "out": tmp_path}
    with pytest.raises(OptionError, match="the model is on cpu"):
        run_study("maps", mixed, small, decode="gpu", **given)
    with pytest.raises(OptionError, match="known: auto, cpu, gpu"):
        run_study("maps", mixed, small, decode="nvjpeg", **given)
    with pytest.raises(OptionError, match="shortcuts decodes on the CPU only"):
        run_study("shortcuts", mixed, small, out=tmp_path, decode="gpu")
    assert choose_scaling("auto", small.preprocess, CPU) is None
    monkeypatch.setattr(decoding, "why_not", lambda device: None)
    assert choose_scaling("auto", small.preprocess, CPU) is not None
    assert choose_scaling("cpu", small.preprocess, CPU) is None
    other = adapt(lambda image: transforms.functional.to_tensor(image.resize((64, 64))))
    assert choose_scaling("auto", other, CPU) is None
    with pytest.raises(OptionError, match="preprocessing is not a resize"):
        choose_scaling("gpu", other, CPU)


def test_a_stream_in_a_thread_ends_with_its_consumer() -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for i in range(100):
            taken.append(i)
            yield i + 1
        raise ValueError("at its end")

    stream = ahead(numbers())
    assert [next(stream), next(stream)] == [1, 2]
    stream.close()  # type: ignore[attr-defined]
    assert len(taken) <= 5 and not [t for t in threading.enumerate() if t.name.startswith("vitreous-decode")]
    with pytest.raises(ValueError, match="at its end"):
        list(ahead(numbers()))
