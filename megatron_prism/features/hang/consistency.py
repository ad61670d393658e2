"""Set dumps apart that are of another job, or of another moment, than the others.

In : a DumpSet.  Out: ``ConsistentDumps``: the dumps that belong together, and why the others do
not.  A dump that somebody asked for by hand, before the job stood still, makes its rank look late;
one that was left in the folder by another job describes other groups.  Neither says who is to
blame.

A call that needs everybody ends nowhere before all have issued it.  So a rank that has not issued a
call which ended elsewhere was written down earlier.  The root of a broadcast may be ahead of the
others: where the calls are not known (outstanding ones only), groups in which Megatron broadcasts
must be ``_AHEAD`` calls apart.

The other way round, a few ranks may say that calls ended in which most members still wait.  So does
who was written down after its communicators were aborted (ProcessGroupNCCL's watchdog then takes
its calls for completed), and a dump that an earlier attempt, which got further, left behind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks, ranks_text
from megatron_prism.features.hang import dump_clocks, waits
from megatron_prism.features.hang.calls import CallPart, Launch
from megatron_prism.features.hang.dump_clocks import EPOCH_NS, JOINT
from megatron_prism.features.hang.dumps import Dump, DumpSet, Group
from megatron_prism.features.hang.siblings import fewest_at_odds
from megatron_prism.features.hang.state import CallKey, JobState, issue_order, key_of
from megatron_prism.features.hang.verdict import Diagnosis

# groups in which Megatron's iterations are joint: not the tensor-parallel ones, which broadcast
_ROOTLESS = ("EXPERT_", "DATA_PARALLEL", "INTRA_", "MODEL_PARALLEL")
_MIXED = ("PIPELINE", "CONTEXT", "default_pg")  # their counters may count messages too
_AHEAD = 32
_PART = 4  # of so many dumps one may be of another moment,
_MOVED = 6  # or one that was not aborted
_FEW, _EIGHT = 2, 8  # culprits that need nothing in common; and of so many ranks one
_SHARE = 10  # nothing is stuck before a tenth of its time-out is over
_STILL = {"host stuck", "device stuck"}
_MOVING = {*_STILL, "order", "skipped call", "extra call"}
_PROOF = (
    "proof that nothing moves: who is late in a job that runs leaves the same dumps; a second set, "
    "some seconds later, tells: --then DIR"
)
_SEVERAL = ("CONTEXT", "HIERARCHICAL", "HYBRID")  # a rank may be in several of these
_FEWER = 4  # times fewer ranks are further on than are behind: those few are the odd ones


@dataclass(frozen=True)
class ConsistentDumps:
    """Dumps that belong together.

    Attributes:
        state: Of what can be judged.
        of_other_attempts: Rank -> why its dump is of another attempt of the job.
        stale: Rank -> why its dump is of another moment.
        new: Rank -> that its dump has no call yet, though others went on: a rank that was started
            again leaves such a dump, and one that was written down before its first call.
        strangers: Why there is nothing to judge; "" if there is.
        otherwise: Ranks that have other groups than the rest, which never met in them -> one of
            these groups.
    """

    state: JobState
    of_other_attempts: Mapping[int, str] = field(default_factory=dict)
    stale: Mapping[int, str] = field(default_factory=dict)
    new: Mapping[int, str] = field(default_factory=dict)
    strangers: str = ""
    otherwise: Mapping[int, Group] = field(default_factory=dict)


def consistent_dumps(observed: DumpSet) -> ConsistentDumps:
    """Find the dumps that belong together."""
    observed = _with_distinct_descriptions(_with_named_counters(observed))
    old = dump_clocks.other_attempts(observed)
    if not old:
        return _of_one_attempt(observed)

    # so many that nobody knows which attempt is asked about
    if _PART * len(old) > len(observed.dumps):
        text = f"the dumps of {ranks_text(sorted(old))} are of another attempt than the others"
        return ConsistentDumps(JobState(observed), old, strangers=text)
    parted = _of_one_attempt(_observed_without(observed, old))
    return replace(parted, of_other_attempts=old)


def _of_one_attempt(observed: DumpSet) -> ConsistentDumps:
    """Find the dumps that belong together, of dumps of one attempt of the job."""
    state = JobState(observed)

    # a few ranks have other groups than the rest, in which nobody met: started with other sizes
    unlike_groups = _other_groups(observed)
    is_minority = 2 * len(unlike_groups) < len(observed.dumps)
    if unlike_groups and is_minority and _never_met(observed, unlike_groups):
        return ConsistentDumps(state, otherwise=unlike_groups)
    if len(unlike_groups) > 1:
        first_rank = min(unlike_groups)
        text = f"{ranks_text(unlike_groups)} describe other groups than the rest (group "
        text += f"{unlike_groups[first_rank].name} on rank {first_rank}): dumps of two jobs, or of "
        text += "ranks that were started with other parallel sizes"
        return ConsistentDumps(state, strangers=text)

    # dumps that say that a call ended in which others wait
    apart = _aborted(state)
    if apart:
        state = _without(observed, apart)

    # dumps of ranks that lack a call which ended elsewhere
    moments = _moments(state)
    if moments.ahead and _FEWER * len(moments.ahead) <= len(moments.stale):
        remaining_state = _without(observed, {*apart, *moments.ahead})
        remaining = _moments(remaining_state)

        # a few dumps of a later moment are likelier than many of an earlier one
        if not remaining.stale:
            apart |= moments.ahead
            state, moments = remaining_state, remaining

    if _are_too_many(observed, apart, moments.stale):
        moment = "an earlier"
        if apart:
            moment = "another"
        text = f"the dumps of {ranks_text({*apart, *moments.stale})} are of {moment} moment"
        return ConsistentDumps(state, strangers=text)
    if moments.stale:
        state = _without(observed, {*apart, *moments.stale})
    return ConsistentDumps(state, stale=apart | moments.stale, new=moments.new)


def _are_too_many(observed: DumpSet, apart: Collection[int], stale: Collection[int]) -> bool:
    """Tell whether so many dumps are of another moment that the others prove nothing."""
    dump_count = len(observed.dumps)
    if _PART * len({*apart, *stale}) > dump_count:
        return True

    # an abort leaves nothing outstanding: other dumps are of ranks that were moving
    moving = set(stale)
    for rank in apart:
        if any(not part.done for part in observed.dumps[rank].entries.parts):
            moving.add(rank)
    return len(moving) > max(1, dump_count // _MOVED)


def unless_running(
    verdict: Diagnosis, parted: ConsistentDumps, differ: Collection[Launch], excused: set[int]
) -> Diagnosis:
    """Name no rank that is behind where the job may have been running when dumps were written.

    What a rank issued it has issued; what it saw end is as old as its watchdog's last look, 100 ms,
    and dumps are of moments up to seconds apart.  So every call to which all have come may have
    ended since (``waits.whom_calls_need``).  A job that stands still is not changed by
    that: whoever waits does so in the end for the culprits.  And few stop by themselves at once.

    Args:
        verdict: What the dumps say if the job stood still.
        parted: The dumps of one moment, and what was set apart.
        differ: Calls that members make differently: these do not end.
        excused: Ranks that are not named though others wait for them.
    """
    named = {culprit.rank for culprit in verdict.culprits}
    moving_kinds = {culprit.kind for culprit in verdict.culprits} & _MOVING
    if not moving_kinds and (verdict.culprits or verdict.verdict != "deadlock"):
        return verdict
    suspects = named or set(verdict.candidates)
    doubt = _doubt_of_running(verdict, parted, suspects, excused, differ)
    if not doubt:
        if moving_kinds & _STILL:
            verdict = replace(verdict, missing=(*verdict.missing, _PROOF))
        return verdict
    return replace(
        verdict,
        verdict="undetermined",
        confidence="possible",
        culprits=(),
        candidates=tuple(sorted(suspects)),
        evidence=(doubt, *verdict.evidence),
    )


def _doubt_of_running(
    verdict: Diagnosis,
    parted: ConsistentDumps,
    suspects: Collection[int],
    excused: Collection[int],
    differ: Collection[Launch],
) -> str:
    """Say why the job may have been running; "" where nothing says so."""
    state = parted.state
    late = f"those who look late ({ranks_text(suspects)})"
    again = "perhaps the job was running: a second set of dumps, --then DIR, tells"
    # watchdogs fired, and the job has ended
    if state.has_only_logs and state.observed.waits:
        again = "perhaps they wait outside NCCL"

    # the oldest call is younger than a tenth of its time-out
    oldest = _oldest_wait(state)
    if 0 <= _SHARE * oldest.waited_ns < oldest.limit_ns:
        waited_s, limit_s = oldest.waited_ns / 1e9, oldest.limit_ns / 1e9
        return (
            f"the oldest call waits {waited_s:.0f} s of its {limit_s:.0f} s; less than "
            f"a tenth is no hang: {again}"
        )

    # somebody waits for none of those who would be named
    independent = _free_of(state, {*suspects, *excused}, differ)
    if independent:
        return f"{ranks_text(independent)} may wait for others than {late}: {again}"

    # dumps are of several moments, or what would be named has nothing in common
    apart_count = len({*parted.stale, *parted.new})
    are_many_apart = _PART * apart_count > len(state.dumps) + len(parted.stale)
    are_several = len({culprit.rank for culprit in verdict.culprits}) > 1
    if are_many_apart or are_several and (parted.stale or _by_chance(verdict, state)):
        return f"{late} have nothing in common, or their dumps are of several moments: {again}"
    return ""


class _Wait(NamedTuple):
    """How long a call waits.

    Attributes:
        waited_ns: From its issue to the writing of the dump.
        limit_ns: Its time-out.
    """

    waited_ns: int
    limit_ns: int


def _oldest_wait(state: JobState) -> _Wait:
    """Return the outstanding call that waits longest, of those with a clock; else none of 0 ns."""
    oldest = _Wait(0, 0)
    is_known = False
    for rank, dump in state.dumps.items():
        if not dump.written_ns:
            continue
        calls = state.outstanding[rank]
        for part, places in calls.parts_and_places:
            issued_ns = calls.created_ns[places]
            issued_ns = issued_ns[issued_ns > EPOCH_NS]
            if not len(issued_ns):
                continue
            wait = _Wait(dump.written_ns - int(issued_ns.min()), part.timeout_ms * 10**6)

            # where clocks differ it may be negative: it counts, too
            if not is_known or wait > oldest:
                oldest = wait
                is_known = True
    return oldest


def unless_moved(verdict: Diagnosis, before: DumpSet, after: DumpSet) -> Diagnosis:
    """Return the verdict on the second of two sets of dumps, by what moved between them.

    A rank that made a call or saw one end is alive and no culprit; a job of which all ranks did so
    runs.
    """
    ranks_in_both = sorted(before.dumps.keys() & after.dumps.keys())
    moved: list[int] = []
    for rank in ranks_in_both:
        if position(before.dumps[rank]) != position(after.dumps[rank]):
            moved.append(rank)
    counted_ranks = counted(len(ranks_in_both), "rank")
    text = f"{len(moved)} of {counted_ranks} made calls, or saw one end, in between"
    if not ranks_in_both:
        text = "no rank left a dump in both sets: what moved is not known"
    evidence = (text, *verdict.evidence)

    # all moved
    if ranks_in_both and len(moved) == len(ranks_in_both):
        return Diagnosis("healthy", evidence=evidence, missing=verdict.missing)
    # nobody did
    if not moved and ranks_in_both:
        return replace(verdict, evidence=evidence)
    # some did, or nobody knows
    suspects = [culprit.rank for culprit in verdict.culprits if culprit.rank not in moved]
    return replace(
        verdict,
        verdict="undetermined",
        culprits=(),
        confidence="possible",
        candidates=tuple(suspects) or verdict.candidates,
        evidence=evidence,
    )


def position(dump: Dump) -> tuple[object, ...]:
    """Return where a rank stands: its counters, its last record, and its outstanding calls."""
    last_record = -1
    if dump.entries:
        last_record = dump.entries[-1].record
    outstanding = dump.entries.taken(~dump.entries.done)
    return dict(dump.status), last_record, outstanding.launches()


def _free_of(state: JobState, ranks: Collection[int], differ: Collection[Launch]) -> list[int]:
    """Find ranks that wait, and in the end for none of ``ranks``.

    A rank that waits for one of which the dumps do not say what it waits for is not among them.
    """
    ranks_needed = waits.whom_calls_need(state, differ=differ)
    ranks_waiting = waits.reversed_edges(ranks_needed)
    without_dump = ranks_waiting.keys() - state.dumps.keys()
    sources = {*ranks, *state.hidden, *state.mute(), *without_dump}
    reached = waits.reached_from(sources, ranks_waiting)
    free: list[int] = []
    for rank, calls in state.outstanding.items():
        if calls and rank not in reached:
            free.append(rank)
    return free


def _by_chance(verdict: Diagnosis, state: JobState) -> bool:
    """Tell whether the culprits that are stuck have nothing in common.

    They are too many to have stopped by themselves, or stopped at different calls, and are no group
    or stage as a whole, which may wait for what dumps do not show.  Hosts and devices do not stand
    for one reason.
    """
    stuck = [culprit for culprit in verdict.culprits if culprit.kind in _STILL]
    ranks = {culprit.rank for culprit in stuck}
    if len({culprit.kind for culprit in stuck}) > 1:
        return True

    # of hosts the first call that waits for each
    first_calls: dict[int, CallKey] = {}
    for (_, rank), entry in sorted(state.lates.items(), key=lambda late: issue_order(late[1])):
        first_calls.setdefault(rank, key_of(entry))
    calls_of_hosts: set[CallKey | None] = set()
    for culprit in stuck:
        if culprit.kind == "host stuck":
            calls_of_hosts.add(first_calls.get(culprit.rank))

    most_by_chance = min(_FEW, -(-len(state.dumps) // _EIGHT))
    if len(ranks) <= most_by_chance and len(calls_of_hosts) <= 1:
        return False
    if ranks == state.dumps.keys():
        return True
    units = [set(group.ranks) for group in state.groups.values()]
    units += [set(siblings) for siblings in state.siblings.values()]
    return ranks not in units


def _with_named_counters(observed: DumpSet) -> DumpSet:
    """Name counters that a dump cannot name, as where group names are hashes and it has no calls.

    Ranks with groups of the same descriptions made them in the same order, and the calls of others
    tell which number is whose.
    """
    if not any(dump.unnamed for dump in observed.dumps.values()):
        return observed

    # descriptions of a rank's groups -> (number of a group, its description), as some rank knows
    named_groups: dict[tuple[str, ...], set[tuple[str, str]]] = defaultdict(set)
    descriptions: dict[int, tuple[str, ...]] = {}
    for rank, dump in observed.dumps.items():
        sorted_descriptions = sorted(group.desc for group in dump.groups.values())
        own_descriptions = tuple(sorted_descriptions)
        descriptions[rank] = own_descriptions
        for number, name in dump.ids.items():
            if name in dump.groups:
                desc = dump.groups[name].desc
                named_groups[own_descriptions].add((number, desc))

    dumps: dict[int, Dump] = {}
    for rank, dump in observed.dumps.items():
        numbered_descriptions = named_groups[descriptions[rank]]
        dumps[rank] = _with_counters_of(dump, numbered_descriptions)
    return replace(observed, dumps=dumps)


def _with_counters_of(dump: Dump, numbered_descriptions: Collection[tuple[str, str]]) -> Dump:
    """Name the counters of a dump by the descriptions that groups of these numbers have.

    Where a number has several descriptions, or a description several groups, nothing is named.
    """
    desc_of_number = dict(numbered_descriptions)
    name_of_desc = {group.desc: name for name, group in dump.groups.items()}
    are_unique = (
        len(numbered_descriptions) == len(desc_of_number) == len(set(desc_of_number.values()))
    )
    if not are_unique or len(name_of_desc) < len(dump.groups):
        return dump
    named = {}
    for number, status in dump.unnamed.items():
        if number in desc_of_number:
            named[name_of_desc[desc_of_number[number]]] = status

    # the note stays as long as one counter has no name
    notes = dump.notes
    if len(named) >= len(dump.unnamed):
        notes = tuple(note for note in notes if "cannot be named" not in note)
    return replace(dump, status={**named, **dump.status}, notes=notes)


def _with_distinct_descriptions(observed: DumpSet) -> DumpSet:
    """Add the group's name to descriptions that a rank's groups share, such as "undefined".

    What ranks call there is compared inside a group, and not with other groups of that word.
    """
    shared: set[str] = set()
    for dump in observed.dumps.values():
        groups = {
            (group.name, group.desc) for group in dump.groups.values() if len(group.ranks) != 1
        }
        for desc, count in Counter(desc for _, desc in groups).items():
            # Megatron's own words stay
            if count > 1 and "_GROUP" not in desc:
                shared.add(desc)
    if not shared:
        return observed

    dumps: dict[int, Dump] = {}
    for rank, dump in observed.dumps.items():
        distinct_groups = dict(dump.groups)
        for name, group in dump.groups.items():
            if group.desc in shared:
                distinct_groups[name] = replace(group, desc=f"{group.desc} (group {name})")
        entries = dump.entries.with_descriptions(lambda part: _distinct_desc(part, shared))
        dumps[rank] = replace(dump, groups=distinct_groups, entries=entries)
    return replace(observed, dumps=dumps)


def _distinct_desc(part: CallPart, shared: Collection[str]) -> str:
    """Return the description of a call's group, with its name where others share it."""
    if part.desc in shared:
        return f"{part.desc} (group {part.group})"
    return part.desc


