"""A method with options of one's own: taken wherever a method's name is, and typed for editors."""

from __future__ import annotations

import inspect
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
import zoo
from conftest import off
from machine import ROUNDING
from PIL import Image
from pydantic import Field

import vitreous
from vitreous import METHODS, method, methods
from vitreous.cli.arguments import parse_settings
from vitreous.declaration import ConfiguredMethod, Method
from vitreous.errors import OptionError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from _make import stub


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    chance = np.random.default_rng(0)
    for number in range(2):
        Image.fromarray(chance.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


# --------------------------------------------------------------------------------------------------------- what it is


def test_it_says_what_it_is_in_python_and_on_the_command_line() -> None:
    one = methods.attention(layer=3, query=(1, 2))
    assert repr(one) == "vitreous.methods.attention(layer=3, query=(1, 2))"
    assert str(one) == "attention --set attention.layer=3 --set attention.query=1,2"
    assert one.label == "attention layer=3 query=(1, 2)"
    assert (one.name, one.options) == ("attention", {"layer": 3, "query": (1, 2)})
    assert dict(one.values) == {"layer": 3, "heads": "mean", "across": "none", "query": (1, 2)}
    assert [repr(methods.gae()), str(methods.gae()), methods.gae().label] == ["vitreous.methods.gae()", "gae", "gae"]


def test_it_is_the_same_where_it_does_the_same() -> None:
    assert methods.gae(start_layer=0) == methods.gae() != methods.gae(start_layer=1)
    assert methods.gae() != methods.grad_rollout() and methods.gae() != "gae"
    assert len({methods.gae(), methods.gae(start_layer=0), methods.gae(start_layer=1)}) == 2
    assert methods.attention(query=[1, 2]) == methods.attention(query=(1, 2)), "a value is checked and made its type"  # type: ignore[arg-type]


def other(one: Method) -> dict[str, Any]:
    """Each option with a value that is not its default."""
    given: dict[str, Any] = {}
    for name, schema in one.schema["options"].items():
        default = one.options.model_fields[name].default
        words = [word for part in (schema, *schema.get("anyOf", ())) for word in part.get("enum", ())]
        tries = [*words, 3, 0.25, not default if isinstance(default, bool) else 3, "srg", (1, 2)]
        for value in tries:
            try:
                if one.check({name: value})[name] != default:
                    given[name] = value
                    break
            except OptionError:
                continue
    return given


@pytest.mark.parametrize("one", METHODS.values(), ids=lambda one: one.name)
def test_what_it_says_makes_it_again(one: Method) -> None:
    made = one.configured(**other(one))
    assert list(made.options) == list(one.options.model_fields), "every option was changed"
    assert eval(repr(made)) == made
    name, *words = shlex.split(str(made))
    read = parse_settings(words[1::2])
    assert set(words[::2]) <= {"--set"} and one.check(read.get(name, {})) == made.values


def test_wrong_options_are_told_at_once() -> None:
    with pytest.raises(OptionError, match="gae has no option 'start'; did you mean start_layer"):
        methods.gae(start=1)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"rollout.discard takes a number, not True"):
        methods.rollout(discard=True)
    with pytest.raises(AttributeError, match=r"'vitreous.methods' has no attribute 'gea'"):
        _ = methods.gea  # type: ignore[attr-defined]


def test_a_folder_with_the_name_of_a_method_is_that_method_too() -> None:
    for folder in ("attention", "gradient"):
        called = getattr(methods, folder)
        assert called() == METHODS[folder].configured()
        assert inspect.signature(called) == inspect.signature(METHODS[folder].configured)


def test_methods_of_others_are_there_by_their_name() -> None:
    def theirs(trace: Any, target: Any, *, power: Annotated[float, Field(gt=0, description="how much")] = 1.0) -> Any:
        """Ones."""
        return trace.map(torch.ones(len(trace), trace.layout.tokens))

    with METHODS.temporary():
        method(family="own")(theirs)
        made = methods.theirs(power=2)  # type: ignore[attr-defined]
        assert repr(made) == "vitreous.methods.theirs(power=2.0)" and "theirs" in dir(methods)
        assert vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT"), made).options == {"power": 2.0}
    assert not hasattr(methods, "theirs")


