"""A linear probe: classes of one's own, read off the embedding of a network that stays as it is.

    y = W·z + b        z: what the network's own classifier reads, or its output where it has none
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.concept import fingerprint
from vitreous.errors import ModelError, Unsupported, WeightsError, one_line
from vitreous.model import _LOCKS, Model
from vitreous.types import Images, Output
from vitreous.version import VERSION

MAKE = "make one: vitreous probe train"
