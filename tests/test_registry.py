"""One declaration per method, read by everything; also of methods that come from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
import zoo
from machine import PATIENCE
from pydantic import Field

import vitreous
from vitreous import registry
from vitreous.errors import OptionError, VitreousError
from vitreous.registry import METHODS, METRICS, Declared, Method, MethodWarning, Registry, method

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLE = DOCS / "examples" / "own_method.py"


def sample(
    trace: Any,
    target: Any,
    *,
    share: Annotated[float, Field(ge=0, lt=1, description="how much")] = 0.5,
    heads: Annotated[Literal["mean", "max"] | int, Field(description="which")] = "mean",
    place: Annotated[tuple[int, int], Field(description="row and column")] = (0, 0),
    flag: Annotated[bool, Field(description="or not")] = False,
) -> Any:
    """What it shows,
    on two lines.

    a = b

    and more
    """
    return trace.map(torch.ones(len(trace), trace.layout.tokens))


DECLARED = Method("sample", "own", "someone2026", sample, signed=True, targeted=False, attention=False)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Registry[Method]:
    """A registry without vitreous's own methods, into which `@method` declares."""
    new: Registry[Method] = Registry("method")
    monkeypatch.setattr(registry, "METHODS", new)
    monkeypatch.setattr(registry, "import_own", lambda kind: None)
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    return new


@pytest.fixture
def undo() -> Iterator[None]:
    """What a test declares is gone after it."""
    with METHODS.temporary():
        yield


# ----------------------------------------------------------------------------------------- signature to declaration


def test_the_docstring_is_the_summary_and_the_formula() -> None:
    assert DECLARED.summary == "What it shows, on two lines."
    assert DECLARED.formula == "a = b\n\nand more"


def test_the_signature_is_the_options() -> None:
    fields = DECLARED.options.model_fields
    assert list(fields) == ["share", "heads", "place", "flag"]
    assert fields["share"].description == "how much"
    assert DECLARED.check({}) == {"share": 0.5, "heads": "mean", "place": (0, 0), "flag": False}


def test_the_schema_is_json_with_bounds() -> None:
    schema = json.loads(json.dumps(DECLARED.schema, allow_nan=False))
    assert schema["name"] == "sample"
    assert schema["family"] == "own"
    assert schema["cite"] == "someone2026"
    assert (schema["signed"], schema["targeted"], schema["attention"]) == (True, False, False)
    share = schema["options"]["share"]
    assert (share["type"], share["minimum"], share["exclusiveMaximum"], share["default"]) == ("number", 0, 1, 0.5)
    assert share["description"] == "how much"
    assert [part.get("enum") or part["type"] for part in schema["options"]["heads"]["anyOf"]] == [
        ["mean", "max"],
        "integer",
    ]
    assert schema["options"]["place"]["default"] == [0, 0]


@pytest.mark.parametrize("one", [*METHODS.values(), *METRICS.values()], ids=lambda one: one.name)
def test_every_schema_is_json(one: Declared) -> None:
    schema = json.loads(json.dumps(one.schema, allow_nan=False))
    assert set(schema["options"]) == set(one.options.model_fields)
    for option in schema["options"].values():
        assert "description" in option
        assert "default" in option
        assert "$ref" not in json.dumps(option), "a page can use it as it is"


def test_bounds_of_a_real_method() -> None:
    discard = METHODS["rollout"].schema["options"]["discard"]
    assert (discard["minimum"], discard["exclusiveMaximum"], discard["default"]) == (0, 1, 0.0)


# ------------------------------------------------------------------------------------------------- checking values


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({"share": 0}, {"share": 0.0}),
        ({"heads": 3}, {"heads": 3}),
        ({"heads": "max"}, {"heads": "max"}),
        ({"place": [2, 3]}, {"place": (2, 3)}),
        ({"flag": True}, {"flag": True}),
    ],
)
def test_good_values(given: dict[str, Any], valid: dict[str, Any]) -> None:
    assert DECLARED.check(given).items() >= valid.items()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"share": 1.0}, "sample.share takes a number ≥ 0 and < 1, not 1.0"),
        ({"share": -0.1}, "sample.share takes a number ≥ 0 and < 1, not -0.1"),
        ({"share": float("nan")}, "sample.share=nan: Input should be a finite number"),
        ({"share": "much"}, "sample.share takes a number, not 'much'"),
        (
            {"heads": "median"},
            "sample.heads takes mean, max or a whole number, not 'median'",
        ),
        ({"place": [1]}, "sample.place takes 2 values (a whole number, a whole number), not [1]"),
        ({"shre": 0.5}, "sample has no option 'shre'; did you mean share?"),
        ({"zzzz": 0.5}, "sample has no option 'zzzz'; it has share, heads, place, flag"),
    ],
)
def test_bad_values_are_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        DECLARED.check(given)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_unknown_methods_suggest_the_nearest() -> None:
    with pytest.raises(OptionError, match="unknown method 'rolout'; did you mean rollout"):
        METHODS["rolout"]
    with pytest.raises(OptionError, match="unknown method 'qqqqq'; see: vitreous methods"):
        METHODS["qqqqq"]
    assert "rolout" not in METHODS
    assert METHODS.get("rollout") is METHODS["rollout"]


