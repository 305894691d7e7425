"""A model and a batch of images: what is recorded of their runs, and what is asked of the output."""
