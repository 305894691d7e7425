"""What a metric reads: the probability, the logit or the target's own score; and rows and columns with own options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from machine import rare
from pyarrow import parquet
from test_leaderboard import loaded, photo, small
from test_outputs import GRADED, IMAGES, MAPS, brute_force, vit
from torch import Tensor, nn

import vitreous
from vitreous import METRICS, Contrast, Model
from vitreous.errors import OptionError
from vitreous.evaluation.leaderboard import run_leaderboard
from vitreous.evaluation.plan import USUAL, by_name, listed, make_plan, spelled
from vitreous.evaluation.study.run import run_study
from vitreous.images.dataset import read_data
from vitreous.models.output import Meaning, log_odds
from vitreous.trace.perturb import variant_scores

__all__ = ["loaded", "small"]  # fixtures
OF = ("probability", "logit", "score")
READS = [*GRADED, "sensitivity_n"]
QUICK = ["srg", "deletion", *rare(*sorted({*READS} - {"srg", "deletion"}))]
CHEAP: dict[str, dict[str, Any]] = {
    "deletion": {"steps": 3},
    "insertion": {"steps": 3},
    "road": {"shares": (0.5,)},
    "saco": {"groups": 4},
    "sensitivity_n": {"shares": (0.4,), "subsets": 6},
    "srg": {"steps": 3},
    "token_deletion": {"steps": 3},
}


class Ended(nn.Module):
    """A network that returns its outputs through a last function."""

    def __init__(self, net: nn.Module, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.end = net, end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.net(x))


def score(model: Model, metric: str, target: Any = 0, **options: Any) -> vitreous.Score:
    return vitreous.evaluate(model, IMAGES, MAPS, metric, target, **CHEAP[metric], **options)


def check(model: Model, net: Any, of: str, expected: Callable[[Tensor], Tensor]) -> None:
    """Four metrics, from their definitions."""
    options: dict[str, Any] = {"insertion": {"fill": "mean"}, "saco": {"groups": 4}}
    for metric, value in brute_force(net, expected).items():
        found = vitreous.evaluate(model, IMAGES, MAPS, metric, 0, of=of, **options.get(metric, {})).value
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-4)


def test_every_metric_that_reads_a_score_says_which() -> None:
    read = [name for name, one in METRICS.items() if "of" in one.options.model_fields]
    assert {*read} == {*READS, "token_shortcut"}
    usual = {name: METRICS[name].check({})["of"] for name in read}
    assert usual == {**dict.fromkeys(read, "probability"), "sensitivity_n": "score"}


def test_of_a_network_that_returns_logits() -> None:
    """test_outputs has the probabilities."""
    net = vit(5, 2.0)
    check(Model(net), net, "logit", lambda out: out[:, 0])
    assert score(Model(net), "deletion", of="score").value.equal(score(Model(net), "deletion", of="logit").value)


def test_of_a_network_that_returns_probabilities() -> None:
    net = vit(5, 2.0)
    model = Model(Ended(net, lambda out: out.softmax(1)))
    check(model, net, "logit", lambda out: out.log_softmax(1)[:, 0])
    assert score(model, "deletion", of="score").value.equal(score(model, "deletion").value)
    assert model.meaning is Meaning.SOFTMAX and model.exclusive


def test_of_a_network_that_returns_a_sigmoid() -> None:
    net = vit(5, 2.0)
    model = Model(Ended(net, torch.sigmoid))
    check(model, net, "logit", lambda out: out[:, 0])
    assert model.meaning is Meaning.SOFTMAX and not model.exclusive
    found, same = (score(one, "deletion", of="logit").value for one in (model, Model(net, output="sigmoid")))
    torch.testing.assert_close(found, same, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("metric", QUICK)
def test_what_is_no_class_has_its_own_score_only(metric: str) -> None:
    for model, target in ((Model(vit(5)), "neuron:0"), (Model(vit(3), output="value"), 0)):
        values = [score(model, metric, target, of=of).value for of in OF]
        assert values[0].equal(values[1]) and values[0].equal(values[2])


def test_of_a_contrast() -> None:
    net = vit(5, 2.0)
    whole = net(IMAGES).detach()
    chances = whole.softmax(1)
    expected = {"probability": chances[:, 0] - chances[:, 1], "logit": whole[:, 0] - whole[:, 1]}
    for of in OF:
        found = score(Model(net), "token_deletion", Contrast(vitreous.Class(0), vitreous.Class(1)), of=of)
        torch.testing.assert_close(found.curve[:, 0], expected.get(of, expected["logit"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("metric", READS)
def test_the_default_is_what_it_was(metric: str) -> None:
    model = Model(vit(5, 2.0))
    usual = "score" if metric == "sensitivity_n" else "probability"
    found, same = score(model, metric), score(model, metric, of=usual)
    assert found.value.equal(same.value) and found.options["of"] == usual
    others = [score(model, metric, of=of).value for of in OF if of != usual]
    if metric not in ("saco", "sensitivity_n"):  # those may agree: they compare drops with each other
        assert not found.value.allclose(others[0], atol=1e-4)


def test_srg_is_the_difference_of_two_curves_on_every_scale() -> None:
    model = Model(vit(5, 2.0))
    for of in OF:
        most, least = (score(model, "token_deletion", of=of, order=order).curve for order in ("most", "least"))
        torch.testing.assert_close(score(model, "srg", of=of).curve, least - most, rtol=1e-4, atol=1e-5)


def test_probabilities_that_round_to_nothing_or_one_have_a_finite_logit() -> None:
    for exclusive in (True, False):
        scale = Meaning.SOFTMAX.scale("logit", exclusive)
        assert scale is not None
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            assert scale(torch.tensor([[0.0, 1.0]], dtype=dtype)).isfinite().all()
    p = torch.rand(4, 5, dtype=torch.float64) * 0.9 + 0.05
    torch.testing.assert_close(log_odds(p), p.logit())


# --------------------------------------------------------------------------------------------------- shared variants


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four images in two classes."""
    for i in range(4):
        photo(tmp_path / "data" / ("cat" if i < 2 else "hound") / f"{i}.png", i)
    return tmp_path / "data"


