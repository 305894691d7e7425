"""What a network gets beside its images: tensors by name that travel with the images, one row for each."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import InputError, nearest
from vitreous.models.libraries.any import IMAGES

Given = Mapping[str, Any]  # what one forward pass gets


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors by name: one row for each of `count` images, or a single row for all; anything else is given as it is."""

    count: int
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any, count: int, like: Tensor) -> Inputs:
        """What a user gives, checked; numbers are moved to where `like` is, those with fractions to its precision."""
        if isinstance(given, Inputs):
            if given.count != count:
                raise InputError(f"inputs of {given.count} images for {count}; give those of each image")
            return cls(count, {name: moved(value, like) for name, value in given.values.items()})
        values = {name: tensor_of(name, value, like) for name, value in named(given).items()}
        for name, value in values.items():
            if has_rows(value) and len(value) not in (1, count):
                said = f"inputs[{name!r}] has {len(value)} rows for {count} image{'s' if count > 1 else ''}"
                raise InputError(f"{said}; give one row for each image, or one for all")
        return cls(count, values)

    def __bool__(self) -> bool:
        return bool(self.values)

    def rows(self, images: Sequence[int]) -> dict[str, Any]:
        """What a forward pass gets whose rows belong to these images."""
        return {name: chosen(value, images, self.count) for name, value in self.values.items()}

    def of_images(self, images: Sequence[int]) -> Inputs:
        """The inputs of some of the images."""
        return Inputs(len(images), self.rows(images))

    def part(self, part: slice) -> Inputs:
        return self.of_images(range(self.count)[part])

    @property
    def kind(self) -> Hashable:
        """Names, types and shapes: what the geometry of a model may depend on."""
        return tuple((name, shape_of(value)) for name, value in sorted(self.values.items()))

    def stamps(self) -> tuple[str, ...]:
        """A hash of what belongs to each image, as the user gave it up to its precision."""
        return tuple(stamp(self.rows([index])) for index in range(self.count)) if self else ()


def named(given: Any) -> dict[str, Any]:
    """A dictionary of inputs, or none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InputError(f"inputs= takes a dictionary {{name: tensor}}, not a {type(given).__name__}")
    return dict(given)


def tensor_of(name: str, value: Any, like: Tensor) -> Any:
    """Numbers as a tensor on the device; whole numbers and truths keep their type. A single value stays as it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | list | tuple):
        try:
            value = torch.as_tensor(np.asarray(value))
        except (TypeError, ValueError):
            raise InputError(
                f"inputs[{name!r}] is no array of numbers; give a tensor, one row for each image"
            ) from None
    if not isinstance(value, Tensor):
        raise InputError(f"inputs[{name!r}] is a {type(value).__name__}; give a tensor, one row for each image")
    if value.is_floating_point() and not value.is_cuda and not bool(value.isfinite().all()):
        raise InputError(f"inputs[{name!r}] contains NaN or infinity")
    return moved(value, like)


