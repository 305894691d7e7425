"""`vitreous.check` says what is right with a model and finds what is wrong; every comparison has a negative control."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import Run
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, Check, Layout, Model, check, method
from vitreous.images.preprocess import IMAGENET
from vitreous.inspect.check import verify
from vitreous.models.libraries import cropped

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
timm_sweep: Any = importlib.import_module("timm_sweep")

FEW = ("attention", "gradient")
FIRST = "patches and their tokens, first layer"
LAST = "patches and their tokens, last layer"
ALONE = "gradient of one image and finite differences"


def small(net: nn.Module | None = None, **options: Any) -> Model:
    ready = cropped((64, 64), *IMAGENET)
    return Model(net or zoo.network("timm ViT"), ready, name="small", **{"classifier": True, **options})


def states(found: Check) -> dict[str, str]:
    return {one.what: one.state for one in found.verified}


def wrong(found: Check) -> list[str]:
    return [what for what, state in states(found).items() if state != "right"]


class Around(nn.Module):
    """A ViT whose images or output are changed."""

    def __init__(self, before: Callable[[Tensor], Tensor] | None = None, after: Any = None) -> None:
        super().__init__()
        self.body, self.before, self.after = zoo.network("timm ViT"), before, after

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x if self.before is None else self.before(x))
        return y if self.after is None else self.after(y)


# ------------------------------------------------------------------------------------------------------- what is right


def test_a_plain_model_is_right() -> None:
    found = check(small())
    assert found.right and found.problems == ()
    assert wrong(found) == [] and len(found.verified) == 10
    assert set(found.of("works")) == set(METHODS) and found.layout["grid"] == (4, 4)
    errors = {one.what: one.error for one in found.verified}
    assert 0 < errors["A·V = O in every layer"] < 1e-5 and 0 < errors["token_ablation and removing the token"] < 1e-3
    shapes = {one.method: one.shape for one in found.methods}
    assert shapes["gae"] == (4, 4) and shapes["gradient"] == (64, 64)
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "no disagreement found" in text and "ok     A·V = O in every layer: error" in text
    assert "64×64 images of 3 channels, float32 on cpu" in text and f"Methods that work: {len(METHODS)} of" in text
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert told["right"] is True and told["layout"]["readout"] == [0] and told["channels"] == 3
    assert [one["method"] for one in told["methods"]] == list(METHODS)


def test_every_field_of_a_layout_is_told() -> None:
    found = check(small(), methods="attention")
    assert set(found.layout) == set(Layout.__dataclass_fields__)
    assert all(f"\n  {name} " in str(found) for name in found.layout)


def test_a_refused_model_says_why() -> None:
    found = check(zoo.model("timm Swin"), zoo.images("timm Swin", 2), seconds=30.0)
    assert found.right, found.problems
    assert {"attention_flow", "value_zeroing", "token_ablation"} <= set(found.of("refused"))
    assert {"attention", "gae", "gradient", "gradcam"} <= set(found.of("works"))
    text = str(found)
    assert "needs attention between all tokens; timm-swin attends in 7×7 windows" in " ".join(text.split())
    assert " ".join(text.split()).count("needs attention between all tokens") == 1, (
        "methods with the same reason stand together"
    )
    assert max(map(len, text.splitlines())) <= 80


def test_a_backbone_without_classes_is_checked_by_a_neuron() -> None:
    found = check(small(classifier=False), methods=FEW)
    assert found.right and found.of("works") == FEW
    assert "7 outputs that are no classes" in " ".join(str(found).split())


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float64])
def test_other_precisions_have_their_own_rounding(precision: torch.dtype) -> None:
    model = small(copy.deepcopy(zoo.network("timm ViT")).to(precision))
    found = check(model, zoo.images("timm ViT", 1), methods=("attention", "gae", "gradient"))
    assert found.right, found.problems
    assert (ALONE in wrong(found)) == (precision == torch.bfloat16), "finite differences need digits"


def test_a_model_that_cannot_run_is_reported() -> None:
    found = check(Model(nn.Linear(3, 3), cropped((8, 8), *IMAGENET)))
    assert not found.right and found.failure is not None and "Linear" in found.failure
    assert "problem: Linear" in str(found) and json.dumps(found.as_dict())


# ------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "where"),
    [
        (Layout(grid=(2, 8), prefix=1), FIRST),
        (Layout(grid=(4, 4), prefix=0, suffix=1, readout=(0,)), FIRST),
        (Layout(grid=(4, 4), prefix=1, patch=(8, 8)), FIRST),
    ],
    ids=["another grid", "one token off", "another patch"],
)
def test_a_wrong_layout_is_found(layout: Layout, where: str) -> None:
    found = check(small(layout=layout), methods="attention")
    assert states(found)[where] == "wrong" and not found.right
    assert "WRONG  patches and their tokens, first layer" in str(found)


def test_a_layout_without_layers_is_found() -> None:
    found = check(small(layout=Layout(grid=(5, 5), prefix=1)), methods="attention")
    assert found.of("refused") == ("attention",) and "no layer attends over 26 tokens" in " ".join(str(found).split())


class Doubled(torch.autograd.Function):
    """The identity with a wrong backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.flip(-1) * 2


