"""Compare ranks with their siblings: ranks at the same place of their pipelines.

Siblings run the same program, so what one of them called tells what another should have called.
The same holds for a rank and its own earlier iterations.  The module answers four questions about a
``JobState``, in one section each:

order     : which ranks issued two calls in another order than their siblings?
progress  : which ranks stopped before their siblings, and why may they have stopped?
messages  : which ranks left out a send or a receive that their siblings posted?
rhythm    : which ranks changed the messages that they repeat in each iteration?
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_prism.core.units import counted
from megatron_prism.features.hang.calls import Calls, Entry
from megatron_prism.features.hang.mismatch import Mismatch
from megatron_prism.features.hang.state import (
    NOT_POSTED,
    STEP_GROUPS,
    CallKey,
    JobState,
    issue_order,
    key_of,
    places_of_key,
)


class MessageStep(NamedTuple):
    """A send or receive, comparable between ranks of a group.

    Batches of them are sorted and compared with pairs of a program: hence a named tuple.

    Attributes:
        op: "send" or "recv".
        distance: From this rank to the other side, in places of the group, modulo its size.
    """

    op: str
    distance: int


Way = tuple[MessageStep, ...]  # the messages of one batch


# -- order: which ranks issued two calls in another order? ----------------------------------------
@dataclass(frozen=True)
class Conflict:
    """A disagreement of two siblings.

    Attributes:
        key: The call about which they disagree.
        text: The calls or messages in question, in words.
        other_desc: Description of the group of the other call, if there is one.
    """

    key: CallKey
    text: str
    other_desc: str = ""


@dataclass(frozen=True)
class OrderConflicts:
    """Ranks that issued their calls in another order than their siblings.

    Attributes:
        opponent_counts: Rank -> number of siblings with which it disagrees.
        conflict_of_rank: The same ranks -> the first disagreement of each with a sibling.
        uncompared: What was not compared, in words; "" if all siblings were compared.
        undecided: The odd siblings, and those without a dump that may have done as they did, if
            these decide who is at odds with whom.
    """

    opponent_counts: dict[int, int]
    conflict_of_rank: dict[int, Conflict]
    uncompared: str = ""
    undecided: tuple[int, ...] = ()


@dataclass(frozen=True)
class Exclusion:
    """Ranks without which the remaining ranks agree.

    Attributes:
        opponent_counts: Rank -> number of ranks with which it disagrees.
        is_unique: False if other ranks could be excluded as well; ``opponent_counts`` then holds
            all ranks that come into question.
    """

    opponent_counts: dict[int, int]
    is_unique: bool


@dataclass(frozen=True)
class _IssuedCalls:
    """The calls that a rank issued, comparable between siblings.

    Attributes:
        first_position: Call -> position of its first record.  A coalesced call has several.
        ended_position: Collective that ended -> position of its first record.
        batches: (Group description, number) -> messages issued together, in the order of issue.
        collective_counts: Group description -> number of collectives, recorded or not.
        outstanding: Collectives that did not end, in the order of issue; empty if queues are not
            compared.
    """

    first_position: Mapping[CallKey, int]
    ended_position: Mapping[CallKey, int]
    batches: Mapping[tuple[str, int], Way]
    collective_counts: Mapping[str, int]
    outstanding: tuple[CallKey, ...]

    def fingerprint(self) -> object:
        """Return a hashable value that is equal for ranks that issued the same calls."""
        return (
            tuple(self.first_position.items()),
            tuple(self.ended_position.items()),
            tuple(self.batches.items()),
            tuple(self.collective_counts.items()),
            self.outstanding,
        )


@dataclass(frozen=True)
class _EqualSiblings:
    """Siblings that issued the same calls.

    Attributes:
        ranks: Global ranks; the first one stands for all of them.
        issued: The calls of each of these ranks.
    """

    ranks: list[int]
    issued: _IssuedCalls


_MAX_COMPARED = 64  # sets of equal siblings of which each is compared with each
_REFERENCES = 16  # of these, sets that agree, with which each further set is compared


def find_order_conflicts(
    state: JobState, queued: bool = False, apart: Collection[int] = ()
) -> OrderConflicts:
    """Find the fewest ranks whose removal leaves siblings that agree in the order of their calls.

    Args:
        state: The job.
        queued: Also compare calls that one sibling has queued and the other has not yet issued.
        apart: Ranks that are not compared.

    Returns:
        The ranks.  There are none if several choices are as good, or if more than a third of the
        siblings would be named: the siblings then have two programs, and neither is wrong.  Nor are
        there any if siblings without a dump could turn the vote.
    """
    opponent_counts: dict[int, int] = {}
    conflict_of_rank: dict[int, Conflict] = {}
    uncompared = ""
    for place, siblings_of_place in state.siblings.items():
        ranks = [rank for rank in siblings_of_place if rank not in apart]
        equal_siblings = _sets_of_equal_siblings(state, ranks, queued)
        if len(equal_siblings) > _MAX_COMPARED:
            uncompared = (
                f"of {len(equal_siblings)} siblings that made unlike calls, {_MAX_COMPARED} were "
                f"compared with each other, the rest with {_REFERENCES} of these that agree"
            )
        comparison = _compare_sets(state, list(equal_siblings.values()), queued)

        # what holds for the compared rank of a set holds for all ranks of the set
        excluded: dict[int, int] = {}
        for first, opponent_count in comparison.exclusion.opponent_counts.items():
            conflict = comparison.conflicts[first]
            for rank in equal_siblings[first].ranks:
                excluded[rank] = opponent_count
                conflict_of_rank[rank] = conflict
        for rank in _agreeing_with_twins(state, ranks, excluded, queued):
            del excluded[rank], conflict_of_rank[rank]

        # two programs, and no sign which of them is wrong
        if not comparison.exclusion.is_unique or 3 * len(excluded) > len(ranks):
            return OrderConflicts({}, {}, uncompared)
        lost = state.siblings_without_dump(place)
        if _may_be_turned(len(excluded), len(ranks) - len(excluded), len(lost)):
            return OrderConflicts({}, {}, uncompared, (*sorted(excluded), *lost))
        by_messages = [rank for rank in excluded if conflict_of_rank[rank].key.pair]
        unconfirmed = _unconfirmed_by_replica(state, by_messages, lost)
        if unconfirmed:
            return OrderConflicts({}, {}, uncompared, unconfirmed)
        opponent_counts |= excluded
    return OrderConflicts(opponent_counts, conflict_of_rank, uncompared)


_CHANCE = 0.05  # of a vote that comes out so though not most siblings are of that opinion


def _may_be_turned(odd_count: int, agreeing_count: int, lost_count: int) -> bool:
    """Tell whether siblings without a dump may turn a vote.

    Of all siblings just half may agree, and the dumps that were lost be mostly those of the others:
    how likely is it that no more odd ones are left?  Of four siblings three are left, and two of
    these agree: in one of two losses.  Of sixty-four sixteen are left, and fifteen agree: never.
    """
    if not odd_count or not lost_count:
        return False
    seen_count = odd_count + agreeing_count
    sibling_count = seen_count + lost_count
    half = sibling_count // 2
    ways = 0
    for unlike_count in range(odd_count + 1):
        of_the_others = math.comb(sibling_count - half, unlike_count)
        ways += of_the_others * math.comb(half, seen_count - unlike_count)
    return ways > _CHANCE * math.comb(sibling_count, seen_count)


def _unconfirmed_by_replica(
    state: JobState, odd_ranks: Collection[int], lost: Collection[int]
) -> tuple[int, ...]:
    """Find ranks with odd messages whose whole replica may have them, and its lost members.

    The ranks of a replica at one place of the pipeline have the same microbatches, so a replica
    with other ones is odd as a whole, and none of its ranks errs.  A member that does as the other
    replicas do shows that the rank alone is odd.
    """
    unconfirmed: set[int] = set()
    for rank in odd_ranks:
        members = state.model_parallel_ranks(rank) - {rank}
        lost_members = members.intersection(lost)
        agreeing = members.intersection(state.dumps) - set(odd_ranks)
        if lost_members and not agreeing:
            unconfirmed |= {rank, *lost_members}
    return tuple(sorted(unconfirmed))


_TWINS = 3  # ranks, at least, among which one may be the odd one


def _agreeing_with_twins(
    state: JobState, ranks: Sequence[int], suspects: Collection[int], queued: bool
) -> set[int]:
    """Find suspects that agree with the siblings at their place in the model-parallel groups.

    The first rank of a tensor-parallel group may rightly make calls that the others do not make,
    as the first ranks of the other replicas do.
    """
    twins_of_place: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank in ranks:
        twins_of_place[state.model_place(rank)].append(rank)
    agreeing: set[int] = set()
    for twins in twins_of_place.values():
        suspected_twins = set(twins).intersection(suspects)
        # all siblings are twins, or too few are to tell the odd one
        if not suspected_twins or not _TWINS <= len(twins) < len(ranks):
            continue
        equal_twins = _sets_of_equal_siblings(state, twins, queued)
        exclusion = _compare_sets(state, list(equal_twins.values()), queued).exclusion
        odd_twins: set[int] = set()
        for first in exclusion.opponent_counts:
            odd_twins.update(equal_twins[first].ranks)
        agreeing |= suspected_twins - odd_twins
    return agreeing


@dataclass(frozen=True)
class _Comparison:
    """The outcome of comparing sets of equal siblings.

    Attributes:
        exclusion: First ranks of the sets without which the others agree.
        conflicts: First rank of a set -> its first disagreement with another set.
    """

    exclusion: Exclusion
    conflicts: dict[int, Conflict]


def _compare_sets(
    state: JobState, equal_siblings: Sequence[_EqualSiblings], queued: bool
) -> _Comparison:
    """Compare one rank of each set with one rank of other sets.

    A job of a thousand siblings that all differ would have half a million pairs.  So only the first
    sets are compared in pairs; those of them that agree tell which of the further ones are odd.
    """
    opponents = defaultdict[int, set[int]](set)
    conflicts: dict[int, Conflict] = {}
    in_pairs = equal_siblings[:_MAX_COMPARED]
    for earlier, later in itertools.combinations(in_pairs, 2):
        conflict = _conflict_of_sets(state, later, earlier, queued)
        if conflict is not None:
            opponents[later.ranks[0]].add(earlier.ranks[0])
            opponents[earlier.ranks[0]].add(later.ranks[0])
            conflicts.setdefault(later.ranks[0], conflict)
            conflicts.setdefault(earlier.ranks[0], conflict)
    set_sizes = {equal.ranks[0]: len(equal.ranks) for equal in in_pairs}
    exclusion = fewest_at_odds(opponents, set_sizes)
    if not exclusion.is_unique:
        return _Comparison(exclusion, conflicts)

    # the further sets against sets that agree, spread over all of these
    agreeing = [equal for equal in in_pairs if equal.ranks[0] not in exclusion.opponent_counts]
    # of a place of which no rank left a dump there are none
    sets_for_reference = max(1, -(-len(agreeing) // _REFERENCES))
    references = agreeing[::sets_for_reference]
    opponent_counts = dict(exclusion.opponent_counts)
    for further in equal_siblings[_MAX_COMPARED:]:
        opponent_count = 0
        for reference in references:
            conflict = _conflict_of_sets(state, further, reference, queued)
            if conflict is not None:
                opponent_count += len(reference.ranks)
                conflicts.setdefault(further.ranks[0], conflict)
        if opponent_count:
            opponent_counts[further.ranks[0]] = opponent_count
    return _Comparison(Exclusion(opponent_counts, is_unique=True), conflicts)


def _conflict_of_sets(
    state: JobState, left: _EqualSiblings, right: _EqualSiblings, queued: bool
) -> Conflict | None:
    """Find a call about which two sets of siblings disagree.

    Replicas with other numbers of microbatches rightly make other calls.
    """
    conflict = _find_conflict(left.issued, right.issued, queued)
    if conflict is None:
        return None
    for rank in (left.ranks[0], right.ranks[0]):
        for desc in (conflict.key.desc, conflict.other_desc):
            if desc and state.unlike_replicas(rank, desc):
                return None
    return conflict


def fewest_at_odds(opponents: Mapping[int, set[int]], sizes: Mapping[int, int]) -> Exclusion:
    """Choose few ranks without which no two ranks disagree.

    The choice is greedy: the rank with most opponents per rank for which it stands goes first.

    Args:
        opponents: Rank -> ranks with which it disagrees; symmetric.
        sizes: Rank -> number of ranks for which it stands.

    Returns:
        The chosen ranks, and whether the choice was the only one.
    """
    remaining = {rank: set(opposing) for rank, opposing in opponents.items()}
    excluded: dict[int, int] = {}
    while any(remaining.values()):
        opponent_counts: dict[int, int] = {}
        for rank, opposing in remaining.items():
            if opposing:
                opponent_counts[rank] = sum(sizes[opponent] for opponent in opposing)
        ratios = {rank: count / sizes[rank] for rank, count in opponent_counts.items()}
        highest_ratio = max(ratios.values())
        candidates = [rank for rank, ratio in ratios.items() if ratio == highest_ratio]

        # candidates that disagree with different ranks: each of them may be the odd one
        first_opposing = remaining[candidates[0]]
        if any(remaining[rank] != first_opposing for rank in candidates):
            return Exclusion(excluded | opponent_counts, is_unique=False)

        # candidates that disagree with the same ranks err alike and go together
        for rank in candidates:
            excluded[rank] = opponent_counts[rank]
            for opponent in remaining.pop(rank):
                remaining[opponent].discard(rank)
    return Exclusion(excluded, is_unique=True)


def call_of(state: JobState, conflict: Conflict, rank: int) -> Entry | None:
    """Look up the call of a conflict.

    Returns:
        The record of ``rank``, else of a sibling, else the oldest outstanding call in a group of
        that description; None if there is none of these.
    """
    for sibling in (rank, *state.siblings_of(rank)):
        issued = state.issued(sibling)
        places = places_of_key(issued, conflict.key)
        if places:
            return issued[places[0]]

    # nobody recorded the call
    candidates: list[Entry] = []
    for outstanding in state.outstanding.values():
        candidates += [entry for entry in outstanding if entry.desc == conflict.key.desc]
    return min(candidates, key=issue_order, default=None)


def _sets_of_equal_siblings(
    state: JobState, ranks: Sequence[int], queued: bool
) -> dict[int, _EqualSiblings]:
    """Partition siblings into sets that issued the same calls: first rank of a set -> the set."""
    set_of_fingerprint: dict[object, _EqualSiblings] = {}
    set_of_columns: dict[object, _EqualSiblings] = {}
    code_of_kind: dict[object, int] = {}
    for rank in ranks:
        # most siblings are alike to the last record: of these one stands for all
        columns = _columns(state, rank, queued, code_of_kind)
        equal = set_of_columns.get(columns)
        if equal is None:
            issued = _issued_calls(state, rank, queued)
            equal = set_of_fingerprint.setdefault(issued.fingerprint(), _EqualSiblings([], issued))
            set_of_columns[columns] = equal
        equal.ranks.append(rank)
    return {equal.ranks[0]: equal for equal in set_of_fingerprint.values()}


def _columns(
    state: JobState, rank: int, queued: bool, code_of_kind: dict[object, int]
) -> tuple[object, ...]:
    """Return a hashable value that only ranks share whose records, in siblings' terms, are alike.

    Args:
        state: The job.
        rank: The rank.
        queued: Also its queue.
        code_of_kind: What is alike in calls but their numbers -> code, which grows.
    """
    sequences = [state.issued(rank), state.messages(rank)]
    if queued:
        sequences.append(state.outstanding[rank])
    columns: list[object] = []
    for calls in sequences:
        codes: list[int] = []
        for part in calls.parts:
            step = -1
            if part.pair:
                step = state.step(rank, part)
            kind = part.desc, part.op, part.done, part.pair, step
            codes.append(code_of_kind.setdefault(kind, len(code_of_kind)))
        columns += [calls.per_part(codes).tobytes(), calls.seq.tobytes()]
    return (*columns, tuple(_collective_counts(state, rank).items()))


def _collective_counts(state: JobState, rank: int) -> dict[str, int]:
    """Return how many collectives a rank made: group description -> number.

    Counters of groups with messages count these too, and say nothing about collectives.
    """
    message_groups = {state.groups[name].desc for name in state.pairs & state.groups.keys()}
    counts = state.counts[rank]
    return {desc: counts[desc] for desc in counts if desc not in message_groups}


def _issued_calls(state: JobState, rank: int, queued: bool) -> _IssuedCalls:
    """Collect what ``rank`` issued, in terms that siblings share; ``queued``: also its queue."""
    first_position: dict[CallKey, int] = {}
    ended_position: dict[CallKey, int] = {}
    for position, entry in enumerate(state.issued(rank)):
        key = key_of(entry)
        first_position.setdefault(key, position)
        if entry.done and not entry.pair:
            ended_position.setdefault(key, position)

    batches: dict[tuple[str, int], Way] = {}
    cut_batch = state.cut_batch(rank)
    for message in state.messages(rank):
        if message.launch == cut_batch:
            continue
        earlier_steps = batches.get((message.desc, message.seq), ())
        step = MessageStep(message.op, state.step(rank, message))
        batches[message.desc, message.seq] = (*earlier_steps, step)

    outstanding: tuple[CallKey, ...] = ()
    if queued:
        outstanding = tuple(key_of(entry) for entry in state.outstanding[rank] if not entry.pair)
    counts = _collective_counts(state, rank)
    return _IssuedCalls(first_position, ended_position, batches, counts, outstanding)


def _find_conflict(left: _IssuedCalls, right: _IssuedCalls, queued: bool) -> Conflict | None:
    """Find a call about which two siblings disagree."""
    # all members of both calls agreed to exchange them: a program may do so, as with more modules
    if _first_exchanged_pair(left.ended_position, right.ended_position) is not None:
        return None

    conflict = _conflict_of_messages(left, right)
    if conflict is None:
        conflict = _conflict_of_recorded_order(left, right)
    if conflict is None:
        conflict = _conflict_of_counts(left, right)
    if conflict is None and queued:
        conflict = _conflict_of_queues(left, right)
    if conflict is None and queued:
        conflict = _conflict_of_queues(right, left)
    return conflict


def _conflict_of_messages(left: _IssuedCalls, right: _IssuedCalls) -> Conflict | None:
    """Find a batch that both siblings issued, but of different messages."""
    for (desc, number), left_batch in left.batches.items():
        right_batch = right.batches.get((desc, number))
        if right_batch is not None and sorted(left_batch) != sorted(right_batch):
            text = f"{desc} message #{number}: {way_text(left_batch)} or {way_text(right_batch)}"
            return Conflict(CallKey(desc, True, number), text)
    return None


def _conflict_of_recorded_order(left: _IssuedCalls, right: _IssuedCalls) -> Conflict | None:
    """Find two recorded calls that the siblings issued in different orders."""
    exchanged = _first_exchanged_pair(left.first_position, right.first_position)
    if exchanged is None:
        return None
    first, second = exchanged
    text = f"{first.desc} #{first.seq} and {second.desc} #{second.seq}"
    return Conflict(first, text, second.desc)


def _conflict_of_counts(left: _IssuedCalls, right: _IssuedCalls) -> Conflict | None:
    """Find two groups such that each sibling issued more calls than the other in one of them.

    Siblings at different places of one program differ in one direction only.
    """
    left_leads = _leads(left.collective_counts, right.collective_counts)
    right_leads = _leads(right.collective_counts, left.collective_counts)
    if not left_leads or not right_leads:
        return None

    # the first call that only the right sibling issued; calls without a record come last
    unrecorded = len(right.first_position)
    missing: list[CallKey] = []
    for desc, count in left.collective_counts.items():
        if desc in right_leads:
            missing.append(CallKey(desc, False, count + 1))
    first_missing = min(missing, key=lambda key: right.first_position.get(key, unrecorded))
    desc_of_left_lead = next(iter(left_leads))
    text = f"{desc_of_left_lead} and {first_missing.desc}"
    return Conflict(first_missing, text, desc_of_left_lead)


def _conflict_of_queues(left: _IssuedCalls, right: _IssuedCalls) -> Conflict | None:
    """Find a call in which both wait and before which ``left`` queued a call that ``right`` lacks.

    This happens where ``right`` leaves out a layer and waits in the next one.
    """
    queue_position: dict[CallKey, int] = {}
    first_lacking: CallKey | None = None
    for position, key in enumerate(left.outstanding):
        queue_position.setdefault(key, position)
        right_lacks_it = key.seq > right.collective_counts.get(key.desc, key.seq)
        if right_lacks_it and first_lacking is None:
            first_lacking = key
    if first_lacking is None:
        return None

    for key in right.outstanding:
        if key in queue_position and queue_position[key] > queue_position[first_lacking]:
            return Conflict(key, f"{first_lacking.desc} and {key.desc}", first_lacking.desc)
    return None


def _first_exchanged_pair(
    left: Mapping[CallKey, int], right: Mapping[CallKey, int]
) -> tuple[CallKey, CallKey] | None:
    """Find two calls, successive among those of both, that ``right`` has in the other order."""
    common = [key for key in left if key in right]
    for first, second in itertools.pairwise(common):
        if right[first] > right[second]:
            return first, second
    return None


def _leads(counts: Mapping[str, int], reference: Mapping[str, int]) -> dict[str, int]:
    """Return by how many calls ``counts`` exceeds ``reference``, for groups in which it does.

    Groups without a count in ``reference`` are left out.
    """
    leads: dict[str, int] = {}
    for desc, count in counts.items():
        if count > reference.get(desc, count):
            leads[desc] = count - reference[desc]
    return leads


# -- progress: which ranks stopped before their siblings? -----------------------------------------
def is_behind_replicas(state: JobState, rank: int) -> bool:
    """Tell whether siblings went on from where ``rank`` stands.

    A sibling went on if all calls outstanding on ``rank`` are outstanding on it too, and behind
    them it issued a call at which other ranks wait for ``rank``.  At least as many siblings must
    have gone on as stand where ``rank`` stands.  A lead in other groups proves nothing: replicas
    with fewer microbatches make fewer calls and stand still all the same.
    """
    # it may stand in an older call that its recorder has lost
    if rank in state.short_rings:
        return False
    own_counts = state.counts[rank]
    awaited_groups: set[str] = set()
    for name, late_rank in state.lates:
        if late_rank == rank:
            awaited_groups.add(state.groups[name].desc)

    went_on = level = 0
    for sibling in state.siblings_of(rank):
        sibling_leads = _leads(state.counts[sibling], own_counts)
        own_leads = _leads(own_counts, state.counts[sibling])

        # rank itself is one of these
        if not sibling_leads and not own_leads:
            level += 1

        shares_outstanding_calls = state.opened(rank) <= state.opened(sibling)
        if (
            shares_outstanding_calls
            and not own_leads
            and not awaited_groups.isdisjoint(sibling_leads)
            and _issued_more_behind_common(state, rank, sibling)
        ):
            went_on += 1

    if went_on < level:
        return False
    return not any(state.unlike_replicas(rank, desc) for desc in awaited_groups)


def _issued_more_behind_common(state: JobState, rank: int, sibling: int) -> bool:
    """Tell whether ``sibling`` issued what ``rank`` lacks behind all calls outstanding on both.

    If not, the two made their calls in different orders, and either may err.
    """
    own_counts = state.counts[rank]
    lacking_seen = False
    for entry in state.outstanding[sibling]:
        is_common = key_of(entry) in state.opened(rank)
        if is_common and lacking_seen:
            return False
        if not is_common and not entry.pair and entry.seq > own_counts.get(entry.desc, entry.seq):
            lacking_seen = True
    return True


def ranks_ahead(state: JobState, idle: Collection[int]) -> set[int]:
    """Find idle ranks that stand further on than an idle sibling, at least two at one place.

    Args:
        state: The job.
        idle: Ranks without an outstanding call.
    """
    ahead: set[int] = set()
    for rank in idle:
        own_counts = state.counts[rank]
        idle_siblings = [sibling for sibling in state.siblings_of(rank) if sibling in idle]
        sibling_counts = [state.counts[sibling] for sibling in idle_siblings]

        # rank is one of its siblings, so a count of two is rank and one more
        stands_alone = sibling_counts.count(own_counts) < 2
        if not stands_alone and any(_is_further(own_counts, counts) for counts in sibling_counts):
            ahead.add(rank)
    return ahead


def _is_further(counts: Mapping[str, int], reference: Mapping[str, int]) -> bool:
    """Tell whether ``counts`` exceeds ``reference`` in some group and falls behind in none."""
    return bool(_leads(counts, reference)) and not _leads(reference, counts)


def uncreated_group(state: JobState, rank: int) -> str:
    """Find a group whose communicator ``rank`` may be creating, waiting for another member.

    The first call of a group creates its communicator and leaves no record.  So siblings made such
    a call, and are ahead of ``rank`` only in groups in which ``rank`` never called.

    Returns:
        The description of the group; "" if there is none.
    """
    # a log does not count the calls of every group
    if state.dumps[rank].version == "log":
        return ""
    own_counts = state.all_counts(rank)
    for sibling in state.siblings_of(rank):
        leads = _leads(state.all_counts(sibling), own_counts)

        # the sibling is also ahead in a group that exists: it went on for another reason
        if any(own_counts[desc] >= 1 for desc in leads):
            continue
        for name in state.groups_of[rank]:
            group = state.groups[name]
            if group.desc in leads and _lacks_member(state, name, rank):
                return group.desc
    return ""


def _lacks_member(state: JobState, name: str, rank: int) -> bool:
    """Tell whether a member of the group other than ``rank`` has not made its first call there."""
    for member in state.groups[name].ranks:
        if member != rank and member in state.dumps and state.enqueued.get((name, member), -1) < 1:
            return True
    return False


def is_between_iterations(state: JobState, rank: int) -> bool:
    """Tell whether siblings are one whole iteration ahead of ``rank``, which stands between two.

    Checkpoints, evaluations and data loading hold a host there, and another rank may be to blame.
    """
    own_counts = state.all_counts(rank)
    for sibling in state.siblings_of(rank):
        leads = _leads(state.all_counts(sibling), own_counts)

        # a lead in one group may be any call
        if len(leads) < 2:
            continue
        if _are_whole_iterations(own_counts, leads, {}):
            return True

        # with --overlap-param-gather some calls of data parallelism follow in the next forward
        overlapped = {desc: leads[desc] for desc in leads if desc.startswith("DATA_PARALLEL")}
        if _are_whole_iterations(own_counts, leads, overlapped):
            return True
    return False


def _are_whole_iterations(
    counts: Mapping[str, int], leads: Mapping[str, int], may_lack: Mapping[str, int]
) -> bool:
    """Tell whether ``counts`` are those of at least two whole iterations.

    A sibling at the end of the next iteration leads by as many calls as an iteration makes.  The
    largest lead gives the number of iterations, of which every other count is a multiple.

    Args:
        counts: Group description -> calls of the rank.
        leads: Group description -> calls that a sibling made beyond these.
        may_lack: Group description -> calls that may be missing from the last iteration.
    """
    complete = [desc for desc in leads if desc not in may_lack]
    largest = max(complete, key=lambda desc: leads[desc], default="")
    if not largest:
        return False
    iterations, remainder = divmod(counts[largest], leads[largest])
    if iterations < 2 or remainder:
        return False
    for desc in leads:
        missing_calls = -counts[desc] % iterations
        if counts[desc] < iterations or missing_calls > may_lack.get(desc, 0):
            return False
    return True


# -- messages: which ranks left out a send or a receive? ------------------------------------------
def skipped_messages(state: JobState, apart: Collection[int] = ()) -> Iterator[tuple[int, Entry]]:
    """Find ranks that left out a message which their siblings posted, and that went on.

    Args:
        state: The job.
        apart: Ranks that say nothing of their siblings.

    Yields:
        The rank, and the call of another rank that waits for its message.
    """
    for waiting_rank in sorted(state.outstanding):
        head = state.head(waiting_rank)
        reason, peers = state.waits(waiting_rank)
        if head is None or not head.pair or reason != NOT_POSTED:
            continue
        for peer in peers:
            # a rank without outstanding calls is late; with other microbatches it proves nothing
            if not state.outstanding.get(peer) or state.unlike_replicas(peer, head.desc):
                continue
            if state.history:
                skipped = _went_on_without_next_message(state, peer, head.desc, apart)
            else:
                skipped = _posted_fewer_messages(state, peer, head.desc, apart)
            if skipped:
                yield peer, head


def _went_on_without_next_message(
    state: JobState, rank: int, desc: str, apart: Collection[int]
) -> bool:
    """Tell by the records whether ``rank`` made calls that siblings made after the next message."""
    issued = state.issued(rank)
    messages = issued.places(lambda part: part.pair and part.desc == desc)
    last_message = int(issued.seq[messages].max(initial=0))
    votes = state.went_on_without(rank, CallKey(desc, True, last_message + 1), apart)
    return votes[True] > 0 and votes[False] == 0


def _posted_fewer_messages(state: JobState, rank: int, desc: str, apart: Collection[int]) -> bool:
    """Tell by the counters whether ``rank`` posted fewer messages of a group than its siblings.

    Siblings that made no more collectives but more messages vote for it; siblings with no more
    messages though they made as many collectives vote against it.
    """
    own_messages, _ = state.messages_counted(rank, desc)
    own_counts = state.counts[rank]
    votes_for = votes_against = 0
    for sibling in state.siblings_of(rank):
        if sibling in apart:
            continue
        messages, _ = state.messages_counted(sibling, desc)
        counts = state.counts[sibling]
        if messages > own_messages >= 0 and not _leads(counts, own_counts):
            votes_for += 1
        if sibling != rank and messages <= own_messages and not _leads(own_counts, counts):
            votes_against += 1
    return votes_for > votes_against


# -- rhythm: which ranks changed the messages of their iterations? --------------------------------


@dataclass(frozen=True)
class MessageBatch:
    """Messages of a rank that were issued together.

    Attributes:
        steps: The messages, sorted.
        messages: All messages of the rank.
        first_place: Place, among them, of the message that was issued first.
    """

    steps: Way
    messages: Calls
    first_place: int

    @property
    def first(self) -> Entry:
        """The record of the message that was issued first."""
        return self.messages[self.first_place]


@dataclass(frozen=True)
class _RhythmChange:
    """The place at which a repeated sequence of batches changes.

    Attributes:
        period: Number of batches in an iteration.
        position: Position of the first batch that differs from that of the iteration before.
    """

    period: int
    position: int


def find_broken_rhythms(state: JobState) -> list[Mismatch]:
    """Find ranks whose last messages differ from those of their own earlier iterations.

    A rank is named only if no sibling has these messages and no other rank of the group changed
    its rhythm: evaluations and a growing batch change it for all.
    """
    batches_of_rank = {rank: batches_of(state, rank) for rank in state.outstanding}
    mismatches_of_group: dict[str, list[Mismatch]] = defaultdict(list)
    for rank, batches_of_group in batches_of_rank.items():
        max_iterations = _iterations_by_counters(state, rank)
        for name, numbered_batches in batches_of_group.items():
            if name not in state.groups:
                continue
            batches = list(numbered_batches.values())
            change = _last_rhythm_change([batch.steps for batch in batches], max_iterations)
            if change is None:
                continue
            changed = batches[change.position]
            usual = batches[change.position - change.period]

            siblings = [sibling for sibling in state.siblings_of(rank) if sibling != rank]
            if _may_be_evaluation(changed, [batches_of_rank[sibling] for sibling in siblings]):
                continue
            kind = kind_of_change(changed.steps, usual.steps)
            text = f"rank {rank} posts {way_text(changed.steps)} where its earlier iterations have "
            text += way_text(usual.steps)
            mismatch = Mismatch(kind, changed.first, (rank,), (rank,), text, voted=False)
            mismatches_of_group[name].append(mismatch)

    # where several ranks of a group changed their rhythm, the job did
    return [rows[0] for rows in mismatches_of_group.values() if len(rows) == 1]


def _may_be_evaluation(
    changed: MessageBatch, batches_of_siblings: Sequence[Mapping[str, Mapping[int, MessageBatch]]]
) -> bool:
    """Tell whether all siblings may come to have the changed messages, as in an evaluation.

    Siblings have the batch in groups of their own, of the same description: in a group of another
    one, that number is of other messages.
    """
    sibling_steps: list[Way] = []
    for batches_of_group in batches_of_siblings:
        for numbered_batches in batches_of_group.values():
            batch = numbered_batches.get(changed.first.seq)
            if batch is not None and batch.first.desc == changed.first.desc:
                sibling_steps.append(batch.steps)

    # no sibling has come to this batch yet
    if batches_of_siblings and not sibling_steps:
        return True
    return changed.steps in sibling_steps


def _iterations_by_counters(state: JobState, rank: int) -> int:
    """Return an upper bound of the iterations of ``rank``: the calls of optimizer steps."""
    step_counts: list[int] = []
    for desc, count in state.all_counts(rank).items():
        if desc.startswith(STEP_GROUPS):
            step_counts.append(count)
    return min(step_counts, default=0)


def _last_rhythm_change(batches: Sequence[Way], max_iterations: int) -> _RhythmChange | None:
    """Find a change in the last iteration of a sequence that repeats.

    Args:
        batches: The messages of each batch, in the order of issue.
        max_iterations: The iteration of the change cannot have a higher number than this.

    Returns:
        The change; None if the first two iterations are not alike, or nothing changes after them,
        or the change is older than the last iteration.
    """
    for period in range(2, len(batches) // 2 + 1):
        first_iteration = batches[:period]
        second_iteration = batches[period : 2 * period]
        if first_iteration != second_iteration or len(set(first_iteration)) < 2:
            continue
        position = _first_deviation(batches, period)
        if position is None:
            continue
        is_in_last_iteration = position >= len(batches) - period
        if is_in_last_iteration and position // period <= max_iterations:
            return _RhythmChange(period, position)
    return None


def _first_deviation(batches: Sequence[Way], period: int) -> int | None:
    """Find the first batch, behind two periods, that differs from the batch a period before."""
    for position in range(2 * period, len(batches)):
        if batches[position] != batches[position - period]:
            return position
    return None


def batches_of(state: JobState, rank: int) -> dict[str, dict[int, MessageBatch]]:
    """Collect the messages of ``rank`` by batch: group name -> number -> batch."""
    messages = state.messages(rank)
    cut_batch = state.cut_batch(rank)
    step_of_part: list[MessageStep] = []
    for part in messages.parts:
        step_of_part.append(MessageStep(part.op, state.step(rank, part)))

    # group -> number -> messages: the place of each, and its step
    issued_together: dict[str, dict[int, list[tuple[int, MessageStep]]]] = {}
    indices, numbers = messages.part.tolist(), messages.seq.tolist()
    for place, (index, number) in enumerate(zip(indices, numbers, strict=True)):
        if (messages.parts[index].group, True, number) == cut_batch:
            continue
        numbered = issued_together.setdefault(messages.parts[index].group, {})
        numbered.setdefault(number, []).append((place, step_of_part[index]))

    batches: dict[str, dict[int, MessageBatch]] = {}
    for name, numbered in issued_together.items():
        batches[name] = {}
        for number, placed_steps in numbered.items():
            steps = tuple(sorted(step for _, step in placed_steps))
            first_place, _ = placed_steps[0]
            batches[name][number] = MessageBatch(steps, messages, first_place)
    return batches


def kind_of_change(changed: Way, usual: Way) -> str:
    """Classify a batch that differs from the usual one: skipped call, extra call or order."""
    if set(changed) < set(usual):
        return "skipped call"
    if set(changed) > set(usual):
        return "extra call"
    return "order"


def way_text(steps: Way) -> str:
    """Describe the messages of a batch: ``send to 1 rank further and recv from …``."""
    texts = []
    for step in steps:
        preposition = "to" if step.op == "send" else "from"
        distance = counted(step.distance, "rank")
        texts.append(f"{step.op} {preposition} {distance} further")
    return " and ".join(texts)
