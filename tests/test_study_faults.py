"""Studies when the world changes under them: each fault ends with a true sentence, and the store opens."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import Run
from machine import PATIENCE
from test_study import album, photo, same  # the same pictures

from vitreous import Model, open_study, run_study
from vitreous._support.files import write_whole
from vitreous.cli import arguments
from vitreous.errors import InputError
from vitreous.evaluation.study import local
from vitreous.evaluation.study.kind import find_kind
from vitreous.evaluation.study.plan import Source, plan
from vitreous.evaluation.study.store import circumstances, open_store
from vitreous.images.dataset import read_data
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped

assert album


@pytest.fixture(scope="module")
def small() -> Model:
    torch.manual_seed(0)
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")


@pytest.fixture
def own(album: Path, tmp_path: Path) -> Path:
    """A copy of the pictures, for the worse."""
    shutil.copytree(album, tmp_path / "own")
    return tmp_path / "own"


def at_shard(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Do something when this shard is about to be computed."""
    true = local.run_shard

    def run(recipe: Any, model: Any, one: Any, loaded: Any) -> Any:
        if one.number == number:
            act()
        return true(recipe, model, one, loaded)

    monkeypatch.setattr(local, "run_shard", run)


def go(data: Path, model: Model, out: Path) -> Any:
    return run_study("maps", data, model, out, methods="attention", shard=2, batch=2, workers=0)


# ------------------------------------------------------------------------------------------- images that change


