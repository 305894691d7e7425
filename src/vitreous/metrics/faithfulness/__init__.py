"""Does the score change when what matters is taken away?"""
