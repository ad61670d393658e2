"""Replay against a simulation of every rank, closed forms, and what must hold of any timeline."""

import dataclasses
import pathlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.naive_replay import Simulation, prices_of, random_programs

from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.collectives import BY_NAME
from megatron_prism.core.programs.ops import CODE, PHASE_NAMES
from megatron_prism.core.programs.program_text import parse
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.graph import issue_graph, loops
from megatron_prism.graph import world_graph as graph
from megatron_prism.replay import network, timeline
from megatron_prism.replay.costs import price_ops
from megatron_prism.replay.costs.machine import machine
from megatron_prism.replay.priced_graph import replay
from megatron_prism.report.metrics import path_parts

SEEDS = st.integers(0, 2**32)
DISORDER = st.booleans()
ONE_NODE = 1 << 30  # ranks


@pytest.fixture(params=["interpreted", "compiled"])
def executor(request, monkeypatch):
    if request.param == "compiled":
        pytest.importorskip("numba")
        monkeypatch.setattr(loops, "SMALL", -1)


def replayed(programs, iterations=2):
    world_graph = graph.build(programs)
    return timeline.build_timeline(world_graph, prices_of(world_graph), iterations)


def simulated(programs, iterations=2, **more):
    """(graph, issue graph, begin, end) of the event engine."""
    world_graph = graph.build(programs)
    joined = issue_graph.build_issue_graph(world_graph, iterations)
    durations = timeline.durations_of(joined, prices_of(world_graph))
    return world_graph, joined, *network.simulate_network(joined, durations, **more)


def assert_equal(programs, world_graph, joined, begin, end, naive):
    """Every op of every rank is at the same time; -1 for what never happened."""
    count = 0
    for rank in range(programs.world.size):
        index = int(world_graph.classes.of[rank])
        for iteration, (nodes, ready) in enumerate(
            zip(joined.node_of[index], joined.ready_of[index], strict=True)
        ):
            for op in np.flatnonzero(nodes >= 0).tolist():
                key = (rank, iteration, op)
                assert naive.start.get(key, -1) == begin[nodes[op]], (key, programs.of(rank)[op])
                assert naive.end.get(key, -1) == end[nodes[op]], (key, programs.of(rank)[op])
                if ready[op] >= 0:
                    assert naive.ready.get(key, -1) == end[ready[op]]
                count += 1
    assert count >= len(naive.start)


# -- against every single rank ---------------------------------------------------------------------
@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEEDS, DISORDER)
def test_classes_are_as_every_rank_for_itself(seed, disorder):
    programs = random_programs(seed, disorder)
    naive = Simulation(programs)
    if naive.hangs:
        with pytest.raises(PrismError, match="the job hangs: .* steps wait for each other"):
            replayed(programs)
        return
    made = replayed(programs)
    assert_equal(programs, made.graph, made.dag, made.node_start, made.node_end, naive)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, DISORDER, st.booleans())
def test_events_are_as_every_rank_for_itself(seed, disorder, contention):
    programs = random_programs(seed, disorder)
    naive = Simulation(programs, contention=contention)
    world_graph = graph.build(programs)
    shared = network.ports(world_graph, ONE_NODE) if contention else None
    found = simulated(programs, links=shared)
    assert (found[-1] < 0).any() == naive.hangs
    assert_equal(programs, *found, naive)


def test_who_waits_for_an_asynchronous_barrier_is_held():
    """Rank 0 waits at once for a barrier that rank 1 reaches after 1 ms, then launches on another
    stream; an all-reduce in its place holds the stream only."""
    text = """prism-program 1
world size=2 tp=2
program rank=0 ranks=0
- NAME handle=0
- wait handle=0
- compute ns=5 stream=side
program rank=1 ranks=1
- compute ns=1000000
- NAME handle=0
- wait handle=0
"""
    calls = {"barrier TENSOR_MODEL_PARALLEL_GROUP": 1_000_000,
             "all_reduce TENSOR_MODEL_PARALLEL_GROUP int8 n=1 reduce=sum": 0}  # fmt: skip
    for call, least in calls.items():
        made = replayed(parse(text.replace("NAME", call)), 1)
        index = int(made.graph.classes.of[0])
        begin = made.node_start[made.dag.node_of[index][0][2]]
        assert begin >= least > 0 or begin == least == 0


