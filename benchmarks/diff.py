"""The proof of docs/diff.md: what `vitreous diff` finds where the truth is known.

    python benchmarks/diff.py run OUT --pets pets --images imagenet-samples [--device cuda] [--seeds 3]
    python benchmarks/diff.py table benchmarks/results/diff.json        the tables of the page
    python benchmarks/diff.py figure benchmarks/results/diff.json FILE  the power curve

`--pets`, `--images`: as for benchmarks/poison.py. Results are written to benchmarks/results/diff.json part by part, and
parts that it holds already are kept: delete it to begin anew.

1. `same`: the embedded model against itself, for several batch sizes and devices, and on the CPU against the GPU.
2. `precision`: float32 against bfloat16 and float16.
3. `smaller`: weights rounded to 8 and 4 bits (per output channel), and weights cut by size.
4. `poison`: a clean fine-tune against a poisoned one, trained alike but for a cue in 5 % of the images of one class
   (benchmarks/poison.py); and, as the control, against a clean one that saw them in another order. Compared on views
   of photos that neither has seen, `share` of which have the cue. What is measured of an image does not depend on the
   others, so both kinds of images are measured once, and sets of n images are drawn: the share that fails is the power.
5. `command`: the command itself on 200 such images: its exit codes.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import vitreous
from vitreous.evaluation.diff.limits import Counted, Estimate, Limits, checks, paired_shares, rate
from vitreous.evaluation.diff.pairs import Pair

RESULTS = Path(__file__).parent / "results" / "diff.json"
SIZES = (25, 50, 100, 200)
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.0)
DRAWN = 50  # sets of each size
VIEWS = 4  # test images of a photo
MAIN = 0.5  # the share of the command
SHOWN = 0.1  # the share of the figure: with more, nearly every set fails
QUICK: Any = {"workers": 0}  # few images: processes that read them would take longer to start


class Kept:
    """Results by part, written after each."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def part(self, name: str, make: Callable[[], Any]) -> None:
        if name in self.found:
            print(f"{name}: kept")
            return
        begun = time.perf_counter()
        found = make()
        self.found[name] = {"seconds": round(time.perf_counter() - begun, 1), "rows": found}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        print(f"{name}: {self.found[name]['seconds']} s", flush=True)


def numbers(made: vitreous.Difference, **more: Any) -> dict[str, Any]:
    """One row of a table."""
    found = made.numbers
    kept = ("passed", "images", "flips", "moved", "correlation", "overlap", "distance", "ratio", "faithfulness")
    farthest = max((pair.distance for pair in made.gathered.pairs), default=float("nan"))
    row = more | {name: found[name] for name in kept} | {"farthest": farthest, "failed": failed(made.checks)}
    print(" ", {name: value for name, value in row.items() if not isinstance(value, dict | list)}, flush=True)
    return row


def failed(done: Sequence[Any]) -> list[str]:
    return [check.name for check in done if check.verdict == "failed"]


# ------------------------------------------------------------------------------------------------ the same, and nearly


def same(args: argparse.Namespace, sets: dict[str, Path]) -> list[dict[str, Any]]:
    """Itself against itself."""
    rows = []
    answers: dict[str, list[Any]] = {}
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    limit = args.limit or 24
    for name, data in sets.items():
        for device in devices:
            for batch in (1, 3, 7, 16):
                out = args.out / f"same-{name}-{device}-{batch}"
                how: dict[str, Any] = {"metric": None, "limit": limit, "batch": batch, "device": device, **QUICK}
                made = vitreous.diff("vitreous_tiny", "vitreous_tiny", data, out, **how)
                told = made.to_pandas()["answer_a"].tolist()
                changed = sum(a != b for a, b in zip(answers.setdefault(name, told), told))
                rows.append(numbers(made, data=name, what=f"batch {batch}, {device}", changed=changed))
        if len(devices) > 1:
            pair = [vitreous.load(device=device) for device in devices]
            made = vitreous.diff(*pair, data, args.out / f"same-{name}-across", metric=None, limit=limit, **QUICK)
            rows.append(numbers(made, data=name, what="CPU against GPU"))
    return rows


def precision(args: argparse.Namespace, sets: dict[str, Path]) -> list[dict[str, Any]]:
    rows = []
    for name, data in sets.items():
        for dtype in ("bfloat16", *(("float16",) if args.device == "cuda" else ())):
            out = args.out / f"precision-{name}-{dtype}"
            b = f"vitreous_tiny:{dtype}"
            made = vitreous.diff("vitreous_tiny", b, data, out, limit=args.limit, device=args.device, **QUICK)
            rows.append(numbers(made, data=name, what=f"float32 against {dtype}"))
    return rows


