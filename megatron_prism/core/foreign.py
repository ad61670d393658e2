"""The boundary: every file that somebody else may have written is read through this module.

Dumps, plans, recipes, programs, calibrations, outputs of nccl-tests, baselines and machine files
come from other people and other releases.  A reader here bounds the bytes of a file, the depth and
the *expanded* size of its value (an alias that is written once and meant a million times), what a
compressed member inflates to and the shape that an array declares, all before the work that they
would cost.  What a format holds is said once, as a type: ``shaped`` checks a value against it and
names the place and what was expected there.

msgspec checks types.  It reads dataclasses and named tuples as they are, checks a million entries
of a dump in half a second, has no dependency and is imported in 45 ms.

>>> shaped([0, "x"], list[int])
Traceback (most recent call last):
    ...
ValueError: [1]: expected `int`, got `str`
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import lzma
import os
import pickle
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn, TypeVar, cast, get_args

import msgspec
import numpy as np
import yaml

from megatron_prism.core.errors import PrismError, UsageError, shown

T = TypeVar("T")
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]

JSON_BYTES = 1 << 25
YAML_BYTES = 1 << 18
_DEPTH = 32
_EXPANDED = 1 << 26, 64, 1 << 31  # bytes of a value that any file may mean; by its size; at most
_HEAD = 1 << 28  # bytes of one member that is text
_PIECE = 1 << 23  # bytes that are read at once
_INFLATED = 1 << 28  # bytes to which the compressed members of a file may inflate together
_MEMORY = 1 << 30, 32  # bytes that any file may take; by its size

_Opener = Callable[[BinaryIO], Any]  # of gzip or lzma
_PACKED: dict[bytes, _Opener] = {b"\x1f\x8b": gzip.open, b"\xfd7": lzma.open}

_last_read = ""


def last_read() -> str:
    """The foreign file that was read last, for a report of an error that nobody expected."""
    return _last_read


@contextlib.contextmanager
def reading(
    path: str | os.PathLike[str],
    what: str,
    fix: str,
    *,
    absent: str | None = None,
    error: type[UsageError] = UsageError,
) -> Iterator[Path]:
    """Turn what goes wrong with a foreign file into one error that names it.

    Args:
        path: the file.
        what: it should be, with its article: ``a calibration``.
        fix: what to type if it is something else.
        absent: what to type if it cannot be opened; None: ``fix``.
        error: the kind of UsageError to raise.
    """
    global _last_read
    _last_read = str(path)
    try:
        yield Path(path)
    # an error of ours says it already
    except PrismError:
        raise
    # it cannot be opened
    except OSError as cause:
        reason = cause.strerror or str(cause)
        raise error(f"cannot read {what}, {path}: {reason}", fix=absent or fix) from cause
    except RecursionError as cause:
        raise error(f"{path} is nested too deeply to be {what}", fix=fix) from cause
    except MemoryError as cause:
        raise error(f"{path} is too large to be {what}", fix=fix) from cause
    except KeyError as cause:
        reason = f"{cause} is missing"
        raise error(f"{path} is not {what}: {shown(reason)[:2000]}", fix=fix) from cause
    except (ValueError, OverflowError, zipfile.BadZipFile, zlib.error) as cause:
        raise error(f"{path} is not {what}: {shown(str(cause))[:2000]}", fix=fix) from cause


def read_bytes(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """All bytes of a file or pipe.  OSError; ValueError for more than ``most_bytes``."""
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return data


def read_unpacked(path: str | os.PathLike[str], limit_bytes: int, times: int = 100) -> bytearray:
    """Read all bytes of a file, or what it packs by gzip or xz.

    Args:
        path: the file.
        limit_bytes: that it may have, or unpack to.
        times: how many times its size it may unpack to; 256 MiB more are always fine.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more bytes, or is damaged.
    """
    data, damage = read_to_cut(path, limit_bytes, times)
    if damage:
        raise ValueError(f"it is cut off or damaged: {damage}")
    return data


_CUT = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)  # what a cut packed file raises


def read_to_cut(
    path: str | os.PathLike[str], limit_bytes: int, times: int = 100
) -> tuple[bytearray, str]:
    """Read a file as ``read_unpacked`` does, but keep what stands before a cut.

    Returns:
        The bytes, and why they end early; "" where the file is whole.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more bytes than allowed.
    """
    data = bytearray()
    with open(path, "rb") as file:
        opened = _opener(file)
        packed = opened is not None
        # a packed file may be small and expand without end
        if packed:
            limit_bytes = min(limit_bytes, (1 << 28) + times * os.fstat(file.fileno()).st_size)
        try:
            for piece in _pieces(file, opened):
                data += piece
                if len(data) > limit_bytes:
                    verb = "has"
                    if packed:
                        verb = "unpacks to"
                    raise ValueError(f"it {verb} more than {limit_bytes:,} bytes")
        except _CUT as error:
            return data, str(error)
    return data, ""


def first_bytes(path: str | os.PathLike[str], size: int) -> bytes:
    """Read the first ``size`` bytes of a file, or of what it packs, as far as it can be unpacked.

    OSError if it cannot be read.
    """
    data = bytearray()
    with open(path, "rb") as file, contextlib.suppress(*_CUT):
        # a cut file gives what stands before the cut
        for piece in _pieces(file, _opener(file)):
            data += piece
            if len(data) >= size:
                break
    return bytes(data[:size])


def _opener(file: BinaryIO) -> _Opener | None:
    """Find what unpacks a file, by its first two bytes; None: it is not packed."""
    opened = _PACKED.get(file.read(2))
    file.seek(0)
    return opened


def _pieces(file: BinaryIO, opened: _Opener | None) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked by ``opened``, in pieces of at most ``_PIECE``.

    ``read1`` gives what stands before a cut; ``read`` would lose its last piece.
    """
    unpacked = file if opened is None else opened(file)
    read = getattr(unpacked, "read1", unpacked.read)
    while piece := read(_PIECE):
        yield piece