def images_run(model: Model, folder: Path, metrics: str) -> tuple[int, Any]:
    """How many images pass the first block, and the leaderboard."""
    seen: list[int] = []
    block: Any = model.module.get_submodule("blocks.0")
    hook = block.register_forward_hook(lambda _, args, out: seen.append(len(out)))
    settings = {name: CHEAP[name] for name in dict.fromkeys(spelled(one)[0] for one in listed(metrics))}
    board = run_leaderboard(model, folder, "gae", metrics, options=settings)
    hook.remove()
    return sum(seen), board


@pytest.mark.parametrize("metric", QUICK)
def test_both_scales_come_from_one_set_of_forward_passes(small: Model, folder: Path, metric: str) -> None:
    first = "score" if metric == "sensitivity_n" else "probability"
    images_run(small, folder, metric)  # what is found out about a model once
    alone, one = images_run(small, folder, metric)
    both, two = images_run(small, folder, f"{metric}:of={first},{metric}:of=logit")
    assert alone == both > 0
    assert two.metrics == [metric, f"{metric} of=logit"]
    np.testing.assert_array_equal(two.values[:, 0], one.values[:, 0])
    by_hand = vitreous.evaluate(
        small, [sample.image for sample in two.data.samples], "gae", metric, [0, 0, 1, 1], of="logit", **CHEAP[metric]
    )
    np.testing.assert_allclose(two.values[2, 1], by_hand.value, rtol=1e-4, atol=1e-5)


def test_token_deletion_and_srg_share_theirs(small: Model, folder: Path) -> None:
    images_run(small, folder, "srg")
    alone, _ = images_run(small, folder, "srg")
    both, two = images_run(small, folder, "srg,token_deletion,token_deletion:of=logit")
    assert alone == both
    _, other = images_run(small, folder, "token_deletion")
    np.testing.assert_allclose(two.values[:, 1], other.values[:, 0], rtol=1e-4)


