"""The command line as people use it: files out, one line for each error, exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import zoo
from conftest import Run, off
from machine import PATIENCE, ROUNDING
from PIL import Image

import vitreous
from vitreous import METHODS, Attribution, Model
from vitreous._support import marks
from vitreous._support.files import write_whole
from vitreous.cli import arguments, explained
from vitreous.cli.main import main
from vitreous.evaluation.report.folder import CSV, INDEX, PARQUET
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped
from vitreous.plot.sheet import Sheet
from vitreous.registry import Method, MethodWarning, method

SMALL = ("--model", "test_vit", "--weights", "random")


@pytest.fixture(scope="module")
def small() -> Model:
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")


@pytest.fixture
def drawn(small: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A tiny model in place of the embedded one."""
    monkeypatch.setattr(arguments, "load_model", lambda *_: small)
    return small


@pytest.fixture
def quick(drawn: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The same, and the figures are only files."""
    monkeypatch.setattr(explained, "explanation_figure", lambda *_, **more: Sheet(1, 1))
    monkeypatch.setattr(explained, "save_figure", save_dot)
    return drawn


def save_dot(figure: Any, path: Path, told: Any = None) -> None:
    """A figure of one pixel, with its mark."""
    held = io.BytesIO()
    Image.new("RGB", (1, 1)).save(held, "PNG", **marks.pixels("png", told))
    write_whole(path, held.getvalue())


def by_class(trace: Any, target: Any) -> Any:
    """The score of the target, on every patch."""
    return trace.score(target)[:, None, None].expand(-1, *trace.layout.grid)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Method]]:
    """A method that depends on the target; and `all` are only the quick ones."""
    with METHODS.temporary():
        method(targeted=True, signed=True, family="own")(by_class)
        quick = {name: METHODS[name] for name in ("attention", "rollout", "by_class", "centre", "random")}
        monkeypatch.setattr("vitreous.registry.METHODS", quick)
        yield quick


def photo(path: Path, colour: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(colour).integers(0, 255, (40, 60, 3), np.uint8)
    Image.fromarray(noise).resize((90, 60)).save(path)
    return path


def names(folder: Path) -> list[str]:
    """What lies in a folder, without the index and the summaries."""
    return sorted(path.name for path in folder.iterdir() if path.name not in (INDEX, CSV, PARQUET))


# ------------------------------------------------------------------------------------------------- as a real command


def command(*args: Any, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "", **settings}
    words = [sys.executable, *map(str, args)]
    given = {"cwd": cwd, "env": environment, "timeout": PATIENCE, "check": False}
    return subprocess.run(words, capture_output=True, text=True, **given)


@pytest.mark.process
def test_explain_for_real(tmp_path: Path, cat: Path, tiny: Model) -> None:
    """One photo: a figure, the raw maps, and what the model saw."""
    ran = command("-m", "vitreous", "explain", cat, "--out", "out", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert ran.stdout.startswith("out/cat.png  ")
    assert "cat" in ran.stdout.split("cat.png")[1].splitlines()[0]
    assert "1 image explained by vitreous_tiny with centred_lrp; raw maps: out/cat.npz" in ran.stdout
    assert names(tmp_path / "out") == ["cat.npz", "cat.png"]
    with Image.open(tmp_path / "out" / "cat.png") as figure:
        assert figure.width > 1000
    with np.load(tmp_path / "out" / "cat.npz", allow_pickle=False) as stored:
        expected = vitreous.explain(tiny, cat)
        key = f"centred_lrp@{expected.target}"
        assert set(stored) == {key, "provenance"}
        assert stored[key].dtype == np.float32
        assert off(torch.from_numpy(stored[key]), expected.map[0]) < 1e-4
        assert json.loads(str(stored["provenance"]))["maps"][key] == expected.provenance


@pytest.mark.slow
@pytest.mark.process
def test_an_error_for_real(tmp_path: Path) -> None:
    ran = command("-m", "vitreous", "explain", "gone.jpg", "--method", "rolout", cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: unknown method 'rolout'; did you mean rollout")
    assert ran.stderr.count("\n") == 1
    assert names(tmp_path) == [], "nothing is left behind"


@pytest.mark.slow
@pytest.mark.process
def test_a_terminal_of_few_characters(tmp_path: Path) -> None:
    ran = command("-m", "vitreous", "methods", "rollout", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "number ? 0 and < 1" in ran.stdout


@pytest.mark.slow
@pytest.mark.process
def test_a_home_that_is_not_there(tmp_path: Path, cat: Path) -> None:
    """Neither to be found nor to be made: nothing is said about it."""
    (tmp_path / "file").touch()
    home = str(tmp_path / "file" / "home")
    settings = {"HOME": home, "XDG_CACHE_HOME": home, "XDG_CONFIG_HOME": home, "MPLCONFIGDIR": home}
    ran = command("-m", "vitreous", "explain", cat, "-x", "rollout", "-o", "out", cwd=tmp_path, **settings)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert names(tmp_path / "out") == ["cat.npz", "cat.png"]


@pytest.mark.process
def test_help_needs_nothing_heavy(tmp_path: Path) -> None:
    for words in (["--help"], ["explain", "-h"], ["--version"]):
        ran = command("-X", "importtime", "-m", "vitreous", *words, cwd=tmp_path)
        assert ran.returncode == 0
        imported = {line.split("|")[-1].strip().split(".")[0] for line in ran.stderr.splitlines()}
        assert "typer" in imported
        assert not imported & {"torch", "timm", "numpy", "matplotlib", "PIL", "scipy", "transformers"}


# ---------------------------------------------------------------------------------------------------------- explaining


def test_several_methods_in_python_are_the_same(run: Run, quick: Model, tmp_path: Path) -> None:
    path = photo(tmp_path / "a.png")
    result = run("explain", path, "-x", "attention, rollout,centre", "-o", "out", "-s", "rollout.discard=0.5")
    assert (result.code, result.err) == (0, "")
    with np.load("out/a.npz") as stored:
        assert set(stored) == {"attention", "rollout", "centre", "provenance"}
        expected = vitreous.explain(quick, path, "rollout", discard=0.5)
        assert np.allclose(stored["rollout"], expected.map[0].numpy(), rtol=1e-5)
        assert json.loads(str(stored["provenance"]))["maps"]["rollout"] == expected.provenance
    back = Attribution.load("out/a.npz", "rollout")
    assert back.provenance["options"]["discard"] == 0.5
    assert torch.allclose(back.map, expected.map, rtol=1e-5)
    with pytest.raises(vitreous.VitreousError, match="holds attention, rollout, centre; choose one"):
        Attribution.load("out/a.npz")


def test_all_methods(run: Run, quick: Model, few: dict[str, Method], tmp_path: Path) -> None:
    told = json.loads(run("explain", photo(tmp_path / "a.png"), "-x", "all", "--json").out)
    assert told["methods"] == list(few)
    assert told["notes"] == []
    assert {name.split("@")[0] for name in told["images"][0]["range"]} == set(few)


def test_all_means_all() -> None:
    assert arguments.pick_methods("all") == (list(METHODS.values()), True)


def test_json_is_for_programs(run: Run, quick: Model, tmp_path: Path) -> None:
    paths = [photo(tmp_path / f"{i}.png", i) for i in range(2)]
    result = run("explain", *paths, "-x", "attention,rollout", "--json", "--out", "out")
    told = json.loads(result.out)
    assert result.err == ""
    assert told["model"] == "small"
    assert told["methods"] == ["attention", "rollout"]
    assert told["failed"] == told["notes"] == []
    assert [entry["image"] for entry in told["images"]] == [str(path) for path in paths]
    for entry, path in zip(told["images"], paths):
        assert Path(entry["figure"]).is_file()
        assert Path(entry["maps"]).is_file()
        scores = quick.run(quick.prepare(path)).softmax(-1)[0]
        assert [best["class"] for best in entry["top"]] == scores.argsort(descending=True)[:5].tolist()
        assert entry["top"][0]["probability"] == pytest.approx(scores.max().item(), abs=1e-5)
        assert entry["top"][0]["label"] == quick.label(entry["top"][0]["class"])
        found = vitreous.explain(quick, path, "rollout").map
        assert entry["range"]["rollout"] == pytest.approx(
            {"min": found.min().item(), "max": found.max().item()}, rel=1e-4
        )


def test_more_than_one_batch(run: Run, quick: Model, tmp_path: Path) -> None:
    for i in range(10):
        photo(tmp_path / "in" / f"{i}.png", i)
    told = json.loads(run("explain", "in", "-x", "rollout", "--json").out)
    assert len(told["images"]) == 10
    for i in (0, 9):
        with np.load(f"vitreous-out/{i}.npz") as stored:
            expected = vitreous.explain(quick, tmp_path / "in" / f"{i}.png", "rollout").map[0].numpy()
            assert np.allclose(stored["rollout"], expected, rtol=1e-4)


def test_patterns(run: Run, quick: Model, tmp_path: Path) -> None:
    for name in ("a1.png", "a2.png", "b1.png", "größe 1.png"):
        photo(tmp_path / "in" / name)
    assert run("explain", "in/a*.png", "in/größe*", "-x", "centre", "-o", "out").code == 0
    assert names(tmp_path / "out") == ["a1.npz", "a1.png", "a2.npz", "a2.png", "größe 1.npz", "größe 1.png"]
    assert run("explain", "in/c*.png").error == "in/c*.png: nothing matches this pattern"


def test_cells_are_drawn_otherwise(run: Run, drawn: Model, tmp_path: Path) -> None:
    path = photo(tmp_path / "a.png")
    assert run("explain", path, "-x", "rollout", "-o", "smooth").code == 0
    assert run("explain", path, "-x", "rollout", "-o", "cells", "--cells").code == 0
    with Image.open("smooth/a.png") as smooth, Image.open("cells/a.png") as cells:
        assert smooth.size == cells.size
        assert not np.array_equal(np.asarray(smooth), np.asarray(cells))
    with np.load("smooth/a.npz") as one, np.load("cells/a.npz") as other:
        assert off(one["rollout"], other["rollout"]) <= ROUNDING, "the numbers are the same"


def test_animated_pictures_get_a_note(run: Run, quick: Model, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:])
    result = run("explain", "film.gif", "-x", "centre")
    assert result.code == 0
    assert result.err == "note: film.gif: has 2 frames, the first is explained\n"


# ------------------------------------------------------------------------------------------------------------- targets


def test_targets_make_rows(run: Run, drawn: Model, few: dict[str, Method], tmp_path: Path) -> None:
    path, method = photo(tmp_path / "a.png"), "by_class"
    told = json.loads(run("explain", path, "-x", f"{method},rollout", "-t", "cat,3", "--json").out)
    assert set(told["images"][0]["range"]) == {f"{method}@0", f"{method}@3", "rollout"}
    with np.load(told["images"][0]["maps"]) as stored:
        expected = vitreous.explain(drawn, path, method, 3).map[0].numpy()
        assert np.allclose(stored[f"{method}@3"], expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    one = json.loads(run("explain", path, "-x", method, "-t", "dog, hound", "--json").out)
    assert set(one["images"][0]["range"]) == {f"{method}@1"}


def test_each_picture_has_its_own_best_class(run: Run, quick: Model, few: dict[str, Method], tmp_path: Path) -> None:
    for i in range(3):
        photo(tmp_path / "in" / f"{i}.png", i)
    told = json.loads(run("explain", "in", "-x", "by_class", "--json").out)
    for entry in told["images"]:
        assert set(entry["range"]) == {f"by_class@{entry['top'][0]['class']}"}


def test_a_target_that_no_method_uses_is_said(run: Run, quick: Model, tmp_path: Path) -> None:
    result = run("explain", photo(tmp_path / "a.png"), "-x", "rollout,centre", "-t", "cat")
    assert result.code == 0
    assert result.err == "note: --target cat: rollout or centre does not depend on a target\n"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("cta", "unknown class 'cta'; did you mean cat"),
        ("99", "class 99 is out of range"),
        ("cat,qqqqqq", "unknown class 'qqqqqq'"),
        ("top-9", "top-9 is out of range"),
    ],
)
def test_unknown_classes(run: Run, quick: Model, tmp_path: Path, target: str, said: str) -> None:
    assert said in run("explain", photo(tmp_path / "a.png"), "-t", target).error


# --------------------------------------------------------------------------------------------------------- bad pictures


def test_one_bad_picture_in_a_folder_does_not_stop_the_others(run: Run, quick: Model, tmp_path: Path) -> None:
    for i in range(3):
        photo(tmp_path / "in" / f"{i}.png", i)
    (tmp_path / "in" / "bad.jpg").write_bytes(b"\xff\xd8 not really")
    result = run("explain", "in", "-x", "centre", "-o", "out")
    assert result.code == 0
    assert names(tmp_path / "out") == ["0.npz", "0.png", "1.npz", "1.png", "2.npz", "2.png"]
    assert "3 images of 4 explained by small" in result.out
    assert result.err == "skipped: in/bad.jpg: is not an image that Pillow can read\n"
    told = json.loads(run("explain", "in", "-x", "centre", "-o", "out", "--json").out)
    assert told["failed"] == [{"image": "in/bad.jpg", "reason": "in/bad.jpg: is not an image that Pillow can read"}]


@pytest.mark.parametrize("given", [["in/bad.jpg", "in/0.png"], ["in", "in/bad.jpg"], ["in/0.png", "gone.png"]])
def test_a_bad_picture_that_was_named_is_an_error(run: Run, quick: Model, tmp_path: Path, given: list[str]) -> None:
    """The others are explained all the same."""
    photo(tmp_path / "in" / "0.png")
    (tmp_path / "in" / "bad.jpg").write_bytes(b"nothing")
    result = run("explain", *given, "-x", "centre", "-o", "out")
    assert result.error.split(":")[0] in ("in/bad.jpg", "gone.png")
    assert names(tmp_path / "out") == ["0.npz", "0.png"]


def test_nothing_but_bad_pictures(run: Run, quick: Model, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.jpg").write_bytes(b"nothing")
    result = run("explain", "in", "-o", "out")
    assert result.error == "in/bad.jpg: is not an image that Pillow can read"
    assert result.out == ""
    assert not (tmp_path / "out").exists()
    asked = run("explain", "in", "--json")
    assert asked.code == 2
    assert json.loads(asked.out)["images"] == []


def test_a_folder_without_pictures(run: Run, quick: Model, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    assert run("explain", "in").error.startswith("in: no images in this folder")


# ------------------------------------------------------------------------------------------------------ what is written


def test_pictures_of_the_same_name(run: Run, quick: Model, tmp_path: Path) -> None:
    for name in ("a/x.png", "b/x.png", "x.png", "x.jpg", "y.png"):
        photo(tmp_path / "in" / name, len(name) + ord(name[0]))
    for _ in range(2):  # the second run finds the same names again
        told = json.loads(run("explain", "in", "-x", "random", "-o", "out", "--json").out)
        figures = {entry["image"]: entry["figure"] for entry in told["images"]}
        assert figures == {
            "in/a/x.png": "out/a/x.png",
            "in/b/x.png": "out/b/x.png",
            "in/x.jpg": "out/x.png",
            "in/x.png": "out/x_2.png",
            "in/y.png": "out/y.png",
        }
        for image, figure in figures.items():
            with np.load(Path(figure).with_suffix(".npz")) as stored:
                assert np.array_equal(stored["random"], vitreous.explain(quick, image, "random").map[0].numpy())


def test_a_second_run_writes_the_same_files(run: Run, quick: Model, tmp_path: Path) -> None:
    """Neither more of them, nor figures of figures."""
    photo(tmp_path / "in" / "x.jpg")
    for _ in range(2):
        assert run("explain", "in", "-x", "centre", "-o", "in/out").code == 0
        assert names(tmp_path / "in" / "out") == ["x.npz", "x.png"]


def test_a_picture_is_never_overwritten(run: Run, quick: Model, tmp_path: Path) -> None:
    path = photo(tmp_path / "in" / "x.png")
    mine = photo(tmp_path / "in" / "y.png")
    before = path.read_bytes(), mine.read_bytes()
    for more in ([], [], ["--overwrite"]):
        assert run("explain", "in/x.png", "-x", "centre", "-o", "in", *more).code == 0
        assert names(tmp_path / "in") == ["x.png", "x_2.npz", "x_2.png", "y.png"]
    photo(tmp_path / "y.jpg")
    assert run("explain", "y.jpg", "-x", "centre", "-o", "in", "--overwrite").code == 0
    assert (path.read_bytes(), mine.read_bytes()) == before
    assert "y_2.png" in names(tmp_path / "in")


def test_out_that_cannot_be_a_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        arguments, "load_model", lambda *_: pytest.fail("the folder is checked before the model is loaded")
    )
    path = photo(tmp_path / "a.png")
    (tmp_path / "notes.txt").touch()
    assert run("explain", path, "--out", "notes.txt").error == "--out notes.txt: notes.txt is a file, not a folder"
    assert "a.png is a file" in run("explain", path, "--out", "a.png/sub/folder").error
    assert "a.png is a file" in run("explain", path, "--out", "a.png/b.png").error


def test_out_that_cannot_be_written(run: Run, quick: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device", "out/a.png")

    monkeypatch.setattr(explained, "save_figure", full)
    assert run("explain", photo(tmp_path / "a.png"), "-x", "centre").error == "out/a.png: No space left on device"


def test_interrupt(run: Run, quick: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finished stays, nothing is half written."""
    for i in range(3):
        photo(tmp_path / "in" / f"{i}.png", i)
    real, calls = Path.write_bytes, []

    def interrupted(file: Path, content: bytes) -> int:
        calls.append(file)
        if len(calls) == 3:  # the second picture's first file
            real(file, content[: len(content) // 2])
            raise KeyboardInterrupt
        return real(file, content)

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    monkeypatch.setattr(explained, "THREADS", 1)
    result = run("explain", "in", "-x", "centre", "-o", "out")
    assert result.code == 130
    assert result.err == "interrupted\n"
    assert names(tmp_path / "out") == ["0.npz", "0.png"]


def test_interrupt_while_loading(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(arguments, "load_model", interrupted)
    assert run("explain", photo(tmp_path / "a.png"), "-o", "out").code == 130
    assert not (tmp_path / "out").exists()


def test_out_of_memory_is_one_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(arguments, "load_model", full)
    assert "too little memory" in run("explain", photo(tmp_path / "a.png")).error


def test_our_own_mistakes_keep_their_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: Any) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(arguments, "load_model", wrong)
    monkeypatch.setattr(sys, "argv", ["vitreous", "explain", str(photo(tmp_path / "a.png"))])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "in wrong" in said and "ZeroDivisionError: by nothing" in said
    assert f"vitreous {vitreous.__version__}" in said
    assert said.endswith("please report it with the lines above and the output of: vitreous doctor\n")


def test_our_own_warnings_are_one_line(run: Run, quick: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("--version")
    assert (
        warnings.formatwarning(MethodWarning("x does not load"), MethodWarning, "f.py", 3) == "note: x does not load\n"
    )
    assert "f.py:3: UserWarning: hm" in warnings.formatwarning(UserWarning("hm"), UserWarning, "f.py", 3)


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("setting", "option", "value"),
    [
        ("attention.layer=0", "layer", 0),
        ("attention.layer=-2", "layer", -2),
        (" attention.heads = max ", "heads", "max"),
        ("attention.heads=1", "heads", 1),
        ("attention.query=1,2", "query", [1, 2]),
        ("attention.query=[1, 2]", "query", [1, 2]),
    ],
)
def test_settings(run: Run, quick: Model, tmp_path: Path, setting: str, option: str, value: Any) -> None:
    path = photo(tmp_path / "a.png")
    assert run("explain", path, "-x", "attention", "--set", setting).code == 0
    found = Attribution.load("vitreous-out/a.npz")
    assert found.provenance["options"][option] == value
    given = tuple(value) if isinstance(value, list) else value
    assert torch.allclose(found.map, vitreous.explain(quick, path, "attention", **{option: given}).map, rtol=1e-5)


def test_dashes_may_be_typed_for_underscores(run: Run, quick: Model, tmp_path: Path) -> None:
    assert run("explain", photo(tmp_path / "a.png"), "-x", "rollout", "-s", "rollout.start-layer=1").code == 0
    assert Attribution.load("vitreous-out/a.npz").options["start_layer"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-s", "rollout.discard=2"], "rollout.discard takes a number ≥ 0 and < 1, not 2"),
        (["-s", "rollout.discard=much"], "rollout.discard takes a number, not 'much'"),
        (["-s", "rollout.discrd=0.9"], "rollout has no option 'discrd'; did you mean discard?"),
        (["-s", "rolout.discard=0.9"], "unknown method 'rolout'; did you mean rollout"),
        (["-s", "discard=0.9"], "--set discard=0.9: write method.option=value"),
        (["-s", "rollout.discard"], "--set rollout.discard: write method.option=value"),
        (["-x", "rollout", "-s", "centre.width=1"], "--set centre.…: centre is not among the chosen methods"),
        (["-s", "centre.width=1"], "--set centre.…: centre is not chosen: add --method centre"),
        (["-x", "rollout,attenton"], "unknown method 'attenton'; did you mean attention"),
        (["-x", " , "], "--method: name at least one"),
        (["--img-size", "big"], "--img-size big: write one number or height×width"),
        (["--img-size", "224x0"], "--img-size 224x0: write one number"),
        (["--nonsense"], "No such option: --nonsense"),
    ],
)
def test_bad_options(run: Run, tmp_path: Path, words: list[str], said: str) -> None:
    """All of this is known before a model is loaded."""
    assert run("explain", photo(tmp_path / "a.png"), *words).error.startswith(said)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("attention.layer=7", "layer 7 is out of range: small has layers 0 to 2"),
        ("attention.layer=-4", "layer -4 is out of range"),
        ("attention.heads=2", "head 2 is out of range: the layer has heads 0 to 1"),
        ("attention.query=4,0", "query=4,0 is out of range: the grid has 4 rows and 4 columns"),
        ("rollout.start_layer=3", "start_layer=3 is out of range"),
    ],
)
def test_out_of_range(run: Run, quick: Model, tmp_path: Path, setting: str, said: str) -> None:
    method = setting.partition(".")[0]
    assert said in run("explain", photo(tmp_path / "a.png"), "-x", method, "-s", setting).error