@pytest.mark.slow
def test_the_random_worlds_hang_contend_and_split():
    seen = {"hangs": 0, "contends": 0, "splits": 0}
    for seed in range(40):
        programs = random_programs(seed, disorder=seed % 2 == 1)
        world_graph, *_, alone = simulated(programs)
        *_, shared = simulated(programs, links=network.ports(world_graph, ONE_NODE))
        seen["hangs"] += (alone < 0).any()
        seen["contends"] += not np.array_equal(alone, shared)
        seen["splits"] += len(world_graph.classes) > programs.world.pp
    assert min(seen.values()) >= 5, seen


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS)
def test_events_equal_the_longest_path(seed):
    """On random graphs, whatever their shape."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 60))
    lists = [rng.integers(0, i, rng.integers(0, 4)) if i else [] for i in range(n)]
    lengths = np.array([len(one) for one in lists])
    shuffled = rng.permutation(n)  # node numbers tell nothing about the order
    order = np.argsort(shuffled)
    start = np.concatenate(([0], np.cumsum(lengths[order])))
    before = np.concatenate([shuffled[np.array(lists[i], dtype=int)] for i in order]).astype(int)
    empty = np.zeros(n, dtype=np.int32)
    made = issue_graph.IssueGraph(
        empty.astype(np.uint8), empty, empty, empty, start, before, (), ()
    )
    durations = rng.integers(0, 5, n) * rng.integers(0, 10**9, n)
    begin, end = timeline.evaluate(made, durations)
    found = network.simulate_network(made, durations)
    assert all(map(np.array_equal, (begin, end), found))


@pytest.mark.slow
def test_interpreted_and_compiled_are_one(monkeypatch):
    pytest.importorskip("numba")
    for seed in range(8):
        programs = random_programs(seed)
        shared = network.ports(graph.build(programs), ONE_NODE)
        found = []
        for small in (1 << 40, -1):
            monkeypatch.setattr(loops, "SMALL", small)
            _, dag, begin, end = simulated(programs, links=shared)
            tail = loops.longest(dag.order[::-1], *dag.followers, end)[0]
            path = loops.path(dag.start, dag.before, end, int(end.argmax()))
            found.append((begin, end, dag.start, dag.before, dag.order, tail, path))
        for a, b in zip(*found, strict=True):
            assert np.array_equal(a, b)


# -- closed forms ----------------------------------------------------------------------------------
def bubble(programs):
    """The part of one iteration from rest in which a stage does not compute; all calls are free."""
    world_graph = graph.build(programs)
    cost = np.array([{"forward": 1000, "backward": 2000}.get(name, 0) for name in PHASE_NAMES])
    free = prices_of(world_graph)
    priced = dataclasses.replace(
        free,
        compute=tuple(
            np.where(program.ops["name"] == CODE["compute"], cost[program.ops["phase"]], 0)
            for program in world_graph.program_list
        ),
        collective_ns=np.zeros_like(free.collective_ns),
    )
    made = timeline.build_timeline(world_graph, priced, 1)
    (busy,) = {made.account(index).compute for index in range(len(world_graph.classes))}
    return 1 - Fraction(busy, made.iteration_ns)


def test_the_bubble_of_a_pipeline_without_backward():
    """m forwards through p stages take m + p - 1."""
    text = ["prism-program 1", "world size=4 pp=4"]
    group = "PIPELINE_MODEL_PARALLEL_GROUP bf16"
    for stage in range(4):
        text.append(f"program rank={stage} ranks={stage}")
        for m in range(6):
            text += [f"{m}F recv {group} out=4 peer=-1"] * (stage > 0) + [f"{m}F compute"]
            text += [f"{m}F send {group} in=4 peer=1"] * (stage < 3)
    assert bubble(parse("\n".join(text))) == Fraction(3, 6 + 3)


@pytest.fixture
def megatron():
    """Megatron's own schedules; the module is imported where it is asked for."""
    pytest.importorskip("megatron.core")
    from megatron_prism.emulate.schedule import schedules

    return schedules


