"""A method of your own: this file is all there is to write."""

from typing import Annotated

from pydantic import Field

from vitreous import Map, Target, Trace, method


@method(cite="kobayashi2020attention", family="own", attention=True)
def value_norm(
    trace: Trace,
    target: Target,
    *,
    layer: Annotated[int, Field(description="layer from 0, or from the end by -1, -2, …")] = -1,
) -> Map:
    """How much each patch has to offer to whoever looks at it.

    mean over the heads of ‖v⁽ˡ⁾ₕ‖
    """
    values = trace.layer(layer).v  # [B H M d]
    return trace.map(values.norm(dim=-1).mean(1))  # [B M] to [B h w]
