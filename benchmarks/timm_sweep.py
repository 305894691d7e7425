"""Every architecture of timm: built small with random weights, and checked. One JSON line for each, and a table.

python benchmarks/timm_sweep.py --workers 16 --out sweep.jsonl      # resumes: names that are in the file are skipped
python benchmarks/timm_sweep.py --out sweep.jsonl --table           # Markdown, by family
python benchmarks/timm_sweep.py --out sweep.jsonl --table --write docs/timm.md

Each network lives in a process of its own, with a limit of time and memory. Verdicts:

right      everything that could be compared agrees, attention can be followed
refused    the same, but attention cannot be followed (the reason is given); the other methods are right
wrong      something disagrees, in float64, too: with torch.autograd, with brute force, with a map that is zero or NaN
crash      an error that is not one line of ours; the traceback is given
not built  timm cannot make it at any of the sizes (why)
too large  more parameters, seconds or memory than allowed
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")  # before torch: many processes share the machine
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

CLASSES = 13
SIZES = (96, 112, 128, 160, 192, 224, 256)
SMALL = (  # tried in this order, as far as an architecture takes them
    {"embed_dim": 48, "depth": 3, "num_heads": 3},
    {"embed_dim": 96, "depth": 3, "num_heads": 3},
    {"embed_dim": 192, "depth": 3, "num_heads": 3},
    {"depth": 3},
    {},
)
VERDICTS = ("right", "refused", "wrong", "crash", "not built", "too large")
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
Line = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What one network may take."""

    seconds: float = 120.0
    gigabytes: float = 8.0
    parameters: int = 60_000_000


# ------------------------------------------------------------------------------------------------- one network