@pytest.mark.megatron
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 12), (8, 32), (16, 16)])
def test_megatrons_1f1b_has_the_papers_bubble(megatron, p, m):
    assert bubble(megatron(p, microbatches=m)) == Fraction(p - 1, m + p - 1)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 2, 32), (2, 3, 12)]
)
def test_megatrons_interleaved_schedule_has_the_papers_bubble(megatron, p, v, m):
    assert bubble(megatron(p, v, m)) == Fraction(p - 1, v * m + p - 1)


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_a_ring_all_reduce_moves_twice_n_minus_1_over_n(n):
    """n - 1 steps of reduce-scatter and n - 1 of all-gather, played message by message."""
    chunk, group = 1000, "TENSOR_MODEL_PARALLEL_GROUP"
    lines = ["prism-program 1", f"world size={n} tp={n}", f"program rank=0 ranks=0-{n - 1}"]
    for step in range(2 * (n - 1)):
        lines += [
            f"- send {group} int8 in={chunk} peer=1 batch={step}",
            f"- recv {group} int8 out={chunk} peer=-1 batch={step}",
        ]
    made = replayed(parse("\n".join(lines)), 1)
    assert len(made.graph.classes) == 1
    assert made.iteration_ns == 2 * (n - 1) * chunk  # at a byte a nanosecond
    assert made.iteration_ns == BY_NAME["all_reduce"].wire_bytes(n * chunk, n)


# -- what holds of any timeline --------------------------------------------------------------------
def some_timeline(seed):
    """A replay of the first world from ``seed`` on that does not hang."""
    while True:
        try:
            return replayed(random_programs(seed))
        except PrismError:
            seed += 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SEEDS, st.integers(1, 1000), st.data())
def test_slower_is_never_earlier(seed, more, data):
    made = some_timeline(seed)
    if not len(made.dag):
        return
    durations = made.durations.copy()
    durations[data.draw(st.integers(0, len(durations) - 1))] += more
    begin, end = timeline.evaluate(made.dag, durations)
    assert (begin >= made.node_start).all()
    assert (end >= made.node_end).all()
    assert end.max() <= made.node_end.max() + more


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SEEDS)
def test_accounts_add_up(seed):
    made = some_timeline(seed)
    for index in range(len(made.graph.classes)):
        account = made.account(index)
        parts = [*account.exposed.values(), *account.waiting.values()]
        assert account.compute + sum(parts) + account.idle == account.total == made.iteration_ns
        assert min([account.compute, account.idle, *parts]) >= 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SEEDS)
def test_the_critical_path_is_a_path_as_long_as_all_iterations(seed):
    made = some_timeline(seed)
    path = timeline.critical_path(made.dag, made.node_end)
    if not path:
        return
    assert made.node_start[path[0]] == 0
    assert made.node_end[path[-1]] == made.node_end.max()
    for one, other in zip(path, path[1:], strict=False):
        assert one in made.dag.before[made.dag.start[other] : made.dag.start[other + 1]]
        assert made.node_end[one] == made.node_start[other]
    assert (
        made.durations[path].sum()
        == made.node_end.max()
        == sum(made.ends[i] - (made.ends[i - 1] if i else 0) for i in range(2))
    )


def test_the_critical_path_adds_up_where_a_host_begins_before_the_others_have_ended():
    made = replay(open_programs(pathlib.Path(__file__).parents[1] / "golden/slices/dense_pp2"))
    parts = [part.ns for part in path_parts(made)]
    assert sum(parts) == made.iteration_ns
    assert min(parts) > 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(SEEDS, st.data())
def test_slack_is_what_a_class_may_lose(seed, data):
    made = some_timeline(seed)
    index = data.draw(st.integers(0, len(made.graph.classes) - 1))
    segments = np.flatnonzero((made.dag.kind == issue_graph.COMPUTE) & (made.dag.owner == index))
    if not segments.size:
        return
    least = made.slack()[index]
    reached = []
    for node in segments.tolist():
        durations = made.durations.copy()
        durations[node] += least
        assert timeline.evaluate(made.dag, durations)[1].max() == made.node_end.max()
        durations[node] += 1
        reached.append(timeline.evaluate(made.dag, durations)[1].max() > made.node_end.max())
    assert any(reached)


# -- hangs and faults ------------------------------------------------------------------------------
CROSSED = """prism-program 1
world size=2 pp=2
program rank=0 ranks=0
- compute ns=5
- recv PIPELINE_MODEL_PARALLEL_GROUP int8 out=4 peer=1
- send PIPELINE_MODEL_PARALLEL_GROUP int8 in=4 peer=1
program rank=1 ranks=1
- recv PIPELINE_MODEL_PARALLEL_GROUP int8 out=4 peer=-1
- send PIPELINE_MODEL_PARALLEL_GROUP int8 in=4 peer=-1
"""


