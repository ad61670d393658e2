"""Run programs, with faults, until nothing moves: the stalled job.

In : Programs, and faults.  Out: StalledJob: per rank what it issued and what of it ended.  The
issue graph without times, also of programs that do not fit together: a call ends when all members
are ready and their calls agree; one that disagrees never ends.  This is what a watchdog finds half
an hour later; ``features.hang.export`` writes it down as dumps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from megatron_prism.core.groups import Membership
from megatron_prism.core.ops import CODE, IS_CALL, IS_PAIR
from megatron_prism.core.program import Program, Programs, Splits
from megatron_prism.graph import loops
from megatron_prism.graph.issue_graph import JOIN, MEET, build_issue_graph
from megatron_prism.graph.matching import signature
from megatron_prism.graph.world_graph import WorldGraph, build


@dataclass(frozen=True)
class RankFault:
    """What happens to one rank; op indices of its program, None for never.

    host   : the host never issues this op (exception, GIL, SIGSTOP, data loader)
    device : the device never gets to this op (a kernel that does not end)
             of both: nothing of a batch is launched before all of it
    blind  : from this op on completions are not noticed (watchdog or CUDA error)
    silent : the rank leaves no dump
    """

    host: int | None = None
    device: int | None = None
    blind: int | None = None
    silent: bool = False


@dataclass
class StalledJob:
    """issued: rank -> ops its host issued; done, ready: rank -> for every op 1 if it ended, and of
    calls 1 if it started.  Ranks of a class share theirs.
    """

    programs: Programs
    groups: Mapping[str, Membership]
    faults: Mapping[int, RankFault]
    issued: list[int]
    done: list[bytes]
    ready: list[bytes]
    said: dict[object, Any] = field(default_factory=dict)  # what an export needs many times

    @property
    def finished(self) -> bool:
        """Whether everybody came to the end."""
        lengths = [len(self.programs.of(r)) for r in range(self.programs.world.size)]
        return self.issued == lengths and all(map(all, {id(d): d for d in self.done}.values()))


def run_until_stalled(
    programs: Programs, faults: Mapping[int, RankFault] | None = None
) -> StalledJob:
    """Run all ranks until nobody can go on.

    Nothing depends on times, so ranks of one class stop at one place: a class is run once.
    """
    faults = dict(faults or {})
    try:
        return _run(build(programs, [[rank] for rank in faults]), faults)
    except _UnlikeGroupsError:
        return _run(build(programs, [[rank] for rank in range(programs.world.size)]), faults)


class _UnlikeGroupsError(Exception):
    """Splits fit in one of two groups that hold the same classes in another order."""


def _run(graph: WorldGraph, faults: Mapping[int, RankFault]) -> StalledJob:
    """What ends is what the loops can order, once a node that never starts has one thing more to
    wait for.
    """
    dag, of = build_issue_graph(graph), graph.classes.of
    waiting, meets = np.diff(dag.start), dag.kind == MEET
    waiting[meets] += ~_calls_that_fit(graph)
    ends = [len(program) for program in graph.program_list]  # where hosts stop
    starts = [*ends]  # where devices do
    for rank, fault in faults.items():
        index = of[rank]
        ends[index] = _first_of_batch(graph.program_list[index], fault.host)
        starts[index] = min(ends[index], _first_of_batch(graph.program_list[index], fault.device))
        waiting[(dag.owner == index) & (dag.op >= starts[index])] += 1
    ended = np.zeros(len(dag) + 1, dtype=bool)  # the last one: of ops that have no node
    ended[loops.order(waiting, *dag.followers)] = True
    held = (dag.kind == JOIN) & ~ended[:-1]
    issued, done, ready = [], [], []
    for index, program in enumerate(graph.program_list):
        mine = dag.op[held & (dag.owner == index)]
        ops = program.ops[mine]
        holds = ~IS_CALL[ops["name"]]
        holds |= (ops["name"] == CODE["barrier"]) & (ops["handle"] < 0)
        issued.append(int(min(ends[index], mine[holds].min(initial=ends[index]) + 1)))
        flags = ended[dag.node_of[index][0]]
        without = dag.node_of[index][0] < 0
        flags[without] = np.flatnonzero(without) < issued[-1]
        flags[mine[holds]] = False
        done.append(flags.tobytes())
        ready.append(ended[dag.ready_of[index][0]].tobytes())
    at = of.tolist()
    return StalledJob(graph.programs, graph.groups, faults, [issued[c] for c in at],
                      [done[c] for c in at], [ready[c] for c in at])  # fmt: skip


def _first_of_batch(program: Program, op: int | None) -> int:
    """Where somebody stops who never gets to ``op``; behind all ops for None."""
    if op is None or op >= len(program):
        return len(program)
    batch = program.ops["batch"]
    return op if batch[op] < 0 else int(np.argmax(batch == batch[op]))


def _calls_that_fit(graph: WorldGraph) -> np.ndarray:
    """bool [matched calls]: those that all members make, and alike."""
    meet, programs = graph.matched_calls, graph.program_list
    fits = np.diff(meet.start) >= meet.sides
    first, split = np.full((len(meet), 6), -1, dtype=np.int64), np.zeros(len(meet), dtype=bool)
    for program, of in zip(programs, meet.of, strict=True):
        talks = np.flatnonzero(of >= 0)
        calls, signs = of[talks], _signature(program)[talks]
        new = first[calls, 0] < 0
        first[calls[new]] = signs[new]
        fits[calls[(first[calls] != signs).any(axis=1)]] = False
        split[calls[program.ops["splits"][talks] >= 0]] = True

    @cache
    def orders(name: str, index: int) -> set[tuple[int, ...]]:
        """How the classes of its groups follow each other."""
        groups = (graph.groups[name].group(int(rank)) for rank in graph.classes.ranks(index))
        return {tuple(graph.classes.of[group].tolist()) for group in groups}

    for number in np.flatnonzero(split & fits).tolist():
        rows = {c: (programs[c], int(programs[c].ops["splits"][op]))
                for c, op in meet.members(number)}  # fmt: skip
        if min(at for _, at in rows.values()) < 0:
            continue
        index, op = meet.members(number)[0]
        name = programs[index].strings[programs[index].ops["group"][op]]
        each = {_splits_fit(tuple(rows[c][0].splits[rows[c][1]] for c in order))
                for order in orders(name, index)}  # fmt: skip
        if len(each) > 1:
            raise _UnlikeGroupsError
        fits[number] = each.pop()
    return fits


def _signature(program: Program) -> np.ndarray:
    """What the other sides must call alike, int64 [ops, 6]."""
    if "signature" not in program.derived:
        signs, pair = signature(program, np.arange(len(program))), IS_PAIR[program.ops["name"]]
        signs[pair, 0] = 0  # a send and its receive agree in dtype and size
        signs[pair, 3:] = 0
        program.derived["signature"] = signs
    return np.asarray(program.derived["signature"])


@lru_cache(maxsize=256)
def _splits_fit(rows: tuple[Splits, ...]) -> bool:
    """Whether each member sends what the others expect; rows: (sent, wanted) of each, in order."""
    sent, wanted = ([row[side] for row in rows] for side in (0, 1))
    if any(len(row) != len(rows) for row in (*sent, *wanted)):
        return False
    return bool(np.array_equal(np.array(sent), np.array(wanted).T))
