"""Damaged files of every kind through every reader: an image or one line, in time, in little memory, in silence."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from damaged import MANY, bombs, damaged_files, png, whole_files
from fuzz import MIB, MOST_GROWTH, MOST_PEAK, outcome, readers, tar_of, try_all
from machine import PATIENCE

from vitreous.errors import InputError
from vitreous.images import masks, pictures, saved_datasets, tars

FUZZ = Path(__file__).parent / "fuzz.py"
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured the Linux way")


def test_a_hundred_damaged_files_through_every_reader(tmp_path: Path) -> None:
    found = try_all(damaged_files(100), tmp_path)
    assert found["faults"] == []
    assert found["counts"]["refused"] > 300 and found["counts"]["image"] > 20  # or nothing was damaged, or everything


def in_a_process(*args: Any) -> dict[str, Any]:
    """What the fuzzer saw in a process of its own, which a crash would end."""
    ran = subprocess.run([sys.executable, FUZZ, *map(str, args)], capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


@linux
@pytest.mark.slow
@pytest.mark.process
def test_a_thousand_damaged_files_in_little_memory() -> None:
    found = in_a_process("files", 1000, 1)
    assert found["faults"] == []
    assert found["counts"]["refused"] > 3000 and found["counts"]["image"] > 1000
    assert found["most MiB"] * MIB < MOST_PEAK and found["growth MiB"] * MIB < MOST_GROWTH
    assert found["meter MiB"] >= 99, "what a file takes is seen"


@pytest.mark.slow
@pytest.mark.process
def test_damaged_rows_of_saved_data_sets() -> None:
    """Images inside the rows, and the data set's own files: a damaged one must not end the process."""
    pytest.importorskip("datasets")
    found = in_a_process("rows", 500, 2)
    assert found["faults"] == [] and sum(found["counts"].values()) == 600
    assert found["counts"]["refused"] > 200 and found["counts"]["image"] > 50


# ------------------------------------------------------------------------------------------------- the fuzzer itself


def test_whole_files_are_read_by_every_reader_that_takes_them(tmp_path: Path) -> None:
    """Without damage: what is not read has other channels than the model takes."""
    for name, held in whole_files().items():
        path = tmp_path / name
        path.write_bytes(held)
        taken = 0
        for channels in (1, 3, 4):
            with suppress(InputError):
                assert pictures.open_file(path, channels).image.size in ((48, 40), (40, 48), (9, 8))
                taken += 1
        assert taken or name == "mask.npy", name
        if "mask" in name:
            assert masks.open_mask(path, 0).shape == (40, 48)


def test_a_seed_makes_the_same_files() -> None:
    first, again = list(damaged_files(80, 3)), list(damaged_files(80, 3))
    assert first == again and first != list(damaged_files(80, 4)) and len(first) == 80
    assert {Path(made.name).suffix for made in bombs()} >= {".png", ".tif", ".npy", ".npz", ".gif", ".bmp", ".ppm"}


def test_the_fuzzer_sees_what_is_wrong(tmp_path: Path) -> None:
    made = next(damaged_files(1))

    def raising(error: BaseException) -> Any:
        def read(*_: Any) -> None:
            raise error

        return read

    def warning(*_: Any) -> None:
        warnings.warn("odd", stacklevel=1)

    def logs(*_: Any) -> None:
        logging.getLogger("odd").warning("odd")

    assert outcome(raising(KeyError("x")), made, tmp_path) == "KeyError: 'x'"
    assert outcome(raising(InputError("one line")), made, tmp_path) == "refused"
    assert "2 lines" in outcome(raising(InputError("two\nlines")), made, tmp_path)
    assert "warned ['odd']" in outcome(warning, made, tmp_path)
    assert "logged 'odd" in outcome(logs, made, tmp_path)


def test_the_fuzzer_sees_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any) -> None:
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue

    monkeypatch.setattr("fuzz.SECONDS", 0.05)
    assert outcome(endless, next(damaged_files(1)), tmp_path).startswith("took more than")


def test_uploads_are_among_the_readers() -> None:
    pytest.importorskip("fastapi")
    assert {"file of 1", "file of 4", "mask", "tar", "damaged tar", "batch", "upload of 3"} <= set(readers())


# ----------------------------------------------------------------------------------------------------- what was found


def test_a_mask_that_is_too_large_is_refused_in_silence(tmp_path: Path) -> None:
    (tmp_path / "mask.png").write_bytes(png(10010, 10010))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match="10010×10010 is more than 100 megapixels; shrink it first"):
            masks.open_mask(tmp_path / "mask.png", 0)


def test_a_tiff_strip_that_unpacks_to_more_than_its_size(tmp_path: Path) -> None:
    pytest.importorskip("tifffile")
    (made,) = [made for made in bombs() if made.name == "packed.tif"]
    (tmp_path / made.name).write_bytes(made.held)
    assert len(made.held) < MANY // 500
    with pytest.raises(InputError, match="unpacks to more than its size"):
        pictures.open_file(tmp_path / made.name, 4)


def test_a_tiff_of_other_channels_is_refused_before_it_is_read(tmp_path: Path) -> None:
    pytest.importorskip("tifffile")
    for made in bombs():
        if made.name in ("sparse.tif", "some.tif"):
            (tmp_path / made.name).write_bytes(made.held)
            with pytest.raises(InputError, match="40] is not an image of 4 channels"):
                pictures.open_file(tmp_path / made.name, 4)


def test_a_name_of_several_lines_is_told_on_one(tmp_path: Path) -> None:
    made = bombs()[0]._replace(name="a\nb.png", held=b"no image")
    (tmp_path / "a.tar").write_bytes(tar_of(made))
    (entry,) = tars.read_tars([tmp_path / "a.tar"]).entries
    with pytest.raises(InputError, match=r"a b\.png: is not an image"):
        pictures.read(entry.image)


def test_a_damaged_saved_data_set_is_one_line(tmp_path: Path) -> None:
    """Arrow trusts the offsets of a file, and would read beyond it."""
    datasets = pytest.importorskip("datasets")
    rows = [{"bytes": whole_files()["rgb.png"], "path": f"name{i}.png"} for i in range(3)]
    made = datasets.Dataset.from_dict({"image": rows}).cast_column("image", datasets.Image(decode=False))
    made.save_to_disk(str(tmp_path / "set"))
    assert len(saved_datasets.read_saved(tmp_path / "set").entries) == 3
    shutil.copytree(tmp_path / "set", tmp_path / "bad")
    (file,) = (tmp_path / "bad").glob("*.arrow")
    offsets, held = struct.pack("<4i", 0, 9, 18, 27), file.read_bytes()  # of the names
    assert held.count(offsets) == 1
    file.write_bytes(held.replace(offsets, struct.pack("<4i", 0, 9, 10**8, 27)))
    with pytest.raises(InputError, match="cannot be read as a saved data set"):
        saved_datasets.read_saved(tmp_path / "bad")
