"""Relevance, propagated from the score back to the tokens or the pixels."""
