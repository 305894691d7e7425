"""Perturbation methods: change the image or its tokens and measure the effect on the score."""
