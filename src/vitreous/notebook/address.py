"""What a view shows, as the page writes it in its address (state.js)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode


def text(method: str, options: Mapping[str, Any]) -> str:
    """rollout;discard=0.9;heads=max"""
    told = (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items())
    return ";".join([method, *told])


def address(pairs: Iterable[tuple[str, str]]) -> str:
    return f"#{urlencode(list(pairs), safe=':;=')}"
