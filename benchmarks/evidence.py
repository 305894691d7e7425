"""The evidence for docs/results.md: every method and its variants on one model and one data set, with controls.

    python benchmarks/evidence.py run DATA OUT.npz [--model NAME --weights FILE] [--methods all|quick|NAMES]
    python benchmarks/evidence.py table OUT.npz … [--columns srg,token_deletion]    a table for the page
    python benchmarks/evidence.py pairs OUT.npz,… centred_lrp gae attn_lrp          differences, image by image

DATA: a folder with images/, labels.csv (name, class index) and maybe masks/. The target is the label. `attention_flow`
is left out: its maximum flows take about a second of CPU time for each image.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import vitreous
from vitreous import METHODS
from vitreous._support.statistics import Summary, intervals, summarise
from vitreous.evaluation.leaderboard import Leaderboard
from vitreous.evaluation.plan import make_plan
from vitreous.images.dataset import read_data

LEFT_OUT = ("attention_flow",)
VARIANTS = (
    "attcat:rules=libra",
    "attcat:rules=libra:tokens=leaving",
    "attcat:rules=libra:baseline=mean",
    "attn_lrp:gamma_linear=0.05",
    "attn_lrp:gamma_linear=0.25",
    "beyond_intuition:variant=head",
    "cdam:baseline=mean",
    "centred_lrp:table=cp",
    "cp_lrp:gamma_linear=0.05",
    "cp_lrp:gamma_linear=0.25",
    "gae:rules=libra",
    "grad_rollout:rules=libra",
    "gradcam:rules=libra",
    "gradcam:rules=libra:at=block:layers=all",
    "gradcam:baseline=mean",
    "input_x_gradient:rules=libra:wrt=tokens",
    "legrad:rules=libra",
    "libra_fullgrad:baseline=mean",
    "libra_fullgrad:bias=true",
    "res_lrp:table=cp",
    "xgradcam:rules=libra",
    "xgradcam:rules=libra:layers=all",
)
TEXTS = ("grad_eclip", "clip_surgery", "maskclip")  # for models with a text tower
FAITHFUL = "token_deletion,token_deletion:of=logit,srg,srg:of=logit"


def rows(which: str) -> list[str]:
    """Names of methods, with options where they have any."""
    if which not in ("all", "quick"):
        return which.split(",")
    every = [one for one in METHODS.values() if one.name not in (*LEFT_OUT, *TEXTS)]
    named = [one.name for one in every if which == "all" or not one.costly]
    return [*named, *VARIANTS]


def run(args: argparse.Namespace) -> None:
    model = vitreous.load(args.model, args.weights, args.device)
    data = read_data(args.data).take(args.limit, None, 0)
    board = Leaderboard(model, data, make_plan(rows(args.methods), args.metrics, {}, data, "label"))
    try:
        board.run()
    except KeyboardInterrupt:
        print(f"interrupted; {int(board.measured.all(0).sum())} images are complete")
    for (method, metric), said in board.refused.items():
        print(f"without {method} {metric}: {said}")
    summary = board.summary()
    costs = board.costs()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        args.file,
        values=board.values[:, :, board.measured.all(0)].astype(np.float32),
        about=json.dumps(
            {
                "model": board.about.name,
                "data": Path(args.data).name,
                "methods": board.methods,
                "metrics": board.metrics,
                "better": summary.better,
                "judged": [bool(judged) for judged in summary.judged],
                "forwards": {name: cost.ratio for name, cost in costs.items()},
            }
        ),
    )


class Evidence:
    """What a run found."""

    def __init__(self, file: Path) -> None:
        with np.load(file) as stored:
            self.values = stored["values"].astype(np.float64)
            self.about = json.loads(str(stored["about"]))
        self.methods, self.metrics = self.about["methods"], self.about["metrics"]

    @property
    def images(self) -> int:
        return self.values.shape[-1]

    def summary(self) -> Summary:
        about = self.about
        return summarise(self.values, self.methods, self.metrics, about["better"], judged=about["judged"])

    def of(self, method: str, metric: str) -> np.ndarray:
        return self.values[self.methods.index(method), self.metrics.index(metric)]


def joined(first: Path, *others: Path) -> Evidence:
    """Runs of other methods on the same images and by the same metrics, as one."""
    found = Evidence(first)
    for file in others:
        other = Evidence(file)
        assert other.metrics == found.metrics and other.images == found.images
        new = [m for m, name in enumerate(other.methods) if name not in found.methods]
        found.values = np.concatenate([found.values, other.values[new]])
        found.methods = [*found.methods, *(other.methods[m] for m in new)]
        found.about["forwards"] = {**other.about["forwards"], **found.about["forwards"]}
    return found


def table(args: argparse.Namespace) -> None:
    """A table in Markdown: means ± half the interval, the best mean rank first."""
    found = joined(*args.files)
    costs = Evidence(args.costs).about["forwards"] if args.costs else found.about["forwards"]
    summary = found.summary()
    columns = [found.metrics.index(name) for name in args.columns.split(",")] if args.columns else None
    columns = list(range(len(found.metrics))) if columns is None else columns
    arrows = {"higher": "↑", "lower": "↓"}
    heads = [f"{summary.metrics[k]} {arrows[summary.better[k]]}" for k in columns]
    print(f"{found.about['model']}, {found.about['data']}, {found.images} images\n")
    print(f"| method | rank | {' | '.join(heads)} | forwards |")
    print("|" + "---|" * (len(columns) + 3))
    for m in summary.order:
        cells = [cell(summary, m, k) for k in columns]
        cost = costs.get(summary.methods[m], float("nan"))
        told = f"{cost:.1f}" if np.isfinite(cost) else "–"
        print(f"| `{summary.methods[m]}` | {summary.mean_rank[m]:.1f} | {' | '.join(cells)} | {told} |")


def cell(summary: Summary, m: int, k: int) -> str:
    if not summary.count[m, k]:
        return "–"
    half = (summary.high[m, k] - summary.low[m, k]) / 2
    digits = 2 if abs(summary.mean[:, k][np.isfinite(summary.mean[:, k])]).max() >= 2 else 3
    mark = {1: "", 0: " =", -1: " ▼"}[int(summary.effect[m, k])]
    mark = "" if summary.methods[m] == summary.control else mark
    return f"{summary.mean[m, k]:.{digits}f} ±{half:.{digits}f}{mark}".replace("±0.", "±.")


def pairs(args: argparse.Namespace) -> None:
    """The paired differences of one method to others, with intervals; above zero is better."""
    found = joined(*args.files.split(","))
    columns = args.columns.split(",") if args.columns else found.metrics
    print(f"| {args.method} against | {' | '.join(columns)} |")
    print("|" + "---|" * (len(columns) + 1))
    for other in args.others:
        cells = []
        for metric in columns:
            sign = 1 if found.about["better"][found.metrics.index(metric)] == "higher" else -1
            gain = sign * (found.of(args.method, metric) - found.of(other, metric))
            low, high = intervals(gain[None])[:, 0]
            cells.append(f"{np.nanmean(gain):+.3f} ({low:+.3f} … {high:+.3f})".replace("-", "−"))
        print(f"| `{other}` | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asked = commands.add_parser("run")
    asked.add_argument("data")
    asked.add_argument("file", type=Path)
    asked.add_argument("--model")
    asked.add_argument("--weights")
    asked.add_argument("--device")
    asked.add_argument("--methods", default="all")
    asked.add_argument("--metrics", default=FAITHFUL)
    asked.add_argument("--limit", type=int)
    asked.set_defaults(work=run)
    shown = commands.add_parser("table")
    shown.add_argument("files", type=Path, nargs="+")
    shown.add_argument("--columns")
    shown.add_argument("--costs", type=Path, help="another run, made on an idle machine, whose costs are shown")
    shown.set_defaults(work=table)
    compared = commands.add_parser("pairs")
    compared.add_argument("files", help="one file, or several separated by commas")
    compared.add_argument("method")
    compared.add_argument("others", nargs="+")
    compared.add_argument("--columns")
    compared.set_defaults(work=pairs)
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
