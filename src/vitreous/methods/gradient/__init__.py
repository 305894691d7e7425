"""Gradients of the target with respect to the pixels."""
