"""Combined 1F1B (overlap_moe_expert_parallel_comm): which part of which layer runs when, where?

Megatron's ``combined_1f1b`` and its schedule plans run as they are (``TransformerModelChunkSchedule
Plan.run`` decides the order of parts, ``ScheduleNode`` the streams and events); the nodes of a
layer record instead of computing.  Every layer is taken for a MoE layer.  What dispatch and combine
send is inside their nodes, so it is a compute op on the second stream, with no sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common import model_chunk_schedule_plan as plans
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.pipeline_parallel import utils as pipeline_utils

from megatron_prism.emulate.schedule_model import Chunk
from megatron_prism.emulate.schedule_tape import Like, Replaced, Tape, Token

__all__ = ["replace"]

# attention, layer norm and router: the name changed in 0.19
_FIRST = (
    "attn" if hasattr(plans.TransformerLayerSchedulePlan, "attn") else "pre_dispatch_computation"
)
_LAZY = hasattr(pipeline_utils.ScheduleNode, "stream_acquire_context")  # 0.19: streams on first use


def replace(seams: Replaced, tape: Tape, chunks: list[Any]) -> Callable[..., Any]:
    """Put recorders in place; returns the forward_step_func, which makes schedule plans."""
    cuda = _Cuda(tape)
    like = Like(torch, cuda=cuda, autograd=SimpleNamespace(backward=_loss_backward(tape)))
    seams.set(pipeline_utils, torch=like, make_viewless=lambda e: e)
    seams.set(pipeline_utils, _COMP_STREAM=None, _COMM_STREAM=None)
    seams.set(plans, torch=like)
    seams.set(combined_1f1b, torch=like)
    seams.set(
        gpt_model, GPTModel=Chunk
    )  # 0.16 asserts that the model is one (combined_1f1b.py:338)
    seams.set(
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