# --------------------------------------------------------------------------------------------------------------- models


def test_model_weights_labels_and_size(run: Run, tmp_path: Path) -> None:
    net = timm.create_model("test_vit", num_classes=3)
    torch.save({"state_dict": net.state_dict()}, tmp_path / "w.pth")
    (tmp_path / "labels.txt").write_text("cat\ndog\nbird\n")
    words = ["-m", "test_vit", "-w", "w.pth", "--labels", "labels.txt", "--img-size", "64x128", "--device", "cpu"]
    told = json.loads(run("explain", photo(tmp_path / "a.png"), *words, "-x", "rollout", "--json").out)
    assert told["model"] == "test_vit"
    assert {best["label"] for best in told["images"][0]["top"]} == {"cat", "dog", "bird"}
    assert Attribution.load("vitreous-out/a.npz").map.shape == (1, 4, 8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "vit_tinny_patch16_224"], "unknown model 'vit_tinny_patch16_224'; did you mean vit_tiny_patch16_224"),
        (["-m", "torchvision/vit_b_61"], "torchvision has no model 'vit_b_61'; did you mean"),
        (["-m", "hf/./nowhere"], "hf/./nowhere: no such folder"),
        (["-w", "gone.safetensors"], "gone.safetensors: no such weights file"),
        ([*SMALL, "--device", "cuda:7"], "there is no device 'cuda:7' here"),
        ([*SMALL, "--labels", "gone.txt"], "gone.txt: no such labels file"),
        (["-m", "test_resnet", "-w", "random", "--img-size", "64"], "test_resnet does not take another img_size"),
    ],
)
def test_models_that_cannot_be_had(run: Run, tmp_path: Path, words: list[str], said: str) -> None:
    if "hf/" in words[1]:
        pytest.importorskip(
            "transformers", reason="the folder is looked at by transformers: pip install 'vitreous[hf]'"
        )
    assert run("explain", photo(tmp_path / "a.png"), *words).error.startswith(said)
    assert not (tmp_path / "vitreous-out").exists()


