"""Modified backward rules for an unmodified model: a mode applies a table from torch functions to rules.

mode.py         Rules: recognises functions and the tensors that carry a signal, and notes functions without a rule
gradient.py     rules in gradient form, relevance = x·∂y/∂x: AttnLRP and CP-LRP
relevance.py    rules in relevance form, where the backward pass carries the relevance itself: Chefer's LRP
"""
