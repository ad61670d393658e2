"""Schedules of all stages of a pipeline, taken from Megatron's own scheduler without a model.

In : ScheduleSettings.  Out: Programs, one per stage.  Megatron's forward_backward_* and its p2p
code run as they are, once per stage, on tokens instead of tensors; what is replaced is what they
call: torch inside ``p2p_communication`` and ``schedules``, forward and backward of the model, and
the size of a group (core/utils.py:518 answers 1 while torch.distributed is not initialised).  All
of it is put back afterwards.  No model is built, so nothing here knows times, memory or the
communication inside a layer.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.megatron_source import megatron_release
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.emulate.schedule_model import (
    ScheduleChunk,
    ScheduleSettings,
    chunk_layers,
    chunk_note,
    configuration,
)
from megatron_prism.emulate.schedule_tape import ModuleProxy, ReplacedNames, Tape, TapeGroup, Token
from megatron_prism.runtime import world as session

__all__ = ["schedules"]

_lock = threading.Lock()  # the replaced are module globals


def schedules(pp: int, vpp: int | None = None, microbatches: int = 1, **settings: Any) -> Programs:
    """The programs of all stages; ``settings`` are those of ScheduleSettings."""
    return record(ScheduleSettings(pp, vpp, microbatches, **settings))


def record(settings: ScheduleSettings) -> Programs:
    """Run Megatron's schedule for every stage.

    Raises UsageError with Megatron's words where it refuses the settings, UnsupportedError inside a
    virtual world, whose own replaced would answer the tokens.
    """
    if session.current() is not None:
        raise UnsupportedError(
            "a schedule without a model cannot be recorded inside an emulated job",
            fix="use a process of its own: prism schedule",
        )
    config = configuration(settings)
    with _lock:
        programs = [_stage(settings, config, stage) for stage in range(settings.pp)]
    source = {
        "megatron_core": megatron_release(),
        "made_by": "Megatron's scheduler without a model: order only, no times, no memory",
        **settings.described(),
    }
    world = World(settings.pp, pp=settings.pp, vpp=settings.vpp)
    return Programs.one_per_rank(programs, world, source=source)


def _stage(settings: ScheduleSettings, config: Any, stage: int) -> Program:
    """Run the schedule once, as stage ``stage``."""
    tape = Tape(stage, settings.pp, settings.dtype)
    chunks = []
    for index in range(settings.chunks):
        layers = chunk_layers(settings, config, stage, index)
        chunks.append(ScheduleChunk(config, index, layers, settings.vpp is not None))
        if settings.knows_layers:
            tape.add("mark", chunk=index if settings.vpp else -1, note=chunk_note(layers))
    _hooks(settings, config, tape)
    with ReplacedNames() as replaced:
        _replace(replaced, settings, tape)
        step: Callable[..., Any] = _no_forward
        if settings.ep_overlap:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of packages that Megatron would rather have
                from megatron_prism.emulate import schedule_model

            step = schedule_model.replace(replaced, tape, chunks)
        _run(settings, config, tape, chunks, step)
    return tape.program()


def _run(settings: ScheduleSettings, config: Any, tape: Tape, chunks: list[Any], step: Any) -> None:
    """Megatron's function for these sizes, with Megatron's communicator."""
    function = megatron_schedules.get_forward_backward_func(settings.pp, settings.vpp)
    alone = TapeGroup("alone", 0, 1)
    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "embd", "pos_embd", "dp_cp"):
        setattr(groups, name, alone)
    groups.pp = tape.pipeline
    tokens, micro, _ = settings.shape or (0, 0, 0)
    p2p = p2p_communication.P2PCommunicator(tape.pipeline, config) if settings.pp > 1 else None
    try:
        function(
            forward_step_func=step,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=settings.microbatches,
            seq_length=tokens,
            micro_batch_size=micro,
            forward_only=settings.forward_only,
            p2p_communicator=p2p,
            pg_collection=groups,
        )
    except (AssertionError, ValueError, RuntimeError) as error:  # its own refusals
        raise UsageError(f"Megatron refuses: {error}", fix="change what it names") from error


def _no_forward(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the recorder stands for forward_step")


def _hooks(settings: ScheduleSettings, config: Any, tape: Tape) -> None:
    """Gradient and parameter hooks as training sets them (training/training.py:2547
    @core_v0.16.1): with aligned gathers and reductions, overlapped."""

    def starts(name: str, chunk: int) -> Callable[..., object]:
        at = chunk if settings.vpp is not None else -1
        return lambda parameters: tape.add(name, phase="sync", chunk=at) and None

    def per_chunk(name: str) -> Any:
        found = [starts(name, chunk) for chunk in range(settings.chunks)]
        return found if settings.vpp is not None else found[0]

    def finalize(*args: Any, **kwargs: Any) -> None:
        tape.add("mark", phase="sync", note="finalize_model_grads")

    config.no_sync_func = tape.no_sync if settings.vpp is None else [tape.no_sync] * settings.chunks
    config.grad_sync_func = per_chunk("grad_sync") if settings.align_grad_reduce else None
    config.param_sync_func = per_chunk("param_sync") if settings.vpp is not None else None
    config.finalize_model_grads_func = finalize


# -- what Megatron calls ---------------------------------------------------------------------------
def _replace(replaced: ReplacedNames, settings: ScheduleSettings, tape: Tape) -> None:
    """Tokens, recorders and group sizes in place of torch, the model and torch.distributed."""
    distributed = ModuleProxy(
        torch.distributed,
        isend=tape.isend,
        irecv=tape.irecv,
        P2POp=tape.p2p_op,
        batch_isend_irecv=tape.batch,
        get_backend=lambda group: "nccl",
        get_global_rank=lambda group, rank: rank,
        group=ModuleProxy(torch.distributed.group, WORLD=tape.everyone),
    )
    cuda = ModuleProxy(torch.cuda, current_device=lambda: "cuda", synchronize=tape.synchronize)

    def empty(shape: Any, dtype: Any, **kwargs: Any) -> Token:
        if dtype is torch.int64:  # a stage's shape, ahead of its tensor
            return Token(sizes=tuple(shape), tells=settings.shape or ())
        return Token(sizes=tuple(shape) if settings.shape else ())

    def tensor(shape: Any, **kwargs: Any) -> Token:
        return Token(sizes=(3,), tells=shape)

    tokens = ModuleProxy(torch, distributed=distributed, cuda=cuda, empty=empty, tensor=tensor)
    replaced.set(p2p_communication, torch=tokens, dist=distributed)
    replaced.set(
        megatron_schedules,
        torch=ModuleProxy(torch, zeros=lambda *args, **kwargs: 0),
        forward_step=partial(_forward, tape, settings.shape or ()),
        backward_step=lambda inputs, outputs, grads, *rest: tape.backward(inputs, outputs, grads),
        deallocate_output_tensor=lambda *args: None,
    )
    replaced.set(
        pipeline_utils,
        get_pg_rank=lambda group: group.rank(),
        get_pg_size=lambda group: group.size(),
    )


def _forward(tape: Tape, shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for schedules.forward_step(func, iterator, model, count, input, ...)."""
    chunk = kwargs.get("vp_stage")
    output = tape.forward(
        args[4], kwargs["current_microbatch"], -1 if chunk is None else chunk, shape
    )
    return output, 0
