"""The Libra gradient as an option: autograd with attention weights, the σ of norms and gates held constant.

Under it Σ h·∂y/∂h, with the contributions of biases, is the same for the tokens h of every layer: the score.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from vitreous.capture.attention_backward import Visitor
from vitreous.trace.ruled import follow_ruled, ruled
from vitreous.trace.rules.libra import LIBRA
from vitreous.trace.rules.mode import Table
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace

GradientRules = Annotated[
    Literal["plain", "libra"],
    Field(description="the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant"),
]


def table_of(rules: GradientRules) -> Table | None:
    """The table of this gradient; None: plain."""
    return LIBRA if rules == "libra" else None


def following(trace: Trace, rules: GradientRules) -> Callable[[Target, Visitor], None]:
    """`Trace.follow` with this gradient; makes the forward pass that everything after it uses."""
    if rules == "plain":
        trace.followed(seen=False)
        return trace.follow
    return partial(follow_ruled, trace, ruled(trace, LIBRA))
