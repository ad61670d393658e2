"""What is changed in Megatron's pipeline communication, and why: scales and shapes of what comes.

Same form as ``seams``: each answers what only an absent rank could answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from megatron_prism.emulate.patch import Context, Patch
from megatron_prism.emulate.patches.startup import _get_args
from megatron_prism.runtime.world import current

__all__ = ["PATCHES"]


def _label_receives(module: ModuleType, context: Context) -> None:
    """Say which received tensor is an activation and which a gradient: their scales differ."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            world = current()
            if world is None:
                return original(**kwargs)
            with world.values.expecting(
                activation=kwargs.get("tensor_recv_prev"), gradient=kwargs.get("tensor_recv_next")
            ):
                return original(**kwargs)

        return call

    context.replace(module, "_p2p_ops", make)
    context.replace(module, "_batched_p2p_ops", make)

    def shapes(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, send_next: Any, send_prev: Any, recv_prev: Any, recv_next: Any) -> Any:
            prev, after = original(self, send_next, send_prev, recv_prev, recv_next)
            layout = getattr(self.config, "pipeline_model_parallel_layout", None)
            if getattr(self.config, "mtp_standalone", False) and layout is not None:
                if not hasattr(self, "_prism_lengths"):  # a schedule makes a communicator
                    self._prism_lengths = mtp_lengths(self, context.proof.microbatches())
                one = _shape_here(self.config)
                long = [next(side) if asked else 1 for side, asked in
                        zip(self._prism_lengths, (recv_prev, recv_next), strict=True)]  # fmt: skip
                before, behind = ([one[0] * n, *one[1:]] for n in long)
            else:
                before = behind = _shape_here(self.config, send_next, send_prev)
            return (  # a local peer has said it
                before if recv_prev and not all(prev) else prev,
                behind if recv_next and not all(after) else after,
            )

        return call

    context.replace(module.P2PCommunicator, "_communicate_shapes", shapes)


def _shape_here(config: Any, *sent: Any) -> list[int]:
    """The shape a peer would announce: what we send it, else [sequence, micro-batch, hidden]."""
    for tensor in sent:
        if tensor is not None:
            return list(tensor.shape)
    settings = _get_args()
    tokens = settings.seq_length // config.context_parallel_size
    if config.sequence_parallel:
        tokens //= config.tensor_model_parallel_size
    return [tokens, settings.micro_batch_size, config.hidden_size]


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
    long = 1 + config.mtp_num_layers
    forward = [chunk * stages + stage for chunk in order]
    backward = [(chunks - 1 - chunk) * stages + stage for chunk in order]
    return (
        iter([long if place > mtp else 1 for place in forward if place > 0]),
        iter([long if place >= mtp else 1 for place in backward if place < stages * chunks - 1]),
    )


def _scaled_gradients(module: ModuleType, context: Context) -> None:
    """A received gradient carries the loss scale that the last stage multiplied its loss by.

    The optimizer divides by it again: without it gradients of middle stages come out 2^32 times too
    small under fp16, and the norm prints 0.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            world = current()
            if world is not None:
                world.values.loss_scale = _loss_scale(self.config.grad_scale_func)
            return original(self, *args, **kwargs)

        return call

    context.replace(module.P2PCommunicator, "_communicate", make)


def _loss_scale(scale_loss: Any) -> Callable[[], Any] | None:
    """Reads the loss scale of now; None where nothing is scaled (bf16, fp32, no optimizer).

    ``scale_loss`` is the optimizer's method (training.py:2547 @0.16.1); a job's own function is
    asked what becomes of a loss of one.
    """
    if scale_loss is None:
        return None
    optimizer = getattr(scale_loss, "__self__", None)
    if optimizer is None or not hasattr(optimizer, "get_loss_scale"):
        return lambda: scale_loss(torch.ones(1, device=torch.cuda.current_device()))
    first = (getattr(optimizer, "chained_optimizers", None) or [optimizer])[0]
    scaler = getattr(first, "grad_scaler", None)
    return None if scaler is None else lambda: scaler.scale


PATCHES: tuple[Patch, ...] = (
    Patch(
        "label-receives",
        "megatron.core.pipeline_parallel.p2p_communication",
        "received activations and gradients have different scales; shapes need an oracle",
        "core/pipeline_parallel/p2p_communication.py:48, :66, :160",
        _label_receives,
        targets=(
            "_p2p_ops",
            "_batched_p2p_ops",
            "P2PCommunicator._communicate_shapes",
        ),
    ),
    Patch(
        "loss-scale",
        "megatron.core.pipeline_parallel.p2p_communication",
        "under fp16 received gradients carry the loss scale",
        "core/pipeline_parallel/p2p_communication.py:254 @0.16.1; :275 @0.19.0",
        _scaled_gradients,
        targets=("P2PCommunicator._communicate",),
    ),
)
