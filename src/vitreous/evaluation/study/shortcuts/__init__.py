"""`study shortcuts`: spurious cues of a data set, found, removed, inserted and ranked."""
