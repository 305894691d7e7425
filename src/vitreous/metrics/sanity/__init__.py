"""Does the map depend on the model, and does it add up?"""
