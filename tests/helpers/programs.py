"""Small worlds of programs, healthy and with one op changed."""

import dataclasses

import numpy as np

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World

TP, PP = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"
DP, CP, EP = "DATA_PARALLEL_GROUP_WITH_CP", "CONTEXT_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL_GROUP"


def without_host(program):
    """The program without times of its host, which takes another each time."""
    ops = program.ops.copy()
    ops["host"] = ops["lead"] = -1
    return dataclasses.replace(program, ops=ops)


def stage_ops(stage, world, microbatches=2):
    """A 1F1B-like stage with everything a group can do."""
    ops = []
    for m in range(microbatches):
        at = {"phase": "forward", "microbatch": m}
        if stage > 0:
            ops.append(Op("recv", PP, "bf16", num_out=64, peer=-1, **at))
        ops.append(Op("compute", ns=100 + stage, **at))
        ops.append(Op("all_reduce", TP, "bf16", 64, 64, "sum", site="mappings.py:31", **at))
        ops.append(Op("all_gather", CP, "bf16", 64, 64 * world.cp, **at))
        ops.append(Op("send", CP, "bf16", num_in=8, peer=1, batch=m, **at))
        ops.append(Op("recv", CP, "bf16", num_out=8, peer=-1, batch=m, **at))
        even = (4,) * world.ep
        ops.append(Op("all_to_all", EP, "bf16", 8 * world.ep, 8 * world.ep, splits=(even, even)))
        if stage < world.pp - 1:
            ops.append(Op("send", PP, "bf16", num_in=64, peer=1, **at))
    ops.append(Op("broadcast", TP, "int64", 5, 5, root=0))
    ops.append(Op("reduce_scatter", DP, "fp32", 64 * world.dp * world.cp, 64, "sum", batch=7))
    ops.append(Op("reduce_scatter", DP, "fp32", 64 * world.dp * world.cp, 64, "sum", batch=7))
    ops.append(Op("all_reduce", "default_pg", "fp32", 1, 1, "max"))
    if stage in (0, world.pp - 1):
        ops.append(Op("all_reduce", "EMBEDDING_GROUP", "fp32", 9, 9, "sum"))
    return ops


def healthy(world):
    by_stage = [Program.from_ops(world.rank_at(pp=s), stage_ops(s, world)) for s in world.stages]
    return Programs(world, tuple(by_stage), world._along("pp", np.arange(world.size)))


def with_rank(programs, rank, ops):
    """The same world, with one rank that runs ``ops``."""
    of = programs.program_of.copy()
    of[rank] = len(programs.programs)
    changed = (*programs.programs, Program.from_ops(rank, ops))
    return dataclasses.replace(programs, programs=changed, program_of=of)


WORLDS = [
    World(1),
    World(8, tp=2, pp=2),
    World(16, tp=2, pp=4, cp=2, ep=2),
    World(64, tp=2, pp=4, cp=2, ep=4, etp=1),
    World(128, tp=4, pp=2, cp=2, ep=8),
    World(512, tp=8, pp=8, ep=8),
]


# -- an independent rank-level graph --------------------------------------------------------------
def members_of(programs, rank, name):
    if name == "default_pg":
        return tuple(range(programs.world.size))
    if name in programs.groups:
        return next(g for g in programs.groups[name] if rank in g)
    return programs.world.group(rank, name)


# -- faults ---------------------------------------------------------------------------------------
def index_of(ops, name, group, nth=0):
    return [i for i, op in enumerate(ops) if op.name == name and op.group == group][nth]


def edit(call, where, nth=0, **fields):
    def change(ops):
        at = index_of(ops, call, where, nth)
        ops[at] = dataclasses.replace(ops[at], **fields)

    return change


def drop(name, group, nth=0):
    return lambda ops: ops.pop(index_of(ops, name, group, nth))


def swap(first, second):
    def change(ops):
        a, b = index_of(ops, *first), index_of(ops, *second)
        ops[a], ops[b] = ops[b], ops[a]

    return change


FAULTS = {
    "missing": (drop("all_reduce", TP, 1), "missing", TP, "rank 5 never calls all_reduce bf16 #2"),
    "missing last": (drop("broadcast", TP), "missing", TP, "rank 5 stops 1 call before rank"),
    "extra": (lambda ops: ops.insert(0, Op("barrier", TP)), "missing", TP, "rank 5 calls barrier"),
    "order": (swap(("all_reduce", TP, 1), ("broadcast", TP)), "order", TP, "another order"),
    "shape": (edit("all_reduce", TP, num_in=32, num_out=32), "shape", TP, "64 elements on rank 4, "
              "32 elements on rank 5"),
    "dtype": (edit("all_reduce", TP, 1, dtype="fp32"), "dtype", TP, "bf16 on rank 4, fp32 on"),
    "reduce op": (edit("all_reduce", TP, reduce="max"), "reduce op", TP, "sum on rank 4, max on"),
    "root": (edit("broadcast", TP, root=1), "root", TP, "0 on rank 4, 1 on rank 5"),
    "operation": (edit("all_reduce", TP, name="broadcast"), "operation", TP, "all_reduce on rank"),
    "coalescing": (edit("reduce_scatter", DP, 1, batch=8), "coalescing", DP, "coalescing"),
    "splits": (edit("all_to_all", EP, 1, splits=((3, 5), (4, 4))), "splits", EP, "which expects 8"),
    "too few splits": (edit("all_to_all", EP, splits=((8,), (4, 4))), "splits", EP, "1 splits for"),
    "send shape": (edit("send", PP, 1, num_in=63), "shape", PP, "does not expect"),
    "send dtype": (edit("send", PP, dtype="fp16"), "dtype", PP, "does not expect"),
    "no send": (drop("send", PP), "unmatched receive", PP, "posts 1 more recv than rank 5"),
    "no receive": (drop("recv", PP), "unmatched send", PP, "posts 1 more send than rank 5"),
    "wrong group": (edit("all_reduce", TP, 1, group=CP), "wrong group", TP, f"of {TP} in {CP}"),
    "never": (lambda ops: ops.clear(), "missing", TP, "stops 3 calls before"),
}  # fmt: skip
