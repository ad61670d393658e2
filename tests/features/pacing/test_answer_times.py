"""What virtual ranks answer, as a table: against replays of the whole world, to the nanosecond."""

import dataclasses

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.naive_replay import prices_of, random_programs

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program
from megatron_prism.features.pacing.answer_times import START, build_answer_times, cuts, terms
from megatron_prism.graph import issue_graph, world_graph
from megatron_prism.replay import timeline

SEEDS = st.integers(0, 2**32)
ITERATIONS = 6


def world_of(seed):
    """(graph in which the local ranks are classes of their own, the local ranks)."""
    rng = np.random.default_rng(seed)
    programs = random_programs(seed)
    size = programs.world.size
    local = sorted(rng.choice(size, int(rng.integers(1, min(size, 4))), replace=False).tolist())
    return world_graph.build(programs, [[rank] for rank in local]), local


def prescribed(made, joined, local, seed):
    """(durations, start and end of every node) when local ranks compute for random times."""
    rng = np.random.default_rng(seed)
    durations = timeline.durations_of(joined, prices_of(made))
    classes = [int(made.classes.of[rank]) for rank in local]
    mine = np.isin(joined.owner, classes) & (joined.kind == issue_graph.COMPUTE)
    durations[mine] = rng.integers(0, 200, mine.sum())
    return durations, *timeline.evaluate(joined, durations)


def last_arrival(joined, mine, node, end):
    """When the last local member of the meeting ``node`` comes to it."""
    ready = joined.before[joined.start[node] : joined.start[node + 1]]
    return int(end[ready[mine[ready]]].max())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_terms_give_what_the_whole_world_gives(seed):
    made, local = world_of(seed)
    joined = issue_graph.build_issue_graph(made, 3)
    assume(len(joined.order) == len(joined))
    classes = [int(made.classes.of[rank]) for rank in local]
    cut, mine = cuts(joined, classes)
    start, cause, weight = terms(joined, timeline.durations_of(joined, prices_of(made)), cut, mine)
    for other in range(3):
        durations, _, end = prescribed(made, joined, local, seed + other)
        for node in np.flatnonzero(cut).tolist():
            part = slice(start[node], start[node + 1])
            assert start[node] < start[node + 1]
            arrival = last_arrival(joined, mine, node, end)
            causes = zip(cause[part].tolist(), weight[part].tolist(), strict=True)
            reached = [(0 if i == START else int(end[i])) + w for i, w in causes]
            assert max(arrival + int(durations[node]), *reached) == end[node]


def with_sync(programs):
    """The same world, whose iterations end with a call of everybody, which all streams wait for."""
    still = Op("host_wait", note="device")
    everybody = Op("all_reduce", group="default_pg", dtype="int8", num_in=9)
    made = tuple(Program.from_ops(p.rank, [*p, still, everybody, still]) for p in programs.programs)
    return dataclasses.replace(programs, programs=made)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(SEEDS)
def test_one_table_serves_every_iteration(seed):
    programs = with_sync(random_programs(seed))
    rng = np.random.default_rng(seed)
    local = sorted(rng.choice(programs.world.size, 2, replace=False).tolist())
    assume(len(local) < programs.world.size)
    made = world_graph.build(programs, [[rank] for rank in local])
    joined = issue_graph.build_issue_graph(made, ITERATIONS)
    assume(len(joined.order) == len(joined))
    table = build_answer_times(made, prices_of(made), local)
    assert table.loose == 0
    _, _, end = prescribed(made, joined, local, seed)
    classes = [int(made.classes.of[rank]) for rank in local]
    seen = []
    for iteration in range(ITERATIONS):
        arrivals = np.zeros(len(table), dtype=np.int64)
        ends = np.zeros(len(table), dtype=np.int64)
        for index, op, of in zip(table.member, table.op, table.of, strict=True):
            ready = joined.ready_of[classes[index]][iteration][op]
            arrivals[of] = max(arrivals[of], end[ready])
            ends[of] = end[joined.node_of[classes[index]][iteration][op]]
        if iteration >= 2:
            assert np.array_equal(table.ends(arrivals, seen[::-1]), ends)
        seen.append(ends)


def test_a_lockstep_peer_needs_one_term_a_call():
    """Calls of one group, one after the other: only the call before matters."""
    call = Op("all_reduce", "TENSOR_MODEL_PARALLEL_GROUP", "int8", 7, 7)
    ops = [Op("compute", ns=100), call] * 50
    from megatron_prism.core.programs.program import Programs
    from megatron_prism.core.world import World

    programs = Programs(World(2, tp=2), (Program.from_ops(0, ops),), np.zeros(2, dtype=np.int32))
    made = world_graph.build(programs, [[0]])
    table = build_answer_times(made, prices_of(made), [0])
    assert np.diff(table.start).tolist() == [1] * 50
    assert table.weight.tolist() == [107] * 50
    assert table.back.tolist() == [1] + [0] * 49
