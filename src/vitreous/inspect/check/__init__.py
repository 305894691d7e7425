"""What the layout run found in a model, what was verified, and which methods work on it."""