def _counts_collectives(state: JobState, group: Group) -> bool:
    """Tell whether the counters of a group are of collectives alone."""
    return group.name not in state.pairs and not group.desc.startswith(_MIXED)


def _without(observed: DumpSet, apart: Collection[int]) -> JobState:
    """Return the state of the job without the dumps of some ranks."""
    return JobState(_observed_without(observed, apart))


def _observed_without(observed: DumpSet, apart: Collection[int]) -> DumpSet:
    """Return what was observed without the dumps of some ranks."""
    remaining = {rank: dump for rank, dump in observed.dumps.items() if rank not in apart}
    return replace(observed, dumps=remaining)


def _aborted(state: JobState) -> dict[int, str]:
    """Find ranks that say that a call ended in which more of its members still wait.

    Returns:
        Rank -> why its dump is of another moment.
    """
    apart: dict[int, str] = {}
    for name, (seq, op) in sorted(_first_joint_calls(state).items(), reverse=True):
        group = state.groups[name]
        if not _counts_collectives(state, group):
            continue
        members = _members_at(state, group, seq)
        if not _contradict(state, group, members):
            continue
        text = f"{op} #{seq} of {group.desc} ended on it, and ranks "
        text += f"{format_ranks(members.waiting)} still wait in it: written after its "
        text += "communicators were aborted, or left by another attempt"
        for rank in members.ended:
            apart.setdefault(rank, f"the dump of rank {rank} is of another moment: {text}")
    return apart


