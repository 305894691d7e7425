"""Text embeddings, for models that embed images and texts in one space."""

from __future__ import annotations

import torch
from torch import Tensor

from vitreous.errors import TargetError, one_line
from vitreous.models.model import Model
from vitreous.models.output import read_output


def embed_text(model: Model, prompt: str) -> Tensor:
    """The embedding of a text, [D]."""
    embed = model.library.text(model.module, model.known_as)
    if embed is None:
        raise TargetError(f"text:{prompt}: {model.name} has no text tower; load a CLIP model (openclip/…, hf/…)")
    try:
        with torch.no_grad(), model.still():
            return read_output(embed(prompt), model.name)[0]
    except (OSError, ImportError, RuntimeError, ValueError, IndexError) as error:
        raise TargetError(f"text:{prompt}: {model.name} cannot encode it ({one_line(error, 160)})") from error
