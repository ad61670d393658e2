"""Whose code a file is.

Of a running process the folders of imported packages decide, never a word of the path: a checkout,
an environment or a user's folder may be called ``megatron_prism``, ``megatron`` or ``torch``.  Of a
file that another machine names only its path is known: there the environment's own folder of
packages decides (``without_environment``).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_PRISM = f"{Path(__file__).parents[1].as_posix()}/"
# Debian's and NVIDIA's images call it dist-packages
_ENVIRONMENT = re.compile(r"^(?:.*/)?(?:site|dist)-packages/")


def is_ours(file: str) -> bool:
    """Return whether a file is of this package."""
    return _slashes(file).startswith(_PRISM)


def below_prism(file: str) -> str:
    """Return the path of one of this package's files below its folder."""
    return _slashes(file).removeprefix(_PRISM)


def below_package(package: str, file: str) -> str | None:
    """Return the path of a file below the folder of an imported package.

    Args:
        package: its full name, such as ``megatron.core``; nothing is imported.
        file: a path as the import system writes it (``code.co_filename``).

    Returns:
        The path inside the package, or None if the file is elsewhere or nothing imported the
        package.
    """
    path = _slashes(file)
    # a namespace package, such as megatron, has several folders
    for folder in getattr(sys.modules.get(package), "__path__", ()):
        start = f"{_slashes(str(folder)).rstrip('/')}/"
        if path.startswith(start):
            return path[len(start) :]
    return None


def is_installed(file: str) -> bool:
    """Return whether a file is below an environment's folder of installed packages."""
    return _ENVIRONMENT.match(_slashes(file)) is not None


def without_environment(file: str) -> str:
    """Return a path from the installed package on, or the whole path of what is not installed."""
    return _ENVIRONMENT.sub("", _slashes(file), count=1)


def last_two(file: str) -> str:
    """Return the file's name behind that of its folder."""
    return "/".join(_slashes(file).rsplit("/", 2)[-2:])


def _slashes(file: str) -> str:
    return file.replace("\\", "/")
