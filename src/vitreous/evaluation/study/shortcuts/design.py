"""What the second phase does, decided from the rows of the first: clusters, and which cue goes into which image."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vitreous._support.words import plain
from vitreous.evaluation.study.columns import flat_arrays
from vitreous.evaluation.study.kind import Rows
from vitreous.evaluation.study.shortcuts.cluster import Found, find_clusters, unit
from vitreous.evaluation.study.shortcuts.options import Options

SHEET = 8  # images on a contact sheet
COLUMNS = ["target", "target_label", "error", "places", "shares", "inside", "parts", "parts_shape"]


@dataclass(frozen=True, eq=False)
class Image:
    """The parts of one image."""

    number: int
    group: int  # its class
    places: Int[np.ndarray, "m"]
    shares: Float[np.ndarray, "m"]
    features: Float[np.ndarray, "m D"]
    inside: Float[np.ndarray, "m"] | None


def read_images(study: Rows) -> tuple[list[Image], dict[int, str]]:
    """Every image that has parts, and the names of the classes."""
    found, names, number = list[Image](), dict[int, str](), 0
    for table in study.tables(COLUMNS):
        words = table.select(["target", "target_label", "error", "parts_shape"]).to_pylist()
        arrays = [flat_arrays(table[name]) for name in ("places", "shares", "inside", "parts")]
        for row, places, shares, inside, features in zip(words, *arrays):
            asked = row["target"] or ""
            if row["error"] is None and row["parts_shape"] is not None and asked.isdigit():
                names.setdefault(int(asked), row["target_label"] or asked)
                known = inside if len(inside) else None
                part = features.reshape(row["parts_shape"])
                found.append(Image(number, int(asked), places, shares, part, known))
            number += 1
    return found, names


def design_of(options: Options, layer: int, study: Rows) -> dict[str, Any]:
    """The clusters of every class and the insertions that test them, as JSON can hold it."""
    images, names = read_images(study)
    if not images:
        return {"layer": layer, "mean": pack(np.zeros(0)), "classes": [], "clusters": [], "pairs": []}
    mean = np.mean([image.features.mean(0, dtype=np.float64) for image in images], 0)
    classes, clusters, pairs = list[dict[str, Any]](), list[dict[str, Any]](), list[list[Any]]()
    for group in sorted(names):
        mine = [image for image in images if image.group == group]
        told: dict[str, Any] = {"class": group, "label": names[group], "images": len(mine), "skipped": None}
        told["skipped"] = why_skipped(options, group, names[group], len(mine))
        found = [] if told["skipped"] else clusters_of(mine, mean, options, [options.seed, group])
        parts = sum(len(image.places) for image in mine)
        held = len(set().union(*(one.parts.tolist() for one in found)) if found else set())
        classes.append({**told, "clusters": len(found), "unclustered": 1 - held / max(1, parts)})
        others = [image for image in images if image.group != group]
        for one in found:
            number = len(clusters)
            told = {"cluster": number, "class": group, "label": names[group], **described(one, mine, options)}
            pairs += insertions(number, told, mine, others, options)
            told["places"] = told.pop("all_places")[: max(SHEET, options.donors)]
            clusters.append({**told, "rare": 1 - one.images / len(mine)})
    return {"layer": layer, "mean": pack(mean), "classes": classes, "clusters": clusters, "pairs": pairs}


def why_skipped(options: Options, group: int, name: str, count: int) -> str | None:
    """Why a class is left out; None if it is not."""
    wanted = options.classes
    known = {str(group), plain(name), *(plain(part) for part in name.split(","))}
    if wanted is not None and not known & {plain(one) for one in wanted}:
        return "not among the classes asked for"
    return f"{count} of at least {options.images} images" if count < options.images else None


def clusters_of(images: Sequence[Image], mean: np.ndarray, options: Options, seed: Sequence[int]) -> list[Found]:
    units = unit(np.concatenate([image.features for image in images]), mean)
    owner = np.repeat([image.number for image in images], [len(image.places) for image in images])
    weight = np.concatenate([image.shares for image in images]).astype(np.float64)
    start = int(np.random.default_rng(seed).integers(2**31))
    return find_clusters(units, owner, weight, least=options.least, most=options.clusters, seed=start)


def described(found: Found, images: Sequence[Image], options: Options) -> dict[str, Any]:
    """A cluster with its images, those where it weighs most first."""
    held = np.zeros(sum(len(image.places) for image in images), bool)
    held[found.parts] = True
    rows, start = list[tuple[float, Image, np.ndarray]](), 0
    for image in images:
        own = held[start : start + len(image.places)]
        start += len(own)
        if own.any():
            rows.append((float(image.shares[own].sum()), image, own))
    rows.sort(key=lambda row: (-row[0], row[1].number))
    return {
        "images": found.images,
        "parts": len(found.parts),
        "again": found.again,
        "persistence": found.persistence,
        "stability": found.stability,
        "radius": found.radius,
        "centre": pack(found.centre),
        "members": [image.number for _, image, _ in rows],
        "shares": [round(share, 6) for share, _, _ in rows],
        "outside": [outside(image, own) for _, image, own in rows],
        "all_places": [image.places[own].tolist() for _, image, own in rows],
        "indexed": [image.number for _, image, _ in rows if image.inside is not None][: options.indexed],
    }


def outside(image: Image, own: np.ndarray) -> float | None:
    """The share of these parts' relevance that lies outside the mask; None without a mask."""
    if image.inside is None:
        return None
    share = image.shares[own].astype(np.float64)
    return round(float((share * (1 - image.inside[own])).sum() / share.sum()), 6)


def insertions(
    number: int, cluster: dict[str, Any], mine: Sequence[Image], others: Sequence[Image], options: Options
) -> list[list[Any]]:
    """Which cue goes into which image: [host, cluster, donor, its places, ordinary image, its places, seed].

    Ordinary parts are the most relevant patches of images of the class without the cluster, or, where all images have
    it, of any of them outside it; `seed` draws patches where there are fewer than the cue has, and the random ones.
    """
    draw = np.random.default_rng([options.seed, 1, number])
    hosts = [others[i] for i in draw.permutation(len(others))[: options.hosts]]
    held = dict(zip(cluster["members"], cluster["all_places"]))
    donors = list(held.items())[: options.donors]
    usual = [image for image in mine if image.number not in held] or list(mine)
    order = draw.permutation(len(usual))
    found = list[list[Any]]()
    for i, host in enumerate(hosts):
        (donor, cue), image = donors[i % len(donors)], usual[order[i % len(order)]]
        rest = [place for place in image.places.tolist() if place not in held.get(image.number, ())]
        seed = int(draw.integers(2**31))
        found.append([host.number, number, donor, cue, image.number, rest[: len(cue)], seed])
    return found


def pack(values: np.ndarray) -> str:
    return base64.b64encode(np.asarray(values, np.float32).tobytes()).decode()


def unpack(text: str) -> Float[np.ndarray, "D"]:
    return np.frombuffer(base64.b64decode(text), np.float32).astype(np.float64)
