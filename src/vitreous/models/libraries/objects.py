"""Objects of other libraries as models: pipelines, pairs of a network and its processor, Lightning's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from vitreous.errors import ModelError
from vitreous.models.checkpoint import classes_in
from vitreous.models.kinds_of_module import unwrap
from vitreous.models.libraries import library_of
from vitreous.models.model import Model

LABELS = ("id2label", "class_names", "labels", "classes", "label_names", "idx_to_class", "class_to_idx")


def of_object(given: Any, **options: Any) -> Model:
    """The model that an object stands for. It is used as it is: not moved, not changed."""
    if isinstance(given, Model):
        return given
    net, processor = parts_of(given)
    if net is None:
        kind = type(given).__name__
        known = (
            "a name, a folder, an nn.Module, a transformers pipeline, a pair (network, processor) or a LightningModule"
        )
        raise ModelError(f"a {kind} is not a model; give {known}")
    if not is_lightning(net):
        return Model(net, processor, **options)
    inside = network_in(net)
    if options.get("labels") is None:
        options["labels"] = labels_of(net, inside)
    if inside is net and processor is None:  # its own forward, with the preprocessing of the largest part
        largest = max(net.children(), key=size_of, default=net)
        processor = library_of(unwrap(largest)).preprocess(unwrap(largest))
    return Model(inside, processor, **options)


def parts_of(given: Any) -> tuple[nn.Module | None, Any]:
    """The network and the processor of an object."""
    if isinstance(given, nn.Module):
        return given, None
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], nn.Module):
        return given[0], given[1]
    net = getattr(given, "model", None)
    if isinstance(net, nn.Module) and hasattr(given, "task"):
        processor = getattr(given, "image_processor", None) or getattr(given, "processor", None)
        return net, processor
    return None, None


def is_lightning(net: nn.Module) -> bool:
    return any(base.__name__ == "LightningModule" for base in type(net).__mro__)


def network_in(net: nn.Module) -> nn.Module:
    """The only part of a LightningModule with parameters; where there are several, its own forward joins them."""
    trained = [(name, child) for name, child in net.named_children() if size_of(child)]
    if len(trained) == 1 and not any(True for _ in net.parameters(recurse=False)):
        return trained[0][1]
    if "forward" in {name for base in own_classes(net) for name in vars(base)}:
        return net
    names = ", ".join(name for name, _ in trained) or "none"
    said = f"{type(net).__name__} has no forward and several networks ({names})"
    raise ModelError(f"{said}; give the one to explain, e.g. module.{trained[0][0] if trained else 'net'}")


def own_classes(net: nn.Module) -> list[type]:
    """Its classes before LightningModule."""
    classes = type(net).__mro__
    return list(classes[: next(i for i, base in enumerate(classes) if base.__name__ == "LightningModule")])


def size_of(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def labels_of(net: nn.Module, inside: nn.Module) -> Mapping[int, str] | Sequence[str] | None:
    """Names of classes among the attributes and hyperparameters of a LightningModule, if there are as many."""
    count = classes_in(dict(inside.state_dict())).get("num_classes")
    hparams = getattr(net, "hparams", None)
    for place in (vars(net), hparams if isinstance(hparams, Mapping) else {}):
        for name in LABELS:
            found = as_labels(place.get(name))
            if found is not None and count in (None, len(found)):
                return found
    return None


def as_labels(value: Any) -> dict[int, str] | None:
    """Class names in any usual form: a list, index to name, or name to index."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        return dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        return None
    if all(isinstance(key, str) and isinstance(index, int) for key, index in value.items()):
        return {index: key for key, index in value.items()}
    try:
        return (
            {int(key): name for key, name in value.items()} if all(isinstance(n, str) for n in value.values()) else None
        )
    except (TypeError, ValueError):
        return None
