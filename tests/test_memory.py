"""Memory budgets, batches that are halved, progress, and stopping."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import zoo
from conftest import Run, off
from machine import DIFFERENCES, FREE, PATIENCE, rare, until

import vitreous
from vitreous._support import memory, progress
from vitreous._support.memory import (
    batch_size,
    budget,
    free_in_group,
    free_memory,
    in_batches,
    limit_memory,
    parse_memory,
)
from vitreous.errors import OptionError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "amount"),
    [("4GB", 4 * 10**9), ("3.5 GiB", 3758096384), ("512MiB", 2**29), ("500m", 5 * 10**8), ("123", 123), (77, 77)],
)
def test_amounts_of_memory(text: str | int, amount: int) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "4 apples", "1ib", True])
def test_amounts_that_are_none(text: str | bool) -> None:
    with pytest.raises(OptionError, match="write 4GB"):
        parse_memory(text)


def test_the_limit_holds_inside_its_context_only() -> None:
    assert budget(CPU) == FREE // 2
    with limit_memory("1MB"):
        assert budget(CPU) == 10**6
        with limit_memory(None):
            assert budget(CPU) == FREE // 2
        assert batch_size(10**5, CPU) == 10
        assert batch_size(10**9, CPU) == 1, "one always runs"
        assert batch_size(1, CPU) == memory.MOST["cpu"], "more gains nothing"
        assert batch_size(1, CPU, most=3) == 3
    assert budget(CPU) == FREE // 2


def test_what_the_system_and_the_container_leave(tmp_path: Path) -> None:
    assert free_in_group(tmp_path) == math.inf, "no container"
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert free_in_group(tmp_path) == math.inf, "a container without a limit"
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    assert free_in_group(tmp_path) == 2**30 - 5


@pytest.mark.parametrize(("group", "free"), [(math.inf, 700 * 1024), (500 * 1024, 500 * 1024)])
def test_the_container_counts_where_it_leaves_less(group: float, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=700 * 1024))
    monkeypatch.setattr(memory, "free_in_group", lambda folder: group)
    assert free_memory(CPU) == free  # the function itself: tests replace the module's name by a fixed amount


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_a_batch_that_does_not_fit_is_halved_and_nothing_is_lost(kind: type[Exception]) -> None:
    asked: list[int] = []

    def run(part: slice) -> list[int]:
        asked.append(part.stop - part.start)
        if part.stop - part.start > 3:
            raise kind("DefaultCPUAllocator: not enough memory")
        return list(range(part.start, part.stop))

    assert [i for part in in_batches(run, 17, 8) for i in part] == list(range(17))
    assert asked[:3] == [8, 4, 2]


def test_other_errors_and_a_single_one_too_large_are_raised() -> None:
    def wrong(part: slice) -> None:
        raise RuntimeError("a bug")

    def large(part: slice) -> None:
        raise torch.OutOfMemoryError("too much")

    with pytest.raises(RuntimeError, match="a bug"):
        in_batches(wrong, 4, 4)
    with pytest.raises(torch.OutOfMemoryError):
        in_batches(large, 4, 4)


def test_the_footprint_grows_with_the_image_and_counts_eager_attention() -> None:
    small, large = (zoo.model(name).layout_at(zoo.ZOO[name].size) for name in ("timm ViT", "timm ViT 224×448"))
    assert large.footprint[0] > 15 * small.footprint[0]
    fused, eager = (zoo.model(name).layout_at((64, 64)) for name in ("timm ViT", "timm ViT unfused"))
    assert eager.footprint[1] > fused.footprint[1] > fused.footprint[0] > 0


@pytest.mark.parametrize("method", ["token_ablation", "gae", *rare("rollout", "integrated_gradients", "smoothgrad")])
def test_maps_do_not_depend_on_the_budget(method: str) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 5)
    free = vitreous.explain(model, images, method, 1 if vitreous.METHODS[method].targeted else None).map
    with limit_memory(1):
        tight = vitreous.explain(model, images, method, 1 if vitreous.METHODS[method].targeted else None).map
    assert off(tight, free) <= DIFFERENCES


# ------------------------------------------------------------------------------------------------------------ progress


class Heard:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def begin(self, what: str, total: int) -> str:
        self.said.append((what, total))
        return what

    def move(self, task: str, done: int) -> None:
        self.said.append(done)

    def end(self, task: str) -> None:
        self.said.append(f"end {task}")


def test_long_methods_tell_how_far_they_are() -> None:
    heard = Heard()
    with progress.listening(heard), limit_memory(1):
        vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT", 2), "token_ablation", 1)
    assert heard.said[0] == ("token_ablation, images", 2)
    assert heard.said[1] == ("token_ablation", 16)
    assert heard.said[2:18] == list(range(1, 17))
    assert heard.said[18] == "end token_ablation"
    assert heard.said[-1] == "end token_ablation, images"
    before = len(heard.said)
    vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT", 1), "token_ablation", 1)
    assert len(heard.said) == before, "nobody listens any more"


def test_an_error_ends_the_task() -> None:
    heard = Heard()

    def broken() -> Iterator[int]:
        yield 1
        raise ValueError

    with progress.listening(heard), pytest.raises(ValueError):
        list(progress.steps(broken(), 5, "work"))
    assert heard.said == [("work", 5), 1, "end work"]


def test_bars_appear_after_two_seconds() -> None:
    from rich.console import Console
    from rich.progress import Progress

    now = [0.0]
    shown = Progress(console=Console(file=open(os.devnull, "w")), auto_refresh=False)  # noqa: SIM115
    bars = progress.Bars(shown, clock=lambda: now[0])
    task = bars.begin("work", 10)
    bars.move(task, 1)
    assert not shown.live.is_started
    now[0] = 2.5
    bars.move(task, 2)
    assert shown.live.is_started
    assert shown.tasks[0].visible and shown.tasks[0].completed == 2
    bars.end(task)
    assert not shown.live.is_started and not shown.tasks
    shown.console.file.close()


def test_show_progress_is_quiet_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    with vitreous.show_progress():
        assert list(progress.steps([1, 2], 2, "work")) == [1, 2]
    with vitreous.show_progress(True):
        assert list(progress.steps([1, 2], 2, "work")) == [1, 2]
    assert capfd.readouterr().err == ""


# ------------------------------------------------------------------------------------------------------------ stopping


def test_an_interrupted_run_leaves_the_model_clean_and_what_was_finished(
    run: Run, cat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitreous.cli.explained import Writer

    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jpg").write_bytes(cat.read_bytes())
    original = Writer.add

    def add(writer: Writer, *args: Any) -> None:
        if len(writer.jobs) == 2:
            for job in writer.jobs.values():
                job.result()
            raise KeyboardInterrupt
        original(writer, *args)

    monkeypatch.setattr(Writer, "add", add)
    said = run("explain", "a.jpg", "b.jpg", "c.jpg", "-x", "rollout", "-o", "out")
    assert said.code == 130
    assert "out/a.png" in said.out and "2 images" in said.out
    assert "interrupted" in said.err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        *("a.npz", "a.png", "b.npz", "b.png"),
        *("index.html", "summary.csv", "summary.parquet"),
    ]


def test_an_interrupt_inside_a_method_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.model("timm ViT")
    images = zoo.images("timm ViT", 1)
    vitreous.explain(model, images, "token_ablation", 1)
    block = model.net.blocks[1]
    calls = [0]

    def stop(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt

    handle = block.register_forward_hook(stop)
    with limit_memory(1), pytest.raises(KeyboardInterrupt):
        vitreous.explain(model, images, "token_ablation", 1)
    handle.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.net.modules())
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_stops_the_command_between_pictures(cat: Path, tmp_path: Path) -> None:
    for number in range(400):  # more than are ever done before the signal comes
        (tmp_path / f"{number:03}.jpg").symlink_to(cat)
    command = [sys.executable, "-m", "vitreous", "explain", ".", "-x", "gae", "-o", "out"]
    work = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "out" / "000.png").exists() or work.poll() is not None, "the first picture")
    work.send_signal(signal.SIGINT)
    out, err = work.communicate(timeout=PATIENCE)
    assert work.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted" and "Traceback" not in err
    assert "out/000.png" in out
    left = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert left[:2] == ["000.npz", "000.png"] and len(left) < 800
    assert not any(name.startswith(".") or "tmp" in name for name in left)


def test_the_command_takes_a_memory_limit(run: Run, cat: Path) -> None:
    assert run("explain", cat, "-x", "rollout", "--memory", "200MB").code == 0
    assert "write 4GB" in run("explain", cat, "--memory", "lots").error
