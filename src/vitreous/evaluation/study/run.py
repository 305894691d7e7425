"""Runs a study: plan it, compute missing shards on an engine, and open the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from vitreous._support.progress import counting
from vitreous.errors import OptionError
from vitreous.evaluation.plan import Methods, by_name, listed_methods, refuse_unregistered
from vitreous.evaluation.study.kind import OWN, Kind, Settings, find_kind
from vitreous.evaluation.study.local import run_local
from vitreous.evaluation.study.plan import Planned, Source, plan
from vitreous.evaluation.study.read import Study
from vitreous.evaluation.study.store import Store, circumstances, open_store
from vitreous.images.dataset import Data, read_data
from vitreous.models.model import Model

ENGINES = ("local", "ray")
Given = Model | nn.Module | str | Source | None


def run_study(
    kind: str,
    data: str | Path | Sequence[str | Path] | Data,
    model: Given | Sequence[Given] = None,
    out: str | Path = "vitreous-out",
    *,
    methods: Methods | None = None,
    metrics: str | Sequence[str] | None = None,
    options: Settings | None = None,
    target: Any = None,
    masks: str | Path | None = None,
    inputs: str | Path | Mapping[str, Any] | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    gpus: float = 0.0,
    batch: int | None = None,
    shard: int | None = None,
    device: str | None = None,
    decode: str = "cpu",
) -> Study:
    """Run a study on a data set, or resume it where it stopped.

    `kind`: "cass", "spread", "compare", "leaderboard", "maps" or "shortcuts". `data`: as for `run_leaderboard`, also
    tar shards and Hugging Face data sets on disk. `model`: one or several. `options`: {"rollout": {"discard": 0.9}},
    and of the study itself {"cass": {"samples": 32}}. `target`: one or a list, e.g. ["label", "top-1"]. `inputs`: what
    the network gets beside each image, arrays by name or an .npz, one row for each image. `workers`: processes that
    read images; for `engine="ray"` actors that compute, each with `gpus` of a GPU. `decode`: where JPEG files are
    decoded, "cpu", "gpu", or "auto" for the GPU if it can.
    """
    whole = data if isinstance(data, Data) else read_data(data, masks)
    found = whole.with_inputs(inputs).take(limit, sample, seed).stamped()
    made = make_kind(kind, methods, metrics, options or {}, found, seed)
    several: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    choice = {"limit": limit, "sample": sample, "seed": seed}
    planned, loaded = plan(
        made,
        [as_source(one) for one in several],
        found,
        as_targets(target),
        batch=batch,
        shard=shard,
        device="cpu" if engine == "ray" else device,
        choice=choice,
        decode=decode,
    )
    far = {"workers": workers, "address": address, "gpus": gpus}
    near = {"workers": workers, "device": device, "loaded": loaded}
    return carry_out(planned, Path(out), pick_engine(engine), far if engine == "ray" else near)


def carry_out(
    planned: Planned,
    out: Path,
    run: Callable[..., None],
    settings: Mapping[str, Any],
    begun: Callable[[Store, int], None] | None = None,
) -> Study:
    """Compute the missing shards, cut as when the study began; `begun` is called with the number of finished shards.

    A kind of two phases then goes through the images again; that phase is stored in a folder of its own below.
    """
    store = open_store(out, planned.manifest, circumstances())
    with store.locked():
        compute_missing(planned, store, run, settings, begun)
        study = Study(store)
        later = planned.recipe.kind.next_phase(study)
        if later is not None:
            then = planned.then(later, store.manifest)
            below = open_store(store.folder, then.manifest, circumstances())
            compute_missing(then, below, run, settings, begun)
    return Study(store)


def compute_missing(
    planned: Planned,
    store: Store,
    run: Callable[..., None],
    settings: Mapping[str, Any],
    begun: Callable[[Store, int], None] | None,
) -> None:
    """Compute and store what one phase lacks."""
    recipe = replace(planned.recipe, batch=store.manifest["batch"])
    store.clean()
    done = set(store.done())
    missing = [shard for shard in planned.cut(store.manifest["shard"]) if shard.number not in done]
    if begun is not None:
        begun(store, len(done))
    if missing:
        with counting(sum(map(len, missing)), f"{recipe.kind.name}, images") as tick:
            run(recipe, missing, store, tick=tick, **settings)


def make_kind(
    name: str,
    methods: Methods | None,
    metrics: str | Sequence[str] | None,
    options: Settings,
    data: Data,
    seed: int,
) -> Kind:
    """The kind of study with all its options, checked."""
    if name in OWN:
        raise OptionError(
            f"the study {name} has a function of its own, vitreous.{name}, and a command: vitreous {name}"
        )
    made: Any = find_kind(name)
    if name == "leaderboard":
        refuse_unregistered([] if methods is None else listed_methods(methods))
        return made.make(methods, metrics, options, data)  # type: ignore[no-any-return]
    own = dict(options.get(name, {})) if name not in ("compare", "maps") else {}
    names, options = by_name(methods, options)
    if metrics is not None:
        raise OptionError(f"the study {name} measures no metrics; that is study leaderboard")
    if name == "shortcuts":
        return made.make(names, {**options, name: {"seed": seed, **own}})  # type: ignore[no-any-return]
    if name in ("maps", "compare"):
        return made.make(names, options)  # type: ignore[no-any-return]
    if methods is not None:
        raise OptionError(f"the study {name} has its own method; leave methods out")
    for other in options:
        if other != name:
            raise OptionError(f"options for {other}: the study {name} has none but its own, {name}.…")
    return made.make({"seed": seed, **own} if name in ("ablate", "cass") else own)  # type: ignore[no-any-return]


def as_source(given: Given) -> Source:
    if isinstance(given, Source):
        return given
    return Source(given) if given is None or isinstance(given, str) else Source(ready=given)


def as_targets(given: Any) -> list[str | None]:
    """One or several targets, without repetition."""
    several = list(given) if isinstance(given, list | tuple) else [given]
    if not several:
        raise OptionError("name at least one target, or none for the labels")
    return list(dict.fromkeys(None if one is None else str(one).strip() for one in several))


def pick_engine(name: str) -> Callable[..., None]:
    if name not in ENGINES:
        raise OptionError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    if name == "local":
        return run_local
    from vitreous.evaluation.study.on_ray import run_ray

    return run_ray
