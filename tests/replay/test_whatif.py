"""What-ifs against worlds that are what is asked for: simulated, built anew, captured anew."""

import dataclasses
import pathlib
from fractions import Fraction

import numpy as np
import pytest
from helpers.programs import WORLDS, healthy, with_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.naive_replay import Simulation, prices_of, random_programs

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import PrismError, ProgramError, UsageError, WorldError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.programs.program_text import parse
from megatron_prism.core.world import World
from megatron_prism.graph import world_graph as graph
from megatron_prism.graph.issue_graph import COMPUTE, MEET
from megatron_prism.replay import timeline, whatif
from megatron_prism.replay.costs import price_ops
from megatron_prism.replay.costs.machine import machine
from megatron_prism.replay.replicas import with_data_parallel

SEEDS = st.integers(0, 2**32)
H200 = machine("h200")
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "slices"


# -- slow ranks ------------------------------------------------------------------------------------
@settings(max_examples=30, deadline=None, derandomize=True)
@given(SEEDS, st.sampled_from(["3/2", 2, 1.1, "1/3"]), st.data())
def test_a_slow_rank_is_as_if_its_segments_were_longer(seed, factor, data):
    programs = random_programs(seed)
    rank = data.draw(st.integers(0, programs.world.size - 1))
    ratio = Fraction(str(factor))
    ops = [
        dataclasses.replace(op, ns=-(-op.ns * ratio.numerator // ratio.denominator))
        if op.name == "compute"
        else op
        for op in programs.of(rank)
    ]
    naive = Simulation(with_rank(programs, rank, ops))
    edit = whatif.slow_ranks([rank], factor)
    slow = whatif.edited(programs, [edit])
    priced = edit.prices(slow, prices_of(slow), H200)
    if naive.hangs:
        with pytest.raises(PrismError, match="hangs"):
            timeline.build_timeline(slow, priced)
        return
    made = timeline.build_timeline(slow, priced)
    device = np.isin(made.dag.kind, [COMPUTE, MEET])  # the host may go on after the last kernel
    assert made.node_end[device].max(initial=0) == max(naive.end.values(), default=0)
    for index, one in enumerate(slow.classes.representatives):
        nodes = made.dag.node_of[index][1]
        for op in np.flatnonzero(nodes >= 0).tolist():
            assert made.node_end[nodes[op]] == naive.end[one, 1, op]


def test_slow_ranks_split_the_world_as_far_as_they_must():
    world = World(64, tp=2, pp=4, cp=2, ep=4, etp=1)
    programs = healthy(world)
    slow = whatif.edited(programs, [whatif.slow_ranks([5], 2)])
    classes = slow.classes
    assert classes.ranks(int(classes.of[5])).tolist() == [5]
    assert len(graph.build(programs).classes) < len(classes) < world.size
    assert "rank 5 computes 2 times" in slow.programs.source["what-if"]
    assert programs == healthy(world)  # nothing is changed in place
    everyone = whatif.edited(programs, [whatif.slow_ranks(range(world.size), 2)])
    assert len(everyone.classes) == len(graph.build(programs).classes)


def test_twice_slow_is_the_product_and_says_so():
    text = "prism-program 1\nworld size=2\nprogram rank=0 ranks=0-1\n- compute ns=8"
    edits = [whatif.slow_ranks([1], "3/2"), whatif.slow_ranks([1], 2)]
    world_graph = whatif.edited(parse(text), edits)
    prices = price_ops(world_graph, H200)
    for edit in edits:
        prices = edit.prices(world_graph, prices, H200)
    assert [int(ns[0]) for ns in prices.compute] == [8, 24]
    labels = [prices.sources[source[0]] for source in prices.compute_source]
    assert labels[0].startswith("given")
    assert labels[1].startswith("assumed: x 2, of assumed: x 3/2, of given")


@pytest.mark.parametrize("factor", [0, -1, "fast", "1/0", float("nan"), float("inf")])
def test_what_is_no_factor_is_refused(factor):
    with pytest.raises(UsageError, match="is no factor"):
        whatif.slow_ranks([0], factor)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(WorldError, match="rank 8 is outside"):
        whatif.edited(healthy(WORLDS[1]), [whatif.slow_ranks([8], 2)])


# -- faster calls, other machines ------------------------------------------------------------------
CALLS = """prism-program 1
world size=4 tp=2
program rank=0 ranks=0-3
- all_reduce TENSOR_MODEL_PARALLEL_GROUP int8 n=100 reduce=sum
- all_gather TENSOR_MODEL_PARALLEL_GROUP int8 in=50 out=100
- all_reduce DATA_PARALLEL_GROUP int8 n=1000 reduce=sum
"""


@pytest.mark.parametrize(
    ("name", "group", "total"),
    [
        ("", "", 600),
        ("all_reduce", "", 650),
        ("", "TENSOR_MODEL_PARALLEL_GROUP", 1100),
        ("", "tp", 1100),
        ("all_reduce", "dp", 1200 - 500),
        ("all_gather", "TENSOR_MODEL_PARALLEL_GROUP", 1150),
    ],
)
def test_calls_twice_as_fast(name, group, total):
    world_graph = graph.build(parse(CALLS))
    edit = whatif.faster_calls(2, name, group)
    fast = edit.prices(world_graph, prices_of(world_graph), H200)
    assert timeline.build_timeline(world_graph, fast, 1).iteration_ns == total
    changed = fast.collective_source > 0
    assert changed.any()
    assert fast.sources[1] == "assumed: 2 x as fast, of test"


def test_calls_that_do_not_exist_are_refused_with_those_that_do():
    world_graph = graph.build(parse(CALLS))
    with pytest.raises(UsageError, match="no all_reduce in EMBEDDING_GROUP") as raised:
        whatif.faster_calls(2, "all_reduce", "EMBEDDING_GROUP").prices(
            world_graph, prices_of(world_graph), H200
        )
    assert "DATA_PARALLEL_GROUP" in raised.value.fix


def test_another_machine():
    """A segment bound by flops scales with them, one bound by memory with that."""
    here = machine("h200")
    there = dataclasses.replace(
        here, name="other", flops={k: v / 2 for k, v in here.flops.items()}, memory_rate=1e12
    )
    busy, wide = int(here.flops["bf16"] / 100), int(here.memory_rate / 100)  # 10 ms each
    text = f"""prism-program 1
    world size=1
    program rank=0 ranks=0
    - compute ns=20000000 flops={busy} traffic=8
    - compute ns=30000000 flops=8 traffic={wide}
    - compute ns=5000
    """
    world_graph = graph.build(parse(text))
    given = price_ops(world_graph, here)
    found = whatif.moved(here, None, there).prices(world_graph, given, there)
    start = here.kernel_ns  # of a kernel, the same on both
    assert found.compute[0][0] == pytest.approx(40_000_000 - 2 * start, abs=9)
    assert found.compute[0][1] == pytest.approx(
        (30e6 - 3 * start) * here.memory_rate / 1e12 + 3 * start, rel=1e-6
    )
    assert found.compute[0][2] == 5000
    assert "scaled from" in found.sources[found.compute_source[0][0]]
    same = whatif.moved(here, None, here).prices(world_graph, given, here)
    assert same.compute[0].tolist() == [20_000_000, 30_000_000, 5000]


# -- data parallel size ----------------------------------------------------------------------------
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 8, 1024])
def test_a_scaled_world_is_the_world_built_at_that_size(dp):
    world = World(16, tp=2, pp=2, cp=2)
    bigger = dataclasses.replace(world, size=8 * dp)
    made, built = with_data_parallel(healthy(world), dp), healthy(bigger)
    assert made.world == bigger
    assert all(list(made.of(r)) == list(built.of(r)) for r in range(0, bigger.size, 7))
    assert graph.build(made).check() == []
    assert np.array_equal(graph.build(made).classes.of, graph.build(built).classes.of)