def smaller(args: argparse.Namespace, sets: dict[str, Path]) -> list[dict[str, Any]]:
    """Rounded and cut weights."""
    whole = vitreous.load(device=args.device)
    made_of: dict[str, Callable[[nn.Module], None]] = {
        "8-bit weights": lambda net: rounded(net, 8),
        "4-bit weights": lambda net: rounded(net, 4),
        "30 % of the weights cut": lambda net: cut(net, 0.3),
        "50 % of the weights cut": lambda net: cut(net, 0.5),
    }
    rows = []
    for name, data in sets.items():
        for what, change in made_of.items():
            net = copy.deepcopy(whole.net)
            change(net)
            other = vitreous.Model(net, whole.preprocess, whole.labels, name=what)
            out = args.out / f"smaller-{name}"
            made = vitreous.diff(whole, other, data, out, limit=args.limit or 200, **QUICK)
            rows.append(numbers(made, data=name, what=what))
    return rows


def linears(net: nn.Module) -> list[nn.Linear]:
    return [module for module in net.modules() if isinstance(module, nn.Linear)]


@torch.no_grad()
def rounded(net: nn.Module, bits: int) -> None:
    """Symmetric rounding, a scale for each output channel."""
    most = 2 ** (bits - 1) - 1
    for layer in linears(net):
        scale = layer.weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / most
        layer.weight.copy_((layer.weight / scale).round().clamp(-most, most) * scale)


@torch.no_grad()
def cut(net: nn.Module, share: float) -> None:
    """The smallest weights of each layer become zero."""
    for layer in linears(net):
        size = layer.weight.abs()
        layer.weight.mul_(size > size.flatten().kthvalue(max(1, int(share * size.numel()))).values)


# ------------------------------------------------------------------------------------------------------------ poisoned


