"""What a method or metric needs besides its own file: each thing is asked for in a line that says what to write where.

Nothing here is more than a contributor can write: tables of results and of costs list what was run, not what there is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import test_methods
import test_metrics
from conftest import Run
from pydantic import Field

from vitreous import METHODS, METRICS, Trace, method, metric
from vitreous.metrics.case import Case, Measured
from vitreous.references import REFERENCES
from vitreous.registry import Declared, Method, Metric
from vitreous.trace.run import gradients
from vitreous.trace.target import Target
from vitreous.types import Map

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from _make import declared, evidence

OURS = [one for known in (METHODS, METRICS) for one in known.values() if one.run.__module__.startswith("vitreous.")]


def lacking(one: Declared) -> list[str]:
    """What is still to be written for a method or metric, and where."""
    return [*lacking_in_its_file(one), *lacking_elsewhere(one)]


def lacking_in_its_file(one: Declared) -> Iterator[str]:
    kind = "method" if isinstance(one, Method) else "metric"
    file = f"src/vitreous/{kind}s/{one.family}/{one.name}.py"
    if one.run.__module__ != f"vitreous.{kind}s.{one.family}.{one.name}":
        yield f"move {one.name} into a file of its own: {file}"
    if not one.summary.endswith("." if kind == "method" else (".", "?")) or len(one.summary) >= 160:
        yield f"{file}: begin the docstring of {one.name} with one sentence of fewer than 160 characters"
    if not one.formula:
        yield f"{file}: write the formula of {one.name} below the first sentence of its docstring, after an empty line"
    for name, field in one.options.model_fields.items():
        if not field.description:
            yield f'{file}: say what the option {name} does: Annotated[TYPE, Field(description="…")]'
    if kind == "metric" and not one.cite:
        yield f'{file}: name the paper that {one.name} comes from: @metric(cite="KEY", …)'


def lacking_elsewhere(one: Declared) -> Iterator[str]:
    if one.cite and one.cite not in REFERENCES:
        yield f'src/vitreous/references.py: add the work that {one.name} cites: "{one.cite}": Reference(…)'
    if len(evidence.limits().get(one.name, "")) <= 60:
        place = "below '## Methods'" if isinstance(one, Method) else "below '## Metrics'"
        yield f"docs/limits.md: write a section '### `{one.name}`' {place}: what to know before believing it"
    if f"`{one.name}`" not in (ROOT / "README.md").read_text(encoding="utf-8"):
        place = "in the table below '## Methods'" if isinstance(one, Method) else "in the paragraph 'Metrics:'"
        yield f"README.md: name `{one.name}` {place}"


@pytest.mark.parametrize("one", OURS, ids=lambda one: one.name)
def test_nothing_is_lacking(one: Declared) -> None:
    if told := lacking(one):
        pytest.fail("\n".join(told), pytrace=False)


def test_no_document_speaks_of_what_is_gone() -> None:
    assert set(evidence.limits()) <= {*METHODS, *METRICS}, "docs/limits.md"
    assert set(REFERENCES) == {one.cite for one in OURS} - {""}, "src/vitreous/references.py"
    assert all(work.url.startswith("https://") for work in REFERENCES.values())


# --------------------------------------------------------------------------------------------------- a new one of each


def brand_new(
    trace: Trace,
    target: Target,
    *,
    power: Annotated[float, Field(gt=0, description="of the gradient's size")] = 1.0,
) -> Map:
    """The gradient's size at each pixel, to a power.

    Σ_c |∂y/∂x_c|ᵖ
    """
    record = trace.pixels()
    (grad,) = gradients(trace.score(target, record), [record.images])
    return grad.float().abs().pow(power).sum(1)


def brightest_share(case: Case) -> Measured:
    """How much of the map its highest patch has.

    max |s| / Σ|s|
    """
    size = case.patches.flatten(1).abs()
    return Measured(size.amax(1) / size.sum(1).clamp_min(1e-12))


def hasty(trace: Any, target: Any, *, power: float = 1.0) -> Any:
    """something or other"""


def hastier(case: Any) -> Any:
    """Something or other?"""


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Method, Metric]]:
    """A method and a metric as a contributor's two files would declare them."""
    monkeypatch.setattr(brand_new, "__module__", "vitreous.methods.novelty.brand_new")
    monkeypatch.setattr(brightest_share, "__module__", "vitreous.metrics.complexity.brightest_share")
    with METHODS.temporary(), METRICS.temporary():
        method(cite="someone2030new", targeted=True)(brand_new)
        metric(cite="chalasani2020concise", better="higher")(brightest_share)
        yield METHODS["brand_new"], METRICS["brightest_share"]


def test_what_a_new_one_needs_is_told(new: tuple[Method, Metric]) -> None:
    """Beside two good files: no table of results, no list in a test, nothing that only a long run can make."""
    assert lacking(new[0]) == [
        'src/vitreous/references.py: add the work that brand_new cites: "someone2030new": Reference(…)',
        "docs/limits.md: write a section '### `brand_new`' below '## Methods': what to know before believing it",
        "README.md: name `brand_new` in the table below '## Methods'",
    ]
    assert lacking(new[1]) == [
        "docs/limits.md: write a section '### `brightest_share`' below '## Metrics': what to know before believing it",
        "README.md: name `brightest_share` in the paragraph 'Metrics:'",
    ]


@pytest.mark.usefixtures("new")
def test_what_a_hasty_file_lacks_is_told() -> None:
    method(family="gradient")(hasty)
    metric(family="sanity", better="lower")(hastier)
    file, other = "src/vitreous/methods/gradient/hasty.py", "src/vitreous/metrics/sanity/hastier.py"
    assert [*lacking_in_its_file(METHODS["hasty"])] == [
        f"move hasty into a file of its own: {file}",
        f"{file}: begin the docstring of hasty with one sentence of fewer than 160 characters",
        f"{file}: write the formula of hasty below the first sentence of its docstring, after an empty line",
        f'{file}: say what the option power does: Annotated[TYPE, Field(description="…")]',
    ]
    assert [*lacking_in_its_file(METRICS["hastier"])] == [
        f"move hastier into a file of its own: {other}",
        f"{other}: write the formula of hastier below the first sentence of its docstring, after an empty line",
        f'{other}: name the paper that hastier comes from: @metric(cite="KEY", …)',
    ]


def test_a_new_one_is_tested_listed_and_documented(new: tuple[Method, Metric], run: Run) -> None:
    """By everything that reads declarations, also where it was never measured and its family is new."""
    test_methods.test_battery("brand_new", "timm ViT")
    test_methods.test_half_precision_models_give_float32_maps("brand_new")
    test_metrics.test_battery("brightest_share", "timm ViT")
    test_metrics.test_half_precision("brightest_share")
    listed = run("methods").out
    assert "\nnovelty\n  brand_new " in f"\n{listed}" and "brightest_share" in run("metrics").out
    facts = declared.facts(new[0], declared.method_facts(new[0]))
    for row in ("| family | Novelty |", "| cost | not measured |", "| reference | someone2030new |"):
        assert row in facts
    for said in (declared.results_of(new[0]), declared.standing(new[1])):
        assert said[1:] == ["Not part of [the leaderboard](../results.md)."]
    assert declared.known_limits(new[0]) == declared.UNWRITTEN
    pages = {"Novelty": [{"brand_new": "methods/brand_new.md"}]}
    assert "## Novelty\n" in declared.index("Methods", METHODS) and pages in declared.nav_of("Methods", METHODS)
    assert "brightest_share" in declared.index("Metrics", METRICS)
