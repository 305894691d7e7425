"""Recorded forward passes of a model on a batch of images, and the targets that are explained."""
