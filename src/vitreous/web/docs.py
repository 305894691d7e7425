"""The OpenAPI schema as a plain page: no scripts, nothing from elsewhere."""

from __future__ import annotations

import json
from html import escape
from typing import Any


def page(schema: dict[str, Any]) -> str:
    routes = [
        route(method, path, told) for path, methods in schema["paths"].items() for method, told in methods.items()
    ]
    models = [
        f'<h3 id="{escape(name)}">{escape(name)}</h3><pre>{escape(json.dumps(told, indent=1))}</pre>'
        for name, told in schema["components"]["schemas"].items()
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>vitreous API</title>'
        f"<h1>vitreous {escape(schema['info']['version'])}: API</h1>"
        '<p>The same for programs: <a href="/api/openapi.json">openapi.json</a></p>'
        f"{''.join(routes)}<h2>Objects</h2>{''.join(models)}</html>"
    )


def route(method: str, path: str, told: dict[str, Any]) -> str:
    parameters = [f"<li><code>{escape(p['name'])}</code> ({escape(p['in'])})</li>" for p in told.get("parameters", [])]
    said = escape(told.get("description") or told.get("summary", ""))
    body = reference(told.get("requestBody", {}))
    answers = ", ".join(status for status in told["responses"] if status.startswith("2"))
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{said}</p><ul>{''.join(parameters)}{body}</ul>"
        f"<p>answers {answers}</p>"
    )


def reference(body: dict[str, Any]) -> str:
    """What a body must be."""
    said = []
    for kind, told in body.get("content", {}).items():
        name = told.get("schema", {}).get("$ref", "").rpartition("/")[2]
        said.append(f'<li>body: {escape(kind)} <a href="#{escape(name)}">{escape(name)}</a></li>')
    return "".join(said)
