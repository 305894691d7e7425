"""Nothing is lost: results have names of their own, and what is there is replaced only by the same or on demand."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import zoo
from conftest import Run
from machine import PATIENCE
from PIL import Image

from vitreous import Model
from vitreous._support import marks
from vitreous._support.arrays import save_arrays
from vitreous.cli import arguments
from vitreous.cli.places import place, placed_folder, release, reserved
from vitreous.cli.results import relative_names
from vitreous.errors import InputError
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("sources", "file", "name"),
    [
        (["in"], "in/cat.jpg", "cat"),
        (["in"], "in/album/cat.jpg", "album/cat"),
        (["in/"], "in/album/best.of/cat.v2.jpg", "album/best.of/cat.v2"),
        (["."], "in/album/cat.jpg", "in/album/cat"),
        (["in/album/cat.jpg"], "in/album/cat.jpg", "cat"),
        (["in/album/*.jpg"], "in/album/cat.jpg", "cat"),
        (["in/*/*.jpg"], "in/album/cat.jpg", "album/cat"),
        (["in/**/c?t.*"], "in/album/cat.jpg", "album/cat"),
        (["*.jpg"], "cat.jpg", "cat"),
        (["in/album", "in"], "in/album/cat.jpg", "cat"),
        (["in", "in/album"], "in/album/cat.jpg", "album/cat"),
        (["in", "in/album/cat.jpg"], "in/album/cat.jpg", "cat"),
        (["../in"], "../in/album/cat.jpg", "album/cat"),
    ],
)
def test_names_are_paths_below_what_was_named(here: Path, sources: list[str], file: str, name: str) -> None:
    (here / "in" / "album" / "best.of").mkdir(parents=True)
    os.chdir(here / "in" if sources == ["../in"] else here)
    assert relative_names([Path(file)], sources) == {Path(file): name}


def test_names_do_not_depend_on_their_neighbours(here: Path) -> None:
    (here / "in").mkdir()
    alone = relative_names([Path("in/x.png")], ["in"])
    among = relative_names([Path(f"in/{name}") for name in ("a/x.png", "x.jpg", "x.png")], ["in"])
    assert among[Path("in/x.png")] == alone[Path("in/x.png")] == "x"


def test_names_of_many_and_of_odd_files(here: Path) -> None:
    for folder in "ab":
        (here / folder).mkdir()
    many = [Path(f"{folder}/{i}.jpg") for folder in "ab" for i in range(2000)]
    assert len(set(relative_names(many, ["."]).values())) == 4000
    long = Path("in") / ("ü" * 120 + ".jpg")
    assert len(relative_names([long], [long])[long].encode()) <= 180
    folder = Path("[a]")
    folder.mkdir()
    assert relative_names([folder / "cat.jpg"], [folder]) == {folder / "cat.jpg": "cat"}


# -------------------------------------------------------------------------------------------------------------- places

KINDS = (".png", ".npz")
GROWING = ("index.html", "summary.csv", "summary.parquet")


def result(path: Path, identity: str) -> Path:
    """A file of vitreous with this identity."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"identity": identity}
    if path.suffix == ".npz":
        save_arrays(path, {"map": np.zeros(2)}, told)
    elif path.suffix == ".json":
        path.write_text(json.dumps(marks.marked(told)))
    else:
        Image.new("RGB", (2, 2)).save(path, **marks.pixels(path.suffix[1:], told))
    return path


def placed_once(out: Path, name: str, identity: str, overwrite: bool = False, **more: Any) -> str:
    found = place(out, name, KINDS, identity, overwrite, **more)
    release(out, found, KINDS)
    return found


def test_a_free_name_is_taken(here: Path) -> None:
    assert placed_once(here / "out", "album/cat", "one") == "album/cat"
    assert list((here / "out" / "album").iterdir()) == [], "nothing is left of the reservation"


