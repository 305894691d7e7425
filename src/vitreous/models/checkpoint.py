"""A state of tensors and a network: the names that fit, what is left over, and filling the network strictly."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.errors import WeightsError, one_line

State = dict[str, Tensor]
Convert = Callable[[State, nn.Module], State]  # to a network's own names
HEADS = ("head.weight", "classifier.weight", "heads.head.weight", "fc.weight")
# Put before names, anywhere in them, by DistributedDataParallel, torch.compile, Fabric, FSDP and checkpointing.
WRAPS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
AVERAGED = re.compile(r"ema|teacher|target|momentum|shadow|averag|swa")  # prefixes of a second copy of the network
# What trainers keep beside a network, and buffers that no network needs:
BESIDES = re.compile(r"loss|criterion|metric|accura|(^|_)(acc|f1|auroc|auc)(_|$)|n_averaged")
NEEDLESS = re.compile(r"(^|\.)(position_ids|total_ops|total_params)$")


def read_safetensors(file: Path) -> State:
    from safetensors.torch import load_file

    try:
        found: State = load_file(file)
        return found
    except Exception as error:
        said = f"is not a readable checkpoint ({one_line(error, 120)})"
        raise WeightsError(f"{file}: {said}; copy or save it again") from None


def classes_in(state: State) -> dict[str, int]:
    """The number of classes, as the shape of the classifier's weights tells it."""
    heads = [value for key, value in state.items() if any(key == h or key.endswith("." + h) for h in HEADS)]
    heads = [value for value in heads if value.ndim == 2]
    return {"num_classes": heads[-1].shape[0]} if heads else {}


def channels_in(state: State, net: nn.Module) -> int | None:
    """The number of channels, as the shape of the weights of the network's first convolution tells it."""
    first = next((item for item in net.named_modules() if isinstance(item[1], nn.Conv2d)), None)
    weight = None if first is None else state.get(f"{first[0]}.weight")
    return None if first is None or weight is None or weight.ndim != 4 else weight.shape[1] * first[1].groups


