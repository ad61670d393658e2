"""An out-of-memory error of torch: which request of the job's slices it was, and when.

``CUDA out of memory. Tried to allocate 17.58 GiB. … 51.75 GiB is allocated by PyTorch, and 17.84
GiB is reserved by PyTorch but unallocated.`` (c10/cuda/CUDACachingAllocator.cpp, ``malloc`` @torch
2.11): two decimals, and the segment that was asked for (``alloc_size``), not the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program
from megatron_prism.memory.allocator import Settings
from megatron_prism.memory.peaks import holdings_at, op_at, site_of

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_SAYS = {
    "asked": re.compile(rf"[Tt]ried to allocate {_SIZE}"),
    "capacity": re.compile(rf"total capacity of {_SIZE}"),
    "device_free": re.compile(rf"{_SIZE} is free"),
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch"),
    "unused": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
STATES = ("exp_avg", "exp_avg_sq")  # of Adam, made by the first step


@dataclass(frozen=True)
class OomFigures:
    """What torch's error says, in bytes; None for what it leaves out.

    Attributes:
        asked: The segment that was asked for.
        rounding: By how much ``asked`` may be off: the text has two decimals.
        capacity: Of the device.
        device_free: Free on the device.
        allocated: In use by tensors of this process.
        unused: Reserved by this process and not in use.
    """

    asked: int
    rounding: int
    capacity: int | None = None
    device_free: int | None = None
    allocated: int | None = None
    unused: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A request of the slices that the error may be about.

    Attributes:
        program: Of the rank that asks.
        event: Which of its allocations.
        num_bytes: Of the tensor.
        op: In which it is made.
        site: Where in the code.
        allocated: Bytes that are in use then.
        first: Whether ``allocated`` is of the first iteration, which has no states of Adam yet.
    """

    program: Program
    event: int
    num_bytes: int
    op: Op
    site: str
    allocated: int
    first: bool


def parse(text: str) -> OomFigures:
    """Read torch's text.

    Raises:
        UsageError: It does not say what was asked for.
    """
    matches = {name: pattern.search(text) for name, pattern in _SAYS.items()}
    asked = matches["asked"]
    if asked is None:
        raise UsageError(
            "the text says no 'Tried to allocate … GiB'",
            fix="oom='Tried to allocate 17.58 GiB. … 51.75 GiB is allocated by PyTorch …'",
        )
    num_bytes: dict[str, int] = {}
    for name, match in matches.items():
        # a text that was cut lacks some of the figures
        if match is not None:
            num_bytes[name] = round(float(match[1]) * _UNITS[match[2]])
    # half a hundredth of the unit, and a byte for sizes that are printed in bytes
    return OomFigures(rounding=_UNITS[asked[2]] // 200 + 1, **num_bytes)


def candidates(programs: Sequence[Program], figures: OomFigures) -> list[Candidate]:
    """Find the requests that take such a segment, first those nearest to what was allocated."""
    requests: list[Candidate] = []
    for program in programs:
        requests += _candidates_of(program, figures)
    allocated = figures.allocated
    if allocated is not None:
        requests.sort(key=lambda request: abs(request.allocated - allocated))
    return requests


def _candidates_of(program: Program, figures: OomFigures) -> Iterator[Candidate]:
    """Find the requests of one rank that take such a segment."""
    sizes = program.allocations["bytes"]
    live_bytes = program.live_bytes()
    segment_of = Settings().segment
    num_events_before = int(np.count_nonzero(program.allocations["before"] == 0))
    states_bytes = _states_bytes(program, num_events_before)
    for event, size in enumerate(sizes[num_events_before:].tolist(), num_events_before):
        # memory that is given back, or a segment of another size
        if size <= 0 or abs(segment_of(size) - figures.asked) > figures.rounding:
            continue
        op = program[op_at(program, event)]
        site = site_of(program, event)
        in_use = int(live_bytes[event]) - size
        # Adam makes its states in the first optimizer step: before it they take nothing
        if states_bytes and op.phase != "optimizer":
            yield Candidate(program, event, size, op, site, in_use - states_bytes, first=True)
        yield Candidate(program, event, size, op, site, in_use, first=False)


def _states_bytes(program: Program, num_events_before: int) -> int:
    """Return the bytes of Adam's states that stand before the iteration.

    Args:
        program: Of a rank.
        num_events_before: How many changes of memory are from before the iteration.
    """
    if not num_events_before:
        return 0
    held = holdings_at(program, num_events_before - 1)
    return sum(memory.num_bytes for memory in held if memory.module in STATES)


def limit_of(figures: OomFigures) -> int | None:
    """Return bytes of segments that the process could have; None where the error does not say."""
    allocated, unused, device_free = figures.allocated, figures.unused, figures.device_free
    if allocated is None or unused is None or device_free is None:
        return None
    return allocated + unused + device_free
