"""How are a thousand dumps read in time?  By several processes, with the result of one.

In : the folder.  Out: the ``DumpSet`` that ``flight_recorder.read`` gives, also its errors.  Most
of the time is unpickling, so files are read, checked and reduced in other processes; what comes
back is columns, numbers as arrays and what repeats once, and becomes entries here.  A worker
holds a few dumps at a time; eight of them are the most, for memory's sake.

Workers are started afresh (spawn), so it does not matter which threads the caller has.  They end
with the caller whatever ends it, and leave Ctrl-C to it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import repeat
from pathlib import Path
from typing import Any

from megatron_prism import flight_recorder
from megatron_prism.errors import DumpError
from megatron_prism.flight_dump import Dump, DumpSet, Entry
from megatron_prism.guards import bounded_memory, no_collector

__all__ = ["read"]

_MOST = 8
_EACH = 24  # dumps for which another process pays: it takes 0.3 s to start
_WORDS = [f in ("group", "desc", "op", "numbers", "dtypes", "state", "done", "site")
          for f in Entry._fields]  # fmt: skip


def read(folder: str | os.PathLike[str], processes: int | None = None) -> DumpSet:
    """All dumps in ``folder``; by default as many processes as there are cores and work for.

    DumpError as ``flight_recorder.read``, or if a process is killed.
    """
    files = flight_recorder.files(Path(folder))
    if processes is None:
        processes = min(_MOST, os.cpu_count() or 1, len(files) // _EACH)
    if processes < 2:
        return flight_recorder.read(folder)
    with no_collector():
        return flight_recorder.gather(_loaded(files, processes))


def _loaded(files: dict[int, Path], processes: int) -> Iterator[tuple[int, Dump | DumpError]]:
    ranks = sorted(files)
    largest = max(file.stat().st_size for file in files.values())
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start)
    try:
        found = pool.map(_load, ranks, [files[r] for r in ranks], repeat(largest), chunksize=4)
        for rank, packed in zip(ranks, found, strict=True):
            yield rank, packed if isinstance(packed, DumpError) else _unpack(packed)
    except BrokenProcessPool as error:
        raise DumpError(
            f"a process that read the dumps in {files[ranks[0]].parent} was killed",
            fix="free memory (2 GB for 1,024 dumps of 2,000 entries), then try again",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start() -> None:
    """In a worker: Ctrl-C is the caller's; without the caller there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _load(rank: int, file: Path, largest: int) -> tuple[Any, ...] | DumpError:
    with bounded_memory(largest), no_collector():
        found = flight_recorder.load(rank, file)
    return found if isinstance(found, DumpError) else _pack(found)


def _pack(dump: Dump) -> tuple[Any, ...]:
    """Pickle writes a repeated object once, and an array as its bytes."""
    columns = list(zip(*dump.entries, strict=True))
    packed = [c if word else array("q", c) for c, word in zip(columns, _WORDS, strict=False)]
    return dump.rank, dump.version, dump.groups, dump.status, packed, dump.notes


def _unpack(packed: tuple[Any, ...]) -> Dump:
    rank, version, groups, status, columns, notes = packed
    share: dict[Any, Any] = {}  # a number of 8 bytes is 32 as an object
    lists = [c if word else list(map(share.setdefault, c, c))
             for c, word in zip(columns, _WORDS, strict=False)]  # fmt: skip
    entries = tuple(map(Entry._make, zip(*lists, strict=True)))
    return Dump(rank, version, groups, status, entries, notes)
