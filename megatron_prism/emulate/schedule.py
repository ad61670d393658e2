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
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_prism.core.errors import UnsupportedError, UsageError, refuse
from megatron_prism.core.megatron_source import megatron_release
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.emulate.schedule_tape import (
    ModuleProxy,
    ScheduleChunk,
    Tape,
    TapeGroup,
    Token,
    replace,
    replace_combined,
)
from megatron_prism.replay import microbatches as other
from megatron_prism.runtime import virtual_world

_lock = threading.Lock()  # what is replaced are module globals


def schedules(pp: int, vpp: int | None = None, microbatches: int = 1, **settings: Any) -> Programs:
    """Run Megatron's schedule for every stage; ``settings`` are those of ScheduleSettings.

    Raises UsageError with Megatron's words where it refuses the settings, UnsupportedError inside a
    virtual world, whose own process group would answer the tokens.
    """
    if virtual_world.current() is not None:
        raise UnsupportedError(
            "a schedule without a model cannot be recorded inside an emulated job",
            fix="use a process of its own: prism schedule",
        )
    wanted = ScheduleSettings(pp, vpp, microbatches, **settings)
    config = configuration(wanted)
    with _lock:
        programs = [_stage(wanted, config, stage) for stage in range(pp)]
    source = {
        "megatron_core": megatron_release(),
        "made_by": "Megatron's scheduler without a model: order only, no times, no memory",
        **wanted.described(),
    }
    world = World(pp, pp=pp, vpp=wanted.vpp)
    return Programs.one_per_rank(programs, world, source=source)