def test_the_same_result_is_replaced(here: Path) -> None:
    for kind in KINDS:
        result(here / f"cat{kind}", "one")
    assert placed_once(here, "cat", "one") == "cat"
    (here / "cat.npz").unlink()
    assert placed_once(here, "cat", "one") == "cat"


@pytest.mark.parametrize("kind", KINDS)
def test_another_result_stays(here: Path, kind: str) -> None:
    """One file of the name is enough."""
    result(here / f"cat{kind}", "one")
    assert placed_once(here, "cat", "two") == "cat_2"
    assert placed_once(here, "cat", "two", overwrite=True) == "cat"
    result(here / f"cat_2{kind}", "two")
    assert placed_once(here, "cat", "two") == "cat_2"
    assert placed_once(here, "cat", "three") == "cat_3"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_of_somebody_else_stays(here: Path, overwrite: bool) -> None:
    Image.new("RGB", (9, 9)).save(here / "cat.png")
    (here / "dog.npz").write_bytes(b"something")
    (here / "mouse.png").mkdir()
    (here / "bird.png").symlink_to("nowhere.png")
    for name in ("cat", "dog", "mouse", "bird"):
        assert placed_once(here, name, "one", overwrite) == f"{name}_2"


def test_results_of_the_first_release_are_replaced_only_on_demand(here: Path) -> None:
    shutil.copy(Path(__file__).parent / "first_release" / "explained.npz", here / "cat.npz")
    Image.new("RGB", (9, 9)).save(here / "cat.png")
    assert placed_once(here, "cat", "one") == "cat_2"
    assert placed_once(here, "cat", "one", overwrite=True) == "cat"


def test_one_run_uses_a_name_once(here: Path) -> None:
    """cat.jpg and cat.png, or the same photo in two folders."""
    taken: set[str] = set()
    found = [placed_once(here, "cat", identity, True, taken=taken) for identity in ("one", "two", "one")]
    assert found == ["cat", "cat_2", "cat_3"]


def test_without_files_any_name_will_do(here: Path) -> None:
    assert place(here / "out", "cat", (), "one", False) == "cat"
    assert not (here / "out").exists()


# ---------------------------------------------------------------------------------------------------- several processes


def test_a_reserved_name_is_not_given_again(here: Path) -> None:
    assert place(here, "cat", KINDS, "one", True) == "cat"
    assert place(here, "cat", KINDS, "two", True) == "cat_2"
    release(here, "cat", KINDS)
    release(here, "cat_2", KINDS)
    assert placed_once(here, "cat", "two") == "cat"
    assert not list(here.iterdir())


