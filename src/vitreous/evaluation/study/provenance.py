"""What made a row of a study: the model, the image, the target and the options, told as for any other result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from vitreous.attribution import Attribution
from vitreous.errors import InputError, OptionError, nearest
from vitreous.evaluation.study.kind import Kind
from vitreous.registry import METHODS

Named = Any  # the name of an image, or a mapping or a row of a pandas table that has it


@runtime_checkable
class Rows(Protocol):
    """The study that a row belongs to (`vitreous.Study`), as far as it is asked here."""

    @property
    def kind(self) -> Kind: ...
    @property
    def folder(self) -> Path: ...
    @property
    def manifest(self) -> dict[str, Any]: ...
    @property
    def about(self) -> dict[str, Any]: ...
    def of(self, model: str) -> Rows: ...
    def rows(self, image: str, *, arrays: bool = False) -> Iterator[dict[str, Any]]: ...


def find_row(study: Rows, image: Named, method: str | None, target: str | None, arrays: bool) -> dict[str, Any]:
    """The only row of an image, a method and a target; of several, one has to be chosen."""
    wanted: dict[str, Any] = {"image": image} if isinstance(image, str) else dict(image)
    wanted |= {} if method is None else {"method": method}
    if "image" not in wanted:
        raise OptionError("the row names no image; give a row of to_pandas() or iter_maps(), or the name of an image")
    rows = study.rows(wanted["image"], arrays=arrays)
    found = [row for row in rows if matches(row, wanted) and target in (None, row["target"], row["asked"])]
    if not found:
        said = ", ".join(f"{name} {wanted[name]}" for name in ("image", "method") if known(wanted.get(name)))
        aim = "" if target is None else f", target {target}"
        raise InputError(f"{study.folder}: has no row of {said}{aim}{unknown(study, wanted)}")
    each = dict.fromkeys(f"{row['method']} for {row['target']} of {row['model']}" for row in found)
    if len(each) > 1:
        said = ", ".join(each)
        raise OptionError(f"{wanted['image']} has several rows ({said}); choose a method, a target, or study.of(MODEL)")
    return found[0]


def matches(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    names = ("model", "method", "target", "asked")
    return all(str(row[name]) == str(wanted[name]) for name in names if known(wanted.get(name)))


def known(value: Any) -> bool:
    """A data frame has NaN where a value is missing."""
    return value is not None and value == value


def unknown(study: Rows, wanted: Mapping[str, Any]) -> str:
    methods = list(study.kind.methods)
    name = wanted.get("method")
    return "" if name is None or name in methods else nearest(str(name), methods)


def provenance_of(study: Rows, row: Mapping[str, Any]) -> dict[str, Any]:
    """As `Attribution.provenance`."""
    return made(study, row, np.zeros((0, 0), np.float32)).provenance


def attribution_of(study: Rows, row: Mapping[str, Any]) -> Attribution:
    """The map of a row, with all that is known of it."""
    if row.get("map") is None:
        why = row["error"] or f"a study {study.kind.name} stores none"
        raise InputError(f"{row['image']}: there is no map of {row['method']} ({why})")
    return made(study, row, row["map"])


def made(study: Rows, row: Mapping[str, Any], map: np.ndarray) -> Attribution:
    options = dict(study.kind.methods[row["method"]])
    declared = METHODS[study.kind.declared(row["method"])]
    own = declared.options.model_fields
    about = study.of(row["model"]).about
    aimed = study.kind.targeted and (declared.targeted or ("form" in about and declared.attention))
    return Attribution(
        map=torch.from_numpy(np.array(map, np.float32))[None],
        method=declared.name,
        options=options,
        targets=(row["target"] if aimed else None,),
        labels=(row["target_label"],) if aimed and row["target_label"] is not None else (),
        probabilities=(row["probability"],) if aimed and row["probability"] is not None else (),
        model=row["model"],
        signed=declared.is_signed(declared.check({k: v for k, v in options.items() if k in own})),
        notes={"study": study.folder.name, "asked": row["asked"], "error": row["error"]},
        version=study.manifest["vitreous"],
        box=tuple(about["box"]) if about.get("box") and list(map.shape) == about["grid"] else None,
        sources=(source_of(study, row),),
        made_by=origin_of(study, row["model"]),
    )


def source_of(study: Rows, row: Mapping[str, Any]) -> dict[str, Any]:
    """The image, as the views of an attribution tell it."""
    root = study.manifest.get("root")
    path = None if root is None else os.path.join(root, row["image"])
    return {"name": row["image"], "path": path, "sha256": row["image_hash"]}


def origin_of(study: Rows, model: str) -> dict[str, Any]:
    """What is known of a model; studies of the first release know its digest, its input and the versions."""
    about = study.of(model).about
    told = study.manifest.get("origins", {}).get(model)
    if told is not None:
        return dict(told)
    return {
        "weights": {"files": [], "digest": about["weights"]},
        "input": {"size": about["size"], "dtype": about["dtype"]},
        "versions": {"vitreous": study.manifest["vitreous"], **study.manifest.get("versions", {})},
    }
