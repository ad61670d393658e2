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
class Said:
    """What the error says, in bytes; None for what it leaves out.  ``error``: by how much
    ``asked`` and ``allocated`` may be off, being rounded.
    """

    asked: int
    error: int
    capacity: int | None = None
    device_free: int | None = None
    allocated: int | None = None
    unused: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A request of the slices that the error may be about.

    program    : of the rank that asks;  event: of its allocations
    num_bytes  : of the tensor;  op, site : where
    allocated  : bytes that are in use then, in the first iteration or in later ones (``first``)
    """

    program: Program
    event: int
    num_bytes: int
    op: Op
    site: str
    allocated: int
    first: bool


def parse(text: str) -> Said:
    """Read torch's words.  UsageError if they do not say what was asked for."""
    matches = {key: pattern.search(text) for key, pattern in _SAYS.items()}
    sizes = {k: round(float(m[1]) * _UNITS[m[2]]) for k, m in matches.items() if m}
    asked = matches["asked"]
    if asked is None:
        raise UsageError(
            "the text says no 'Tried to allocate … GiB'",
            fix="oom='Tried to allocate 17.58 GiB. … 51.75 GiB is allocated by PyTorch …'",
        )
    return Said(error=_UNITS[asked[2]] // 200 + 1, **sizes)


def candidates(programs: Sequence[Program], said: Said) -> list[Candidate]:
    """Requests that take such a segment, those first that agree best with what was allocated."""
    found = [one for program in programs for one in _candidates(program, said)]
    if (level := said.allocated) is not None:
        found.sort(key=lambda one: abs(one.allocated - level))
    return found


def _candidates(program: Program, said: Said) -> Iterator[Candidate]:
    events, live, segment = program.allocations, program.live_bytes(), Settings().segment
    begun = int(np.count_nonzero(events["before"] == 0))
    stands = holdings_at(program, begun - 1) if begun else ()
    states = sum(one.num_bytes for one in stands if one.module in STATES)
    for at, size in enumerate(events["bytes"][begun:].tolist(), begun):
        if size <= 0 or abs(segment(size) - said.asked) > said.error:
            continue
        op, in_use = program[op_at(program, at)], int(live[at]) - size
        for first in (True, False) if states and op.phase != "optimizer" else (False,):
            level = in_use - states if first else in_use
            yield Candidate(program, at, size, op, site_of(program, at), level, first)


def limit_of(said: Said) -> int | None:
    """Bytes of segments that the process could have; None where the error does not say."""
    parts = said.allocated, said.unused, said.device_free
    return None if None in parts else sum(filter(None, parts))