class Blank(TorchFunctionMode):
    """Build a network without random initialisation, which takes time: a checkpoint will set every parameter."""

    DRAWS = (Tensor.uniform_, Tensor.normal_, Tensor.erfinv_, Tensor.clamp_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else (kwargs or {}).get("tensor")
        draws = func in self.DRAWS or getattr(func, "__module__", "") == "torch.nn.init"
        return first if draws and isinstance(first, nn.Parameter) else func(*args, **(kwargs or {}))


# --------------------------------------------------------------------------------------------------------------- names


class Named(NamedTuple):
    """A state under the names of a network."""

    state: State
    left: tuple[str, ...] = ()  # names of the checkpoint that are no part of the network
    copies: tuple[str, ...] = ()  # prefixes under which the checkpoint holds the network again


def fit_names(own: Iterable[str], state: State, part: str | None = None) -> Named:
    """Strip the prefix under which most names are the network's own; `part`: the prefix that the user chose."""
    own = set(own)
    state = unwrapped(own, state)
    if part is not None:
        (part,) = unwrapped(own, {part: Tensor()})
        state = {key: value for key, value in state.items() if key.startswith(f"{part}.")}
    counts = count_prefixes(own, state)
    if not counts:
        return Named(state)
    prefix = min(counts, key=lambda one: (-counts[one], bool(AVERAGED.search(one)), len(one)))
    copies = [one for one in counts if not prefix.startswith(one) and counts[one] > 0.9 * counts[prefix]]
    mine = {key: value for key, value in state.items() if key.startswith(prefix) and not key.startswith(tuple(copies))}
    under = {key.removeprefix(prefix): value for key, value in mine.items()}
    firsts = {key.partition(".")[0] for key in own}
    beside = [key for key in under if key not in own and is_beside(key, firsts)]
    kept = {key: value for key, value in under.items() if key not in beside}
    outside = [key for key in state if not key.startswith((prefix, *copies))]
    left = [*outside, *(prefix + key for key in beside if not NEEDLESS.search(key))]
    return Named(kept, tuple(left), tuple(copy.rstrip(".") for copy in copies))


def is_beside(key: str, firsts: set[str]) -> bool:
    """Whether a name that the network lacks is that of a loss, a metric or a needless buffer."""
    first = key.partition(".")[0]
    return NEEDLESS.search(key) is not None or (first not in firsts and BESIDES.search(first) is not None)


def unwrapped(own: set[str], state: State) -> State:
    """Names without those of wrappers, wherever these stand."""
    kept = {part for key in own for part in key.split(".")}
    gone = {wrap for wrap in WRAPS if wrap not in kept}
    return {".".join(part for part in key.split(".") if part not in gone): value for key, value in state.items()}


def count_prefixes(own: set[str], state: State) -> Counter[str]:
    """How many names are the network's own if a prefix is stripped from them."""
    counts: Counter[str] = Counter()
    for key in state:
        parts = key.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in own:
                counts["".join(f"{part}." for part in parts[:start])] += 1
    return counts


def shared_prefix(state: State) -> str:
    """The longest prefix that all names share."""
    parts = [key.split(".")[:-1] for key in state]
    shared = []
    for column in zip(*parts):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return "".join(f"{part}." for part in shared)


def bare_names(own: Iterable[str], state: State, part: str | None = None) -> State:
    """The state under the network's names, as far as they are found."""
    return fit_names(own, state, part).state


# ------------------------------------------------------------------------------------------------------------- filling


def fill(
    net: nn.Module,
    state: State,
    path: str,
    convert: Convert | None = None,
    part: str | None = None,
    resized: str | None = None,
) -> tuple[str, ...]:
    """Load a state strictly, through `convert` where its names or shapes differ; raise with what does not fit.

    Returns notes. `resized`: the parameter that is known to get another shape.
    """
    own = net.state_dict()
    named = fit_names(own, state, part)
    wrong, found = mismatch(own, named.state), named.state
    if wrong and convert is not None:
        shared = shared_prefix(state)
        bare = unwrapped(set(own), {key.removeprefix(shared): value for key, value in state.items()})
        for given in (named, Named(bare)):
            converted = tried(convert, given.state, net)
            if converted is not None and not mismatch(own, converted):
                wrong, found, named = "", converted, given
                break
    if wrong:
        near = len(own.keys() & named.state.keys()) > len(own) / 10
        shown = named.state if near else unwrapped(set(own), state)
        wrong = mismatch(own, shown) + remedy(own, shown)
        raise WeightsError(f"{path}: does not fit {type(net).__name__}: {wrong}")
    net.load_state_dict(found)
    kept = {key: value for key, value in named.state.items() if key in own and key != resized}
    new = [key for key, value in kept.items() if value.numel() != own[key].numel()]
    said = (f"{path}: {some('resampled to fit', new)}",) if new else ()
    return (*notes_on(named, path, type(net).__name__), *said)


def tried(convert: Convert, state: State, net: nn.Module) -> State | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that are old, not of these weights
        try:
            return convert(dict(state), net)
        except Exception:  # not a format it converts: the error names the keys as given
            return None


def notes_on(named: Named, path: str, kind: str) -> Iterable[str]:
    if named.left:
        yield f"{path}: {some('ignored', named.left, 8)}, which {kind} does not have"
    if named.copies:
        one = f"{path.partition('#')[0]}#{named.copies[0]}"
        yield f"{path}: it also holds {', '.join(named.copies)}; to use it write {one}"


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


def remedy(own: State, state: State) -> str:
    """What to do about weights that do not fit."""
    given, wanted = depth(state), depth(own)
    if given and wanted and given != wanted and {plain(key) for key in state} & {plain(key) for key in own}:
        return f"; it has {given} blocks, the network {wanted}: name the architecture that it was trained with"
    return "; name the architecture that it was trained with"


def depth(state: State) -> int:
    """How many blocks there are: the most numbers that stand at one place of a name."""
    numbers: dict[str, set[str]] = {}
    for key in state:
        for found in re.finditer(r"\.(\d+)\.", key):
            numbers.setdefault(plain(key[: found.start()]), set()).add(found[1])
    return max((len(found) for found in numbers.values()), default=0)


def plain(key: str) -> str:
    return re.sub(r"\d+", "#", key)


def some(what: str, keys: Sequence[str], most: int = 3) -> str:
    """`missing a, b, c and 9 more`."""
    return f"{what} {', '.join(keys[:most])}" + (f" and {len(keys) - most} more" if len(keys) > most else "")
