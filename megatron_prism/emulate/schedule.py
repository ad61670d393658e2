"""Schedules of all stages of a pipeline, taken from Megatron's own scheduler without a model.

In : the sizes and switches that change the order.  Out: Programs, one per stage; by
which ``replay.microbatches`` orders captured steps.  Megatron's forward_backward_* and its p2p code
run as they are, once per stage, on tokens instead of tensors; what is replaced is what they
call: torch inside ``p2p_communication`` and ``schedules``, forward and backward of the model, and
the size of a group (core/utils.py:518 answers 1 while torch.distributed is not initialised).  All
of it is put back afterwards.  No model is built, so nothing here knows times, sizes or the
communication inside a layer; of memory it knows when Python drops a message's tensor.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs.megatron_source import megatron_release
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.emulate.schedule_tape import (
    ModuleProxy,
    ScheduleChunk,
    Tape,
    Token,
    replace,
    replace_combined,
    tape_group,
)
from megatron_prism.replay.microbatches import change

_lock = threading.Lock()  # what is replaced are module globals


def schedules(
    pp: int,
    vpp: int | None = None,
    microbatches: int = 1,
    *,
    group_size: int | None = None,
    overlap_p2p: bool | None = None,
    warmup_flush: bool = False,
    variable_lengths: bool = False,
    ep_overlap: bool = False,
    stages: Collection[int] | None = None,
) -> Programs:
    """Run Megatron's schedule for every stage.

    Args:
        pp: stages.
        vpp: chunks of a stage; None or 1: not interleaved.
        microbatches: of an iteration.
        group_size: microbatch_group_size_per_vp_stage; None: pp, as in Megatron.
        overlap_p2p: overlap_p2p_comm; None: on if interleaved, as in Megatron's arguments.
        warmup_flush: overlap_p2p_comm_warmup_flush.
        variable_lengths: variable_seq_lengths: shapes are sent before tensors.
        ep_overlap: overlap_moe_expert_parallel_comm.
        stages: those to run, None: all; the others have no program then.

    Raises:
        UsageError: Megatron refuses the settings, in its words.
    """
    vpp = None if vpp == 1 else vpp  # Megatron's arguments take one chunk for not interleaved
    # Megatron overlaps the forward of one chunk with the backward of another
    if ep_overlap and pp > 1 and vpp is None:
        raise UsageError("ep_overlap on a pipeline needs chunks", fix="vpp=2 or more")
    interleaved = vpp is not None
    overlaps = interleaved if overlap_p2p is None else overlap_p2p
    # two messages in one batch between two ranks: which is which depends on their order
    if interleaved and pp == 2 and not overlaps:
        raise UsageError("two sends between the same ranks in one batch", fix="overlap_p2p=True")
    try:
        config = _configuration(
            num_layers=pp * (vpp or 1),
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            overlap_p2p_comm=overlaps,
            batch_p2p_comm=not overlaps,
            overlap_p2p_comm_warmup_flush=warmup_flush,
            microbatch_group_size_per_vp_stage=group_size,
            variable_seq_lengths=variable_lengths,
            **(_EP_OVERLAP if ep_overlap else {}),
        )
        with _lock:
            kept = range(pp) if stages is None else sorted(stages)
            programs = tuple(_stage(config, stage, microbatches) for stage in kept)
    except (AssertionError, ValueError, NotImplementedError, RuntimeError) as error:
        words = " ".join(str(error).split())
        fix = _accepted(group_size or pp, pp, microbatches) if interleaved else ""
        raise UsageError(f"Megatron refuses: {words}", fix or "change what it names") from error
    source = {
        "megatron_core": megatron_release(),
        "made_by": "Megatron's scheduler without a model: order only, no times, no memory",
        "microbatches": str(microbatches),
    }
    of = np.full(pp, -1)
    of[kept] = range(len(programs))
    return Programs(World(pp, pp=pp, vpp=vpp), programs, of, source=source, partial=len(kept) < pp)


def _accepted(group: int, pp: int, microbatches: int) -> str:
    """The nearest numbers of microbatches that the interleaved schedule takes."""

    def fits(m: int) -> bool:
        return m >= group and (m % group == 0 or m % group >= pp)

    if fits(microbatches):
        return ""
    low = next((m for m in range(microbatches, 0, -1) if fits(m)), 0)
    high = next(m for m in range(microbatches, microbatches + 2 * group + 1) if fits(m))
    return " or ".join(f"microbatches={m}" for m in (low, high) if m)


_EP_OVERLAP = {
    "num_moe_experts": 2,
    "expert_model_parallel_size": 2,
    "overlap_moe_expert_parallel_comm": True,
}


def _configuration(**settings: Any) -> TransformerConfig:
    """Megatron's configuration with these switches, as core_transformer_config_from_args makes it
    (training/arguments.py:1306 @core_v0.16.1).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            hidden_size=1,
            num_attention_heads=1,
            pipeline_dtype=torch.bfloat16,
            params_dtype=torch.bfloat16,
            bf16=True,
            moe_token_dispatcher_type="alltoall",  # its default refuses variable lengths
            deallocate_pipeline_outputs=True,
            **settings,
        )


