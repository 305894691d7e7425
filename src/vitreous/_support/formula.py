"""Formulas as they are written in docstrings, in Unicode, typeset as MathML.

What is a formula and what is prose is seen from the letters: words of two letters and more are prose unless they are
functions; single letters, Greek letters and what is joined to them are set.

    text("ρᵀ Π_l (r·I + (1−r)·Ā⁽ˡ⁾), rows normalised")  →  <math>…</math>, rows normalised
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

UP = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ᵀʰʲˡⁱᵏⁿ", "0123456789+−()Thjlikn"))
DOWN = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₕᵢⱼₖₗₘₙₜ", "0123456789+−()hijklmnt"))
OVER = {"\u0304": "¯", "\u0303": "~", "\u0302": "^"}  # combining marks
FUNCTIONS = {
    *("argmax", "corr", "cos", "diag", "exp", "ln", "max", "mean", "min", "sign", "softmax", "MLP"),
    *("SmoothGrad",),
}
LARGE, PREFIX = {"Σ": "∑", "Π": "∏", "∫": "∫"}, "∂∇Δ"
OPENING = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}
OPERATORS, BARS = "+−±·⊙×/=:←<>≤≥∈∩∪∘√…'", "|‖"
GAP = '<mspace width="0.17em"/>'
TOKEN = re.compile(
    r"(?P<code>`[^`]*`)|(?P<space>\s+)|(?P<number>\d+(?:\.\d+)?)|(?P<assign>:=)"
    r"|(?P<word>[A-Za-z]{2,}(?:_[A-Za-z]{3,})+|[A-Za-z]+(?:[-'’][a-z]+)*)"
    r"|(?P<under>_(?:\{[^}]*\}|[A-Za-zα-ω0-9]+))|(?P<power>\^(?:\{[^}]*\}|[A-Za-z0-9]))"
    rf"|(?P<up>[{''.join(UP)}]+)|(?P<down>[{''.join(DOWN)}]+)|(?P<over>[{''.join(OVER)}])|(?P<other>.)"
)


@dataclass
class Item:
    """A part of a formula. `kind`: symbol, function, number, operator, group, word, space, or code."""

    kind: str
    text: str
    html: str = ""  # of its base
    inner: list[Item] = field(default_factory=list)  # of a group
    below: list[str] = field(default_factory=list)
    above: list[str] = field(default_factory=list)

    @property
    def mathematical(self) -> bool:
        """Whether it is set, wherever it stands."""
        if self.kind == "group":
            return bool(self.above or self.below) or any(one.mathematical for one in self.inner)
        return self.kind in ("symbol", "function")

    @property
    def plain(self) -> str:
        """As it was written."""
        if self.kind != "group":
            return self.text
        return self.text[0] + "".join(one.plain for one in self.inner) + self.text[1:]


def text(formula: str) -> str:
    """HTML of a formula with its prose."""
    return prose(grouped(iter([*scanned(" ".join(formula.split()))])))


def prose(items: list[Item]) -> str:
    """Words as they are, and the formulas between them."""
    parts: list[str] = []
    run: list[Item] = []
    for place, one in enumerate(items):
        if joins(items, place):
            run.append(one)
            continue
        parts.append(set_run(run))
        run = []
        if one.kind == "group":
            parts.append(escape(one.text[0]) + prose(one.inner) + escape(one.text[1]))
        else:
            parts.append(f"<code>{escape(one.text[1:-1])}</code>" if one.kind == "code" else escape(one.text))
    return "".join([*parts, set_run(run)])


def joins(items: list[Item], place: int) -> bool:
    """Whether an item belongs to a formula rather than to the prose."""
    one = items[place]
    if one.kind != "group":
        return one.kind in ("symbol", "function", "number", "operator", "space")
    if one.above or one.below or (place and items[place - 1].mathematical):  # (…)⁺, f(…)
        return True
    if one.inner and one.inner[0].kind == "word":
        return False
    return one.mathematical or all(part.kind in ("number", "operator", "space") for part in one.inner)


def set_run(run: list[Item]) -> str:
    """A formula as MathML, or as it was written where it has no symbol; spaces at its ends stay outside."""
    if not any(one.mathematical for one in run):
        return escape("".join(one.plain for one in run))
    first = next(i for i, one in enumerate(run) if not loose(one))
    last = next(i for i in reversed(range(len(run))) if not loose(run[i]))
    outside = ["".join(one.plain for one in part) for part in (run[:first], run[last + 1 :])]
    return f"{escape(outside[0])}<math>{row(run[first : last + 1])}</math>{escape(outside[1])}"


def loose(one: Item) -> bool:
    """Space and punctuation, which are not set at the end of a formula."""
    return one.kind == "space" or one.text in (":", "'")


# ------------------------------------------------------------------------------------------------------------- reading


def scanned(formula: str) -> Iterator[Item]:
    """The items of a formula without groups: scripts and marks are joined to what they follow."""
    last: Item | None = None
    formula = decomposed(formula)
    for found in TOKEN.finditer(formula):
        kind, said = str(found.lastgroup), found[0]
        if kind in ("under", "power", "up", "down") and last is not None and last.kind != "space":
            scripts = last.below if kind in ("under", "down") else last.above
            scripts.append(script(kind, said))
            last.text += said
            continue
        if kind == "over" and last is not None:
            last.html = f'<mover accent="true">{last.html}<mo>{OVER[said]}</mo></mover>'
            last.text += said
            continue
        for last in made(kind, said, formula[found.end() :]):
            yield last


def decomposed(formula: str) -> str:
    """Ā as A and a mark over it; nothing else is taken apart."""
    return "".join(
        unicodedata.normalize("NFD", c) if unicodedata.normalize("NFD", c)[-1] in OVER else c for c in formula
    )


def script(kind: str, said: str) -> str:
    """MathML of an index or an exponent."""
    table = {"up": UP, "down": DOWN}.get(kind)
    words = "".join(table[c] for c in said) if table else said[1:].strip("{}")
    if re.fullmatch(r"[A-Za-z]{3,}", words):
        return f"<mtext>{escape(words)}</mtext>"
    return "".join(leaf(c) for c in words if c != " ")


def leaf(c: str) -> str:
    if c.isdigit():
        return f"<mn>{c}</mn>"
    return f"<mi>{escape(c)}</mi>" if c.isalpha() else f"<mo>{escape(c)}</mo>"


def made(kind: str, said: str, rest: str) -> list[Item]:
    if kind == "word":
        return worded(said, rest)
    if kind == "number":
        return [Item("number", said, f"<mn>{said}</mn>")]
    if kind in ("space", "code"):
        return [Item(kind, said)]
    if said in LARGE:
        return [Item("symbol", said, f'<mo stretchy="false" lspace="0" rspace="0.1em">{LARGE[said]}</mo>')]
    if said in PREFIX:
        return [Item("symbol", said, f'<mi mathvariant="normal">{said}</mi>')]
    if said == ":=":
        return [Item("operator", said, "<mo>≔</mo>")]
    if said in BARS:
        return [Item("operator", said, f'<mo stretchy="false" lspace="0" rspace="0">{said}</mo>')]
    if said in OPERATORS:
        return [Item("operator", said, f'<mo stretchy="false">{escape(said)}</mo>')]
    if said.isalpha():
        return [Item("symbol", said, f"<mi>{said}</mi>")]
    return [Item("operator" if said == "′" else "word", said, f"<mo>{escape(said)}</mo>")]


def worded(said: str, rest: str) -> list[Item]:
    """A letter, a function, or a word of prose."""
    scripted = rest[:1] in {"_", "^", *UP, *DOWN, *OVER}
    before_prose = bool(re.match(r"\s+[A-Za-z]{2,}\b(?!_.\b)(?!\()", rest)) and not is_function(rest.split()[0])
    if len(said) == 1:
        article = said == "a" and before_prose and not scripted
        return [Item("word" if article else "symbol", said, f"<mi>{said}</mi>")]
    if (said in FUNCTIONS and not before_prose) or (said in FUNCTIONS and scripted) or rest[:1] == "(":
        return [Item("function", said, f'<mi mathvariant="normal">{said}</mi>')]
    if len(said) == 2 and scripted and said.islower():  # vvᵀ
        return [Item("symbol", c, f"<mi>{c}</mi>") for c in said]
    return [Item("word", said)]


def is_function(word: str) -> bool:
    return re.split(r"[^A-Za-z]", word)[0] in FUNCTIONS


def grouped(items: Iterator[Item], end: str = "") -> list[Item]:
    """The same with brackets and what they hold as groups; scripts of a closing bracket are the group's."""
    found: list[Item] = []
    for one in items:
        bare = one.text[:1]
        if end and bare == end:
            found.append(Item("close", end, below=one.below, above=one.above))
            return found
        if bare in OPENING and one.kind == "word":
            inner = grouped(items, OPENING[bare])
            closing = inner.pop() if inner and inner[-1].kind == "close" else None
            if closing is None:
                found += [Item("word", bare), *inner]
            else:
                found.append(Item("group", bare + OPENING[bare], "", inner, closing.below, closing.above))
        elif found and found[-1].text == "√":
            root = f"<msqrt>{item(one, [])}</msqrt>"
            found[-1] = Item("symbol", found[-1].text + one.text, root)
        else:
            found.append(one)
    return found


