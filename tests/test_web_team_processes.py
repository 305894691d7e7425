"""A server for a team as it is started: `vitreous serve --workers 2`, killed, stopped, flooded and misconfigured."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "multipart", "httpx", "prometheus_client"):
    pytest.importorskip(needed, reason="the tests of the server need pip install 'vitreous[web]'")

import httpx
import psutil
from machine import PATIENCE, until
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.slow, pytest.mark.process]
CAT = "sample:cat"
TOKEN = "a-token-that-is-long-enough"
PHOTOS = Path(__file__).parents[1] / "src" / "vitreous" / "assets" / "photos"
LONG = {"image": CAT, "methods": [{"name": "rise", "options": {"masks": 4000}}], "targets": list(range(8))}
POSIX = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")


class Served:
    """A server that was started, and what it says."""

    def __init__(self, process: subprocess.Popen[str], home: str, folder: Path) -> None:
        self.process, self.home, self.folder = process, home, folder

    def visitor(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.home, timeout=PATIENCE, **more)

    @property
    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors.splitlines()]

    def worker(self, number: int) -> psutil.Process:
        """The process that listens on a worker's socket."""
        found = [
            child
            for child in psutil.Process(self.process.pid).children()
            for one in child.net_connections("unix")
            if str(one.laddr).endswith(f"worker-{number}.sock")
        ]
        return found[0]


@contextmanager
def started(folder: Path, *words: str, ready: bool = True, **env: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "vitreous", "serve", "--port", "0", "--memory", "1GB", *words]
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder, env={**os.environ, **env}
        ) as process,
    ):
        try:
            assert process.stdout is not None
            home = ""
            if ready:
                first = process.stdout.readline()
                assert "vitreous_tiny" in first, (folder / "stderr").read_text()
                home = process.stdout.readline().split()[0].partition("?")[0]
            yield Served(process, home, folder)
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children():
                    child.kill()
                process.kill()


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with started(tmp_path_factory.mktemp("team"), "--workers", "2", "--log", "json") as found:
        yield found


def placed(team: Served, worker: int) -> httpx.Client:
    """A visitor of one worker."""
    return team.visitor(cookies={"vitreous_worker": str(worker)})


