"""Checkpoint files: read as data, never as code; renamed to fit a network, and loaded strictly."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.errors import WeightsError, one_line

State = dict[str, Tensor]
Convert = Callable[[State, nn.Module], State]  # to a network's own names
WRAPPERS = ("state_dict", "model", "model_state_dict", "model_state", "teacher", "module")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
HEADS = ("head.weight", "classifier.weight", "heads.head.weight", "fc.weight")


def read_state(path: str) -> State:
    """Read the tensors of a .safetensors file or a pickled checkpoint, without running any code in it."""
    file = Path(path)
    if not file.is_file():
        raise WeightsError(f"{path}: {'is a folder, not a weights file' if file.is_dir() else 'no such weights file'}")
    state = read_safetensors(file) if file.suffix == ".safetensors" else read_pickle(file)
    while isinstance(state, dict):
        inner = next((state[key] for key in WRAPPERS if isinstance(state.get(key), dict)), None)
        if inner is None:
            break
        state = inner
    if not isinstance(state, dict):
        raise WeightsError(f"{path}: is a {type(state).__name__}, not a dictionary of tensors")
    tensors = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(f"{path}: contains no tensors (keys: {', '.join(map(str, list(state)[:5])) or 'none'})")
    return tensors


def read_safetensors(file: Path) -> Any:
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except Exception as error:
        raise WeightsError(f"{file}: is not a readable checkpoint ({one_line(error, 120)})") from None


def read_pickle(file: Path) -> Any:
    """torch.load, restricted to tensors and plain values; anything else in the file is refused, not run."""
    kept_options = torch.serialization.safe_globals([argparse.Namespace])  # in the checkpoints of DeiT and MAE
    with warnings.catch_warnings(), kept_options:
        warnings.simplefilter("ignore")
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise WeightsError(f"{file}: {why_not(str(error))}") from None


def why_not(said: str) -> str:
    """torch's reason, without its advice to run the file as code."""
    found = re.search(r"GLOBAL (\S+)", said)
    if found is not None:
        return f"contains a {found[1]} besides tensors and was not opened; save model.state_dict() instead"
    other = "weights_only" in said or not said
    reason = "it contains something other than tensors" if other else one_line(ValueError(said), 120)
    return f"is not a readable checkpoint ({reason})"


def classes_in(state: State) -> dict[str, int]:
    """The number of classes, as the shape of the classifier's weights tells it."""
    heads = [value for key, value in state.items() if any(key == h or key.endswith("." + h) for h in HEADS)]
    heads = [value for value in heads if value.ndim == 2]
    return {"num_classes": heads[-1].shape[0]} if heads else {}


def channels_in(state: State, net: nn.Module) -> int | None:
    """The number of channels, as the shape of the weights of the network's first convolution tells it."""
    first = next((item for item in net.named_modules() if isinstance(item[1], nn.Conv2d)), None)
    if first is None:
        return None
    weight = bare_names(net.state_dict(), state).get(f"{first[0]}.weight")
    return None if weight is None or weight.ndim != 4 else weight.shape[1] * first[1].groups


class Blank(TorchFunctionMode):
    """Build a network without random initialisation, which takes time: a checkpoint will set every parameter."""

    DRAWS = (Tensor.uniform_, Tensor.normal_, Tensor.erfinv_, Tensor.clamp_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else (kwargs or {}).get("tensor")
        draws = func in self.DRAWS or getattr(func, "__module__", "") == "torch.nn.init"
        return first if draws and isinstance(first, nn.Parameter) else func(*args, **(kwargs or {}))


def fill(net: nn.Module, state: State, path: str, convert: Convert | None = None) -> None:
    """Load a state strictly, through `convert` where its names differ; raise with what does not fit."""
    own = net.state_dict()
    state = bare_names(own, state)
    if convert is not None and mismatch(own, state):
        try:
            converted = convert(dict(state), net)
            state = state if mismatch(own, converted) else converted
        except Exception:  # not a format it converts: the message below names the keys as given
            pass
    wrong = mismatch(own, state)
    if wrong:
        raise WeightsError(f"{path}: does not fit {type(net).__name__}: {wrong}")
    net.load_state_dict(state)


def bare_names(own: State, state: State) -> State:
    """Strip the prefixes that wrappers put before every name."""
    for prefix in PREFIXES:
        if state and all(key.startswith(prefix) for key in state) and not any(key.startswith(prefix) for key in own):
            return bare_names(own, {key.removeprefix(prefix): value for key, value in state.items()})
    return state


def mismatch(own: State, state: State) -> str:
    """The first names that differ; an empty text if all fit."""
    parts = {
        "missing": [key for key in own if key not in state],
        "unexpected": [key for key in state if key not in own],
        "of another shape": [
            f"{key} {list(state[key].shape)} for {list(own[key].shape)}"
            for key in own
            if key in state and own[key].shape != state[key].shape
        ],
    }
    return "; ".join(some(what, keys) for what, keys in parts.items() if keys)


def some(what: str, keys: Sequence[str]) -> str:
    """`missing a, b, c and 9 more`."""
    return f"{what} {', '.join(keys[:3])}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
