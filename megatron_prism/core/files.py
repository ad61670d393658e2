"""Files and folders of results that appear complete or not at all.

Everything is written into a hidden sibling of the final place and renamed into place when the
work has succeeded; the rename is one step of the file system, so nobody ever reads half an
artefact.  An exception, Ctrl-C or SIGTERM removes the hidden folder.  After ``kill -9`` it stays
behind, as
``.<name>.partial-<host>-<pid>-<random>``; the next run to the same place on that host clears it.
Whoever works minutes for a folder claims it before (``claimed``): a second run into it is refused
at once.

>>> with artefact_folder("out/llama") as folder:                                   # doctest: +SKIP
...     write_json(folder / "summary.json", {"ranks": 4})
>>> with whole_file("out/page.html") as file:                                      # doctest: +SKIP
...     file.write(b"<html>")
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from megatron_prism.core.errors import UsageError


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Python does not look for cycles meanwhile."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


_claims: set[tuple[int, Path]] = set()  # (process, what it claims)


@contextlib.contextmanager
def claimed(path: str | os.PathLike[str], *, inside: bool = False) -> Iterator[None]:
    """No other run claims ``path`` meanwhile; UsageError at entry if one has.

    The claim is a lock on a hidden file beside ``path``, or ``inside`` the folder, which is made.
    It ends with the block or with the process, also one that is killed.  A file system without
    locks grants every claim.
    """
    path = Path(os.path.abspath(path))
    lock = path / ".claim" if inside else path.with_name(f".{path.name}.claim")
    claim = os.getpid(), lock
    if claim in _claims:  # by an outer block
        yield
        return
    is_new_folder = not lock.parent.exists()
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(lock)
    except BlockingIOError:
        owner = ""
        with contextlib.suppress(OSError, ValueError):
            owner = f" ({lock.read_text()})"
        message = f"another run{owner} writes {path}"
        raise UsageError(message, fix="wait for its end, or name another place") from None
    except OSError as error:
        message = f"cannot write to {lock.parent}: {error.strerror}"
        raise UsageError(message, fix="name a place you may write to") from error
    _claims.add(claim)
    try:
        with contextlib.suppress(OSError):  # a full disk
            os.truncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        if claim[0] == os.getpid():  # no fork
            _claims.discard(claim)
            lock.unlink(missing_ok=True)
            if is_new_folder:
                with contextlib.suppress(OSError):  # it is used
                    lock.parent.rmdir()
        os.close(file)


def _locked(lock: Path) -> int:
    """The file, open and locked.  BlockingIOError if somebody else has it."""
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise
        except OSError:  # a file system without locks
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.stat(lock).st_ino == os.fstat(file).st_ino:
                return file
        os.close(file)  # who had it has just ended, and removed it


T = TypeVar("T")


@contextlib.contextmanager
def artefact_folder(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """The folder to write an artefact into; renamed to ``path`` when the block has ended well.

    Its parents are made; ``force`` replaces what is there, which is kept until then.  UsageError at
    entry when the place is taken or cannot be written.
    """
    path = Path(path).absolute()
    check_free(path, force)
    # no two runs write to one place, and an interruption leaves no half folder
    with claimed(path), unwinding():
        _clear_leftovers(path)
        check_free(path, force)
        work = path.with_name(f"{_hidden(path)}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            work.mkdir()
        except OSError as error:
            message = f"cannot write to {path.parent}: {error.strerror}"
            raise UsageError(message, fix="name a folder you may write to with -o DIR") from error
        try:
            yield work
            check_free(path, force)  # somebody else may have finished meanwhile
            _put_in_place(work, path)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def check_free(path: str | os.PathLike[str], force: bool = False) -> None:
    """UsageError unless an artefact may be put at ``path``: call it before any long work."""
    path = Path(path).absolute()
    if os.path.lexists(path):
        another = "name another place with -o DIR"
        # a file, or a link that would be replaced
        if path.is_symlink() or not path.is_dir():
            raise UsageError(f"{path} exists and is no folder", fix=another)
        # an empty folder is as good as none
        if not force and any(path.iterdir()):
            raise UsageError(f"{path} exists already", fix=f"{another}, or replace it with --force")
    check_writable(path.parent)


def write_json(path: Path, value: object) -> None:
    """Write one JSON file, keys in the order given; ValueError for NaN and infinity."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _put_in_place(work: Path, path: Path) -> None:
    """Rename ``work`` to its final name; an older artefact steps aside and goes after it."""
    old = work.with_name(work.name + ".old")
    # what was there steps aside, and comes back if the renaming fails
    if path.exists():
        path.rename(old)
    try:
        work.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _hidden(path: Path) -> str:
    """What names of hidden folders start with; other hosts' processes are not ours to judge."""
    return f".{path.name}.partial-{socket.gethostname()}-"


def _clear_leftovers(path: Path) -> None:
    """Remove hidden folders of this artefact whose process is gone (killed with -9)."""
    for leftover in path.parent.iterdir() if path.parent.is_dir() else ():
        pid = leftover.name.removeprefix(_hidden(path)).split("-")[0]
        if not leftover.name.startswith(_hidden(path)) or not pid.isdigit() or _alive(int(pid)):
            continue
        if leftover.suffix == ".old" and not path.exists():
            leftover.rename(path)  # killed between the two renames: the old one returns
        else:
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """SIGTERM ends what runs inside as Ctrl-C does: workers end, half a file goes, the cursor is
    back.  A handler of the job is left alone.
    """
    # only the main thread may set a handler
    is_main = threading.current_thread() is threading.main_thread()
    handles = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if handles:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        if handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[BinaryIO]:
    """The file at ``path``, open for bytes: there when the block has ended well, else as it was.

    ``force`` replaces the file that is there, of a link the file it names; never a device or a
    pipe.  Raises UsageError if the place is taken (before the block and again after it) or cannot
    be written; parents are made.
    """
    path = Path(path)
    check_not_taken(path, force)
    path = Path(os.path.realpath(path))
    work = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(work, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check_not_taken(path, force)  # somebody else may have been faster
        os.replace(work, path)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise UsageError(message, fix="name a place you may write to") from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made
            work.unlink()


def write_whole(path: str | os.PathLike[str], text: str, *, force: bool = False) -> Path:
    """``text`` as a UTF-8 file, whole or not at all; see ``whole_file``."""
    with whole_file(path, force=force) as file:
        file.write(text.encode(errors="backslashreplace"))  # names need not be UTF-8
    return Path(path)


def check_not_taken(path: Path, force: bool) -> None:
    """UsageError unless a file may be put at ``path``."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", fix=f"name a file, such as {path / path.name}")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists and is not overwritten", fix="--force, or another name")
    if path.exists() and not path.is_file():  # /dev/null would become a file
        raise UsageError(f"{path} is a device or a pipe, no file", fix="name a file")


def check_writable(folder: Path, where: str = "-o DIR") -> None:
    """UsageError unless ``folder``, or the nearest of its parents that exists, takes new files."""
    place = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    try:  # root may write everywhere, and yet /proc takes no files
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        fix = "name a folder you may write to" + (f" with {where}" if where else "")
        message = f"cannot write to {folder}: {place} takes no files: {error.strerror}"
        raise UsageError(message, fix=fix) from None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True
