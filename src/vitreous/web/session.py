"""The page as one file that opens without a server: its modules, and the answers of one session."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import lru_cache, partial
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from vitreous.models.fingerprint import fingerprint
from vitreous.version import VERSION
from vitreous.web import bundle
from vitreous.web.common import Served
from vitreous.web.engine import Served as ServedModel
from vitreous.web.snippet import bare, checks, loaded, words

router = APIRouter()
INLINE = re.compile(r"<(script|style)([^>]*)>(.*?)</\1>", re.DOTALL)


@router.get("/page", response_class=HTMLResponse)
async def page(engine: Served) -> HTMLResponse:
    """The page without a session; the browser, which knows what was answered, writes it where it says `null`."""
    models = {served.name: await engine.read(partial(told, served)) for served in engine.models.values()}
    about = json.dumps({"version": VERSION, "models": models})
    return HTMLResponse(shell(about), headers={"Cache-Control": "no-store"})


def told(served: ServedModel) -> dict[str, Any]:
    """Which weights a model has, and the command that serves it; no folder of this computer."""
    files = [f"{name}: SHA-256 {digest}" for name, digest in checks(served.source)]
    weights = "; ".join([f"fingerprint {fingerprint(served.model)}", *files])
    return {"weights": weights, "serve": words("vitreous", "serve", *loaded(bare(served.source)), "--open")}


@lru_cache(maxsize=4)
def shell(about: str) -> str:
    """The document, which may load nothing: its own scripts and styles are allowed by their hashes."""
    html = bundle.document("saved.js", {"about": about, "session": "null"})
    found = [(kind, text) for kind, more, text in INLINE.findall(html) if "application/json" not in more]
    allowed = {kind: " ".join(hashed(text) for other, text in found if other == kind) for kind in ("script", "style")}
    policy = (
        f"default-src 'none'; script-src {allowed['script']} data:; style-src {allowed['style']}; img-src data: blob:"
    )
    return html.replace("<head>", f'<head>\n  <meta http-equiv="Content-Security-Policy" content="{policy}">', 1)


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
