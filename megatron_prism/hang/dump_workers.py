"""How are a thousand dumps read in time?  By several processes, with the result of one.

In : the folder.  Out: the ``DumpSet`` that ``flight_recorder.read`` gives, also its errors.  Most
of the time is unpickling, so files are read, checked and reduced in other processes; what comes
back is columns, numbers as arrays and what repeats once, and becomes entries here.  A worker
holds a few dumps at a time; eight of them are the most, for memory's sake.

Workers are started afresh (spawn), so it does not matter which threads the caller has.  They end
with the caller whatever ends it, and leave Ctrl-C to it.  Each has a pipe of its own, and nobody
shares a lock: a ProcessPoolExecutor that was interrupted, or whose workers were killed, stood still
for good once in a hundred times (Python 3.11).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from array import array
from collections.abc import Generator, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.core.errors import DumpError
from megatron_prism.core.guards import bounded_memory, no_collector
from megatron_prism.hang import dump_reader
from megatron_prism.hang.dumps import Dump, DumpSet, Entry

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["read"]

Packed = tuple[Any, ...]  # the fields of a Dump, its entries by columns

_MOST = 8
_AHEAD = 2  # dumps that a worker has been told of, so that it does not wait for the next
_EACH = 24  # dumps for which another process pays: it takes 0.3 s to start
_WORDS = [f in ("group", "desc", "op", "numbers", "dtypes", "state", "done", "site")
          for f in Entry._fields]  # fmt: skip


def read(folder: str | os.PathLike[str], processes: int | None = None) -> DumpSet:
    """All dumps in ``folder``; by default as many processes as there are cores and work for.

    DumpError as ``flight_recorder.read``, or if a process is killed.
    """
    files = dump_reader.files(Path(folder))
    if processes is None:
        processes = min(_MOST, os.cpu_count() or 1, len(files) // _EACH)
    if processes < 2:
        return dump_reader.read(folder)
    # closed: after an error a generator lives as long as the error's frames, and its workers too
    with no_collector(), contextlib.closing(_loaded(files, processes)) as loaded:
        return dump_reader.gather(loaded)


def _loaded(
    files: dict[int, Path], processes: int
) -> Generator[tuple[int, Dump | DumpError], None, None]:
    ranks, context = sorted(files), multiprocessing.get_context("spawn")
    largest = max(file.stat().st_size for file in files.values())
    workers: dict[Connection, SpawnProcess] = {}
    failed: Exception | None = None  # in a worker, which is not the end of it
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            workers[ours] = context.Process(target=_work, args=(theirs, largest), daemon=True)
            workers[ours].start()
            theirs.close()  # so that a worker's end is the end of the pipe
        for rank, packed in _dealt(ranks, files, list(workers)):
            if isinstance(packed, Exception) and not isinstance(packed, DumpError):
                failed = packed
                break
            yield rank, packed if isinstance(packed, DumpError) else _unpack(packed)
    except (EOFError, OSError) as error:
        raise DumpError(
            f"a process that read the dumps in {files[ranks[0]].parent} was killed",
            fix="free memory (2 GB for 1,024 dumps of 2,000 entries), then try again",
        ) from error
    finally:
        for pipe, process in workers.items():
            if process.pid is not None:  # it was started
                process.kill()
                process.join()
            pipe.close()
    if failed is not None:
        raise failed


def _dealt(
    ranks: Sequence[int], files: dict[int, Path], pipes: Sequence[Connection]
) -> Iterator[tuple[int, Packed | Exception]]:
    """(rank, what was read of it or the error), in the order of ``ranks``; a worker that is done
    gets the next.

    EOFError or OSError if a worker is gone.
    """
    waiting, found = iter(ranks), {}

    def deal(pipe: Connection) -> None:
        if (rank := next(waiting, None)) is not None:
            pipe.send((rank, files[rank]))

    for pipe in pipes:
        for _ in range(_AHEAD):
            deal(pipe)
    for rank in ranks:
        while rank not in found:
            ready = connection.wait(pipes)
            for pipe in (one for one in pipes if one in ready):
                done, packed = pipe.recv()
                deal(pipe)
                found[done] = packed
        yield rank, found.pop(rank)


def _work(pipe: Connection, largest: int) -> None:
    """A worker: Ctrl-C is the caller's; without the caller there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        try:
            rank, file = pipe.recv()
        except (EOFError, OSError):  # nobody wants more
            return
        try:
            packed: Packed | Exception = _load(rank, file, largest)
        except Exception as error:  # whatever it is, the caller shall know
            packed = error
        pipe.send((rank, packed))


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _load(rank: int, file: Path, largest: int) -> Packed | DumpError:
    with bounded_memory(largest), no_collector():
        found = dump_reader.load(rank, file)
    return found if isinstance(found, DumpError) else _pack(found)


def _pack(dump: Dump) -> Packed:
    """Pickle writes a repeated object once, and an array as its bytes."""
    columns = list(zip(*dump.entries, strict=True))
    packed = [c if word else array("q", c) for c, word in zip(columns, _WORDS, strict=False)]
    rest = dump.notes, dump.ids, dump.unnamed, dump.written_ns
    return dump.rank, dump.version, dump.groups, dump.status, packed, *rest


def _unpack(packed: Packed) -> Dump:
    rank, version, groups, status, columns, *rest = packed
    share: dict[int, int] = {}  # a number of 8 bytes is 32 as an object
    lists = [c if word else list(map(share.setdefault, c, c))
             for c, word in zip(columns, _WORDS, strict=False)]  # fmt: skip
    entries = tuple(map(Entry._make, zip(*lists, strict=True)))
    return Dump(rank, version, groups, status, entries, *rest)