# (elements of all, of one rank) of the buckets of Llama-3-8B, tp 4, by data-parallel ranks (cp 2):
# prism capture llama3-8b_64gpu_tp4cp2_h200 world_size=8, 16, 24, 64; megatron-core 0.16.1
BUCKETS = {
    2: [(131596288, 65798144), (44044288, 22022144), (54534144, 27267072), (142090240, 71045120)],
    4: [(131596288, 32899072), (44044288, 11011072), (54534144, 13633536), (142090240, 35522560)],
    6: [(131596416, 21932736), (44044416, 7340736), (54534144, 9089024), (142090368, 23681728)],
    16: [(131596288, 8224768), (44044288, 2752768), (54534144, 3408384), (142090240, 8880640)],
}
PAIRS = [(a, b) for a in BUCKETS for b in BUCKETS if b % a == 0 and a != b]


def buckets(ranks):
    world = World(8 * ranks // 2, tp=4, cp=2)
    more = {"group": "DATA_PARALLEL_GROUP_WITH_CP", "site": "a/param_and_grad_buffer.py:433"}
    ops = [
        op
        for whole, part in BUCKETS[ranks]
        for op in (
            Op("reduce_scatter", **more, dtype="fp32", num_in=whole, num_out=part, reduce="sum"),
            Op("all_gather", **more, dtype="bf16", num_in=part, num_out=whole),
        )
    ]
    return Programs(world, (Program.from_ops(0, ops),), np.zeros(world.size))


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_buckets_are_those_that_megatron_makes(before, after):
    made = with_data_parallel(buckets(before), after // 2)
    assert list(made.of(0)) == list(buckets(after).of(0))
    assert "too large" not in made.source["what-if"]


def test_what_is_not_certain_is_said():
    fewer = with_data_parallel(buckets(6), 1).source["what-if"]
    assert "size 1 instead of 3" in fewer
    assert "up to their padding too large" in fewer
    assert "boundaries of buckets" in with_data_parallel(buckets(16), 24).source["what-if"]
    assert "boundaries" not in with_data_parallel(buckets(2), 4).source["what-if"]


def test_messages_through_the_default_group_reach_the_same_stage():
    """Pipelines of two stages send one way through the group of all ranks (p2p_communication)."""
    world = World(8, tp=2, pp=2)

    def at(size):
        return [
            Program.from_ops(0, [Op("send", "default_pg", "bf16", num_in=8, peer=size // 2)]),
            Program.from_ops(4, [Op("recv", "default_pg", "bf16", num_out=8, peer=-(size // 2))]),
        ]

    made = with_data_parallel(Programs(world, tuple(at(8)), [0] * 4 + [1] * 4), 5)
    assert [op.peer for program in made.programs for op in program] == [10, -10]
    assert graph.build(made).check() == []


def test_scaling_refuses_what_it_cannot_know():
    programs = healthy(World(16, tp=2, pp=2, cp=2))
    with pytest.raises(ProgramError, match="ranks 1 and 5 differ in nothing but the replica"):
        with_data_parallel(with_rank(programs, 5, [*programs.of(5), Op("mark", note="5")]), 4)
    with pytest.raises(UsageError, match="size of 0"):
        with_data_parallel(programs, 0)
    with pytest.raises(ProgramError, match="lists of ranks"):
        with_data_parallel(dataclasses.replace(programs, groups={"A": ((0, 1),)}), 4)
    with pytest.raises(UsageError, match="multiple of 4 replicas"):
        with_data_parallel(healthy(World(16, tp=2, ep=4, etp=2)), 1)
    for op, says in (
        (Op("all_to_all", "DATA_PARALLEL_GROUP", "bf16", 8, 8), "is not known"),
        (Op("send", "DATA_PARALLEL_GROUP", "bf16", num_in=8, peer=1), "changes its size"),
    ):
        one = Programs(World(4), (Program.from_ops(0, [op]),), np.zeros(4))
        with pytest.raises(ProgramError, match=says):
            with_data_parallel(one, 8)
    assert with_data_parallel(programs, 2) is programs


@pytest.mark.parametrize("word", ["tp=4", "pp=4", "vpp=2"])
def test_sizes_that_were_not_captured_are_refused(word, capsys):
    assert cli.main(["replay", str(GOLDEN / "dense_pp2"), word]) == 2
    assert "capture them with that size" in capsys.readouterr().err
