"""Attention weighted by the gradient of the target."""
