"""Methods and metrics in full: every one has its page and its JSON, formulas are trees, nothing leads elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install 'vitreous[web]'")

from fastapi.testclient import TestClient

from vitreous import METHODS, METRICS
from vitreous.web import about
from vitreous.web.app import inner_app
from vitreous.web.engine import Engine
from vitreous.web.limits import Limits

ALL = [*(("methods", name) for name in METHODS), *(("metrics", name) for name in METRICS)]
MATHS = {"math", "mi", "mo", "mn", "mtext", "mrow", "mspace", "msub", "msup", "msubsup", "mfrac", "msqrt", "mover"}


class Idle(Engine):
    """An engine that computes nothing."""

    def __init__(self) -> None:
        self.limits = Limits()

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(inner_app(Idle()))


def names(tree: list[Any]) -> set[str]:
    return {tree[0]} | {name for child in tree[2:] if isinstance(child, list) for name in names(child)}


def words(tree: list[Any]) -> str:
    return "".join(words(child) if isinstance(child, list) else child for child in tree[2:])


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_method_and_metric_is_told_in_full(kind: about.Kind, name: str) -> None:
    told = about.about(kind, name)
    assert names(told.formula) <= MATHS | {"span", "code"} and words(told.formula).strip()
    assert told.limits and all(one[0] == "p" and names(one) <= {"p", "code", "em"} for one in told.limits)
    assert "](" not in "".join(map(words, told.limits)) and "`" not in "".join(map(words, told.limits))
    page = bytes(about.page(told).body).decode()
    assert "<script" not in page and " style=" not in page and f"<h1>{name}</h1>" in page


def test_the_routes_give_them(client: TestClient) -> None:
    told = client.get("/api/methods/gae").json()
    assert told["reference"].startswith("Chefer") and told["options"][0]["name"] == "start_layer"
    assert client.get("/methods/gae").headers["content-type"].startswith("text/html")
    assert client.get("/api/metrics/deletion").json()["facts"]["better"] == "lower"
    assert "<math>" in client.get("/metrics/deletion").text


@pytest.mark.parametrize("path", ["/api/methods/deletion", "/api/metrics/gae", "/methods/nothing", "/metrics/x"])
def test_an_unknown_name_is_refused_in_words(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "there is no" in answer.json()["detail"]


def test_texts_are_escaped() -> None:
    assert about.markup(about.paragraph("a <b> `<i>` [*words*](there.md)")) == (
        "<p>a &lt;b&gt; <code>&lt;i&gt;</code> <em>words</em></p>"
    )


def test_a_package_without_the_file_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about, "LIMITS", ())
    about.known_limits.cache_clear()
    try:
        assert about.about("methods", "gae").limits == []
    finally:
        about.known_limits.cache_clear()
