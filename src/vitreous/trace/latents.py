"""A dictionary of latents: directions that the patch tokens of one layer are made of, few at a time.

x ≈ m + Σ_j a_j·d_j        x a patch token that leaves the layer, ‖d_j‖ = 1, a_j ≥ 0; m the mean token, of nmf 0
sae   a = TopK_k(relu(W·x + b))                                        an encoder that was trained with the d_j
nmf   a = argmin_{a ≥ 0} ‖x − m − Σ_j a_j·d_j‖², by projected gradients   none but the d_j
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitreous._support.files import write_whole
from vitreous._support.words import plain
from vitreous.errors import TargetError, nearest, one_line
from vitreous.models.fingerprint import fingerprint
from vitreous.models.model import Model
from vitreous.trace.concept import FOLDER
from vitreous.trace.target import Target
from vitreous.types import Output, Scores

FORMAT = "vitreous latents"
ENDING = ".latents.safetensors"
KINDS = ("sae", "nmf")
STEPS = 100  # of projected gradients

Tokens = Float[Tensor, "*n D"]
Activations = Float[Tensor, "*n K"]


@dataclass(frozen=True, eq=False)
class Latents:
    """The latents of one layer of one model. `latents[17]` is a target, as `"latent:NAME#17"` is."""

    name: str
    layer: int  # the block that the tokens leave, from 0
    kind: str  # sae or nmf
    mean: Tensor  # [D]
    decoder: Tensor  # [K D]: d_j, of unit norm
    encoder: Tensor | None = None  # [K D]: W
    bias: Tensor | None = None  # [K]: b
    k: int = 0  # the most latents of a token; 0: any number
    model: str | None = None  # fingerprint of the model whose tokens they are; None: any of the right width
    names: tuple[str | None, ...] = ()  # what each is called, where that is known
    told: Mapping[str, Any] = field(default_factory=dict)  # how they were found

    def __post_init__(self) -> None:
        trained = self.encoder is not None and self.bias is not None
        if self.kind not in KINDS or (self.kind == "sae") != trained:
            raise TargetError(f"latents are of kind sae, with an encoder, or nmf, without one; not {self.kind!r}")
        if self.decoder.ndim != 2 or self.mean.shape != self.decoder.shape[1:] or not self.decoder.isfinite().all():
            raise TargetError(f"latents are finite numbers [K, D], not {list(self.decoder.shape)}")

    def __len__(self) -> int:
        return len(self.decoder)

    def __repr__(self) -> str:
        return f"Latents({self.name}, {len(self)} of layer {self.layer}, {self.kind})"

    def __getitem__(self, index: int) -> Latent:
        """One latent as a target."""
        return Latent(self, self.checked(index))

    def checked(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise TargetError(f"latent {index} is out of range: {self.name} has latents 0 to {len(self) - 1}")
        return index

    def label(self, index: int) -> str:
        """What a latent is called, with its number."""
        said = self.names[index] if self.names else None
        return f"#{index}" if said is None else f"#{index} {said}"

    # ------------------------------------------------------------------------------------------------------- numbers

    def to(self, like: Tensor) -> Latents:
        """The same on a device and of a type."""
        moved = [None if t is None else t.to(like) for t in (self.mean, self.decoder, self.encoder, self.bias)]
        mean, decoder, encoder, bias = moved
        assert mean is not None and decoder is not None
        return replace(self, mean=mean, decoder=decoder, encoder=encoder, bias=bias)

    def encode(self, tokens: Tokens) -> Activations:
        """How active each latent is in each token."""
        if self.encoder is not None and self.bias is not None:
            return keep_largest(F.relu(F.linear(tokens, self.encoder, self.bias)), self.k)
        return nonnegative(tokens - self.mean, self.decoder)

    def decode(self, activations: Activations) -> Tokens:
        """The tokens that these activations make."""
        found: Tensor = activations @ self.decoder + self.mean
        return found

    @cached_property
    def digest(self) -> str:
        """Tells two dictionaries apart."""
        told = hashlib.blake2b(f"{self.kind} {self.layer} {self.k}".encode(), digest_size=8)
        for part in (self.mean, self.decoder, self.encoder, self.bias):
            told.update(b"" if part is None else part.detach().float().cpu().numpy().tobytes())
        return told.hexdigest()

    # --------------------------------------------------------------------------------------------------------- files

    def check(self, model: Model) -> None:
        """Raise unless these are latents of this model."""
        if self.model is not None and self.model != fingerprint(model):
            said = f"the latents {self.name!r} were found in another model than {model.name}"
            raise TargetError(f"{said}; find them in this one: vitreous concept discover DATA")

    def save(self, path: str | Path | None = None) -> Path:
        """Save everything in one file; default: vitreous-concepts/NAME.latents.safetensors."""
        from safetensors.torch import save

        parts = {"mean": self.mean, "decoder": self.decoder, "encoder": self.encoder, "bias": self.bias}
        numbers = {name: part.detach().cpu().contiguous() for name, part in parts.items() if part is not None}
        told = {"format": FORMAT, "name": self.name, "layer": str(self.layer), "kind": self.kind, "k": str(self.k)}
        told |= {"model": self.model or "", "names": json.dumps(self.names), "told": json.dumps(self.told)}
        file = FOLDER / f"{self.name}{ENDING}" if path is None else Path(path)
        write_whole(file, save(numbers, told))
        return file

    @classmethod
    def load(cls, path: str | Path) -> Latents:
        from safetensors import safe_open

        try:
            with safe_open(str(path), "pt") as stored:
                told = stored.metadata() or {}
                parts = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118, it is no mapping
            if told["format"] != FORMAT:
                raise ValueError(f"its format is {told['format']!r}")
            about = {"k": int(told["k"]), "model": told["model"] or None, "told": json.loads(told["told"])}
            names = tuple(json.loads(told["names"]))
            return cls(told["name"], int(told["layer"]), told["kind"], **parts, **about, names=names)
        except Exception as error:
            said = f"lacks {error}" if isinstance(error, KeyError) else one_line(error, 100)
            raise TargetError(f"{path}: is not a file of latents ({said})") from None

    @classmethod
    def find(cls, name: str, model: Model, *, files: bool = True) -> Latents:
        """Load latents by file (if `files`), or by their name in the folder `vitreous-concepts`."""
        kept = {file.name.removesuffix(ENDING): file for file in sorted(FOLDER.glob(f"*{ENDING}"))}
        places = [Path(name)] if files and Path(name).is_file() else []
        places += [file for stem, file in kept.items() if stem == name]
        places += [file for stem, file in kept.items() if plain(stem) == plain(name)]
        if not places:
            hint = nearest(name, list(kept)) or "; find some: vitreous concept discover DATA --layer L --name NAME"
            raise TargetError(f"there are no latents {name!r} here{hint}")
        found = cls.load(places[0])
        found.check(model)
        return found


@dataclass(frozen=True, eq=False)
class Latent(Target):
    """The mean activation of one latent over the patches."""

    latents: Latents
    index: int
    read: bool = False  # whether it is applied to the outputs of the model that returns latents

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        if not self.read:
            said = f"{self} is read from the patches of layer {self.latents.layer}, not from the output"
            raise TargetError(f"{said}; vitreous.explain, evaluate and the command explain take it")
        return output[:, self.index]

    def check(self, model: Model, outputs: int | None = None) -> None:
        own = getattr(model, "latents", None)  # of the model that returns them
        if own is None:
            self.latents.check(model)
        elif own.digest != self.latents.digest:
            raise TargetError(f"{self}: targets of one image must be of the same latents ({own.name})")

    def __str__(self) -> str:
        return f"latent:{self.latents.name}#{self.index}"

    def title(self, model: Model, output: Output, index: int) -> str:
        said = f"latent {self.latents.name} {self.latents.label(self.index)}"
        return f"{said} {float(output[index, self.index]):.3g}" if self.read else said

    @property
    def identity(self) -> Hashable:
        return str(self), self.latents.digest


def keep_largest(values: Activations, k: int) -> Activations:
    """The k largest of the last axis, and zeros; 0: all."""
    if not 0 < k < values.shape[-1]:
        return values
    chosen = values.detach().topk(k, -1).indices
    others = torch.ones_like(values, dtype=torch.bool).scatter(-1, chosen, False)
    return values.masked_fill(others, 0)


def nonnegative(
    x: Tokens,
    decoder: Float[Tensor, "K D"],
    start: Activations | None = None,
    steps: int = STEPS,
    penalty: Tensor | float = 0.0,
) -> Activations:
    """argmin_{a ≥ 0} ½‖x − a·D‖² + λ·Σa by projected gradients: a ← relu(a − (a·DDᵀ − x·Dᵀ + λ)/L), L = ‖DDᵀ‖.

    No step increases what is minimised.
    """
    gram = decoder @ decoder.mT
    step = 1 / torch.linalg.matrix_norm(gram, 2).clamp_min(1e-12)
    turn, pull = torch.eye(len(gram)).to(gram) - gram * step, (F.linear(x, decoder) - penalty) * step
    a = F.relu(pull) if start is None else start
    for _ in range(steps):
        a = F.relu(F.linear(a, turn) + pull)
    return a
