"""`vitreous.discover`: the concepts that a layer of a model is made of, found in images without any labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitreous.errors import OptionError
from vitreous.evaluation.discover.fit import Size, fit, quality, stability
from vitreous.evaluation.discover.names import embed_words, name_latents, read_words
from vitreous.evaluation.discover.rank import Effect
from vitreous.evaluation.discover.report import write_report
from vitreous.evaluation.discover.result import Found, Place
from vitreous.evaluation.discover.search import Search
from vitreous.evaluation.discover.shards import Made, Shards
from vitreous.images.dataset import TABLE, Data, read_data
from vitreous.models.fingerprint import fingerprint
from vitreous.models.match_labels import match_labels
from vitreous.trace.apply import as_model, of_images
from vitreous.trace.latent import refuse_latents
from vitreous.trace.latents import KINDS, Latents
from vitreous.version import VERSION

TOP = 6  # images that show a latent
NAMED = 4  # of them, whose crops are compared with words
SHARDS = ".shards"


@dataclass(frozen=True, eq=False)
class Discovered(Found):
    """Latents, how good and how stable they are, where they are seen, and what classes lose without them."""

    def save(self, folder: str | Path) -> list[Path]:
        """Write the latents, tables (Parquet), findings (JSON), contact sheets and the report (HTML)."""
        return write_report(self, Path(folder))


def discover(
    model: Any,
    data: str | Path | Sequence[str | Path] | Data,
    layer: int = -2,
    *,
    name: str | None = None,
    by: str = "sae",
    latents: int | None = None,
    k: int | None = None,
    seeds: int = 3,
    steps: int | None = None,
    candidates: int = 8,
    removals: int = 2,
    per_class: int = 32,
    words: str | Path | Sequence[str] | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
) -> Discovered:
    """Find the concepts that the patch tokens of a layer are made of; `.latents.save()` makes them targets.

    `data`: a folder, class folders, a CSV or files. `layer`: the block that the tokens leave; −2 is the one before the
    last. `by`: "sae", a TopK sparse autoencoder of so many `latents`, `k` of which a token may have, or "nmf",
    semi-NMF; None: as many as the tokens allow. `seeds`: dictionaries fitted to tell which latents are stable. For each
    class, `candidates` latents are ablated in at most `per_class` of its images, and the patches of the best `removals`
    of them removed. `words`: names to choose from, for models with a text tower: a list, or a file with one a line.
    `out`: a folder that keeps what is computed, so that the same call goes on after an interruption.
    """
    wrapped = of_images(as_model(model), "discover works")
    number = refuse_latents(wrapped, layer)
    check(by, seeds, candidates, removals, per_class)
    listed = None if words is None else read_words(words)
    if listed is not None:
        embed_words(wrapped, listed[:1])  # raises before anything runs
    whole = data if isinstance(data, Data) else read_data(data)
    found = match_labels(whole.take(limit, sample, seed), wrapped)
    options = {"by": by, "latents": latents, "k": k, "seeds": seeds, "steps": steps, "seed": seed}
    options |= {"candidates": candidates, "removals": removals, "per_class": per_class}
    plan = {"model": fingerprint(wrapped), "data": found.fingerprint, "layer": number, "version": VERSION, **options}
    shards = Shards(None if out is None else Path(out) / SHARDS, plan)
    search = Search(wrapped, found, number, seed, shards)
    shards.plan["batch"] = search.batch
    return run(search, name or named_after(found), by, (latents, k), seeds, steps, plan, listed)


def check(by: str, seeds: int, candidates: int, removals: int, per_class: int) -> None:
    if by not in KINDS:
        raise OptionError(f"by={by!r}: must be one of {', '.join(KINDS)}")
    for what, value, least in (("seeds", seeds, 1), ("candidates", candidates, 1), ("per_class", per_class, 1)):
        if value < least:
            raise OptionError(f"{what}={value}: must be at least {least}")
    if removals < 0:
        raise OptionError(f"removals={removals}: must be at least 0")


def run(
    search: Search,
    name: str,
    by: str,
    size: tuple[int | None, int | None],
    seeds: int,
    steps: int | None,
    plan: dict[str, Any],
    words: list[str] | None,
) -> Discovered:
    model, notes = search.model, list(search.data.notes)
    tokens, image = search.tokens()
    held = search.held_out(image)
    rows = tokens[~held].to(model.device)
    chosen = Size.of(by, len(rows), tokens.shape[1], *size)
    fitted = [fitted_latents(search, rows, by, chosen, search.seed + i, steps, i) for i in range(seeds)]
    told = {"plan": plan, "images": len(search.data), "tokens": len(rows), "data": search.data.source, "of": model.name}
    about = {"name": name, "layer": search.layer, "model": plan["model"], "told": told}
    latents = replace(fitted[0], **about)
    test = tokens[held] if held.any() else tokens
    of = image[held] if held.any() else image
    if not held.any():
        notes.append("too few images to hold some out: the explained variance is that of the tokens fitted to")
    measured = quality(latents, [test[of == number].to(model.device) for number in sorted(set(of.tolist()))])
    agreed = stability(latents, fitted[1:], rows, search.seed)
    seen = search.look(latents)
    effects, why = ranked(search, latents, seen, notes)
    notes += [why] if why else []
    failed = {search.data.samples[n].name: said for n, said in sorted(search.shards.failed.items())}
    top = top_places(seen)
    result = Discovered(
        latents, model, search.data, measured, agreed, top, seen, effects, search.grid(), failed, notes, search
    )
    return result if words is None else with_names(result, words)


def fitted_latents(
    search: Search, rows: Tensor, by: str, size: Size, seed: int, steps: int | None, number: int
) -> Latents:
    """The latents of one seed, stored as soon as they are fitted."""

    def make(_: Any) -> Made:
        found, losses = fit(rows, by, size, seed, steps)
        parts = {"mean": found.mean, "decoder": found.decoder, "encoder": found.encoder, "bias": found.bias}
        return {name: part for name, part in parts.items() if part is not None} | {"losses": torch.tensor(losses)}

    (made,) = search.shards.each(f"seed{number}", [None], make)
    mean, decoder = made["mean"].to(rows), made["decoder"].to(rows)
    encoder, bias = (made[name].to(rows) if name in made else None for name in ("encoder", "bias"))
    return Latents("", search.layer, by, mean, decoder, encoder, bias, size.k)


def ranked(search: Search, latents: Latents, seen: Made, notes: list[str]) -> tuple[list[Effect], str | None]:
    if search.ranks is not None:
        return [], search.ranks
    plan = search.shards.plan
    effects, why = search.effects(latents, seen, plan["candidates"], plan["removals"], plan["per_class"])
    if effects and all(one.logit.mean == 0 for one in effects):
        notes.append(f"the classes do not depend on the patches that leave layer {search.layer}; take an earlier layer")
    return effects, why


def top_places(seen: Made, count: int = TOP) -> list[list[Place]]:
    """Of each latent, the images where it is largest, and the patch of each."""
    values, rows = seen["most"].topk(min(count, len(seen["most"])), 0)
    return [
        [
            (int(seen["number"][row]), int(seen["where"][row, j]), float(value))
            for value, row in zip(values[:, j], rows[:, j].tolist())
            if value > 0
        ]
        for j in range(values.shape[1])
    ]


def with_names(found: Discovered, words: list[str]) -> Discovered:
    """The same with a word for each latent."""
    crops = [[found.crop(number, patch) for number, patch, _ in places[:NAMED]] for places in found.top]
    named = name_latents(found.model, words, crops)
    fits = [None if one is None else round(one[1], 4) for one in named]
    names = tuple(None if one is None else one[0] for one in named)
    told = {**found.latents.told, "words": words, "fits": fits}
    return replace(found, latents=replace(found.latents, names=names, told=told))


def named_after(data: Data) -> str:
    """The folder or the file of a data set, as a name for its latents."""
    source = Path(data.source)
    return (source.parent.name if source.name == TABLE else source.stem) or "latents"
