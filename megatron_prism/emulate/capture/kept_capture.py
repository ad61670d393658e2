"""What a folder of slices was captured from, so that the same capture again only reads it.

In : the job that is asked for, this process's environment, the files that the job's ranks imported.
Out: ``.captured`` in the folder, and in which words a job differs from what it says.  Nothing of
Megatron or torch is imported, and no rank starts.  A variable's value is kept as a salted digest
alone: it may be a key, and folders of slices are handed on.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_prism.core.files import artefact_folder
from megatron_prism.core.programs.slices import WORLD
from megatron_prism.emulate.command_line import job_arguments

_FILE = ".captured"
_FORMAT = 1
_SLICES = "slice-*.prism"
_NEVER_NS = 1 << 63
_MEANWHILE = "changed during the capture"  # a stamp that no file has
# Packages whose files are compared one by one; of the other installed ones the first file is, which
# every installation writes anew.
_COMPARED_WHOLE = frozenset({"megatron", "megatron_prism", "transformer_engine"})
_INSTALLED = ("site-packages", "dist-packages")
# Variables of a terminal, a login or a shell's last command: no job depends on them.
_OF_TERMINALS = frozenset(
    " ".join(
        (
            "_ CLICOLOR COLORFGBG COLORTERM COLUMNS DISPLAY FORCE_COLOR LESS LINES LOGNAME",
            "LS_COLORS",
            "MAIL MANPAGER NO_COLOR OLDPWD PAGER PS1 PS2 PWD SHELL SHLVL STY TERM TERM_PROGRAM",
            "TMPDIR",
            "TMUX TMUX_PANE TTY_COMPATIBLE USER WINDOWID",
        )
    ).split()
)
_STARTS_OF_TERMINALS = (
    "BASH_FUNC_",
    "DBUS_",
    "ITERM_",
    "LC_",
    "PYTEST_",
    "SSH_",
    "VSCODE_",
    "XDG_",
)
_DEVICES = Path("/dev")
_OTHER_ORDER = "the words of the command are in another order"
_WORLD = "the world, the tier or a --prism flag"
_END = "--"  # of our part of a command, behind which the job's words stand
_MOST_NEIGHBOURS = 64  # folders beside one that are looked into
_MOST_CHANGED = 4  # options that change an iteration: with more it is another job
_MOST_NAMED = 3  # differences of a kind that a message names


@dataclass(frozen=True)
class CaptureRecord:
    """What a folder was captured from.

    command   : our flags, the tier, the ranks of the world, ``--``, the script and its arguments
    folder    : that the command was typed in
    python    : its version and its place
    devices   : GPUs of this machine
    salt      : of the digests
    variables : name -> digest of its value
    files     : path -> "SIZE MTIME" in nanoseconds; "" where there is none.  Of every file that a
                rank imported, that a word or a variable names, and of the slices.
    """

    command: list[str]
    folder: str
    python: str
    devices: list[str]
    salt: str
    variables: dict[str, str]
    files: dict[str, str]

    def differences(self, asked: CaptureRecord) -> list[str]:
        """Say in which words ``asked``, of the job that is asked for now, differs from this one."""
        differ = list[str]()
        if asked.command != self.command:
            options = changed_options(self.command, asked.command)
            differ.append(f"{_some(options)} of the command" if options else _OTHER_ORDER)
        if asked.folder != self.folder:
            differ.append(f"it was typed in {self.folder}")
        if asked.python != self.python:
            differ.append(f"it ran with Python {self.python}")
        if asked.devices != self.devices:
            differ.append("the machine has other GPUs")
        variables = _changed(self.variables, asked.variables)
        if variables:
            differ.append(f"{_some(variables)} in the environment")
        files = _changed(self.files, asked.files)
        if files:
            differ.append(f"{_some(files)} changed")
        return differ


@dataclass(frozen=True)
class Neighbour:
    """A folder beside one, captured from the same files with other options of the job.

    changed : options whose values differ
    """

    folder: Path
    changed: list[str]

    @property
    def changing(self) -> list[str]:
        """The options that change an iteration; none where the slices are those of both jobs."""
        return [name for name in self.changed if not _leaves_iterations(name)]


def _leaves_iterations(option: str) -> bool:
    """Whether jobs that differ in this option have the same iterations."""
    is_option = option.startswith("--")
    return is_option and not job_arguments.matters(option[2:].replace("-", "_"))


def changed_options(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the options in which two commands differ, whatever their order."""
    options = list[str]()
    parts = [list(command[: command.index(_END)]) for command in (before, now)]
    if parts[0] != parts[1]:
        options.append(_WORLD)
    words_before = job_arguments.program_words(before[before.index(_END) + 1 :])
    words_now = job_arguments.program_words(now[now.index(_END) + 1 :])
    return options + _changed(words_before, words_now)


