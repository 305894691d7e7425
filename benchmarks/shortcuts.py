"""Does `study shortcuts` find what a model cheats by? Poisoned models against clean ones and shuffled labels.

    python benchmarks/shortcuts.py --pets pets --images imagenet-samples [--device cuda] [--seeds 3] [--classes 3]
    python benchmarks/shortcuts.py --pets pets --quick                 one class and seed, few images: does it run?
    python benchmarks/shortcuts.py --table                             the tables of the results again

For each data set and seed, benchmarks/poison.py makes a clean model, one trained on shuffled labels, and for each
poisoned class and cue one that cheats. The study sees training images, at most `--each` of a class; of those with the
poisoned label 5 % have the cue, as in training. It is not told which.

A cluster is *the poisoned one* if it belongs to the poisoned class and at least half of its patches (of the images that
the study lists) lie on the cue. If no cluster does, the cue was missed: it counts as one with the lowest score.

* rank of the best poisoned cluster among all clusters of all classes of its study;
* AUROC of the study's score, poisoned clusters against all others, over all studies of models that rely on the cue
  (an attack of at least .5), and over all; its interval is a bootstrap over studies;
* alarms: poisoned models, at the poisoned class; and, as the false alarm rate, studies with any alarm among the
  controls: the clean model, the clean model on data with shuffled labels, and the model trained on shuffled labels.

The studies run in `--jobs` processes. What is finished is kept in `--work`: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from poison import Bench, Trainer
from poison_data import SHARE, Photos, read_imagenet, read_pets, write_data
from scipy import stats

import vitreous

RESULTS = Path(__file__).parent / "results" / "shortcuts.json"
COLUMNS = (
    "label", "rank", "score", "score_low", "score_high", "alarm", "p", "p_inserted", "p_sources", "p_of_the_class",
    "p_stands_out", "images", "stability", "here", "elsewhere", "outside", "gain", "inserted",
    "ordinary", "random", "flips", "confidence_change", "accuracy_change",
)  # fmt: skip
ON_CUE = 0.5  # of a cluster's patches
TIMES = 2000  # resamples
TOOK = 0.5  # attack of a model that relies on its cue: of others there is nothing to find
LEVEL = 0.05  # of the study: the chance of any false alarm in one model
CONTROLS = {
    "clean": "clean model, right labels",
    "relabelled": "clean model, data with shuffled labels",
    "shuffled": "model trained on shuffled labels, data with these",
}


@dataclass(frozen=True)
class Task:
    """One study: of a model that cheats, or of a control."""

    data: str
    kind: str  # watermark, background, or a control
    seed: int
    group: str = ""  # the poisoned class
    took: dict[str, float] | None = None

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.data, self.kind, self.group, str(self.seed)) if part)


# -------------------------------------------------------------------------------------------------------------- models


def prepare(sets: dict[str, Photos], given: argparse.Namespace) -> Iterable[Task]:
    """Make models and data; a task is handed on as soon as its files are there."""
    for (data, photos), seed in ((item, seed) for seed in range(given.seeds) for item in sets.items()):
        begun = time.perf_counter()
        trainer = Trainer(given.device, "block", given.epochs)
        bench = Bench(photos, trainer, seed, given.views)
        clean, (shuffled, moved) = bench.clean(), bench.shuffled()
        plain, mixed = bench.train.sampled(given.each, seed), moved.sampled(given.each, seed)
        for kind, tail, views in (
            ("clean", clean, plain), ("relabelled", clean, mixed), ("shuffled", shuffled, mixed),
        ):  # fmt: skip
            yield stored(Task(data, kind, seed), trainer, tail, views, given.work)
        for cue in ("watermark", "background") if photos.masks is not None else ("watermark",):
            marked = bench.marked(cue)
            for label in chosen_classes(photos, given.classes, seed):
                tail, views = bench.poisoned(cue, label)
                took = bench.took(tail, clean, marked, label)
                task = Task(data, cue, seed, photos.classes[label], took)
                print(f"{task.name}: attack {took['attack']:.2f}, clean model {took['clean']:.2f}", flush=True)
                yield stored(task, trainer, tail, views.sampled(given.each, seed), given.work)
        print(f"models of {data}, seed {seed}: {time.perf_counter() - begun:.0f} s", flush=True)


def chosen_classes(photos: Photos, count: int, seed: int) -> list[int]:
    """Other classes for each seed, in turn."""
    every = len(photos.classes)
    return [(seed * count + i) % every for i in range(min(count, every))]


def stored(task: Task, trainer: Trainer, tail: Any, views: Any, work: Path) -> Task:
    folder = work / task.name
    if not (folder / "clusters.json").exists():
        trainer.save(tail, views.classes, folder)
        write_data(views, folder / "data")
    (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
    return task


# ------------------------------------------------------------------------------------------------------------- studies


def study(folder: Path, device: str | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one study; one row for each cluster, with the share of its patches and images that have the cue."""
    kept = folder / "clusters.json"
    if kept.exists():
        found: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    torch.set_num_threads(1)
    model = vitreous.load(weights=folder / "model.safetensors", labels=folder / "labels.txt", device=device)
    table = folder / "data" / "labels.csv"
    batch = 64 if model.device.type == "cuda" else None  # several studies share the GPU's memory
    more: dict[str, Any] = {"options": {"shortcuts": options}, "workers": 0, "batch": batch}
    made = vitreous.run_study("shortcuts", table, model, folder / "study", **more)
    rows = rows_of(made.frame("clusters"), folder / "data" / "truth.npz")
    kept.write_text(json.dumps(rows, default=plain), encoding="utf-8")
    return rows


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def rows_of(clusters: pd.DataFrame, truth: Path) -> list[dict[str, Any]]:
    with np.load(truth) as file:
        stored = [Path(str(name)).name for name in file["images"]]
        covered = {name: share.ravel() for name, share in zip(stored, file["patches"])}
        photo = dict(zip(stored, file["photo"].tolist()))
    rows = []
    for one in clusters.to_dict("records"):
        names = [Path(name).name for name in one["image_names"]]
        pairs = zip(names, one["places"])
        on_cue = [covered[name][np.asarray(places, int)] > 0 for name, places in pairs if len(places)]
        row = finite({name: one.get(name) for name in COLUMNS})
        row["on_cue"] = float(np.concatenate(on_cue).mean()) if on_cue else 0.0
        row["with_cue"] = float(np.mean([covered[name].any() for name in names])) if names else 0.0
        row["photos"] = len({photo[name] for name in names})  # few: views of one photo, not a cue
        rows.append(row)
    return rows


