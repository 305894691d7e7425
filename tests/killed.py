"""Run as a program: end a study without notice at random moments, let it finish, and run another in peace."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
import zoo

from vitreous import Model, open_study, run_study
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
