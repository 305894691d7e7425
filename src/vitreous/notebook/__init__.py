"""The page in a notebook: the same modules in a frame, answered by the kernel through widget messages."""