def test_an_image_that_changes_during_a_run_is_a_row_with_the_reason(
    small: Model, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are never those of another image; the same command then is another study."""
    changed = read_data(own).samples[-1]
    assert isinstance(changed.image, Path)
    before = go(own, small, tmp_path / "before")
    at_shard(monkeypatch, 0, lambda: photo(changed.image, 99))
    study = go(own, small, tmp_path / "out")
    monkeypatch.undo()
    rows = study.to_pandas().set_index("image")["error"]
    assert study.finished and study.folder.name == before.folder.name
    assert (
        rows[changed.name] == f"{changed.image}: has changed since the study was begun; run it again on the new images"
    )
    assert rows.drop(changed.name).equals(before.to_pandas().set_index("image")["error"].drop(changed.name))
    again = go(own, small, tmp_path / "out")
    assert again.folder != study.folder and again.to_pandas().set_index("image")["error"].isna()[changed.name]


def test_a_mask_that_changes_is_noticed_too(tmp_path: Path) -> None:
    photo(tmp_path / "images" / "a.png"), photo(tmp_path / "masks" / "a.png")
    (sample,) = read_data(tmp_path).stamped().samples
    assert sample.stamps == sample.seen
    photo(tmp_path / "masks" / "a.png", 5, (45, 30))
    assert sample.stamps != sample.seen and sample.stamp == sample.seen[0]


def test_stamps_are_taken_once_and_name_the_same_study(own: Path) -> None:
    data = read_data(own)
    kept = data.stamped()
    assert kept.fingerprint == data.fingerprint and kept.samples == data.samples
    shutil.rmtree(own)
    assert kept.stamped().fingerprint != kept.fingerprint == data.fingerprint


def test_an_image_that_vanishes_is_a_row_with_the_reason(
    small: Model, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = read_data(own).samples[-1]
    assert isinstance(gone.image, Path)
    at_shard(monkeypatch, 0, lambda: os.remove(str(gone.image)))
    rows = go(own, small, tmp_path / "out").to_pandas().set_index("image")["error"]
    assert rows[gone.name] == f"{gone.image}: no such file"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_of_images_that_vanishes_stops_the_study(
    run: Run, small: Model, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A drive that is unplugged: its images are not stored as failed, and the study goes on when it is back."""
    monkeypatch.setattr(arguments, "load_model", lambda *_, **more: small)
    monkeypatch.setattr(Source, "load", lambda *_: small)
    aside = tmp_path / "aside"
    args = ("study", "maps", own, "-x", "attention", "--shard", 1, "--batch", 1, "--workers", workers, "--out", "out")
    at_shard(monkeypatch, 2, lambda: own.rename(aside))
    ran = run(*args)
    last = ran.err.splitlines()[-1]
    assert ran.code == 2 and "has vanished during the run; bring it back, then run the same command again" in last
    assert str(own) in last
    stored = open_study("out")
    assert 2 <= len(stored.numbers) < 10 and not any("no such file" in str(e) for e in stored.to_pandas()["error"])
    monkeypatch.undo()
    monkeypatch.setattr(Source, "load", lambda *_: small)
    monkeypatch.chdir(tmp_path)
    aside.rename(own)
    assert run(*args).code == 0
    whole = run_study("maps", own, small, tmp_path / "whole", methods="attention", shard=1, batch=1)
    same(open_study("out"), whole)


# ----------------------------------------------------------------------------------------- folders that go or refuse


def test_a_store_that_vanishes_is_not_made_anew_in_part(
    small: Model, album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_shard(monkeypatch, 3, lambda: (tmp_path / "out").rename(tmp_path / "moved"))
    with pytest.raises(
        InputError, match=r"has vanished during the run, with what was stored in it; bring it back to resume"
    ):
        go(album, small, tmp_path / "out")
    monkeypatch.undo()
    made = go(album, small, tmp_path / "out")
    assert made.finished and len(open_study(tmp_path / "moved").numbers) < 5
    same(go(album, small, tmp_path / "moved"), made)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space, then run the same command again"),
        (errno.EROFS, "make it writable, then run the same command again"),
        (errno.EIO, "vitreous-out/maps-"),
    ],
)
def test_the_remedy_is_that_of_the_fault(
    run: Run, small: Model, album: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    monkeypatch.setattr(Source, "load", lambda *_: small)
    true = os.replace

    def refuse(draft: Any, path: Any) -> None:
        if str(path).endswith("00001.parquet"):
            raise OSError(number, os.strerror(number), str(draft))
        true(draft, path)

    monkeypatch.setattr(os, "replace", refuse)
    ran = run("study", "maps", album, "-x", "attention", "--shard", 2, "--batch", 2)
    assert ran.code == 2 and "stopped: 1 of 5 shards are in" in ran.err and remedy in ran.err
    assert ran.err.splitlines()[-1].endswith(f"00001.parquet: {os.strerror(number)}")
    assert ("free some space" in ran.err) == (number == errno.ENOSPC)
    assert open_study("vitreous-out").numbers == [0] and not list(Path("vitreous-out").rglob("*.part"))


def test_a_failed_write_names_the_file_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as told:
        write_whole(tmp_path / "a.txt", b"x")
    assert told.value.filename == str(tmp_path / "a.txt") and not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------- two at once


def test_of_two_runs_at_once_one_decides_how_the_study_is_cut(small: Model, album: Path, tmp_path: Path) -> None:
    """The manifest is written under the lock and not written again: the other run has other ideas of it."""
    data = read_data(album)
    ours, other = (
        plan(find_kind("spread")(), [Source(ready=small)], data, batch=size, shard=size)[0] for size in (2, 5)
    )
    store = open_store(tmp_path, ours.manifest, circumstances())
    with store.locked():
        assert open_store(tmp_path, other.manifest, circumstances()).manifest == store.manifest
        (store.folder / "study.json").unlink()  # as if neither had written it yet
        with pytest.raises(InputError, match="another run is working on this study; wait for it"):
            open_store(tmp_path, other.manifest, circumstances())
    assert not (store.folder / "study.json").exists()


# ---------------------------------------------------------------------------------------------------------- killed

KILLED = Path(__file__).parent / "killed.py"
KILLS = 100


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_killed_at_a_hundred_moments(album: Path, tmp_path: Path) -> None:
    """SIGKILL while it plans, reads, computes and writes: the folder opens each time, nothing is lost or doubled."""
    command = [sys.executable, str(KILLED), str(album), str(tmp_path), str(KILLS), "0"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["kills"] == KILLS and told["between"] > KILLS // 10, told  # many fell between shards


# ------------------------------------------------------------------------------------------- real commands and limits

APART = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]  # file systems that nobody else sees
VITREOUS = f"{sys.executable} -m vitreous"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Where a small file system can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run([*APART, f"mount -t tmpfs -o size=64k tmpfs {folder}"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system lets no test mount a file system of its own")
    return folder


def shell(script: str) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([*APART, script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("command", ["explain {data} -x attention", "evaluate {data} --methods attention"])
def test_results_on_a_full_disk(disk: Path, own: Path, command: str) -> None:
    """One line that names the file, exit code 2, and no file that is not whole."""
    said = command.format(data=own / "cat")
    if command.startswith("evaluate"):
        said += " --metrics sparsity"
    ran = shell(
        f"mount -t tmpfs -o size=16k tmpfs {disk}; {VITREOUS} {said} --out {disk}; echo code $?; "
        f"find {disk} -name '*.part' -o -size 0 -type f; find {disk} -name '*.png' -exec {sys.executable} -c "
        f"'import sys; from PIL import Image; Image.open(sys.argv[1]).load()' {{}} \\;"
    )
    assert ran.stdout.splitlines()[-1] == "code 2", ran.stdout + ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(f"error: {disk}/") and last.endswith(": No space left on device")


@pytest.mark.slow
@pytest.mark.process
def test_a_folder_that_may_not_be_written(disk: Path, own: Path) -> None:
    """Read-only from the start, and after it was begun."""
    command = f"{VITREOUS} study maps {own} -x attention --shard 2 --batch 2 --out {disk}/out"
    ran = shell(
        f"mount -t tmpfs -o size=9m tmpfs {disk}; mount -o remount,ro {disk}; {command}; echo code $?; "
        f"mount -o remount,rw {disk}; {command}; echo code $?; "
        f"rm {disk}/out/maps-*/shards/00003.parquet; mount -o remount,ro {disk}; {command}; echo code $?; "
        f"{VITREOUS} report {disk}/out --out {own.parent}/report; echo code $?; cp -r {disk}/out {own.parent}/kept"
    )
    assert [line for line in ran.stdout.splitlines() if line.startswith("code")] == [
        *("code 2", "code 0", "code 2", "code 0")
    ], ran.stdout + ran.stderr
    assert ran.stderr.count(": Read-only file system") == 2 and "free some space" not in ran.stderr
    assert open_study(own.parent / "kept").numbers == [0, 1, 2, 4]


@pytest.mark.slow
@pytest.mark.process
def test_two_studies_started_at_once(own: Path, tmp_path: Path) -> None:
    """Many times over: one works, the others end with one sentence, and the rows are there once."""
    args = ["study", "cass", str(own), "--samples", "2", "--shard", "1", "--batch", "1", "--out", str(tmp_path / "out")]
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "vitreous", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    ended = [(one.communicate(timeout=PATIENCE), one.returncode) for one in runs]
    codes = [code for _, code in ended]
    assert 0 in codes and set(codes) <= {0, 2}, ended
    for (_, err), code in ended:
        assert "Traceback" not in err
        assert code == 0 or err.splitlines()[-1].endswith("another run is working on this study; wait for it")
    whole = run_study(
        "cass", own, None, tmp_path / "whole", options={"cass": {"samples": 2}}, shard=1, batch=1, workers=0
    )
    same(open_study(tmp_path / "out"), whole)
