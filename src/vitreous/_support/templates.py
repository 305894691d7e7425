"""HTML from Jinja2 templates: a folder `templates` beside the modules that fill them, every value escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(package: str, name: str, **values: Any) -> Markup:
    """The template `name` of a package, filled in; a name that is not given is an error."""
    return Markup(environment(package).get_template(name).render(values))


@cache
def environment(package: str) -> Environment:
    """A package's templates. Text that is HTML already is a `Markup`; all else is escaped."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
