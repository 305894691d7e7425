"""Pictures within tars and saved data sets: found, read one by one from any process, and refused with a reason."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from conftest import off
from machine import ROUNDING
from PIL import Image

import vitreous
from vitreous import Model
from vitreous.errors import InputError, ModelError, TargetError
from vitreous.images import tars
from vitreous.images.dataset import Data, read_data
from vitreous.images.masks import read_mask
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped
from vitreous.models.match_labels import match_labels

SIZE = (30, 20)
Files = Sequence[tuple[str, bytes]]


@pytest.fixture(scope="module")
def small() -> Model:
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")


def photo(grey: int = 0, form: str = "PNG", size: tuple[int, int] = SIZE) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", size, (grey, grey, grey)).save(held, form)
    return held.getvalue()


def write_tar(path: Path, files: Files, form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as opened:
        for name, content in files:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            opened.addfile(header, io.BytesIO(content))
    return path


def shard(path: Path, first: int, count: int = 3) -> Path:
    """Each picture's grey is its number and its label."""
    pairs = [((f"{i:03}.png", photo(i)), (f"{i:03}.cls", str(i).encode())) for i in range(first, first + count)]
    return write_tar(path, [file for pair in pairs for file in pair])


def told(data: Data) -> list[tuple[str, Any]]:
    return [(sample.name, sample.label) for sample in data.samples]


def greys(data: Data) -> list[int]:
    return [np.asarray(sample.open().image)[0, 0, 0].item() for sample in data.samples]


# ------------------------------------------------------------------------------------------------------- what tars hold


def test_a_tar_of_pictures_and_labels(tmp_path: Path) -> None:
    tar = write_tar(
        tmp_path / "x.tar",
        [
            ("./n01/a.jpg", photo(10, "JPEG")),
            ("./n01/a.cls", b"7\n"),
            ("b.json", json.dumps({"label": "dog", "caption": "a dog"}).encode()),
            ("b.PNG", photo(20)),
            ("c.webp", photo(30, "WEBP")),
            ("c.txt", b"a thing"),
            ("d.json", json.dumps({"caption": "no picture"}).encode()),
            ("e.cls", b"-1"),
            ("e.png", photo(40)),
            ("f.left.png", photo(50)),
            ("f.right.png", photo(60)),
            ("f.cls", b"hound"),
            ("._a.jpg", b"a resource fork"),
            ("README", b"no ending"),
        ],
    )
    data = read_data(tar)
    wanted = [("n01/a.jpg", 7), ("b.PNG", "dog"), ("c.webp", None), ("e.png", None)]
    assert told(data) == [*wanted, ("f.left.png", "hound"), ("f.right.png", "hound")]
    assert np.abs(np.subtract(greys(data), [10, 20, 30, 40, 50, 60])).max() <= 2  # JPEG and WebP lose a little
    assert data.notes == () and data.source == str(tar)
    assert str(data.samples[0].image) == f"{tar}/n01/a.jpg" and data.samples[0].open().name == "a.jpg"


def test_the_values_of_json_labels(tmp_path: Path) -> None:
    kinds = [{"cls": 3}, {"class": "cat"}, {"label": [1]}, {"label": True, "target": "5"}, {}, [1]]
    files = [(f"{i}.json", json.dumps(kind).encode()) for i, kind in enumerate(kinds)]
    tar = write_tar(tmp_path / "x.tar", [*files, *((f"{i}.png", photo(i)) for i in range(len(kinds)))])
    assert [sample.label for sample in read_data(tar).samples] == [3, "cat", None, 5, None, None]


def test_a_bad_label_is_noted(tmp_path: Path) -> None:
    files = [("a.png", photo()), ("a.json", b"{"), ("b.png", photo()), ("b.cls", b"\xff\xfe"), ("c.png", photo())]
    data = read_data(write_tar(tmp_path / "x.tar", files))
    assert told(data) == [("a.png", None), ("b.png", None), ("c.png", None)]
    assert data.notes == ("2 labels cannot be read: a.png, b.png",)


