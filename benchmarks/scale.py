"""Studies of ImageNet's size: what it takes to plan one, to open and report its store, and to resume it.

python benchmarks/scale.py FOLDER                              1.28 million rows of every kind, a million file names
python benchmarks/scale.py FOLDER --rows 200000 --kinds spread,cass
python benchmarks/scale.py FOLDER --kinds plan --files 1000000 only the planning, of a folder and of a CSV

FOLDER receives generated stores (rows as the real writer stores them, with random values, of images that are but names)
and, to be planned, empty image files. Every step is measured in a process of its own: seconds, CPU seconds and the peak
of its resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

import vitreous
from vitreous.evaluation.study.kind import Kind
from vitreous.evaluation.study.plan import Planned, Shard, Source, plan
from vitreous.evaluation.study.run import make_kind
from vitreous.evaluation.study.shard import schema_of
from vitreous.evaluation.study.store import Store, circumstances, open_store
from vitreous.images.dataset import Data, Sample, read_data
from vitreous.images.readers import as_jpeg
from vitreous.images.samples import Samples
from vitreous.models.libraries import wordnet

METHODS = {"maps": "attention,gae", "compare": None, "leaderboard": "gae,cdam"}
KINDS = ("spread", "cass", "maps", "compare", "leaderboard")
STEPS = ("open", "rows", "findings", "report", "resume", "missing")
POINTS = 11  # of a curve
BROKEN = 10_000  # one image in so many cannot be read


def main() -> None:
    given = parse()
    if given.step:
        return in_child(given)
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    kinds = given.kinds.split(",")
    if "plan" in kinds:
        images, table = folder / "names", folder / "names.csv"
        make_images(images, given.files)
        make_table(images, table)
        for data in (images, table):
            measure(given, "plan", "spread", str(data))
    for kind in kinds:
        if kind != "plan":
            on_kind(given, folder, kind)
    return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, default=1_281_167)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--kinds", default=",".join(("plan", *KINDS)))
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--patience", type=float, help="stop a step after so many seconds")
    parser.add_argument("--step", help="run one step and print what it took")
    parser.add_argument("--kind", default="spread")
    parser.add_argument("--data", default="", help="of a step: what is planned, or how many images")
    return parser.parse_args()


def on_kind(given: argparse.Namespace, folder: Path, kind: str) -> None:
    nothing = Data("", (Sample(Path("0"), "0"),))
    methods = len(make_kind(kind, METHODS.get(kind), None, {}, nothing, 0).methods)
    images = str(given.rows // methods)
    if not (folder / kind).is_dir():
        measure(given, "write", kind, images)
    for step in given.steps.split(","):
        measure(given, step, kind, images)


def measure(given: argparse.Namespace, step: str, kind: str, data: str) -> None:
    """One step in a process of its own."""
    command = [sys.executable, __file__, given.folder, "--step", step, "--kind", kind, "--data", data]
    begun = time.perf_counter()
    try:
        ran = subprocess.run(
            [*command, "--model", given.model],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=None if step == "write" else given.patience,
        )
        told = ran.stdout.splitlines()[-1] if ran.returncode == 0 else f"failed with {ran.returncode}"
    except subprocess.TimeoutExpired:
        told = f"not finished after {time.perf_counter() - begun:.0f} s"
    print(f"{kind:12s}{step:10s}{told}", flush=True)


def in_child(given: argparse.Namespace) -> None:
    begun, cpu = time.perf_counter(), time.process_time()
    said = globals()[f"step_{given.step}"](given)
    took = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu, "peak_mib": peak()}
    print(json.dumps({**{name: round(value, 1) for name, value in took.items()}, "said": said}))


def peak() -> float:
    """The peak of this process's resident memory, in MiB; getrusage would count that of the process it came from."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


# --------------------------------------------------------------------------------------------------------------- steps


def step_plan(given: argparse.Namespace) -> str:
    """Names to shards, without the model, which takes the same time for any number of images."""
    model = weights_of(given).load("cpu")
    _ = model.layout
    begun, cpu = time.perf_counter(), time.process_time()
    data = read_data(given.data)
    read = time.perf_counter() - begun
    planned, _ = plan(make_kind("spread", None, None, {}, data, 0), [Source(ready=model)], data)
    shards = len(planned.shards)
    took = f"{time.perf_counter() - begun:.1f} s, {time.process_time() - cpu:.1f} s of CPU"
    return f"{len(data)} names, {shards} shards: {took}, of these reading {read:.1f} s"


def step_open(given: argparse.Namespace) -> str:
    return repr(vitreous.open_study(given.folder + "/" + given.kind))


