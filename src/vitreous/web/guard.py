"""Access control, rate limits and size limits, checked before any route sees the request.

host     only names that this server has (a foreign page cannot reach it through its own name)
origin   /api answers no other site's page
token    where one was given at start: Authorization: Bearer, or ?token= once and a cookie from then on
rate     a bucket of tokens for each client
body     not longer than allowed, and not slower
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitreous.web.limits import Limits
from vitreous.web.problems import INTERNAL, Problem, answer

LOG = logging.getLogger("vitreous.web")
COOKIE = "vitreous"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class Guard:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, limits: Limits, hosts: Iterable[str] = LOOPBACK, token: str | None = None) -> None:
        self.app, self.limits, self.token = app, limits, token
        self.hosts = {host.lower() for host in hosts}
        self.rates = Rates(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, began = False, time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers["Server-Timing"] = f"total;dur={1000 * (time.perf_counter() - began):.2f}"
            await send(message)

        try:
            refused = self.refuse(scope)
            if refused is not None:
                await refused(scope, receive, sending)
                return
            await self.app(scope, Body(receive, self.limits, scope), sending)
        except Exception as error:
            LOG.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            if not started:
                await answer(500, INTERNAL)(scope, receive, sending)

    def refuse(self, scope: Scope) -> Response | None:
        """The response that replaces the application's, or None."""
        headers = Headers(scope=scope)
        client = scope["client"][0] if scope.get("client") else "?"
        try:
            self.check_rate(client)
            self.check_host(headers)
            self.check_origin(scope, headers)
            self.check_size(scope, headers)
            return self.check_token(scope, headers)
        except Problem as problem:
            return answer(problem.status_code, str(problem.detail), problem.headers)

    def check_rate(self, client: str) -> None:
        wait = self.rates.take(client)
        if wait > 0:
            raise Problem(429, "too many requests from this address; slow down", retry=math.ceil(wait))

    def check_host(self, headers: Headers) -> None:
        if host_of(headers.get("host", "")) not in self.hosts:
            raise Problem(421, "this server is not known by that name; start it with --allow-host NAME")

    def check_origin(self, scope: Scope, headers: Headers) -> None:
        if not scope["path"].startswith("/api"):
            return
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        foreign = site not in (None, "same-origin", "none")
        if origin is not None and scope["method"] not in ("GET", "HEAD"):
            foreign = foreign or authority(origin) != headers.get("host", "").lower()
        if foreign:
            raise Problem(403, "this was sent by a page of another site")

    def check_size(self, scope: Scope, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > most_bytes(scope["path"], self.limits):
            raise Problem(413, f"this is more than {most_bytes(scope['path'], self.limits) / 10**6:g} MB")

    def check_token(self, scope: Scope, headers: Headers) -> Response | None:
        if self.token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        asked = dict(query).get("token")
        if scope["method"] == "GET" and asked is not None and same(asked, self.token):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            path = "/" + scope["path"].lstrip("/\\")
            response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            response.set_cookie(COOKIE, sealed(self.token), httponly=True, samesite="strict", path="/")
            return response
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and same(bearer.strip(), self.token):
            return None
        if same(cookie_of(headers), sealed(self.token)):
            return None
        said = "this server wants its token: open it once as /?token=…, or send Authorization: Bearer …"
        return answer(401, said, {"WWW-Authenticate": "Bearer"})


def same(given: str, wanted: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def sealed(token: str) -> str:
    """The cookie's value, derived from the token."""
    return hmac.new(token.encode(), b"vitreous cookie", hashlib.sha256).hexdigest()


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


def most_bytes(path: str, limits: Limits) -> int:
    """The Content-Length of a request."""
    return {"/api/images": limits.upload_bytes, "/api/concepts": limits.concept_bytes}.get(path, limits.json_bytes)


class Body:
    """The body of a request, counted as it arrives."""

    def __init__(self, receive: Receive, limits: Limits, scope: Scope) -> None:
        self.receive, self.limits = receive, limits
        self.most, self.size, self.done = most_bytes(scope["path"], limits), 0, False
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

    def take(self, client: str) -> float:
        """Take a request from the bucket: zero, or the seconds to wait."""
        now = time.monotonic()
        held, when = self.buckets.pop(client, (float(self.limits.burst), now))
        held = min(float(self.limits.burst), held + (now - when) * self.limits.rate)
        wait = 0.0 if held >= 1 else (1 - held) / self.limits.rate
        self.buckets[client] = (held - 1 if wait == 0 else held), now
        while len(self.buckets) > self.limits.clients:
            self.buckets.popitem(last=False)
        return wait
