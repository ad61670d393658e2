"""The rules that say which ranks made a job hang, in one table, and the exceptions to them.

In : a ``Judgement``: the job's state, and what was found up to now.  Out: culprits of each rule.
What a rank did needs no wait that leads to it, so each rule looks at ranks by itself.  A rule names
ranks; where waits remain that no culprit explains, more rules are asked.  An exception excuses
hosts that wait for nobody in the dumps and may wait for a rank all the same.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from megatron_prism.core.world import format_ranks, ranks_text
from megatron_prism.features.hang import siblings, waits
from megatron_prism.features.hang.calls import Entry, Launch
from megatron_prism.features.hang.consistency import ConsistentDumps
from megatron_prism.features.hang.dumps import RankEvent
from megatron_prism.features.hang.log_errors import WENT_ON
from megatron_prism.features.hang.mismatch import Mismatch
from megatron_prism.features.hang.state import JobState, call_text, issue_order
from megatron_prism.features.hang.verdict import Culprit

PLACES = ("outside", "in a call", "at work")  # events that say where a rank stands
HANDLED = ("handled", "logged")  # events of exceptions that ended nothing, or perhaps nothing
_OF_PYTHON = ("exception", "out of memory", "logged")
_MAX_SHOWN = 4  # lines of evidence of one rule


@dataclass
class Judgement:
    """What is known of a job that hangs, and what rules found.

    Attributes:
        parted: The dumps of one moment, and what was set apart.
        evidence: In words.
        mismatches: Calls that members of a group make differently.
        first: The first call that cannot end, if a rule says it.
        excused: Ranks that are not named though others wait for them.
        among: Where nobody is named, the ranks that may be culprits.
        sure: Whether a majority made the very call that differs.
        uncompared: Which siblings were not compared by the order of their calls.
        doubt: Whether a rank that is named may be a victim of something that dumps lack.
        culprits: Rank -> culprit.
        named_by: Rank -> name of the rule that named it.
        has_lone_callers: Whether a few ranks wait in a call that most never make.
        outside_call: The call outside NCCL in which ranks wait; empty: there is none.
        outside_ranks: The ranks that wait in it.
    """

    parted: ConsistentDumps
    evidence: list[str]
    mismatches: list[Mismatch] = field(default_factory=list)
    first: Entry | None = None
    excused: set[int] = field(default_factory=set)
    among: tuple[int, ...] = ()
    sure: bool = False
    uncompared: str = ""
    doubt: bool = False
    culprits: dict[int, Culprit] = field(default_factory=dict)
    named_by: dict[int, str] = field(default_factory=dict)
    has_lone_callers: bool = False
    outside_call: str = ""
    outside_ranks: tuple[int, ...] = ()

    @property
    def state(self) -> JobState:
        """The state of what can be judged."""
        return self.parted.state

    @property
    def differ(self) -> set[Launch]:
        """Calls that members make differently."""
        return {mismatch.entry.launch for mismatch in self.mismatches}

    @property
    def is_split(self) -> bool:
        """Whether a call differs and no majority decides."""
        return any(not mismatch.ranks for mismatch in self.mismatches)

    def note(self, entry: Entry, text: str) -> None:
        """Add evidence about a call; the oldest such call is the first that cannot end."""
        if self.first is None or issue_order(entry) < issue_order(self.first):
            self.first = entry
        if text not in self.evidence:
            self.evidence.append(text)

    def add_doubt(self, text: str) -> None:
        """Add that a rank that is named may be a victim of something that dumps lack."""
        self.doubt = True
        self.evidence.append(text)

    def suspect(self, ranks: Iterable[int]) -> None:
        """Add ranks among which the culprit may be."""
        self.among = tuple(sorted({*self.among, *ranks}))

    def held(self, culprits: Collection[int]) -> set[int]:
        """Find ranks that wait for something else than ``culprits`` and ranks not known."""
        return waits.held(self.state, {*culprits, *self.excused, *self.state.mute()})

    def most_are_here(self) -> bool:
        """Tell whether a rank without a dump is an exception."""
        return len(self.state.missing) <= len(self.state.dumps)

    @cached_property
    def late_hosts(self) -> dict[int, Entry]:
        """Hosts for which others wait, and not because of their own waits -> the first call."""
        state, differ = self.state, self.differ
        late: dict[int, Entry] = {}
        for (_, rank), entry in sorted(state.lates.items(), key=lambda late: issue_order(late[1])):
            if rank in late or rank not in state.dumps:
                continue
            calls = state.outstanding[rank]

            # the rank whose call differs holds it
            is_held = any(call.launch in differ for call in calls)
            if not calls or (not is_held and siblings.is_behind_replicas(state, rank)):
                late[rank] = entry
        for rank, entry in waits.ranks_without_message(state):
            late.setdefault(rank, entry)

        # nothing is known of these, or their logs say where they wait
        waiting_elsewhere = self.excused - self.parted.new.keys()
        for rank in (*state.mute(), *state.hidden, *waiting_elsewhere):
            late.pop(rank, None)
        return late

    @cached_property
    def idle_hosts(self) -> set[int]:
        """Those of the late hosts that have no outstanding call."""
        return {rank for rank in self.late_hosts if not self.state.outstanding[rank]}


class When(enum.Enum):
    """Where a rule is asked."""

    ALWAYS = "always"
    WAITS_REMAIN = "where waits remain that no culprit explains"
    NOBODY_NAMED = "where no other rule names a rank"


@dataclass(frozen=True)
class Rule:
    """A rule that names ranks.

    Attributes:
        name: In words.
        find: Finds culprits.
        decides: Cases whose verdict the rule decides, of planted faults and recorded hangs
            (tests/features/hang/test_rules.py).
        when: Where it is asked.
        replaces: Names of rules whose culprits it takes over.
        must_explain: Whether its ranks are named only if they explain all waits.
    """

    name: str
    find: Callable[[Judgement], list[Culprit]]
    decides: tuple[str, ...] = ()
    when: When = When.ALWAYS
    replaces: tuple[str, ...] = ()
    must_explain: bool = False


# -- what logs say ------------------------------------------------------------------------------
def failed_processes(judgement: Judgement) -> list[Culprit]:
    """Find ranks whose process failed by itself; where half of them did, it is the job's error."""
    state = judgement.state
    failures: dict[int, RankEvent] = {}
    for rank, events in sorted(state.events.items()):
        for event in events:
            if event.kind in PLACES or rank in failures:
                continue
            # its watchdog printed the call, so the process was alive when time was out
            if event.kind == "killed" and _waits_like_others(judgement, rank, event):
                text = f"rank {rank} waited as others do before it ended: {event.text}"
                judgement.evidence.append(text)
                continue
            if event.kind == "handled" or _waits_like_others(judgement, rank, event):
                went_on = bool(state.outstanding.get(rank)) or WENT_ON in event.text
                deed = "went on after an exception"
                # nobody knows what it did then
                if not went_on:
                    deed = "had an exception that did not end it"
                judgement.evidence.append(f"rank {rank} {deed}: {event.text}")
            elif event.kind == "logged":
                text = f"rank {rank} logged an exception, which perhaps ended nothing: {event.text}"
                judgement.evidence.append(text)
            else:
                failures[rank] = event
    lines = [f"rank {rank}: {event.kind}: {event.text}" for rank, event in failures.items()]
    judgement.evidence += lines[:_MAX_SHOWN]
    rank_count = max(len(state.dumps), state.observed.world)
    if len(failures) > 1 and 2 * len(failures) > rank_count:
        return []

    # of one rank alone nobody knows whether the others failed alike
    if failures and rank_count < 2:
        judgement.doubt = True
    return [Culprit(rank, event.kind, event.text) for rank, event in failures.items()]


