"""How well ablations are predicted, and what pruning by them is worth, on real networks.

python benchmarks/ablate.py --weights deit_tiny_patch16_224.safetensors --images imagenet-samples --device cuda

`--images`: a folder of photos with a labels.csv (name, imagenet_index). Two networks, DeiT-Tiny and the embedded one.
Every attention head, MLP and layer is ablated in three ways on all photos; predicted changes are compared with the true
ones. Then heads are pruned in the order of their importance on one half of the photos, and the accuracy is measured on
the other half, against orders that are random. What is finished is kept in `--work` and not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitreous
from vitreous._support.statistics import intervals, mean_of
from vitreous.evaluation.leaderboard import pool_of
from vitreous.images.dataset import read_data
from vitreous.inspect.ablate.ablate import Ablation
from vitreous.inspect.ablate.blocks import find_places
from vitreous.inspect.ablate.sources import Source
from vitreous.inspect.ablate.study import together, without
from vitreous.plot.curves import Curve, curves_figure
from vitreous.plot.figure import save_figure

RESULTS = Path(__file__).parent / "results"
DEIT = "deit_tiny_patch16_224"
WHATS, WAYS = ("heads", "mlps", "layers"), ("zero", "mean", "resample")
POINTS = {"heads": 1, "mlps": 8, "layers": 8}  # gradients that are averaged
SHARES = (0.06, 0.11, 0.17, 0.25, 0.33, 0.42, 0.5, 0.67)  # of the heads that are pruned
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
PATHS = {"first_order": "first order", "first_order_size": "first order, sizes", "averaged": "averaged gradients"}


def said(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def half(model: vitreous.Model, data: Any, numbers: Sequence[int], batch: int) -> Iterator[Any]:
    """Traces of some photos of a data set."""
    pool = pool_of(model, data, "top-1")
    for start in range(0, len(numbers), batch):
        yield together(pool, [(number, pool.image(number)) for number in numbers[start : start + batch]])


def right_without(traces: Sequence[Any], labels: np.ndarray, gone: set[tuple[int, int]]) -> np.ndarray:
    """Which photos are classified correctly without some heads, all zeroed at once."""
    answers = []
    with torch.inference_mode(False), torch.no_grad():
        for trace in traces:
            own = without(find_places("heads", trace), trace, Source(), gone) if gone else trace
            answers.append(own.output.argmax(1).cpu().numpy())
    return np.concatenate(answers) == labels


def pruned(found: Ablation, batch: int, seeds: int) -> dict[str, Any]:
    """Accuracy on one half of the photos without the heads that the other half needs least."""
    model, worth, data = found.model, found.worth, found.data
    labels = np.array([sample.label for sample in data.samples])
    chosen, tested = np.arange(0, len(labels), 2), np.arange(1, len(labels), 2)
    assert worth.images == len(labels), "a photo could not be read"
    traces = list(half(model, data, tested.tolist(), batch))
    orders: dict[str, list[np.ndarray]] = {}
    for name, series in (("true", worth.changes), ("averaged", worth.averaged), ("first order", worth.predicted)):
        orders[name] = [np.argsort(-mean_of(series["log_probability"][:, chosen]), kind="stable")]
    size = -mean_of(np.abs(worth.predicted["log_probability"][:, chosen]))
    orders["first order, size"] = [np.argsort(-size, kind="stable")]
    orders["random"] = [np.random.default_rng(seed).permutation(len(worth.names)) for seed in range(seeds)]
    counts = sorted({max(1, round(share * len(worth.names))) for share in SHARES})
    parts = find_places("heads", traces[0]).all
    whole = right_without(traces, labels[tested], set())
    right = {name: np.zeros((len(counts), len(tested))) for name in orders}
    for i, count in enumerate(counts):
        for name, several in orders.items():
            each = [right_without(traces, labels[tested], {parts[k] for k in order[:count]}) for order in several]
            right[name][i] = np.mean(each, 0)
        said(f"  {count} heads: " + ", ".join(f"{name} {values[i].mean():.3f}" for name, values in right.items()))
    rows = {}
    for name, values in right.items():
        low, high = intervals(values)
        gain = values - right["random"]
        ends, over = intervals(gain), intervals(gain.mean(0)[None])[:, 0]
        rows[name] = {
            "accuracy": values.mean(1).tolist(),
            "low": low.tolist(),
            "high": high.tolist(),
            "gain": gain.mean(1).tolist(),
            "gain_low": ends[0].tolist(),
            "gain_high": ends[1].tolist(),
            "mean_gain": [float(gain.mean()), float(over[0]), float(over[1])],
        }
    return {"counts": counts, "whole": float(whole.mean()), "images": len(tested), "seeds": seeds, "orders": rows}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["| network | ablated | by | " + " | ".join(PATHS.values()) + " |", "|---|---|---|" + "---|" * len(PATHS)]

    def cell(found: dict[str, Any] | None) -> str:
        return (
            "—"
            if found is None
            else f"{found['r']:.2f} [{found['low']:.2f}, {found['high']:.2f}], ρ {found['rho']:.2f}"
        )

    for name, one in results["models"].items():
        for key, made in one["agreement"].items():
            what, by = key.split()
            cells = " | ".join(cell(made["log_probability"][path]) for path in PATHS)
            lines.append(f"| {name} | {what} | {by} | {cells} |")
    for name, one in results["models"].items():
        if "pruned" not in one:
            continue
        found = one["pruned"]
        lines += ["", f"{name}: accuracy {found['whole']:.1%} on {found['images']} photos with all heads; without", ""]
        lines += ["| order | " + " | ".join(map(str, found["counts"])) + " | mean gain over random, points |"]
        lines += ["|---" * (len(found["counts"]) + 2) + "|"]
        for order, row in found["orders"].items():
            gain, low, high = (100 * x for x in row["mean_gain"])
            last = "control" if order == "random" else f"{gain:+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")
            cells = " | ".join(f"{100 * x:.1f}" for x in row["accuracy"])
            lines.append(f"| {order} | {cells} | {last} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], folder: Path) -> None:
    """The accuracy of pruned networks as curves."""
    for name, one in results["models"].items():
        if "pruned" in one:
            found = one["pruned"]
            curves = {
                order: Curve(found["counts"], *(100 * np.array(row[key]) for key in ("accuracy", "low", "high")))
                for order, row in found["orders"].items()
            }
            title, up = f"{name} without some of its heads", f"accuracy in %, {found['images']} photos"
            figure = curves_figure(curves, title, better="higher", across="heads that are pruned", up=up)
            save_figure(figure, folder / f"ablate-pruned-{name}.png")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--weights", type=Path, help="of DeiT-Tiny; without it, only the embedded network")
    words.add_argument("--images", type=Path, help="a folder of photos with a labels.csv")
    words.add_argument("--device", default=None)
    words.add_argument("--limit", type=int, default=None, help="so many photos, spread evenly")
    words.add_argument("--seeds", type=int, default=10, help="random orders")
    words.add_argument("--batch", type=int, default=None)
    words.add_argument("--only", default=",".join(WHATS), help="heads, mlps, layers")
    words.add_argument("--work", type=Path, default=Path("vitreous-out"), help="where finished shards are kept")
    words.add_argument("--results", type=Path, default=RESULTS / "ablate.json")
    words.add_argument("--table", action="store_true", help="only print the table of earlier results")
    words.add_argument("--figures", type=Path, default=None, help="also draw figures into this folder")
    words.add_argument("--write", type=Path, default=None, help="also put the table into this page, at its place")
    given = words.parse_args()
    if given.table:
        results = json.loads(given.results.read_text(encoding="utf-8"))
        print(table(results))
    else:
        results = measured(given)
    if given.figures is not None:
        draw(results, given.figures)
    if given.write is not None:
        page = given.write.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        given.write.write_text(
            f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8"
        )


def measured(given: argparse.Namespace) -> dict[str, Any]:
    data = read_data(given.images).take(None, given.limit, 0)
    networks = {"DeiT-Tiny": lambda: vitreous.load(DEIT, given.weights, given.device)} if given.weights else {}
    networks["embedded"] = lambda: vitreous.load(device=given.device)
    begun = time.time()
    results: dict[str, Any] = {"images": len(data), "device": given.device or "cpu", "models": {}}
    for name, load in networks.items():
        model = load()
        one = results["models"][name] = {"agreement": {}, "said": {}}
        for what in given.only.split(","):
            for by in WAYS:
                asked = {"points": POINTS[what], "control": by == "zero", "batch": given.batch, "workers": 0}
                found = vitreous.ablate(model, data, what, by=by, out=given.work, **asked)
                numbers = found.findings.numbers
                one["agreement"][f"{what} {by}"] = numbers["agreement"]
                one["said"][f"{what} {by}"] = [found.said, *found.findings.told]
                one["accuracy"] = numbers["accuracy"]
                made = numbers["agreement"]["log_probability"]
                told = ", ".join(f"{path} {made[path]['r']:.2f}" for path in PATHS if made[path] is not None)
                said(f"{name}, {what} by {by}: {told}; {found.said}")
                if (what, by) == ("heads", "zero"):
                    if given.figures is not None:
                        for chart in found.findings.charts:
                            save_figure(chart.draw(), given.figures / f"ablate-{name}-{chart.name}.png")
                    one["pruned"] = pruned(
                        found, given.batch or (256 if model.device.type == "cuda" else 16), given.seeds
                    )
                    if given.figures is not None:
                        draw(results, given.figures)
                results["seconds"] = round(time.time() - begun)
                given.results.parent.mkdir(parents=True, exist_ok=True)
                given.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    said(f"{results['seconds']} s")
    return results


if __name__ == "__main__":
    main()
