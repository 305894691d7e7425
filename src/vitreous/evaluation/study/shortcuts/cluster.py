"""Clusters of parts of images: branches of a tree that stand apart, weigh much and come back in half of the images.

Parts are joined by average linkage of 1 − cos. A branch is worth (height of its parent − its own height) · relevance in
it, and the disjoint branches that are worth most together are chosen, if they are stable; how many there are follows
from the data. k-means gives a cue that 5 % of the images have a cluster of its own only among some 24.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.cluster.hierarchy import linkage

SPLITS = 8  # into halves of the images
STABLE = 0.5  # a branch is kept if it overlaps so much with one of a half's tree: Jaccard, mean over the splits
MOST = 2400  # parts in one tree; of more images, some are drawn at random
WITHIN = 0.9  # of its own parts lie within the radius of a cluster
SMALLEST = 0.02  # radius: parts of equal pixels differ by rounding only

Units = Float[np.ndarray, "P D"]
Owners = Int[np.ndarray, "P"]


@dataclass(frozen=True, eq=False)
class Found:
    """One cluster of parts."""

    centre: Float[np.ndarray, "D"]  # of length one
    radius: float
    parts: Int[np.ndarray, "n"]  # by their numbers
    images: int
    persistence: float
    stability: float
    worth: float
    again: int  # images with a part within the radius of the others' centre


def unit(vectors: Float[np.ndarray, "*n D"], mean: Float[np.ndarray, "D"]) -> Float[np.ndarray, "*n D"]:
    """Vectors of length one from the common mean."""
    found = vectors.astype(np.float64) - mean
    return np.asarray(found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), 1e-12))


def find_clusters(
    units: Units, image: Owners, weight: Float[np.ndarray, "P"], *, least: int, most: int, seed: int
) -> list[Found]:
    """At most `most` clusters of parts of at least `least` images, the worthiest first.

    `image`: whose part each is; `weight`: its share of the image's relevance.
    """
    draw = np.random.default_rng(seed)
    kept = some_parts(image, draw)
    if len(np.unique(image[kept])) < least or len(kept) < 2:
        return []
    tree = Tree.of(units[kept], image[kept])
    worth = tree.persistence * (tree.members @ weight[kept])
    chosen = best_branches(tree, np.where(tree.images >= least, worth, 0))
    stability = recurrences(units[kept], image[kept], tree.members[chosen], draw)
    stable = [(branch, how) for branch, how in zip(chosen, stability) if how >= STABLE]
    stable = sorted(stable, key=lambda one: -worth[one[0]])[:most]
    found = [
        Found(
            *centre_of(units[kept], image[kept], tree.members[branch], kept),
            float(tree.persistence[branch]),
            float(how),
            float(worth[branch]),
            0,
        )
        for branch, how in stable
    ]
    return [gathered(one, units, image, np.unique(image[kept])) for one in found]


def some_parts(image: Owners, draw: np.random.Generator) -> Int[np.ndarray, "p"]:
    """The parts of all images, or of as many random ones as a tree takes."""
    if len(image) <= MOST:
        return np.arange(len(image))
    names, count = np.unique(image, return_counts=True)
    order = draw.permutation(len(names))
    fits = order[np.cumsum(count[order]) <= MOST]
    return np.flatnonzero(np.isin(image, names[fits]))


@dataclass(frozen=True, eq=False)
class Tree:
    """All branches of a tree of parts, without the root."""

    members: Bool[np.ndarray, "T P"]
    persistence: Float[np.ndarray, "T"]
    images: Int[np.ndarray, "T"]
    children: Int[np.ndarray, "T 2"]  # −1: a single part

    @classmethod
    def of(cls, units: Units, image: Owners) -> Tree:
        count = len(units)
        joins = linkage(units, "average", "cosine")
        members = np.zeros((2 * count - 1, count), bool)
        members[np.arange(count), np.arange(count)] = True
        height, parent = np.zeros(2 * count - 1), np.full(2 * count - 1, 2 * count - 2)
        children = np.full((2 * count - 1, 2), -1)
        for place, (one, other, apart, _) in enumerate(joins, count):
            pair = [int(one), int(other)]
            members[place] = members[pair[0]] | members[pair[1]]
            height[place], parent[pair], children[place] = apart, place, pair
        owners = np.unique(image, return_inverse=True)[1]
        there = members.astype(np.float32) @ np.eye(owners.max() + 1, dtype=np.float32)[owners] > 0
        rest = slice(0, 2 * count - 2)
        apart = (height[parent] - height)[rest]
        return cls(members[rest], np.maximum(apart, 0), there.sum(1)[rest], children[rest])


def best_branches(tree: Tree, worth: Float[np.ndarray, "T"]) -> list[int]:
    """The disjoint branches whose worth is largest in sum; a branch comes after its children."""
    best, chosen = np.zeros(len(worth)), [list[int]() for _ in worth]
    inner = np.zeros(len(worth), bool)
    for branch, (one, other) in enumerate(tree.children):
        below = best[one] + best[other] if one >= 0 else 0.0
        if worth[branch] > below:
            best[branch], chosen[branch] = worth[branch], [branch]
        elif one >= 0:
            best[branch], chosen[branch] = below, chosen[one] + chosen[other]
        if one >= 0:
            inner[[one, other]] = True
    return [branch for top in np.flatnonzero(~inner) for branch in chosen[top]]


def recurrences(
    units: Units, image: Owners, members: Bool[np.ndarray, "c P"], draw: np.random.Generator
) -> Float[np.ndarray, "c"]:
    """How well each cluster is found again in half of the images: the mean of the largest Jaccard index.

    A half that has the cluster in one image only says nothing: any part is a branch by itself.
    """
    names, owner = np.unique(image, return_inverse=True)
    owned = np.eye(len(names), dtype=np.float32)[owner]
    found = np.full((SPLITS, len(members)), np.nan)
    for split in range(SPLITS if len(members) else 0):
        half = np.flatnonzero(np.isin(image, draw.permutation(names)[: len(names) // 2]))
        if len(half) < 3:
            continue
        tree = Tree.of(units[half], image[half])
        mine, other = members[:, half].astype(np.float32), tree.members.astype(np.float32)
        both = mine @ other.T
        either = mine.sum(1)[:, None] + other.sum(1) - both
        there = (mine @ owned[half] > 0).sum(1) > 1
        found[split, there] = (both / np.maximum(either, 1)).max(1)[there]
    known = np.isfinite(found)
    return np.asarray(np.where(known, found, 0).sum(0) / np.maximum(known.sum(0), 1))


def centre_of(
    units: Units, image: Owners, members: Bool[np.ndarray, "P"], numbers: Int[np.ndarray, "P"]
) -> tuple[np.ndarray, float, np.ndarray, int]:
    """The centre, radius, parts and images of a branch; distances are to the centre of the other images' parts."""
    mine = np.flatnonzero(members)
    apart = distances_to_others(units[mine], image[mine])
    centre = units[mine].sum(0)
    radius = max(float(np.quantile(apart, WITHIN)), SMALLEST)
    return centre / max(float(np.linalg.norm(centre)), 1e-12), radius, numbers[mine], len(np.unique(image[mine]))


