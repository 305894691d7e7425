"""Models by name: from a library, with weights from a local checkpoint, or the one in the package."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitreous._support.files import stamp_file
from vitreous.errors import ModelError, ModelWarning, one_line, one_of
from vitreous.images.preprocess import what_is_assumed
from vitreous.models.labels import read_labels
from vitreous.models.libraries import DEFAULT, SOURCES, Size, embedded
from vitreous.models.libraries.loading import RANDOM
from vitreous.models.model import Model
from vitreous.models.output import AUTO, check_kind

LOG = logging.getLogger(__name__)
EMBEDDED = embedded.NAME
BARE = (embedded.PREFIX, DEFAULT)  # sources whose names need no prefix


def load(
    spec: str | None = None,
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    img_size: int | Size | None = None,
    labels: Sequence[str] | Mapping[int, str] | str | Path | None = None,
    probe: str | Path | None = None,
    bands: Sequence[int] | int | None = None,
    output: str = AUTO,
) -> Model:
    """Load a model by name.

    "timm/NAME" or NAME, "hf/ID" or "hf/FOLDER", "torchvision/NAME", "openclip/NAME[:TAG]"; by default the embedded
    model. `weights`: a .safetensors or .pth file, or "random"; by default the published ones. `img_size`: another input
    size. `probe`: a file written by `vitreous probe train`, whose classes replace the model's own. `bands`: the
    one or three channels of an image that figures show, for models that take more than red, green and blue. `output`:
    what the numbers of its output mean, as in `Model`.
    """
    if probe is not None and labels is not None:
        raise ModelError("a probe brings its own labels; give either labels or a probe")
    if probe is not None and output != AUTO:
        raise ModelError("a probe gives logits of its own classes; give either output or a probe")
    check_kind(output, None)
    source, name = parse(spec)
    where, kind = pick_device(device), to_dtype(dtype)
    found = SOURCES[source].load(name, None if weights is None else str(weights), to_size(img_size))
    if labels is not None:
        given = read_labels(labels) if isinstance(labels, str | Path) else labels
        found = found._replace(labels=given, classifier=True)
    more: dict[str, Any] = {"classifier": found.classifier, "bands": bands, "output": output}
    model = Model(found.net, found.preprocess, found.labels, name=found.name, **more)
    if probe is not None:
        from vitreous.models.probe.attach import attach

        model = attach(model, probe)
    model.net.eval().requires_grad_(False)
    model.to(where, kind)
    files = () if weights in (None, RANDOM) else (Path(str(weights)),)
    model.spec, model.weights = f"{source}/{name}", found.weights or files
    for file in model.weights:
        model.facts.note(("stamp", file), stamp_file(file))  # so that a later file is not taken for it
    assumed = (what_is_assumed(found.preprocess, model.name),) if found.preprocess.assumed else ()
    model.notes = (*found.notes, *assumed, *found.asked)
    for note in (*found.notes, *assumed):
        warnings.warn(note, ModelWarning, stacklevel=2)
    LOG.info("%s runs on %s in %s", model.name, model.device, model.dtype)
    return model


def parse(spec: str | None) -> tuple[str, str]:
    """Source and name of a spec: ("hf", "ID") for "hf/ID"."""
    if spec in (None, EMBEDDED):
        return embedded.PREFIX, EMBEDDED
    source, _, name = str(spec).partition("/")
    return (source, name) if source in SOURCES else (DEFAULT, str(spec))


def is_here(spec: str | None) -> bool:
    """Is it in the package or in a local folder, so that nothing is downloaded?"""
    source, name = parse(spec)
    return source == embedded.PREFIX or Path(name).is_dir()


def pick_device(device: str | torch.device | None) -> torch.device:
    """The requested device; by default a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except Exception as error:  # every backend raises its own kind
        raise ModelError(f"there is no device {str(device)!r} here ({one_line(error, 80)}); try cpu") from None


def to_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    if isinstance(dtype, torch.dtype) or dtype is None:
        return dtype or torch.float32
    names = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in names:
        raise ModelError(f"unknown dtype {dtype!r}; known: {one_of(names)}")
    return names[dtype]


def to_size(size: int | Size | None) -> Size | None:
    """Height and width."""
    pair = (size, size) if isinstance(size, int) else size
    if pair is not None and (len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair)):
        raise ModelError(f"img_size={size!r}: give one number or (height, width), e.g. 384 or (224, 448)")
    return None if pair is None else (pair[0], pair[1])


def catalogue(everything: bool = True) -> dict[str, list[str]]:
    """The names that `load` accepts, by source: all of them, or only Vision Transformers."""
    found = {prefix: source.names(everything) for prefix, source in SOURCES.items()}
    return {prefix: names for prefix, names in found.items() if names is not None}