def moved(value: Any, like: Tensor) -> Any:
    """A tensor where another one is; fractions also in its precision."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(like.device, like.dtype if value.is_floating_point() else value.dtype)


def has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def chosen(value: Any, images: Sequence[int], count: int) -> Any:
    """The rows of these images; a single row serves all."""
    if not has_rows(value):
        return value
    if len(value) == 1:
        return value.expand(len(images), *value.shape[1:])
    same = len(images) == count and list(images) == list(range(count))
    return value if same else value[list(images)]


def spread(shared: Given, rows: int) -> dict[str, Any]:
    """What is the same for all images, for so many rows: a single row is repeated, anything else given as it is."""
    return {name: chosen(value, range(rows), -1) if has_one(value) else value for name, value in shared.items()}


def has_one(value: Any) -> bool:
    return has_rows(value) and len(value) == 1


def shape_of(value: Any) -> Hashable:
    return (tuple(value.shape[1:]), str(value.dtype)) if isinstance(value, Tensor) else repr(value)


def stamp(values: Given) -> str:
    """A hash of names and values."""
    told = hashlib.sha256()
    for name, value in sorted(values.items()):
        told.update(f"{name} {shape_of(value)}".encode())
        if isinstance(value, Tensor):
            whole = value.detach().cpu().contiguous()
            told.update((whole.float() if whole.is_floating_point() else whole).numpy().tobytes())
    return told.hexdigest()


# --------------------------------------------------------------------------------------------- the arguments of a call


def parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    """The arguments of a function that have a name."""
    try:
        every = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one for one in every if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]


def takes_any(call: Callable[..., Any]) -> bool:
    """Whether a function takes arguments of any name."""
    try:
        return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return True


def image_arguments(call: Callable[..., Any], taken: Collection[str]) -> list[str]:
    """The arguments that may take the images, the likeliest first: by its name, then needed ones, then others."""
    left = [one for one in parameters(call) if one.name not in taken and one.kind is not one.POSITIONAL_ONLY]
    known = [one.name for name in IMAGES for one in left if one.name == name]
    needed = [one.name for one in left if one.default is one.empty]
    others = [one.name for one in left if not isinstance(one.default, bool | int | float | str)]
    return list(dict.fromkeys([*known[:1], *needed, *others]))


def missing_arguments(call: Callable[..., Any], taken: Collection[str]) -> list[str]:
    """The arguments without a default that are not given."""
    return [one.name for one in parameters(call) if one.default is one.empty and one.name not in taken]


def refuse_unknown(call: Callable[..., Any], names: Collection[str], image: str | None, model: str) -> None:
    """Raise if a function takes no input of this name, or if it is that of the images."""
    known = [one.name for one in parameters(call)]
    for name in names:
        if name == image:
            raise InputError(f"inputs[{name!r}]: {model} takes its images there; give the other arguments as inputs")
        if name not in known and not takes_any(call):
            hint = nearest(name, known) or f"; it takes {', '.join(known)}"
            raise InputError(f"{model} takes no argument {name!r}{hint}")


class Arguments:
    """How a network is called: which argument takes the images, and what the others get that is alike for all."""

    def __init__(
        self, call: Callable[..., Any], name: str, shared: Mapping[str, Any] | None, image: str | None
    ) -> None:
        self.shared, self.image = named(shared), image
        self._signature, self._name = call, name
        self._samples: dict[Hashable, Inputs] = {}
        self._found: dict[frozenset[str], str | None] = {}
        self.twins: dict[str, Any] = {}  # models of the same network whose images another argument takes
        refuse_unknown(call, self.shared, image, name)
        if image is not None and not takes_any(call) and image not in [one.name for one in parameters(call)]:
            raise InputError(f"image={image!r}: {name}.forward takes {', '.join(one.name for one in parameters(call))}")

    @cached_property
    def kind(self) -> Hashable:
        """What tells it from another way to call the same network; empty for an image alone."""
        shared = tuple((name, stamp({name: value})) for name, value in sorted(self.shared.items()))
        return (self.image, shared) if self.image is not None or shared else ()

    @property
    def told(self) -> dict[str, Any]:
        """The same as JSON."""
        hashes = {name: stamp({name: value}) for name, value in sorted(self.shared.items())}
        image = {} if self.image is None else {"image_argument": self.image}
        return image | ({"shared_inputs": hashes} if hashes else {})

    def check(self, given: Any, count: int, like: Tensor) -> Inputs:
        """What a user gives beside so many images."""
        alike = {name: value for name, value in self.shared.items() if has_one(value)}
        found = Inputs.of(given if isinstance(given, Inputs) else {**alike, **named(given)}, count, like)
        if not found:
            return found
        image = self.image or next(iter(image_arguments(self._signature, ())), None)
        named_image = image if self.image is not None or image in IMAGES else None
        refuse_unknown(self._signature, found.values, named_image, self._name)
        return found

    def sample(self, inputs: Inputs | None) -> Inputs:
        """The inputs of one image for the images of noise: the first that came of this kind; None: of any kind."""
        if inputs is None:
            return next(iter(self._samples.values()), Inputs(1))
        return self._samples.setdefault(inputs.kind, inputs.of_images([0])) if inputs else Inputs(1)

    def call(self, run: Callable[..., Any], images: Tensor, given: Given) -> Any:
        """One forward pass."""
        whole = {**spread({name: moved(one, images) for name, one in self.shared.items()}, len(images)), **given}
        image = self.image or self._image(run, images, whole)
        first = next(iter(parameters(self._signature)), None)
        if image is None or (first is not None and first.name == image and image not in whole):
            return in_rows(run(images, **whole))
        return in_rows(run(**{image: images}, **whole))

    def _image(self, run: Callable[..., Any], images: Tensor, given: Given) -> str | None:
        """The argument that takes the images; where names do not tell, the first with which the network runs."""
        names = frozenset(given)
        if names not in self._found:
            may = image_arguments(self._signature, names)
            needed = missing_arguments(self._signature, names)
            told = len(may) < 2 or may[0] in IMAGES or len(needed) == 1
            self._found[names] = next(iter(may), None) if told else first_running(run, may, images, given)
        return self._found[names]

    def taking(self, image: str) -> Arguments:
        """The same with another argument for the images."""
        return Arguments(self._signature, self._name, self.shared, image)

    def needed(self, given: Collection[str]) -> list[str]:
        """The arguments without a default that get neither one of these nor what is alike for all."""
        return missing_arguments(self._signature, {*self.shared, *given})

    def missing(self, given: Given) -> list[str]:
        """The arguments that the network needs and does not get."""
        taken = {*self.shared, *given}
        image = self.image or next(iter(image_arguments(self._signature, taken)), None)
        return missing_arguments(self._signature, {*taken, *([image] if image else [])})


def in_rows(output: Any) -> Any:
    """One number for each image, such as a similarity, as a vector of one."""
    return output[:, None] if isinstance(output, Tensor) and output.ndim == 1 else output


def first_running(run: Callable[..., Any], may: Sequence[str], images: Tensor, given: Given) -> str:
    """The first of these arguments with which a network runs; the first of all if it runs with none."""
    for name in may:
        try:
            with torch.no_grad():
                run(**{name: images}, **given)
        except Exception:  # whatever the network says to an image in a wrong place
            continue
        return name
    return may[0]


class Sampled:
    """A model that gives the inputs of one image to every image."""

    def __init__(self, model: Any, sample: Inputs) -> None:
        self._model, self._sample = model, sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, images: Tensor) -> Tensor:
        found: Tensor = self._model.run(images, self._sample.rows([0] * len(images)))
        return found
