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
