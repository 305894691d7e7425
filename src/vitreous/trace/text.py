"""Texts for models that embed images and texts in one space."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitreous.errors import TargetError, one_line
from vitreous.models.model import Model, read_output


def embed_text(model: Model, prompt: str) -> Tensor:
    """The vector of a text, [D]."""
    net: Any = model.module
    try:
        with torch.no_grad(), model.still():
            if hasattr(net, "encode_text"):
                return open_clip_text(model, prompt)
            if hasattr(net, "get_text_features"):
                return hf_text(model, prompt)
    except (OSError, ImportError, RuntimeError, ValueError, IndexError) as error:
        raise TargetError(f"text:{prompt}: {model.name} cannot read it ({one_line(error, 160)})") from error
    raise TargetError(f"text:{prompt}: {model.name} has no text tower; load a CLIP model (openclip/…, hf/…)")


def open_clip_text(model: Model, prompt: str) -> Tensor:
    import open_clip

    known = model.name if model.name in open_clip.list_models() else "ViT-B-32"
    tokens = open_clip.get_tokenizer(known)([prompt], context_length=getattr(model.module, "context_length", None))
    vector: Tensor = model.module.encode_text(tokens.to(model.device))[0]  # type: ignore[operator]
    return vector


def hf_text(model: Model, prompt: str) -> Tensor:
    import transformers

    net: Any = model.module
    tokenizer = transformers.AutoTokenizer.from_pretrained(net.config._name_or_path)
    length = "max_length" if "siglip" in net.config.model_type else True
    tokens = tokenizer([prompt], return_tensors="pt", padding=length, truncation=True).to(model.device)
    return read_output(net.get_text_features(**tokens), model.name)[0]
