"""What an emulated job changes in Megatron, by subject.

startup.py       groups, arguments, the data set's helper and index, the log
training.py      the training loop, optimizers, FSDP, vocabulary-parallel layers
pipeline.py      what is received from other ranks: scale, shape, tokens; labels of phases
moe.py           dispatchers, routing, multi-token prediction
checkpoints.py   which checkpoints are written and read, and what a rank alone reads
planned_reads.py  loading on shapes: what Megatron would read, without reading it
planned_writes.py  what Megatron would write into a checkpoint
shifted_states.py  states that Megatron saves in the wrong place
own_layout.py    a checkpoint of the job's own layout, in place of one that is not here
outputs.py       curves, traces and other files of the real job
without_cuda.py  kernels, CUDA graphs, offloading and number formats where there is no GPU
stand_in_data.py  mock data where Megatron has none
initial_parameters.py  the same weights in every layout (cpu)
"""

from __future__ import annotations

from megatron_prism.emulate.patch import Patch
from megatron_prism.emulate.patches import (
    checkpoints,
    initial_parameters,
    moe,
    outputs,
    pipeline,
    stand_in_data,
    startup,
    training,
    without_cuda,
)

__all__ = ["PATCHES", "patches_for"]

_BY_SUBJECT = (
    startup,
    pipeline,
    training,
    checkpoints,
    outputs,
    moe,
    without_cuda,
    initial_parameters,
    stand_in_data,
)
PATCHES: list[Patch] = []
for _subject in _BY_SUBJECT:
    PATCHES += _subject.PATCHES


def patches_for(tier: str) -> list[Patch]:
    """Every patch that a run on ``tier`` needs."""
    return [one for one in PATCHES if tier in one.tiers]
