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
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

Release = tuple[int, int]
TESTED = ("0.16.1", "0.19.0", "0.19.1", "0.19.2")  # tag core_v0.19.0 reports 0.19.1
UNKNOWN = "unknown"  # the release where there is no megatron.core
_VERSION = ("MAJOR", "MINOR", "PATCH")


@dataclass(frozen=True)
class Definition:
    """A name that a module binds: ``kind`` is class, function or other (imported, assigned).

    members : of a class, those of its own body; complete: whether it inherits from nothing else
    """

    kind: str
    members: frozenset[str] = frozenset()
    complete: bool = True


def locate(module: str, roots: Sequence[str] | None = None) -> Path | None:
    """The source file of a module, without importing it or its parents; None: there is none.

    roots : where to look instead of where Python would
    """
    first, *rest = module.split(".")
    places = [Path(root) / first for root in roots] if roots is not None else _installed(first)
    for part in rest:
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
    if roots is None and isinstance(version := getattr(loaded, "__version__", None), str):
        return version.partition("+")[0]
    path = locate("megatron.core.package_info", roots)
    if path is None:
        return UNKNOWN
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(value)):
                found[name] = str(value)
    if not all(name in found for name in _VERSION):
        return UNKNOWN
    return ".".join(found[name] for name in _VERSION) + found.get("PRE_RELEASE", "")


def parse_release(version: str) -> Release | None:
    """(0, 19) of ``0.19.2``; None for what names no release."""
    parts = version.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if all(p.isdigit() for p in parts) and parts[1:] else None


def read_source(path: Path) -> str:
    """The text of a module; replaced in tests that rename what a module defines."""
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def _definitions(source: str) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    _collect(ast.parse(source).body, found)
    return found


def _collect(body: list[ast.stmt], found: dict[str, Definition]) -> None:
    for node in body:
        if isinstance(node, ast.ClassDef):
            own: dict[str, Definition] = {}
            _collect(node.body, own)
            found[node.name] = Definition("class", frozenset(own), not node.bases)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = Definition("function")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[(alias.asname or alias.name).partition(".")[0]] = Definition("other")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        found[name.id] = Definition("other")
        else:  # what is bound under if, try and with is bound in the module
            for part in ("body", "orelse", "finalbody"):
                _collect(getattr(node, part, []), found)
            for handler in getattr(node, "handlers", []):
                _collect(handler.body, found)


def fields_of_class(module: str, name: str) -> dict[str, tuple[str, object]]:
    """Of a dataclass in a module of Megatron's: field -> (its type as written, its default, None
    where that is computed); none where Megatron is not installed."""
    path = locate(module)
    found = dict[str, tuple[str, object]]()
    for node in ast.parse(read_source(path)).body if path is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            for one in node.body:
                match one:
                    case ast.AnnAssign(ast.Name(field), kind, value):
                        default = value.value if isinstance(value, ast.Constant) else None
                        found[field] = ast.unparse(kind), default
    return found


def lookup(path: Path, target: str) -> str:
    """What is wrong with ``name`` or ``Class.member`` in the source of a module; "": nothing.

    A name that is imported or assigned there counts as found, and so does a member that a class may
    inherit.
    """
    source, (name, _, member) = read_source(path), target.partition(".")
    if _plainly(source, name, member):  # parsing all that is patched takes half a second
        return ""
    found = _definitions(source).get(name)
    if found is None:
        return f"{path.name} defines no {name}"
    if not member or found.kind == "other" or member in found.members:
        return ""
    if found.kind == "function":
        return f"{name} is a function now, not a class"
    if found.complete and not hasattr(object, member):
        return f"class {name} has no {member}"
    return ""


def _plainly(source: str, name: str, member: str) -> bool:
    """Whether the source has the lines of a definition, where most of them are."""
    if not member:
        return bool(re.search(rf"^(?:async )?def {name}\b", source, re.MULTILINE))
    begin = re.search(rf"^class {name}\b.*$", source, re.MULTILINE)
    if begin is None:
        return False
    end = re.compile(r"^(?:class|def|async|@|[A-Za-z_])", re.MULTILINE).search(source, begin.end())
    body = source[begin.end() : end.start() if end else None]
    return bool(re.search(rf"^    (?:async )?def {member}\b", body, re.MULTILINE))


def engine_version() -> str:
    """The installed Transformer Engine, ``2.20.2``, its Python alone or whole; "" without one."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """What besides Megatron decides the memory: torch, and Transformer Engine if it is there."""
    found = {"torch": importlib.metadata.version("torch")}
    if version := engine_version():
        found["transformer_engine"] = version
    return found
