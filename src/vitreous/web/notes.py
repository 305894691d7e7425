"""What is noted about a request while it is answered: for limits, metrics and logs."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

KEY = "vitreous"  # where the scope holds the note
REQUEST_ID = "x-request-id"
SANE = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEALTH = ("/healthz", "/readyz", "/metrics")
FILES, PAGE = "/{path:path}", "page"  # the route of the page's files, and how it is called
OTHER = "other"  # the route of a request that no route answers


@dataclass
class Note:
    request: str  # its id
    client: str = "?"  # whose limits count: a token or an address
    token: str | None = None  # the token's name, never the token
    jobs: int | None = None  # that this client may have at a time; None: as many as anybody
    others: int = 0  # jobs that this client has at other workers
    worker: int | None = None  # that answers
    answered_by: str | None = None  # the route, where another process knows it
    rejected: str | None = None  # why the guard refused


class Visitor(str):
    """A client's name, with the jobs that it may have at a time."""

    jobs: int | None = None
    others: int = 0


def note_of(scope: Scope) -> Note:
    """The note of a request, made when it is first asked for."""
    if KEY not in scope:
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        client = scope["client"][0] if scope.get("client") else "?"
        scope[KEY] = Note(asked if SANE.fullmatch(asked) else secrets.token_hex(8), client)
    found: Note = scope[KEY]
    return found


def visitor_of(scope: Scope) -> Visitor:
    note = note_of(scope)
    found = Visitor(note.client)
    found.jobs, found.others = note.jobs, note.others
    return found


def route_of(scope: Scope) -> str:
    """The template of the route, which holds no ids; one name for all files of the page."""
    known, path = note_of(scope).answered_by, getattr(scope.get("route"), "path", None)
    if known is not None:
        return known
    if scope["path"] in HEALTH:
        return str(scope["path"])
    if path in (None, FILES):
        return PAGE if "endpoint" in scope else OTHER
    return f"/api{path}" if scope["path"].startswith("/api/") and not path.startswith("/api/") else str(path)
