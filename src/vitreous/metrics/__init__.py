"""How good a map is: one metric, one file, found by its name."""
