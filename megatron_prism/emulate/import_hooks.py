"""Change a Megatron module right after its import, before anybody copies names out of it.

A finder at the head of ``sys.meta_path`` runs callbacks right after a module has executed and
before its importer goes on, so a later ``from x import f`` copies the replaced ``f``.  Callbacks
for modules that are already imported run at once; such modules may have leaked copies, which
``launch`` avoids by installing before the first ``import megatron``.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then the callbacks."""

    def __init__(self, loader: Any, callbacks: Sequence[Callback]) -> None:
        self._loader = loader
        self._callbacks = callbacks

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for callback in self._callbacks:
            callback(module)

    def __getattr__(self, name: str) -> Any:  # get_source, is_package, … for inspect and pickling
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self.triggers: dict[str, Callable[[], None]] = {}

    def ensure(self) -> None:
        """Be at the head of ``sys.meta_path``."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # once a package, before any of its modules
        trigger = self.triggers.pop(fullname.partition(".")[0], None)
        if trigger is not None:
            trigger()
        callbacks = self.callbacks.get(fullname)
        if callbacks is None:
            return None
        for finder in sys.meta_path:  # editable installs have finders of their own
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            if (spec := find(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, callbacks)
                return spec
        return None


_finder = _Finder()


def after_import(module: str, callback: Callback) -> None:
    """Call ``callback(module)`` once ``module`` has executed (now, if it already has)."""
    if module in sys.modules:
        callback(sys.modules[module])
        return
    _finder.ensure()
    _finder.callbacks.setdefault(module, []).append(callback)


def forget(module: str, callback: Callback) -> None:
    """Do not call ``callback`` any more when ``module`` is imported."""
    waiting = _finder.callbacks.get(module, [])
    if callback in waiting:
        waiting.remove(callback)


def before_first_import(package: str, trigger: Callable[[], None]) -> None:
    """Call ``trigger()`` once, when the first module of top-level ``package`` is looked for."""
    _finder.ensure()
    _finder.triggers[package] = trigger


def before_first_call(module: str, name: str, trigger: Callable[[], None]) -> None:
    """Call ``trigger()`` when the imported ``module``'s function ``name`` is called first; what
    ``trigger`` has put in its place then gets the call.
    """
    owner = sys.modules.get(module)
    if owner is None or not hasattr(owner, name):  # torch without torch.distributed
        return
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(owner, name) is call:
            setattr(owner, name, original)
            trigger()
        return getattr(owner, name)(*args, **kwargs)

    call.__prism_original__ = original  # type: ignore[attr-defined]
    setattr(owner, name, call)


def clear() -> None:
    """Forget everything that has not run yet."""
    _finder.callbacks.clear()
    _finder.triggers.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
