"""The Ray engine, with real Ray on two workers: the same rows, also when a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import Run
from machine import PATIENCE
from PIL import Image
from test_study import album, same  # the same pictures

from vitreous import Model, open_study, run_study
from vitreous.errors import InputError, ModelError
from vitreous.evaluation.study.kind import find_kind
from vitreous.evaluation.study.on_ray import (
    CHANGED,
    changes,
    connected,
    cores_each,
    marked,
    results,
    run_ray,
    usual_actors,
)
from vitreous.evaluation.study.plan import Shard, Source, plan
from vitreous.evaluation.study.store import circumstances, open_store
from vitreous.images.dataset import Sample, read_data
from vitreous.images.preprocess import IMAGENET
from vitreous.images.readers import Reader
from vitreous.models.libraries import cropped

ray = pytest.importorskip("ray", reason="the tests of the Ray engine need Ray: pip install 'vitreous[ray]'")
assert album
pytestmark = [
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray on this machine, with workers that find the tests' modules."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before.get("PYTHONPATH")]))
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112, or other tests on the same cores would starve them
    with connected(ray, None):
        yield ray
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def small() -> Model:
    torch.manual_seed(0)
    return Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")


def workers() -> list[int]:
    """The processes in which shards are computed; another cluster on this machine has its own."""
    named, parents = [], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                    named.append(int(entry.name))

    def ours(process: int) -> bool:
        return process == os.getpid() or (process in parents and ours(parents[process]))

    return [process for process in named if ours(process)]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "kind", ["cass", *(pytest.param(k, marks=pytest.mark.slow) for k in ("spread", "compare", "leaderboard"))]
)
def test_both_engines_give_the_same_rows(small: Model, album: Path, tmp_path: Path, kind: str) -> None:
    more: dict[str, Any] = {"shard": 3, "batch": 3, "seed": 1}
    if kind in ("compare", "leaderboard"):
        more["methods"] = "attention,cdam"
    if kind == "leaderboard":
        more["metrics"] = "sparsity,token_deletion"
    if kind == "cass":
        more["options"] = {"cass": {"samples": 3}}
    far = run_study(kind, album, small, tmp_path / "ray", engine="ray", workers=2, **more)
    near = run_study(kind, album, small, tmp_path / "local", **more)
    assert far.finished and len(far.numbers) == 4 and far.folder.name == near.folder.name
    assert far.to_pandas()["error"].notna().sum() == len(far.kind.methods)  # the broken picture
    same(far, near)
    same(run_study(kind, album, small, tmp_path / "ray", **more), far)  # either engine goes on with the other's study


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="finds the workers the Linux way")
def test_a_killed_worker_loses_nothing(album: Path, tmp_path: Path) -> None:
    """SIGKILL to a worker in the middle: Ray starts another, every shard is there once."""
    planned, _ = plan(
        find_kind("cass")(samples=4),  # type: ignore[call-arg]
        [Source()],
        read_data(album),
        batch=1,
        shard=1,
        device="cpu",
    )
    store = open_store(tmp_path / "killed", planned.manifest, circumstances())
    ticks: list[int] = []
    killed: list[int] = []

    def tick(more: int) -> None:
        ticks.append(more)
        if len(ticks) == 2:
            killed.extend(workers()[:1])
            os.kill(killed[0], signal.SIGKILL)

    run_ray(planned.recipe, planned.shards, store, workers=2, tick=tick)
    assert len(killed) == 1 and killed[0] not in workers()
    assert ticks == [1] * 10 and store.done() == list(range(10))
    whole = run_study("cass", album, None, tmp_path / "local", options={"cass": {"samples": 4}}, batch=1, shard=1)
    same(open_study(tmp_path / "killed"), whole)


NODES = Path(__file__).parent / "two_nodes.py"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="finds the workers the Linux way")
def test_a_killed_node_loses_and_doubles_nothing(small: Model, album: Path, tmp_path: Path) -> None:
    """A cluster of two nodes with a core each: when one dies there is no room to restart its worker."""
    torch.save(small.net.state_dict(), tmp_path / "small.pth")
    whole = run_study("cass", album, small, tmp_path / "local", options={"cass": {"samples": 4}}, batch=1, shard=1)
    for attempt in range(4):  # until the node dies with a shard in its hands
        out = tmp_path / f"nodes-{attempt}"
        command = [sys.executable, str(NODES), str(album), str(out), str(tmp_path / "small.pth")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        told = json.loads(ran.stdout.splitlines()[-1])
        assert not told["alive"] and 0 < told["killed"] < 10, told
        assert told["ticks"] == 10 and told["done"] == list(range(10))
        study = open_study(out)
        assert study.folder.name == whole.folder.name and len(study.to_pandas()) == 10
        same(study, whole)
        if told["missed"]:
            return
    pytest.fail("the node never had a shard when it died")


class Actor:
    """A worker on paper: `run` gives a reference, which is its own name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.run, self.here = self, self

    def options(self, max_task_retries: int) -> Actor:
        assert max_task_retries == -1
        return self

    def remote(self, shard: Any = None) -> tuple[str, int]:
        return self.name, -1 if shard is None else shard.number