# -- values ---------------------------------------------------------------------------------------
def shaped(value: object, kind: type[T], *, strict: bool = True, closed: bool = False) -> T:
    """Convert ``value`` to a ``kind``.

    Args:
        value: plain values, as JSON or YAML has them.
        kind: a type of msgspec's, a dataclass or a named tuple.
        strict: False also takes a number that is written as text.
        closed: the outermost mapping may have no other keys than the fields of ``kind``.

    Raises:
        ValueError: naming the place, what was expected there and what stands there.
    """
    # keys that nobody reads are mistakes of typing
    if closed and isinstance(value, Mapping):
        fields = [field.name for field in dataclasses.fields(cast(Any, kind)) if field.init]
        if unknown := sorted(str(key)[:40] for key in set(value) - set(fields)):
            raise ValueError(f"{', '.join(unknown)}: unknown; it has {', '.join(fields)}")
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(_place_first(error)) from None


def choices(kind: object) -> list[str]:
    """The words that a type lists, of which a value has to be one."""
    words = list[str]()
    for part in get_args(kind):
        if isinstance(part, str):
            words.append(part)
        else:  # a Literal in a union
            words += choices(part)
    return words


def _place_first(error: msgspec.ValidationError) -> str:
    """msgspec's words, with the place before them: rows[3].ns: expected `int`, got `str`."""
    text, _, place = str(error).partition(" - at ")
    text = text[:1].lower() + text[1:]
    place = place.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
    if not place:
        return text
    return f"{place}: {text}"