def _first_joint_calls(state: JobState) -> dict[str, tuple[int, str]]:
    """Return group -> (number, operation) of its first outstanding call that needs everybody."""
    first_calls: dict[str, tuple[int, str]] = {}
    for outstanding in state.outstanding.values():
        for part, places in outstanding.parts_and_places:
            if part.op in JOINT:
                call = int(outstanding.seq[places].min()), part.op
                first_calls[part.group] = min(call, first_calls.get(part.group, call))
    return first_calls


@dataclass(frozen=True)
class _MembersAtCall:
    """Members of a group, by what their counters say of one call.

    Attributes:
        ended: The call ended.
        waiting: It was issued and did not end.
        absent: It was not issued, by a dump that is there.
    """

    ended: list[int]
    waiting: list[int]
    absent: list[int]


def _members_at(state: JobState, group: Group, seq: int) -> _MembersAtCall:
    """Sort the members of a group by what their counters say of call ``seq``."""
    members = _MembersAtCall([], [], [])
    for rank in group.ranks:
        counter = group.name, rank
        is_issued = state.enqueued.get(counter, -1) >= seq
        if state.completed.get(counter, -1) >= seq:
            members.ended.append(rank)
        elif is_issued:
            members.waiting.append(rank)
        if rank in state.dumps and not is_issued:
            members.absent.append(rank)
    return members