def neighbour(folder: Path, command: Sequence[str]) -> Neighbour | None:
    """Find the folder beside ``folder`` whose job is nearest to ``command``.

    Returns:
        A folder captured by the same Python in the same environment, whose files have not changed
        and whose job differs in few options that change an iteration; None where there is none.
    """
    parent = folder.absolute().parent
    if not parent.is_dir():
        return None
    records = sorted(parent.glob(f"*/{_FILE}"))[:_MOST_NEIGHBOURS]
    nearest: Neighbour | None = None
    for path in records:
        # a folder without its world was not captured to the end
        record = read(path.parent)
        if record is None or not (path.parent / WORLD).is_file():
            continue
        # what its own command is captured from now: other files or variables make other slices
        asked = _record(record.command, record.salt, [*record.files, *_slice_files(path.parent)])
        if record.differences(asked):
            continue
        changed = changed_options(record.command, command)
        candidate = Neighbour(path.parent, changed)
        if len(candidate.changing) > _MOST_CHANGED:
            continue
        if nearest is None or len(candidate.changing) < len(nearest.changing):
            nearest = candidate
    return nearest


def copy_slices(source: Path, folder: Path) -> None:
    """Copy the slices of ``source`` into ``folder``, with what they were captured from.

    The folder is there when all of it is: an interrupted copy leaves none.

    Raises:
        UsageError: somebody else has made the folder meanwhile, or it cannot be made.
        OSError: a slice cannot be copied.
    """
    record = read(source)
    assert record is not None, "it is a neighbour"
    with artefact_folder(folder) as work:
        for path in _slice_files(source):
            name = os.path.basename(path)
            shutil.copyfile(path, work / name)
            del record.files[path]
            # as it will be called
            copy = os.path.abspath(folder / name)
            record.files[copy] = _stamp(str(work / name))
        _write(work, record)


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the keys whose values differ, or that only one of the two mappings has."""
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))


def _some(names: Sequence[str]) -> str:
    """Join the first of ``names``, and say how many more there are."""
    shown = ", ".join(names[:_MOST_NAMED])
    left_out = len(names) - _MOST_NAMED
    return f"{shown} and {left_out} more" if left_out > 0 else shown


def differences(folder: Path, command: Sequence[str]) -> list[str] | None:
    """Compare what ``folder`` was captured from with ``command``, as it would be captured now.

    Returns:
        In which words they differ, none if they are the same; None where the folder does not say,
        or holds no whole world.
    """
    record = read(folder)
    if record is None or not (folder / WORLD).is_file():
        return None
    slices = _slice_files(folder)
    return record.differences(_record(command, record.salt, [*record.files, *slices]))


def read(folder: Path) -> CaptureRecord | None:
    """Read what ``keep`` has written into ``folder``; None where there is no such file."""
    try:
        text = (folder / _FILE).read_text(encoding="utf-8")
        fields = json.loads(text)
        if fields.pop("format") != _FORMAT:
            return None
        return CaptureRecord(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or cut
        return None


def keep(
    folder: Path,
    command: Sequence[str],
    imported: Collection[str],
    *,
    all_new: bool,
    began_ns: int = _NEVER_NS,
) -> None:
    """Write what ``folder`` was captured from.

    Args:
        folder: of the slices, which are whole.
        command: of the job that was captured.
        imported: files that the ranks imported that ran now; empty where every slice was kept.
        all_new: whether every slice was captured now.  Slices that were kept are of the files, the
            environment and the machine as they were then: what was written of those stays.
        began_ns: when the capture began, as times of files count.  Whether ranks read a file that
            was changed since then, before it was, nobody knows.
    """
    before = read(folder)
    slices = _slice_files(folder)
    # every slice is of this command, so nothing of an earlier record counts
    if all_new:
        record = _record(command, secrets.token_hex(8), imported)
        for path, stamp in record.files.items():
            if _changed_since(path, began_ns):
                record.files[path] = f"{_MEANWHILE} {stamp}"
        record.files.update({path: _stamp(path) for path in slices})
        _write(folder, record)
        return
    # of slices of which nobody knows what they were made from, nothing is said
    if before is None:
        return
    files: dict[str, str] = {}
    kept_command = before.command
    # the slices are those of the new command, too, if it leaves iterations as they are
    if all(map(_leaves_iterations, changed_options(before.command, command))):
        kept_command = list(command)
        files.update({path: _stamp(path) for path in _named_files(command)})
    files.update({path: stamp for path, stamp in before.files.items() if not _is_slice(path)})
    files.update({path: _stamp(path) for path in slices})
    _write(folder, replace(before, command=kept_command, files=files))


def _write(folder: Path, record: CaptureRecord) -> None:
    """Write the record of ``folder``, whole or not at all."""
    text = json.dumps({"format": _FORMAT, **asdict(record)}, indent=0)
    work = folder / f"{_FILE}.{os.getpid()}"
    work.write_text(text + "\n", encoding="utf-8")
    os.replace(work, folder / _FILE)


def _changed_since(path: str, began_ns: int) -> bool:
    """Return whether a file was written at or after ``began_ns``.

    What a job itself makes in the folder of temporary files (kernels that it compiles) is new each
    time.
    """
    if path.startswith(f"{tempfile.gettempdir()}/"):
        return False
    try:
        return os.stat(path).st_mtime_ns >= began_ns
    except (OSError, ValueError):
        return False


def _is_slice(path: str) -> bool:
    """Return whether a file is called as a slice is."""
    return fnmatch.fnmatch(os.path.basename(path), _SLICES)


def _slice_files(folder: Path) -> list[str]:
    """Return the paths of the slices of ``folder``."""
    return [os.path.abspath(path) for path in sorted(folder.glob(_SLICES))]


def _record(command: Sequence[str], salt: str, files: Iterable[str]) -> CaptureRecord:
    """Describe ``command`` as it would be captured now; ``files``: besides those that it names."""
    # variables of terminals change no job
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_TERMINALS and not name.startswith(_STARTS_OF_TERMINALS)
    }
    named = [*_named_files(command), *_named_by_variables(variables)]
    return CaptureRecord(
        command=list(command),
        folder=os.getcwd(),
        python=f"{sys.version.split()[0]} of {sys.executable}",
        devices=gpu_devices(),
        salt=salt,
        variables={name: _digest(salt, value) for name, value in variables.items()},
        files={path: _stamp(path) for path in [*files, *named]},
    )


def _digest(salt: str, value: str) -> str:
    """Return a digest of a variable's value that does not give it away."""
    return hashlib.sha256(f"{salt}{value}".encode(errors="surrogateescape")).hexdigest()[:16]


