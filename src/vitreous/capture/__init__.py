"""Record the attention of a network during a forward pass, and its gradients; independent of `Model`."""
