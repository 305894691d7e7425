"""Activation maximisation: the picture that a unit of the model answers to most."""