def _waits_like_others(judgement: Judgement, rank: int, event: RankEvent) -> bool:
    """Tell whether a rank that failed waits in a call as the others do.

    It handled its exception then, or was killed later, unless others wait for this rank, and would
    go on with it.
    """
    state = judgement.state
    if event.kind not in (*_OF_PYTHON, "killed") or "NCCL watchdog" in event.text:
        return False
    if not state.outstanding.get(rank) and rank not in state.hidden:
        return False
    awaited = {late_rank for _, late_rank in state.lates}
    waiting: set[int] = set()
    for other_rank, calls in state.outstanding.items():
        head = state.head(other_rank)
        if head is not None and head.pair:
            awaited.update(state.waits(other_rank)[1])
        if calls and other_rank != rank:
            waiting.add(other_rank)
    if rank not in awaited:
        return True
    still_held = judgement.held({rank}) - {rank}
    return len(still_held) >= len(waiting)


def hosts_outside_nccl(judgement: Judgement) -> list[Culprit]:
    """Find ranks that did not come to a call outside NCCL, in which others time out by their logs.

    The waiting ranks are excused.
    """
    state = judgement.state
    texts: dict[int, str] = {}
    for rank, events in state.events.items():
        # with calls outstanding, the call of its stack may be that of its dump
        kinds: tuple[str, ...] = ("outside",)
        if rank in state.outstanding and not state.outstanding[rank]:
            kinds = ("outside", "in a call")
        for event in events:
            if event.kind in kinds:
                texts[rank] = event.text
    judgement.excused |= texts.keys()

    # ranks that print the same wait in one line
    ranks_of_text: dict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(texts.items()):
        ranks_of_text[text].append(rank)
    for text, ranks in ranks_of_text.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        judgement.evidence.append(f"{ranks_text(ranks)} {verb} outside NCCL, in {text}")

    # of the largest group of a waiting rank, the only member that does not wait
    blamed: set[int] = set()
    for rank in texts:
        groups = [state.groups[name] for name in state.groups_of[rank]]
        data_groups = [group for group in groups if group.desc.startswith("DATA_PARALLEL")]
        largest = max(data_groups or groups, key=lambda group: len(group.ranks), default=None)
        absent: set[int] = set()
        if largest is not None:
            absent = set(largest.ranks) - texts.keys()
        judgement.suspect(absent)
        if len(absent) == 1:
            blamed |= absent

    if not texts:
        return []

    # where no line names a group: the ranks of the job that print nothing
    if not any(state.groups_of[rank] for rank in texts):
        judgement.suspect(set(range(state.observed.world)) - texts.keys() - state.observed.logged)
    place = next(iter(texts.values())).partition(":")[0] + ")"
    judgement.outside_call = place.partition(" of ")[0]
    judgement.outside_ranks = tuple(sorted(texts))

    # a rank of which there is neither a dump nor a line may wait there as the others do
    blamed &= state.dumps.keys() | state.observed.logged
    if not blamed:
        return []
    reason = f"did not come to {place} outside NCCL"
    judgement.evidence.append(f"{ranks_text(sorted(blamed))} {reason}")
    return [Culprit(rank, "skipped call", reason) for rank in sorted(blamed)]


