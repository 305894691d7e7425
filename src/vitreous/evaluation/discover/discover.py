"""`vitreous.discover`: the concepts that a layer of a model is made of, found in images without any labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitreous._support.statistics import pearson
from vitreous.errors import OptionError
from vitreous.evaluation.discover.fit import Quality, Size, Stability, fit, quality, stability
from vitreous.evaluation.discover.names import embed_words, name_latents, read_words
from vitreous.evaluation.discover.rank import Effect, Spread
from vitreous.evaluation.discover.search import Search
from vitreous.evaluation.discover.shards import Made, Shards
from vitreous.images.dataset import TABLE, Data, read_data
from vitreous.models.fingerprint import fingerprint
from vitreous.models.match_labels import match_labels
from vitreous.models.model import Model
from vitreous.trace.apply import as_model, of_images
from vitreous.trace.latent import refuse_latents
from vitreous.trace.latents import KINDS, Latents
from vitreous.version import VERSION

TOP = 6  # images that show a latent
NAMED = 4  # of them, whose crops are compared with words
CONTEXT = 3  # patches across, of a crop
SHARDS = ".shards"

Place = tuple[int, int, float]  # the number of an image, its patch where a latent is largest, and how large


@dataclass(frozen=True, eq=False)
class Discovered:
    """Latents, how good and how stable they are, where they are seen, and what classes lose without them."""

    latents: Latents
    model: Model
    data: Data
    quality: Quality
    stability: Stability | None
    top: list[list[Place]]  # of each latent
    seen: dict[str, Tensor]  # of each image: mean, most, where, share [N K]; class, best [N]
    effects: list[Effect]
    grid: tuple[int, ...]
    failed: dict[str, str]  # images that could not be read
    notes: list[str]
    search: Search = field(repr=False)

    @property
    def explained(self) -> Spread:
        return Spread.of(self.quality.explained, self.search.seed)

    @property
    def agreement(self) -> float:
        """Pearson's r of the predicted and the true effects, over classes and their latents."""
        if len(self.effects) < 3:
            return float("nan")
        values = np.array([[one.predicted, one.logit.mean] for one in self.effects]).T
        return float(pearson(values[0], values[1]))

    def stable(self, latent: int) -> bool | None:
        return None if self.stability is None else bool(self.stability.stable[latent])

    def best(self, latent: int) -> Effect | None:
        """The class that loses most without a latent, among those it was tried for."""
        own = [one for one in self.effects if one.latent == latent]
        return max(own, key=lambda one: one.logit.mean, default=None)

    @property
    def order(self) -> list[int]:
        """The latents, those with the largest effect on a class first, then by how many images have them."""
        has = (self.seen["most"] > 0).float().mean(0)
        effect = {j: one.logit.mean for j in range(len(self.latents)) if (one := self.best(j)) is not None}
        return sorted(range(len(self.latents)), key=lambda j: (j not in effect, -effect.get(j, 0), -float(has[j])))

    def photo(self, number: int) -> Image.Image:
        """What the model sees of an image."""
        return self.model.preprocess.view(self.data.samples[number].open(self.model.channels).image)

    def crop(self, number: int, patch: int, context: int = CONTEXT) -> Image.Image:
        """A patch with what is around it, as a square of `context` patches."""
        photo, (rows, columns) = self.photo(number), self.grid[-2:]
        y, x = divmod(patch % (rows * columns), columns)
        box = self.model.layout.box(self.model.size) or (0.0, 0.0, 1.0, 1.0)
        high, wide = (box[2] - box[0]) * photo.height / rows, (box[3] - box[1]) * photo.width / columns
        middle = box[1] * photo.width + (x + 0.5) * wide, box[0] * photo.height + (y + 0.5) * high
        half = context / 2 * max(high, wide)
        left = min(max(middle[0] - half, 0), max(0, photo.width - 2 * half))
        top = min(max(middle[1] - half, 0), max(0, photo.height - 2 * half))
        return photo.crop((round(left), round(top), round(left + 2 * half), round(top + 2 * half)))

    def maps(self, wanted: dict[int, list[int]]) -> dict[tuple[int, int], Float[np.ndarray, "h w"]]:
        """The latents' own activations in the patches of images, by image and latent."""
        return self.search.maps(self.latents, wanted)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the latents, tables (Parquet), findings (JSON), contact sheets and the report (HTML)."""
        from vitreous.evaluation.discover.report import write_report

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


def told_effect(effect: Effect) -> dict[str, Any]:
    """An effect as one flat row."""
    row: dict[str, Any] = {}
    for name, value in asdict(effect).items():
        ends = {"mean": None, "low": None, "high": None} if value is None else value
        row |= {f"{name}_{end}": ends[end] for end in ends} if isinstance(ends, dict) else {name: value}
    return row
