"""Runs of images with tokens dropped or patches hidden."""
