"""Names of latents, for models that embed images and texts in one space.

s(j, w) = cos(mean embedding of the crops around the patches where latent j is largest, embedding of the word w)
a latent is called by the word with the largest s(j, w) − mean_j s(j, w): what fits it better than other latents
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitreous.errors import InputError, TargetError, Unsupported
from vitreous.models.model import Model
from vitreous.trace.concept import embeddings
from vitreous.trace.text import embed_text

PROMPT = "a photo of {}"


def read_words(given: str | Path | Sequence[str]) -> list[str]:
    """Words from a file, one a line, or as they are."""
    if not isinstance(given, str | Path):
        found = [str(word).strip() for word in given]
    else:
        try:
            found = [line.strip() for line in Path(given).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{given}: cannot be read as a list of words ({error})") from None
    found = list(dict.fromkeys(word for word in found if word))
    if len(found) < 2:
        raise InputError(f"{given}: {len(found)} words are too few to choose names from; give at least two")
    return found


def embed_words(model: Model, words: Sequence[str]) -> Float[Tensor, "W D"]:
    """The embedding of each word; raise if the model has no text tower."""
    try:
        found = [embed_text(model, PROMPT.format(word)) for word in words]
    except TargetError as error:
        raise Unsupported(f"latents cannot be named: {error}") from None
    return F.normalize(torch.stack(found).float(), dim=1)


def name_latents(model: Model, words: Sequence[str], crops: Sequence[Sequence[Any]]) -> list[tuple[str, float] | None]:
    """The word of each latent and by how much it fits better than other latents; None: it has no patches."""
    texts = embed_words(model, words)
    means = [torch.cat(list(embeddings(model, list(some)))).float() if some else None for some in crops]
    known = [i for i, mean in enumerate(means) if mean is not None]
    if not known:
        return [None] * len(crops)
    rows = [F.normalize(F.normalize(mean, dim=1).mean(0), dim=0) for mean in means if mean is not None]
    fits = torch.stack(rows) @ texts.mT.to(rows[0])
    fits = fits - fits.mean(0)
    best = fits.max(1)
    found: list[tuple[str, float] | None] = [None] * len(crops)
    for i, word, fit in zip(known, best.indices.tolist(), best.values.tolist()):
        found[i] = words[word], fit
    return found
