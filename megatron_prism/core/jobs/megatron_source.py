"""Releases of megatron-core: which are tested, which would be imported, what its modules define.

Nothing of Megatron is imported: modules are located as Python would locate them (``megatron`` is a
namespace package, which a checkout before an installed wheel on ``sys.path`` shadows part by part)
and their source is parsed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import symtable
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

Release = tuple[int, int]
TESTED = ("0.16.1", "0.19.0", "0.19.1", "0.19.2")  # tag core_v0.19.0 reports 0.19.1
UNKNOWN = "unknown"  # the release where there is no megatron.core
_VERSION = ("MAJOR", "MINOR", "PATCH")


def locate(module: str, roots: Sequence[str] | None = None) -> Path | None:
    """The source file of a module, without importing it or its parents; None: there is none.

    roots : where to look instead of where Python would
    """
    first, *parts = module.split(".")
    if roots is None:
        places = _installed(first)
    else:
        places = [Path(root) / first for root in roots]
    # a regular package hides all others of its name; without one all are parts of a namespace
    for part in parts:
        regular = [place for place in places if (place / "__init__.py").is_file()]
        places = [place / part for place in (regular[:1] or places)]
    for place in places:
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def _installed(package: str) -> list[Path]:
    """Folders of a top-level package, in Python's order; editable installs have finders."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module without a spec, as stand-ins are
        spec = None
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def megatron_release(roots: Sequence[str] | None = None) -> str:
    """The version of the ``megatron.core`` that is or would be imported, such as 0.19.2.

    Once imported from a git checkout, it calls itself 0.19.2+COMMIT, before that nobody knows: the
    commit is left out.
    """
    loaded = sys.modules.get("megatron.core")
    version = getattr(loaded, "__version__", None)
    # it is imported: its own word counts
    if roots is None and isinstance(version, str):
        return version.partition("+")[0]
    path = locate("megatron.core.package_info", roots)
    if path is None:
        return UNKNOWN
    constants = {}
    # it is not imported: constants of its package_info.py
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(value)):
                constants[name] = str(value)
    if not all(name in constants for name in _VERSION):
        return UNKNOWN
    release = ".".join(constants[name] for name in _VERSION)
    return release + constants.get("PRE_RELEASE", "")


def parse_release(version: str) -> Release | None:
    """(0, 19) of ``0.19.2``; None for what names no release."""
    parts = version.split(".")[:2]
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[1])


def read_source(path: Path) -> str:
    """The text of a module; replaced in tests that rename what a module defines."""
    return path.read_text(encoding="utf-8")


def fields_of_class(module: str, name: str) -> dict[str, tuple[str, object]]:
    """Of a dataclass in a module of Megatron's: field -> (its type as written, its default, None
    where that is computed); none where Megatron is not installed.
    """
    path = locate(module)
    if path is None:
        return {}
    fields = dict[str, tuple[str, object]]()
    for node in ast.parse(read_source(path)).body:
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for statement in node.body:
            match statement:
                case ast.AnnAssign(ast.Name(field), kind, ast.Constant(value)):
                    fields[field] = ast.unparse(kind), value
                # a default that is computed, or none
                case ast.AnnAssign(ast.Name(field), kind):
                    fields[field] = ast.unparse(kind), None
    return fields


@lru_cache(maxsize=256)
def _symbols(source: str) -> symtable.SymbolTable:
    return symtable.symtable(source, "module", "exec")


def lookup(path: Path, target: str) -> str:
    """What is wrong with ``name`` or ``Class.member`` in the source of a module; "": nothing.

    A name that is imported or assigned there counts as found, and so does a member that a class may
    inherit.
    """
    source, (name, _, member) = read_source(path), target.partition(".")
    symbols = _symbols(source)
    if name not in symbols.get_identifiers() or not symbols.lookup(name).is_local():
        return f"{path.name} defines no {name}"
    spaces = symbols.lookup(name).get_namespaces()
    # a name that is imported or assigned: its members are elsewhere
    if not member or not spaces:
        return ""
    if spaces[0].get_type() == "function":
        return f"{name} is a function now, not a class"
    inherits = re.search(rf"^\s*class {name}\s*\(\s*[^)\s]", source, re.MULTILINE)
    members = {symbol.get_name() for symbol in spaces[0].get_symbols() if symbol.is_local()}
    if inherits or hasattr(object, member) or member in members:
        return ""
    return f"class {name} has no {member}"


def engine_version() -> str:
    """The installed Transformer Engine, ``2.20.2``, its Python alone or whole; "" without one."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """What besides Megatron decides the memory: torch, and Transformer Engine if it is there."""
    releases = {"torch": importlib.metadata.version("torch")}
    engine = engine_version()
    if engine:
        releases["transformer_engine"] = engine
    return releases
