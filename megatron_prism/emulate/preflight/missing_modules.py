"""Modules that a script imports and that are not installed, all of them at once.

In : a script.  Out: names of packages.  Nothing is imported: the texts of the script, and of the
modules beside it, are read.  Imports in functions, branches and ``try`` are optional
and left out.
"""

from __future__ import annotations

import ast
import itertools
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_MOST_FILES = 500  # of a checkout
_MOST_FOLDERS = 5000  # a checkout of Megatron-LM has fewer than 700


def missing_packages(script: Path) -> list[str]:
    """Return the packages that a script needs and that are not here, in the order of imports.

    Args:
        script: file of the script; its folder is that of its modules.
    """
    folder = script.resolve().parent
    folders = [folder]
    # the checkout that a script is in is often in PYTHONPATH
    folders += [Path(place) for place in sys.path if place and Path(place) in folder.parents]
    missing: dict[str, None] = {}
    waiting = [script]
    seen = {script}
    while waiting and len(seen) < _MOST_FILES:
        file = waiting.pop(0)
        for name in _imported(file):
            files = _files_of(name, folders)
            for module_file in files:
                if module_file not in seen:
                    seen.add(module_file)
                    waiting.append(module_file)
            package = name.partition(".")[0]
            if not files and not _is_installed(package):
                missing[package] = None
    # examples/mimo/train.py adds examples/multimodal to its path
    if missing:
        for name in _modules_below(_checkout_of(folder)):
            missing.pop(name, None)
    return list(missing)


def _checkout_of(folder: Path) -> Path:
    """Return the checkout of Megatron that a folder is in, the folder itself outside of one."""
    for parent in (folder, *folder.parents):
        if (parent / "megatron" / "core").is_dir():
            return parent
    return folder


def _modules_below(checkout: Path) -> set[str]:
    """Return the names of the modules of a checkout, wherever they are."""
    names: set[str] = set()
    # outside of a checkout the folder may be somebody's home
    for _, _, files in itertools.islice(os.walk(checkout), _MOST_FOLDERS):
        names.update(file.removesuffix(".py") for file in files if file.endswith(".py"))
    return names


def _imported(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports wherever it is imported itself."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.name
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
            # a module of a package: from tools import data
            for alias in statement.names:
                if alias.name != "*":
                    yield f"{statement.module}.{alias.name}"


def _files_of(name: str, folders: list[Path]) -> list[Path]:
    """Return the files of a module beside the script; none where it is no module of these."""
    path = Path(*name.split("."))
    for folder in folders:
        for file in (folder / path.with_suffix(".py"), folder / path / "__init__.py"):
            if file.is_file():
                return [file]
    # a name of a module, or a folder without a file of its own
    parent = path.parent
    for folder in folders:
        if (folder / path).is_dir():
            return [folder / path]
        if path.parts[1:] and (folder / parent.with_suffix(".py")).is_file():
            return [folder / parent.with_suffix(".py")]
        if path.parts[1:] and (folder / parent / "__init__.py").is_file():
            return [folder / parent / "__init__.py"]
    return []


def _is_installed(package: str) -> bool:
    """Tell whether a package can be found, without importing it."""
    if package in sys.builtin_module_names or package in sys.modules:
        return True
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
