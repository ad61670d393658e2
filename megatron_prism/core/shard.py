"""A rank's shard: what of a program follows the part of the parameters that the rank updates.

With Megatron's distributed optimizer replicas share the parameters out.  Calls of buckets say so;
what a step of the optimizer runs and holds, and its states, are of the shard.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from megatron_prism.core.ops import CODE, DTYPE_NAMES, PHASE_NAMES
from megatron_prism.core.program import Program

BUCKETS = "param_and_grad_buffer.py"  # the site of a bucket's calls
SCALAR = 512  # bytes; what is smaller is of a step, not of parameters
_OPTIMIZER = PHASE_NAMES.index("optimizer")
_STATES = re.compile(r"optim:|grad:main parameters$")  # notes of what has a shard's size
# as runtime.recorder.owners names a storage of several
_PARAMETERS = re.compile(r"param:(?:buffer of (\d+) parameters|.*?(?:\[(\d+)\])?)$")
_COSTS = ("ns", "host", "lead", "products", "flops", "traffic", "kernels")


def calls_of_buckets(program: Program, name: str) -> np.ndarray:
    """bool [ops]: calls of that name which move buckets."""
    sites = np.array([BUCKETS in text for text in program.strings])
    found: np.ndarray = (program.ops["name"] == CODE[name]) & sites[program.ops["site"]]
    return found


def is_sharded(program: Program) -> bool:
    """Whether replicas share the parameters out, so that each updates a part of them."""
    return bool(calls_of_buckets(program, "reduce_scatter").any())


def has_quantized(program: Program) -> bool:
    """Whether buckets gather bytes of FP8 parameters."""
    dtypes = program.ops["dtype"][calls_of_buckets(program, "all_gather")]
    return bool((dtypes == DTYPE_NAMES.index("uint8")).any())


def _step(program: Program) -> np.ndarray:
    """bool [ops]: of an optimizer's step.  What comes behind the last gather of parameters is about
    whole ones.
    """
    found: np.ndarray = program.ops["phase"] == _OPTIMIZER
    ends = np.flatnonzero(calls_of_buckets(program, "all_gather") & found)
    found[ends[-1] if len(ends) else len(found) :] = False
    return found


def segments(program: Program) -> np.ndarray:
    """int64 [n]: the segments that work on the shard."""
    return np.flatnonzero(_step(program) & (program.ops["name"] == CODE["compute"]))


def parameters(program: Program) -> int:
    """How many parameters the rank has, of which a shard has no more; 0 if nothing says so."""
    held = program.allocations["note"][program.allocations["before"] == 0]
    notes = (_PARAMETERS.match(program.strings[note]) for note in held.tolist())
    return sum(int(note[1] or note[2] or 1) for note in notes if note)


def parts(program: Program) -> int:
    """How many parts of parameters the rank updates, by its states of one kind."""
    held = program.allocations[storages(program)[0]]
    return int(np.bincount(held["note"][held["before"] == 0], minlength=1).max())


def storages(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """(which storages that come have a shard's size, which of them a step allocates), bool
    [allocations].
    """
    memory, step = program.allocations, _step(program)
    states, buckets = (
        np.array([bool(text.search(note)) for note in program.strings])[memory["note"]]
        for text in (_STATES, re.compile(re.escape(BUCKETS)))
    )
    within = (memory["before"] > 0) & step[np.minimum(memory["before"], len(step) - 1)]
    come = memory["bytes"] >= SCALAR
    return come & (states | within & ~buckets), come & ~states & within & ~buckets


def without_shard(program: Program) -> Program:
    """What ranks have alike whose shards are cut elsewhere; storages are not told apart."""
    ops, memory = program.ops.copy(), program.allocations
    mine = segments(program)
    for name in _COSTS:
        ops[name][mine] = -1
    ops["host"] = ops["lead"] = -1  # a host takes another time each time
    ops["note"][mine] = 0
    # a small tensor of a step belongs to one of its parameters, of which shards have some
    chosen = np.isin(memory["storage"], memory["storage"][storages(program)[0]])
    step = _step(program)[np.minimum(memory["before"], max(0, len(ops) - 1))]
    small = np.abs(memory["bytes"]) < SCALAR
    small &= (
        step | np.array([text.startswith("optim:") for text in program.strings])[memory["note"]]
    )
    left = memory[~chosen & ~small]
    left["storage"] = 0
    return dataclasses.replace(program, rank=0, ops=ops, allocations=left)
