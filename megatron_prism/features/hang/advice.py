"""What to do next: whose watchdog fires first, what would decide, where to stop the culprits.

In : the job's state and the verdict.  Out: words and command lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_prism.core.programs.collectives import BY_NAME
from megatron_prism.core.world import format_ranks, ranks_text
from megatron_prism.features.hang import waits
from megatron_prism.features.hang.calls import Entry
from megatron_prism.features.hang.dump_clocks import EPOCH_NS
from megatron_prism.features.hang.dumps import UNNAMED
from megatron_prism.features.hang.logs import op_type
from megatron_prism.features.hang.mismatch import is_batched
from megatron_prism.features.hang.state import JobState
from megatron_prism.features.hang.verdict import JOB, Diagnosis

_MAX_STOPPED = 8  # culprits that one command stops: those of a host


# -- whose watchdog fires first -------------------------------------------------------------------
@dataclass(frozen=True)
class _Deadline:
    """When the watchdog of a rank fires.

    Attributes:
        due_ns: The time.
        rank: The rank.
        place: Place of the call among those of the rank: of calls that are due together the
            first counts.
        entry: The call that waits.
    """

    due_ns: int
    rank: int
    place: int
    entry: Entry


def first_watchdog(state: JobState) -> str:
    """Say which rank's watchdog fires first, and what it prints; "" where no call has a time."""
    deadlines: list[_Deadline] = []
    for rank, calls in state.outstanding.items():
        # of each part the first call is due first
        for part, places in calls.parts_and_places:
            with_clock = places[calls.created_ns[places] > EPOCH_NS]
            if part.timeout_ms > 0 and len(with_clock):
                place = int(with_clock[calls.created_ns[with_clock].argmin()])
                entry = calls[place]
                due_ns = entry.created_ns + entry.timeout_ms * 10**6
                deadlines.append(_Deadline(due_ns, rank, place, entry))
    if not deadlines:
        return ""
    first = min(deadlines, key=lambda deadline: (deadline.due_ns, deadline.rank, deadline.place))
    oldest_ns = min(deadline.entry.created_ns for deadline in deadlines)
    after_s = (first.due_ns - oldest_ns) / 1e9
    is_in_batch = bool(is_batched(state, first.rank, first.entry))
    return (
        f"rank {first.rank}{_others_due(state, deadlines, first)}, {after_s:.1f} s after the first "
        f"call that waits was issued: "
        f"{_watchdog_message(first.rank, first.entry, is_in_batch)}{_unlike_timeouts(state)}"
    )


_LOOK_NS = 10**8  # a watchdog looks every 100 ms (kWatchdogThreadSleepMillis)


def _others_due(state: JobState, deadlines: Sequence[_Deadline], first: _Deadline) -> str:
    """Say whose watchdog may fire before that of the call due first; "" if nobody's."""
    others: list[int] = []
    for deadline in deadlines:
        if deadline.rank != first.rank and deadline.due_ns - first.due_ns < _LOOK_NS:
            others.append(deadline.rank)
    clauses: list[str] = []
    if others:
        clauses.append(f"or {ranks_text(sorted(set(others)))}, due within 0.1 s")
    if state.missing:
        clauses.append("of those with a dump")
    if not clauses:
        return ""
    return f" ({'; '.join(clauses)})"


def _unlike_timeouts(state: JobState) -> str:
    """Say which groups have another time-out than most, by the calls in the dumps."""
    timeout_of_desc: dict[str, int] = {}
    for dump in state.dumps.values():
        calls = dump.entries
        for part in calls.parts:
            if part.timeout_ms > 0:
                timeout_of_desc.setdefault(part.desc, part.timeout_ms)

        # the time-out of a group's last call counts
        by_last_place = sorted(calls.parts_and_places, key=lambda row: int(row[1][-1]))
        for part, _ in by_last_place:
            if part.timeout_ms > 0:
                timeout_of_desc[part.desc] = part.timeout_ms
    usual_ms = Counter(timeout_of_desc.values()).most_common(1)[0][0]
    unlike: list[str] = []
    for desc, timeout_ms in sorted(timeout_of_desc.items()):
        if timeout_ms != usual_ms:
            unlike.append(f"{desc} has {timeout_ms / 1e3:,.0f} s")
    if not unlike:
        return ""
    return f" ({'; '.join(unlike)}; the others {usual_ms / 1e3:,.0f} s)"


# ProcessGroupNCCL.cpp: collectiveCoalesced of reduce_scatter_tensor_coalesced and the like
_COALESCED = ("all_reduce", "all_gather", "reduce_scatter")


def _watchdog_message(rank: int, entry: Entry, is_in_batch: bool) -> str:
    """Return what the watchdog of ``rank`` prints about a call, or the batch in which it is."""
    inputs, outputs = sum(entry.numbers[0]), sum(entry.numbers[1])
    kind = op_type(entry.op)
    if is_in_batch:
        kind = "COALESCED"
    # what a coalescing manager joins has the recorder's name of its kind, and this one in a log
    elif entry.op in _COALESCED:
        kind += " or COALESCED"
    if is_in_batch and entry.pair:
        inputs = outputs = 0
    return (
        f"[Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={entry.seq}, OpType={kind}, NumelIn={inputs}, NumelOut={outputs}, "
        f"Timeout(ms)={entry.timeout_ms}) of {entry.desc} ran for {entry.timeout_ms} "
        "milliseconds before timing out."
    )


