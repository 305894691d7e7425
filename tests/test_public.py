"""What `import vitreous` offers."""

from __future__ import annotations

import ast
import copy
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo

import vitreous
from vitreous import Model, Trace
from vitreous.cli.arguments import load_model
from vitreous.trace.apply import of_model


def test_every_public_name_is_there() -> None:
    for name in vitreous.__all__:
        assert getattr(vitreous, name) is not None
    assert set(vitreous.__all__) <= set(dir(vitreous))
    assert callable(vitreous.explain) and callable(vitreous.load) and callable(vitreous.cass)
    with pytest.raises(AttributeError, match="No vitreous attribute explian"):
        _ = vitreous.explian


def stub_imports() -> dict[str, str]:
    """What type checkers read in __init__.pyi: each name, and the module it comes from."""
    tree = ast.parse(Path(vitreous.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = {}
    for line in tree.body:
        assert isinstance(line, ast.ImportFrom) and line.level == 1, ast.unparse(line)
        (name,) = line.names
        assert name.asname == name.name, f"{ast.unparse(line)}: only `{name.name} as {name.name}` is an export"
        found[name.name] = f"vitreous.{line.module or name.name}"
    assert len(found) == len(tree.body), "a name is imported twice"
    return found


def test_type_checkers_see_what_is_exported() -> None:
    assert sorted(vitreous.__all__) == sorted(stub_imports())
    for name, home in stub_imports().items():
        module = importlib.import_module(home)
        assert getattr(vitreous, name) is (module if home == f"vitreous.{name}" else getattr(module, name))


def test_the_page_on_stability_lists_the_public_names() -> None:
    page = (Path(__file__).parents[1] / "docs" / "stability.md").read_text(encoding="utf-8")
    table = page[page.index("| for | names |") : page.index("Of a `Trace`")]
    listed = re.findall(r"`(\w+)`", table)
    assert sorted(listed) == sorted(vitreous.__all__)


def test_what_the_guide_to_methods_says_of_a_trace_is_there() -> None:
    """The stability page promises these members."""
    page = (Path(__file__).parents[1] / "docs" / "own-method.md").read_text(encoding="utf-8")
    members = set(re.findall(r"`trace\.(\w+)", page[page.index("## What the trace offers") :]))
    assert members and all(hasattr(vitreous.Trace, name) for name in members)


@pytest.mark.process
def test_importing_is_quick() -> None:
    """No torch before something needs it."""
    code = "import sys, vitreous; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_exceptions_have_one_root() -> None:
    from vitreous import errors

    for name in (
        "InputError",
        "ModelError",
        "WeightsError",
        "Unsupported",
        "TargetError",
        "OptionError",
        "CaptureError",
        "EmptyMap",
    ):
        assert issubclass(getattr(errors, name), vitreous.VitreousError)
        assert getattr(vitreous, name) is getattr(errors, name)
        assert name in (errors.__doc__ or "")


# ------------------------------------------------------------------------------------------------- traces beside models


def test_a_trace_explains_itself() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    trace = vitreous.Trace(model, images)
    for method, target, options in (("gae", 3, {}), ("rollout", None, {"discard": 0.5}), ("cdam", [0, "top-2", 1], {})):
        ours = trace.explain(method, target, **options)
        same = vitreous.explain(model, trace, method, target, **options)
        assert torch.equal(ours.map, same.map) and ours.provenance == same.provenance
        assert torch.allclose(ours.map, vitreous.explain(model, images, method, target, **options).map, atol=1e-6)
    assert trace.explain().method == vitreous.explain(model, images).method == "centred_lrp"


@pytest.mark.parametrize(
    ("metric", "options"), [("deletion", {"steps": 3}), ("sparsity", {}), ("max_sensitivity", {"samples": 1})]
)
def test_a_trace_is_measured_like_its_images(metric: str, options: dict[str, Any]) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    trace = vitreous.Trace(model, images)
    for explained in ("gae", trace.explain("gae", [3, 1, 0])):
        ours, plain = (vitreous.evaluate(model, x, explained, metric, **options) for x in (trace, images))
        assert len(ours) == 3 and torch.allclose(ours.value, plain.value, atol=1e-5, equal_nan=True)
    each = [vitreous.evaluate(model, trace, "gae", metric, [3, 1, 0], **options).value]
    each.append(vitreous.evaluate(model, trace, trace.explain("gae", [3, 1, 0]), metric, **options).value)
    assert torch.allclose(each[0], each[1], atol=1e-5)
    with pytest.raises(vitreous.TargetError, match="2 targets for 3 images"):
        vitreous.evaluate(model, trace, "gae", metric, [3, 1], **options)


def test_a_trace_with_masks_is_measured_like_its_images() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    masks = [np.tri(64, dtype=bool)] * 3
    ours, plain = (
        vitreous.evaluate(model, x, "gae", "pointing_game", masks=masks).value
        for x in (vitreous.Trace(model, images), images)
    )
    assert torch.equal(ours, plain)


def test_a_trace_of_another_model_is_refused() -> None:
    model = Model(zoo.network("timm ViT"), name="mine")
    other = Model(copy.deepcopy(zoo.network("timm ViT")), name="theirs")
    trace = vitreous.Trace(model, zoo.images("timm ViT")[:1])
    said = "this trace is of mine, not of theirs: give the model that it was made with, or make a trace of theirs"
    calls: list[Callable[[Any], Any]] = [
        lambda named: vitreous.explain(named, trace, "gae", 1),
        lambda named: vitreous.explain_targets(named, trace, "gae", [1, 2]),
        lambda named: vitreous.evaluate(named, trace, "gae", "sparsity"),
        lambda named: vitreous.cass(named, trace, 1, samples=1),
        lambda named: vitreous.inspect.heads(named, trace),
    ]
    for call in calls:
        with pytest.raises(vitreous.ModelError, match=re.escape(said)):
            call(other)
    with pytest.raises(vitreous.ModelError, match="this trace is of mine, not of timm/vit_base:"):
        vitreous.explain("timm/vit_base", trace)
    for same in (model, Model(model.net), model.net, torch.nn.DataParallel(model.net), None, "mine"):
        assert vitreous.explain(same, trace, "attention").model == "mine"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("vitreous_tiny", "vitreous_tiny"),
        ("timm/vit_tiny", "vit_tiny"),
        ("hf/facebook/dino", "dino"),
        ("openclip/ViT-B-32:laion", "ViT-B-32"),
        ("timm/hf-hub:timm/vit_tiny", "hf-hub:timm/vit_tiny"),
    ],
)
def test_a_model_is_known_by_the_name_it_was_loaded_by(spec: str, name: str) -> None:
    model = Model(zoo.network("timm ViT"), name=name)
    assert of_model(Trace(model, zoo.images("timm ViT")[:1]), spec).model is model


def test_loading_says_on_which_device(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vitreous"):
        model = vitreous.load("vitreous_tiny", weights="random", device="cpu", dtype="float64")
    assert caplog.messages == ["vitreous_tiny runs on cpu in torch.float64"]
    assert "cpu" in repr(model) and "torch.float64" in repr(model)


@pytest.mark.parametrize(
    ("terminal", "device", "said"), [(True, "cpu", True), (False, "cpu", False), (False, "meta", True)]
)
def test_commands_say_on_which_device(
    terminal: bool, device: str, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where people look, and wherever it is not the CPU; never among the results."""
    monkeypatch.setattr("vitreous.models.load.load", lambda *args, **more: Model(zoo.network("timm ViT"), name="vit"))
    monkeypatch.setattr(Model, "device", torch.device(device))
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    load_model(None, None, None, None)
    found = capsys.readouterr()
    assert found.out == "" and (f"vit runs on {device}" in found.err) is said and bool(found.err) is said
