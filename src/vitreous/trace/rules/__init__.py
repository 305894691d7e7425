"""Other backward rules for a model as it is: a table from torch functions to rules, held by a mode.

mode.py         Rules: which function is called, what carries a signal, which functions have no rule
gradient.py     rules in gradient form, relevance = x·∂y/∂x: AttnLRP and CP-LRP
relevance.py    rules in relevance form, where the backward pass carries the relevance itself: Chefer's LRP
"""
