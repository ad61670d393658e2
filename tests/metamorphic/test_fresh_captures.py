"""What-ifs, points of a sweep and memory against jobs that are captured as asked."""

import numpy as np
import pytest
from helpers.metamorphic import MACHINE, about, answer, fresh, memory, ns
from helpers.needs import MEGATRON

from megatron_prism.replay.replicas import with_data_parallel

schedule = pytest.importorskip("megatron_prism.emulate.schedule")
pytestmark = [MEGATRON, pytest.mark.slow, pytest.mark.ci]

LAYOUTS = {
    "dense": (),
    "tp2": ("tp=2", "sequence_parallel=true"),
    "pp2": ("pp=2",),
    "fp32": ("bf16=false",),
    "whole": ("use_distributed_optimizer=false",),
    "moe": ("num_experts=4", "ep=2"),
    "overlap": ("overlap_grad_reduce=true", "overlap_param_gather=true"),
}


@about("dp")
@pytest.mark.parametrize(("before", "after"), [(2, 8), (8, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_replicas_are_the_job_captured_with_them(layout, before, after):
    settings = LAYOUTS[layout]
    given, real = fresh(*settings, dp=before), fresh(*settings, dp=after)
    # Python's loops over the replicas that share a bucket follow no what-if
    # (param_and_grad_buffer.py, shard_buffer @0.16.1)
    assert ns(given, MACHINE, f"dp={after}") == pytest.approx(ns(real, MACHINE), rel=0.03)
    made = with_data_parallel(given, after)
    for (top, held), (real_top, real_held) in zip(memory(made), memory(real), strict=True):
        assert top == pytest.approx(real_top, rel=0.003)
        assert held == pytest.approx(real_held, rel=0.1)


@about("microbatches")
@pytest.mark.parametrize("layout", ["dense", "pp2", "moe"])
def test_other_microbatches_are_the_job_captured_with_them(layout):
    given, real = (fresh(*LAYOUTS[layout], microbatches=n) for n in (6, 9))
    assert ns(given, MACHINE, "microbatches=9") == pytest.approx(ns(real, MACHINE), rel=0.01)
    assert memory(answer(given, MACHINE, "microbatches=9").graph.programs) == [
        (pytest.approx(top, rel=0.001), pytest.approx(held, rel=0.03)) for top, held in memory(real)
    ]


@about("microbatches")
def test_a_steady_state_that_was_not_captured_is_the_job_captured_with_one():
    """The README's: without a wait alone between two steps of the first stage."""
    settings = "pp=4", "vpp=5", "num_layers=20", "hidden_size=64"
    given, real = (fresh(*settings, microbatches=n) for n in (8, 16))
    made = schedule.with_microbatches(given, 16)
    for one, other in zip(made.programs, real.programs, strict=True):
        assert [(op.name, op.label) for op in one] == [(op.name, op.label) for op in other]
    assert ns(made, MACHINE) == pytest.approx(ns(real, MACHINE), rel=0.001)
    for one, other in zip(made.programs, real.programs, strict=True):
        top = int(other.live_bytes().max(initial=0))  # 0: of a stage like another one
        assert int(one.live_bytes().max(initial=0)) == pytest.approx(top, rel=0.005)


@about("microbatches")
@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8)])
@pytest.mark.parametrize("layout", [(), ("num_experts=4", "ep=2")], ids=["dense", "moe"])
def test_buffers_of_messages_live_as_long_as_in_the_job_captured_with_them(layout, before, after):
    settings = "pp=4", "vpp=2", "num_layers=8", "hidden_size=64", *layout
    given, real = (fresh(*settings, microbatches=n) for n in (before, after))
    made = schedule.with_microbatches(given, after)
    assert "peaks may be off" not in made.source["what-if"]
    for one, other in zip(made.programs, real.programs, strict=True):
        assert one.live_bytes().max(initial=0) == other.live_bytes().max(initial=0)
        if not len(other.allocations):  # of a stage like another one
            continue
        levels, real_levels = (_levels(program) for program in (one, other))
        # the mean of the losses reads all of them; emptied outputs have two bytes each
        assert np.abs(levels - real_levels).max() <= 8 * max(before, after)


def _levels(program):
    """int64 [ops + 1]: the most that is alive while each op is asked for; 0: no change."""
    levels = np.zeros(len(program) + 1, dtype=np.int64)
    np.maximum.at(levels, program.allocations["before"], program.live_bytes())
    return levels


@pytest.mark.parametrize("layout", ["dense", "tp2", "pp2", "moe"])
def test_whichever_rank_of_a_stage_is_captured(layout):
    first, last = fresh(*LAYOUTS[layout]), fresh(*LAYOUTS[layout], rank=-1)
    assert ns(last, MACHINE) == pytest.approx(ns(first, MACHINE), rel=0.005)
    for (top, _), (other, _) in zip(memory(first), memory(last), strict=True):
        assert other == pytest.approx(top, rel=0.002)


def test_memory_of_a_job_is_that_of_longer_runs():
    short, long = (fresh(f"train_iters={n}") for n in (2, 5))
    assert [top for top, _ in memory(long)] == [top for top, _ in memory(short)]
    assert ns(long, MACHINE) == ns(short, MACHINE)