def absent_from_barrier(judgement: Judgement) -> list[Culprit]:
    """Find the rank that did not come to a monitored barrier, as gloo prints it."""
    absent = judgement.state.observed.absent
    if not absent:
        return []
    text = "did not come to a monitored barrier"
    judgement.evidence.append(f"{ranks_text(absent)} {text}, as another rank prints")

    # the barrier names all that are late, also those that wait for one of them
    if len(absent) > 1:
        judgement.suspect(absent)
        return []
    return [Culprit(absent[0], "host stuck", text)]


# -- calls that differ ----------------------------------------------------------------------------
def unlike_calls(judgement: Judgement) -> list[Culprit]:
    """Find ranks that make a call otherwise than most of its members, or than their siblings."""
    return _culprits_of(judgement, judgement.mismatches)


def broken_rhythms(judgement: Judgement) -> list[Culprit]:
    """Find ranks whose last messages differ from those of their own earlier iterations."""
    return _culprits_of(judgement, siblings.find_broken_rhythms(judgement.state))


def _culprits_of(judgement: Judgement, mismatches: Iterable[Mismatch]) -> list[Culprit]:
    """Name the ranks of mismatches that a vote decided; the same in other groups is one fault."""
    decided = [mismatch for mismatch in mismatches if mismatch.ranks]
    accepted: list[Mismatch] = []
    for mismatch in decided:
        if mismatch.voted or mismatch.call == decided[0].call:
            accepted.append(mismatch)
    if accepted:
        judgement.first = accepted[0].entry
        judgement.sure = all(mismatch.voted for mismatch in accepted)
    judgement.evidence += map(str, accepted[:_MAX_SHOWN])
    culprits: list[Culprit] = []
    for mismatch in accepted:
        for rank in mismatch.ranks:
            culprits.append(Culprit(rank, mismatch.kind, mismatch.text))
    return culprits


# -- ranks that stand still -----------------------------------------------------------------------
def lone_callers(judgement: Judgement) -> list[Culprit]:
    """Find a few ranks that wait in a call that most, done with all of theirs, never make."""
    state, idle = judgement.state, judgement.idle_hosts
    calls: dict[tuple[str, int], Entry] = {}
    for (_, rank), entry in state.lates.items():
        if rank in idle:
            calls[entry.group, entry.seq] = entry

    # members of these calls that came, and that left no dump
    call_of_rank: dict[int, Entry] = {}
    lost: set[int] = set()
    for entry in calls.values():
        members = state.groups[entry.group].ranks

        # it ended on a member: all have come to it
        if any(state.is_over(member, entry) for member in members):
            continue
        for member in members:
            if member in state.dumps and state.arrived(member, entry):
                call_of_rank[member] = entry
            elif member in state.missing:
                lost.add(member)
    free = [rank for rank, outstanding in state.outstanding.items() if not outstanding]
    is_minority = len(idle | lost) > 2 * len(call_of_rank)
    if not call_of_rank or not is_minority or 2 * len(free) <= len(state.dumps):
        return []
    judgement.has_lone_callers = True
    for rank, entry in call_of_rank.items():
        text = f"rank {rank} waits in {call_text(entry)}, which nobody else makes"
        judgement.note(entry, text)
    text = f"or ranks {format_ranks(sorted(idle))} are held up before it (files, data, gloo): "
    judgement.add_doubt(text + "they wait for nobody")
    culprits: list[Culprit] = []
    for rank, entry in call_of_rank.items():
        culprits.append(Culprit(rank, "extra call", f"makes {call_text(entry)} alone"))
    return culprits


