"""How much of the map must be looked at?"""
