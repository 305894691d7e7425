"""The proof for docs/counterfactual.md: how few tokens turn a decision, by order, by search, and at best.

    python benchmarks/counterfactual.py photos DATA [--weights deit_tiny_patch16_224.safetensors] [--device cuda]
    python benchmarks/counterfactual.py grid DATA [--device cuda]
    python benchmarks/counterfactual.py table [RESULTS.json …]            the tables of the page, as Markdown
    python benchmarks/counterfactual.py figure [RESULTS.json]             the chart of the page

DATA: a folder of photos with labels.csv (imagenet_index). `photos`: DeiT-Tiny or, without weights, the embedded model,
from the decision to the runner-up; random orders, RISE and other maps as they are (prefix), pruned, and with as many
runs as our search takes. `grid`: tiny ViTs of 4 × 4 tokens, trained for seconds, against all 2^16 sets. Results go to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import vitreous
from vitreous import Model, Trace
from vitreous._support.statistics import intervals
from vitreous.counterfactuals.aim import Aim, aim
from vitreous.counterfactuals.change import removal
from vitreous.counterfactuals.find import POOL, Task, better, evidence
from vitreous.counterfactuals.search import Reached, Search, first_turn, prefixes
from vitreous.errors import VitreousError
from vitreous.images.dataset import read_data

RESULTS = Path(__file__).parent / "results"
CONTRAST = ("token_ablation", "centred_lrp", "gae", "attcat", "cdam", "libra_fullgrad", "gradcam")
PLAIN = ("token_ablation", "centred_lrp", "gae")  # also for the class alone
PRUNED = ("token_ablation", "centred_lrp", "gae", "attcat", "rise", "random")
SEEDS = 3  # of random orders
OURS = "greedy, pruned (the default)"
POOLS = (24, 196)  # other numbers of patches that each step of the growth tries
EVERY = 10  # images between two saves
GROUPS = 10  # classes of the small models
SIDE = 64
Row = dict[str, dict[str, float]]  # by order: prefix, pruned, runs


# --------------------------------------------------------------------------------------------------------------- orders


class Plain(Aim):
    """The same aim with a map for the present class alone."""

    @property
    def contrast(self) -> Any:
        return vitreous.Class(self.source)


def plain(task: Task) -> Task:
    given = task.aim
    return Task(task.trace, Plain(given.source, given.to, given.rival, given.model, given.slack), task.change)


def by_map(task: Task, method: str, **options: Any) -> list[int]:
    """All patches, those with the largest values of a map first."""
    return evidence(task, method, options).argsort(descending=True, stable=True).tolist()


def at_random(task: Task, seed: int) -> list[int]:
    return torch.randperm(task.trace.layout.patches, generator=torch.Generator().manual_seed(seed)).tolist()


def orders(task: Task) -> dict[str, Callable[[], list[int]]]:
    """How to make each order."""
    made: dict[str, Callable[[], list[int]]] = {m: lambda m=m: by_map(task, m) for m in CONTRAST}
    made |= {f"{m}, class only": lambda m=m: by_map(plain(task), m) for m in PLAIN}
    made |= {"attention": lambda: by_map(task, "attention"), "rise": lambda: by_map(task, "rise")}
    return made | {f"random {seed}": lambda seed=seed: at_random(task, seed) for seed in range(SEEDS)}


def followed(task: Task, order: Sequence[int], prune: bool) -> tuple[dict[str, float], Reached]:
    """How many patches of an order turn the decision, and how many are left after pruning."""
    before, search = task.change.passes, Search(task.search.margin, *size_of(task))
    listed = prefixes(order, task.change.most)
    start = first_turn(listed, search.measure(listed))
    found = {"prefix": size(start), "runs": float(task.change.passes - before)}
    end = search.pruned(start) if prune else start
    if prune:
        found |= {"pruned": size(end), "runs pruned": float(task.change.passes - before)}
    return found, end


def size_of(task: Task) -> tuple[int, int, torch.device]:
    return task.trace.layout.patches, task.change.most, task.trace.images.device


def size(found: Reached) -> float:
    return float(len(found.patches)) if found.turns else float("nan")


def ours(task: Task, order: Sequence[int], pool: int = POOL) -> tuple[dict[str, float], Reached]:
    """The default search: the order of the map, greedy growth, both pruned; without proof."""
    before, search = task.change.passes, Search(task.search.margin, *size_of(task))
    listed = prefixes(order, task.change.most)
    best = search.pruned(first_turn(listed, search.measure(listed)))
    most = len(best.patches) - 1 if best.turns else search.most
    if most:
        best = better(best, search.pruned(search.grown(pool, most)))
    return {"pruned": size(best), "runs pruned": float(task.change.passes - before)}, best


def restarted(task: Task, budget: float) -> dict[str, float]:
    """Random orders, each pruned, until as many runs are spent; the best of them."""
    best, spent, seed = float("nan"), 0.0, 100
    while spent < budget:
        found, _ = followed(task, at_random(task, seed), True)
        best, spent, seed = float(np.fmin(best, found["pruned"])), spent + found["runs pruned"], seed + 1
    return {"pruned": best, "runs pruned": spent}


# --------------------------------------------------------------------------------------------------------------- photos


def one_photo(model: Model, file: str) -> Row:
    """All orders on one photo."""
    trace = Trace(model, [file])
    task = Task(trace, aim(trace), removal(trace))
    row: Row = {}
    made = {}
    for name, make in orders(task).items():
        try:
            made[name] = make()
        except VitreousError as error:
            print(f"  without {name}: {error}", flush=True)
            continue
        row[name] = followed(task, made[name], name.rpartition(" ")[0] == "random" or name in PRUNED)[0]
    extra = {"token_ablation": trace.layout.patches, "rise": 500}
    for name, runs in extra.items():
        row[name] |= {key: row[name][key] + runs for key in ("runs", "runs pruned")}
    found, _ = ours(task, made["token_ablation"])
    found["runs pruned"] += trace.layout.patches
    row[OURS] = found
    for pool in POOLS:
        other, _ = ours(task, made["token_ablation"], pool)
        row[f"greedy of {pool}, pruned"] = other | {"runs pruned": other["runs pruned"] + trace.layout.patches}
    row["random, same runs"] = restarted(task, found["runs pruned"])
    masks = max(16, round(found["runs pruned"] - row["rise"]["runs pruned"] + 500))
    same, _ = followed(task, by_map(task, "rise", masks=masks), True)
    row["rise, same runs"] = {"pruned": same["pruned"], "runs pruned": same["runs pruned"] + masks}
    row["before"] = {"p": float(model.meaning.probabilities(trace.output)[0].max())}
    return row


def photos(args: argparse.Namespace) -> None:
    data = read_data(args.data).take(None, args.limit, 0)
    files = [str(one.image) for one in data.samples]
    given = (args.model, args.weights) if args.weights else (None, None)
    model = vitreous.load(*given, device=args.device)
    begun, rows = time.time(), []
    for number, file in enumerate(files, 1):
        rows.append(one_photo(model, file))
        if number % EVERY == 0 or number == len(files):
            print(f"{model.name}: {number} of {len(files)} photos, {time.time() - begun:.0f} s", flush=True)
            told = {"model": model.name, "photos": number, "patches": model.layout.patches, "rows": rows}
            save(args.out / f"counterfactual-{model.name}.json", told | {"seconds": time.time() - begun})


# ----------------------------------------------------------------------------------------------------------------- grid


def small(data: Any, seed: int, device: str, steps: int) -> tuple[Model, torch.Tensor]:
    """A tiny ViT of 4 × 4 tokens, trained on the photos at 64 pixels in as many classes as there are groups."""
    import timm

    shown = [one.open().image.convert("RGB").resize((SIDE, SIDE)) for one in data]
    images = torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in shown]).float() / 127.5 - 1
    labels = torch.arange(len(images)) % GROUPS
    images, labels = images.to(device), labels.to(device)
    torch.manual_seed(seed)
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIDE, num_classes=GROUPS, embed_dim=96, depth=4, num_heads=3
    ).to(device)
    rate = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        some = torch.randint(len(images), (128,), generator=drawn).to(device)
        loss = nn.functional.cross_entropy(net(images[some]), labels[some])
        rate.zero_grad()
        loss.backward()
        rate.step()
    net.eval()
    with torch.no_grad():
        right = (net(images).argmax(1) == labels).float().mean()
    print(f"seed {seed}: {right:.0%} of the photos learnt, loss {float(loss.detach()):.3f}", flush=True)
    return Model(net, classifier=True, name=f"grid-{seed}"), images


def one_small(model: Model, image: torch.Tensor) -> Row:
    """All searches on one image, and the optimum."""
    trace = Trace(model, image[None])
    task = Task(trace, aim(trace), removal(trace))
    row: Row = {}
    for name in ("token_ablation", "gae", "rise", "random"):
        order = at_random(task, 0) if name == "random" else by_map(task, name)
        row[name] = followed(task, order, True)[0]
        if name == "token_ablation":
            row[OURS], best = ours(task, order)
    search = Search(task.search.margin, *size_of(task))
    shown = search.proved(len(best.patches) if best.turns else search.most + 1, 2**16)
    optimum = size(shown.found if shown.found is not None else best)
    row["optimum"] = {"prefix": optimum, "pruned": optimum, "bound": float(shown.bound)}
    return row


def grid(args: argparse.Namespace) -> None:
    data = list(read_data(args.data).take(None, args.limit, 0).samples)
    begun, rows = time.time(), []
    for seed in range(args.models):
        model, images = small(data, seed, args.device or ("cuda" if torch.cuda.is_available() else "cpu"), args.steps)
        for number, image in enumerate(images, 1):
            rows.append(one_small(model, image))
            if number % (5 * EVERY) == 0 or number == len(images):
                print(f"seed {seed}: {number} of {len(images)} images, {time.time() - begun:.0f} s", flush=True)
                save(args.out / "counterfactual-grid.json", {"rows": rows, "seconds": time.time() - begun})


# --------------------------------------------------------------------------------------------------------------- tables


def save(file: Path, told: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told) + "\n", encoding="utf-8")


def seeds_of(rows: Sequence[Row], name: str) -> list[str]:
    """The names under which an order is stored: random orders have several."""
    return [name] if name in rows[0] else [f"{name} {seed}" for seed in range(SEEDS)]


def column(rows: Sequence[Row], name: str, key: str, missing: float = np.nan) -> np.ndarray:
    """The values of an order, one for each image, the mean of several; `missing` where a decision did not turn."""
    each = [[row.get(one, {}).get(key, np.nan) for row in rows] for one in seeds_of(rows, name)]
    return np.nan_to_num(np.array(each, float), nan=missing).mean(0)


def turned(rows: Sequence[Row], name: str, key: str) -> np.ndarray:
    """For each image whether the decision turned, 0 or 1; of several random orders, how many did."""
    each = [[row.get(one, {}).get(key, np.nan) for row in rows] for one in seeds_of(rows, name)]
    return np.isfinite(np.array(each, float)).mean(0)


def with_interval(values: np.ndarray, form: str = ".1f") -> str:
    low, high = intervals(values[None])[:, 0]
    return f"{np.nanmean(values):{form}} [{low:{form}}, {high:{form}}]"


def photo_table(told: dict[str, Any]) -> list[str]:
    """Flip rate and size of every order; a decision that does not turn counts as all patches."""
    rows, most = told["rows"], told["patches"]
    stored = [key.rstrip(" 0123456789") if key.startswith("random ") else key for key in rows[0] if key != "before"]
    own = column(rows, OURS, "pruned", most)
    lines = [f"**{told['model']}**, {len(rows)} photos, {most} patches", ""]
    lines += ["| order | turned | size, prefix only | size, pruned | pruned − ours | runs |", "|---|" + 5 * "---|"]
    listed = []
    for name in dict.fromkeys(stored):
        known = [key for key in ("prefix", "pruned") if key in rows[0][seeds_of(rows, name)[0]]]
        sizes = {key: column(rows, name, key, most) for key in known}
        share = with_interval(100 * turned(rows, name, known[-1]), ".0f")
        shown = [with_interval(sizes[key]) if key in sizes else "—" for key in ("prefix", "pruned")]
        gap = with_interval(sizes["pruned"] - own) if "pruned" in sizes and name != OURS else "—"
        runs = column(rows, name, "runs pruned" if "pruned" in sizes else "runs").mean()
        rank = ("pruned" not in sizes, float(sizes[known[-1]].mean()))
        listed.append((rank, f"| {name} | {share} % | {shown[0]} | {shown[1]} | {gap} | {runs:.0f} |"))
    return [*lines, *(line for _, line in sorted(listed)), ""]


def grid_table(told: dict[str, Any]) -> list[str]:
    """The share of optimal sets and the excess over the optimum, where one exists."""
    rows = told["rows"]
    best = column(rows, "optimum", "pruned")
    lines = [
        f"{len(rows)} images; a counterfactual exists for {np.isfinite(best).sum()} of them, "
        f"of {np.nanmean(best):.2f} patches on average",
        "",
    ]
    lines += ["| search | found | optimal | excess, patches |", "|---|---|---|---|"]
    for name in (OURS, "token_ablation", "gae", "rise", "random"):
        for key in ("pruned", "prefix"):
            got = column(rows, name, key)[np.isfinite(best)]
            if not np.isfinite(got).any():
                continue
            excess = got - best[np.isfinite(best)]
            shares = [with_interval(100 * share, ".1f") for share in (np.isfinite(got).astype(float), excess == 0)]
            called = name if name == OURS else f"{name}, {'pruned' if key == 'pruned' else 'prefix only'}"
            lines.append(f"| {called} | {shares[0]} % | {shares[1]} % | {with_interval(excess, '.2f')} |")
    return [*lines, ""]


def found_files(args: argparse.Namespace) -> list[Path]:
    return args.files or sorted(args.out.glob("counterfactual-*.json"))


def table(args: argparse.Namespace) -> None:
    for file in found_files(args):
        told = json.loads(file.read_text(encoding="utf-8"))
        print("\n".join((photo_table if "patches" in told else grid_table)(told)))


def figure(args: argparse.Namespace) -> None:
    """The share of decisions that turned within so many patches, for each order alone and for the search."""
    from vitreous.plot.curves import Curve, curves_figure
    from vitreous.plot.figure import save_figure

    told = next(t for f in found_files(args) if "patches" in (t := json.loads(f.read_text(encoding="utf-8"))))
    rows, at = told["rows"], list(range(0, 101))
    curves = {}
    for name, key in (
        (OURS, "pruned"),
        *((m, "prefix") for m in ("token_ablation", "centred_lrp", "gae", "rise")),
        ("attention", "prefix"),
        ("random", "prefix"),
    ):
        sizes = np.stack([column(rows, one, key, np.inf) for one in seeds_of(rows, name)])  # [seeds n]
        share = np.stack([(sizes <= count).mean(0) for count in at])
        low, high = intervals(share)
        curves["ours, greedy" if name == OURS else name] = Curve(at, share.mean(1), low, high)
    made = curves_figure(
        curves,
        f"Decisions turned, {told['model']}, {len(rows)} photos",
        better="higher",
        across="tokens removed",
        up="share of photos whose decision has turned",
    )
    save_figure(made, args.figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for work, limit in ((photos, 100), (grid, 150)):
        one = commands.add_parser(work.__name__)
        one.set_defaults(work=work)
        one.add_argument("data")
        one.add_argument("--model", default="deit_tiny_patch16_224")
        one.add_argument("--weights", help="of DeiT-Tiny; without them, the embedded model")
        one.add_argument("--device")
        one.add_argument("--limit", type=int, default=limit, help="images")
        one.add_argument("--models", type=int, default=2, help="small models")
        one.add_argument("--steps", type=int, default=150, help="of their training")
        one.add_argument("--out", type=Path, default=RESULTS)
    for work in (table, figure):
        one = commands.add_parser(work.__name__)
        one.set_defaults(work=work)
        one.add_argument("files", nargs="*", type=Path)
        one.add_argument("--out", type=Path, default=RESULTS)
        one.add_argument("--figure", type=Path, default=Path("docs/figures/counterfactual-proof.png"))
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
