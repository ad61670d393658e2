"""Worlds by hand of which some ranks get other inputs."""

import dataclasses

import numpy as np
from helpers.programs import DP, EP, PP, healthy, stage_ops

from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Builder, Program, Programs
from megatron_prism.core.world import World
from megatron_prism.features.uneven.inputs import read_input
from megatron_prism.features.uneven.kinds import InputKind
from megatron_prism.features.uneven.rank_programs import Sources

WORLD = World(8, tp=2, pp=2)
HIDDEN = 4


def of_microbatches(programs, count):
    """The same world by hand: its generator knows no scheduler."""
    world = programs.world
    by_stage = []
    for stage in world.stages:
        by_stage.append(Program.from_ops(world.rank_at(pp=stage), stage_ops(stage, world, count)))
    return dataclasses.replace(programs, programs=tuple(by_stage))


def sources(world=WORLD, lengths=None, captured=None):
    return Sources(captured or healthy(world), of_microbatches, lambda path: None, lengths)


def some(word, world=WORLD):
    key, _, text = word.partition("=")
    return read_input(InputKind(key), text, world)


def pipeline(length, *, extra="", settings=None, microbatches=3):
    """Two stages, some microbatches, one forward message each; a shape ahead if lengths vary."""
    settings = settings or {}
    world = World(4, pp=2)
    programs = []
    for stage in world.stages:
        ops = []
        name, peer = ("send", 1) if stage == 0 else ("recv", -1)
        side = "num_in" if stage == 0 else "num_out"
        for microbatch in range(microbatches):
            step = {"phase": "forward", "microbatch": microbatch}
            compute = Op("compute", ns=length, **step)
            ahead = Op(name, PP, "int64", peer=peer, **{side: 3})
            tensor = Op(name, PP, "bf16", peer=peer, **{side: length * HIDDEN})
            message = [tensor]
            if "variable_seq_lengths" in settings:
                message = [ahead, tensor]
            ops += [compute, *message] if stage == 0 else [*message, compute]
        if extra:
            ops.append(Op(extra, DP, "fp32", length, length, "sum"))
        programs.append(Program.from_ops(world.rank_at(pp=stage), ops))
    line = job_settings.as_text({"seq_length": str(length), **settings})
    stages = world._along("pp", np.arange(4)).astype(np.int32)
    return Programs(world, tuple(programs), stages, source={"settings": line}, path=f"s{length}")


# -- jobs at several lengths -----------------------------------------------------------------------
LENGTHS_WORLD = World(8, pp=2)
MICROBATCHES = 3
LENGTHS_VARY = {"variable_seq_lengths": "true", "moe_token_dispatcher_type": "alltoall"}


def microbatch_ops(stage, microbatch, length, with_experts):
    """Forward or backward of a stage: work with a linear and a quadratic part."""
    step = {"phase": "forward", "microbatch": microbatch}
    ops = [Op("compute", ns=100_000 + 5000 * length + 300 * length**2, **step)]
    if with_experts:
        ops.append(Op("all_to_all", EP, "bf16", 8 * length, 8 * length, **step))
        ops.append(Op("compute", ns=1000 * length, **step))
    name, peer, side = ("send", 1, "num_in") if stage == 0 else ("recv", -1, "num_out")
    ahead = Op(name, PP, "int64", peer=peer, **{side: 3})
    tensor = Op(name, PP, "bf16", peer=peer, shape=f"{length}x4", **{side: 4 * length})
    return [*ops, ahead, tensor] if stage == 0 else [ahead, tensor, *ops]


def length_job(length, with_experts=False, world=LENGTHS_WORLD):
    programs = []
    for stage in world.stages:
        ops = []
        for microbatch in range(MICROBATCHES):
            ops += microbatch_ops(stage, microbatch, length, with_experts)
        ops.append(Op("all_reduce", DP, "fp32", 64, 64, "sum"))
        programs.append(Program.from_ops(world.rank_at(pp=stage), ops))
    settings = {"seq_length": str(length), **LENGTHS_VARY}
    source = {"settings": job_settings.as_text(settings)}
    stages = world._along("pp", np.arange(world.size)).astype(np.int32)
    return Programs(world, tuple(programs), stages, source=source, path=f"s{length}")


PARAMETERS = 1000


def memory_program(lengths):
    """All forwards, then all backwards: activations of all microbatches are alive together."""
    builder = Builder()
    builder.memory(0, PARAMETERS, "param:w")
    for microbatch, length in enumerate(lengths):
        # kept until the backward, and scores of attention that go at once
        builder.memory(10 + microbatch, 8 * length, "")
        # a workspace of one kernel
        builder.memory(30 + microbatch, 4 * length, "")
        builder.memory(30 + microbatch, -4 * length, "")
        builder.memory(20 + microbatch, length**2, "")
        builder.add("compute", phase="forward", microbatch=microbatch, ns=length)
        builder.memory(20 + microbatch, -(length**2), "")
        builder.add("compute", phase="forward", microbatch=microbatch, ns=length)
    for microbatch, length in enumerate(lengths):
        builder.add("compute", phase="backward", microbatch=microbatch, ns=length)
        builder.memory(10 + microbatch, -8 * length, "")
    builder.add("all_reduce", "DATA_PARALLEL_GROUP", dtype="fp32", num_in=4, num_out=4,
                reduce="sum", phase="sync")  # fmt: skip
    builder.add("compute", phase="optimizer", ns=1)
    return builder.build(0)


def memory_job(length):
    source = {"settings": job_settings.as_text({"seq_length": str(length)})}
    one = memory_program([length] * MICROBATCHES)
    return Programs(World(2), (one,), np.zeros(2, np.int32), source=source, path=f"s{length}")
