"""HTML from Jinja2 templates, which lie in a package's `templates` folder; every value is escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(package: str, name: str, **values: Any) -> Markup:
    """Render the template `name` of a package; an undefined variable is an error."""
    return Markup(environment(package).get_template(name).render(values))


@cache
def environment(package: str) -> Environment:
    """The template environment of a package. Pass HTML as `Markup`; everything else is escaped."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
