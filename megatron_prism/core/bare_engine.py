"""Hide a Transformer Engine that has no compiled library; imports nothing heavy."""

import importlib.util
import os
import sys
import sysconfig

_ENGINE = "transformer_engine"


def hide_bare_engine() -> None:
    """Have Transformer Engine's Python alone, which comes with us, look as if it were not there.

    Without its compiled library it raises RuntimeError where Megatron expects an ImportError
    (common/__init__.py, sanity_checks_for_pypi_installation @v2.20).  Emulation brings it back.
    """
    if _ENGINE in sys.modules or (spec := importlib.util.find_spec(_ENGINE)) is None:
        return
    # where it looks itself (common/__init__.py:83, :143 @v2.20)
    roots = (os.path.dirname(os.path.dirname(spec.origin or "")), sysconfig.get_path("purelib"))
    places = (os.path.join(r, p) for r in roots for p in ("", _ENGINE, f"{_ENGINE}/wheel_lib"))
    names = (name for place in places if os.path.isdir(place) for name in os.listdir(place))
    if not any(name.startswith(f"lib{_ENGINE}") for name in names):
        sys.modules[_ENGINE] = None  # type: ignore[assignment]
