"""Server-sent events, as they are written."""

from __future__ import annotations

import json
from typing import Any


def sse(name: str, data: dict[str, Any], number: int | None = None) -> bytes:
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
