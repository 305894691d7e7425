"""Ablation: what a model loses without an attention head, an MLP or a layer."""