def _contradict(state: JobState, group: Group, members: _MembersAtCall) -> bool:
    """Tell whether members that saw a call end are of another moment than those that wait in it."""
    ended, waiting, absent = members.ended, members.waiting, members.absent

    # an abort leaves nothing outstanding
    were_aborted = bool(ended) and not any(state.outstanding[rank] for rank in ended)

    # all came: it ended, and the counters of others are older
    if not (absent or were_aborted):
        return False
    if len(waiting) > max(1, len(ended)):
        return True
    if not waiting or not were_aborted:
        return False

    # as many ended as wait: only if others did not come, or several wait,
    if absent or len(waiting) >= max(2, len(ended)):
        return True
    # or nobody waits elsewhere, as a rank does that has not been through an abort
    waits_elsewhere = any(calls for rank, calls in state.outstanding.items() if rank not in waiting)
    return not waits_elsewhere


def _other_groups(observed: DumpSet) -> dict[int, Group]:
    """Find the fewest ranks without which all agree about the members of groups.

    Only groups are compared of a description that Megatron gives once to a rank.

    Returns:
        Rank -> a group about which it disagrees; both sides where there are several choices.
    """
    opponents = defaultdict[int, set[int]](set)
    disputed_group: dict[int, Group] = {}
    for group_of_rank in _unique_groups(observed).values():
        ranks_by_members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, group in group_of_rank.items():
            ranks_by_members[group.ranks].append(rank)

        # members of a group that list other members
        for members, listing_ranks in ranks_by_members.items():
            unlike: set[int] = set()
            for member in members:
                if member in group_of_rank and group_of_rank[member].ranks != members:
                    unlike.add(member)
            if not unlike:
                continue
            for rank in listing_ranks:
                disputed_group.setdefault(rank, group_of_rank[rank])
                opponents[rank] |= unlike
                for opponent in unlike:
                    opponents[opponent].add(rank)
                    disputed_group.setdefault(opponent, group_of_rank[opponent])
    exclusion = fewest_at_odds(opponents, dict.fromkeys(opponents, 1))
    return {rank: disputed_group[rank] for rank in sorted(exclusion.opponent_counts)}


