"""`vitreous cass`: compare the attention heads with the saliency of a class; writes a figure, arrays and a summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor

from vitreous._support.arrays import save_arrays
from vitreous.attribute import told_targets
from vitreous.attribution import Attribution, mark_of
from vitreous.cli.arguments import Place
from vitreous.cli.results import (
    BATCH,
    SHOWN,
    Batch,
    Summary,
    check_out,
    find_pictures,
    placed,
    tell_notes,
    work_through,
)
from vitreous.cli.values import NUMBERS
from vitreous.images.pictures import Picture
from vitreous.methods.attention.head_similarity import class_saliency, head_maps, similarities, weighted_heads
from vitreous.models.model import Model
from vitreous.plot.figure import save_figure
from vitreous.plot.heads import heads_figure
from vitreous.registry import METHODS
from vitreous.trace.apply import choose, images_at_once, refuse
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views

ENDING = ".cass"
ENDS = 5  # heads listed at each end
CLEAR, LOOSE = 0.7, 0.3  # absolute rank correlations from which the summary reports a trend, or a weak one


@dataclass(frozen=True)
class Compared:
    """The attention heads and the saliency of the class for a batch of images."""

    weighted: Attribution
    scores: np.ndarray  # [B L H]
    saliency: np.ndarray  # [B h w], or [B Y X] in pixel space
    heads: np.ndarray  # [B L H h w]
    titles: list[str]


def run(
    *,
    sources: list[str],
    load: Callable[[], Model],
    target: str | None,
    options: dict[str, Any],
    limit: int | None,
    place: Place,
) -> None:
    values, formats = METHODS["cass_attention"].check(options), place.formats
    check_out(place.out)
    given = find_pictures(sources, limit)
    model = load()
    summary = Summary.of(model, place.out, given)

    def work(batch: Batch) -> None:
        pictures = [picture for _, picture in batch if isinstance(picture, Picture)]
        trace = Trace(model, [picture.image for picture in pictures])
        found = compare(trace, target, values, Views(pictures, model.preprocess))
        for i, (file, _) in enumerate(batch):
            files = write(found, i, given.names[file], formats, place.overwrite, summary)
            summary.done.append({"image": str(file), **files, **facts(found, i)})

    size = min(BATCH, images_at_once(model))
    work_through(given.files, summary, size, work, lambda: report(summary, values, place.as_json), place.as_json)
    report(summary, values, place.as_json)
    raise typer.Exit(summary.code)


def compare(trace: Trace, target: str | None, values: dict[str, Any], views: Views) -> Compared:
    """The map of `cass_attention` together with its scores, saliency and head maps."""
    declared = METHODS["cass_attention"]
    refuse(trace, declared)
    trace.whole()  # the class is chosen from the output
    chosen = choose(trace, target, declared)
    device = trace.images.device.type
    with torch.inference_mode(False), torch.autocast(device, enabled=False), torch.no_grad():
        saliency = class_saliency(trace, chosen, **values)
        scores = similarities(trace, saliency, values["space"])
        heads = torch.stack([head_maps(trace, layer) for layer in range(scores.shape[1])], 1)
        map = weighted_heads(trace, scores)
    weighted = Attribution(
        map=map.detach().float(),
        method=declared.name,
        options=values,
        targets=told_targets(chosen, trace.output, len(trace)),
        model=trace.model.name,
        signed=declared.is_signed(values),
        notes={"cass": scores},
        views=views,
    )
    titles = [chosen.title(trace.model, trace.output, i) for i in range(len(trace))]
    return Compared(weighted, numbers(scores), numbers(saliency), numbers(heads), titles)


def numbers(values: Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()


# -------------------------------------------------------------------------------------------------------- writing files


def write(
    found: Compared, index: int, name: str, formats: tuple[str, ...], overwrite: bool, summary: Summary
) -> dict[str, str]:
    """Write the arrays and the figure of one image, each atomically; returns the files by what they are."""
    one, scores = found.weighted[index], found.scores[index]
    arrays = {"cass": scores, "saliency": found.saliency[index], "heads": found.heads[index]}
    mark = {**mark_of({"weighted": one}), "explained": found.titles[index]}
    words, files = f"CASS: {found.titles[index]}", dict[str, str]()
    endings = [f"{ENDING}.{kind}" for kind in formats]
    with placed(summary, name, endings, mark["identity"], overwrite) as place:
        for kind, ending in zip(formats, endings):
            file = summary.out / f"{place}{ending}"
            if kind == NUMBERS:
                save_arrays(file, {**arrays, "weighted": one.map[0].cpu().numpy()}, mark)
            else:
                seen = heads_figure(found.heads[index], scores, found.saliency[index], one, one.seen(), title=words)
                save_figure(seen, file, mark)
            files.setdefault("maps" if kind == NUMBERS else "figure", str(file))
    return files


def facts(found: Compared, index: int) -> dict[str, Any]:
    """What was found for one image."""
    scores = found.scores[index]
    ranked, means = rank(scores), scores.mean(1)
    return {
        "target": found.weighted[index].target,
        "explained": found.titles[index],
        "most_alike": ranked[:ENDS],
        "least_alike": ranked[::-1][:ENDS],
        "layer_means": means.tolist(),
        "depth_correlation": correlation(means),
    }


def rank(scores: np.ndarray) -> list[dict[str, Any]]:
    """All heads, the most similar first."""
    order = np.argsort(-scores, axis=None, kind="stable")
    places = (divmod(int(i), scores.shape[1]) for i in order)
    return [{"layer": layer, "head": head, "similarity": float(scores[layer, head])} for layer, head in places]


def correlation(means: np.ndarray) -> float | None:
    """Spearman's rank correlation between depth and the mean of a layer; None if it is undefined."""
    if len(means) < 3 or np.ptp(means) == 0 or not np.isfinite(means).all():
        return None
    return float(spearmanr(np.arange(len(means)), means).statistic)


