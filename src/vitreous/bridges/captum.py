"""captum's objects as methods, and methods as code written for captum calls them.

from_captum(IntegratedGradients(net))            a method, wherever a method's name is taken
captum_style(net, "gae").attribute(x, target)    what code written for captum calls

captum is not imported: its objects are known by their `attribute`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitreous._support.memory import out_of_memory
from vitreous.api import explain
from vitreous.capture.attention import widen
from vitreous.declaration import ConfiguredMethod, Method, Noted
from vitreous.errors import InputError, ModelError, OptionError, TargetError, Unsupported, VitreousError, explained
from vitreous.methods.gradient.channels import Reduce, reduce_channels
from vitreous.models.kinds_of_module import unwrap
from vitreous.models.model import Model
from vitreous.registry import METHODS
from vitreous.trace.run import Run
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images, Map, Output, Scores

SEED = 0  # of objects that draw random numbers, each image by itself
REDUCES = ("sum", "abs-mean", "max-abs")


# --------------------------------------------------------------------------------------------------- captum as a method


class CaptumMethod(ConfiguredMethod):
    """A method made of a captum object."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CaptumMethod) and self.method is other.method

    def __hash__(self) -> int:
        return id(self.method)

    def __repr__(self) -> str:
        return f"vitreous.from_captum({self.method.doc.split('(')[0]}(…), name={self.name!r})"


def from_captum(
    attribution: Any,
    name: str | None = None,
    *,
    model: Model | nn.Module | None = None,
    reduce: str = "sum",
    **arguments: Any,
) -> ConfiguredMethod:
    """Make a method of a captum attribution object, to be given wherever a method's name is.

    `attribution`: IntegratedGradients(net), LayerGradCam(net, layer), Occlusion(net), NoiseTunnel(…), …; any object
    with a `forward_func` and an `attribute` method will do. `name`: what figures and tables call it; by default
    captum_integrated_gradients and the like. `model`: the network, needed only if the object was made on a function.
    `reduce`: how channels become one number: "sum" (the map is then signed), "abs-mean" or "max-abs". `arguments` are
    passed to its `attribute`: n_steps=20, sliding_window_shapes=(3, 16, 16).

    If the object was made on the network itself, targets may be any: classes, texts, concepts. An object that keeps
    the network as its `model` (DeepLift, LRP, GuidedBackprop), or was made on a function, takes classes only.
    """
    kind = type(attribution).__name__
    if not callable(getattr(attribution, "attribute", None)) or not callable(forward_of(attribution)):
        raise OptionError(f"from_captum takes a captum object, e.g. IntegratedGradients(net), not a {kind}")
    if reduce not in REDUCES:
        raise OptionError(f"from_captum.reduce takes sum, abs-mean or max-abs, not {reduce!r}")
    called = name or f"captum_{snake(kind)}"
    if not called.isidentifier() or called in METHODS:
        why = "is a method of vitreous" if called in METHODS else "is not a name in Python"
        raise OptionError(f"name={called!r} {why}; give another")
    bridge = Bridge(attribution, network_of(attribution, model), cast("Reduce", reduce), arguments)

    def run(trace: Trace, target: Target) -> Noted:
        return bridge.maps(trace, target)

    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    run.__doc__ = f"{kind}({given}) of captum."
    declared = Method(called, "captum", "", run, targeted=True, signed=reduce == "sum", alone=True, costly=True)
    return CaptumMethod(declared, {})


