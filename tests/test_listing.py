"""What vitreous wrote is never taken for an image, by no command; and it is said once."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import zoo
from conftest import Run
from PIL import Image

from vitreous import Model
from vitreous._support import marks
from vitreous.cli import arguments
from vitreous.errors import InputError
from vitreous.images import class_folders, listing, pictures
from vitreous.images.dataset import read_data
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped

FIRST_RELEASE = Path(__file__).parent / "first_release"


def photo(path: Path, colour: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(colour).integers(0, 255, (40, 60, 3), np.uint8)).resize((90, 60)).save(path)
    return path


def figure(path: Path) -> Path:
    """A result with its mark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.removeprefix(".")
    if kind == "npz":
        held = io.BytesIO()
        np.savez(held, map=np.zeros((2, 2)), provenance=json.dumps(marks.marked({"identity": "x"})))
        path.write_bytes(held.getvalue())
    else:
        Image.new("RGB", (30, 30)).save(path, **marks.pixels(kind, {"identity": "x"}))
    return path


@pytest.fixture
def album(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two photos, and the results of one run below them."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        photo(tmp_path / f"{name}.jpg", ord(name))
        figure(tmp_path / "vitreous-out" / f"{name}.png")
        figure(tmp_path / "vitreous-out" / f"{name}.npz")
    return tmp_path


def test_results_are_left_out_and_counted(album: Path) -> None:
    found = listing.look(".")
    assert found.files == [Path("a.jpg"), Path("b.jpg")]
    assert found.note == "skipped 4 files that vitreous wrote (vitreous-out)"
    assert pictures.find(".") == found.files
    assert listing.look("a.jpg").note is None


@pytest.mark.parametrize("kind", sorted(listing.MARKED))
def test_every_kind_of_result_is_known(tmp_path: Path, kind: str) -> None:
    """Also beside photos, in one folder with them."""
    photo(tmp_path / "photo.jpg")
    figure(tmp_path / f"figure{kind}")
    found = listing.look(tmp_path)
    assert [file.name for file in found.files] == ["photo.jpg"]
    assert [file.name for file in found.results] == [f"figure{kind}"]


def test_a_file_that_is_named_is_taken(album: Path) -> None:
    assert listing.look("vitreous-out/a.png").files == [Path("vitreous-out/a.png")]
    both = listing.look(".", "vitreous-out/a.png")
    assert len(both.files) == 3
    assert both.note == "skipped 3 files that vitreous wrote (vitreous-out)"


def test_patterns_leave_results_out(album: Path) -> None:
    photo(album / "vitreous-out" / "mine.png")
    found = listing.look("vitreous-out/*.png")
    assert found.files == [Path("vitreous-out/mine.png")]
    assert found.note == "skipped 2 files that vitreous wrote (vitreous-out)"
    with pytest.raises(InputError, match=r"matches no images other than 2 that vitreous wrote; name the file"):
        listing.look("vitreous-out/[ab].png")


def test_a_folder_of_nothing_but_results(album: Path) -> None:
    with pytest.raises(InputError, match="no images in this folder other than 4 that vitreous wrote"):
        listing.look("vitreous-out")


def test_the_note_names_few_folders(tmp_path: Path) -> None:
    photo(tmp_path / "photo.jpg")
    for folder in ("a", "a/b", "c", "d", "e"):
        figure(tmp_path / folder / "x.png")
    note = listing.look(tmp_path).note
    assert note == f"skipped 5 files that vitreous wrote ({tmp_path / 'a'}, {tmp_path / 'c'}, {tmp_path / 'd'} …)"


def test_a_word_in_a_photo_is_no_mark(tmp_path: Path) -> None:
    Image.new("RGB", (30, 30)).save(tmp_path / "a.jpg", comment=b"vitreous humour of the eye")
    photo(tmp_path / "vitreous" / "vitreous.png")
    assert len(listing.look(tmp_path).files) == 2


@pytest.mark.parametrize("damage", [b"", b"\x89PNG vitreous", b"GIF8 vitreous", b"PK vitreous"])
def test_damaged_files_are_no_results(tmp_path: Path, damage: bytes) -> None:
    """They are listed, and reading them says what is wrong."""
    for kind in listing.MARKED:
        (tmp_path / f"bad{kind}").write_bytes(damage)
    assert len(listing.look(tmp_path).files) == len(listing.MARKED) - 1, "an array beside images is none of them"


# ------------------------------------------------------------------------------------------------------ first release


def test_figures_of_the_first_release_are_known_by_their_maps(tmp_path: Path) -> None:
    for name in ("cat.png", "cat.jpg", "dog.png", "mouse.png"):
        photo(tmp_path / name)
    shutil.copy(FIRST_RELEASE / "explained.npz", tmp_path / "cat.npz")
    np.savez(tmp_path / "dog.npz", mine=np.zeros(3))
    figure(tmp_path / "mouse.npz")  # of today: its figure would have a mark, so this is the photo
    found = listing.look(tmp_path)
    assert [file.name for file in found.files] == ["cat.jpg", "dog.png", "mouse.png"]
    assert [file.name for file in found.results] == ["cat.npz", "cat.png", "mouse.npz"]


def test_charts_of_studies_are_known_by_the_study(tmp_path: Path) -> None:
    study = tmp_path / "out" / "maps-1"
    shutil.copytree(next((FIRST_RELEASE / "study").glob("maps-*")), study)
    photo(study / "figures" / "chart.png")
    photo(tmp_path / "report" / "figures" / "chart.png")
    (tmp_path / "report" / "findings.json").write_text("{}")
    mine = [photo(tmp_path / "figures" / "mine.png"), photo(tmp_path / "report" / "mine.png")]
    found = listing.look(tmp_path)
    assert found.files == mine
    assert len(found.results) == 2


# ------------------------------------------------------------------------------------------------- data sets, classes


def test_data_sets_say_what_they_left_out(album: Path) -> None:
    for given in (".", ["a.jpg", "."], ["*.jpg", "vitreous-out/*.png", "b.jpg"][::2]):
        found = read_data(given)
        assert [sample.name for sample in found.samples] == ["a.jpg", "b.jpg"]
    assert read_data(".").notes == ("skipped 4 files that vitreous wrote (vitreous-out)",)


def test_results_are_no_class(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        photo(tmp_path / kind / "1.jpg")
        photo(tmp_path / kind / "2.jpg", 1)
    figure(tmp_path / "vitreous-out" / "cat" / "1.png")
    figure(tmp_path / "cat" / "explained.png")
    (tmp_path / "vitreous-concepts").mkdir()
    (tmp_path / "vitreous-concepts" / "cat.safetensors").touch()
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "leaderboard.json").touch()
    found = class_folders.open_folder(tmp_path)
    assert found.classes == ("cat", "dog")
    assert len(found.files) == 4
    assert found.note is not None and found.note.startswith("skipped 2 files that vitreous wrote")
    assert {sample.label for sample in read_data(tmp_path).samples} == {"cat", "dog"}
    assert len(class_folders.open_folder(tmp_path, limit=1).files) == 2


def test_tables_leave_results_out(album: Path) -> None:
    photo(album / "images" / "cat.jpg")
    figure(album / "images" / "cat.png")
    (album / "labels.csv").write_text("image,label\ncat,0\n")
    assert [sample.image for sample in read_data(album / "labels.csv").samples] == [album / "images" / "cat.jpg"]


def test_shards_with_results_beside_them_are_still_shards(tmp_path: Path) -> None:
    import tarfile

    file = photo(tmp_path / "cat.jpg")
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(file, "cat.jpg")
    file.unlink()
    figure(tmp_path / "vitreous-out" / "cat.png")
    assert [sample.name for sample in read_data(tmp_path).samples] == ["cat.jpg"]


# ------------------------------------------------------------------------------------------------------- all commands


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), [*"abcdefg"], name="small")
    monkeypatch.setattr(arguments, "load_model", lambda *_, **more: made)
    return made


