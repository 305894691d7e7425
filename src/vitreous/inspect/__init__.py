"""Look inside a model while it sees an image: heads, layers, queries and keys, who reads whom, patch
features, outlier tokens.

vitreous.inspect.heads(model, "image.jpg").save("heads.png")
"""

from vitreous.inspect.basis import Basis
from vitreous.inspect.channels import Channel
from vitreous.inspect.discard import Discard, discard
from vitreous.inspect.features import Features, features
from vitreous.inspect.flow import Flow, flow
from vitreous.inspect.heads import Heads, heads
from vitreous.inspect.layers import Layers, layers
from vitreous.inspect.outliers.registers import Registers, registers
from vitreous.inspect.qk import QK, qk
from vitreous.inspect.similarity import Similarity, similarity
from vitreous.inspect.view import View

__all__ = [
    "QK",
    "Basis",
    "Channel",
    "Discard",
    "Features",
    "Flow",
    "Heads",
    "Layers",
    "Registers",
    "Similarity",
    "View",
    "discard",
    "features",
    "flow",
    "heads",
    "layers",
    "qk",
    "registers",
    "similarity",
]
