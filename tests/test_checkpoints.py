"""Checkpoints people have: files, folders and objects of all kinds, opened without running anything that lies in them."""

from __future__ import annotations

from pathlib import Path

import vitreous
from vitreous import Model

# ------------------------------------------------------------------------------------------- what a model says of itself


def test_a_model_says_where_it_came_from(tiny: Model, tmp_path: Path) -> None:
    assert tiny.spec == "embedded/vitreous_tiny"
    assert [file.name for file in tiny.weights] == ["vitreous_tiny.safetensors"]
    assert tiny.notes == ()
    random = vitreous.load("test_vit", weights="random")
    assert (random.spec, random.weights, random.notes) == ("timm/test_vit", (), ())
    mine = Model(random.net)
    assert (mine.spec, mine.weights, mine.notes) == (None, (), ())
