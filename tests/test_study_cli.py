"""`vitreous study` and `vitreous report`: what they say, what they write, what they refuse."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zoo
from conftest import Run
from machine import PATIENCE, rare, until
from PIL import Image
from test_study import album, names, other_network

from vitreous import Model, open_study
from vitreous.cli import study as command
from vitreous.evaluation.study import local
from vitreous.evaluation.study.kind import HOMES
from vitreous.evaluation.study.store import Store
from vitreous.images.preprocess import IMAGENET
from vitreous.models import load as sources
from vitreous.models.libraries import cropped

assert album


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models in place of real ones; `other` has other weights."""

    def load(spec: str | None = None, weights: str | None = None, *_: Any, **more: Any) -> Model:
        net = zoo.network("timm ViT") if weights is None else other_network()
        return Model(net, cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name=spec or "small")

    monkeypatch.setattr(sources, "load", load)


def written(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_every_kind_has_its_command() -> None:
    assert {one.callback.__name__ for one in command.app.registered_commands} == set(HOMES)


def test_cass_says_what_it_found_and_leaves_figures(run: Run, album: Path) -> None:
    ran = run("study", "cass", album, "--samples", 2, "--shard", 4, "--batch", 4)
    assert ran.code == 0 and ran.out.startswith(f"cass: 10 images of {album}, 1 failed")
    assert "Similarity and depth: each image's rank correlation" in ran.out and "Heads of a layer:" in ran.out
    assert "failed: " in ran.err and "cat/3.png: is not an image" in ran.err
    study = open_study("vitreous-out")
    files = written(study.folder)
    for name in ("heads", "similarity-by-class", "similarity-by-layer"):
        assert {f"figures/{name}.png", f"figures/{name}.svg"} <= files
        with Image.open(study.folder / "figures" / f"{name}.png") as figure:
            assert min(figure.size) > 300 and figure.getextrema()[0][0] < 100  # something dark is drawn
    page = (study.folder / "report.html").read_text()
    assert page.count("<svg role") == 3 and "What failed (1)" in page and "is not an image" in page
    assert not re.search(r'(?:src|href|url\()\s*=?\s*["\']?(?:https?:)?//', page)
    told = json.loads((study.folder / "findings.json").read_text())
    assert list(told["failed"]) == ["cat/3.png"] and told["finished"] and told["models"]["small"]["lead"]


@pytest.mark.parametrize("kind", ["maps", *rare("leaderboard", "spread", "compare")])
def test_the_other_kinds(run: Run, album: Path, kind: str) -> None:
    more: tuple[Any, ...] = () if kind == "spread" else ("-x", "attention,gae")
    more += ("--metrics", "sparsity,token_deletion") if kind == "leaderboard" else ()
    ran = run("study", kind, album, *more, "--json", "--workers", 0)
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["study"]["study"] == kind and Path(told["report"]).is_file()
    page = Path(told["report"]).read_text()
    assert told["models"]["small"]["lead"].split(".")[0].replace("&", "&amp;") in page
    figures = written(Path(told["folder"]) / "figures") if kind != "maps" else set()
    expected = {
        "spread": {"spread-histogram.png", "spread-by-layer.svg"},
        "compare": {"pairs.png", "correlation.svg"},
        "leaderboard": {"token_deletion.png", "token_deletion.svg"},
        "maps": set(),
    }
    assert expected[kind] <= figures
    if kind == "spread":
        assert sum(name.startswith("spread-level-") for name in figures) >= 8
    if kind == "leaderboard":
        assert "Leaderboard" in page and page.count("<img") >= 4  # examples with their maps
        assert told["models"]["small"]["numbers"]["label, else top-1"]["gae"]["sparsity"] is not None


def test_a_report_is_made_again_elsewhere(run: Run, album: Path, tmp_path: Path) -> None:
    run("study", "compare", album, "-x", "attention,gae")
    study = open_study("vitreous-out")
    whole = (study.folder / "report.html").read_text()
    (study.folder / "report.html").unlink()
    ran = run("report", "vitreous-out", "--out", "again")
    assert ran.code == 0 and ran.out.rstrip().endswith("report: again/report.html")
    assert Path("again/report.html").read_text() == whole and not (study.folder / "report.html").exists()
    assert "figures/pairs.png" in written(Path("again"))
    study.store.file(0).unlink()
    unfinished = run("report", study.folder)
    assert unfinished.code == 2 and "not finished: 0 of 1 shards" in unfinished.out


@pytest.mark.slow
def test_two_models_and_two_targets(run: Run, album: Path) -> None:
    given = ("-m", "one", "-m", "two", "-w", "a", "-w", "b", "--target", "label,top-1", "-x", "gae")
    ran = run("study", "maps", album, *given)
    assert ran.code == 0 and "one: 18 maps" in ran.out and "two: 18 maps" in ran.out
    study = open_study("vitreous-out")
    assert study.models == ["one", "two"] and len(study.to_pandas()) == 40
    assert set(study.to_pandas()["asked"]) == {"label", "top-1"}
    board = run("study", "leaderboard", album, "-x", "gae", "--metrics", "sparsity", "--target", "label,top-1")
    assert board.code == 0 and "target label" in board.out and "target top-1" in board.out
    assert run("study", "maps", album, "-m", "one", "-w", "a", "-w", "b", "-x", "gae").code == 0  # one net, two files


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("cass", "nowhere"), "nowhere: no such file or folder"),
        (("cass", "."), "no images in this folder"),
        (("maps", "ALBUM", "-x", "gea"), "did you mean gae"),
        (("maps", "ALBUM", "--target", ","), "--target is empty"),
        (("maps", "ALBUM", "--target", "zebra", "-x", "gae"), "unknown class 'zebra'"),
        (("maps", "ALBUM", "-m", "a", "-m", "b", "-w", "x"), "1 --weights for 2 --model"),
        (("maps", "ALBUM", "--engine", "spark"), "unknown engine 'spark'"),
        (("compare", "ALBUM", "-s", "rollout.discard=0.5"), "rollout: it is not among the methods"),
        (("spread", "ALBUM", "--aggregate", "sum"), "give mean, min, max or rollout"),
        (("cass", "ALBUM", "--limit", "0"), "see: vitreous study --help"),
        (("maps", "ALBUM", "--out", "FILE"), "is a file, not a folder"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, album: Path, args: tuple[str, ...], said: str) -> None:
    Path("FILE").write_text("x")
    ran = run("study", *(str(album) if arg == "ALBUM" else arg for arg in args))
    assert said in ran.error