def test_two_ranks_that_receive_first_hang():
    programs = parse(CROSSED)
    assert graph.build(programs).check() == []  # every message has its other side
    with pytest.raises(PrismError, match="the job hangs") as raised:
        replayed(programs)
    assert "prism hang" in raised.value.fix
    world_graph, *_, end = simulated(programs, 1)
    assert (end < 0).any()
    with pytest.raises(PrismError, match="the job hangs"):
        network.replay_network(world_graph, prices_of(world_graph))


# -- contention ------------------------------------------------------------------------------------
def test_transfers_share_a_port_in_equal_parts(executor):
    """100 and 40 bytes from 0 on: 40 each until 80, then 60 more alone; both ways do not meet."""
    group, text = "PIPELINE_MODEL_PARALLEL_GROUP", ["prism-program 1", "world size=3 pp=3"]
    text += ["program rank=0 ranks=0", f"- send {group} int8 in=100 peer=1 handle=0",
             f"- send {group} int8 in=40 peer=2 handle=1",
             f"- recv {group} int8 out=70 peer=2 batch=5", "program rank=1 ranks=1",
             f"- recv {group} int8 out=100 peer=-1", "program rank=2 ranks=2",
             f"- recv {group} int8 out=40 peer=-2 handle=2", 
             f"- send {group} int8 in=70 peer=-2 batch=4"]  # fmt: skip
    programs = parse("\n".join(text))
    world_graph = graph.build(programs)
    _, dag, _, end = simulated(programs, 1, links=network.ports(world_graph, ONE_NODE))
    ends = end[dag.kind == issue_graph.MEET]
    assert sorted(ends.tolist()) == [70, 80, 140]


def test_ports_tell_the_node_from_the_network(executor):
    """A tensor group on a node and a data-parallel one across nodes do not slow each other."""
    text = """prism-program 1
    world size=4 tp=2
    program rank=0 ranks=0-3
    - all_reduce TENSOR_MODEL_PARALLEL_GROUP int8 n=100 reduce=sum handle=0
    - all_reduce DATA_PARALLEL_GROUP int8 n=100 reduce=sum handle=1
    """
    for per_node, total in ((1, 200), (2, 100), (4, 200)):
        world_graph = graph.build(parse(text))
        made = network.replay_network(
            world_graph, prices_of(world_graph), 1, network.ports(world_graph, per_node)
        )
        assert made.iteration_ns == total


def test_a_coalesced_call_moves_the_sum_of_its_parts():
    text = """prism-program 1
    world size=2
    program rank=0 ranks=0-1
    - all_reduce default_pg int8 n=30 reduce=sum batch=0
    - all_reduce default_pg int8 n=50 reduce=sum batch=0
    """
    world_graph = graph.build(parse(text))
    shared = network.ports(world_graph, ONE_NODE)
    assert network.replay_network(world_graph, prices_of(world_graph), 1, shared).iteration_ns == 80


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SEEDS)
def test_sharing_changes_no_verdict(seed):
    """What hangs with shared links hangs without, and the other way round."""
    programs = random_programs(seed, disorder=True)
    world_graph, *_, alone = simulated(programs)
    *_, shared = simulated(programs, links=network.ports(world_graph, 1))
    assert np.array_equal(alone < 0, shared < 0)


def test_segments_with_one_note_and_different_work_cost_differently():
    text = """prism-program 1
world size=1
program rank=0
- compute note=big flops=1000000000000000
- compute note=big flops=10"""
    long, short = priced(text).compute[0].tolist()
    assert long > 1000 * short > 0


@pytest.mark.parametrize(
    "line", ["ns=500000000000000000", 'note="g(1)bfloat16:1:1*9999999999999999"']
)
def test_times_beyond_64_bits_are_refused(line):
    text = "\n".join(
        ["prism-program 1", "world size=1", "program rank=0", *[f"- compute {line}"] * 16]
    )
    world = graph.build(parse(text))
    with pytest.raises(PrismError, match="longer than 64 bits"):
        timeline.build_timeline(world, priced(text))


def priced(text):
    return price_ops(graph.build(parse(text)), machine("h200"))
