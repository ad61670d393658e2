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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_prism.core.world import ranks_text
from megatron_prism.features.hang.calls import NO_CALLS, CallPart, Calls, Entry, Integers, Launch
from megatron_prism.features.hang.dumps import DumpSet, Group

# groups in which each optimizer step makes a call: by their beginnings
STEP_GROUPS = ("INTRA_", "EMBEDDING", "MODEL_PARALLEL", "DATA_PARALLEL")
_OF_MODEL = ("TENSOR_MODEL_PARALLEL_GROUP", "CONTEXT_PARALLEL_GROUP")
_PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"  # as Megatron describes it
_PIPELINE_WORDS = re.compile(r"(?:^|mesh[_-])pp$|pipeline", re.IGNORECASE)


def stages(groups: Mapping[str, Group], message_groups: Collection[str]) -> dict[int, int]:
    """Return the place of each rank in its pipeline: rank -> number; empty without a pipeline.

    Args:
        groups: Name -> group.
        message_groups: Names of groups in which messages are sent.
    """
    places: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for group in _pipelines(list(groups.values()), message_groups):
        desc, _, _ = group.desc.partition(" (group ")
        for place, rank in enumerate(group.ranks):
            places[rank].append((desc, place))

    # ranks with the same places are siblings
    key_of_rank: dict[int, tuple[tuple[str, int], ...]] = {}
    for rank, rank_places in places.items():
        rank_places.sort()
        key_of_rank[rank] = tuple(rank_places)
    distinct_keys = set(key_of_rank.values())
    number_of_key = {key: number for number, key in enumerate(sorted(distinct_keys))}
    return {rank: number_of_key[key] for rank, key in key_of_rank.items()}


def _pipelines(groups: Collection[Group], message_groups: Collection[str]) -> list[Group]:
    """Return the groups that are pipelines."""
    pipelines = [group for group in groups if group.desc == _PIPELINE]
    if pipelines:
        return pipelines
    # other frameworks have other words for it
    pipelines = [group for group in groups if _PIPELINE_WORDS.search(group.desc)]
    if pipelines:
        return pipelines
    # Megatron names its groups; without a pipeline among them there is none
    if any("_PARALLEL_GROUP" in group.desc for group in groups):
        return []
    return [group for group in groups if group.name in message_groups]


_MAX_UNNAMED = 64  # oldest outstanding calls that counters tell where a dump has no entries
_ALL_CALLS = 1 << 61  # the counter of a rank that is taken to have come to all calls of a group


_AFTER_RECORDS = 1 << 62  # the record of a call that is not recorded


