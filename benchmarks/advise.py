"""Does `advise`, which searches in stages, find what the exhaustive search finds, and with how many runs?

    python benchmarks/advise.py DATA [--images 40] [--model NAME --weights FILE --device cuda] [--methods NAMES]
                                     [--metric srg] [--orders 100] [--values FILE.npz]

DATA: a folder with images/ and maybe labels.csv. Both searches are run in full. The search in stages is then repeated
for other orders of the images, on the values that the exhaustive search has measured. A winner counts as the same if
it is the exhaustive search's, or if the interval of their paired difference on all images contains 0.
`--values`: keep what was measured, or take it from there and only repeat the search.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import vitreous
from vitreous._support.statistics import intervals
from vitreous.evaluation.advice import interval
from vitreous.evaluation.estimate import Estimate
from vitreous.evaluation.leaderboard import Leaderboard
from vitreous.evaluation.plan import CONTROLS
from vitreous.evaluation.stages import by_gain, plan_stages, runs_of, search
from vitreous.images.dataset import read_data


class Replayed(Leaderboard):
    """A board that takes its values from another instead of measuring them."""

    def __init__(self, methods: list[str], known: np.ndarray) -> None:
        self.methods, self.known = methods, known  # [M N]
        self.values = np.full((len(methods), 1, known.shape[1]), np.nan)
        self.measured = np.zeros(known.shape, dtype=bool)
        self.wanted = np.zeros(known.shape, dtype=bool)
        self.skipped = {}

    def run(self, after: Any = None, numbers: Any = None, names: Any = None) -> None:
        rows = np.ix_([self.methods.index(name) for name in names], numbers)
        self.measured[rows] = True
        self.values[:, 0] = np.where(self.measured, self.known, np.nan)


def winner(methods: list[str], values: np.ndarray, sign: int, seed: int) -> tuple[str, int]:
    """The winner of the search in stages, and its runs."""
    board = Replayed(methods, values)
    stages = plan_stages(len(methods) - len(CONTROLS), values.shape[1])
    found = search(board, stages, np.random.default_rng(seed).permutation(values.shape[1]).tolist(), sign, None)
    finalists = [name for name in methods if name not in CONTROLS and name not in found.dropped]
    return by_gain(board, finalists, sign)[0], int(board.measured.sum())


def difference(methods: list[str], values: np.ndarray, sign: int, one: str, other: str) -> tuple[float, float, float]:
    """How much better one is than the other, image by image, with its interval."""
    gain = sign * (values[methods.index(one)] - values[methods.index(other)])
    low, high = intervals(gain[None])[:, 0]
    return float(np.nanmean(gain)), float(low), float(high)


def measure(args: argparse.Namespace) -> tuple[list[str], np.ndarray, int]:
    """Run both searches; the values of the exhaustive one."""
    data = read_data(args.data).take(None, args.images, args.seed)
    names = args.methods.split(",") if args.methods else None
    boards = {}
    for exhaustive in (False, True):
        model = vitreous.load(args.model, args.weights, args.device)
        told: list[Estimate] = []
        begun = time.perf_counter()
        found = vitreous.advise(
            model, data, args.metric, methods=names, exhaustive=exhaustive, seed=args.seed, before=told.append
        )
        seconds = time.perf_counter() - begun
        kind = "exhaustive" if exhaustive else "in stages"
        best = found.contenders[0]
        print(f"{kind}: estimated {told[0]}")
        print(f"{kind}: {found.runs} runs, {seconds:.0f} s, {best.name} {interval(best)}")
        boards[exhaustive] = found
    whole, staged = boards[True], boards[False]
    sign = -1 if whole.better == "lower" else 1
    values, methods = whole.board.values[:, 0], whole.board.methods
    mean, low, high = difference(methods, values, sign, whole.contenders[0].name, staged.contenders[0].name)
    print(f"difference of the winners: {mean:+.4f} ({low:+.4f} … {high:+.4f})")
    print(f"share of the runs: {staged.runs / whole.runs:.3f}")
    print(staged)
    return methods, values, sign


def repeat(methods: list[str], values: np.ndarray, sign: int, orders: int) -> None:
    """The search in stages for other orders of the images."""
    board = Replayed(methods, values)
    board.run(None, range(values.shape[1]), methods)
    best = by_gain(board, [name for name in methods if name not in CONTROLS], sign)[0]
    stages = plan_stages(len(methods) - len(CONTROLS), values.shape[1])
    print(f"stages: {', '.join(f'{one.contenders} × {one.images}' for one in stages)}; {runs_of(stages)} runs")
    found = Counter(winner(methods, values, sign, seed)[0] for seed in range(orders))
    same = 0
    for name, times in found.most_common():
        mean, low, high = difference(methods, values, sign, best, name)
        within = low <= 0
        same += times * within
        print(f"{times:4} of {orders}: {name}, {best} is better by {mean:+.4f} ({low:+.4f} … {high:+.4f})")
    print(f"{same} of {orders} orders end with {best} or one that cannot be told from it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--images", type=int, help="only so many, chosen by the seed")
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--device")
    parser.add_argument("--methods")
    parser.add_argument("--metric", default="srg")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--orders", type=int, default=100)
    parser.add_argument("--values", type=Path)
    args = parser.parse_args()
    if args.values is not None and args.values.is_file():
        with np.load(args.values) as kept:
            methods, values, sign = json.loads(str(kept["methods"])), kept["values"], int(kept["sign"])
    else:
        methods, values, sign = measure(args)
        if args.values is not None:
            np.savez_compressed(args.values, methods=json.dumps(methods), values=values, sign=sign)
    repeat(methods, values, sign, args.orders)


if __name__ == "__main__":
    main()
