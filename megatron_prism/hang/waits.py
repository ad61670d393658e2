"""Who waits for whom, and the ranks at which waits end: dead, idle, or alone in a call.

In : State.  Out: ranks with the call at which others wait for them; ``hang`` makes culprits of them
and says why.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping

from megatron_prism.core.world import format_ranks, ranks_text
from megatron_prism.hang import siblings
from megatron_prism.hang.dumps import Entry, Launch
from megatron_prism.hang.state import JobState, call_text
from megatron_prism.hang.verdict import Waiting

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
    ahead = dict[int, set[int]]()
    for rank, calls in state.outstanding.items():  # a host may stand at another than the first
        launches = {e.launch: e for e in calls}.values()
        blockers = (b for e in launches for b in state.blockers(rank, e).values())
        ahead[rank] = set[int]().union(*blockers) - {rank}
    back = reversed_edges(ahead)
    found = []
    for rank in ranks:
        reached = reached_from([rank], ahead)
        unknown = any(not state.outstanding.get(r) for r in reached)  # may wait for anybody
        if unknown or reached <= reached_from([rank], back):
            found.append(rank)
    return found


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
    waits further on, all members of a group: in a barrier of gloo for it, or on their way."""
    for group in state.groups.values() if len(idle) > 1 else ():
        others = set(group.ranks) - set(idle)
        if len(others) == 1 == len(group.ranks) - len(idle) and state.outstanding.get(min(others)):
            return others.pop(), group.desc
    return None


def waiting_for_dead(state: JobState, idle: Collection[int], dead: Collection[int]) -> set[int]:
    """Those of ``idle`` who may wait outside NCCL for a rank without a dump: members of groups of
    which nobody else is.  One death explains them, and they need no fault of their own."""
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
    others who wait in a call of theirs to which most members have not come."""
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
    call, and the last one that ended there."""
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
    """Ranks that wait on even if ``culprits`` made their calls: something else holds them.

    Who waits goes on when all for whom its oldest call waits do.  A rank without a dump goes on
    with anybody for whom it may wait.
    """
    needs, goes = whom_calls_need(state, culprits), set(culprits)
    lost = {rank: set(_may_wait_for(state, rank)) for rank in state.missing}
    while True:
        more = {rank for rank, need in needs.items() if need <= goes}
        more |= {rank for rank, others in lost.items() if not goes.isdisjoint(others)}
        if more <= goes:
            return needs.keys() - goes
        goes |= more


_NOBODY = -1  # never goes on


def whom_calls_need(
    state: JobState, culprits: Collection[int] | None = None, differ: Collection[Launch] = ()
) -> dict[int, set[int]]:
    """For whom the oldest call of each rank waits.

    Args:
        culprits: in a job that stands still, a call that has everybody ends when one of them goes
            on, if one takes part; a message else with its other side.  None: the job may run, and
            every call has ended that may: to which all have come, with nothing before it and, where
            devices were timed, which all have started.  What is issued in one batch ends in one.
        differ: calls that members make differently: these do not end.
    """
    last = None if culprits is None else 1  # of a job that stands still the first calls do
    queues = {rank: deque({e.launch: e for e in calls[:last][::-1]}.values())
              for rank, calls in state.outstanding.items()}  # fmt: skip
    timed = any(e.state == "started" for calls in state.outstanding.values() for e in calls)
    while True:
        first = {rank: queue[-1] for rank, queue in queues.items() if queue}
        at = {rank: entry.launch for rank, entry in first.items()}
        needs: dict[object, set[int]] = {}
        found: dict[int, set[int]] = {}
        for rank, entry in first.items():
            key = (rank, entry.launch) if entry.pair else entry.launch
            if key not in needs:
                needs[key] = set().union(*state.blockers(rank, entry, at).values())
                sides = _sides(state, rank, entry)
                if culprits is not None:
                    other = {state.other(rank, entry) if entry.pair else _NOBODY}
                    needs[key] = needs[key] or sides.intersection(culprits) or other
                elif entry.launch in differ and sides.isdisjoint(needs[key]):
                    needs[key] = sides
                elif timed and not needs[key]:
                    needs[key] = {r for r in sides & first.keys() if first[r].state == "scheduled"}
            found[rank] = needs[key]
        waits = {rank for rank, others in found.items() if others}
        while more := {r for r in first.keys() - waits if first[r].pair
                       and not waits.isdisjoint(_sides(state, r, first[r]))}:  # fmt: skip
            waits |= more
            found |= {r: _sides(state, r, first[r]) & waits - {r} for r in more}
        if culprits is not None or waits == first.keys():
            return found
        for rank in first.keys() - waits:
            queues[rank].pop()


def _sides(state: JobState, rank: int, entry: Entry) -> set[int]:
    """Who takes part in an outstanding call of ``rank``, or in the messages issued with it."""
    if not entry.pair:
        return set(state.groups[entry.group].ranks)
    batch = (e for e in state.outstanding[rank] if e.launch == entry.launch)
    return {rank, *(state.other(rank, e) for e in batch)}


def _may_wait_for(state: JobState, lost: int) -> Iterator[int]:
    """For whom a rank without a dump may wait: who did not end what its siblings called in its
    group, or ended fewer messages than its own siblings."""
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
    them, but a circle of waits or somebody who has not come."""
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
    which most members wait."""
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
    calls = (e for e in state.outstanding[rank] if head.pair and e.launch == head.launch)
    return next((e for e in calls if state.never_posted(rank, e)), head)


def issue_order(entry: Entry) -> tuple[int, int]:
    """To compare calls by: which was issued first?"""
    return entry.created_ns if entry.created_ns >= 0 else 1 << 63, entry.seq
