"""Does the map depend on the class?"""
