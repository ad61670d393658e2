"""Packages that do not install, or do not import, without a GPU: their names, which refuse calls.

An import that its author guards (``try:``, ``suppress``) fails as it would without the package:
whoever wrote it has another way.  Any other import of a package in ``PACKAGES`` gets a module, and
``from … import name`` a class whose first use is refused by its name.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges

PACKAGES = {  # package -> why it is seldom there without a GPU
    "causal_conv1d": "compiled with nvcc",
    "fla": "imports triton's driver",
    "flash_attn": "compiled with nvcc",
    "mamba_ssm": "compiled with nvcc",
    "nvidia_resiliency_ext": "the releases that are asked for are not on PyPI",
}


class _Refused:
    """What a stand-in module has under any name."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        # the class that a program derives names the stand-in
        stand_in = next(base for base in type(self).__mro__ if _Refused in base.__bases__)
        name = f"{stand_in.__module__}.{stand_in.__name__}"
        package = name.partition(".")[0]
        raise UnsupportedError(
            f"{name} is used, and {package} is not here ({PACKAGES[package]})",
            fix="install the package, leave out the option that needs it, or --prism-tier cuda",
        )


class Module(types.ModuleType):
    """A stand-in module: names that it lacks are refused when they are used."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or not _unguarded_import(sys._getframe(1)):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        refused = type(name, (_Refused,), {"__module__": self.__name__})
        setattr(self, name, refused)
        return refused


@functools.lru_cache(maxsize=256)
def _unguarded_imports(file: str) -> frozenset[int]:
    """Lines of a source file's import statements that are in no ``try`` and no ``suppress``."""
    # a module without source (compiled, say) has no lines
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    lines: set[int] = set()

    def visit(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom) and not guarded:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        # the body of a ``try``, not its handlers
        within = node.body if isinstance(node, ast.Try) else []
        suppressed = isinstance(node, ast.With) and "suppress" in ast.unparse(node.items[0])
        for child in ast.iter_child_nodes(node):
            visit(child, guarded or suppressed or child in within)

    visit(tree, guarded=False)
    return frozenset(lines)


def _unguarded_import(frame: types.FrameType | None) -> bool:
    """Whether the code that is behind ``frame``, the import system left out, must import."""
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_lineno in _unguarded_imports(frame.f_code.co_filename)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: for modules of ``PACKAGES`` that nothing else has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in PACKAGES and _unguarded_import(sys._getframe(1)):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name, "A stand-in of megatron_prism.")

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


def add_modules(changes: ProcessChanges) -> None:
    """Answer for ``PACKAGES`` that are not installed, until ``changes`` are undone."""
    finder, before = _Finder(), set(sys.modules)

    def remove() -> None:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in PACKAGES:
                del sys.modules[name]

    sys.meta_path.append(finder)
    changes.on_undo(remove)