def said(run: Run, *words: Any) -> tuple[dict[str, Any], list[str]]:
    told = json.loads(run(*words, "--json").out)
    return told, told["notes"]


COMMANDS = [
    ("explain", ".", "-x", "centre"),
    pytest.param(("inspect", "layers", "."), marks=pytest.mark.slow),
    pytest.param(("cass", ".", "--samples", "1"), marks=pytest.mark.slow),
    pytest.param(("inspect", "registers", "."), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_own_figures_are_no_photos(run: Run, small: Model, album: Path, words: tuple[str, ...]) -> None:
    """The results of the run itself are left out by the next one, too."""
    together = "registers" in words
    told, notes = said(run, *words)
    assert [entry["image"] for entry in told["images"]] == ["a.jpg", "b.jpg"][: 1 if together else 2]
    assert notes[0] == "skipped 4 files that vitreous wrote (vitreous-out)"
    again, notes = said(run, *words)
    assert len(again["images"]) == len(told["images"])
    assert notes[0].startswith("skipped") and notes[0].endswith("(vitreous-out)")


@pytest.mark.slow
def test_own_figures_are_no_photos_of_a_data_set(run: Run, small: Model, album: Path) -> None:
    note = "skipped 4 files that vitreous wrote (vitreous-out)"
    told, notes = said(run, "evaluate", ".", "-x", "centre", "--metric", "sparsity", "-o", "board")
    assert told["data"]["images"] == 2 and notes[0] == note
    told, notes = said(run, "advise", ".", "-x", "attention,rollout")
    assert told["images"] == 2 and note in notes
    torch.save(timm.create_model("test_vit", num_classes=3).state_dict(), "w.pth")
    told, notes = said(run, "study", "maps", ".", "-x", "rollout", "-m", "test_vit", "-w", "w.pth", "-o", "study")
    assert told["study"]["data"]["images"] == 2 and notes[0] == note
    result = run("concept", "build", "x", ".")
    assert "2 images" in result.out and result.err == f"note: {note}\n"


@pytest.mark.slow
def test_own_figures_are_no_class_of_a_probe(run: Run, tmp_path: Path) -> None:
    for i, kind in enumerate(("cat", "dog")):
        for k in range(3):
            photo(tmp_path / "data" / kind / f"{k}.jpg", 10 * i + k)
    torch.save(timm.create_model("test_vit", num_classes=3).state_dict(), tmp_path / "w.pth")
    model = ("--model", "test_vit", "--weights", "w.pth")
    assert run("explain", "data", "-x", "centre", "-o", "data/out", *model).code == 0
    told = json.loads(run("probe", "train", "data", "--epochs", "1", "--no-augment", *model, "--json").out)
    assert told["classes"] == ["cat", "dog"]
    assert told["notes"] == ["skipped 12 files that vitreous wrote (data/out/cat, data/out/dog)"]
    for words in (["probe.safetensors", "data"], ["data", "--probe", "probe.safetensors"]):
        found = run("probe", "eval", *words, *model)
        assert (found.code, found.err.count("skipped 12 files")) == (0, 1)
    assert run("probe", "eval", "data", *model).error.startswith("give one folder of classes, and the probe")
    assert "2 images" in run("probe", "eval", "data", "--probe", "probe.safetensors", "--limit", 1, *model).out


# --------------------------------------------------------------------------------------------------------------- speed


@pytest.mark.slow
def test_the_check_costs_little(tmp_path: Path) -> None:
    """7 µs for each file by measurement, so that a million JPEGs take seconds more."""
    import time

    photo(tmp_path / "0.jpg")
    for i in range(1, 5000):
        os.link(tmp_path / "0.jpg", tmp_path / f"{i}.jpg")
    files = [entry.name for entry in os.scandir(tmp_path)]

    def seconds() -> float:
        begun = time.process_time()
        assert not any(listing.is_result(str(tmp_path), name, ()) for name in files)
        return time.process_time() - begun

    assert min(seconds() for _ in range(5)) / len(files) < 30e-6, "with room for slower machines"
