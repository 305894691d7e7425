"""The parameters of the ascent, and the image in 0…1 that they define.

pixel      I = σ(z)
fourier    I = σ(C · F⁻¹(z ⊙ f^−decay))        f: cycles per pixel, C: the axes in which colours vary alone
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitreous._support.noise import normal
from vitreous.types import Images

# Light, red against blue, green against magenta: the principal axes of the colours of photographs (as logits), and
# how widely they spread along each, measured over 500 photographs of as many classes.
AXES = ((1, 1, 1), (1, 0, -1), (1, -2, 1))
SPREAD = (2.6, 0.69, 0.36)
START = 0.1  # how far from grey it begins: the deviation of the logits


class Canvas:
    """One image for each key; `z` are the parameters that an optimiser changes."""

    def __init__(
        self,
        keys: Int[Tensor, "U"],
        size: tuple[int, int],
        fourier: bool,
        decay: float,
        like: Tensor,
        channels: int = 3,
    ) -> None:
        shape = (channels, size[0], size[1] // 2 + 1, 2) if fourier else (channels, *size)
        count = torch.Size(shape).numel()
        start = torch.cat([normal(key[None], count) for key in keys.cpu()])  # the same on every device
        self.z = (START * start.reshape(-1, *shape)).to(like).requires_grad_()
        self.paint = fourier_paint(size, decay, like, channels) if fourier else torch.sigmoid

    def image(self) -> Images:
        """The images, differentiable in z."""
        return self.paint(self.z)


def fourier_paint(size: tuple[int, int], decay: float, like: Tensor, channels: int = 3) -> Callable[[Tensor], Tensor]:
    """From a spectrum [U C Y X/2+1 2] to an image; a spectrum of unit normals gives logits of unit deviation."""
    weights = falling(size, decay).to(like)[..., None]  # [Y X/2+1 1]
    colours = (colour_axes() if channels == 3 else torch.eye(channels)).to(like)  # others vary alone

    def paint(z: Tensor) -> Tensor:
        planes = torch.fft.irfft2(torch.view_as_complex(z * weights), s=size, norm="ortho")  # [U C Y X]
        return torch.einsum("rc,ucyx->uryx", colours, planes).sigmoid()

    return paint


def falling(size: tuple[int, int], decay: float) -> Float[Tensor, "Y half"]:
    """f^−decay, without the mean at its infinity, scaled to keep the deviation of what it is applied to."""
    across, down = torch.fft.rfftfreq(size[1]), torch.fft.fftfreq(size[0])
    f = torch.hypot(down[:, None], across[None]).clamp_min(1 / max(size))
    weights: Tensor = f**-decay
    return weights / (2 * weights.square().mean()).sqrt()


def colour_axes() -> Float[Tensor, "3 3"]:
    """Columns: the axes, each as long as colours spread along it; the rows have unit length on average."""
    columns = torch.tensor(AXES, dtype=torch.float32).T
    axes: Tensor = columns / columns.square().sum(0).sqrt() * torch.tensor(SPREAD)
    return axes / axes.square().sum(1).mean().sqrt()