def test_wrong_weights_name_the_keys(run: Run, tmp_path: Path) -> None:
    torch.save({"cls_token": torch.zeros(1), "other": torch.zeros(2)}, tmp_path / "w.pth")
    said = run("explain", photo(tmp_path / "a.png"), "-m", "test_vit", "-w", "w.pth").error
    assert said.startswith("w.pth: does not fit VisionTransformer: missing ")
    assert "unexpected other" in said


def test_models_that_attend_between_channels_are_refused_with_advice(
    run: Run, few: dict[str, Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xcit = Model(zoo.network("timm XCiT"), cropped((64, 64), *IMAGENET), name="xcit")
    monkeypatch.setattr(arguments, "load_model", lambda *_: xcit)
    path = photo(tmp_path / "a.png")
    said = run("explain", path, "-x", "centre,rollout").error
    assert said.startswith("rollout needs token attention; xcit attends between channels, not between tokens. Try ")
    result = run("explain", path, "-x", "all")
    assert result.code == 0
    assert "note: without rollout: rollout needs token attention; xcit attends between channels" in result.err
    assert "centre" in result.out.splitlines()[-1]


def test_a_model_without_classes(
    run: Run, few: dict[str, Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = Model(zoo.network("open_clip ViT-B-32"), name="clip")
    monkeypatch.setattr(arguments, "load_model", lambda *_: clip)
    told = json.loads(run("explain", photo(tmp_path / "a.png"), "--json").out)
    assert told["images"][0]["top"] == []
    assert set(told["images"][0]["range"]) == {"attention"}
    result = run("explain", "a.png")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0].strip() == "vitreous-out/a.png"
    assert "clip has no classifier" in run("explain", "a.png", "-x", "by_class").error
    result = run("explain", "a.png", "-x", "all")
    assert result.code == 0
    assert result.err.startswith("note: without by_class: clip has no classifier")
    assert "with attention, rollout, centre, random" in result.out


# -------------------------------------------------------------------------------------------------------------- listing


def test_methods(run: Run) -> None:
    result = run("methods")
    assert result.code == 0
    assert all(name in result.out for name in METHODS)
    assert {METHODS[name].family for name in METHODS} <= set(result.out.splitlines())
    assert max(map(len, result.out.splitlines())) <= 80
    assert "How much the tokens that the classifier reads attend" in result.out


def test_one_method(run: Run) -> None:
    result = run("methods", "rollout")
    assert result.code == 0
    assert "rollout: How much of each patch reaches" in result.out
    assert "number ≥ 0 and < 1" in result.out
    assert "mean, min or max" in result.out
    assert "start_layer" in result.out
    assert "reference: Abnar, Zuidema (2020). Quantifying attention flow in transformers." in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert run("methods", "rolout").error.startswith("unknown method 'rolout'; did you mean rollout")


def test_methods_as_json(run: Run) -> None:
    told = json.loads(run("methods", "--json").out)
    assert [one["name"] for one in told] == list(METHODS)
    assert told == json.loads(json.dumps([METHODS[name].schema for name in METHODS]))
    assert [one["name"] for one in json.loads(run("methods", "rollout", "--json").out)] == ["rollout"]


def test_models(run: Run) -> None:
    pytest.importorskip("open_clip", reason="its models are listed too: pip install 'vitreous[clip]'")
    listed = run("models").out.splitlines()
    assert listed[0] == "vitreous_tiny"
    assert {"vit_base_patch16_224", "torchvision/vit_b_16", "openclip/ViT-B-32"} <= set(listed)
    assert "resnet18" not in listed
    found = run("models", "vit_tiny*").out.splitlines()
    assert "vit_tiny_patch16_224" in found
    assert all(name.startswith("vit_tiny") for name in found)
    assert "deit_tiny_patch16_224" in run("models", "tiny_patch16").out.splitlines(), "a part of a name will do"
    assert run("models", "torchvision/vit*").out.splitlines()[0] == "torchvision/vit_b_16"
    assert set(json.loads(run("models", "vit_b*", "--json").out)) == {"timm", "torchvision"}
    assert "openclip/ViT-B-32" in run("models", "vit-b-32").out.splitlines(), "in any case"
    assert run("models", "vit_tiny_patch16_225").error.startswith(
        "no model matches 'vit_tiny_patch16_225'; did you mean"
    )


def test_version_and_help(run: Run) -> None:
    assert run("--version").out == f"vitreous {vitreous.__version__}\n"
    for words in ([], ["--help"], ["-h"]):
        result = run(*words)
        assert result.code == 0
        assert all(word in result.out for word in ("explain", "methods", "models"))
    assert "--method" in run("explain", "--help").out
    assert run("explain").error == "Missing argument 'IMAGE...'; see: vitreous explain --help"
    assert run("explian").error.startswith("No such command 'explian'")