def samples(client: httpx.Client) -> dict[tuple[str, ...], float]:
    return {
        (one.name, *(value for _, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for one in family.samples
    }


class Listener(threading.Thread):
    """Hears the events of a job."""

    def __init__(self, client: httpx.Client, job: str) -> None:
        super().__init__(daemon=True)
        self.client, self.job, self.heard, self.broken = client, job, list[str](), False
        self.start()

    def run(self) -> None:
        try:
            with self.client.stream("GET", f"/api/jobs/{self.job}/events") as response:
                for line in response.iter_lines():
                    self.heard.append(line)
        except httpx.HTTPError:
            self.broken = True

    @property
    def names(self) -> list[str]:
        return [line.removeprefix("event: ") for line in self.heard if line.startswith("event: ")]


def test_ids_tell_which_worker_made_them(team: Served) -> None:
    photo = (PHOTOS / "cat.jpg").read_bytes()
    images = []
    for number in range(2):
        with placed(team, number) as client:
            image = client.post("/api/images", files={"file": ("cat.jpg", photo)}).json()["id"]
            asked = {"image": image, "methods": [{"name": "rollout"}], "targets": ["0"]}
            job = client.post("/api/explain", json=asked).json()["job"]
            told = client.get(f"/api/jobs/{job}/events").text
            made = json.loads(re.findall(r"event: map\ndata: (.*)", told)[0])["id"]
            assert image[:2] == job[:2] == made[:2] == f"0{number}"
            images.append(image)
    assert images[0][2:] == images[1][2:], "the same image"
    with team.visitor() as other:  # someone who was sent a link
        for number, image in enumerate(images):
            assert other.get(f"/api/images/{image}/view").status_code == 200
            assert other.cookies["vitreous_worker"] == str(number)
            assert other.post("/api/predict", json={"image": image}).json()["classes"]


def test_two_hundred_requests_at_once_lose_nothing(team: Served) -> None:
    def ask(number: int) -> int:
        with placed(team, number % 2) as client:
            if number % 4 == 3:
                return client.post("/api/predict", json={"image": CAT}).status_code
            return client.get(("/api/info", "/", "/api/labels?q=cat")[number % 4]).status_code

    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(ask, range(200)))
    assert answers == [200] * 200


def test_metrics_of_a_team(team: Served) -> None:
    with placed(team, 1) as client:
        client.get("/api/labels")
        found = samples(client)
    for worker in ("0", "1"):
        assert found["vitreous_worker_up", worker] == 1
        assert found["vitreous_resident_bytes", worker] > 10**8
        assert found["vitreous_jobs_ended_total", "done", worker] >= 0
    assert found["vitreous_resident_bytes", "front"] < 1.5e8, "it has no models"
    assert found["vitreous_requests_total", "GET", "/api/labels", "200"] >= 1


def test_a_worker_alone_answers_nobody_but_the_front(team: Served) -> None:
    path = next(one.laddr for one in team.worker(0).net_connections("unix") if str(one.laddr).endswith(".sock"))
    folder = Path(str(path)).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://worker") as stranger:
        for asked in ("/api/info", "/worker/status", "/"):
            assert stranger.get(asked).status_code == 403


def test_a_killed_worker_fails_its_jobs_and_comes_back(team: Served) -> None:
    """Last of those that share the team: it forgets what the worker held."""
    with placed(team, 0) as doomed, placed(team, 1) as safe:
        photo = (PHOTOS / "cat.jpg").read_bytes()
        image = doomed.post("/api/images", files={"file": ("cat.jpg", photo)}).json()["id"]
        jobs = [client.post("/api/explain", json=LONG).json()["job"] for client in (doomed, safe)]
        ends, goes = Listener(doomed, jobs[0]), Listener(safe, jobs[1])
        until(lambda: "progress" in ends.names and "progress" in goes.names, "two jobs that run")
        before = samples(safe)["vitreous_worker_restarts_total", "0"]
        team.worker(0).kill()
        ends.join(PATIENCE)
        assert not ends.broken and ends.names[-1] == "failed" and "being started again" in ends.heard[-2]
        assert goes.is_alive(), "others notice nothing"
        gone = doomed.get(f"/api/images/{image}/view")
        assert gone.status_code == 503 and gone.headers["retry-after"]
        assert doomed.get("/api/labels").status_code == 200, "another worker takes over"
        assert safe.get("/healthz").status_code == 200
        until(lambda: safe.get("/readyz").status_code == 200, "the return of the worker")
        after = doomed.get(f"/api/images/{image}/view")
        assert after.status_code == 404 and "send it again" in after.json()["detail"]
        with placed(team, 0) as again:
            assert again.post("/api/images", files={"file": ("cat.jpg", photo)}).json()["id"] == image
        assert samples(safe)["vitreous_worker_restarts_total", "0"] == before + 1
        assert "restart" in {one["event"] for one in team.lines()}
        assert safe.delete(f"/api/jobs/{jobs[1]}").status_code == 204
        goes.join(PATIENCE)
        assert goes.names[-1] == "cancelled"


def test_a_front_that_dies_comes_back_and_nothing_is_forgotten(team: Served) -> None:
    port = int(team.home.rstrip("/").rpartition(":")[2])
    with placed(team, 1) as client:
        photo = (PHOTOS / "coffee.jpg").read_bytes()
        image = client.post("/api/images", files={"file": ("coffee.jpg", photo)}).json()["id"]
    (front,) = [
        child
        for child in psutil.Process(team.process.pid).children()
        if any(one.laddr.port == port for one in child.net_connections("tcp"))
    ]
    front.kill()
    with team.visitor() as client:  # who waits for the new one

        def back() -> bool:
            with suppress(httpx.HTTPError):
                return client.get("/readyz").status_code == 200
            return False

        until(back, "the return of the front")
        assert client.get(f"/api/images/{image}/view").status_code == 200


def test_logs_of_a_team_are_json(team: Served) -> None:
    for number in range(2):
        with placed(team, number) as client:
            asked = {"image": CAT, "methods": [{"name": "rollout"}], "targets": ["0"]}
            client.get(f"/api/jobs/{client.post('/api/explain', json=asked).json()['job']}/events")
    until(lambda: team.errors.endswith("\n"), "a whole line")
    lines = team.lines()
    assert {one["process"] for one in lines} >= {"supervisor", "front", "worker-0", "worker-1"}
    assert {"start", "worker", "request", "job"} <= {one["event"] for one in lines}
    assert all({"time", "level", "event", "process"} <= set(one) for one in lines)


# ------------------------------------------------------------------------------------------------------------- its end


@POSIX
@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_gives_a_running_job_its_grace_and_then_a_last_word(tmp_path: Path, workers: str) -> None:
    with (
        started(tmp_path, "--workers", workers, "--grace", "2") as served,
        served.visitor() as client,
        served.visitor() as kept,
    ):
        job = client.post("/api/explain", json=LONG).json()["job"]
        listener = Listener(client, job)
        until(lambda: "progress" in listener.names, "a job that runs")
        assert kept.get("/readyz").status_code == 200
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        status = 200
        with suppress(httpx.HTTPError):  # while it lasts, the open connection hears that it ends
            until(lambda: kept.get("/readyz").status_code == 503, "the server to be not ready")
            status = 503
        assert status == 503
        with pytest.raises(httpx.ConnectError), served.visitor() as late:
            late.get("/readyz")
        listener.join(PATIENCE)
        assert time.monotonic() - began > 1.9
        assert not listener.broken and listener.names[-1] == "failed" and "being stopped" in listener.heard[-2]
        assert served.process.wait(PATIENCE) == 0
        assert served.errors == ""


@POSIX
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_job_that_ends_within_the_grace_is_done(tmp_path: Path, workers: str) -> None:
    with started(tmp_path, "--workers", workers, "--grace", "60") as served, served.visitor() as client:
        asked = {"image": CAT, "methods": [{"name": "rise", "options": {"masks": 500}}], "targets": ["0"]}
        listener = Listener(client, client.post("/api/explain", json=asked).json()["job"])
        until(lambda: "progress" in listener.names, "a job that runs")
        served.process.send_signal(signal.SIGTERM)
        listener.join(PATIENCE)
        assert listener.names[-2:] == ["map", "done"]
        assert served.process.wait(PATIENCE) == 0


@POSIX
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_sigterm_ends_it_at_once(tmp_path: Path, workers: str) -> None:
    with started(tmp_path, "--workers", workers, "--grace", "600") as served, served.visitor() as client:
        listener = Listener(client, client.post("/api/explain", json=LONG).json()["job"])
        until(lambda: "progress" in listener.names, "a job that runs")
        children = psutil.Process(served.process.pid).children()
        served.process.send_signal(signal.SIGTERM)
        time.sleep(2)
        assert served.process.poll() is None
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 143 and time.monotonic() - began < 10
        assert served.errors == ""
        psutil.wait_procs(children, PATIENCE)
        assert not any(child.is_running() for child in children)


@POSIX
def test_ctrl_c_ends_a_team_without_grace(tmp_path: Path) -> None:
    with started(tmp_path, "--workers", "2", "--grace", "600") as served, served.visitor() as client:
        listener = Listener(client, client.post("/api/explain", json=LONG).json()["job"])
        until(lambda: "progress" in listener.names, "a job that runs")
        for one in (psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children()):
            one.send_signal(signal.SIGINT)  # a terminal sends it to all of them
        assert served.process.wait(PATIENCE) == 130
        assert served.errors.strip() == "interrupted"
        listener.join(PATIENCE)
        assert listener.names[-1] == "failed"


@POSIX
def test_a_team_ends_with_its_supervisor(tmp_path: Path) -> None:
    with started(tmp_path, "--workers", "2") as served:
        children = psutil.Process(served.process.pid).children()
        served.process.kill()
        _, alive = psutil.wait_procs(children, PATIENCE)
        assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


# ---------------------------------------------------------------------------------------------------- its beginning


def test_a_team_says_that_a_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["--workers", "2", "--port", str(taken.getsockname()[1])]
        with started(tmp_path, *words, ready=False) as served:
            assert served.process.wait(PATIENCE) == 2
            assert "choose another --port" in served.errors


def test_a_worker_that_cannot_start_ends_the_team_with_the_reason(tmp_path: Path) -> None:
    with started(tmp_path, "--workers", "2", "--model", "nonsense", ready=False) as served:
        assert served.process.wait(PATIENCE) == 2
        assert "unknown model" in served.errors.splitlines()[-1] and "Traceback" not in served.errors


def test_one_worker_for_each_device(tmp_path: Path) -> None:
    with started(tmp_path, "--device", "cpu,cpu") as served, served.visitor() as client:
        assert samples(client)["vitreous_worker_up", "1"] == 1


@POSIX
def test_workers_on_the_loopback_interface_where_unix_sockets_do_not_fit(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with started(tmp_path, "--workers", "2", TMPDIR=str(deep)) as served, served.visitor() as client:
        assert client.post("/api/predict", json={"image": CAT}).status_code == 200
        ports = {
            one.laddr.port
            for child in psutil.Process(served.process.pid).children()
            for one in child.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and f":{one.laddr.port}/" not in served.home
        }
        assert len(ports) == 2
        for port in ports:
            assert httpx.get(f"http://127.0.0.1:{port}/api/info").status_code == 403


@POSIX
@pytest.mark.parametrize("workers", ["1", "2"])
def test_tokens_are_revoked_by_sighup(tmp_path: Path, workers: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(f'[[token]]\nname = "ana"\ntoken = "{TOKEN}"\n')
    with started(tmp_path, "--workers", workers, "--tokens", str(file), "--log", "json") as served:
        with served.visitor(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            assert client.get("/api/labels").status_code == 200
            file.write_text(f'[[token]]\nname = "ben"\ntoken = "other-{TOKEN}"\n')
            served.process.send_signal(signal.SIGHUP)
            until(lambda: client.get("/api/labels").status_code == 401, "the end of the token")
        until(lambda: served.errors.endswith("\n"), "a whole line")
        said = [one for one in served.lines() if one["event"] == "request" and one["status"] == 200]
        assert {one["token"] for one in said} == {"ana"} and TOKEN not in served.errors
