"""Who waits for whom, and the ranks at which waits end: dead, idle, or alone in a call.

In : State.  Out: ranks with the call at which others wait for them; ``hang`` makes culprits of them
and says why.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megatron_prism.core.world import format_ranks, ranks_text
from megatron_prism.features.hang import siblings
from megatron_prism.features.hang.dumps import Entry, Launch
from megatron_prism.features.hang.state import JobState, call_text, issue_order
from megatron_prism.features.hang.verdict import Waiting

_EDGES = 1_000_000  # waits that are looked at for the smallest circle


def smallest_cycle(state: JobState) -> list[int]:
    """The smallest circle of ranks in which each waits for the next."""
    edges = {r: state.waits(r)[1] for r in state.outstanding}
    best: list[int] = []
    left = _EDGES
    for start in sorted(edges, key=lambda r: len(edges[r])):  # few waits: small circles
        back, queue = {start: start}, deque([(start, 1)])
        while queue and left > 0 and not (best and queue[0][1] >= len(best)):
            rank, length = queue.popleft()
            left -= len(edges[rank])
            if start in edges[rank]:
                best = [rank]
                while best[-1] != start:
                    best.append(back[best[-1]])
                best.reverse()
                break
            for other in edges[rank]:
                if other not in back and other in edges:
                    back[other] = rank
                    queue.append((other, length + 1))
        if len(best) == 2 or left <= 0:
            break
    return best


def ranks_where_waits_end(state: JobState, ranks: Iterable[int]) -> list[int]:
    """Those of ``ranks`` at whom waits end: everybody for whom they wait waits for them.

    Ranks that wait for each other only and make the calls of their programs do not stand still: so
    where no device does, each such circle holds somebody who errs, and who is in none is a victim.
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
        ends_unknown = any(not state.outstanding.get(other) for other in reached)
        if ends_unknown or reached <= reached_from([rank], ranks_waiting):
            ends.append(rank)
    return ends


def reached_from(start: Iterable[int], edges: Mapping[int, Collection[int]]) -> set[int]:
    """``start``, and whoever is at the end of edges from there."""
    found, queue = set(start), [*start]
    while queue:
        more = set(edges.get(queue.pop(), ())) - found
        found |= more
        queue += more
    return found


def reversed_edges(edges: Mapping[int, Collection[int]]) -> dict[int, set[int]]:
    """Who is before whom, of who is behind whom."""
    found: dict[int, set[int]] = defaultdict(set)
    for rank, others in edges.items():
        for other in others:
            found[other].add(rank)
    return found


UNSEEN = (
    "what hosts wait for outside NCCL (gloo, the store, files, data) or while a communicator "
    "is made: if the job stands still all the same, take its stacks: py-spy dump"
)


def why_hosts_wait(state: JobState, idle: Collection[int], ahead: Collection[int]) -> str:
    """Why hosts that wait for nobody in the dumps may wait for one of them all the same; "" if
    nothing says so.

    A communicator is created at its first call: its members wait there without a record.  And calls
    outside NCCL (DeepEP, gloo, the store) leave none.
    """
    if ahead:
        return (f"ranks {format_ranks(sorted(ahead))} wait for nobody either, further on than a "
                "sibling: perhaps for it, while a communicator is created")  # fmt: skip
    whole = [g for g in state.groups.values() if set(g.ranks) <= set(idle)]
    if not whole:
        return ""
    group = max(whole, key=lambda g: len(g.ranks))
    return (f"ranks {format_ranks(sorted(idle))} are all members of {group.desc}, or of several: "
            "they may wait for one of them outside NCCL (DeepEP, gloo, the store), or while a "
            "communicator is created, which is not recorded")  # fmt: skip


def lacking_member(state: JobState, idle: Collection[int]) -> tuple[int, str] | None:
    """(the rank, the group) where several hosts that wait for nobody are, but for one rank that
    waits further on, all members of a group: in a barrier of gloo for it, or on their way.
    """
    for group in state.groups.values() if len(idle) > 1 else ():
        others = set(group.ranks) - set(idle)
        if len(others) == 1 == len(group.ranks) - len(idle) and state.outstanding.get(min(others)):
            return others.pop(), group.desc
    return None


def waiting_for_dead(state: JobState, idle: Collection[int], dead: Collection[int]) -> set[int]:
    """Those of ``idle`` who may wait outside NCCL for a rank without a dump: members of groups of
    which nobody else is.  One death explains them, and they need no fault of their own.
    """
    whole = [set(g.ranks) for g in state.groups.values() if {*idle, *dead}.issuperset(g.ranks)]
    reached = set(dead)
    while more := [g for g in whole if not g.isdisjoint(reached) and not g <= reached]:
        reached.update(*more)
    return reached & set(idle)


