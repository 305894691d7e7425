"""Activation maximisation beside real photos, with and without the patch-border term.

    python benchmarks/maximize.py --weights FILE --data PHOTOS [--classes 10] [--steps 256] [--device cuda] [--out DIR]

Classes are drawn by chance from those that the model finds first in at least one of the photos. For each: its logit on
the photos (mean, largest) and on the maximised picture, without and with the term, all else alike; once with the usual
options, once as a plain ascent in pixels (no random views, no other penalty). Writes the pictures and the figure of
before and after.
"""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import vitreous
from vitreous import Maximized, Model
from vitreous._support.files import write_whole
from vitreous.images import pictures
from vitreous.inspect.maximize.penalty import both_ways

PLAIN: dict[str, Any] = {
    "canvas": "pixel", "copies": 1, "jitter": 0, "scale": 0.0, "rotate": 0.0, "noise": 0.0, "colour": 0.0, "tv": 0.0,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {"usual options": {}, "plain ascent in pixels": PLAIN}
INSIDE = ("block:6/channel:50", "head:8/2/q:30")  # drawn beside a class
PATCHES = 6  # of a picture's corner that is shown enlarged
BATCH = 50
WIDE, COLOURS = 1680, 224  # of the figure, whose noise would otherwise take a megabyte
Pair = tuple[Maximized, Maximized]  # without and with the term


def main() -> None:
    given = parse()
    name = "deit_tiny_patch16_224" if given.weights else None
    model = vitreous.load(given.model or name, weights=given.weights, device=given.device)
    with vitreous.show_progress():
        scores = photo_scores(model, given.data)
        found = sorted(set(scores.argmax(1).tolist()))
        chosen = random.Random(given.seed).sample(found, given.classes)
        units = [f"class:{i}" for i in chosen]
        pairs = {word: ascend(model, units, given.steps, given.seed, **o) for word, o in SETTINGS.items()}
        inside = ascend(model, list(INSIDE), given.steps, given.seed, **PLAIN)
    print(f"{model.name}, {len(scores)} photos, {given.steps} steps, seed {given.seed}, {model.device.type}")
    for word, pair in pairs.items():
        print(f"\n{word}:\n\n{table(pair, scores[:, chosen])}\n\n{verdict(pair, scores[:, chosen])}")
    out = Path(given.out)
    for word, pair in (*pairs.items(), ("inside", inside)):
        for one, kind in zip(pair, ("without", "with")):
            one.save(out / f"{word.replace(' ', '-')}-{kind}.npz")
    pairs["usual options"][1].save(out / "usual-options.png")
    figure(pairs, inside, out / "maximize-continuity.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a folder of photos")
    parser.add_argument("--weights", help="a DeiT-Tiny checkpoint; default: the embedded model, of the same size")
    parser.add_argument("--model", help="another model by name")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default="vitreous-out/maximize")
    return parser.parse_args()


def photo_scores(model: Model, folder: str) -> Tensor:
    """Every photo's logits, [photos classes]."""
    files = pictures.find(folder)
    with torch.no_grad():
        parts = [model.net(model.prepare(files[i : i + BATCH])) for i in range(0, len(files), BATCH)]
    return torch.cat(parts).float().cpu()


def ascend(model: Model, units: list[str], steps: int, seed: int, **options: Any) -> Pair:
    """Without and with the term; with: as heavy as usual."""
    without = vitreous.maximize(model, units, steps=steps, seed=seed, **options, continuity=0.0)
    return without, vitreous.maximize(model, units, steps=steps, seed=seed, **options)


def table(pair: Pair, scores: Tensor) -> str:
    """Markdown: a line for each class."""
    without, term = pair
    lines = [
        "| unit | photos, mean | photos, largest | maximised without | with | borders without | with |",
        "|---|---|---|---|---|---|---|",
    ]
    for i, title in enumerate(term.titles):
        photos = f"{scores[:, i].mean():.2f} | {scores[:, i].max():.2f}"
        active = f"{without.final[i]:.2f} | {term.final[i]:.2f}"
        lines.append(f"| {title} | {photos} | {active} | {without.border_ratio[i]:.2f} | {term.border_ratio[i]:.2f} |")
    return "\n".join(lines)


def verdict(pair: Pair, scores: Tensor) -> str:
    """The numbers that must hold, in a sentence."""
    without, term = pair
    over = [(one.final > scores.max(0).values).sum().item() for one in pair]
    kept = term.final / without.final
    borders = [one.border_ratio.mean().item() for one in pair]
    lower = (term.border_ratio < without.border_ratio).sum().item()
    return (
        f"Over the largest of the photos: {over[0]} of {len(term)} without the term, {over[1]} with it. The term keeps "
        f"{kept.mean():.0%} of the activation ({kept.min():.0%} at least) and takes the borders from {borders[0]:.2f} "
        f"to {borders[1]:.2f} on average, lower for {lower} of {len(term)}."
    )


