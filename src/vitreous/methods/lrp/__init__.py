"""Layer-wise relevance propagation: from the score back to the tokens or the pixels."""
