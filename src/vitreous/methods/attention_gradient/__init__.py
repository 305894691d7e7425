"""Attention weighted by what the target wants of it."""