def step_rows(given: argparse.Namespace) -> str:
    return f"{vitreous.open_study(given.folder + '/' + given.kind).to_arrow().num_rows} rows"


def step_findings(given: argparse.Namespace) -> str:
    found = vitreous.open_study(given.folder + "/" + given.kind).findings()
    return next(iter(found.values())).lead


def step_report(given: argparse.Namespace) -> str:
    """As `vitreous report`."""
    from vitreous.cli.report import tell

    study = vitreous.open_study(given.folder + "/" + given.kind)
    tell(study, Path(given.folder) / f"{given.kind}-report", True)
    return f"{sum(f.stat().st_size for f in (Path(given.folder) / f'{given.kind}-report').rglob('*.html'))} bytes"


def step_resume(given: argparse.Namespace) -> str:
    """The same command again, with nothing left to do."""
    study = vitreous.run_study(
        given.kind, names(given), weights_of(given), given.folder + "/" + given.kind, **asked(given)
    )
    return repr(study)


def step_missing(given: argparse.Namespace) -> str:
    """The same with a shard that is lost, as far as the work begins."""
    from vitreous.evaluation.study.run import carry_out

    store = vitreous.open_study(given.folder + "/" + given.kind).store
    lost, aside = store.file(1), store.folder / "aside"
    lost.rename(aside)
    begun: list[Shard] = []
    try:
        carry_out(planned_of(given)[0], store.folder.parent, lambda _, shards, *__, **___: begun.extend(shards), {})
    finally:
        aside.rename(lost)
    assert [shard.number for shard in begun] == [1]
    return f"{len(begun)} shard of {len(begun[0])} images would be computed"


def step_write(given: argparse.Namespace) -> str:
    """Generate the store."""
    planned, classes = planned_of(given)
    store = open_store(Path(given.folder) / given.kind, planned.manifest, circumstances())
    for shard in planned.shards:
        write_shard(planned, store, shard, classes)
    return f"{planned.manifest['shards']} shards"


# ------------------------------------------------------------------------------------------------------ what is planned


def asked(given: argparse.Namespace) -> dict[str, Any]:
    return {"methods": METHODS.get(given.kind), "batch": 64}


def planned_of(given: argparse.Namespace) -> tuple[Planned, Callable[[int], str | None]]:
    data = names(given)
    kind = make_kind(given.kind, METHODS.get(given.kind), None, {}, data, 0)
    choice = {"limit": None, "sample": None, "seed": 0}
    planned, model = plan(kind, [weights_of(given)], data, [None], batch=64, choice=choice)
    return planned, model.label


def names(given: argparse.Namespace) -> Data:
    """As many images as the store has, named as ImageNet's are."""
    classes, count = sorted(wordnet()), int(given.data)
    each = [(name, i) for c, name in enumerate(classes) for i in range(c, count, len(classes))]
    files = [f"{name}/{name}_{i:07d}.JPEG" for name, i in each]
    return Data("images", Samples(files, "images", labels=[name for name, _ in each]))


def weights_of(given: argparse.Namespace) -> Source:
    """The same random weights for every step."""
    file = Path(given.folder) / f"{given.model}.pth"
    if not file.is_file():
        torch.manual_seed(0)
        torch.save(vitreous.load(given.model, "random", "cpu").module.state_dict(), file)
    return Source(given.model, str(file))


def make_images(folder: Path, count: int) -> None:
    """Empty files in class folders, named as ImageNet's are."""
    if folder.is_dir():
        return
    names = sorted(wordnet())
    for c, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(c, count, len(names)):
            os.close(os.open(folder / name / f"{name}_{i:07d}.JPEG", os.O_CREAT | os.O_WRONLY))


def make_table(images: Path, table: Path) -> None:
    rows = [
        f"{images.name}/{folder.name}/{file},{folder.name}"
        for folder in images.iterdir()
        for file in os.listdir(folder)
    ]
    table.write_text("image,label\n" + "\n".join(rows) + "\n")


# ---------------------------------------------------------------------------------------------------------------- rows


