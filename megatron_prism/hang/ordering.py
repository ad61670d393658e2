"""Find ranks that issued calls in another order than equivalent ranks: the fewest that explain it.

In : State.  Out: the ranks at odds with the others of their place in the pipeline, and what about.
Ranks at one place run the same program, so of two calls that both make, each makes the same first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_prism.hang.dumps import Entry
from megatron_prism.hang.state import JobState

__all__ = ["find_order_conflicts"]

_Key = tuple[str, int]  # description, sequence


@dataclass(frozen=True)
class Conflict:
    """Two siblings made this call otherwise, or in another order than ``text`` names."""

    desc: str
    pair: bool
    seq: int
    text: str

    def entry(self, state: JobState, rank: int) -> Entry | None:
        """The call as ``rank`` made it, or as a sibling did, or the oldest wait in its group."""
        key = (self.desc, self.pair, self.seq)
        for other in (rank, *state.siblings[state.role.get(rank, 0)]):
            for e in state.dumps[other].entries:
                if (e.desc, e.pair, e.seq) == key and e.op != "coalesced":
                    return e
        calls = (e for calls in state.outstanding.values() for e in calls)
        alike = (e for e in calls if e.desc == self.desc)
        return min(alike, key=lambda e: (e.created_ns, e.seq), default=None)


def find_order_conflicts(
    state: JobState, queued: bool = False
) -> tuple[dict[int, int], Conflict | None, bool]:
    """Fewest ranks whose removal leaves siblings that issued their calls in one order.

    queued : also by calls that only one of two issued yet, in front of one at which both stand, and
    among ranks that rightly differ, as a last resort
    (rank -> with how many siblings it is at odds, what about, whether these may be right); empty if
    there are several choices, or it is more than a third of the siblings: then they have two
    programs, and neither is odd.
    """
    agreed = _Agreed(state)
    odd, about = _odd(state, queued, agreed)
    if about is not None or not (queued and agreed.differ):
        return odd, about, False
    return *_odd(state, queued, None), True


def _odd(
    state: JobState, queued: bool, agreed: _Agreed | None
) -> tuple[dict[int, int], Conflict | None]:
    """The same; ``agreed`` says which siblings are not compared."""
    odd: dict[int, int] = {}
    about: Conflict | None = None
    for ranks in state.siblings.values():
        kinds: dict[_Issued, list[int]] = defaultdict(list)
        issued = {rank: _issued(state, rank) for rank in ranks}
        for rank in ranks:
            kinds[issued[rank]].append(rank)
        heads = [group[0] for group in kinds.values()]
        weight = {group[0]: len(group) for group in kinds.values()}
        at_odds: dict[int, set[int]] = defaultdict(set)
        for i, a in enumerate(heads[:64]):
            for b in heads[:i]:
                if agreed is not None and agreed.otherwise(a, b):
                    continue
                what = _conflict(issued[a], issued[b])
                if what is None and queued:
                    what = _early(issued[a], issued[b]) or _early(issued[b], issued[a])
                if what:
                    at_odds[a].add(b)
                    at_odds[b].add(a)
                    about = about or what
        alone: dict[int, int] = {}
        while any(at_odds.values()):
            score = {r: sum(weight[x] for x in s) / weight[r] for r, s in at_odds.items() if s}
            best = max(score.values())
            worst = [r for r, s in score.items() if s == best]
            if len(worst) > 1:
                return {}, about
            group = next(g for g in kinds.values() if g[0] == worst[0])
            alone |= dict.fromkeys(group, int(best * len(group)))
            for other in at_odds.pop(worst[0]):
                at_odds[other].discard(worst[0])
        odd |= alone
        if 3 * len(alone) > len(ranks):
            return {}, about
    return odd, about


class _Agreed:
    """Whether siblings rightly differ, as with more microbatches, other modules, or reports that
    the first ranks make: by calls that ended, in which all members agreed."""

    def __init__(self, state: JobState) -> None:
        self.state, self.differ = state, False
        self._ended: dict[str, dict[int, str]] = {}
        self._order: dict[int, dict[_Key, int]] = {}

    def otherwise(self, one: int, other: int) -> bool:
        """Whether calls ended of which these made other ones, or the same in two orders."""
        found = self._others(one, other) or self._turned(self.order(one), self.order(other))
        self.differ |= found
        return found

    def _others(self, one: int, other: int) -> bool:
        groups, of = self.state.groups, self.state.groups_of
        theirs = {groups[name].desc: name for name in of[other]}
        for name in of[one]:
            like = theirs.get(groups[name].desc, name)
            if like != name:
                a, b = self.ended(name), self.ended(like)
                if any(a[seq] != b[seq] for seq in a.keys() & b.keys()):
                    return True
        return False

    @staticmethod
    def _turned(one: dict[_Key, int], other: dict[_Key, int]) -> bool:
        common = [key for key in one if key in other]
        return any(other[x] > other[y] for x, y in zip(common, common[1:], strict=False))

    def ended(self, name: str) -> dict[int, str]:
        """Number -> operation, by the first member that left a dump."""
        if name not in self._ended:
            ranks = [r for r in self.state.groups[name].ranks if r in self.state.dumps][:1]
            self._ended[name] = {e.seq: e.op for r in ranks for e in self.state.dumps[r].entries
                                 if e.group == name and e.done and not e.pair}  # fmt: skip
        return self._ended[name]

    def order(self, rank: int) -> dict[_Key, int]:
        """Its collectives that ended -> their places."""
        if rank not in self._order:
            self._order[rank] = {
                (e.desc, e.seq): place
                for place, e in enumerate(self.state.dumps[rank].entries)
                if e.done and not e.pair and e.op != "coalesced"
            }
        return self._order[rank]


@dataclass(frozen=True)
class _Issued:
    """What a rank issued: order of (description, kind, sequence), its messages, its counters;
    ``waits`` are its outstanding collectives (description, sequence) in the order of issue."""

    order: tuple[tuple[tuple[str, str, int], int], ...]
    messages: tuple[tuple[tuple[str, int], tuple[tuple[str, int], ...]], ...]
    counts: tuple[tuple[str, int], ...]
    waits: tuple[tuple[str, int], ...]


def _issued(state: JobState, rank: int) -> _Issued:
    order: dict[tuple[str, str, int], int] = {}
    messages: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}
    for place, e in enumerate(e for e in state.dumps[rank].entries if e.op != "coalesced"):
        order.setdefault((e.desc, "p2p" if e.pair else "all", e.seq), place)
        if e.pair:
            one = (e.op, state.step(rank, e))
            messages[e.desc, e.seq] = (*messages.get((e.desc, e.seq), ()), one)
    counts = {
        state.groups[name].desc: state.enqueued[name, rank]
        for name in state.groups_of[rank]
        if (name, rank) in state.enqueued and name not in state.pairs
    }
    if state.in_batch(rank):
        last = state.dumps[rank].entries[-1]
        messages.pop((last.desc, last.seq), None)  # which is not whole
    waits = tuple((e.desc, e.seq) for e in state.outstanding[rank] if not e.pair)
    return _Issued(
        tuple(order.items()), tuple(messages.items()), tuple(sorted(counts.items())), waits
    )


def _conflict(one: _Issued, other: _Issued) -> Conflict | None:
    """Two calls which siblings made in different orders, or a message that only one of them has."""
    messages = dict(other.messages)
    for (desc, seq), mine in one.messages:
        theirs = messages.get((desc, seq), mine)
        if sorted(mine) != sorted(theirs):
            text = f"{desc} message #{seq}: {_way(mine)} or {_way(theirs)}"
            return Conflict(desc, True, seq, text)
    order = dict(other.order)
    common = [key for key, _ in one.order if key in order]
    for x, y in zip(common, common[1:], strict=False):
        if order[x] > order[y]:
            return Conflict(x[0], x[1] == "p2p", x[2], f"{x[0]} #{x[2]} and {y[0]} #{y[2]}")
    counts = dict(other.counts)
    ahead = [desc for desc, n in one.counts if n > counts.get(desc, n)]
    behind = [desc for desc, n in one.counts if n < counts.get(desc, n)]
    if not (ahead and behind):
        return None
    missing = {desc: n + 1 for desc, n in one.counts if desc in behind}  # what the other has made
    late = len(order)
    desc = min(behind, key=lambda desc: order.get((desc, "all", missing[desc]), late))
    return Conflict(desc, False, missing[desc], f"{ahead[0]} and {desc}")


def _early(one: _Issued, other: _Issued) -> Conflict | None:
    """An outstanding call that ``one`` issued before another, at which the other rank stands and
    has not come to the first: as where one leaves out a layer and waits in the next."""
    counts = dict(other.counts)
    ahead = [(desc, seq) for desc, seq in one.waits if seq > counts.get(desc, seq)]
    for call in other.waits if ahead else ():
        if call in one.waits and one.waits.index(ahead[0]) < one.waits.index(call):
            return Conflict(call[0], False, call[1], f"{ahead[0][0]} and {call[0]}")
    return None


def _way(messages: tuple[tuple[str, int], ...]) -> str:
    """``send to the rank 1 further`` of what was issued as one."""
    return " and ".join(f"{op} {'to' if op == 'send' else 'from'} {step} ranks further"
                        for op, step in messages)  # fmt: skip
