"""Which rank's NCCL watchdog fires first, and what does it print?  So that a log can be recognised.

In : State of dumps with wall-clock times.  Out: one sentence, or "" where times are unknown.  Every
outstanding call ends its patience ``timeout_ms`` after it was issued; the first of all ranks fires
(ProcessGroupNCCL.cpp WorkNCCL::checkTimeout, torch 2.13).  It is rarely a culprit's: who waits is
who times out.
"""

from __future__ import annotations

from megatron_prism.hang.dumps import Entry
from megatron_prism.hang.outstanding import State

__all__ = ["first", "message"]

_EPOCH_NS = 10**18  # 2001: smaller numbers are counters, not clocks
_TYPES = {
    "all_reduce": "ALLREDUCE", "all_gather": "_ALLGATHER_BASE",
    "reduce_scatter": "_REDUCE_SCATTER_BASE", "broadcast": "BROADCAST", "reduce": "REDUCE",
    "all_to_all": "ALLTOALL_BASE", "send": "SEND", "recv": "RECV", "barrier": "BARRIER",
    "gather": "GATHER", "scatter": "SCATTER",
}  # fmt: skip


def first(state: State) -> str:
    """The sentence."""
    waits = [
        (entry.created_ns + entry.timeout_ms * 1_000_000, rank, entry)
        for rank, calls in state.outstanding.items()
        for entry in calls
        if entry.created_ns > _EPOCH_NS and entry.timeout_ms > 0
    ]
    if not waits:
        return ""
    begin = min(entry.created_ns for _, _, entry in waits)
    due, rank, entry = min(waits, key=lambda wait: wait[:2])
    after = (due - begin) / 1e9
    return (f"rank {rank}, {after:.1f} s after the first call that waits was issued: "
            + message(rank, entry))  # fmt: skip


def message(rank: int, entry: Entry) -> str:
    """What the watchdog of ``rank`` prints about ``entry``."""
    ins, outs = (sum(side) for side in entry.numbers)
    kind = _TYPES.get(entry.op, entry.op.upper())
    return (f"[Rank {rank}] Watchdog caught collective operation timeout: "
            f"WorkNCCL(SeqNum={entry.seq}, OpType={kind}, NumelIn={ins}, NumelOut={outs}, "
            f"Timeout(ms)={entry.timeout_ms}) of {entry.desc} ran for {entry.timeout_ms} "
            "milliseconds before timing out.")  # fmt: skip
