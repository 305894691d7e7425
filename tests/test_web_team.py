"""A server for a team, without starting one: tokens, health, metrics, logs, and the front with workers of straw."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "multipart", "httpx", "prometheus_client"):
    pytest.importorskip(needed, reason="the tests of the server need pip install 'vitreous[web]'")

import httpx
import zoo
from machine import PATIENCE
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from vitreous import Model
from vitreous.errors import OptionError
from vitreous.web import ids, logs
from vitreous.web.app import create_app
from vitreous.web.engine import Engine, Source
from vitreous.web.front import COOKIE, create_front
from vitreous.web.guard import HEADERS, Guard
from vitreous.web.limits import Limits
from vitreous.web.settings import Settings
from vitreous.web.tokens import Tokens
from vitreous.web.watch import LEAVING
from vitreous.web.workers import CLIENT, FRONT, JOBS, OTHERS, ROUTE

HOME = "http://127.0.0.1:8000"
ANA, BEN = "ana-has-a-long-token", "ben-has-a-long-token"
FILE = f"""
[[token]]
name = "ana"
token = "{ANA}"
rate = 0.001
burst = 3
upload = 0.01

[[token]]
name = "ben"
sha256 = "{hashlib.sha256(BEN.encode()).hexdigest()}"
jobs = 1
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = Engine([(Model(zoo.network("timm ViT"), name="tiny"), Source())], Limits(rate=1e6, burst=10**6))
    yield found
    found.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "tokens.toml"
    found.write_text(FILE)
    return found


