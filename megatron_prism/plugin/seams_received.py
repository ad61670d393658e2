"""What is changed where values of virtual ranks come in, and why.  Same form as ``seams``."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_prism.plugin.seams import Context, Seam, _wrap
from megatron_prism.virtual.session import current, values_of

__all__ = ["SEAMS", "tokens_of"]


def tokens_of(labels: torch.Tensor, length: int, place: int, parts: int) -> torch.Tensor | None:
    """Tokens [length, b] of a local stretch, read off ``labels`` [b, s]; None if they do not fit.

    A label is the token that follows, so tokens are the labels before; the first is unknown and
    gets the last label.  With sequence parallelism a rank holds one of ``parts`` stretches, that at
    ``place``.
    """
    if labels.dim() != 2:
        return None
    tokens = labels.roll(1, -1)
    if length * parts == labels.shape[-1] and parts > 1:
        tokens = tokens.chunk(parts, -1)[place]
    return tokens.t() if tokens.shape[-1] == length else None


def _received_tokens(module: ModuleType, context: Context) -> None:
    """A stage with labels learns from vectors of tokens; from noise it could not."""
    if context.meta:
        return

    def tell(model: Any, labels: torch.Tensor) -> None:
        world, received = current(), getattr(model.decoder, "input_tensor", None)
        if world is None or received is None or not world.values.is_noise(received):
            return
        from megatron.core import parallel_state

        parts, place = 1, 0
        if model.config.sequence_parallel:
            parts = parallel_state.get_tensor_model_parallel_world_size()
            place = parallel_state.get_tensor_model_parallel_rank()
        tokens = tokens_of(labels, received.shape[0], place, parts)
        if tokens is not None and tokens.shape == received.shape[:-1]:
            world.values.told(received, tokens)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.get("labels", args[4] if len(args) > 4 else None)
            if labels is not None:
                tell(self, labels)
            return original(self, *args, **kwargs)

        return call

    _wrap(module.GPTModel, "forward", make)


def _whole_ring(module: ModuleType, context: Context) -> None:
    """Where gradients of keys and values go round, the last rank writes half of what it sends."""
    if context.meta:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(ctx: Any, *gradients: Any) -> Any:
            group = ctx.cp_group
            if values_of(group) is None or group.rank() + 1 < group.size():
                return original(ctx, *gradients)
            empty = torch.empty

            def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
                return empty(*args, **kwargs).zero_()

            torch.empty = zeros
            try:
                return original(ctx, *gradients)
            finally:
                torch.empty = empty

        return backward

    if (attention := getattr(module, "AttnFuncWithCPAndKVP2P", None)) is not None:
        attention.backward = staticmethod(make(attention.backward))


SEAMS: tuple[Seam, ...] = (
    Seam(
        "received-tokens",
        "megatron.core.models.gpt.gpt_model",
        "nothing but a direction shared by all tokens can be learned from noise",
        "core/pipeline_parallel/schedules.py:415 @0.16.1; :501 @0.19.0 (set_input_tensor)",
        _received_tokens,
    ),
    Seam(
        "whole-ring",
        "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
        "the real neighbour overwrites the half that stays unwritten; a mirrored one adds it up",
        "transformer_engine/pytorch/.../context_parallel.py:3030 @2.20.2",
        _whole_ring,
    ),
)
