"""Class activation maps: feature maps weighted by what the target wants of them."""
