"""Find ranks whose call differs from that of the other members of its group.

In : State.  Out: what the few did and what the others did, by majority.  In a group of two it is
the siblings, ranks with the same program in other groups, that decide.  A vote without a majority
names nobody.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_prism.features.hang.dumps import Entry, Launch
from megatron_prism.features.hang.state import JobState, call_text

_HALVES = {"Half", "BFloat16"}  # a job computes in one of them; others have their places
SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "barrier")
Calls = dict[int, list[Entry]]


Sign = tuple[str, tuple[str, ...], object]  # operation, dtypes, shape
Signature = tuple[Sign, ...]


def signature(state: JobState, entries: list[Entry]) -> Signature:
    """What must be alike.  Logs know no dtypes, and a barrier as the all_reduce that it is."""
    if state.has_logs:
        entries = [e._replace(op=_LOGGED.get(e.op, e.op), dtypes=()) for e in entries]
    return tuple((e.op, e.dtypes, e.numbers if e.op in SIZED else ()) for e in entries)


_LOGGED = {"barrier": "all_reduce"}
_LAST = 6  # calls before one, by which siblings are at the same place


@dataclass(frozen=True)
class Mismatch:
    """A call in which ranks differ.

    kind  : operation, dtype, shape, splits, coalescing, skipped call, extra call
    entry : the call as the majority makes it (or one of those who differ)
    ranks : the odd ones; empty if no vote decided, then ``among`` says between whom
    voted : whether others made this very call; else only calls like it
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
    mismatches = list(_messages(state))
    awaited_calls: dict[Launch, Entry] = {}
    for outstanding in state.outstanding.values():
        for entry in outstanding:
            if entry.to < 0:
                awaited_calls[entry.group, False, entry.seq] = entry

    # of each group the calls in the order of issue, until one differs
    decided_groups: set[str] = set()
    calls_of_members: dict[str, list[tuple[int, Mapping[int, list[Entry]]]]] = {}
    for (name, _, seq), entry in sorted(awaited_calls.items(), key=lambda call: call[0][2]):
        if name in decided_groups:
            continue
        if name not in calls_of_members:
            members = state.groups[name].ranks
            calls_of_members[name] = [
                (rank, state.numbered(rank).get(entry.desc, {})) for rank in members
            ]
        numbered_calls = calls_of_members[name]
        if _is_plainly_alike([numbered.get(seq) for _, numbered in numbered_calls]):
            continue
        calls: Calls = {}
        for rank, numbered in numbered_calls:
            if seq in numbered:
                calls[rank] = numbered[seq]
        if not calls:
            continue
        mismatch = _compare(state, calls)
        if mismatch is not None:
            decided_groups.add(name)
            mismatches.append(mismatch)
    return sorted(mismatches, key=lambda mismatch: mismatch.entry.created_ns)


def _is_plainly_alike(calls_of_members: Sequence[list[Entry] | None]) -> bool:
    """Tell whether all members made one single call, each the same: the common case, at once.

    Calls that read the same may still not fit where each member has sizes of its own.

    Args:
        calls_of_members: The calls of one number of each member; None: it has none recorded.
    """
    calls_of_first = calls_of_members[0] if calls_of_members else None
    if calls_of_first is None:
        return False
    first = calls_of_first[0]
    if first.op not in SIZED:
        return False
    op, dtypes, numbers = first.op, first.dtypes, first.numbers
    for calls in calls_of_members:
        if calls is None or len(calls) > 1:
            return False
        entry = calls[0]
        if entry.op != op or entry.dtypes != dtypes or entry.numbers != numbers:
            return False
    return True


def _onward(state: JobState, rank: int, like: Entry) -> list[Signature]:
    """What it called from ``like`` on in its group of that description."""
    calls = (state.at(rank, like.desc, seq) for seq in itertools.count(like.seq))
    return [signature(state, made) for made in itertools.takewhile(bool, calls)]


def _before(state: JobState, rank: int, like: Entry) -> list[tuple[str, ...]]:
    """The operations of its last calls before ``like`` in its group of that description."""
    numbers = range(like.seq - _LAST, like.seq)
    return [tuple(e.op for e in state.at(rank, like.desc, n)) for n in numbers]


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


