"""Worlds by hand of which some ranks get other inputs."""

import dataclasses

import numpy as np
from helpers.programs import DP, PP, healthy, stage_ops

from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
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
