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


def without_mask(program: Program, job: Mapping[str, str]) -> Program | None:
    """The program without the loader's mask; None where it has none, or where it is needed.

    Args:
        program: of one rank.
        job: its source.
    """
    sizes = _mask_sizes(job)
    masks = _masks(program, sizes) if sizes else set()
    if not masks:
        return None
    events = program.allocations
    is_mask = np.isin(events["storage"], list(masks))
    earlier = _earlier_masks(program, is_mask)
    in_history = np.isin(program.history[:, 0], [*masks, *earlier])
    return dataclasses.replace(
        program,
        allocations=events[~is_mask],
        streams=program.streams[~is_mask] if len(program.streams) else program.streams,
        history=program.history[~in_history],
        routed=program.routed[~is_mask] if len(program.routed) else program.routed,
    )


def _earlier_masks(program: Program, is_mask: np.ndarray) -> list[int]:
    """Return allocations of earlier iterations whose size only masks of this iteration have.

    Args:
        program: Of earlier iterations it keeps sizes alone.
        is_mask: bool [allocations].
    """
    events, history = program.allocations, program.history
    sizes = set(events["bytes"][is_mask & (events["bytes"] > 0)].tolist())
    sizes -= set(events["bytes"][~is_mask].tolist())
    earlier = ~np.isin(history[:, 0], events["storage"])
    storages: list[int] = history[earlier & np.isin(history[:, 1], list(sizes)), 0].tolist()
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
    length = settings.get("seq_length", "")
    rows = settings.get("micro_batch_size", "1")
    ranks = settings.get("context_parallel_size", "1")
    if not (length.isdecimal() and rows.isdecimal() and ranks.isdecimal() and int(ranks)):
        return set()
    whole = int(rows) * int(length) ** 2
    return {whole, whole // int(ranks)}


def _masks(program: Program, sizes: set[int]) -> set[int]:
    """Storages of these sizes that forwards allocate before their first module runs."""
    events, ops = program.allocations, program.ops
    op = np.minimum(events["before"], len(program) - 1)
    in_forward = (ops["phase"][op] == _FORWARD) & (events["before"] > 0) & (events["bytes"] > 0)
    rounded = {-(-size // _ROUNDED) * _ROUNDED for size in sizes} | sizes
    begun: set[tuple[int, int]] = set()  # microbatches and chunks whose modules run
    masks: set[int] = set()
    for event in np.flatnonzero(in_forward).tolist():
        row = ops[op[event]]
        turn = int(row["microbatch"]), int(row["chunk"])
        if peaks.module_of(program.strings[events["note"][event]]):
            begun.add(turn)
        elif turn not in begun and int(events["bytes"][event]) in rounded:
            masks.add(int(events["storage"][event]))
    return masks