_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def dead_ranks(state: JobState, known: Collection[int]) -> dict[int, Entry]:
    """Ranks without a dump that are needed to explain the waits -> the call that waits for them.

    known : ranks whose dumps are there, of another moment.  Where calls of all members wait for
    somebody, messages say nothing more: who does not post them may be a victim
    """
    waits: list[tuple[Entry, list[int]]] = []
    for rank in state.outstanding:
        (_, others), head = state.waits(rank), state.head(rank)
        lost = [r for r in others if r >= 0 and r not in state.dumps]
        # a file that was cut off is of a process that lived to write it
        lost = [r for r in lost if r not in state.unreadable] or lost
        if head is not None and lost and not set(known) & set(lost):
            waits.append((head, lost))
    if any(not head.pair for head, _ in waits):
        waits = [(head, lost) for head, lost in waits if not head.pair]
    alone = {lost[0] for _, lost in waits if len(lost) == 1}
    found: dict[int, Entry] = {}
    for head, lost in waits:
        if len(lost) > 1 and not alone.isdisjoint(lost):
            continue  # one of them is needed elsewhere, and is enough here
        for r in lost:  # an old call says more than a new one
            if r not in found or issue_order(head) < issue_order(found[r]):
                found[r] = head
    return found


def missing_dump_lines(found: Mapping[int, Entry]) -> Iterator[tuple[Entry, str]]:
    """What is said of ranks without a dump: those for which one kind of call waits in one line."""
    calls: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, e in sorted(found.items()):
        calls[e.op, e.desc, e.seq, e.pair, e.site].append(rank)
    for ranks in calls.values():
        entry = min((found[r] for r in ranks), key=issue_order)
        if len(ranks) == 1:
            yield entry, f"rank {ranks[0]} left no dump, and {call_text(entry)} waits for it"
        else:  # the other sides of messages differ
            text = call_text(entry._replace(to=-1))
            yield entry, f"ranks {format_ranks(ranks)} left no dump, and {text} waits for them"


def supporting_evidence(state: JobState, ranks: Collection[int]) -> list[str]:
    """What speaks for ``ranks``, at odds with their siblings: whole groups of them that agree, or
    others who wait in a call of theirs to which most members have not come.
    """
    others = set[int]()
    for head in (e for rank in ranks if (e := state.head(rank)) is not None and not e.pair):
        members = state.groups[head.group].ranks
        came = {r for r in members if r in state.dumps and state.arrived(r, head)}
        if 2 * len(came) < len(members):
            others |= {r for r in came if (h := state.head(r)) and h.launch == head.launch}
    said = []
    if others := others - set(ranks):
        text = format_ranks(sorted(others))
        said.append(f"to the call of these few came, but also {text}: perhaps they err alike")
    if any(set(g.ranks) <= set(ranks) for g in state.groups.values()):
        said.append(f"among ranks {format_ranks(sorted(ranks))} are all members of groups, which "
                    "agree: perhaps they rightly make other calls than their siblings")  # fmt: skip
    return said


def ranks_without_message(state: JobState) -> Iterator[tuple[int, Entry]]:
    """Ranks with nothing outstanding whose messages others wait for."""
    for rank in sorted(state.outstanding):
        head = state.head(rank)
        if head is None or not head.pair:
            continue
        for other in state.waits(rank)[1]:
            if other in state.dumps and not state.outstanding[other]:
                yield other, head


def incomplete_calls(state: JobState) -> Iterator[tuple[int, Entry, int]]:
    """Ranks on which a call that needs everybody did not end, though it did on others: with the
    call, and the last one that ended there.
    """
    for name, group in state.groups.items():
        done = {r: state.completed[name, r] for r in group.ranks if (name, r) in state.completed}
        last = max(done.values(), default=-1)
        for rank, mine in done.items():
            if mine >= last or name in state.pairs or state.enqueued[name, rank] < last:
                continue
            calls = [e for e in state.outstanding[rank]
                     if e.group == name and mine < e.seq <= last]  # fmt: skip
            joint = [e for e in calls if e.op not in (*_ROOTED, "call")]  # of counters alone
            if joint:
                yield rank, joint[0], last


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
    while True:
        oldest_calls = {rank: queue[-1] for rank, queue in queues.items() if queue}
        needs = _needs_of_running_calls(state, oldest_calls, differ, is_timed)
        _hold_rest_of_batches(state, oldest_calls, needs)
        ended = [rank for rank, needed in needs.items() if not needed]
        if not ended:
            return needs
        for rank in ended:
            queues[rank].pop()


def _oldest_last(calls: Sequence[Entry]) -> list[Entry]:
    """Return one call of each launch, in reverse order of issue."""
    queue: dict[Launch, Entry] = {}
    for entry in reversed(calls):
        queue[entry.launch] = entry
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
    outstanding = itertools.chain.from_iterable(state.outstanding.values())
    return any(entry.state == "started" for entry in outstanding)


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
    batch = state.launches(rank)[entry.launch]
    return {rank, *(state.other(rank, message) for message in batch)}


def _may_wait_for(state: JobState, lost: int) -> Iterator[int]:
    """For whom a rank without a dump may wait: who did not end what its siblings called in its
    group, or ended fewer messages than its own siblings.
    """
    siblings = state.siblings_of(lost)
    for name in state.groups_of[lost]:
        group = state.groups[name]
        last = max((state.counts[s].get(group.desc, -1) for s in siblings), default=1 << 62)
        for other in group.ranks:
            if other not in state.dumps:
                continue
            if name in state.pairs:
                alike = state.siblings_of(other)
                last = max(state.messages_counted(s, group.desc)[1] for s in alike)
                behind = state.messages_counted(other, group.desc)[1] < max(1, last)
            else:
                behind = state.completed.get((name, other), -1) < last
            if behind:
                yield other


