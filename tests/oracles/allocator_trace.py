"""Does the model reserve what the real allocator reserved?  A recorded history, replayed.

In : the events of ``torch.cuda.memory._record_memory_history``, as ``benchmarks/record_allocator``
writes them.  Out: reserved bytes of both after every event, and their peaks.  Requests, streams and
the moment at which a block came back (record_stream defers it) are the recording's; which block
serves a request, when a segment is asked for and how large it is are the model's.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_prism.core.errors import UsageError
from megatron_prism.memory.allocator import CachingAllocator, Settings

__all__ = ["ACTIONS", "FORMAT", "Compared", "History", "load", "replay_history"]

FORMAT = 1
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
           "segment_map", "segment_unmap", "snapshot", "oom")  # fmt: skip
_MORE = ("segment_alloc", "segment_map")
_LESS = ("segment_free", "segment_unmap")
_FIX = (
    "record it from the start of the process: python -m benchmarks.tools.record_allocator -o FILE"
)

Event = tuple[str, int, int, int]  # action, address (or its number), bytes, stream


@dataclass(frozen=True)
class History:
    """One recorded process: what it set, and its events."""

    conf: str
    events: tuple[Event, ...]
    source: str = ""


@dataclass(frozen=True)
class Compared:
    """Bytes that were reserved, and that the model reserves.

    recorded, modelled : after every event
    requests           : how many there were
    """

    recorded: tuple[int, ...]
    modelled: tuple[int, ...]
    requests: int

    @property
    def peaks(self) -> tuple[int, int]:
        """(recorded, modelled)."""
        return max(self.recorded, default=0), max(self.modelled, default=0)

    @property
    def relative(self) -> float:
        """(modelled - recorded) / recorded of the peaks."""
        real, ours = self.peaks
        return (ours - real) / real if real else 0.0


def replay_history(events: Iterable[Event], settings: Settings | None = None) -> Compared:
    """Run the requests of ``events`` through the model.

    UsageError for a history that does not start with an empty allocator, or lost its beginning.
    """
    machine = CachingAllocator(settings or Settings())
    real = requests = 0
    recorded, modelled = [], []
    before = ""
    for number, (action, address, num_bytes, stream) in enumerate(events):
        if action == "alloc":
            if address in machine.state.live:
                raise UsageError(f"event {number}: {address} is given out twice", fix=_FIX)
            machine.malloc(address, num_bytes, stream)
            requests += 1
        elif action == "free_completed":
            if address not in machine.state.live:
                raise UsageError(
                    f"event {number}: {address} comes back and was never out", fix=_FIX
                )
            machine.free(address)
        elif action in _MORE:
            real += num_bytes
        elif action in _LESS:
            if before not in _LESS:  # empty_cache, or a retry: everything at once
                machine.release()
            real -= num_bytes
        elif action not in ACTIONS:
            raise UsageError(f"event {number}: {action} is no action of the allocator", fix=_FIX)
        before = action
        recorded.append(real)
        modelled.append(machine.state.reserved)
    return Compared(tuple(recorded), tuple(modelled), requests)


def load(path: str | os.PathLike[str]) -> tuple[History, ...]:
    """What ``benchmarks/tools/record_allocator.py`` wrote; UsageError for anything else."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        stored = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        if stored["format"] != FORMAT:
            raise ValueError(f"format {stored['format']}, this release reads {FORMAT}")
        return tuple(_history(run, str(stored["source"])) for run in stored["runs"])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}", fix=_FIX) from error
    except (ValueError, KeyError, TypeError, IndexError, EOFError, RecursionError) as error:
        raise UsageError(f"{path} is no recorded history: {error}", fix=_FIX) from error


def _history(run: dict[str, object], source: str) -> History:
    columns = [_column(run[key]) for key in ("action", "address", "bytes", "stream")]
    if min(map(min, columns), default=0) < 0:
        raise ValueError("its columns have negative numbers")
    events = tuple((ACTIONS[a], at, size, on) for a, at, size, on in zip(*columns, strict=True))
    return History(str(run["conf"]), events, source)


def _column(values: object) -> list[int]:
    """The whole numbers of a column; ValueError for anything else."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError("its columns are no whole numbers")
    return values
