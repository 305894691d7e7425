"""Configure methods by name: `vitreous.methods.gae(start_layer=2)` is accepted wherever a method's name is.

The options are validated at once; the result is a `ConfiguredMethod`. Methods of other packages are included.

One method is one file, in the folder of its family. Editors and type checkers read the names and their options in
`__init__.pyi`, which `make stub` writes from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable

from vitreous.declaration import ConfiguredMethod
from vitreous.registry import METHODS


def __getattr__(name: str) -> Callable[..., ConfiguredMethod]:
    if name.startswith("_") or name not in METHODS:
        raise AttributeError(f"module 'vitreous.methods' has no attribute {name!r}; see: vitreous methods")
    return METHODS[name].configured


def __dir__() -> list[str]:
    return sorted(METHODS)
