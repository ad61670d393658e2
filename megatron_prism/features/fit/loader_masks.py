"""What Megatron's data loader may leave out: its attention mask of sequence x sequence.

In : a program and its job's settings.  Out: the program without the mask.  pretrain_gpt.py's loader
makes a mask of booleans for each sample unless ``--no-create-attention-mask-in-dataloader`` is
given (training/arguments.py:2505 @0.16.1), and every tensor-parallel rank of the first and the last
stage keeps it on its GPU.  Causal attention of Transformer Engine does not read it.  Allocations do
not say whose they are, so the mask is what a forward allocates before its first module runs, of
just that size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import PHASE_NAMES
from megatron_prism.core.programs.program import Program
from megatron_prism.memory import peaks

NO_MASK = "--no-create-attention-mask-in-dataloader"
_FORWARD = PHASE_NAMES.index("forward")
_ROUNDED = 512  # bytes, to which the allocator of a GPU rounds
_STORAGE, _BYTES = 0, 1  # columns of Program.history


def without_mask(program: Program, job: Mapping[str, str]) -> Program | None:
    """The program without the loader's mask; None where it has none, or where it is needed.

    Args:
        program: of one rank.
        job: its source.
    """
    mask_sizes = _mask_sizes(job)
    if not mask_sizes:
        return None
    masks = _masks(program, mask_sizes)
    if not masks:
        return None
    is_mask = np.isin(program.allocations["storage"], list(masks))
    earlier_masks = _earlier_masks(program, is_mask)
    history_storages = program.history[:, _STORAGE]
    is_mask_in_history = np.isin(history_storages, [*masks, *earlier_masks])

    # rows of these columns are those of the allocations, where the capture knew them
    streams, routed = program.streams, program.routed
    if len(streams):
        streams = streams[~is_mask]
    if len(routed):
        routed = routed[~is_mask]
    return dataclasses.replace(
        program,
        allocations=program.allocations[~is_mask],
        streams=streams,
        history=program.history[~is_mask_in_history],
        routed=routed,
    )


def _earlier_masks(program: Program, is_mask: np.ndarray) -> list[int]:
    """Return storages of earlier iterations whose size only masks of this iteration have.

    Of earlier iterations a program has no notes of steps, so a mask is told by its size alone.

    Args:
        program: of one rank.
        is_mask: bool [allocations].
    """
    events, history = program.allocations, program.history
    is_request = events["bytes"] > 0
    sizes = set(events["bytes"][is_mask & is_request].tolist())
    # another tensor has the same size: an earlier one of it may be either
    sizes -= set(events["bytes"][~is_mask].tolist())
    is_earlier = ~np.isin(history[:, _STORAGE], events["storage"])
    has_size = np.isin(history[:, _BYTES], list(sizes))
    storages: list[int] = history[is_earlier & has_size, _STORAGE].tolist()
    return storages


def _mask_sizes(job: Mapping[str, str]) -> set[int]:
    """Bytes that the mask of a micro batch may have: whole, or a context-parallel rank's rows."""
    # a recipe's own loader makes no mask
    if "arguments" not in job:
        return set()
    settings = job_settings.of_source(job)
    # Megatron's own attention makes the same mask if it gets none
    if settings.get("transformer_impl") == "local":
        return set()
    # such a mask keeps documents apart: without it the job would compute something else
    if settings.get("reset_attention_mask", "False") == "True":
        return set()
    seq_length = settings.get("seq_length", "")
    micro_batch_size = settings.get("micro_batch_size", "1")
    cp = settings.get("context_parallel_size", "1")
    if not all(text.isdecimal() for text in (seq_length, micro_batch_size, cp)) or int(cp) == 0:
        return set()
    whole_bytes = int(micro_batch_size) * int(seq_length) ** 2  # a boolean is a byte
    return {whole_bytes, whole_bytes // int(cp)}


def _masks(program: Program, sizes: set[int]) -> set[int]:
    """Storages of these sizes that forwards allocate before their first module runs."""
    events, ops = program.allocations, program.ops
    op_of_event = np.minimum(events["before"], len(program) - 1)
    is_request = (events["before"] > 0) & (events["bytes"] > 0)
    is_forward_request = is_request & (ops["phase"][op_of_event] == _FORWARD)
    # the allocator of a GPU has rounded sizes up
    possible_sizes = {-(-size // _ROUNDED) * _ROUNDED for size in sizes} | sizes
    begun_steps: set[tuple[int, int]] = set()  # (microbatch, chunk) in which a module has run
    masks: set[int] = set()
    for event in np.flatnonzero(is_forward_request).tolist():
        op = ops[op_of_event[event]]
        step = int(op["microbatch"]), int(op["chunk"])
        if peaks.module_of(program.strings[events["note"][event]]):
            begun_steps.add(step)
        elif step not in begun_steps and int(events["bytes"][event]) in possible_sizes:
            masks.add(int(events["storage"][event]))
    return masks
