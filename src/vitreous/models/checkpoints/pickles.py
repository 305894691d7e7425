"""Pickled checkpoints, read as data: what is neither a tensor nor a plain value becomes an inert object.

torch.load(weights_only=True) reads most files. Others also hold settings of a trainer's own classes. These are read
by an unpickler that imports nothing and calls nothing but torch's functions that put a tensor together: every other
name in the file stands for an inert class.
"""

from __future__ import annotations

import argparse
import pickle
import re
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.errors import WeightsError, one_line

TRUST = "if you trust whoever made it, say trust_pickle=True (--trust-pickle)"
REMEDY = "save model.state_dict() instead"
# What runs commands, opens files or fetches code: a checkpoint that names it is refused as a whole.
HOSTILE = {
    *("os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "runpy", "importlib", "ctypes", "pty", "code"),
    *("codeop", "commands", "webbrowser", "pip", "pdb", "timeit", "asyncio", "urllib", "ftplib"),
}
HOSTILE_NAMES = {"eval", "exec", "compile", "open", "__import__", "input", "breakpoint", "execfile", "file", "apply"}


class Inert:
    """Stands for an object whose class is not opened: it keeps what the file says of it and does nothing."""

    called = ""  # module and name of the class

    def __new__(cls, *args: Any, **more: Any) -> Inert:
        made = object.__new__(cls)
        made.__dict__.update(given=args, state=None, entries={})
        return made

    def __init__(self, *args: Any, **more: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["entries"][key] = value

    def __call__(self, *args: Any, **more: Any) -> Inert:
        return self

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    add = append

    @property
    def is_module(self) -> bool:
        """Whether it is a pickled network."""
        state = self.__dict__["state"]
        return isinstance(state, dict) and {"_parameters", "_modules"} <= state.keys()


class Hostile(Exception):
    """The file names something that would run commands."""


class Calls:
    """A function that the file may call, in a wrapper that the file cannot change."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        pass


def of_type(function: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any = None) -> Any:
    """A tensor of a class of its own, as a plain tensor."""
    return function(*args)


CALLED: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": torch._utils._rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": lambda data, *more: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *more: data,
    "torch._tensor._rebuild_from_type_v2": of_type,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": lambda *more: {},
}


class Careful(pickle.Unpickler):
    """Imports nothing; every name is inert, but for those that put tensors together."""

    def find_class(self, module: str, name: str) -> Any:
        called = f"{module}.{name}"
        builtin = module in ("builtins", "__builtin__")
        if module.split(".")[0] in HOSTILE or (builtin and name.split(".")[0] in HOSTILE_NAMES):
            raise Hostile(called)
        if called in CALLED:
            return Calls(CALLED[called])
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if called in ("torch.storage.UntypedStorage", "torch.UntypedStorage"):
            return type("Bytes", (), {"dtype": torch.uint8})
        return type(name, (Inert,), {"called": called})


def careful_load(file: Any, **options: Any) -> Any:
    return Careful(file, **options).load()


CAREFULLY: Any = SimpleNamespace(__name__="careful", Unpickler=Careful, load=careful_load)  # in place of pickle


def read_pickle(file: Path) -> Any:
    """What a file of torch.save holds; nothing in it is run."""
    refuse_archives(file)
    with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.simplefilter("ignore")
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error)
        try:
            return torch.load(file, map_location="cpu", weights_only=False, pickle_module=CAREFULLY)
        except Hostile as error:
            said = f"contains a {error} besides tensors and was not opened; {REMEDY}"
            raise WeightsError(f"{file}: {said}") from None
        except Exception:
            raise WeightsError(f"{file}: {why_not(reason)}") from None


def refuse_archives(file: Path) -> None:
    """Raise for archives that torch.save did not write."""
    if file.stat().st_size == 0:
        raise WeightsError(f"{file}: is not a readable checkpoint (it is empty); copy or download it again")
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            inside = {name.partition("/")[2] for name in archive.namelist()}
        if "data.pkl" not in inside:
            raise WeightsError(f"{file}: is a zip archive, but not one of torch.save; give the file of weights itself")
        if "constants.pkl" in inside:
            raise WeightsError(f"{file}: is a TorchScript archive, which hides the attention; {REMEDY}")
    elif tarfile.is_tarfile(file):
        raise WeightsError(f"{file}: is a tar archive; unpack it and give the file of weights itself")
    elif not may_be_pickle(file):
        raise WeightsError(
            f"{file}: is not a readable checkpoint (torch.save did not write it); give a file of weights"
        )


def why_not(said: str) -> str:
    """torch's reason, without its advice to run the file as code."""
    found = re.search(r"GLOBAL (\S+)", said)
    if found is not None:
        return f"contains a {found[1]} besides tensors and cannot be read; {REMEDY}"
    other = "weights_only" in said or "Weights only" in said or not said
    reason = "it is cut off or damaged" if other else one_line(ValueError(said), 120)
    return f"is not a readable checkpoint ({reason}); copy or save it again"


def as_mapping(content: Any) -> Mapping[Any, Any] | None:
    """A dictionary, or what an inert object says of itself."""
    if isinstance(content, Mapping):
        return content
    if isinstance(content, argparse.Namespace):
        return vars(content)
    if not isinstance(content, Inert) or content.is_module:
        return None
    state = content.__dict__["state"]
    state = state if isinstance(state, dict) else {}
    return as_mapping(state.get("_content")) or {**content.__dict__["entries"], **state}  # OmegaConf's are in _content


def as_text(content: Any) -> str | None:
    """A text, or the one that an inert setting of OmegaConf holds."""
    held = (as_mapping(content) or {}).get("_val") if isinstance(content, Inert) else content
    return held if isinstance(held, str) else None


def pickled_module(content: Any) -> str | None:
    """The class of a network that was pickled as a whole, alone or in a dictionary that holds no tensors."""
    inside = [content, *(content.values() if isinstance(content, Mapping) else ())]
    return next((one.called for one in inside if isinstance(one, Inert) and one.is_module), None)


def refuse_module(file: Path, called: str) -> WeightsError:
    reason = f"is a whole network pickled by torch.save(model) ({called}), and opening it runs any code that lies in it"
    return WeightsError(f"{file}: {reason}; {REMEDY}, or, {TRUST}")


def open_trusted(file: Path) -> nn.Module | None:
    """The network in a pickle, which is run as code; None if it holds no network."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:
        said = f"cannot be opened as a whole network ({one_line(error, 160)})"
        raise WeightsError(f"{file}: {said}; the code that defines its classes must be importable") from None
    inside = [content, *(content.values() if isinstance(content, Mapping) else ())]
    return next((one for one in inside if isinstance(one, nn.Module)), None)


def may_be_pickle(file: Path) -> bool:
    """Whether a file may hold a pickle."""
    if not file.is_file() or file.suffix == ".safetensors":
        return False
    with file.open("rb") as opened:
        return opened.read(1) in (b"P", b"\x80")


def tensors_of(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
