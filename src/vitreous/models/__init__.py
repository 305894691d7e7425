"""A network with what it takes to feed it images and to name its outputs."""
