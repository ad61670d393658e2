"""Settings of a schedule, stand-ins for the model's chunks, and layer-wise (combined) schedules.

In : ScheduleSettings.  Out: Megatron's TransformerConfig, chunks that hold it, and a note per chunk
about the layers that Megatron would put there.  Layers change what a chunk costs, never the order;
the exception is an MTP layer on a stage of its own, which makes stages exchange shapes
(mtp_standalone, core/pipeline_parallel/p2p_communication.py:301 @core_v0.16.1).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.common import model_chunk_schedule_plan as plans
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.schedule_tape import ModuleProxy, ReplacedNames, Tape, Token

__all__ = [
    "ScheduleChunk",
    "ScheduleSettings",
    "chunk_layers",
    "chunk_note",
    "configuration",
    "replace",
]


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
        if self.vpp is not None:
            self._check_groups()

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
        if self.overlap_p2p and self.vpp is None:
            raise UsageError(
                "sends and receives overlap only in the interleaved schedule",
                fix="vpp=2 or more, or overlap=false",
            )
        if self.vpp is not None and self.pp == 2 and not self.overlap_p2p:
            raise UsageError(
                "pp=2 interleaved without overlap: Megatron refuses two sends between the same "
                "ranks in one batch",
                fix="overlap=true, or pp=4",
            )
        if self.warmup_flush and not self.overlap_p2p:
            raise UsageError("warmup_flush needs overlapping p2p", fix="overlap=true")
        if self.ep_overlap and self.pp > 1 and self.vpp is None:
            raise UsageError("ep_overlap on a pipeline needs chunks", fix="vpp=2 or more")
        if self.delay_wgrad and not self.ep_overlap:
            raise UsageError("delay_wgrad needs ep_overlap", fix="ep_overlap=true")
        if self.group_size is not None and self.vpp is None:
            raise UsageError("group_size belongs to the interleaved schedule", fix="vpp=2")

    def _check_groups(self) -> None:
        """The last group of microbatches must be whole or at least as long as the pipeline."""
        group, m = self.group_size or self.pp, self.microbatches
        if group < self.pp:
            raise UsageError(
                f"group_size={group} is below pp={self.pp}: the pipeline would run dry",
                fix=f"group_size={self.pp}",
            )
        if not self._fits(m):
            low = next((n for n in range(m - 1, 0, -1) if self._fits(n)), None)
            high = next(n for n in range(m + 1, m + 2 * group) if self._fits(n))
            near = " or ".join(f"microbatches={n}" for n in (low, high) if n)
            raise UsageError(
                f"{m} microbatches do not divide into groups of {group} (pp={self.pp}): the last "
                f"group would have {m % group} of them",
                fix=near,
            )

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


class ScheduleChunk(torch.nn.Module):
    """A model chunk that the schedule can hold and ask for its config; it has no parameters."""

    def __init__(self, config: Any, index: int, layers: list[str], interleaved: bool) -> None:
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.vp_stage = index if interleaved else None
        self.layers, self.input_tensor = layers, None

    def set_input_tensor(self, tensors: Any) -> None:
        """What forward will take."""
        self.input_tensor = tensors


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


# attention, layer norm and router: the name changed in 0.19
_FIRST = (
    "attn" if hasattr(plans.TransformerLayerSchedulePlan, "attn") else "pre_dispatch_computation"
)
_LAZY = hasattr(pipeline_utils.ScheduleNode, "stream_acquire_context")  # 0.19: streams on first use


def replace(replaced: ReplacedNames, tape: Tape, chunks: list[Any]) -> Callable[..., Any]:
    """Put recorders in place; returns the forward_step_func, which makes schedule plans."""
    cuda = _Cuda(tape)
    like = ModuleProxy(torch, cuda=cuda, autograd=SimpleNamespace(backward=_loss_backward(tape)))
    replaced.set(pipeline_utils, torch=like, make_viewless=lambda e: e)
    replaced.set(pipeline_utils, _COMP_STREAM=None, _COMM_STREAM=None)
    replaced.set(plans, torch=like)
    replaced.set(combined_1f1b, torch=like)
    replaced.set(
        gpt_model, GPTModel=ScheduleChunk
    )  # 0.16 asserts that the model is one (combined_1f1b.py:338)
    replaced.set(
        megatron_schedules,
        set_current_microbatch=lambda chunk, number: setattr(chunk, "microbatch", number),
        forward_step_calc_loss=_loss,
    )
    for chunk in chunks:
        chunk.build_schedule_plan = None  # Megatron looks for it; the step makes the plan

    def step(iterator: Any, chunk: Any, return_schedule_plan: bool = False) -> Any:
        return _Plan(tape, cuda, chunk), lambda tensor: _loss_forward(tape, tensor)

    return step


# -- streams and events ----------------------------------------------------------------------------
class _Stream:
    def __init__(self, name: str = "s1", **kwargs: Any) -> None:
        self.name = name


class _Event:
    """The event that all nodes of a chunk's microbatch record and wait for."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.handle = tape, -1

    def record(self, stream: _Stream) -> None:
        """Everything issued to ``stream`` so far."""
        self.handle = len(self.tape.rows)
        self.tape.add("record", stream=stream.name, handle=self.handle)

    def wait(self, stream: _Stream) -> None:
        """``stream`` waits for what was recorded last."""
        if self.handle >= 0:
            self.tape.add("wait", stream=stream.name, handle=self.handle)