def one(name: str, limits: Limits) -> Line:
    """Build a network and check it."""
    import torch

    import vitreous
    from vitreous.models.libraries import cropped

    torch.set_num_threads(1)
    torch.manual_seed(0)
    began = time.time()
    built = build(name, limits)
    if isinstance(built, str):
        large = built.startswith("parameters")
        return {"verdict": "too large" if large else "not built", "reason": built}
    net, size, options = built
    spice(net, size)
    preprocess = cropped(size, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    model = vitreous.Model(net, preprocess, name=name, classifier=True)
    left = max(5.0, 0.4 * (limits.seconds - (time.time() - began)))
    line = judged(vitreous.check(model, seconds=left))
    if line["verdict"] == "wrong":  # rounding, which a deep network with random weights may blow up?
        again = judged(
            vitreous.check(vitreous.Model(net.double(), preprocess, name=name, classifier=True), seconds=left)
        )
        line = {**again, "in float32": line["reason"]}
    return {**line, "size": size, "options": options}


def build(name: str, limits: Limits) -> tuple[Any, tuple[int, int], Line] | str:
    """The smallest variant that can be built and run, its input size and options; or why there is none."""
    import timm

    native = timm.get_pretrained_cfg(name)
    usual = tuple(native.input_size[1:]) if native is not None else (224, 224)
    said = ""
    for small in SMALL:
        for size in dict.fromkeys([*((side, side) for side in SIZES), usual]):
            for options in ({**small, "img_size": size}, small):
                try:
                    return made(name, size, options, limits), size, options
                except TooLarge as error:
                    said = str(error)
                    break
                except MemoryError:
                    raise
                except Exception as error:
                    said = said or f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            else:
                continue
            break  # of another size it has as many
    return said


class TooLarge(Exception):
    """It has too many parameters."""


def made(name: str, size: tuple[int, int], options: Line, limits: Limits) -> Any:
    """A network that gives classes for images of this size."""
    import timm
    import torch

    number = count(name, options)
    if number > limits.parameters:
        raise TooLarge(f"parameters: {number / 1e6:.0f} million")
    net = timm.create_model(name, num_classes=CLASSES, **options).eval()
    with torch.no_grad():
        output = net(torch.randn(2, 3, *size))
    if not isinstance(output, torch.Tensor) or output.shape != (2, CLASSES):
        raise ValueError(f"returns {getattr(output, 'shape', type(output).__name__)}, not classes")
    return net


def count(name: str, options: Line) -> int:
    """The number of parameters, without making them; 0 if the architecture cannot be made without memory."""
    import timm
    import torch

    try:
        with torch.device("meta"):
            net = timm.create_model(name, num_classes=CLASSES, **options)
        return sum(p.numel() for p in net.parameters())
    except (TypeError, AssertionError):
        raise  # it does not take these options
    except Exception:
        return 0


def spice(net: Any, size: tuple[int, int]) -> None:
    """Give weights that begin at zero a value, and normalisations the statistics of noise: else all maps are zero."""
    import torch
    from torch import nn

    for part, p in net.named_parameters():
        largest = float(p.detach().abs().max()) if p.numel() else 1.0
        if p.ndim > 1 and largest < 1e-3:
            nn.init.normal_(p, std=0.05)
        elif (
            p.ndim <= 1 and largest < 1e-2 and "bias" not in part.rpartition(".")[2]
        ):  # LayerScale, a last norm's weight
            nn.init.constant_(p, 0.3)
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        for module in norms:
            module.momentum = 1.0
        net.train()
        try:
            with torch.no_grad():
                net(torch.randn(8, 3, *size))
        except Exception:
            pass
        net.eval()


def judged(found: Any) -> Line:
    """The verdict on a check, and what the table needs of it."""
    crashed = [one for one in (*found.verified, *found.methods) if one.traceback]
    obstacle = found.layout.get("obstacle")
    line = {
        "verdict": "right",
        "reason": "",
        "parameters": found.facts["parameters"],
        "grid": found.layout.get("grid"),
        "layers": found.layout.get("layers"),
        "works": len(found.of("works")),
        "refused": len(found.of("refused")),
        "not tried": found.of("not tried"),
        "verified": {one.what: [one.state, one.error] for one in found.verified},
        "reasons": sorted({one.reason.partition(" ")[2] for one in found.methods if one.status == "refused"}),
    }
    if found.failure:
        line |= {"verdict": "refused", "reason": found.failure}
    elif crashed:
        line |= {"verdict": "crash", "reason": "; ".join(found.problems), "traceback": crashed[0].traceback}
    elif found.problems:
        line |= {"verdict": "wrong", "reason": "; ".join(found.problems)}
    elif obstacle and not found.layout.get("stages"):
        line |= {"verdict": "refused", "reason": obstacle}
    return line


# --------------------------------------------------------------------------------------------- all, in processes


def child(name: str, limits: Limits, pipe: Any) -> None:
    """One network in a process of its own."""
    import resource
    import warnings

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (int(limits.gigabytes * 2**30),) * 2)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, what timm says while it builds
    try:
        line = one(name, limits)
    except BaseException as error:
        short = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        reason = "memory" if short else f"{type(error).__name__}: {error}"
        line = {"verdict": "too large" if short else "crash", "reason": reason}
        if not short:
            line["traceback"] = traceback.format_exc()
    pipe.send(json.dumps(line, default=str))
    pipe.close()


def sweep(names: Iterator[str], limits: Limits, workers: int) -> Iterator[Line]:
    """Lines as they come; a network that takes too long is ended."""
    context = multiprocessing.get_context("forkserver")  # torch and timm are imported once
    context.set_forkserver_preload(["timm", "vitreous.api", "vitreous.inspect.check.check", "vitreous.methods"])
    running: dict[str, tuple[Any, Any, float]] = {}
    while True:
        while len(running) < workers and (name := next(names, None)) is not None:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(name, limits, theirs), daemon=True)
            process.start()
            theirs.close()
            running[name] = (process, ours, time.time())
        if not running:
            return
        time.sleep(0.02)
        for name, (process, pipe, began) in list(running.items()):
            line: Line | None = None
            took = time.time() - began
            if pipe.poll():
                try:
                    line = json.loads(pipe.recv())
                except EOFError:
                    process.join()
                    killed = process.exitcode in (-9, 137)
                    said = f"ended with code {process.exitcode}"
                    line = {"verdict": "too large" if killed else "crash", "reason": said}
            elif took > limits.seconds:
                line = {"verdict": "too large", "reason": f"more than {limits.seconds:.0f} s"}
                process.kill()
            if line is not None:
                process.join(5)
                process.kill()
                del running[name]
                yield {"name": name, "seconds": round(took, 1), **line}


