"""Hide a Transformer Engine that has no compiled library; imports nothing heavy."""

import importlib.util
import os
import sys

_ENGINE = "transformer_engine"


def hide_bare_engine() -> None:
    """Have Transformer Engine's Python alone, which comes with us, look as if it were not there.

    Without its compiled library it raises RuntimeError where Megatron expects an ImportError
    (common/__init__.py, sanity_checks_for_pypi_installation @v2.20).  Emulation brings it back.
    """
    if _ENGINE in sys.modules or (spec := importlib.util.find_spec(_ENGINE)) is None:
        return
    folder = os.path.dirname(spec.origin or "")
    places = (os.path.dirname(folder), folder, os.path.join(folder, "wheel_lib"))
    names = (name for place in places if os.path.isdir(place) for name in os.listdir(place))
    if not any(name.startswith(f"lib{_ENGINE}") for name in names):
        sys.modules[_ENGINE] = None  # type: ignore[assignment]
