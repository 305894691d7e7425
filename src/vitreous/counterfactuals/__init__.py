"""What would change the decision: the smallest set of patches without which a model decides otherwise."""