def test_report_of_nothing(run: Run) -> None:
    assert "holds no study" in run("report", ".").error


def test_a_stop_says_what_is_safe(run: Run, album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = local.run_shard

    def stopping(recipe: Any, model: Any, one: Any, loaded: Any) -> Any:
        if one.number == 2:
            raise KeyboardInterrupt
        return true(recipe, model, one, loaded)

    monkeypatch.setattr(local, "run_shard", stopping)
    ran = run("study", "spread", album, "--shard", 2, "--batch", 2)
    assert ran.code == 130 and "stopped: 2 of 5 shards are in vitreous-out" in ran.err
    assert "run the same command again to resume" in ran.err and ran.out == ""
    monkeypatch.undo()


def test_a_full_disk_is_one_line_and_a_remedy(run: Run, album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Store, number: int, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(self.file(number)))

    monkeypatch.setattr(Store, "write_bytes", full)
    ran = run("study", "spread", album, "--shard", 2, "--batch", 2)
    assert ran.code == 2 and "stopped: 0 of 5 shards" in ran.err
    assert "free some space, then run the same command" in ran.err
    assert "No space left on device" in ran.err


def test_going_on_is_said(run: Run, album: Path) -> None:
    given = ("study", "maps", album, "-x", "attention", "--shard", 2, "--batch", 2)
    run(*given)
    open_study("vitreous-out").store.file(3).unlink()
    ran = run(*given)
    assert ran.code == 0 and "resuming " in ran.err and "4 of 5 shards are complete" in ran.err


def test_pictures_that_all_fail_are_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    for i in range(3):
        (tmp_path / "bad" / f"{i}.png").write_bytes(b"no")
    for kind in HOMES:
        ran = run("study", kind, tmp_path / "bad")
        assert ran.code == 2 and ran.err.count("is not an image") == 3, kind
        assert open_study("vitreous-out").to_pandas()["error"].notna().all()


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_in_a_real_run(album: Path, tmp_path: Path) -> None:
    """SIGINT to the whole group, as a terminal sends it: no traceback, no process left."""
    args = [sys.executable, "-m", "vitreous", "study", "cass", str(album), "--shard", "1", "--batch", "1"]
    child = subprocess.Popen(
        [*args, "--samples", "60", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    begun = tmp_path / "out"
    until(lambda: list(begun.glob("*/shards/*.parquet")) or child.poll() is not None, "the first shard")
    os.killpg(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130 and "Traceback" not in said and "stopped: " in said and "interrupted" in said
    assert 1 <= len(open_study(tmp_path / "out").numbers) < 10
    until(lambda: gone(child.pid), "the end of the processes that read images")


def gone(group: int) -> bool:
    """Has every process of the group ended?"""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_names_are_relative_paths(run: Run, album: Path) -> None:
    run("study", "maps", album, "-x", "attention")
    assert list(open_study("vitreous-out").to_pandas()["image"]) == names(album)
