"""Every method beside its peers: forward passes of the same batch, in one process, with the maps compared.

    python benchmarks/bench.py                            # DeiT-Tiny and ViT-S, batches of 1 and 8, CPU and GPU
    python benchmarks/bench.py --weights FILE --model deit_tiny_patch16_224 --batch 8 --methods cdam,gae
    python benchmarks/bench.py --model vit_base_patch16_224 --dtype bfloat16 --batch 64 --device cuda
    python benchmarks/bench.py --quick                    # operations and passes only, against limits
    python benchmarks/bench.py --profile                  # where the time of each method goes
    python benchmarks/bench.py --memory                   # what gae keeps, by the number of tokens

Rounds are interleaved: in each, every method and every peer runs once, with a plain forward before each of them, and is
divided by the median of the round's forwards. Shown are the median of the rounds with its quartiles and the ratio of
the fastest runs. What takes more than 20 forwards runs in three of the rounds. Absolute times mean nothing on a shared
machine and are not shown.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import metrics
import torch
from counting import Flops, flops, peak_memory
from metrics import Setting
from peers import PEERS, Map, Peer
from profiling import kept, profiled, streamed
from quick import quick

import vitreous

SLOW = 20  # forwards
RESULTS = Path(__file__).parent / "results"
EMBEDDED = "vitreous_tiny"  # of the size of DeiT-Tiny
RANDOM = "random"
LEGEND = """All in forwards of the same batch. *fastest*: the fastest run beside the fastest forward. *counted*: by \
operations. *peak*: the most bytes that torch held at a time beyond weights and images. *target*: only for DeiT-Tiny, \
batch 8, on a CPU and ViT-B/16, batch 64, on a GPU, or by operations. *as fast*: times as fast as that peer, by \
medians (by the fastest runs). *map*: the largest difference from the peer's map, as a share of its largest value; in \
half precision both are rounded, and ours must not be farther from float32."""


@dataclass(frozen=True)
class Row:
    """What is measured, and what the project promises of it, in forwards."""

    label: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    cpu: float | None = None  # DeiT-Tiny, batch 8
    cuda: float | None = None  # ViT-B/16, batch 64, bfloat16
    counted: float | None = None  # by operations
    targets: int = 1
    each: str = ""  # of which it notes how many there were: the cost of one of them

    @property
    def alone(self) -> bool:
        """Does it run the network many times for an image? It is then measured with one, in forwards of one."""
        many = self.method in vitreous.METRICS or self.method in ("integrated_gradients", "smoothgrad")
        return many or vitreous.METHODS[self.method].alone

    def run(self, given: Setting) -> Map:
        if self.method in vitreous.METRICS:
            curve = given.ours(self.method, **self.options).curve
            assert curve is not None
            return curve
        if self.targets == 1:
            return self.explain(given).map
        targets = range(self.targets)
        made = vitreous.explain_targets(given.model, given.images, self.method, targets, **self.options)
        return torch.stack([one.map for one in made])

    def explain(self, given: Setting) -> vitreous.Attribution:
        return vitreous.explain(given.model, given.images, self.method, given.classes.tolist(), **self.options)

    def parts(self, given: Setting) -> float:
        return float(sum(self.explain(given).notes[self.each])) if self.each else 1.0


ROWS = [
    Row("attention, all layers", "attention", {"across": "mean"}, cpu=1.05, cuda=1.1),
    Row("rollout", "rollout", cpu=1.15, cuda=1.3),
    Row("cdam", "cdam", cpu=1.0, cuda=1.05),
    Row("cdam, 2 targets", "cdam", targets=2),
    Row("cdam, 5 targets", "cdam", targets=5),
    Row("gradcam", "gradcam", cpu=1.0, cuda=1.05),
    Row("gae", "gae", cpu=2.2, cuda=3.0),
    Row("gae, 5 targets", "gae", targets=5),
    Row("grad_rollout", "grad_rollout", cpu=2.2, cuda=3.0),
    Row("attn_lrp", "attn_lrp", cpu=3.0, cuda=3.5),
    Row("cp_lrp", "cp_lrp"),
    Row("transformer_attribution", "transformer_attribution", cpu=10.0, cuda=10.0),
    Row("transformer_attribution, single", "transformer_attribution", {"precision": "single"}, cuda=10.0),
    Row("gradient", "gradient"),
    Row("input_x_gradient", "input_x_gradient"),
    Row("legrad", "legrad"),
    Row("norm_attention", "norm_attention"),
    Row("integrated_gradients, 50 steps", "integrated_gradients", {"steps": 50}),
    Row("smoothgrad, 16 samples", "smoothgrad", {"samples": 16}),
    Row("token_ablation", "token_ablation", cuda=175, counted=170),
    Row("occlusion, zeros", "occlusion", {"fill": "zero"}),
    Row("value_zeroing, rolled out", "value_zeroing", counted=100),
    Row("value_zeroing, last layer", "value_zeroing", {"layer": -1}),
    Row("vit_cx, a mask", "vit_cx", each="masks"),
    Row("deletion, patch by patch", "deletion", {"steps": None, "fill": "zero"}),
    Row("token_deletion, 196 steps", "token_deletion", {"steps": 196}, counted=85),
]