@pytest.fixture
def written() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What is logged as JSON."""
    held = io.StringIO()
    with logs.configured("json", "test"):
        logs.LOG.handlers[0].setStream(held)  # type: ignore[attr-defined]
        yield lambda: [json.loads(line) for line in held.getvalue().splitlines()]


@cache
def routes(engine: Engine) -> Guard:
    return create_app(engine)  # once: it takes a while


def guarded(engine: Engine, tokens: Tokens | None) -> Guard:
    """The routes behind a guard of their own."""
    base = routes(engine)
    return Guard(base.app, engine.limits, tokens=tokens, watch=base.watch)


def visitor(engine: Engine, tokens: Tokens | None = None, token: str | None = None) -> TestClient:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return TestClient(guarded(engine, tokens), base_url=HOME, headers=headers, follow_redirects=False)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values."""
    return {
        (one.name, *(value for _, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


# -------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.slow
def test_every_token_opens_the_server_and_is_known_by_its_name(engine: Engine, file: Path) -> None:
    tokens = Tokens("the-one-of-the-option", file)
    assert [one.name for one in tokens.known] == ["default", "ana", "ben"]
    assert ANA not in repr(tokens.known) and tokens.known[1].digest not in repr(tokens.known)
    for token in (ANA, BEN, "the-one-of-the-option"):
        assert visitor(engine, tokens, token).get("/api/labels").status_code == 200
    assert visitor(engine, tokens, "a-stranger-with-no-token").get("/api/labels").status_code == 401
    assert visitor(engine, tokens).get("/").status_code == 401


@pytest.mark.parametrize("token", [ANA, BEN])
@pytest.mark.slow
def test_a_visitor_with_a_token_gets_its_own_cookie(engine: Engine, file: Path, token: str) -> None:
    client = visitor(engine, Tokens(None, file))
    welcomed = client.get(f"/?token={token}&a=1")
    assert (welcomed.status_code, welcomed.headers["location"]) == (303, "/?a=1")
    assert {"httponly", "samesite=strict"} <= {
        part.strip().lower() for part in welcomed.headers["set-cookie"].split(";")
    }
    assert token not in welcomed.headers["set-cookie"]
    assert client.get("/api/labels").status_code == 200


def test_a_token_has_a_rate_of_its_own(engine: Engine, file: Path) -> None:
    app = guarded(engine, Tokens(None, file))
    ana, ben = (TestClient(app, base_url=HOME, headers={"Authorization": f"Bearer {one}"}) for one in (ANA, BEN))
    assert [ana.get("/api/labels").status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = ana.get("/api/labels")
    assert "with this token" in refused.json()["detail"] and int(refused.headers["retry-after"]) > 100
    assert {ben.get("/api/labels").status_code for _ in range(9)} == {200}, "the same address, another token"


@pytest.mark.slow
def test_a_token_has_a_limit_of_uploads(engine: Engine, file: Path) -> None:
    app = guarded(engine, Tokens(None, file))
    sent = {"file": ("x.png", b"x" * 20_000)}
    for token, status in ((ANA, 413), (BEN, 415)):
        client = TestClient(app, base_url=HOME, headers={"Authorization": f"Bearer {token}"})
        assert client.post("/api/images", files=sent).status_code == status


@pytest.mark.slow
def test_a_token_has_a_limit_of_jobs(engine: Engine, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = visitor(engine, Tokens(None, file), BEN)
    asked = {"image": "sample:cat", "methods": [{"name": "rollout"}], "targets": ["0"]}
    monkeypatch.setattr(engine.jobs, "known", type(engine.jobs.known)(engine.limits.jobs_kept))
    monkeypatch.setattr("vitreous.web.jobs.Job.run", lambda job, work, quick: None)  # which never ends
    assert client.post("/api/explain", json=asked).status_code == 202
    refused = client.post("/api/explain", json=asked)
    assert refused.status_code == 429 and "1 of your jobs" in refused.json()["detail"]


@pytest.mark.slow
def test_tokens_are_revoked_when_the_file_is_read_again(
    engine: Engine, file: Path, written: Callable[[], list[dict[str, Any]]]
) -> None:
    tokens = Tokens(None, file)
    ana, ben = visitor(engine, tokens, ANA), visitor(engine, tokens, BEN)
    file.write_text(FILE.replace("ana-has", "eve-has"))
    assert ana.get("/api/labels").status_code == 200, "not yet"
    tokens.reload()
    assert (ana.get("/api/labels").status_code, ben.get("/api/labels").status_code) == (401, 200)
    file.write_text("nonsense")
    tokens.reload()
    assert ben.get("/api/labels").status_code == 200, "a file that cannot be read changes nothing"
    assert "stay as they were" in next(one["message"] for one in written() if one["level"] == "error")


def test_a_token_ends_with_its_day(file: Path) -> None:
    today = datetime.now(UTC).date()
    for day, opens in ((today, True), (today - timedelta(days=1), False)):
        file.write_text(FILE + f"expires = {day.isoformat()}\n")
        assert (Tokens(None, file).find(BEN) is not None) == opens


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "is not TOML"),
        ("", "token: Field required"),
        ("token = []", "at least 1 item"),
        ('[[token]]\nname = "a"', "give token or sha256, one of them"),
        ('[[token]]\nname = "a"\ntoken = "short"', "too easy to guess"),
        ('[[token]]\nname = "a"\nsha256 = "12"', "64 hexadecimal digits"),
        (f'[[token]]\nname = "a b"\ntoken = "{ANA}"', "token 1 name: String should match"),
        (f'[[token]]\nname = "a"\ntoken = "{ANA}"\nrates = 3', "token 1 rates: Extra inputs"),
        (f'[[token]]\nname = "a"\ntoken = "{ANA}"\nupload = 21', "less than or equal to 20"),
        (f'[[token]]\nname = "a"\ntoken = "{ANA}"\n' * 2, "two entries have the same name"),
        (f'[[token]]\nname = "a"\ntoken = "{ANA}"\n[[token]]\nname = "b"\ntoken = "{ANA}"', "the same token"),
    ],
)
def test_a_wrong_file_of_tokens_is_refused_without_showing_one(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(OptionError) as refused:
        Tokens(None, file)
    assert said in str(refused.value) and ANA not in str(refused.value)


def test_a_missing_file_of_tokens_is_said(run: Any) -> None:
    assert "cannot be read" in run("serve", "--tokens", "nowhere.toml", "--port", "0").error
    assert "--log is one of text, json" in run("serve", "--log", "xml", "--port", "0").error


# ------------------------------------------------------------------------------------------------- health and metrics


def test_health_is_told_to_anybody_and_nothing_else_is(engine: Engine, file: Path) -> None:
    client = TestClient(guarded(engine, Tokens(None, file)), base_url="http://10.1.2.3:8000")
    assert client.get("/healthz").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.get("/metrics").status_code == client.get("/").status_code == 421
    assert visitor(engine, Tokens(None, file)).get("/metrics").status_code == 401
    assert visitor(engine, Tokens(None, file), BEN).get("/metrics").status_code == 200


@pytest.mark.slow
def test_a_server_that_stops_is_not_ready_and_begins_nothing(engine: Engine) -> None:
    app = create_app(engine)
    client, app.watch.leaving = TestClient(app, base_url=HOME), True
    refused = client.get("/readyz")
    assert (refused.status_code, refused.json()["detail"]) == (503, LEAVING) and "retry-after" in refused.headers
    assert client.get("/healthz").status_code == client.get("/api/labels").status_code == 200
    assert client.post("/api/predict", json={"image": "sample:cat"}).status_code == 503


@pytest.mark.slow
def test_metrics_count_requests_by_route_and_never_by_id(engine: Engine, file: Path) -> None:
    app = create_app(engine, tokens=Tokens(None, file))
    client = TestClient(app, base_url=HOME, headers={"Authorization": f"Bearer {BEN}"})
    for number in range(5):
        client.get(f"/api/maps/{number:024x}")
        client.get(f"/nothing-{number}.js")
        client.request(f"ODD{number}", "/api/labels")
    client.get("/api/labels")
    TestClient(client.app, base_url=HOME).get("/api/labels")
    client.get("/api/labels", headers={"Host": "evil.example"})
    client.get("/api/labels", headers={"Sec-Fetch-Site": "cross-site"})
    text = client.get("/metrics").text
    found = samples(text)
    assert found["vitreous_requests_total", "GET", "/api/maps/{map}", "404"] == 5
    assert found["vitreous_requests_total", "GET", "page", "404"] == 5
    assert found["vitreous_requests_total", "GET", "/api/labels", "200"] == 1
    assert found["vitreous_request_seconds_count", "/api/labels"] >= 1
    for reason in ("token", "host", "origin"):
        assert found["vitreous_rejected_total", reason] == 1
    assert found["vitreous_requests_open",] == 1, "this one"
    assert not any("0000" in value or "ODD" in value or "ben" in value for key in found for value in key)
    assert found["vitreous_resident_bytes", "0"] > 10**7
    for store in ("traces", "images", "maps", "features"):
        assert found["vitreous_stored_bytes", store, "0"] >= 0
    assert {key[1] for key in found if key[0] == "vitreous_jobs_ended_total"} == {"done", "cancelled", "failed"}


@pytest.mark.slow
def test_metrics_count_jobs(engine: Engine) -> None:
    client = visitor(engine)
    before = samples(client.get("/metrics").text)["vitreous_jobs_ended_total", "done", "0"]
    asked = {"image": "sample:cat", "methods": [{"name": "rollout"}], "targets": ["0"]}
    client.get(f"/api/jobs/{client.post('/api/explain', json=asked).json()['job']}/events")
    found = samples(client.get("/metrics").text)
    assert found["vitreous_jobs_ended_total", "done", "0"] == before + 1
    assert found["vitreous_stored_bytes", "maps", "0"] > 0 and found["vitreous_stored_bytes", "traces", "0"] > 0


# ---------------------------------------------------------------------------------------------------------------- logs


def test_logs_are_json_and_hold_no_secrets(
    engine: Engine, file: Path, written: Callable[[], list[dict[str, Any]]]
) -> None:
    client = visitor(engine, Tokens(None, file), BEN)
    client.post("/api/images", files={"file": ("my-private-name.png", b"nonsense")}, headers={"X-Request-ID": "mine.1"})
    client.get(f"/?token={BEN}")
    client.get("/api/labels?q=my-secret-words", headers={"X-Request-ID": "not sane\x7f"})
    first, second, third = written()
    assert first["event"] == "request" and first["request"] == "mine.1" and first["token"] == "ben"
    assert (first["route"], first["status"], first["level"]) == ("/api/images", 415, "info") and first["ms"] >= 0
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert second["status"] == 303 and len(third["request"]) == 16
    said = json.dumps(written())
    assert not any(one in said for one in (BEN, client.cookies["vitreous"], "private", "secret-words"))


@pytest.mark.slow
def test_a_failure_is_one_line_with_its_traceback(
    engine: Engine, written: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("oh no")

    monkeypatch.setattr(engine, "find", fail)
    client = TestClient(guarded(engine, None), base_url=HOME, raise_server_exceptions=False)
    got = client.get("/api/labels")
    assert got.status_code == 500 and len(got.headers["x-request-id"]) == 16
    (error,) = [one for one in written() if one["level"] == "error"]
    assert error["event"] == "error" and "oh no" in error["traceback"] and "/api/labels" in error["message"]


# ----------------------------------------------------------------------------------------------------------- the front


class Straw(httpx.AsyncBaseTransport):
    """A worker of straw: it notes what it is asked, and answers with its number."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, list[httpx.Request]()
        self.answer: Callable[[httpx.Request], httpx.Response] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.asked.append(request)
        if self.answer is not None:
            return self.answer(request)
        return httpx.Response(200, headers={ROUTE: "/api/x"}, json={"worker": self.number})


class Chunks(httpx.AsyncByteStream):
    def __init__(self, *chunks: bytes, error: Exception | None = None, waits: bool = False) -> None:
        self.chunks, self.error, self.waits, self.closed = chunks, error, waits, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk
        if self.waits:
            await asyncio.sleep(PATIENCE)
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        self.closed = True


class Site:
    def __init__(self, tokens: Tokens | None = None, limits: Limits | None = None) -> None:
        settings = Settings(make=lambda number: None, hosts=("127.0.0.1",), workers=3, folder=Path("/nowhere"))  # type: ignore[arg-type,return-value]
        self.app, self.workers = create_front(settings, tokens or Tokens(), limits or Limits(rate=1e6, burst=10**6))
        self.straws = [Straw(number) for number in range(3)]
        for worker, straw in zip(self.workers.all, self.straws):
            worker.transport, worker.alive = straw, True  # type: ignore[assignment]
        self.client = TestClient(self.app, base_url=HOME)
        self.secret = settings.secret

    def worker(self, method: str, path: str, **more: Any) -> int:
        got = self.client.request(method, path, **more)
        assert got.status_code == 200, got.text
        return int(got.json()["worker"])


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_request_goes_to_the_worker_that_made_its_ids(site: Site) -> None:
    image, job, concept = "02" + "a" * 30, "01" + "b" * 22, "00" + "c" * 22
    assert site.worker("GET", f"/api/images/{image}/view") == 2
    assert site.worker("GET", f"/api/jobs/{job}/events") == 1
    assert site.worker("GET", f"/api/features?image={image}&layer=1") == 2
    assert site.worker("POST", "/api/explain", json={"image": image, "targets": ["0"]}) == 2
    assert site.worker("POST", "/api/explain", json={"image": "sample:cat", "targets": [f"concept:{concept}"]}) == 0


@pytest.mark.slow
def test_a_visitor_stays_with_a_worker_and_moves_with_an_image(site: Site) -> None:
    home = site.worker("GET", "/api/info")
    assert site.client.cookies[COOKIE] == str(home)
    assert {site.worker("POST", "/api/predict", json={"image": "sample:cat"}) for _ in range(5)} == {home}
    other = (home + 1) % 3
    assert site.worker("GET", f"/api/maps/{other:02x}{'a' * 22}") == other
    assert site.worker("GET", "/api/info") == home, "a map of another worker moves nobody"
    assert site.worker("GET", f"/api/images/{other:02x}{'a' * 30}/view") == other
    assert site.worker("GET", "/api/info") == other, "an image does"


@pytest.mark.slow
def test_the_page_gives_new_visitors_the_freest_worker(site: Site) -> None:
    site.workers.all[0].jobs, site.workers.all[1].jobs = {"a": 3}, {"b": 1}
    got = site.client.get("/")
    assert got.status_code == 200 and site.client.cookies[COOKIE] == "2"
    assert "httponly" in got.headers["set-cookie"].lower() and "samesite=strict" in got.headers["set-cookie"].lower()
    assert site.worker("GET", "/api/info") == 2
    assert not any(straw.asked for straw in site.straws[:2]), "the page's files are the front's own"


@pytest.mark.slow
def test_what_is_no_file_of_the_page_is_a_workers(site: Site) -> None:
    assert site.worker("GET", "/methods/gae") in range(3)
    assert site.client.get("/app.js").headers["content-type"].startswith("text/javascript")
    assert len([one for straw in site.straws for one in straw.asked]) == 1


@pytest.mark.slow
def test_programs_without_cookies_stay_with_a_worker_too(site: Site) -> None:
    for _ in range(5):
        site.client.cookies.clear()
        site.worker("GET", "/api/info")
    assert sorted(len(straw.asked) for straw in site.straws) == [0, 0, 5]


@pytest.mark.slow
def test_a_worker_that_is_gone_is_said_and_others_take_over(site: Site) -> None:
    home = site.worker("GET", "/api/info")
    site.workers.all[home].alive = False
    other = site.worker("GET", "/api/info")
    assert other != home and site.client.cookies[COOKIE] == str(other)
    refused = site.client.get(f"/api/images/{home:02x}{'a' * 30}/view")
    assert refused.status_code == 503 and refused.headers["retry-after"] == "2"
    assert "being started again" in refused.json()["detail"]
    assert "2 of 3 workers" in site.client.get("/readyz").json()["detail"]
    for worker in site.workers.all:
        worker.alive = False
    assert site.client.get("/api/info").status_code == site.client.get("/readyz").status_code == 503
    assert site.client.get("/healthz").status_code == site.client.get("/").status_code == 200
    assert site.client.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    ("error", "asked", "method"),
    [
        (httpx.ConnectError("gone"), 1, "GET"),
        (httpx.RemoteProtocolError("cut"), 2, "GET"),
        (httpx.RemoteProtocolError("cut"), 1, "POST"),
        (httpx.ReadTimeout("slow"), 1, "GET"),
    ],
)
@pytest.mark.slow
def test_a_request_that_a_worker_drops_gets_an_answer(site: Site, error: Exception, asked: int, method: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    site.straws[1].answer = fail
    got = site.client.request(method, f"/api/maps/01{'a' * 22}")
    assert got.status_code == 503 and "retry-after" in got.headers and len(site.straws[1].asked) == asked


@pytest.mark.slow
def test_an_answer_that_breaks_off_never_arrives_in_part(site: Site) -> None:
    cut = Chunks(b"half", error=httpx.ReadError("cut"))
    site.straws[1].answer = lambda request: httpx.Response(200, headers={"content-length": "8"}, stream=cut)
    assert site.client.get(f"/api/maps/01{'a' * 22}").status_code == 503


@pytest.mark.parametrize("error", [None, httpx.ReadError("killed")], ids=["ended", "killed"])
@pytest.mark.slow
def test_events_of_a_worker_that_dies_end_with_failed(site: Site, error: Exception | None) -> None:
    stream = Chunks(b"event: map\ndata: {}\n\n", b"event: prog", error=error)
    kind = {"content-type": "text/event-stream"}
    site.straws[1].answer = lambda request: httpx.Response(200, headers=kind, stream=stream)
    text = site.client.get(f"/api/jobs/01{'a' * 22}/events").text
    last = text.strip().split("\n\n")[-1]
    assert last.startswith("event: failed\ndata: ") and "being started again" in last and stream.closed
    whole = Chunks(b"event: map\ndata: {}\n\n", b"event: done\ndata: {}\n\n", error=error)
    site.straws[1].answer = lambda request: httpx.Response(200, headers=kind, stream=whole)
    assert site.client.get(f"/api/jobs/01{'a' * 22}/events").text.endswith("event: done\ndata: {}\n\n")


@pytest.mark.slow
def test_a_visitor_who_leaves_ends_the_stream_of_the_worker(site: Site) -> None:
    stream = Chunks(b"event: queued\ndata: {}\n\n", waits=True)
    kind = {"content-type": "text/event-stream"}
    site.straws[1].answer = lambda request: httpx.Response(200, headers=kind, stream=stream)
    path = f"/api/jobs/01{'a' * 22}/events"
    scope = {
        **{"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""},
        **{"headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "scheme": "http"},
    }
    sent: list[Any] = []

    async def visit() -> None:
        heard = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if b"queued" in message.get("body", b""):
                heard.set()

        async def receive() -> Any:
            await heard.wait()
            return {"type": "http.disconnect"}

        await asyncio.wait_for(site.app(scope, receive, send), PATIENCE)

    asyncio.run(visit())
    assert stream.closed and sent[0]["status"] == 200


@pytest.mark.slow
def test_workers_learn_who_asks_and_nothing_secret(site: Site, file: Path) -> None:
    site = Site(Tokens(None, file))
    site.workers.all[0].jobs = {"token ben": 2}
    sent = {"Authorization": f"Bearer {BEN}", FRONT: "forged", CLIENT: "forged", "X-Request-ID": "r1", "Cookie": "a=b"}
    got = site.client.post("/api/predict", json={"image": "01" + "a" * 30}, headers=sent)
    assert got.status_code == 200 and got.headers["x-request-id"] == "r1" and ROUTE not in got.headers
    assert all(got.headers[name] == value for name, value in HEADERS.items())
    (asked,) = site.straws[1].asked
    told = asked.headers
    assert told.get_list(FRONT) == [site.secret] and told.get_list(CLIENT) == ["token ben"]
    assert (told[JOBS], told[OTHERS], told["x-request-id"]) == ("1", "2", "r1")
    assert "cookie" not in told and "authorization" not in told
    assert json.loads(asked.content) == {"image": "01" + "a" * 30}


@pytest.mark.slow
def test_the_front_guards_for_its_workers(site: Site, file: Path) -> None:
    """What test_web.py says of the guard holds here: it is the same one."""
    assert site.client.get("/api/info", headers={"Host": "evil.example"}).status_code == 421
    assert site.client.post("/api/predict", json={}, headers={"Origin": "http://evil.example"}).status_code == 403
    assert site.client.post("/api/predict", content=b"x" * 1_000_001).status_code == 413
    assert site.client.post("/api/images", content=(b"x" * 10**6 for _ in range(21))).status_code == 413
    form = {"content-type": "multipart/form-data; boundary=x"}
    too_much = (b"x" * 10**6 for _ in range(21))
    assert site.client.post("/api/images", content=too_much, headers=form).status_code == 413
    assert Site(Tokens(None, file)).client.get("/api/info").status_code == 401
    assert not any(straw.asked for straw in site.straws)


@pytest.mark.slow
def test_uploads_pass_as_they_come(site: Site) -> None:
    assert site.worker("POST", "/api/images", files={"file": ("x.png", b"y" * 3_000_000)}) in range(3)
    (asked,) = [one for straw in site.straws for one in straw.asked]
    assert asked.content.count(b"y") >= 3_000_000 and asked.headers["content-type"].startswith("multipart/form-data")


@pytest.mark.slow
def test_the_front_counts_by_the_routes_of_its_workers(site: Site) -> None:
    site.worker("GET", "/api/info")
    site.workers.all[2].alive, site.workers.all[1].restarts = False, 4
    own = b'# HELP vitreous_jobs Jobs.\n# TYPE vitreous_jobs gauge\nvitreous_jobs{worker="%d",state="queued"} 1.0\n'
    for number, straw in enumerate(site.straws):
        straw.answer = lambda request, number=number: httpx.Response(200, content=own % number)
    found = samples(site.client.get("/metrics").text)
    assert found["vitreous_requests_total", "GET", "/api/x", "200"] == 1
    assert [found["vitreous_worker_up", str(n)] for n in range(3)] == [1, 1, 0]
    assert found["vitreous_worker_restarts_total", "1"] == 4
    assert found["vitreous_jobs", "queued", "0"] == found["vitreous_jobs", "queued", "1"] == 1
    assert ("vitreous_jobs", "queued", "2") not in found


@pytest.mark.slow
def test_the_front_holds_no_models() -> None:
    code = "import sys, vitreous.web.front, vitreous.web.team; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ids_tell_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ids.stamped("ff12") == "ff12"
    monkeypatch.setattr(ids, "_own", [11])
    assert ids.stamped("ff12") == "0b12" and ids.fresh().startswith("0b") and len(ids.fresh()) == 24
    assert ids.workers_of(f"/a/{ids.fresh()}?b={'01' + 'a' * 30}&c={'a' * 40}".encode(), 12) == [(11, False), (1, True)]
    assert ids.workers_of(b"05" + b"a" * 30, 5) == []