def write_shard(planned: Planned, store: Store, shard: Shard, label: Callable[[int], str | None]) -> None:
    kind, chance = planned.recipe.kind, np.random.default_rng(shard.number)
    about, methods = planned.manifest["models"][0], list(kind.methods)
    count, each = len(shard), len(methods)
    broken = np.repeat((np.arange(count) + shard.first) % BROKEN == BROKEN - 1, each)
    labels = np.repeat([sample.label for sample in shard.samples], each)
    guess = np.where(chance.random(count) < 0.8, labels[::each], 0)
    words: dict[str, Any] = {
        "model": [about["name"]] * count * each,
        "image": [sample.name for sample in shard.samples for _ in methods],
        "image_hash": [chance.bytes(32).hex() for _ in shard.samples for _ in methods],
        "label": labels,
        "class": [label(int(number)) for number in labels],
        "prediction": pa.array(np.repeat(guess, each), mask=broken),
        "asked": ["label" if kind.targeted else None] * count * each,
        "target": [str(number) if kind.targeted else None for number in labels],
        "target_label": [label(int(number)) if kind.targeted else None for number in labels],
        "probability": chance.random(len(labels)).astype(np.float32) if kind.targeted else [None] * len(labels),
        "method": methods * count,
        "error": ["it cannot be read, it may be truncated" if bad else None for bad in broken],
    }
    made = {**words, **own_columns(kind, about, chance, broken)}
    made |= arrays(kind, about, shard, chance, broken)
    schema = schema_of(kind)
    columns = [
        pa.array(made[name], schema.field(name).type)
        if name in made
        else pa.nulls(len(broken), schema.field(name).type)
        for name in schema.names
    ]
    told = {"seconds": dict.fromkeys(methods, 1.0), "images": dict.fromkeys(methods, count), "told": {}}
    if kind.name == "leaderboard":
        at = np.linspace(0, 1, POINTS).tolist()
        told["told"] = {"forward": 0.01} | {f"at {name}": at for name in kind.metrics if f"{name}_curve" in made}  # type: ignore[attr-defined]
    table = pa.table(dict(zip(schema.names, columns)), schema)
    store.write(shard.number, table.replace_schema_metadata({"vitreous": json.dumps(told)}))


def own_columns(kind: Kind, about: dict[str, Any], chance: np.random.Generator, broken: np.ndarray) -> dict[str, Any]:
    """Random values of the columns of a kind."""
    count, layers = len(broken), about["layers"]
    if kind.name == "spread":
        return {
            "entropy": pa.array(chance.normal(4, 0.4, count).astype(np.float32), mask=broken),
            "layer_entropy": lists(chance.normal(4, 0.4, (count, layers)), broken),
        }
    if kind.name == "cass":
        return {"cass": lists(chance.normal(np.linspace(0.8, 0.4, 3 * layers), 0.1, (count, 3 * layers)), broken)}
    if kind.name == "compare":
        return {"sparsity": pa.array(chance.random(count).astype(np.float32), mask=broken)}
    if kind.name != "leaderboard":
        return {}
    found: dict[str, Any] = {}
    for name in kind.metrics:  # type: ignore[attr-defined]
        found[name] = pa.array(chance.normal(0.5, 0.2, count), mask=broken)
        if name != "sparsity":
            found[f"{name}_curve"] = lists(chance.random((count, POINTS)), broken)
    return found


def arrays(
    kind: Kind, about: dict[str, Any], shard: Shard, chance: np.random.Generator, broken: np.ndarray
) -> dict[str, Any]:
    """Maps of every row where the kind stores them, photos and parts of the examples."""
    h, w = about["grid"]
    count, each = len(broken), len(kind.methods)
    found: dict[str, Any] = {}
    if kind.name != "leaderboard":
        found["map"] = lists(np.abs(chance.normal(0, 1, (count, h * w))), broken)
        found["map_shape"] = pa.array([None if bad else [h, w] for bad in broken])
    panels = {"cass": 1 + 3 * about["layers"], "spread": about["layers"] + 4, "leaderboard": 1}.get(kind.name, 0)
    photo: list[bytes | None] = [None] * count
    parts, shape = list[Any]([None] * count), list[Any]([None] * count)
    photos = sorted(Path(str(files("vitreous") / "assets" / "photos")).glob("*.jpg"))
    smooth = np.hypot(*np.mgrid[-1 : 1 : h * 1j, -1 : 1 : w * 1j])
    for number in shard.shown:
        first = (number - shard.first) * each
        photo[first] = as_jpeg(Image.open(photos[number % len(photos)]).convert("RGB"))
        for row in range(first, first + each) if panels and not broken[first] else ():
            parts[row] = (smooth * chance.random((panels, 1, 1))).astype(np.float32).ravel()
            shape[row] = [h, w] if panels == 1 else [panels, h, w]
    return {**found, "photo": photo, "parts": parts, "parts_shape": shape}


def lists(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    """One list of numbers for each row."""
    ends = np.append(0, np.cumsum(np.where(missing, 0, values.shape[1]))).astype(np.int32)
    kept = pa.array(values[~missing].astype(np.float32).ravel())
    return pa.ListArray.from_arrays(pa.array(ends), kept, mask=pa.array(missing))


if __name__ == "__main__":
    main()