@pytest.mark.slow
def test_a_wrong_backward_is_found() -> None:
    found = check(small(Around(Doubled.apply)), methods=FEW)
    assert ALONE in wrong(found) and states(found)["gradient and torch.autograd"] == "right", "autograd errs, too"


@pytest.mark.slow
def test_a_gradient_that_is_stopped_is_judged_by_finite_differences() -> None:
    """vitreous runs what is under torch.no_grad with gradients, torch.autograd does not."""

    def frozen(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2

    found = check(small(Around(frozen)), methods=FEW)
    (one,) = [one for one in found.verified if one.what == "gradient and torch.autograd"]
    assert one.state == "right" and "finite differences agree, torch.autograd" in one.note


@pytest.mark.slow
@pytest.mark.parametrize(
    "after", [lambda y: y * 0 + torch.arange(7.0), lambda y: y * float("nan")], ids=["constant", "NaN"]
)
def test_an_output_that_says_nothing_is_found(after: Any) -> None:
    found = check(small(Around(after=after)), methods="gradient")
    assert states(found)["output depends on the image"] == "wrong" and not found.right
    assert found.of("refused") == ("gradient",), "its map is zero or NaN"
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.slow
def test_a_network_that_does_not_repeat_is_found() -> None:
    found = check(small(Around(after=lambda y: y + 0.1 * torch.rand_like(y))), methods="gradient")
    assert not found.right and "gives another result when it is run again" in str(found.failure)


@pytest.mark.slow
def test_a_network_that_mixes_images_is_run_one_by_one() -> None:
    found = check(small(Around(after=lambda y: y + 0.1 * y.mean(0) * len(y))), methods="gradient")
    assert found.right and found.layout["alone"] is True and found.of("works") == ("gradient",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "where"),
    [
        ("scores_without", "token_ablation and removing the token"),
        ("scores_hidden", "occlusion and painting over the pixels"),
    ],
)
def test_brute_force_decides(engine: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = getattr(verify, engine)
    monkeypatch.setattr(verify, engine, lambda *given: true(*given).roll(1))
    assert wrong(check(small(), methods="attention")) == [where]


@pytest.mark.slow
def test_tokens_that_are_shuffled_on_the_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = verify.tokens_of
    mixed = torch.randperm(16, generator=torch.Generator().manual_seed(2))

    def shuffled(subject: Any, images: Tensor, layer: int) -> Tensor:
        tokens = true(subject, images, layer)
        return tokens if layer == 0 else tokens.flatten(1, 2)[:, mixed].reshape(tokens.shape)

    monkeypatch.setattr(verify, "tokens_of", shuffled)
    assert wrong(check(small(), methods="attention")) == [LAST]


@pytest.mark.slow
def test_an_error_of_a_comparison_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "filled", lambda *_: 1 / 0)
    found = check(small(), methods="attention")
    assert states(found)["occlusion and painting over the pixels"] == "bug"
    assert "ZeroDivisionError" in found.problems[0] and "1 / 0" in str(found.verified[-1].traceback)


def test_methods_that_fail_or_give_nothing_are_found() -> None:
    def crashing(trace: Any, target: Any) -> Any:
        raise KeyError("lost")

    def zero(trace: Any, target: Any) -> Any:
        return torch.zeros(len(trace), 4, 4)

    def flat(trace: Any, target: Any) -> Any:
        return torch.ones(len(trace), 4, 4)

    def unknown(trace: Any, target: Any) -> Any:
        return torch.full((len(trace), 4, 4), float("nan"))

    def crowd(trace: Any, target: Any) -> Any:
        return torch.rand(4, 4, generator=torch.Generator().manual_seed(0)).expand(len(trace), 4, 4) * len(trace)

    ours = (crashing, zero, flat, unknown, crowd)
    with METHODS.temporary():
        for one in ours:
            method(family="own", quick=one is crowd)(one)
        found = check(small(), methods=[one.__name__ for one in ours])
    reasons = {one.method: (one.status, one.reason) for one in found.methods}
    assert reasons["crashing"] == ("bug", "KeyError: 'lost'") and 'KeyError("lost")' in str(found.methods[0].traceback)
    assert reasons["zero"][0] == "refused" and "zero everywhere" in reasons["zero"][1]
    assert reasons["flat"] == ("wrong", "its map is the same everywhere")
    assert reasons["unknown"][0] == "refused" and "not finite" in reasons["unknown"][1]
    assert reasons["crowd"][0] == "wrong" and "depends on the other images of the batch" in reasons["crowd"][1]
    assert len(found.problems) == 3 and "this is a bug of vitreous" in " ".join(str(found).split())


