"""What did every rank's Flight Recorder hold when the job hung?  A folder of dumps as values.

In : a folder with one dump per rank, as torch (any prefix), Megatron and NVRx name them: the file
name ends in the rank, perhaps with ``.json`` or ``.pkl``, or has it behind the word "rank".
Pickles are read by an unpickler that builds nothing but containers, text and numbers; whatever else
a file asks for is refused.  Out: ``DumpSet``.  Formats 2.0 to 2.10, pickle and JSON, with or
without history, stacks and pg_status.

``pg_status`` is keyed by pg_id, a rank's own count of its groups; entries say which group that is,
and where none does, ids and names in ascending order belong together (true of all dumps we know,
if there are as many of each; otherwise the status of those groups is left out and said so).

A process that was started anew without ending (NVRx's in-process restart) makes its groups again,
with the same names and new ids, and the recorder still holds calls of those that were aborted.  Of
a name the group with the largest id is the one that lives.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from megatron_prism.core.errors import DumpError
from megatron_prism.core.guards import bounded_memory, no_collector
from megatron_prism.hang.dump_entries import Row, aborted, entries_of, integer, of_batches, typed
from megatron_prism.hang.dumps import Dump, DumpSet, Group, Status

__all__ = ["bounded_memory", "files", "gather", "load", "of_value", "parse", "read"]

_ENDING = r"(?:\.(?:json|pkl|pickle|trace|bin|pt))?$"
_FILE = re.compile(r"(?:^|\D)(\d{1,9})" + _ENDING)
# of a world's rank, not of a node's, a local or a stage's one: those have a word in front
_RANK = re.compile(
    r"(?:^_?|[^a-z_]_?|(?:trace|dump|global)[_-])rank[_-]?(\d{1,9})(?!\d)", re.IGNORECASE
)
_PLAIN = re.compile(r"[^.]*" + _ENDING)
_LOOSE = re.compile(r"(?<!local)(?<!local[_-])rank[_-]?(\d{1,9})(?!\d)", re.IGNORECASE)
_PACKED = re.compile(r"\.(?:gz|tgz|zst|xz|bz2|lz4|zip|tar)$")
_LIMIT = 1 << 30  # bytes of one file; full dumps with C++ stacks are a few MB
FIX = "name the folder that TORCH_FR_DUMP_TEMP_FILE or --flight-recorder-dump-path wrote into"


def read(folder: str | os.PathLike[str]) -> DumpSet:
    """All dumps in ``folder``.  DumpError if there is none to read, or one that is hostile."""
    found = files(Path(folder))
    # values without cycles by the million: looking for cycles would cost more than reading
    with bounded_memory(max(file.stat().st_size for file in found.values())), no_collector():
        return gather((rank, load(rank, file)) for rank, file in sorted(found.items()))


def load(rank: int, file: Path) -> Dump | DumpError:
    """One dump, or why it cannot be read."""
    try:
        made = parse(_bytes(file), rank, str(file))
        return replace(made, written_ns=file.stat().st_mtime_ns)
    except DumpError as error:
        return error


def gather(loaded: Iterable[tuple[int, Dump | DumpError]]) -> DumpSet:
    """The set of (rank, dump or why there is none), ranks ascending.  DumpError as ``read``."""
    dumps, broken = {}, {}
    for rank, found in loaded:
        if isinstance(found, HostileError):
            raise found
        if isinstance(found, DumpError):
            broken[rank] = found.message
        else:
            _is_of(found)
            dumps[rank] = found
    if not dumps:
        raise DumpError(next(iter(broken.values())), fix=FIX)
    return DumpSet(dumps, broken)


def _is_of(dump: Dump) -> None:
    """A dump under another rank's name would make that rank the culprit: DumpError.

    Nothing in it says whose it is, but whoever calls in a group is a member of it.
    """
    used = {entry.group for entry in dump.entries}
    used |= {name for name, status in dump.status.items() if status.enqueued > 0}
    members = [dump.groups[n].ranks for n in used if n in dump.groups and dump.groups[n].ranks]
    other = next((ranks for ranks in members if dump.rank not in ranks), None)
    if other is None:
        return
    own = set(other).intersection(*members)
    whose = f"rank {min(own)}" if len(own) == 1 else f"one of the ranks {sorted(other)[:8]}"
    raise DumpError(
        f"the dump that is named as rank {dump.rank}'s was written by {whose}: it has calls of "
        f"groups without rank {dump.rank}",
        fix="name every file after the global rank that wrote it, such as _dump_517",
    )


class HostileError(DumpError):
    """It tried to run code: nothing else of the folder is read."""


def files(folder: Path) -> dict[int, Path]:
    """rank -> its file.  DumpError if there are none, or two of one rank."""
    if folder.is_file():
        raise DumpError(f"{folder} is a file", fix=f"name its folder: --dumps {folder.parent}")
    if not folder.is_dir():
        raise DumpError(f"there is no folder {folder}", fix=FIX)
    try:
        paths = sorted(folder.iterdir())
    except PermissionError as error:
        raise DumpError(f"cannot read {folder}: {error.strerror}", fix=FIX) from error
    there = [p for p in paths if _may_be_dump(p.name) and p.is_file()]
    if not there:
        raise DumpError(f"no file in {folder} has a name that ends in a rank", fix=_instead(paths))
    found, twice = _by_rank(there, _RANK)
    if twice:  # rank_3_20260817 of a job whose name stands in front
        other, still = _by_rank(there, _LOOSE)
        found, twice = (found, twice) if still else (other, still)
    if twice:
        rank, one, another = twice
        raise DumpError(
            f"{one.name} and {another.name} in {folder} are both of rank {rank}",
            fix="keep the dumps of one hang per folder, each named after its global rank",
        )
    return found


def _may_be_dump(name: str) -> bool:
    """.nfs0012 is no dump of rank 12, rank_3.log none of rank 3."""
    worded = _RANK.search(name) and _PLAIN.match(name)
    return name[0] != "." and bool(_FILE.search(name) or worded)


def _by_rank(
    paths: list[Path], word: re.Pattern[str]
) -> tuple[dict[int, Path], tuple[int, Path, Path] | None]:
    """(rank -> file, two of one rank); the rank stands behind the last ``word``, or at the end."""
    found: dict[int, Path] = {}
    for path in paths:
        ends = _FILE.search(path.name)
        rank = int((word.findall(path.name) or [ends[1] if ends else -1])[-1])
        if rank in found:
            return found, (rank, found[rank], path)
        found[rank] = path
    return found, None


def _instead(paths: list[Path]) -> str:
    """What to do about a folder in which no file is a dump."""
    if any(_PACKED.search(path.name) for path in paths):
        return "unpack the files: gunzip, unzstd or tar xf"
    folders = [p for p in paths if p.is_dir() and os.access(p, os.R_OK | os.X_OK)]
    inside = [p for p in folders if any(_FILE.search(f.name) and f.is_file() for f in p.iterdir())]
    if not inside:
        return FIX
    if len(inside) == 1:
        return f"name its folder {inside[0]}"
    several = ", ".join(str(p) for p in inside[:4]) + (" …" if len(inside) > 4 else "")
    return f"one of its folders ({several}), or, if they are a folder per node, put all into one"


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > _LIMIT:
            raise DumpError(f"{path} has more than {_LIMIT >> 20} MiB: no dump of one rank")
        return path.read_bytes()
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}", fix=FIX) from error


class _Unpickler(pickle.Unpickler):
    """Builds containers, text, bytes and numbers; a name of a class or function is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise HostileError(
            f"asks for {module}.{name}, which no dump needs; nothing was executed",
            fix="do not open this file with anything else",
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise HostileError("asks for an object from outside; nothing was executed")


def parse(data: bytes, rank: int, where: str = "dump") -> Dump:
    """One dump out of the bytes of its file.  DumpError for anything that is none."""
    try:
        head = data[:64].lstrip()[:1]
        value = json.loads(data) if head in (b"{", b"[") else _Unpickler(io.BytesIO(data)).load()
        return of_value(value, rank)
    except DumpError as error:
        raise type(error)(f"{where}: {error.message}", fix=error.fix or FIX) from error
    except Exception as error:  # damaged pickles raise almost anything
        text = str(error)[:200] or type(error).__name__
        raise DumpError(f"{where} is no dump, or damaged: {text}", fix=FIX) from error


def of_value(value: object, rank: int) -> Dump:
    """One dump out of the value that torch pickles.  DumpError if it is none."""
    top = typed(value, dict, "the file")
    version = top.get("version")
    if not isinstance(version, str) or not re.fullmatch(r"2\.\d{1,3}", version):
        raise DumpError(f"has version {str(version)[:20]!r}; versions 2.0 to 2.10 are read")
    notes = []
    groups = {str(n): _group(str(n), g) for n, g in _table(top, "pg_config").items()}
    raw = [typed(e, dict, "an entry") for e in typed(top.get("entries") or [], list, "entries")]
    entries = entries_of(raw)
    status = {str(i): _status(s) for i, s in _table(top, "pg_status").items()}
    dead = _aborted_ids(raw, status, len(groups))
    if dead:
        raw = [e for e in raw if str(e.get("pg_id")) not in dead]
        entries, status = entries_of(raw), {i: s for i, s in status.items() if i not in dead}
        notes.append("calls of groups that were aborted and made again are left out")
    if cut := aborted(raw):
        entries = tuple(e._replace(done=at not in cut and e.done) for at, e in enumerate(entries))
        notes.append("calls that were aborted count as outstanding")
    if any(a.record > b.record for a, b in zip(entries, entries[1:], strict=False)):
        entries = tuple(sorted(entries, key=lambda e: e.record))
    names = _names_of_ids(status, groups, raw)
    known = {names[i]: s for i, s in status.items() if i in names}
    entries = of_batches(entries, [n for n, s in known.items() if 0 <= s.enqueued == s.completed])
    unnamed = {i: s for i, s in status.items() if i not in names}
    if unnamed:
        notes.append(f"pg_status of {len(unnamed)} groups cannot be named")
    notes += ["no pg_status"] * (not status)
    return Dump(rank, version, groups, known, entries, tuple(notes), names, unnamed)


def _table(top: Row, key: str) -> dict[object, Row]:
    found = typed(top.get(key) or {}, dict, key)
    return {k: typed(v, dict, f"{key}[{k!r:.20}]") for k, v in found.items() if v != "[]"}


def _group(name: str, config: Row) -> Group:
    ranks = config.get("ranks", [])
    if isinstance(ranks, str):  # thousands of dumps say the same of their largest groups
        return _group_of_text(name, str(config.get("desc", ""))[:200], ranks)
    return _made(name, str(config.get("desc", ""))[:200], ranks)


@lru_cache(maxsize=4096)
def _group_of_text(name: str, desc: str, ranks: str) -> Group:
    return _made(name, desc, re.findall(r"-?\d{1,9}", ranks))


def _made(name: str, desc: str, ranks: object) -> Group:
    members = tuple(integer(r, f"a rank of group {name:.20}") for r in typed(ranks, list, "ranks"))
    if len(set(members)) != len(members) or any(r < 0 for r in members):
        raise DumpError(f"group {name:.20} has members that cannot be")
    return Group(name, desc, members)


def _status(row: Row) -> Status:
    def last(word: str) -> int:
        return integer(row.get(f"last_{word}_collective"), f"last_{word}_collective")

    return Status(last("enqueued"), last("started"), last("completed"))


def _aborted_ids(raw: Sequence[Row], status: Mapping[str, Status], groups: int) -> set[str]:
    """pg_ids of groups whose names newer groups have; where no entry tells and every group was
    made again, all ids but the newest."""
    named = {(e["pg_id"], str(e["process_group"][0])) for e in raw
             if type(e.get("pg_id")) is int}  # fmt: skip
    newest: dict[str, int] = {}
    for number, name in named:
        newest[name] = max(number, newest.get(name, number))
    old = [number for number, name in named if number < newest[name]]
    ids = sorted((i for i in status if i.isdecimal()), key=int)
    # one group and another that was made later, which pg_config lacks, look the same
    again = groups > 1 and len(ids) == len(status) > groups and len(ids) % groups == 0
    dead = set(ids[:-groups]) if again else set()
    if old:  # ids count up: those of groups without an entry are as old
        last = max(old)
        dead |= {i for i in status if i.isdecimal() and int(i) <= last} | set(map(str, old))
    return dead


def _names_of_ids(
    status: Mapping[str, Status], groups: Mapping[str, Group], raw: Sequence[Row]
) -> dict[str, str]:
    """pg_id -> name of the group."""
    known = {str(e.get("pg_id")): str(e["process_group"][0]) for e in raw}
    ids = [i for i in status if i not in known]
    names = [name for name in groups if name not in set(known.values())]
    if len(ids) == len(names) and all(x.isdecimal() for x in [*ids, *names]):
        known |= zip(sorted(ids, key=int), sorted(names, key=int), strict=True)
    elif set(ids) <= set(names) and not known:
        known |= {i: i for i in ids}
    return {i: name for i, name in known.items() if i in status}
