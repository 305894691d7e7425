"""The page as one HTML document that needs no server: for notebooks and for saved sessions.

Styles and modules are written into the document; an import map gives each module its text. `entry` is the module that
starts: it chooses a transport (transport.js) and then imports app.js.
"""

from __future__ import annotations

import base64
import json
import re
from html import escape
from pathlib import Path

from vitreous.web.statics import FOLDER, TYPES

SPECIFIER = re.compile(r"""(?<=["'])\./(?=[\w/]+\.js["'])""")
SCRIPT = '<script type="module" src="/app.js"></script>'
STYLE = re.compile(r'<link rel="stylesheet" href="/([\w.]+)">')
ICON = 'href="/icon.svg"'


def document(entry: str, data: dict[str, str] | None = None) -> str:
    """One HTML document; `data` is given to the modules as <script type="application/json" id=KEY>."""
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    html = STYLE.sub(lambda found: f"<style>{(FOLDER / found[1]).read_text(encoding='utf-8')}</style>", html)
    html = html.replace(ICON, f'href="{data_url(FOLDER / "icon.svg")}"')
    held = "".join(held_data(key, text) for key, text in (data or {}).items())
    start = f'<script type="module">import "vitreous/{entry}";</script>'
    if SCRIPT not in html:
        raise AssertionError("index.html starts app.js in another way; tell bundle.py")
    return html.replace(SCRIPT, f'{held}<script type="importmap">{json.dumps({"imports": modules()})}</script>{start}')


def modules() -> dict[str, str]:
    """Each module of the page by its name, as a data: address; modules import each other by these names."""
    return {f"vitreous/{path.name}": module(path) for path in sorted(FOLDER.glob("*.js"))}


def module(path: Path) -> str:
    text = SPECIFIER.sub("vitreous/", path.read_text(encoding="utf-8"))
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def data_url(path: Path) -> str:
    return f"data:{TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def held_data(key: str, text: str) -> str:
    """JSON within HTML: no `<` in it, so that nothing ends the element early."""
    return f'<script type="application/json" id="{escape(key)}">{text.replace("<", chr(92) + "u003c")}</script>'
