"""Ascend from noise to the image that a unit answers to most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from vitreous._support.memory import batch_size, in_batches
from vitreous._support.progress import steps as counted
from vitreous.errors import Unsupported
from vitreous.images.bands import usual_bands
from vitreous.inspect.maximize.canvas import Canvas
from vitreous.inspect.maximize.penalty import border_ratio, discontinuity, distance_from_grey, total_variation
from vitreous.inspect.maximize.result import Maximized, join
from vitreous.inspect.maximize.transform import drawn, moved, noisy, recoloured
from vitreous.inspect.maximize.unit import Unit, look, parse_units, title
from vitreous.models.model import Model
from vitreous.models.origin import Origin
from vitreous.registry import Declared
from vitreous.trace.apply import as_model, of_images
from vitreous.trace.run import gradients
from vitreous.trace.trace import Trace
from vitreous.types import Images, Scores

FRAMES = 32  # of the film of an ascent
BETAS = (0.9, 0.99)  # of Adam
Seed = Annotated[int, Field(ge=0, lt=2**62)]


def maximize(
    model: Model | nn.Module | str | None,
    units: Any,
    *,
    steps: Annotated[int, Field(ge=1, le=100_000, description="of the ascent")] = 256,
    seed: Annotated[Seed | list[Seed], Field(description="of the start and the views; several: an image for each")] = 0,
    canvas: Annotated[
        Literal["fourier", "pixel"], Field(description="what is moved: frequencies or pixels")
    ] = "fourier",
    rate: Annotated[float, Field(gt=0, le=10, description="how far a step goes; it falls to zero at the end")] = 0.08,
    decay: Annotated[
        float, Field(ge=0, le=3, description="fourier: start and steps fall with frequency as f^−decay")
    ] = 1.25,
    copies: Annotated[int, Field(ge=1, le=64, description="random views of the image in each step")] = 2,
    jitter: Annotated[int, Field(ge=0, le=512, description="views are shifted by up to so many pixels")] = 16,
    scale: Annotated[float, Field(ge=0, le=4, description="and resized by up to 1 + scale either way")] = 0.25,
    rotate: Annotated[float, Field(ge=0, le=180, description="and turned by up to so many degrees")] = 10.0,
    noise: Annotated[float, Field(ge=0, le=2, description="and given noise of this deviation")] = 0.1,
    colour: Annotated[float, Field(ge=0, le=2, description="and each channel stretched by up to e^colour")] = 0.3,
    l2: Annotated[float, Field(ge=0, le=1000, description="weight of the distance from grey")] = 0.0,
    tv: Annotated[float, Field(ge=0, le=1000, description="weight of the total variation")] = 0.05,
    continuity: Annotated[float, Field(ge=0, le=1000, description="weight of steps where patches meet")] = 1.0,
) -> Maximized:
    """The images that units of a model answer to most: one for each unit (and seed), in 0…1 at the model's size.

    z ← z + rate · Adam(∂I/∂z · (∇S / rms ∇S − l2 ∇‖I − ½‖²/2 − tv ∇TV − continuity ∇D))

    S: the unit's mean over random views of the image I. `units`: class:NAME, neuron:K, block:L/channel:C,
    token:L/T[/channel:C], head:L/H/q:C, head:L/H/k:C, one or several. Weights are relative to the unit's own gradient,
    so that they mean the same for every unit. Ctrl-C ends the ascent and keeps what there is.
    """
    given = {name: value for name, value in locals().items() if name not in ("model", "units")}
    options = DECLARED.check(given)
    wrapped = of_images(as_model(model), "maximize works")
    trace = Trace(wrapped, torch.zeros(1, wrapped.channels, *wrapped.size))
    seeds = [options["seed"]] if isinstance(options["seed"], int) else options["seed"]
    pairs = [(unit, one) for unit in parse_units(units, trace) for one in seeds]
    done: list[Maximized] = []

    def run(part: slice) -> None:
        if not any(one.stopped for one in done):
            done.append(Ascent(trace, pairs[part], options).run())

    at_once = batch_size(trace.layout.footprint[1], wrapped.device) // copies
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(wrapped.device.type, enabled=False):
        in_batches(run, len(pairs), max(1, at_once))
    return join(done)


DECLARED = Declared("maximize", "activation", "", maximize)


class Ascent:
    """A batch of images during the ascent; each is independent of the others."""

    def __init__(self, trace: Trace, pairs: Sequence[tuple[Unit, int]], options: dict[str, Any]) -> None:
        self.trace, self.options = trace, options
        self.units, self.seeds = [unit for unit, _ in pairs], [seed for _, seed in pairs]
        model, (h, w) = trace.model, trace.layout.grid
        self.patch = (trace.size[0] // h, trace.size[1] // w)
        self.keys = torch.tensor(self.seeds, device=model.device)
        like = torch.zeros((), dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
        fourier, decay = options["canvas"] == "fourier", options["decay"]
        self.canvas = Canvas(self.keys, trace.size, fourier, decay, like, model.channels)
        colours = (model.preprocess.mean, model.preprocess.std)
        self.mean, self.std = (torch.tensor(tuple(c)).to(like)[:, None, None] for c in colours)

    def run(self) -> Maximized:
        """Run all steps, or those before Ctrl-C."""
        count, rate = self.options["steps"], self.options["rate"]
        adam = torch.optim.Adam([self.canvas.z], rate, BETAS)
        first = self.picture()
        start, film, curve, stopped = self.measure(first), [eight_bit(first)], [], False
        try:
            for step in counted(range(count), count, f"maximizing {told(self.units)}, steps"):
                adam.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / count)) / 2
                curve.append(self.climb(step))
                adam.step()
                if (step + 1) * (FRAMES - 1) // count > step * (FRAMES - 1) // count:
                    film.append(eight_bit(self.picture()))
        except KeyboardInterrupt:
            if not curve:
                raise
            stopped = True
        last = eight_bit(self.picture())
        images = last.to(first) / 255  # as they will be in a file
        film[-1] = last
        return Maximized(
            images=images.float().cpu(),
            units=tuple(map(str, self.units)),
            titles=tuple(title(unit, self.trace) for unit in self.units),
            seeds=tuple(self.seeds),
            activation=torch.stack(curve, 1).float().cpu(),
            start=start.float().cpu(),
            final=self.measure(images).float().cpu(),
            border_ratio=border_ratio(images, self.patch).float().cpu(),
            film=torch.stack(film, 1).cpu(),
            options=self.options,
            model=self.trace.model.name,
            made_by=Origin.of(self.trace.model, self.trace.size),
            patch=self.patch,
            stopped=stopped,
            usual=DECLARED.check({}),
            bands=self.trace.model.bands or usual_bands(images.shape[1]),
        )

    def climb(self, step: int) -> Scores:
        """Set the gradient of z; return the units' values on this step's views."""
        image = self.canvas.image()
        leaf = image.detach().requires_grad_()
        values = look(self.trace, self.ready(self.views(leaf, step)), self.units, grad=True)
        values = values.reshape(len(self.units), -1).mean(1)
        (slope,) = gradients(values, [leaf], keep=False)
        size = slope.square().mean((1, 2, 3), keepdim=True).sqrt()
        for unit, still in zip(self.units, (size == 0).flatten().tolist() if step == 0 else ()):
            if still:
                raise Unsupported(f"{unit} does not depend on the image in {self.trace.model.name}")
        uphill = slope / size.clamp_min(torch.finfo(slope.dtype).tiny) - self.cost(leaf)
        (self.canvas.z.grad,) = torch.autograd.grad(image, [self.canvas.z], -uphill)
        return values.detach()

    def views(self, images: Images, step: int) -> Float[Tensor, "rows channels Y X"]:
        """Random copies of each image, in a row."""
        o, copies = self.options, self.options["copies"]
        draws = drawn(self.keys, copies, step, images.shape[1]).to(images)
        images = images.repeat_interleave(copies, 0)
        images = moved(images, draws, o["jitter"], o["scale"], o["rotate"])
        images = recoloured(images, draws, o["colour"])
        return noisy(images, self.keys, copies, step, o["noise"])

    def cost(self, leaf: Images) -> Images:
        """The gradient of the penalties."""
        o = self.options
        total = o["l2"] * distance_from_grey(leaf) + o["tv"] * total_variation(leaf)
        return gradients(total + o["continuity"] * discontinuity(leaf, self.patch), [leaf], keep=False)[0]

    def ready(self, images: Images) -> Images:
        """The images as the model takes them."""
        return ((images - self.mean) / self.std).to(self.trace.model.dtype)

    def measure(self, images: Images) -> Scores:
        """The units' values on images as they are."""
        return look(self.trace, self.ready(images), self.units, grad=False)

    @torch.no_grad()
    def picture(self) -> Images:
        return self.canvas.image()


def eight_bit(images: Images) -> Tensor:
    return (images * 255).round().to(torch.uint8)


def told(units: Sequence[Unit]) -> str:
    return str(units[0]) if len(units) == 1 else f"{len(units)} units"
