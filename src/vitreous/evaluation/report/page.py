"""What all pages share: one file, nothing from the network, figures as part of it."""

from __future__ import annotations

import base64
import html
import io
import re
from importlib.resources import files
from typing import TYPE_CHECKING

from matplotlib import rc_context
from PIL import Image

from vitreous.plot.colour import LINE_CONTROL, LINES
from vitreous.plot.sheet import BAR, GREY, INK, PALE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THUMB = 264  # pixels of an example: twice what is seen
text = html.escape


def shell(title: str, body: str) -> str:
    """A whole page; it asks nothing of the network."""
    style = (files("vitreous.evaluation.report") / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def shade(colour: str) -> str:
    """A line's colour in either theme."""
    return f"var(--c{colour.lower().removeprefix('#')})"


def inline_svg(figure: Figure, said: str) -> str:
    """A figure as part of the page: real letters, the page's colours, nothing that points outside."""
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
    return drawn.replace("<svg", f'<svg role="img" aria-label="{text(said)}"', 1)


def data_uri(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    scale = min(1.0, THUMB / max(picture.size))
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    picture.resize(size).save(buffer, "WEBP", quality=82)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# -------------------------------------------------------------------------------------------------------- the rest
