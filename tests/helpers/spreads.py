"""Variabilities of one kind, and a pipeline to vary."""

import numpy as np
from helpers.pricing import priced

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.features.predict.variability import Variability

TP, PP, ALL = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP", "default_pg"


def spread(**parts):
    return Variability("test", *(parts.get(p, 0.0) for p in ("gpu", "step", "call", "network")), "")


def still(programs):
    """Calls take no time here unless a test says so."""
    return priced(programs, 0)


def same(world, ops):
    return Programs(world, (Program.from_ops(0, ops),), np.zeros(world.size))


def pipeline(world, microbatches=4):
    programs = []
    for stage in world.stages:
        ops = []
        for m in range(microbatches):
            at = {"phase": "forward", "microbatch": m}
            if stage:
                ops.append(Op("recv", PP, "bf16", num_out=8, peer=-1, **at))
            ops.append(Op("compute", ns=100_000 * (1 + stage), **at))
            ops.append(Op("all_reduce", TP, "bf16", 8, 8, "sum", **at))
            if stage < world.pp - 1:
                ops.append(Op("send", PP, "bf16", num_in=8, peer=1, **at))
        ops.append(Op("all_reduce", ALL, "fp32", 1, 1, "sum"))
        programs.append(Program.from_ops(world.rank_at(pp=stage), ops))
    return Programs(world, tuple(programs), world._along("pp", np.arange(world.size)))
