"""Find ranks whose call differs from that of the other members of its group.

In : State.  Out: what a minority did and what the others did, by majority.  In a group of two it is
the siblings, ranks with the same program in other groups, that decide.  A vote without a majority
names nobody.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.features.hang.calls import CallPart, Calls, Entry, Integers
from megatron_prism.features.hang.state import JobState, NumberedCalls, call_text

_HALVES = {"Half", "BFloat16"}  # a job computes in one of them; others have their places
SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "barrier")
CallsOfRanks = dict[int, list[Entry]]


Sign = tuple[str, tuple[str, ...], object]  # operation, dtypes, shape
Signature = tuple[Sign, ...]


def signature(state: JobState, entries: list[Entry]) -> Signature:
    """Return what must be alike on all members of a call.

    Logs know no dtypes, and print a barrier as the all_reduce that it is.
    """
    signs: list[Sign] = []
    for entry in entries:
        op, dtypes = entry.op, entry.dtypes
        if state.has_logs:
            op = _LOGGED.get(op, op)
            dtypes = ()
        numbers: object = ()
        if op in SIZED:
            numbers = entry.numbers
        signs.append((op, dtypes, numbers))
    return tuple(signs)


_LOGGED = {"barrier": "all_reduce"}
_LAST = 6  # calls before one, by which siblings are at the same place


@dataclass(frozen=True)
class Mismatch:
    """A call in which ranks differ.

    Attributes:
        kind: operation, dtype, shape, splits, coalescing, skipped call or extra call.
        entry: The call as the majority makes it, or one of the ranks that differ.
        ranks: The ranks that err; empty if no vote decided.
        among: The ranks between which the vote was.
        text: What the ranks call, in words.
        voted: Whether others made this very call; else only calls like it.
    """

    kind: str
    entry: Entry
    ranks: tuple[int, ...]
    among: tuple[int, ...]
    text: str
    voted: bool = True

    @property
    def call(self) -> tuple[object, ...]:
        """What is alike where ranks of several groups err in the same way."""
        return self.kind, self.entry.desc, self.entry.op, self.entry.seq, self.entry.pair

    def __str__(self) -> str:
        undecided = "" if self.ranks else "; no majority decides"
        return f"{call_text(self.entry)}: {self.text}{undecided}"


def find_mismatches(state: JobState) -> list[Mismatch]:
    """Find outstanding calls that members of their group make differently.

    Returns:
        The first such call of each group, and messages that do not fit; earliest first.
    """
    numbered_mismatches: list[tuple[int, int, int, Mismatch]] = []
    for name, awaited in state.awaited.items():
        # of each group the calls in the order of their numbers, until one differs
        desc = awaited.last(awaited.numbers[0]).desc
        for number in _numbers_unlike(state, name, desc, awaited.numbers):
            calls = _calls_of_members(state, name, desc, number)
            mismatch = _compare(state, calls)
            if mismatch is not None:
                order, place = awaited.first_place(number)
                numbered_mismatches.append((number, order, place, mismatch))
                break

    # by number, and for one number as the ranks come to it
    numbered_mismatches.sort(key=lambda row: row[:3])
    mismatches = list(_messages(state))
    mismatches += [mismatch for *_, mismatch in numbered_mismatches]
    return sorted(mismatches, key=lambda mismatch: mismatch.entry.created_ns)


def _calls_of_members(state: JobState, name: str, desc: str, number: int) -> CallsOfRanks:
    """Return the calls of a number that the members of a group made."""
    calls: CallsOfRanks = {}
    for rank in state.groups[name].ranks:
        entries = state.at(rank, desc, number)
        if entries:
            calls[rank] = entries
    return calls


def _numbers_unlike(
    state: JobState, name: str, desc: str, awaited_numbers: Sequence[int]
) -> list[int]:
    """Return the numbers of awaited calls that members do not plainly make alike.

    All members made one single call, each the same: that is the common case.  Calls that read the
    same may still not fit where each member has sizes of its own.
    """
    numbers = np.array(awaited_numbers, np.int64)
    are_alike = np.ones(len(numbers), np.bool_)
    code_of_sign: dict[object, int] = {}
    codes_of_first: Integers | None = None
    for rank in state.groups[name].ranks:
        codes = _codes_at(state.numbered(rank, desc), numbers, code_of_sign)
        if codes_of_first is None:
            codes_of_first = codes
        are_alike &= codes >= 0
        are_alike &= codes == codes_of_first
    unlike: list[int] = numbers[~are_alike].tolist()
    return unlike


def _codes_at(
    numbered: NumberedCalls, numbers: Integers, code_of_sign: dict[object, int]
) -> Integers:
    """Return a code of what a rank calls at each number; equal calls have the same.

    Args:
        numbered: The rank's collectives.
        numbers: Numbers of calls, ascending.
        code_of_sign: Operation, dtypes and sizes -> code, which grows.

    Returns:
        Codes; -1 where the rank makes none or several calls, or one whose sizes may differ.
    """
    codes_of_parts: list[int] = []
    for part in numbered.calls.parts:
        code = -1
        if part.op in SIZED:
            sign = part.op, part.dtypes, part.numbers
            next_code = len(code_of_sign)
            code = code_of_sign.setdefault(sign, next_code)
        codes_of_parts.append(code)
    codes = np.full(len(numbers), -1)
    firsts = np.searchsorted(numbered.numbers, numbers)
    ends = np.searchsorted(numbered.numbers, numbers, "right")
    counts = ends - firsts
    are_single = counts == 1
    first_places = firsts[are_single]
    if len(first_places):
        places = numbered.places[first_places]
        codes_of_calls = numbered.calls.per_part(codes_of_parts)
        codes[are_single] = codes_of_calls[places]
    return codes


def _onward(state: JobState, rank: int, call: Entry) -> list[Signature]:
    """Return what ``rank`` called from ``call`` on in its group of that description."""
    signatures: list[Signature] = []
    for number in itertools.count(call.seq):
        entries = state.at(rank, call.desc, number)
        if not entries:
            return signatures
        signatures.append(signature(state, entries))
    return signatures


def _before(state: JobState, rank: int, call: Entry) -> list[tuple[str, ...]]:
    """Return the operations of the last calls before ``call`` in that group of ``rank``."""
    operations: list[tuple[str, ...]] = []
    for number in range(call.seq - _LAST, call.seq):
        entries = state.at(rank, call.desc, number)
        operations.append(tuple(entry.op for entry in entries))
    return operations


@dataclass(frozen=True)
class _RightCall:
    """The call that is right where ranks differ.

    Attributes:
        signature: The call.
        example: The calls of a rank that made it, a member or a sibling in a group of its own.
        makers: The others that make it, in words.
        voted: Whether a majority made it; else only calls like it.
    """

    signature: Signature
    example: list[Entry]
    makers: str
    voted: bool


def _compare(state: JobState, calls: CallsOfRanks) -> Mismatch | None:
    """Find how the members that made one call differ in it, and which of them is wrong."""
    if not calls:
        return None
    signatures = {rank: signature(state, entries) for rank, entries in calls.items()}
    first_signature, *unlike_signatures = dict.fromkeys(signatures.values())
    first = next(iter(calls.values()))[0]

    # all members make the same call: only the sums of its sizes may not fit
    if not unlike_signatures and len(calls) == len(state.groups[first.group].ranks):
        return _totals(state, calls)
    right = _right_call(state, calls, signatures)

    # the members whose calls are recorded agree, and nothing says that they err
    if not unlike_signatures and (right is None or right.signature == first_signature):
        return None
    texts = {rank: _text(entries) for rank, entries in calls.items()}
    members = tuple(calls)
    if right is None:
        kind = _kind(first_signature, unlike_signatures[0])
        return Mismatch(kind, first, (), members, _differ(texts))

    erring_ranks = tuple(rank for rank in calls if signatures[rank] != right.signature)
    first_erring = erring_ranks[0]
    erring_text = _differ({first_erring: texts[first_erring]})
    text = f"{erring_text}, {right.makers} {_text(right.example)}"
    erring_call = calls[first_erring][0]
    kind = _skipped_or_extra(state, erring_call, first_erring, right.signature, members)
    if not kind:
        kind = _kind(signatures[first_erring], right.signature)

    # a sibling made it in a group of its own: the call is that of this group
    entry = right.example[0]._replace(group=first.group)
    return Mismatch(kind, entry, erring_ranks, members, text, right.voted)


def _right_call(
    state: JobState, calls: CallsOfRanks, signatures: dict[int, Signature]
) -> _RightCall | None:
    """Find the call that is right.

    In this order: by a strict majority of the members, those without a dump counted; with the
    siblings at that number; by what members call next; by the job's other calls.
    """
    first = next(iter(calls.values()))[0]
    # members that the log does not name may be the majority
    if state.groups[first.group].partial:
        return None
    examples: dict[Signature, list[Entry]] = {}
    for rank, called in signatures.items():
        examples.setdefault(called, calls[rank])
    votes = Counter(signatures.values())
    unseen = len(state.groups[first.group].ranks) - len(calls)
    right = _majority(votes, unseen, examples)
    if right is not None:
        return right

    # the siblings vote, too: of the calls in question, or of all where the members agree
    candidates = set(votes) if len(votes) > 1 else None
    unlike = any(state.unlike_replicas(rank, first.desc) for rank in calls)
    if not unlike:
        for called, entries in _elsewhere(state, first, set(calls), candidates):
            votes[called] += 1
            examples.setdefault(called, entries)
    right = _majority(votes, unseen, examples)
    if right is not None or candidates is None or unlike:
        return right

    # what members call next
    numbered_alike: set[Signature] = set()
    calls_onward = {rank: _onward(state, rank, first) for rank in calls}
    common_places = _common_places(calls_onward)
    for rank, called in signatures.items():
        if _is_numbered_as_siblings(state, rank, first, calls_onward, common_places):
            numbered_alike.add(called)
    makers_count = sum(called in numbered_alike for called in signatures.values())
    if len(numbered_alike) == 1 and 2 * makers_count >= len(calls):
        called = numbered_alike.pop()
        makers = "the others, who make the next calls as siblings do,"
        return _RightCall(called, examples[called], makers, voted=False)

    # what the rest of the job calls
    right_rank = _right_of_two(state, calls)
    if right_rank is None:
        return None
    called = signatures[right_rank]
    return _RightCall(called, examples[called], "as nobody else, the other", voted=False)


def _majority(
    votes: Counter[Signature], unseen: int, examples: Mapping[Signature, list[Entry]]
) -> _RightCall | None:
    """Return the call of a strict majority, ``unseen`` ranks counted against it."""
    called, count = votes.most_common(1)[0]
    if 2 * count <= votes.total() + unseen:
        return None
    return _RightCall(called, examples[called], f"{count} others", voted=True)


def _common_places(calls_onward: Mapping[int, list[Signature]]) -> set[int]:
    """Return the places, from 0, at which several members all make the same call.

    Args:
        calls_onward: What each member calls from the call in question on.
    """
    if len(calls_onward) < 2:
        return set()
    common_places: set[int] = set()
    shortest = min(len(calls) for calls in calls_onward.values())
    for place in range(shortest):
        calls_there = {calls[place] for calls in calls_onward.values()}
        if len(calls_there) == 1:
            common_places.add(place)
    return common_places


def _is_numbered_as_siblings(
    state: JobState,
    rank: int,
    call: Entry,
    calls_onward: Mapping[int, list[Signature]],
    common_places: Collection[int],
) -> bool:
    """Tell whether a later call of ``rank`` in that group has the number that siblings give it.

    The call must be unlike its neighbours: only then the rank left out none before it and made none
    too many.  Where all members make it, none of them did: it says nothing of the call in question.
    """
    siblings = [sibling for sibling in state.siblings_of(rank) if sibling not in calls_onward]
    own_calls = calls_onward[rank]
    for place in range(1, len(own_calls)):
        if place in common_places:
            continue
        neighbours = own_calls[place - 1 : place] + own_calls[place + 1 : place + 2]
        if own_calls[place] in neighbours:
            continue
        sibling_calls: list[Signature] = []
        short_count = 0
        for sibling in siblings:
            number = call.seq + place
            entries = state.at(sibling, call.desc, number)
            if entries:
                sibling_calls.append(signature(state, entries))
            elif state.counts[sibling].get(call.desc, number) < number:
                short_count += 1

        # siblings that err alike come further, and alone: half of them decide nothing
        is_majority = len(sibling_calls) > short_count
        if is_majority and set(sibling_calls) == {own_calls[place]}:
            return True
    return False


def _right_of_two(state: JobState, calls: CallsOfRanks) -> int | None:
    """Find which of two members is right, where one makes a call that nobody else in the job makes.

    Where what follows fits with a shift by one, one of the two left out a call or made one more:
    both calls may be right, and whether others make the like says nothing.
    """
    if len(calls) != 2:
        return None
    left_rank, right_rank = calls
    if len(calls[left_rank]) != len(calls[right_rank]):
        return None
    left, right = calls[left_rank][0], calls[right_rank][0]

    left_onward = _onward(state, left_rank, left)
    right_onward = _onward(state, right_rank, left)
    is_shifted = _alike_from(left_onward[1:], right_onward)
    is_shifted = is_shifted or _alike_from(right_onward[1:], left_onward)
    is_replaced = _alike_from(left_onward[1:], right_onward[1:])

    # an operation unlike the other, and the calls behind it are alike with a shift
    if is_shifted and left.op != right.op:
        return None
    # or nothing is known of the calls behind it
    if not is_replaced and (is_shifted or left.op != right.op):
        return None
    sizes = (left.numbers[0] + left.numbers[1], right.numbers[0] + right.numbers[1])
    erring = _unlike_the_job(state, (left, right), sizes)
    if erring is None:
        return None
    return (right_rank, left_rank)[erring]


def _skipped_or_extra(
    state: JobState, call: Entry, rank: int, usual: Signature, members: Collection[int]
) -> str:
    """Tell whether ``rank`` skipped a call or made one more.

    It calls at ``call`` what the others call next, or next what they call there.

    Returns:
        "skipped call", "extra call", or "" if neither is known.
    """
    own_calls = _onward(state, rank, call)

    # the longest record of the ranks that make the usual call
    usual_calls: list[Signature] = []
    for candidate in {*members, *state.siblings_of(rank)}:
        candidate_calls = _onward(state, candidate, call)
        if candidate_calls[:1] == [usual] and len(candidate_calls) > len(usual_calls):
            usual_calls = candidate_calls

    # the call was replaced by another: what follows is alike
    if _alike_from(own_calls[1:], usual_calls[1:]):
        return ""
    if _alike_from(own_calls, usual_calls[1:]):
        return "skipped call"
    if _alike_from(own_calls[1:], usual_calls):
        return "extra call"
    return ""


def _elsewhere(
    state: JobState, like: Entry, members: set[int], candidates: set[Signature] | None
) -> Iterator[tuple[Signature, list[Entry]]]:
    """Find what siblings call at this place of their own groups.

    Only siblings count whose calls before it are alike: numbers say nothing where siblings make
    calls of their own.

    Args:
        state: The job.
        like: The call of a member.
        members: Ranks that made it.
        candidates: Calls of ranks that are in question; None: all.

    Yields:
        The call of a sibling, and its records.
    """
    before_members = [_before(state, rank, like) for rank in sorted(members)]
    for role in {state.role.get(rank, 0) for rank in members}:
        for sibling in state.siblings[role]:
            if sibling in members:
                continue
            entries = state.at(sibling, like.desc, like.seq)
            called = signature(state, entries)
            if not entries or (candidates is not None and called not in candidates):
                continue
            before_sibling = _before(state, sibling, like)
            if any(_fit(before_sibling, before) for before in before_members):
                yield called, entries


def _unlike_the_job(
    state: JobState, pair: tuple[Entry, Entry], sizes: tuple[tuple[int, ...], tuple[int, ...]]
) -> int | None:
    """Find which of two calls is like nothing else in the job.

    First whole calls are compared, then their operations, the job's half precision, and numbers of
    elements: those that several other calls move.

    Args:
        state: The job.
        pair: The two calls.
        sizes: Numbers of elements of either call.

    Returns:
        0 or 1: the place in ``pair``; None if nothing decides.
    """
    call_counts: Counter[CallPart] = Counter()
    for dump in state.dumps.values():
        for part, places in dump.entries.parts_and_places:
            if not part.closes_batch:
                call_counts[part] += len(places)
    call_counts.subtract([entry.part for entry in pair])
    other_calls = [part for part, count in call_counts.items() if count > 0]

    # an aspect decides if both calls have it and the job knows one of them
    for aspect in (_whole_call, _operation, _half_precision):
        first, second = aspect(pair[0]), aspect(pair[1])
        if not first or not second:
            continue
        aspects_of_job = {aspect(part) for part in other_calls}
        is_usual = [first in aspects_of_job, second in aspects_of_job]
        if is_usual[0] != is_usual[1]:
            return is_usual.index(False)

    # numbers of elements; a single element is a scalar and says nothing
    calls_with_size: Counter[int] = Counter()
    for part in other_calls:
        for size in {*part.numbers[0], *part.numbers[1]}:
            if size > 1:
                calls_with_size[size] += call_counts[part]
    is_usual = []
    for own_sizes in sizes:
        is_usual.append(any(calls_with_size[size] > 1 for size in own_sizes))
    if is_usual[0] != is_usual[1] and pair[0].dtypes == pair[1].dtypes:
        return is_usual.index(False)
    return None


def _whole_call(entry: Entry | CallPart) -> object:
    """Return group, operation, dtypes and sizes of a collective; False for a message."""
    if entry.pair:
        return False
    numbers: object = ()
    if entry.op in SIZED:
        numbers = entry.numbers
    return entry.desc, entry.op, entry.dtypes, numbers


def _operation(entry: Entry | CallPart) -> object:
    """Return group, operation and dtypes of a collective; False for a message."""
    return not entry.pair and (entry.desc, entry.op, entry.dtypes)


def _half_precision(entry: Entry | CallPart) -> object:
    """Return the dtype of a call in half precision; False, or nothing, for others."""
    return set(entry.dtypes) <= _HALVES and entry.dtypes[:1]


def _alike_from(left: list[Signature], right: list[Signature]) -> bool:
    """Tell whether both are alike as far as both are known; False where one is not known."""
    common = min(len(left), len(right))
    return common > 0 and left[:common] == right[:common]


def _fit(left: list[tuple[str, ...]], right: list[tuple[str, ...]]) -> bool:
    """Tell whether the same was called, as far as both are known."""
    for left_ops, right_ops in zip(left, right, strict=True):
        if left_ops and right_ops and left_ops != right_ops:
            return False
    return True


_ASPECTS = ("operation", "dtype", "shape")  # of a Sign, in its order


def _kind(left: Signature, right: Signature) -> str:
    """Name the first aspect in which two calls differ."""
    if len(left) != len(right):
        return "coalescing"
    for left_sign, right_sign in zip(left, right, strict=True):
        for place, aspect in enumerate(_ASPECTS):
            if left_sign[place] != right_sign[place]:
                return aspect
    return "shape"


def _text(entries: list[Entry]) -> str:
    """Describe a call, or those coalesced in it: ``all_reduce 64 BFloat16``."""
    first = entries[0]
    sizes = "+".join(map(str, first.numbers[0])) or "nothing"
    text = f"{first.op} {sizes}"
    if first.dtypes and first.dtypes[0]:
        text += f" {first.dtypes[0]}"
    if len(entries) > 1:
        text += f" and {len(entries) - 1} more in one call"
    return text


def _differ(texts: dict[int, str]) -> str:
    """Say what at most four ranks call."""
    clauses = [f"rank {rank} calls {text}" for rank, text in sorted(texts.items())]
    return ", ".join(clauses[:4])


def _totals(state: JobState, calls: dict[int, list[Entry]]) -> Mismatch | None:
    """Find an all-to-all in which all together send more or less than all together receive."""
    first = next(iter(calls.values()))[0]
    if first.op != "all_to_all" or len(calls) < len(state.groups[first.group].ranks):
        return None
    sent: dict[int, int] = {}
    expected: dict[int, int] = {}
    for rank, entries in calls.items():
        sent[rank] = sum(entries[0].numbers[0])
        expected[rank] = sum(entries[0].numbers[1])
    if sum(sent.values()) == sum(expected.values()):
        return None

    # of two members either may err; of more, the only one whose own sums differ does
    uneven = tuple(rank for rank in calls if sent[rank] != expected[rank])
    clauses = [f"rank {rank} sends {sent[rank]}, expects {expected[rank]}" for rank in uneven]
    erring_ranks: tuple[int, ...] = ()
    if len(uneven) == 1 and len(calls) > 2:
        erring_ranks = uneven
    return Mismatch("splits", first, erring_ranks, tuple(calls), "; ".join(clauses[:4]))


def _messages(state: JobState) -> Iterator[Mismatch]:
    """Find sends and receives, the oldest of both sides, that do not fit."""
    for rank, outstanding in state.outstanding.items():
        sends = outstanding.places(lambda part: part.op == "send").tolist()
        if not sends:
            continue
        send = outstanding[sends[0]]

        # without a receive of the other side it waits, and nothing is compared
        receive = state.mate(rank, send)
        if receive is None:
            continue
        peer = state.other(rank, send)
        sent_numbers, expected_numbers = send.numbers[0], receive.numbers[1]
        sent, expected = sum(sent_numbers), sum(expected_numbers)
        sent_dtype, expected_dtype = send.dtypes[:1], receive.dtypes[:1]

        # both agree about what is sent, but perhaps not about how
        if sent == expected and sent_dtype == expected_dtype:
            yield from _unbatched(state, _Side(rank, send), _Side(peer, receive))
            continue

        # they do not fit: the side that errs has sizes or types of its own
        erring_ranks: tuple[int, ...] = ()
        erring = _unlike_the_job(state, (send, receive), (sent_numbers, expected_numbers))
        if erring is not None:
            erring_ranks = ((rank, peer)[erring],)
        text = f"rank {rank} sends {sent} {sent_dtype}, "
        text += f"rank {peer} expects {expected} {expected_dtype}"
        kind = "shape"
        if sent == expected:
            kind = "dtype"
        yield Mismatch(kind, send, erring_ranks, (rank, peer), text)


@dataclass(frozen=True)
class _Side:
    """One side of a message.

    Attributes:
        rank: The rank that posts it.
        entry: Its send or receive.
    """

    rank: int
    entry: Entry


def _unbatched(state: JobState, sender: _Side, receiver: _Side) -> Iterator[Mismatch]:
    """Find a message that one side posts in a batch and the other by itself.

    NCCL moves the first in the group's communicator and the second in one of the two ranks, so they
    never meet.
    """
    sides = (sender, receiver)
    is_batched_of_side = [is_batched(state, side.rank, side.entry) for side in sides]
    if set(is_batched_of_side) != {True, False}:
        return

    # the side that posts it otherwise than most siblings post theirs
    erring_ranks: list[int] = []
    clauses: list[str] = []
    for side, batched in zip(sides, is_batched_of_side, strict=True):
        votes = _batches_of_siblings(state, side)
        if votes[not batched] > votes[bool(batched)]:
            erring_ranks.append(side.rank)
        manner = ("by itself", "in a batch")[bool(batched)]
        clauses.append(f"rank {side.rank} posts its {side.entry.op} {manner}")
    if len(erring_ranks) == 1:
        among = (sender.rank, receiver.rank)
        text = ", ".join(clauses)
        yield Mismatch("coalescing", sender.entry, tuple(erring_ranks), among, text)


def _batches_of_siblings(state: JobState, side: _Side) -> Counter[bool | None]:
    """Count whether siblings post their first such message in a batch."""
    step = state.step(side.rank, side.entry)
    votes: Counter[bool | None] = Counter()
    for sibling in state.siblings_of(side.rank):
        if sibling == side.rank:
            continue
        entry = _first_like(state, sibling, side.entry, step)
        if entry is not None:
            votes[is_batched(state, sibling, entry)] += 1
    return votes


def _first_like(state: JobState, rank: int, message: Entry, step: int) -> Entry | None:
    """Return the first recorded message of ``rank`` that goes as many places further."""
    calls = state.dumps[rank].entries
    first_places: list[int] = []
    for part, places in calls.parts_and_places:
        is_like = part.pair and part.desc == message.desc and part.op == message.op
        if not is_like or state.step(rank, part) != step:
            continue
        first_place = int(places[0])
        first_places.append(first_place)
    if not first_places:
        return None
    place = min(first_places)
    return calls[place]


def _from(calls: Calls, first: Entry) -> Iterator[Entry]:
    """Yield the calls of a rank from one of them on."""
    first_place = calls.place_of(first)
    for place in range(first_place, len(calls)):
        yield calls[place]


def is_batched(state: JobState, rank: int, message: Entry) -> bool | None:
    """Tell whether the record that closes a batch follows a message.

    Returns:
        None where the records behind are not there, as in dumps without calls that ended.
    """
    entries = state.dumps[rank].entries
    for record, entry in enumerate(_from(entries, message), message.record):
        # a record is missing
        if entry.record != record:
            return None
        # another call comes before the batch is closed
        if entry.group != message.group or entry.pair and entry.seq != message.seq:
            return False
        if entry.op == "coalesced":
            return True
    return False
