"""Images in, tensors out: files, folders, archives, masks and preprocessing."""
