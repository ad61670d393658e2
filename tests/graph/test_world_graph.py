"""The world graph: its classes are the coarsest, its meetings those of every single rank, and every
planted fault is found, named and drawn."""

import dataclasses
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from helpers.programs import CP, DP, EP, FAULTS, PP, TP, WORLDS, healthy, members_of, with_rank
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prism.core.errors import ProgramError, WorldError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.programs.program_text import parse
from megatron_prism.core.world import World, family
from megatron_prism.graph import world_graph
from megatron_prism.graph.classes import memberships, partition


def rank_level(programs):
    """Rendezvous of single ranks: key -> sorted [(rank, op)], by the rules and nothing else."""
    met = defaultdict(list)
    for rank in range(programs.world.size):
        count = Counter()
        for at, op in enumerate(programs.of(rank)):
            if not op.group:
                continue
            group = members_of(programs, rank, op.group)
            if op.name in ("send", "recv"):
                peer = group[(group.index(rank) + op.peer) % len(group)]
                way = (rank, peer) if op.name == "send" else (peer, rank)
                fifo = (op.group, op.name, way)
                met["p2p", op.group, way, count[fifo]].append((rank, at))
            else:
                fifo = (op.group, "all")
                met["all", op.group, group, count[fifo]].append((rank, at))
            count[fifo] += 1
    return met


def naive_classes(programs):
    """Refinement with dictionaries, straight from the definition."""
    colour = [list(p) for p in programs.programs]
    colour = [colour.index(list(programs.of(r))) for r in range(programs.world.size)]
    while True:
        seen = []
        for rank, mine in enumerate(colour):
            view = set()
            for op in programs.of(rank):
                if op.group:
                    group = members_of(programs, rank, op.group)
                    if op.name in ("send", "recv"):
                        peer = group[(group.index(rank) + op.peer) % len(group)]
                        view.add((op.group, op.peer, colour[peer]))
                    view.add((op.group, tuple(sorted(colour[r] for r in group))))
            seen.append((mine, frozenset(view)))
        order = {key: i for i, key in enumerate(dict.fromkeys(seen))}
        if len(order) == len(set(colour)):
            return [order[key] for key in seen]
        colour = [order[key] for key in seen]


def assert_exact(programs):
    """Classes are the naive ones, and class meetings are the rank meetings seen from afar."""
    made = world_graph.build(programs)
    assert made.classes.of.tolist() == naive_classes(programs)
    meetings = made.matched_calls
    for met in rank_level(programs).values():
        numbers = {int(meetings.of[made.classes.of[rank]][at]) for rank, at in met}
        assert len(numbers) == 1, met
        expected = sorted({(int(made.classes.of[rank]), at) for rank, at in met})
        assert sorted(meetings.members(numbers.pop())) == expected
    return made


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_healthy_world_is_clean_and_as_small_as_its_stages(world):
    made = assert_exact(healthy(world))
    assert made.check() == []
    assert len(made.classes) == world.pp
    assert sum(made.classes.counts) == world.size
    assert made.num_ops() == sum(len(made.programs.of(r)) for r in range(world.size))


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(WORLDS[1:5]), st.integers(0, 2**32), st.integers(1, 3))
def test_odd_ranks_split_only_what_they_must(world, seed, odd):
    rng = random.Random(seed)
    programs = healthy(world)
    for _ in range(odd):
        rank = rng.randrange(world.size)
        ops = [
            dataclasses.replace(op, ns=op.ns + 1) if op.name == "compute" else op
            for op in programs.of(rank)
        ]
        programs = with_rank(programs, rank, ops)
    assert assert_exact(programs).check() == []


def test_reasons_say_why_a_class_is_one():
    world = WORLDS[2]
    slow = [dataclasses.replace(op, ns=9) if op.name == "compute" else op for op in
            healthy(world).of(5)]  # fmt: skip
    found = partition(with_rank(healthy(world), 5, slow))
    reason = dict(zip(found.representatives, found.reasons, strict=True))
    assert reason[5] == "its program"
    assert any("which classes are in its group" in text for text in found.reasons)
    assert found.ranks(int(found.of[5])).tolist() == [5]


def test_equal_programs_are_one_class():
    world = World(4, tp=4)
    ops = [Op("all_reduce", TP, "bf16", 1, 1, "sum")]
    made = Programs.one_per_rank([Program.from_ops(r, ops) for r in range(4)], world)
    assert len(partition(made)) == 1


def test_a_million_ranks_cost_what_their_classes_cost():
    world = World(1 << 20, tp=8, pp=4, cp=2, ep=8)
    made = world_graph.build(healthy(world))
    assert made.check() == []
    assert made.classes.counts == (1 << 18,) * 4


def planted(change, rank=5, world=WORLDS[2]):
    programs = healthy(world)
    ops = list(programs.of(rank))
    change(ops)
    return world_graph.build(with_rank(programs, rank, ops)).check()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    change, kind, group, says = FAULTS[name]
    found = planted(change)
    about = [f for f in found if f.group == group]
    assert [f.kind for f in about][:1] == [kind], found
    assert says in about[0].likely
    assert 5 in about[0].ranks
    assert "<-- here" in about[0].picture
    assert f"rank {about[0].ranks[0]}" in str(about[0])


def test_a_rank_outside_the_group_it_calls():
    text = """prism-program 1
world size=3
group A 0,1
program ranks=0-2
- all_reduce A bf16 n=1 reduce=sum"""
    (found,) = world_graph.build(parse(text)).check()
    assert found.kind == "wrong group"
    assert "rank 2 is in no group called A" in found.likely


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("group B 0,1", "uses the group A"),
        ("group A 0,9", "rank 9 is outside"),
        ("group A 0,1;1,2", "rank 1 is in it twice"),
    ],
)
def test_groups_that_cannot_be(line, says):
    text = f"prism-program 1\nworld size=3\n{line}\nprogram ranks=0-2\n- barrier A"
    with pytest.raises(ProgramError, match=says):
        world_graph.build(parse(text))