def with_microbatches(programs: Programs, wanted: int) -> Programs:
    """The world of ``programs`` with ``wanted`` microbatches an iteration: captured steps in the
    order in which Megatron's scheduler runs them.

    Raises:
        UsageError: Megatron's scheduler refuses that number, in its words.
        ProgramError: the captured order is not that of Megatron's scheduler, or a kind of step that
            ``wanted`` microbatches have was not captured.
    """
    return change.with_microbatches(programs, wanted, schedules)


def _stage(config: TransformerConfig, stage: int, microbatches: int) -> Program:
    """Run the schedule once, as stage ``stage``, with Megatron's function and communicator."""
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    tape = Tape(stage, pp)
    chunks = [ScheduleChunk(config, stage, index) for index in range(vpp or 1)]
    _hooks(config, tape, vpp)
    # not as a job in this process has it, whose microbatches are counted
    function = inspect.unwrap(megatron_schedules.get_forward_backward_func(pp, vpp))
    # the pipeline's group sends and receives; in all other groups the rank is alone
    alone = tape_group("alone", 0, 1)
    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "embd", "pos_embd", "dp_cp"):
        setattr(groups, name, alone)
    groups.pp = tape.pipeline
    with ProcessChanges() as changes:
        _replace(changes, tape)
        step: Callable[..., Any] = _no_forward
        if config.overlap_moe_expert_parallel_comm:
            step = replace_combined(changes, tape, chunks)
        p2p = p2p_communication.P2PCommunicator(tape.pipeline, config) if pp > 1 else None
        function(
            forward_step_func=step,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=microbatches,
            seq_length=0,
            micro_batch_size=0,
            forward_only=False,
            p2p_communicator=p2p,
            pg_collection=groups,
        )
    return tape.program()


def _no_forward(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the recorder stands for forward_step")


def _hooks(config: Any, tape: Tape, vpp: int | None) -> None:
    """Gradient and parameter hooks as training sets them (training/training.py:2547
    @core_v0.16.1): with aligned gathers and reductions, overlapped.
    """

    def per_chunk(name: str) -> Any:
        def starts(chunk: int) -> Callable[..., object]:
            return lambda parameters: tape.add(name, phase="sync", chunk=chunk) and None

        return starts(-1) if vpp is None else [starts(chunk) for chunk in range(vpp)]

    def finalize(*args: Any, **kwargs: Any) -> None:
        tape.add("mark", phase="sync", note="finalize_model_grads")

    config.no_sync_func = tape.no_sync if vpp is None else [tape.no_sync] * vpp
    config.grad_sync_func = per_chunk("grad_sync")
    config.param_sync_func = per_chunk("param_sync") if vpp is not None else None
    config.finalize_model_grads_func = finalize


# -- what Megatron calls ---------------------------------------------------------------------------
def _replace(changes: ProcessChanges, tape: Tape) -> None:
    """Tokens, recorders and group sizes in place of torch, the model and torch.distributed."""
    distributed = ModuleProxy(
        torch.distributed,
        isend=tape.isend,
        irecv=tape.irecv,
        P2POp=lambda *op: op,
        batch_isend_irecv=tape.batch,
        get_backend=lambda group: "nccl",
        get_global_rank=lambda group, rank: rank,
        group=ModuleProxy(torch.distributed.group, WORLD=tape.everyone),
    )
    cuda = ModuleProxy(torch.cuda, current_device=lambda: "cuda", synchronize=tape.synchronize)

    def empty(shape: Any, dtype: Any, **kwargs: Any) -> Token:
        return Token(is_shape=dtype is torch.int64)  # a stage's shape goes ahead of its tensor

    def tensor(shape: Any, **kwargs: Any) -> Token:
        return Token(is_shape=True)

    # modules of Megatron get a torch in which only these functions are others
    tokens = ModuleProxy(torch, distributed=distributed, cuda=cuda, empty=empty, tensor=tensor)
    replace(changes, p2p_communication, torch=tokens, dist=distributed)
    replace(
        changes,
        megatron_schedules,
        torch=ModuleProxy(torch, zeros=lambda *args, **kwargs: 0),
        forward_step=partial(_forward, tape),
        backward_step=lambda inputs, outputs, grads, *rest: tape.backward(inputs, outputs, grads),
        deallocate_output_tensor=tape.deallocate,
    )
    replace(
        changes,
        pipeline_utils,
        get_pg_rank=lambda group: group.rank(),
        get_pg_size=lambda group: group.size(),
    )


def _forward(tape: Tape, *args: Any, **kwargs: Any) -> Any:
    """Stands for schedules.forward_step(func, iterator, model, count, input, ...)."""
    chunk = kwargs.get("vp_stage")
    if chunk is None:
        chunk = -1
    inputs = args[4]
    tape.give_input(args[2], inputs)
    microbatch = kwargs["current_microbatch"]
    return tape.forward(inputs, microbatch, chunk), 0
