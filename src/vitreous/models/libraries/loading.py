"""What the loaders of all libraries share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import nn

from vitreous.errors import ModelError, one_line
from vitreous.models.checkpoint import Convert, bare_names, channels_in, classes_in, fill
from vitreous.models.checkpoints.read import Checkpoint, read
from vitreous.models.libraries.any import Size
from vitreous.models.libraries.grids import grid_of, own_size_note, resampled_note, size_in
from vitreous.models.libraries.hub import no_weights

RANDOM = "random"  # in place of a file of weights: untrained
SEE = "; see: vitreous models"
NOTHING: tuple[str, ...] = ()


@contextmanager
def hush() -> Iterator[None]:
    """Silence log lines: whatever matters is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def not_built(name: str, error: Exception, weights: str | None, reason: str | None = None) -> ModelError:
    """Why a network could not be made: most often, its published weights could not be fetched (`reason`: why)."""
    if weights is not None:
        return ModelError(f"{name}: {one_line(error)}")
    return no_weights(name, reason or one_line(error, 120))


def fixed_size(name: str, error: Exception) -> ModelError:
    return ModelError(f"{name} does not take another img_size ({one_line(error, 120)})")


# ------------------------------------------------------------------------------------------------- filling a network


class Settings(NamedTuple):
    """How a network is built for a state; None: as usual."""

    size: Size | None = None
    classes: int | None = None
    channels: int | None = None


class Filled(NamedTuple):
    """A network with its weights, and what there is to say of them."""

    net: nn.Module
    notes: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    weights: tuple[Path, ...] = ()


Build = Callable[[Settings], nn.Module]
SizeOf = Callable[[nn.Module], Size | None]


def read_weights(weights: str | None) -> Checkpoint | None:
    """The checkpoint that the user names, if it is one."""
    return None if weights in (None, RANDOM) else read(str(weights))


def filled(
    build: Build,
    found: Checkpoint,
    size: Size | None,
    size_of: SizeOf,
    convert: Convert,
    stretches: bool = False,
) -> Filled:
    """Build a network as its weights tell (classes, channels and, unless it is given, the input size), and fill it.

    `stretches`: the network itself resamples its position grid in every run.
    """
    fixed = None if stretches else size
    settings = Settings(fixed, classes_in(found.state).get("num_classes"))
    net = build(settings)
    state = bare_names(net.state_dict(), found.state, found.part)
    usual = size_of(net)
    grid = grid_of(net, usual)
    same = state.keys() == net.state_dict().keys()  # else another reason is given why it does not fit
    told = size_in(state, grid, found.said, size) if same or stretches else None
    classes = classes_in(state).get("num_classes", settings.classes)
    better = Settings(fixed or told, classes, channels_in(state, net))
    if better.size != fixed or classes != settings.classes or better.channels not in (None, channels_of(net)):
        net = build(better)
    notes, asked = found.notes, NOTHING
    if told is not None and grid is not None and usual is not None:
        if size is None:
            notes += (own_size_note(found.said, told, usual, grid.patch),)
        elif size != told:
            asked = (resampled_note(found.said, told, size, grid.patch),)
    notes += fill(net, found.state, found.said, convert, found.part, grid.name if grid and told else None)
    return Filled(net, notes, asked, found.files)


def channels_of(net: nn.Module) -> int | None:
    return next((module.in_channels for module in net.modules() if isinstance(module, nn.Conv2d)), None)


def published_resampled(net: nn.Module, name: str, before: Size | None, size: Size | None) -> tuple[str, ...]:
    """What to say where published weights are used at another size than theirs."""
    grid = None if size is None or before in (None, size) else grid_of(net, size)
    return () if grid is None or before is None or size is None else (resampled_note(name, before, size, grid.patch),)
