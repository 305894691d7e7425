"""The page as one document: every module and style within it, nothing asked of a server."""

from __future__ import annotations

import base64
import json
import re

import pytest

pytest.importorskip("fastapi", reason="the page needs pip install 'vitreous[web]'")

from vitreous.web import bundle
from vitreous.web.statics import FOLDER

IMPORT = re.compile(r'''(?:from|import)\s*\(?\s*"([^"]+\.js)"''')


def imports(html: str) -> dict[str, str]:
    found = re.search(r'<script type="importmap">(.*?)</script>', html)
    assert found is not None
    return dict(json.loads(found[1])["imports"])


def test_every_import_is_in_the_document() -> None:
    html = bundle.document("app.js")
    held = imports(html)
    assert set(held) == {f"vitreous/{path.name}" for path in FOLDER.glob("*.js")}
    for address in held.values():
        text = base64.b64decode(address.partition(",")[2]).decode()
        assert {name for name in IMPORT.findall(text) if not name.startswith("vitreous/")} == set()
    assert 'import "vitreous/app.js"' in html


def test_nothing_is_asked_of_a_server() -> None:
    html = bundle.document("app.js")
    shell = re.sub(r"<script.*?</script>|<style>.*?</style>|<noscript>.*?</noscript>", "", html, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', shell) == []
    assert html.count("<style>") == len(list(FOLDER.glob("*.css")))


def test_data_cannot_end_its_element() -> None:
    told = json.dumps({"name": "</script><script>alert(1)</script>"})
    html = bundle.document("app.js", {"held": told})
    held = re.search(r'id="held">(.*?)</script>', html)
    assert held is not None and json.loads(held[1]) == json.loads(told)


def test_no_rule_of_the_styles_contradicts_another_one_of_the_same_name() -> None:
    """A class that two parts of the page use for different things shows here."""
    held: dict[tuple[str, str], str] = {}
    for path in sorted(FOLDER.glob("*.css")):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        plain = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", text)
        for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", plain):
            names = {part.partition(":")[0].strip() for part in body.split(";") if ":" in part}
            for key in {(" ".join(selectors.split()), name) for name in names}:
                assert key not in held, f"{key[0]} sets {key[1]} in {held[key]} and in {path.name}"
                held[key] = path.name
