"""Ranks without a pipeline are all siblings: who rightly makes other calls is not to blame."""

import random

import pytest
from helpers import random_hangs
from helpers.dump_values import Dump, verdict
from helpers.flight_dumps import FULL
from helpers.production import ACTIVE
from helpers.random_hangs import dumps_of, named

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.programs.program_text import parse
from megatron_prism.core.world import World
from megatron_prism.features.hang import analyze as hang
from megatron_prism.features.hang import waits
from megatron_prism.features.hang.state import JobState
from megatron_prism.graph import stall

TP, DP = "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP"
MP = "MODEL_PARALLEL_GROUP"


def iteration(world, rank, unlike):
    """Of two microbatches; ``unlike``: which ranks make other calls than the rest, and may."""
    tp, replica, ops = world.tp, rank // world.tp, []
    if unlike == "firsts report" and rank % tp == 0:
        ops.append(Op("all_reduce", DP, "int64", 1, 1, "sum"))
    layers = 1 if unlike == "two modules" and replica == 0 else 4
    for _ in range(3 if unlike == "more microbatches" and replica == 0 else 2):
        ops.append(Op("broadcast", TP, "int64", 64, 64, root=0))
        for _ in range(layers):
            ops += [Op("compute", ns=1), Op("all_gather", TP, "bf16", 32, 32 * tp),
                    Op("reduce_scatter", TP, "bf16", 32 * tp, 32, "sum")]  # fmt: skip
    all_in = 64 * world.size // tp
    return [*ops, Op("reduce_scatter", DP, "fp32", all_in, 64, "sum"),
            Op("all_reduce", MP, "fp32", 1, 1, "sum"), Op("host_wait", note="device"),
            Op("all_gather", DP, "fp32", 64, all_in)]  # fmt: skip


def judged(world, unlike, change, how):
    """The verdict on three iterations of which ``change`` gets one rank's ops, rank -> change."""
    ops = {r: iteration(world, r, unlike) * 3 for r in range(world.size)}
    for rank, edit in change.items():
        edit(ops[rank])
    programs = Programs.one_per_rank([Program.from_ops(r, o) for r, o in ops.items()], world)
    state = stall.run_until_stalled(programs)
    assert not state.finished
    return hang.diagnose_dumps(dumps_of(state, **how))


def repeats(nth, name="reduce_scatter"):
    """Makes its ``nth`` call of the tensor-parallel group twice; of a name."""

    def change(ops):
        at = [i for i, op in enumerate(ops) if (op.group, op.name) == (TP, name)][nth]
        ops.insert(at, ops[at])

    return change


def leaves_out(nth, group):
    def change(ops):
        ops.pop([i for i, op in enumerate(ops) if op.group == group][nth])

    return change


SIXTEEN, EIGHT, PAIRS = World(16, tp=4), World(8, tp=4), World(12, tp=2)


@pytest.mark.parametrize("how", [ACTIVE, FULL], ids=["outstanding only", "history"])
@pytest.mark.parametrize(
    ("world", "unlike", "rank", "change"),
    [
        (SIXTEEN, "firsts report", 13, repeats(7)),  # ranks 0 to 12:4 were certain
        (SIXTEEN, "firsts report", 13, leaves_out(1, MP)),  # ranks 12, 14 and 15 were likely
        (EIGHT, "firsts report", 5, leaves_out(1, MP)),  # ranks 4, 6 and 7 were
        (PAIRS, "firsts report", 9, leaves_out(0, MP)),  # its neighbour was
        (SIXTEEN, "more microbatches", 1, leaves_out(1, MP)),  # ranks 0 to 3 were certain
        (SIXTEEN, "two modules", 1, leaves_out(1, MP)),  # ranks 0 to 3 were
        (PAIRS, "two modules", 9, repeats(0)),  # ranks 8 and 9 were likely
        (PAIRS, "two modules", 9, repeats(2)),
    ],
)
def test_who_rightly_makes_other_calls_is_not_named(world, unlike, rank, change, how):
    found = judged(world, unlike, {rank: change}, how)
    assert named(found) <= {rank}, found


def test_replicas_whose_first_iteration_is_longer_are_not_named_beside_a_rank_that_errs():
    """Ranks 0 to 3 have a microbatch more: their calls up to the step, which ended, say so."""
    found = judged(SIXTEEN, "more microbatches", {13: leaves_out(0, MP)}, FULL)
    assert named(found) == {13}


