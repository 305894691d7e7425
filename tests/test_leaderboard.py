"""Methods × metrics on many images: the right values, whatever fails, and files that are there after all."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Run
from PIL import Image
from pyarrow import parquet

import vitreous
from vitreous import METHODS, METRICS, Model
from vitreous.cli import arguments
from vitreous.errors import InputError, OptionError, TargetError, Unsupported
from vitreous.evaluation import leaderboard
from vitreous.evaluation.leaderboard import Leaderboard, run_leaderboard
from vitreous.evaluation.plan import make_plan, pick_methods, pick_metrics
from vitreous.evaluation.report.files import Log
from vitreous.images.preprocess import IMAGENET
from vitreous.metrics.case import Measured
from vitreous.models.libraries import cropped
from vitreous.registry import method, metric

FILES = ["curves.parquet", "leaderboard.csv", "leaderboard.json", "leaderboard.parquet", "report.html"]


@pytest.fixture(scope="module")
def small() -> Model:
    torch.manual_seed(0)
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")


@pytest.fixture
def loaded(small: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A tiny model in place of the embedded one."""
    monkeypatch.setattr(arguments, "load_model", lambda *_: small)
    return small


@pytest.fixture
def own() -> Iterator[None]:
    """Whatever a test declares is forgotten."""
    with METHODS.temporary(), METRICS.temporary():
        yield