def late_hosts(judgement: Judgement) -> list[Culprit]:
    """Find hosts for which others wait and that wait for nobody, or that stopped before siblings.

    Hosts that an exception excuses are not named.
    """
    if judgement.has_lone_callers:
        return []
    state, new = judgement.state, judgement.parted.new
    stack_of_rank: dict[int, str] = {}
    for rank, events in state.events.items():
        for event in events:
            if event.kind == "at work":
                stack_of_rank[rank] = event.text
    hosts = _IdleHosts(judgement.idle_hosts, set(stack_of_rank))
    for exception in EXCEPTIONS:
        exception.apply(judgement, hosts)
    excused = hosts.ahead | hosts.elsewhere
    judgement.excused |= excused

    culprits: list[Culprit] = []
    for rank, entry in judgement.late_hosts.items():
        if rank in excused:
            continue
        kind, deed, reason = "host stuck", "never came to", "it waits for nobody"
        # the counters of a log are of one group
        if state.dumps[rank].version == "log" and entry.group in state.dumps[rank].assumed:
            reason = "its log names no call in which it waits"
        if rank not in judgement.idle_hosts:
            reason = "ranks with the same calls outstanding went on"
            if state.skipped(rank, entry):
                kind, deed, reason = "skipped call", "skips", "its siblings made it before others"
            if len(state.siblings_of(rank)) == 2:
                judgement.add_doubt(f"rank {rank} has one sibling: either of them may err")
        text = f"{deed} {call_text(entry)}; {reason}"
        if rank in stack_of_rank:
            text += f"; its stack: {stack_of_rank[rank]}"
        judgement.note(entry, f"rank {rank} {text}")
        culprits.append(Culprit(rank, kind, text))

    # a rank that was started again is named only if no other is
    older = [culprit for culprit in culprits if culprit.rank not in new]
    return older or culprits


def stuck_devices(judgement: Judgement) -> list[Culprit]:
    """Find ranks that did not see the end of a call that needs everybody, though others did."""
    state = judgement.state
    incomplete = list(waits.incomplete_calls(state))
    ranks_of_launch: dict[Launch, set[int]] = defaultdict(set)
    ended_of_launch: dict[Launch, list[int]] = {}
    exchanges: set[Launch] = set()
    for rank, entry, _ in incomplete:
        ranks_of_launch[entry.launch].add(rank)
        if entry.launch not in ended_of_launch:
            ended_of_launch[entry.launch] = []
            for member in state.groups[entry.group].ranks:
                if state.is_over(member, entry):
                    ended_of_launch[entry.launch].append(member)
        if entry.op == "all_to_all":
            exchanges.add(entry.launch)
    culprits: list[Culprit] = []
    for rank, entry, last in incomplete:
        ended = ended_of_launch[entry.launch]

        # of an all-to-all each waits for its pairs only
        ranks = ranks_of_launch[entry.launch]
        if len(ranks) > 1 and entry.launch in exchanges:
            judgement.suspect(ranks)
            text = f"{call_text(entry)} ended on {ranks_text(ended)}, not on {ranks_text(ranks)}: "
            text += "what one of them sends another does not expect (splits), or their link "
            judgement.note(entry, text + "stands still")
            continue

        # a log names no call that ended: the others may have made another one of this number
        is_named_by_number = state.groups[entry.group].partial
        if is_named_by_number and len(ended) <= len(ranks):
            judgement.suspect({*ranks, *ended})
            text = f"{ranks_text(ended)} ended a call #{entry.seq} of {entry.desc}, which the log "
            text += f"does not name; {ranks_text(sorted(ranks))} waits in {call_text(entry)}: "
            text += "a device, or other calls on one side"
            judgement.note(entry, text)
            continue

        # of others it is not known, or it did not end on these either
        others_text = "the others"
        if len(ended) < len(state.groups[entry.group].ranks) - 1:
            others_text = ranks_text(ended)
        reason = f"{call_text(entry)} ended on {others_text} (up to #{last}), not on it: "
        reason += "its device, its watchdog or the link to it"
        if is_named_by_number:
            reason += ", or another call than theirs"
        judgement.note(entry, f"rank {rank}: {reason}")
        culprits.append(Culprit(rank, "device stuck", reason))
    return culprits