class Paper:
    """Ray on paper: calls end in the order of `ends`, each well, with the death of its worker, or lost (None)."""

    class exceptions:
        class RayActorError(Exception): ...

        class RayTaskError(Exception): ...

        class ObjectLostError(Exception): ...

    def __init__(self, *ends: tuple[str, int, bool | None]) -> None:
        self.ends = list(ends)
        self.asked: list[set[Any]] = []

    def wait(self, references: list[Any], timeout: float | None) -> tuple[list[Any], list[Any]]:
        self.asked.append(set(references))
        assert self.ends or timeout, "it would wait for ever"
        return ([self.ends[0][:2]] if self.ends else []), []

    def get(self, reference: Any) -> bytes:
        name, number, well = self.ends.pop(0)
        assert reference == (name, number) and reference in self.asked[-1]
        if well is None:
            raise self.exceptions.ObjectLostError("its node died")
        if not well:
            raise self.exceptions.RayActorError("it died")
        return f"{name}{number}".encode()


def on_paper(count: int, *ends: tuple[str, int, bool | None], samples: tuple[Sample, ...] = ()) -> dict[int, bytes]:
    shards = [Shard(i, 0, i, samples, frozenset()) for i in range(count)]
    return {shard.number: content for shard, content in results(Paper(*ends), [Actor("a"), Actor("b")], shards)}


def test_shards_of_a_dead_worker_go_to_the_others() -> None:
    """Worker b dies with two shards and does not come back; a does them all."""
    ends = [("a", 0, True), ("b", 1, False), ("b", 3, False), *(("a", i, True) for i in (2, 4, 3, 1))]
    assert on_paper(5, *ends) == {0: b"a0", 2: b"a2", 4: b"a4", 3: b"a3", 1: b"a1"}


def test_a_worker_that_comes_back_gets_shards_again() -> None:
    ends = [("b", 1, False), ("b", 3, False), ("b", -1, True), ("b", 3, True), ("b", 1, True), ("a", 0, True)]
    assert set(on_paper(4, *ends, ("a", 2, True))) == {0, 1, 2, 3}


def test_rows_that_are_lost_with_their_node_are_computed_again() -> None:
    ends = [("a", 0, True), ("b", 1, None), ("a", 1, True)]
    assert on_paper(2, *ends) == {0: b"a0", 1: b"a1"}


def test_workers_that_never_come_back_are_an_error() -> None:
    dead = [("a", 0, False), ("b", 1, False)]
    with pytest.raises(
        ModelError, match="every Ray worker died and none came back within 10 minutes; what is finished"
    ):
        on_paper(2, *dead)
    with pytest.raises(ModelError, match=r"every Ray worker died \(it died\); what is finished is stored"):
        on_paper(2, *dead, ("a", -1, False), ("b", -1, False))


def test_a_shard_that_kills_its_workers_is_given_up() -> None:
    times = [("a", 0, False), ("b", 0, False), *[("a", -1, True), ("a", 0, False)] * 2]
    with pytest.raises(ModelError, match=r"the Ray worker of shard 0 died again and again .*try fewer workers"):
        on_paper(1, *times)


