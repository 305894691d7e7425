"""Which decision is left and which one is wanted, and how far an output is from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitreous.errors import TargetError, Unsupported
from vitreous.models.model import Model
from vitreous.models.output import Form, Meaning
from vitreous.trace.apply import of_images, read_target
from vitreous.trace.target import Class, Contrast, no_classifier
from vitreous.trace.trace import Trace

ANY = "any"
ROUNDING = 64 * torch.finfo(torch.float32).eps  # of the largest logit: how much two runs of one variant may differ


@dataclass(frozen=True)
class Aim:
    """From class `source` to class `to`; `to` None: to any other, of which `rival` is the best one at first."""

    source: int
    to: int | None
    rival: int
    model: Model
    slack: float  # relative to the largest logit: a smaller lead may be a rounding error

    @property
    def contrast(self) -> Contrast:
        """What speaks for the present decision rather than the wanted one."""
        return Contrast(Class(self.source), Class(self.rival))

    def logits(self, output: Float[Tensor, "V C"]) -> Float[Tensor, "V C"]:
        scale = self.model.meaning.scale("logit", self.model.exclusive)
        return output if scale is None else scale(output)

    def margins(self, output: Float[Tensor, "V C"]) -> Float[Tensor, "V"]:
        """The lead of the wanted class over the best other, in logits; positive where the decision has turned."""
        logits = self.logits(output)
        wanted = self.wanted(output)[:, None]
        lead = logits.gather(1, wanted)[:, 0] - logits.scatter(1, wanted, -torch.inf).amax(1)
        if self.to is None:
            lead = logits.gather(1, wanted)[:, 0] - logits[:, self.source]
        return lead - self.slack * logits.abs().amax(1).clamp_max(torch.finfo(logits.dtype).max)

    def wanted(self, output: Float[Tensor, "V C"]) -> Int[Tensor, "V"]:
        """The class that is wanted in each variant: the given one, or the best other."""
        if self.to is not None:
            return torch.full((len(output),), self.to, device=output.device)
        own = torch.full((len(output), 1), self.source, device=output.device)
        return output.scatter(1, own, -torch.inf).argmax(1)

    def probabilities(self, output: Float[Tensor, "V C"]) -> tuple[list[float], list[float]]:
        """Of the class that is left and of the wanted one."""
        shares = self.model.meaning.probabilities(output)
        return shares[:, self.source].tolist(), shares.gather(1, self.wanted(output)[:, None])[:, 0].tolist()


def aim(trace: Trace, to: Any = None, source: Any = None) -> Aim:
    """The aim on one image; by default from the predicted class to the runner-up."""
    refuse_undecided(trace)
    model, output = trace.model, trace.output
    first, second = output[0].topk(2).indices.tolist()
    if source is not None and one_class(trace, source) != first:
        told = model.label(one_class(trace, source))
        raise TargetError(f"the decision is {model.label(first)}, not {told}; leave --from (from_) out")
    wanted = None if to == ANY else second if to is None else one_class(trace, to)
    if wanted == first:
        raise TargetError(f"the decision is {model.label(first)} already; give another class, or any")
    dtype = trace.model.dtype
    slack = max(ROUNDING, 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0)
    return Aim(first, wanted, second if wanted is None else wanted, model, slack)


def one_class(trace: Trace, given: Any) -> int:
    """The number of a class."""
    numbers = read_target(trace, given).fix(trace.output).class_numbers(1)
    if numbers is None or len(numbers) != 1:
        raise TargetError(f"{given!r} is not one class; give its number or its name")
    return numbers[0]


def refuse_undecided(trace: Trace) -> None:
    """Raise if the model makes no decision between classes, one for each image."""
    model = of_images(trace.model, "a counterfactual works")
    if model.form is not Form.VECTOR:
        said = f"{model.name} gives {model.form.value}, and a counterfactual turns one decision for the whole image"
        raise Unsupported(f"{said}; explain a contrast of two classes instead: target A-B")
    if not trace.classifies:
        raise no_classifier(model.name)
    if model.meaning is Meaning.VALUE or trace.output.shape[1] < 2:
        what = "numbers that are no classes" if model.meaning is Meaning.VALUE else "one class only"
        raise Unsupported(f"{model.name} gives {what}, so there is no other decision; try token_ablation")