def _compare(state: JobState, calls: Calls) -> Mismatch | None:
    """Find how the members that made one call differ in it, and which of them is wrong."""
    signatures = {rank: signature(state, entries) for rank, entries in calls.items()}
    one, *others = dict.fromkeys(signatures.values())
    first = next(iter(calls.values()))[0]
    if not others and len(calls) == len(state.groups[first.group].ranks):
        return _totals(state, calls)
    right = _right_call(state, calls, signatures)

    # all members known agree, and nothing says that they err
    if not others and (right is None or right.signature == one):
        return None
    texts = {rank: _text(entries) for rank, entries in calls.items()}
    if right is None:
        return Mismatch(_kind(one, others[0]), first, (), tuple(calls), _differ(texts))

    odd = tuple(rank for rank, made in signatures.items() if made != right.signature)
    odd_text = _differ({odd[0]: texts[odd[0]]})
    text = f"{odd_text}, {right.makers} {_text(right.example)}"
    kind = _skipped_or_extra(state, calls[odd[0]][0], odd[0], right.signature, calls.keys())
    if not kind:
        kind = _kind(signatures[odd[0]], right.signature)

    # a sibling made it in a group of its own: the call is that of this group
    entry = right.example[0]._replace(group=first.group)
    return Mismatch(kind, entry, odd, tuple(calls), text, right.voted)


