"""Any network, with its preprocessing and the names of its classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitreous._support.memory import out_of_memory
from vitreous.errors import InputError, ModelError, VitreousError, one_line
from vitreous.images import pictures, preprocess
from vitreous.images.bands import check_bands
from vitreous.images.preprocess import Preprocess
from vitreous.models.facts import Facts, facts_of
from vitreous.models.failures import why_failed
from vitreous.models.labels import name_classes
from vitreous.models.layout import Layout
from vitreous.models.layout_run import find_layout
from vitreous.models.libraries import CHECKPOINTING, HOOKS, Library, adapt, library_of
from vitreous.models.output import AUTO, Ending, Form, Meaning, check_kind, decide, read_output, see
from vitreous.models.survey_run import noise_images
from vitreous.types import Images

FLAGS = ("training", *CHECKPOINTING)  # of a module: off while it is watched


class Model:
    """A network, its preprocessing and its labels. The network itself is never changed.

    `forward` runs the network on a batch (found for timm, transformers, torchvision and open_clip models);
    `classifier` says whether its output is class scores, `output` what its numbers mean: "logits", "sigmoid", "softmax"
    (it returns probabilities), "value" (a regression) or "auto"; `layout` replaces what the layout run finds.
    `channels`: how many its images have, where the network does not tell; `bands`: the one or three of them that
    figures show. `branch`: of a network that sees patches of several sizes (CrossViT), the one that maps show.
    """

    def __init__(
        self,
        net: nn.Module,
        preprocess: Any = None,
        labels: Sequence[str] | Mapping[int, str] | None = None,
        *,
        name: str | None = None,
        forward: Callable[[Tensor], Any] | None = None,
        classifier: bool | None = None,
        output: str = AUTO,
        layout: Layout | None = None,
        channels: int | None = None,
        bands: Sequence[int] | int | None = None,
        branch: int | None = None,
    ) -> None:
        if isinstance(net, torch.jit.ScriptModule):
            raise ModelError("a TorchScript module hides its attention; give the nn.Module that it was made from")
        if not isinstance(net, nn.Module):
            raise ModelError(f"a {type(net).__name__} is not a network; give an nn.Module, or a name to vitreous.load")
        self.net, self.module = net, unwrap(net)
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
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._given_layout, self.branch = layout, branch
        self.known_as = self.name  # where the library looks its parts up, such as a tokenizer
        self.outputs: int | None = None  # how many classes or numbers it returns; known after the first run
        self.form = Form.VECTOR  # how its output is laid out; known after the first run
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
    def device(self) -> torch.device:
        return self._like().device

    @property
    def dtype(self) -> torch.dtype:
        return self._like().dtype

    def _like(self) -> Tensor:
        tensors = chain(self.module.parameters(), self.module.buffers())
        return next((t for t in tensors if t.is_floating_point()), torch.zeros(()))

    @property
    def layout(self) -> Layout:
        """The geometry at the usual input size."""
        return self.layout_at(self.size)

    def layout_at(self, size: tuple[int, int]) -> Layout:
        """The geometry at this (height, width), measured once; a layout given by hand is believed."""
        if size not in self._layouts:
            self._ending = self._ending if self._layouts else None  # of a run with gradients
            found, reference = find_layout(self, size, self._given_layout)
            if found.reads_one_patch and not self._mean:  # there is no CLS among the tokens that it returns
                self._mean = True
                found, reference = find_layout(self, size, self._given_layout)
            self._layouts[size] = found
            if self._given_layout is None:
                self.facts.note(("layout run", size), reference)
            if self._ending is not None:
                self._ending.check(self.output, self.name)
        return self._layouts[size]

    def alone_at(self, size: tuple[int, int]) -> Layout:
        """The geometry at this size, of a model that must be run one image at a time."""
        self._layouts[size] = self.layout_at(size).one_by_one()
        return self._layouts[size]

    def classifies(self, layout: Layout) -> bool:
        """Whether the outputs are classes; if neither user nor library says so, the end of the network decides."""
        if self.classifier is None:
            self.classifier = layout.linear_output or (self._ending is not None and self._ending.classifies)
        return self.classifier

    @property
    def meaning(self) -> Meaning:
        """What the numbers of its output mean, as given or as the layout run shows."""
        if self._meaning is None and self.output != AUTO:
            self._meaning = Meaning(self.output)
        if self._meaning is None:
            size, layout = next(iter(self._layouts.items()), None) or (self.size, self.layout)
            if self._ending is None:
                self.run(noise_images(self, size))
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
        return facts_of(self.module)

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
            return self._checked(images).detach().to(self.device, self.dtype)
        if isinstance(images, Tensor):
            images = images.cpu().numpy()
        count = self.channels
        listed = [pictures.read(image, i, count) for i, image in enumerate(pictures.as_list(images, count))]
        if not listed:
            raise InputError("there are no images to explain")
        ready = [self.preprocess(picture.image) for picture in listed]
        if len({x.shape for x in ready}) > 1:
            raise InputError(f"preprocessing gives these images different sizes: {[tuple(x.shape[1:]) for x in ready]}")
        return torch.stack(ready).to(self.device, self.dtype)

    def _checked(self, images: Tensor) -> Tensor:
        images = images[None] if images.ndim == 3 else images
        if images.ndim != 4 or 0 in images.shape or not self.takes(images):
            said = f"a tensor of shape {tuple(images.shape)} is not a batch of images"
            count = f" of {self.channels} channels" if images.ndim == 4 else ""
            raise InputError(f"{said}{count}; give [B, {self.channels}, H, W]")
        look = partial(preprocess.warn_unnormalised, images, lambda: self.preprocess, self.name)
        if not images.is_cuda:
            preprocess.refuse_infinite(images.sum(dtype=torch.float64))
            look()
        elif not capturing(images):  # once, as it waits for the GPU
            self.facts.find("range of an image on the GPU", look)
        return images

    def takes(self, images: Tensor) -> bool:
        """Whether a tensor [B C H W] has as many channels as the network takes; if it runs on them, it does."""
        return images.shape[1] == self.channels or self._runs(images[:1])

    def _runs(self, sample: Tensor) -> bool:
        """Whether the network takes a sample of other channels than was found; then these are believed."""
        try:
            with self.still(), torch.no_grad():
                self.run(sample.detach().to(self.device, self.dtype))
        except (ModelError, RuntimeError):
            return False
        self._channels = int(sample.shape[1])
        self._layouts.clear()
        return True

    def run(self, images: Images) -> Float[Tensor, "rows *outputs"]:
        """One forward pass; the scores or the embedding of each image."""
        try:
            output = read_output(self._call(images), self.name, self._mean)
            self.outputs = output.shape[1]
            if self._ending is None and not capturing(images):
                self._ending = see(output)
            return output
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, VitreousError) or out_of_memory(error):
                raise
            raise ModelError(self._why(error, (images.shape[-2], images.shape[-1]))) from error

    def _call(self, images: Images) -> Any:
        return self._forward(images) if self._forward is not None else self.library.run(self.module, images)

    def _why(self, error: Exception, size: tuple[int, int]) -> str:
        """Why a forward pass failed."""
        try:
            usual = self.size
        except VitreousError:  # its preprocessing cannot be made, which is another matter
            usual = None
        return why_failed(self.module, self.name, error, size, usual, self._forward is None)

    @property
    def has_gradients(self) -> bool:
        """Whether its weights are of a kind that gradients pass through: not int8."""
        return not self.facts.find("int8", lambda: is_int8(self.module))

    @contextmanager
    def still(self) -> Iterator[Still]:
        """Hold the network in eval mode, uncompiled, for one thread; restore everything on exit."""
        with self.facts.lock, ExitStack() as stack:
            names, compiled, hooked = {}, self.net is not self.module, False
            left = [("", self.module)]
            while left:
                name, module = left.pop()
                own = module.__dict__  # asked directly: this walk is part of every run
                if id(module) in names:
                    continue
                names[id(module)] = name
                inner = own["_modules"].items()
                left += [(f"{name}.{key}" if name else key, child) for key, child in inner if child is not None]
                compiled = compiled or is_compiled(module)
                hooked = hooked or bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or not HOOKS.isdisjoint(own))
                for flag in FLAGS:  # checkpointing would run parts of the network again, unwatched
                    if own.get(flag) is True:
                        stack.callback(setattr, module, flag, True)
                        setattr(module, flag, False)
            if compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield Still(names, hooked)


@dataclass(frozen=True)
class Still:
    """What is known of a network that holds still."""

    names: dict[int, str]  # of its modules, by identity
    hooked: bool  # someone has hooked into it, so that every run must go to its end


def is_int8(net: nn.Module) -> bool:
    """Whether torch quantised its weights: its kernels for them have no backward."""
    return any(hasattr(module, "_packed_params") or is_quantised(module) for module in net.modules())


def is_quantised(module: Any) -> bool:
    return any(t.is_quantized for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def unwrap(net: nn.Module) -> nn.Module:
    """The network inside torch.compile and DataParallel."""
    inner = getattr(net, "_orig_mod", None)
    if inner is None and isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = net.module
    return net if inner is None else unwrap(inner)


def capturing(images: Tensor) -> bool:
    """Is a graph being recorded, so that nothing may be asked of the GPU?"""
    return images.is_cuda and torch.cuda.is_current_stream_capturing()


def later(value: Tensor) -> Callable[[], Tensor]:
    """What a GPU computes, to be asked for when it has got more to do: nothing behind it is waited for."""
    copied, there = value.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()

    def ask() -> Tensor:
        there.synchronize()
        return copied

    return ask


def is_compiled(module: nn.Module) -> bool:
    own = module.__dict__
    return "_orig_mod" in own["_modules"] or own.get("_compiled_call_impl") is not None