def test_an_image_that_changes_is_seen_where_the_study_was_begun(tmp_path: Path) -> None:
    """Rows of a changed image are asked for again, with the reason; workers with copies of other dates are trusted."""
    for name in "ab":
        Image.new("RGB", (9, 9)).save(tmp_path / f"{name}.png")
    still, changing = read_data(tmp_path).stamped().samples
    Image.new("RGB", (20, 20)).save(tmp_path / "b.png")
    sent: list[Any] = []
    actor = Actor("a")
    true = actor.remote

    def remote(shard: Any = None) -> tuple[str, int]:
        sent.append([sample.seen for sample in shard.samples])
        return true(shard)

    actor.remote = remote  # type: ignore[method-assign]
    shard = Shard(0, 0, 0, (still, changing), frozenset())
    ray_on_paper = Paper(("a", 0, True), ("a", 0, True))
    assert [content for _, content in results(ray_on_paper, [actor], [shard])] == [b"a0"]
    assert sent == [[None, None], [None, CHANGED]] and changes(shard) == {1}
    loaded = Reader(dict(enumerate(marked(shard, changes(shard)).samples)), cropped((8, 8), *IMAGENET))[[0, 1]]
    assert list(loaded.failed) == [1] and "has changed since the study was begun" in loaded.failed[1]
    tmp_path.rename(tmp_path.with_name("aside"))
    with pytest.raises(InputError, match="has vanished during the run; bring it back"):
        on_paper(1, ("a", 0, True), samples=(still,))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_stop_on_ray_goes_on_here(small: Model, album: Path, tmp_path: Path) -> None:
    planned, _ = plan(find_kind("spread")(), [Source(ready=small)], read_data(album), batch=2, shard=2)
    store = open_store(tmp_path, planned.manifest, circumstances())

    def tick(more: int) -> None:
        if len(store.done()) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ray(planned.recipe, planned.shards, store, workers=2, tick=tick)
    assert len(store.done()) == 2
    study = run_study("spread", album, small, tmp_path, batch=2, shard=2)
    assert study.finished and study.folder == store.folder
    assert len(study.to_pandas()) == 10


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_errors_of_workers_are_ours(album: Path, tmp_path: Path) -> None:
    planned, _ = plan(find_kind("spread")(), [Source()], read_data(album), device="cpu")
    gone = Source("deit_tiny_patch16_224", str(tmp_path / "gone.safetensors"))
    recipe = replace(planned.recipe, sources=(gone,), names=("gone",))
    store = open_store(tmp_path, planned.manifest, circumstances())
    with pytest.raises(ModelError, match=r"gone\.safetensors: no such"):
        run_ray(recipe, planned.shards, store, workers=1)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_the_command_on_ray(run: Run, album: Path) -> None:
    ran = run("study", "maps", album, "-x", "attention", "--engine", "ray", "--workers", 2, "--shard", 5, "--batch", 5)
    assert ran.code == 0 and "9 maps of 10 images" in ran.out
    assert "failed: " in ran.err and "cat/3.png" in ran.err


def test_what_ray_has_is_shared() -> None:
    class Small:
        def __init__(self, **there: float) -> None:
            self.there = there

        def cluster_resources(self) -> dict[str, float]:
            return self.there

    assert usual_actors(Small(CPU=8.0), 0.0) == 8 and usual_actors(Small(CPU=8.0, GPU=4.0), 0.5) == 8
    assert usual_actors(Small(), 1.0) == 1 and cores_each(Small(CPU=8.0), 2) == 4 and cores_each(Small(CPU=1.0), 4) == 1


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def is_initialized(self) -> bool:
            return False

        def init(self, address: str, log_to_driver: bool, logging_level: int) -> None:
            raise ConnectionError("nobody there")

    with (
        pytest.raises(InputError, match=r"Ray at far:6379 does not answer \(nobody there\)"),
        connected(Silent(), "far:6379"),
    ):
        pass


def test_ray_is_started_here_whatever_another_program_left() -> None:
    """A Ray that was killed leaves its address in a file, which ray.init() would follow."""

    class Fresh:
        begun: tuple[Any, ...] = ()

        def is_initialized(self) -> bool:
            return False

        def init(self, address: str | None = None, **more: Any) -> None:
            self.begun = address, more["num_cpus"] >= 2

        def shutdown(self) -> None: ...

    with connected(fresh := Fresh(), None):
        assert fresh.begun == ("local", True)


def test_without_ray(monkeypatch: pytest.MonkeyPatch, small: Model, album: Path, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModelError, match=r"this needs ray: pip install 'vitreous\[ray\]'"):
        run_study("spread", album, small, tmp_path, engine="ray")