def test_what_does_not_fit_into_the_time_is_not_tried() -> None:
    found = check(small(), seconds=0.0)
    assert found.of("not tried") == tuple(METHODS) and found.right
    assert "it may take longer than the 0 s" in " ".join(str(found).split())
    assert check(small(), methods="attention", seconds=0.0).of("works") == ("attention",)


def test_slow_methods_declare_cheap_options() -> None:
    for declared in METHODS.values():
        declared.check(declared.cheap)
    used = {one.method: one.options for one in check(small(), methods=("smoothgrad",)).methods}
    assert METHODS["smoothgrad"].cheap and used == {"smoothgrad": {}}, "a method that is named runs as it is"


# ------------------------------------------------------------------------------------------------------- command line


def test_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("vitreous.cli.arguments.load_model", lambda *asked, **more: given.append(asked) or small())
    ran = run("models", "--check", "vit_tiny", "-w", "random", "--device", "cpu", "-x", "attention,gradient")
    assert ran.code == 0 and ran.out.startswith("small (timm)\n") and given == [("vit_tiny", "random", "cpu", None)]
    told = json.loads(run("models", "--check", "vit_tiny", "-x", "attention", "--json").out)
    assert told["right"] and told["methods"][0]["status"] == "works"
    monkeypatch.setattr("vitreous.cli.arguments.load_model", lambda *_, **more: small(layout=Layout((2, 8), prefix=1)))
    assert run("models", "--check", "vit_tiny", "-x", "attention").code == 1
    for words in (("vit", "--check", "vit_tiny"), ("--device", "cpu")):
        assert "give --check NAME" in run("models", *words).error


def test_a_file_is_weights_of_the_embedded_model(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    torch.save({"a": torch.zeros(2)}, other)
    ran = run("models", "--check", other)
    assert ran.code == 2 and "other.pth" in ran.error
    assert ran.error.endswith(f"name that: vitreous models --check NAME --weights {other}")
    assert "give either --check FILE" in run("models", "--check", other, "-w", "random").error
    own = tmp_path / "own.pth"
    torch.save(vitreous.load(weights="random", device="cpu", img_size=32).net.state_dict(), own)
    ran = run("models", "--check", own, "-x", "attention", "--img-size", "32")
    assert ran.code == 0 and ran.out.startswith("vitreous_tiny (timm)\n")


# --------------------------------------------------------------------------------------------------------- the sweep


def test_the_sweep_judges_one_architecture() -> None:
    found = timm_sweep.one("test_vit", timm_sweep.Limits(seconds=20))
    assert found["verdict"] == "right" and found["options"]["depth"] == 3 and found["size"] == (96, 96), found
    assert timm_sweep.one("test_vit", timm_sweep.Limits(parameters=1000))["verdict"] == "too large"


def test_the_sweep_gives_a_verdict_on_every_check() -> None:
    def verdict(*given: Any, **more: Any) -> str:
        return str(timm_sweep.judged(check(*given, **more))["verdict"])

    assert verdict(small(layout=Layout((2, 8), prefix=1)), methods="attention") == "wrong"
    assert verdict(zoo.model("timm XCiT"), zoo.images("timm XCiT", 2), methods="attention") == "refused"
    assert verdict(Model(nn.Linear(3, 3), cropped((8, 8), *IMAGENET))) == "refused"


def test_the_table_of_the_sweep(tmp_path: Path) -> None:
    file, page = tmp_path / "sweep.jsonl", tmp_path / "page.md"
    lines = [
        {"name": "a", "family": "vit", "verdict": "wrong", "reason": "zero"},
        {"name": "a", "family": "vit", "verdict": "right", "reason": ""},
        {"name": "b", "family": "swin", "verdict": "refused", "reason": "attends in 7×7 windows"},
        {"name": "c", "family": "swin", "verdict": "crash", "reason": "KeyError | 3"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    page.write_text(f"before\n{timm_sweep.BEGIN}\nold\n{timm_sweep.END}\nafter\n")
    timm_sweep.written(page, timm_sweep.table(timm_sweep.read(file)))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "3 architectures: 1 right, 1 refused, 1 crash." in text
    assert "| swin |  | 1 |  | 1 |  |  | attends in 7×7 windows (1) |" in text
    assert "* KeyError \\| 3: `c`" in text