def families() -> dict[str, str]:
    """The file of timm in which each architecture stands."""
    import timm

    return {name: module for module in timm.list_modules() for name in timm.list_models(module=module)}


def read(file: Path) -> list[Line]:
    """The lines so far; of several of one name, the last."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return list({line["name"]: line for line in lines}.values())


# ----------------------------------------------------------------------------------------------------- the table


def table(lines: list[Line]) -> str:
    """Verdicts by family, then what is wrong and what was not run."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[line["family"]].append(line)
    total = Counter(line["verdict"] for line in lines)
    said = ", ".join(f"{total[verdict]} {verdict}" for verdict in VERDICTS if total[verdict])
    rows = [
        f"{len(lines)} architectures: {said}.",
        "",
        f"| family | {' | '.join(VERDICTS)} | refused, because the model |",
    ]
    rows.append("|---" * (len(VERDICTS) + 2) + "|")
    for family, group in sorted(groups.items()):
        found = Counter(line["verdict"] for line in group)
        numbers = " | ".join(str(found[verdict] or "") for verdict in VERDICTS)
        why = Counter(cell(line["reason"]) for line in group if line["verdict"] == "refused")
        rows.append(f"| {family} | {numbers} | {'; '.join(f'{reason} ({n})' for reason, n in why.most_common(3))} |")
    for verdict in ("wrong", "crash", "not built", "too large"):
        chosen = [line for line in lines if line["verdict"] == verdict]
        if chosen:
            rows += ["", f"**{verdict.capitalize()}**", ""]
            by_reason: dict[str, list[str]] = defaultdict(list)
            for line in chosen:
                by_reason[cell(line["reason"])].append(f"`{line['name']}`")
            rows += [f"* {reason}: {', '.join(sorted(names))}" for reason, names in sorted(by_reason.items())]
    return "\n".join(rows)


def cell(text: str) -> str:
    """A reason in a table: one line; numbers that differ from model to model are left out."""
    short = " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
    short = short.partition(" (layers of")[0].partition(" (vitreous sees")[0]
    return short if len(short) <= 240 else f"{short[:239]}…"


def written(page: Path, text: str) -> None:
    """Replace what stands between the markers of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or patterns, separated by commas")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for one network")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="limit for one network")
    parser.add_argument("--total", type=float, help="begin no network after this many seconds; run again to go on")
    parser.add_argument("--again", default="", help="verdicts to try again, separated by commas: wrong,crash")
    parser.add_argument("--out", type=Path, default=Path("timm_sweep.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of what is in the file")
    parser.add_argument("--write", type=Path, help="with --table: a page to put it into")
    given = parser.parse_args()
    lines = read(given.out) if given.out.exists() else []
    if given.table:
        text = table(lines)
        print(text) if given.write is None else written(given.write, text)
        return
    family = families()
    done = {line["name"] for line in lines if line["verdict"] not in given.again.split(",")}
    wanted = [name for name in family if any(fnmatch.fnmatch(name, p) for p in given.only.split(","))]
    names, began = [name for name in wanted if name not in done], time.time()
    print(f"{len(wanted)} architectures, {len(wanted) - len(names)} done before", flush=True)

    def in_time() -> Iterator[str]:
        for name in names:
            if given.total is None or time.time() - began < given.total:
                yield name

    limits = Limits(given.seconds, given.gigabytes)
    with given.out.open("a", encoding="utf-8") as file:
        for i, line in enumerate(sweep(in_time(), limits, given.workers), 1):
            file.write(json.dumps({"family": family[line["name"]], **line}) + "\n")
            file.flush()
            print(f"{i}/{len(names)} {line['name']}: {line['verdict']} {line['reason'][:100]}", flush=True)


if __name__ == "__main__":
    main()
