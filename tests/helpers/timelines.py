"""Timelines to render."""

import dataclasses

import numpy as np
from helpers.programs import PP, TP

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Builder, Program, Programs
from megatron_prism.core.world import World
from megatron_prism.graph import world_graph
from megatron_prism.replay import costs, timeline
from megatron_prism.replay.costs.machine import machine

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{data}}\u2028'\""


def replayed(programs, iterations=2, collective_ns=None):
    made = world_graph.build(programs)
    prices = costs.price_ops(made, machine("h200"))
    if collective_ns is not None:
        prices = dataclasses.replace(
            prices, collective_ns=np.full_like(prices.collective_ns, collective_ns)
        )
    return timeline.build_timeline(made, prices, iterations)


def tiny():
    """Two stages, two microbatches, memory and flops: all that a report can show."""
    made = []
    for stage in range(2):
        build = Builder()
        build.memory(0, 1000)
        build.memory(1, 24)
        for m in range(2):
            at = {"phase": "forward", "microbatch": m, "chunk": 0}
            if stage:
                build.add("recv", PP, dtype="bf16", num_out=4096, peer=-1, **at)
            build.memory(2 + m, 512)
            build.add("compute", ns=50_000, flops=10**9, kernels=3, note="gemm", **at)
            size = {"num_in": 4096, "num_out": 4096, "reduce": "sum"}
            build.add("all_reduce", TP, dtype="bf16", site="mappings.py:31", **size, **at)
            if not stage:
                build.add("send", PP, dtype="bf16", num_in=4096, peer=1, **at)
        build.memory(2, -512)
        one = {"num_in": 1, "num_out": 1, "reduce": "sum"}
        build.add("all_reduce", "default_pg", dtype="fp32", **one, phase="optimizer")
        made.append(build.build(stage * 4))
    world = World(8, tp=2, pp=2)
    return Programs(world, tuple(made), world._along("pp", np.arange(8)), source={"tier": "cpu"})


def hostile():
    ops = [
        Op("compute", ns=10_000, phase="forward", microbatch=0, note=HOSTILE, site=HOSTILE),
        Op("all_reduce", HOSTILE, "bf16", 64, 64, "sum", site=HOSTILE, shape=HOSTILE),
        Op("compute", ns=10_000, stream=HOSTILE),
    ]
    groups = {HOSTILE: ((0, 1),)}
    program = Program.from_ops(0, ops)
    return Programs(World(2), (program,), np.zeros(2), groups=groups, source={HOSTILE: HOSTILE})
