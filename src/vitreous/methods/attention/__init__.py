"""Where the model looks: attention read, averaged or followed through the layers."""

import sys

from vitreous.registry import Family

sys.modules[__name__].__class__ = Family  # vitreous.methods.attention(…) is the method of this name