@pytest.mark.slow
def test_outputs_too_many_to_keep_are_computed_again(
    small: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "srg,srg:of=logit,token_deletion,deletion,deletion:of=logit"
    few, kept = images_run(small, folder, asked)
    monkeypatch.setattr(variant_scores, "MOST_KEPT", 0)
    many, dropped = images_run(small, folder, asked)
    assert many > few
    np.testing.assert_allclose(dropped.values, kept.values, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_maps_of_one_batch_do_not_share_theirs(small: Model, folder: Path) -> None:
    board = run_leaderboard(
        small, folder, "gae,rollout", "deletion,deletion:of=logit", options={"deletion": {"steps": 4}}
    )
    assert len({tuple(values) for values in board.values[:, 1]}) == 4


# ----------------------------------------------------------------------------------------------------- rows and columns


def test_how_options_are_spelled() -> None:
    assert spelled("gae") == ("gae", {}) and spelled("gae:start-layer=2") == ("gae", {"start_layer": 2})
    assert spelled("srg:of=logit:steps=5") == ("srg", {"of": "logit", "steps": 5})
    assert listed("token-deletion, srg:of=logit ,") == ["token_deletion", "srg:of=logit"]
    assert listed("road:shares=0.2,0.4:noise=0,srg") == ["road:shares=0.2,0.4:noise=0", "srg"]
    assert listed("a:b=[1, 2],c:d=-1,e") == ["a:b=[1, 2]", "c:d=-1", "e"]
    assert spelled("road:shares=0.2,0.4")[1] == {"shares": [0.2, 0.4]}
    with pytest.raises(OptionError, match="gae:start_layer: write NAME:OPTION=VALUE"):
        spelled("gae:start_layer")


def test_rows_and_columns_of_a_plan(folder: Path) -> None:
    data = read_data(folder)
    asked = "gae,gae:start_layer=2,gae:start_layer=0,rollout:discard=0.9"
    plan = make_plan(asked, "srg,srg:of=logit,sparsity", {"srg": {"steps": 5}, "gae": {"start_layer": 1}}, data)
    assert list(plan.methods) == [
        "random", "centre", "gae", "gae start_layer=2", "gae start_layer=0", "rollout discard=0.9",
    ]  # fmt: skip
    layers = [one.values["start_layer"] for name, one in plan.methods.items() if name.startswith("gae")]
    assert layers == [1, 2, 0]
    assert list(plan.metrics) == ["srg", "srg of=logit", "sparsity"]
    assert [one.values.get("steps") for one in plan.metrics.values()] == [5, 5, None]
    assert plan.judged == [True, False, False] and plan.twins == [1]
    assert make_plan("gae", "srg:of=logit,srg,srg:steps=5", {}, data).judged == [True, False, True]
    family = make_plan("gae", "faithfulness:of=score", {}, data)
    assert {one.values["of"] for one in family.metrics.values()} == {"score"} and "srg of=score" in family.metrics
    same = make_plan(
        ["gae:start_layer=2", vitreous.methods.gae(start_layer=2), "gae", "gae:start_layer=0"], "srg", {}, data
    )
    assert list(same.methods)[2:] == ["gae start_layer=2", "gae"]


def test_wrong_rows_and_columns_are_refused(folder: Path) -> None:
    data = read_data(folder)
    for methods, metrics, said in (
        ("gae:layer=2", "srg", "gae has no option 'layer'"),
        ("gae:start_layer=x", "srg", "gae.start_layer takes a whole number"),
        ("gay:start_layer=2", "srg", "unknown method 'gay'"),
        ("gae", "srg:of=odds", "srg.of takes probability, logit or score"),
        ("gae", "sparsity:of=logit", "sparsity has no option 'of'"),
        ("gae", "srgg:of=logit", "unknown metric 'srgg'"),
    ):
        with pytest.raises(OptionError, match=said):
            make_plan(methods, metrics, {}, data)
    with pytest.raises(OptionError, match="two rows would be named 'gae'"):
        make_plan(["gae", vitreous.methods.gae()], "srg", {"gae": {"start_layer": 1}}, data)


def test_the_usual_leaderboard_shows_both(folder: Path) -> None:
    plan = make_plan(None, None, {}, read_data(folder))
    assert len(plan.metrics) == len(USUAL)
    for name in ("srg", "token_deletion"):
        assert plan.metrics[name].values["of"] == "probability"
        assert plan.metrics[f"{name} of=logit"].values["of"] == "logit"
    judged = [name for name, counts in zip(plan.metrics, plan.judged) if counts]
    assert judged == ["token_deletion", "srg", "deletion", "insertion"]


@pytest.mark.slow
def test_a_column_on_another_scale_does_not_weigh_twice(small: Model, folder: Path, tmp_path: Path) -> None:
    settings = {name: CHEAP[name] for name in ("srg", "deletion")}
    one = run_leaderboard(small, folder, "gae,rollout", "srg,deletion", options=settings)
    two = run_leaderboard(small, folder, "gae,rollout", "srg,deletion,srg:of=logit,deletion:of=logit", options=settings)
    np.testing.assert_array_equal(one.summary().mean_rank, two.summary().mean_rank)
    assert [one.summary().verdict(m) for m in range(4)] == [two.summary().verdict(m) for m in range(4)]
    two.save(tmp_path / "out")
    told = json.loads((tmp_path / "out" / "leaderboard.json").read_text(encoding="utf-8"))
    assert told["judged"] == ["srg", "deletion"] and told["settings"]["metrics"]["srg of=logit"]["of"] == "logit"
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "counted once, by the first column of the metric: srg of=logit, deletion of=logit." in page
    rows = parquet.read_table(tmp_path / "out" / "leaderboard.parquet").to_pylist()
    assert {row["metric"] for row in rows} == {"srg", "deletion", "srg of=logit", "deletion of=logit"}
    assert "srg of=logit,higher" in (tmp_path / "out" / "leaderboard.csv").read_text(encoding="utf-8")
    points = parquet.read_table(tmp_path / "out" / "curves.parquet").to_pylist()
    both = [[p["mean"] for p in points if (p["method"], p["metric"]) == ("gae", m)] for m in ("srg", "srg of=logit")]
    assert len(both[0]) == len(both[1]) == 3 and both[0] != both[1]


@pytest.mark.slow
def test_a_study_has_the_same_rows_and_columns(small: Model, folder: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "methods": ["gae", vitreous.methods.rollout(discard=0.5), "gae:start_layer=1"],
        "metrics": "srg,srg:of=logit",
        "options": {"srg": {"steps": 3}},
    }
    study = run_study("leaderboard", folder, small, tmp_path / "out", shard=2, **asked)
    board = run_leaderboard(small, folder, **asked)
    table = study.to_pandas()
    assert list(dict.fromkeys(table["method"])) == board.methods
    for m, name in enumerate(board.methods):
        for k, metric in enumerate(board.metrics):
            np.testing.assert_allclose(table[table["method"] == name][metric], board.values[m, k], rtol=1e-4, atol=1e-6)
    found = study.findings()["small"]
    assert found.tables[0].head == ["method", "srg ↑", "srg of=logit ↑"] and len(found.tables[0].rows) == 5
    assert [chart.name for chart in found.charts] == ["srg", "srg-of=logit"]


def test_other_studies_keep_one_row_for_each_method() -> None:
    assert by_name("gae:start_layer=1,rollout", {}) == (["gae", "rollout"], {"gae": {"start_layer": 1}})
    with pytest.raises(OptionError, match="gae is asked for with several choices of options"):
        by_name("gae,gae:start_layer=1", {})


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_the_command(run: Run, folder: Path, tmp_path: Path) -> None:
    asked = ("--methods", "gae,gae:start_layer=1", "--metrics", "srg,srg:of=logit", "--set", "srg.steps=3")
    said = run("evaluate", folder, *asked, "--out", "out")
    assert said.code == 0 and "gae start_layer=1 " in said.out and "of=logit" in said.out
    told = json.loads((tmp_path / "out" / "leaderboard.json").read_text(encoding="utf-8"))
    assert set(told["settings"]["methods"]) == {"random", "centre", "gae", "gae start_layer=1"}
    assert told["settings"]["metrics"]["srg of=logit"]["steps"] == 3


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_advice_by_the_logit(run: Run, folder: Path) -> None:
    said = run("advise", folder, "-x", "gae,gae:start_layer=1", "--metric", "srg:of=logit", "--json")
    told = json.loads(said.out)
    assert told["metric"] == "srg of=logit"
    assert {one["name"] for one in told["contenders"]} == {"gae", "gae rules=libra", "gae start_layer=1"}
    with pytest.raises(OptionError, match="sparsity does not measure faithfulness"):
        vitreous.advise(None, folder, "sparsity")
