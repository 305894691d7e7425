"""Run as a program: end a study without notice at random moments, let it finish, and run another in peace.

killed.py ALBUM FOLDER: a timer of the process itself, a few times in long runs
killed.py ALBUM FOLDER KILLS SEED: SIGKILL from outside, that often, in runs so short that most of each is writing
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)
import zoo

from vitreous import Model, Study, open_study, run_study
from vitreous.errors import InputError
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped

KILLS, ROUNDS = 8, 6
SHARDS = 10


def go(album: Path, out: Path, model: Model) -> None:
    run_study("cass", album, model, out, options={"cass": {"samples": 24}}, shard=1, batch=1, workers=1)


def stored(out: Path) -> int:
    return len(open_study(out).numbers) if (out / "latest.json").exists() else 0


def kill_once(seconds: float, album: Path, out: Path, model: Model) -> bool:
    """Begin in a child that the system ends after so much work; was it still at work?

    The timer counts the child's own work, so that other load on the machine moves nothing; its signal, which nobody
    handles, ends the child on the spot, as SIGKILL would.
    """
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        go(album, out, model)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGVTALRM, "it died of something else"
        return True
    assert status == 0, "it failed"
    return False


def main(album: Path, folder: Path) -> None:
    torch.manual_seed(0)
    model = Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")
    go(album, folder / "peace", model)
    begun = os.times().user
    go(album, folder / "again", model)
    whole, chance, kills, between = os.times().user - begun, random.Random(), 0, 0
    for number in range(ROUNDS):
        out = folder / f"killed{number}"
        while kills < KILLS and stored(out) < SHARDS:
            kills += kill_once(chance.uniform(0.1, 0.6) * whole, album, out, model)
            between += 0 < stored(out) < SHARDS
        go(album, out, model)
    sys.stdout.write(json.dumps({"kills": kills, "between": between, "rounds": ROUNDS}) + "\n")


# ------------------------------------------------------------------------------------------------------- many times


def quick(album: Path, out: Path, model: Model, workers: int = 0) -> Study:
    return run_study("maps", album, model, out, methods="attention", shard=1, batch=1, workers=workers)


def kill_after(seconds: float, album: Path, out: Path, model: Model, workers: int) -> bool:
    """Begin in a child and send it SIGKILL after so long; was it still at work?"""
    child = os.fork()
    if child == 0:
        quick(album, out, model, workers)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, "it failed"
    return os.WIFSIGNALED(status)


def seen(out: Path, whole: list[tuple[str, ...]]) -> int:
    """How many rows are stored: each is one of the whole study, and none is there twice."""
    try:
        study = open_study(out)
    except InputError as error:
        if (out / "latest.json").exists():
            raise AssertionError("there is a study, and it does not open") from error
        return 0  # it was killed before there was one
    rows = rows_of(study)
    assert len(set(rows)) == len(rows) == len(study.numbers) and set(rows) <= set(whole)
    return len(rows)


def rows_of(study: Study) -> list[tuple[str, ...]]:
    """Every column of every row, the maps among them."""
    return [tuple(map(str, row.values())) for table in study.tables() for row in table.to_pylist()]


def often(album: Path, folder: Path, count: int, seed: int) -> None:
    torch.manual_seed(0)
    model = Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")
    quick(album, folder / "first", model)
    begun = time.monotonic()
    whole = rows_of(quick(album, folder / "peace", model))
    length, chance = time.monotonic() - begun, random.Random(seed)
    kills = rounds = between = 0
    while kills < count:
        out, before = folder / f"killed{rounds}", 0
        while kills < count and before < SHARDS:
            kills += kill_after(chance.uniform(0, 1.2) * length, album, out, model, kills % 2)
            after = seen(out, whole)
            assert after >= before, "a row was lost"
            between += 0 < after < SHARDS
            before = after
        assert rows_of(quick(album, out, model)) == whole, "not the rows of the undisturbed study"
        assert not [draft for draft in out.rglob("*.part") if draft.parent != out], "a draft was left"
        rounds += 1
    sys.stdout.write(json.dumps({"kills": kills, "between": between, "rounds": rounds}) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        often(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
