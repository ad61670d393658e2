"""Renderers: a result is written by the class that registered itself for the result's type.

Results are plain data and know no renderer.  ``renderer_of`` finds the renderer's class, and first
imports where it stands: the module that the result's feature names as ``renderers``, or the package
``megatron_prism.report`` for results of core.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from megatron_prism.core import feature

_FEATURES = "megatron_prism.features."
_REPORT = "megatron_prism.report"


class Renderer:
    """Base of renderers; a subclass has those forms that its results can be written in.

    text  : for a terminal, ends in a newline
    page  : one self-contained page for any browser
    trace : Chrome trace for ui.perfetto.dev
    """

    text: ClassVar[Callable[..., str]]
    page: ClassVar[Callable[..., str]]
    trace: ClassVar[Callable[..., str]]


RendererClass = TypeVar("RendererClass", bound=type[Renderer])
_REGISTERED: dict[type, type[Renderer]] = {}


def renders(*result_types: type) -> Callable[[RendererClass], RendererClass]:
    """Register the decorated class as the renderer of results of these types."""

    def register(renderer: RendererClass) -> RendererClass:
        for result_type in result_types:
            _REGISTERED[result_type] = renderer
        return renderer

    return register


def renderer_of(result: object) -> Any:
    """Return the class that writes ``result``.

    Raises:
        LookupError: no class is registered for the type of the result.
    """
    result_type = type(result)
    if _registered(result_type) is None:
        _import_renderers(result_type)
    renderer = _registered(result_type)
    if renderer is None:
        raise LookupError(f"no renderer is registered for {result_type.__qualname__}")
    return renderer


def _registered(result_type: type) -> type[Renderer] | None:
    """Return the renderer of a type or of the nearest of its base classes."""
    for base in result_type.__mro__:
        if base in _REGISTERED:
            return _REGISTERED[base]
    return None


def _import_renderers(result_type: type) -> None:
    """Import the modules that register renderers beside the module of ``result_type``."""
    home = result_type.__module__
    if home.startswith(_FEATURES):
        feature_name = home.removeprefix(_FEATURES).partition(".")[0]
        module_name = feature.installed()[feature_name].renderers
        import_module(f"{_FEATURES}{feature_name}.{module_name}")
        return
    for module_name in import_module(_REPORT).RENDERERS:
        import_module(f"{_REPORT}.{module_name}")


class Rendered:
    """Mixin of results: the forms that the registered renderer writes.

    A result has those forms that its renderer has.
    """

    def to_text(self) -> str:
        """Write the result for a terminal; the text ends in a newline."""
        text: str = renderer_of(self).text(self)
        return text

    def to_html(self) -> str:
        """Write the result as one self-contained page for any browser."""
        page: str = renderer_of(self).page(self)
        return page

    def to_chrome_trace(self) -> str:
        """Write the result as a Chrome trace, for ui.perfetto.dev."""
        trace: str = renderer_of(self).trace(self)
        return trace
