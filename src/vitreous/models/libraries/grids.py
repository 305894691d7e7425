"""The input size that weights tell by their position grid, and the sizes that patches fill."""

from __future__ import annotations

from itertools import takewhile
from math import isqrt
from typing import NamedTuple

from torch import Tensor, nn

from vitreous.errors import ModelError, WeightsError, one_of
from vitreous.models.checkpoint import State

Size = tuple[int, int]
RELATIVE = ("relative_position_bias_table",)
NAMES = ("pos_embed", "position_embeddings", "pos_embedding", "positional_embedding", "position_embedding.weight")
MOST_EXTRA = 16  # tokens with a position besides the patches


class Grid(NamedTuple):
    """The position grid of a network."""

    name: str  # of the parameter
    patch: Size
    size: Size  # of the images it was built for
    extra: int  # positions of other tokens
    relative: bool  # it is a table of all distances between two cells

    @property
    def cells(self) -> Size:
        return self.size[0] // self.patch[0], self.size[1] // self.patch[1]

    @property
    def length(self) -> int:
        """How many rows the parameter has for patches."""
        return rows(self.cells, self.relative)

    def side(self, count: int) -> int | None:
        """The side of a square grid with so many rows."""
        root = isqrt(count)
        whole = root * root == count and (root % 2 == 1 or not self.relative)
        return None if not whole else (root + 1) // 2 if self.relative else root


def rows(cells: Size, relative: bool) -> int:
    return (2 * cells[0] - 1) * (2 * cells[1] - 1) if relative else cells[0] * cells[1]


def patch_of(net: nn.Module) -> tuple[str, Size] | None:
    """Name and patch size of the first convolution, if it cuts the image into patches."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            kernel, stride = module.kernel_size, module.stride
            cuts = kernel == stride and stride[0] >= 4 and not any(side for side in module.padding if side != "valid")
            return (name, (stride[0], stride[1])) if cuts else None
    return None


def places(tensor: Tensor) -> int:
    """How many tokens a position embedding [1, N, D] or [N, D] is for; 0 if it has another form."""
    flat = tensor[0] if tensor.ndim == 3 and len(tensor) == 1 else tensor
    return len(flat) if flat.ndim == 2 else 0


def grid_of(net: nn.Module, size: Size | None) -> Grid | None:
    """The position grid of a network that was built for images of this size; None if it has none of a known form."""
    cut = patch_of(net)
    if cut is None or size is None:
        return None
    conv, patch = cut
    cells = size[0] // patch[0], size[1] // patch[1]
    found = []
    for relative, endings in enumerate((NAMES, RELATIVE)):
        counts = {name: places(value) for name, value in net.named_parameters() if name.endswith(endings)}
        left = [(name, count - rows(cells, bool(relative))) for name, count in counts.items()]
        found += [Grid(name, patch, size, extra, bool(relative)) for name, extra in left if 0 <= extra <= MOST_EXTRA]
    return max(found, key=lambda one: (not one.relative, shared(one.name, conv)), default=None)


def shared(name: str, other: str) -> int:
    """How many leading parts two names share."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(name.split("."), other.split(".")))))


def size_in(state: State, grid: Grid | None, path: str, given: Size | None) -> Size | None:
    """The image size that a state was trained for, if its position grid has another number of places."""
    embedding = None if grid is None else state.get(grid.name)
    count = 0 if embedding is None or grid is None else places(embedding) - grid.extra
    if grid is None or count <= 0 or count == grid.length:
        return None
    side = grid.side(count)
    if side is not None:
        return side * grid.patch[0], side * grid.patch[1]
    tried = f"{shown(given)} does not fit" if given else "its shape is not known"
    said = f"its position grid has {count} places, which is no square, and {tried}"
    raise WeightsError(f"{path}: {said}; give the size it was trained with, img_size=(H, W) (--img-size HxW)")


def shown(size: Size) -> str:
    return f"{size[0]}×{size[1]}"


def own_size_note(path: str, told: Size, usual: Size, patch: Size) -> str:
    cells = told[0] // patch[0], told[1] // patch[1]
    said = f"its position grid is {shown(cells)}, so the model takes images of {shown(told)}, not {shown(usual)}"
    return f"{path}: {said}; another size is chosen with img_size (--img-size)"


def resampled_note(path: str, told: Size, size: Size, patch: Size) -> str:
    before, after = ((one[0] // patch[0], one[1] // patch[1]) for one in (told, size))
    return f"{path}: its position grid of {shown(before)} is resampled to {shown(after)} for images of {shown(size)}"


def refuse_odd_size(net: nn.Module, size: Size | None, name: str, usual: Size | None = None) -> None:
    """Raise if patches do not fill an image of the size that the user asks for."""
    cut = patch_of(net)
    stated = stated_patch(net)
    cells = stated if cut is None else cut[1]
    if cells is None or size is None or size == usual or pads(net) or (stated is None and cells[0] < 8):
        return
    if any(side % patch for side, patch in zip(size, cells)):
        fits = [tuple(max(side // patch + more, 1) * patch for side, patch in zip(size, cells)) for more in (0, 1)]
        each = [str(one[0]) if one[0] == one[1] and size[0] == size[1] else shown((one[0], one[1])) for one in fits]
        patch = cells[0] if cells[0] == cells[1] else shown(cells)
        said = f"{name}: img_size {size[0] if size[0] == size[1] else shown(size)} is not a multiple of its patches of"
        raise ModelError(f"{said} {patch} pixels; try {one_of(dict.fromkeys(each))}")


def stated_patch(net: nn.Module) -> Size | None:
    """The patch size that the first layer states."""
    size = getattr(getattr(net, "patch_embed", None), "patch_size", None)
    pair = (size, size) if isinstance(size, int) else size
    return (int(pair[0]), int(pair[1])) if isinstance(pair, tuple | list) and len(pair) == 2 else None


def pads(net: nn.Module) -> bool:
    """Whether the network pads images to whole patches."""
    return any(getattr(module, "dynamic_img_pad", False) or hasattr(module, "maybe_pad") for module in net.modules())
