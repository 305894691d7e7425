"""The target `latent:NAME#17`: how much of one latent the patches of an image have, on average.

y_j = (1/P)·Σ_p a_j(x_p)        x_p the tokens of the P patches as they leave the layer, a_j their activations

A latent is no function of the model's output, so a second model returns the y_j: the same network, run up to the layer,
and the encoder. It has a layout of its own, whose read-out is the patches, and every method treats it as any network
that takes the mean of its patches. The mean, because it is linear: what two patches add to it is the sum of both.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitreous.capture.attention import widen
from vitreous.capture.narrowed_block import own_thread
from vitreous.errors import OptionError, TargetError, Unsupported
from vitreous.models.facts import facts_of
from vitreous.models.fingerprint import fingerprint
from vitreous.models.inputs import Inputs
from vitreous.models.layout import Layout
from vitreous.models.model import Model
from vitreous.models.output import Form
from vitreous.models.survey_run import noise_images
from vitreous.trace.block_outputs import block_outputs
from vitreous.trace.latents import Latent, Latents
from vitreous.trace.perform import block_of
from vitreous.trace.target import Contrast
from vitreous.trace.trace import Trace
from vitreous.types import Extent, Images

_SIBLINGS: WeakKeyDictionary[Trace, dict[str, Trace]] = WeakKeyDictionary()  # the same images, latents as the output


class Left(BaseException):
    """Raised where the layer is left: nothing later has a part in its tokens."""


class Read(nn.Module):
    """A network up to one layer, and the mean activation of each latent over the patches."""

    def __init__(self, backbone: Model, latents: Latents) -> None:
        super().__init__()
        self.backbone, self.net = backbone, backbone.module
        self.latents = latents.to(widen(torch.empty(0, dtype=backbone.dtype, device=backbone.device)))
        for name in ("mean", "decoder", "encoder", "bias"):
            self.register_buffer(name, getattr(self.latents, name))  # part of what identifies the model
        self.training = self.net.training

    def forward(self, images: Images) -> Float[Tensor, "rows K"]:
        layout = self.backbone.layout_at((*images.shape[1:-3], images.shape[-2], images.shape[-1]))
        tokens, axis = patch_rows(layout, self.leaving(layout, images), self.backbone.name)
        return self.latents.encode(tokens.to(self.latents.mean.dtype)).mean(axis)

    def leaving(self, layout: Layout, images: Images) -> Tensor:
        """The tokens that leave the layer, as the network holds them."""
        taken: list[Tensor] = []

        def take(module: nn.Module, args: Any, out: Any) -> None:
            while isinstance(out, tuple | list) and out:
                out = out[0]
            taken.append(out)
            raise Left

        hook = block_of(self.backbone, layout, self.latents.layer).register_forward_hook(own_thread(take))
        try:
            with suppress(Left):
                self.backbone.run(images)
        finally:
            hook.remove()
        return taken[0]


def patch_rows(layout: Layout, tokens: Tensor, name: str) -> tuple[Tensor, int]:
    """The tokens of the patches, [B P D] or as the network holds them, and the axis of the patches.

    Some patches may have been cut out: then there are fewer.
    """
    run, axis = layout.patch_run, 1 - layout.batch_axis
    if tokens.ndim == 3 and not layout.stages and layout.obstacle is None and isinstance(run, slice):
        behind = layout.tokens - run.stop
        return tokens.narrow(axis, run.start, tokens.shape[axis] - run.start - behind), axis
    placed = layout.to_grid(tokens.movedim(layout.batch_axis, 0))
    if placed is None:
        said = f"{name}: the tokens of this layer cannot be matched with patches of the image"
        raise Unsupported(f"{said}, so they have no latents; try another layer")
    return placed.flatten(1, -2), 1


class LatentModel(Model):
    """A model whose outputs are the mean activations of latents."""

    def __init__(self, backbone: Model, latents: Latents) -> None:
        refuse_latents(backbone, latents.layer)
        net = Read(backbone, latents)
        facts_of(net).lock = backbone.facts.lock  # one run at a time through what both share
        super().__init__(
            net,
            backbone.preprocess,
            name=f"{backbone.name}+{latents.name}",
            classifier=False,
            channels=backbone.channels,
            bands=backbone.bands,
        )
        self.backbone, self.latents = backbone, latents
        self.outputs = len(latents)
        self.spec, self.weights, self.notes = backbone.spec, backbone.weights, backbone.notes

    def layout_at(self, size: Extent, inputs: Inputs | None = None) -> Layout:
        """The geometry at this size; that of the backbone is measured before, in a run that nothing watches."""
        self.backbone.layout_at(size)
        found = super().layout_at(size, inputs)
        if not found.stages and found.obstacle is None and not found.reads and found.layers:
            found = replace(found, readout=tuple(sorted(found.patch_tokens)), share=None)  # also where noise has none
            self._layouts[size, self.arguments.sample(inputs).kind] = found
        return found


def refuse_latents(model: Model, layer: int) -> int:
    """The number of a layer whose patch tokens can be taken apart; raise if there are none."""
    if model.frames is not None or model.form is Form.WORDS:
        what = "takes videos" if model.frames is not None else "answers questions"
        raise Unsupported(f"{model.name} {what}, and latents are of the patches of one image; give its image encoder")
    layout = model.layout
    if layout.decoder is not None:
        raise Unsupported(f"{model.name} reads its patches through a decoder, whose layers are no layers of patches")
    if not layout.layers:
        said = layout.obstacle or "shows no layers"
        raise Unsupported(f"{model.name} {said}, so there are no patch tokens to take apart")
    if not -layout.layers <= layer < layout.layers:
        raise OptionError(f"layer {layer} is out of range: {model.name} has layers 0 to {layout.layers - 1}")
    number = layer % layout.layers
    block_of(model, layout, number)
    trace = Trace(model, noise_images(model, model.extent)[:1])
    tokens = block_outputs(trace, trace.images, [number])[number]
    patch_rows(trace.layout, tokens.movedim(0, trace.batch_axis), model.name)
    return number


def latent_model(model: Model, latents: Latents) -> LatentModel:
    """The model that returns the latents of another; made once for each network, device and precision."""
    key = f"latents {latents.digest} {latents.name} {fingerprint(model)} {model.device} {model.dtype}"
    if key not in model.arguments.twins:
        latents.check(model)
        model.arguments.twins[key] = LatentModel(model, latents)
    found = model.arguments.twins[key]
    assert isinstance(found, LatentModel)
    return found


def parse_latent(text: str, model: Model, *, files: bool = True) -> Latent:
    """Parse NAME#17, on a model or on the model that returns its latents; `files`: NAME may be a path."""
    name, hash, number = text.rpartition("#")
    if not hash or not name.strip() or not re.fullmatch(r"\d+", number.strip()):
        raise TargetError(f"latent:{text}: write latent:NAME#NUMBER, e.g. latent:pets#17")
    if isinstance(model, LatentModel):
        given = model.latents
        found = given if given.name == name.strip() else Latents.find(name.strip(), model.backbone)
        latent = Latent(found, found.checked(int(number)), read=True)
    else:
        found = Latents.find(name.strip(), model, files=files)
        latent = Latent(found, found.checked(int(number)))
    latent.check(model)
    return latent


