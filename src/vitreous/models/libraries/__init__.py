"""What is particular to a model library, each in its own file."""
