"""Outlier tokens: where they are, what attends to them, which units make them, and a model without them."""
