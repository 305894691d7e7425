"""Class activation maps: feature maps weighted by the gradient of the target."""
