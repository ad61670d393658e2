"""Run programs, with faults, until nothing moves: the stalled job.

In : Programs, and faults.  Out: StalledJob: per rank what it issued and what of it ended.  The
issue graph without times, also of programs that do not fit together: a call ends when all members
are ready and their calls agree; one that disagrees never ends.  This is what a watchdog finds half
an hour later; ``features.hang.export`` writes it down as dumps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_prism.core.groups import Membership
from megatron_prism.core.programs.ops import CODE, IS_CALL, IS_PAIR
from megatron_prism.core.programs.program import Program, Programs, Splits
from megatron_prism.graph import loops
from megatron_prism.graph.issue_graph import JOIN, MEET, build_issue_graph
from megatron_prism.graph.matching import signature
from megatron_prism.graph.world_graph import WorldGraph, build

_SIGNATURE_COLUMNS = 6  # of ``matching.signature``


@dataclass(frozen=True)
class RankFault:
    """What happens to one rank.

    Of a batch, ``host`` and ``device`` stop all calls: no call of a batch is launched before all
    of it.

    Attributes:
        host: The op of the rank's program that the host never issues (exception, GIL, SIGSTOP,
            data loader); None: it issues all.
        device: The op that the device never gets to (a kernel that does not end); None: it gets
            to all.
        blind: The op from which on completions are not noticed (watchdog or CUDA error); None:
            all are noticed.
        silent: Whether the rank leaves no dump.
    """

    host: int | None = None
    device: int | None = None
    blind: int | None = None
    silent: bool = False


@dataclass
class StalledJob:
    """What each rank issued, and what of it ended.  Ranks of a class share bytes.

    Attributes:
        programs: The programs that ran.
        groups: Group description -> the groups of the ranks.
        faults: Rank -> its fault.
        issued: Per rank: how many ops its host issued.
        done: Per rank: a byte an op, 1 if the op ended.
        ready: Per rank: a byte an op, 1 if the op is a call and the rank came to it.
        said: What an export needs many times.
    """

    programs: Programs
    groups: Mapping[str, Membership]
    faults: Mapping[int, RankFault]
    issued: list[int]
    done: list[bytes]
    ready: list[bytes]
    said: dict[object, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether all ranks came to the end."""
        lengths = [len(self.programs.of(rank)) for rank in range(self.programs.world.size)]
        if self.issued != lengths:
            return False
        # ranks of a class share their bytes: each is looked at once
        distinct_flags = {id(flags): flags for flags in self.done}
        return all(map(all, distinct_flags.values()))


def run_until_stalled(
    programs: Programs, faults: Mapping[int, RankFault] | None = None
) -> StalledJob:
    """Run all ranks until none can go on.

    Nothing depends on times, so ranks of one class stop at one place: a class is run once.

    Args:
        programs: The programs of all ranks.
        faults: Rank -> its fault.
    """
    fault_of_rank = dict(faults or {})
    faulty_ranks = [[rank] for rank in fault_of_rank]
    try:
        return _run(build(programs, faulty_ranks), fault_of_rank)
    except _UnlikeGroupsError:
        # ranks of a class may stop at unlike places: every rank is a class of its own
        ranks = [[rank] for rank in range(programs.world.size)]
        return _run(build(programs, ranks), fault_of_rank)


class _UnlikeGroupsError(Exception):
    """Splits fit in one of two groups that hold the same classes in another order."""


def _run(graph: WorldGraph, faults: Mapping[int, RankFault]) -> StalledJob:
    """Find what ends: what the loops can order.

    A node that never starts has one predecessor more than there are.
    """
    issue_graph = build_issue_graph(graph)
    class_of_rank = graph.classes.of
    num_awaited = np.diff(issue_graph.start)

    # calls that do not fit never end
    is_meeting = issue_graph.kind == MEET
    num_awaited[is_meeting] += ~_calls_that_fit(graph)

    # ops that faults keep from starting never end; a rank with a fault is a class of its own
    first_unissued = [len(program) for program in graph.program_list]
    first_unstarted = [*first_unissued]
    for rank, fault in faults.items():
        index = class_of_rank[rank]
        program = graph.program_list[index]
        first_unissued[index] = _first_of_batch(program, fault.host)
        device_stop = _first_of_batch(program, fault.device)
        first_unstarted[index] = min(first_unissued[index], device_stop)
        is_of_class = issue_graph.owner == index
        num_awaited[is_of_class & (issue_graph.op >= first_unstarted[index])] += 1

    has_ended = np.zeros(len(issue_graph) + 1, dtype=bool)  # the last one: of ops without a node
    has_ended[loops.order(num_awaited, *issue_graph.followers)] = True
    is_held_join = (issue_graph.kind == JOIN) & ~has_ended[:-1]
    issued, done, ready = [], [], []
    for index, program in enumerate(graph.program_list):
        # ops that hold the host: waits of the host, and barriers that it waits for
        held_ops = issue_graph.op[is_held_join & (issue_graph.owner == index)]
        rows = program.ops[held_ops]
        holds_host = ~IS_CALL[rows["name"]]
        holds_host |= (rows["name"] == CODE["barrier"]) & (rows["handle"] < 0)
        host_stops = held_ops[holds_host]

        # the host issues the first op that holds it, and no op behind it
        num_ops = first_unissued[index]
        first_stop = host_stops.min(initial=num_ops)
        issued.append(int(min(num_ops, first_stop + 1)))

        node_of_op = issue_graph.node_of[index][0]
        flags = has_ended[node_of_op]
        # an op without a node ends as the host issues it
        has_no_node = node_of_op < 0
        flags[has_no_node] = np.flatnonzero(has_no_node) < issued[-1]
        flags[host_stops] = False
        done.append(flags.tobytes())
        ready.append(has_ended[issue_graph.ready_of[index][0]].tobytes())

    classes = class_of_rank.tolist()
    return StalledJob(
        programs=graph.programs,
        groups=graph.groups,
        faults=faults,
        issued=[issued[index] for index in classes],
        done=[done[index] for index in classes],
        ready=[ready[index] for index in classes],
    )