def reading(trace: Trace, target: Any) -> tuple[Trace, Any]:
    """The trace whose model returns the latents of a target, and the target on it."""
    model = trace.model
    if isinstance(model, LatentModel):
        return trace, bound(target)
    latents = latents_of(target, model)
    if trace.inputs:
        raise Unsupported(f"{model.name} takes inputs beside its images, which latents do not follow")
    own = latent_model(model, latents)
    kept = _SIBLINGS.setdefault(trace, {})
    if own.name + latents.digest not in kept:
        other = trace.like(trace.images, model=own)
        other.crops = trace.crops
        kept[own.name + latents.digest] = other
    return kept[own.name + latents.digest], bound(target)


def bound(target: Any) -> Any:
    """A latent that is given as an object, to be applied to the outputs of its model."""
    if isinstance(target, list | tuple):
        return [bound(one) for one in target]
    if isinstance(target, Contrast):
        return Contrast(bound(target.one), bound(target.other))
    return replace(target, read=True) if isinstance(target, Latent) else target


def latents_of(target: Any, model: Model) -> Latents:
    """The dictionary of the first latent in a target."""
    if isinstance(target, Latent):
        target.check(model)
        return target.latents
    if isinstance(target, list | tuple):
        return latents_of(target[0], model)
    if isinstance(target, Contrast):
        return latents_of(target.one, model)
    found = re.search(r"latent:(.*?#\d+)", str(target), re.IGNORECASE)
    if found is None:
        raise TargetError(f"{target}: write latent:NAME#NUMBER, e.g. latent:pets#17")
    return parse_latent(found[1], model).latents
