"""Any network, with its preprocessing and the names of its classes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitreous._support.memory import capturing, out_of_memory
from vitreous.errors import InputError, ModelError, VitreousError, one_line
from vitreous.images import pictures, preprocess
from vitreous.images.bands import check_bands
from vitreous.images.preprocess import Preprocess
from vitreous.models.detected import Detections, describe
from vitreous.models.facts import Facts, facts_of
from vitreous.models.failures import why_failed
from vitreous.models.inputs import Arguments, Given, Inputs, Sampled
from vitreous.models.kinds_of_module import is_int8, unwrap
from vitreous.models.labels import name_classes
from vitreous.models.layout import Layout
from vitreous.models.layout_run import find_layout
from vitreous.models.libraries import Library, adapt, library_of
from vitreous.models.output import AUTO, Ending, Form, Meaning, check_kind, decide, lay_out, see
from vitreous.models.still import Still, hold_still
from vitreous.models.survey_run import noise_images
from vitreous.models.video import checked_axes, not_images, prepared
from vitreous.types import Extent, Images


class Model:
    """A network, its preprocessing and its labels. The network itself is never changed.

    `forward` runs the network on a batch (found for timm, transformers, torchvision and open_clip models);
    `classifier` says whether its output is class scores, `output` what its numbers mean: "logits", "sigmoid", "softmax"
    (it returns probabilities), "value" (a regression) or "auto"; `layout` replaces what the layout run finds.
    `channels`: how many its images have, where the network does not tell; `bands`: the one or three of them that
    figures show. `inputs`: what the network gets beside its images, the same for all; `image`: the argument of its
    forward that takes the images, where that cannot be found out. `frames`: of a network of videos, how many it takes;
    `axes`: "BCTHW" where they are not [B,T,C,H,W]. `branch`: of a network that sees patches of several sizes
    (CrossViT), the one that maps show.
    """

    def __init__(
        self,
        net: nn.Module,
        preprocess: Any = None,
        labels: Sequence[str] | Mapping[int, str] | None = None,
        *,
        name: str | None = None,
        forward: Callable[..., Any] | None = None,
        classifier: bool | None = None,
        output: str = AUTO,
        layout: Layout | None = None,
        channels: int | None = None,
        bands: Sequence[int] | int | None = None,
        inputs: Mapping[str, Any] | None = None,
        image: str | None = None,
        frames: int | None = None,
        axes: str = "BTCHW",
        branch: int | None = None,
    ) -> None:
        if isinstance(net, torch.jit.ScriptModule):
            raise ModelError("a TorchScript module hides its attention; give the nn.Module that it was made from")
        if not isinstance(net, nn.Module):
            raise ModelError(f"a {type(net).__name__} is not a network; give an nn.Module, or a name to vitreous.load")
        self.net, self.module = net, unwrap(net)
        self._compiled = False  # whether a run calls what the user compiled
        self.name = name or self.library.name(self.module)
        self.labels = name_classes(labels if labels is not None else self.library.labels(self.module))
        known = True if labels is not None or self.labels else self.library.classifies(self.module)
        self.output = check_kind(output, classifier)
        self.classifier = True if self.output != AUTO else known if classifier is None else classifier
        self._named = classifier is True or bool(self.labels)
        self._ending: Ending | None = None  # what the layout run showed of the output
        self._meaning: Meaning | None = None
        self._forward = forward
        self._mean = False  # whether the mean of the tokens is the embedding, for a network that returns its tokens
        self._preprocess = preprocess
        self._channels = channels
        self.bands = None if bands is None else check_bands(bands, self.channels)
        self.arguments = Arguments(forward or self.module.forward, self.name, inputs, image)
        own = frames is None and forward is None  # else it takes what the user says
        self.frames = self.library.frames(self.module) if own else frames  # None: it takes images
        self.axes = checked_axes(axes, self.frames)
        self._layouts: dict[tuple[Extent, Hashable], Layout] = {}
        self._given_layout, self.branch = layout, branch
        self.known_as = self.name  # where the library looks its parts up, such as a tokenizer
        self.outputs: int | None = None  # how many classes or numbers it returns; known after the first run
        self.form = Form.VECTOR  # how its output is laid out; known after the first run
        self.detections: Detections | None = None  # of a detector: how its scores are read; known after the first run
        self.spec: str | None = None  # its source and name; set by `load`, as are the next two
        self.weights: tuple[Path, ...] = ()  # the files that its weights came from
        self.notes: tuple[str, ...] = ()  # what was assumed or left out to load it

    def __repr__(self) -> str:
        return f"Model({self.name}, {len(self.labels)} labels, {self.device}, {self.dtype})"

    @property
    def library(self) -> Library:
        """The library whose conventions the network follows."""
        return library_of(self.module)

    @property
    def preprocess(self) -> preprocess.Preprocess:
        """How an image becomes its input."""
        if not isinstance(self._preprocess, preprocess.Preprocess):
            given = self._preprocess
            found = self._usual_preprocess() if given is None else adapt(given, self.channels)
            self._preprocess = found if given is None else replace(found, own=True)
        found = self._preprocess
        if found.channels != self.channels or found.bands != self.bands:
            self._preprocess = found = preprocess.refitted(found, self.channels, self.bands)
        return found

    @property
    def channels(self) -> int:
        """How many channels its images have: as given, else as its first layer or its library tells, else three."""
        if self._channels is None:
            self._channels = self.library.channels(self.module) or 3
        return self._channels

    def _usual_preprocess(self) -> Preprocess:
        try:
            return preprocess.said_if_assumed(self.library.preprocess(self.module), self.name)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            said = f"{self.name}: its usual preprocessing cannot be made ({one_line(error, 120)})"
            raise ModelError(f"{said}; give one, Model(net, preprocess=…), or float tensors [B, 3, H, W]") from error

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of its usual input."""
        return self.preprocess.size

    @property
    def extent(self) -> Extent:
        """The same, behind the number of frames if it takes videos."""
        return self.size if self.frames is None else (self.frames, *self.size)

    @property
    def device(self) -> torch.device:
        return self._like().device

    @property
    def dtype(self) -> torch.dtype:
        return self._like().dtype

    def _like(self) -> Tensor:
        kinds = ("_parameters", "_buffers")  # asked directly: this is part of every run
        tensors = (t for kind in kinds for module in self.module.modules() for t in module.__dict__[kind].values())
        found = next((t for t in tensors if t is not None and t.is_floating_point()), None)
        return torch.zeros(()) if found is None else found

    @property
    def layout(self) -> Layout:
        """The geometry at the usual input size."""
        return self.layout_at(self.extent)

    def layout_at(self, size: Extent, inputs: Inputs | None = None) -> Layout:
        """The geometry at this ((frames,) height, width), measured once; a layout given by hand is believed."""
        key = size, self.arguments.sample(inputs).kind
        if key not in self._layouts:
            self._ending = self._ending if self._layouts else None  # of a run with gradients
            run = self.sampled(inputs)
            found, reference = find_layout(run, size, self._given_layout)
            if found.reads_one_patch and not self._mean:  # there is no CLS among the tokens that it returns
                self._mean = True
                found, reference = find_layout(run, size, self._given_layout)
            self._layouts[key] = found
            if self._given_layout is None:
                self.facts_for(inputs).note(("layout run", size), reference)
            if self._ending is not None:
                self._ending.check(self.output, self.name)
        return self._layouts[key]

    def alone_at(self, size: Extent, inputs: Inputs | None = None) -> Layout:
        """The geometry at this size, of a model that must be run one image at a time."""
        key = size, self.arguments.sample(inputs).kind
        self._layouts[key] = self.layout_at(size, inputs).one_by_one()
        return self._layouts[key]

    def sampled(self, inputs: Inputs | None = None) -> Any:
        """The model as the layout run takes it (a `Network`): every noise image gets the inputs of one image."""
        sample = self.arguments.sample(inputs)
        return Sampled(self, sample) if sample else self

    def classifies(self, layout: Layout) -> bool:
        """Whether the outputs are classes; if neither user nor library says so, the end of the network decides."""
        if self.classifier is None:
            shows = self.form is not Form.VECTOR or (self._ending is not None and self._ending.classifies)
            self.classifier = layout.linear_output or shows
        return self.classifier

    @property
    def meaning(self) -> Meaning:
        """What the numbers of its output mean, as given or as the layout run shows."""
        if self._meaning is None and self.output != AUTO:
            self._meaning = Meaning(self.output)
        if self._meaning is None:
            (size, _), layout = next(iter(self._layouts.items()), None) or ((self.extent, ()), self.layout)
            if self._ending is None:
                self.sampled().run(noise_images(self, size))
            if self.detections is not None:
                return self.detections.meaning
            assert self._ending is not None
            told = self.library.meaning(self.module)
            self._meaning = decide(self._ending, self.classifies(layout), told, self._named)
        return self._meaning

    @property
    def exclusive(self) -> bool:
        """Whether its outputs, if they are probabilities, sum to one; known after a forward pass."""
        return self._ending is None or self._ending.is_exclusive

    @property
    def facts(self) -> Facts:
        """What was found out about the network, shared by every `Model` of it."""
        return facts_of(self.module).of_kind(self.arguments.kind)

    def facts_for(self, inputs: Inputs | None) -> Facts:
        """The same of runs with inputs of this kind."""
        return self.facts.of_kind(self.arguments.sample(inputs).kind)

    def forget(self) -> None:
        """Forget everything that was found out by running the network, after it was changed in place."""
        self._layouts.clear()
        self._meaning = None
        self.facts.forget()

    def label(self, index: int) -> str:
        """The first name of a class (of a regression, of an output), or its number."""
        return self.labels[index].split(",")[0] if index in self.labels else f"{self.meaning.noun} {index}"

    def to(self, *args: Any, **kwargs: Any) -> Model:
        """Move the network."""
        self.net.to(*args, **kwargs)
        return self

    def prepare(self, images: Any) -> Images:
        """Preprocess images; a float tensor [B,channels,H,W] is used as it is."""
        if isinstance(images, Tensor) and images.is_floating_point():
            return self._checked(images).detach().to(self._like())
        images = images.cpu().numpy() if isinstance(images, Tensor) else images
        if self.frames is not None:
            return prepared(images, self.frames, self.preprocess).to(self.device, self.dtype)
        given = pictures.as_list(images, self.channels)
        listed = [pictures.read(image, i, self.channels) for i, image in enumerate(given)]
        if not listed:
            raise InputError("there are no images to explain")
        ready = [self.preprocess(picture.image) for picture in listed]
        if len({x.shape for x in ready}) > 1:
            raise InputError(f"preprocessing gives these images different sizes: {[tuple(x.shape[1:]) for x in ready]}")
        return torch.stack(ready).to(self.device, self.dtype)

    def _checked(self, images: Tensor) -> Tensor:
        axes = 4 if self.frames is None else 5
        images = images[None] if images.ndim == axes - 1 else images
        if images.ndim != axes or 0 in images.shape or not self.takes(images):
            raise InputError(not_images(images, axes, self.channels, self.name))
        look = partial(preprocess.check_values, images, lambda: self.preprocess, self.name)
        if not images.is_cuda:
            look()
        elif not capturing(images):  # once, as it waits for the GPU
            self.facts.find("range of an image on the GPU", look)
        return images

    def takes(self, images: Tensor) -> bool:
        """Whether a tensor [B (T) C H W] has as many channels as the network takes; if it runs on them, it does."""
        return images.shape[-3] == self.channels or self._runs(images[:1])

    def _runs(self, sample: Tensor) -> bool:
        """Whether the network takes a sample of other channels than was found; then these are believed."""
        try:
            with self.still(), torch.no_grad():
                self.sampled().run(sample.detach().to(self.device, self.dtype))
        except (ModelError, RuntimeError):
            return False
        self._channels = int(sample.shape[-3])
        self._layouts.clear()
        return True

    def run(self, images: Images, given: Given | None = None) -> Float[Tensor, "rows *outputs"]:
        """One forward pass; the scores or the embedding of each image, laid out in the `form` of the model.

        `given`: what else each row gets, by name.
        """
        try:
            raw = self._call(images, given or {})
            laid = lay_out(raw, self.name, self._mean, (images.shape[-2], images.shape[-1]))
            output, self.outputs, self.form = laid.values, laid.classes, laid.form
            if self.form is Form.DETECTIONS:
                return self._detected(output)
            if self._ending is None and not capturing(images):
                self._ending = see(output)
            return output
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, VitreousError) or out_of_memory(error):
                raise
            extent = (*images.shape[1:-3], *images.shape[-2:])
            raise ModelError(self._why(error, extent, given or {})) from error

    def _detected(self, output: Tensor) -> Tensor:
        if self.detections is None:
            told = self.library.meaning(self.module)
            self.detections = describe(output.shape[-1] - 4, self.output, self.labels, told, self.name)
        self.outputs, self._meaning = self.detections.classes, self.detections.meaning
        return output

    def _call(self, images: Images, given: Given) -> Any:
        images = images.transpose(1, 2) if self.axes == "BCTHW" and self.frames is not None else images
        net = self.net if self._compiled else self.module
        if given or self.arguments.kind:
            return self.arguments.call(self._forward or net, images, given)
        return self._forward(images) if self._forward is not None else self.library.run(net, images)

    def _why(self, error: Exception, size: Extent, given: Given) -> str:
        """Why a forward pass failed."""
        try:
            built = self.library.frames(self.module)
            usual: Extent | None = self.size if built is None else (built, *self.size)
        except VitreousError:  # its preprocessing cannot be made, which is another matter
            usual = None
        missing = self.arguments.missing(given) if self._forward is None else []
        return why_failed(self.name, error, size, usual, missing)

    @property
    def has_gradients(self) -> bool:
        """Whether its weights are of a kind that gradients pass through: not int8."""
        return not self.facts.find("int8", lambda: is_int8(self.module))

    def still(self) -> AbstractContextManager[Still]:
        """Hold the network in eval mode, uncompiled, for one thread; restore everything on exit."""
        return hold_still(self.module, self.facts.lock, wrapped=self.net is not self.module)

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Hold the network in eval mode, and run it as the user compiled it."""
        with hold_still(self.module, self.facts.lock, wrapped=False, eager=False), ExitStack() as stack:
            self._compiled = True
            stack.callback(setattr, self, "_compiled", False)
            yield
