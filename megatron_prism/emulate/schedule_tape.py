"""A tape of what Megatron's scheduler asks of one stage, and the tokens on it.

In : calls that the scheduler makes to what it takes for torch, torch.distributed and the model.
Out: a Program.  A ``Token`` stands for a tensor that stages exchange; it remembers the event that
made it, so that a receive learns which step its tensor was for, and a send which step made it.
Nothing here knows the order of anything: it writes down what it is told, in that order.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Union

import torch
from megatron.core.enums import ModelType
from megatron.core.models.common import model_chunk_schedule_plan as plans
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.programs.program import Builder, Program
from megatron_prism.replay.microbatches.message_buffers import FORWARD, GRADIENT, OUTPUT, RECEIVED
from megatron_prism.runtime.recorder.recorder import _nearest

PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"
WORLD = "default_pg"

Label = tuple[str, int, int]  # phase, microbatch, chunk
Tokens = Union["Token", "list[Token | None]", None]  # as Megatron hands them on
TapeRow = dict[str, Any]  # an event: what ``Builder.add`` is told besides its name


def step(label: Label) -> TapeRow:
    """A label as fields of an event."""
    return dict(zip(("phase", "microbatch", "chunk"), label, strict=True))


def replace(changes: ProcessChanges, owner: object, **names: object) -> None:
    """Replace names of ``owner`` (those that this release has) until ``changes`` are undone."""
    for name, value in names.items():
        if hasattr(owner, name):
            changes.set(owner, name, value)


class ModuleProxy:
    """A module with some names of our own."""

    def __init__(self, module: object, **names: object) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def tape_group(desc: str, rank: int, size: int) -> SimpleNamespace:
    """A process group of which only size, own position and name are asked."""
    return SimpleNamespace(desc=desc, rank=lambda: rank, size=lambda: size)


class Token:
    """A tensor that is not there.

    row   : the receive it comes from, or None
    label : (phase, microbatch, chunk) of the step that made it or will use it
    is_shape : it is the shape of the tensor that is sent next
    kept  : what lives as long as this tensor: the inputs of its graph
    storage : what it holds until it is deallocated, of a forward's output
    on_drop : called when Python drops the tensor
    The rest is what Megatron's combined schedule keeps on tensors, and a loss's input, ``parent``.
    """

    device, shape = "cuda", ()  # which nobody needs
    row: TapeRow | None = None
    grad: Token | None = None
    parent: Token | None = None
    requires_grad = True
    schedule_plan: Any = None
    loss_func: Any = None
    kept: object = None
    storage: Token | None = None
    on_drop: Callable[[], None] | None = None

    def __init__(self, label: Label = ("", -1, -1), is_shape: bool = False) -> None:
        self.label, self.is_shape = label, is_shape

    def __del__(self) -> None:
        if self.on_drop is not None:
            self.on_drop()

    def used_by(self, label: Label) -> None:
        """The step that uses the tensor says what its receive was for."""
        if self.row is not None:
            self.row.update(step(label))

    def size(self) -> tuple[int, ...]:
        """Shape; nobody needs it."""
        return ()

    def tolist(self) -> list[int]:
        """Of a received shape: the shape that all stages exchange."""
        return []

    def detach(self) -> Token:
        """A leaf of the same tensor."""
        leaf = Token(self.label)
        leaf.kept = self
        return leaf

    def retain_grad(self) -> None:
        """Gradients are kept anyway."""

    def record_stream(self, stream: object) -> None:
        """No allocator listens."""


def _each(tokens: Tokens) -> list[Token]:
    """The tokens, bare or in a list, that are there: the first stage has no input."""
    if not isinstance(tokens, list):
        tokens = [tokens]
    return [token for token in tokens if token is not None]


def _grad(token: Token | None) -> Token | None:
    """The gradient of an input; None where there is none, as on the first stage."""
    if token is None:
        return None
    return token.grad


class _Request:
    """What isend and irecv return; a wait for it is an event, too.

    A receive's request holds its tensor, a send's none, as in the virtual process group.
    """

    def __init__(self, tape: Tape, handle: int, received: Token | None) -> None:
        self._tape, self._handle, self._received = tape, handle, received

    def wait(self) -> None:
        """Add the event."""
        self._tape.add("wait", handle=self._handle)


@dataclass
class BufferLife:
    """When a tensor comes and goes.

    kind    : RECEIVED, OUTPUT or GRADIENT
    event   : its number on the tape
    dropped : the event before which Python drops it, -1: never
    cause   : FORWARD if it goes as a forward takes its input, "": as the scheduler drops it
    """

    kind: str
    event: int
    dropped: int = -1
    cause: str = ""


class Tape:
    """The events of one stage, in order.

    stage, pp : own position and size of the pipeline
    buffers   : of every tensor that is received, of every output of a forward, and of every
                gradient that a backward makes for the stage before it
    """

    def __init__(self, stage: int, pp: int) -> None:
        self.stage, self.pp = stage, pp
        self.rows: list[tuple[str, TapeRow]] = []
        self.stream = "main"
        self.synchronizing = True  # no no_sync() is open
        self.pipeline, self.everyone = (tape_group(desc, stage, pp) for desc in (PIPELINE, WORLD))
        self.buffers: list[BufferLife] = []
        self._in_forward = False  # a model takes its next input
        self._batches = 0

    def follow(self, token: Token, kind: str, event: int) -> None:
        """Write down when Python drops a tensor that comes with an event."""
        life = BufferLife(kind, event)
        self.buffers.append(life)

        def note_drop() -> None:
            life.dropped, life.cause = len(self.rows), FORWARD if self._in_forward else ""

        token.on_drop = note_drop

    def give_input(self, model: ScheduleChunk, inputs: Tokens) -> None:
        """Give a chunk the input of a forward; it keeps that until the next one."""
        self._in_forward = True
        model.set_input_tensor(inputs)
        self._in_forward = False

    def add(self, name: str, **fields: Any) -> TapeRow:
        """Append an event on the current stream."""
        if self.stream != "main":
            fields.setdefault("stream", self.stream)
        self.rows.append((name, fields))
        return fields

    def program(self) -> Program:
        """The tape as a program of rank ``stage``."""
        builder = Builder()
        changes = defaultdict[int, list[tuple[int, int, str]]](list)
        for number, life in enumerate(self.buffers):
            changes[life.event].append((number, 1, life.kind))
            if life.dropped >= 0:
                changes[life.dropped].append((number, -1, life.cause))
        for event, (name, row) in enumerate(self.rows):
            for change in changes[event]:
                builder.memory(*change)
            builder.add(name, **row)
        # what Python drops as the scheduler returns
        for change in changes[len(self.rows)]:
            builder.memory(*change)
        return builder.build(self.stage)

    # -- steps ------------------------------------------------------------------------------------
    def forward(self, inputs: Tokens, microbatch: int, chunk: int) -> Tokens:
        """A forward; returns its output in the form of its input (a tensor or a list of one)."""
        label = ("forward", microbatch, chunk)
        for token in _each(inputs):
            token.used_by(label)
        output = Token(label)
        output.kept, output.storage = inputs, Token(label)
        self.follow(output.storage, OUTPUT, len(self.rows))
        self.add("compute", **step(label))
        return [output] if isinstance(inputs, list) else output

    def backward(self, inputs: Tokens, outputs: Tokens, grads: Tokens) -> Tokens:
        """The backward of what made ``outputs``; returns gradients in the form of ``inputs``."""
        label = ("backward", *_each(outputs)[0].label[1:])
        for token in _each(grads):
            token.used_by(label)
        row = len(self.rows)
        self.add("compute", **step(label))
        # an input holds its gradient; the output's graph still names its leaves, the inputs
        for token in _each(inputs):
            token.grad = Token(label)
            self.follow(token.grad, GRADIENT, row)
        self.own_grad_sync(label[2])
        if isinstance(inputs, list):
            return [_grad(token) for token in inputs]
        return _grad(inputs)

    def deallocate(self, outputs: Tokens, *settings: object) -> None:
        """Stands for schedules.deallocate_output_tensor: an output's graph stays."""
        for output in _each(outputs):
            output.storage = None

    # -- gradients and parameters -----------------------------------------------------------------
    def own_grad_sync(self, chunk: int) -> None:
        """Outside no_sync, a backward starts each bucket as it fills: DDP's own hooks."""
        if self.synchronizing:
            self.add("grad_sync", phase="sync", chunk=chunk, note="in backward")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards only accumulate."""
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True

    # -- p2p --------------------------------------------------------------------------------------
    def isend(
        self, tensor: Token, dst: int, group: SimpleNamespace, at: int = 0, batch: int = -1
    ) -> _Request:
        """torch.distributed.isend."""
        row, work = self._pair("send", tensor, dst, group, at, batch)
        row.update(step(tensor.label))
        return work

    def irecv(
        self, tensor: Token, src: int, group: SimpleNamespace, at: int = 0, batch: int = -1
    ) -> _Request:
        """torch.distributed.irecv."""
        if not tensor.is_shape:
            self.follow(tensor, RECEIVED, len(self.rows))
        tensor.row, work = self._pair("recv", tensor, src, group, at, batch)
        return work

    def _pair(
        self, name: str, tensor: Token, peer: int, group: SimpleNamespace, at: int, batch: int
    ) -> tuple[TapeRow, _Request]:
        """(the event, its request)."""
        line, handle = at or sys._getframe(2).f_lineno, len(self.rows)
        fields: TapeRow = {
            "group": group.desc,
            "peer": _nearest(peer - self.stage, self.pp),
            "handle": handle,
            "batch": batch,
            "site": f"core/pipeline_parallel/p2p_communication.py:{line}",
        }
        # the shape of a tensor that is about to come: three numbers
        if tensor.is_shape:
            fields |= {"dtype": "int64", "shape": "3"}
            fields["num_in" if name == "send" else "num_out"] = 3
        request = _Request(self, handle, tensor if name == "recv" else None)
        return self.add(name, **fields), request

    def batch(self, ops: list[tuple[Any, ...]]) -> list[_Request]:
        """torch.distributed.batch_isend_irecv of ``P2POp``, which are tuples here: one call to
        NCCL.
        """
        number, self._batches = self._batches, self._batches + 1
        at = sys._getframe(1).f_lineno
        return [op(tensor, peer, group, at, number) for op, tensor, peer, group in ops]

    def synchronize(self) -> None:
        """torch.cuda.synchronize."""
        self.add("host_wait", note="device")


# Layer-wise (combined) schedules: what Megatron puts on two streams of a chunk.
#
# Here a layer's parts record themselves; their order, streams and events are Megatron's.


class ScheduleChunk(torch.nn.Module):
    """A model chunk that the schedule can hold and ask for its config; it has no parameters."""

    def __init__(self, config: TransformerConfig, stage: int, index: int) -> None:
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        vpp = config.virtual_pipeline_model_parallel_size
        self.vp_stage = None if vpp is None else index
        last = (config.pipeline_model_parallel_size - 1, (vpp or 1) - 1)
        self.has_loss, self.input_tensor = (stage, index) == last, None

    def set_input_tensor(self, tensors: Any) -> None:
        """What forward will take."""
        self.input_tensor = tensors


# attention, layer norm and router: the name changed in 0.19
_FIRST = (
    "attn" if hasattr(plans.TransformerLayerSchedulePlan, "attn") else "pre_dispatch_computation"
)
_LAZY = hasattr(pipeline_utils.ScheduleNode, "stream_acquire_context")  # 0.19: streams on first use


def replace_combined(changes: ProcessChanges, tape: Tape, chunks: list[Any]) -> Callable[..., Any]:
    """Put recorders in place; returns the forward_step_func, which makes schedule plans."""
    cuda = _Cuda(tape)
    autograd = SimpleNamespace(backward=partial(_loss_backward, tape))
    like = ModuleProxy(torch, cuda=cuda, autograd=autograd)
    replace(changes, pipeline_utils, torch=like, make_viewless=lambda e: e)
    replace(changes, pipeline_utils, _COMP_STREAM=None, _COMM_STREAM=None)
    replace(changes, plans, torch=like)
    replace(changes, combined_1f1b, torch=like)
    # 0.16 asserts that the model is one (combined_1f1b.py:338)
    replace(changes, gpt_model, GPTModel=ScheduleChunk)
    replace(
        changes,
        megatron_schedules,
        set_current_microbatch=lambda chunk, number: setattr(chunk, "microbatch", number),
        forward_step_calc_loss=_loss,
    )
    for chunk in chunks:
        chunk.build_schedule_plan = None  # Megatron looks for it; the step makes the plan

    def forward_step(iterator: object, chunk: Any, return_schedule_plan: bool = False) -> Any:
        return _Plan(tape, cuda, chunk), partial(_loss_forward, tape)

    return forward_step


# -- streams and events ----------------------------------------------------------------------------
class _Stream:
    def __init__(self, name: str = "s1", **kwargs: object) -> None:
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

    def __init__(self, plan: _Plan, name: str, comm: bool = False) -> None:
        get = pipeline_utils.get_comm_stream if comm else pipeline_utils.get_comp_stream
        super().__init__(
            self._record_forward,
            get if _LAZY else get(),
            plan.event,
            self._record_backward,
            name=name,
        )
        self.plan, self.note = plan, name

    def _record_forward(self, *inputs: Token) -> Token:
        self.plan.tape.add("compute", **step(self.plan.forward), note=self.note)
        return Token(self.plan.forward)

    def _record_backward(self, outputs: Any, grads: Any) -> Any:
        for grad in grads:
            grad.used_by(self.plan.backward)
        self.plan.tape.add("compute", **step(self.plan.backward), note=self.note)
        for token in self.inputs:
            token.grad = Token(self.plan.backward)
        return grads

    def backward_dw(self) -> None:
        """Weight gradients are part of the backward."""


class _First(_Node):
    """The embedding, or what was received."""

    def _record_forward(self) -> Token:  # type: ignore[override]
        for token in self.plan.received:
            token.used_by(self.plan.forward)
        return super()._record_forward()

    def _record_backward(self, outputs: Any, grads: Any) -> Any:
        super()._record_backward(outputs, grads)
        for token in self.plan.received:
            token.grad = Token(self.plan.backward)
        self.plan.tape.own_grad_sync(self.plan.backward[2])
        return grads


class _Layer(plans.TransformerLayerSchedulePlan):
    """A layer's parts, on the streams where Megatron makes them (model_chunk_schedule_plan.py:160
    @core_v0.16.1).
    """

    def __init__(self, plan: _Plan) -> None:
        self.config = plan.config
        setattr(self, _FIRST, _Node(plan, _FIRST))
        self.moe_dispatch = _Node(plan, "moe_dispatch", comm=True)
        self.mlp = _Node(plan, "mlp")
        self.moe_combine = _Node(plan, "moe_combine", comm=True)
        self.mtp_post_process = pipeline_utils.NoopScheduleNode()

    def get_fp8_context(self) -> contextlib.AbstractContextManager[None]:
        """A layer's precision orders nothing, and only the layer knows it."""
        return contextlib.nullcontext()

    get_low_precision_context = get_fp8_context  # its name in 0.19.2


