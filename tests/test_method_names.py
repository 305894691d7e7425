"""What is known about a method stands in its declaration: no table elsewhere in the package names methods."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitreous import METHODS

PACKAGE = Path(__file__).parents[1] / "src" / "vitreous"
NAMES = {one.name for one in METHODS.values() if one.run.__module__.startswith("vitreous.")}

DEFAULT = "what is taken where no method is named"
PUBLISHED = "published numbers and claims are about these methods"
REFERENCE = "the control with which all others are compared"
PART = "this view is, or is made of, the map of this method"
TARGETED = "stands for any method that depends on a target"
WORD = "the word, not the method"
TAB = "the view of the page, not the method"

ALLOWED = {  # file, names: why they are there
    "inspect/outliers/registers.py": {WORD: ["rise"]},
    "metrics/shortcut/token_shortcut.py": {"its scores are those of this method": ["token_ablation"]},
    "_support/statistics.py": {REFERENCE: ["random"]},
    "cli/advise.py": {REFERENCE: ["random"]},
    "cli/cass.py": {PART: ["cass_attention"], WORD: ["rise"]},
    "cli/health.py": {"one map that every device can make": ["cdam"]},
    "cli/probe.py": {WORD: ["random"]},
    "counterfactuals/find.py": {DEFAULT: ["token_ablation", "occlusion"]},
    "declaration.py": {WORD: ["attention"]},
    "evaluation/diff/told.py": {WORD: ["centre"]},
    "evaluation/leaderboard.py": {TARGETED: ["gradient"]},
    "evaluation/plan.py": {REFERENCE: ["random", "centre"]},
    "evaluation/report/leaderboard.py": {WORD: ["centre"]},
    "evaluation/study/cass.py": {PART: ["cass_attention"]},
    "evaluation/study/claim_verdicts.py": {PUBLISHED: ["gae"]},
    "evaluation/study/compare.py": {PUBLISHED: ["attention", "cdam", "gae", "token_ablation"]},
    "evaluation/study/comparison.py": {PUBLISHED: ["attention", "cdam", "gae"]},
    "evaluation/study/comparison_findings.py": {PUBLISHED: ["attention"]},
    "evaluation/study/maps.py": {DEFAULT: ["attention", "rollout", "gae", "cdam"]},
    "evaluation/study/published_claims.py": {PUBLISHED: ["attention", "cdam", "gae", "token_ablation"]},
    "evaluation/study/shard.py": {TARGETED: ["gradient"]},
    "evaluation/study/shortcuts/design.py": {WORD: ["centre"]},
    "evaluation/study/shortcuts/effects.py": {WORD: ["centre"]},
    "evaluation/study/shortcuts/score.py": {REFERENCE: ["random"]},
    "evaluation/study/spread.py": {PART: ["attention", "rollout"]},
    "inspect/check/verify.py": {"compared with another way to compute it": ["gradient", "token_ablation"]},
    "inspect/discard.py": {PART: ["rollout"]},
    "inspect/layers.py": {PART: ["rollout"]},
    "metrics/case.py": {TARGETED: ["gradient"]},
    "models/libraries/loading.py": {WORD: ["random"]},
    "plot/curves.py": {REFERENCE: ["random"]},
    "plot/cdam_by_attention.py": {PUBLISHED: ["cdam"]},
    "plot/spread.py": {PART: ["rollout"]},
    "cli/language.py": {"the words of a text have their own ways, named as those of images": ["gradient", "gae"]},
    "language/ask.py": {DEFAULT: ["gae"]},
    "language/words.py": {
        "the words of a text have their own ways, named as those of images": ["gradient", "gae", "occlusion"]
    },
    "trace/apply.py": {"stands for any method that needs attention": ["attention"]},
    "trace/rules/gradient.py": {"the rules of relevance have the names of their papers": ["attn_lrp", "cp_lrp"]},
    "notebook/recorded.py": {"a trait of methods, not the method": ["attention"]},
    "notebook/show.py": {TAB: ["attention"]},
    "web/about.py": {"an example in the documentation of the API": ["gae"]},
    "web/attention.py": {PART: ["rollout"], TAB: ["attention"]},
    "web/clips.py": {TAB: ["attention"]},
    "web/exports.py": {PART: ["attention", "rollout"]},
    "web/faithfulness.py": {REFERENCE: ["random"]},
    "web/heads.py": {PART: ["cass_attention"]},
    "web/recipes.py": {PART: ["rollout"]},
    "web/schema.py": {"an example in the documentation of the API": ["cdam"]},
    "web/static/attention.js": {PART: ["attention", "rollout"]},
    "web/static/concepts.js": {DEFAULT: ["cdam"]},
    "web/static/draw.js": {WORD: ["centre"]},
    "web/static/faithfulness.js": {REFERENCE: ["random"]},
    "web/static/steps.js": {TAB: ["attention"], DEFAULT: ["centred_lrp", "attn_lrp", "gae", "gradcam", "occlusion"]},
    "web/static/texts.js": {
        TAB: ["attention"],
        PART: ["rollout", "grad_rollout", "cdam", "token_ablation", "occlusion", "cass_attention"],
    },
}


def files() -> Iterator[Path]:
    for file in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js")]):
        if not file.is_relative_to(PACKAGE / "methods"):
            yield file


def named(file: Path) -> dict[str, int]:
    """The methods that are named as a string, each with the first line where it is."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".js":
        found = [
            (at, word) for at, line in enumerate(text.splitlines(), 1) for word in re.findall(r"[\"'](\w+)[\"']", line)
        ]
    else:
        strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        found = [(node.lineno, node.value) for node in strings if isinstance(node.value, str)]
    return {word: at for at, word in sorted(found, reverse=True) if word in NAMES}


def unexpected(file: Path, place: str) -> list[str]:
    allowed = {name for names in ALLOWED.get(place, {}).values() for name in names}
    return [f"{place}:{at}: {name}" for name, at in named(file).items() if name not in allowed]


def test_methods_are_named_in_their_own_files() -> None:
    found = [line for file in files() for line in unexpected(file, file.relative_to(PACKAGE).as_posix())]
    said = "declare what is known of a method in its @method(…), or give the reason in ALLOWED"
    assert not found, "\n".join([said, *found])


def test_every_exception_is_still_needed() -> None:
    for place, reasons in ALLOWED.items():
        there = set(named(PACKAGE / place)) if (PACKAGE / place).exists() else set()
        for reason, names in reasons.items():
            assert set(names) <= there, f"{place}: {reason}: {', '.join(set(names) - there)} is named there no longer"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("new.py", 'SLOW = ("gae",)\n'),
        ("new.py", 'SLOW = {\n    "rollout": 3,\n}\n'),
        ("new.js", 'const slow = ["gae"];\n'),
    ],
)
def test_a_new_table_is_seen(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert len(unexpected(file, name)) == 1
