"""Models that are named by a folder or a file: which library and architecture they are, and where their weights lie."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitreous.errors import ModelError, WeightsError, one_line
from vitreous.models.checkpoints.pickles import as_mapping, as_text
from vitreous.models.checkpoints.read import ADAPTER, ENDINGS, read, split, weights_in

NAME_IT = "name its architecture too: load(NAME, weights=FILE), on the command line -m NAME -w FILE"
# Where training programs write the name of an architecture, in this order.
KEYS = (
    *("arch", "architecture", "model_name", "backbone_name", "backbone", "model_id", "encoder", "model", "name", "net"),
    *("timm_model", "timm_name", "model_name_or_path"),
)
INSIDE = ("hyper_parameters", "hparams", "args", "config", "cfg", "opt", "model_args", "meta", "model", "net")


class Place(NamedTuple):
    """A model as `load` looks it up."""

    source: str
    name: str
    weights: str | None
    notes: tuple[str, ...] = ()
    adapter: Path | None = None  # a folder of PEFT


def is_path(spec: str, known: Collection[str]) -> bool:
    """Whether a name is that of a folder or a file here; names of the libraries count first."""
    if spec.startswith((".", "/", "~")):
        return True
    before, after = spec.partition("/")[::2]
    if before in known and after:
        return False
    path = split(spec)[0]
    return bool(spec) and path.exists() and (path.suffix in ENDINGS or not is_timm(spec))


def find(spec: str, weights: str | None, known: Collection[str]) -> Place:
    """The model that a path names."""
    path = split(spec)[0]
    if path.is_dir():
        return in_folder(path, weights, known)
    if not path.is_file():
        raise ModelError(f"{spec}: no such folder or file")
    if path.name.endswith(".json"):
        return in_folder(path.parent, weights, known)
    if (path.parent / "config.json").is_file() and weights is None:
        return in_folder(path.parent, spec, known)
    source, name = of_file(spec, known)
    return Place(source, name, weights or spec)


def in_folder(folder: Path, weights: str | None, known: Collection[str]) -> Place:
    """The model in a folder of Hugging Face, timm or PEFT, or of a training run that holds such folders."""
    if (folder / ADAPTER).is_file():
        return on_base(folder, folder, weights, known)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    if config is not None and ("model_type" in config or "architectures" in config):
        return Place("hf", str(folder), weights)
    if config is not None and "architecture" in config:
        return Place("timm", f"local-dir:{folder}", weights or str(folder))
    if config is not None:
        said = "says neither model_type (Hugging Face) nor architecture (timm)"
        raise ModelError(f"{folder / 'config.json'}: {said}; {NAME_IT}")
    saved = steps_in(folder)
    if saved:
        found = in_folder(saved[-1], weights, known)
        note = f"{folder}: {saved[-1].name} is used, the newest of {len(saved)} checkpoints"
        return found._replace(notes=(note, *found.notes)) if len(saved) > 1 else found
    files = weights_in(folder)
    if len(files) == 1:
        source, name = of_file(str(files[0]), known)
        return Place(source, name, weights or str(files[0]))
    raise ModelError(f"{folder}: is a folder without config.json, so its architecture is not known; {NAME_IT}")


def steps_in(folder: Path) -> list[Path]:
    """The folders checkpoint-500, checkpoint-1000 … that a trainer has written, in this order."""
    found = [one for one in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", one.name)]
    whole = [one for one in found if (one / "config.json").is_file() or (one / ADAPTER).is_file()]
    return sorted(whole, key=lambda one: int(one.name.rpartition("-")[2]))


def on_base(adapter: Path, said: Path, weights: str | None, known: Collection[str]) -> Place:
    """An adapter on the base that its configuration names."""
    base = str(read_json(adapter / ADAPTER).get("base_model_name_or_path") or "")
    if not base:
        raise ModelError(
            f"{said}: {ADAPTER} names no base model; give both: load(BASE, weights={str(said)!r}), -m BASE -w …"
        )
    beside = adapter / base  # folders are often moved together
    path = next((one for one in (Path(base).expanduser(), beside) if one.is_dir()), None)
    found = Place("hf", base, None) if path is None else in_folder(path, None, known)
    if weights is not None:
        found = found._replace(weights=weights)
    return found._replace(adapter=adapter)


def read_json(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: is not readable ({one_line(error, 80)}); copy or save the folder again") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: is a {type(found).__name__}, not a configuration; copy or save the folder again")
    return found


# ------------------------------------------------------------------------------------------- what a file says of itself


def of_file(file: str, known: Collection[str]) -> tuple[str, str]:
    """The library and the architecture that a checkpoint names among its settings."""
    path = split(file)[0]
    if path.suffix not in ENDINGS:
        raise ModelError(f"{file}: is neither a folder of a model nor a file of weights ({', '.join(ENDINGS[:5])})")
    for word in architectures(read(file).settings):
        source, _, name = word.partition("/")
        if source in known and name:
            return source, name
        if is_timm(word):
            return "timm", word
        if is_torchvision(word):
            return "torchvision", word
        if re.fullmatch(r"[\w.-]+/[\w.-]+", word) and not word.startswith("."):
            return "hf", word
    raise WeightsError(f"{file}: does not say its architecture; {NAME_IT}")


def architectures(settings: Any, depth: int = 3) -> Iterator[str]:
    """What may be the name of an architecture, the most likely first."""
    inside = as_mapping(settings) or {}
    yield from (value for key in KEYS if (value := as_text(inside.get(key))) is not None)
    if depth:
        for key in INSIDE:
            yield from architectures(inside.get(key), depth - 1)


def is_timm(name: str) -> bool:
    import timm

    return bool(timm.is_model(name.partition(".")[0]))


def is_torchvision(name: str) -> bool:
    import torchvision

    return name in torchvision.models.list_models()