class _Plan(plans.TransformerModelChunkSchedulePlan):
    """One microbatch of one chunk; ``run`` and all of its order are Megatron's."""

    def __init__(self, tape: Tape, cuda: _Cuda, chunk: Any) -> None:
        self.tape, self.config = tape, chunk.config
        self.vp_stage = chunk.vp_stage
        # -1: a model of one chunk
        number = -1 if chunk.vp_stage is None else chunk.vp_stage
        self.forward: Label = ("forward", chunk.microbatch, number)
        self.backward: Label = ("backward", chunk.microbatch, number)
        self.received = [token for token in chunk.input_tensor if token is not None]
        self._model_chunk_state = SimpleNamespace(model=chunk)
        self._event = cuda.Event()
        self.pre_process = _First(self, "pre_process")
        self._transformer_layers = [_Layer(self)]
        self.post_process = _Node(self, "post_process") if chunk.has_loss else None


# -- the loss --------------------------------------------------------------------------------------
def _loss(
    chunk: Any, output: Token, loss_func: Any, *args: object, **kwargs: object
) -> tuple[Any, int]:
    """Stands for schedules.forward_step_calc_loss, which asks parallel_state for the last stage."""
    return (loss_func(output) if chunk.has_loss else output), 0


def _loss_forward(tape: Tape, tensor: Token) -> Token:
    tape.add("compute", **step(tensor.label), note="loss")
    loss = Token(tensor.label)
    loss.parent = tensor
    return loss


def _loss_backward(tape: Tape, loss: Token, grad_tensors: object = None) -> None:
    """torch.autograd.backward of a loss: the gradient of what it was computed from."""
    label = ("backward", *loss.label[1:])
    tape.add("compute", **step(label), note="loss")
    assert loss.parent is not None
    loss.parent.grad = Token(label)
