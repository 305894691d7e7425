"""Why a network cannot be run or read as it is, in one sentence with a remedy that works."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vitreous.errors import one_line
from vitreous.types import Extent

READ = {1: "net(x)[:, None]", 3: "net(x).mean(1)", 4: "net(x).mean((2, 3))", 5: "net(x).mean((2, 3, 4))"}


def why_failed(name: str, error: Exception, size: Extent, usual: Extent | None, missing: Sequence[str]) -> str:
    """Why a forward pass failed. `usual`: the size of its input, if known; `missing`: arguments that it did not get."""
    if usual is not None and len(size) == len(usual) == 3 and size[0] != usual[0]:
        return f"{name} takes videos of {usual[0]} frames and failed on {size[0]} ({one_line(error, 120)})"
    size, usual = size[-2:], None if usual is None else usual[-2:]
    given, said = "×".join(map(str, size)), one_line(error, 120)
    if missing and isinstance(error, TypeError):
        words = ", ".join(f"{one}=…" for one in missing)
        needed = f"{name}.forward needs the argument{'s' if len(missing) > 1 else ''} {' and '.join(missing)}"
        rows = f"inputs={{{', '.join(f'{one!r}: …' for one in missing)}}}, one row for each image"
        return f"{needed}; give it beside the images: {rows}; or Model(net, forward=lambda x: net(x, {words}))"
    if usual is None or size == usual:
        return f"{name} failed on a {given} image ({said}); say how to run it: Model(net, forward=…)"
    remedy = f"load it with img_size=({size[0]}, {size[1]}) if it allows another size"
    return f"{name} takes {'×'.join(map(str, usual))} images and failed on {given} ({said}); {remedy}"


def how_to_read(raw: Tensor) -> str:
    """How to make one vector per image of an output of another shape, as Python."""
    return f"Model(net, forward=lambda x: {READ.get(raw.ndim, 'net(x)[:, …]')}, classifier=True)"