# ---------------------------------------------------------------------------------------------------------- the figure


def profile(found: Maximized) -> np.ndarray:
    """⟨Δ²⟩ by the place in its patch where a step begins, 1 … side (from there to the next patch); their mean is 1."""
    ways = []
    for images, side in both_ways(found.images, found.patch):
        steps = images.diff(dim=3).square().mean((1, 2))  # [U X−1]
        count = (images.shape[3] - 1) // side
        ways.append(steps[:, : count * side].reshape(len(images), count, side).mean(1))
    both = torch.stack(ways).mean(0)
    return (both / both.mean(1, keepdim=True)).mean(0).numpy()


def figure(pairs: dict[str, Pair], inside: Pair, path: Path) -> None:
    """Before and after: enlarged corners of a plain ascent, whole pictures of the usual one, and where steps are."""
    from vitreous.plot.figure import png_bytes
    from vitreous.plot.sheet import BODY, HEAD, QUIET, SMALL, Sheet

    side, gap, left, top = 1.5, 0.12, 0.9, 0.98
    usual, plain = pairs["usual options"], pairs["plain ascent in pixels"]
    whole = [min(i, len(usual[0]) - 1) for i in (4, 8)]
    columns = [(plain, 0, True), (inside, 0, True), (inside, 1, True), *((usual, i, False) for i in whole)]
    at = [left + i * (side + gap) + (0.3 if i > 2 else 0) for i in range(len(columns))]
    sheet = Sheet(at[-1] + side + 0.75 + 2.0 + 0.2, top + 2 * (side + 0.42) + 0.1)
    sheet.text("The patch-border term (continuity), all else alike", 0.2, 0.2, 8, HEAD)
    sheet.text(f"plain ascent in pixels, the corner of {PATCHES}×{PATCHES} patches", at[0], 0.52, 3 * side, QUIET)
    sheet.text("usual options, whole picture", at[3], 0.52, 2 * side + gap, QUIET)
    for (pair, i, corner), x in zip(columns, at):
        title = pair[0].titles[i]
        sheet.text(title.partition(" ")[2] or title, x, 0.78, side, BODY)
        for row, found in enumerate(pair):
            y = top + row * (side + 0.42)
            pixels = np.asarray(found.picture(i))
            height, width = (PATCHES * p for p in found.patch)
            shown = pixels[:height, :width] if corner else pixels
            sheet.image(shown.repeat(4, 0).repeat(4, 1) if corner else shown, x, y, side, side)
            said = f"{found.final[i]:.1f} · borders {found.border_ratio[i]:.2f}"
            sheet.text(said, x, y + side + 0.13, side, SMALL)
    for row, word in enumerate(("without", "with")):
        sheet.text(word, 0.2, top + row * (side + 0.42) + side / 2, left - 0.25, BODY)
    draw_profiles(sheet, (plain, inside), at[-1] + side + 0.75, top, side)
    drawn = Image.open(io.BytesIO(png_bytes(sheet.figure))).convert("RGB")
    drawn.thumbnail((WIDE, WIDE), Image.Resampling.LANCZOS)
    small = io.BytesIO()
    drawn.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    write_whole(path, small.getvalue())


def draw_profiles(sheet: Any, plain: tuple[Pair, ...], x: float, top: float, side: float) -> None:
    """Squared steps by their place in a patch, of the plain ascents without and with the term."""
    from vitreous.plot.colour import LINES
    from vitreous.plot.curves import frame
    from vitreous.plot.sheet import LABEL, QUIET, SMALL

    wide, high = 2.0, 2 * side + 0.1
    place = (x / sheet.width, 1 - (top + high) / sheet.height, wide / sheet.width, high / sheet.height)
    axes = sheet.figure.add_axes(place)
    frame(axes)
    sheet.text("squared step, plain ascents,", x - 0.3, 0.52, 2.3, QUIET)
    sheet.text("its mean over a patch = 1", x - 0.3, 0.7, 2.3, QUIET)
    for kind, (word, colour) in enumerate((("without", LINES[1]), ("with", LINES[0]))):
        values = np.mean([profile(pair[kind]) for pair in plain], 0)
        at = np.arange(1, len(values) + 1)
        axes.plot(at, values, color=colour, linewidth=1.4, marker="o", markersize=2.5)
        where, align = ((at[-1] - 0.4, values[-1]), "right") if kind == 0 else ((at[9], values[9] + 0.1), "center")
        axes.text(*where, word, ha=align, color=colour, fontproperties=LABEL.font)
    axes.set_ylim(0, None)
    axes.set_xticks([1, len(values) // 2, len(values)])
    sheet.text("place in the patch; last: to the next one", x + wide / 2, top + high + 0.32, 2.5, SMALL, "center")


if __name__ == "__main__":
    main()
