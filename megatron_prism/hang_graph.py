"""Would these programs hang?  What in a world graph does not fit, or who waits in a ring.

In : a WorldGraph.  Out: Diagnosis.  The calls are compared first (``matching``); if they all fit,
nodes of the dependency graph that can never run are deadlock by quiescence, and the smallest ring
among them is shown.  Culprits are the ranks of the rarer program; where no program is rarer, nobody
is named.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from megatron_prism.diagnosis import Blamed, Diagnosis, Waiting
from megatron_prism.graph import WorldGraph
from megatron_prism.matching import Finding
from megatron_prism.replay import dag
from megatron_prism.selectors import format_ranks

__all__ = ["of_graph"]

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


def _spread(graph: WorldGraph) -> Counter[int]:
    """Program -> how many ranks run it."""
    found: Counter[int] = Counter()
    for program, count in zip(graph.classes.programs, graph.classes.counts, strict=True):
        found[program] += count
    return found


def _rarer(graph: WorldGraph, ranks: set[int]) -> list[int]:
    """Those of ``ranks`` whose program fewest ranks of the world run; none if all are alike."""
    spread, of = _spread(graph), graph.classes
    counts = {rank: spread[of.programs[of.of[rank]]] for rank in ranks}
    least = min(counts.values())
    return (
        sorted(r for r, n in counts.items() if n == least) if len(set(counts.values())) > 1 else []
    )


def _mismatch(graph: WorldGraph, findings: list[Finding]) -> Diagnosis:
    odd: Counter[int] = Counter()
    for finding in findings:
        odd.update(_rarer(graph, set(finding.ranks)) or [finding.ranks[1]])
    rank, _ = odd.most_common(1)[0]
    first = next(f for f in findings if rank in f.ranks)
    ranks = graph.classes.ranks(int(graph.classes.of[rank])).tolist()
    sure = any(rank in _rarer(graph, set(f.ranks)) for f in findings)
    members = graph.groups[first.group].group(rank).tolist()
    op = first.picture.partition(f"#{first.number} ")[2].split()
    name = op[1] if len(op) > 1 else ""
    victims = [Waiting(r, tuple(ranks), name, first.group, first.number)
               for r in members if r not in ranks]  # fmt: skip
    return Diagnosis(
        "mismatch",
        tuple(Blamed(r, first.kind, first.likely) for r in ranks),
        tuple(victims),
        first.group,
        name,
        first.number,
        "certain" if sure else "possible",
        evidence=tuple(f"{f.kind} in {f.group}, call #{f.number}: {f.likely}" for f in findings),
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
    culprits = _rarer(graph, involved) if len(involved) > 1 else []
    chain = [f"{op.name} #{place} of {op.group} on ranks {format_ranks(sorted(ranks))} waits for "
             f"the next" for ranks, op, place in rows]  # fmt: skip
    _, op, place = rows[0] if rows else (set(), None, -1)
    why = "its program, which few ranks run, closes the ring"
    victims = tuple(
        Waiting(r, tuple(sorted(ranks - {r})), call.name, call.group, at)
        for r, (ranks, call, at) in {r: row for row in rows for r in row[0]}.items()
        if r not in culprits
    )
    return Diagnosis(
        "deadlock",
        tuple(Blamed(r, "order", why) for r in culprits),
        victims,
        op.group if op else "",
        op.name if op else "",
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