# ----------------------------------------------------------------------------------------------------- printing results


def report(summary: Summary, values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        told = {"model": summary.model, "options": values, "images": summary.done}
        typer.echo(json.dumps({**told, "failed": summary.failed, "notes": list(summary.notes)}, indent=2))
    elif summary.done:
        show_done(summary)
    tell_notes(summary, as_json)


def show_done(summary: Summary) -> None:
    for entry in summary.done[:SHOWN]:
        typer.echo(f"{entry.get('figure', entry['image'])}\n    {entry['explained']}\n")
        show_heads(entry)
        typer.echo(f"\n{depth(entry)}\n")
    count, failed = len(summary.done), len(summary.failed)
    if count > SHOWN:
        typer.echo(f"… and {count - SHOWN} more in {summary.out}")
    pictures = f"{count} image{'s' if count > 1 else ''}" + (f" of {count + failed}" if failed else "")
    where = "the .npz beside each figure" if count > 1 else summary.done[0].get("maps")
    arrays = f"; arrays: {where}" if "maps" in summary.done[0] else ""
    typer.echo(f"{pictures}, the heads of {summary.model_and_weights} compared with the saliency of the class{arrays}")


def show_heads(entry: dict[str, Any]) -> None:
    """Print the most and the least similar heads side by side."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for word in ("most alike", "least alike"):
        table.add_column(word)
        table.add_column("similarity", justify="right")
    for most, least in zip(entry["most_alike"], entry["least_alike"]):
        table.add_row(
            *(cell for one in (most, least) for cell in (f"layer {one['layer']}, head {one['head']}", score(one)))
        )
    Console(highlight=False).print(table)


def score(one: dict[str, Any]) -> str:
    return f"{one['similarity']:.3f}"


def depth(entry: dict[str, Any]) -> str:
    """A sentence on whether the similarity falls with depth, as it does in most trained models."""
    means, found = entry["layer_means"], entry["depth_correlation"]
    if found is None:
        return "There are too few distinct layers to tell whether the similarity falls with depth."
    way = "fall" if found < 0 else "rise"
    strong, weak = f"{way}s with depth", f"tends to {way} with depth, with exceptions"
    said = strong if abs(found) >= CLEAR else weak if abs(found) >= LOOSE else "does not follow depth"
    ends = f"from {means[0]:.2f} in layer 0 to {means[-1]:.2f} in layer {len(means) - 1}"
    return f"The mean similarity of a layer {said}: {ends}, rank correlation {found:.2f}."
