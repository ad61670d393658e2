"""Confine a process and all that it starts: they may write in some folders only, and not connect.

Landlock, the kernel's own (Linux 5.13; files that are emptied 6.2, connections 6.7; landlock(7)).
It needs no privileges and no library.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, of every architecture
_VERSION = 1  # flag of _CREATE: answer the kernel's version of Landlock
_NO_NEW_PRIVS = 38  # prctl
_WRITE_FILE, _MAKE_DIR, _MAKE_REG, _TRUNCATE = 1 << 1, 1 << 7, 1 << 8, 1 << 14
_ALL_WRITES = _WRITE_FILE | 0x1FF0 | _TRUNCATE  # also to remove, and to make of any kind
_CONNECT = 3  # TCP: bind and connect, from version 4 on


def available() -> bool:
    """Whether this kernel can confine."""
    return _version() >= 1


def _version() -> int:
    return int(ctypes.CDLL(None).syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION))


def confine(scratch: Path, folder: Path) -> None:
    """Confine this process: anything may be written in ``scratch``, and new files and folders in
    ``folder``, where nothing is removed or emptied.  OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: object) -> int:
        result = int(libc.syscall(number, *arguments))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    version = _version()
    # a kernel refuses a ruleset with rights that it does not know: EINVAL,
    # landlock_create_ruleset(2)
    known = _ALL_WRITES if version >= 3 else _ALL_WRITES & ~_TRUNCATE
    handled = struct.pack("QQ", known, _CONNECT)[: 16 if version >= 4 else 8]
    rules = call(_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    allowed = (
        (scratch, known),
        (folder, _WRITE_FILE | _MAKE_DIR | _MAKE_REG),
        # scripts redirect to /dev/null
        (Path("/dev"), known & (_WRITE_FILE | _TRUNCATE)),
    )
    for place, rights in allowed:
        fd = os.open(place, os.O_PATH)  # type: ignore[attr-defined,unused-ignore]
        call(_ADD, rules, 1, struct.pack("=Qi", rights, fd), 0)
        os.close(fd)
    # a process without privileges may not restrict itself before: EPERM, landlock_restrict_self(2)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    call(_RESTRICT, rules, 0)