def _unique_groups(observed: DumpSet) -> dict[str, dict[int, Group]]:
    """Return description -> rank -> its only group of that description."""
    group_of_rank: dict[str, dict[int, Group]] = defaultdict(dict)
    for rank, dump in observed.dumps.items():
        own_groups: list[Group] = []
        for group in dump.groups.values():
            is_of_megatron = "_PARALLEL_GROUP" in group.desc or group.desc == "default_pg"
            if rank in group.ranks and is_of_megatron and not group.desc.startswith(_SEVERAL):
                own_groups.append(group)
        group_counts = Counter(group.desc for group in own_groups)
        for group in own_groups:
            if group_counts[group.desc] == 1:
                group_of_rank[group.desc][rank] = group
    return group_of_rank


def _never_met(observed: DumpSet, disputed_group: Mapping[int, Group]) -> bool:
    """Tell whether no call of the groups about which dumps disagree ended on any rank.

    No communicator comes of ranks that were started with other parallel sizes.
    """
    names = {group.name for group in disputed_group.values()}
    for dump in observed.dumps.values():
        if any(dump.status[name].completed >= 1 for name in names & dump.status.keys()):
            return False
        if any(part.done and part.group in names for part in dump.entries.parts):
            return False
    return True


@dataclass(frozen=True)
class _Moments:
    """Ranks whose dumps are of another moment than others.

    Attributes:
        stale: Rank -> why its dump is of an earlier moment.
        new: Rank -> that it has made no call yet.
        ahead: Rank -> why its dump is of a later moment, if the stale ones are not of an earlier.
    """

    stale: dict[int, str]
    new: dict[int, str]
    ahead: dict[int, str]


