"""The page's files, read once at start; requests look them up by name."""

from __future__ import annotations

import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from vitreous.web.problems import answer

FOLDER = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".svg": "image/svg+xml", ".webp": "image/webp"}


@dataclass(frozen=True)
class File:
    held: bytes
    kind: str
    tag: str


class Statics:
    def __init__(self, folder: Path = FOLDER) -> None:
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        self.files = {f"/{path.relative_to(folder).as_posix()}": load(path) for path in found}
        if "/index.html" in self.files:
            self.files["/"] = self.files["/index.html"]

    async def get(self, request: Request) -> Response:
        file = self.files.get(request.url.path)
        if file is None:
            return answer(404, "there is nothing here")
        headers = {"ETag": file.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.held, media_type=file.kind, headers=headers)


def load(path: Path) -> File:
    held = path.read_bytes()
    kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return File(held, kind, f'"{hashlib.sha256(held).hexdigest()[:16]}"')
