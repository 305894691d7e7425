"""Does the map stay when the image hardly changes?"""