def test_the_name_of_a_killed_process_is_free_again(here: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    claim = {"identity": "one", "host": socket.gethostname(), "process": int(gone.stdout)}
    for kind in KINDS:
        (here / f".cat{kind}.claim").write_text(json.dumps(claim))
    assert placed_once(here, "cat", "two") == "cat"
    for kind in KINDS:
        (here / f".dog{kind}.claim").write_text(json.dumps({**claim, "host": "elsewhere"}))
    assert placed_once(here, "dog", "two") == "dog_2", "whether it runs on another machine is not known"
    (here / ".bird.png.claim").touch()
    assert placed_once(here, "bird", "two") == "bird_2", "it may just be written"


RACE = """
import sys
from pathlib import Path
from vitreous.cli.places import place, release
who = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
for i in range(40):
    name = place(Path("out"), f"{i}", (".txt",), who, False)
    with open(f"out/{name}.txt", "a") as file:
        file.write(who)
    release(Path("out"), name, (".txt",))
"""


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_lose_nothing(here: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", RACE, who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for who in ("a", "b")
    ]
    for one in running:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in running:
        one.communicate("go\n", timeout=PATIENCE)
        assert one.returncode == 0
    written = [file.read_text() for file in sorted((here / "out").iterdir())]
    assert sorted(written) == ["a"] * 40 + ["b"] * 40, "each file has one writer, and nothing else is left"


# ------------------------------------------------------------------------------------------------------ several files


FILES = ("leaderboard.json", "report.html")


def placed_files(out: Path, identity: str, overwrite: bool = False) -> tuple[Path, list[str]]:
    with placed_folder(out, "leaderboard", FILES, identity, overwrite) as found:
        return found


def test_a_result_of_several_files_goes_below_when_it_would_replace_another(here: Path) -> None:
    out = Path("out")
    assert placed_files(out, "one") == (out, [])
    result(out / "leaderboard.json", "one")
    (out / "report.html").touch()
    assert placed_files(out, "one") == (out, [])
    folder, (note,) = placed_files(out, "two")
    assert folder == out / "leaderboard_2"
    assert note.startswith("out/leaderboard.json is something else and stays; the new result is in out/leaderboard_2")
    assert placed_files(out, "two", overwrite=True) == (out, [])
    result(folder / "leaderboard.json", "two")
    assert placed_files(out, "two")[0] == folder
    assert placed_files(out, "three")[0] == out / "leaderboard_3"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_page_of_somebody_else_stays(here: Path, overwrite: bool) -> None:
    (here / "report.html").write_text("mine")
    assert placed_files(here, "one", overwrite)[0] == here / "leaderboard_2"
    (here / "leaderboard.json").write_text("{}")
    assert placed_files(here, "one", overwrite)[0] == here / "leaderboard_2"


def test_a_leaderboard_of_the_first_release_is_replaced_only_on_demand(here: Path) -> None:
    (here / "leaderboard.json").write_text(json.dumps(dict.fromkeys(("model", "data", "settings", "table"))))
    assert placed_files(here, "one")[0] == here / "leaderboard_2"
    assert placed_files(here, "one", overwrite=True)[0] == here


def test_a_file_is_written_by_one_process_at_a_time(here: Path) -> None:
    with reserved(here / "cat.safetensors"):
        with pytest.raises(InputError, match="another run is writing this file"), reserved(here / "cat.safetensors"):
            pass
    with reserved(here / "cat.safetensors"):
        pass


# ------------------------------------------------------------------------------------------------------- all commands


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), [*"abcdefg"], name="small")
    monkeypatch.setattr(arguments, "load_model", lambda *_, **more: made)
    return made


def photo(path: str | Path, colour: int = 0) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(colour).integers(0, 255, (40, 60, 3), np.uint8)).resize((90, 60)).save(path)
    return path


def held(folder: str | Path) -> dict[str, bytes]:
    """The files of a folder, with their content; without the index and the summaries, which grow with each run."""
    files = [file for file in sorted(Path(folder).rglob("*")) if file.is_file() and file.name not in GROWING]
    return {str(file): file.read_bytes() for file in files}


def test_explain_never_loses_a_result(run: Run, small: Model, here: Path) -> None:
    """Another photo of the same name; the same photo by another method; the same again; --overwrite."""
    photo("s1/img.jpg", 1)
    photo("s2/img.jpg", 2)
    assert run("explain", "s1", "-x", "centre", "-o", "zz").err == ""
    first = held("zz")
    second = run("explain", "s2", "-x", "centre", "-o", "zz")
    assert "zz/img_2.png" in second.out
    assert second.err == (
        "note: zz/img.png is something else and stays; the new result is zz/img_2.png "
        "(--overwrite replaces results of vitreous)\n"
    )
    assert first.items() <= held("zz").items()
    told = json.loads(run("explain", "s1", "-x", "attention", "-o", "zz", "--json").out)
    assert told["images"][0]["figure"] == "zz/img_3.png" and "img_3" in told["notes"][0]
    assert len(held("zz")) == 6
    assert run("explain", "s2", "-x", "centre", "-o", "zz").out.startswith("zz/img_2.png"), "found again"
    assert run("explain", "s2", "-x", "attention", "-o", "zz", "--overwrite").err == ""
    assert len(held("zz")) == 6 and not first.items() <= held("zz").items()