def quantus_deletion(given: Setting) -> Map:
    """With a patch as one step, which Quantus as shipped refuses; our curve begins with the whole image."""
    curve = torch.from_numpy(metrics.deletion_unchecked(given)[1]())
    whole = given.model.net(given.images).softmax(1).gather(1, given.targets[:, None])
    return torch.cat([whole.detach().cpu().to(curve), curve], 1)


PEERS["deletion, patch by patch"].append(
    Peer("Quantus PixelFlipping", quantus_deletion, "quantus", 1e-3, lambda curve: curve)
)


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Job:
    """One way to a map, with what was found out about it."""

    name: str
    work: Callable[[], Map]
    share: float  # of the batch that it works on
    ratios: list[float] = field(default_factory=list)  # forwards, one a round
    best: float = float("inf")  # seconds
    counted: float = 0.0
    memory: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.ratios) < 3:
            return min(self.ratios), max(self.ratios)
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, high


def plain_forward(given: Setting) -> Map:
    with torch.no_grad():
        output: torch.Tensor = given.model.net(given.images)
    return output


def quietly(work: Callable[[], Map]) -> Map:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()


class Bench:
    """One model, one batch, one device."""

    def __init__(self, model: vitreous.Model, images: torch.Tensor, rows: Iterable[Row], promised: bool) -> None:
        self.model, self.images, self.device, self.promised = model, images, images.device.type, promised
        self.rows = list(rows)
        self.whole, self.one = Setting(model, images), Setting(model, images[:1])
        self.missing: dict[str, str] = {}
        self.agreement: dict[tuple[str, str], tuple[float | None, bool]] = {}
        self.forward = partial(plain_forward, self.whole)
        self.operations = flops(self.forward)
        self.jobs = {row.label: self.jobs_of(row) for row in self.rows}
        self.plain: list[float] = []  # seconds

    def jobs_of(self, row: Row) -> list[Job]:
        """Ours first; peers that are not there are left out, with a line that says why."""
        given = self.one if row.alone else self.whole
        share = row.parts(given) * len(given.images) / len(self.images)
        jobs = [Job("vitreous", partial(row.run, given), share)]
        if not row.each:
            row.run(given)  # what is found out once for a model is no part of the cost
        ours = self.count(jobs[0])
        for peer in PEERS.get(row.label, []):
            job = Job(peer.name, partial(peer.run, given), share)
            try:
                theirs = self.count(job)
            except (ImportError, AttributeError) as error:
                self.missing[peer.name] = str(error)
                continue
            exact = partial(self.in_float32, row, peer)
            self.agreement[row.label, peer.name] = agreement(peer.match(ours), theirs, peer.within, exact)
            jobs.append(job)
        return jobs

    def in_float32(self, row: Row, peer: Peer) -> Map | None:
        """What rounding hides, where the model is in half precision: our map by the same weights in float32."""
        if self.model.dtype == torch.float32:
            return None
        model = vitreous.Model(copy.deepcopy(self.model.net).float())
        images = (self.images[:1] if row.alone else self.images).float()
        return peer.match(quietly(partial(row.run, Setting(model, images))))

    def count(self, job: Job) -> Map:
        """Operations and memory, and the map."""
        with Flops() as counter, peak_memory(self.device) as peak:
            map = quietly(job.work)
        job.counted, job.memory = counter.total / (self.operations * job.share), peak.bytes
        return map

    def measure(self, rounds: int) -> None:
        """Seconds, in rounds; on CUDA our repeated shapes are replayed."""
        with vitreous.replay() if self.device == "cuda" else nullcontext():
            for _ in range(3 if self.device == "cuda" else 0):  # kernels are chosen, recorded, replayed
                for job in self.all_jobs:
                    quietly(job.work)
            few = {0, rounds // 2, rounds - 1}
            for number in range(rounds):
                self.round([job for job in self.all_jobs if job.counted < SLOW or number in few])

    def round(self, jobs: list[Job]) -> None:
        plain, taken = [], []
        for job in jobs:
            plain.append(self.seconds(self.forward))
            taken.append(self.seconds(job.work))
        self.plain += plain
        for job, seconds in zip(jobs, taken):
            job.ratios.append(seconds / (statistics.median(plain) * job.share))
            job.best = min(job.best, seconds)

    def seconds(self, work: Callable[[], object]) -> float:
        sync = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sync()
            start = time.perf_counter()
            work()
            sync()
            return time.perf_counter() - start

    @property
    def all_jobs(self) -> list[Job]:
        return [job for jobs in self.jobs.values() for job in jobs]

    # ------------------------------------------------------------------------------------------------------- results

    def results(self) -> list[dict[str, Any]]:
        return [self.result(row) for row in self.rows]

    def result(self, row: Row) -> dict[str, Any]:
        ours, *others = self.jobs[row.label]
        best = min(self.plain)
        described = {
            job.name: {
                "median": job.median,
                "quartiles": job.quartiles,
                "fastest": job.best / (best * job.share),
                "counted": job.counted,
                "peak_bytes": job.memory,
                "rounds": len(job.ratios),
            }
            for job in (ours, *others)
        }
        for job in others:
            difference, same = self.agreement[row.label, job.name]
            described[job.name] |= {"difference": difference, "same": same}
        limit, found = self.promise(row, ours)
        met = None if limit is None else found <= limit
        return {"row": row.label, "image": "one" if row.alone else "batch", "limit": limit, "met": met} | {
            "counted_limit": row.counted,
            "jobs": described,
        }

    def promise(self, row: Row, ours: Job) -> tuple[float | None, float]:
        """The limit where there is one for this setting, and what was found."""
        if row.counted is not None and self.device != "cuda":
            return row.counted, ours.counted
        limit = row.cuda if self.device == "cuda" else row.cpu
        return (limit if self.promised else None), ours.median


def agreement(
    ours: Map, theirs: Map, within: float | None, exact: Callable[[], Map | None]
) -> tuple[float | None, bool]:
    """The largest difference as a share of the largest value, and whether it is small enough.

    In half precision: whether ours is at most a little farther from float32 than theirs is.
    """
    if within is None:
        return None, True
    difference = apart(ours, theirs)
    if difference <= within or (truth := exact()) is None:
        return difference, difference <= within
    return difference, apart(ours, truth) <= max(0.05, 1.5 * apart(theirs, truth))


def apart(one: Map, other: Map) -> float:
    one, other = one.double().cpu(), other.detach().double().cpu()
    return float((one - other).abs().max() / other.abs().max())


# -------------------------------------------------------------------------------------------------------------- tables


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, one line a method."""
    head = "method | median (quartiles) | fastest | counted | peak | target | fastest peer | its median | as fast | map"
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return "\n".join(lines + [line(result) for result in results])


def line(result: dict[str, Any]) -> str:
    ours, *others = result["jobs"].values()
    peers = [name for name in result["jobs"] if name != "vitreous"]
    cells = [result["row"], spread(ours), short(ours["fastest"]), short(ours["counted"]), size(ours["peak_bytes"])]
    cells.append(promised(result))
    if not others:
        return f"| {' | '.join([*cells, '', '', '', ''])} |"
    name, best = min(zip(peers, others), key=lambda pair: pair[1]["median"])
    times = f"{best['median'] / ours['median']:.2f} ({best['fastest'] / ours['fastest']:.2f})"
    return f"| {' | '.join([*cells, name, spread(best), times, compared(best)])} |"


def spread(job: dict[str, Any]) -> str:
    low, high = job["quartiles"]
    return f"{short(job['median'])} ({short(low)}–{short(high)})"


def short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def size(bytes_held: int) -> str:
    return f"{bytes_held / 2**20:.0f} MiB"


def promised(result: dict[str, Any]) -> str:
    if result["limit"] is None:
        return ""
    counted = " counted" if result["counted_limit"] == result["limit"] else ""
    return f"{short(result['limit'])}{counted}{'' if result['met'] else ' (missed)'}"


def compared(job: dict[str, Any]) -> str:
    if job["difference"] is None:
        return "other noise"
    return f"{job['difference']:.0e}" + ("" if job["same"] else " DIFFERS")


# ------------------------------------------------------------------------------------------------------- what is asked


def load(name: str, given: argparse.Namespace, device: str) -> vitreous.Model:
    """The embedded model, a checkpoint, or an architecture with random weights: costs do not depend on them."""
    if name == EMBEDDED:
        return vitreous.load(None, device=device, dtype=given.dtype)
    torch.manual_seed(0)
    return vitreous.load(name, weights=given.weights or RANDOM, device=device, dtype=given.dtype)


def inputs(model: vitreous.Model, batch: int, image: str | None) -> torch.Tensor:
    """One photograph many times, or noise."""
    if image:
        return model.prepare([image] * batch)
    noise = torch.randn(batch, 3, *model.size, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device, model.dtype)


def chosen(methods: str | None, batch: int, device: str) -> list[Row]:
    """The rows of these methods; without a choice all, those of many runs only beside batches of one."""
    if methods is None:
        return [row for row in ROWS if not row.alone or batch == 1 or (device == "cuda" and row.cuda)]
    names = methods.split(",")
    known = {row.method for row in ROWS}
    return [row for row in ROWS if row.method in names] + [Row(name, name) for name in names if name not in known]


def state(device: str) -> dict[str, Any]:
    """What else could be at work."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "load": [round(one, 1) for one in os.getloadavg()],
    }