@pytest.mark.parametrize("ending", ["mask.png", "seg.png", "mask", "SEG.PNG"])
def test_masks_within(tmp_path: Path, ending: str, small: Model) -> None:
    drawn = io.BytesIO()
    Image.fromarray(np.pad(np.full((20, 15), 255, np.uint8), ((0, 0), (0, 15)))).save(drawn, "PNG")
    files = [(f"a.{ending}", drawn.getvalue()), ("a.jpg", photo(9, "JPEG")), ("b.jpg", photo(9, "JPEG"))]
    data = read_data(write_tar(tmp_path / "x.tar", files))
    assert told(data) == [("a.jpg", None), ("b.jpg", None)] and data.masked
    first, second = data.samples
    assert second.mask is None
    mask = read_mask(first.mask, first.open(), small.preprocess, (64, 64))
    assert mask is not None and mask[:, :8].all() and not mask[:, -8:].any()
    (tmp_path / "masks").mkdir()
    Image.open(drawn).save(tmp_path / "masks" / "b.png")
    assert read_data(tmp_path / "x.tar", tmp_path / "masks").samples[1].mask == tmp_path / "masks" / "b.png"


def test_a_mask_that_cannot_be_read(tmp_path: Path, small: Model) -> None:
    data = read_data(write_tar(tmp_path / "x.tar", [("a.png", photo()), ("a.mask.png", b"no")]))
    with pytest.raises(InputError, match=r"x\.tar/a\.mask\.png: cannot be read as a mask"):
        read_mask(data.samples[0].mask, data.samples[0].open(), small.preprocess, (64, 64))


def test_a_key_that_comes_again(tmp_path: Path) -> None:
    again = [("a.png", photo(3)), ("a.cls", b"2"), ("a.png", photo(4)), ("a.cls", b"3")]
    files = [
        ("a.png", photo(1)),
        ("a.cls", b"0"),
        ("a (2).png", photo(5)),
        ("b.cls", b"1"),
        ("b.png", photo(2)),
        *again,
    ]
    data = read_data(write_tar(tmp_path / "x.tar", files))
    assert told(data) == [("a.png", 0), ("a (2).png", None), ("b.png", 1), ("a.png (2)", 2), ("a.png (3)", 3)]
    assert greys(data) == [1, 5, 2, 3, 4]
    assert data.notes == ("1 names occur more than once, all are used: a.png",)


def test_labels_may_lie_apart_from_their_pictures(tmp_path: Path) -> None:
    files = [("a.png", photo(1)), ("b.png", photo(2)), ("a.cls", b"1"), ("b.cls", b"2")]
    assert told(read_data(write_tar(tmp_path / "x.tar", files))) == [("a.png", 1), ("b.png", 2)]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_kind_of_header(tmp_path: Path, form: int) -> None:
    long = f"{'d' * 90}/{'e' * 60}/é.png"
    tar = write_tar(tmp_path / "x.tar", [("a.png", photo(1)), (long, photo(2)), ("b.png", photo(3))], form)
    assert [sample.name for sample in read_data(tar).samples] == ["a.png", long, "b.png"]
    assert greys(read_data(tar)) == [1, 2, 3]


def test_links_and_folders_are_passed_over(tmp_path: Path) -> None:
    photos = tmp_path / "in" / "sub"
    photos.mkdir(parents=True)
    (photos / "a.png").write_bytes(photo(1))
    (photos / "z.png").symlink_to("a.png")
    with tarfile.open(tmp_path / "x.tar", "w") as opened:
        opened.add(tmp_path / "in", ".")
    assert [sample.name for sample in read_data(tmp_path / "x.tar").samples] == ["sub/a.png"]


