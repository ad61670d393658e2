"""Hide a Transformer Engine that has no compiled library; imports nothing heavy."""

import importlib.util
import itertools
import os
import sys
import sysconfig

_ENGINE = "transformer_engine"


def hide_bare_engine() -> None:
    """Have Transformer Engine's Python alone, which comes with us, look as if it were not there.

    Without its compiled library it raises RuntimeError where Megatron expects an ImportError
    (common/__init__.py, sanity_checks_for_pypi_installation @v2.20).  Emulation brings it back.
    """
    if _ENGINE in sys.modules:
        return
    spec = importlib.util.find_spec(_ENGINE)
    if spec is None:
        return
    # where it looks itself (common/__init__.py:83, :143 @v2.20)
    own_root = os.path.dirname(os.path.dirname(spec.origin or ""))
    roots = (own_root, sysconfig.get_path("purelib"))
    folders = ("", _ENGINE, f"{_ENGINE}/wheel_lib")
    for root, folder in itertools.product(roots, folders):
        place = os.path.join(root, folder)
        if os.path.isdir(place) and any(map(_is_library, os.listdir(place))):
            return
    sys.modules[_ENGINE] = None  # type: ignore[assignment]


def _is_library(name: str) -> bool:
    """Whether a file is the compiled part of Transformer Engine."""
    return name.startswith(f"lib{_ENGINE}")
