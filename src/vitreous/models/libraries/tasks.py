"""What a network of transformers is for, as the name of its class tells."""

from __future__ import annotations

import inspect
import re
from typing import Any

TASKS = ("Classification", "Segmentation", "DepthEstimation")  # of images, or of each of their places
QUERIES = ("UniversalSegmentation", "MaskFormerForInstanceSegmentation")  # classes, weighed by the masks of queries

PROMPTED = re.compile(r"Sam\w{0,2}Model")  # masks for a point or a box


def is_classifier(made: str) -> bool:
    """Whether its outputs are classes, or values, that can be explained."""
    return any(task in made for task in TASKS) or PROMPTED.fullmatch(made) is not None


def meaning_of(made: str) -> str | None:
    """What its outputs mean; None if the name does not tell."""
    if "DepthEstimation" in made:
        return "value"
    if PROMPTED.fullmatch(made):  # each mask by itself
        return "sigmoid"
    return "softmax" if made.endswith(QUERIES) else None


def stretches(net: Any) -> bool:
    """Whether its forward pass takes the option to stretch its positions to another size."""
    takes = inspect.signature(net.forward).parameters.values()
    return any(one.name == "interpolate_pos_encoding" or one.kind is one.VAR_KEYWORD for one in takes)
