"""Two checkpoints compared: the same answers, for the same reasons?"""
