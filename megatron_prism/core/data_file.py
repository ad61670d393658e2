"""Data files of this package, or a user's own: one JSON object with known fields."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_prism.core import guards
from megatron_prism.core.errors import UsageError

__all__ = ["read", "shipped"]


Row = dict[str, Any]  # an object of JSON: whoever reads it checks what there is


def shipped(folder: Path) -> dict[str, Path]:
    """Name -> file of what comes with the package."""
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read(
    name: str | os.PathLike[str],
    folder: Path,
    what: str,
    fields: Collection[str],
    optional: Collection[str] = (),
) -> tuple[Path, Row]:
    """The file of that name, and its ``fields``: all of them but ``optional`` ones, and no others.

    UsageError says what is wrong; ``what`` it is (a machine) is for people.
    """
    known = shipped(folder)
    path = known.get(str(name), Path(name))
    try:
        found = guards.read_json(path)
    except OSError as error:
        raise UsageError(
            f"there is no {what} {name}: {error.strerror}",
            fix=f"use {', '.join(known)}, or a JSON file",
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}", fix=f"see costs/{folder.name}/") from error
    given = set(found) if isinstance(found, dict) else set()
    wrong = sorted((given ^ set(fields)) - (set(fields) & set(optional)))
    if wrong:
        raise UsageError(
            f"{path}: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} missing or unknown",
            fix=f"a {what} has {', '.join(sorted(fields))}",
        )
    return path, found
