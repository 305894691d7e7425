"""What the loaders of all libraries share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from vitreous.errors import ModelError, one_line

RANDOM = "random"  # in place of a file of weights: untrained
SEE = "; see: vitreous models"


@contextmanager
def hush() -> Iterator[None]:
    """Silence log lines: whatever matters is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def not_built(name: str, error: Exception, weights: str | None) -> ModelError:
    """Why a network could not be made: most often, its published weights could not be fetched."""
    if weights is not None:
        return ModelError(f"{name}: {one_line(error)}")
    return ModelError(
        f"the weights of {name} could not be downloaded ({one_line(error, 120)}); "
        "give a file with weights=…, or weights='random' for untrained ones"
    )


def fixed_size(name: str, error: Exception) -> ModelError:
    return ModelError(f"{name} does not take another img_size ({one_line(error, 120)})")
