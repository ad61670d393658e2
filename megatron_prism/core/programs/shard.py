"""A rank's shard: what of a program follows the part of the parameters that the rank updates.

With Megatron's distributed optimizer replicas share the parameters out.  Calls of buckets say so;
what a step of the optimizer runs and holds, and its states, are of the shard.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from megatron_prism.core.programs.ops import CODE, DTYPE_NAMES, PHASE_NAMES
from megatron_prism.core.programs.program import Program

BUCKETS = "param_and_grad_buffer.py"  # the site of a bucket's calls
SCALAR = 512  # bytes; what is smaller is of a step, not of parameters
# how notes of the optimizer's states begin, its main parameters among them
STATE_NOTES = ("optim:", "master:")
_OPTIMIZER = PHASE_NAMES.index("optimizer")
_STATES = re.compile(r"(?:optim|master):|grad:main parameters$")  # notes of what has a shard's size
# as runtime.recorder.owners names a storage of several
# earlier releases wrote a buffer's module and its number of parameters: decoder.layers[48]
_PARAMETERS = re.compile(r"param:(?:buffer of (\d+) parameters.*|.*?(?:\[(\d+)\])?)$")
_COSTS = ("ns", "host", "lead", "products", "flops", "traffic", "kernels")


def calls_of_buckets(program: Program, name: str) -> np.ndarray:
    """Find the calls that move buckets.

    Args:
        program: of the rank.
        name: of the calls, as ``all_gather``.

    Returns:
        bool [ops].
    """
    is_bucket_site = np.array([BUCKETS in text for text in program.strings])
    ops = program.ops
    calls: np.ndarray = (ops["name"] == CODE[name]) & is_bucket_site[ops["site"]]
    return calls


def is_sharded(program: Program) -> bool:
    """Say whether replicas share the parameters out, so that each updates a part of them."""
    # without a distributed optimizer the gradients of a bucket are all-reduced
    return bool(calls_of_buckets(program, "reduce_scatter").any())


def has_quantized(program: Program) -> bool:
    """Say whether buckets gather bytes of FP8 parameters."""
    dtypes = program.ops["dtype"][calls_of_buckets(program, "all_gather")]
    return bool((dtypes == DTYPE_NAMES.index("uint8")).any())


def _step(program: Program) -> np.ndarray:
    """Find the ops of an optimizer's step: bool [ops].

    What comes behind the last gather of parameters is about whole parameters.
    """
    in_step: np.ndarray = program.ops["phase"] == _OPTIMIZER
    gathers = np.flatnonzero(calls_of_buckets(program, "all_gather") & in_step)
    if len(gathers):
        in_step[gathers[-1] :] = False
    return in_step


def segments(program: Program) -> np.ndarray:
    """Find the segments that work on the shard: their indices, int64 [n]."""
    return np.flatnonzero(_step(program) & (program.ops["name"] == CODE["compute"]))


def parameters(program: Program) -> int:
    """Count the rank's parameters, of which a shard has no more; 0 if nothing says so."""
    standing_notes = program.allocations["note"][program.allocations["before"] == 0]
    count = 0
    for note in standing_notes.tolist():
        match = _PARAMETERS.match(program.strings[note])
        if match is None:
            continue
        # a buffer of several, a name with a count, or a single parameter
        count += int(match[1] or match[2] or 1)
    return count


def parts(program: Program) -> int:
    """Count the parts of parameters that the rank updates, by its states of one kind."""
    coming, _ = storages(program)
    sharded = program.allocations[coming]
    standing_notes = sharded["note"][sharded["before"] == 0]
    return int(np.bincount(standing_notes, minlength=1).max())


def storages(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """Find the storages that have a shard's size.

    Returns:
        Two bool [allocations]: those that come, and of them those that a step allocates.
    """
    memory = program.allocations
    is_state_note = np.array([bool(_STATES.search(text)) for text in program.strings])
    is_bucket_note = np.array([BUCKETS in text for text in program.strings])
    states = is_state_note[memory["note"]]
    buckets = is_bucket_note[memory["note"]]

    within_step = (memory["before"] > 0) & _memory_of_step(program)
    coming = memory["bytes"] >= SCALAR
    temporaries = within_step & ~buckets
    return coming & (states | temporaries), coming & ~states & temporaries


def _memory_of_step(program: Program) -> np.ndarray:
    """Find the allocations in front of an op of an optimizer's step: bool [allocations]."""
    in_step = _step(program)
    # what comes behind the last op belongs to it
    last_op = max(0, len(in_step) - 1)
    of_step: np.ndarray = in_step[np.minimum(program.allocations["before"], last_op)]
    return of_step


def without_shard(program: Program) -> Program:
    """Return what ranks have alike whose shards are cut elsewhere; storages are not told apart."""
    ops = program.ops.copy()
    memory = program.allocations

    # what work on the shard costs differs; a host takes another time each time
    shard_segments = segments(program)
    for name in _COSTS:
        ops[name][shard_segments] = -1
    ops["host"] = ops["lead"] = -1
    ops["note"][shard_segments] = 0

    # a small tensor of a step belongs to one of its parameters, of which shards have some
    coming, _ = storages(program)
    of_shard = np.isin(memory["storage"], memory["storage"][coming])
    is_optimizer_note = np.array([text.startswith(STATE_NOTES) for text in program.strings])
    of_optimizer = _memory_of_step(program) | is_optimizer_note[memory["note"]]
    small = (np.abs(memory["bytes"]) < SCALAR) & of_optimizer

    alike = memory[~of_shard & ~small]
    alike["storage"] = 0
    return dataclasses.replace(program, rank=0, ops=ops, allocations=alike)
