"""Maps as heat maps of FiftyOne, which is not imported before they are made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitreous._support.optional import needs
from vitreous.attribution import Attribution
from vitreous.bridges.coco import label_of
from vitreous.bridges.placed import paths_of, placed
from vitreous.errors import InputError, OptionError
from vitreous.plot.logged import numbers

SIDE = 256  # pixels of the longer side of a heat map: a database holds it


def to_fiftyone(
    samples: Any,
    found: Attribution,
    field: str | None = None,
    *,
    scores: Mapping[str, Any] | None = None,
    side: int = SIDE,
) -> list[Any]:
    """Add maps to the samples of FiftyOne that have the same files, as heat maps; return these samples.

    `samples`: a dataset, a view, a list of samples, or None for new ones. Each sample gets the field `field` (default:
    the method's name), an `fo.Heatmap` over the whole image, zero where the model did not look, whose range is that of
    the map; `field_target`, an `fo.Classification` with the target's label and probability; and the numbers
    `field_entropy` and `field_gini`. `scores`: further numbers, e.g. {"srg": vitreous.evaluate(…)}. Images that are not
    in a dataset or list are added to it. `side`: the most pixels on a side of a heat map.
    """
    fo, name = needs("fiftyone", "fiftyone"), field or found.method
    if not name.isidentifier():
        raise OptionError(f"field={name!r} is not a name that a field can have; use letters, digits and _")
    paths = paths_of(found)
    for path, image in zip(paths, found.names):
        if path is None:
            raise InputError(f"{image} has no file, and a sample of FiftyOne is a file; explain files by their paths")
    further = {key: listed(key, values, len(found)) for key, values in (scores or {}).items()}
    values = {key: some for key, some in {**numbers(found), **further}.items() if key != "share"}
    fields = [fields_of(fo, found, i, name, side) for i in range(len(found))]
    known = {os.path.abspath(sample.filepath): sample for sample in (() if samples is None else samples)}
    changed, new = [], []
    for i, path in enumerate(paths):
        sample = known.get(str(path))
        if sample is None:
            sample = fo.Sample(filepath=str(path))
            new.append(sample)
        for key, value in {**fields[i], **{f"{name}_{k}": v[i] for k, v in values.items()}}.items():
            sample[key] = value
        changed.append(sample)
    keep(samples, changed, new)
    return changed


def fields_of(fo: Any, found: Attribution, index: int, name: str, side: int) -> dict[str, Any]:
    """The heat map, and the target where there is one."""
    map = placed(found, index, side)
    if not map.original:
        said = "its preprocessing mirrors, turns or normalises each image by itself"
        raise InputError(f"{found.names[index]}: what the model saw cannot be found in the image ({said})")
    seen = map.map[map.seen]
    most = float(np.abs(seen).max())
    ends = [-most, most] if found.signed else [min(0.0, float(seen.min())), float(seen.max())]
    made = {name: fo.Heatmap(map=map.map, range=ends)}
    if found.targets[index] is not None:
        share = found.probabilities[index] if found.probabilities else None
        made[f"{name}_target"] = fo.Classification(label=label_of(found, index), confidence=share)
    return made


def listed(name: str, values: Any, count: int) -> list[float]:
    """Numbers, one for each image: a `Score`, a tensor or a list."""
    found = [float(value) for value in getattr(values, "value", values)]
    if len(found) != count:
        raise OptionError(f"{len(found)} values of {name} for {count} images; give one for each image")
    return found


def keep(samples: Any, changed: Sequence[Any], new: Sequence[Any]) -> None:
    """Save what lies in a database, and add what is new."""
    for sample in changed:
        if not any(sample is one for one in new) and getattr(sample, "in_dataset", False):
            sample.save()
    if new and hasattr(samples, "add_samples"):
        samples.add_samples(list(new))
    elif new and isinstance(samples, list):
        samples.extend(new)
