"""The state of a job that hangs: outstanding calls of every rank, and who has not come to them.

In : the dumps of a job that stands still.  Out: ``JobState``, the questions that a verdict asks.
Two ranks are *siblings* when they stand at the same place of their pipeline: they run the same
program, so what one of them did tells what the other should have done.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_prism.core.world import ranks_text
from megatron_prism.features.hang.dumps import DumpSet, Entry, Group, Launch

_MEGATRON = "PIPELINE_MODEL_PARALLEL_GROUP"
_WORDS = re.compile(r"(?:^|mesh[_-])pp$|pipeline", re.IGNORECASE)


def stages(groups: Mapping[str, Group], messages: Collection[str]) -> dict[int, int]:
    """rank -> its place; empty if there is no pipeline."""
    known = list(groups.values())
    lines = [g for g in known if g.desc == _MEGATRON] or [g for g in known if _WORDS.search(g.desc)]
    if not lines and not any("_PARALLEL_GROUP" in g.desc for g in known):
        lines = [g for g in known if g.name in messages]
    places: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for group in lines:
        for place, rank in enumerate(group.ranks):
            places[rank].append((group.desc.partition(" (group ")[0], place))
    keys = {rank: tuple(sorted(found)) for rank, found in places.items()}
    numbers = {key: i for i, key in enumerate(sorted(set(keys.values())))}
    return {rank: numbers[key] for rank, key in keys.items()}


_MOST = 64  # outstanding calls made up from counters where a dump has no entries


_ALL_CALLS = 1 << 61  # the counter of a rank that is taken to have come to all calls of a group


def _unnamed(group: Group, seq: int) -> Entry:
    """A call of which only its number is known."""
    nothing: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    last = 1 << 62  # after everything that is recorded
    return Entry(
        last, group.name, group.desc, "call", seq, seq, -1, nothing, (), "", False, "", -1, -1
    )


class CallKey(NamedTuple):
    """A call, comparable between siblings: each makes it in a group of its own.

    Keys are made and hashed by the million: hence a named tuple.

    Attributes:
        desc: Description of the group.
        pair: Whether it is a send or a receive.
        seq: Number of the call among the group's collectives, or among its messages.
    """

    desc: str
    pair: bool
    seq: int


def key_of(entry: Entry) -> CallKey:
    """Return the key of a call."""
    return CallKey(entry.desc, entry.to >= 0, entry.seq)


def issue_order(entry: Entry) -> tuple[int, int]:
    """Return a key that orders calls by the time of issue; a call of unknown time comes last."""
    return entry.created_ns if entry.created_ns >= 0 else 1 << 63, entry.seq


class _Route(NamedTuple):
    """What messages have in common that meet in the order of issue.

    Attributes:
        group: Name of the group.
        op: "send" or "recv".
        peer: Global rank of the other side; -1 if it is not known.
    """

    group: str
    op: str
    peer: int


@dataclass
class _Messages:
    """Messages of a rank on one route, in the order of issue.

    Attributes:
        entries: The messages.
        position_of_entry: Message -> its position; of equal ones the first.
        position_of_record: Number of the record -> position of the message.
    """

    entries: list[Entry] = field(default_factory=list)
    position_of_entry: dict[Entry, int] = field(default_factory=dict)
    position_of_record: dict[int, int] = field(default_factory=dict)

    def append(self, message: Entry) -> None:
        """Add the message that was issued next."""
        position = len(self.entries)
        self.entries.append(message)
        self.position_of_entry.setdefault(message, position)
        self.position_of_record.setdefault(message.record, position)


_NO_MESSAGES = _Messages()
_OTHER_OP = {"send": "recv", "recv": "send"}


def call_text(entry: Entry) -> str:
    """``all_reduce #3 of GROUP at file:line``."""
    way = "to" if entry.op == "send" else "from"
    what = f"{entry.op} {way} group rank {entry.to}" if entry.pair else entry.op
    where = f" at {entry.site}" if entry.site else ""
    return f"{what} #{entry.seq} of {entry.desc}{where}"


