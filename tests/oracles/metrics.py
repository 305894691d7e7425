"""The metrics of faithfulness a second time: one image, one variant, one pixel at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

Run = Callable[[Tensor], float]  # an image [3 Y X] to its score


def ranking(values: Sequence[float], most: bool = True) -> list[int]:
    """Patches by relevance; of equals, the first."""
    return sorted(range(len(values)), key=lambda i: (-values[i] if most else values[i], i))


def covered(image: Tensor, cover: Tensor, patches: Sequence[int], grid: tuple[int, int]) -> Tensor:
    """The image with these patches taken from the cover."""
    image = image.clone()
    y, x = image.shape[1] // grid[0], image.shape[2] // grid[1]
    for patch in patches:
        top, left = patch // grid[1] * y, patch % grid[1] * x
        image[:, top : top + y, left : left + x] = cover[:, top : top + y, left : left + x]
    return image


def mean_cover(image: Tensor) -> Tensor:
    cover = torch.empty_like(image)
    for channel in range(3):
        cover[channel] = image[channel].sum() / image[channel].numel()
    return cover


def trapezoid(x: Sequence[float], y: Sequence[float]) -> float:
    parts = [(x[i + 1] - x[i]) * (y[i + 1] + y[i]) / 2 for i in range(len(x) - 1)]
    return sum(parts) / (x[-1] - x[0])


def deletion(run: Run, image: Tensor, cover: Tensor, values: Sequence[float], grid: tuple[int, int]) -> list[float]:
    """The score while patches are hidden one after the other."""
    order = ranking(values)
    return [run(covered(image, cover, order[:k], grid)) for k in range(len(order) + 1)]


def insertion(run: Run, image: Tensor, cover: Tensor, values: Sequence[float], grid: tuple[int, int]) -> list[float]:
    order = ranking(values)
    return [run(covered(cover, image, order[:k], grid)) for k in range(len(order) + 1)]


def srg(run: Run, image: Tensor, cover: Tensor, values: Sequence[float], grid: tuple[int, int], steps: int) -> float:
    """By pixels."""
    ways = []
    for most in (False, True):
        order = ranking(values, most)
        counts = [int(len(order) * step / steps + 1e-9) for step in range(steps)]
        ways.append([run(covered(image, cover, order[:count], grid)) for count in counts])
    return float(np.mean(np.array(ways[0]) - np.array(ways[1])))


def saco(
    run: Run, image: Tensor, cover: Tensor, values: Sequence[float], grid: tuple[int, int], groups: int
) -> tuple[float, list[float]]:
    order, whole = ranking(values), run(image)
    ends = [len(order) * k // groups for k in range(groups + 1)]
    members = [order[ends[k] : ends[k + 1]] for k in range(groups)]
    s = [sum(float(values[i]) for i in group) / len(group) for group in members]
    d = [whole - run(covered(image, cover, group, grid)) for group in members]
    signed = total = 0.0
    for i in range(groups):
        for j in range(i + 1, groups):
            weight = s[i] - s[j] if d[i] >= d[j] else -(s[i] - s[j])
            signed += weight
            total += abs(weight)
    return signed / total, d


def sensitivity(
    run: Run,
    image: Tensor,
    cover: Tensor,
    values: Sequence[float],
    grid: tuple[int, int],
    sets: Sequence[Sequence[int]],
) -> float:
    """Pearson's r over these sets of patches."""
    whole = run(image)
    sums = [sum(float(values[i]) for i in one) for one in sets]
    drops = [whole - run(covered(image, cover, one, grid)) for one in sets]
    return float(np.corrcoef(sums, drops)[0, 1])


# ---------------------------------------------------------------------------------------------------------------- road


def impute(image: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """[3 Y X]: every pixel that is gone is the weighted mean of the neighbours that it has; a dense system."""
    pixels = [tuple(place) for place in np.argwhere(gone)]
    number = {place: i for i, place in enumerate(pixels)}
    system, right = np.zeros((len(pixels), len(pixels))), np.zeros((len(pixels), len(image)))
    for i, (y, x) in enumerate(pixels):
        for down in (-1, 0, 1):
            for across in (-1, 0, 1):
                place = (y + down, x + across)
                inside = 0 <= place[0] < gone.shape[0] and 0 <= place[1] < gone.shape[1]
                if not inside or (down, across) == (0, 0):
                    continue
                weight = 1 / 6 if 0 in (down, across) else 1 / 12
                system[i, i] += weight
                if place in number:
                    system[i, number[place]] -= weight
                else:
                    right[i] += weight * image[:, place[0], place[1]]
    filled = image.astype(float)
    filled[:, gone] = np.linalg.solve(system, right).T
    return filled


def road(run: Run, image: Tensor, values: Sequence[float], grid: tuple[int, int], counts: Sequence[int]) -> list[float]:
    """Without noise."""
    ways = []
    for most in (False, True):
        order, scores = ranking(values, most), []
        for count in counts:
            marked = covered(torch.zeros_like(image), torch.ones_like(image), order[:count], grid)[0] > 0
            scores.append(run(torch.from_numpy(impute(image.double().numpy(), marked.numpy())).float()))
        ways.append(scores)
    return [(least - most) / 2 for least, most in zip(*ways)]


# ---------------------------------------------------------------------------------------------------- tokens taken out


@contextmanager
def keeping(net: nn.Module, block: str, tokens: Sequence[int]) -> Iterator[None]:
    """Within this context the network's blocks see only these tokens; relative positions stay."""

    def cut(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][:, list(tokens)], *args[1:])

    handle = net.get_submodule(block).register_forward_pre_hook(cut)
    relative = [part for part in net.modules() if hasattr(part, "_get_rel_pos_bias")]
    for part in relative:
        bias = part._get_rel_pos_bias()[..., list(tokens), :][..., list(tokens)]
        part._get_rel_pos_bias = lambda bias=bias: bias
    try:
        yield
    finally:
        handle.remove()
        for part in relative:
            del part._get_rel_pos_bias


def token_deletion(
    run: Run,
    net: nn.Module,
    block: str,
    image: Tensor,
    values: Sequence[float],
    prefix: int,
    steps: int,
    most: bool = True,
) -> list[float]:
    order, curve = ranking(values, most), []
    for step in range(steps):
        gone = order[: len(order) * step // steps]
        tokens = [*range(prefix), *(prefix + i for i in range(len(order)) if i not in gone)]
        with keeping(net, block, tokens):
            curve.append(run(image))
    return curve
