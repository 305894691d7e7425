"""What all reports share: one file that works offline, with its figures inside."""

from __future__ import annotations

import base64
import io
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape
from matplotlib import rc_context
from PIL import Image

from vitreous._support.templates import render
from vitreous.plot.colour import LINE_CONTROL, LINES
from vitreous.plot.sheet import BAR, GREY, INK, PALE
from vitreous.version import VERSION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THUMB = 264  # pixels of an example: twice what is seen
HOME = "vitreous.evaluation.report"


def whole_page(template: str, **values: Any) -> str:
    """A template that extends page.html.j2, filled in."""
    style = Markup((files(HOME) / "style.css").read_text(encoding="utf-8"))
    return str(render(HOME, template, style=style, version=VERSION, **values))


def shade(colour: str) -> str:
    """A line's colour in either theme."""
    return f"var(--c{colour.lower().removeprefix('#')})"


def inline_svg(figure: Figure, said: str) -> Markup:
    """A figure as part of the page: text stays text, colours are the page's, nothing points outside."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": said}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r' (width|height)="[\d.]+pt"', "", drawn, count=2)
    named = {INK: "--ink", GREY: "--grey", PALE: "--pale", BAR: "--bar"}
    for colour in (*LINES, LINE_CONTROL):
        drawn = drawn.replace(colour.lower(), shade(colour))
    for colour, variable in named.items():
        drawn = drawn.replace(colour.lower(), f"var({variable})")
    return Markup(drawn.replace("<svg", f'<svg role="img" aria-label="{escape(said)}"', 1))


def data_uri(image: Image.Image) -> str:
    """A thumbnail of an image as a data URI."""
    buffer = io.BytesIO()
    scale = min(1.0, THUMB / max(image.size))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    image.resize(size).save(buffer, "WEBP", quality=82)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