# -- what would decide ----------------------------------------------------------------------------
def what_decides(verdict: Diagnosis, state: JobState, programs: bool = False) -> str:
    """Return the one command or setting that would tell which rank is the culprit.

    Args:
        verdict: The verdict.
        state: The job.
        programs: Whether the verdict was held against the job's programs already.

    Returns:
        "" where a rank is named.
    """
    if verdict.exit_code != 3:
        return ""
    suspects: Collection[int] = verdict.candidates or [c.rank for c in verdict.culprits]
    suspects = suspects or waits.last_waited_for(state) or state.missing or _silent(state)
    waits_outside = any("outside NCCL" in line for line in verdict.evidence)
    # time-outs ended the ranks that waited: they have no stack any more
    if waits_outside and not suspects and state.has_only_logs:
        return "what the other ranks printed: prism hang DIR with all logs in DIR"
    suspects = suspects or [0]

    # what the evidence asks for
    if any("--then DIR" in line for line in verdict.evidence):
        return "prism hang DIR --then DIR2: dumps of the same job some seconds later"
    if waits_outside:
        return _log_or_stack(state, suspects, stack_too=True)
    lacks_dump = any("and no dump" in line for line in verdict.evidence)
    if verdict.verdict == "missing dump" or lacks_dump:
        return _log_or_stack(state, suspects)

    return _missing_setting(state, programs)


def _silent(state: JobState) -> list[int]:
    """Return the ranks of the job of which there is neither a dump nor a line."""
    all_ranks = set(range(state.observed.world))
    return sorted(all_ranks - state.dumps.keys() - state.observed.logged)


def _missing_setting(state: JobState, programs: bool) -> str:
    """Return the command or setting that gives what the dumps lack."""
    only_logs = all(dump.version == "log" for dump in state.dumps.values())
    has_unknown_members = any(group.partial for group in state.groups.values())
    is_empty = not any(dump.entries or dump.status for dump in state.dumps.values())
    silent = _silent(state)
    if is_empty and 0 < len(silent) <= len(state.observed.logged):
        return _log_or_stack(state, silent)
    if is_empty or only_logs and has_unknown_members:
        return "TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 in the job: dumps"
    if not programs:
        return (
            "prism hang DIR -- pretrain_gpt.py <the job's arguments>: its programs, captured "
            "on tier meta, tell who left the order"
        )
    if not state.history:
        return "TORCH_INCLUDE_ONLY_ACTIVE=0 in the job: dumps with the calls that ended"
    return "TORCH_NCCL_ENABLE_TIMING=1 in the job: which device started its call"


def _log_or_stack(state: JobState, suspects: Collection[int], stack_too: bool = False) -> str:
    """Say what to ask for of ranks: their logs, where these are not there; else their stacks.

    In a log of several ranks one that says nothing has no log of its own to give.
    """
    logged = state.observed.logged
    without_log = [rank for rank in suspects if rank not in logged]

    # no rank has a log
    if without_log and not logged:
        ranks = ranks_text(without_log)
        if stack_too:
            text = f"the log of {ranks}, or its stack: prism hang DIR with the logs in DIR, "
            return text + "py-spy dump"
        return f"what {ranks} printed: prism hang DIR with its log in DIR"

    # some have one
    if without_log:
        stacks = f"py-spy dump > DIR/rank{min(without_log)}.txt"
        ranks = ranks_text(without_log)
        stack = f"a stack while it hangs ({stacks})"
        return f"the log of {ranks}, if there is one, or {stack}: prism hang DIR"
    stacks = f"py-spy dump > DIR/rank{min(suspects)}.txt"
    return f"the stack of {ranks_text(suspects)} ({stacks}), while it hangs: prism hang DIR"


# -- where to stop the culprits -------------------------------------------------------------------
def breakpoint_at(call: str, site: str) -> str:
    """Return a call as ``--prism-break`` takes it; sites are those inside Megatron's folder."""
    if not site:
        return call
    return f"{call} at {site.rpartition('megatron/')[2]}"


def stop_command(calls: Mapping[int, str], size: int | str) -> str:
    """Return the command that runs ranks of a world of ``size`` and stops each at its call."""
    ranks_of_call: dict[str, list[int]] = {}
    for rank, call in calls.items():
        ranks_of_call.setdefault(call, []).append(rank)
    ranks = ",".join(map(str, calls))
    flags = f"--prism-world-size {size} --prism-ranks {ranks} --prism-break "
    if len(calls) == 1:
        return f"prism run {flags}'{next(iter(calls.values()))}' -- {JOB}"

    # several would share one terminal
    stops = [f"rank={format_ranks(group)} {call}" for call, group in ranks_of_call.items()]
    flags += f"'{'; '.join(stops)}' --prism-debugger debugpy:5678"
    return f"torchrun --nproc-per-node {len(calls)} {JOB} --prism-emulate {flags}"


def stop_of(state: JobState, call: Entry, ranks: Sequence[int]) -> str:
    """Return the command that stops ``ranks`` at ``call``; "" where it has no name.

    The number of the call since the job began is known, and is one of the first iteration's, where
    the recorder still holds the first call.
    """
    if call.op not in BY_NAME or call.desc == UNNAMED:
        return ""
    calls: dict[int, str] = {}
    for rank in ranks[:_MAX_STOPPED]:
        entries: Sequence[Entry] = ()
        if rank in state.dumps:
            entries = state.dumps[rank].entries
        number = ""
        if not call.pair and entries and entries[0].record == 0:
            number = f" #{call.seq}"
        calls[rank] = breakpoint_at(f"{call.op}{number} of {call.desc}", call.site)
    world: list[int] = []
    for group in state.groups.values():
        if group.desc == "default_pg" and not group.partial:
            world += group.ranks

    # a log does not say how many ranks there are
    if state.has_logs and not world:
        return stop_command(calls, "N")
    return stop_command(calls, 1 + max(*world, *state.dumps, *state.missing, 0))