def devices_that_never_started(judgement: Judgement) -> list[Culprit]:
    """Find ranks, of a timed job, whose device never started their oldest call."""
    state = judgement.state
    heads: dict[int, Entry] = {}
    scheduled: dict[int, Entry] = {}
    for rank, calls in state.outstanding.items():
        if not calls:
            continue
        heads[rank] = calls[0]
        if calls[0].state == "scheduled":
            scheduled[rank] = calls[0]

    # a recorder without timing starts nothing
    if 2 * len(scheduled) >= len(heads):
        return []
    culprits: list[Culprit] = []
    for rank, entry in scheduled.items():
        # behind an older call that its recorder lost, none starts
        if rank in state.short_rings:
            continue
        text = f"the device of rank {rank} never started {call_text(entry)}"
        judgement.note(entry, text)
        partners = waits.exchange_partners(state, rank)
        # it may stand in an exchange of tokens for which another rank has not come
        if partners:
            judgement.suspect({rank, *partners})
            continue
        culprits.append(Culprit(rank, "device stuck", f"never started {call_text(entry)}"))
    return culprits


def ranks_without_dump(judgement: Judgement) -> list[Culprit]:
    """Find ranks without a dump at which waits end."""
    state = judgement.state
    parted = judgement.parted
    call_of_rank = waits.dead_ranks(state, {*parted.of_other_attempts, *parted.stale})

    # what these ranks printed may stand behind the end of a log that is cut off
    if state.observed.cut_log and state.has_logs:
        judgement.suspect(call_of_rank)
        return []
    printed = [rank for rank in call_of_rank if rank in state.observed.logged]

    # some of them printed something: the silent ones are likelier
    if printed and len(printed) < len(call_of_rank):
        text = f"{ranks_text(sorted(printed))} printed something, though nothing of their calls"
        judgement.evidence.append(text)
        judgement.excused.update(printed)
        for rank in printed:
            del call_of_rank[rank]

    # others contradict each other, or most are not here: it says nothing of them
    if judgement.is_split or not judgement.most_are_here():
        return []
    for entry, text in waits.missing_dump_lines(call_of_rank):
        judgement.note(entry, text)
    if len(call_of_rank) > 1:
        text = "who only lost its dump looks like who died: some of these may be victims"
        judgement.evidence.append(text)
    culprits: list[Culprit] = []
    for rank, entry in call_of_rank.items():
        reason = f"left no dump; {call_text(entry)} waits for it"
        culprits.append(Culprit(rank, "missing dump", reason))
    return culprits


# -- ranks that left the order --------------------------------------------------------------------
def exchanged_calls(judgement: Judgement) -> list[Culprit]:
    """Find ranks that issued calls in another order than their siblings."""
    return _out_of_order(judgement, queued=False)


def exchanged_queues(judgement: Judgement) -> list[Culprit]:
    """Find such ranks by calls that one sibling queued and another has not yet issued."""
    return _out_of_order(judgement, queued=True)


def _order_conflicts(judgement: Judgement, queued: bool) -> siblings.OrderConflicts:
    """Find ranks that issued calls in another order than their siblings.

    Args:
        judgement: What is known.
        queued: Also compare calls that one sibling queued and another has not yet issued.
    """
    state = judgement.state

    # a host that stands still explains all waits: replicas may differ for another reason
    kinds = {culprit.kind for culprit in judgement.culprits.values()}
    if kinds == {"host stuck"} and not judgement.held(judgement.culprits):
        return siblings.OrderConflicts({}, {})

    # what named ranks called says nothing of their siblings
    conflicts = siblings.find_order_conflicts(state, queued, judgement.culprits)

    # nor does what most siblings did, if they wait where most members of a group never come
    lone = None
    if conflicts.opponent_counts:
        lone = waits.lone_waiters(state, waits.smallest_cycle(state))
    are_others = lone is not None and conflicts.opponent_counts.keys().isdisjoint(lone.ranks)
    if lone is not None and lone.kind == "extra call" and are_others:
        apart = {*judgement.culprits, *lone.ranks}
        conflicts = siblings.find_order_conflicts(state, queued, apart)
    return conflicts


