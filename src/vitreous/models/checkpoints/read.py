"""Weights as users name them: a file, FILE#NAME for one network of several in it, an index of shards, or a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vitreous.errors import WeightsError, one_line
from vitreous.models.checkpoint import State, read_safetensors, some
from vitreous.models.checkpoints.pickles import (
    as_mapping,
    may_be_pickle,
    pickled_module,
    read_pickle,
    refuse_module,
    tensors_of,
)

# Where checkpoints keep the network, the first that is there; then averages of it, if there is nothing else.
MAIN = ("state_dict", "model", "model_state_dict", "model_state", "teacher", "module", "net", "network", "weights")
AVERAGES = ("model_ema", "state_dict_ema", "ema", "ema_state_dict", "student", "ema_model", "swa_model")
BESIDES = ("optim", "lr_", "scheduler", "scaler", "callback", "loops", "criterion", "loss", "amp", "metric", "rng")
SHARDS = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
)
USUAL = ("model.safetensors", "pytorch_model.bin", "model.pth", "model.pt", "open_clip_model.safetensors")
ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "adapter_model", "random_states")
ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """What was read: the tensors of one network, and what else the files say."""

    said: str  # as the user named it
    state: State
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    part: str | None = None  # a prefix of names that the user chose
    settings: Mapping[Any, Any] = field(default_factory=dict)  # the rest of the file


def read(weights: str) -> Checkpoint:
    """Read weights as the user names them, without running any code in them."""
    path, part = split(weights)
    files = files_of(path)
    if len(files) > 1 or path.suffix == ".json":
        return Checkpoint(weights, read_shards(files), files, part=part)
    (file,) = files
    if is_safetensors(file):
        return Checkpoint(weights, read_safetensors(file), files, part=part)
    content = read_pickle(file)
    called = whole_network(content)
    if called is not None:
        raise refuse_module(file, called)
    state, notes, part = choose(content, part, file)
    settings = as_mapping(content) or {}
    return Checkpoint(weights, state, files, notes, part, settings)


def whole_network(content: Any) -> str | None:
    """The class of a pickled network, in a file that holds no tensors beside it."""
    called = pickled_module(content)
    return called if called is not None and not any(True for _ in networks(content)) else None


def is_whole(file: Path) -> bool:
    """Whether a file holds a pickled network and no tensors, as far as it can be read as data."""
    if not may_be_pickle(file):
        return False
    try:
        return whole_network(read_pickle(file)) is not None
    except WeightsError:  # a network may keep anything beside its weights
        return True


def is_safetensors(file: Path) -> bool:
    """By its ending, or because it begins as such files do, whatever it is called."""
    with file.open("rb") as opened:
        start = opened.read(9)
    begins = start[8:] == b"{" and int.from_bytes(start[:8], "little") < file.stat().st_size
    return file.suffix == ".safetensors" or begins


def split(weights: str) -> tuple[Path, str | None]:
    """The path, and the name of the network in it that is chosen: FILE#NAME."""
    path = Path(weights).expanduser()
    if path.exists() or "#" not in weights:
        return path, None
    before, _, name = weights.rpartition("#")
    return Path(before).expanduser(), name or None


# ------------------------------------------------------------------------------------------------------------- files


def files_of(path: Path) -> tuple[Path, ...]:
    """The file or files in which the weights lie."""
    if not path.exists():
        raise WeightsError(f"{path}: no such weights file")
    if path.is_file():
        return shards(path) if path.name.endswith(".json") else (path,)
    index = next((path / name for name in SHARDS if (path / name).is_file()), None)
    if index is not None:
        return shards(index)
    usual = next((path / name for name in USUAL if (path / name).is_file()), None)
    if usual is not None:
        return (usual,)
    found = weights_in(path)
    if len(found) == 1:
        return (found[0],)
    if found:
        raise WeightsError(f"{path}: is a folder with {some('several files of weights,', names(found))}; name one")
    raise WeightsError(f"{path}: is a folder without weights; it needs one of {', '.join(USUAL[:2])} or {SHARDS[0]}")


