"""The Containerfile: what it names exists, its health check works; where there is a builder, it is built and run."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

for needed in ("fastapi", "uvicorn", "multipart", "httpx", "prometheus_client"):
    pytest.importorskip(needed, reason="the tests of the server need pip install 'vitreous[web]'")

import httpx
import uvicorn
import zoo
from machine import PATIENCE, until

from vitreous import Model
from vitreous.cli.main import app
from vitreous.cli.serve import listen
from vitreous.web.app import create_app
from vitreous.web.engine import Engine, Source

ROOT = Path(__file__).parents[1]
TOKEN = "a-token-that-is-long-enough"
LONG = 3600  # seconds for a build, which downloads torch


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text("utf-8"), flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def the(name: str) -> str:
    """The last instruction of this name, which is the one that holds."""
    return [said for one, said in instructions() if one == name][-1]


def test_everything_that_is_copied_exists() -> None:
    copied = [word for one, said in instructions() if one == "COPY" for word in said.split()[:-1]]
    assert {"pyproject.toml", "src"} <= {*copied}
    assert [word for word in copied if not (ROOT / word).exists()] == []


def test_what_pip_needs_is_copied_before_it_runs() -> None:
    """The readme and the licence that pyproject.toml names belong to the package."""
    before = " ".join(said for one, said in instructions()[: [one for one, _ in instructions()].index("USER")])
    assert all(word in before for word in ("README.md", "LICENSE", "constraints.txt", "src", ".[web]"))


def test_it_does_not_run_as_root_and_hears_signals() -> None:
    assert int(the("USER")) > 0, "a number, not 0"
    order = [one for one, _ in instructions()]
    assert order.index("USER") > max(number for number, one in enumerate(order) if one == "RUN")
    assert the("STOPSIGNAL") == "SIGTERM"
    assert isinstance(json.loads(the("ENTRYPOINT")), list), "not through a shell, which would keep signals to itself"


def test_the_entry_point_is_a_command_with_these_options() -> None:
    program, *words = json.loads(the("ENTRYPOINT"))
    assert program == "vitreous"
    command = typer.main.get_command(app)
    context = command.make_context("vitreous", list(words), resilient_parsing=True)
    name, found, rest = command.resolve_command(context, words)  # type: ignore[attr-defined]
    assert name == "serve"
    assert found.make_context("serve", [*rest, "--workers", "2"]).params["host"] == "0.0.0.0"


@contextmanager
def served() -> Iterator[int]:
    """A server as the container has one, with a token, on some port."""
    engine = Engine([(Model(zoo.network("timm ViT"), name="tiny"), Source())])
    config = uvicorn.Config(create_app(engine, token=TOKEN), log_level="error", ws="none", timeout_graceful_shutdown=1)
    server, listening = uvicorn.Server(config), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until(lambda: server.started or not thread.is_alive(), "the start of the server")
    try:
        yield int(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def checked(port: int) -> int:
    """The exit code of the health check on another port than the container's."""
    command = json.loads(the("HEALTHCHECK").partition("CMD")[2])
    assert command[0] == "python" and f":{the('EXPOSE')}/healthz" in command[-1]
    words = [sys.executable, *command[1:-1], command[-1].replace(f":{the('EXPOSE')}/", f":{port}/")]
    return subprocess.run(words, check=False, timeout=PATIENCE, stderr=subprocess.DEVNULL).returncode


def test_the_health_check_tells_a_server_from_none() -> None:
    with served() as port:
        assert checked(port) == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert checked(port) == 1


# ----------------------------------------------------------------------------------------------- built and started


def tool(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout, cwd=ROOT)


@pytest.fixture
def builder() -> str:
    """podman or docker, where one works and has or gets the base image."""
    tried = []
    for name in ("podman", "docker"):
        if shutil.which(name) is None:
            tried.append(f"there is no {name}")
        elif tool(name, "info").returncode:
            tried.append(f"{name} does not work here (no daemon, or no rights)")
        elif (
            tool(name, "image", "inspect", the("FROM")).returncode
            and tool(name, "pull", the("FROM"), timeout=LONG).returncode
        ):
            tried.append(f"{name} has no base image {the('FROM')} and cannot fetch it")
        else:
            return name
    pytest.skip("; ".join(tried))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_container_is_built_serves_and_stops(builder: str, workers: str) -> None:
    built = tool(builder, "build", "-t", "vitreous-test", "-f", "Containerfile", ".", timeout=LONG)
    assert built.returncode == 0, built.stderr[-2000:]
    place = ["-p", "127.0.0.1::8000", "-e", f"VITREOUS_TOKEN={TOKEN}", "--read-only", "--tmpfs", "/tmp"]
    begun = tool(
        builder, "run", "-d", *place, "vitreous-test", "--workers", workers, "--log", "json", "--memory", "1GB"
    )
    assert begun.returncode == 0, begun.stderr
    name = begun.stdout.strip()
    try:
        home = f"http://{tool(builder, 'port', name, '8000').stdout.split()[-1]}"

        def ready() -> bool:
            try:
                return httpx.get(f"{home}/readyz").status_code == 200
            except httpx.HTTPError:
                return False

        until(ready, f"the container to be ready: {tool(builder, 'logs', name).stderr[-500:]}")
        asked = {"url": f"{home}/api/predict", "json": {"image": "sample:cat"}, "timeout": PATIENCE}
        assert httpx.post(**asked).status_code == 401
        assert httpx.post(**asked, headers={"Authorization": f"Bearer {TOKEN}"}).json()["classes"]
        assert tool(builder, "exec", name, "id", "-u").stdout.strip() == the("USER")
        health = json.loads(the("HEALTHCHECK").partition("CMD")[2])
        assert tool(builder, "exec", name, *health).returncode == 0
        assert tool(builder, "stop", "-t", "60", name).returncode == 0
        assert tool(builder, "inspect", "-f", "{{.State.ExitCode}}", name).stdout.strip() == "0"
        said = tool(builder, "logs", name)
        assert TOKEN not in said.stdout + said.stderr and "Traceback" not in said.stderr
    finally:
        tool(builder, "rm", "-f", name)