def _out_of_order(judgement: Judgement, queued: bool) -> list[Culprit]:
    """Name the ranks that issued calls in another order than their siblings.

    Args:
        judgement: What is known.
        queued: Also compare calls that one sibling queued and another has not yet issued.
    """
    state, mismatches = judgement.state, judgement.mismatches

    # all members stand in a call: it may end, and the job go on, whatever the order
    if not mismatches and waits.complete_calls(state):
        return []
    conflicts = _order_conflicts(judgement, queued)
    judgement.uncompared = conflicts.uncompared
    opponent_counts = conflicts.opponent_counts
    # siblings without a dump decide: the odd ones and these, or all the others, may be right
    if conflicts.undecided:
        odd = [rank for rank in conflicts.undecided if rank in state.dumps]
        lost = [rank for rank in conflicts.undecided if rank not in state.dumps]
        text = f"{ranks_text(odd)} issued calls otherwise than the siblings that left a dump; "
        text += f"what {ranks_text(lost)} did, without a dump, decides which of them are odd"
        judgement.evidence.append(text)
        return []
    if not opponent_counts:
        return []

    if not _may_explain(mismatches, opponent_counts.keys()):
        return []
    ranks = waits.ranks_where_waits_end(state, sorted(opponent_counts))
    if not ranks:
        return []
    texts: dict[int, str] = {}
    for rank in ranks:
        conflict = conflicts.conflict_of_rank[rank]
        texts[rank] = f"issues {conflict.text} otherwise than its siblings"
        odds_text = f"(at odds with {opponent_counts[rank]})"
        judgement.evidence.append(f"rank {rank} {texts[rank]} {odds_text}")

    # each may differ because of the other: counters do not say whose call came first
    if not state.history and _are_of_one_pipeline(state, ranks):
        judgement.among = judgement.among or tuple(ranks)
        return []

    for doubt in waits.supporting_evidence(state, ranks):
        judgement.add_doubt(doubt)
    if mismatches:
        judgement.first = mismatches[0].entry
    else:
        conflict = conflicts.conflict_of_rank[ranks[0]]
        judgement.first = siblings.call_of(state, conflict, ranks[0])
    if judgement.first is not None:
        judgement.evidence.append(f"first: {call_text(judgement.first)}")
    return [Culprit(rank, "order", texts[rank]) for rank in ranks]


def _may_explain(mismatches: Iterable[Mismatch], odd_ranks: Collection[int]) -> bool:
    """Tell whether ranks that left the order explain the calls that no vote decides.

    That all ranks of such a call are at odds with others, or none of them, says nothing about it.
    """
    undecided: set[int] = set()
    for mismatch in mismatches:
        if not mismatch.ranks:
            undecided |= set(mismatch.among)
    if not undecided:
        return True
    return not undecided <= set(odd_ranks) and not undecided.isdisjoint(odd_ranks)


def _are_of_one_pipeline(state: JobState, ranks: Collection[int]) -> bool:
    """Tell whether two of the ranks send each other messages."""
    for name in state.pairs & state.groups.keys():
        if len(set(ranks).intersection(state.groups[name].ranks)) > 1:
            return True
    return False


def lone_waiters(judgement: Judgement) -> list[Culprit]:
    """Find ranks that left out a message, by what siblings did, or wait where most never come."""
    # calls that differ, and none of them is decided: the circle may come of them
    if judgement.mismatches and not judgement.culprits:
        return []
    cycle = waits.smallest_cycle(judgement.state)
    lone = waits.lone_waiters(judgement.state, cycle, judgement.culprits)
    if lone is None:
        return []
    judgement.first = lone.call
    text = f"{ranks_text(lone.ranks)} {lone.text}"
    # several only wait where most never come
    if len(lone.ranks) > 1:
        text = text.replace(" waits in ", " wait in ", 1)
    judgement.evidence.append(text)
    return [Culprit(rank, lone.kind, lone.text) for rank in lone.ranks]


# -- exceptions: idle hosts that may wait for a rank all the same ---------------------------------
@dataclass
class _IdleHosts:
    """Hosts without an outstanding call for which others wait.

    Attributes:
        idle: All of them.
        at_work: Ranks whose stacks say that they do not wait.
        ahead: Excused: they are further on than a sibling.
        elsewhere: Excused: they may wait for a rank outside NCCL.
    """

    idle: set[int]
    at_work: set[int]
    ahead: set[int] = field(default_factory=set)
    elsewhere: set[int] = field(default_factory=set)

    @property
    def remaining(self) -> set[int]:
        """Idle hosts of which nothing says that they wait elsewhere."""
        return self.idle - self.elsewhere


@dataclass(frozen=True)
class RuleException:
    """An exception to the rule that a host which waits for nobody is stuck.

    Attributes:
        name: In words.
        apply: Excuses hosts, or adds a doubt.
        decides: Cases whose verdict the exception decides.
    """

    name: str
    apply: Callable[[Judgement, _IdleHosts], None]
    decides: tuple[str, ...] = ()


def _excuse_further_on(judgement: Judgement, hosts: _IdleHosts) -> None:
    """Excuse hosts that are further on than an idle sibling."""
    started_hosts = hosts.idle - judgement.parted.new.keys()
    hosts.ahead = siblings.ranks_ahead(judgement.state, started_hosts)