# ------------------------------------------------------------------------------------------------------------- setting


def row(items: list[Item]) -> str:
    """MathML of a run, with fractions where a stroke stands between two factors without spaces."""
    out: list[tuple[Item, str]] = []
    place = 0
    while place < len(items):
        one = items[place]
        if one.text == "/" and (right := factor(items, place + 1)) and (left := taken(out)):
            over, under = left, "".join(naked(part) for part in items[place + 1 : right])
            out.append(
                (Item("symbol", "/"), f'<mfrac displaystyle="true"><mrow>{over}</mrow><mrow>{under}</mrow></mfrac>')
            )
            place = right
            continue
        before = next((last.kind for last, _ in reversed(out) if last.kind != "space"), "")
        gap = GAP if one.kind == "function" and before in ("symbol", "number") else ""
        out.append((one, gap + item(one, items[place + 1 : place + 2])))
        place += 1
    return "".join(html for _, html in out)


def factor(items: list[Item], start: int) -> int:
    """Where the factor that begins here ends; 0 if none does."""
    place = start
    while place < len(items) and items[place].text[:1] in PREFIX:
        place += 1
    ok = (
        place < len(items)
        and (items[place].kind in ("symbol", "number", "group"))
        and items[place].text[:1] not in LARGE
    )
    return place + 1 if ok else 0