def value_of_json(data: bytes | str, kind: type[T] = object, **how: bool) -> T:  # type: ignore[assignment]
    """The value of a JSON text, as a ``kind``; NaN and infinities are none.  ValueError."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    return cast(T, value) if kind is object else shaped(value, kind, **how)


def read_json(path: str | os.PathLike[str], kind: type[T] = object, **how: bool) -> T:  # type: ignore[assignment]
    """The value in a JSON file.  OSError; ValueError for what is none, or no ``kind``."""
    return value_of_json(read_bytes(path, JSON_BYTES), kind, **how)


def expanded_size(value: object, most_bytes: int) -> int:
    """Bytes of ``value``, plain data, if everything in it were written as often as it is meant.

    ValueError if they are more than ``most_bytes``, or without end.  The pickler in C writes them,
    and remembers nothing.
    """

    class Counter:
        size = 0

        def write(self, data: bytes) -> None:
            self.size += len(data)
            if self.size > most_bytes:
                raise ValueError(f"it means more than {most_bytes:,} bytes, written as aliases")

    counter = Counter()
    pickler = pickle.Pickler(counter, protocol=4)
    pickler.fast = True
    try:
        pickler.dump(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return counter.size


# -- YAML -----------------------------------------------------------------------------------------
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # its events; composing in C would recurse
_IN_LINE = re.compile(rf"^\s*(?:[-?]\s+){{{_DEPTH}}}", re.MULTILINE)  # - - - - x


def _check_yaml(text: str) -> None:
    """YAMLError, or ValueError for aliases, a few bytes of which may mean billions, and for nesting
    that would cost a parser of ``text`` too much.
    """
    depth = deepest = 0
    for bracket in re.finditer(r"[][{}]", text):  # the scanner's time grows with their square
        depth += 1 if bracket[0] in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > _DEPTH or _IN_LINE.search(text):
        raise ValueError("it is nested too deeply")
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"*{event.anchor} is an alias: write out what it means")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH:
            raise ValueError("it is nested too deeply")


def read_yaml(path: str | os.PathLike[str]) -> str:
    """A text that a YAML parser may be given.  OSError; ValueError if it is none, long or deep."""
    text = read_bytes(path, YAML_BYTES).decode("utf-8")
    try:
        _check_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from None
    return text


def load_yaml(path: str | os.PathLike[str]) -> object:
    """The value of a YAML file.  OSError; ValueError if it is none, long or deep."""
    try:
        value: object = yaml.safe_load(read_yaml(path))
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from None
    return value


# -- pickles --------------------------------------------------------------------------------------
class HostileValueError(ValueError):
    """It asks for code or for objects from outside; nothing was executed."""


class _Unpickler(pickle.Unpickler):
    """Builds containers, text, bytes and numbers; a name of a class or function is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise HostileValueError(f"it asks for {module}.{name}; nothing was executed")

    def persistent_load(self, pid: object) -> NoReturn:
        raise HostileValueError("it asks for an object from outside; nothing was executed")


def unpickled(data: bytes | bytearray, bound: Callable[[object], None] | None = None) -> object:
    """The plain value of a pickle.  HostileValueError; ValueError for anything else that is wrong.

    Call it inside ``bounded_memory``: one opcode may ask for 64 GiB.  ``bound`` raises ValueError
    where what its caller reads of the value means too much; by default all of it is measured.
    """
    try:
        # without a buffer the unpickler asks for every few bytes; a large one is copied by malloc
        value = _Unpickler(io.BufferedReader(io.BytesIO(data), 1 << 13)).load()
    except HostileValueError:
        raise
    except MemoryError:
        raise ValueError("it asks for more memory than its size explains") from None
    except Exception as error:  # damaged pickles raise almost anything
        raise ValueError(f"it is damaged: {str(error)[:200] or type(error).__name__}") from None
    if bound is not None:
        bound(value)
    else:
        fewest_bytes, times, most_bytes = _EXPANDED
        expanded_size(value, min(max(fewest_bytes, times * len(data)), most_bytes))
    return value


class _UnpicklerToCut(pickle._Unpickler):
    """The unpickler in Python, of which the unfinished values can be looked at."""

    find_class = _Unpickler.find_class
    persistent_load = _Unpickler.persistent_load


