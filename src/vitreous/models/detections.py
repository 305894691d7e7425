"""What a detector returns: for each of its queries the scores of all classes and one box, side by side [B Q C+4].

A box is its centre, width and height as shares of the model's input. It is no part of a score, so it has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCORES = ("logits", "pred_logits")
BOXES = "pred_boxes"


def read_detections(raw: Mapping[str, Any]) -> Tensor | None:
    """Scores and boxes of every query, [B Q C+4], if they are among the named outputs of a network."""
    scores, boxes = next((raw[key] for key in SCORES if raw.get(key) is not None), None), raw.get(BOXES)
    if not isinstance(scores, Tensor) or not isinstance(boxes, Tensor) or scores.ndim != 3:
        return None
    if boxes.shape != (*scores.shape[:2], 4):
        return None
    return torch.cat([scores, boxes.detach().to(scores.dtype)], -1)
