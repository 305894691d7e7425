"""Errors as application/problem+json: a sentence for the user, never a traceback."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from vitreous.errors import VitreousError, one_line

TITLES = {
    400: "bad request",
    401: "token needed",
    403: "not from here",
    404: "not found",
    405: "method not allowed",
    408: "too slow",
    413: "too large",
    415: "not an image",
    421: "other host",
    422: "cannot be done",
    429: "too many requests",
    500: "internal error",
    503: "busy",
}

INTERNAL = "internal error; see the server log"


class Problem(HTTPException):
    """An error response."""

    def __init__(self, status: int, detail: str, retry: int | None = None) -> None:
        headers = {} if retry is None else {"Retry-After": str(retry)}
        super().__init__(status, detail, headers)


def described(status: int, detail: str) -> dict[str, Any]:
    title = TITLES.get(status, "error")
    return {"type": f"about:blank#{title.replace(' ', '-')}", "title": title, "status": status, "detail": detail}


def of_error(error: BaseException) -> dict[str, Any]:
    """The message of a map that failed."""
    if isinstance(error, Problem):
        return described(error.status_code, str(error.detail))
    if isinstance(error, VitreousError):
        return described(422, one_line(error))
    return described(500, INTERNAL)


def answer(status: int, detail: str, headers: Any = None) -> JSONResponse:
    return JSONResponse(described(status, detail), status, dict(headers or {}), "application/problem+json")


async def on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return answer(error.status_code, str(error.detail), error.headers)


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    return answer(422, f"{where}: {first['msg']}"[:300])


async def on_ours(request: Request, error: Exception) -> JSONResponse:
    return answer(422, one_line(error))


async def on_anything(request: Request, error: Exception) -> JSONResponse:
    return answer(500, INTERNAL)
