"""Modified backward rules for an unmodified model: a mode applies a table from torch functions to rules.

mode.py         Rules: recognises functions and the tensors that carry a signal, and notes functions without a rule
gradient.py     rules in gradient form, relevance = x·∂y/∂x: AttnLRP and CP-LRP
gamma.py        these with the γ rule in linear layers and convolutions
residual.py     these with another rule for residual additions: ResLRP
origin.py       which layers a tensor comes from, by which residual additions are recognised
relevance.py    rules in relevance form, where the backward pass carries the relevance itself: Chefer's LRP
"""
