"""Gradients of the target with respect to the pixels."""

import sys

from vitreous.registry import Family

sys.modules[__name__].__class__ = Family  # vitreous.methods.gradient(…) is the method of this name
