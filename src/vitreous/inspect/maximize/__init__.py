"""Activation maximisation: the image that a unit of the model answers to most."""
