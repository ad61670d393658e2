"""Would these programs hang?  What in a world graph does not fit, or who waits in a ring.

In : a WorldGraph.  Out: Diagnosis.  The calls are compared first (``matching``); if they all fit,
nodes of the dependency graph that can never run are deadlock by quiescence, and the smallest ring
among them is shown.  Culprits are the ranks that a majority contradicts; where there is none,
nobody is named.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from megatron_prism.core.ops import IS_COLLECTIVE
from megatron_prism.core.selectors import format_ranks
from megatron_prism.graph.matching import Finding
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.hang.verdict import Blamed, Diagnosis, Waiting
from megatron_prism.replay import dag

__all__ = ["of_graph"]

_SAID = ("name", "dtype", "reduce", "peer", "root", "num_in", "num_out", "batch")
_MOST = 2048  # nodes from which a shortest ring is looked for


def of_graph(graph: WorldGraph) -> Diagnosis:
    """Healthy, mismatch or deadlock."""
    findings = graph.check()
    if findings:
        return _mismatch(graph, findings)
    made = dag.build(graph)
    stuck = np.ones(len(made), dtype=bool)
    stuck[made.order] = False
    if not stuck.any():
        return Diagnosis("healthy")
    return _deadlock(graph, made, stuck)


class _Jury:
    """Who of some ranks is the odd one?  Siblings (ranks of the same stage) that call otherwise
    decide first, then the other members of the group; without a majority nobody is odd."""

    def __init__(self, graph: WorldGraph) -> None:
        self.graph = graph
        world = graph.programs.world
        self.stage = np.asarray(world._along("pp", np.arange(world.size)))
        self._said: dict[tuple[int, str, bool], bytes] = {}

    def says(self, rank: int, group: str, together: bool = False) -> bytes:
        """What ``rank`` calls in its group (of any description: ""), as one value; ``together``:
        only what all members call."""
        classes = self.graph.classes
        key = (classes.programs[classes.of[rank]], group, together)
        if key not in self._said:
            program = self.graph.programs.programs[key[0]]
            indices = np.sort(np.concatenate(list(program.groups().values()) or [np.empty(0, int)]))
            if group:
                indices = program.groups().get(group, indices[:0])
            if together:
                indices = indices[IS_COLLECTIVE[program.ops["name"][indices]]]
            ops = program.ops[indices]
            splits = [program.splits[i] if i >= 0 else None for i in ops["splits"].tolist()]
            names = [program.strings[i] for i in ops["group"].tolist()]
            said = [tuple(row) for row in ops[list(_SAID)].tolist()]
            self._said[key] = repr((said, splits, names)).encode()
        return self._said[key]

    def odd(self, ranks: set[int], group: str) -> list[int]:
        """Those of ``ranks`` whom a majority contradicts."""
        found = [r for r in sorted(ranks) if self._outvoted(r, self._siblings(r), group)]
        if found and (len(found) < len(ranks) or len(ranks) == 1):
            return found
        # a tie among siblings, but what they say fits what all the others here say: it would heal
        found = [r for r in sorted(ranks) if self._outvoted(r, self._siblings(r), group, tie=True)]
        if found and len(found) < len(ranks):
            return found
        members = self.graph.groups[group].group(min(ranks)).tolist() if group else []
        return [r for r in members if self._outvoted(r, members, group, together=True)]

    def _siblings(self, rank: int) -> list[int]:
        classes = self.graph.classes
        same = self.stage == self.stage[rank]
        kinds, first, counts = np.unique(classes.of[same], return_index=True, return_counts=True)
        ranks = np.flatnonzero(same)[first]
        return np.repeat(ranks, counts).tolist() if len(kinds) > 1 else []

    def _outvoted(
        self, rank: int, others: list[int], group: str, tie: bool = False, together: bool = False
    ) -> bool:
        votes = Counter(self.says(r, group, together) for r in others)
        mine = votes.pop(self.says(rank, group, together), 0)
        most = max(votes.values(), default=0)
        return most >= max(1, mine) if tie else 2 * most > len(others)


def _mismatch(graph: WorldGraph, findings: list[Finding]) -> Diagnosis:
    jury = _Jury(graph)
    odd: Counter[int] = Counter()
    for finding in findings:
        odd.update(jury.odd(set(finding.ranks), finding.group))
    ranks: list[int] = []
    if odd:
        rank, _ = odd.most_common(1)[0]
        alike = graph.classes.ranks(int(graph.classes.of[rank])).tolist()
        ranks = sorted({*alike, *(r for r, n in odd.items() if n == odd[rank])})
    first = next((f for f in findings if odd.keys() & set(f.ranks)), findings[0])
    members = graph.groups[first.group].group(first.ranks[0]).tolist()
    line = next((x for x in first.picture.splitlines() if "<-- here" in x), first.picture)
    op = line.partition(f"#{first.number} ")[2].split()
    name = op[1] if len(op) > 1 else ""
    victims = [Waiting(r, tuple(ranks), name, first.group, first.number)
               for r in members if r not in ranks]  # fmt: skip
    evidence = [f"{f.kind} in {f.group}, call #{f.number}: {f.likely}" for f in findings]
    if not ranks:
        evidence.append("no majority, among the members or the ranks of their stages, says which "
                        f"of ranks {format_ranks(first.ranks)} is wrong")  # fmt: skip
    return Diagnosis(
        "mismatch",
        tuple(Blamed(r, first.kind, first.likely) for r in ranks),
        tuple(victims),
        first.group,
        name,
        first.number,
        "certain" if ranks else "possible",
        evidence=tuple(evidence),
        chain=tuple(first.picture.splitlines()),
    )


def _deadlock(graph: WorldGraph, made: dag.Dag, stuck: np.ndarray) -> Diagnosis:
    ring = _ring(made, stuck)
    meets = [int(made.op[n]) for n in ring if made.kind[n] == dag.MEET]
    rows = []
    for number in dict.fromkeys(meets):
        here = graph.rendezvous.meeting(number)
        ranks = sorted(graph.classes.representatives[c] for c, _ in here)
        op = graph.program_list[here[0][0]][here[0][1]]
        place = int(graph.program_list[here[0][0]].sequence[here[0][1]])
        rows.append((set(ranks), op, place))
    involved = set().union(*(ranks for ranks, _, _ in rows)) if rows else {0}
    culprits = _Jury(graph).odd(involved, "") if len(involved) > 1 else []
    chain = [f"{op.name} #{place} of {op.group} on ranks {format_ranks(sorted(ranks))} waits for "
             f"the next" for ranks, op, place in rows]  # fmt: skip
    first, place = (rows[0][1], rows[0][2]) if rows else (None, -1)
    why = "its calls, made otherwise by the ranks of its stage, close the ring"
    victims = tuple(
        Waiting(r, tuple(sorted(ranks - {r})), call.name, call.group, at)
        for r, (ranks, call, at) in {r: row for row in rows for r in row[0]}.items()
        if r not in culprits
    )
    return Diagnosis(
        "deadlock",
        tuple(Blamed(r, "order", why) for r in culprits),
        victims,
        first.group if first else "",
        first.name if first else "",
        place,
        "certain",
        (f"{int(stuck.sum()):,} of {len(made):,} nodes can never run: nothing is runnable and "
         "something is outstanding",),
        tuple(chain),
    )  # fmt: skip


def _ring(made: dag.Dag, stuck: np.ndarray) -> list[int]:
    """A smallest ring of nodes that wait for each other, each for the next."""
    best: list[int] = []
    for start in np.flatnonzero(stuck & (made.kind == dag.MEET))[:_MOST].tolist():
        back: dict[int, int] = {start: -1}
        queue, end = deque([start]), -1
        while queue and end < 0:
            node = queue.popleft()
            for other in made.predecessors(node).tolist():
                if other == start:
                    end = node
                    break
                if stuck[other] and other not in back:
                    back[other] = node
                    queue.append(other)
        path = []
        while end >= 0:
            path.append(end)
            end = back[end]
        if path and (not best or len(path) < len(best)):
            best = path[::-1]
    return best