def taken(out: list[tuple[Item, str]]) -> str:
    """The factors that end here, taken off what was set; nothing if something else does."""
    parts: list[str] = []
    while out and (last := out[-1][0]).kind in ("symbol", "number", "group"):
        if last.text[:1] in LARGE or last.text == "/":
            break
        out.pop()
        parts.insert(0, naked(last))
        if last.kind != "symbol":
            break
    return "".join(parts)


def naked(one: Item) -> str:
    """A factor of a fraction: the stroke replaces a group's brackets."""
    return row(one.inner) if one.kind == "group" and not (one.above or one.below) else item(one, [])


def item(one: Item, after: list[Item]) -> str:
    if one.kind == "space":
        return ""
    if one.kind in ("word", "code"):
        return f"<mtext>\u00a0{escape(one.text.strip('`'))}\u00a0</mtext>" if one.text[-1].isalnum() else leaf(one.text)
    if one.kind == "group":
        opening, closing = (f"<mo>{mark}</mo>" for mark in one.text)
        return scripts(one, f"<mrow>{opening}{sentence(one.inner)}{closing}</mrow>")
    gap = GAP if one.kind == "function" and not (after and after[0].kind == "group") else ""
    return scripts(one, one.html) + gap


def sentence(items: list[Item]) -> str:
    """What brackets hold: formulas, and words between them."""
    out: list[str] = []
    run: list[Item] = []
    for one in items:
        if one.kind == "word" and one.text[:1].isalnum():
            out.append(row(run))
            run = []
            if out[-1] == "" and len(out) > 1 and out[-2].endswith("\u00a0</mtext>"):  # words of one phrase
                before = out[-2].removesuffix("</mtext>")
                out[-2:] = [f"{before}{escape(one.text)}\u00a0</mtext>"]
            else:
                out.append(item(one, []))
        else:
            run.append(one)
    html = "".join([*out, row(run)])
    return re.sub("^<mtext>\u00a0", "<mtext>", re.sub("\u00a0</mtext>$", "</mtext>", html))


def scripts(one: Item, base: str) -> str:
    below, above = ("<mo>,</mo>".join(parts) for parts in (one.below, one.above))
    if below and above:
        return f"<msubsup>{base}<mrow>{below}</mrow><mrow>{above}</mrow></msubsup>"
    if below:
        return f"<msub>{base}<mrow>{below}</mrow></msub>"
    return f"<msup>{base}<mrow>{above}</mrow></msup>" if above else base
