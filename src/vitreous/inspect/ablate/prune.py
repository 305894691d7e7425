"""A checkpoint without some heads, MLPs or layers: their weights are zero, so that it gives the ablated outputs alone.

head     the columns of the output projection W_O that read it are zero; mean: W_O^h·μ_h is added to its bias
MLP      its second linear layer is zero, and so is the norm behind it, if there is one; mean: its bias is μ
layer    the output projection of its attention and its MLP are zero
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitreous._support.files import write_whole
from vitreous.capture.attention import near
from vitreous.errors import ModelError, OptionError, Unsupported, one_line
from vitreous.inspect.ablate.blocks import Mlps, find_places
from vitreous.inspect.ablate.places import Heads, Places
from vitreous.inspect.ablate.sources import Source
from vitreous.inspect.ablate.study import without
from vitreous.methods.attention.value_runs import record
from vitreous.models.model import Model
from vitreous.models.origin import Origin
from vitreous.trace.trace import Trace
from vitreous.version import VERSION

FORMAT = "vitreous-pruned-1"
State = dict[str, Tensor]
Chosen = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Saved:
    """A pruned checkpoint on disk."""

    file: Path
    removed: tuple[str, ...]
    difference: float  # largest |difference| of its outputs and those of the ablated network
    size: float  # largest |output| of the latter

    @property
    def said(self) -> str:
        return (
            f"{self.file}: without {', '.join(self.removed)}; loaded again, its outputs differ from those of the "
            f"ablated network by at most {self.difference:.1g} (outputs up to {self.size:.3g})"
        )


def parse_names(text: str, places: Places) -> list[tuple[int, int]]:
    """3.1,5.0 as heads; 3,5 as MLPs or layers."""
    known = dict(zip(places.names, places.all))
    found = []
    for word in (word.strip() for word in text.split(",")):
        if word not in known:
            some = ", ".join(list(known)[:3])
            raise OptionError(f"{word!r} is no {places.one} of {places.trace.model.name}; they are {some}, …")
        found.append(known[word])
    return list(dict.fromkeys(found))


def save_pruned(
    file: str | Path, trace: Trace, what: str, by: str, chosen: Chosen, mean: Source | None = None
) -> Saved:
    """Write the checkpoint, load it into a copy of the network, and compare its outputs with the ablated ones.

    `mean`: the mean values, of which the mean over positions is folded into biases.
    """
    path, places = Path(file), find_places(what, trace)
    if path.suffix != ".safetensors":
        raise OptionError(f"{path}: a pruned checkpoint is written as .safetensors; name such a file")
    if path.is_dir():
        raise OptionError(f"{path}: is a folder; name the file to write")
    if by == "resample":
        raise OptionError("a checkpoint cannot hold the values of other images; save with --by zero or --by mean")
    if by == "mean" and what == "layers":
        raise Unsupported("the mean of a whole layer has no bias that could hold it; save layers with --by zero")
    if len(chosen) == 0:
        raise OptionError("nothing is to be pruned; give --prune COUNT or --remove NAMES")
    source = Source() if by == "zero" else even(mean)
    state = {name: tensor.detach().clone() for name, tensor in trace.model.module.state_dict().items()}
    Fold(trace, places, state, source)(chosen)
    names = [name for name, one in zip(places.names, places.all) if one in set(chosen)]
    told = {
        "format": "pt",
        "vitreous": json.dumps(
            {"format": FORMAT, "what": what, "by": by, "removed": names, "version": VERSION, **made_of(trace.model)}
        ),
    }
    from safetensors.torch import load_file, save

    write_whole(path, save({name: tensor.contiguous() for name, tensor in state.items()}, told))
    expected = without(places, trace, source, set(chosen)).output
    output = output_of(loaded(trace.model, load_file(str(path), device=str(trace.images.device))), trace)
    worst, size = float((output - expected).abs().max()), float(expected.abs().max())
    if not near(output, expected) and worst > 1e-4 * max(1.0, size):
        path.unlink()
        raise Unsupported(
            f"{trace.model.name} cannot be pruned by its weights: the checkpoint gives other outputs than the ablation "
            f"(by {worst:.1g}), so it was not kept. Something else than a projection stands behind its {what}."
        )
    return Saved(path, tuple(names), worst, size)


def even(mean: Source | None) -> Source:
    """The same mean at every position."""
    if mean is None or mean.layers is None:
        raise OptionError("mean values are needed to save with --by mean")
    made = []
    for one in mean.layers:
        axes = tuple(range(2, one.ndim - 1))
        made.append(one.mean(axes, keepdim=True).expand(one.shape) if axes else one)
    return Source(made)


def made_of(model: Model) -> dict[str, Any]:
    told = Origin.of(model, model.size).told
    return {"of": {"name": model.name, **{key: told[key] for key in ("library", "spec", "architecture", "weights")}}}


class Fold:
    """Folds ablations into a state dict."""

    def __init__(self, trace: Trace, places: Places, state: State, source: Source) -> None:
        self.trace, self.places, self.state, self.source = trace, places, state, source
        own = trace.model.module.state_dict(keep_vars=True)
        self.names = {tensor.data_ptr(): name for name, tensor in own.items() if isinstance(tensor, Tensor)}

    def __call__(self, chosen: Chosen) -> None:
        if isinstance(self.places, Heads):
            self.heads(chosen)
        elif isinstance(self.places, Mlps):
            self.mlps(self.places, [layer for layer, _ in chosen])
        else:
            layers = [layer for layer, _ in chosen]
            self.projections(layers)
            self.mlps(Mlps(self.trace), layers)

    def name_of(self, tensor: Tensor | None, what: str) -> str:
        name = None if tensor is None else self.names.get(tensor.data_ptr())
        if name is None or tensor is None or self.state[name].shape != tensor.shape:
            raise Unsupported(
                f"{what} of {self.trace.model.name} is no tensor of its checkpoint, so it cannot be pruned"
            )
        return name

    def heads(self, chosen: Chosen) -> None:
        found = record(self.trace, [0])
        for layer, head in chosen:
            projection = found[layer].projection
            if projection is None or projection.weight is None:
                said = f"layer {layer} of {self.trace.model.name} has no single output projection behind its heads"
                raise Unsupported(f"{said}, so that it cannot be pruned by its weights")
            weight = self.state[self.name_of(projection.weight, f"the output projection of layer {layer}")]
            width = weight.shape[1] // self.places.parts[layer]
            columns = slice(head * width, (head + 1) * width)
            if self.source.layers is not None:
                bias = self.state[self.name_of(projection.bias, f"the bias of the output projection of layer {layer}")]
                mean = self.source.layers[layer][0, head].flatten(0, -2)[0].to(weight.device, torch.float64)
                bias += (weight[:, columns].double() @ mean).to(bias)
            weight[:, columns] = 0

    def projections(self, layers: Sequence[int]) -> None:
        """Make attention give nothing."""
        found = record(self.trace, [0])
        for layer in layers:
            projection = found[layer].projection
            if projection is None or projection.weight is None:
                raise Unsupported(f"layer {layer} of {self.trace.model.name} has no single output projection")
            self.state[self.name_of(projection.weight, f"the output projection of layer {layer}")].zero_()
            if projection.bias is not None:
                self.state[self.name_of(projection.bias, f"the bias of layer {layer}")].zero_()

    def mlps(self, places: Mlps, layers: Sequence[int]) -> None:
        """The last module with a weight and a bias that decides what an MLP gives: its norm, or its linear layer."""
        net = self.trace.model.module
        for layer in layers:
            if layer not in places.mlps:
                raise Unsupported(f"layer {layer} of {self.trace.model.name} has no MLP of two linear layers")
            chain = places.chains[layer]
            norms = [name for name in chain[1:] if is_norm(net.get_submodule(name))]
            name = norms[-1] if norms else chain[0]
            module: Any = net.get_submodule(name)
            self.state[self.name_of(module.weight, name)].zero_()
            bias = getattr(module, "bias", None)
            if self.source.layers is None:
                if bias is not None:
                    self.state[self.name_of(bias, name)].zero_()
                continue
            mean = self.mean_at(places, layer, name)
            stored = self.state[self.name_of(bias, f"the bias of {name}")]
            stored.copy_(mean.to(stored))

    def mean_at(self, places: Mlps, layer: int, name: str) -> Tensor:
        """μ before what scales it: μ / γ, where a LayerScale multiplies by γ."""
        assert self.source.layers is not None
        mean = self.source.layers[layer][0, 0].flatten(0, -2)[0].double()
        chain = places.chains[layer]
        gain = torch.ones_like(mean)
        for behind in chain[chain.index(name) + 1 :]:
            for parameter in self.trace.model.module.get_submodule(behind).parameters():
                gain = gain * parameter.detach().double().flatten().to(gain.device)
        if bool((gain == 0).any()):
            raise Unsupported(f"a scale behind {name} is zero, so that no bias can hold the mean")
        return mean / gain


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None


def loaded(model: Model, state: State) -> Model:
    """A copy of the model with these weights, loaded strictly."""
    if model._forward is not None:
        said = f"{model.name} is run by a forward of its own, so that a copy of its network cannot be checked"
        raise Unsupported(f"{said}; put it into the forward of an nn.Module")
    try:
        with model.facts.lock:
            net = copy.deepcopy(model.module)
    except (RuntimeError, TypeError) as error:
        said = f"{model.name} cannot be copied ({one_line(error, 120)}), so that its checkpoint cannot be checked"
        raise ModelError(said) from error
    net.load_state_dict(state, strict=True)
    made = Model(
        net,
        model.preprocess,
        model.labels or None,
        name=model.name,
        classifier=model.classifier,
        output=model.output,
        channels=model.channels,
        bands=model.bands,
    )
    made._mean = model._mean
    return made


def output_of(model: Model, trace: Trace) -> Tensor:
    """The outputs of another model for the images of a trace."""
    with torch.inference_mode(False), torch.no_grad(), model.still():
        given = [trace.inputs.rows(range(len(trace)))] if trace.inputs else []
        return model.run(trace.images, *given).float()