def _right_call(
    state: JobState, calls: Calls, signatures: dict[int, Signature]
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
    for rank, made in signatures.items():
        examples.setdefault(made, calls[rank])
    votes = Counter(signatures.values())
    unseen = len(state.groups[first.group].ranks) - len(calls)
    right = _majority(votes, unseen, examples)
    if right is not None:
        return right

    # the siblings vote, too: of the calls in question, or of all where the members agree
    candidates = set(votes) if len(votes) > 1 else None
    unlike = any(state.unlike_replicas(rank, first.desc) for rank in calls)
    if not unlike:
        for made, entries in _elsewhere(state, first, set(calls), candidates):
            votes[made] += 1
            examples.setdefault(made, entries)
    right = _majority(votes, unseen, examples)
    if right is not None or candidates is None or unlike:
        return right

    # what members call next
    numbered_alike: set[Signature] = set()
    for rank, made in signatures.items():
        if _is_numbered_as_siblings(state, rank, first, calls):
            numbered_alike.add(made)
    makers_count = sum(made in numbered_alike for made in signatures.values())
    if len(numbered_alike) == 1 and 2 * makers_count >= len(calls):
        made = numbered_alike.pop()
        makers = "the others, who make the next calls as siblings do,"
        return _RightCall(made, examples[made], makers, voted=False)

    # what the rest of the job calls
    replaced_rank = _replaced(state, calls)
    if replaced_rank is None:
        return None
    made = signatures[replaced_rank]
    return _RightCall(made, examples[made], "as nobody else, the other", voted=False)


def _majority(
    votes: Counter[Signature], unseen: int, examples: Mapping[Signature, list[Entry]]
) -> _RightCall | None:
    """Return the call of a strict majority, ``unseen`` ranks counted against it."""
    made, count = votes.most_common(1)[0]
    if 2 * count <= votes.total() + unseen:
        return None
    return _RightCall(made, examples[made], f"{count} others", voted=True)


def _is_numbered_as_siblings(state: JobState, rank: int, call: Entry, members: Calls) -> bool:
    """Whether a later call of ``rank`` in that group has the number that siblings give it, and is
    unlike its neighbours: so it left out none before it and made none too many.
    """
    siblings = [r for r in state.siblings_of(rank) if r not in members]
    mine = _onward(state, rank, call)
    for place in range(1, len(mine)):
        if mine[place] not in (*mine[place - 1 : place], *mine[place + 1 : place + 2]):
            calls = (state.at(r, call.desc, call.seq + place) for r in siblings)
            if {signature(state, one) for one in calls if one} == {mine[place]}:
                return True
    return False


def _replaced(state: JobState, calls: Calls) -> int | None:
    """Who of two makes the right call, where one of them replaced it by one that nobody else in
    the job makes.

    Where what follows fits with a shift by one, one of the two left out a call or made one more:
    both calls may be right, and whether others make the like says nothing.
    """
    if len(calls) != 2 or len(set(map(len, calls.values()))) > 1:
        return None
    (one, a), (other, b) = ((rank, entries[0]) for rank, entries in calls.items())
    mine, theirs = _onward(state, one, a), _onward(state, other, a)
    replaced = len(mine) > 1 < len(theirs) and _alike_from(mine[1:], theirs[1:])
    shifted = _alike_from(mine[1:], theirs) or _alike_from(theirs[1:], mine)
    if not replaced and (shifted or a.op != b.op) or shifted and a.op != b.op:
        return None
    odd = _unlike_the_job(state, (a, b), (sum(a.numbers, ()), sum(b.numbers, ())))
    return None if odd is None else (other, one)[odd]


def _skipped_or_extra(
    state: JobState, call: Entry, rank: int, usual: Signature, members: Collection[int]
) -> str:
    """Whether ``rank`` calls here what the others call next, or next what they call here; "" if
    neither is known.
    """
    mine = _onward(state, rank, call)
    alike = (_onward(state, r, call) for r in {*members, *state.siblings_of(rank)})
    theirs = max((calls for calls in alike if calls[:1] == [usual]), key=len, default=[])
    if _alike_from(mine[1:], theirs[1:]):
        return ""
    if _alike_from(mine, theirs[1:]):
        return "skipped call"
    return "extra call" if _alike_from(mine[1:], theirs) else ""


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
        candidates: Calls that are in question; None: all.

    Yields:
        The call of a sibling, and its records.
    """
    before_members = [_before(state, rank, like) for rank in sorted(members)]
    for role in {state.role.get(rank, 0) for rank in members}:
        for sibling in state.siblings[role]:
            if sibling in members:
                continue
            entries = state.at(sibling, like.desc, like.seq)
            made = signature(state, entries)
            if not entries or (candidates is not None and made not in candidates):
                continue
            before_sibling = _before(state, sibling, like)
            if any(_fit(before_sibling, before) for before in before_members):
                yield made, entries


def _unlike_the_job(
    state: JobState, pair: tuple[Entry, Entry], sizes: tuple[tuple[int, ...], tuple[int, ...]]
) -> int | None:
    """Which of two calls looks like nothing else in the job: 0, 1 or None.  First whole calls are
    compared, then their operations, the job's half precision, and numbers of elements: those that
    several other calls move.

    sizes : of either call
    """
    looks: tuple[Callable[[Entry], object], ...] = (
        lambda e: not e.pair and (e.desc, e.op, e.dtypes, e.numbers if e.op in SIZED else ()),
        lambda e: not e.pair and (e.desc, e.op, e.dtypes),
        lambda e: set(e.dtypes) <= _HALVES and e.dtypes[:1],
    )
    others = [e for dump in state.dumps.values() for e in dump.entries
              if e.op != "coalesced" and e is not pair[0] and e is not pair[1]]  # fmt: skip
    for look in looks:
        heard = set(map(look, others))
        known = [bool(look(e)) and look(e) in heard for e in pair]
        if all(map(look, pair)) and known[0] != known[1]:
            return known.index(False)
    moved = Counter(n for e in others for n in set(sum(e.numbers, ())) if n > 1)  # not scalars
    known = [max((moved[n] for n in set(mine)), default=0) > 1 for mine in sizes]
    if known[0] != known[1] and pair[0].dtypes == pair[1].dtypes:
        return known.index(False)
    return None


def _alike_from(one: list[Signature], other: list[Signature]) -> bool:
    """Whether what is known of both is the same; not where nothing is known of one."""
    return bool(one and other) and all(a == b for a, b in zip(one, other, strict=False))


def _fit(one: list[tuple[str, ...]], other: list[tuple[str, ...]]) -> bool:
    """Whether the same was called, as far as both are known."""
    return all(a == b for a, b in zip(one, other, strict=True) if a and b)


def _kind(a: Signature, b: Signature) -> str:
    if len(a) != len(b):
        return "coalescing"
    for x, y in zip(a, b, strict=True):
        for name, p, q in zip(("operation", "dtype", "shape"), x, y, strict=True):
            if p != q:
                return name
    return "shape"


def _text(entries: list[Entry]) -> str:
    e = entries[0]
    sizes = "+".join(map(str, e.numbers[0])) or "nothing"
    more = f" and {len(entries) - 1} more in one call" if len(entries) > 1 else ""
    return f"{e.op} {sizes} {e.dtypes[0] if e.dtypes else ''}".rstrip() + more


def _differ(texts: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} calls {text}" for rank, text in sorted(texts.items())[:4])


def _totals(state: JobState, calls: dict[int, list[Entry]]) -> Mismatch | None:
    """An all-to-all in which all together send more or less than all together receive."""
    entries = {rank: e[0] for rank, e in calls.items()}
    first = next(iter(entries.values()))
    if first.op != "all_to_all" or len(calls) < len(state.groups[first.group].ranks):
        return None
    sums = {r: (sum(e.numbers[0]), sum(e.numbers[1])) for r, e in entries.items()}
    if sum(a for a, _ in sums.values()) == sum(b for _, b in sums.values()):
        return None
    uneven = tuple(r for r, (a, b) in sums.items() if a != b)
    text = "; ".join(f"rank {r} sends {sums[r][0]}, expects {sums[r][1]}" for r in uneven[:4])
    alone = len(uneven) == 1 and len(sums) > 2
    return Mismatch("splits", first, uneven if alone else (), tuple(sums), text)


def _messages(state: JobState) -> Iterator[Mismatch]:
    """Sends and receives at the head of both sides that do not fit."""
    for rank in state.outstanding:
        send = next((e for e in state.outstanding[rank] if e.op == "send"), None)
        mate = state.mate(rank, send) if send else None
        if send is None or mate is None:
            continue
        a, b = (sum(send.numbers[0]), send.dtypes[:1]), (sum(mate.numbers[1]), mate.dtypes[:1])
        sizes, peer = (send.numbers[0], mate.numbers[1]), state.other(rank, send)
        if a == b:
            yield from _unbatched(state, (rank, send), (peer, mate))
            continue
        alone = _unlike_the_job(state, (send, mate), sizes)
        odd = () if alone is None else ((rank, peer)[alone],)
        text = f"rank {rank} sends {a[0]} {a[1]}, rank {peer} expects {b[0]} {b[1]}"
        kind = "dtype" if a[0] == b[0] else "shape"
        yield Mismatch(kind, send, odd, (rank, peer), text)


def _unbatched(
    state: JobState, one: tuple[int, Entry], other: tuple[int, Entry]
) -> Iterator[Mismatch]:
    """A message that one side posts in a batch and the other by itself: NCCL moves the first in the
    group's communicator and the second in one of the two ranks, so they never meet.
    """
    here = [(is_batched(state, *side), *side) for side in (one, other)]
    if {batched for batched, *_ in here} != {True, False}:
        return
    odd = []
    for batched, rank, entry in here:
        kind, seen = (entry.desc, entry.op, state.step(rank, entry)), Counter[bool | None]()
        for sibling in state.siblings_of(rank):
            alike = (e for e in state.dumps[sibling].entries if e.pair and sibling != rank
                     and (e.desc, e.op, state.step(sibling, e)) == kind)  # fmt: skip
            if (last := next(alike, None)) is not None:
                seen[is_batched(state, sibling, last)] += 1
        if seen[not batched] > seen[batched]:
            odd.append(rank)
    if len(odd) == 1:
        how = ("by itself", "in a batch")
        text = ", ".join(f"rank {r} posts its {e.op} {how[bool(b)]}" for b, r, e in here)
        yield Mismatch("coalescing", one[1], tuple(odd), (one[0], other[0]), text)


def is_batched(state: JobState, rank: int, entry: Entry) -> bool | None:
    """Whether the record that closes a batch follows; None where the records behind are not there,
    as in dumps without calls that ended.
    """
    entries = state.dumps[rank].entries
    at = entries.index(entry)
    for record, e in enumerate(entries[at:], entry.record):
        if e.record != record:
            return None
        if e.group != entry.group or e.pair and e.seq != entry.seq:
            return False
        if e.op == "coalesced":
            return True
    return False
