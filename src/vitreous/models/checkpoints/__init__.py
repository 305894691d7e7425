"""Files and folders of weights: reading them as data, and choosing among their contents."""