def test_methods_are_listed_by_family_and_name() -> None:
    listed = [(METHODS[name].family, name) for name in METHODS]
    assert listed == sorted(listed)
    assert len(METHODS) == len(listed)
    assert {("attention", "attention"), ("attention", "rollout"), ("control", "centre")} <= set(listed)


# ----------------------------------------------------------------------------------------------------- declaring


def test_declaring_is_registering(fresh: Registry[Method]) -> None:
    assert method(signed=True, family="own")(sample) is sample, "the function stays as it is"
    assert list(fresh) == ["sample"]
    assert fresh["sample"].signed
    assert not fresh["sample"].targeted


def test_the_family_is_the_folder(fresh: Registry[Method], monkeypatch: pytest.MonkeyPatch) -> None:
    for module, family in [("package.folder.file", "folder"), ("script", "script")]:
        monkeypatch.setattr(sample, "__module__", module)
        with fresh.temporary():
            method()(sample)
            assert fresh["sample"].family == family


def test_what_is_declared_temporarily_is_forgotten() -> None:
    """Everything else is known before, within and afterwards."""
    known = dict(METHODS)
    with METHODS.temporary():
        method(family="own")(sample)
        assert dict(METHODS) == {**known, "sample": METHODS["sample"]}
        with METHODS.temporary():
            method(family="own")(lambda_named("deeper", "own"))
            assert {"sample", "deeper"} <= set(METHODS)
        assert "sample" in METHODS and "deeper" not in METHODS
    assert dict(METHODS) == known


def test_what_is_declared_temporarily_is_forgotten_after_an_error() -> None:
    def fail() -> None:
        with METHODS.temporary():
            method(family="own")(sample)
            raise ValueError("a test fails")

    with pytest.raises(ValueError, match="a test fails"):
        fail()
    assert "sample" not in METHODS and "rollout" in METHODS


