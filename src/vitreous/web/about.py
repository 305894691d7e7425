"""A method or a metric in full: its formula as MathML, its options, where it comes from, and its known limits."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal
from xml.etree import ElementTree

from fastapi import APIRouter
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse
from markupsafe import Markup
from pydantic import BaseModel

from vitreous._support import formula
from vitreous._support.templates import render
from vitreous.declaration import takes, typed
from vitreous.references import cited
from vitreous.registry import METHODS, METRICS, Declared, Method, Metric
from vitreous.version import VERSION
from vitreous.web.limits import bounded
from vitreous.web.problems import Problem

LIMITS = (  # in the installed package, and in a checkout
    Path(__file__).parents[1] / "assets" / "limits.md",
    Path(__file__).parents[3] / "docs" / "limits.md",
)
PIECE = re.compile(r"`(?P<code>[^`]+)`|\*{1,2}(?P<em>[^*]+)\*{1,2}|\[(?P<link>[^\]]+)\]\([^)]*\)")
Kind = Literal["methods", "metrics"]
Name = Annotated[str, InPath(max_length=100, examples=["gae"])]
Tree = list[Any]  # [name, {attribute: value}, text or tree, …]

router = APIRouter()
pages = APIRouter(include_in_schema=False)


class Option(BaseModel):
    name: str
    default: str
    takes: str
    help: str


class About(BaseModel):
    kind: Kind
    name: str
    family: str
    summary: str
    formula: Tree  # of a <span>: words and MathML
    facts: dict[str, str]
    reference: str | None
    options: list[Option]
    limits: list[Tree]  # paragraphs; empty where none are known


@router.get("/methods/{name}")
async def method(name: Name) -> About:
    """A method in full."""
    return about("methods", name)


@router.get("/metrics/{name}")
async def metric(name: Name) -> About:
    """A metric in full."""
    return about("metrics", name)


@pages.get("/methods/{name}")
async def method_page(name: Name) -> HTMLResponse:
    return page(about("methods", name))


@pages.get("/metrics/{name}")
async def metric_page(name: Name) -> HTMLResponse:
    return page(about("metrics", name))


def about(kind: Kind, name: str) -> About:
    known: dict[str, Declared] = dict(METHODS if kind == "methods" else METRICS)
    if name not in known:
        raise Problem(404, f"there is no {kind[:-1]} {name}; GET /api/info lists all {kind}")
    one = known[name]
    return About(
        kind=kind,
        name=name,
        family=one.family,
        summary=one.summary,
        formula=typeset(one.formula),
        facts=facts(one),
        reference=cited(one.cite) if one.cite else None,
        options=[
            Option(name=key, default=typed(told.get("default")), takes=takes(told), help=told.get("description", ""))
            for key, told in bounded(one).items()
        ],
        limits=known_limits().get(name, []),
    )


def page(told: About) -> HTMLResponse:
    """The same as a page without scripts."""
    limits = [markup(paragraph) for paragraph in told.limits]
    return HTMLResponse(
        render("vitreous.web", "about.html.j2", one=told, formula=markup(told.formula), limits=limits, version=VERSION)
    )


def facts(one: Declared) -> dict[str, str]:
    if isinstance(one, Method):
        signed = one.is_signed(one.check({}))
        sign = "signed: evidence for and against the target" if signed else "unsigned: no evidence against the target"
        if one.family == "control":
            sign = "a control: it says nothing about the model"
        elif one.level:
            sign = "a level: only differences are meaningful"
        return {
            "map": sign,
            "depends on the target": "yes" if one.targeted else "no: the same map for every class",
            "needs": "attention from token to token" if one.attention else "tokens" if one.tokens else "any network",
        }
    assert isinstance(one, Metric)
    return {
        "better": one.direction(one.check({})),
        "needs": "masks or boxes of the object" if one.masks else "the map and the model",
    }


# --------------------------------------------------------------------------------------------------------------- trees


def typeset(written: str) -> Tree:
    """A formula of a docstring with its prose, as a tree of MathML."""
    return tree(ElementTree.fromstring(f"<span>{formula.text(written)}</span>"))


def tree(node: ElementTree.Element) -> Tree:
    made: Tree = [node.tag, dict(node.attrib)]
    if node.text:
        made.append(node.text)
    for child in node:
        made.append(tree(child))
        if child.tail:
            made.append(child.tail)
    return made


def markup(given: Tree) -> Markup:
    """The HTML of a tree; every text is escaped."""
    name, attributes, *children = given
    said = Markup("").join(markup(child) if isinstance(child, list) else child for child in children)
    told = Markup("").join(Markup(' {}="{}"').format(key, value) for key, value in attributes.items())
    return Markup("<{0}{1}>{2}</{0}>").format(name, told, said)


@cache
def known_limits() -> dict[str, list[Tree]]:
    """What docs/limits.md says of each method and metric, as paragraphs."""
    file = next((path for path in LIMITS if path.exists()), None)
    if file is None:
        return {}
    parts = re.split(r"^#{2,3} (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = {name.strip("`"): text for name, text in zip(parts[1::2], parts[2::2]) if name.startswith("`")}
    return {name: [paragraph(one) for one in text.strip().split("\n\n")] for name, text in sections.items()}


def paragraph(text: str) -> Tree:
    """Markdown of one paragraph; links keep their words only, because their pages are not in the package."""
    text = " ".join(text.split())
    made: Tree = ["p", {}]
    end = 0
    for found in PIECE.finditer(text):
        made.append(text[end : found.start()])
        if found["link"]:
            made += paragraph(found["link"])[2:]
        else:
            made.append(["code", {}, found["code"]] if found["code"] else ["em", {}, found["em"]])
        end = found.end()
    return [part for part in (*made, text[end:]) if part != ""]
