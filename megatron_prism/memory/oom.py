"""An out-of-memory error of torch: which request of the job's slices it was, and when.

``CUDA out of memory. Tried to allocate 17.58 GiB. … 51.75 GiB is allocated by PyTorch, and 17.84
GiB is reserved by PyTorch but unallocated.`` (CUDACachingAllocator.cpp, ``alloc_found`` @torch
2.11): two decimals, so that a request is known to a few MiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import Op
from megatron_prism.core.program import Program
from megatron_prism.memory.peaks import HeldMemory, holdings_at, op_at, site_of

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
    ``asked`` and ``allocated`` may be off, being rounded."""

    asked: int
    error: int
    capacity: int | None = None
    device_free: int | None = None
    allocated: int | None = None
    unused: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A request of the slices that the error may be about.

    num_bytes  : what is asked for;  op, site : where
    allocated  : bytes that are in use then, in the first iteration or in later ones (``first``)
    holdings   : what is alive then, largest first, as in later iterations
    """

    num_bytes: int
    op: Op
    site: str
    allocated: int
    first: bool
    holdings: tuple[HeldMemory, ...]


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


def candidates(program: Program, said: Said) -> list[Candidate]:
    """Requests of that size, those first that agree best with what was allocated."""
    events, live = program.allocations, program.live_bytes()
    found = []
    for at in range(len(events)):
        size = int(events["bytes"][at])
        if abs(size - said.asked) > said.error or not events["before"][at]:
            continue
        op = program[op_at(program, at)]
        holdings = holdings_at(program, at)
        states = sum(h.num_bytes for h in holdings if h.module in STATES)
        in_use = int(live[at]) - size
        for first in (True, False) if states and op.phase != "optimizer" else (False,):
            level = in_use - states if first else in_use
            found.append(Candidate(size, op, site_of(program, at), level, first, holdings))
    if said.allocated is not None:
        level = said.allocated
        found.sort(key=lambda one: abs(one.allocated - level))
    return found


def limit_of(said: Said) -> int | None:
    """Bytes of segments that the process could have; None where the error does not say."""
    parts = said.allocated, said.unused, said.device_free
    return None if None in parts else sum(filter(None, parts))
