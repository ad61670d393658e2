"""Tensors of messages go when Megatron's scheduler drops them, with other microbatches too."""

import dataclasses

import numpy as np
import pytest

from megatron_prism.core.programs.ops import CODE, DTYPE_NAMES

schedule = pytest.importorskip("megatron_prism.emulate.schedule")

SHAPE = DTYPE_NAMES.index("int64")
ELEMENTS, NUM_BYTES = 64, 256  # of every message, in fp32


def with_tensors(programs):
    """The schedule as a job that has the tensors of its messages and nothing else."""
    found = []
    for program in programs.programs:
        ops, strings = program.ops.copy(), [*program.strings]
        messages = np.isin(ops["name"], (CODE["send"], CODE["recv"]))
        ops["dtype"][messages & (ops["dtype"] != SHAPE)] = DTYPE_NAMES.index("fp32")
        ops["num_in"][messages] = ops["num_out"][messages] = ELEMENTS
        strings.append("@core/pipeline_parallel/p2p_communication.py:310")
        memory = program.allocations.copy()
        received = [i for i, text in enumerate(strings) if text == "received"]
        comes = memory["bytes"] > 0
        is_message = comes & np.isin(memory["note"], received)
        memory["note"] = np.where(is_message, len(strings) - 1, 0)
        memory["bytes"] *= NUM_BYTES
        found.append(
            dataclasses.replace(program, ops=ops, strings=tuple(strings), allocations=memory)
        )
    return dataclasses.replace(programs, programs=tuple(found))


def with_reductions(programs, overlapped=True):
    """The schedule as a job that reduces gradients: one bucket of dense parameters, one of experts.

    Overlapped buckets are reduced where the scheduler asks for it, and Python drops its tensors
    behind both; others are reduced behind the scheduler's last step, as it has returned.
    """
    changed = []
    calls = ["compute", "reduce_scatter", "compute", "reduce_scatter"]
    for program in programs.programs:
        ops = program.ops
        in_backward = [place for place, text in enumerate(program.strings) if text == "in backward"]
        is_asked_for = (ops["name"] == CODE["grad_sync"]) & ~np.isin(ops["note"], in_backward)
        counts = np.ones(len(ops), dtype=np.int64)
        if overlapped:
            counts[is_asked_for] = len(calls)
            first_calls = np.flatnonzero(is_asked_for)
        else:
            counts[is_asked_for] = 0
            first_calls = np.array([len(ops) - 1])  # the mark of the iteration's end
            counts[first_calls] = len(calls) + 1
        starts = np.concatenate(([0], np.cumsum(counts)))
        new_ops = np.repeat(ops, counts)
        for start in starts[first_calls].tolist():
            for place, name in enumerate(calls, start):
                new_ops["name"][place] = CODE[name]
                if overlapped and name == "reduce_scatter":
                    new_ops["handle"][place] = len(ops) + place
        memory = program.allocations.copy()
        memory["before"] = starts[memory["before"]]
        changed.append(dataclasses.replace(program, ops=new_ops, allocations=memory))
    return dataclasses.replace(programs, programs=tuple(changed))


def lifetimes(program):
    """(before which op it comes, before which it goes) of every storage, in order."""
    found = {}
    for before, storage, size, _ in program.allocations.tolist():
        if size > 0:
            found[storage] = (before, -1)
        else:
            found[storage] = (found[storage][0], before)
    return sorted(found.values())


@pytest.mark.parametrize(
    ("sizes", "given", "wanted"),
    [
        ({"pp": 4, "vpp": 2}, 8, 16),
        ({"pp": 4, "vpp": 2}, 16, 8),
        ({"pp": 4, "vpp": 2, "warmup_flush": True}, 12, 16),
        ({"pp": 4, "vpp": 2, "overlap_p2p": False}, 16, 24),
        ({"pp": 4, "vpp": 2, "group_size": 6}, 18, 30),
        ({"pp": 2, "vpp": 2}, 6, 10),
        ({"pp": 4}, 8, 12),
        ({"pp": 4}, 12, 8),
        ({"pp": 2}, 5, 64),
    ],
)
def test_each_tensor_lives_as_long_as_in_the_schedule_of_that_number(sizes, given, wanted):
    captured = with_tensors(schedule.schedules(microbatches=given, **sizes))
    real = with_tensors(schedule.schedules(microbatches=wanted, **sizes))
    made = schedule.with_microbatches(captured, wanted)
    for one, other in zip(made.programs, real.programs, strict=True):
        assert lifetimes(one) == lifetimes(other)
        assert one.live_bytes().max() == other.live_bytes().max() > 0


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("given", [8, 16])
def test_tensors_outlive_the_calls_that_the_scheduler_asks_for(given, overlapped):
    """Four stages of two chunks, of which 8 microbatches show no steady state."""
    sizes = {"pp": 4, "vpp": 2}
    wanted = 24 - given
    captured = with_tensors(
        with_reductions(schedule.schedules(microbatches=given, **sizes), overlapped)
    )
    real = with_tensors(
        with_reductions(schedule.schedules(microbatches=wanted, **sizes), overlapped)
    )
    made = schedule.with_microbatches(captured, wanted)
    for one, other in zip(made.programs, real.programs, strict=True):
        assert lifetimes(one) == lifetimes(other)
    assert "peaks may be off" not in made.source["what-if"]


def test_a_buffer_that_the_schedule_does_not_explain_follows_captured_steps():
    """Each received tensor is held until the end: none goes earlier than it was captured."""
    programs = with_tensors(schedule.schedules(pp=4, microbatches=8))
    program = programs.programs[1]
    memory = program.allocations
    received = [s for _, s, size, note in memory.tolist() if size > 0 and note]
    goes = (memory["bytes"] < 0) & np.isin(memory["storage"], received)
    late = memory[goes]
    late["before"] = len(program)
    changed = dataclasses.replace(program, allocations=np.concatenate([memory[~goes], late]))
    captured = dataclasses.replace(
        programs, programs=(programs.programs[0], changed, *programs.programs[2:])
    )
    made = schedule.with_microbatches(captured, 12).programs[1]
    ends = [end for _, end in lifetimes(made)]
    assert ends.count(len(made)) >= 23
