"""See what a Vision Transformer looks at, and why.

import vitreous
model = vitreous.load()                                  # or any timm, Hugging Face, torchvision, open_clip model
vitreous.explain(model, "photo.jpg", "rollout").save("rollout.png")
"""

from __future__ import annotations

import lazy_loader

# The public names are listed once, in __init__.pyi, for Python and type checkers; each is imported at its first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
