"""The OpenAPI schema as a plain page: no scripts, nothing from elsewhere."""

from __future__ import annotations

import json
from typing import Any

from vitreous._support.templates import render


def page(schema: dict[str, Any]) -> str:
    """Every route and every object of the API."""
    objects = {name: json.dumps(told, indent=1) for name, told in schema["components"]["schemas"].items()}
    version = schema["info"]["version"]
    return render("vitreous.web", "api.html.j2", version=version, paths=schema["paths"], objects=objects)
