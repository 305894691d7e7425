"""Optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from vitreous.errors import ModelError


def needs(package: str, extra: str) -> Any:
    """Import an optional package; raise with the install command if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ModelError(f"this needs {package}: pip install 'vitreous[{extra}]'") from None
