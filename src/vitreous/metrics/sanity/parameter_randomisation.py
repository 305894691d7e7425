from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from vitreous._support.progress import steps
from vitreous.errors import Unsupported
from vitreous.metrics.case import Case, Measured
from vitreous.metrics.correlation import rank_correlation
from vitreous.metrics.sanity.copies import copy_of
from vitreous.models.inputs import Given
from vitreous.models.model import Model
from vitreous.registry import metric
from vitreous.types import Images


@metric(better="lower", cite="adebayo2018sanity", again=True)
def parameter_randomisation(
    case: Case,
    *,
    stages: Annotated[
        int, Field(ge=1, description="maps to compare: from the classifier alone to the whole network")
    ] = 4,
    seed: Annotated[int, Field(ge=0, description="another seed shuffles otherwise")] = 0,
) -> Measured:
    """How similar a map stays when the network's weights are shuffled, from the classifier down; use it to find methods
    that ignore the model.

    mean over stages of |ρ(s, s′)|, ρ = Spearman's rank correlation, s′ = the map of the network whose classifier and
    last k blocks have their weights shuffled (each parameter by itself); a copy is shuffled, never the network itself
    """
    twin = copy_of(case.trace.model)
    parts = parts_of(twin, case.trace.images[:1], case.trace.layout.blocks, case.trace.inputs.rows([0]))
    parameters = dict(twin.module.named_parameters())
    target = case.target.for_any_model()
    curve, done = [], 0
    counts = depths(len(parts), stages)
    for count in steps(counts, len(counts), "parameter_randomisation"):
        for name in (name for part in parts[done:count] for name in part):
            shuffle(parameters[name], seed ^ zlib.crc32(name.encode()))
        done = count
        curve.append(
            rank_correlation(case.map, case.again(case.trace.like(case.trace.images, model=twin), target)).abs()
        )
    found = torch.stack(curve, 1)
    return Measured(found.mean(1), found, [float(count) for count in counts])


def depths(parts: int, stages: int) -> list[int]:
    """How many parts are shuffled at each stage: 1 … all, in equal steps."""
    if stages == 1:
        return [parts]
    return sorted({round(1 + (parts - 1) * stage / (stages - 1)) for stage in range(stages)})


def shuffle(parameter: nn.Parameter, seed: int) -> None:
    """Other weights of the same values, so of the same mean and spread."""
    order = torch.randperm(parameter.numel(), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        parameter.copy_(parameter.flatten()[order.to(parameter.device)].view_as(parameter))


# -------------------------------------------------------------------------------------------------- parts of a network


class Uses(TorchFunctionMode):
    """The parameters of a network in the order in which a run first uses them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.known = {id(parameter): name for name, parameter in net.named_parameters()}
        self.names: dict[str, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # to look at a shape is no use
            used = (self.known.get(id(leaf)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.names.update(dict.fromkeys(name for name in used if name is not None))
        return func(*args, **(kwargs or {}))


def parts_of(model: Model, images: Images, blocks: Sequence[str], given: Given | None = None) -> list[list[str]]:
    """Names of parameters, from the head down: what follows the last block, each block, what comes before the first."""
    uses = Uses(model.module)
    with model.still(), uses:
        model.run(images, given)
    if not uses.names:
        raise Unsupported(
            f"{model.name}: its forward runs another network than the one given, so no weights can be shuffled; "
            "give Model(net, forward=…) a function of net alone"
        )
    blocks = blocks or owners(uses.names)
    parts: list[list[str]] = [[] for _ in range(len(blocks) + 2)]
    now = 0
    for name in uses.names:
        inside = next((i for i, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), None)
        now = max(now, inside or 0)
        parts[inside or (now if now < len(blocks) else -1)].append(name)
    return [part for part in reversed(parts) if part]


def owners(names: Iterable[str]) -> list[str]:
    """The modules that hold these parameters, for networks without blocks."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name))
