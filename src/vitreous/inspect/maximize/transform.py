"""Random views of an image: a unit that responds in all of them does not respond to single pixels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitreous._support.noise import normal
from vitreous.types import Images

PLACE = 4  # draws: two of the place, one each of size and angle; then a gain and a shift for each channel


def moved(
    images: Images, draws: Float[Tensor, "B draws"], jitter: int, scale: float, rotate: float
) -> Float[Tensor, "B channels Y X"]:
    """Shifted by up to `jitter` pixels, resized by up to 1 + `scale` either way, turned by up to `rotate` degrees.

    What lies beyond the edges is the image mirrored.
    """
    if not (jitter or scale or rotate):
        return images
    y, x = images.shape[-2:]
    shift = (draws[:, :2] * jitter).round() * 2 / torch.tensor([x, y]).to(draws)  # in halves of the sides
    zoom = (draws[:, 2] * math.log1p(scale)).exp()
    angle = draws[:, 3] * math.radians(rotate)
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    theta = torch.stack([cos, -sin * y / x, shift[:, 0], sin * x / y, cos, shift[:, 1]], 1).reshape(-1, 2, 3)
    grid = F.affine_grid(theta.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def recoloured(images: Images, draws: Float[Tensor, "B draws"], colour: float) -> Float[Tensor, "B channels Y X"]:
    """Each channel stretched around grey by up to e^±colour and shifted by up to ± half of that."""
    if not colour:
        return images
    gains, shifts = draws[:, PLACE:].chunk(2, 1)
    gain, shift = ((colour * part)[:, :, None, None].to(images) for part in (gains, shifts / 2))
    return (images - 0.5) * gain.exp() + 0.5 + shift


def drawn(keys: Int[Tensor, "U"], copies: int, step: int, channels: int = 3) -> Float[Tensor, "B draws"]:
    """Numbers evenly between −1 and 1 for each copy of each image: of the key and the step alone."""
    draws = PLACE + 2 * channels
    even: Tensor = 2 * torch.special.ndtr(normal(keys.cpu(), copies * draws, 2 * step + 1)) - 1
    return even.reshape(-1, draws)


def noisy(images: Images, keys: Int[Tensor, "U"], copies: int, step: int, sigma: float) -> Images:
    """With normal noise of this deviation."""
    if not sigma:
        return images
    return images + sigma * normal(keys, copies * images[0].numel(), 2 * step + 2).reshape(images.shape).to(images)