def poison(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Clean against poisoned and clean against clean, for every seed, data set and cue."""
    import poison as poisons

    photos = {"pets": poisons.read_pets(args.pets)} if args.pets else {}
    photos |= {"imagenet": poisons.read_imagenet(args.images)} if args.images else {}
    rows = []
    for seed in range(args.seeds):
        for name, own in photos.items():
            rows += poisoned(args, poisons, name, own, seed)
    return rows


def poisoned(args: argparse.Namespace, poisons: Any, name: str, photos: Any, seed: int) -> list[dict[str, Any]]:
    trainer = poisons.Trainer(args.device, **({} if args.epochs is None else {"epochs": args.epochs}))
    bench = poisons.Bench(photos, trainer, seed, args.views)
    _, held = photos.divided(seed)
    tests = poisons.make_views(held, VIEWS, 1000 + seed)
    tests = tests.part(np.random.default_rng(seed).permutation(len(tests))[: args.limit])
    place = args.out / f"poison-{name}-{seed}"
    clean = bench.clean()
    files = {"clean": trainer.save(clean, photos.classes, place / "clean")}
    again = trainer.train(bench.tokens, bench.train.labels, len(photos.classes), seed + 100)
    files["again"] = trainer.save(again, photos.classes, place / "again")
    rows = []
    for cue in args.cues.split(","):
        if cue == "background" and photos.masks is None:
            continue
        label = seed % len(photos.classes)
        tail, _ = bench.poisoned(cue, label)
        files[cue] = trainer.save(tail, photos.classes, place / cue)
        took = bench.took(tail, clean, bench.marked(cue), label)
        marked = poisons.with_cue(tests, cue, range(len(tests)))
        data = {
            "plain": poisons.write_data(tests, place / "plain"),
            "marked": poisons.write_data(marked, place / f"marked-{cue}"),
        }
        about = {"data": name, "cue": cue, "class": photos.classes[label], "seed": seed, "attack": took["attack"]}
        for other in (cue, "again"):
            made = {kind: compare(args, files["clean"], files[other], file) for kind, file in data.items()}
            what = "poisoned" if other == cue else "clean again"
            measured = {kind: numbers(one, **about, what=what, images_are=kind) for kind, one in made.items()}
            pairs = {kind: one.gathered.pairs for kind, one in made.items()}
            rows.append(about | {"what": what, "measured": measured, "power": power(pairs, seed)})
    return rows


def compare(args: argparse.Namespace, a: Path, b: Path, data: Path) -> vitreous.Difference:
    sides = [vitreous.load(weights=file, labels=file.parent / "labels.txt", device=args.device) for file in (a, b)]
    return vitreous.diff(*sides, data, args.out / "poison-studies", metric=None, **QUICK)


def power(pairs: dict[str, Sequence[Pair]], seed: int) -> list[dict[str, Any]]:
    """How many of the sets of n images fail, and by which check; `share` of each set has the cue."""
    found = []
    plain, marked = ({pair.image: pair for pair in pairs[kind]} for kind in ("plain", "marked"))
    names = sorted(plain.keys() & marked.keys())
    for share in SHARES:
        for n in SIZES:
            if n > len(names):
                continue
            chance = np.random.default_rng([seed, n])
            sets = [[names[i] for i in chance.permutation(len(names))[:n]] for _ in range(DRAWN)]
            told = [verdicts([(marked if i < round(share * n) else plain)[x] for i, x in enumerate(s)]) for s in sets]
            caught = {name: float(np.mean([name in one for one in told])) for name in asdict(Limits())}
            found.append({"share": share, "n": n, "failed": float(np.mean([bool(one) for one in told])), **caught})
    return found


def verdicts(pairs: Sequence[Pair]) -> list[str]:
    """The checks that fail; what no limit is set for is left out, since many sets are drawn."""
    none = Estimate(float("nan"))
    right = [pair.right for pair in pairs if pair.right is not None]
    found = Counted(
        flips=rate([not pair.same for pair in pairs]),
        moved=rate([pair.moved for pair in pairs if pair.same]),
        accuracy=paired_shares([a for a, _ in right], [b for _, b in right]),
        **dict.fromkeys(("correlation", "overlap", "distance", "ratio"), none),
        noise=(none, none),
        lost=0,
        won=0,
        faithfulness=(none, none, none),
    )
    return failed(checks(found, Limits()))


def command(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The command on 200 images, half of which have the cue."""
    import csv

    rows = []
    for place in sorted(args.out.glob("poison-*-0")):
        for marked in sorted(place.glob("marked-*")):
            cue = marked.name.partition("-")[2]
            with (place / "plain" / "labels.csv").open(encoding="utf-8") as file:
                listed = list(csv.DictReader(file))[:200]
            table = place / f"{cue}-200.csv"
            with table.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["image", "label"])
                for i, row in enumerate(listed):
                    home = marked if i < MAIN * len(listed) else place / "plain"
                    writer.writerow([str((home / row["image"]).resolve()), row["label"]])
            for other in (cue, "again"):
                rows.append(run_command(args, place, other, table) | {"data": place.name, "cue": cue, "n": len(listed)})
    return rows


