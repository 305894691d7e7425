"""The files of found latents: tables, findings, contact sheets and the report."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from PIL import Image

from vitreous._support.files import write_whole
from vitreous._support.words import count_of
from vitreous.evaluation.discover.rank import Effect, Spread, signed
from vitreous.evaluation.discover.result import Found, told_effect
from vitreous.evaluation.report.files import parquet
from vitreous.evaluation.report.page import data_uri, whole_page
from vitreous.plot.figure import save_figure
from vitreous.plot.latents import Shown, latents_figure, on_image
from vitreous.trace.latents import ENDING

MOST = 24  # latents that are shown
EACH = 8  # on one sheet
SHOWN_CLASSES = 3  # latents of a class in the table of the report


def write_report(found: Found, folder: Path) -> list[Path]:
    """Write everything; what was stored for a resumed run is removed."""
    name = found.latents.name
    files = [found.latents.save(folder / f"{name}{ENDING}")]
    files.append(put(folder / "latents.parquet", parquet(pa.Table.from_pylist(latent_rows(found)))))
    if found.effects:
        effects = [told_effect(effect) for effect in found.effects]
        files.append(put(folder / "effects.parquet", parquet(pa.Table.from_pylist(effects))))
    told = json.dumps(findings(found), indent=2, ensure_ascii=False, default=str)
    files.append(put(folder / "findings.json", told.encode()))
    shown = show(found, [j for j in found.order if found.top[j]][:MOST])
    for start in range(0, len(shown), EACH):
        file = folder / f"sheet-{start // EACH + 1}.png"
        save_figure(sheet(found, list(shown.values())[start : start + EACH]), file)
        files.append(file)
    files.append(put(folder / "report.html", page(found, shown).encode()))
    found.search.shards.drop()
    return files


def put(file: Path, content: bytes) -> Path:
    write_whole(file, content)
    return file


def clean(value: float) -> float | None:
    return None if value is None or math.isnan(value) else value


# -------------------------------------------------------------------------------------------------------------- tables


def latent_rows(found: Found) -> list[dict[str, Any]]:
    """One row for each latent."""
    rows = []
    has = (found.seen["most"] > 0).float().mean(0)
    for j in range(len(found.latents)):
        best, stability = found.best(j), found.stability
        rows.append(
            {
                "latent": j,
                "name": found.latents.names[j] if found.latents.names else None,
                "share_of_tokens": float(found.seen["share"][:, j].mean()),
                "share_of_images": float(has[j]),
                "mean_activation": float(found.seen["mean"][:, j].mean()),
                "stability": None if stability is None else float(stability.mean[j]),
                "stability_control": None if stability is None else float(stability.control[j]),
                "stable": found.stable(j),
                "class": None if best is None else best.label,
                "effect": None if best is None else best.logit.mean,
                "effect_low": None if best is None else clean(best.logit.low),
                "effect_high": None if best is None else clean(best.logit.high),
                "top_images": [found.data.samples[number].name for number, _, _ in found.top[j]],
                "top_patches": [patch for _, patch, _ in found.top[j]],
                "top_activations": [value for _, _, value in found.top[j]],
            }
        )
    return rows


def findings(found: Found) -> dict[str, Any]:
    """What was found, as numbers with intervals."""
    stability, latents = found.stability, found.latents
    explained, active = found.explained, Spread.of(found.quality.active, found.search.seed)
    return {
        "name": latents.name,
        "model": found.model.name,
        "layer": latents.layer,
        "kind": latents.kind,
        "latents": len(latents),
        "k": latents.k,
        "images": len(found.seen["number"]),
        "explained_variance": vars(explained),
        "l0": vars(active),
        "dead": found.quality.dead,
        "stability": None
        if stability is None
        else {
            "mean": float(stability.mean.mean()),
            "control": float(stability.control.mean()),
            "threshold": stability.threshold,
            "stable": int(stability.stable.sum()),
            "interval": "none: latents of one dictionary are not independent",
        },
        "predicted_against_true": {"r": clean(found.agreement), "interval": "none: pairs are not independent"},
        "effects": [told_effect(effect) for effect in found.effects],
        "failed": found.failed,
        "notes": found.notes,
        "told": dict(latents.told),
    }


# ------------------------------------------------------------------------------------------------------------- figures


def show(found: Found, latents: list[int]) -> dict[int, Shown]:
    """The patches and images of some latents."""
    wanted: dict[int, list[int]] = defaultdict(list)
    for j in latents:
        for number, _, _ in found.top[j]:
            wanted[number].append(j)
    maps, box = found.maps(wanted), found.model.layout.box(found.model.size)
    shown = {}
    for j in latents:
        most = found.top[j][0][2]
        patches = [
            (found.crop(number, patch), on_image(found.photo(number), maps[number, j], most, patch, box))
            for number, patch, _ in found.top[j]
        ]
        shown[j] = Shown(found.latents.label(j), lines_on(found, j), patches)
    return shown


def lines_on(found: Found, j: int) -> list[str]:
    """What the sheet says on a latent."""
    lines = [f"in {float(found.seen['share'][:, j].mean()):.1%} of the patches"]
    if found.stability is not None:
        stable = "stable" if found.stable(j) else "unstable"
        lines.append(f"{stable} over seeds: cosine {found.stability.mean[j]:.2f}")
    best = found.best(j)
    if best is not None:
        lines += [f"without it {best.label}", f"loses {best.logit}", f"control {best.control}"]
    return lines


def sheet(found: Found, shown: list[Shown]) -> Any:
    latents = found.latents
    title = f"Latents of layer {latents.layer}: {latents.name}"
    about = "above: the patch where the latent is largest, with what is around it; below: its activation in the image"
    return latents_figure(shown, title, about, found.model.name)


def page(found: Found, shown: dict[int, Shown]) -> str:
    """The report: one file that works offline."""
    latents, stability = found.latents, found.stability
    kind = "sparse autoencoder" if latents.kind == "sae" else "semi-NMF"
    cards = [
        {
            "title": one.title,
            "target": f"latent:{latents.name}#{j}",
            "lines": one.lines,
            "stable": found.stable(j) is not False,
            "patches": [(data_uri(shrunk(crop)), data_uri(image)) for crop, image in one.patches],
        }
        for j, one in shown.items()
    ]
    about = [found.model.name, f"layer {latents.layer}", count_of(len(latents), "latent"), kind]
    about.append(count_of(len(found.seen["number"]), "image"))
    facts = [
        ("explained variance (held-out images)", str(found.explained)),
        ("latents of a patch (L0)", str(Spread.of(found.quality.active, found.search.seed))),
        ("latents that no patch has", f"{found.quality.dead} of {len(latents)}"),
    ]
    if stability is not None:
        said = f"{int(stability.stable.sum())} of {len(latents)} (cosine at least {stability.threshold:.2f})"
        facts += [("stable over seeds", said), ("mean cosine over seeds", f"{stability.mean.mean():.2f}")]
        facts.append(("the same with random directions", f"{stability.control.mean():.2f}"))
    if not math.isnan(found.agreement):
        facts.append(("predicted against true effects, r", signed(found.agreement)))
    return whole_page(
        "latents.html.j2",
        title=f"Latents {latents.name}",
        about=about,
        facts=facts,
        cards=cards,
        classes=class_rows(found),
        notes=found.notes,
        failed=found.failed,
        manifest=json.dumps(dict(latents.told), indent=2, ensure_ascii=False, default=str),
    )


def class_rows(found: Found) -> list[list[str]]:
    """The first latents of each class, with their effects and controls."""
    by: dict[int, list[Effect]] = defaultdict(list)
    for effect in found.effects:
        by[effect.number].append(effect)
    rows = []
    for effects in by.values():
        for one in effects[:SHOWN_CLASSES]:
            numbers = [one.logit, one.control, one.gain, one.probability, one.removed, one.random, one.removed_gain]
            told = ["—" if number is None else str(number) for number in numbers]
            rows.append([one.label, found.latents.label(one.latent), str(one.images), *told])
    return rows


def shrunk(crop: Image.Image) -> Image.Image:
    """A crop at the size of a thumbnail."""
    return crop.resize((132, 132)) if min(crop.size) > 0 else crop