@pytest.mark.parametrize(
    ("lines", "kind", "at", "says"),
    [
        ("- wait handle=7", "handle", 0, "it waits for handle 7, which no op before it has"),
        ("- compute ns=1\n- wait", "handle", 1, "it waits for handle -1"),
        ("- wait handle=7\n- barrier default_pg handle=7", "handle", 0, "handle 7"),
        ("- record handle=3\n- wait handle=5\n- wait handle=3", "handle", 1, "handle 5"),
        ("- compute batch=0\n- barrier default_pg batch=0", "batch", 0, "compute is no call"),
        (
            "- barrier default_pg batch=0\n- compute ns=1\n- barrier default_pg batch=0",
            "batch",
            2,
            "batch 0 was over",
        ),
    ],
)
def test_programs_that_mean_nothing_by_themselves(lines, kind, at, says):
    (found,) = world_graph.build(
        parse(f"prism-program 1\nworld size=3\nprogram ranks=0-2\n{lines}")
    ).check()
    assert (found.kind, found.number, found.ranks) == (kind, at, (0, 0))
    assert says in found.likely
    assert "<-- here" in found.picture.splitlines()[2]


def test_waits_and_batches_that_mean_something():
    text = """prism-program 1
world size=2
program ranks=0-1
- barrier default_pg handle=7
- wait handle=7
- wait handle=7
- barrier default_pg handle=7 batch=4
- mark note=x
- barrier default_pg batch=4
- barrier default_pg batch=3
- record handle=1 stream=side
- wait handle=1"""
    assert world_graph.build(parse(text)).check() == []


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ("broadcast default_pg bf16 n=4 root=3", "root", "no group rank 3 in a group of 3"),
        (
            "all_to_all default_pg bf16 n=8 to=1,1,1 from=1,1,1",
            "splits",
            "rank 0 sends 8 elements and gives 3 rows of them",
        ),
        (
            "all_to_all default_pg bf16 in=6 out=1 to=1,1,1 from=0,0,0",
            "splits",
            "rank 0 receives 1 elements and gives 0 rows",
        ),
    ],
)
def test_calls_that_every_rank_makes_alike_and_wrongly(line, kind, says):
    (found,) = world_graph.build(
        parse(f"prism-program 1\nworld size=3\nprogram ranks=0-2\n- {line}")
    ).check()
    assert found.kind == kind
    assert says in found.likely
    assert "<-- here" in str(found)


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ((4, 6), ""),
        ((4, 5), "rank 1 sends 5 elements to rank 0, which expects 6"),
        ((4, 7), "rank 1 sends 7 elements and gives 6 rows of them"),
    ],
)
def test_a_gather_may_take_more_from_some_ranks(shares, says):
    """dist_muon's was a wrong shape, in a job that trains."""
    lines = "".join(
        f"\nprogram ranks={rank}\n- all_gather default_pg bf16 in={own} out=10 "
        f"to={min(own, 6)},{min(own, 6)} from=4,6"
        for rank, own in enumerate(shares)
    )
    found = world_graph.build(parse(f"prism-program 1\nworld size=2{lines}")).check()
    assert [one.kind for one in found] == ["splits"] * bool(says)
    assert says in "".join(one.likely for one in found)


def test_a_call_needs_a_group():
    text = "prism-program 1\nworld size=2\nprogram ranks=0-1\n- all_reduce bf16 n=4 reduce=sum"
    with pytest.raises(ProgramError, match="a call without a group"):
        world_graph.build(parse(text))
    with pytest.raises(WorldError, match="makes no group"):
        family("")


def test_groups_written_by_hand_may_differ_in_size():
    text = """prism-program 1
world size=5
group A 4,0;1,2,3
program ranks=0-4
- all_gather A bf16 in=1 out=2
- send A bf16 in=3 peer=1
- recv A bf16 out=3 peer=-1"""
    made = assert_exact(parse(text))
    assert made.check() == []
    assert len(made.classes) == 2
    assert memberships(made.programs)["A"].group(0).tolist() == [4, 0]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_memberships_are_the_worlds_groups(world):
    for name in (TP, PP, DP, CP, EP, "EMBEDDING_GROUP", "MODEL_PARALLEL_GROUP",
                 "EXPERT_DATA_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
                 "POSITION_EMBEDDING_GROUP", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
                 "DATA_PARALLEL_GROUP_GLOO"):  # fmt: skip
        made = memberships(
            Programs(world, (Program.from_ops(0, [Op("barrier", name)]),), np.zeros(world.size))
        )[name]
        for rank in range(world.size):
            expected = world.group(rank, name.removesuffix("_GLOO")) or ()
            assert tuple(made.group(rank)) == expected
            if expected:
                assert made.position[rank] == expected.index(rank)


def test_classes_of_one_group_share_what_they_know_of_it():
    """4,096 different ranks in one group took 2 GB and half a minute before they did."""
    ops = [[Op("compute", ns=rank), Op("barrier", "default_pg")] for rank in range(64)]
    made = world_graph.build(
        Programs.one_per_rank([Program.from_ops(rank, one) for rank, one in enumerate(ops)])
    )
    assert len(made.classes) == 64
    assert len({id(members["default_pg"]) for members in made.classes.members}) == 1
    assert made.check() == []
    assert len(made.matched_calls) == 1