@pytest.mark.slow
def test_out_may_name_the_file_of_one_image(run: Run, small: Model, here: Path) -> None:
    photo("in/a.jpg")
    assert run("explain", "in/a.jpg", "-x", "centre", "-o", "made/ff.png").code == 0
    assert list(held("made")) == ["made/ff.png"]
    assert run("explain", "in/a.jpg", "-x", "centre", "-o", "ff.npz").out.startswith("ff.npz")
    assert Path("ff.npz").is_file()
    before = Path("in/a.jpg").read_bytes()
    assert run("explain", "in/a.jpg", "-x", "centre", "-o", "in/a.jpg").out.startswith("in/a_2.jpg")
    assert Path("in/a.jpg").read_bytes() == before
    photo("in/b.jpg")
    said = run("explain", "in", "-x", "centre", "-o", "gg.png").error
    assert said == "--out gg.png: is the name of one file, but there are 2 images; give a folder"
    assert "is the name of a file; give a folder" in run("inspect", "layers", "in", "-o", "gg.png").error
    assert not Path("gg.png").exists()


@pytest.mark.slow
def test_limit_and_format(run: Run, small: Model, here: Path) -> None:
    for i in range(3):
        photo(f"in/{i}.jpg", i)
    assert run("explain", "in", "-x", "centre", "--limit", 2, "--format", "npz").code == 0
    assert list(held("vitreous-out")) == ["vitreous-out/0.npz", "vitreous-out/1.npz"]
    told = run("explain", "in", "-x", "centre", "--limit", 1, "--format", "none", "-o", "nothing")
    assert told.code == 0 and sorted(os.listdir("nothing")) == ["summary.csv", "summary.parquet"]
    assert "in/0.jpg" in told.out
    assert run("inspect", "layers", "in", "--limit", 1, "--format", "svg,pdf", "-o", "views").code == 0
    assert list(held("views")) == ["views/0.layers.pdf", "views/0.layers.svg"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "other", "kinds"),
    [
        (["inspect", "layers"], ["--heads", "max"], [".layers.npz", ".layers.png"]),
        (["inspect", "discard", "--steps", "2"], ["--most", "0.5"], [".discard.gif", ".discard.npz", ".discard.png"]),
        (["cass", "--samples", "1"], ["--samples", "2"], [".cass.npz", ".cass.png"]),
    ],
)
def test_views_are_never_lost(
    run: Run, small: Model, here: Path, words: list[str], other: list[str], kinds: list[str]
) -> None:
    image = photo("in/a.jpg")
    for _ in range(2):
        assert run(*words, image, "-o", "out").err == ""
        assert list(held("out")) == [f"out/a{kind}" for kind in kinds]
    first = held("out")
    assert "the new result is out/a_2" in run(*words, *other, image, "-o", "out").err
    assert list(held("out")) == [f"out/a{more}{kind}" for more in ("", "_2") for kind in kinds]
    assert first.items() <= held("out").items()
    photo("in/a.jpg", 5)
    assert "the new result is out/a_3" in run(*words, image, "-o", "out").err
    assert run(*words, image, "-o", "out", "--overwrite").err == ""
    assert len(held("out")) == 3 * len(kinds)


@pytest.mark.slow
def test_maximized_images_are_never_lost(run: Run, small: Model, here: Path) -> None:
    words = ["maximize", "-u", "neuron:1", "-u", "neuron:2", "--steps", "2", "-o", "out"]
    for _ in range(2):
        assert run(*words).err == ""
        first = held("out")
        assert len(first) == 9
    again = run(*words, "--decay", "1")
    assert "and 2 more have new names" in again.err and "out/maximized_2.png" in again.out
    assert len(held("out")) == 18 and first.items() <= held("out").items()
    assert run(*words, "--decay", "1", "--format", "svg", "-o", "other").code == 0
    assert len(held("other")) == 7


