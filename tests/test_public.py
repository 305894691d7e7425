"""What `import vitreous` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import vitreous


def test_every_public_name_is_there() -> None:
    for name in vitreous.__all__:
        assert getattr(vitreous, name) is not None
    assert set(vitreous.__all__) <= set(dir(vitreous))
    assert callable(vitreous.explain) and callable(vitreous.load) and callable(vitreous.cass)
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        _ = vitreous.explian


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