def snake(name: str) -> str:
    """IntegratedGradients becomes integrated_gradients."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def parts_of(attribution: Any) -> dict[str, Any]:
    """The captum objects that a captum object is made of, by attribute: NoiseTunnel and GuidedGradCam have some."""
    return {key: part for key, part in vars(attribution).items() if callable(getattr(part, "attribute", None))}


def forward_of(attribution: Any) -> Any:
    """The function that the object explains, or that one of its parts does."""
    own = getattr(attribution, "forward_func", None)
    return own if own is not None else next((forward_of(part) for part in parts_of(attribution).values()), None)


def network_of(attribution: Any, model: Model | nn.Module | None) -> nn.Module:
    """The network that a captum object was made on."""
    if model is not None:
        return model.module if isinstance(model, Model) else unwrap(model)
    forward = forward_of(attribution)
    if isinstance(forward, nn.Module):
        return unwrap(forward)
    raise OptionError(
        f"{type(attribution).__name__} was made on a function; say of which network: from_captum(…, model=net)"
    )


def keeps_network(attribution: Any) -> bool:
    """Whether it runs the network by itself, not through its `forward_func`."""
    return isinstance(getattr(attribution, "model", None), nn.Module) or any(
        map(keeps_network, parts_of(attribution).values())
    )


class Bridge:
    """Runs a captum object on a trace."""

    def __init__(self, attribution: Any, net: nn.Module, reduce: Reduce, arguments: dict[str, Any]) -> None:
        self.attribution, self.net, self.reduce, self.arguments = attribution, net, reduce, arguments
        self.kind = type(attribution).__name__
        self.names = {id(module): name for name, module in net.named_modules()}
        forward = forward_of(attribution)
        whole = isinstance(forward, nn.Module) and unwrap(forward) is net
        self.redirects = whole and not keeps_network(attribution)

    def maps(self, trace: Trace, target: Target) -> Noted:
        """One image at a time: objects that repeat images do so in different orders."""
        self.check(trace.model)
        if trace.inputs and not self.redirects:
            raise Unsupported(f"{self.kind} runs the network by itself, without the inputs beside the images")
        fixed = target.fix(trace.output)
        numbers = fixed.class_numbers(len(trace)) if fixed.one_class else None
        if numbers is None and not self.redirects:
            raise TargetError(f"{self.kind} runs the network by itself, so it takes a class, not {target}")
        keys = trace.keys(SEED).tolist()
        found = []
        for i in range(len(trace)):
            with drawing(keys[i]), torch.enable_grad(), trace.model.still():
                number = None if numbers is None else numbers[i]
                found.append(self.map(trace, self.one(trace, fixed.of_image(i), i, number)))
        return Noted(torch.cat(found), {"captum": self.kind})

    def one(self, trace: Trace, target: Target, index: int, number: int | None) -> Any:
        """What the object finds for one image."""
        image = trace.images[index : index + 1].detach().clone().requires_grad_()
        own = self.moved(self.attribution, trace.model.module)
        if self.redirects:
            own, number = redirected(own, score_function(trace, target, index)), None
        asked = {**self.arguments, **({} if number is None else {"target": number})}
        try:
            return own.attribute(image, **asked)
        except VitreousError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise Unsupported(f"{self.kind} of captum fails on {trace.model.name} ({explained(error)})") from error

    def check(self, model: Model) -> None:
        """Raise unless the model is the network of the object, or a copy of it (with other weights)."""
        twin = model.module
        shapes = [{name: p.shape for name, p in net.named_parameters()} for net in (self.net, twin)]
        if twin is self.net:
            return
        if type(twin) is not type(self.net) or shapes[0] != shapes[1]:
            raise ModelError(f"{self.kind} was made on another network than {model.name}; make it on this one")
        if not self.redirects and not keeps_network(self.attribution):
            raise ModelError(f"{self.kind} was made on a function, which is not that of a copy of {model.name}")

    def moved(self, attribution: Any, net: nn.Module) -> Any:
        """The object with its modules (a layer, the model) replaced by those of a copy of the network."""
        if net is self.net:
            return attribution
        twin = copy.copy(attribution)
        for key, value in vars(attribution).items():
            if key in parts_of(attribution):
                setattr(twin, key, self.moved(value, net))
            elif isinstance(value, nn.Module) and id(value) in self.names:
                setattr(twin, key, net.get_submodule(self.names[id(value)]))
        return twin

    def map(self, trace: Trace, found: Any) -> Map:
        """An attribution as a map: of pixels or of a feature map [1 C h w], or of tokens [1 N D]."""
        values = found[0] if isinstance(found, tuple | list) and len(found) == 1 else found
        layout = trace.layout
        if isinstance(values, Tensor):
            values = widen(values.detach())
            if values.ndim == 4 and len(values) == 1:
                return reduce_channels(values, self.reduce)
            if values.ndim == 3:
                tokens = values.movedim(trace.batch_axis, 0)
                if tokens.shape[:2] == (1, layout.tokens):
                    return trace.map(reduce_channels(tokens.mT[:, :, None], self.reduce)[:, 0])
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        said = f"{self.kind} returns {shape} for an image, not values of pixels [1, C, h, w]"
        raise Unsupported(f"{said} or of the {layout.tokens} tokens of a layer [1, {layout.tokens}, D]")


def redirected(attribution: Any, forward: Callable[[Tensor], Scores]) -> Any:
    """A copy of the object, and of its parts, that explains another function."""
    twin = copy.copy(attribution)
    for key, part in parts_of(attribution).items():
        setattr(twin, key, redirected(part, forward))
    twin.forward_func = forward
    return twin


def score_function(trace: Trace, target: Target, index: int) -> Callable[[Tensor], Scores]:
    """The score of versions of one image, with a gradient where there is one."""

    def score(images: Tensor) -> Scores:
        how = Run.from_pixels() if torch.is_grad_enabled() else Run.to_output()
        run = trace.run(images, how.unseen().of([index] * len(images)))
        return target.of_rows([0] * len(images))(run.output, run.embedding)

    return score


@contextmanager
def drawing(key: int) -> Iterator[None]:
    """The same random numbers for an image every time; the generators of torch and NumPy are as before afterwards."""
    state = np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(key)
        np.random.seed(key % 2**32)
        try:
            yield
        finally:
            np.random.set_state(state)


# -------------------------------------------------------------------------------------------------- methods for captum


class CaptumStyle:
    """A method with captum's `attribute`."""

    def __init__(self, model: Model | nn.Module, method: str | ConfiguredMethod | None = None, **options: Any) -> None:
        self.model = model if isinstance(model, Model) else Model(model)
        self.method, self.options = method, options

    @property
    def forward_func(self) -> Callable[[Tensor], Output]:
        return self.model.run

    def attribute(self, inputs: Any, target: Any = None) -> Any:
        """Values in the shape of the inputs [B C Y X], a preprocessed batch or a tuple with one.

        A map is enlarged to the size of the images (bilinear) and divided equally among their channels, so that the
        sum over channels is the map. `target`: as for `vitreous.explain`, e.g. one class for each image; None: top-1.
        """
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].ndim != 4:
            raise InputError("attribute takes one batch of preprocessed images, [B C Y X]")
        images = given[0].detach()
        maps = enlarged(self.model, images, self.method, target, self.options).to(images.device)
        found = (maps[:, None] / images.shape[1]).to(images.dtype).expand_as(images).contiguous()
        return (found,) if isinstance(inputs, tuple) else found


def captum_style(model: Model | nn.Module, method: str | ConfiguredMethod | None = None, **options: Any) -> CaptumStyle:
    """A method as code written for captum expects it: `captum_style(net, "gae").attribute(inputs, target=281)`."""
    return CaptumStyle(model, method, **options)


def enlarged(
    model: Model, images: Images, method: str | ConfiguredMethod | None, target: Any, options: dict[str, Any]
) -> Map:
    """Maps at the size of the images."""
    chosen = target.tolist() if isinstance(target, Tensor | np.ndarray) else target
    made = explain(model, images, method, chosen, **options)
    return made.resize((images.shape[-2], images.shape[-1])).map