@pytest.mark.slow
def test_leaderboards_are_never_lost(run: Run, small: Model, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(2):
        photo(f"in/{i}.jpg", i)
    words = ["evaluate", "in", "-x", "centre", "--metric", "sparsity", "-o", "out"]
    assert run(*words).err == ""
    first = held("out")
    assert run(*words).err == "" and set(held("out")) == set(first)
    other = run("evaluate", "in", "-x", "attention", "--metric", "sparsity", "-o", "out")
    assert (
        "the new result is in out/leaderboard_2" in other.err and "report: out/leaderboard_2/report.html" in other.out
    )
    told = json.loads(run(*words, "--seed", 3, "--json").out)
    assert "out/leaderboard_3" in told["notes"][-1]
    before = held("out")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitreous.evaluation.leaderboard.measure_method", stop)
    stopped = run(*words)
    assert stopped.code == 130 and "finished before, and stays" in stopped.err
    assert held("out") == before


@pytest.mark.slow
def test_reports_are_never_lost(run: Run, here: Path) -> None:
    photo("in/0.jpg")
    torch.save(timm.create_model("test_vit", num_classes=3).state_dict(), "w.pth")
    for samples in ("1", "2"):
        words = ["study", "cass", "in", "--samples", samples, "-m", "test_vit", "-w", "w.pth"]
        assert run(*words, "-o", f"study{samples}").code == 0
    for _ in range(2):
        assert run("report", "study1", "-o", "page").err == ""
    first = held("page")
    assert "the new result is in page/report_2" in run("report", "study2", "-o", "page").err
    assert first.items() <= held("page").items()
    Path("mine/figures").mkdir(parents=True)
    assert "mine/report_2" in run("report", "study2", "-o", "mine", "--overwrite").err, "a folder of somebody else"


@pytest.mark.slow
def test_a_concept_is_not_replaced_by_another(run: Run, small: Model, here: Path) -> None:
    photo("one/a.jpg", 1)
    photo("two/b.jpg", 2)
    for _ in range(2):
        assert run("concept", "build", "cat", "one").code == 0
    first = held("vitreous-concepts")
    said = run("concept", "build", "cat", "two").error
    assert said == (
        "vitreous-concepts/cat.safetensors: holds another concept of this name (1 image, dot); "
        "give another name, or --overwrite"
    )
    photo("one/a.jpg", 3)
    assert "holds another concept" in run("concept", "build", "cat", "one").error, "the same name, another content"
    assert held("vitreous-concepts") == first
    assert run("concept", "build", "cat", "two", "--overwrite").code == 0
    assert held("vitreous-concepts") != first
    Path("mine.safetensors").write_bytes(b"weights")
    said = run("concept", "build", "cat", "two", "--out", "mine.safetensors", "--overwrite").error
    assert said.startswith("mine.safetensors: is there and is not a concept")


@pytest.mark.slow
def test_a_probe_is_not_replaced_by_another(run: Run, small: Model, here: Path) -> None:
    for i, kind in enumerate(("cat", "dog")):
        for k in range(3):
            photo(f"data/{kind}/{k}.jpg", 10 * i + k)
    words = ["probe", "train", "data", "--epochs", "1", "--no-augment"]
    for _ in range(2):
        assert run(*words).code == 0
    first = held(".")["probe.safetensors"]
    assert run(*words, "--seed", "1").error.startswith("probe.safetensors: holds another probe (2 classes on small")
    photo("data/cat/0.jpg", 77)
    assert "trained otherwise or on other images" in run(*words).error
    assert held(".")["probe.safetensors"] == first
    assert run(*words, "--overwrite").code == 0
    Path("mine.safetensors").write_bytes(b"weights")
    assert "is there and is not a probe" in run(*words, "--out", "mine.safetensors", "--overwrite").error