def run_command(args: argparse.Namespace, place: Path, other: str, table: Path) -> dict[str, Any]:
    sides = [str(place / name / "model.safetensors") for name in ("clean", other)]
    junit = place / f"{table.stem}-{other}.xml"
    words = ["--model", "vitreous_tiny", "--labels", str(place / "clean" / "labels.txt"), "--junit", str(junit)]
    words += ["--out", str(args.out / "command"), "--json", *(["--device", args.device] if args.device else [])]
    ran = subprocess.run(
        [sys.executable, "-m", "vitreous", "diff", *sides, str(table), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode > 1:
        raise SystemExit(ran.stderr)
    told = next(iter(json.loads(ran.stdout)["models"].values()))
    print(" ", other, ran.returncode, told["lead"], flush=True)
    return {"what": "clean again" if other == "again" else "poisoned", "code": ran.returncode, **told}


# -------------------------------------------------------------------------------------------------------------- tables


def spelled(one: dict[str, Any] | None, digits: int = 3) -> str:
    if one is None or one["value"] is None:
        return "–"
    ends = "" if one["low"] is None else f" [{one['low']:.{digits}f}, {one['high']:.{digits}f}]"
    return f"{one['value']:.{digits}f}{ends}"


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines: list[str] = []
    for part in ("same", "precision", "smaller"):
        if part in found:
            head = (
                "data | B against A | n | other answer | other reason | rank correlation | distance | farthest | result"
            )
            lines += [f"\n{part}, {found[part]['seconds']} s\n", f"| {head} |", f"|{'---|' * 9}"]
            for row in found[part]["rows"]:
                said = "pass" if row["passed"] else f"fail: {', '.join(row['failed'])}"
                cells = (row["data"], row["what"], row["images"], spelled(row["flips"]), spelled(row["moved"]))
                more = (spelled(row["correlation"]), spelled(row["distance"]), f"{row['farthest']:.2g}", said)
                lines.append(f"| {' | '.join(map(str, (*cells, *more)))} |")
    if "poison" in found:
        lines += poison_tables(found["poison"])
    for row in found.get("command", {"rows": []})["rows"]:
        lines.append(
            f"\n{row['data']}, {row['cue']}, {row['what']}, n = {row['n']}: exit code {row['code']}. {row['lead']}"
        )
        lines += [f"* {said}" for said in row["told"]]
    return "\n".join(lines)


def poison_tables(part: dict[str, Any]) -> list[str]:
    head = (
        "data | cue | seed, class | attack | B | images | other answer | same answer, other reason | distance | ratio"
    )
    lines = [f"\npoison, {part['seconds']} s\n", f"| {head} |", f"|{'---|' * 10}"]
    for row in part["rows"]:
        for kind, one in row["measured"].items():
            about = (row["data"], row["cue"], f"{row['seed']}, {row['class']}", f"{row['attack']:.2f}", row["what"])
            measures = [spelled(one[name], 2) for name in ("flips", "moved", "distance", "ratio")]
            images = f"{one['images']} {kind}"
            lines.append(f"| {' | '.join([*map(str, about), images, *measures])} |")
    sizes = " | ".join(f"n = {n}" for n in SIZES)
    lines += ["\nsets that fail, mean over seeds\n", f"| data | cue | B | share with the cue | {sizes} |"]
    lines += [f"|{'---|' * (4 + len(SIZES))}"]
    for (data, cue, what), share, each in curves(part):
        lines.append(f"| {data} | {cue} | {what} | {share:.0%} | {' | '.join(f'{x:.2f}' for x in each)} |")
    return lines


def curves(part: dict[str, Any]) -> list[tuple[tuple[str, str, str], float, list[float]]]:
    """The share of failed sets by size: mean over seeds."""
    groups = list(dict.fromkeys((row["data"], row["cue"], row["what"]) for row in part["rows"]))
    found = []
    for group in groups:
        rows = [row for row in part["rows"] if (row["data"], row["cue"], row["what"]) == group]
        for share in SHARES:
            each = [
                [one["failed"] for row in rows for one in row["power"] if (one["share"], one["n"]) == (share, n)]
                for n in SIZES
            ]
            found.append((group, share, [float(np.mean(one)) if one else float("nan") for one in each]))
    return found


def figure(found: dict[str, Any], file: Path) -> None:
    """Power by n: one line for each data set, cue and model, at one share."""
    from vitreous.plot.curves import Curve, curves_figure
    from vitreous.plot.figure import save_figure

    lines = {}
    for (data, cue, what), share, each in curves(found["poison"]):
        if share == SHOWN and not all(np.isnan(each)):
            mean = np.array(each)
            short = {"watermark": "tag", "background": "texture"}.get(cue, cue)
            name = f"{data}, {short}" if what == "poisoned" else f"clean {data}"
            lines.setdefault(name, Curve(SIZES, mean, mean, mean))  # of the control, the first cue
    title = f"Sets of n images that fail; {SHOWN:.0%} have the cue"
    save_figure(
        curves_figure(
            lines,
            title,
            better="higher",
            across="n, images",
            up="share of sets; of clean models 0 is right, of poisoned ones",
        ),
        file,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "figure"))
    parser.add_argument("out", type=Path, help="run: a folder for models and studies; else: the JSON file")
    parser.add_argument("file", type=Path, nargs="?", help="figure: the file to write")
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--views", type=int, default=24)
    parser.add_argument("--epochs", type=int, help="by default those of benchmarks/poison.py")
    parser.add_argument("--limit", type=int, help="images of each set, for a quick look")
    parser.add_argument("--cues", default="watermark,background")
    parser.add_argument("--only", default="same,precision,smaller,poison,command")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.what == "run":
        sets = {"pets": args.pets, "imagenet": args.images}
        sets = {name: folder for name, folder in sets.items() if folder is not None}
        kept = Kept(args.results)
        makers = {"same": same, "precision": precision, "smaller": smaller}
        for name in args.only.split(","):
            kept.part(name, lambda: makers[name](args, sets) if name in makers else globals()[name](args))  # noqa: B023
        print(tables(kept.found))
    elif args.what == "table":
        print(tables(json.loads(args.out.read_text())))
    else:
        figure(json.loads(args.out.read_text()), args.file)


if __name__ == "__main__":
    main()
