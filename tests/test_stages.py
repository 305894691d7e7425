"""The search in stages: what it costs, whom it keeps, and that it ends where the exhaustive search does."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from conftest import Run
from PIL import Image
from rich.console import Console

import vitreous
from vitreous._support.statistics import intervals
from vitreous.cli import advise as command
from vitreous.cli import arguments
from vitreous.evaluation.advice import Advice, Contender
from vitreous.evaluation.estimate import Estimate, duration
from vitreous.evaluation.leaderboard import Leaderboard
from vitreous.evaluation.plan import CONTROLS
from vitreous.evaluation.stages import SHARE, Stage, by_gain, plan_stages, runs_of, search
from vitreous.images.dataset import read_data


class Known(Leaderboard):
    """A board whose values are known beforehand."""

    def __init__(self, values: np.ndarray, unreadable: tuple[int, ...] = ()) -> None:
        self.known, self.unreadable = values, unreadable  # [M N]
        self.methods = [*CONTROLS, *(f"c{i}" for i in range(len(values) - len(CONTROLS)))]
        self.values = np.full((len(values), 1, values.shape[1]), np.nan)
        self.measured = np.zeros(values.shape, dtype=bool)
        self.wanted = np.ones(values.shape, dtype=bool)
        self.skipped: dict[int, str] = {}
        self.asked: list[tuple[tuple[int, ...], tuple[str, ...]]] = []

    def run(self, after: Any = None, numbers: Any = None, names: Any = None) -> None:
        self.asked.append((tuple(numbers), tuple(names)))
        self.skipped |= {n: "is not an image" for n in numbers if n in self.unreadable}
        readable = [n for n in numbers if n not in self.skipped]
        cells = np.ix_([self.methods.index(name) for name in names], readable)
        assert not self.measured[cells].any(), "nothing is measured twice"
        self.measured[cells] = True
        self.values[:, 0] = np.where(self.measured, self.known, np.nan)


def race(contenders: int, images: int, seed: int = 0, spread: float = 0.15) -> np.ndarray:
    """Values as methods have them: most are bad, a few nearly as good as the best; images differ more than methods."""
    chance = np.random.default_rng(seed)
    worth = np.concatenate([[0.0, 0.05], 0.4 * chance.beta(1, 2, contenders)])
    return worth[:, None] + 0.3 * chance.normal(size=images) + spread * chance.normal(size=(len(worth), images))


def searched(values: np.ndarray, seed: int = 0, sign: int = 1, **more: Any) -> tuple[Known, str, dict[str, int]]:
    board, count = Known(values, **more), values.shape[1]
    order = np.random.default_rng(seed).permutation(count).tolist()
    found = search(board, plan_stages(len(values) - len(CONTROLS), count), order, sign, None)
    left = [name for name in board.methods if name not in CONTROLS and name not in found.dropped]
    return board, by_gain(board, left, sign)[0], found.dropped


@pytest.mark.parametrize("contenders", [12, 30, 94, 300])
@pytest.mark.parametrize("images", [16, 20, 40, 192, 500])
def test_a_fifth_of_the_runs_at_most(contenders: int, images: int) -> None:
    stages = plan_stages(contenders, images)
    assert SHARE == 5 and (runs_of(stages) <= (contenders + 2) * images / 5 or len(stages) == 1)
    assert stages[0].contenders == contenders and stages[-1].images == images
    for before, after in pairwise(stages):
        assert after.contenders < before.contenders and after.images > before.images
    board, _, _ = searched(race(contenders, images))
    assert board.measured.sum() == runs_of(stages), "as many as were planned"


def test_what_is_staged_at_all() -> None:
    assert len(plan_stages(94, 20)) > 1 and len(plan_stages(94, 192)) > 1
    for contenders, images in ((94, 5), (3, 40), (1, 1), (0, 7), (5, 0)):
        assert plan_stages(contenders, images) == (Stage(contenders, images),), "too few to save anything"
    assert plan_stages(94, 192, exhaustive=True) == (Stage(94, 192),)
    assert runs_of((Stage(94, 192),)) == 96 * 192


@pytest.mark.parametrize("sign", [1, -1])
def test_the_winner_is_the_exhaustive_one_within_its_interval(sign: int) -> None:
    wrong = 0
    for seed in range(20):
        values = sign * race(94, 40, seed)
        _, ours, _ = searched(values, seed, sign)
        whole = Known(values)
        whole.run(None, range(40), whole.methods)
        best = by_gain(whole, whole.methods[2:], sign)[0]
        gain = sign * (values[whole.methods.index(best)] - values[whole.methods.index(ours)])
        wrong += intervals(gain[None])[0, 0] > 0
    assert wrong <= 1, "of 20; the interval is one of 95 %"


def test_controls_are_measured_on_every_image_and_finalists_too() -> None:
    board, _, dropped = searched(race(94, 40))
    assert board.measured[:2].all()
    for row, name in enumerate(board.methods[2:], 2):
        assert board.measured[row].all() == (name not in dropped)
        assert board.measured[row].any(), "each has had its chance"
    assert (board.wanted == board.measured).all()


def test_those_with_the_least_gain_are_left_out_first() -> None:
    values = np.arange(42.0)[:, None] + np.zeros(40)
    _, best, dropped = searched(values)
    assert best == "c39"
    stage = [dropped.get(f"c{i}", 99) for i in range(40)]
    assert stage == sorted(stage)
    _, best, _ = searched(values, sign=-1)
    assert best == "c0"


def test_the_same_seed_gives_the_same_search() -> None:
    values = race(60, 30)
    (one, _, _), (same, _, _), (other, _, _) = (searched(values, seed) for seed in (3, 3, 4))
    assert one.asked == same.asked and one.asked != other.asked


def test_images_that_cannot_be_read_do_not_count() -> None:
    values = race(94, 40)
    order = np.random.default_rng(0).permutation(40).tolist()
    board, _, _ = searched(values, unreadable=tuple(order[:5]))
    first = plan_stages(94, 40)[0].images
    assert board.measured[2:].any(1).all() and board.measured[:, order[:5]].sum() == 0
    assert (board.measured[2:].sum(1) >= first).all()


def test_a_contender_without_any_value_is_left_out_first() -> None:
    values = race(40, 40)
    values[5] = np.nan
    _, _, dropped = searched(values)
    assert dropped["c3"] == 0


# -------------------------------------------------------------------------------------------- with a model and images


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    chance = np.random.default_rng(0)
    for number in range(20):
        Image.fromarray(chance.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / f"{number:02}.png")
    return folder


LAYERS = [
    "attention",
    "norm_attention",
    "gradcam",
    "hirescam",
    "xgradcam",
    "gae",
    "rollout",
    "cdam",
    "attcat",
    "legrad",
]
LAYERS += ["centred_lrp", "grad_rollout"]
QUICKLY = "token_deletion:steps=2"


@pytest.fixture(scope="module")
def ours(photos: Path) -> Advice:
    told: list[Estimate] = []
    found = vitreous.advise(zoo.model("timm ViT"), photos, QUICKLY, methods=LAYERS, before=told.append)
    assert told == [found.estimate]
    return found


def test_the_estimate_is_what_is_done(ours: Advice) -> None:
    told = ours.estimate
    assert ours.runs == told.runs <= told.exhaustive_runs / 5
    assert told.exhaustive_runs == (told.contenders + 2) * 20 and told.contenders == len(ours.contenders)
    assert told.seconds > 0 and told.forwards > 4 * told.runs, "a map and the steps of its curve"
    assert "run" not in vars(ours.board.model), "the counter is gone"
    assert ours.board.finished and not any("stopped early" in note for note in ours.board.notes())
    for one in ours.contenders:
        assert one.images == (20 if one.dropped is None else told.stages[one.dropped - 1].images)
    assert len(ours.finalists) == told.stages[-1].contenders and set(ours.equals) <= {x.name for x in ours.finalists}
    ranked = [(one.dropped or 99, one.gain) for one in ours.contenders]
    assert ranked == sorted(ranked, reverse=True)


@pytest.mark.slow
def test_finalists_have_the_numbers_of_the_exhaustive_search(ours: Advice, photos: Path) -> None:
    whole = vitreous.advise(zoo.model("timm ViT"), photos, QUICKLY, methods=LAYERS, exhaustive=True)
    assert whole.runs == whole.estimate.runs == ours.estimate.exhaustive_runs and whole.fresh is None
    assert {one.name for one in ours.contenders} == {one.name for one in whole.contenders}, "no row is missing"
    same = {one.name: one for one in whole.contenders}
    for one in ours.finalists:
        numbers = [(x.score, x.low, x.high, x.gain, x.gain_low, x.gain_high) for x in (one, same[one.name])]
        assert np.allclose(*numbers, atol=1e-6)
    rows = [whole.board.methods.index(found.contenders[0].name) for found in (whole, ours)]
    lost = whole.board.values[rows[1], 0] - whole.board.values[rows[0], 0]  # lower is better
    assert intervals(lost[None])[0, 0] <= 0 and "Searched in stages" not in str(whole)


def test_what_only_the_finalists_saw(ours: Advice) -> None:
    last = ours.estimate.stages[-2].images
    assert ours.fresh is not None and ours.fresh.images == 20 - last
    order = np.random.default_rng(0).permutation(20)
    row, control = (ours.board.values[ours.board.methods.index(n), 0] for n in (ours.contenders[0].name, "random"))
    assert abs((control - row)[order[last:]].mean() - ours.fresh.gain) < 1e-9, "lower is better"
    assert "Searched in stages" in str(ours)


def test_every_row_is_told_as_json(ours: Advice) -> None:
    told = json.loads(json.dumps(command.told(ours, [], []), allow_nan=False))
    assert len(told["contenders"]) == len(ours.contenders) and told["runs"] == ours.runs
    assert told["estimate"]["exhaustive_runs"] == ours.estimate.exhaustive_runs and told["fresh"]["images"] > 0
    assert {one["dropped"] for one in told["contenders"]} >= {None, 1}


def printed(found: Advice, width: int) -> str:
    text = io.StringIO()
    command.show(found, Console(file=text, width=width, force_terminal=True, color_system=None, highlight=False))
    return text.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_is_never_cut(ours: Advice, width: int) -> None:
    """JOURNEYS P1-11: names fold, nothing is replaced by an ellipsis, and no row is left out."""
    for found in (ours, replace(ours, metric="token_deletion of=logit steps=12345")):
        shown = printed(found, width)
        assert all(len(line.rstrip()) <= width for line in shown.splitlines())
        assert "more" not in shown.lower() and not any(line.rstrip().endswith("…") for line in shown.splitlines())
        body = "".join(shown.split())
        for one in found.contenders:
            assert f"{one.score:.3f}" in body and f"{one.gain:+.3f}" in body
            if np.isfinite(one.low):
                assert (
                    f"({one.low:.3f}…{one.high:.3f})" in body and f"({one.gain_low:+.3f}…{one.gain_high:+.3f})" in body
                )
        names = [line[:14] for line in shown.splitlines()]
        for method in LAYERS:
            assert any(name.startswith(method[:8]) for name in names)


def test_a_pipe_has_no_width(ours: Advice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    command.show(ours)
    lines = capsys.readouterr().out.splitlines()
    for one in ours.contenders:
        (line,) = [line for line in lines if line.startswith(f"{one.name}  ")]
        assert f"{one.gain:+.3f}" in line and line.split()[-1] == str(one.images)


def test_the_command_says_the_cost_first(run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "load_model", lambda *_: zoo.model("timm ViT"))
    monkeypatch.setitem(os.environ, "COLUMNS", "80")
    said = run("advise", photos, "-x", "gae,rollout", "--limit", "6", "--metric", QUICKLY, "--json")
    assert said.code == 0 and json.loads(said.out)["estimate"]["runs"] == json.loads(said.out)["runs"]
    assert said.err.startswith("5 contenders × 6 images, 42 runs: about ") and "forward passes, " in said.err


@pytest.mark.slow
def test_the_command_in_stages_and_exhaustively(run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "load_model", lambda *_: zoo.model("timm ViT"))
    asked = ("advise", photos, "-x", ",".join(LAYERS), "--metric", QUICKLY)
    staged, whole = run(*asked), run(*asked, "--exhaustive")
    assert " × 20 images in " in staged.err and "\nSearched in stages: " in staged.out
    assert " × 20 images, " in whole.err and "stages" not in whole.err + whole.out


@pytest.mark.slow
@pytest.mark.shared
def test_on_pets_the_winner_is_that_of_the_exhaustive_search(shared: Path, tiny: vitreous.Model) -> None:
    """The embedded model on 20 pets; benchmarks/advise.py does it for more."""
    data = read_data(shared / "data" / "pets").take(None, 20, 0)
    names = ["gradcam", "gae", "centred_lrp", "attn_lrp", "attention", "rollout", "cdam", "attcat"]
    ours, whole = (vitreous.advise(tiny, data, methods=names, exhaustive=one) for one in (False, True))
    assert len(ours.estimate.stages) > 1 and ours.runs <= whole.runs / 5
    rows = [whole.board.methods.index(found.contenders[0].name) for found in (whole, ours)]
    gain = whole.board.values[rows[0], 0] - whole.board.values[rows[1], 0]
    assert intervals(gain[None])[0, 0] <= 0


def test_durations() -> None:
    assert [duration(s) for s in (0.2, 45, 600, 9000)] == ["1 s", "45 s", "10 min", "2.5 h"]
    estimate = Estimate(94, 40, (Stage(94, 2), Stage(4, 40)), 420, 3840, 12345.0, 65.0)
    assert str(estimate) == (
        "94 contenders × 40 images in 2 stages, 420 of 3,840 runs: about 12,000 forward passes, 65 s"
    )
    assert str(Estimate(1, 1, (Stage(1, 1),), 3, 3, float("nan"), float("nan"))) == "1 contender × 1 image, 3 runs"


def test_a_row_without_an_interval() -> None:
    one = Contender("gae", "gae", {}, 0.5, float("nan"), float("nan"), 0.1, float("nan"), float("nan"), 2.0, 1, 1)
    assert [str(word) for word in command.row(one, False, False)] == ["gae", "0.500", "+0.100", "2.0", "1"]
