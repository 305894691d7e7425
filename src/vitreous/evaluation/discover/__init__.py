"""Concepts found in the patch tokens of a layer: fitting, ranking, naming and showing them."""
