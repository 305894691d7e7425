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
from vitreous.models.kinds_of_module import unwrap
from vitreous.models.labels import read_labels
from vitreous.models.libraries import DEFAULT, SOURCES, Loaded, Size, embedded, library_of
from vitreous.models.libraries.places import Place
from vitreous.models.model import Model
from vitreous.models.output import AUTO, check_kind

LOG = logging.getLogger(__name__)
EMBEDDED = embedded.NAME
BARE = (embedded.PREFIX, DEFAULT)  # sources whose names need no prefix


def load(
    spec: Any = None,
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    img_size: int | Size | None = None,
    labels: Sequence[str] | Mapping[int, str] | str | Path | None = None,
    probe: str | Path | None = None,
    bands: Sequence[int] | int | None = None,
    output: str = AUTO,
    trust_pickle: bool = False,
) -> Model:
    """Load a model by name, from a folder or a file, or from an object of another library.

    "timm/NAME" or NAME, "hf/ID", "torchvision/NAME", "openclip/NAME[:TAG]"; a folder of Hugging Face, timm or PEFT; a
    checkpoint that names its architecture; by default the embedded model. A transformers pipeline, a pair (network,
    processor), a LightningModule or an nn.Module is used as it is. `weights`: a file (.safetensors, .pth, .ckpt …),
    "FILE#NAME" for one network of several in it, a folder, or "random"; by default the published ones. `img_size`:
    another input size. `probe`: a file written by `vitreous probe train`, whose classes replace the model's own.
    `bands`: the one or three channels of an image that figures show, for models that take more than red, green and
    blue. `output`: what the numbers of its output mean, as in `Model`. `trust_pickle`: run the code in a network that
    was pickled as a whole; everything else is read as data.
    """
    if probe is not None and labels is not None:
        raise ModelError("a probe brings its own labels; give either labels or a probe")
    if probe is not None and output != AUTO:
        raise ModelError("a probe gives logits of its own classes; give either output or a probe")
    check_kind(output, None)
    named = read_labels(labels) if isinstance(labels, str | Path) else labels
    more: dict[str, Any] = {"bands": bands, "output": output}
    if spec is None or isinstance(spec, str | Path):
        where, kind = pick_device(device), to_dtype(dtype)
        words = None if spec is None else str(spec), None if weights is None else str(weights)
        found, full_name = find(*words, to_size(img_size), trust_pickle)
        found = found if named is None else found._replace(labels=named, classifier=True)
        more |= {"classifier": found.classifier, "name": found.name}
        model = Model(found.net, found.preprocess, found.labels, **more)
        assumed = (what_is_assumed(found.preprocess, model.name),) if found.preprocess.assumed else ()
        model.spec, model.weights, model.notes = full_name, found.weights, (*found.notes, *assumed, *found.asked)
        model.net.eval().requires_grad_(False)
        model.to(where, kind)
        for note in (*found.notes, *assumed):
            warnings.warn(note, ModelWarning, stacklevel=2)
    else:
        model = given(spec, weights, device, dtype, img_size, labels=named, **more)
    if probe is not None:
        model = probed(model, probe)
    for file in model.weights:
        model.facts.note(("stamp", file), stamp_file(file))  # so that a later file is not taken for it
    LOG.info("%s runs on %s in %s", model.name, model.device, model.dtype)
    return model


def probed(model: Model, probe: str | Path) -> Model:
    """The model with the classes of a probe, which is one more file of its weights."""
    from vitreous.models.probe.attach import attach

    found = attach(model, probe).to(model.device, model.dtype)
    found.net.eval().requires_grad_(False)
    found.spec, found.notes, found.weights = model.spec, model.notes, (*model.weights, Path(probe))
    return found


def find(spec: str | None, weights: str | None, size: Size | None, trust: bool) -> tuple[Loaded, str]:
    """The network that a name, a folder or a file stands for; its source and name."""
    if spec is None and weights is None:
        return SOURCES[embedded.PREFIX].load(EMBEDDED, None, size), f"{embedded.PREFIX}/{EMBEDDED}"
    from vitreous.models.checkpoints.read import ADAPTER
    from vitreous.models.libraries import places

    if trust:
        whole = trusted(spec, weights, size)
        if whole is not None:
            return whole
    here = spec not in (None, EMBEDDED) and places.is_path(str(spec), SOURCES)
    place = places.find(str(spec), weights, SOURCES) if here else in_source(spec, weights)
    if place.weights is not None and (Path(place.weights) / ADAPTER).is_file():
        place = place._replace(weights=None, adapter=Path(place.weights))
    if place.adapter is not None:
        from vitreous.models.libraries.adapters import load_adapted

        found = load_adapted(place.source, place.name, place.weights, size, place.adapter)
    else:
        found = SOURCES[place.source].load(place.name, place.weights, size)
    return found._replace(notes=(*place.notes, *found.notes)), f"{place.source}/{place.name}"


def in_source(spec: str | None, weights: str | None) -> Place:
    """A name in a library; a folder after hf/ may also be one that a trainer wrote."""
    source, name = parse(spec)
    folder = Path(name.removeprefix("local-dir:")).expanduser()
    named = source == "hf" or name.startswith("local-dir:")
    if named and folder.is_dir() and not (source == "hf" and (folder / "config.json").is_file()):
        from vitreous.models.libraries import places

        return places.in_folder(folder, weights, SOURCES)
    return Place(source, str(folder) if named and folder.is_dir() else name, weights)


def trusted(spec: str | None, weights: str | None, size: Size | None) -> tuple[Loaded, str] | None:
    """The network in a pickle that the user trusts, if there is one."""
    from vitreous.models.checkpoints.pickles import open_trusted
    from vitreous.models.checkpoints.read import is_whole

    file = Path(weights or spec or "").expanduser()
    net = open_trusted(file) if is_whole(file) else None
    if net is None:
        return None
    library = library_of(unwrap(net))
    steps = library.preprocess(unwrap(net), size)
    return Loaded(net, steps, library.name(unwrap(net)), weights=(file,)), str(file)


def given(thing: Any, weights: Any, device: Any, dtype: Any, size: int | Size | None, **options: Any) -> Model:
    """The model that an object stands for; it is moved only if the user asks for it."""
    from vitreous.models.libraries.objects import of_object

    if weights is not None or size is not None:
        raise ModelError(f"a {type(thing).__name__} has its weights and its size; weights and img_size are for names")
    model = of_object(thing, **options)
    if device is not None:
        model.to(pick_device(device))
    return model if dtype is None else model.to(to_dtype(dtype))


def parse(spec: str | None) -> tuple[str, str]:
    """Source and name of a spec: ("hf", "ID") for "hf/ID"."""
    if spec in (None, EMBEDDED):
        return embedded.PREFIX, EMBEDDED
    source, _, name = str(spec).partition("/")
    return (source, name) if source in SOURCES else (DEFAULT, str(spec))


def is_here(spec: str | None) -> bool:
    """Is it in the package or in a local folder, so that nothing is downloaded?"""
    source, name = parse(spec)
    return source == embedded.PREFIX or Path(name).expanduser().exists()


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