def _moments(state: JobState) -> _Moments:
    """Find ranks that have not issued a call which ended elsewhere, and the ranks further on."""
    ranks_without_call: set[int] = set()
    for rank, dump in state.dumps.items():
        if not dump.entries and all(status.enqueued < 1 for status in dump.status.values()):
            ranks_without_call.add(rank)

    moments = _Moments({}, {}, {})
    for name, group in state.groups.items():
        if not _counts_collectives(state, group):
            continue
        ended_calls: dict[int, int] = {}
        for rank in group.ranks:
            if rank in state.dumps:
                ended_calls[rank] = state.completed.get((name, rank), -1)
        if not ended_calls:
            continue
        last = max(ended_calls.values())
        furthest_rank = max(rank for rank, count in ended_calls.items() if count == last)

        for rank in ended_calls:
            first_missing = max(1, state.enqueued.get((name, rank), last) + 1)
            if first_missing > last or rank in moments.stale or rank in moments.new:
                continue
            if not _joint(state, name, first_missing, last):
                continue
            calls = f"#{first_missing} to #{last}"
            if first_missing == last:
                calls = f"#{last}"
            ended = f"{calls} of {group.desc} ended on rank {furthest_rank}"

            # it has made no call at all
            if rank in ranks_without_call:
                text = f"rank {rank} has made no call, though {ended}: it was started again, "
                moments.new[rank] = text + "or its dump is of before its first call"
                continue
            moments.stale[rank] = f"the dump of rank {rank} is of an earlier moment: {ended}"
            for further, count in ended_calls.items():
                if count >= first_missing:
                    text = f"the dump of rank {further} is of a later moment, or left by another "
                    text += f"attempt: {calls} of {group.desc} ended there, and on few others"
                    moments.ahead[further] = text
    return moments


def _joint(state: JobState, name: str, first: int, last: int) -> bool:
    """Tell whether one of the calls from ``first`` to ``last`` needs everybody."""
    op_of_call: dict[int, str] = {}
    for rank in state.groups[name].ranks:
        # all calls are known
        if len(op_of_call) > last - first:
            break
        if rank not in state.dumps:
            continue
        calls = state.dumps[rank].entries
        places = calls.collectives_of_group.get(name, np.empty(0, np.int64))
        places = places[(calls.seq[places] >= first) & (calls.seq[places] <= last)]
        for entry in calls.taken(places):
            op_of_call[entry.seq] = entry.op

    # no call is known: by what Megatron calls in such a group, or they are many
    if not op_of_call:
        return state.groups[name].desc.startswith(_ROOTLESS) or last - first >= _AHEAD
    return any(op in JOINT for op in op_of_call.values())
