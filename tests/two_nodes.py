"""Run as a program: a study on a Ray cluster of two nodes on this machine, one of which is killed on the way."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
import zoo
from ray.cluster_utils import Cluster

from vitreous import Model
from vitreous.evaluation.study.kind import find_kind
from vitreous.evaluation.study.on_ray import Crew, run_ray
from vitreous.evaluation.study.plan import Shard, Source, plan
from vitreous.evaluation.study.store import circumstances, open_store
from vitreous.images.dataset import read_data
from vitreous.images.preprocess import IMAGENET
from vitreous.models.libraries import cropped

SMALL = 80 * 2**20  # bytes of each node's object store


def main(album: Path, out: Path, weights: Path) -> None:
    model = Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog, hound", *"abcde"], name="small")
    model.net.load_state_dict(torch.load(weights))
    kind = find_kind("cass")(samples=4)  # type: ignore[call-arg]
    planned, _ = plan(kind, [Source(ready=model)], read_data(album).stamped(), batch=1, shard=1, device="cpu")
    store = open_store(out, planned.manifest, circumstances())
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": SMALL, "include_dashboard": False},
    )
    second = cluster.add_node(num_cpus=1, object_store_memory=SMALL)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    ticks, killed, missed = 0, 0, list[int]()

    def tick(more: int) -> None:
        nonlocal ticks, killed
        ticks += more
        if not killed and works(second):
            killed = ticks
            cluster.remove_node(second, allow_graceful=False)

    true = Crew.miss

    def miss(self: Crew, actor: int, shard: Shard, error: Exception) -> None:
        missed.append(shard.number)
        true(self, actor, shard, error)

    Crew.miss = miss  # type: ignore[method-assign]

    begun = time.monotonic()
    run_ray(planned.recipe, planned.shards, store, workers=2, tick=tick)
    told = {"ticks": ticks, "killed": killed, "done": store.done(), "missed": missed}
    told |= {"alive": second.any_processes_alive(), "seconds": round(time.monotonic() - begun)}
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(json.dumps(told) + "\n")


def works(node: Any) -> bool:
    """Has this node a worker that computes shards? Its processes are children of the node's own."""
    ours = {process.process.pid for kind in node.all_processes.values() for process in kind}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in ours and (entry / "cmdline").read_bytes().startswith(b"ray::Worker"):
                return True
    return False


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main(*map(Path, sys.argv[1:]))
