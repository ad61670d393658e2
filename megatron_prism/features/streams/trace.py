"""What the streams of one rank do with memory in an iteration: rows, and their file.

A row is one fact in the order in which the host issued it.  ``Kind`` says what the fields of a row
mean.  Storages and events have running numbers.  The file stands beside the slice of the rank.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from megatron_prism.core import foreign
from megatron_prism.core.errors import ProgramError
from megatron_prism.core.files import whole_file
from megatron_prism.features.streams import FEATURE

FORMAT = 1  # version of the file
_MEMBERS = re.compile(r"rows")
MAIN = 0  # place of the default stream among the streams of a trace

ROW = np.dtype(
    [
        ("kind", "u1"),
        ("stream", "u2"),  # place in StreamTrace.streams
        ("object", "i4"),  # a storage or an event
        ("low", "i8"),
        ("high", "i8"),
        ("text", "u4"),  # place in StreamTrace.places
    ]
)


class Kind(enum.IntEnum):
    """Kind of a row.

    ALLOCATE: storage ``object`` of ``high`` bytes comes from the pool of ``stream``.
    FREE: nobody holds storage ``object`` any more.
    READ, WRITE: a kernel of ``stream`` accesses bytes ``low`` to ``high`` of storage ``object``.
    RECORD: event ``object`` is recorded on ``stream``.
    WAIT: ``stream`` waits for event ``object``.
    HOST_STREAM: the host waits until ``stream`` is idle.
    HOST_EVENT: the host waits for event ``object``.
    HOST_DEVICE: the host waits until all streams are idle.
    USE: ``record_stream``: the allocator learns that ``stream`` uses storage ``object``.
    HOLD: a call of NCCL holds storage ``object`` until somebody waits for event ``low``.
    """

    ALLOCATE = 0
    FREE = 1
    READ = 2
    WRITE = 3
    RECORD = 4
    WAIT = 5
    HOST_STREAM = 6
    HOST_EVENT = 7
    HOST_DEVICE = 8
    USE = 9
    HOLD = 10


class RowPlace(msgspec.Struct, frozen=True):
    """Where a row comes from.

    Args:
        what: name of the operator or of the call; of an allocation type and shape of the tensor.
        site: file and line; "": unknown.
        step: ``2F0``: microbatch 2, forward, chunk 0.
    """

    what: str
    site: str
    step: str


@dataclass(frozen=True)
class StreamTrace:
    """The rows of one rank.

    Args:
        rank: global rank.
        rows: structured array ROW [n], in the order of issue.
        streams: names of the streams; the first is the default stream.
        places: of the rows.
        tier: meta or cuda.
        graph_launches: launches of CUDA graphs, which have no rows.
    """

    rank: int
    rows: np.ndarray
    streams: tuple[str, ...]
    places: tuple[RowPlace, ...]
    tier: str = "meta"
    graph_launches: int = 0


class _Head(msgspec.Struct):
    """The JSON in a file."""

    format: int
    rank: int
    streams: tuple[str, ...]
    places: tuple[RowPlace, ...]
    tier: str
    graph_launches: int


def path_of(folder: Path, rank: int) -> Path:
    """Name the file of a rank in a folder of slices."""
    return folder / f"streams-{rank:06d}.npz"


def save(trace: StreamTrace, path: Path, *, force: bool = False) -> None:
    """Write a trace to one file, whole or not at all.  UsageError if the place is taken."""
    head = _Head(FORMAT, trace.rank, trace.streams, trace.places, trace.tier, trace.graph_launches)
    arrays = {
        "rows": trace.rows,
        "head": np.frombuffer(msgspec.json.encode(head), dtype=np.uint8),
    }
    with whole_file(path, force=force) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type] # none is called allow_pickle


def load(path: Path) -> StreamTrace:
    """Read what ``save`` wrote.  ProgramError for a file that is foreign, cut or of a later one."""
    reading = foreign.reading(
        path,
        "a file of streams",
        "prism capture --prism-streams writes it",
        absent="prism capture --prism-streams writes it",
        error=ProgramError,
    )
    with reading:
        head, arrays = foreign.read_arrays(path, _Head, _MEMBERS)
        # columns may have other meanings in another format
        if head.format != FORMAT:
            raise ProgramError(
                f"{path} has format {head.format}; this release reads {FORMAT}",
                fix="capture it again, with --prism-streams",
            )
        rows = arrays["rows"]
        _check_rows(rows, head)
        return StreamTrace(
            head.rank, rows, head.streams, head.places, head.tier, head.graph_launches
        )


def _check_rows(rows: np.ndarray, head: _Head) -> None:
    """ValueError for rows that no recorder writes."""
    if rows.dtype != ROW or rows.ndim != 1:
        raise ValueError(f"its rows are {rows.dtype}")
    limits = {"kind": len(Kind), "stream": len(head.streams), "text": len(head.places)}
    for column, limit in limits.items():
        if rows.size and int(rows[column].max()) >= limit:
            raise ValueError(f"its rows have {column} {rows[column].max()} of {limit}")


def traces_of(folder: Path) -> Sequence[Path]:
    """List the files of a folder, by rank."""
    name = re.compile(FEATURE.rank_files)
    return sorted(path for path in folder.iterdir() if name.fullmatch(path.name))
