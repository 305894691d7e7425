"""A mode that applies a table {name of a torch function: backward rule} while a model runs.

A rule is called in place of the function, with the function and its arguments, and returns the same result with a
different backward. All spellings of a function (F.gelu, torch.gelu, Tensor.gelu_) share one name. If the mode is
entered before a trace runs, it receives the functions that `Capture` calls: it is one more layer around them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.capture.capture import ModuleNames, caller
from vitreous.capture.entries import Entry
from vitreous.models.facts import Facts

Function = Callable[..., Any]
Rule = Callable[..., Any]  # (function, *arguments) -> result


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHAPE = words(
    """get getitem setitem view view_as reshape reshape_as permute transpose t flatten unflatten squeeze unsqueeze
    expand expand_as broadcast_to contiguous clone cat concat concatenate stack hstack vstack dstack split
    split_with_sizes tensor_split chunk unbind narrow select diagonal index_select index take_along_dim gather repeat
    repeat_interleave tile roll flip movedim moveaxis swapaxes swapdims rot90 pad constant_pad_nd unfold fold
    as_strided pixel_shuffle pixel_unshuffle channel_shuffle masked_fill masked_select where tril triu copy meshgrid
    to float double half bfloat16 type type_as detach requires_grad dropout alpha_dropout feature_dropout dropout1d
    dropout2d dropout3d atleast_2d atleast_3d index_copy index_put scatter scatter_add masked_scatter index_add size
    nan_to_num"""
)
LINEAR = SHAPE | words(
    """linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d add sub rsub neg positive mean sum cumsum diff
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate upsample
    batch_norm nansum grid_sample embedding"""
)
SPELLINGS = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "rmul": "mul", "radd": "add"}
SPELLINGS |= {"subtract": "sub", "negative": "neg", "special_softmax": "softmax", "special_expit": "sigmoid"}
IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "idiv": "div", "ipow": "pow"}
OPERANDS = {"input": 0, "other": 1, "mat2": 1}
COUNTED = words("layer_norm rms_norm linear")
ROOT = "_vitreous_root"  # attribute of a tensor: the signal of which it is an elementwise function


class RuleWarning(UserWarning):
    """Warns that relevance passes through a function without a rule."""


@dataclass(frozen=True)
class Table:
    """Rules by function name; functions in `plain` need none. `instead` describes what all others get."""

    name: str
    rules: Mapping[str, Rule]
    plain: frozenset[str]
    instead: str = "its plain gradient"
    other: Rule | None = None  # the fallback for functions without a rule
    noted: frozenset[str] = frozenset()  # functions that are in `rules` for bookkeeping, not for relevance
    repeats: bool = True  # rules treat a block that is run again alike: they count nothing, and ask for no origin


class Way(NamedTuple):
    """How a function is treated."""

    name: str
    fresh: Function  # its out-of-place form
    inplace: bool
    rule: Rule | None
    noted: bool  # relevance that passes through is noted
    plain: bool  # it is simply called


class Rules(TorchFunctionMode):
    """Apply `table` to all functions of a signal, i.e. of tensors that depend on the image, not on parameters alone.

    `names`: the model's modules by identity. `entry`: store the input of this norm or linear layer in `entered`.
    Functions without a rule are collected in `unruled`, with the calling module, once relevance passes through them.
    """

    def __init__(self, table: Table, names: ModuleNames, entry: Entry | None = None) -> None:
        super().__init__()
        self.table, self.names, self.entry = table, names, entry
        self.unruled: dict[str, str] = {}
        self.entered: Tensor | None = None
        self._counts = {"norm": 0, "linear": 0}
        self._ways: dict[Any, Way] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        way = self._ways.get(func) or self.way(func)
        args = tuple(map(constant, args))
        kwargs = {key: constant(value) for key, value in kwargs.items()} if kwargs else {}
        if way.plain:
            return func(*args, **kwargs)
        args, kwargs = positional(args, kwargs)
        if self.entry is not None and self.entered is None:
            self.look_for_entry(way.name, args)
        if way.rule is None or not any(map(carries, tensors_in((*args, *kwargs.values())))):
            out = func(*args, **kwargs)
            if way.inplace:
                set_root(args[0], None)
        elif kwargs.pop("inplace", False) or way.inplace:
            out = overwritten(args[0], way.rule(way.fresh, *args, **kwargs))
        else:
            out = way.rule(way.fresh, *args, **kwargs)
        if way.noted:
            self.note(way.name, out)
        return out

    def way(self, func: Any) -> Way:
        """How a function is treated; found out when it is first called."""
        (name, fresh, inplace), table = spelled(func), self.table
        ruled = name in table.rules
        rule = table.rules[name] if ruled else None if name in table.plain else table.other
        noted = (name not in table.plain and not ruled) or name in table.noted
        plain = rule is None and not noted and not inplace and (self.entry is None or name not in COUNTED)
        self._ways[func] = Way(name, fresh, inplace, rule, noted, plain)
        return self._ways[func]

    def look_for_entry(self, name: str, args: tuple[Any, ...]) -> None:
        """Count norms and linear layers as `Capture` does."""
        kind = "norm" if name in ("layer_norm", "rms_norm") else name
        if kind in self._counts:
            self._counts[kind] += 1
            if (kind, self._counts[kind]) == self.entry:
                self.entered = args[0]

    def note(self, name: str, out: Any) -> None:
        """Run a function without a rule, and note it if relevance passes through."""
        parts = [part for part in tensors_in((out,)) if part.requires_grad]
        where = caller(self.names) if parts else ""
        for part in parts:
            part.register_hook(noting(self.unruled, name, where))  # type: ignore[no-untyped-call]


def noting(unruled: dict[str, str], name: str, where: str) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        unruled.setdefault(name, where)

    return hook


def warn_of(rules: Rules, facts: Facts, model: str) -> None:
    """Warn, once per model, about functions without a rule."""
    if rules.unruled and facts.first("a warning of functions without a rule"):
        listed = ", ".join(f"torch.{name} (in {where or 'its own code'})" for name, where in rules.unruled.items())
        said = f"{model}: no relevance rule for {listed}; {rules.table.instead} is used"
        warnings.warn(said, RuleWarning, stacklevel=3)


@cache
def spelled(func: Any) -> tuple[str, Function, bool]:
    """The canonical name of a function, its out-of-place form, and whether it works in place."""
    full = str(getattr(func, "__name__", "")).split(".")[0]
    name = full.strip("_")
    if full.startswith("__") and name in IN_PLACE:
        return IN_PLACE[name], getattr(Tensor, IN_PLACE[name]), True
    if full == "__setitem__":
        return name, func, True
    if full.endswith("_") and not full.startswith("_"):
        home: Any = Tensor if hasattr(Tensor, name) else F
        fresh = getattr(home, name, func)
        return name, fresh if callable(fresh) else func, True  # requires_grad is no function
    return SPELLINGS.get(name, name), func, False


def positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with operands in their places: rules share relevance among these."""
    if "condition" in kwargs or not kwargs.keys() & OPERANDS:
        return args, kwargs
    named = [kwargs[name] for name in OPERANDS if name in kwargs]
    return (*args, *named), {name: value for name, value in kwargs.items() if name not in OPERANDS}


def constant(value: Any) -> Any:
    """Parameters carry no signal."""
    kind = type(value)
    if kind is Tensor:  # the common case first, since this runs for every function call
        return value
    if kind in (list, tuple):
        return kind(map(constant, value))
    return value.detach() if issubclass(kind, Tensor) and isinstance(value, nn.Parameter) else value


def carries(value: Any) -> bool:
    """Whether this is a tensor that depends on the image."""
    return isinstance(value, Tensor) and value.requires_grad


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among the arguments, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def overwritten(t: Tensor, new: Tensor) -> Tensor:
    """Give t new values without changing saved copies of it (except the base tensor of which it is a view)."""
    if not t._is_view():
        t.data = torch.empty_like(t)
    out = t.copy_(new)
    set_root(out, getattr(new, ROOT, None))
    return out


def root_of(t: Tensor) -> Tensor:
    root: Tensor = getattr(t, ROOT, t)
    return root


def set_root(t: Any, root: Tensor | None) -> None:
    """Mark `t` as an elementwise function of `root` (None or the former `t`: only of itself)."""
    if root is not None and root is not t:
        setattr(t, ROOT, root)
    elif hasattr(t, ROOT):
        delattr(t, ROOT)
