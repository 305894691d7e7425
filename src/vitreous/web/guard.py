"""Access control, rate limits and size limits, checked before any route sees the request.

host     only names that this server has (a foreign page cannot reach it through its own name)
origin   /api answers no other site's page
token    where the server has some: Authorization: Bearer, or ?token= once and a cookie from then on
rate     a bucket of requests for each token, or for each address where there is none
body     not longer than allowed, and not slower
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitreous.web.limits import Limits
from vitreous.web.notes import note_of, route_of
from vitreous.web.problems import INTERNAL, Problem, answer
from vitreous.web.tokens import Token, Tokens
from vitreous.web.watch import HEADERS as HEADERS
from vitreous.web.watch import LEAVING, Sending, Watch

LOG = logging.getLogger("vitreous.web")
COOKIE = "vitreous"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OPEN = ("/healthz", "/readyz")  # answered to anybody: they tell no more than yes or no


class Guard:
    """The outermost layer of the application."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        hosts: Iterable[str] = LOOPBACK,
        tokens: Tokens | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.app, self.limits, self.tokens = app, limits, tokens or Tokens()
        self.hosts = {host.lower() for host in hosts}
        self.rates = Rates(limits)
        self.watch = watch or Watch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sending = Sending(send, scope)
        with self.watch.over(sending):
            try:
                refused = self.refuse(scope)
                if refused is not None:
                    await refused(scope, receive, sending)
                    return
                await self.app(scope, Body(receive, self.limits, self.most_bytes(scope)), sending)
            except Exception as error:
                LOG.error("%s %s failed", scope["method"], route_of(scope), exc_info=error)
                if not sending.started:
                    await answer(500, INTERNAL)(scope, receive, sending)
        await sending.finish()

    def refuse(self, scope: Scope) -> Response | None:
        """The response that replaces the application's, or None."""
        headers, note = Headers(scope=scope), note_of(scope)
        if scope["path"] in OPEN:
            return None
        try:
            token, asked = self.identify(scope, headers)
            if token is not None:
                note.client, note.token, note.jobs = f"token {token.name}", token.name, token.jobs
            self.check_rate(note.client, token)
            self.check_host(headers)
            self.check_origin(scope, headers)
            self.check_size(scope, headers)
            self.check_leaving(scope)
            if asked and token is not None:
                return welcome(scope, token)
            if self.tokens and token is None:
                said = "this server wants its token: open it once as /?token=…, or send Authorization: Bearer …"
                raise Refused("token", 401, said, {"WWW-Authenticate": "Bearer"})
            return None
        except Refused as refused:
            note.rejected = refused.reason
            return answer(refused.status_code, str(refused.detail), refused.headers)

    def identify(self, scope: Scope, headers: Headers) -> tuple[Token | None, bool]:
        """The token that a request brings, and whether it asks for a cookie."""
        if not self.tokens:
            return None, False
        if scope["method"] == "GET":
            asked = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)).get("token")
            found = self.tokens.find(asked) if asked is not None else None
            if found is not None:
                return found, True
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        found = self.tokens.find(bearer.strip()) if kind.lower() == "bearer" else None
        return found or self.tokens.of_cookie(cookie_of(headers)), False

    def check_rate(self, client: str, token: Token | None) -> None:
        wait = self.rates.take(client, token.rate if token else None, token.burst if token else None)
        if wait > 0:
            whom = "with this token" if token else "from this address"
            said = f"too many requests {whom}; slow down"
            raise Refused("rate", 429, said, {"Retry-After": str(math.ceil(wait))})

    def check_host(self, headers: Headers) -> None:
        if host_of(headers.get("host", "")) not in self.hosts:
            raise Refused("host", 421, "this server is not known by that name; start it with --allow-host NAME")

    def check_origin(self, scope: Scope, headers: Headers) -> None:
        if not scope["path"].startswith("/api"):
            return
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        foreign = site not in (None, "same-origin", "none")
        if origin is not None and scope["method"] not in ("GET", "HEAD"):
            foreign = foreign or authority(origin) != headers.get("host", "").lower()
        if foreign:
            raise Refused("origin", 403, "this was sent by a page of another site")

    def check_size(self, scope: Scope, headers: Headers) -> None:
        length, most = headers.get("content-length", ""), self.most_bytes(scope)
        if length.isdigit() and int(length) > most:
            raise Refused("size", 413, f"this is more than {most / 10**6:g} MB")

    def check_leaving(self, scope: Scope) -> None:
        """While the server stops, results of what runs can be fetched, but nothing is begun."""
        if self.watch.leaving and scope["method"] not in ("GET", "HEAD", "DELETE"):
            raise Refused("leaving", 503, LEAVING, {"Retry-After": "5", "Connection": "close"})

    def most_bytes(self, scope: Scope) -> int:
        """The longest body of a request."""
        path, name = scope["path"], note_of(scope).token
        most = {"/api/images": self.limits.upload_bytes, "/api/concepts": self.limits.concept_bytes}.get(path)
        own = next((token.upload_bytes for token in self.tokens.known if token.name == name), None)
        if most is None:
            return self.limits.json_bytes
        return most if own is None else min(most, own)


class Refused(Problem):
    """A request that no route may see, and the reason in one word."""

    def __init__(self, reason: str, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail)
        self.reason, self.headers = reason, headers or {}


def welcome(scope: Scope, token: Token) -> Response:
    """Give the cookie, and the same address without the token."""
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    rest = urlencode([pair for pair in query if pair[0] != "token"])
    path = "/" + scope["path"].lstrip("/\\")
    response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
    response.set_cookie(COOKIE, token.cookie, httponly=True, samesite="strict", path="/")
    return response


def cookie_of(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def host_of(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


class Body:
    """The body of a request, counted as it arrives."""

    def __init__(self, receive: Receive, limits: Limits, most: int) -> None:
        self.receive, self.limits = receive, limits
        self.most, self.size, self.done = most, 0, False
        self.until = time.monotonic() + limits.seconds

    async def __call__(self) -> Message:
        if self.done:  # what follows is the end of the connection, whenever that comes
            return await self.receive()
        try:
            message = await asyncio.wait_for(self.receive(), max(0.0, self.until - time.monotonic()))
        except TimeoutError:
            raise Problem(408, f"the body took more than {self.limits.seconds:.0f} seconds to arrive") from None
        if message["type"] == "http.request":
            self.size += len(message.get("body", b""))
            self.done = not message.get("more_body", False)
            if self.size > self.most:
                raise Problem(413, f"this is more than {self.most / 10**6:g} MB")
        return message


class Rates:
    """A bucket for each client: `burst` requests at once, `rate` a second in the long run."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when

    def take(self, client: str, rate: float | None = None, burst: int | None = None) -> float:
        """Take a request from the bucket: zero, or the seconds to wait."""
        now, rate, burst = time.monotonic(), rate or self.limits.rate, burst or self.limits.burst
        held, when = self.buckets.pop(client, (float(burst), now))
        held = min(float(burst), held + (now - when) * rate)
        wait = 0.0 if held >= 1 else (1 - held) / rate
        self.buckets[client] = (held - 1 if wait == 0 else held), now
        while len(self.buckets) > self.limits.clients:
            self.buckets.popitem(last=False)
        return wait
