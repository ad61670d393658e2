"""Hand a result to the renderer that writes it down.

Results stand below the renderers of ``report`` and must not import them, so a result names its
renderer as ``module:function``, which is looked up when the result is written.
"""

from __future__ import annotations

from importlib import import_module
from typing import TypeVar

__all__ = ["rendered"]

T = TypeVar("T")


def rendered(renderer: str, result: object, kind: type[T]) -> T:
    """Return ``result`` as ``renderer`` (``report.html:render``) writes it, a value of ``kind``."""
    module, _, function = renderer.partition(":")
    found = getattr(import_module(f"megatron_prism.{module}"), function)(result)
    assert isinstance(found, kind)
    return found
