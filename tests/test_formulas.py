"""Formulas on the site and on the page: MathML made of the Unicode of the docstrings, nothing lost, no network."""

from __future__ import annotations

import re
import sys
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vitreous import METHODS, METRICS
from vitreous._support import formula

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

ALL = {**METHODS, **METRICS}
LOOKS = str.maketrans({**formula.UP, **formula.DOWN, **formula.LARGE})


def read(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{html}</div>")


def letters(text: str) -> list[str]:
    """The letters and digits of a text, whatever their place on the line."""
    plain = unicodedata.normalize("NFD", text).translate(LOOKS)
    return sorted(c for c in plain if c.isalnum() or c in "∑∏∂")


@pytest.mark.parametrize("name", ALL)
def test_every_formula_is_typeset_and_nothing_is_lost(name: str) -> None:
    made = read(formula.text(ALL[name].formula))
    assert letters("".join(made.itertext())) == letters(ALL[name].formula)
    for part in made.iter("math"):
        said = "".join(part.itertext())
        assert said.strip() and not re.search(r"[_`\u0302-\u0304⁰-⁹₀-₉ᵀ]", said), said


@pytest.mark.parametrize("name", sorted(set(ALL) - {"pointing_game", "optimus", "random"}))
def test_formulas_hold_more_than_letters(name: str) -> None:
    """What makes a formula of it: an index, an exponent, a fraction, an operator, or a function of something."""
    kinds = {part.tag for part in read(formula.text(ALL[name].formula)).iter()}
    assert "math" in kinds and kinds & {"msub", "msup", "msubsup", "mfrac", "mo", "mrow"}


@pytest.mark.parametrize(
    ("written", "inside"),
    [
        ("∂y/∂x", "<mfrac"),
        ("A⁽ˡ⁾ₕ", "<msubsup><mi>A</mi><mrow><mi>h</mi></mrow><mrow><mo>(</mo><mi>l</mi><mo>)</mo></mrow></msubsup>"),
        ("A^h_ij", "<msubsup><mi>A</mi><mrow><mi>i</mi><mi>j</mi></mrow><mrow><mi>h</mi></mrow></msubsup>"),
        ("x₀_c", "<msub><mi>x</mi><mrow><mn>0</mn><mo>,</mo><mi>c</mi></mrow></msub>"),
        ("Σ_{i∈S} s_i", "<mi>i</mi><mo>∈</mo><mi>S</mi>"),
        ("Ā", '<mover accent="true"><mi>A</mi><mo>¯</mo></mover>'),
        ("softmax(vvᵀ/√d)", "<msqrt><mi>d</mi></msqrt>"),
        ("mean_α f", '<msub><mi mathvariant="normal">mean</mi><mrow><mi>α</mi></mrow></msub>'),
        ("Σ_mask s⁺", "<mtext>mask</mtext>"),
        ("(I + A)/2", '<mfrac displaystyle="true"><mrow><mi>I</mi>'),
        ("y(all tokens)", "<mtext>all\u00a0tokens</mtext>"),
    ],
)
def test_how_it_is_set(written: str, inside: str) -> None:
    assert inside in formula.text(written)


@pytest.mark.parametrize(
    "prose",
    [
        "a patch in no mask gets the mean of all",
        "rows normalised; the last ones end at the border (1/6 each beside, 1/12 each across)",
        "completeness_error, start_layer, in_mask",
        "0 … 1, lower is better",
        "the image's patches, k-means",
        "the attention head that lies in the last layer",
    ],
)
def test_prose_stays_prose(prose: str) -> None:
    assert formula.text(prose) == prose.replace("'", "&#x27;")
    assert formula.text(f"x, {prose}").startswith("<math><mi>x</mi></math>, ")


def test_names_in_backticks_are_code() -> None:
    assert formula.text("y: the score, or what `of` says <") == (
        "<math><mi>y</mi></math>: the score, or what <code>of</code> says &lt;"
    )


def test_pages_show_it_without_the_network() -> None:
    """MathML needs neither a script nor a font from elsewhere."""
    pytest.importorskip("mkdocs", reason="the site needs pip install 'vitreous[docs]'")
    from _make import declared

    shown = declared.opening(METHODS["gae"])[-1]
    assert shown.startswith('<div class="formula"><math>') and "mean" in shown
    assert formula.text(declared.NOTATION).count("<math>") > 10
    for file in (ROOT / "mkdocs.yml", *(ROOT / "docs" / "theme").iterdir()):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"mathjax|katex|cdn|url\(\s*[\"']?http|@import", text, re.IGNORECASE), file
