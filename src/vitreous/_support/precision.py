"""Double precision, and what to do on devices that have none."""

from __future__ import annotations

import torch
from torch import Tensor


def widest(device: torch.device) -> torch.dtype:
    """The most precise type of numbers that the device computes with: float32 on Apple's MPS, else float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def doubled(values: Tensor) -> Tensor:
    """The values in float64; those of a device without it are copied to the CPU."""
    return values.double() if widest(values.device) == torch.float64 else values.cpu().double()