class JobState:
    """Where every rank stands.

    groups      : name -> Group with two or more members
    outstanding : rank -> its outstanding calls in the order of issue
    enqueued    : (group, rank) -> how many collectives it has issued
    completed   : (group, rank) -> how many of them it saw complete
    missing     : ranks that are in some group but left no dump
    role        : rank -> its place in its pipeline
    has_logs    : whether what some ranks called is known from their logs
    observed    : the dumps, with what logs say beside them
    """

    def __init__(self, found: DumpSet) -> None:
        self.dumps, self.unreadable, self.events = found.dumps, found.unreadable, found.events
        self.said = found.evidence
        self.observed = found  # what logs say beside the dumps is read there
        self.groups: dict[str, Group] = {}
        self.notes: list[str] = []
        self.enqueued: dict[tuple[str, int], int] = {}
        self.completed: dict[tuple[str, int], int] = {}
        self.outstanding: dict[int, list[Entry]] = {}
        self._waited: dict[Launch | tuple[int, Launch], Mapping[str, Sequence[int]]] = {}
        self._places: dict[str, dict[int, int]] = {}
        self._launches: dict[int, dict[Launch, list[Entry]]] = {}
        self._blocking: dict[tuple[str, int], frozenset[int]] = {}
        self._bounds: dict[str, list[int]] = {}
        self._outstanding_messages: dict[int, dict[_Route, _Messages]] = {}
        self._all_messages: dict[int, dict[_Route, _Messages]] = {}
        self._numbered: dict[int, dict[str, dict[int, list[Entry]]]] = {}
        self._collect_groups(found.listed)
        self.pairs = {e.group for d in self.dumps.values() for e in d.entries if e.to >= 0}
        self.pairs |= {n for n, g in self.groups.items() if g.desc.startswith("PIPELINE")}
        for dump in self.dumps.values():  # of such counters one is a message's
            self.pairs |= {n for n, s in dump.status.items() if s.completed > s.enqueued >= 0}
        for rank, dump in self.dumps.items():
            self._count(rank)
            self.outstanding[rank] = self._pending(rank, dump.entries)
        members = {r for g in self.groups.values() for r in g.ranks}
        self.missing = sorted(members - set(self.dumps))
        self.role = stages(self.groups, self.pairs)
        self.has_logs = any(dump.version == "log" for dump in self.dumps.values())
        self.siblings: dict[int, list[int]] = defaultdict(list)
        for rank in self.dumps:
            self.siblings[self.role.get(rank, 0)].append(rank)

    def _collect_groups(self, listed: Mapping[str, Counter[Group]]) -> None:
        lazy: dict[str, Counter[Group]] = defaultdict(Counter)
        for rank, dump in self.dumps.items():  # lazily made communicators are not in pg_config
            for entry in dump.entries:
                if entry.group not in listed:
                    lazy[entry.group][Group(entry.group, entry.desc, (rank,))] += 1
        for name, versions in {**listed, **lazy}.items():
            if len(versions) > 1 and all(len(g.ranks) == 1 for g in versions):
                ranks = sorted(g.ranks[0] for g in versions)
                self.groups[name] = Group(name, next(iter(versions)).desc, tuple(ranks))
                self.notes.append(f"the members of group {name} are known from its calls only")
            else:
                self.groups[name] = versions.most_common(1)[0][0]
                if len(versions) > 1:
                    self.notes.append(f"dumps disagree about who is in group {name}")
        self.groups = {n: g for n, g in self.groups.items() if len(g.ranks) > 1 or g.partial}

    def _count(self, rank: int) -> None:
        dump = self.dumps[rank]
        for name, status in dump.status.items():
            if name not in self.pairs:  # there the counters also count sends and receives
                self.enqueued[name, rank] = status.enqueued
                self.completed[name, rank] = status.completed
        if dump.is_cut:
            # behind the cut may be calls that no counter has: the rank is taken to have come to all
            for name in self._uncounted_of_cut(rank):
                self.enqueued[name, rank] = _ALL_CALLS
            return
        uncounted = self.pairs | {e.group for e in dump.entries} - dump.status.keys()
        completed = {name: self.completed.get((name, rank), -1) for name in dump.status}
        for entry in dump.entries:
            name = entry.group
            if name in uncounted:
                key = (name, rank)
                self.enqueued[key] = max(self.enqueued.get(key, -1), entry.calls)
                if entry.done and entry.to < 0:
                    self.completed[key] = max(self.completed.get(key, -1), entry.seq)
            # gloo counts calls that failed, too
            elif not entry.done and entry.seq <= completed[name]:
                self.completed[name, rank] = completed[name] = entry.seq - 1

    def _uncounted_of_cut(self, rank: int) -> list[str]:
        """Return the groups of a rank with a cut dump in which no counter tells its collectives."""
        dump = self.dumps[rank]
        if not dump.is_cut:
            return []
        names = self.groups_of[rank]
        return [name for name in names if name in self.pairs or name not in dump.status]

    def _pending(self, rank: int, entries: Iterable[Entry]) -> list[Entry]:
        found = [
            e
            for e in entries
            if not e.done
            and e.op != "coalesced"
            and e.group in self.groups
            and (e.to >= 0 or e.seq > self.completed.get((e.group, rank), -1))
        ]
        has = {e.group for e in found}
        for name in self.groups_of[rank]:
            last, done = (t.get((name, rank), -1) for t in (self.enqueued, self.completed))
            if name in has or name in self.pairs or last == _ALL_CALLS:
                continue
            waits = range(max(done, last - _MOST, 0) + 1, last + 1)
            found += [_unnamed(self.groups[name], seq) for seq in waits]
        return found

    @cached_property
    def groups_of(self) -> dict[int, list[str]]:
        """rank -> its groups."""
        found: dict[int, list[str]] = defaultdict(list)
        for name, group in self.groups.items():
            for rank in group.ranks:
                found[rank].append(name)
        return found

    @cached_property
    def counts(self) -> dict[int, dict[str, int]]:
        """rank -> description -> collectives that it has issued."""
        found: dict[int, dict[str, int]] = {rank: {} for rank in self.dumps}
        for (name, rank), count in self.enqueued.items():
            is_assumed = name in self.dumps[rank].assumed or count == _ALL_CALLS
            if name in self.groups and not is_assumed:
                found[rank][self.groups[name].desc] = count
        return found

    def siblings_of(self, rank: int) -> list[int]:
        """Ranks with a dump at its place of the pipeline, itself among them."""
        return self.siblings[self.role.get(rank, 0)]

    def unlike_replicas(self, rank: int, desc: str) -> bool:
        """Whether several siblings of ``rank`` made another number of calls or messages in their
        groups of ``desc`` than most that stand in the same call: replicas with more microbatches,
        of which numbers say nothing.
        """
        counts: dict[object, Counter[object]] = defaultdict(Counter)
        for other in self.siblings_of(rank):
            head = self.head(other)
            if head is not None and other != rank and head.desc != desc and not head.pair:
                made = self.counts[other].get(desc), self.messages_counted(other, desc)
                counts[head.desc, head.seq][made] += 1
        return sum(n.total() - max(n.values()) for n in counts.values()) > 1

    # -- questions --------------------------------------------------------------------------------
    def head(self, rank: int) -> Entry | None:
        """The oldest outstanding call of ``rank``."""
        calls = self.outstanding.get(rank)
        return calls[0] if calls else None

    def issued(self, rank: int) -> list[Entry]:
        """Its calls and messages that are recorded, without the records that close batches: these
        have the number of a collective that came before them.
        """
        return [e for e in self.dumps[rank].entries if e.op != "coalesced"]

    def numbered(self, rank: int) -> Mapping[str, Mapping[int, list[Entry]]]:
        """Return the recorded collectives of ``rank``: description -> number -> calls.

        There are several calls of one number where they are coalesced.
        """
        calls = self._numbered.get(rank)
        if calls is None:
            calls = self._numbered[rank] = {}
            entries = self.dumps[rank].entries if rank in self.dumps else ()
            for entry in entries:
                if entry.to < 0 and entry.op != "coalesced":
                    of_desc = calls.setdefault(entry.desc, {})
                    of_desc.setdefault(entry.seq, []).append(entry)
        return calls

    def at(self, rank: int, desc: str, seq: int) -> list[Entry]:
        """Return the collectives of ``rank`` that have that number."""
        return self.numbered(rank).get(desc, {}).get(seq, [])

    def all_counts(self, rank: int) -> dict[str, int]:
        """Description -> calls or messages issued, also in groups of one."""
        dump = self.dumps[rank]
        return {dump.groups[name].desc: status.enqueued for name, status in dump.status.items()
                if name in dump.groups and name not in dump.assumed}  # fmt: skip

    def messages_counted(self, rank: int, desc: str) -> tuple[int, int]:
        """(issued, ended) messages of its group of that description, by its counter; -1: not
        known.
        """
        dump, pairs = self.dumps[rank], self.pairs & self.groups.keys() - self.dumps[rank].assumed
        rows = [(s.enqueued, s.completed) for name, s in dump.status.items()
                if name in pairs and self.groups[name].desc == desc]  # fmt: skip
        return max(rows, default=(-1, -1))

    @cached_property
    def opened(self) -> dict[int, frozenset[CallKey]]:
        """rank -> its outstanding calls, comparable between siblings."""
        return {rank: frozenset(map(key_of, calls)) for rank, calls in self.outstanding.items()}

    def other(self, rank: int, entry: Entry) -> int:
        """The global rank at the other side of a send or receive; -1 if it is not known."""
        ranks = self.groups[entry.group].ranks
        return ranks[entry.to] if entry.to < len(ranks) else -1

    def _place(self, name: str, rank: int) -> int:
        """Return the place of ``rank`` in a group; -1 if it is no member."""
        places = self._places.get(name)
        if places is None:
            members = self.groups[name].ranks
            places = self._places[name] = {member: place for place, member in enumerate(members)}
        return places.get(rank, -1)

    def step(self, rank: int, entry: Entry) -> int:
        """Return how many places further in the group the other side of a message is."""
        if entry.group not in self.groups:
            return entry.to
        place = self._place(entry.group, rank)
        if place < 0:
            return entry.to
        return (entry.to - place) % len(self.groups[entry.group].ranks)

    def launches(self, rank: int) -> Mapping[Launch, list[Entry]]:
        """Return the outstanding calls of ``rank`` by launch, both in the order of issue.

        The calls are collected once per rank: asking for each launch looks at each call once.
        """
        launches = self._launches.get(rank)
        if launches is None:
            launches = self._launches[rank] = {}
            for entry in self.outstanding.get(rank, ()):
                launches.setdefault((entry.group, entry.to >= 0, entry.seq), []).append(entry)
        return launches

    def blocking_ranks(self, rank: int) -> set[int]:
        """Return the ranks that keep some outstanding call of ``rank`` waiting, for any reason.

        Of a group's collectives one of each stretch is asked for, and of these no rank asks twice.
        """
        needed_sets: set[frozenset[int]] = set()
        numbers_of_group: dict[str, list[int]] = {}
        for launch, entries in self.launches(rank).items():
            name, is_message, number = launch
            if is_message:
                reasons = self.blockers(rank, entries[0])
                needed_sets.add(frozenset(itertools.chain.from_iterable(reasons.values())))
            else:
                numbers_of_group.setdefault(name, []).append(number)
        for name, numbers in numbers_of_group.items():
            numbers.sort()
            bounds = self._bounds_of_stretches(name)
            position = 0
            while position < len(numbers):
                number = numbers[position]
                stretch = bisect.bisect_right(bounds, number)
                needed_sets.add(self._blocking_stretch(rank, (name, False, number), stretch))

                # on to the first number of the next stretch
                if stretch == len(bounds):
                    break
                position = bisect.bisect_left(numbers, bounds[stretch], position)
        return set[int]().union(*needed_sets)

    def _blocking_stretch(self, rank: int, launch: Launch, stretch: int) -> frozenset[int]:
        """Return the ranks that keep a collective waiting, and all of its stretch."""
        name, _, _ = launch
        ranks = self._blocking.get((name, stretch))
        if ranks is None:
            reasons = self.blockers(rank, self.launches(rank)[launch][0])
            ranks = frozenset(itertools.chain.from_iterable(reasons.values()))
            self._blocking[name, stretch] = ranks
        return ranks

    def _bounds_of_stretches(self, name: str) -> list[int]:
        """Return the numbers at which the collectives of a group may begin to wait for others.

        For whom a collective waits depends on which members have issued it, which saw it end, and
        which stand in it.  Between two of these numbers it is the same for each collective.
        """
        bounds = self._bounds.get(name)
        if bounds is None:
            numbers: set[int] = set()
            for member in self.groups[name].ranks:
                numbers.add(self.enqueued.get((name, member), -1) + 1)
                numbers.add(self.completed.get((name, member), -1) + 1)
                group, is_message, number = self.heads.get(member, ("", False, -1))
                if group == name and not is_message:
                    numbers.update((number, number + 1))
            bounds = self._bounds[name] = sorted(numbers)
        return bounds

    def _by_route(self, rank: int, messages: Iterable[Entry]) -> dict[_Route, _Messages]:
        """Collect messages of ``rank`` by group, operation and other side."""
        by_route: dict[_Route, _Messages] = defaultdict(_Messages)
        for message in messages:
            route = _Route(message.group, message.op, self.other(rank, message))
            by_route[route].append(message)
        return dict(by_route)

    def _outstanding_of_route(self, rank: int, route: _Route) -> _Messages:
        """Return the outstanding messages of ``rank`` on a route."""
        if rank not in self._outstanding_messages:
            messages = [entry for entry in self.outstanding.get(rank, ()) if entry.pair]
            self._outstanding_messages[rank] = self._by_route(rank, messages)
        return self._outstanding_messages[rank].get(route, _NO_MESSAGES)

    def _all_of_route(self, rank: int, route: _Route) -> _Messages:
        """Return the messages of ``rank`` on a route since the job began, where all are known."""
        if rank not in self._all_messages:
            known = (entry for entry in self.dumps[rank].messages if entry.group in self.groups)
            self._all_messages[rank] = self._by_route(rank, known)
        return self._all_messages[rank].get(route, _NO_MESSAGES)

    def mate(self, rank: int, entry: Entry) -> Entry | None:
        """Find the other side's outstanding counterpart of an outstanding send or receive.

        Messages of two ranks meet in the order of issue: the third send meets the third receive.
        """
        peer = self.other(rank, entry)
        own_messages = self._outstanding_of_route(rank, _Route(entry.group, entry.op, peer))
        route_back = _Route(entry.group, _OTHER_OP[entry.op], rank)
        counterparts = self._outstanding_of_route(peer, route_back).entries
        position = own_messages.position_of_entry[entry]
        return counterparts[position] if position < len(counterparts) else None

    def messages(self, rank: int) -> tuple[Entry, ...]:
        """Its recorded messages: of outstanding calls only, where all are left, all of them."""
        return self.dumps[rank].messages or tuple(e for e in self.dumps[rank].entries if e.pair)

    def never_posted(self, rank: int, entry: Entry) -> bool | None:
        """Tell whether the other side made fewer messages of this kind than ``rank`` up to this.

        Args:
            rank: One side.
            entry: Its send or receive.

        Returns:
            None where not all messages of both sides are recorded.
        """
        peer = self.other(rank, entry)
        if peer not in self.dumps or not self.dumps[rank].messages or not self.dumps[peer].messages:
            return None
        own_messages = self._all_of_route(rank, _Route(entry.group, entry.op, peer))
        route_back = _Route(entry.group, _OTHER_OP[entry.op], rank)
        counterparts = self._all_of_route(peer, route_back).entries
        return len(counterparts) <= own_messages.position_of_record[entry.record]

    def is_over(self, rank: int, entry: Entry) -> bool:
        """Whether ``rank`` saw the collective ``entry`` end."""
        return self.completed.get((entry.group, rank), -1) >= entry.seq

    def arrived(self, rank: int, entry: Entry) -> bool:
        """Whether ``rank`` has issued its part of the collective ``entry``."""
        return self.enqueued.get((entry.group, rank), -1) >= entry.seq

    @cached_property
    def lates(self) -> Mapping[tuple[str, int], Entry]:
        """(group, rank that has not come) -> the first call at which others wait for it."""
        calls_of_group: dict[str, dict[int, Entry]] = defaultdict(dict)
        for outstanding in self.outstanding.values():
            for entry in outstanding:
                if entry.to < 0:
                    calls_of_group[entry.group][entry.seq] = entry

        first_calls: dict[tuple[str, int], Entry] = {}
        for name, calls in sorted(calls_of_group.items()):
            numbers = sorted(calls)
            late_ranks: list[tuple[int, int]] = []
            for rank in self.groups[name].ranks:
                # the first number that is above its counter
                position = bisect.bisect_right(numbers, self.enqueued.get((name, rank), -1))
                if position < len(numbers):
                    late_ranks.append((position, rank))

            # by the call, and for one call in the order of the group
            for position, rank in sorted(late_ranks, key=lambda late: late[0]):
                first_calls[name, rank] = calls[numbers[position]]
        return first_calls

    def skipped(self, rank: int, entry: Entry) -> bool:
        """Whether ``rank``, which lacks ``entry``, made calls that most siblings made after it."""
        votes = self.went_on_without(rank, key_of(entry))
        return votes[True] > votes[False]

    def went_on_without(self, rank: int, wanted: CallKey) -> Counter[bool]:
        """Whether ``rank`` made one of the calls that a sibling made after ``wanted``: votes."""
        mine, votes = set(map(key_of, self.issued(rank))), Counter[bool]()
        for other in self.siblings_of(rank):
            keys = list(map(key_of, self.issued(other)))
            if other != rank and wanted in keys:
                votes[not mine.isdisjoint(keys[keys.index(wanted) :])] += 1
        return votes

    @cached_property
    def heads(self) -> Mapping[int, Launch]:
        """rank -> the launch of its oldest outstanding call."""
        return {rank: calls[0].launch for rank, calls in self.outstanding.items() if calls}

    def waits(self, rank: int) -> tuple[str, Sequence[int]]:
        """(why, for whom) the oldest outstanding call of ``rank`` waits."""
        head = self.head(rank)
        found = self.blockers(rank, head) if head is not None else {}
        return next(((why, ranks) for why, ranks in found.items() if ranks), ("", []))

    def blockers(
        self, rank: int, entry: Entry, first: Mapping[int, Launch] | None = None
    ) -> Mapping[str, Sequence[int]]:
        """Find why, and for which ranks, an outstanding call waits.

        Args:
            rank: The rank that waits.
            entry: Its call.
            first: Rank -> the launch at which it stands; by default its oldest outstanding one.

        Returns:
            Reason -> ranks, which may be none; the reason that says most comes first.
        """
        if first is not None:
            return self._blockers(rank, entry, first)

        # all ranks that stand in a collective wait for the same ranks; messages differ by rank
        key = (rank, entry.launch) if entry.pair else entry.launch
        if key not in self._waited:
            self._waited[key] = self._blockers(rank, entry, self.heads)
        return self._waited[key]

    def _blockers(
        self, rank: int, entry: Entry, first: Mapping[int, Launch]
    ) -> Mapping[str, Sequence[int]]:
        """Find what keeps a collective or a message waiting: reason -> ranks."""
        if entry.pair:
            return self._unanswered(rank, entry, first)
        absent: list[int] = []
        without_dump: list[int] = []
        elsewhere: list[int] = []
        launch = entry.launch
        for member in self.groups[entry.group].ranks:
            counter = entry.group, member
            if member not in self.dumps:
                without_dump.append(member)
            elif self.enqueued.get(counter, -1) < entry.seq:
                absent.append(member)
            is_over = self.completed.get(counter, -1) >= entry.seq
            if first.get(member, launch) != launch and not is_over:
                elsewhere.append(member)
        return {
            "has not come": absent,
            "left no dump": without_dump,
            "has it queued behind another call": elsewhere,
        }

    def _unanswered(
        self, rank: int, head: Entry, first: Mapping[int, Launch]
    ) -> Mapping[str, Sequence[int]]:
        """Find what keeps a message waiting, or one of those issued with it: they end together."""
        lacking: dict[int, None] = {}
        behind: dict[int, None] = {}
        unknown: dict[int, None] = {}
        for entry in self.launches(rank)[head.launch]:
            peer = self.other(rank, entry)
            mate = self.mate(rank, entry)
            not_posted = self.never_posted(rank, entry)

            # which messages the other side posted stands behind the cut of its dump
            if peer in self.dumps and self.dumps[peer].is_cut:
                unknown[peer] = None
                continue
            # not all messages are recorded: what is not outstanding was not posted, or it ended
            if not_posted is None:
                not_posted = mate is None
            if not_posted:
                lacking[peer] = None
            # without a mate it ended, or waits for the rest of its batch
            elif mate is not None and first.get(peer, mate.launch) != mate.launch:
                behind[peer] = None
        return {
            "has not posted its side": list(lacking),
            "has it queued behind another call": [] if lacking else list(behind),
            "left a dump that is cut off": [] if lacking or behind else list(unknown),
        }

    @cached_property
    def hidden(self) -> set[int]:
        """Ranks that wait, by their counters, in a message of which no entry is left: the ring was
        too short, or there are counters only.  To whom it goes nobody knows.
        """
        shown = {(e.group, r) for r, calls in self.outstanding.items() for e in calls}
        hidden_ranks: set[int] = set()
        for rank, dump in self.dumps.items():
            for name, status in dump.status.items():
                if name not in self.pairs or name not in self.groups or (name, rank) in shown:
                    continue
                if status.enqueued > status.completed:
                    hidden_ranks.add(rank)

            # behind a cut may be messages that no counter has
            if any(name not in dump.status for name in self._uncounted_of_cut(rank)):
                hidden_ranks.add(rank)
        return hidden_ranks

    def mute(self) -> list[int]:
        """Ranks whose dumps have neither calls nor counters, where others have counters: started
        again, or their recorders were off.  It proves nothing against them.
        """
        if not any(dump.status for dump in self.dumps.values()):
            return []
        return [r for r, dump in self.dumps.items() if not dump.entries and not dump.status]

    @cached_property
    def history(self) -> bool:
        """Whether dumps hold calls that ended, too."""
        return any(e.done for dump in self.dumps.values() for e in dump.entries)

    def lacks(self) -> tuple[str, ...]:
        """What the dumps do not hold, and which variable to set next time."""
        found, dumps = list(dict.fromkeys(self.notes)), self.dumps.values()
        if self.missing:
            found.append(f"dumps of {ranks_text(self.missing)}")
        found += [f"rank {r}: {why}" for r, why in list(self.unreadable.items())[:4]]
        cut_ranks = [rank for rank, dump in self.dumps.items() if dump.is_cut]
        if cut_ranks:
            found.append(f"the ends of the dumps of {ranks_text(cut_ranks)}, which are cut off: "
                         "counters, and calls that ended, are read")  # fmt: skip
        if not any(d.entries or d.status for d in dumps) and not self.observed.differ:
            found.append("calls and counters: next time TORCH_FR_BUFFER_SIZE=2000")
        if mute := self.mute():
            found.append(f"counters of {ranks_text(mute)}: their recorders were off or new")
        short_rings = self.hidden.difference(cut_ranks)
        if short_rings and not all(d.version == "log" for d in dumps):
            found.append(f"outstanding messages of {ranks_text(short_rings)}: next "
                         "time a larger TORCH_FR_BUFFER_SIZE")  # fmt: skip
        found += sorted({note for dump in dumps for note in dump.notes})
        if dumps and all(dump.version == "log" for dump in dumps):
            # nothing more is in a log, whatever the recorders are told
            return (*found, "dumps: next time TORCH_FR_BUFFER_SIZE=2000 and "
                    "TORCH_NCCL_DUMP_ON_TIMEOUT=1")  # fmt: skip
        if not self.history:
            # Megatron takes what the environment says; the flags for it came with 0.17
            found.append("history: only outstanding calls; next time TORCH_INCLUDE_ONLY_ACTIVE=0")
        if not any(e.site for d in dumps for e in d.entries):
            found.append("all stack frames; next time TORCH_INCLUDE_STACK_TRACE=1")
        if not any(e.state == "started" for d in dumps for e in d.entries):
            found.append("what had started on the device; next time TORCH_NCCL_ENABLE_TIMING=1")
        return tuple(found)