@pytest.mark.process
def test_the_names_are_there_without_an_import_of_torch() -> None:
    code = "import sys, vitreous; vitreous.methods; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------------------------------------------- where it is taken


def test_explaining() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    named = vitreous.explain(model, images, "gae", 1, start_layer=1)
    made = vitreous.explain(model, images, methods.gae(start_layer=1), 1)
    assert off(made.map, named.map) <= ROUNDING and made.provenance == named.provenance
    (one,) = vitreous.explain_targets(model, images, methods.gae(start_layer=1), [1])
    assert off(one.map, named.map) <= ROUNDING and one.options == {"start_layer": 1, "rules": "plain"}


def test_options_in_two_places_are_refused() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    said = r"vitreous.methods.gae\(start_layer=1\) has its own options; give start_layer there, or the method's name"
    with pytest.raises(OptionError, match=said):
        vitreous.explain(model, images, methods.gae(start_layer=1), start_layer=2)


def test_measuring() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    made = vitreous.evaluate(model, images, methods.attention(layer=0), "sparsity")
    maps = vitreous.explain(model, images, "attention", layer=0)
    assert torch.equal(made.value, vitreous.evaluate(model, images, maps, "sparsity").value)
    assert made.method == "attention"


def test_a_leaderboard_has_a_row_for_each_choice_of_options(photos: Path) -> None:
    model, metric = zoo.model("timm ViT"), "sparsity"
    asked: list[str | ConfiguredMethod] = ["attention", methods.attention(layer=0), methods.attention(layer=0)]
    board = vitreous.run_leaderboard(model, photos, asked, metric)
    assert board.methods == ["random", "centre", "attention", "attention layer=0"]
    files = sorted(map(str, photos.iterdir()))
    expected = vitreous.evaluate(model, files, methods.attention(layer=0), metric).value
    assert np.allclose(board.values[3, 0], expected)
    with pytest.raises(OptionError, match=r"options for attention: it is not among .* asked for by name"):
        vitreous.run_leaderboard(model, photos, asked[1], metric, options={"attention": {"layer": 1}})


def test_advice_measures_it_as_it_is(photos: Path) -> None:
    found = vitreous.advise(zoo.model("timm ViT"), photos, methods=["gae", methods.attention(layer=1)])
    assert {one.name for one in found.contenders} == {"gae", "gae rules=libra", "attention layer=1"}
    assert next(one for one in found.contenders if one.method == "attention").options == {"layer": 1}


def test_a_study_keeps_one_row_for_each_method(photos: Path, tmp_path: Path) -> None:
    model = zoo.model("timm ViT")
    study = vitreous.run_study("maps", photos, model, tmp_path, methods=["gae", methods.attention(layer=0)])
    named = {"methods": "gae,attention", "options": {"attention": {"layer": 0}}}
    again: Any = vitreous.run_study("maps", photos, model, tmp_path, **named)
    assert again.folder == study.folder, "the same study"
    for twice in ([methods.gae(), methods.gae(start_layer=1)], ["gae", methods.gae(start_layer=1)]):
        with pytest.raises(OptionError, match="gae is asked for with several choices of options; give one"):
            vitreous.run_study("maps", photos, model, tmp_path, methods=twice)
    with pytest.raises(OptionError, match="several choices of options"):
        vitreous.run_study("maps", photos, model, tmp_path, methods=methods.gae(), options={"gae": {"start_layer": 1}})


# ---------------------------------------------------------------------------------------------------------- its types


def test_editors_see_what_is_declared() -> None:
    assert stub.FILE.read_text(encoding="utf-8") == stub.stub(), "the declarations have changed: make stub"


def test_types_are_written_as_they_are_read() -> None:
    shown = Annotated[int, Field(ge=1)]
    for kind, text in [
        (Literal["a", 1] | int | None, 'Literal["a", 1] | int | None'),
        (tuple[shown, ...], "tuple[int, ...]"),
        (tuple[int, float], "tuple[int, float]"),
    ]:
        assert stub.spelled(kind) == text
