"""The ops that programs are made of, as rows of a table and as values.

``OP`` is the numpy row, so that a hundred thousand ops load in milliseconds; ``Op`` is the same row
for people, tests and the text form.  Semantics, in CUDA's terms:

==============  ====================================================================================
compute         kernels on ``stream``: ``ns`` measured (-1: unknown), ``flops``, ``traffic`` bytes.
                ``host``: how long the host takes to issue them, ``lead`` of it until the device may
                begin and then never waits for a launch; ``ns`` is then the kernels' alone, as if
                the host were always ahead.  Unknown (-1): ``ns`` has its delays in it.
                ``products`` of ``ns`` are matrix products and attention (-1: unknown)
all_reduce ...  any row of ``collectives.TABLE`` that is no p2p: issued from ``stream``, runs on the
                group's own stream.  Without a handle the issuing stream waits for it at once
send recv       p2p with the rank ``peer`` places further in the group's ring of members (may be
                negative); the position is relative, so that all ranks of a class say the same
record          an event of ``stream``: everything issued there so far, by its handle
wait            ``stream`` waits for the op with this handle
host_wait       the host waits until ``stream`` (its note: or everything) is idle
grad_sync       a gradient bucket's communication is asked for; param_sync: a parameter gather
mark            nothing runs; the note says what was reached
==============  ====================================================================================

``group`` is Megatron's group_desc and a rank is in at most one group of each description.  Ops that
share a ``batch`` number are one call to NCCL (coalesced collectives, batched p2p).  Times are whole
nanoseconds, sizes whole bytes; -1 in a number of an op means that it is unknown or does not apply.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

import numpy as np

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs.collectives import TABLE

NAMES = ("compute", "record", "wait", "host_wait", "grad_sync", "param_sync", "mark") + tuple(
    row.name for row in TABLE
)
CODE = {name: code for code, name in enumerate(NAMES)}
IS_PAIR = np.array([name in ("send", "recv") for name in NAMES])
_COLLECTIVES = frozenset(row.name for row in TABLE if row.kind == "group")
_OF_NCCL = frozenset(row.name for row in TABLE if row.nccl)
IS_COLLECTIVE = np.array([name in _COLLECTIVES for name in NAMES])
IS_CALL = IS_COLLECTIVE | IS_PAIR
IS_NCCL = np.array([name in _OF_NCCL for name in NAMES])
# letters of the text form; W is a weight gradient computed apart from its backward
PHASES = {"": "-", "forward": "F", "backward": "B", "weight": "W", "optimizer": "O", "sync": "G"}
PHASE_NAMES = tuple(PHASES)
STEPS = ("forward", "backward", "weight")  # phases of a microbatch, which Python runs
SHARED = "DATA_PARALLEL"  # in the names of groups whose members share parameters out
DTYPES = {
    "": 0,
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "fp8e4m3": 1,
    "fp8e5m2": 1,
}
DTYPE_NAMES = tuple(DTYPES)
DTYPE_WORDS = {  # of torch, as its recorders write them
    "bf16": "BFloat16",
    "fp16": "Half",
    "fp32": "Float",
    "fp64": "Double",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "fp8e4m3": "Float8_e4m3fn",
    "fp8e5m2": "Float8_e5m2",
}
ITEM_SIZE = np.array(list(DTYPES.values()), dtype=np.int64)
REDUCE = ("", "sum", "avg", "max", "min", "product", "band", "bor", "bxor", "premul_sum")

OP = np.dtype(
    [
        ("name", "u1"),  # index into NAMES
        ("phase", "u1"),  # index into PHASE_NAMES
        ("dtype", "u1"),  # index into DTYPE_NAMES
        ("reduce", "u1"),  # index into REDUCE
        ("chunk", "i2"),
        ("stream", "u2"),  # indices into Program.strings
        ("group", "u2"),
        ("shape", "u2"),
        ("site", "u4"),
        ("note", "u4"),
        ("microbatch", "i4"),
        ("peer", "i4"),  # relative group position of a p2p's other side
        ("root", "i4"),  # group rank of a rooted collective's root
        ("splits", "i4"),  # index into Program.splits
        ("handle", "i4"),
        ("batch", "i4"),
        ("kernels", "i4"),
        ("num_in", "i8"),  # elements of this rank's input and output
        ("num_out", "i8"),
        ("ns", "i8"),
        ("flops", "i8"),
        ("traffic", "i8"),
        ("host", "i8"),
        ("lead", "i8"),
        ("products", "i8"),
    ]
)
# What of the live memory changed before which op: storage ids are the program's own.  ``note`` says
# whose storage it is, as ``kind:module @file:line``; every part may be absent (kinds: memory.py).
ALLOCATION = np.dtype([("before", "i4"), ("storage", "i4"), ("bytes", "i8"), ("note", "u4")])
# for a storage in a history: the cache is emptied, the host waits, a train step begins
EMPTIED, WAITED, BEGUN = -1, -2, -3
TEXTS = ("stream", "group", "shape", "site", "note")
CODED: dict[str, tuple[str, ...]] = {
    "name": NAMES,
    "phase": PHASE_NAMES,
    "dtype": DTYPE_NAMES,
    "reduce": REDUCE,
}


@dataclass(frozen=True)
class Op:
    """One op, readable; see the module for what the fields mean and OP for their units."""

    name: str
    group: str = ""
    dtype: str = ""
    num_in: int = -1
    num_out: int = -1
    reduce: str = ""
    peer: int = 0
    root: int = -1
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    stream: str = "main"
    handle: int = -1
    batch: int = -1
    phase: str = ""
    microbatch: int = -1
    chunk: int = -1
    ns: int = -1
    flops: int = -1
    traffic: int = -1
    host: int = -1
    lead: int = -1
    products: int = -1
    kernels: int = -1
    shape: str = ""
    site: str = ""
    note: str = ""

    @property
    def label(self) -> str:
        """``2F0``: microbatch 2, forward, chunk 0; ``O`` optimizer; ``-`` outside."""
        return label(self.phase, self.microbatch, self.chunk)

    @property
    def call_label(self) -> CallLabel:
        """What selectors look at."""
        place = self.microbatch, self.chunk, self.phase, self.site
        return CallLabel(self.name, self.group, -1, *place)

    def __post_init__(self) -> None:
        for name, values in CODED.items():
            if getattr(self, name) not in values:
                message = f"an op's {name} cannot be {getattr(self, name)!r}"
                raise ProgramError(message, fix=f"use one of {', '.join(filter(None, values))}")


def label(phase: str, microbatch: int, chunk: int) -> str:
    """How a step is written: ``2F0``, ``2F`` without chunks, ``O``, ``-``."""
    letter = PHASES[phase]
    before = str(microbatch) if microbatch >= 0 else ""
    return f"{before}{letter}{chunk if chunk >= 0 else ''}"


# columns in which -1 is "unknown" or "none"
UNKNOWN = ("splits", *(column.name for column in fields(Op) if column.default == -1))


@cache
def limits(field: str) -> tuple[int, int]:
    """The smallest and the largest number that a column (or a ``rank``) holds; -1 is unknown.

    Those of 64 bits stay below 2^59, so that what follows from them (bytes, sums) fits as well.
    """
    dtype = np.dtype(np.int32)
    for table in (ALLOCATION, OP):
        if field in (table.names or ()):
            dtype = table[field]
    largest = min(int(np.iinfo(dtype).max), 1 << 59)
    if field == "peer":  # an offset, which may go back
        return -largest, largest
    if field in ("rank", "storage", "bytes"):
        return 0, largest
    return -1, largest


@dataclass(frozen=True)
class CallLabel:
    """What a rank's call is called by, for whoever looks for one."""

    op: str
    group: str
    iteration: int = -1  # from 1; -1 where programs know none
    microbatch: int = -1
    chunk: int = -1
    phase: str = ""
    site: str = ""


# Names in notes of segments that are no kernels, but work of the host on large tensors, with its
# bytes: copies that the computing waits for, copies of another stream beside the computing, copies
# of memory that is not pinned, and what the host's own operators read and write.
HOST_COPY = "host_copy"
HOST_COPY_BESIDE = "host_copy_beside"
HOST_COPY_UNPINNED = "host_copy_unpinned"
ON_HOST = "host_memory"
HOST_WORK = frozenset((HOST_COPY, HOST_COPY_BESIDE, HOST_COPY_UNPINNED, ON_HOST))