class _Cuda:
    """What the combined schedule uses of torch.cuda."""

    Stream = _Stream
    nvtx = SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None)

    def __init__(self, tape: Tape) -> None:
        self.tape, self._current = tape, _Stream("main")

    def Event(self) -> _Event:  # noqa: N802 - torch's name
        """A new event."""
        return _Event(self.tape)

    def current_stream(self) -> _Stream:
        """The stream that ops are issued to."""
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Issue to ``stream`` inside."""
        before, self._current = self._current, stream
        self.tape.stream = stream.name
        try:
            yield
        finally:
            self._current, self.tape.stream = before, before.name


# -- nodes -----------------------------------------------------------------------------------------
class _Node(pipeline_utils.ScheduleNode):
    """A part of a layer; Megatron's base class handles stream and event."""

    def __init__(
        self, plan: _Plan, name: str, layer: int | None = None, comm: bool = False
    ) -> None:
        get = pipeline_utils.get_comm_stream if comm else pipeline_utils.get_comp_stream
        super().__init__(
            self._record_forward,
            get if _LAZY else get(),
            plan.event,
            self._record_backward,
            name=name,
        )
        self.plan, self.note = plan, name if layer is None else f"{name} {layer}"

    def _add(self, phase: str) -> None:
        microbatch, chunk = self.plan.label
        self.plan.tape.add(
            "compute", phase=phase, microbatch=microbatch, chunk=chunk, note=self.note
        )

    def _record_forward(self, *inputs: Token) -> Token:
        self._add("forward")
        return Token(("forward", *self.plan.label), inputs[0].sizes if inputs else self.plan.sizes)

    def _record_backward(self, outputs: Any, grads: Any) -> Any:
        for grad in grads:
            grad.used_by("backward", *self.plan.label)
        self._add("backward")
        for token in self.inputs:
            token.grad = Token(("backward", *self.plan.label), token.sizes)
        return grads

    def backward_dw(self) -> None:
        """The weight gradients, if they are computed apart."""
        if self.plan.config.delay_wgrad_compute:
            self._add("weight")


class _First(_Node):
    """The embedding, or what was received."""

    def _record_forward(self) -> Token:  # type: ignore[override]
        for token in self.plan.received:
            token.used_by("forward", *self.plan.label)
        return super()._record_forward()

    def _record_backward(self, outputs: Any, grads: Any) -> Any:
        super()._record_backward(outputs, grads)
        for token in self.plan.received:
            token.grad = Token(("backward", *self.plan.label), token.sizes)
        self.plan.tape.own_grad_sync(self.plan.label[1])
        return grads


class _Layer(plans.TransformerLayerSchedulePlan):
    """A layer's parts, on the streams where Megatron makes them (model_chunk_schedule_plan.py:160
    @core_v0.16.1)."""

    def __init__(self, plan: _Plan, number: int, mtp: bool) -> None:
        self.config = plan.config
        setattr(self, _FIRST, _Node(plan, _FIRST, number))
        self.moe_dispatch = _Node(plan, "moe_dispatch", number, comm=True)
        self.mlp = _Node(plan, "mlp", number)
        self.moe_combine = _Node(plan, "moe_combine", number, comm=True)
        noop = pipeline_utils.NoopScheduleNode()
        self.mtp_post_process = _Node(plan, "mtp_post_process", number) if mtp else noop

    def get_fp8_context(self) -> contextlib.AbstractContextManager[None]:
        """A layer's precision orders nothing, and only the layer knows it."""
        return contextlib.nullcontext()

    get_low_precision_context = get_fp8_context  # its name in 0.19.2


class _Plan(plans.TransformerModelChunkSchedulePlan):
    """One microbatch of one chunk; ``run`` and all of its order are Megatron's."""

    def __init__(self, tape: Tape, cuda: _Cuda, chunk: Any) -> None:
        self.tape, self.config = tape, chunk.config
        self.vp_stage = chunk.vp_stage
        self.label = (chunk.microbatch, -1 if chunk.vp_stage is None else chunk.vp_stage)
        self.received = [token for token in chunk.input_tensor if token is not None]
        self.sizes = self.received[0].sizes if self.received else ()
        self._model_chunk_state = SimpleNamespace(model=chunk)
        self._event = cuda.Event()
        self.pre_process = _First(self, "pre_process")
        kinds = [name for name in chunk.layers if name in ("decoder", "mtp")]
        self._transformer_layers = [_Layer(self, i, k == "mtp") for i, k in enumerate(kinds)]
        self.post_process = _Node(self, "post_process") if "loss" in chunk.layers else None


# -- the loss --------------------------------------------------------------------------------------
def _loss(chunk: Any, output: Token, loss_func: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Stands for schedules.forward_step_calc_loss, which asks parallel_state for the last stage."""
    return (loss_func(output) if "loss" in chunk.layers else output), 0


def _loss_forward(tape: Tape, tensor: Token) -> Token:
    phase, microbatch, chunk = tensor.label
    tape.add("compute", phase=phase, microbatch=microbatch, chunk=chunk, note="loss")
    loss = Token(tensor.label)
    loss.parent = tensor
    return loss


def _loss_backward(tape: Tape) -> Callable[..., None]:
    """torch.autograd.backward of a loss: the gradient of what it was computed from."""

    def backward(loss: Token, grad_tensors: Any = None) -> None:
        label = ("backward", *loss.label[1:])
        phase, microbatch, chunk = label
        tape.add("compute", phase=phase, microbatch=microbatch, chunk=chunk, note="loss")
        assert loss.parent is not None
        loss.parent.grad = Token(label, loss.parent.sizes)

    return backward