def last_waited_for(state: JobState) -> list[int]:
    """Ranks for whom somebody waits, and who wait for nobody."""
    others = {other for rank in state.outstanding for other in state.waits(rank)[1]}
    return sorted(r for r in others if r >= 0 and not state.waits(r)[1])


def complete_calls(state: JobState) -> list[Entry]:
    """Collectives at which all members stand and that did not end: a device, or the network; or the
    job runs, since counters are some 100 ms old.  Who issues calls in another order leaves none of
    them, but a circle of waits or somebody who has not come.
    """
    calls = {e.launch: e for rank in sorted(state.outstanding)
             if (e := state.head(rank)) and not e.pair and not state.waits(rank)[1]
             and state.hidden.isdisjoint(state.groups[e.group].ranks)}  # fmt: skip
    return list(calls.values())


def complete_call_lines(state: JobState) -> str:
    """What is said where calls have everybody and somebody does not leave them: whose they are."""
    calls = complete_calls(state)
    ranks = [format_ranks(sorted(state.groups[e.group].ranks)) for e in calls]
    more = ", …" if len(ranks) > 4 else ""
    whose = f" (of ranks {'; '.join(ranks[:4])}{more})" if ranks else ""
    over = sorted({r for e in calls for r in state.groups[e.group].ranks if state.is_over(r, e)})
    left = f"only {ranks_text(over)} left it" if over else "none left it"
    splits = ", or splits that do not fit, which dumps do not hold" * any(
        e.op == "all_to_all" for e in calls)  # fmt: skip
    if any(state.groups[e.group].partial for e in calls):
        known = ranks_text(sorted({r for e in calls for r in state.groups[e.group].ranks}))
        return (
            f"the call of {known} did not end, and the log does not say who else belongs to its "
            f"group: a rank that did not come, a device, the network or NCCL{splits}"
        )
    return f"every member{whose} entered the call and {left}: a device, the network or NCCL{splits}"


def lone_waiters(state: JobState, cycle: list[int]) -> tuple[Entry, list[int], str, str] | None:
    """(call, ranks, kind, why): the one rank that left out a message, by what its siblings did;
    else of a circle the few who wait where most members never come, or who left out the call in
    which most members wait.
    """
    past = dict(siblings.skipped_messages(state))
    if len(past) == 1:
        ((rank, entry),) = past.items()
        text = f"does not answer {call_text(entry)}; its siblings did, before calls it made"
        return entry, [rank], "skipped call", text
    shares: dict[float, list[tuple[Entry, list[int], bool]]] = defaultdict(list)
    heads = [e for r in cycle if (e := state.head(r)) is not None and not e.pair]
    for head in {e.launch: e for e in heads}.values():
        members = state.groups[head.group].ranks
        came = [r for r in members if state.arrived(r, head)]
        if all((h := state.head(r)) is not None and h.launch == head.launch for r in came):
            absent = [r for r in members if r in state.dumps and r not in came]
            few, alone = (came, True) if len(came) < len(absent) else (absent, False)
            if not alone and len(absent) > 1:
                continue  # several who did not come wait for others
            shares[len(few) / len(members)].append((head, few, alone))
    share = min(shares, default=1.0)
    if share == 0.5 or len(shares.get(share, ())) != 1:
        return None
    ((entry, ranks, alone),) = shares[share]
    if alone:
        text = f"waits in {call_text(entry)}, to which most of its members never come"
        return entry, ranks, "extra call", text
    text = f"left out {call_text(entry)}, in which all other members wait, and went on"
    return entry, ranks, "skipped call", text


def waiting_ranks(
    state: JobState, blamed: Collection[int], cycle: Collection[int]
) -> tuple[tuple[Waiting, ...], tuple[str, ...]]:
    """All others that wait, and in words those of them who wait for ``blamed`` or in the circle."""
    victims: list[Waiting] = []
    chain: list[str] = []
    for rank in sorted(state.outstanding):
        head = state.head(rank)
        if head is None or rank in blamed:
            continue
        why, others = state.waits(rank)
        victims.append(Waiting(rank, tuple(others), head.op, head.desc, head.seq))
        if len(chain) < 10 and (rank in cycle or not set(blamed).isdisjoint(others)):
            if len(others) > 1:
                why = why.replace("has ", "have ", 1).replace("its side", "their sides")
            chain.append(f"rank {rank} in {call_text(_lacking_message(state, rank, head))}: "
                         f"{ranks_text(others)} {why}")  # fmt: skip
    return tuple(victims), tuple(chain)


def _lacking_message(state: JobState, rank: int, head: Entry) -> Entry:
    """Of a batch the message that the other side did not post."""
    if head.pair:
        for message in state.launches(rank)[head.launch]:
            if state.never_posted(rank, message):
                return message
    return head
