"""Ranks of one class stand still at one place: a class is run once, and nothing else comes out."""

import dataclasses

import pytest
from helpers import random_hangs
from helpers.hang_worlds import CASES, world
from oracles import naive_stall

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.features.hang import fault_plan
from megatron_prism.features.hang import planting as fault_planting
from megatron_prism.graph import stall


def same(programs, faults=None):
    """The job that stands still, run by classes; rank by rank it is the same."""
    found = stall.run_until_stalled(programs, faults)
    alone = naive_stall.Run(programs, faults).to_the_end()
    assert found.issued == alone.issued
    for rank, plan in enumerate(alone.plan):
        calls = [i for i, name in enumerate(plan.names) if naive_stall.TALK[name] or plan.hosts[i]]
        for mine, theirs in ((found.done, alone.done), (found.ready, alone.ready)):
            assert all(mine[rank][i] == theirs[rank][i] for i in calls if mine is found.done
                       or naive_stall.TALK[plan.names[i]]), rank  # fmt: skip
    return found


@pytest.mark.parametrize("kind", random_hangs.KINDS)
def test_classes_stand_where_their_ranks_do(kind):
    for seed, size in enumerate(random_hangs.WORLDS[:4]):
        programs, faults, _ = random_hangs.draw(kind, size, seed)
        same(programs, faults)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_captured_worlds_stand_where_their_ranks_do(case):
    found = fault_planting.plant(world(case.world), [fault_plan.parse(f) for f in case.faults])
    assert not same(found.programs, found.faults).finished


def test_groups_that_hold_the_same_classes_in_another_order_are_told_apart():
    """In (A, B) what each sends is what the other expects; in (B, A) it is not."""
    splits = (((1, 2), (1, 3)), ((3, 4), (2, 4)))
    made = [Program.from_ops(r, [Op("all_to_all", "pairs", "bf16", splits=splits[r % 2])])
            for r in range(4)]  # fmt: skip
    programs = Programs.one_per_rank(made, World(4))
    programs = dataclasses.replace(programs, groups={"pairs": ((0, 1), (3, 2))})
    assert [bytes(done) for done in same(programs).done] == [b"\1", b"\1", b"\0", b"\0"]
