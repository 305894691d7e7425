"""Does the map lie on the object?"""
