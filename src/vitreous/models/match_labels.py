"""The labels of a data set as class numbers of a model."""

from __future__ import annotations

import re
from dataclasses import replace

from vitreous.errors import TargetError, nearest
from vitreous.images.dataset import Data
from vitreous.images.entries import some
from vitreous.models.labels import find_exact, names
from vitreous.models.libraries import wordnet
from vitreous.models.model import Model

SAME = 0.5  # of the class names; two lists of classes that agree by so much are one, spelled in two ways


def match_labels(data: Data, model: Model) -> Data:
    """Every label as a class number of the model; without labels, and with a note, where it knows none of them."""
    given = dict.fromkeys(sample.label for sample in data.samples if sample.label is not None)
    if not given:
        return data
    if model.outputs is None:
        _ = model.layout  # the probe runs the model once
    own = own_numbers(data, model)
    found = {label: own[label] if label in own else class_number(label, model) for label in given}
    unknown = [str(label) for label, number in found.items() if number is None]
    if len(unknown) == len(found):
        said = f"the labels of {data.source} are no classes of {model.name} ({some(unknown)}), so they are not used"
        samples = tuple(replace(s, label=None) for s in data.samples)
        return replace(data, samples=samples, notes=(*data.notes, said))
    if unknown:
        known = [name for label in model.labels.values() for name in names(label)]
        raise TargetError(
            f"{data.source}: {len(unknown)} of {len(found)} labels are no classes of {model.name}: {some(unknown)}"
            f"{nearest(spellings(unknown[0])[-1], known)}"
        )
    samples = tuple(s if s.label is None else replace(s, label=found[s.label]) for s in data.samples)
    return replace(data, samples=samples)


def own_numbers(data: Data, model: Model) -> dict[int | str, int]:
    """The data set's own class numbers by name, where the model's are the same although some names are not (crane2)."""
    if len(data.classes) != model.outputs:
        return {}
    alike = sum(names(name)[0] in names(model.labels.get(i, "")) for i, name in enumerate(data.classes))
    return {name: i for i, name in enumerate(data.classes)} if alike > SAME * len(data.classes) else {}


def class_number(label: int | str, model: Model) -> int | None:
    """By number, by name, or by an ImageNet folder's name: n01440764, n01440764_tench."""
    if isinstance(label, int) or label.isdigit():
        return int(label) if int(label) < (model.outputs or 0) else None
    if re.match(r"n\d{8}", label):  # names may stand for two classes (crane), these numbers do not
        known = wordnet().get(label[:9])
        if known is not None and names(known[1])[0] in names(model.labels.get(known[0], "")):
            return known[0]
    return next((found for text in spellings(label) if (found := find_exact(text, model.labels)) is not None), None)


def spellings(label: str) -> list[str]:
    """great_white_shark as it is, with spaces, and without a WordNet number before it."""
    bare = re.sub(r"^n\d{8}[_\- ]*", "", label)
    return [text for text in dict.fromkeys((label, label.replace("_", " "), bare, bare.replace("_", " "))) if text]
