"""What a comparison of two models says: sentences and tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitreous._support.statistics import intervals
from vitreous._support.words import count_of, number, share, span
from vitreous.evaluation.diff.limits import Check, Counted, Estimate, rate
from vitreous.evaluation.diff.pairs import Gathered, Pair
from vitreous.evaluation.study.findings import Table

ROWS, COLUMNS = ("upper", "middle", "lower"), ("left", "centre", "right")
SEEN = 0.005  # of the relevance: less is shown as 0.00
CLASSES = 10  # rows of the table of classes


def lead(done: Sequence[Check], found: Counted, images: int) -> str:
    """The verdict and the three numbers behind it."""
    if not images:
        return "No image could be compared."
    failed = [check for check in done if check.verdict == "failed"]
    said = "PASSED" if not failed else f"FAILED ({', '.join(check.name for check in failed)})"
    parts = f"{part(found.flips)} of {count_of(images, 'image')} have another answer"
    return f"{said}: {parts}; {part(found.moved)} of those with the same answer have another reason."


def described(about: Mapping[str, Any], origin: Mapping[str, Any]) -> str:
    """`vit_tiny, a.safetensors, bfloat16, weights 1f2e3d4c`."""
    files = [Path(one["path"]).name for one in origin.get("weights", {}).get("files", ())]
    return ", ".join([str(about["name"]), *files, str(about["dtype"]), f"weights {str(about['weights'])[:8]}"])


def part(found: Estimate) -> str:
    """12 % [8 %, 17 %]."""
    return "–" if not math.isfinite(found.value) else f"{share(found.value)} [{share(found.low)}, {share(found.high)}]"


def plain(found: Estimate, digits: int = 2) -> str:
    """0.91 [0.88, 0.93]; without an interval where there are too few images."""
    known = math.isfinite(found.low) and math.isfinite(found.high)
    return number(found.value, digits) + (f" {span((found.low, found.high), digits)}" if known else "")


def sentences(found: Counted, gathered: Gathered, done: Sequence[Check], names: Sequence[str]) -> list[str]:
    """One for each thing that was measured; `names`: what the two models are."""
    level = 1 / (gathered.copies + 1)
    told = [
        f"A is {names[0]}; B is {names[1]}.",
        "Both explain the same class in each image: its label, or A's answer where it has none.",
        f"Reason moved: B's map is farther from A's than A's own maps under any of {gathered.copies} augmentations "
        "and than B's own under half of them. "
        f"A map that is only one more augmentation of A is so in {share(level)} of the images at most.",
    ]
    if found.accuracy[0].count:
        gone = f"{found.lost} right answers became wrong, {found.won} wrong ones right (McNemar's exact p = "
        told.append(f"Accuracy: A {part(found.accuracy[0])}, B {part(found.accuracy[1])}; {gone}{found.pvalue:.2g}).")
    unsure = [check.name for check in done if check.verdict == "passed" and not check.sure]
    if unsure:
        told.append(
            f"Passed without proof: the intervals of {', '.join(unsure)} reach beyond the limit; more images tell."
        )
    if gathered.missing is not None:
        told.append(f"Without faithfulness: {gathered.missing}")
    every = [pair.gained for pair in gathered.pairs if pair.same]
    kept = [pair.gained for pair in gathered.pairs if pair.same and pair.moved]
    flipped = [pair.answered for pair in gathered.pairs if not pair.same]
    told += [
        f"Where the relevance went in {what}, B − A as shares of a map: {went}."
        for what, gains in (
            (f"all {count_of(len(every), 'image')} of the same answer", every),
            (f"the {count_of(len(kept), 'image')} of the same answer and another reason", kept),
            (f"the {count_of(len(flipped), 'image')} of another answer, each model explaining its own", flipped),
        )
        if (went := where_to(gains))
    ]
    return told


def where_to(gained: Sequence[np.ndarray]) -> str:
    """The ninth of the image that gained most relevance and the one that lost most; nothing of nothing."""
    if len(gained) < 2:
        return ""
    gains = np.stack([ninths(one) for one in gained], 1)  # [9 n]
    low, high = intervals(gains)
    mean = gains.mean(1)
    if np.abs(mean).max() < SEEN:
        return ""
    most, least = int(mean.argmax()), int(mean.argmin())
    named = [f"{ROWS[k // 3]} {COLUMNS[k % 3]}" for k in range(9)]

    def told(k: int) -> str:
        return f"{named[k]}: {'+' if mean[k] > 0 else ''}{number(float(mean[k]))} {span((low[k], high[k]))}"

    unclear = " (neither is clear)" if low[most] <= 0 and high[least] >= 0 else ""
    return f"{told(most)}; {told(least)}{unclear}"


def ninths(gained: np.ndarray) -> np.ndarray:
    """The sum over each ninth of the image, row by row."""
    high, wide = gained.shape
    rows, columns = np.arange(high) * 3 // high, np.arange(wide) * 3 // wide
    found = np.zeros(9)
    np.add.at(found, (3 * rows[:, None] + columns[None, :]).ravel(), gained.ravel())
    return found


def tables(found: Counted, gathered: Gathered, done: Sequence[Check]) -> list[Table]:
    made = [checks_table(done), reasons_table(found), answers_table(found, gathered)]
    classes = classes_table(gathered.pairs)
    return [*made, *([classes] if classes.rows else [])]


def checks_table(done: Sequence[Check]) -> Table:
    rows = []
    for check in done:
        shown = plain(check.found) if check.least else part(check.found)
        limit = number(check.limit) if check.least else share(check.limit)
        rows.append((check.name, check.what, f"{'≥' if check.least else '≤'} {limit}", shown, check.verdict))
    about = "A check fails if the whole 95 % interval lies beyond the limit."
    return Table("Checks", ("check", "what", "limit", "found", "verdict"), rows, about)


def reasons_table(found: Counted) -> Table:
    faith = found.faithfulness
    rows = [
        ("rank correlation of the maps, median", plain(found.correlation)),
        ("overlap (IoU) of the top tenth of the patches, median", plain(found.overlap)),
        ("distance of the maps, median", plain(found.distance)),
        ("… in medians of the distance under augmentation", plain(found.ratio)),
        ("distance under A's own augmentations, median", plain(found.noise[0])),
        ("distance under B's own augmentations, median", plain(found.noise[1])),
    ]
    if faith[0].count:
        rows += [
            ("faithfulness of A, mean", plain(faith[0], 3)),
            ("faithfulness of B, mean", plain(faith[1], 3)),
            ("… B − A, paired", plain(faith[2], 3)),
        ]
    about = "Distance: ½ Σ|a/Σ|a| − b/Σ|b||, the share of the relevance that lies elsewhere."
    return Table("Reasons", ("measure", "value"), rows, about)


def answers_table(found: Counted, gathered: Gathered) -> Table:
    pairs = gathered.pairs
    rows = [
        ("same answer", part(rate([pair.same for pair in pairs])), str(sum(pair.same for pair in pairs))),
        ("same answer, same reason", *counted([pair.same and not pair.moved for pair in pairs])),
        ("same answer, other reason", *counted([pair.same and pair.moved for pair in pairs])),
        ("other answer", *counted([not pair.same for pair in pairs])),
    ]
    if found.accuracy[0].count:
        right = [pair.right for pair in pairs if pair.right is not None]
        rows += [
            ("right in A, wrong in B", *counted([a and not b for a, b in right])),
            ("wrong in A, right in B", *counted([b and not a for a, b in right])),
        ]
        rows += [(f"accuracy of {side}", part(one), str(one.count)) for side, one in zip("AB", found.accuracy)]
        rows.append(("accuracy B − A, paired", plain(found.accuracy[2], 3), str(found.accuracy[2].count)))
    return Table("Answers", ("images", "share", "number"), rows)


def counted(these: Sequence[bool]) -> tuple[str, str]:
    return part(rate(these)), str(sum(these))


def classes_table(pairs: Sequence[Pair]) -> Table:
    """The classes whose reasons moved most often, and those whose answers did."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.target or "–"].append(pair)
    told = {name: [pair for pair in group if pair.moved or not pair.same] for name, group in groups.items()}
    order = sorted((name for name in groups if told[name]), key=lambda name: (-len(told[name]), name))
    rows = []
    for name in order[:CLASSES]:
        group = groups[name]
        moved = rate([pair.moved for pair in group if pair.same])
        typical = number(float(np.median([pair.distance for pair in group])))
        rows.append((name, str(len(group)), part(rate([not pair.same for pair in group])), part(moved), typical))
    head = ("class", "images", "other answer", "same answer, other reason", "median distance")
    return Table("Classes that changed most", head, rows)
