"""Maps as masks of the original images: PNG files, or annotations in the format of COCO.

A mask holds where a map is large: above Otsu's threshold, the `top` share of what the model saw, or the largest values
that hold the share `mass` of the map's sum. Of a signed map it holds the evidence for the target only.
"""

from __future__ import annotations

import io
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from PIL import Image

from vitreous._support.files import write_whole
from vitreous._support.marks import marked, pixels
from vitreous._support.statistics import otsu
from vitreous.attribution import Attribution, mark_of
from vitreous.bridges.placed import Placed, as_several, paths_of, placed
from vitreous.errors import OptionError
from vitreous.plot.colour import is_level
from vitreous.plot.logged import numbered
from vitreous.version import VERSION

Mask = Bool[np.ndarray, "Y X"]


def to_masks(
    found: Attribution | Sequence[Any],
    folder: str | Path,
    *,
    top: float | int | None = None,
    mass: float | int | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write each map as a mask, a PNG file (0 or 255) in the size of the original image; return the files.

    Masks are cut by Otsu's threshold; with `top=0.2`, they are a fifth of what the model saw; with `mass=0.5`, the
    places that hold half of the map's sum. Of several attributions, the names of the files tell method and target.
    A file with other content is not replaced unless `overwrite` is True.
    """
    several = as_several(found)
    files = names_of(several, Path(folder))
    contents = []
    for one, index in each_of(several):
        buffer = io.BytesIO()
        mask = mask_of(one, index, placed_or_seen(one, index), top, mass)
        Image.fromarray(mask.astype(np.uint8) * 255).save(buffer, "PNG", **pixels("png", mark_of({"map": one[index]})))
        contents.append(buffer.getvalue())
    for file, content in zip(files, contents):
        refuse_other(file, content, overwrite)
    for file, content in zip(files, contents):
        write_whole(file, content)
    return files


def to_coco(
    found: Attribution | Sequence[Any],
    path: str | Path | None = None,
    *,
    top: float | int | None = None,
    mass: float | int | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Maps as annotations of COCO: return the JSON document, and write it to `path` if that is given.

    Each map becomes an annotation with a mask (compressed RLE) in the pixels of the original image, its area and box;
    the category is the target's label, the score its probability. `top`, `mass`, `overwrite`: as for `to_masks`. Where
    nothing speaks for the target, there is no annotation. Images of several attributions are listed once.
    """
    several = as_several(found)
    images: dict[Any, dict[str, Any]] = {}
    categories: dict[str, dict[str, Any]] = {}
    annotations: list[dict[str, Any]] = []
    for one, index in each_of(several):
        key = paths_of(one)[index] or (one.names[index], index)
        map = placed_or_seen(one, index)
        image = images.setdefault(key, image_entry(len(images) + 1, key, one.names[index], map))
        label = label_of(one, index)
        category = categories.setdefault(label, {"id": len(categories) + 1, "name": label, "supercategory": ""})
        mask = mask_of(one, index, map, top, mass)
        if mask.any():
            about = {"id": len(annotations) + 1, "image_id": image["id"], "category_id": category["id"]}
            annotations.append({**about, **region(mask), **score_of(one, index), "method": one.method})
    document = {
        "info": {"description": "maps of vitreous, cut to masks", "version": VERSION},
        "licenses": [],
        "images": told_apart(list(images.values())),
        "categories": list(categories.values()),
        "annotations": annotations,
        **marked(mark_of({str(number): one for number, one in enumerate(several)})),
    }
    if path is not None:
        content = json.dumps(document).encode()
        refuse_other(Path(path), content, overwrite)
        write_whole(Path(path), content)
    return document


# ---------------------------------------------------------------------------------------------------------------- masks


def mask_of(found: Attribution, index: int, map: Placed, top: float | int | None, mass: float | int | None) -> Mask:
    """Where one map is large."""
    given = {"top": top, "mass": mass}
    for name, share in given.items():
        if share is not None and not 0 < share <= 1:
            raise OptionError(f"{name} takes a share between 0 and 1, not {share!r}")
    if top is not None and mass is not None:
        raise OptionError("give top or mass, not both; without either, masks are cut by Otsu's threshold")
    level = is_level(found.method)
    if level and mass is not None:
        raise OptionError(f"only differences within a map of {found.method} mean something, so it has no mass; use top")
    allowed = map.seen if level else map.seen & (map.map > 0)
    values = map.map[map.seen].astype(np.float64)
    if top is not None:
        least = np.partition(values, len(values) - max(1, round(top * len(values))))[-max(1, round(top * len(values)))]
    elif mass is not None:
        falling = np.sort(values[values > 0])[::-1]
        sums = falling.cumsum()
        least = falling[np.searchsorted(sums, mass * sums[-1] * (1 - 1e-9))] if len(falling) else np.inf
    else:
        own = found.map[index].detach().float().cpu().numpy().reshape(1, -1)
        least = otsu(own if level else np.maximum(own, 0))[1][0]
    return np.asarray(allowed & (map.map >= least))


def placed_or_seen(found: Attribution, index: int) -> Placed:
    map = placed(found, index)
    if not map.original:
        said = "its preprocessing mirrors, turns or normalises each image by itself"
        shown = f"{found.names[index]}: the mask has the pixels of what the model saw, {map.size[0]}×{map.size[1]}"
        warnings.warn(f"{shown}, not of the image: {said}", UserWarning, stacklevel=3)
    return map


def region(mask: Mask) -> dict[str, Any]:
    """The mask as run lengths, its area, and its box as left, top, width, height."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    left, top = int(columns[0]), int(rows[0])
    box = [left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1]
    return {"segmentation": run_lengths(mask), "area": int(mask.sum()), "bbox": box, "iscrowd": 0}


def run_lengths(mask: Mask) -> dict[str, Any]:
    """The compressed RLE of COCO: lengths of runs of 0, 1, 0, … down the columns, each as its difference from the one
    two before it, in characters of five bits and a sixth that says whether more follow, least first.
    """
    flat = np.concatenate([[0], mask.flatten("F").astype(np.int8), [0]])
    changes = np.flatnonzero(np.diff(flat))
    counts = np.diff(np.concatenate([[0], changes, [mask.size]])).tolist()
    if counts and counts[-1] == 0:
        counts.pop()
    told = []
    for i, count in enumerate(counts):
        rest = count - counts[i - 2] if i > 2 else count
        more = True
        while more:
            five = rest & 31
            rest >>= 5
            more = rest != (-1 if five & 16 else 0)
            told.append(chr((five | 32 if more else five) + 48))
    return {"size": [int(mask.shape[0]), int(mask.shape[1])], "counts": "".join(told)}


# -------------------------------------------------------------------------------------------------------------- entries


def each_of(several: Sequence[Attribution]) -> Iterator[tuple[Attribution, int]]:
    return ((one, index) for one in several for index in range(len(one)))


def image_entry(number: int, key: Any, name: str, map: Placed) -> dict[str, Any]:
    entry = {"id": number, "file_name": name, "width": map.size[0], "height": map.size[1]}
    path = {"path": key} if isinstance(key, str) else {}
    return {**entry, **path, **({} if map.original else {"cropped": True})}


def told_apart(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Files of one name in several folders are named from the folder that holds them all."""
    if len({image["file_name"] for image in images}) < len(images) and all("path" in image for image in images):
        shared = os.path.commonpath([os.path.dirname(image["path"]) for image in images])
        return [{**image, "file_name": Path(os.path.relpath(image["path"], shared)).as_posix()} for image in images]
    return images


def label_of(found: Attribution, index: int) -> str:
    """The name of a map's target; of a method that does not depend on one, its own."""
    label = found.labels[index] if found.labels else None
    return label or found.targets[index] or found.method


def score_of(found: Attribution, index: int) -> dict[str, float]:
    share = found.probabilities[index] if found.probabilities else None
    return {} if share is None else {"score": float(share)}


def names_of(several: Sequence[Attribution], folder: Path) -> list[Path]:
    """A file for each map: the image's name, and what tells several maps of it apart."""
    stems = [Path(one.names[index]).stem for one, index in each_of(several)]
    if len(several) > 1:
        told = [re.sub(r"[^\w.-]+", "_", f"{one.method}-{label_of(one, index)}") for one, index in each_of(several)]
        stems = [f"{stem}-{more}" for stem, more in zip(stems, told)]
    return [folder / f"{name}.png" for name in numbered(stems)]


def refuse_other(path: Path, content: bytes, overwrite: bool) -> None:
    if not overwrite and path.exists() and path.read_bytes() != content:
        raise OptionError(f"{path} is there already, with other content; give another name, or overwrite=True")
