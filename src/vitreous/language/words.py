"""Which words of a text make it fit an image, in a model that embeds both in one space (CLIP, SigLIP)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitreous._support.marks import identity_of
from vitreous.capture.shown import shown
from vitreous.errors import InputError, OptionError, Unsupported, nearest
from vitreous.language.ask import one_image
from vitreous.plot.figure import png_bytes
from vitreous.plot.save import save_either
from vitreous.plot.sheet import Sheet
from vitreous.plot.words import words_figure
from vitreous.trace.apply import as_model
from vitreous.trace.run import gradients
from vitreous.trace.text_tower import TextRun, TextTower
from vitreous.trace.views import Views
from vitreous.version import VERSION

METHODS = ("gradient", "gae", "occlusion")


@dataclass(frozen=True, eq=False)
class Words:
    """The relevance of each word of a text for its similarity to an image."""

    words: tuple[str, ...]
    values: Float[Tensor, "words"]
    similarity: float  # the cosine of the embeddings of image and text
    method: str
    model: str
    image: str
    photo: Image.Image
    version: str = VERSION

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def signed(self) -> bool:
        return self.method != "gae"

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, word: int | str) -> float:
        """The relevance of a word, by its number or by itself."""
        return float(self.values[word if isinstance(word, int) else self.words.index(word)])

    @property
    def mark(self) -> dict[str, Any]:
        """What a file of them says of them."""
        told: dict[str, Any] = {"text": self.text, "method": self.method, "model": self.model, "image": self.image}
        told |= {"similarity": self.similarity, "vitreous": self.version}
        return {"identity": identity_of(told), **told}

    def figure(self) -> Sheet:
        """The image, the text in colours, and a bar for each word."""
        return words_figure(self)

    def save(self, path: str | Path) -> Path:
        """Save the figure (.png, .svg, .pdf, …), or the numbers (.npz)."""
        arrays = {"relevance": self.values.numpy(), "words": np.array(self.words)}
        return save_either(path, self.figure, arrays, self.mark)

    def _repr_png_(self) -> bytes:
        return png_bytes(self.figure())


def words(model: Any, image: Any, text: str, method: str = "gradient") -> Words:
    """Find which words of a text make it similar to an image, for CLIP-like models.

    `method`: "gradient" (gradient × embedding of each token, summed over the tokens of a word), "gae" (attention that
    raises the similarity, followed through the text tower) or "occlusion" (how much the similarity falls if the word is
    left out; one run for each word).
    """
    if method not in METHODS:
        near = nearest(method, METHODS)
        raise OptionError(f"there is no method {method!r} for words{near}; use {', '.join(METHODS)}")
    listed = text.split()
    if not listed:
        raise InputError("the text has no words")
    found = as_model(model)
    tower = TextTower(found)
    seen = found.prepare(one_image(image))
    if len(seen) != 1:
        raise InputError(f"give one image, not {len(seen)}")
    with torch.no_grad(), found.still():
        fixed = found.run(seen)[0].detach()
    run = tower.run(text := " ".join(listed))
    with torch.enable_grad():
        score = similarity(run.embedding, fixed)
    whole = float(score.detach())
    if method == "occlusion":
        values = torch.tensor([whole - without(tower, listed, i, fixed) for i in range(len(listed))])
    else:
        tokens = (by_gradient if method == "gradient" else by_attention)(run, score, found.name)
        values = torch.stack([tokens[span.start : span.stop].sum() for span in tower.tokens_of(listed)])
    views = Views.of(one_image(image), found)
    return Words(tuple(listed), values.detach().float().cpu(), whole, method, found.name, views.name(0), views[0])


def similarity(one: Tensor, other: Tensor) -> Tensor:
    return F.cosine_similarity(one.float(), other.float(), 0)


def by_gradient(run: TextRun, score: Tensor, name: str) -> Float[Tensor, "tokens"]:
    """Σ_d e·∂y/∂e of each token."""
    (grad,) = gradients(score.reshape(1), [run.leaf])
    return (run.leaf.detach() * grad)[0].float().sum(-1)


def by_attention(run: TextRun, score: Tensor, name: str) -> Float[Tensor, "tokens"]:
    """R ← R + mean_h (∇A ⊙ A)⁺ · R; ρᵀ(R − I), where ρ is the token that the embedding is read from."""
    count = run.leaf.shape[1]
    layers = [layer for layer in run.layers if layer.shape[0] == 1 and layer.shape[2:] == (count, count)]
    if not layers or len(layers) != len(run.layers):
        raise Unsupported(f"gae needs attention between all tokens of a text, which {name} does not show; try gradient")
    grads = gradients(score.reshape(1), [layer.node for layer in layers])
    size = layers[-1].fold(grads[-1])[0].float().norm(dim=-1).sum(0)
    read = ((size > 0).float() / (size > 0).sum().clamp_min(1))[None]
    gained = torch.zeros_like(read)
    for layer, grad in reversed(list(zip(layers, grads))):
        layer.verify()
        gained = gained + shown(layer, grad).gained(read + gained)
    return gained[0].detach()


def without(tower: TextTower, listed: list[str], index: int, image: Tensor) -> float:
    """The similarity of the text without one word."""
    with torch.no_grad():
        left = " ".join(listed[:index] + listed[index + 1 :])
        return float(similarity(tower.run(left).embedding.detach(), image))