def test_a_temporary_declaration_does_not_hide_what_was_not_yet_looked_for(
    fresh: Registry[Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods of our own files are imported once: they must not be among what is forgotten."""
    monkeypatch.setattr(registry, "import_own", lambda kind: method()(sample))
    with fresh.temporary():
        method()(lambda_named("other", "own"))
    assert list(fresh) == ["sample"]


def test_the_same_name_twice_is_refused(fresh: Registry[Method], monkeypatch: pytest.MonkeyPatch) -> None:
    method()(sample)
    method()(sample)  # the same file, imported again
    monkeypatch.setattr(sample, "__module__", "elsewhere")
    with pytest.raises(VitreousError) as caught:
        method()(lambda_named("sample", "other"))
    assert str(caught.value) == "two methods are named 'sample': in elsewhere and in other; rename yours"


def lambda_named(name: str, module: str) -> Any:
    def run(trace: Any, target: Any) -> Any:
        """Nothing."""

    run.__name__, run.__module__ = name, module
    return run


def test_a_package_cannot_take_the_name_of_our_own(undo: None) -> None:
    with pytest.raises(VitreousError, match=r"two methods are named 'rollout': .* rename yours"):
        method()(lambda_named("rollout", "theirs"))
    assert METHODS["rollout"].run.__module__ == "vitreous.methods.attention.rollout"


def test_our_own_wins_when_it_comes_later(fresh: Registry[Method]) -> None:
    """A user's module may be imported before the first look into METHODS."""
    method()(lambda_named("rollout", "theirs"))
    ours = lambda_named("rollout", "vitreous.methods.attention.rollout")
    with pytest.warns(MethodWarning, match="the latter is used"):
        method()(ours)
    assert fresh["rollout"].run is ours


def test_wrong_signatures_are_refused_where_they_are_declared(fresh: Registry[Method]) -> None:
    def none() -> None: ...
    def positional(trace: Any, target: Any, share: float = 0.5) -> None: ...
    def required(trace: Any, target: Any, *, share: float) -> None: ...
    def untyped(trace: Any, target: Any, *, share=0.5) -> None: ...  # type: ignore[no-untyped-def]
    def anything(trace: Any, target: Any, **share: Any) -> None: ...

    for run, said in [
        (none, r"signature of a method is \(trace, target, \*, options\)"),
        (positional, r"option share must be keyword-only"),
        (required, "option share needs a type annotation and a default"),
        (untyped, "option share needs a type annotation and a default"),
        (anything, r"option share must be keyword-only"),
    ]:
        with pytest.raises(VitreousError, match=said):
            method()(run)
    assert len(fresh) == 0


def test_types_that_only_a_type_checker_imports(fresh: Registry[Method]) -> None:
    """Only the options' types must be known at run time."""
    space: dict[str, Any] = {"__name__": "late"}
    code = "from __future__ import annotations\ndef late(trace: Trace, target: Target, *, n: int = 3) -> Map: ..."
    exec(code, space)
    method()(space["late"])
    assert fresh["late"].check({"n": 4}) == {"n": 4}


# ------------------------------------------------------------------------------------------ methods of other packages


def points(*values: str) -> list[EntryPoint]:
    return [EntryPoint(name=value.split(":")[0], value=value, group="vitreous.methods") for value in values]


def test_entry_points_are_loaded_on_the_first_look(
    fresh: Registry[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_method.py").write_text(EXAMPLE.read_text().replace("value_norm", "late_method"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: points("late_method") if group == "vitreous.methods" else []
    )
    assert "late_method" not in sys.modules
    assert "late_method" in fresh
    monkeypatch.delitem(sys.modules, "late_method")


def test_broken_packages_only_warn(fresh: Registry[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_method.py").write_text("raise RuntimeError('out of\\norder')")
    (tmp_path / "fine_method.py").write_text(EXAMPLE.read_text().replace("value_norm", "fine_method"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", lambda group: points("bad_method", "gone_method", "fine_method"))
    with pytest.warns(MethodWarning) as seen:
        assert list(fresh) == ["fine_method"]
    said = [str(w.message) for w in seen]
    assert said == [
        "the method 'bad_method' of bad_method does not load: out of order",
        "the method 'gone_method' of gone_method does not load: No module named 'gone_method'",
    ]
    assert list(fresh) == ["fine_method"], "and only once"
    monkeypatch.delitem(sys.modules, "fine_method")


def test_an_interrupted_first_look_is_made_again(fresh: Registry[Method], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(kind: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "import_own", interrupted)
    with pytest.raises(KeyboardInterrupt):
        len(fresh)
    monkeypatch.setattr(registry, "import_own", lambda kind: method()(sample))
    assert list(fresh) == ["sample"]


SCRIPT = """
import sys, torch, vitreous, zoo
from vitreous.cli.main import main
assert "own_method" not in sys.modules
assert vitreous.METHODS["value_norm"].family == "own"
model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
assert vitreous.explain(model, images, "value_norm", layer=0).map.shape == (3, 4, 4)
sys.argv = ["vitreous", "methods"]
main()
"""


@pytest.mark.slow
@pytest.mark.process
def test_an_installed_package_adds_a_method(tmp_path: Path) -> None:
    """As pip would leave it: a module and its dist-info; nobody imports anything."""
    (tmp_path / "own_method.py").write_text(EXAMPLE.read_text())
    project = tomllib.loads(blocks("toml")[0])
    info = tmp_path / "my_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    group, named = next(iter(project["project"]["entry-points"].items()))
    lines = [f"{name} = {value}" for name, value in {**named, "broken": "no_such_module"}.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    paths = os.pathsep.join(filter(None, [str(tmp_path), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^own\n  value_norm +How much each patch has to offer", ran.stdout, re.MULTILINE)
    assert "the method 'broken' of my-methods does not load: No module named 'no_such_module'" in ran.stderr


# --------------------------------------------------------------------------------------------- the documented example


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / "own-method.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_documentation_shows_exactly_the_tested_file() -> None:
    assert blocks("python")[0] == EXAMPLE.read_text(encoding="utf-8")


def test_the_example_is_as_short_as_promised() -> None:
    doc = re.compile(r'""".*?"""', re.DOTALL)
    lines = doc.sub("", EXAMPLE.read_text(encoding="utf-8")).splitlines()
    assert len([line for line in lines if line.strip()]) <= 20


@pytest.mark.parametrize("name", ["timm ViT", "timm DINOv3", "HF ViT eager", "torchvision ViT"])
def test_the_example_works(name: str, undo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its map is the norm of the values, recomputed here from the trace."""
    space: dict[str, Any] = {"__name__": "own_method"}
    exec(compile(EXAMPLE.read_text(encoding="utf-8"), EXAMPLE.name, "exec"), space)
    model, images, entry = zoo.model(name), zoo.images(name), zoo.ZOO[name]
    maps = vitreous.explain(model, images, "value_norm", layer=1).map
    values = vitreous.Trace(model, images).attention[1].v[:, :, entry.prefix :]
    assert torch.allclose(maps.flatten(1), values.square().sum(-1).sqrt().mean(1), atol=1e-5)
    with pytest.raises(OptionError, match="layer 9 is out of range"):
        vitreous.explain(model, images, "value_norm", layer=9)


def test_the_documented_call(undo: None, tmp_path: Path, cat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block of the page, in a folder with a photo."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.jpg").write_bytes(cat.read_bytes())
    exec(blocks("python")[1], {})
    assert (tmp_path / "value_norm.png").stat().st_size > 10_000
    monkeypatch.delitem(sys.modules, "own_method")
