"""What strangers send to `vitreous serve`: every route of the schema, mutated uploads, paths in every text.

No answer is a 500, every status is documented, and no thread of the server opens, lists, writes or connects to anything
but the package and the Python installation. Routes are read from the schema, so that a new one is covered at once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "multipart", "httpx"):
    pytest.importorskip(needed, reason="the tests of the server need pip install 'vitreous[web]' httpx")

import httpx
from machine import rare
from mutated import PATHS, broken_form, encoded, images, mutated
from PIL import Image
from starlette.testclient import TestClient
from test_web import CAT, FREE, end, made, named
from watched import Watched, watching

import vitreous
from vitreous import METHODS
from vitreous.web import schema
from vitreous.web.app import create_app
from vitreous.web.engine import Engine, Source

HOST = "http://testserver"
SLOW = ("attention_flow", "optimus", "ensemble", "rise", "tis", "vit_cx", "value_zeroing")
FORM = "multipart/form-data"


@dataclass
class Site:
    """A server, a visitor, the routes with values that exist, and a file that nobody may open."""

    engine: Engine
    guarded: Any
    client: TestClient
    told: dict[str, Any]
    canary: str

    @property
    def operations(self) -> list[tuple[str, str, dict[str, Any]]]:
        return [(path, verb, one) for path, verbs in self.told["paths"].items() for verb, one in verbs.items()]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A job that nobody hears ends after two seconds; none may have failed through a mistake of ours."""
    limits = replace(FREE, own_jobs=10**6, queue=10**4, jobs_kept=10**5, patience=2.0)
    engine, canary = Engine([(named("timm ViT"), Source())], limits), tmp_path_factory.mktemp("secret") / "canary.png"
    guarded = create_app(engine, hosts=["testserver"])
    canary.write_bytes(encoded(Image.new("RGB", (8, 8)), "PNG"))
    with TestClient(guarded, base_url=HOST) as client:
        told = known_values(engine, client)
        client.post("/api/figure", json={"maps": [made(client, "rollout")["id"]]})  # matplotlib writes at its first
        yield Site(engine, guarded, client, told, str(canary))
        end(engine)


def known_values(engine: Engine, client: TestClient) -> dict[str, Any]:
    """The API's own schema, but with ids and names that exist, so that requests come further than to a 404."""
    numbers = [made(client, name)["id"] for name in ("rollout", "cdam")]
    jobs = [job.id for job in engine.jobs.known.values()]
    quick = [name for name in METHODS if name not in SLOW]

    def deep(told: Any) -> Any:
        if isinstance(told, list):
            return [deep(item) for item in told]
        if not isinstance(told, dict):
            return told
        found = {schema.IMAGE: [CAT, "sample:rocket"], schema.HEX: [*numbers, *jobs[:1]]}.get(str(told.get("pattern")))
        found = quick if told.get("examples") == ["cdam"] else found
        return {"type": "string", "enum": found} if found else {key: deep(value) for key, value in told.items()}

    return deep(client.get("/api/openapi.json").json())  # type: ignore[no-any-return]


def documented(site: Site, operation: dict[str, Any], got: httpx.Response, said: str) -> None:
    """The status is one that the schema names, and a problem is a problem."""
    assert str(got.status_code) in operation["responses"], f"{said}: {got.status_code} {got.text[:300]}"
    assert got.status_code < 500 or got.status_code == 503, f"{said}: {got.text[:300]}"
    if got.status_code >= 400:
        assert got.headers["content-type"] == "application/problem+json", said
        assert {*got.json()} == {"type", "title", "status", "detail"}, said
    assert "root:" not in got.text[:2000], said


