"""The labels of a data set as class numbers of a model."""

from __future__ import annotations

import re
from dataclasses import replace

from vitreous.errors import TargetError
from vitreous.images.dataset import Data
from vitreous.images.entries import some
from vitreous.models.labels import ClassNames, names, suggest
from vitreous.models.libraries import wordnet
from vitreous.models.model import Model
from vitreous.models.output import Meaning

SAME = 0.5  # share of equal class names above which two lists are taken for the same classes, spelled in two ways


def match_labels(data: Data, model: Model) -> Data:
    """Turn every label into a class number of the model; drop them all, with a note, if it knows none."""
    labels = data.columns.labels or ()
    given = dict.fromkeys(label for label in labels if label is not None)
    if not given:
        return data
    if model.outputs is None:
        _ = model.layout  # the layout run tells the number of outputs
    if model.meaning is Meaning.VALUE or model.outputs == 1:
        what = "returns values" if model.meaning is Meaning.VALUE else "has one output"
        return unlabelled(
            data, f"{model.name} {what}, which the labels of {data.source} do not number; they are not used"
        )
    own = own_numbers(data, model)
    known = ClassNames(model.labels)
    found = {label: own[label] if label in own else class_number(label, model, known) for label in given}
    unknown = [str(label) for label, number in found.items() if number is None]
    if len(unknown) == len(found):
        said = f"the labels of {data.source} are not classes of {model.name} ({some(unknown)}) and are not used"
        return unlabelled(data, said)
    if unknown:
        raise TargetError(
            f"{data.source}: {len(unknown)} of {len(found)} labels are not classes of {model.name}: {some(unknown)}"
            f"{suggest(spellings(unknown[0])[-1], model.labels)}"
        )
    numbers = [None if label is None else found[label] for label in labels]
    return replace(data, samples=data.columns.labelled(numbers))


def unlabelled(data: Data, note: str) -> Data:
    return replace(data, samples=data.columns.labelled(None), notes=(*data.notes, note))


def own_numbers(data: Data, model: Model) -> dict[int | str, int]:
    """The data set's own class numbers by name, if the model has the same classes, some perhaps under other names."""
    if len(data.classes) != model.outputs:
        return {}
    alike = sum(names(name)[0] in names(model.labels.get(i, "")) for i, name in enumerate(data.classes))
    return {name: i for i, name in enumerate(data.classes)} if alike > SAME * len(data.classes) else {}


def class_number(label: int | str, model: Model, by_name: ClassNames) -> int | None:
    """Find a class by its number, its name, or the name of an ImageNet folder: n01440764, n01440764_tench."""
    if isinstance(label, int) or label.isdigit():
        return int(label) if int(label) < (model.outputs or 0) else None
    if re.match(r"n\d{8}", label):  # a name may stand for two classes (crane), a WordNet ID does not
        known = wordnet().get(label[:9])
        if known is not None and names(known[1])[0] in names(model.labels.get(known[0], "")):
            return known[0]
    return next((found for text in spellings(label) if (found := by_name.find(text)) is not None), None)


def spellings(label: str) -> list[str]:
    """A label as it is, and without a WordNet ID before it."""
    return [text for text in dict.fromkeys((label, re.sub(r"^n\d{8}[_\- ]*", "", label))) if text]