def test_what_webdataset_writes(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        webdataset = pytest.importorskip("webdataset", reason="webdataset itself writes the file: pip install it")
        with webdataset.TarWriter(str(tmp_path / "x.tar")) as writer:
            for i in range(4):
                picture = np.full((20, 30, 3), i, np.uint8)
                writer.write({"__key__": f"n0{i % 2}/{i:04}", "png": picture, "cls": i, "json": {"label": 9}})
    data = read_data(tmp_path / "x.tar")
    assert told(data) == [("n00/0000.png", 0), ("n01/0001.png", 1), ("n00/0002.png", 2), ("n01/0003.png", 3)]
    assert greys(data) == [0, 1, 2, 3] and data.notes == ()


# --------------------------------------------------------------------------------------------------- how tars are named


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for i in range(3):
        shard(tmp_path / "shards" / f"part-{i:04}.tar", 10 * i)
    return tmp_path / "shards"


@pytest.mark.parametrize(
    "way", ["", "/*.tar", "/*", "/part-{0000..0002}.tar", "/part-000{0,1,2}.tar", "/*-{0000..2}.tar"]
)
def test_shards_by_folder_pattern_or_range(shards: Path, way: str) -> None:
    data = read_data(f"{shards}{way}")
    names = [f"part-000{i}/{10 * i + k:03}.png" for i in range(3) for k in range(3)]
    assert told(data) == [(name, int(name[-7:-4])) for name in names]
    assert greys(data) == [sample.label for sample in data.samples]
    assert data.fingerprint == read_data(sorted(shards.iterdir())).fingerprint


def test_braces_as_a_shell_writes_them_out() -> None:
    assert tars.braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert tars.braces("{8..10}") == ["8", "9", "10"] and tars.braces("{2..0}") == ["2", "1", "0"]
    assert tars.braces("{000..002}") == ["000", "001", "002"]
    assert tars.braces("{a,b}/{1..2}.tar") == ["a/1.tar", "a/2.tar", "b/1.tar", "b/2.tar"]
    assert tars.braces("{x}{}{1..}.tar") == ["{x}{}{1..}.tar"]


def test_braces_in_a_name_that_exists(tmp_path: Path) -> None:
    assert len(read_data(shard(tmp_path / "{1..3}.tar", 0))) == 3


def test_one_tar_of_several_folders(tmp_path: Path) -> None:
    tars = [shard(tmp_path / "train" / "0.tar", 0), shard(tmp_path / "val" / "0.tar", 0)]
    names = [sample.name for sample in read_data(tars).samples]
    assert names[0] == "train/0/000.png" and names[3] == "val/0/000.png" and len(set(names)) == 6
    assert [sample.name for sample in read_data([tmp_path / "train", tmp_path / "val"]).samples] == names
    assert [sample.name for sample in read_data([tars[0], str(tars[0])]).samples] == ["000.png", "001.png", "002.png"]


def test_a_tar_beside_its_unpacked_pictures(tmp_path: Path) -> None:
    shard(tmp_path / "val.tar", 0)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(photo(1))
    assert told(read_data(tmp_path)) == [("cat/1.png", "cat")]


def test_tars_and_pictures_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    with pytest.raises(InputError, match=r"a\.png: is not a tar file; give tar files or images, not both"):
        read_data([shard(tmp_path / "x.tar", 0), tmp_path / "a.png"])


def test_shards_that_are_not_there(shards: Path) -> None:
    with pytest.raises(InputError, match=r"part-0003\.tar.*: no such file \(2 of 5 tar files are missing\)"):
        read_data(f"{shards}/part-{{0000..0004}}.tar")
    with pytest.raises(InputError, match=r"none\.tar: no such file$"):
        read_data(shards / "none.tar")
    with pytest.raises(InputError, match="nothing matches this pattern"):
        read_data(f"{shards}/x*.tar")


# ---------------------------------------------------------------------------------------------------------- broken tars


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar", "x.tar.zst"])
def test_compressed_tars_are_refused(tmp_path: Path, name: str) -> None:
    plain = shard(tmp_path / "plain" / "x.tar", 0)
    (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
    for source in (tmp_path / name, [plain, tmp_path / name]):
        with pytest.raises(InputError, match=r"x\.t.*: is compressed.*decompress it to a \.tar"):
            read_data(source)


@pytest.mark.parametrize("content", [b"", b"no tar" * 1000, b"\x1f\x8b" + b"x" * 1000, bytes(5)])
def test_one_unreadable_tar(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(InputError, match=r"x\.tar after 0 files \(.+\): cannot be read as a tar file; download"):
        read_data(tmp_path / "x.tar")


def test_a_tar_without_pictures(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.tar: no images inside \(\.bmp"):
        read_data(write_tar(tmp_path / "x.tar", [("a.txt", b"a")]))
    with pytest.raises(InputError, match="no images inside"):
        read_data(write_tar(tmp_path / "x.tar", []))


def test_a_broken_shard_among_good_ones(shards: Path) -> None:
    broken = shards / "part-0001.tar"
    broken.write_bytes(broken.read_bytes()[:100])
    data = read_data(shards)
    assert [sample.name[:9] for sample in data.samples] == ["part-0000"] * 3 + ["part-0002"] * 3
    (note,) = data.notes
    assert "1 of 3 tar files truncated or damaged, the rest is used" in note and f"{broken} after 0 files (" in note


def layout(tar: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(tar) as opened:
        return opened.getmembers()


@pytest.mark.parametrize("where", ["header", "picture", "after", "damaged"])
def test_a_tar_that_ends_too_early(tmp_path: Path, where: str) -> None:
    tar = shard(tmp_path / "x.tar", 0, 4)
    third, held = layout(tar)[4], bytearray(tar.read_bytes())
    cut = {"header": third.offset + 100, "picture": third.offset_data + 20, "after": third.offset, "damaged": len(held)}
    if where == "damaged":
        held[third.offset + 5 : third.offset + 50] = b"?" * 45
    tar.write_bytes(held[: cut[where]])
    data = read_data(tar)
    assert told(data) == [("000.png", 0), ("001.png", 1)] and greys(data) == [0, 1]
    assert "1 of 1 tar files truncated or damaged" in data.notes[0] and "after 4 files" in data.notes[0]


def test_any_cut_and_any_scratch_end_well(tmp_path: Path) -> None:
    tar, chance = shard(tmp_path / "x.tar", 0, 4), random.Random(0)
    whole, opened, said = tar.read_bytes(), 0, []
    for _ in range(150):
        held = bytearray(whole[: chance.randrange(1, len(whole))] if chance.random() < 0.5 else whole)
        for _ in range(chance.randrange(4)):
            held[chance.randrange(len(held))] = chance.randrange(256)
        tar.write_bytes(held)
        try:
            for sample in read_data(tar).samples:
                sample.open()
                opened += 1
        except InputError as error:
            said.append(str(error))
    assert opened > 50 and len(said) > 20, "or this shows nothing"
    assert not any("\n" in line for line in said)


def test_a_corrupt_picture_is_its_own_error(tmp_path: Path) -> None:
    whole = photo(5, "JPEG", (200, 200))
    files = [
        ("a.png", photo(1)),
        ("b.jpg", whole[:500]),
        ("c.jpg", b"text"),
        ("d.jpg", b""),
        ("e.png", photo(1, size=(2, 2))),
    ]
    data = read_data(write_tar(tmp_path / "x.tar", files))
    assert len(data) == 5 and data.notes == ()
    data.samples[0].open()
    reasons = ["truncated or corrupt", "is not an image that Pillow can read", "the file is empty", "are too few"]
    for sample, reason in zip(data.samples[1:], reasons, strict=True):
        with pytest.raises(InputError, match=rf"x\.tar/{sample.name}: .*{reason}"):
            sample.open()


def test_a_tar_that_changes_after_it_was_read(tmp_path: Path) -> None:
    data = read_data(shard(tmp_path / "x.tar", 0))
    before = data.samples[2].stamp
    (tmp_path / "x.tar").write_bytes(b"short")
    assert data.samples[2].stamp != before
    with pytest.raises(InputError, match=r"x\.tar has been truncated since it was scanned"):
        data.samples[2].open()
    (tmp_path / "x.tar").unlink()
    assert data.samples[2].stamp.startswith("missing")
    with pytest.raises(InputError, match=r"x\.tar/002\.png: no such file"):
        data.samples[2].open()


# ------------------------------------------------------------------------------------------------- in other processes


READER = """
import pickle, sys
for sample in pickle.load(sys.stdin.buffer):
    sys.stdout.write(f"{sample.open().image.getpixel((0, 0))[0]} ")
"""


def greys_elsewhere(data: Data) -> list[int]:
    """In a fresh process, from nothing but the pickled samples."""
    sent = pickle.dumps(data.samples)
    done = subprocess.run([sys.executable, "-c", READER], input=sent, capture_output=True, check=True)
    assert done.stderr == b""
    return [int(word) for word in done.stdout.split()]


@pytest.mark.process
def test_tar_samples_travel(shards: Path) -> None:
    data = read_data(shards)
    assert pickle.loads(pickle.dumps(data)) == data
    assert len(pickle.dumps(data)) < 150 * len(data)
    assert greys_elsewhere(data) == greys(data)


def test_pictures_are_not_read_to_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [[(f"{i}.png", bytes(200_000)), (f"{i}.cls", b"1")] for i in range(20)]
    tar = write_tar(tmp_path / "x.tar", [file for pair in pairs for file in pair])
    read = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            read.append(held := super().read(size))
            return held

    monkeypatch.setattr(Path, "open", lambda self, mode: Counted(self))
    assert len(read_data(tar)) == 20
    assert sum(map(len, read)) < 64_000 < tar.stat().st_size // 60


def test_explain_takes_a_stored_picture(tmp_path: Path, small: Model) -> None:
    sample = read_data(shard(tmp_path / "x.tar", 0)).samples[0]
    made = vitreous.explain(small, sample.image, "attention")
    assert off(made.map, vitreous.explain(small, sample.open(), "attention").map) <= ROUNDING


# ------------------------------------------------------------------------------------------------------ Hugging Face


@pytest.fixture
def hf() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = pytest.importorskip("datasets", reason="saved data sets need datasets: pip install 'vitreous[hf]'")
        datasets.disable_progress_bars()
        yield datasets
        datasets.enable_progress_bars()


def make(hf: Any, count: int = 5, path: str | None = "in/{:02}.png", **more: Any) -> Any:
    """Each picture's grey is its number."""
    columns = {"id": [f"n{i}" for i in range(count)]}
    rows = [{"bytes": photo(i), "path": path and path.format(i)} for i in range(count)]
    kinds = {"id": hf.Value("string"), "image": hf.Image(), **{name: kind for name, (kind, _) in more.items()}}
    columns |= {"image": rows, **{name: values for name, (_, values) in more.items()}}
    return hf.Dataset.from_dict(columns, features=hf.Features(kinds))


def classed(hf: Any, names: Sequence[str] = ("cat", "hound", "b"), values: Sequence[int] = (0, 1, 2, -1, 1)) -> Any:
    return make(hf, len(values), label=(hf.ClassLabel(names=list(names)), list(values)))


def test_a_saved_data_set(tmp_path: Path, hf: Any, small: Model, capfd: pytest.CaptureFixture[str]) -> None:
    classed(hf).save_to_disk(tmp_path / "set")
    data = read_data(tmp_path / "set")
    assert told(data) == [
        ("00.png", "cat"),
        ("01.png", "hound"),
        ("02.png", "b"),
        ("03.png", None),
        ("04.png", "hound"),
    ]
    assert greys(data) == [0, 1, 2, 3, 4] and data.source == str(tmp_path / "set")
    assert [sample.label for sample in match_labels(data, small).samples] == [0, 1, 3, None, 1]
    assert str(data.samples[1].image) == f"{tmp_path / 'set'}/row 000001"
    assert capfd.readouterr() == ("", "")


def test_labels_without_names(tmp_path: Path, hf: Any) -> None:
    make(hf, 3, label=(hf.Value("int64"), [4, -1, None])).save_to_disk(tmp_path / "a")
    assert [sample.label for sample in read_data(tmp_path / "a").samples] == [4, None, None]
    make(hf, 2, note=(hf.Value("string"), ["x", "y"]), Class=(hf.Value("string"), ["dog", ""])).save_to_disk(
        tmp_path / "b"
    )
    assert [sample.label for sample in read_data(tmp_path / "b").samples] == ["dog", None]
    make(hf, 2, fine=(hf.ClassLabel(num_classes=3), [2, 0])).save_to_disk(tmp_path / "c")
    assert [sample.label for sample in read_data(tmp_path / "c").samples] == [2, 0]
    make(hf, 2).save_to_disk(tmp_path / "d")
    assert [sample.label for sample in read_data(tmp_path / "d").samples] == [None, None]


def test_numbers_decide_where_a_few_names_differ(tmp_path: Path, hf: Any, small: Model) -> None:
    classed(hf, ["cat", "dog", *"abcd", "e2"], [6, 0, 1]).save_to_disk(tmp_path / "same")
    assert [sample.label for sample in match_labels(read_data(tmp_path / "same"), small).samples] == [6, 0, 1]
    classed(hf, ["e2", *"dcba", "dog", "cat"], [6, 0, 1]).save_to_disk(tmp_path / "other")
    with pytest.raises(TargetError, match="1 of 3 labels are not classes of small: e2"):
        match_labels(read_data(tmp_path / "other"), small)


@pytest.mark.parametrize("path", [None, "same.png", "{}/x.png"])
def test_rows_are_numbered_where_names_do_not_tell_them_apart(tmp_path: Path, hf: Any, path: str | None) -> None:
    make(hf, 3, path).save_to_disk(tmp_path / "set")
    assert [sample.name for sample in read_data(tmp_path / "set").samples] == ["row 000000", "row 000001", "row 000002"]


def test_another_order_and_a_part(tmp_path: Path, hf: Any) -> None:
    whole = classed(hf)
    whole.shuffle(seed=3).save_to_disk(tmp_path / "shuffled")
    whole.select([4, 2]).save_to_disk(tmp_path / "part")
    shuffled, part = read_data(tmp_path / "shuffled"), read_data(tmp_path / "part")
    assert sorted(greys(shuffled)) == [0, 1, 2, 3, 4] != greys(shuffled)
    assert [sample.name for sample in shuffled.samples] == [f"{grey:02}.png" for grey in greys(shuffled)]
    assert told(part) == [("04.png", "hound"), ("02.png", "b")] and greys(part) == [4, 2]


def test_many_files_and_a_format_of_its_own(tmp_path: Path, hf: Any, capfd: pytest.CaptureFixture[str]) -> None:
    make(hf, 20).with_format("numpy", columns=["id"]).save_to_disk(tmp_path / "set", num_shards=20)
    hf.enable_progress_bars()
    capfd.readouterr()
    data = read_data(tmp_path / "set")
    assert greys(data) == list(range(20)) and capfd.readouterr() == ("", "")
    assert not hf.are_progress_bars_disabled()


def test_splits(tmp_path: Path, hf: Any) -> None:
    hf.DatasetDict(train=classed(hf), validation=make(hf, 2)).save_to_disk(tmp_path / "two")
    where = str(tmp_path / "two" / "validation").replace("\\", "/")
    with pytest.raises(InputError, match=f"two: has the splits train, validation; name one, e.g. {where}"):
        read_data(tmp_path / "two")
    assert len(read_data(tmp_path / "two" / "validation")) == 2 and len(read_data(tmp_path / "two" / "train")) == 5
    hf.DatasetDict(test=make(hf, 3)).save_to_disk(tmp_path / "one")
    assert read_data(tmp_path / "one").fingerprint == read_data(tmp_path / "one" / "test").fingerprint


def test_masks_of_a_data_set(tmp_path: Path, hf: Any, small: Model) -> None:
    drawn = [{"bytes": photo(255), "path": None}, None]
    make(hf, 2, mask=(hf.Image(), drawn)).save_to_disk(tmp_path / "set")
    data = read_data(tmp_path / "set")
    first, second = data.samples
    mask = read_mask(first.mask, first.open(), small.preprocess, (64, 64))
    assert mask is not None and mask.all() and greys(data) == [0, 1]
    with pytest.raises(InputError, match=r"row 000001: .*contains no image"):
        read_mask(second.mask, second.open(), small.preprocess, (64, 64))


def test_bad_rows_are_their_own_errors(tmp_path: Path, hf: Any) -> None:
    rows = [{"bytes": photo(1), "path": None}, None, {"bytes": b"text", "path": "a.png"}, {"bytes": b"", "path": None}]
    features = hf.Features({"image": hf.Image()})
    hf.Dataset.from_dict({"image": rows}, features=features).save_to_disk(tmp_path / "set")
    data = read_data(tmp_path / "set")
    data.samples[0].open()
    reasons = ["contains no image", "is not an image", "the file is empty"]
    for sample, reason in zip(data.samples[1:], reasons, strict=True):
        with pytest.raises(InputError, match=rf"set/row 00000\d: .*{reason}"):
            sample.open()


def test_bad_data_sets(tmp_path: Path, hf: Any) -> None:
    make(hf, 2).select([]).save_to_disk(tmp_path / "empty")
    with pytest.raises(InputError, match="empty: this data set has no rows"):
        read_data(tmp_path / "empty")
    hf.Dataset.from_dict({"text": ["a"], "label": [1]}).save_to_disk(tmp_path / "text")
    with pytest.raises(InputError, match="text: no column of type Image; it has text, label"):
        read_data(tmp_path / "text")
    make(hf, 2).save_to_disk(tmp_path / "cut")
    next((tmp_path / "cut").glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(InputError, match="cut: cannot be read as a saved data set"):
        read_data(tmp_path / "cut")
    (tmp_path / "cut" / "state.json").write_text("{")
    with pytest.raises(InputError, match=r"state\.json: cannot be read .*; save the data set again"):
        read_data(tmp_path / "cut")


@pytest.mark.process
def test_rows_travel(tmp_path: Path, hf: Any) -> None:
    classed(hf).save_to_disk(tmp_path / "set")
    data = read_data(tmp_path / "set")
    assert pickle.loads(pickle.dumps(data)) == data
    assert greys_elsewhere(data) == [0, 1, 2, 3, 4]


def test_a_data_set_that_is_saved_anew(tmp_path: Path, hf: Any) -> None:
    make(hf, 2).save_to_disk(tmp_path / "set")
    first = read_data(tmp_path / "set")
    assert read_data(tmp_path / "set").fingerprint == first.fingerprint
    os.rename(tmp_path / "set", tmp_path / "moved")
    assert read_data(tmp_path / "moved").fingerprint == first.fingerprint
    make(hf, 3).save_to_disk(tmp_path / "set")
    assert greys(read_data(tmp_path / "set")) == [0, 1, 2]
    assert read_data(tmp_path / "set").fingerprint != first.fingerprint


def test_without_the_library(tmp_path: Path, hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make(hf, 2).save_to_disk(tmp_path / "set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModelError, match=r"needs datasets: pip install 'vitreous\[hf\]'"):
        read_data(tmp_path / "set")
