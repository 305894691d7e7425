"""Hashes of a network's weights: a quick one of samples, and one of every number."""

from __future__ import annotations

import hashlib

import torch

from vitreous.models.model import Model
from vitreous.models.register_tokens import MOVED


def fingerprint(model: Model) -> str:
    """A hash that is equal for equal weights (and inputs that are alike for all), on any device, in any precision."""
    told = hashlib.sha256()
    if model.arguments.shared:
        told.update(str(model.arguments.told).encode())
    samples = []
    for name, tensor in model.module.state_dict().items():
        told.update(f"{name}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().flatten()
        if name.endswith(MOVED):  # all of them: they tell models with test-time registers apart
            told.update(str(flat.tolist()).encode())
        samples += [flat[:8].to(torch.bfloat16), flat[-8:].to(torch.bfloat16)]
    told.update(torch.cat(samples).float().cpu().numpy().tobytes() if samples else b"")
    return told.hexdigest()[:16]


def weights_digest(model: Model) -> str:
    """A digest of every number in every tensor."""
    told = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.module.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):  # the extra state of a module
            told.update(f"{name}{tensor!r}".encode())
            continue
        told.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        told.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return told.hexdigest()
