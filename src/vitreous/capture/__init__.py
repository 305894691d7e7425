"""One run of a network, seen: attention as it is computed, and its gradients. Nothing here knows a Model."""