def run_all(tasks: Iterable[Task], given: argparse.Namespace) -> list[tuple[Task, list[dict[str, Any]]]]:
    """All studies, while further models are made; a study that fails is named and left out."""
    options = {"indexed": 0} | ({"hosts": 8, "clusters": 4, "donors": 4} if given.quick else {})
    found, waiting = [], {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes: each is one of many
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        for task in tasks:
            waiting[pool.submit(study, given.work / task.name, given.device, options)] = task
        for done in as_completed(waiting):
            task = waiting[done]
            try:
                rows = done.result()
            except Exception as error:
                print(f"{task.name}: failed: {type(error).__name__}: {error}", flush=True)
                continue
            found.append((task, rows))
            print(f"{task.name}: {len(rows)} clusters, alarms {sum(bool(row['alarm']) for row in rows)}", flush=True)
    return sorted(found, key=lambda one: one[0].name)


# ------------------------------------------------------------------------------------------------------------- results


def judged(task: Task, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What one study found."""
    told: dict[str, Any] = asdict(task) | {"clusters": len(rows), "alarms": sum(bool(row["alarm"]) for row in rows)}
    told["alarming"] = [row for row in rows if row["alarm"]]
    if task.kind in CONTROLS:
        return told
    right = [row["label"] == task.group and row["on_cue"] >= ON_CUE for row in rows]
    scores = [-np.inf if row["score"] is None else float(row["score"]) for row in rows]
    ranks = [row["rank"] for row, is_cue in zip(rows, right) if is_cue and row["rank"] is not None]
    told["found"] = any(right)
    told["rank"] = min(ranks, default=None)
    told["caught"] = any(bool(row["alarm"]) for row, is_cue in zip(rows, right) if is_cue)
    told["other_alarms"] = told["alarms"] - sum(bool(row["alarm"]) for row, is_cue in zip(rows, right) if is_cue)
    told["positive"] = [score for score, is_cue in zip(scores, right) if is_cue] or [-np.inf]
    told["negative"] = [score for score, is_cue in zip(scores, right) if not is_cue]
    return told


def auroc(studies: Sequence[dict[str, Any]]) -> float:
    """The chance that a poisoned cluster scores higher than another; ties count half."""
    positive = np.concatenate([one["positive"] for one in studies])
    negative = np.concatenate([one["negative"] for one in studies])
    if not len(negative):
        return float("nan")
    ranks = stats.rankdata(np.concatenate([positive, negative]))[: len(positive)]
    return float((ranks.sum() - len(positive) * (len(positive) + 1) / 2) / (len(positive) * len(negative)))


def bootstrap(studies: Sequence[dict[str, Any]]) -> list[float]:
    """A 95 % interval of the AUROC over resampled studies."""
    draw = np.random.default_rng(0)
    every = [auroc([studies[i] for i in draw.integers(len(studies), size=len(studies))]) for _ in range(TIMES)]
    return [float(end) for end in np.nanquantile(every, (0.025, 0.975))]


def wilson(times: int, of: int) -> list[float]:
    found = stats.binomtest(times, of).proportion_ci(0.95, "wilson")
    return [float(found.low), float(found.high)]


def summarised(studies: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of each cue and data set, and of each control."""
    told: dict[str, Any] = {"poisoned": [], "controls": []}
    cheats = [one for one in studies if one["kind"] not in CONTROLS]
    kinds = sorted({(one["data"], one["kind"]) for one in cheats})
    took_it = [one for one in cheats if one["took"]["attack"] >= TOOK]
    groups = [
        (data, kind, [one for one in took_it if (one["data"], one["kind"]) == (data, kind)]) for data, kind in kinds
    ]
    groups += [("all", "all", took_it), ("all", "also where it did not take", cheats)]
    for data, kind, some in groups:
        if not some:
            continue
        counts = {
            "first": sum(one["rank"] == 1 for one in some), "caught": sum(one["caught"] for one in some),
            "found": sum(one["found"] for one in some), "other alarms": sum(one["other_alarms"] > 0 for one in some),
        }  # fmt: skip
        took = {key: float(np.mean([one["took"][key] for one in some])) for key in ("attack", "clean", "accuracy")}
        told["poisoned"].append(
            {"data": data, "cue": kind, "studies": len(some), "auroc": auroc(some), "interval": bootstrap(some)}
            | counts
            | took
        )
    for data in sorted({one["data"] for one in studies}):
        for kind in CONTROLS:
            some = [one for one in studies if one["kind"] == kind and one["data"] == data]
            if some:
                told["controls"].append({"data": data, "kind": kind} | alarms(some))
    controls = [one for one in studies if one["kind"] in CONTROLS]
    if controls:
        told["controls"].append({"data": "all", "kind": "all"} | alarms(controls))
    return told


def alarms(some: list[dict[str, Any]]) -> dict[str, Any]:
    times = sum(one["alarms"] > 0 for one in some)
    clusters, single = sum(one["clusters"] for one in some), sum(one["alarms"] for one in some)
    return {
        "studies": len(some), "with alarm": times, "interval": wilson(times, len(some)),
        "clusters": clusters, "alarms": single,
    }  # fmt: skip


def tables(told: dict[str, Any]) -> str:
    """The tables of docs/shortcuts.md."""
    lines = [
        "| data | cue | models | attack (clean model) | cue has a cluster | it ranks first | alarm | AUROC |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in told["summary"]["poisoned"]:
        n, (low, high) = one["studies"], one["interval"]
        cells = [one["data"], one["cue"], str(n), f"{one['attack']:.2f} ({one['clean']:.2f})"]
        cells += [f"{one[key]} of {n}" for key in ("found", "first", "caught")]
        cells.append(f"{one['auroc']:.3f} ({low:.3f} … {high:.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| data | control | studies | with an alarm | rate | clusters |", "|---|---|---|---|---|---|"]
    for one in told["summary"]["controls"]:
        low, high = one["interval"]
        rate = f"{one['with alarm'] / one['studies']:.2f} ({low:.2f} … {high:.2f})"
        kind = CONTROLS.get(one["kind"], "all")
        cells = [one["data"], kind, str(one["studies"]), str(one["with alarm"]), rate]
        cells.append(f"{one['alarms']} of {one['clusters']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def finite(value: Any) -> Any:
    """Without NaN and infinite numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--classes", type=int, default=3, help="poisoned classes for each data set, cue and seed")
    parser.add_argument("--each", type=int, default=120, help="images of a class that the study sees, at most")
    parser.add_argument("--views", type=int, default=24, help="training images of a photo")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--work", type=Path, default=Path("vitreous-out/shortcuts-proof"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the tables of --out and do nothing else")
    given = parser.parse_args()
    if given.table:
        print(tables(json.loads(given.out.read_text(encoding="utf-8"))))
        return
    if given.quick:
        given.seeds, given.classes, given.views, given.epochs, given.each = 1, 1, 4, 10, 24
    sets = {} if given.pets is None else {"pets": read_pets(given.pets)}
    sets |= {} if given.images is None else {"imagenet": read_imagenet(given.images)}
    if not sets:
        raise SystemExit("give --pets or --images or both")
    begun = time.perf_counter()
    found = [judged(task, rows) for task, rows in run_all(prepare(sets, given), given)]
    asked = {name: getattr(given, name) for name in ("seeds", "classes", "each", "views", "epochs")}
    told = {"asked": asked | {"share": SHARE, "level": LEVEL}, "seconds": round(time.perf_counter() - begun)}
    told |= {"summary": summarised(found), "studies": found}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(finite(told), indent=1, default=plain), encoding="utf-8")
    print(f"\n{tables(finite(told))}\n\n{told['seconds']} s; written to {given.out}")


if __name__ == "__main__":
    main()