def _first_of_batch(program: Program, op: int | None) -> int:
    """Find where a rank stops that never gets to ``op``: behind all ops for None."""
    if op is None or op >= len(program):
        return len(program)
    batch = program.ops["batch"]
    if batch[op] < 0:
        return op
    is_of_batch = batch == batch[op]
    return int(np.argmax(is_of_batch))


def _calls_that_fit(graph: WorldGraph) -> np.ndarray:
    """Find the matched calls that all members make, and alike: bool [matched calls].

    Raises:
        _UnlikeGroupsError: Groups of one matched call differ in whether splits fit.
    """
    matched_calls = graph.matched_calls
    num_members = np.diff(matched_calls.start)
    fits = num_members >= matched_calls.sides

    # calls alike: the signatures of all members are that of the first
    first_signature = np.full((len(matched_calls), _SIGNATURE_COLUMNS), -1, dtype=np.int64)
    has_splits = np.zeros(len(matched_calls), dtype=bool)
    for program, matched in zip(graph.program_list, matched_calls.of, strict=True):
        ops = np.flatnonzero(matched >= 0)
        calls = matched[ops]
        signatures = _signature(program)[ops]
        is_first = first_signature[calls, 0] < 0
        first_signature[calls[is_first]] = signatures[is_first]
        is_unlike = (first_signature[calls] != signatures).any(axis=1)
        fits[calls[is_unlike]] = False
        has_splits[calls[program.ops["splits"][ops] >= 0]] = True

    orders: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for number in np.flatnonzero(has_splits & fits).tolist():
        rows = _splits_of_members(graph, number)
        # a member without recorded splits: nothing to compare
        if rows is None:
            continue
        index, op = matched_calls.members(number)[0]
        program = graph.program_list[index]
        name = program.strings[program.ops["group"][op]]
        if (name, index) not in orders:
            orders[name, index] = _orders_of_classes(graph, name, index)
        fits_in_groups = set()
        for order in orders[name, index]:
            ordered_rows = tuple(rows[class_index] for class_index in order)
            fits_in_groups.add(_splits_fit(ordered_rows))
        if len(fits_in_groups) > 1:
            raise _UnlikeGroupsError
        fits[number] = fits_in_groups.pop()
    return fits


def _splits_of_members(graph: WorldGraph, number: int) -> dict[int, Splits] | None:
    """Give the splits of each class at a matched call; None if one of the calls has none."""
    splits_of_class = {}
    for index, op in graph.matched_calls.members(number):
        program = graph.program_list[index]
        row = int(program.ops["splits"][op])
        if row < 0:
            return None
        splits_of_class[index] = program.splits[row]
    return splits_of_class


def _orders_of_classes(graph: WorldGraph, name: str, index: int) -> set[tuple[int, ...]]:
    """Find how classes follow each other in the groups ``name`` of the ranks of a class."""
    orders = set()
    for rank in graph.classes.ranks(index):
        group = graph.groups[name].group(int(rank))
        orders.add(tuple(graph.classes.of[group].tolist()))
    return orders


def _signature(program: Program) -> np.ndarray:
    """Give what the other sides must call alike: int64 [ops, 6], as ``matching.signature``."""
    if "signature" not in program.derived:
        signatures = signature(program, np.arange(len(program)))
        # a send and its receive agree in dtype and size
        is_message = IS_PAIR[program.ops["name"]]
        signatures[is_message, 0] = 0
        signatures[is_message, 3:] = 0
        program.derived["signature"] = signatures
    return np.asarray(program.derived["signature"])


@lru_cache(maxsize=256)
def _splits_fit(rows: tuple[Splits, ...]) -> bool:
    """Say whether each member sends what the others expect.

    Args:
        rows: (sent, wanted) of each member, in the order of the group.
    """
    sent = [row[0] for row in rows]
    wanted = [row[1] for row in rows]
    num_members = len(rows)
    if any(len(counts) != num_members for counts in (*sent, *wanted)):
        return False
    return bool(np.array_equal(np.array(sent), np.array(wanted).T))
