"""Whose tensors messages between stages carry, on programs by hand."""

import numpy as np
import pytest
from helpers.programs import PP

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.features.uneven.stage_messages import crossing_finding, read_messages

WORLD, SITE = "default_pg", "core/pipeline_parallel/p2p_communication.py:1"


def forward(microbatch, chunk=-1):
    return Op("compute", ns=1, phase="forward", microbatch=microbatch, chunk=chunk)


def backward(microbatch, chunk=-1):
    return Op("compute", ns=1, phase="backward", microbatch=microbatch, chunk=chunk)


def send(peer, group=PP, batch=-1, dtype="bf16"):
    return Op("send", group, dtype, num_in=8, peer=peer, batch=batch, site=SITE)


def recv(peer, group=PP, batch=-1, dtype="bf16"):
    return Op("recv", group, dtype, num_out=8, peer=peer, batch=batch, site=SITE)


def of_stages(world, *ops_of_stages):
    programs = []
    for stage, ops in enumerate(ops_of_stages):
        programs.append(Program.from_ops(world.rank_at(pp=stage), ops))
    stages = world._along("pp", np.arange(world.size)).astype(np.int32)
    return Programs(world, tuple(programs), stages)


def microbatches(programs, stage):
    messages = read_messages(programs.programs[stage], programs)
    return [number for number in messages.microbatch.tolist() if number >= 0]


def test_directions_of_three_stages_say_what_a_message_is():
    # the middle stage runs a forward ahead, so that its messages alternate
    middle = [
        recv(-1), forward(0), send(1), recv(-1), forward(1), send(1),
        recv(1), backward(0), send(-1), recv(1), backward(1), send(-1),
    ]  # fmt: skip
    first = [forward(0), send(1), forward(1), send(1), recv(1), backward(0), recv(1), backward(1)]
    last = [
        recv(-1),
        forward(0),
        backward(0),
        send(-1),
        recv(-1),
        forward(1),
        backward(1),
        send(-1),
    ]
    programs = of_stages(World(3, pp=3), first, middle, last)
    assert microbatches(programs, 0) == [0, 1, 0, 1]
    assert microbatches(programs, 1) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert microbatches(programs, 2) == [0, 0, 1, 1]


def test_chunks_overtake_each_other():
    # three stages of two chunks: the first one's second chunk gets what the last one's first made
    first = [
        forward(0, 0), send(1), forward(1, 0), send(1), forward(2, 0), send(1),
        recv(-1), forward(0, 1), send(1), recv(-1), forward(1, 1), send(1), recv(-1), forward(2, 1),
        send(1),
    ]  # fmt: skip
    last = []
    for chunk in (0, 1):
        for number in range(3):
            last += [recv(-1), forward(number, chunk)]
            if chunk == 0:
                last.append(send(1))
    middle = []
    for chunk in (0, 1):
        for number in range(3):
            middle += [recv(-1), forward(number, chunk), send(1)]
    programs = of_stages(World(3, pp=3, vpp=2), first, middle, last)
    assert microbatches(programs, 0) == [0, 1, 2, 0, 0, 1, 1, 2, 2]
    assert microbatches(programs, 2) == [0, 0, 1, 1, 2, 2, 0, 1, 2]


def exchange(*, batched):
    """Two stages of two chunks: each has made a gradient and an output, and needs both kinds."""
    # single messages: what rank 0 sends in the group of stages rank 1 sends in that of all ranks
    groups = [(PP, WORLD), (WORLD, PP)]
    if batched:
        groups = [(PP, PP), (PP, PP)]
    (to_last, from_last), (to_first, from_first) = groups
    first = [forward(9, 0), send(1, to_last), recv(1, from_last)]
    last = [backward(0, 1), send(1, to_first), recv(1, from_first)]
    if batched:
        # to the previous stage, from it, to the next one, from it
        batch = [send(1, batch=7), recv(1, batch=7), send(1, batch=7), recv(1, batch=7)]
        first += [backward(0, 1), forward(1, 0), *batch]
        last += [forward(9, 0), backward(4, 1), *batch]
    else:
        first += [backward(0, 1), send(1, to_last), forward(1, 0), send(1, to_last)]
        first += [recv(1, from_last), recv(1, from_last)]
        last += [forward(9, 0), send(1, to_first), backward(4, 1), send(1, to_first)]
        last += [recv(1, from_first), recv(1, from_first)]
    first += [forward(2, 1), backward(3, 1)]
    last += [forward(2, 0), backward(3, 0)]
    return of_stages(World(2, pp=2, vpp=2), first, last)


def test_single_messages_of_two_stages_are_what_is_ready():
    programs = exchange(batched=False)
    messages = read_messages(programs.programs[0], programs)
    assert microbatches(programs, 0) == [9, 0, 0, 1, 2, 3]
    assert microbatches(programs, 1) == [0, 9, 9, 4, 3, 2]
    assert messages.crossed == ()


def test_batches_of_two_stages_cross():
    programs = exchange(batched=True)
    messages = read_messages(programs.programs[0], programs)
    assert microbatches(programs, 0) == [9, 0, 0, 2, 1, 3]
    assert microbatches(programs, 1) == [0, 9, 4, 2, 9, 3]
    first, second = messages.crossed
    assert (first.expected.step, first.sent.step) == (
        "forward of microbatch 2 of chunk 1",
        "backward of microbatch 4 of chunk 1",
    )
    assert (second.expected.phase, second.sent.phase) == ("backward", "forward")
    finding = crossing_finding(programs, 0, first)
    assert (finding.kind, finding.ranks, finding.number) == ("order", (1, 0), 2)
    assert "rank 1: what its backward of microbatch 4 of chunk 1 made" in finding.picture


@pytest.mark.parametrize(
    "first",
    [
        # more messages than steps
        [forward(0), send(1), send(1)],
        # a message before the step that makes it
        [send(1), forward(0)],
        # a message behind the step that takes it
        [forward(0), send(1), backward(0), recv(1)],
    ],
)
def test_a_message_of_no_step_is_refused(first):
    last = [recv(-1), forward(0), backward(0), send(-1)]
    programs = of_stages(World(2, pp=2), first, last)
    with pytest.raises(UnsupportedError, match="is of no one microbatch"):
        read_messages(programs.programs[0], programs)


def test_two_tensors_that_are_ready_are_not_guessed():
    ops = [forward(0, 0), backward(0, 1), send(1)]
    programs = of_stages(World(2, pp=2, vpp=2), ops, [recv(1), forward(0, 0)])
    with pytest.raises(UnsupportedError, match="op 2 of rank 0"):
        read_messages(programs.programs[0], programs)


def test_a_shape_ahead_is_of_the_message_behind_it():
    ahead = {"dtype": "int64"}
    first = [forward(0), send(1, **ahead), send(1), forward(1), send(1, **ahead), send(1)]
    last = [recv(-1, **ahead), recv(-1), forward(0), recv(-1, **ahead), recv(-1), forward(1)]
    programs = of_stages(World(2, pp=2), first, last)
    messages = read_messages(programs.programs[1], programs)
    assert messages.microbatch.tolist() == [0, 0, -1, 1, 1, -1]
    assert messages.is_shape.tolist() == [True, False, False, True, False, False]
    assert messages.shape_from.tolist() == [-1, 0, -1, -1, 1, -1]
