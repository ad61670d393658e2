"""Faults with known culprits: drawn by seed, run to a standstill, written as dumps."""

import dataclasses
import random

from helpers.programs import DP, PP, TP, healthy, index_of, with_rank

from megatron_prism.core.files import no_collector
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.world import World
from megatron_prism.features.hang import analyze as hang
from megatron_prism.features.hang import dumps, export
from megatron_prism.features.hang.dumps import DumpSet
from megatron_prism.graph import stall
from megatron_prism.graph.stall import RankFault

WORLDS = [
    World(16, tp=2, pp=4, cp=2, ep=2),
    World(16, tp=2, pp=2, ep=2),
    World(32, tp=4, pp=2, ep=4),
    World(64, tp=2, pp=4, cp=2, ep=4, etp=1),
    World(128, tp=4, pp=2, cp=2, ep=8),
    World(256, tp=8, pp=4, ep=8),
    World(512, tp=8, pp=8, ep=8),
]
COMMON = [(TP, "all_reduce"), ("CONTEXT_PARALLEL_GROUP", "all_gather"), (DP, "reduce_scatter")]


def edited(programs, rank, change):
    ops = list(programs.of(rank))
    change(ops)
    return with_rank(programs, rank, ops)


def replaced(group, call, nth, **fields):
    def change(ops):
        at = index_of(ops, call, group, nth)
        ops[at] = dataclasses.replace(ops[at], **fields)

    return change


def drop(rng, programs, rank):
    nth = rng.randrange(2)
    return edited(programs, rank, lambda ops: ops.pop(index_of(ops, "all_reduce", TP, nth))), {}


def shape(rng, programs, rank):
    change = replaced(TP, "all_reduce", rng.randrange(2), num_in=32, num_out=32)
    return edited(programs, rank, change), {}


def dtype(rng, programs, rank):
    change = replaced(TP, "all_reduce", rng.randrange(2), dtype="fp32")
    return edited(programs, rank, change), {}


def operation(rng, programs, rank):
    change = replaced(TP, "all_reduce", rng.randrange(2), name="broadcast", reduce="", root=0)
    return edited(programs, rank, change), {}


def swap(rng, programs, rank):
    def change(ops):
        a, b = index_of(ops, "all_reduce", TP, 1), index_of(ops, "broadcast", TP)
        ops[a], ops[b] = ops[b], ops[a]

    return edited(programs, rank, change), {}


def inversion(rng, programs, rank):
    """Two groups the other way round on one rank: a ring over groups, which no group shows."""

    def change(ops):
        a = index_of(ops, "all_reduce", TP, 1)
        b = index_of(ops, "all_to_all", "EXPERT_MODEL_PARALLEL_GROUP", 1)
        ops[a], ops[b] = ops[b], ops[a]

    return edited(programs, rank, change), {}


def lost(rng, programs, rank):
    name = "send" if _has(programs, rank, "send") else "recv"
    return edited(programs, rank, lambda ops: ops.pop(index_of(ops, name, PP))), {}


def _has(programs, rank, name):
    return any(op.name == name and op.group == PP for op in programs.of(rank))


def message_shape(rng, programs, rank):
    name, field = ("send", "num_in") if _has(programs, rank, "send") else ("recv", "num_out")
    return edited(programs, rank, replaced(PP, name, 1, **{field: 63})), {}


def extra(rng, programs, rank):
    return edited(programs, rank, lambda ops: ops.insert(0, Op("barrier", TP))), {}


def host_stuck(rng, programs, rank):
    ops = list(programs.of(rank))
    return programs, {rank: RankFault(host=rng.randrange(index_of(ops, "broadcast", TP)))}


def gil(rng, programs, rank):
    """Stuck with something outstanding: the host stops at a place where others wait too."""
    return programs, {rank: RankFault(host=rng.randrange(len(programs.of(rank)) - 2))}


def killed(rng, programs, rank):
    return programs, {rank: RankFault(host=rng.randrange(len(programs.of(rank)) - 2), silent=True)}


def gpu_error(rng, programs, rank):
    at = index_of(list(programs.of(rank)), "all_reduce", TP)
    return programs, {rank: RankFault(blind=at, host=rng.randrange(at + 4, at + 7))}


def gpu_hang(rng, programs, rank):
    at = index_of(list(programs.of(rank)), "compute", "", rng.randrange(2))
    return programs, {rank: RankFault(device=at)}


KINDS = {f.__name__: f for f in (drop, shape, dtype, operation, swap, inversion, lost,
         message_shape, extra, host_stuck, gil, killed, gpu_error, gpu_hang)}  # fmt: skip


def draw(kind, world, seed):
    """(programs, faults, culprits)."""
    rng = random.Random(seed)
    rank = rng.randrange(world.size)
    programs, faults = KINDS[kind](rng, healthy(world), rank)
    return programs, faults, {rank}


def judged(folder, programs, faults=None, **how):
    """(whether everything ended, the verdict from dumps written to ``folder``)."""
    state = stall.run_until_stalled(programs, faults)
    export.write(state, folder, **how)
    return state.finished, hang.diagnose_dumps(dumps.read_in_process(folder))


def dumps_of(state, **how):
    """The dumps themselves, without files."""
    values = export.dumps_of(state, **how)
    with no_collector():
        return DumpSet({rank: dumps.of_value(value, rank) for rank, value in values})


def named(found):
    return {culprit.rank for culprit in found.culprits}
