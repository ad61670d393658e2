"""Patches of communication between ranks: what is received, by its scale, shape and tokens; labels
of phases and microbatches.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.emulate.patch import META, VALUES, Original, PatchContext, Patches, refused
from megatron_prism.runtime.recorder.repeats import NotRepeatedError
from megatron_prism.runtime.virtual_world import current, values_of

PATCHES = Patches()


def tokens_of(labels: torch.Tensor, length: int, place: int, parts: int) -> torch.Tensor | None:
    """Tokens [length, b] of a local stretch, read off ``labels`` [b, s]; None if they do not fit.

    A label is the token that follows, so tokens are the labels before.  The first of a sequence (of
    each chunk, with context parallelism) gets the last label, and what has no label (prompts, in
    fine-tuning) a number of its own place.  With sequence parallelism a rank holds one of ``parts``
    stretches, that at ``place``.
    """
    # labels of other models have other dimensions
    if labels.dim() != 2:
        return None
    tokens = labels.roll(1, -1)
    own = torch.arange(tokens.shape[-1], device=tokens.device, dtype=tokens.dtype)
    # prompts have no label (-100): any number does for them
    tokens = torch.where(tokens < 0, own, tokens)
    # sequence parallel: one stretch of the sequence
    if length * parts == labels.shape[-1] and parts > 1:
        tokens = tokens.chunk(parts, -1)[place]
    return tokens.t() if tokens.shape[-1] == length else None


def _fill_received(model: Any, labels: torch.Tensor) -> None:
    """Give what ``model`` has received as noise the vectors of its tokens."""
    world, received = current(), getattr(model.decoder, "input_tensor", None)
    if world is None or received is None or not world.values.is_noise(received):
        return
    from megatron.core import parallel_state

    parts, place = 1, 0
    # sequence parallel ranks hold parts of the tokens
    if model.config.sequence_parallel:
        parts = parallel_state.get_tensor_model_parallel_world_size()
        place = parallel_state.get_tensor_model_parallel_rank()

    def fill() -> None:
        tokens = tokens_of(labels, received.shape[0], place, parts)
        if tokens is not None and tokens.shape == received.shape[:-1]:
            world.values.fill_vectors(received, tokens)

    world.unrecorded(fill)  # the real job has it from another rank


@PATCHES.instead(
    "megatron.core.models.gpt.gpt_model:GPTModel.forward",
    "GPTModel.build_schedule_plan",
    at="core/pipeline_parallel/schedules.py:415 @0.16.1; :501 @0.19.0 (set_input_tensor)",
    tiers=VALUES,
)
@PATCHES.instead(
    "megatron.core.models.hybrid.hybrid_model:HybridModel.forward",
    at="core/pipeline_parallel/schedules.py:415 @0.16.1; :501 @0.19.0 (set_input_tensor)",
    releases=">=0.19",
    tiers=VALUES,
)
@PATCHES.instead(
    "megatron.core.models.mamba.mamba_model:MambaModel.forward",
    at="core/pipeline_parallel/schedules.py:415 @0.16.1; :501 @0.19.0 (set_input_tensor)",
    releases="<0.19",
    tiers=VALUES,
)
def _received_tokens(
    context: PatchContext, original: Original, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """A stage with labels learns from vectors of tokens; from noise nothing but a direction shared
    by all tokens.
    """
    labels = kwargs.get("labels", args[4] if len(args) > 4 else None)
    if labels is not None:
        _fill_received(self, labels)
    return original(self, *args, **kwargs)


class _Zeroed:
    """While entered, ``torch.empty`` gives zeros for shapes (2, ...); several threads may enter."""

    def __init__(self) -> None:
        self._lock, self._inside, self._empty = threading.Lock(), 0, torch.empty

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._empty = torch.empty
                torch.empty = self._zeros
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.empty = self._empty

    def _zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = self._empty(*args, **kwargs)
        pair = bool(args) and isinstance(args[0], tuple) and args[0][:1] == (2,)
        return made.zero_() if pair else made


@PATCHES.patch(
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
    "AttnFuncWithCPAndKVP2P.backward",
    at="transformer_engine/pytorch/.../context_parallel.py:3030 @2.20.2",
    tiers=VALUES,
)
def _whole_ring(module: ModuleType, context: PatchContext) -> None:
    """Where gradients of keys and values go round, the last rank writes half of what it sends: the
    real neighbour overwrites the other half, a mirrored one adds it up.
    """
    zeroed = _Zeroed()

    def call(original: Original, ctx: Any, *gradients: Any) -> Any:
        group = ctx.cp_group
        if values_of(group) is None or group.rank() + 1 < group.size():
            return original(ctx, *gradients)
        with zeroed:  # keys and values, and behind them their gradients
            return original(ctx, *gradients)

    backward = staticmethod(partial(call, module.AttnFuncWithCPAndKVP2P.backward))
    context.set(module, "AttnFuncWithCPAndKVP2P.backward", backward)


@PATCHES.patch("megatron.core.tensor_parallel.data:broadcast_data", at=":64 @0.16.1 and @0.19.0")
def _own_broadcasts(module: ModuleType, context: PatchContext) -> None:
    """Scripts other than GPT's send a batch and its sizes by ``broadcast_data``.  A rank that reads
    the batch itself, because its source is virtual, has both; on shapes the sizes could not be read
    back.  The calls stay, and so does the one buffer that all tensors are views of.
    """

    def call(original: Original, keys: Any, data: Any, datatype: Any, tp_group: Any = None) -> Any:
        group = module.get_tensor_model_parallel_group_if_none(tp_group)
        source = torch.distributed.get_process_group_ranks(group)[0]
        # no data here, or its source is a local rank with values
        if not data or source in context.local_ranks and not context.meta:
            return original(keys, data, datatype, tp_group=tp_group)
        module._check_data_types(keys, data, datatype)
        sizes = torch.zeros(len(keys) * module._MAX_DATA_DIM, dtype=torch.long, device="cuda")
        torch.distributed.broadcast(sizes, source, group=group)
        flat = torch.cat([data[key].cuda().contiguous().view(-1) for key in keys], dim=0)
        torch.distributed.broadcast(flat, source, group=group)
        parts = flat.split([data[key].numel() for key in keys])
        return {key: part.view(data[key].shape) for key, part in zip(keys, parts, strict=True)}

    context.replace(module, call)


@PATCHES.patch(
    "megatron.core.models.multimodal.llava_model:LLaVAModel.__init__", at=":482 @0.19.0", tiers=META
)
def _images_have_places(module: ModuleType, context: PatchContext) -> None:
    """LLaVA's sequences are as long as the values of its tokens say: refused before it is built."""
    what = "LLaVA puts images where the tokens say, and tier meta has no values"
    context.replace(module, refused(what, "use --prism-tier cpu"))