def photo(path: Path, seed: int = 0, size: tuple[int, int] = (90, 60)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 255, (8, 12, 3), np.uint8)
    Image.fromarray(noise).resize(size).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven pictures in two classes."""
    for i in range(7):
        photo(tmp_path / "data" / ("cat" if i < 3 else "hound") / f"{i}.png", i)
    return tmp_path / "data"


@pytest.fixture
def two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaderboard, "images_at_once", lambda model: 2)


def rows_of(board: Leaderboard, method: str, metric: str) -> list[dict[str, Any]]:
    return [row for row in board.rows() if (row["method"], row["metric"]) == (method, metric)]


# ---------------------------------------------------------------------------------------------------- the right values


@pytest.mark.usefixtures("two_at_a_time")
def test_values_are_those_of_evaluate_one_at_a_time(small: Model, folder: Path) -> None:
    settings = {"token_deletion": {"steps": 4}, "rollout": {"discard": 0.5}}
    board = run_leaderboard(small, folder, "rollout,gae", "token_deletion,sparsity", options=settings)
    assert board.methods == ["random", "centre", "rollout", "gae"] and board.finished
    for m, name in enumerate(board.methods):
        for n, sample in enumerate(board.data.samples):
            assert sample.label == (0 if n < 3 else 1) and board.targets[n] == str(sample.label)
            map = vitreous.explain(small, sample.image, name, sample.label, **settings.get(name, {}))
            deleted = vitreous.evaluate(small, sample.image, map, "token_deletion", sample.label, steps=4)
            sparse = vitreous.evaluate(small, sample.image, map, "sparsity", sample.label)
            assert board.values[m, 0, n] == pytest.approx(deleted.value.item(), rel=1e-4)
            assert board.values[m, 1, n] == pytest.approx(sparse.value.item())


def test_batches_share_a_trace_once_costs_are_known(
    small: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaderboard, "images_at_once", lambda *args: 1)
    made: list[Any] = []
    begin = leaderboard.Trace.__init__
    monkeypatch.setattr(leaderboard.Trace, "__init__", lambda *args: made.append(args) or begin(*args))
    board = run_leaderboard(small, folder, "rollout", "sparsity")
    assert len(made) == 3 * (1 + 3) + 4  # three timed batches with a trace for each method, then one for all
    assert np.isfinite(board.seconds[:, :3]).all() and np.isnan(board.seconds[:, 3:]).all()
    assert set(board.costs()) == {"random", "centre", "rollout"}
    cost = board.costs()["rollout"]
    assert 0 < cost.seconds and cost.ratio == pytest.approx(cost.seconds / board.forward)


def test_curves_are_means_over_images(small: Model, folder: Path) -> None:
    board = run_leaderboard(small, folder, "gae", "token_deletion", target="top-1")
    files = [sample.image for sample in board.data.samples]
    score = vitreous.evaluate(small, files, "gae", "token_deletion")
    assert score.curve is not None
    kept = board.curves["gae", "token_deletion"]
    np.testing.assert_allclose(kept.mean, score.curve.mean(0).numpy(), rtol=1e-4)
    assert kept.at == score.at and (kept.count == 7).all()


def test_targets(small: Model, folder: Path, tmp_path: Path) -> None:
    best = [vitreous.Trace(small, file).output.argmax().item() for file in sorted(folder.rglob("*.png"))]
    top = run_leaderboard(small, folder, "gae", "sparsity", target="top-1")
    assert [top.targets[n] for n in range(7)] == [str(c) for c in best]
    assert top.accuracy == pytest.approx(np.mean([b == (n > 2) for n, b in enumerate(best)]))
    assert set(run_leaderboard(small, folder, "gae", "sparsity", target="cat-hound").targets.values()) == {"0-1"}
    plain = photo(tmp_path / "plain" / "x.png", 3).parent
    assert run_leaderboard(small, plain, "gae", "sparsity").targets[0] == str(best[3])
    with pytest.raises(TargetError, match="has no labels; give class folders"):
        run_leaderboard(small, plain, "gae", "sparsity", target="label")


@pytest.mark.usefixtures("own")
def test_a_map_that_is_right_wins_and_noise_does_not(small: Model, folder: Path) -> None:
    @metric(better="higher", family="faithfulness")
    def first_patch(case: Any) -> Measured:
        """The share of the first patch."""
        values = case.patches.flatten(1)
        return Measured(values[:, 0] / values.sum(1))

    @method()
    def first(trace: Any, target: Any) -> Any:
        """Only the first patch."""
        return (torch.arange(16).reshape(4, 4) == 0).float().expand(len(trace), 4, 4)

    @method()
    def noise(trace: Any, target: Any) -> Any:
        """Other noise."""
        return METHODS["random"].run(trace, target, seed=7)

    board = run_leaderboard(small, folder, "first,noise", "first_patch")
    found = board.summary()
    said = {name: found.verdict(m) for m, name in enumerate(found.methods)}
    assert said["first"] == "better than random on first_patch"
    assert said["noise"] == "not distinguishable from random on this model"
    assert found.methods[found.order[0]] == "first"


@pytest.mark.slow
@pytest.mark.usefixtures("two_at_a_time")
def test_the_same_twice(small: Model, folder: Path) -> None:
    one, other = (run_leaderboard(small, folder, "gae", "sparsity,token_deletion", sample=5, seed=3) for _ in range(2))
    np.testing.assert_allclose(one.values, other.values, rtol=1e-4)
    np.testing.assert_allclose(one.summary().gain_low, other.summary().gain_low, rtol=1e-3, atol=1e-6)
    assert one.data == other.data and len(one.data) == 5


# ------------------------------------------------------------------------------------------------------- what can fail


@pytest.mark.usefixtures("own", "two_at_a_time")
def test_every_failure_leaves_its_reason(small: Model, folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "1.png").write_bytes(b"no picture")

    @method()
    def refuses(trace: Any, target: Any) -> Any:
        """Cannot work here."""
        raise Unsupported("refuses needs windows")

    @method()
    def stumbles(trace: Any, target: Any) -> Any:
        """Fails on some batches."""
        if any(abs(trace.images.sum().item() - one) < 0.01 for one in bad):
            raise RuntimeError("stumbled")
        return METHODS["random"].run(trace, target)

    @method()
    def nothing(trace: Any, target: Any) -> Any:
        """No number at all."""
        return torch.full((len(trace), 4, 4), torch.nan)

    @metric(better="higher", family="localisation", masks=True)
    def inside(case: Any) -> Measured:
        """Is there a mask?"""
        return Measured(
            torch.tensor([torch.nan if mask is None else float(mask.float().mean()) for mask in case.masks])
        )

    masks = photo(tmp_path / "masks" / "cat" / "0.png").parent.parent
    photo(tmp_path / "masks" / "hound" / "4.png", size=(10, 60))  # of another shape
    files = sorted(folder.rglob("*.png"))
    bad = {vitreous.Trace(small, files[3:4]).images.sum().item()}
    bad |= {vitreous.Trace(small, files[2:4]).images.sum().item()}
    board = run_leaderboard(small, folder, "refuses,stumbles,nothing,gae", "inside,sparsity", masks=masks)
    assert board.finished and board.skipped.keys() == {1}
    finite = np.isfinite(board.values).sum(2)
    assert dict(zip(board.methods, finite.tolist())) == {
        "random": [1, 6], "centre": [1, 6], "refuses": [0, 0], "stumbles": [1, 4], "nothing": [0, 0], "gae": [1, 6]
    }  # fmt: skip
    said = "\n".join(board.failures())
    for words in (
        "left out: " + str(folder / "cat" / "1.png"),
        "hound/4.png: its mask is not used",
        "without refuses: refuses needs windows",
        "stumbles, sparsity: RuntimeError: stumbled (cat/2.png and 1 more)",
        "nothing: the map is not finite (cat/0.png and 5 more)",
        "inside: no mask",
    ):
        assert words in said
    assert rows_of(board, "refuses", "sparsity")[0]["note"] == "refuses needs windows"
    assert rows_of(board, "gae", "sparsity")[0]["note"] is None
    found = board.summary()
    assert found.verdict(board.methods.index("nothing")) == "could not be measured"
    assert sorted(file.name for file in board.save(tmp_path / "out")) == FILES
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "could not be measured: refuses needs windows" in page and "no number in this map" in page


@pytest.mark.usefixtures("own")
def test_too_little_memory_halves_the_batch_and_counts_nothing_twice(small: Model, folder: Path) -> None:
    sizes: list[int] = []

    @method()
    def greedy(trace: Any, target: Any) -> Any:
        """Fits with two images."""
        sizes.append(len(trace))
        if len(trace) > 2:
            raise torch.OutOfMemoryError("too much")
        return METHODS["random"].run(trace, target)

    board = run_leaderboard(small, folder, "greedy", "token_deletion", options={"token_deletion": {"steps": 2}})
    assert sizes[0] == 7 and max(sizes[2:]) <= 3 and np.isfinite(board.values).all()
    assert (board.curves["random", "token_deletion"].count == 7).all()
    assert (board.curves["greedy", "token_deletion"].count == 7).all()
    np.testing.assert_allclose(board.values[0], board.values[2], rtol=1e-4)


@pytest.mark.usefixtures("own")
def test_one_image_that_does_not_fit_is_a_reason(small: Model, folder: Path) -> None:
    @method()
    def glutton(trace: Any, target: Any) -> Any:
        """Never fits."""
        raise torch.OutOfMemoryError("too much")

    board = run_leaderboard(small, folder, "glutton", "sparsity", limit=2)
    assert board.failures() == ["glutton, sparsity: OutOfMemoryError: too much (cat/0.png and 1 more)"]


@pytest.mark.usefixtures("own")
def test_a_metric_that_cannot_work_is_tried_once(small: Model, folder: Path) -> None:
    asked: list[int] = []

    @metric(better="lower", family="faithfulness")
    def picky(case: Any) -> Measured:
        """Works on no model."""
        asked.append(1)
        raise Unsupported("picky needs other tokens")

    board = run_leaderboard(small, folder, "gae", "picky,sparsity")
    assert len(asked) == 3 and board.failures() == ["picky cannot be measured for any method: picky needs other tokens"]
    assert board.summary().verdict(2) == "could not be measured"


def test_one_image_and_two(small: Model, folder: Path, tmp_path: Path) -> None:
    for count in (1, 2):
        board = run_leaderboard(small, folder, "gae", "token_deletion,sparsity", limit=count)
        found = board.summary()
        assert found.verdict(2) == f"too few images to tell ({count})" and (found.effect == 0).all()
        board.save(tmp_path / "out")
        page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        assert "too few to tell" in page and len(board.examples) == count


def test_a_model_without_classes_needs_a_target(folder: Path) -> None:
    backbone = Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), classifier=False, name="bare")
    with pytest.raises(TargetError, match="bare has no classifier"):
        run_leaderboard(backbone, folder, "gae", "sparsity")
    board = run_leaderboard(backbone, folder, "gae", "sparsity", target="neuron:2")
    assert np.isfinite(board.values).all() and board.targets[0] == "neuron:2"


# ------------------------------------------------------------------------------------------------------ what is asked


def test_choices() -> None:
    assert pick_methods("gae,rollout,gae") == ["random", "centre", "gae", "rollout"]
    assert pick_methods(["input-x-gradient"])[-1] == "input_x_gradient"
    assert set(pick_methods("all")) == set(METHODS) and pick_methods("all")[:2] == ["random", "centre"]
    assert set(pick_methods(None)) <= set(METHODS) and "gae" in pick_methods(None)
    with pytest.raises(OptionError, match="unknown method 'rolout'; did you mean rollout"):
        pick_methods("rolout")


@pytest.mark.usefixtures("own")
def test_metrics_by_name_family_and_need() -> None:
    @metric(better="higher", family="somewhere", masks=True)
    def wanted(case: Any) -> Measured:
        """Needs masks."""
        raise AssertionError

    names = [one.name for one in pick_metrics("complexity", False)[0]]
    assert "sparsity" in names and "token_deletion" not in names
    assert "wanted" in [one.name for one in pick_metrics("all", True)[0]]
    found, notes = pick_metrics("all", False)
    assert all(not one.masks for one in found) and "wanted" in notes[0] and "no image has a mask" in notes[0]
    usual = pick_metrics(None, False)[0]
    assert usual and all(not one.masks for one in usual)
    with pytest.raises(InputError, match="wanted needs to know where the object is"):
        pick_metrics("wanted", False)
    with pytest.raises(InputError, match="all need masks"):
        pick_metrics("somewhere", False)
    with pytest.raises(OptionError, match="unknown metric 'sparcity'; did you mean sparsity"):
        pick_metrics("sparcity", False)
    with pytest.raises(OptionError, match="name at least one"):
        pick_metrics(" , ", False)


def test_metrics_that_judge_come_first(folder: Path) -> None:
    data = vitreous.images.dataset.read_data(folder)
    plan = make_plan("gae", "sparsity,token_deletion", {"token_deletion": {"steps": 3}}, data)
    assert list(plan.metrics) == ["token_deletion", "sparsity"] and plan.metrics["token_deletion"].values["steps"] == 3
    with pytest.raises(OptionError, match="options for rollout: it is not among"):
        make_plan("gae", "sparsity", {"rollout": {"discard": 0.5}}, data)
    with pytest.raises(InputError, match="no image is left"):
        make_plan("gae", "sparsity", {}, data.take(limit=0))


# --------------------------------------------------------------------------------------------------------- the files


@pytest.mark.usefixtures("two_at_a_time")
def test_files_hold_every_value(small: Model, folder: Path, tmp_path: Path) -> None:
    board = run_leaderboard(small, folder, "gae", "token_deletion,sparsity")
    board.save(tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / "leaderboard.parquet").to_pylist()
    assert len(table) == 7 * 3 * 2
    for row in table:
        m, k = board.methods.index(row["method"]), board.metrics.index(row["metric"])
        n = [sample.name for sample in board.data.samples].index(row["image"])
        assert row["value"] == board.values[m, k, n] and row["label"] == board.data.samples[n].label
    found = board.summary()
    with (tmp_path / "out" / "leaderboard.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows[::2]] == [found.methods[m] for m in found.order]
    assert float(rows[0]["mean"]) == found.mean[found.order[0], 0] and rows[0]["images"] == "7"
    told = json.loads((tmp_path / "out" / "leaderboard.json").read_text(encoding="utf-8"))
    assert told["model"]["name"] == "small" and told["settings"]["methods"]["gae"] == METHODS["gae"].check({})
    assert told["finished"] is True and told["judged"] == ["token_deletion"] and told["versions"]["vitreous"]
    curve = parquet.read_table(tmp_path / "out" / "curves.parquet").to_pylist()
    assert len(curve) == 3 * 10 and {point["metric"] for point in curve} == {"token_deletion"}


def test_the_page_needs_nothing_else(small: Model, folder: Path, tmp_path: Path) -> None:
    photo(folder / "cat" / "a<b>&.png", 9)
    board = run_leaderboard(small, folder, "gae", "token_deletion,sparsity", limit=4)
    board.save(tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=\s*([\"'](?!data:|#)|[^\"'\s])", page)
    assert set(re.findall(r"https?://[^\"'\s]+", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in page and "<script" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "a&lt;b&gt;&amp;.png" in page and "<b>&" not in page
    assert page.count("data:image/webp") == 4 * (1 + 3)  # photos, and a map for each method
    assert "prefers-color-scheme: dark" in page and page.count("<svg role") == 1
    assert "highest at the" in page and "lower is better" in page
    assert not re.search(r"#(332288|1a1c1f)\b", page[page.index("</style>") :], re.IGNORECASE)  # both themes' colours


@pytest.mark.usefixtures("own", "two_at_a_time")
def test_an_interrupt_leaves_what_is_finished(loaded: Model, run: Run, folder: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    kept: list[str] = []

    @method()
    def slow(trace: Any, target: Any) -> Any:
        """Someone loses patience."""
        seen.append(len(trace))
        if len(seen) == 3:
            kept.append((tmp_path / "out" / "leaderboard.partial.csv").read_text(encoding="utf-8"))
            raise KeyboardInterrupt
        return METHODS["random"].run(trace, target)

    said = run("evaluate", folder, "--methods", "slow", "--metrics", "sparsity", "--out", tmp_path / "out")
    assert len(kept[0].splitlines()) == 1 + 2 * 3 * 2 + 2 * 2  # two batches of three methods, the third's controls
    assert said.code == 130 and "stopped early: 4 of 7 images are done, 2 are begun" in said.err
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == FILES
    assert parquet.read_table(tmp_path / "out" / "leaderboard.parquet").num_rows == 4 * 3 + 2 * 2
    assert "stopped early" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_rows_are_on_disk_while_it_runs(small: Model, folder: Path, tmp_path: Path) -> None:
    plan = make_plan("gae", "sparsity", {}, data := vitreous.images.dataset.read_data(folder))
    board = Leaderboard(small, data, plan)
    board.run(Log(board, tmp_path / "out"))
    with (tmp_path / "out" / "leaderboard.partial.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7 * 3 and {row["image"] for row in rows} == {s.name for s in data.samples}
    assert [float(row["value"]) for row in rows[-7:]] == board.values[2, 0].tolist()


# ------------------------------------------------------------------------------------------------------ on a terminal


@pytest.mark.usefixtures("loaded")
def test_the_command(run: Run, folder: Path, tmp_path: Path) -> None:
    asked = ("--methods", "gae,attention", "--metrics", "token_deletion,sparsity", "--set", "token-deletion.steps=3")
    said = run("evaluate", folder.name, *asked, "--out", "out", "--seed", 1)
    assert said.code == 0 and max(map(len, said.out.splitlines())) <= 80
    assert "token_deletion ↓" in said.out and "sparsity ↑" in said.out and "report: out/report.html" in said.out
    for name in ("gae", "attention", "random", "centre"):
        assert len(re.findall(rf"^{name} ", said.out, re.MULTILINE)) == 2
    told = json.loads((tmp_path / "out" / "leaderboard.json").read_text(encoding="utf-8"))
    assert told["settings"]["metrics"]["token_deletion"]["steps"] == 3 and told["settings"]["seed"] == 1


@pytest.mark.usefixtures("loaded")
def test_json(run: Run, folder: Path) -> None:
    said = run("evaluate", folder, "--methods", "gae", "--metrics", "sparsity", "--limit", 2, "--json")
    told = json.loads(said.out)
    assert said.code == 0 and told["data"]["done"] == 2 and Path(told["files"]["report.html"]).is_file()
    assert {row["method"] for row in told["methods"]} == {"gae", "random", "centre"}
    assert {row["verdict"] for row in told["methods"] if row["method"] == "gae"} == {"too few images to tell (2)"}


@pytest.mark.usefixtures("loaded")
def test_what_is_typed_wrong_is_one_line(run: Run, folder: Path) -> None:
    assert "did you mean rollout" in run("evaluate", folder, "--methods", "rolout").error
    assert "did you mean sparsity" in run("evaluate", folder, "--metrics", "sparcity").error
    assert "needs to know where the object is" in run("evaluate", folder, "--metrics", "pointing_game").error
    assert "no such file or folder" in run("evaluate", "nowhere").error
    assert "has no option 'step'" in run("evaluate", folder, "--set", "token_deletion.step=3").error
    assert "did you mean" in run("evaluate", folder, "--set", "rolout.discard=3").error
    assert "is a file, not a folder" in run("evaluate", folder, "--out", folder / "cat" / "0.png").error


@pytest.mark.usefixtures("loaded", "own")
def test_nothing_measured_is_a_failure(run: Run, folder: Path) -> None:
    @method()
    def refuses(trace: Any, target: Any) -> Any:
        """Cannot work here."""
        raise Unsupported("refuses needs windows")

    said = run("evaluate", folder, "--methods", "refuses", "--metrics", "sparsity")
    assert said.code == 2 and "note: without refuses: refuses needs windows" in said.err
    for file in folder.rglob("*.png"):
        file.write_bytes(b"")
    said = run("evaluate", folder, "--methods", "gae", "--metrics", "sparsity")
    assert said.code == 2 and "the file is empty" in said.err
