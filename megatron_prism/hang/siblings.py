"""Compare ranks with their siblings, which run the same program: who left the order of its calls.

In : State.  Out: ranks that left out, added or exchanged calls, with what they did.  Of two calls
that both make, siblings make the same one first: where they do not, the fewest who explain it are
named.  A rank's own earlier iterations are siblings, too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from megatron_prism.hang.dumps import Entry
from megatron_prism.hang.mismatch import Mismatch
from megatron_prism.hang.state import JobState, Key, key_of

Way = tuple[tuple[str, int], ...]  # (operation, places further) of what is issued as one


class Conflict(NamedTuple):
    """The call about which two siblings are at odds, and that in words."""

    key: Key
    text: str


class _Issued(NamedTuple):
    """What a rank issued, comparable between siblings; equal for ranks that issued the same.

    order: its recorded calls -> their places;  ended: of the collectives among them that ended
    messages: (description, number) -> what was issued as one
    counts: description -> collectives;  waits: its outstanding collectives in the order of issue
    """

    order: Mapping[Key, int]
    ended: Mapping[Key, int]
    messages: Mapping[tuple[str, int], Way]
    counts: Mapping[str, int]
    waits: tuple[Key, ...]

    def same(self) -> object:
        """What is equal for ranks that issued the same."""
        return tuple(tuple(x.items() if isinstance(x, dict) else x) for x in self)


def _issued(state: JobState, rank: int) -> _Issued:
    order: dict[Key, int] = {}
    messages: dict[tuple[str, int], Way] = {}
    calls = state.issued(rank)
    for place, e in enumerate(calls):
        order.setdefault(key_of(e), place)
    ended = {key_of(e): at for at, e in enumerate(calls) if e.done and not e.pair}
    for e in state.messages(rank):
        way = (*messages.get((e.desc, e.seq), ()), (e.op, state.step(rank, e)))
        messages[e.desc, e.seq] = way
    pairs = {state.groups[name].desc for name in state.pairs & state.groups.keys()}
    counts = {desc: n for desc, n in state.counts(rank).items() if desc not in pairs}
    waits = tuple(key_of(e) for e in state.outstanding[rank] if not e.pair)
    return _Issued(order, ended, messages, counts, waits)


def fewest_at_odds(
    at_odds: dict[int, set[int]], sizes: Mapping[int, int]
) -> tuple[dict[int, int], bool]:
    """(the fewest without whom nobody is at odds -> with how many they are, whether there was one
    choice of them); ``sizes``: for how many ranks each stands."""
    fewest: dict[int, int] = {}
    while any(at_odds.values()):
        others = {r: sum(sizes[x] for x in s) for r, s in at_odds.items() if s}
        best = max(others[r] / sizes[r] for r in others)
        worst = [r for r in others if others[r] / sizes[r] == best]
        if any(at_odds[r] != at_odds[worst[0]] for r in worst):
            return fewest | {r: others[r] for r in others}, False
        for rank in worst:
            fewest[rank] = others[rank]
            for other in at_odds.pop(rank):
                at_odds[other].discard(rank)
    return fewest, True


def find_order_conflicts(
    state: JobState, queued: bool = False
) -> tuple[dict[int, int], Conflict | None]:
    """Fewest ranks whose removal leaves siblings that issued their calls in one order.

    queued : also by calls that only one of two issued yet, in front of one at which both stand
    (rank -> with how many siblings it is at odds, what about); empty if there are several choices,
    or it is more than a third of the siblings: then they have two programs, and neither is wrong.
    """
    found: dict[int, int] = {}
    about: Conflict | None = None
    for ranks in state.siblings.values():
        kinds: dict[object, list[int]] = defaultdict(list)
        issued = {rank: _issued(state, rank) for rank in ranks}
        for rank in ranks:
            kinds[issued[rank].same()].append(rank)
        alike = {group[0]: group for group in kinds.values()}
        at_odds = defaultdict[int, set[int]](set)
        for b, a in itertools.combinations(list(alike)[:64], 2):
            one, two = issued[a], issued[b]
            if _exchanged(one.ended, two.ended):
                continue  # all members agreed: siblings may differ, as with more modules
            what = _conflict(one, two)
            if what is None and queued:
                what = _early(one, two) or _early(two, one)
            if what:
                at_odds[a].add(b)
                at_odds[b].add(a)
                about = about or what
        heads, sure = fewest_at_odds(at_odds, {head: len(group) for head, group in alike.items()})
        alone = {rank: count for head, count in heads.items() for rank in alike[head]}
        found |= alone
        if not sure or 3 * len(alone) > len(ranks):
            return {}, about
    return found, about


def _exchanged(one: Mapping[Key, int], other: Mapping[Key, int]) -> tuple[Key, Key] | None:
    """Two calls that were made in two orders."""
    common = [key for key in one if key in other]
    pairs = zip(common, common[1:], strict=False)
    return next(((x, y) for x, y in pairs if other[x] > other[y]), None)


def _conflict(one: _Issued, other: _Issued) -> Conflict | None:
    """Two calls which siblings made in different orders, or a message that only one of them has."""
    for (desc, seq), mine in one.messages.items():
        theirs = other.messages.get((desc, seq), mine)
        if sorted(mine) != sorted(theirs):
            text = f"{desc} message #{seq}: {way_text(mine)} or {way_text(theirs)}"
            return Conflict((desc, True, seq), text)
    if pair := _exchanged(one.order, other.order):
        x, y = pair
        return Conflict(x, f"{x[0]} #{x[2]} and {y[0]} #{y[2]}")
    ahead, behind = _more(one.counts, other.counts), _more(other.counts, one.counts)
    if not (ahead and behind):
        return None
    missing = [(desc, False, one.counts[desc] + 1) for desc in one.counts if desc in behind]
    first = min(missing, key=lambda key: other.order.get(key, len(other.order)))
    return Conflict(first, f"{next(iter(ahead))} and {first[0]}")


def _early(one: _Issued, other: _Issued) -> Conflict | None:
    """An outstanding call that ``one`` issued before another, at which the other rank stands and
    has not come to the first: as where one leaves out a layer and waits in the next."""
    ahead = [key for key in one.waits if key[2] > other.counts.get(key[0], key[2])]
    for call in other.waits if ahead else ():
        if call in one.waits and one.waits.index(ahead[0]) < one.waits.index(call):
            return Conflict(call, f"{ahead[0][0]} and {call[0]}")
    return None


def call_of(state: JobState, about: Conflict, rank: int) -> Entry | None:
    """The call as ``rank`` made it, or as a sibling did, or the oldest wait in its group."""
    for other in (rank, *state.siblings_of(rank)):
        for e in state.issued(other):
            if key_of(e) == about.key:
                return e
    alike = (e for calls in state.outstanding.values() for e in calls if e.desc == about.key[0])
    return min(alike, key=lambda e: (e.created_ns, e.seq), default=None)


def _more(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """By how many calls ``one`` is further on, where it is, of what both count."""
    return {k: n - other[k] for k, n in one.items() if n > other.get(k, n)}


# -- who stopped before its siblings --------------------------------------------------------------
def is_behind_replicas(state: JobState, rank: int) -> bool:
    """Whether siblings, with all that ``rank`` waits for outstanding too, issued more: of what
    others wait for, since replicas with fewer microbatches made fewer calls and stand still too."""
    late = {state.groups[name].desc for name, other in state.lates if other == rank}
    mine, counts = state.opened(rank), state.counts(rank)
    passed = level = 0
    for other in state.siblings_of(rank):
        theirs = state.counts(other)
        ahead, behind = _more(theirs, counts), _more(counts, theirs)
        level += not ahead and not behind
        if mine <= state.opened(other) and not behind and _issued_after_common(state, rank, other):
            passed += not late.isdisjoint(ahead)
    return passed >= max(1, level) and not any(state.unlike_replicas(rank, d) for d in late)


def _issued_after_common(state: JobState, rank: int, other: int) -> bool:
    """Whether what only ``other`` issued comes behind all that both have outstanding: if not, they
    made their calls in two orders, and either may err."""
    mine, counts, news = state.opened(rank), state.counts(rank), False
    for e in state.outstanding[other]:
        if key_of(e) not in mine:
            news |= not e.pair and e.seq > counts.get(e.desc, e.seq)
        elif news:
            return False
    return True


def ranks_ahead(state: JobState, idle: Collection[int]) -> set[int]:
    """Those of ``idle`` who stand together further on than a sibling among them."""
    found = set[int]()
    for rank in idle:
        mine = state.counts(rank)
        places = [state.counts(r) for r in state.siblings_of(rank) if r in idle]
        behind = any(_more(mine, o) and not _more(o, mine) for o in places)
        found |= {rank} if behind and places.count(mine) > 1 else set()
    return found


def uncreated_group(state: JobState, rank: int) -> str:
    """The description of a group in whose communicator's creation ``rank`` may wait for another
    member; "" without one.

    Its first call creates it, without a record: siblings made that call, and are ahead in nothing
    that ``rank`` has called before.
    """
    mine = state.all_counts(rank)
    for other in state.siblings_of(rank):
        ahead = _more(state.all_counts(other), mine)
        known = state.dumps[rank].version != "log" and all(mine[desc] < 1 for desc in ahead)
        for name in state.groups_of[rank] if known else ():
            others = state.dumps.keys() & set(state.groups[name].ranks) - {rank}
            if state.groups[name].desc in ahead and any(
                state.enqueued.get((name, r), -1) < 1 for r in others
            ):  # fmt: skip
                return state.groups[name].desc
    return ""


def is_between_iterations(state: JobState, rank: int) -> bool:
    """Whether siblings made one iteration's calls more than ``rank``, which made whole iterations:
    so do checkpoints, evaluations and data hold a host, for which others may be to blame.

    An iteration makes as many calls in a group as a sibling that waits at its end is ahead.  Of
    data parallelism some are made in the next forward (--overlap-param-gather).
    """
    mine = state.all_counts(rank)
    for other in state.siblings_of(rank):
        more = _more(state.all_counts(other), mine)
        early = {key: n if key.startswith("DATA_PARALLEL") else 0 for key, n in more.items()}
        for keys in (more, [key for key in more if not early[key]]) if len(more) > 1 else ():
            most = max(keys, key=lambda key: more[key], default="")
            turns, rest = divmod(mine[most], more[most]) if most else (0, 0)
            lacks = early if keys is not more else dict.fromkeys(more, 0)
            if (
                turns > 1
                and not rest
                and all(mine[key] >= turns and -mine[key] % turns <= lacks[key] for key in more)
            ):
                return True
    return False


# -- who left out a message -----------------------------------------------------------------------
def skipped_messages(state: JobState) -> Iterator[tuple[int, Entry]]:
    """Ranks that did not post a message which their siblings posted before a call that they made,
    too -> the call that waits for it.  Without history their counters tell."""
    for rank in sorted(state.outstanding):
        head, (why, others) = state.head(rank), state.waits(rank)
        if head is not None and head.pair and why == "has not posted its side":
            skips = _passed if state.history else _fewer_messages
            here = (peer for peer in others if state.outstanding.get(peer)
                    and not state.unlike_replicas(peer, head.desc))  # fmt: skip
            yield from ((peer, head) for peer in here if skips(state, peer, head.desc))


def _passed(state: JobState, rank: int, desc: str) -> bool:
    number = max((e.seq for e in state.issued(rank) if e.pair and e.desc == desc), default=0) + 1
    votes = state.went_on_without(rank, (desc, True, number))
    return votes[True] > 0 == votes[False]


def _fewer_messages(state: JobState, rank: int, desc: str) -> bool:
    """Whether by their counters siblings that made no more collectives than ``rank`` posted more
    messages of that group, and more of them than made no more messages and as many collectives."""
    (mine, _), calls = state.messages_counted(rank, desc), state.counts(rank)
    more = fewer = 0
    for other in state.siblings_of(rank):
        (theirs, _), made = state.messages_counted(other, desc), state.counts(other)
        more += theirs > mine >= 0 and not _more(made, calls)
        fewer += other != rank and theirs <= mine and not _more(calls, made)
    return more > fewer


# -- a rank and its own earlier iterations --------------------------------------------------------
_STEP = ("INTRA_", "EMBEDDING", "MODEL_PARALLEL", "DATA_PARALLEL")  # called by every optimizer step


def find_broken_rhythms(state: JobState) -> list[Mismatch]:
    """Ranks whose last messages are not those of their own earlier iterations, where no sibling and
    no other rank of that group lost its rhythm: evaluations and ramps of the batch change it for
    all."""
    broken: dict[str, list[Mismatch]] = defaultdict(list)
    known = {rank: batches_of(state, rank) for rank in state.outstanding}
    for rank, groups in known.items():
        counts = [n for desc, n in state.all_counts(rank).items() if desc.startswith(_STEP)]
        for name, batches in groups.items():
            ways = [way for way, _ in batches.values()]
            found = _first_change(ways, min(counts, default=0))
            if name not in state.groups or found is None:
                continue
            turn, place = found
            usual, (mine, entry) = ways[place - turn], list(batches.values())[place]
            siblings = [known[s] for s in state.siblings_of(rank) if s != rank]
            rows = [b for groups in siblings for b in groups.values() if entry.seq in b]
            if siblings and not rows or any(row[entry.seq][0] == mine for row in rows):
                continue  # an evaluation, to which no sibling has come yet, changes it for all
            kind = kind_of_change(mine, usual)
            text = (f"rank {rank} posts {way_text(mine)} where its earlier iterations have "
                    + way_text(usual))  # fmt: skip
            broken[name].append(Mismatch(kind, entry, (rank,), (rank,), text, voted=False))
    return [rows[0] for rows in broken.values() if len(rows) == 1]


def kind_of_change(mine: Way, usual: Way) -> str:
    """What is wrong with a batch that is not the usual one."""
    if set(mine) < set(usual):
        return "skipped call"
    return "extra call" if set(mine) > set(usual) else "order"


def batches_of(state: JobState, rank: int) -> dict[str, dict[int, tuple[Way, Entry]]]:
    """Group -> number -> (what is issued as one, its first message)."""
    found: dict[str, dict[int, tuple[Way, Entry]]] = defaultdict(dict)
    for e in state.messages(rank):
        way, first = found[e.group].get(e.seq, ((), e))
        found[e.group][e.seq] = tuple(sorted((*way, (e.op, state.step(rank, e))))), first
    return found


def _first_change(ways: list[Way], steps: int) -> tuple[int, int] | None:
    """(how many batches an iteration has, the batch in the last of them that is not that of the
    iteration before), where two iterations are known and alike, and no more than ``steps``."""
    for turn in range(2, len(ways) // 2 + 1):
        if len({*ways[:turn]}) > 1 and ways[:turn] == ways[turn : 2 * turn]:
            other = (i for i in range(2 * turn, len(ways)) if ways[i] != ways[i - turn])
            place = next(other, None)
            if place is not None and place >= len(ways) - turn and place // turn <= steps:
                return turn, place
    return None


def way_text(messages: Way) -> str:
    """``send to the rank 1 further`` of what was issued as one."""
    return " and ".join(f"{op} {'to' if op == 'send' else 'from'} {step} ranks further"
                        for op, step in messages)  # fmt: skip
