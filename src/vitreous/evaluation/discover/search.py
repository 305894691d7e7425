"""The runs over a data set that find latents, look for them in every image, and measure their effects on classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from vitreous.errors import InputError, Unsupported
from vitreous.evaluation.discover.fit import Rows
from vitreous.evaluation.discover.rank import Effect, Spread, ablate, first_order, measured_by, remove, top_latents
from vitreous.evaluation.discover.shards import Made, Shards, joined
from vitreous.evaluation.discover.tokens import Patches
from vitreous.images.dataset import Data
from vitreous.images.readers import Loaded, Reader
from vitreous.models.model import Model
from vitreous.models.output import Form, Meaning
from vitreous.trace.apply import images_at_once
from vitreous.trace.features import patch_features
from vitreous.trace.latents import Latents
from vitreous.trace.perturb.drop_tokens import Undroppable, refuse_dropping
from vitreous.trace.trace import Trace

MOST_TOKENS = 1_000_000
MOST_NUMBERS = 2**28  # of all tokens that are held: 1 GiB
HELD_OUT = 10  # every tenth image is not fitted to, if there are enough
ENOUGH = 20
BATCH = {"cpu": 16, "cuda": 128}

Drawn = tuple[Trace, list[int], Patches]  # some images, their numbers, and their patch tokens


@dataclass(eq=False)
class Search:
    """A model, a layer of it, and images; what is computed is stored as it goes."""

    model: Model
    data: Data
    layer: int
    seed: int
    shards: Shards

    @cached_property
    def reader(self) -> Reader:
        return Reader(dict(enumerate(self.data.samples)), self.model.preprocess)

    @cached_property
    def batch(self) -> int:
        most = BATCH["cuda" if self.model.device.type == "cuda" else "cpu"]
        return max(1, min(most, images_at_once(self.model)))

    def groups(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers[start : start + self.batch]) for start in range(0, len(numbers), self.batch)]

    def draw(self, loaded: Loaded) -> Iterator[Drawn]:
        """The patch tokens of images that could be read."""
        for batch in loaded.batches:
            trace = Trace(self.model, torch.as_tensor(batch.images), self.data.beside(batch.numbers))
            patches = patch_features(trace, [self.layer])[self.layer].flatten(1, -2)
            yield trace, batch.numbers, patches if patches.dtype == torch.float64 else patches.float()

    def grid(self) -> tuple[int, ...]:
        """The patches of the layer, down and across."""
        loaded = self.reader[[self.read_numbers[0]]]
        trace = Trace(self.model, torch.as_tensor(loaded.batches[0].images), self.data.beside([self.read_numbers[0]]))
        return tuple(patch_features(trace, [self.layer])[self.layer].shape[1:-1])

    # ----------------------------------------------------------------------------------------------- tokens to fit to

    def tokens(self) -> tuple[Rows, Tensor]:
        """Patch tokens of all images, of many images some of each, and the number of the image of each."""
        numbers = list(range(len(self.data)))
        if len(numbers) > MOST_TOKENS:
            chosen = np.random.default_rng(self.seed).choice(len(numbers), MOST_TOKENS, replace=False)
            numbers = sorted(chosen.tolist())
        parts = list(self.shards.over("tokens", self.reader, self.groups(numbers), partial(self.some, len(numbers))))
        found = joined(parts)
        if not found:
            first = next(iter(self.shards.failed.values()), "there are no images")
            raise InputError(f"{self.data.source}: no image can be read ({first})")
        return found["tokens"], found["image"]

    def some(self, images: int, loaded: Loaded) -> Made:
        """Some tokens of each image, so that those of all images fit into memory."""
        rows, of = [], []
        for _, numbers, patches in self.draw(loaded):
            most = min(MOST_TOKENS, MOST_NUMBERS // patches.shape[-1]) // images
            for number, own in zip(numbers, patches.float().cpu()):
                if most < len(own):
                    chance = torch.Generator().manual_seed(1_000_003 * self.seed + number)
                    own = own[torch.randperm(len(own), generator=chance)[: max(1, most)].sort().values]
                rows.append(own)
                of.append(torch.full((len(own),), number))
        return {"tokens": torch.cat(rows), "image": torch.cat(of)} if rows else {}

    def held_out(self, image: Tensor) -> Tensor:
        """Which tokens are of images that nothing is fitted to."""
        if len(self.data) < ENOUGH:
            return torch.zeros_like(image, dtype=torch.bool)
        return image % HELD_OUT == HELD_OUT - 1

    # --------------------------------------------------------------------------------------- latents in every image

    @property
    def ranks(self) -> str | None:
        """Why classes cannot be ranked; None if they can."""
        model = self.model
        if not model.classifies(model.layout) or model.meaning is Meaning.VALUE:
            return f"{model.name} has no classes, so latents are not ranked by their effect on them"
        if model.form is not Form.VECTOR:
            return f"{model.name} has {model.form.value}, so latents are not ranked by their effect on a class"
        if not model.has_gradients:
            return f"{model.name} passes no gradient on, so no latents are chosen for the classes"
        return None

    def look(self, latents: Latents) -> Made:
        """How much of each latent every image has, where most, and what its class would lose without it."""
        found = joined(
            list(
                self.shards.over(
                    "images", self.reader, self.groups(range(len(self.data))), partial(self.look_at, latents)
                )
            )
        )
        self.read_numbers = found["number"].tolist()
        return found

    def look_at(self, latents: Latents, loaded: Loaded) -> Made:
        parts = []
        for trace, numbers, patches in self.draw(loaded):
            own = latents.to(patches.new_zeros(0))
            a = own.encode(patches)
            most = a.max(1)
            made = {"number": torch.tensor(numbers), "mean": a.mean(1), "most": most.values, "where": most.indices}
            made["share"] = (a > 0).float().mean(1)
            if self.ranks is None:
                best = trace.output.argmax(1).tolist()
                labels = [self.data.samples[number].label for number in numbers]
                classes = [label if isinstance(label, int) else top for label, top in zip(labels, best)]
                by = measured_by(trace, classes)
                made |= {"class": torch.tensor(classes), "best": torch.tensor(best)}
                made["predicted"] = first_order(trace, latents, patches, by)
            parts.append({name: value.detach().cpu() for name, value in made.items()})
        return joined(parts)

    def maps(self, latents: Latents, wanted: dict[int, list[int]]) -> dict[tuple[int, int], np.ndarray]:
        """The activation of latents in the patches [h w] of images, by image and latent; `wanted`: latents by image."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for group in self.groups(sorted(wanted)):
            for batch in self.reader[group].batches:
                trace = Trace(self.model, torch.as_tensor(batch.images), self.data.beside(batch.numbers))
                placed = patch_features(trace, [self.layer])[self.layer].float()
                a = latents.to(placed.new_zeros(0)).encode(placed)
                for i, number in enumerate(batch.numbers):
                    found |= {(number, j): a[i, ..., j].cpu().numpy() for j in wanted[number]}
        return found

    # ------------------------------------------------------------------------------------------------------- effects

    def effects(
        self, latents: Latents, seen: Made, candidates: int, removals: int, most: int
    ) -> tuple[list[Effect], str | None]:
        """What each class loses without its latents, most first, and why no tokens could be removed, if so."""
        why = self.undroppable()
        jobs = [
            (number, [int(seen["number"][row]) for row in rows[:most]], best)
            for number, rows, best in top_latents(seen["predicted"], seen["class"], candidates)
        ]
        work = partial(self.of_class, latents, 0 if why else removals)
        found, order = [], {int(number): row for row, number in enumerate(seen["number"])}
        for (number, _, best), made in zip(jobs, self.shards.each("classes", jobs, work)):
            rows = [order[int(image)] for image in made["image"]]
            for c, latent in enumerate(best):
                predicted = float(seen["predicted"][rows, latent].mean())
                found.append(self.told(number, latent, predicted, made, c))
        found.sort(key=lambda one: (one.number, -one.logit.mean))
        return found, why

    def undroppable(self) -> str | None:
        loaded = self.reader[[self.read_numbers[0]]]
        trace = Trace(self.model, torch.as_tensor(loaded.batches[0].images), self.data.beside([self.read_numbers[0]]))
        try:
            refuse_dropping(trace)
        except Undroppable as error:
            return f"no tokens are removed, because {error.reason}"
        except Unsupported as error:
            return f"no tokens are removed: {error}"
        return None

    def of_class(self, latents: Latents, removals: int, job: tuple[int, list[int], list[int]]) -> Made:
        """The effects of the latents of one class on its images, and of removing the patches of the first of them."""
        number, images, best = job
        effects: list[Tensor] = []
        removed: list[Tensor] = []
        drawn = [one for group in self.groups(images) for one in self.draw(self.reader[group])]
        for trace, _, _ in drawn:
            by = measured_by(trace, [number] * len(trace))
            effects.append(torch.stack([ablate(trace, latents, j, by, self.seed).cpu() for j in best]))
        whole = torch.cat(effects, 2)  # [C 4 n]
        first = whole[:, 0].mean(1).argsort(descending=True).tolist()[:removals]
        for trace, numbers, patches in drawn if removals and whole.shape[2] else ():
            by = measured_by(trace, [number] * len(trace))
            a = latents.to(patches.new_zeros(0)).encode(patches)
            own = [remove(trace, by, a[..., best[c]], numbers, self.seed) for c in first]
            removed.append(torch.stack(own))
        gone = torch.full((len(best), 5, whole.shape[2]), torch.nan, dtype=torch.float64)
        if removed:
            gone[first] = torch.cat(removed, 2)
        numbers = [number for _, some, _ in drawn for number in some]
        return {"effect": whole.double(), "removed": gone, "image": torch.tensor(numbers)}

    def told(self, number: int, latent: int, predicted: float, made: Made, c: int) -> Effect:
        logit, probability, control, _ = made["effect"][c].numpy()
        gone, _, random, _, patches = made["removed"][c].numpy()
        sides = self.spread(logit), self.spread(control), self.spread(logit - control), self.spread(probability)
        effect = Effect(number, self.model.label(number), latent, len(logit), predicted, *sides)
        if not np.isfinite(gone).any():
            return effect
        return replace(
            effect,
            removed=self.spread(gone),
            random=self.spread(random),
            removed_gain=self.spread(gone - random),
            patches=float(np.nanmean(patches)),
        )

    def spread(self, values: np.ndarray) -> Spread:
        return Spread.of(values, self.seed)
