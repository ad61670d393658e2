"""Who waits for whom, as a graph: its smallest circle, and where all waits end.

In : State.  Out: ranks.  Nothing here says who errs; ``hang`` does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

from megatron_prism.hang.dumps import Entry
from megatron_prism.hang.outstanding import State

__all__ = ["circle", "ends"]

_EDGES = 1_000_000  # waits that are looked at for the smallest circle


def circle(state: State) -> list[int]:
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


def ends(state: State, ranks: Iterable[int]) -> list[int]:
    """Those of ``ranks`` at whom waits end: everybody for whom they wait waits for them.

    Ranks that wait for each other only and make the calls of their programs do not stand still: so
    where no device does, each such circle holds somebody who errs, and who is in none is a victim.
    """
    calls: dict[tuple[str, bool, int], set[int]] = {}
    ahead = {r: _needs(state, r, calls) for r in state.outstanding}
    back: dict[int, set[int]] = defaultdict(set)
    for rank, others in ahead.items():
        for other in others:
            back[other].add(rank)
    circle, found = set[int](), []
    for rank in ranks:
        reached = circle if rank in circle else _reached(rank, ahead)
        unknown = any(not state.outstanding.get(r) for r in reached)  # may wait for anybody
        if unknown or reached <= circle or reached <= _reached(rank, back):
            circle |= reached if not unknown else set()
            found.append(rank)
    return found


def _needs(state: State, rank: int, known: dict[tuple[str, bool, int], set[int]]) -> set[int]:
    """For whom any outstanding call of ``rank`` waits: its host may stand at another than the
    oldest."""
    found = set[int]()
    for e in state.outstanding[rank]:
        if e.pair:
            other, mate = state.other(rank, e), state.mate(rank, e)
            found |= {other} if mate is None else _behind(state, [other], mate)
            continue
        if e.launch not in known:
            members = state.groups[e.group].ranks
            absent = {r for r in members if r not in state.dumps or not state.arrived(r, e)}
            known[e.launch] = absent or _behind(state, members, e)
        found |= known[e.launch]
    return found - {rank}


def _behind(state: State, ranks: Iterable[int], entry: Entry) -> set[int]:
    """Who has a call queued before this one."""
    return {r for r in ranks if (head := state.head(r)) and head.launch != entry.launch}


def _reached(start: int, edges: Mapping[int, Collection[int]]) -> set[int]:
    found, queue = {start}, [start]
    while queue:
        more = set(edges.get(queue.pop(), ())) - found
        found |= more
        queue += more
    return found
