"""A network with a linear probe in place of its classifier. The network itself is not changed.

y = W·z + b        z: the input of the network's own classifier, or its output if it has none
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous._support.files import write_whole
from vitreous.errors import ModelError, Unsupported, WeightsError, one_line
from vitreous.models.facts import facts_of
from vitreous.models.fingerprint import fingerprint
from vitreous.models.model import Model
from vitreous.types import Images
from vitreous.version import VERSION

FORMAT = "vitreous probe"


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear classifier (W and b), the names of its classes, and the backbone it was trained on."""

    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, "C"]
    classes: tuple[str, ...]
    backbone: str
    fingerprint: str
    accuracy: float
    options: dict[str, Any] = field(default_factory=dict)
    version: str = VERSION

    def save(self, path: Path) -> None:
        """Write a .safetensors file, atomically."""
        from safetensors.torch import save

        told = {
            "format": FORMAT,
            "classes": json.dumps(self.classes),
            "backbone": self.backbone,
            "fingerprint": self.fingerprint,
            "accuracy": json.dumps(self.accuracy),
            "options": json.dumps(self.options),
            "version": self.version,
        }
        write_whole(path, save({"weight": self.weight.contiguous(), "bias": self.bias.contiguous()}, told))

    def fits(self, model: Model) -> None:
        """Raise unless this is the backbone it was trained on."""
        found = fingerprint(model)
        if found != self.fingerprint:
            raise ModelError(
                f"this probe was trained on {self.backbone} (fingerprint {self.fingerprint}), not on {model.name} "
                f"({found}); give the same backbone, weights and image size"
            )


def load_probe(path: str | Path) -> Probe:
    """Read a probe from its file."""
    from safetensors import safe_open

    if not Path(path).is_file():
        raise WeightsError(f"{path}: {'is a folder, not a probe' if Path(path).is_dir() else 'no such probe file'}")
    try:
        with safe_open(str(path), "pt") as stored:
            told, weight, bias = stored.metadata() or {}, stored.get_tensor("weight"), stored.get_tensor("bias")
        if told["format"] != FORMAT or weight.ndim != 2 or bias.shape != weight.shape[:1]:
            raise ValueError(f"its format is {told['format']!r}, weight {list(weight.shape)}, bias {list(bias.shape)}")
        classes, options = tuple(json.loads(told["classes"])), json.loads(told["options"])
        if len(classes) != len(weight):
            raise ValueError(f"{len(classes)} classes for {len(weight)} rows")
        accuracy = float(json.loads(told["accuracy"]))
        backbone, identity = told["backbone"], told["fingerprint"]
        return Probe(weight.float(), bias.float(), classes, backbone, identity, accuracy, options, told["version"])
    except Exception as error:
        said = f"lacks {error}" if isinstance(error, KeyError) else one_line(error, 100)
        raise WeightsError(f"{path}: is not a probe ({said}); make one with: vitreous probe train") from None


# --------------------------------------------------------------------------------------------------------- the network


class LastLinear(TorchFunctionMode):
    """Record the input and output of the last linear layer, in this thread only and without hooks."""

    read: Tensor | None = None
    returned: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.read, self.returned = args[0], out
        return out


def embed(model: Model, images: Images) -> Float[Tensor, "rows D"]:
    """The input of the classifier, as in `Trace`, from one forward pass."""
    seen = LastLinear()
    with seen:
        output = model.run(images)
    if model.classifier is not False and seen.read is not None and seen.returned is output:
        return seen.read
    if model.classifier:
        raise Unsupported(
            f"{model.name} has no single embedding before its classifier; give the network without its classifier"
        )
    return output


class Probed(nn.Module):
    """A backbone, run as its model runs it, and a linear classifier on its embedding."""

    def __init__(self, backbone: Model, probe: Probe) -> None:
        super().__init__()
        self.backbone = backbone
        self.net = backbone.module
        self.head = nn.Linear(probe.weight.shape[1], probe.weight.shape[0], device="meta").requires_grad_(False)
        state = {"weight": probe.weight.clone(), "bias": probe.bias.clone()}
        self.head.load_state_dict(state, assign=True)  # without random initialisation
        self.head.to(backbone.device, backbone.dtype)
        self.training = self.head.training = self.net.training

    def forward(self, images: Images) -> Float[Tensor, "rows C"]:
        embedding = embed(self.backbone, images)
        logits: Tensor = self.head(embedding.to(self.head.weight.dtype))
        return logits


def attach(model: Model, probe: Probe | str | Path) -> Model:
    """The model with the probe's classes; the network that both share is unchanged."""
    name = model.name if isinstance(probe, Probe) else f"{model.name}+{Path(probe).stem}"
    probe = probe if isinstance(probe, Probe) else load_probe(probe)
    probe.fits(model)
    net = Probed(model, probe)
    facts_of(net).lock = model.facts.lock  # one run at a time through what both share
    return Model(
        net,
        model.preprocess,
        probe.classes,
        name=name,
        classifier=True,
        layout=model._given_layout,
        channels=model.channels,
        bands=model.bands,
    )