def _unnamed(group: Group, seq: int) -> Entry:
    """Make a call of which only its number is known."""
    return Entry(
        record=_AFTER_RECORDS,
        group=group.name,
        desc=group.desc,
        op="call",
        seq=seq,
        calls=seq,
        to=-1,
        numbers=((), ()),
        dtypes=(),
        state="",
        done=False,
        site="",
        timeout_ms=-1,
        created_ns=-1,
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


def keys_of(calls: Calls) -> list[CallKey]:
    """Return the keys of calls."""
    kinds = [(part.desc, part.pair) for part in calls.parts]
    keys: list[CallKey] = []
    for index, seq in zip(calls.part.tolist(), calls.seq.tolist(), strict=True):
        desc, is_message = kinds[index]
        keys.append(CallKey(desc, is_message, seq))
    return keys


def places_of_key(calls: Calls, key: CallKey) -> list[int]:
    """Return the places of the calls that have a key."""
    of_kind = calls.places(lambda part: part.desc == key.desc and part.pair == key.pair)
    places: list[int] = of_kind[calls.seq[of_kind] == key.seq].tolist()
    return places


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


_Member = tuple[str, int]  # name of a group, rank
_Stretch = tuple[str, int]  # name of a group, place among its stretches of calls
_RankAndRoute = tuple[int, _Route]
Reasons = Mapping[str, Sequence[int]]  # why a call waits -> for which ranks
# the reasons, of one rank
NOT_COME = "has not come"
NO_DUMP = "left no dump"
QUEUED = "has it queued behind another call"
NOT_POSTED = "has not posted its side"
CUT = "left a dump that is cut off"
_OTHER_OP = {"send": "recv", "recv": "send"}


def call_text(entry: Entry) -> str:
    """Say a call: ``all_reduce #3 of GROUP at file:line``."""
    call = entry.op
    if entry.pair:
        direction = "to" if entry.op == "send" else "from"
        call = f"{entry.op} {direction} group rank {entry.to}"
    text = f"{call} #{entry.seq} of {entry.desc}"
    return f"{text} at {entry.site}" if entry.site else text


def _member_at(members: Sequence[int], place: int) -> int:
    """Return the rank at a place of a group; -1 if it has no such place."""
    return members[place] if place < len(members) else -1


@dataclass(frozen=True)
class NumberedCalls:
    """The recorded collectives of a rank in groups of one description, by number.

    There are several calls of one number where they are coalesced.

    Attributes:
        calls: All calls of the rank.
        places: Places of the collectives, by number, those of one number in the order of issue.
        numbers: Their numbers, ascending.
    """

    calls: Calls
    places: Integers
    numbers: Integers

    @classmethod
    def of(cls, calls: Calls, desc: str) -> NumberedCalls:
        """Collect the collectives of a rank in groups of a description."""
        places = calls.places(lambda part: part.desc == desc and part.is_collective)
        numbers = calls.seq[places]
        if (np.diff(numbers) < 0).any():
            order = np.argsort(numbers, kind="stable")
            places, numbers = places[order], numbers[order]
        return cls(calls, places, numbers)

    def at(self, seq: int) -> list[Entry]:
        """Return the calls that have a number."""
        first = np.searchsorted(self.numbers, seq)
        end = np.searchsorted(self.numbers, seq, "right")
        return [self.calls[place] for place in self.places[first:end].tolist()]


@dataclass(frozen=True)
class _Queue:
    """Collectives of a group that are outstanding on a rank.

    Attributes:
        order: Place of the rank among those with a dump.
        calls: All outstanding calls of the rank.
        places: Places of the group's collectives among them.
    """

    order: int
    calls: Calls
    places: Integers

    def places_of(self, number: int) -> list[int]:
        """Return the places of calls that have a number."""
        places: list[int] = self.places[self.calls.seq[self.places] == number].tolist()
        return places


class AwaitedCalls:
    """The collectives of a group in which ranks wait.

    Attributes:
        numbers: Their numbers, each once, ascending.
    """

    def __init__(self, queues: Sequence[_Queue]) -> None:
        self._queues = queues
        self._last: dict[int, Entry] = {}
        numbers = [queue.calls.seq[queue.places] for queue in queues]
        self.numbers: list[int] = np.unique(np.concatenate(numbers)).tolist()

    def last(self, number: int) -> Entry:
        """Return the call of a number, as the last rank that waits in it has it."""
        entry = self._last.get(number)
        if entry is not None:
            return entry
        for queue in reversed(self._queues):
            places = queue.places_of(number)
            if places:
                entry = self._last[number] = queue.calls[places[-1]]
                return entry
        raise LookupError(f"nobody waits in a call #{number}")

    def first_place(self, number: int) -> tuple[int, int]:
        """Return where a call of a number comes first: order of the rank, place on it."""
        for queue in self._queues:
            places = queue.places_of(number)
            if places:
                return queue.order, places[0]
        raise LookupError(f"nobody waits in a call #{number}")


class JobState:
    """Where every rank stands.

    Attributes:
        observed: The dumps, with what logs say beside them.
        dumps: Rank -> dump.
        unreadable: Rank -> why its dump cannot be read.
        events: Rank -> what logs say happened to it.
        evidence: What logs say, in words.
        groups: Name -> Group with two or more members.
        notes: What is not known of groups.
        pairs: Names of groups in which messages are sent: their counters count these, too.
        outstanding: Rank -> its outstanding calls in the order of issue.
        enqueued: (group, rank) -> how many collectives it has issued.
        completed: (group, rank) -> how many of them it saw complete.
        missing: Ranks that are in some group but left no dump.
        role: Rank -> its place in its pipeline.
        siblings: Place in a pipeline -> the ranks with a dump there.
        has_logs: Whether what some ranks called is known from their logs.
    """

    def __init__(self, observed: DumpSet) -> None:
        self.observed = observed
        self.dumps = observed.dumps
        self.unreadable = observed.unreadable
        self.events = observed.events
        self.evidence = observed.evidence
        self.notes: list[str] = []
        self.enqueued: dict[_Member, int] = {}
        self.completed: dict[_Member, int] = {}
        self.outstanding: dict[int, Calls] = {}
        self._waited: dict[Launch | tuple[int, Launch], Reasons] = {}
        self._places: dict[str, dict[int, int]] = {}
        self._opened: dict[int, frozenset[CallKey]] = {}
        self._blocking: dict[_Stretch, frozenset[int]] = {}
        self._bounds: dict[str, list[int]] = {}
        self._outstanding_of_routes: dict[_RankAndRoute, Calls] = {}
        self._all_of_routes: dict[_RankAndRoute, Calls] = {}
        self._numbered: dict[tuple[int, str], NumberedCalls] = {}
        self._up_to_steps: dict[tuple[int, str], dict[CallKey, tuple[int, int]]] = {}

        self.groups = self._collect_groups(observed.listed)
        self.pairs = self._message_groups()
        for rank, dump in self.dumps.items():
            self._count(rank)
            self.outstanding[rank] = self._pending(rank, dump.entries)
        members: set[int] = set()
        for group in self.groups.values():
            members.update(group.ranks)
        self.missing = sorted(members - set(self.dumps))
        self.role = stages(self.groups, self.pairs)
        self.has_logs = any(dump.version == "log" for dump in self.dumps.values())
        self.siblings: dict[int, list[int]] = defaultdict(list)
        for rank in self.dumps:
            role = self.role.get(rank, 0)
            self.siblings[role].append(rank)

    def _collect_groups(self, listed: Mapping[str, Counter[Group]]) -> dict[str, Group]:
        """Return the groups of more than one rank, and note what is not known of them.

        Args:
            listed: Name -> what dumps say of the group, with how many of them say it.
        """
        # communicators that are made at their first call are not in pg_config
        unlisted: dict[str, Counter[Group]] = defaultdict(Counter)
        for rank, dump in self.dumps.items():
            for part in dump.entries.parts:
                if part.group not in listed:
                    caller_alone = Group(part.group, part.desc, (rank,))
                    unlisted[part.group][caller_alone] += 1

        groups: dict[str, Group] = {}
        for name, written in {**listed, **unlisted}.items():
            # a log lists the ranks that speak of the group: a dump knows its members
            whole = Counter({group: n for group, n in written.items() if not group.partial})
            versions = whole or written
            group, _ = versions.most_common(1)[0]
            largest = max(len(version.ranks) for version in versions)
            if len(versions) > 1 and largest == 1:
                # each rank knows of itself alone
                first = next(iter(versions))
                ranks = [version.ranks[0] for version in versions]
                ranks.sort()
                group = Group(name, first.desc, tuple(ranks))
                self.notes.append(f"the members of group {name} are known from its calls only")
            elif len(versions) > 1:
                self.notes.append(f"dumps disagree about who is in group {name}")
            if len(group.ranks) > 1 or group.partial:
                groups[name] = group
        return groups

    def _message_groups(self) -> set[str]:
        """Return the names of groups in which messages are sent."""
        names: set[str] = set()
        for name, group in self.groups.items():
            if group.desc.startswith("PIPELINE"):
                names.add(name)
        for dump in self.dumps.values():
            for part in dump.entries.parts:
                if part.pair:
                    names.add(part.group)
            # more calls ended than were issued: one of the counters is of messages
            for name, status in dump.status.items():
                if status.completed > status.enqueued >= 0:
                    names.add(name)
        return names

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
        calling_groups = {part.group for part in dump.entries.parts}
        uncounted = self.pairs | (calling_groups - dump.status.keys())
        for part, places in dump.entries.parts_and_places:
            key = (part.group, rank)
            last_ended = self.last_ended(part.group, rank)
            seqs = dump.entries.seq[places]
            if part.group in uncounted:
                issued = int(dump.entries.calls[places].max())
                last_issued = self.last_issued(part.group, rank)
                self.enqueued[key] = max(last_issued, issued)
                if part.done and not part.pair:
                    last_number = int(seqs.max())
                    self.completed[key] = max(last_ended, last_number)
            # gloo counts calls that failed, too
            elif not part.done:
                first_failed = int(seqs.min())
                if first_failed <= last_ended:
                    self.completed[key] = first_failed - 1

    def _uncounted_of_cut(self, rank: int) -> list[str]:
        """Return the groups of a rank with a cut dump in which no counter tells its collectives."""
        dump = self.dumps[rank]
        if not dump.is_cut:
            return []
        names = self.groups_of[rank]
        return [name for name in names if name in self.pairs or name not in dump.status]

    def _pending(self, rank: int, calls: Calls) -> Calls:
        """Return the outstanding calls of a rank: recorded ones, then such as counters tell."""
        last_ended = [self.last_ended(part.group, rank) for part in calls.parts]
        is_behind_ended = calls.seq > calls.per_part(last_ended)
        is_behind = calls.pair | is_behind_ended
        may_wait = calls.flags(self._may_wait)
        pending = calls.taken(may_wait & is_behind)

        recorded_groups = {part.group for part in pending.parts}
        unnamed: list[Entry] = []
        for name in self.groups_of[rank]:
            issued = self.last_issued(name, rank)
            ended = self.last_ended(name, rank)
            if name in recorded_groups or name in self.pairs or issued == _ALL_CALLS:
                continue
            # the rank waits in the oldest one, however many it has issued behind it
            first = max(ended, 0) + 1
            last = min(issued, first + _MAX_UNNAMED - 1)
            group = self.groups[name]
            for seq in range(first, last + 1):
                call = _unnamed(group, seq)
                unnamed.append(call)
        return pending.followed_by(unnamed)

    def _may_wait(self, part: CallPart) -> bool:
        """Tell whether calls of a part wait if no counter says that they ended."""
        return not part.done and not part.closes_batch and part.group in self.groups

    @cached_property
    def groups_of(self) -> dict[int, list[str]]:
        """Names of each rank's groups."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, group in self.groups.items():
            for rank in group.ranks:
                names[rank].append(name)
        return names

    @cached_property
    def counts(self) -> dict[int, dict[str, int]]:
        """Collectives that each rank has issued: rank -> description of the group -> how many."""
        counts: dict[int, dict[str, int]] = {rank: {} for rank in self.dumps}
        for (name, rank), count in self.enqueued.items():
            is_assumed = name in self.dumps[rank].assumed or count == _ALL_CALLS
            if is_assumed or name not in self.groups:
                continue
            desc = self.groups[name].desc
            counts[rank][desc] = count
        return counts

    def model_place(self, rank: int) -> tuple[tuple[str, int], ...]:
        """Return the place of a rank in its tensor- and context-parallel groups."""
        places: list[tuple[str, int]] = []
        for name in self.groups_of[rank]:
            group = self.groups[name]
            if group.desc.startswith(_OF_MODEL):
                places.append((group.desc, self._place(name, rank)))
        return tuple(sorted(places))

    def model_parallel_ranks(self, rank: int) -> set[int]:
        """Return the members of a rank's tensor- and context-parallel groups."""
        members: set[int] = set()
        for name in self.groups_of[rank]:
            group = self.groups[name]
            if group.desc.startswith(_OF_MODEL):
                members.update(group.ranks)
        return members

    def siblings_of(self, rank: int) -> list[int]:
        """Return the ranks with a dump at the rank's place of the pipeline, itself among them."""
        return self.siblings[self.role.get(rank, 0)]

    def siblings_without_dump(self, place: int) -> list[int]:
        """Return the ranks at a place of the pipeline that are in some group but left no dump."""
        # without a pipeline all ranks are siblings
        if not self.role:
            return list(self.missing)
        return [rank for rank in self.missing if self.role.get(rank) == place]

    def unlike_replicas(self, rank: int, desc: str) -> bool:
        """Tell whether siblings made unlike numbers of calls up to the same call.

        They are replicas with more microbatches, of which numbers say nothing.  The call is one in
        which they stand, or one of an optimizer step that ended.

        Args:
            rank: A rank, which does not count.
            desc: Description of the groups whose calls and messages are counted.

        Returns:
            Whether several siblings differ from most in one of these.
        """
        counts_of_call: dict[object, Counter[object]] = defaultdict(Counter)
        counts_of_step: dict[object, Counter[object]] = defaultdict(Counter)
        for sibling in self.siblings_of(rank):
            if sibling != rank:
                for step, counts_up_to in self._counts_up_to_steps(sibling, desc).items():
                    counts_of_step[step][counts_up_to] += 1
            head = self.head(sibling)
            if sibling == rank or head is None or head.desc == desc or head.pair:
                continue
            calls = self.counts[sibling].get(desc)
            messages = self.messages_counted(sibling, desc)
            counts_of_call[head.desc, head.seq][calls, messages] += 1
        differing = 0
        for counts in counts_of_call.values():
            differing += counts.total() - max(counts.values())
        for counts in counts_of_step.values():
            differing = max(differing, counts.total() - max(counts.values()))
        return differing > 1

    def _counts_up_to_steps(self, rank: int, desc: str) -> dict[CallKey, tuple[int, int]]:
        """Find the last calls of a description that a rank issued before those of optimizer steps.

        Args:
            rank: A rank.
            desc: Description of the groups whose calls are looked for.

        Returns:
            Each recorded call of a group of optimizer steps that ended -> the numbers of the last
            collective and of the last message that were issued before it; -1: none.
        """
        known = self._up_to_steps.get((rank, desc))
        if known is not None:
            return known
        calls = self.dumps[rank].entries
        counted = calls.places(lambda part: part.desc == desc and not part.closes_batch)
        is_message = calls.pair[counted]
        counts: dict[CallKey, tuple[int, int]] = {}
        for part, places in calls.parts_and_places:
            is_step = part.desc.startswith(STEP_GROUPS) and part.desc != desc
            if not is_step or not part.done or part.pair:
                continue
            for place in places.tolist():
                before = counted < place
                collectives = counted[before & ~is_message]
                messages = counted[before & is_message]
                last_collective = calls.seq[collectives].max(initial=-1)
                last_message = calls.seq[messages].max(initial=-1)
                number = int(calls.seq[place])
                key = CallKey(part.desc, False, number)
                counts[key] = int(last_collective), int(last_message)
        self._up_to_steps[rank, desc] = counts
        return counts

    # -- questions --------------------------------------------------------------------------------
    def head(self, rank: int) -> Entry | None:
        """Return the oldest outstanding call of ``rank``."""
        calls = self.outstanding.get(rank)
        return calls[0] if calls else None

    def issued(self, rank: int) -> Calls:
        """Return recorded calls and messages, without the records that close batches.

        Such a record has the number of a collective that came before it.
        """
        calls = self.dumps[rank].entries
        if not any(part.closes_batch for part in calls.parts):
            return calls
        return calls.taken(~calls.closes_batch)

    def numbered(self, rank: int, desc: str) -> NumberedCalls:
        """Return the recorded collectives of ``rank`` in its groups of a description."""
        key = rank, desc
        if key not in self._numbered:
            calls = NO_CALLS
            if rank in self.dumps:
                calls = self.dumps[rank].entries
            self._numbered[key] = NumberedCalls.of(calls, desc)
        return self._numbered[key]

    def at(self, rank: int, desc: str, seq: int) -> list[Entry]:
        """Return the collectives of ``rank`` that have that number."""
        return self.numbered(rank, desc).at(seq)

    def all_counts(self, rank: int) -> dict[str, int]:
        """Return calls or messages issued, also in groups of one: description -> how many."""
        dump = self.dumps[rank]
        counts: dict[str, int] = {}
        for name, status in dump.status.items():
            if name in dump.groups and name not in dump.assumed:
                counts[dump.groups[name].desc] = status.enqueued
        return counts

    def messages_counted(self, rank: int, desc: str) -> tuple[int, int]:
        """Return how many messages a rank issued and saw end, by its counter; -1: not known.

        Args:
            rank: A rank.
            desc: Description of its group.
        """
        dump = self.dumps[rank]
        counts: list[tuple[int, int]] = []
        for name, status in dump.status.items():
            counts_messages = name in self.pairs and name not in dump.assumed
            if not counts_messages or name not in self.groups:
                continue
            group = self.groups[name]
            if group.desc == desc:
                counts.append((status.enqueued, status.completed))
        return max(counts, default=(-1, -1))

    def opened(self, rank: int) -> frozenset[CallKey]:
        """Return the outstanding calls of a rank, comparable between siblings."""
        keys = self._opened.get(rank)
        if keys is None:
            keys = self._opened[rank] = frozenset(keys_of(self.outstanding[rank]))
        return keys

    def other(self, rank: int, entry: Entry) -> int:
        """Return the global rank at the other side of a message; -1 if it is not known."""
        return _member_at(self.groups[entry.group].ranks, entry.to)

    def _place(self, name: str, rank: int) -> int:
        """Return the place of ``rank`` in a group; -1 if it is no member."""
        places = self._places.get(name)
        if places is None:
            members = self.groups[name].ranks
            places = {member: place for place, member in enumerate(members)}
            self._places[name] = places
        return places.get(rank, -1)

    def step(self, rank: int, entry: Entry | CallPart) -> int:
        """Return how many places further in the group the other side of a message is."""
        if entry.group not in self.groups:
            return entry.to
        place = self._place(entry.group, rank)
        if place < 0:
            return entry.to
        return (entry.to - place) % len(self.groups[entry.group].ranks)

    def batch(self, rank: int, launch: Launch) -> list[Entry]:
        """Return the outstanding calls of ``rank`` with a launch, in the order of issue."""
        if rank not in self.outstanding:
            return []
        calls = self.outstanding[rank]
        name, is_message, number = launch
        places = calls.places(lambda part: part.group == name and part.pair == is_message)
        numbers = calls.seq[places]
        return [calls[place] for place in places[numbers == number].tolist()]

    def blocking_ranks(self, rank: int) -> set[int]:
        """Return the ranks that keep some outstanding call of ``rank`` waiting, for any reason.

        Of a group's collectives one of each stretch is asked for, and of these no rank asks twice.
        """
        needed_sets: set[frozenset[int]] = set()
        calls = self.outstanding.get(rank, NO_CALLS)
        first_messages: dict[Launch, Entry] = {}
        for message in calls.taken(calls.pair):
            first_messages.setdefault(message.launch, message)
        for message in first_messages.values():
            reasons = self.blockers(rank, message)
            needed_sets.add(frozenset(itertools.chain.from_iterable(reasons.values())))
        for name, places in calls.collectives_of_group.items():
            numbers = np.unique(calls.seq[places]).tolist()
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
            reasons = self.blockers(rank, self.batch(rank, launch)[0])
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
                numbers.add(self.last_issued(name, member) + 1)
                numbers.add(self.last_ended(name, member) + 1)
                group, is_message, number = self.heads.get(member, ("", False, -1))
                if group == name and not is_message:
                    numbers.update((number, number + 1))
            bounds = self._bounds[name] = sorted(numbers)
        return bounds

    def _of_route(self, rank: int, calls: Calls, route: _Route) -> Calls:
        """Return those of the messages of ``rank`` that are on a route, in the order of issue."""
        if route.group not in self.groups:
            return NO_CALLS
        members = self.groups[route.group].ranks
        places = calls.places(
            lambda part: (
                part.group == route.group
                and part.op == route.op
                and part.pair
                and _member_at(members, part.to) == route.peer
            )
        )
        return calls.taken(places)

    def _outstanding_of_route(self, rank: int, route: _Route) -> Calls:
        """Return the outstanding messages of ``rank`` on a route."""
        key = rank, route
        if key not in self._outstanding_of_routes:
            calls = self.outstanding.get(rank, NO_CALLS)
            self._outstanding_of_routes[key] = self._of_route(rank, calls, route)
        return self._outstanding_of_routes[key]

    def _all_of_route(self, rank: int, route: _Route) -> Calls:
        """Return the messages of ``rank`` on a route since the job began, where all are known."""
        key = rank, route
        if key not in self._all_of_routes:
            self._all_of_routes[key] = self._of_route(rank, self.dumps[rank].messages, route)
        return self._all_of_routes[key]

    def mate(self, rank: int, entry: Entry) -> Entry | None:
        """Find the other side's outstanding counterpart of an outstanding send or receive.

        Messages of two ranks meet in the order of issue: the third send meets the third receive.
        """
        peer = self.other(rank, entry)
        own_messages = self._outstanding_of_route(rank, _Route(entry.group, entry.op, peer))
        route_back = _Route(entry.group, _OTHER_OP[entry.op], rank)
        counterparts = self._outstanding_of_route(peer, route_back)
        position = own_messages.place_of(entry)
        return counterparts[position] if position < len(counterparts) else None

    def messages(self, rank: int) -> Calls:
        """Return recorded messages: all of them where all are left, else what entries there are."""
        dump = self.dumps[rank]
        if dump.messages:
            return dump.messages
        return dump.entries.taken(dump.entries.pair)

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
        counterparts = self._all_of_route(peer, route_back)
        same_record = np.flatnonzero(own_messages.record == entry.record)
        position = int(same_record[0])
        return len(counterparts) <= position

    def last_issued(self, name: str, rank: int) -> int:
        """Return how many collectives of a group a rank has issued; -1: not known."""
        return self.enqueued.get((name, rank), -1)

    def last_ended(self, name: str, rank: int) -> int:
        """Return how many collectives of a group a rank saw end; -1: not known."""
        return self.completed.get((name, rank), -1)

    def is_over(self, rank: int, entry: Entry) -> bool:
        """Tell whether ``rank`` saw the collective ``entry`` end."""
        return self.last_ended(entry.group, rank) >= entry.seq

    def arrived(self, rank: int, entry: Entry) -> bool:
        """Tell whether ``rank`` has issued its part of the collective ``entry``."""
        return self.last_issued(entry.group, rank) >= entry.seq

    @cached_property
    def awaited(self) -> Mapping[str, AwaitedCalls]:
        """The collectives of each group in which some rank waits."""
        queues_of_group: dict[str, list[_Queue]] = defaultdict(list)
        for order, calls in enumerate(self.outstanding.values()):
            for name, places in calls.collectives_of_group.items():
                queues_of_group[name].append(_Queue(order, calls, places))
        return {name: AwaitedCalls(queues) for name, queues in queues_of_group.items()}

    @cached_property
    def lates(self) -> Mapping[tuple[str, int], Entry]:
        """The first call at which others wait for a rank: (group, late rank) -> call."""
        first_calls: dict[tuple[str, int], Entry] = {}
        for name, awaited in sorted(self.awaited.items()):
            late_ranks: list[tuple[int, int]] = []
            for rank in self.groups[name].ranks:
                # the first number that is above its counter
                issued = self.last_issued(name, rank)
                position = bisect.bisect_right(awaited.numbers, issued)
                if position < len(awaited.numbers):
                    late_ranks.append((position, rank))

            # by the call, and for one call in the order of the group
            late_ranks.sort(key=lambda late: late[0])
            for position, rank in late_ranks:
                number = awaited.numbers[position]
                first_calls[name, rank] = awaited.last(number)
        return first_calls

    def skipped(self, rank: int, entry: Entry) -> bool:
        """Tell whether ``rank`` lacks a call and made calls that most siblings made after it."""
        votes = self.went_on_without(rank, key_of(entry))
        return votes[True] > votes[False]

    def went_on_without(
        self, rank: int, wanted: CallKey, apart: Collection[int] = ()
    ) -> Counter[bool]:
        """Count siblings by whether ``rank`` made one of the calls that they made from one on.

        Args:
            rank: A rank that lacks the call.
            wanted: The call; siblings that lack it do not count.
            apart: Siblings that do not count either.
        """
        own_keys = set(keys_of(self.issued(rank)))
        votes = Counter[bool]()
        for sibling in self.siblings_of(rank):
            if sibling == rank or sibling in apart:
                continue
            issued = self.issued(sibling)
            wanted_places = places_of_key(issued, wanted)
            if not wanted_places:
                continue
            later_keys = keys_of(issued[wanted_places[0] :])
            votes[not own_keys.isdisjoint(later_keys)] += 1
        return votes

    @cached_property
    def heads(self) -> Mapping[int, Launch]:
        """The launch of each waiting rank's oldest outstanding call."""
        return {rank: calls[0].launch for rank, calls in self.outstanding.items() if calls}

    def waits(self, rank: int) -> tuple[str, Sequence[int]]:
        """Return why, and for which ranks, the oldest outstanding call of ``rank`` waits."""
        head = self.head(rank)
        if head is None:
            return "", []
        for reason, ranks in self.blockers(rank, head).items():
            if ranks:
                return reason, ranks
        return "", []

    def blockers(
        self, rank: int, entry: Entry, first: Mapping[int, Launch] | None = None
    ) -> Reasons:
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

    def _blockers(self, rank: int, entry: Entry, first: Mapping[int, Launch]) -> Reasons:
        """Find what keeps a collective or a message waiting: reason -> ranks."""
        if entry.pair:
            return self._unanswered(rank, entry, first)
        absent: list[int] = []
        without_dump: list[int] = []
        elsewhere: list[int] = []
        launch = entry.launch
        for member in self.groups[entry.group].ranks:
            if member not in self.dumps:
                without_dump.append(member)
            elif not self.arrived(member, entry):
                absent.append(member)
            is_over = self.is_over(member, entry)
            if first.get(member, launch) != launch and not is_over:
                elsewhere.append(member)
        return {
            NOT_COME: absent,
            NO_DUMP: without_dump,
            QUEUED: elsewhere,
        }

    def _unanswered(self, rank: int, head: Entry, first: Mapping[int, Launch]) -> Reasons:
        """Find what keeps a message waiting, or one of those issued with it: they end together."""
        lacking: dict[int, None] = {}
        behind: dict[int, None] = {}
        unknown: dict[int, None] = {}
        for entry in self.batch(rank, head.launch):
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
            NOT_POSTED: list(lacking),
            QUEUED: [] if lacking else list(behind),
            CUT: [] if lacking or behind else list(unknown),
        }

    @cached_property
    def hidden(self) -> set[int]:
        """Ranks that wait, by their counters, in a message of which no entry is left.

        The ring was too short, or there are counters only.  To whom it goes nobody knows.
        """
        shown: set[tuple[str, int]] = set()
        for rank, calls in self.outstanding.items():
            shown.update((part.group, rank) for part in calls.parts)
        hidden_ranks: set[int] = set()
        for rank, dump in self.dumps.items():
            for name, status in dump.status.items():
                is_message_group = name in self.pairs and name in self.groups
                if not is_message_group or (name, rank) in shown:
                    continue
                if status.enqueued > status.completed:
                    hidden_ranks.add(rank)

            # behind a cut may be messages that no counter has
            if any(name not in dump.status for name in self._uncounted_of_cut(rank)):
                hidden_ranks.add(rank)
        return hidden_ranks

    @cached_property
    def short_rings(self) -> set[int]:
        """Ranks whose recorder begins with a call that did not end, and had calls before it.

        Older calls may wait, too, and of the batch of that call the beginning may be lost.
        """
        short: set[int] = set()
        for rank, dump in self.dumps.items():
            calls = dump.entries
            # a dump of outstanding calls alone has them all
            is_ring = calls.is_history or self.history
            if not calls or not is_ring:
                continue
            first_record = int(calls.record[0])
            first_ended = bool(calls.done[0])
            if first_record > 0 and not first_ended:
                short.add(rank)
        return short

    def cut_batch(self, rank: int) -> Launch | None:
        """Return the batch of messages of which the recorder of ``rank`` may lack the beginning."""
        if rank not in self.short_rings:
            return None
        first = self.dumps[rank].entries[0]
        if not first.pair:
            return None
        return first.launch

    def mute(self) -> list[int]:
        """Return ranks whose dumps have neither calls nor counters, where others have counters.

        They were started again, or their recorders were off: it proves nothing against them.
        """
        if not any(dump.status for dump in self.dumps.values()):
            return []
        mute_ranks: list[int] = []
        for rank, dump in self.dumps.items():
            if not dump.entries and not dump.status:
                mute_ranks.append(rank)
        return mute_ranks

    @cached_property
    def history(self) -> bool:
        """Whether dumps hold calls that ended, too."""
        return self._any_call(lambda part: part.done)

    def _any_call(self, condition: Callable[[CallPart], object]) -> bool:
        """Tell whether a condition holds for some recorded call of some rank."""
        for dump in self.dumps.values():
            if any(map(condition, dump.entries.parts)):
                return True
        return False

    def lacks(self) -> tuple[str, ...]:
        """Say what the dumps do not hold, and which variable to set next time."""
        texts = [*dict.fromkeys(self.notes), *self._lacking_of_ranks()]
        notes_of_dumps: set[str] = set()
        for dump in self.dumps.values():
            notes_of_dumps.update(dump.notes)
        texts += sorted(notes_of_dumps)
        if self.has_only_logs:
            # nothing more is in a log, whatever the recorders are told
            settings = "TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1"
            texts.append(f"dumps: next time {settings}")
            return tuple(texts)
        if not self.history:
            # Megatron takes what the environment says; the flags for it came with 0.17
            texts.append("history: only outstanding calls; next time TORCH_INCLUDE_ONLY_ACTIVE=0")
        if not self._any_call(lambda part: part.site):
            texts.append("all stack frames; next time TORCH_INCLUDE_STACK_TRACE=1")
        if not self._any_call(lambda part: part.state == "started"):
            texts.append("what had started on the device; next time TORCH_NCCL_ENABLE_TIMING=1")
        return tuple(texts)

    @property
    def has_only_logs(self) -> bool:
        """Whether all that is known is of logs."""
        # only a log may name no rank at all
        if not self.dumps:
            return bool(self.observed.logged) or not self.unreadable
        return all(dump.version == "log" for dump in self.dumps.values())

    def _lacking_of_ranks(self) -> list[str]:
        """Say which ranks left no dump, or one that lacks something."""
        dumps = self.dumps.values()
        texts: list[str] = []
        if self.missing:
            texts.append(f"dumps of {ranks_text(self.missing)}")
        for rank, reason in list(self.unreadable.items())[:_MAX_UNREADABLE]:
            texts.append(f"rank {rank}: {reason}")
        cut_ranks = [rank for rank, dump in self.dumps.items() if dump.is_cut]
        if cut_ranks:
            text = f"the ends of the dumps of {ranks_text(cut_ranks)}, which are cut off: "
            texts.append(text + "counters, and calls that ended, are read")
        has_calls = any(dump.entries or dump.status for dump in dumps)
        if not has_calls and not self.observed.differ:
            texts.append("calls and counters: next time TORCH_FR_BUFFER_SIZE=2000")
        mute_ranks = self.mute()
        if mute_ranks:
            text = f"counters of {ranks_text(mute_ranks)}: their recorders were off or new"
            if all(self.dumps[rank].version == "log" for rank in mute_ranks):
                text = f"counters of {ranks_text(mute_ranks)}, which the log does not have"
            texts.append(text)
        short_rings = self.hidden.difference(cut_ranks)
        if short_rings and not all(dump.version == "log" for dump in dumps):
            text = f"outstanding messages of {ranks_text(short_rings)}: next time "
            texts.append(text + "a larger TORCH_FR_BUFFER_SIZE")
        return texts


_MAX_UNREADABLE = 4  # unreadable dumps of which the reason is said