# ------------------------------------------------------------------------------------------------------------- requests


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # schemathesis does, inside
@pytest.mark.parametrize("examples", rare(4, 200))
def test_fuzzed_requests(own: Site, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """schemathesis: whatever fits the schema or does not, no 500, every answer as documented, nothing read."""
    schemathesis = pytest.importorskip("schemathesis", reason="requests are made up by schemathesis: pip install it")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance as lenient

    monkeypatch.setattr(own.engine, "close", lambda: None)  # schemathesis ends the application after each
    quiet = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    with watching() as seen:
        own.guarded.app.openapi_schema = own.told
        for found in schemathesis.openapi.from_asgi("/api/openapi.json", own.guarded).get_all_operations():

            def ask(case: Any) -> None:
                case.validate_response(case.call(), excluded_checks=[lenient])  # a 422: no such class, say

            settings(quiet, derandomize=True)(given(case=found.ok().as_strategy())(ask))()
    assert seen.wrong == []


def sample(site: Site, told: dict[str, Any], chance: random.Random) -> Any:
    """A value that a schema allows, small."""
    if "$ref" in told:
        return sample(site, site.told["components"]["schemas"][told["$ref"].rpartition("/")[2]], chance)
    if "anyOf" in told:
        return sample(site, chance.choice(told["anyOf"]), chance)
    for key in ("enum", "examples"):
        if told.get(key):
            return chance.choice(told[key])
    if "const" in told or "default" in told:
        return told.get("const", told.get("default"))
    kind = told.get("type")
    if kind == "object":
        needed = told.get("required", ())
        return {
            key: sample(site, value, chance)
            for key, value in told.get("properties", {}).items()
            if key in needed or chance.random() < 0.5
        }
    if kind == "array":
        return [sample(site, told.get("items", {}), chance) for _ in range(max(1, told.get("minItems", 1)))]
    least = told.get("minimum", 0)
    return {"integer": int(least), "number": float(least), "boolean": True, "null": None}.get(str(kind), "top-1")


def texts(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all texts within a value."""
    if isinstance(value, str):
        yield way
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from texts(item, (*way, key))


def placed(value: Any, way: tuple[Any, ...], text: str) -> Any:
    """The same value with another text at the end of a way."""
    if not way:
        return text
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[way[0]] = placed(copy[way[0]], way[1:], text)
    return copy


def request(site: Site, path: str, operation: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The parts of a request that is allowed: path, query, json (or fields)."""
    given: dict[str, Any] = {"path": {}, "query": {}}
    for one in operation.get("parameters", ()):
        if one["in"] in given and (one.get("required") or chance.random() < 0.7):
            given[one["in"]][one["name"]] = sample(site, one["schema"], chance)
    for kind, told in operation.get("requestBody", {}).get("content", {}).items():
        body = sample(site, told["schema"], chance)
        given["fields" if kind == FORM else "json"] = body
    return given


def send(site: Site, path: str, verb: str, given: dict[str, Any]) -> httpx.Response:
    for name, value in given["path"].items():
        path = path.replace(
            f"{{{name}}}", httpx.URL("", params={"x": str(value)}).query.decode()[2:].replace("+", "%20")
        )
    query = {key: value for key, value in given["query"].items() if value is not None}
    more: dict[str, Any] = {"json": given["json"]} if "json" in given else {}
    if "fields" in given:
        fields = {key: str(value) for key, value in given["fields"].items() if not isinstance(value, list)}
        more = {"data": fields, "files": [("file", ("x.png", images()["PNG"]))]}
    return site.client.request(verb, path, params=query, **more)


@pytest.mark.parametrize("rounds", [0, *rare(12)])
def test_no_path_in_any_text_reaches_a_file_or_a_server(own: Site, rounds: int) -> None:
    """Every text of every route (without rounds: one text of each) is replaced by paths and addresses."""
    chance, asked = random.Random(0), 0
    with watching() as seen:
        for path, verb, operation in own.operations:
            if path.endswith("/events"):  # of a job that waits
                continue
            for _ in range(max(1, rounds)):
                given = request(own, path, operation, chance)
                ways = [*texts(given)]
                if rounds:
                    documented(own, operation, send(own, path, verb, given), f"{verb} {path} {given}")
                for way in ways if rounds else chance.sample(ways, min(1, len(ways))):
                    text = chance.choice(PATHS).replace("CANARY", own.canary)
                    bad = placed(given, way, text)
                    got = send(own, path, verb, bad)
                    asked += 1
                    if way[0] != "path":
                        documented(own, operation, got, f"{verb} {path} {bad}")
                    assert got.status_code < 500 or got.status_code == 503, f"{verb} {path} {bad}: {got.text}"
    assert seen.wrong == [] and own.canary not in seen.read
    assert asked > 20 + 50 * rounds


# -------------------------------------------------------------------------------------------------------------- uploads


@pytest.mark.parametrize("count", [24, *rare(40, 1000)])
def test_mutated_uploads(own: Site, count: int) -> None:
    """Files and forms broken in every way, to every route that takes files: an image, or a problem that says so."""
    chance = random.Random(1)
    with watching() as seen:
        taking = [one for one in own.operations if FORM in one[2].get("requestBody", {}).get("content", {})]
        assert {"/api/images", "/api/concepts"} <= {path for path, *_ in taking}
        taken = 0
        for number in range(count):
            path, verb, operation = taking[0] if chance.random() < 0.5 else chance.choice(taking)
            name, held = mutated(chance)
            if number % 5 == 4:
                body, kind = broken_form(name, held, chance)
                got = own.client.request(verb, path, content=body, headers={"Content-Type": kind})
            else:
                fields = {key: str(value) for key, value in request(own, path, operation, chance)["fields"].items()}
                files = [("file", (name, held))] * chance.choice([1, 1, 1, 2])
                got = own.client.request(verb, path, data=fields, files=files)
            documented(own, operation, got, f"{verb} {path} {name!r}")
            if path == "/api/images" and got.status_code == 201:
                taken += 1
                used = own.client.post("/api/predict", json={"image": got.json()["id"]})
                assert used.status_code in (200, 415, 422), used.text
        assert taken > count // 20, "some are images"
    assert seen.wrong == []


def test_what_a_stranger_may_not_open_would_be_seen(tmp_path: Path) -> None:
    """The watch sees what it looks for: a file, a folder, a file written, a connection."""
    import socket
    import threading

    hidden = tmp_path / "hidden.txt"
    hidden.write_text("x")

    def reach() -> None:
        hidden.read_text()
        [*tmp_path.iterdir()]
        (tmp_path / "new").write_text("x")
        with socket.socket() as opened, pytest.raises(OSError):
            opened.connect(("127.0.0.1", 1))

    def seen_by(work: Any) -> Watched:
        with watching() as seen:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return seen

    wrong = "\n".join(seen_by(reach).wrong)
    for part in (f"read: {hidden}", f"read: {tmp_path}\n", f"written: {tmp_path / 'new'}", "socket.connect"):
        assert part in wrong
    assert seen_by(lambda: json.loads("1")).wrong == []
    assert seen_by(lambda: Path(vitreous.__file__).read_bytes()).wrong == []
