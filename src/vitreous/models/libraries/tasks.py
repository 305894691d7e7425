"""What a network of transformers is for, as the name of its class tells, and its usual image processor."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from PIL import Image
from torch import nn

from vitreous.images.preprocess import Preprocess

DETECTOR = "ObjectDetection"
TASKS = ("Classification", "Segmentation", "DepthEstimation", DETECTOR)  # of images, or of each of their places
QUERIES = ("UniversalSegmentation", "MaskFormerForInstanceSegmentation")  # classes, weighed by the masks of queries

PROMPTED = re.compile(r"Sam\w{0,2}Model")  # masks for a point or a box


def is_classifier(made: str) -> bool:
    """Whether its outputs are classes, or values, that can be explained."""
    return any(task in made for task in TASKS) or PROMPTED.fullmatch(made) is not None


def names_of(made: str, named: Mapping[Any, str]) -> dict[int, str]:
    """The names of its classes, if the configuration knows them; a depth has the name of what it is."""
    if "DepthEstimation" in made:
        return {0: "depth"}
    if not is_classifier(made) or all(str(name).startswith("LABEL_") for name in named.values()):
        return {}
    return {int(index): str(name) for index, name in named.items()}


def meaning_of(net: nn.Module, made: str) -> str | None:
    """What its outputs mean; None if the name does not tell."""
    if DETECTOR in made:
        return meaning_of_queries(net)
    if "DepthEstimation" in made:
        return "value"
    if PROMPTED.fullmatch(made):  # each mask by itself
        return "sigmoid"
    return "softmax" if made.endswith(QUERIES) else None


def meaning_of_queries(net: nn.Module) -> str:
    """Of a detector: with one score more than classes, the last one that of "no object", they exclude each other."""
    classes = getattr(getattr(net, "config", None), "num_labels", -1)
    scores = [getattr(part, "out_features", None) for name, part in net.named_modules() if "class" in name]
    return "logits" if classes + 1 in scores else "sigmoid"


def stretches(net: Any) -> bool:
    """Whether its forward pass takes the option to stretch its positions to another size."""
    takes = inspect.signature(net.forward).parameters.values()
    return any(one.name == "interpolate_pos_encoding" or one.kind is one.VAR_KEYWORD for one in takes)


def said_if_varying(made: Preprocess) -> Preprocess:
    """The same preprocessing; it says so if it keeps the shape of an image, as those of detectors do."""
    wide, high = (made(Image.new("RGB", size)).shape for size in ((320, 240), (240, 320)))
    return replace(made, varies=wide != high)
