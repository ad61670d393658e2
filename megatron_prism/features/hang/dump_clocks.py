"""Find dumps that another attempt of the job left in the folder, by the clocks of dumps.

In : a DumpSet.  Out: rank -> why its dump is of another attempt than most.

Ranks of one attempt call side by side: a rank that waits for the others waits no longer than the
time-out of its call, and nobody ends a call that needs a rank before this has issued it.  So dumps
are of two attempts where all calls of the ones are older than all calls of the others, by more than
that time-out; by less where the others' recorders still have the first call of their process, or
where the older files were written before the others issued their calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megatron_prism.core.units import format_ns
from megatron_prism.features.hang.dumps import Dump, DumpSet

JOINT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")  # need everybody
EPOCH_NS = 10**18  # 2001: smaller numbers are counters, not clocks
_SECOND_NS = 10**9
_SKEW_NS = 60 * _SECOND_NS  # clocks of hosts differ by less, and a restart takes longer
_TIMEOUT_NS = 600 * _SECOND_NS  # of NCCL's groups, by default (torch's constants.py)


@dataclass(frozen=True)
class _Lifetime:
    """What a dump says of the time of its process.

    Attributes:
        rank: The rank.
        first_ns: When it issued the oldest call that it recorded.
        last_ns: When it issued the newest one.
        written_ns: When the file was written; 0 if that is not known.
        is_from_start: Whether its oldest call is the first one of its process.
    """

    rank: int
    first_ns: int
    last_ns: int
    written_ns: int
    is_from_start: bool


def other_attempts(observed: DumpSet) -> dict[int, str]:
    """Find the dumps of other attempts than the one of which most dumps are.

    Args:
        observed: All dumps.

    Returns:
        Rank -> why its dump is of another attempt.
    """
    lifetimes = _lifetimes(observed.dumps)
    if not lifetimes:
        return {}
    attempts = _by_attempt(observed.dumps, lifetimes)
    # of two that are as large the later one
    largest = max(reversed(attempts), key=len)
    texts: dict[int, str] = {}
    for attempt in attempts:
        if attempt is largest:
            continue
        is_earlier = attempt[0].first_ns < largest[0].first_ns
        for lifetime in attempt:
            texts[lifetime.rank] = _text(lifetime, largest, is_earlier)

    # dumps without a call have no other time than that of their files
    first_ns = min(lifetime.first_ns for lifetime in largest)
    timed_ranks = {lifetime.rank for lifetime in lifetimes}
    if _are_files_timed(lifetimes):
        for rank, dump in observed.dumps.items():
            gap_ns = first_ns - dump.written_ns
            if rank not in timed_ranks and dump.written_ns and gap_ns > _SKEW_NS:
                text = f"it was written {format_ns(gap_ns)} before the first call of the others"
                texts[rank] = f"the dump of rank {rank} is of another attempt: {text}"
    return texts


def _text(lifetime: _Lifetime, largest: Sequence[_Lifetime], is_earlier: bool) -> str:
    """Say why a dump is of another attempt than the largest one."""
    if is_earlier:
        first_ns = min(of_largest.first_ns for of_largest in largest)
        gap_ns = first_ns - lifetime.last_ns
        order = f"its last call was issued {format_ns(gap_ns)} before the first"
    else:
        last_ns = max(of_largest.last_ns for of_largest in largest)
        gap_ns = lifetime.first_ns - last_ns
        order = f"its first call was issued {format_ns(gap_ns)} after the last"
    text = f"the dump of rank {lifetime.rank} is of another attempt: {order} of the others"
    return f"{text}, or its clock is wrong"


def _lifetimes(dumps: Mapping[int, Dump]) -> list[_Lifetime]:
    """Return the lifetimes of dumps whose calls have clocks, by their oldest calls."""
    lifetimes: list[_Lifetime] = []
    for rank, dump in dumps.items():
        calls = dump.entries

        # calls made up from counters have no clock
        clocks_ns = calls.created_ns[calls.created_ns > EPOCH_NS]
        if not len(clocks_ns):
            continue
        first_ns, last_ns = int(clocks_ns.min()), int(clocks_ns.max())
        is_from_start = bool((calls.record == 0).any())
        lifetimes.append(_Lifetime(rank, first_ns, last_ns, dump.written_ns, is_from_start))
    lifetimes.sort(key=lambda lifetime: lifetime.first_ns)
    return lifetimes


def _by_attempt(dumps: Mapping[int, Dump], lifetimes: Sequence[_Lifetime]) -> list[list[_Lifetime]]:
    """Part lifetimes, which are in the order of their oldest calls, into attempts."""
    limit_ns = _longest_timeout_ns(dumps) + _SKEW_NS
    are_files_timed = _are_files_timed(lifetimes)
    attempts: list[list[_Lifetime]] = []
    current: list[_Lifetime] = []
    last_ns = 0
    for place, lifetime in enumerate(lifetimes):
        gap_ns = lifetime.first_ns - last_ns
        is_break = bool(current) and gap_ns > _SKEW_NS

        # a gap within a time-out may be of one attempt, too: another sign must show that it is not
        if is_break and gap_ns <= limit_ns:
            later = lifetimes[place:]
            written_ns = max(earlier.written_ns for earlier in current)
            are_written = are_files_timed and lifetime.first_ns - written_ns > _SKEW_NS
            is_break = are_written or _ended_without(dumps, current, later)

        # the attempt before ends
        if is_break:
            attempts.append(current)
            current = []
        current.append(lifetime)
        last_ns = max(last_ns, lifetime.last_ns)
    attempts.append(current)
    return attempts


def _longest_timeout_ns(dumps: Mapping[int, Dump]) -> int:
    """Return the longest time-out of a call."""
    timeouts_ms: set[int] = set()
    for dump in dumps.values():
        for part in dump.entries.parts:
            timeouts_ms.add(part.timeout_ms)
    longest_ms = max(timeouts_ms, default=-1)
    if longest_ms <= 0:
        return _TIMEOUT_NS
    return longest_ms * 10**6


def _are_files_timed(lifetimes: Collection[_Lifetime]) -> bool:
    """Tell whether files have the times at which they were written, and not those of a copy.

    A copy is younger than every call, so that no file seems too old; an archive of another time
    zone is older than the calls in it.
    """
    for lifetime in lifetimes:
        if not lifetime.written_ns or lifetime.written_ns < lifetime.last_ns - _SKEW_NS:
            return False
    return True


def _ended_without(
    dumps: Mapping[int, Dump], earlier: Sequence[_Lifetime], later: Sequence[_Lifetime]
) -> bool:
    """Tell whether calls of the earlier dumps ended before members of their groups issued any.

    A rank that starts late holds up the others: none of their calls with it ends before.
    """
    started_later = {lifetime.rank for lifetime in later if lifetime.is_from_start}
    for lifetime in earlier:
        dump = dumps[lifetime.rank]

        # members of groups in which a call that needs everybody ended
        members: set[int] = set()
        for part in dump.entries.parts:
            if part.done and part.op in JOINT and part.group in dump.groups:
                members.update(dump.groups[part.group].ranks)
        if members.isdisjoint(started_later):
            return False
    return True