def _excuse_waiting_for_dead(judgement: Judgement, hosts: _IdleHosts) -> None:
    """Excuse hosts that may wait outside NCCL for a rank without a dump."""
    state = judgement.state
    dead = waits.dead_ranks(state, ())
    waiting = waits.waiting_for_dead(state, hosts.idle - hosts.ahead, dead)

    # one may as well be stuck, and the other's file be lost
    if len(waiting) < 2:
        return
    text = f"ranks {format_ranks(sorted(waiting))} may wait outside NCCL (gloo, the store)"
    judgement.evidence.append(f"{text} for {format_ranks(state.missing)}")
    hosts.elsewhere |= waiting


def _excuse_creating_group(judgement: Judgement, hosts: _IdleHosts) -> None:
    """Excuse hosts that may wait while a communicator is created."""
    group_of_rank: dict[int, str] = {}
    for rank in hosts.remaining - judgement.parted.new.keys():
        desc = siblings.uncreated_group(judgement.state, rank)
        if desc:
            group_of_rank[rank] = desc

    # a host that stands elsewhere is late; where there is none, one of these is
    if not group_of_rank.keys() < hosts.idle:
        return
    for rank, desc in group_of_rank.items():
        text = f"rank {rank} may wait while the communicator of {desc} is created"
        judgement.evidence.append(text)
    judgement.among = (*judgement.among, *group_of_rank)
    hosts.elsewhere |= group_of_rank.keys()


def _excuse_between_iterations(judgement: Judgement, hosts: _IdleHosts) -> None:
    """Excuse hosts that stand between two iterations, where most hosts are idle.

    A host that enters a save alone errs, as one that gets no data.
    """
    state = judgement.state
    idle_count = sum(not calls for calls in state.outstanding.values())
    is_alone = 2 * idle_count < len(state.dumps)
    between: list[int] = []
    for rank in sorted(hosts.remaining - hosts.ahead - hosts.at_work):
        if siblings.is_between_iterations(state, rank):
            between.append(rank)
    if not between:
        return
    where = "(gloo, the store, files, data)"
    text = f"{ranks_text(between)} waits outside NCCL {where}, or is stuck: it stands"
    if len(between) > 1:
        text = f"{ranks_text(between)} wait outside NCCL {where}, or are stuck: they stand"
    judgement.evidence.append(f"{text} between two iterations")
    if not is_alone:
        judgement.among = (*judgement.among, *between)
        hosts.elsewhere.update(between)


def _doubt_whole_groups(judgement: Judgement, hosts: _IdleHosts) -> None:
    """Doubt hosts that are a whole group: they may wait for one of them."""
    if not hosts.remaining:
        return
    excused = hosts.ahead | hosts.elsewhere
    text = waits.why_hosts_wait(judgement.state, hosts.remaining, excused)
    if text:
        judgement.add_doubt(text)


def _excuse_lacking_member(judgement: Judgement, hosts: _IdleHosts) -> None:
    """Excuse hosts that are all members of a group but one, which went on."""
    remaining = hosts.remaining
    lacking = waits.lacking_member(judgement.state, remaining)
    if lacking is None:
        return
    text = f"ranks {format_ranks(sorted(remaining))} wait for nobody, and rank {lacking.rank} "
    text += f"went on: they may wait for it in {lacking.desc}, outside NCCL"
    judgement.evidence.append(text)
    judgement.among = (*judgement.among, lacking.rank, *remaining)
    hosts.elsewhere |= remaining


def _excuse_exchanging_experts(judgement: Judgement, hosts: _IdleHosts) -> None:
    """Excuse hosts that may wait for another rank's experts, in an exchange outside NCCL."""
    state = judgement.state
    ranks_awaited = {rank: state.waits(rank)[1] for rank in state.outstanding}
    ranks_waiting = waits.reversed_edges(ranks_awaited)
    for rank in sorted(hosts.remaining - hosts.at_work):
        waiting_in_the_end = waits.reached_from([rank], ranks_waiting)
        late_partners: list[int] = []
        for partner in sorted(waits.exchange_partners(state, rank)):
            # one that waits for this host in the end is no reason why it stands
            is_waiting = partner in waiting_in_the_end
            if not is_waiting or waits.is_lone_caller(state, partner):
                late_partners.append(partner)
        if not late_partners:
            continue
        text = f"rank {rank} may wait for the experts of {ranks_text(late_partners)}: the exchange "
        judgement.evidence.append(text + "of tokens is not in the dumps (DeepEP, HybridEP)")
        judgement.suspect({rank, *late_partners})
        hosts.elsewhere.add(rank)