def distances_to_others(units: Units, image: Owners) -> Float[np.ndarray, "P"]:
    """1 − cos of each part to the centre of the parts of other images: no part draws its own centre near."""
    whole = units.sum(0)
    found = np.ones(len(units))
    for name in np.unique(image):
        own = image == name
        rest = whole - units[own].sum(0)
        length = float(np.linalg.norm(rest))
        if length > 0:
            found[own] = 1 - units[own] @ rest / length
    return found


def gathered(found: Found, units: Units, image: Owners, seen: Int[np.ndarray, "S"]) -> Found:
    """The cluster with the parts of images that the tree has not seen, and how many images have it again."""
    mine = np.zeros(len(units), bool)
    mine[found.parts] = True
    near = 1 - units @ found.centre <= found.radius
    new = near & ~np.isin(image, seen)
    apart = distances_to_others(units[mine], image[mine]) <= found.radius
    again = set(image[mine][apart].tolist()) | set(image[new].tolist())
    every = np.flatnonzero(mine | new)
    return Found(
        found.centre,
        found.radius,
        every,
        len(np.unique(image[every])),
        found.persistence,
        found.stability,
        found.worth,
        len(again),
    )


def assigned(
    units: Float[np.ndarray, "*n D"], centres: Float[np.ndarray, "C D"], radii: Float[np.ndarray, "C"]
) -> Int[np.ndarray, "*n"]:
    """The nearest cluster of each part, if the part lies within its radius; −1 otherwise."""
    if not len(centres):
        return np.full(units.shape[:-1], -1)
    apart = 1 - units @ centres.T
    nearest = apart.argmin(-1)
    within = np.take_along_axis(apart, nearest[..., None], -1)[..., 0] <= radii[nearest]
    return np.where(within, nearest, -1)
