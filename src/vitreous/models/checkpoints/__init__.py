"""Files and folders of weights: reading them as data, choosing among their contents, and finding their architecture."""