def bench(given: argparse.Namespace, name: str, batch: int, device: str) -> bool:
    """Measure, write and show one table; were all maps the same?"""
    model = load(name, given, device)
    images = inputs(model, batch, given.image)
    _ = model.layout  # the probe runs once for a model, not for a batch
    before = state(device)
    promised = ("tiny" in name and batch == 8) if device == "cpu" else batch == 64
    found = Bench(model, images, chosen(given.methods, batch, device), promised)
    found.measure(given.rounds)
    results = found.results()
    loads = f"load {before['load'][0]} before, {state(device)['load'][0]} after"
    title = f"{name}, batch {batch}, {before['device']}, {given.dtype}, threads: {before['threads']}, {loads}"
    shown = f"# {title}\n\n{table(results)}\n\n{LEGEND}\n"
    print(f"\n{shown}", flush=True)
    for peer, why in found.missing.items():
        print(f"{peer} left out: {why}")
    if given.methods is None:
        stem = f"{device}-{name}-batch{batch}" + ("" if given.dtype == "float32" else f"-{given.dtype}")
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{stem}.md").write_text(shown, encoding="utf-8")
        facts = {"model": name, "batch": batch, "dtype": given.dtype, "state": before, "rows": results}
        (RESULTS / f"{stem}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return all(same for _, same in found.agreement.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=f"{EMBEDDED},vit_small_patch16_224", help="timm's names, by commas")
    parser.add_argument("--weights", help="a checkpoint of the model; default: random, but for the embedded one")
    parser.add_argument("--batch", default="1,8", help="images, by commas")
    parser.add_argument("--device", default="cpu,cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--methods", help="only these, by commas; nothing is written then")
    parser.add_argument("--image", help="a picture to explain; default: noise")
    parser.add_argument("--quick", action="store_true", help="operations and passes against limits: a minute")
    parser.add_argument("--profile", action="store_true", help="where the time of each method goes, on a CPU")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="what gae keeps; on a GPU, peaks at 100×100 patches",
    )
    given = parser.parse_args()
    if given.quick:
        sys.exit(quick())
    combinations = [
        (name, int(batch), device)
        for device in given.device.split(",")
        for name in given.model.split(",")
        for batch in given.batch.split(",")
    ]
    if given.memory:
        print(kept(given.device.split(",")[0]))
        if "cuda" in given.device:
            print(f"\n{streamed()}")
    elif given.profile:
        for name, batch, device in combinations:
            model = load(name, given, device)
            setting = Setting(model, inputs(model, batch, given.image))
            rows = [row for row in chosen(given.methods, batch, device) if not row.alone or given.methods]
            print(f"\n{name}, batch {batch}, {device}\n")
            works = {row.label: partial(row.run, setting) for row in rows}
            print(profiled(works, partial(plain_forward, setting), given.rounds))
    elif sum(not bench(given, *combination) for combination in combinations):
        sys.exit("some maps differ from a peer's: see DIFFERS above")


if __name__ == "__main__":
    main()