def _stamp(path: str) -> str:
    """Return size and time of change of a file, in nanoseconds; "" where there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _named_files(words: Sequence[str]) -> list[str]:
    """Return the places that ``words`` name, whether or not they exist, with files of a data set.

    A word names a place if it has a slash, or if there is such a file.
    """
    places = list[str]()
    for word in words:
        value = word
        # ``--flag=value`` names a place by its value
        if word.startswith("--"):
            value = word.partition("=")[2]
        names_place = "/" in value or (value and os.path.isfile(value))
        if not names_place:
            continue
        place = os.path.abspath(os.path.expanduser(value))
        places += [place, f"{place}.bin", f"{place}.idx"]
    return places


def _named_by_variables(variables: Mapping[str, str]) -> list[str]:
    """Return the files that values of variables name."""
    return [value for value in variables.values() if value[:1] == "/" and os.path.isfile(value)]


def gpu_devices() -> list[str]:
    """Return names of the GPUs of this machine, as far as that is known without a driver's library.

    An empty list is sure: CUDA and ROCm need these devices.
    """
    names = list[str]()
    for pattern in ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd"):
        names += sorted(path.name for path in _DEVICES.glob(pattern))
    for place in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            names.append(place.read_text(errors="replace").partition("\n")[0])
    return names


def imported_files() -> list[str]:
    """Return the source files that decide what this process does, of all that it has imported.

    Those are files outside installed packages, files of Megatron and of this package wherever they
    are, and the first file of every other installed package.  Python's own library is not looked
    at: its version is compared.
    """
    library = os.path.dirname(os.__file__)
    files = set[str]()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not os.path.isabs(file):
            continue
        package, dot, _ = name.partition(".")
        is_installed = any(f"/{folder}/" in file for folder in _INSTALLED)
        # of an installed package of others
        if is_installed and package not in _COMPARED_WHOLE:
            if not dot:
                files.add(file)
            continue
        # of Python itself
        if not is_installed and file.startswith(f"{library}/"):
            continue
        files.add(file)
    return sorted(files)