def weights_in(folder: Path) -> list[Path]:
    """The files in a folder that may be weights of a network."""
    files = sorted(file for file in folder.iterdir() if file.suffix in ENDINGS and file.is_file())
    return [file for file in files if not file.name.startswith(NOT_WEIGHTS)]


def names(files: list[Path]) -> list[str]:
    return [file.name for file in files]


def shards(index: Path) -> tuple[Path, ...]:
    """The files that an index names; all must be there."""
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        found = [index.parent / str(name) for name in dict.fromkeys(listed)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        said = f"is not an index of shards ({one_line(error, 80)})"
        raise WeightsError(f"{index}: {said}; give a file of weights, or the folder") from None
    outside = [file for file in found if file.resolve().parent != index.parent.resolve()]
    if outside:
        raise WeightsError(f"{index}: names files outside its folder ({outside[0]}), which are not read")
    missing = [file.name for file in found if not file.is_file()]
    if missing or not found:
        raise WeightsError(f"{index}: names shards that are not there: {some('', missing).strip()}; copy them too")
    return tuple(found)


def read_shards(files: tuple[Path, ...]) -> State:
    state: State = {}
    for file in files:
        state |= read_safetensors(file) if file.suffix == ".safetensors" else tensors_of(read_pickle(file))
    return state


# ------------------------------------------------------------------------------------------- the networks in one file


def networks(content: Any, path: str = "", depth: int = 3) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Dictionaries with tensors in a checkpoint, by their names; optimizers, callbacks and the like are passed by."""
    inside = as_mapping(content)
    if inside is None:
        return
    if any(isinstance(key, str) and isinstance(value, Tensor) for key, value in inside.items()):
        yield path, inside
    for key, value in inside.items() if depth else ():
        if isinstance(key, str) and not key.lower().startswith(BESIDES):
            yield from networks(value, f"{path}.{key}" if path else key, depth - 1)


def choose(content: Any, part: str | None, file: Path) -> tuple[State, tuple[str, ...], str | None]:
    """The state of the chosen or the main network; notes; and what was chosen, if it may be a prefix of names."""
    inside = as_mapping(content)
    if inside is None:
        kind = getattr(content, "called", type(content).__name__)
        raise WeightsError(f"{file}: is a {kind}, not a dictionary of tensors; save model.state_dict()")
    found = {name: tensors_of(held) for name, held in networks(content)}
    if not found:
        keys = ", ".join(map(str, list(inside)[:5])) or "none"
        raise WeightsError(f"{file}: contains no tensors (keys: {keys}); save model.state_dict()")
    if part is not None:
        exact = next((name for name in found if name in (part, f"{part}.state_dict")), None)
        if exact is not None:
            return found[exact], (), None
    main = main_of(found)
    if main is None:
        raise WeightsError(f"{file}: holds several networks; choose one: {chosen(file, list(found))}")
    if part is not None:
        if not any(key.startswith(f"{part}.") for key in found[main]):
            known = [name for name in found if name] or list(
                dict.fromkeys(key.partition(".")[0] for key in found[main])
            )
            raise WeightsError(f"{file}: has no {part!r}; it has {', '.join(known[:8])}")
        return found[main], (), part
    others = [name for name in found if name and name != main and len(found[name]) > len(found[main]) / 2]
    said = f"{file}: {main or 'its own names'} is used; it also holds {', '.join(others)}: {chosen(file, others)}"
    return found[main], (said,) if others else (), None


def main_of(found: Mapping[str, State]) -> str | None:
    """The name of the network that is meant where none is chosen; None if this is unclear."""
    most = max(map(len, found.values()))
    flat = [""] if len(found.get("", ())) > most / 2 else []  # the tensors lie in the file itself
    for name in (*MAIN, *flat, *AVERAGES):
        inner = [one for one in found if one == name or (name and one.startswith(f"{name}."))]
        known = [one for one in inner if one == name or one.rpartition(".")[2] in MAIN]
        if inner:
            return (known or inner)[0]
    return next(iter(found)) if len(found) == 1 else None


def chosen(file: Path, names: list[str]) -> str:
    """How to choose: `w.pth#model_ema`."""
    return " or ".join(f"{file.name}#{name}" for name in names[:4])
