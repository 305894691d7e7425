"""What `import vitreous` offers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vitreous


def test_every_public_name_is_there() -> None:
    for name in vitreous.__all__:
        assert getattr(vitreous, name) is not None
    assert set(vitreous.__all__) <= set(dir(vitreous))
    assert callable(vitreous.explain) and callable(vitreous.load) and callable(vitreous.cass)
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        _ = vitreous.explian


def checked_imports() -> dict[str, str]:
    """What type checkers are told under TYPE_CHECKING: each name, and the module it comes from."""
    tree = ast.parse(Path(vitreous.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    found = {}
    for line in block.body:
        assert isinstance(line, ast.ImportFrom) and line.module is not None, ast.unparse(line)
        (name,) = line.names
        assert name.asname == name.name, f"{ast.unparse(line)}: only `{name.name} as {name.name}` is an export"
        found[name.name] = line.module
    assert len(found) == len(block.body), "a name is imported twice"
    return found


def test_type_checkers_see_what_is_exported() -> None:
    homes = {name: f"vitreous.{module}" for name, module in vitreous.HOMES.items()}
    assert checked_imports() == {**homes, **dict.fromkeys(vitreous.PARTS, "vitreous")}
    assert sorted(vitreous.__all__) == sorted(["__version__", *checked_imports()])


@pytest.mark.process
def test_importing_is_quick() -> None:
    """No torch before something needs it."""
    code = "import sys, vitreous; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_exceptions_have_one_root() -> None:
    from vitreous import errors

    for name in (
        "InputError",
        "ModelError",
        "WeightsError",
        "Unsupported",
        "TargetError",
        "OptionError",
        "CaptureError",
    ):
        assert issubclass(getattr(errors, name), vitreous.VitreousError)
        assert name in (errors.__doc__ or "")
