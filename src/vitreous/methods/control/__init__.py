"""Controls: maps that do not depend on the model, which every other method must beat."""
