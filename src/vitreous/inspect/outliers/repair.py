"""A copy of a network with test-time registers: extra tokens that take what register units put on patches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vitreous.capture.attention import near
from vitreous.errors import ModelError, OptionError, Unsupported, one_line
from vitreous.inspect.outliers.mlps import Mlp, find_mlps
from vitreous.inspect.outliers.registers import RATIO, registers
from vitreous.inspect.view import AnyModel, refuse_view
from vitreous.models.inputs import Inputs
from vitreous.models.layout import Layout
from vitreous.models.libraries import PREFIXES
from vitreous.models.model import Model
from vitreous.models.register_tokens import ExtendedBlock, MovedUnits
from vitreous.models.register_tokens import Registers as Tokens
from vitreous.models.survey_run import noise_images
from vitreous.trace.apply import as_model, of_images
from vitreous.trace.perturb.dropped_runs import lean_run
from vitreous.trace.run import Run
from vitreous.trace.trace import Trace
from vitreous.types import Extent

Place = tuple[int, int]  # layer and unit


class Repaired(Model):
    """A model with test-time registers."""

    def __init__(self, net: nn.Module, original: Model, registers: Tokens, neurons: tuple[Place, ...]) -> None:
        count = registers.count
        super().__init__(
            net,
            original.preprocess,
            original.labels or None,
            name=f"{original.name} with {count} register{'' if count == 1 else 's'}",
            classifier=original.classifier,
            output=original.output,
            channels=original.channels,
            bands=original.bands,
        )
        self.registers = registers
        self.neurons = neurons
        self.known_as = original.known_as

    def layout_at(self, size: Extent, inputs: Inputs | None = None) -> Layout:
        """The geometry at this size; it names the registers."""
        start = self.registers.at
        return replace(super().layout_at(size, inputs), added=tuple(range(start, start + self.registers.count)))


def with_registers(
    model: AnyModel,
    count: int = 1,
    *,
    neurons: Sequence[Any] | None = None,
    images: Any = None,
    most: int = 10,
    ratio: float | int = RATIO,
) -> Repaired:
    """A model with `count` test-time registers, on which every method runs; the given network is not changed.

    Each register is a token of zeros that enters the first block and is removed after the last one. The k-th largest
    activation of every register neuron over the patches moves to the k-th register, and all patches get zero.
    `neurons`: the register neurons as (layer, unit), inputs of the second linear layer of a block's MLP; or `images`,
    on which the `most` first units of `vitreous.inspect.registers` are taken.
    """
    if count < 1:
        raise OptionError(f"count={count}: give at least one register")
    if (neurons is None) == (images is None):
        raise OptionError("give with_registers either neurons=[(layer, unit), …] or images on which to find them")
    original = of_images(as_model(model), "with_registers works")
    trace = Trace(original, noise_images(original, original.size)[:1])
    refuse_repair(trace)
    places = listed(neurons) if neurons is not None else found_on(original, images, most, ratio)
    with torch.inference_mode(False), torch.enable_grad():  # the layout of the copy is measured by gradients
        mlps = find_mlps(trace)
        check_places(original, places, mlps)
        tokens = Tokens(count, trace.layout.prefix, trace.layout.suffix, 1 - trace.batch_axis)
        net = extended(trace, tokens)
        check_extended(trace, Repaired(net, original, tokens, places))
        for layer in sorted({layer for layer, _ in places}):
            units = [unit for number, unit in places if number == layer]
            move_units(net, moved_name(net, trace.layout, mlps[layer]), units, tokens)
    repaired = Repaired(net, original, tokens, places)
    repaired.forget()  # what was found out about the copy without the moves
    return repaired


# ------------------------------------------------------------------------------------------------------------ neurons


def listed(neurons: Sequence[Any]) -> tuple[Place, ...]:
    """The given neurons, each once."""
    places: dict[Place, None] = {}
    for one in neurons:
        if not isinstance(one, Sequence) or isinstance(one, str) or len(one) != 2:
            raise OptionError(f"neurons: {one!r} is not a pair (layer, unit)")
        places[int(one[0]), int(one[1])] = None
    if not places:
        raise OptionError("neurons: name at least one pair (layer, unit), or give images on which to find them")
    return tuple(places)


def found_on(model: Model, images: Any, most: int, ratio: float | int) -> tuple[Place, ...]:
    """The register neurons found on images."""
    seen = registers(model, images, ratio=ratio, most=most)
    if seen.onset is None:
        raise OptionError(f"{model.name} has no register neurons on these images ({seen.said}); try a lower ratio")
    return tuple((unit.layer, unit.unit) for unit in seen.units)


def check_places(model: Model, places: Sequence[Place], mlps: dict[int, Mlp]) -> None:
    """Raise unless these are units of MLPs whose activations can be moved."""
    if not any(mlp.flat for mlp in mlps.values()):
        raise Unsupported(
            f"{model.name} shows no MLP of two linear layers in its blocks, whose units registers could take over"
        )
    for layer, unit in places:
        if layer not in mlps or not mlps[layer].flat:
            known = [number for number, mlp in mlps.items() if mlp.flat]
            raise OptionError(f"neurons: layer {layer} of {model.name} has no MLP; the layers {known} have one")
        if not 0 <= unit < mlps[layer].units:
            raise OptionError(
                f"neurons: layer {layer} of {model.name} has units 0 to {mlps[layer].units - 1}, not {unit}"
            )


# ------------------------------------------------------------------------------------------------------------ the copy


def refuse_repair(trace: Trace) -> None:
    """Raise unless tokens can be added to this model."""
    model, layout = trace.model, trace.layout
    refuse_view(trace, "registers")
    if model._forward is not None:
        raise Unsupported(
            f"{model.name} is run by a forward of its own, which would run the network without registers; "
            "put it into the forward of an nn.Module"
        )
    if not isinstance(layout.patch_run, slice):
        raise Unsupported(f"{model.name} has other tokens among its patches, so registers cannot be told from them")
    trace.block(0)


def extended(trace: Trace, tokens: Tokens) -> nn.Module:
    """A copy of the network with registers before its first block, which are removed after the last one."""
    model, blocks = trace.model, trace.layout.blocks
    try:
        with model.facts.lock:
            net = copy.deepcopy(model.module)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"{model.name} cannot be copied ({one_line(error, 120)}), which registers need") from error
    for module in net.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else torch may compute the layer as one, past its modules
    for module in (module for name in blocks for module in net.get_submodule(name).modules()):
        for name in PREFIXES:
            if module.__dict__.get(name) == trace.layout.prefix:
                setattr(module, name, trace.layout.prefix + tokens.count)
    for name in dict.fromkeys((blocks[0], blocks[-1])):
        block = net.get_submodule(name)
        put(net, name, ExtendedBlock(block, tokens, first=name == blocks[0], last=name == blocks[-1]))
    return net


def put(net: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a module of a network."""
    parent, _, key = name.rpartition(".")
    net.get_submodule(parent)._modules[key] = module


