"""The options of the γ rule, shared by several methods."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

GammaLinear = Annotated[
    float, Field(ge=0, description="γ of linear layers: how much more what raises the size of an output counts; 0: not")
]
GammaPatch = Annotated[float, Field(ge=0, description="the same for the patch embedding and other convolutions")]
TRIED = ({"gamma_linear": 0.05}, {"gamma_linear": 0.25})  # by `advise`