def with_microbatches(programs: Programs, wanted: int) -> Programs:
    """The world of ``programs`` with ``wanted`` microbatches an iteration: captured steps in the
    order in which Megatron's scheduler runs them.

    Raises:
        UsageError: Megatron's scheduler refuses that number, in its words.
        ProgramError: the captured order is not that of Megatron's scheduler, or a kind of step that
            ``wanted`` microbatches have was not captured.
    """
    return other.with_microbatches(programs, wanted, schedules)


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
    changes = ProcessChanges()
    try:
        _replace(changes, settings, tape)
        step: Callable[..., Any] = _no_forward
        if settings.ep_overlap:
            step = replace_combined(changes, tape, chunks)
        _run(settings, config, tape, chunks, step)
    finally:
        changes.undo()
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
        words = " ".join(str(error).split())
        raise UsageError(f"Megatron refuses: {words}", fix=settings.accepted) from error


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
def _replace(changes: ProcessChanges, settings: ScheduleSettings, tape: Tape) -> None:
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
    replace(changes, p2p_communication, torch=tokens, dist=distributed)
    replace(
        changes,
        megatron_schedules,
        torch=ModuleProxy(torch, zeros=lambda *args, **kwargs: 0),
        forward_step=partial(_forward, tape, settings.shape or ()),
        backward_step=lambda inputs, outputs, grads, *rest: tape.backward(inputs, outputs, grads),
        deallocate_output_tensor=lambda *args: None,
    )
    replace(
        changes,
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


# -- what a schedule is of -------------------------------------------------------------------------
# Layers change what a chunk costs, never the order; the exception is an MTP layer on a stage of its
# own, which makes stages exchange shapes (mtp_standalone,
# core/pipeline_parallel/p2p_communication.py:301 @core_v0.16.1).
_COUNTS = ("pp", "vpp", "microbatches", "group_size", "layers", "first_layers", "last_layers")
_TYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class ScheduleSettings:
    """A schedule to record.

    pp, vpp, microbatches : stages, chunks of a stage (None or 1: not interleaved), microbatches
    group_size        : microbatch_group_size_per_vp_stage; None: pp, as in Megatron
    overlap_p2p       : overlap_p2p_comm; None: on if interleaved, as in Megatron's arguments
    warmup_flush      : overlap_p2p_comm_warmup_flush
    forward_only      : evaluation
    align_grad_reduce : chunks reduce their gradients when the schedule says so; False: as soon as
                        the last backward makes them
    layers, layout, first_layers, last_layers, mtp : what the chunks are made of (num_layers,
                        pipeline_model_parallel_layout, num_layers_in_first/last_pipeline_stage,
                        mtp_num_layers); only an MTP layer on a stage of its own changes the order
    ep_overlap, delay_wgrad : overlap_moe_expert_parallel_comm, delay_wgrad_compute
    variable_lengths  : variable_seq_lengths: shapes are sent before tensors
    shape, dtype      : [tokens, micro-batch, hidden] that stages exchange; None: unknown
    """

    pp: int
    vpp: int | None = None
    microbatches: int = 1
    group_size: int | None = None
    overlap_p2p: bool | None = None
    warmup_flush: bool = False
    forward_only: bool = False
    align_grad_reduce: bool = True
    layers: int | None = None
    layout: str | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    mtp: int = 0
    ep_overlap: bool = False
    delay_wgrad: bool = False
    variable_lengths: bool = False
    shape: tuple[int, int, int] | None = None
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (value is None and name not in ("pp", "microbatches")):
                raise UsageError(f"{name}={value}: a number of at least 1", fix=f"{name}=1")
        if self.mtp < 0:
            raise UsageError(f"mtp={self.mtp}: a number of layers", fix="mtp=1, or leave it out")
        if self.dtype not in _TYPES:
            raise UsageError(f"dtype={self.dtype} is not sent", fix=f"use {', '.join(_TYPES)}")
        self._take_layout()
        if self.vpp == 1:  # Megatron's arguments take one chunk for not interleaved as well
            object.__setattr__(self, "vpp", None)
        if self.vpp is not None and self.pp == 1:
            raise UsageError(
                f"vpp={self.vpp} without a pipeline: there is nothing to interleave",
                fix="pp=2 or more, or leave vpp out",
            )
        if self.overlap_p2p is None:
            object.__setattr__(self, "overlap_p2p", self.vpp is not None)
        self._check_switches()

    def _take_layout(self) -> None:
        """A layout says how many chunks there are: stages and chunks, separated by ``|``."""
        if self.layout is None:
            return

        chunks = layout_chunks(self.layout)
        if chunks % self.pp:
            raise UsageError(
                f"layout {self.layout} has {chunks} chunks, which {self.pp} stages cannot share",
                fix=f"a layout of {self.pp} or {2 * self.pp} chunks, or another pp",
            )
        if self.vpp not in (None, chunks // self.pp):
            raise UsageError(
                f"layout {self.layout} has {chunks // self.pp} chunks a stage, not vpp={self.vpp}",
                fix=f"vpp={chunks // self.pp}, or leave vpp out",
            )
        object.__setattr__(self, "vpp", chunks // self.pp)

    def _check_switches(self) -> None:
        interleaved, overlaps = self.vpp is not None, self.overlap_p2p
        refuse(
            (overlaps and not interleaved,
             "sends and receives overlap only in the interleaved schedule",
             "vpp=2 or more, or overlap=false"),
            (interleaved and self.pp == 2 and not overlaps,
             "pp=2 interleaved without overlap: Megatron refuses two sends between the same ranks "
             "in one batch", "overlap=true, or pp=4"),
            (self.warmup_flush and not overlaps,
             "warmup_flush needs overlapping p2p", "overlap=true"),
            (self.ep_overlap and self.pp > 1 and not interleaved,
             "ep_overlap on a pipeline needs chunks", "vpp=2 or more"),
            (self.delay_wgrad and not self.ep_overlap,
             "delay_wgrad needs ep_overlap", "ep_overlap=true"),
            (self.group_size is not None and not interleaved,
             "group_size belongs to the interleaved schedule", "vpp=2"),
        )  # fmt: skip

    @property
    def accepted(self) -> str:
        """What to type where Megatron refuses the numbers: those nearby whose last group of
        microbatches is whole, or at least as long as the pipeline."""
        group, m = self.group_size or self.pp, self.microbatches
        if self.vpp is None:
            return "change what it names"
        if group < self.pp:
            return f"group_size={self.pp}"
        low = next((n for n in range(m - 1, 0, -1) if self._fits(n)), None)
        high = next(n for n in range(m + 1, m + 2 * group + 1) if self._fits(n))
        return " or ".join(f"microbatches={n}" for n in (low, high) if n)

    def _fits(self, m: int) -> bool:
        group = self.group_size or self.pp
        return m >= group and (m % group == 0 or m % group >= self.pp)

    @property
    def chunks(self) -> int:
        """Model chunks of one stage."""
        return self.vpp or 1

    @property
    def knows_layers(self) -> bool:
        """Whether it was said what the chunks are made of."""
        return bool(self.layers or self.layout or self.first_layers or self.last_layers or self.mtp)

    def described(self) -> dict[str, str]:
        """What differs from the defaults, as plain text for ``Programs.source``."""
        shown = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default or f.name in ("pp", "microbatches"):
                text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
                shown[f.name] = text
        return shown


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def layout_chunks(layout: str) -> int:
    """How many chunks a pipeline_model_parallel_layout makes in all."""
    try:
        return PipelineParallelLayerLayout.get_num_stages_from_str(layout)
    except (AssertionError, ValueError) as error:
        raise UsageError(f"layout {layout}: {error}", fix='layout="Et*2|t*3|t*3|t*2L"') from error


def configuration(settings: ScheduleSettings) -> TransformerConfig:
    """Megatron's configuration with these switches, as core_transformer_config_from_args makes it
    (training/arguments.py:1306 @core_v0.16.1)."""
    s, dtype = settings, _DTYPES[settings.dtype]
    layers = s.layers or s.pp * s.chunks
    if s.layout is not None:
        rows = PipelineParallelLayerLayout.parse_str_to_list(s.layout)
        layers = sum(row.count(LayerType.decoder) for row in rows)
    moe = {
        "num_moe_experts": 2,
        "expert_model_parallel_size": 2,
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": s.delay_wgrad,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TransformerConfig(
                num_layers=layers,
                hidden_size=s.shape[2] if s.shape else 1,
                num_attention_heads=1,
                pipeline_model_parallel_size=s.pp,
                virtual_pipeline_model_parallel_size=s.vpp,
                pipeline_dtype=dtype,
                params_dtype=dtype,
                bf16=s.dtype == "bf16",
                fp16=s.dtype == "fp16",
                overlap_p2p_comm=bool(s.overlap_p2p),
                batch_p2p_comm=not s.overlap_p2p,
                overlap_p2p_comm_warmup_flush=s.warmup_flush,
                microbatch_group_size_per_vp_stage=s.group_size,
                variable_seq_lengths=s.variable_lengths,
                moe_token_dispatcher_type="alltoall",  # its default refuses variable lengths
                deallocate_pipeline_outputs=True,
                pipeline_model_parallel_layout=s.layout,
                num_layers_in_first_pipeline_stage=s.first_layers,
                num_layers_in_last_pipeline_stage=s.last_layers,
                mtp_num_layers=s.mtp or None,
                **(moe if s.ep_overlap else {}),
            )
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise UsageError(f"Megatron refuses: {error}", fix="change what it names") from error


def chunk_layers(settings: ScheduleSettings, config: Any, stage: int, chunk: int) -> list[str]:
    """``embedding decoder decoder``: what Megatron puts into the chunk, in order."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return [layer.name for layer in layout.layout[stage][chunk]]
    vp_stage = chunk if settings.vpp is not None else None
    try:
        count = get_num_layers_to_build(config, vp_stage, stage)
    except AssertionError as error:
        words = " ".join(str(error).split())
        raise UsageError(f"Megatron refuses: {words}", fix="change layers") from error
    first = stage == 0 and chunk == 0
    last = stage == settings.pp - 1 and chunk == settings.chunks - 1
    tail = (["mtp"] * settings.mtp + ["loss"]) * last
    return ["embedding"] * first + ["decoder"] * count + tail


def chunk_note(names: list[str]) -> str:
    """The same in words: ``embedding, 2 decoder``."""
    shown = []
    for name in dict.fromkeys(names):
        single = name in ("embedding", "loss")
        shown.append(name if single else f"{names.count(name)} {name}")
    return ", ".join(shown) or "nothing"