@pytest.mark.parametrize("rank", [2, 4, 11, 13])
@pytest.mark.parametrize("change", [repeats(0), leaves_out(0, DP), leaves_out(1, TP)])
def test_the_first_of_a_group_makes_calls_that_the_firsts_of_others_make(rank, change):
    """Ranks 0 to 12:4 report, and the others do not; ranks 0, 4 and 12 were certain."""
    found = judged(SIXTEEN, "firsts report", {rank: change}, FULL)
    assert named(found) <= {rank}, found


def test_a_whole_group_that_agrees_is_a_doubt():
    ops = [op for _ in range(3) for op in iteration(SIXTEEN, 0, "")]
    programs = Programs.one_per_rank([Program.from_ops(r, ops) for r in range(16)], SIXTEEN)
    state = JobState(dumps_of(stall.run_until_stalled(programs), **FULL))
    doubts = waits.supporting_evidence(state, [0, 1, 2, 3])
    assert any("perhaps they rightly make other calls" in doubt for doubt in doubts)
    assert not waits.supporting_evidence(state, [0, 1, 2])


@pytest.mark.parametrize(
    ("kinds", "how"),
    [
        (("dtype", "lost"), FULL),
        (("drop", "lost"), FULL),
        (("shape", "inversion"), FULL),
        (("shape", "inversion"), ACTIVE),
    ],
)
def test_of_two_faults_what_one_rank_did_does_not_depend_on_the_other(kinds, how):
    """Waits lead to either of them; each did something that its equals did otherwise."""
    rng, world = random.Random(7), random_hangs.WORLDS[4]
    programs, ranks = random_hangs.healthy(world), (21, 90)
    for kind, rank in zip(kinds, ranks, strict=True):
        programs, _ = random_hangs.KINDS[kind](rng, programs, rank)
    found = hang.diagnose_dumps(dumps_of(stall.run_until_stalled(programs), **how))
    assert named(found) == set(ranks), found


@pytest.mark.parametrize(("kind", "seed"), [("swap", 52), ("extra", 29)])
def test_who_is_right_of_two_is_told_by_its_next_calls(kind, seed):
    """Of two members of a group the one whose later calls have the numbers of its siblings'."""
    world = random.Random(seed)
    world.choice([*random_hangs.KINDS])
    programs, _, culprits = random_hangs.draw(kind, world.choice(random_hangs.WORLDS), seed)
    found = hang.diagnose_dumps(dumps_of(stall.run_until_stalled(programs), **ACTIVE))
    assert named(found) == culprits, found


@pytest.mark.parametrize("replicas", [2, 4])
def test_half_of_the_ranks_that_evaluate_decide_nothing_by_coming_further(replicas):
    """The ranks that make a call more have the last numbers for themselves.

    The others were named ("skipped call", likely): siblings in the other data-parallel group that
    evaluate too gave these numbers to the calls of the ranks that erred.
    """
    size = 2 * replicas
    dumps = {}
    for rank in range(size):
        dump = Dump({"mp": range(size), "dp": range(rank % 2, size, 2)})
        for _ in range(3):
            dump.call("dp", "_reduce_scatter_base", done=True, size=400)
            dump.call("dp", "_allgather_base", done=True, size=100)
        if 2 * rank >= size:
            dump.call("dp", "all_reduce", size=2)
        dump.call("dp", "_reduce_scatter_base", size=400)
        dump.call("dp", "_allgather_base", size=100)
        dumps[rank] = dump
    named_ranks, found = verdict(dumps)
    assert named_ranks == set()
    assert found.verdict == "mismatch"
    assert found.seq == 7


def test_calls_that_both_of_two_make_do_not_tell_which_was_right_before():
    """Rank 1 broadcasts, rank 0 reduces: both reduce next, as their siblings do."""
    text = "prism-program 1\nworld size=4 tp=2 cp=2\n"
    for rank in range(4):
        questioned = f"broadcast {TP} bf16 n=64 root=0"
        if rank != 1:
            questioned = f"all_reduce {TP} bf16 n=64 reduce=sum"
        text += f"program ranks={rank}\n"
        text += f"0F0 all_reduce {TP} bf16 n=64 reduce=sum\n"
        text += f"0F0 {questioned}\n"
        text += "0F0 all_gather CONTEXT_PARALLEL_GROUP bf16 in=32 out=64\n"
        text += f"0F0 all_reduce {TP} bf16 n=64 reduce=sum\n"
    state = stall.run_until_stalled(parse(text, "two"))
    found = hang.diagnose_dumps(dumps_of(state, **ACTIVE))
    assert found.candidates == (0, 1), found
    assert not found.culprits, found
