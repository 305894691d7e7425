"""Maps that know nothing of the model: what every other method must beat."""