OUTSIDE_NCCL = "others wait for it outside NCCL"
_LONE_CALLERS = "a few wait in a call that most never make"
_LATE_HOSTS = "others wait for a host that waits for nobody"
_BOTH = ("history", "active")
_ALL = (*_BOTH, "logs")


def _drawn(kinds: str, recorded: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cases of kinds of planted faults: by what the recorder, or a log, holds."""
    cases: list[str] = []
    for kind in kinds.split():
        cases += [f"drawn {kind}, {record}" for record in recorded]
    return tuple(cases)


# hangs as production has them, planted in captured worlds (tests/helpers/production.py)
_SKIPPED_BARRIER = (
    "production a stage skips a barrier",
    "production a stage skips a barrier, a dump is lost",
)
_STALLED_LOADER = ("production data loader of a whole stage",)
_AWAITED_DEAD = (
    "production killed while a stage waits for it outside NCCL",
    "production killed while its replicas save with it",
)
_EXPERTS_LEFT_OUT = (
    "production a layer of experts left out",
    "production a layer of experts left out, outstanding only",
)
_BY_LOGS_ALONE = (
    "production a stage skips a barrier, logs",
    "production data loader of a whole stage, logs",
)
_FIRST_CALL = ("production a host stops before a group's first call",)
_GLOO_BARRIER = ("production a member skips a barrier of gloo",)
_EXPERTS = ("production a message left out, experts exchange outside NCCL",)
_LATE_IN_PRODUCTION = (
    *_SKIPPED_BARRIER,
    *_STALLED_LOADER,
    *_AWAITED_DEAD,
    *_BY_LOGS_ALONE,
    *_FIRST_CALL,
    *_GLOO_BARRIER,
    *_EXPERTS,
)
_CALLED_ALONE = ("production a rank calls alone behind the last save",)
# lines of public reports
_MONITORED_BARRIERS = ("public wenet-e2e/wenet#2552", "public NVIDIA/nccl#849")

RULES = (
    Rule("its process failed", failed_processes, _drawn("killed", ("logs",))),
    Rule(
        OUTSIDE_NCCL,
        hosts_outside_nccl,
        ("recorded nosave, with a log",),
    ),
    Rule("it did not come to a monitored barrier", absent_from_barrier, _MONITORED_BARRIERS),
    Rule(
        "its call differs",
        unlike_calls,
        _drawn("drop extra message_shape shape", _ALL) + _drawn("dtype operation swap", _BOTH),
    ),
    Rule(_LONE_CALLERS, lone_callers, _CALLED_ALONE),
    Rule(_LATE_HOSTS, late_hosts, _drawn("gil host_stuck", _ALL) + _LATE_IN_PRODUCTION),
    Rule(
        "a call ended on others",
        stuck_devices,
        _drawn("gpu_error", ("active", "logs")),
        replaces=(_LATE_HOSTS, _LONE_CALLERS),
    ),
    Rule("its calls are in another order", exchanged_calls, _drawn("lost", ("history",))),
    Rule(
        "its messages are not those of earlier iterations",
        broken_rhythms,
        ("recorded skipsend",),
    ),
    Rule("it left out a call and went on", lone_waiters, _drawn("lost", ("active",))),
    Rule(
        "its device never started a call",
        devices_that_never_started,
        _drawn("gpu_hang", ("history",)),
        when=When.WAITS_REMAIN,
    ),
    Rule(
        "it left no dump",
        ranks_without_dump,
        _drawn("killed", _BOTH) + _AWAITED_DEAD,
        when=When.WAITS_REMAIN,
        must_explain=True,
    ),
    Rule(
        "its queue is in another order",
        exchanged_queues,
        _EXPERTS_LEFT_OUT,
        when=When.NOBODY_NAMED,
    ),
)
EXCEPTIONS = (
    RuleException("it is further on than a sibling", _excuse_further_on, _BY_LOGS_ALONE),
    RuleException("it may wait for a rank without a dump", _excuse_waiting_for_dead, _AWAITED_DEAD),
    RuleException(
        "it may wait for another rank's experts outside NCCL", _excuse_exchanging_experts, _EXPERTS
    ),
    RuleException(
        "it may wait while a communicator is created", _excuse_creating_group, _FIRST_CALL
    ),
    RuleException(
        "it stands between two iterations", _excuse_between_iterations, ("recorded nosave",)
    ),
    RuleException(
        "all members of a group wait for nobody",
        _doubt_whole_groups,
        (*_SKIPPED_BARRIER, *_STALLED_LOADER, *_FIRST_CALL),
    ),
    RuleException(
        "all members of a group but one wait for nobody", _excuse_lacking_member, _GLOO_BARRIER
    ),
)
