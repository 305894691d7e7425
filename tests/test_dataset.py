"""Data as people have it: folders, class folders, masks beside, tables."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zoo
from PIL import Image

import vitreous
from vitreous import Model
from vitreous.errors import InputError, TargetError
from vitreous.images.dataset import Sample, read_data
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped
from vitreous.models.match_labels import match_labels


@pytest.fixture(scope="module")
def small() -> Model:
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")


def photo(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(path)
    return path


def table(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def told(data: vitreous.images.dataset.Data) -> list[tuple[str, object, object]]:
    return [(sample.name, sample.label, sample.mask) for sample in data.samples]


# ------------------------------------------------------------------------------------------------------------- folders


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    photo(tmp_path / "b.jpg"), photo(tmp_path / "more" / "a.png")
    (tmp_path / "notes.txt").touch()
    assert told(read_data(tmp_path)) == [("b.jpg", None, None), ("more/a.png", None, None)]


def test_class_folders(tmp_path: Path) -> None:
    photo(tmp_path / "dog" / "1.jpg"), photo(tmp_path / "cat" / "deep" / "2.jpg")
    assert told(read_data(tmp_path)) == [("cat/deep/2.jpg", "cat", None), ("dog/1.jpg", "dog", None)]


def test_masks_lie_beside_or_are_given(tmp_path: Path) -> None:
    photo(tmp_path / "images" / "x" / "1.jpg"), photo(tmp_path / "images" / "y" / "2.jpg")
    photo(tmp_path / "masks" / "x" / "1.png")
    photo(tmp_path / "others" / "2.png")
    found = read_data(tmp_path)
    assert told(found) == [
        ("images/x/1.jpg", "x", tmp_path / "masks" / "x" / "1.png"),
        ("images/y/2.jpg", "y", None),
    ]
    assert found.masked and found.notes == ("1 of 2 images have no mask: y/2.jpg",)
    given = read_data(tmp_path / "images", tmp_path / "others")
    assert [sample.mask for sample in given.samples] == [None, tmp_path / "others" / "2.png"]


def test_a_masks_folder_within_is_not_taken_for_pictures(tmp_path: Path) -> None:
    photo(tmp_path / "1.jpg"), photo(tmp_path / "where" / "1.png")
    assert told(read_data(tmp_path, tmp_path / "where")) == [("1.jpg", None, tmp_path / "where" / "1.png")]


def test_masks_of_other_names_are_refused(tmp_path: Path) -> None:
    photo(tmp_path / "a" / "1.jpg"), photo(tmp_path / "b" / "one.png")
    with pytest.raises(InputError, match=r"no mask for any image; give them the same names, e\.g\. 1\.png \(there"):
        read_data(tmp_path / "a", tmp_path / "b")
    with pytest.raises(InputError, match="no such folder"):
        read_data(tmp_path / "a", tmp_path / "c")
    with pytest.raises(InputError, match="no such file or folder"):
        read_data(tmp_path / "d")


def test_files_by_name_or_pattern(tmp_path: Path) -> None:
    files = [photo(tmp_path / f"{i}.jpg") for i in range(3)]
    assert [sample.image for sample in read_data(files[:2]).samples] == files[:2]
    assert [sample.image for sample in read_data(f"{tmp_path}/[12].jpg").samples] == files[1:]


def test_files_of_one_name_from_two_folders(tmp_path: Path) -> None:
    files = [photo(tmp_path / "a" / "1.jpg"), photo(tmp_path / "b" / "1.jpg")]
    assert [sample.name for sample in read_data(files).samples] == [str(file) for file in files]


# -------------------------------------------------------------------------------------------------------------- tables


def test_a_table_of_everything(tmp_path: Path) -> None:
    photo(tmp_path / "a.jpg"), photo(tmp_path / "images" / "b.jpg"), photo(tmp_path / "m.png")
    file = table(tmp_path / "t.csv", "Image,label,mask,box", 'a.jpg,3,,"1,2,3,4.5"', "b.jpg,dog,m.png,", "b,,,")
    data = read_data(file)
    assert data.samples == (
        Sample(tmp_path / "a.jpg", "a.jpg", 3, (1.0, 2.0, 3.0, 4.5)),
        Sample(tmp_path / "images" / "b.jpg", "images/b.jpg", "dog", tmp_path / "m.png"),
        Sample(tmp_path / "images" / "b.jpg", "images/b.jpg (2)", None, None),
    )


def test_a_box_in_four_columns(tmp_path: Path) -> None:
    photo(tmp_path / "a.jpg")
    data = read_data(table(tmp_path / "t.csv", "image,x0,y0,x1,y1", "a.jpg,1,2,3,4", "a.jpg,,,,"))
    assert [sample.mask for sample in data.samples] == [(1.0, 2.0, 3.0, 4.0), None]
    with pytest.raises(InputError, match=r"line 2: '1 2 x 4' is not a box"):
        read_data(table(tmp_path / "t.csv", "image,x0,y0,x1,y1", "a.jpg,1,2,x,4"))


def test_a_picture_in_several_rows(tmp_path: Path) -> None:
    photo(tmp_path / "a.jpg"), photo(tmp_path / "b.jpg"), photo(tmp_path / "masks" / "a.png")
    data = read_data(table(tmp_path / "t.csv", "image,label", "a.jpg,1", "b.jpg,-1", "a.jpg,2", "a.jpg,3"))
    names = ["a.jpg", "b.jpg", "a.jpg (2)", "a.jpg (3)"]
    mask = tmp_path / "masks" / "a.png"
    assert told(data) == list(zip(names, [1, None, 2, 3], [mask, None, mask, mask]))
    assert {sample.image for sample in data.samples} == {tmp_path / "a.jpg", tmp_path / "b.jpg"}


def test_a_folder_with_its_table(tmp_path: Path) -> None:
    photo(tmp_path / "images" / "a.jpg"), photo(tmp_path / "masks" / "a.png")
    table(tmp_path / "labels.csv", "name,breed,imagenet_index", "a,tabby,281")
    assert told(read_data(tmp_path)) == [("images/a.jpg", 281, tmp_path / "masks" / "a.png")]
    assert read_data(tmp_path / "labels.csv") == read_data(tmp_path)


def test_bad_tables_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no column image or file; it has picture, label"):
        read_data(table(tmp_path / "t.csv", "picture,label", "a,1"))
    with pytest.raises(InputError, match=r"4 of its files do not exist: a, b, c …"):
        read_data(table(tmp_path / "t.csv", "image", *"abcd"))
    with pytest.raises(InputError, match="has no rows below its header"):
        read_data(table(tmp_path / "t.csv", "image"))
    with pytest.raises(InputError, match="no such file"):
        read_data(tmp_path / "none.csv")
    (tmp_path / "t.csv").write_bytes(b"image\n\xff\xfe\n")
    with pytest.raises(InputError, match="cannot be read as a CSV"):
        read_data(tmp_path / "t.csv")


# ---------------------------------------------------------------------------------------------------- a part of it


def test_a_part_by_order_or_by_chance(tmp_path: Path) -> None:
    for i in range(20):
        photo(tmp_path / f"{i:02}.jpg")
    data = read_data(tmp_path)
    assert data.take(limit=3).samples == data.samples[:3]
    some = data.take(sample=8, seed=1)
    assert some == data.take(sample=8, seed=1) != data.take(sample=8, seed=2)
    assert len(some) == 8 and list(some.samples) == sorted(some.samples, key=lambda s: s.name)
    assert data.take(sample=99) == data and len(data.take(limit=2, sample=8)) == 2


# ---------------------------------------------------------------------------------------------------------- identity


def test_a_sample_opens_its_picture(tmp_path: Path) -> None:
    data = read_data([photo(tmp_path / "a.jpg"), tmp_path / "none.jpg"])
    assert data.samples[0].open().image.size == (30, 20) and data.samples[0].open().name == "a.jpg"
    with pytest.raises(InputError, match=r"none\.jpg: no such file"):
        data.samples[1].open()
    assert data.samples[1].stamp == "missing" and re.fullmatch(r"\d+ \d+", data.samples[0].stamp)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    photo(tmp_path / "set" / "cat" / "1.png"), photo(tmp_path / "set" / "dog" / "2.png")
    return tmp_path / "set"


def test_a_fingerprint_stays(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read_data(pair)
    assert re.fullmatch(r"[0-9a-f]{16}", data.fingerprint)
    assert read_data(pair).fingerprint == data.fingerprint == pickle.loads(pickle.dumps(data)).fingerprint
    assert replace(data, source="x", notes=("y",)).fingerprint == data.fingerprint
    os.rename(pair, pair.parent / "moved")
    monkeypatch.chdir(pair.parent)
    assert read_data("moved").fingerprint == data.fingerprint


def test_a_fingerprint_changes(pair: Path) -> None:
    data = read_data(pair)
    first, second = data.samples
    others = [
        replace(data, samples=(second, first)),
        replace(data, samples=(first,)),
        replace(data, samples=(first, replace(second, label="cow"))),
        replace(data, samples=(first, replace(second, label=None))),
        replace(data, samples=(replace(first, name="one"), second)),
        replace(data, samples=(replace(first, mask=(0.0, 0.0, 1.0, 1.0)), second)),
        replace(data, samples=(replace(first, mask=(0.0, 0.0, 1.0, 2.0)), second)),
        replace(data, samples=(replace(first, mask=pair / "dog" / "2.png"), second)),
    ]
    found = {one.fingerprint for one in others}
    assert len(found) == len(others) and data.fingerprint not in found
    seen = (pair / "cat" / "1.png").stat()
    os.utime(pair / "cat" / "1.png", ns=(seen.st_atime_ns, seen.st_mtime_ns + 1_000_000))
    later = read_data(pair).fingerprint
    (pair / "dog" / "2.png").unlink()
    assert len({data.fingerprint, later, replace(data).fingerprint}) == 3


# -------------------------------------------------------------------------------------------------------------- labels


def labelled(tmp_path: Path, *labels: str) -> vitreous.images.dataset.Data:
    for label in labels:
        photo(tmp_path / label / "1.jpg")
    return read_data(tmp_path)


def test_labels_by_name_and_number(tmp_path: Path, small: Model) -> None:
    found = match_labels(labelled(tmp_path, "Cat", "hound", "n12345678_c", "6"), small)
    assert [sample.label for sample in found.samples] == [6, 0, 1, 4]  # folders: 6, Cat, hound, n…


def test_folders_with_underscores_are_the_classes_with_spaces(tmp_path: Path) -> None:
    """JOURNEYS P2: `Egyptian Mau` is the folder `Egyptian_Mau`, and the other way round."""
    for labels, folders in (
        (["Egyptian Mau", "Maine-Coon", "sphynx"], ["Egyptian_Mau", "maine_coon", "Sphynx"]),
        (["Egyptian_Mau", "Maine_Coon", "sphynx"], ["EGYPTIAN MAU", "Maine-Coon", "sphynx"]),
    ):
        model = Model(zoo.network("timm ViT"), labels=labels, name="cats")
        found = match_labels(labelled(tmp_path / labels[0], *folders), model)
        assert sorted(str(s.label) for s in found.samples) == ["0", "1", "2"] and not found.notes


def test_wordnet_numbers(tmp_path: Path, tiny: Model) -> None:
    names = ("n01440764", "n01484850_great_white_shark", "n02012849", "n03126707_crane")
    found = match_labels(labelled(tmp_path, *names), tiny)
    assert [sample.label for sample in found.samples] == [0, 2, 134, 517]  # two classes are called crane


def test_some_unknown_labels_are_an_error(tmp_path: Path, small: Model) -> None:
    with pytest.raises(TargetError, match=r"1 of 2 labels are not classes of small: doge; did you mean dog\?"):
        match_labels(labelled(tmp_path, "cat", "doge"), small)


def test_only_unknown_labels_are_left_out(tmp_path: Path, small: Model) -> None:
    found = match_labels(labelled(tmp_path, "holiday", "work"), small)
    assert [sample.label for sample in found.samples] == [None, None]
    assert "not classes of small (holiday, work) and are not used" in found.notes[0]


def test_numbers_out_of_range_are_no_classes(tmp_path: Path, small: Model) -> None:
    photo(tmp_path / "a.jpg")
    data = read_data(table(tmp_path / "t.csv", "image,label", "a.jpg,6", "a.jpg,7"))
    with pytest.raises(TargetError, match="1 of 2 labels are not classes of small: 7"):
        match_labels(data, small)


# ------------------------------------------------------------------------------------------------------ the real ones


@pytest.mark.shared
@pytest.mark.parametrize("end", ["", "labels.csv"])
def test_the_shared_sets(shared: Path, end: str, tiny: Model) -> None:
    pets = read_data(shared / "data" / "pets" / end)
    assert len(pets) == 192 and all(s.mask is not None and s.image.is_file() for s in pets.samples)
    assert len({s.label for s in pets.samples}) == 24
    views = read_data(shared / "data" / "imagenet-samples" / end)
    assert len(views) == 500 and not views.masked
    named = vitreous.images.dataset.Data("x", tuple(Sample(s.image, s.name, s.name) for s in views.samples))
    found = match_labels(named, tiny)  # the files' names hold their WordNet numbers
    assert [s.label for s in found.samples] == [s.label for s in views.samples]
