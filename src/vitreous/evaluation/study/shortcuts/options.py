"""The options of `study shortcuts`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitreous.errors import OptionError


class Options(BaseModel):
    """The options of the study itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: int | None = Field(None, description="the block whose patch features are clustered; default: the middle one")
    parts: int = Field(16, ge=1, le=256, description="the most relevant patches of an image that are its parts")
    clusters: int = Field(12, ge=1, le=100, description="clusters of a class that are tested, at most")
    classes: tuple[str, ...] | None = Field(None, description="classes to look at, by name or number; default: all")
    images: int = Field(10, ge=4, description="a class with fewer images is left out")
    least: int = Field(3, ge=2, description="a cluster has parts of so many images at least")
    hosts: int = Field(24, ge=4, le=1000, description="images of other classes into which a cue is inserted")
    donors: int = Field(8, ge=1, le=100, description="images that a cue is taken from, those where it weighs most")
    level: float = Field(0.05, gt=0, lt=1, description="the chance of any false alarm in one model")
    margin: float = Field(0.05, ge=0, lt=1, description="how much a cue must add to the probability for an alarm")
    indexed: int = Field(2, ge=0, description="images of a cluster whose A-TSI and M-TSI are computed, with masks")
    seed: int = Field(0, ge=0, description="the seed of all random choices")


def checked(given: Mapping[str, Any]) -> Options:
    try:
        return Options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:1])
        if first["type"] == "extra_forbidden":
            known = ", ".join(Options.model_fields)
            raise OptionError(f"the study shortcuts has no option {name!r}; it has {known}") from None
        raise OptionError(f"shortcuts.{name}={first['input']!r}: {first['msg'].lower()}") from None
