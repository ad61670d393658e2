"""Which rank waits for which, and the ranks at which waits end: dead, idle, or alone in a call.

In : State.  Out: ranks with the call at which others wait for them; ``analyze`` makes culprits of
them and says why.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_prism.core.world import format_ranks, ranks_text
from megatron_prism.features.hang import siblings
from megatron_prism.features.hang.calls import CallPart, Calls, Entry, Launch
from megatron_prism.features.hang.dumps import Dump
from megatron_prism.features.hang.state import (
    CUT,
    NO_DUMP,
    NOT_COME,
    NOT_POSTED,
    QUEUED,
    JobState,
    call_text,
    issue_order,
)
from megatron_prism.features.hang.verdict import Waiting

_MAX_EDGES = 1_000_000  # waits that are looked at for the smallest circle


def smallest_cycle(state: JobState) -> list[int]:
    """Find the smallest circle of ranks in which each waits for the next."""
    edges = {rank: state.waits(rank)[1] for rank in state.outstanding}
    best: list[int] = []
    edges_left = _MAX_EDGES
    # where ranks wait for few, circles are small
    for start in sorted(edges, key=lambda rank: len(edges[rank])):
        # breadth first, until the start is reached or the circle would not be smaller
        previous = {start: start}
        queue = deque([(start, 1)])
        while queue and edges_left > 0 and not (best and queue[0][1] >= len(best)):
            rank, length = queue.popleft()
            edges_left -= len(edges[rank])
            if start in edges[rank]:
                best = _path_to(rank, start, previous)
                break
            for awaited in edges[rank]:
                if awaited not in previous and awaited in edges:
                    previous[awaited] = rank
                    queue.append((awaited, length + 1))

        # no circle is smaller than one of two
        if len(best) == 2 or edges_left <= 0:
            break
    return best


def _path_to(rank: int, start: int, previous: Mapping[int, int]) -> list[int]:
    """Return the path from ``start`` to ``rank``."""
    path = [rank]
    while path[-1] != start:
        path.append(previous[path[-1]])
    path.reverse()
    return path


def ranks_where_waits_end(state: JobState, ranks: Iterable[int]) -> list[int]:
    """Find those of ``ranks`` at which waits end: all for which it waits wait for it.

    Ranks that wait for each other only and make the calls of their programs do not stand still: so
    where no device does, each such circle holds a rank that errs, and a rank in none is a victim.
    """
    ranks_needed: dict[int, set[int]] = {}
    for rank in state.outstanding:
        # a host may stand at another call than the oldest one
        ranks_needed[rank] = state.blocking_ranks(rank) - {rank}
    ranks_waiting = reversed_edges(ranks_needed)

    ends: list[int] = []
    for rank in ranks:
        reached = reached_from([rank], ranks_needed)

        # a rank without an outstanding call may wait for any other
        ends_unknown = any(not state.outstanding.get(awaited) for awaited in reached)
        if ends_unknown or reached <= reached_from([rank], ranks_waiting):
            ends.append(rank)
    return ends


def reached_from(start: Iterable[int], edges: Mapping[int, Collection[int]]) -> set[int]:
    """Find all ranks at the end of edges from ``start``, these among them."""
    reached = set(start)
    queue = list(reached)
    while queue:
        new_ranks = set(edges.get(queue.pop(), ())) - reached
        reached |= new_ranks
        queue += new_ranks
    return reached


def reversed_edges(edges: Mapping[int, Collection[int]]) -> dict[int, set[int]]:
    """Reverse the edges: rank -> ranks that wait for it."""
    ranks_waiting: dict[int, set[int]] = defaultdict(set)
    for rank, awaited in edges.items():
        for awaited_rank in awaited:
            ranks_waiting[awaited_rank].add(rank)
    return ranks_waiting


UNSEEN = (
    "what hosts wait for outside NCCL (gloo, the store, files, data) or while a communicator "
    "is made: if the job stands still all the same, take its stacks: py-spy dump"
)


def why_hosts_wait(state: JobState, idle: Collection[int], ahead: Collection[int]) -> str:
    """Say why hosts that wait for nobody in the dumps may wait for one of them all the same.

    A communicator is created at its first call: its members wait there without a record.  And calls
    outside NCCL (DeepEP, gloo, the store) leave none.

    Returns:
        "" if nothing says so.
    """
    if ahead:
        ranks = format_ranks(sorted(ahead))
        return (
            f"ranks {ranks} wait for nobody either, further on than a "
            "sibling: perhaps for it, while a communicator is created"
        )
    idle_groups = [group for group in state.groups.values() if set(group.ranks) <= set(idle)]
    if not idle_groups:
        return ""
    largest = max(idle_groups, key=lambda group: len(group.ranks))
    return (
        f"ranks {format_ranks(sorted(idle))} are all members of {largest.desc}, or of several: "
        "they may wait for one of them outside NCCL (DeepEP, gloo, the store), or while a "
        "communicator is created, which is not recorded"
    )


_OF_EXPERTS = ("EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
# with which DeepEP sets up its buffer: it gathers three objects, by two calls each
# (deep_ep/buffer.py)
_SETUP_CALLS = 6


def exchange_partners(state: JobState, rank: int) -> set[int]:
    """Return the ranks with which the experts of a rank exchange tokens outside NCCL.

    DeepEP and HybridEP leave no record: a group of experts makes no call in any rank, but for those
    that set up its buffers.
    """
    partners: set[int] = set()
    for name in state.groups_of[rank]:
        group = state.groups[name]
        if group.desc in _OF_EXPERTS:
            partners.update(group.ranks)
    for member in partners & state.counts.keys():
        for desc in _OF_EXPERTS:
            if state.counts[member].get(desc, 0) > _SETUP_CALLS:
                return set()
        # the tokens of a job that has just begun go through NCCL, too
        if len(state.issued(member).places(_moves_tokens)):
            return set()
    return partners - {rank}


def _moves_tokens(part: CallPart) -> bool:
    """Tell whether a call is of experts, and none that gathers objects."""
    return part.desc in _OF_EXPERTS and part.op != "all_gather"


def is_lone_caller(state: JobState, rank: int) -> bool:
    """Tell whether a rank waits in a call to which most of its members have not come."""
    head = state.head(rank) if rank in state.outstanding else None
    if head is None or head.pair:
        return False
    return 2 * len(state.waits(rank)[1]) > len(state.groups[head.group].ranks)


@dataclass(frozen=True)
class LackingMember:
    """A rank that is not where all other members of its group are.

    Attributes:
        rank: The rank.
        desc: Description of the group.
    """

    rank: int
    desc: str


def lacking_member(state: JobState, idle: Collection[int]) -> LackingMember | None:
    """Find a rank for which hosts that wait for nobody may wait.

    They are all members of a group but for this one, which waits further on: they are in a barrier
    of gloo, or on their way to it.
    """
    if len(idle) < 2:
        return None
    for group in state.groups.values():
        lacking = set(group.ranks) - set(idle)
        is_only_difference = len(lacking) == 1 and len(group.ranks) - len(idle) == 1
        if is_only_difference and state.outstanding.get(min(lacking)):
            return LackingMember(min(lacking), group.desc)
    return None


def waiting_for_dead(state: JobState, idle: Collection[int], dead: Collection[int]) -> set[int]:
    """Find those of ``idle`` that may wait outside NCCL for a rank without a dump.

    They are members of groups of which nobody else is.  One death explains them, and they need no
    fault of their own.
    """
    silent = {*idle, *dead}
    silent_groups: list[set[int]] = []
    for group in state.groups.values():
        if silent.issuperset(group.ranks):
            silent_groups.append(set(group.ranks))

    # from group to group, as they share members
    reached = set(dead)
    while True:
        reached_before = len(reached)
        for members in silent_groups:
            if not members.isdisjoint(reached):
                reached |= members
        if len(reached) == reached_before:
            return reached & set(idle)


_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def dead_ranks(state: JobState, ranks_of_other_moment: Collection[int]) -> dict[int, Entry]:
    """Find ranks without a dump that are needed to explain the waits.

    Args:
        state: The job.
        ranks_of_other_moment: Ranks whose dumps are there, of another moment.

    Returns:
        Rank -> the call that waits for it.
    """
    waits: list[tuple[Entry, list[int]]] = []
    for rank in state.outstanding:
        head = state.head(rank)
        without_dump = [awaited for awaited in state.waits(rank)[1] if awaited >= 0]
        without_dump = [awaited for awaited in without_dump if awaited not in state.dumps]

        # a file that was cut off is of a process that lived to write it
        without_file = [awaited for awaited in without_dump if awaited not in state.unreadable]
        lost = without_file or without_dump
        if head is not None and lost and set(ranks_of_other_moment).isdisjoint(lost):
            waits.append((head, lost))

    # where calls of all members wait for a rank, messages say nothing more: a rank that does not
    # post them may be a victim
    if any(not head.pair for head, _ in waits):
        waits = [(head, lost) for head, lost in waits if not head.pair]
    needed = {lost[0] for _, lost in waits if len(lost) == 1}
    call_of_rank: dict[int, Entry] = {}
    for head, lost in waits:
        # one of them is needed elsewhere, and is enough here
        if len(lost) > 1 and not needed.isdisjoint(lost):
            continue
        # an old call says more than a new one
        for rank in lost:
            if rank not in call_of_rank or issue_order(head) < issue_order(call_of_rank[rank]):
                call_of_rank[rank] = head
    return call_of_rank


def missing_dump_lines(call_of_rank: Mapping[int, Entry]) -> Iterator[tuple[Entry, str]]:
    """Say of ranks without a dump which call waits for them, one line for each kind of call."""
    ranks_of_call: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, entry in sorted(call_of_rank.items()):
        ranks_of_call[entry.op, entry.desc, entry.seq, entry.pair, entry.site].append(rank)
    for ranks in ranks_of_call.values():
        oldest = min((call_of_rank[rank] for rank in ranks), key=issue_order)
        if len(ranks) == 1:
            yield oldest, f"rank {ranks[0]} left no dump, and {call_text(oldest)} waits for it"
            continue

        # the other sides of messages differ
        text = call_text(oldest._replace(to=-1))
        yield oldest, f"ranks {format_ranks(ranks)} left no dump, and {text} waits for them"


def supporting_evidence(state: JobState, ranks: Collection[int]) -> list[str]:
    """Find what speaks for ``ranks``, which are at odds with their siblings."""
    texts: list[str] = []

    # others wait in a call of theirs to which most members have not come
    supporters: set[int] = set()
    for rank in ranks:
        head = state.head(rank)
        if head is None or head.pair:
            continue
        members = state.groups[head.group].ranks
        arrived: set[int] = set()
        for member in members:
            if member in state.dumps and state.arrived(member, head):
                arrived.add(member)
        if 2 * len(arrived) < len(members):
            supporters |= {member for member in arrived if _stands_in(state, member, head)}
    supporters -= set(ranks)
    if supporters:
        text = format_ranks(sorted(supporters))
        texts.append(f"to the call of these few came, but also {text}: perhaps they err alike")

    # whole groups of them agree
    if any(set(group.ranks) <= set(ranks) for group in state.groups.values()):
        text = f"among ranks {format_ranks(sorted(ranks))} are all members of groups, which "
        text += "agree: perhaps they rightly make other calls than their siblings"
        texts.append(text)
    return texts


def _stands_in(state: JobState, rank: int, call: Entry) -> bool:
    """Tell whether ``call`` is the oldest outstanding one of ``rank``."""
    head = state.head(rank)
    return head is not None and head.launch == call.launch


def ranks_without_message(state: JobState) -> Iterator[tuple[int, Entry]]:
    """Find ranks with nothing outstanding for whose messages others wait."""
    for rank in sorted(state.outstanding):
        head = state.head(rank)
        if head is None or not head.pair:
            continue
        for awaited in state.waits(rank)[1]:
            if awaited in state.dumps and not state.outstanding[awaited]:
                yield awaited, head


def incomplete_calls(state: JobState) -> Iterator[tuple[int, Entry, int]]:
    """Find ranks on which a call that needs everybody did not end, though it did on others.

    Yields:
        The rank, the call, and the number of the last one that ended on others.
    """
    for name, group in state.groups.items():
        if name in state.pairs:
            continue
        completed: dict[int, int] = {}
        for rank in group.ranks:
            if (name, rank) in state.completed:
                completed[rank] = state.completed[name, rank]
        last = max(completed.values(), default=-1)
        for rank, count in completed.items():
            if count >= last or state.enqueued[name, rank] < last:
                continue
            calls = state.outstanding[rank]
            places = calls.places(_is_of_everybody(name))
            numbers = calls.seq[places]
            places = places[(numbers > count) & (numbers <= last)]
            if len(places):
                yield rank, calls[int(places[0])], last


def _is_of_everybody(name: str) -> Callable[[CallPart], bool]:
    """Return the condition that a part is of calls of a group that need all its members.

    Counters alone do not say what a call is.
    """
    return lambda part: part.group == name and part.op not in (*_ROOTED, "call")


def held(state: JobState, culprits: Collection[int]) -> set[int]:
    """Find ranks that would still wait if ``culprits`` made their calls.

    A rank goes on once all ranks go on for which its oldest call waits.  A rank without a dump goes
    on with any of the ranks for which it may wait.
    """
    needs = _needs_of_oldest_calls(state, culprits)
    needs_without_dump = {rank: set(_may_wait_for(state, rank)) for rank in state.missing}
    going = set(culprits)
    while True:
        released = {rank for rank, needed in needs.items() if needed <= going}
        for rank, candidates in needs_without_dump.items():
            if not going.isdisjoint(candidates):
                released.add(rank)
        if released <= going:
            return needs.keys() - going
        going |= released


_NOBODY = -1  # a rank that never goes on


def _needs_of_oldest_calls(state: JobState, culprits: Collection[int]) -> dict[int, set[int]]:
    """Return, for a job that stands still, which ranks must go on before each rank can.

    Returns:
        Waiting rank -> ranks that its oldest call needs, never an empty set.
    """
    needs: dict[int, set[int]] = {}
    needs_of_collective: dict[Launch, set[int]] = {}
    for rank in state.heads:
        head = state.outstanding[rank][0]

        # all members of a collective need the same ranks
        if head.launch in needs_of_collective:
            needs[rank] = needs_of_collective[head.launch]
            continue
        needed = _blocking_ranks(state, rank, head, state.heads)

        # all participants came and the call does not end: a culprit among them keeps it
        if not needed:
            needed = _participants(state, rank, head).intersection(culprits)
        # else a message ends with its other side
        if not needed and head.pair:
            needed = {state.other(rank, head)}
        # and nothing is known that would end a collective
        if not needed:
            needed = {_NOBODY}

        needs[rank] = needed
        if not head.pair:
            needs_of_collective[head.launch] = needed
    return needs


def whom_calls_need(state: JobState, differ: Collection[Launch] = ()) -> dict[int, set[int]]:
    """Return, for a job that may still run, for which ranks each rank waits.

    The dumps may be older than the ends of their calls.  So every call ends here that can: all
    members have come to it, no other call is queued before it, and, where devices were timed, all
    of them have started it.  What remains is a wait.

    Args:
        state: The job.
        differ: Calls that their members make differently.  These do not end.

    Returns:
        Waiting rank -> ranks for which its oldest remaining call waits.
    """
    queues = {rank: _oldest_last(calls) for rank, calls in state.outstanding.items()}
    is_timed = _is_timed(state)
    oldest_calls: dict[int, Entry] = {}
    for rank, queue in queues.items():
        if queue:
            oldest_calls[rank] = state.outstanding[rank][queue[-1]]
    while True:
        needs = _needs_of_running_calls(state, oldest_calls, differ, is_timed)
        _hold_rest_of_batches(state, oldest_calls, needs)
        ended = [rank for rank, needed in needs.items() if not needed]
        if not ended:
            return needs
        for rank in ended:
            queue = queues[rank]
            queue.pop()
            if queue:
                oldest_calls[rank] = state.outstanding[rank][queue[-1]]
            else:
                del oldest_calls[rank]


def _oldest_last(calls: Calls) -> list[int]:
    """Return the place of the first call of each launch, in reverse order of issue."""
    launches = calls.launches()
    queue: dict[Launch, int] = {}
    for place in range(len(launches) - 1, -1, -1):
        queue[launches[place]] = place
    return list(queue.values())


def _needs_of_running_calls(
    state: JobState,
    oldest_calls: Mapping[int, Entry],
    differ: Collection[Launch],
    is_timed: bool,
) -> dict[int, set[int]]:
    """Return rank -> ranks for which its call waits; an empty set where the call can end."""
    launches = {rank: entry.launch for rank, entry in oldest_calls.items()}
    needs: dict[int, set[int]] = {}
    needs_of_collective: dict[Launch, set[int]] = {}
    for rank, entry in oldest_calls.items():
        # all members of a collective need the same ranks
        if entry.launch in needs_of_collective:
            needs[rank] = needs_of_collective[entry.launch]
            continue
        needed = _blocking_ranks(state, rank, entry, launches)
        participants = _participants(state, rank, entry)

        # members that disagree about the call wait for each other
        if entry.launch in differ:
            if participants.isdisjoint(needed):
                needed = participants
        # all have come, but some device has not started the call; only a timed job knows
        elif is_timed and not needed:
            for member in participants & oldest_calls.keys():
                if oldest_calls[member].state == "scheduled":
                    needed.add(member)

        needs[rank] = needed
        if not entry.pair:
            needs_of_collective[entry.launch] = needed
    return needs


def _is_timed(state: JobState) -> bool:
    """Tell whether the recorder knows which calls have started on the device."""
    for calls in state.outstanding.values():
        if any(part.state == "started" for part in calls.parts):
            return True
    return False


def _hold_rest_of_batches(
    state: JobState, oldest_calls: Mapping[int, Entry], needs: dict[int, set[int]]
) -> None:
    """Let messages wait whose batch has a message that waits: a batch ends as a whole.

    Args:
        state: The job.
        oldest_calls: Rank -> its oldest remaining call.
        needs: Rank -> ranks for which this call waits; updated.
    """
    waiting = {rank for rank, needed in needs.items() if needed}
    while True:
        participants_of_held: dict[int, set[int]] = {}
        for rank in oldest_calls.keys() - waiting:
            if oldest_calls[rank].pair:
                participants = _participants(state, rank, oldest_calls[rank])
                if not participants.isdisjoint(waiting):
                    participants_of_held[rank] = participants
        if not participants_of_held:
            return

        # a message held now may hold the batches of other ranks in the next round
        waiting |= participants_of_held.keys()
        for rank, participants in participants_of_held.items():
            needs[rank] = participants & (waiting - {rank})


def _blocking_ranks(
    state: JobState, rank: int, entry: Entry, oldest_launches: Mapping[int, Launch]
) -> set[int]:
    """Return the ranks that keep an outstanding call waiting, for whatever reason."""
    ranks_by_reason = state.blockers(rank, entry, oldest_launches)
    return set[int]().union(*ranks_by_reason.values())


def _participants(state: JobState, rank: int, entry: Entry) -> set[int]:
    """Return the members of a collective, or both sides of the messages of a batch."""
    if not entry.pair:
        return set(state.groups[entry.group].ranks)
    batch = state.batch(rank, entry.launch)
    return {rank, *(state.other(rank, message) for message in batch)}


def _may_wait_for(state: JobState, lost: int) -> Iterator[int]:
    """Find the ranks for which a rank without a dump may wait.

    In its groups these are ranks that did not end what its siblings called, or that ended fewer
    messages than their own siblings.
    """
    siblings_of_lost = state.siblings_of(lost)
    for name in state.groups_of[lost]:
        group = state.groups[name]
        counts = [state.counts[sibling].get(group.desc, -1) for sibling in siblings_of_lost]
        last = max(counts, default=1 << 62)
        for member in group.ranks:
            if member not in state.dumps:
                continue
            if name in state.pairs:
                is_behind = _ended_fewer_messages(state, member, group.desc)
            else:
                is_behind = state.completed.get((name, member), -1) < last
            if is_behind:
                yield member


def _ended_fewer_messages(state: JobState, rank: int, desc: str) -> bool:
    """Tell whether ``rank`` ended fewer messages of a group than one of its siblings, or none."""
    last = 1
    for sibling in state.siblings_of(rank):
        _, ended = state.messages_counted(sibling, desc)
        last = max(last, ended)
    _, own_ended = state.messages_counted(rank, desc)
    return own_ended < last


def last_waited_for(state: JobState) -> list[int]:
    """Return ranks for which others wait, and that wait for nobody."""
    awaited: set[int] = set()
    for rank in state.outstanding:
        awaited.update(state.waits(rank)[1])
    return sorted(rank for rank in awaited if rank >= 0 and not state.waits(rank)[1])


def complete_calls(state: JobState) -> list[Entry]:
    """Find collectives at which all members stand and that did not end.

    A device may be to blame, or the network; or the job runs, since counters are some 100 ms old.
    Ranks that issue calls in another order leave none of them, but a circle of waits or a rank that
    has not come.
    """
    calls: dict[Launch, Entry] = {}
    for rank in sorted(state.outstanding):
        head = state.head(rank)
        if head is None or head.pair or state.waits(rank)[1]:
            continue
        if state.hidden.isdisjoint(state.groups[head.group].ranks):
            calls[head.launch] = head
    return list(calls.values())


def complete_call_lines(state: JobState) -> str:
    """Say of calls that have everybody which ranks these are, and which of them left."""
    calls = complete_calls(state)
    members: set[int] = set()
    left: set[int] = set()
    for entry in calls:
        ranks = state.groups[entry.group].ranks
        members.update(ranks)
        left.update(rank for rank in ranks if state.is_over(rank, entry))
    splits_text = ""
    if any(entry.op == "all_to_all" for entry in calls):
        splits_text = ", or splits that do not fit, which dumps do not hold"

    # a log does not list the members
    if any(state.groups[entry.group].partial for entry in calls):
        waiting_text = ranks_text(sorted(members - left))
        return (
            f"the call of {waiting_text} did not end, and the log does not say who else belongs "
            "to its group: a rank that did not come, a device, the network or "
            f"NCCL{splits_text}"
        )
    members_text = ""
    if calls:
        groups = [format_ranks(sorted(state.groups[entry.group].ranks)) for entry in calls]
        members_text = "; ".join(groups[:4])
        if len(groups) > 4:
            members_text += ", …"
        members_text = f" (of ranks {members_text})"
    left_text = "none left it"
    if left:
        left_text = f"only {ranks_text(sorted(left))} left it"
    return (
        f"every member{members_text} entered the call and {left_text}: a device, the network or "
        f"NCCL{splits_text}"
    )


@dataclass(frozen=True)
class LoneWaiters:
    """Ranks that left out a call, or wait in one that others never make.

    Attributes:
        call: The call.
        ranks: The ranks.
        kind: As in Culprit.
        text: What they did, in words.
    """

    call: Entry
    ranks: list[int]
    kind: str
    text: str


def lone_waiters(
    state: JobState, cycle: list[int], culprits: Collection[int] = ()
) -> LoneWaiters | None:
    """Find ranks that left the order, by a minority.

    It is the one rank that left out a message, by what its siblings did; else, in a circle of
    waits, a few that wait where most members never come, or one that left out the call in which all
    others wait.

    Args:
        state: The job.
        cycle: Ranks of a circle of waits.
        culprits: Ranks that are named: what they called says nothing of their siblings.
    """
    silent_ranks = dict(siblings.skipped_messages(state, culprits))
    if len(silent_ranks) == 1:
        ((rank, entry),) = silent_ranks.items()
        text = f"does not answer {call_text(entry)}; its siblings did, before calls it made"
        return LoneWaiters(entry, [rank], "skipped call", text)

    # the call with the smallest minority
    splits: dict[float, list[_Split]] = defaultdict(list)
    for call in _calls_of_cycle(state, cycle):
        split = _split_of(state, call)
        if split is not None:
            splits[len(split.minority) / len(state.groups[call.group].ranks)].append(split)
    smallest = min(splits, default=1.0)
    if smallest == 0.5 or len(splits.get(smallest, ())) != 1:
        return None
    (split,) = splits[smallest]
    if split.has_come:
        text = f"waits in {call_text(split.call)}, to which most of its members never come"
        return LoneWaiters(split.call, split.minority, "extra call", text)
    others_text = "all other members"
    if not set(state.missing).isdisjoint(state.groups[split.call.group].ranks):
        others_text = "all other members with a dump"
    text = f"left out {call_text(split.call)}, in which {others_text} wait, and went on"
    return LoneWaiters(split.call, split.minority, "skipped call", text)


def _calls_of_cycle(state: JobState, cycle: Iterable[int]) -> list[Entry]:
    """Return the collectives in which ranks of a circle of waits stand, each once."""
    calls: dict[Launch, Entry] = {}
    for rank in cycle:
        head = state.head(rank)
        if head is not None and not head.pair:
            calls[head.launch] = head
    return list(calls.values())


@dataclass(frozen=True)
class _Split:
    """A call to which some members have come, and others have not.

    Attributes:
        call: The call.
        minority: Those of the members that are fewer.
        has_come: Whether the minority has come.
    """

    call: Entry
    minority: list[int]
    has_come: bool


def _split_of(state: JobState, call: Entry) -> _Split | None:
    """Divide the members of a call; None where one that has come stands in another call."""
    members = state.groups[call.group].ranks
    arrived = [member for member in members if state.arrived(member, call)]
    if not all(_stands_in(state, member, call) for member in arrived):
        return None
    absent: list[int] = []
    for member in members:
        if member in state.dumps and member not in arrived:
            absent.append(member)
    # members without a dump may have come, or not
    if 2 * len(absent) > len(members):
        return _Split(call, arrived, has_come=True)

    # several that did not come wait for others
    if len(absent) > 1 or 2 * len(arrived) <= len(members):
        return None
    return _Split(call, absent, has_come=False)


@dataclass(frozen=True)
class WaitingRanks:
    """Ranks that wait.

    Attributes:
        victims: All that wait and are not blamed.
        chain: In words, those of them that wait for a blamed rank or in the circle.
    """

    victims: tuple[Waiting, ...]
    chain: tuple[str, ...]


_MAX_CHAIN = 10


def waiting_ranks(state: JobState, blamed: Collection[int], cycle: Collection[int]) -> WaitingRanks:
    """Find all ranks but the blamed ones that wait, and say for which."""
    victims: list[Waiting] = []
    chain: list[str] = []
    for rank in sorted(state.outstanding):
        head = state.head(rank)
        if head is None or rank in blamed:
            continue
        reason, awaited = state.waits(rank)
        victims.append(Waiting(rank, tuple(awaited), head.op, head.desc, head.seq))
        is_in_chain = rank in cycle or not set(blamed).isdisjoint(awaited)
        if not is_in_chain or len(chain) >= _MAX_CHAIN:
            continue
        call = call_text(_lacking_message(state, rank, head))
        predicate = _predicate(state, head, reason, awaited)
        chain.append(f"rank {rank} in {call}: {ranks_text(awaited)} {predicate}")
    return WaitingRanks(tuple(victims), tuple(chain))


_PLURALS = {
    NOT_COME: "have not come",
    NOT_POSTED: "have not posted their sides",
    QUEUED: "have it queued behind another call",
    CUT: "left dumps that are cut off",
    "waits in another call": "wait in other calls",
    "has no such message in its log": "have no such message in their logs",
}


def _predicate(state: JobState, head: Entry, reason: str, awaited: Sequence[int]) -> str:
    """Say in words what keeps a call waiting, as far as it is known of the ranks it waits for.

    Args:
        state: The job.
        head: The call.
        reason: One of ``JobState.waits``.
        awaited: The ranks.
    """
    dumps: list[Dump] = []
    for rank in awaited:
        if rank in state.dumps:
            dumps.append(state.dumps[rank])
    words = reason
    # nobody knows what a rank without a dump posted
    if reason == NOT_POSTED and not dumps:
        words = NO_DUMP
    # a watchdog prints a call of its group alone
    elif reason == NOT_POSTED and any(dump.version == "log" for dump in dumps):
        words = "has no such message in its log"
    elif reason == QUEUED and any(head.group in dump.assumed for dump in dumps):
        words = "waits in another call"
    if len(awaited) > 1:
        words = _PLURALS.get(words, words)
    return words


def _lacking_message(state: JobState, rank: int, head: Entry) -> Entry:
    """Return the message of a batch that the other side did not post; else ``head``."""
    if head.pair:
        for message in state.batch(rank, head.launch):
            if state.never_posted(rank, message):
                return message
    return head