def unpickled_to_cut(
    data: bytes | bytearray, bound: Callable[[object], None]
) -> dict[object, object]:
    """Read what stands before the cut of a pickle of a mapping.

    Args:
        data: The pickle, which ends too early.
        bound: Raises ValueError where the value means too much.

    Returns:
        The mapping, with the values that are whole.  Of its last value, if that is a list or a
        mapping, the items that are whole.

    Raises:
        HostileValueError: It asks for code.
        ValueError: It is not a mapping, or damaged in another way than by a cut.
    """
    stream = io.BytesIO(data)
    unpickler = _UnpicklerToCut(stream)
    try:
        unpickler.load()
    except HostileValueError:
        raise
    except MemoryError:
        raise ValueError("it asks for more memory than its size explains") from None
    except Exception as error:  # damaged pickles raise almost anything
        # at the end of the bytes it is the cut: a value, or the word for what follows, is not whole
        if stream.tell() < len(data):
            raise ValueError(f"it is damaged: {str(error)[:200]}") from None
    else:
        raise ValueError("it is not cut")
    levels = [*getattr(unpickler, "metastack", []), getattr(unpickler, "stack", [])]
    if not levels[0] or not isinstance(levels[0][0], dict):
        raise ValueError("it is cut off before its first value")
    mapping: dict[object, object] = levels[0][0]
    if len(levels) == 1:
        return mapping

    # the last value is being filled: its last item is not whole
    if len(levels) > 2 and levels[1]:
        unfinished, items = levels[1][-1], levels[2][:-1]
        if isinstance(unfinished, list):
            unfinished.extend(items)
        elif isinstance(unfinished, dict):
            unfinished.update(zip(items[::2], items[1::2], strict=False))
        pairs = levels[1]
    else:
        pairs = levels[1][:-1]
    mapping.update(zip(pairs[::2], pairs[1::2], strict=False))
    bound(mapping)
    return mapping


@contextlib.contextmanager
def bounded_memory(size: int) -> Iterator[None]:
    """Let what runs inside have the memory that a file of ``size`` bytes may take, then
    MemoryError.
    """
    with contextlib.ExitStack() as stack:
        # not on every system: there is no bound then, the rest is as safe
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource

            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            before = resource.getrlimit(resource.RLIMIT_AS)
            limit = now + _MEMORY[0] + _MEMORY[1] * size
            if before[0] != resource.RLIM_INFINITY:
                limit = min(limit, before[0])
            resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_AS, before)
        yield


# -- arrays ---------------------------------------------------------------------------------------
def read_arrays(
    path: str | os.PathLike[str], head: type[T], names: re.Pattern[str]
) -> tuple[T, dict[str, np.ndarray]]:
    """(head, arrays by name) of a file that ``numpy.savez`` wrote.

    ``head`` is the type of the JSON in the member of that name; other members match ``names``.
    OSError, ValueError, BadZipFile and zlib.error for everything that is something else.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is no regular file")
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = _members(archive, names, os.fstat(file.fileno()).st_size)
            text = _array(archive, members.pop("head"))
            if text.dtype != np.uint8 or text.ndim != 1:
                raise ValueError("its head is no text")
            value = value_of_json(text.tobytes(), head)
            return value, {name: _array(archive, member) for name, member in members.items()}
    except (NotImplementedError, RuntimeError, EOFError, struct.error) as error:
        raise ValueError(f"it is damaged: {error}") from None  # encrypted, of a later version


def _members(
    archive: zipfile.ZipFile, names: re.Pattern[str], size: int
) -> dict[str, zipfile.ZipInfo]:
    """The members by name, if they are what they may be; ``size``: of the file, in bytes."""
    members = archive.infolist()
    by_name = {member.filename.removesuffix(".npy"): member for member in members}
    if "head" not in by_name:
        raise ValueError("it has no head")
    if len(by_name) != len(members):
        raise ValueError("a member is there twice")
    strange = [name for name in by_name if name != "head" and not names.fullmatch(name)]
    strange += [m.filename for m in members if not m.filename.endswith(".npy")]
    if strange:
        raise ValueError(f"member {strange[0][:80]!r} is unknown")
    # what is stored as it is cannot be larger than the file
    packed = [m.file_size for m in members if m.compress_type != zipfile.ZIP_STORED]
    stored = sum(m.file_size for m in members) - sum(packed)
    if sum(packed) > _INFLATED or stored > size:
        raise ValueError(f"its members would inflate to {sum(packed) + stored:,} bytes")
    if by_name["head"].file_size > _HEAD:
        raise ValueError(f"its head has more than {_HEAD:,} bytes")
    return by_name


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One member, if it has as many bytes as the shape that it declares."""
    with archive.open(member) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):
            raise ValueError(f"{member.filename} has more bytes than its shape")
    return array