_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


@PATCHES.patch(
    "megatron.core.pipeline_parallel.schedules:forward_step",
    "backward_step",
    "get_model_config",
    *_SCHEDULES,
    at=":311, :446 @0.16.1",
)
def _label_phases(module: ModuleType, context: PatchContext) -> None:
    """Tell the monitor, and through it the memory tracker, which phase and microbatch runs."""
    monitor = context.monitor
    signature = inspect.signature(module.forward_step)

    def forward(original: Original, *args: Any, **kwargs: Any) -> Any:
        labels = monitor.forward_labels(kwargs.get("vp_stage"))
        with monitor.step(labels):
            if monitor.repeats is None:
                result = original(*args, **kwargs)
            else:
                # a forward that was recorded is written down again
                arguments = signature.bind(*args, **kwargs).arguments
                key = (labels.get("chunk"), labels["microbatch"])
                run = partial(original, *args, **kwargs)
                model = arguments["model"]
                set_input = module.get_attr_wrapped_model(model, "set_input_tensor")
                inputs, stored = arguments["input_tensor"], arguments["forward_data_store"]
                result = monitor.repeats.forward(key, run, inputs, stored, model, set_input)
        monitor.remember_output(result[0], labels)
        return result

    def backward(
        original: Original, input_tensor: Any, output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        labels = monitor.backward_labels(output)
        with monitor.step(labels):
            if monitor.repeats is None:
                return original(input_tensor, output, *args, **kwargs)
            run = partial(original, input_tensor, output, *args, **kwargs)
            key = (labels.get("chunk"), labels.get("microbatch", -1))
            return monitor.repeats.backward(key, run, input_tensor, (output, *args[:1]))

    def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
        wanted_microbatches = kwargs.get("num_microbatches", 0)
        config = None
        if monitor.few is not None or monitor.repeats is not None:
            model = kwargs.get("model")
            # of all chunks the first
            if isinstance(model, list):
                model = model[0]
            config = module.get_model_config(model)
        # which may lower the number of microbatches
        monitor.new_schedule(kwargs, config)
        try:
            results = original(*args, **kwargs)
        except NotRepeatedError:
            monitor.not_repeated()
            raise
        # its caller expects as many results as it asked for
        if results and kwargs.get("num_microbatches", 0) < wanted_microbatches:
            return list(itertools.islice(itertools.cycle(results), wanted_microbatches))
        return results

    context.replace(module, forward, "forward_step")
    context.replace(module, backward, "backward_step")
    context.replace(module, schedule, *_SCHEDULES)


@PATCHES.patch(
    "megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step",
    at=":237 @0.16.1; :281 @0.19.0",
)
def _label_combined(module: ModuleType, context: PatchContext) -> None:
    """The same for a forward and a backward that run layer by layer beside each other (--overlap-
    moe-expert-parallel-comm): what they do counts as the forward's.
    """
    monitor = context.monitor

    names = inspect.signature(module.combined_forward_backward_step)

    def call(original: Original, *args: Any, **kwargs: Any) -> Any:
        given = names.bind(*args, **kwargs).arguments
        forward = None
        with contextlib.ExitStack() as steps:
            # the first forwards have no backward beside them, the last backwards no forward
            if given["b_model"] is not None:
                backward = monitor.backward_labels(given["b_output_tensor"])
                steps.enter_context(monitor.step(backward))
            if given["f_model"] is not None:
                forward = monitor.forward_labels(given.get("f_model_chunk_id"))
                steps.enter_context(monitor.step(forward))
            result = original(*args, **kwargs)
        if forward is not None:
            monitor.remember_output(result[0], forward)
        return result

    context.replace(module, call)


@PATCHES.patch(
    "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
    "_batched_p2p_ops",
    "P2PCommunicator._communicate_shapes",
    at=":16, :54, :165 @0.16.1; :186 @0.19.0",
)
def _label_receives(module: ModuleType, context: PatchContext) -> None:
    """Received activations and gradients have different scales, and shapes need an oracle."""

    def call(original: Original, **kwargs: Any) -> Any:
        world = current()
        if world is None:
            return original(**kwargs)
        with world.values.expecting(
            activation=kwargs.get("tensor_recv_prev"), gradient=kwargs.get("tensor_recv_next")
        ):
            return original(**kwargs)

    def shapes(
        original: Original,
        self: Any,
        send_next: Any,
        send_prev: Any,
        recv_prev: Any,
        recv_next: Any,
    ) -> Any:
        """Return the shapes of what comes from both neighbours, as virtual ones would say them."""
        prev, after = original(self, send_next, send_prev, recv_prev, recv_next)
        # a local peer has said its shape
        prev_unknown = recv_prev and not all(prev)
        after_unknown = recv_next and not all(after)
        layout = getattr(self.config, "pipeline_model_parallel_layout", None)
        if getattr(self.config, "mtp_standalone", False) and layout is not None:
            if not hasattr(self, "_prism_lengths"):  # a schedule makes a communicator
                num_microbatches = context.monitor.schedule["num_microbatches"]
                self._prism_lengths = mtp_lengths(self, num_microbatches)
            # MTP layers have a stage of their own: several tensors come as one
            activations, gradients = self._prism_lengths
            tokens, *other_sizes = _shape_here(self.config, context)
            before = behind = [tokens, *other_sizes]
            if recv_prev:
                before = [tokens * next(activations), *other_sizes]
            if recv_next:
                behind = [tokens * next(gradients), *other_sizes]
        else:
            before = behind = _shape_here(self.config, context, send_next, send_prev)
            # gradients come in the order of sends
            if self.virtual_pipeline_model_parallel_size is None:
                sent = self.__dict__.setdefault("_prism_sent", [])
                if send_next is not None:
                    sent.append(list(send_next.shape))
                if recv_next and sent:
                    behind = sent.pop(0)
            if prev_unknown and not all(before):  # lengths differ, and it says 0
                message = "how long a microbatch is comes from the stage before, which is virtual"
                fix = "emulate the first stage, or run all layers on one"
                raise UnsupportedError(message, fix=fix)
        if prev_unknown:
            prev = before
        if after_unknown:
            after = behind
        return prev, after

    context.replace(module, call, "_p2p_ops", "_batched_p2p_ops")
    context.replace(module, shapes, "P2PCommunicator._communicate_shapes")


def _shape_here(config: Any, context: PatchContext, *sent: Any) -> list[int]:
    """The shape a peer would announce: what we send it, else [sequence, micro-batch, hidden]."""
    # messages of a pipeline have the same shape in both directions
    for tensor in sent:
        if tensor is not None:
            return list(tensor.shape)
    settings = context.monitor.schedule
    tokens = settings["seq_length"] // config.context_parallel_size
    if config.sequence_parallel:
        tokens //= config.tensor_model_parallel_size
    return [tokens, settings["micro_batch_size"], config.hidden_size]


def mtp_lengths(communicator: Any, microbatches: int) -> tuple[Iterator[int], Iterator[int]]:
    """How many sequences long what comes is where MTP layers have a stage of their own: the n-th
    activation and the n-th gradient of a schedule.

    Such a stage sends its input and a hidden state of every MTP layer as one tensor, and gets its
    gradient back (core/transformer/multi_token_prediction.py:804 @0.19.0).  Messages come in the
    order of the schedule, of those chunks that receive at all.
    """
    from megatron.core.pipeline_parallel.schedules import get_schedule_table
    from megatron.core.transformer.enums import LayerType

    config, stage = communicator.config, communicator.pp_group.rank()
    layout = config.pipeline_model_parallel_layout.layout
    stages, chunks = len(layout), len(layout[0])
    order = [0] * microbatches
    if chunks > 1:
        group = config.microbatch_group_size_per_vp_stage
        order = [chunk for _, chunk in get_schedule_table(microbatches, chunks, group)]
    mtp = next(s for s in range(stages) if LayerType.mtp in layout[s][-1]) + stages * (chunks - 1)
    # a chunk behind those with MTP layers gets as many sequences, and one that sends to them gets
    # as many gradients
    long = 1 + config.mtp_num_layers
    last = stages * chunks - 1
    activations, gradients = [], []
    for chunk in order:
        place = chunk * stages + stage
        if place > mtp:
            activations.append(long)
        elif place > 0:
            activations.append(1)
        # backward goes through the chunks in reverse
        place = (chunks - 1 - chunk) * stages + stage
        if mtp <= place < last:
            gradients.append(long)
        elif place < last:
            gradients.append(1)
    return iter(activations), iter(gradients)


@PATCHES.instead(
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
    at=":254 @0.16.1; :275 @0.19.0",
)
def _loss_scale(
    context: PatchContext, original: Original, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """A received gradient carries the loss scale that the last stage multiplied its loss by.

    The optimizer divides by it again: without it gradients of middle stages come out 2^32 times too
    small under fp16, and the norm prints 0.
    """
    world = current()
    if world is not None:
        world.values.loss_scale = _scale_of_now(self.config.grad_scale_func)
    return original(self, *args, **kwargs)


def _scale_of_now(scale_loss: Any) -> Callable[[], Any] | None:
    """What reads the loss scale of now; None where nothing is scaled (bf16, fp32, no optimizer).

    ``scale_loss`` is the optimizer's method (training.py:2547 @0.16.1); a job's own function is
    asked what becomes of a loss of one.
    """
    if scale_loss is None:
        return None
    # the job's own function
    optimizer = getattr(scale_loss, "__self__", None)
    if optimizer is None or not hasattr(optimizer, "get_loss_scale"):
        return lambda: scale_loss(torch.ones(1, device=torch.cuda.current_device()))
    # of several optimizers the first scales the loss
    first = (getattr(optimizer, "chained_optimizers", None) or [optimizer])[0]
    scaler = getattr(first, "grad_scaler", None)
    return None if scaler is None else lambda: scaler.scale
