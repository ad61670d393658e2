"""CUDA source of the two kernels that make a device wait until a virtual peer would have answered.

``prism_arrive`` writes down when a call's turn has come.  ``prism_call`` is the call itself: it
works out when the call ends, tells the calls after it, moves what the call moves while it runs,
and holds its stream (and as many blocks as NCCL would) until the end.  Times are of %globaltimer,
ns (32 ns a tick on H200).

A call waits from its arrival until its peers are there, then runs for its own time (``own``); what
it moves is spread evenly over that time.  ``own`` is what a call takes its stream, from the end of
what was before it to the beginning of what comes next (``prism calibrate``), so it comes LAUNCH
before its kernel begins to run.  One warp of block 0 works the ends out, the other blocks wait for
the last of them.

Several local ranks share ``end``, ``tag``, ``here``, ``seen`` and ``gone``, which are then host
memory that all their devices see, in the time of the first one's device.  ``prism_ping`` measures
how far this device's clock is from that one: the quickest of many round trips counts, and from the
second measurement on the drift since the last is continued.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "ADDED",
    "CHUNK_NS",
    "CLOCK",
    "COPY_NS",
    "LAUNCH",
    "RING",
    "SHARED",
    "SUM_NS",
    "TABLE",
    "cuda_source",
]

# ns that a kernel which holds a stream for a time takes beyond it, between others (H200: 1.8 to
# 2.1 us behind copies; a kernel that does nothing takes 2.2)
LAUNCH = 2_000
RING = 4  # iterations whose ends are remembered
# The fields of Table, in order: all addresses, but for the last two.
TABLE = (
    "part", "member", "mine", "with", "whom", "own", "start", "cause", "back", "weight",
    "end", "tag", "here", "seen", "gone", "came", "went", "from", "until", "ready", "stuck",
    "clocks", "clock",
)  # fmt: skip
SHARED = ("end", "tag", "here", "seen", "gone")

# struct Clock, as numpy has it.
CLOCK = [("offset", "<i8"), ("at", "<i8"), ("rate", "<f8"), ("round_trip", "<i8")]

ADDED = 16  # what is added to a kind of number whose chunks are added up
# ns from the beginning of a tile until it is written: copied or rewritten (H200: .8 to 1.8 us), and
# added up (2, 4, 8 chunks of 4 MiB in all: .9, 1.3, 2.3 us; of 32 MiB: 1.8, 2.8, 4.4)
COPY_NS, SUM_NS, CHUNK_NS = 1_800, 1_200, 400


def cuda_source(timeout_ns: int, patience_ns: int) -> str:
    """Return the source for the CUDA compiler.

    Args:
        timeout_ns: after which a call that nobody joins gives up, ns.
        patience_ns: for which a call waits for other local ranks, ns.
    """
    limits = {
        "RING": f"{RING}",
        "TIMEOUT": f"{timeout_ns}LL",
        "LAUNCH": f"{LAUNCH}LL",
        "PATIENCE": f"{patience_ns}LL",
        "ADDED": f"{ADDED}",
        "COPY": f"{COPY_NS}LL",
        "SUM": f"{SUM_NS}LL",
        "CHUNK": f"{CHUNK_NS}LL",
    }
    macros = "".join(f"#define {name} {value}\n" for name, value in limits.items())
    return macros + Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")