def moved_name(net: nn.Module, layout: Layout, mlp: Mlp) -> str:
    """The name of a linear layer in the copy: the first and the last block are one level deeper."""
    block = layout.blocks[mlp.layer]
    inside = isinstance(net.get_submodule(block), ExtendedBlock)
    return f"{block}.block{mlp.name.removeprefix(block)}" if inside else mlp.name


def move_units(net: nn.Module, name: str, units: Sequence[int], tokens: Tokens) -> None:
    linear = net.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    put(net, name, MovedUnits.of(linear, units, tokens))


def check_extended(trace: Trace, repaired: Repaired) -> None:
    """Raise unless registers to which no token attends leave the tokens and the output of the network as they were."""
    model = trace.model
    said = f"{model.name} uses its tokens in other ways than attention between them"
    try:
        own = Trace(repaired, trace.images)
        gone = torch.zeros(1, own.layout.tokens, dtype=torch.bool, device=own.images.device)
        gone[:, list(own.layout.added)] = True
        same = own.layout.obstacle is None and own.layout.patch_tokens == shifted(trace.layout, repaired.registers)
        same = same and near(
            lean_run(own, own.images, gone, rows=range(len(own))).output,
            trace.run(trace.images, Run.to_output()).output,
        )
    except ModelError as error:
        raise Unsupported(f"{said}, so no register can be added ({one_line(error, 120)})") from error
    if not same:
        raise Unsupported(f"{said}, so no register can be added")


def shifted(layout: Layout, tokens: Tokens) -> list[int]:
    """The tokens of the patches behind the registers."""
    return [token + tokens.count for token in layout.patch_tokens]
