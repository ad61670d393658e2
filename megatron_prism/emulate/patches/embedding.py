"""What is changed in Megatron's vocabulary-parallel embedding, and why.  Same form as ``seams``."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_prism.emulate.patch import Context, Patch
from megatron_prism.runtime.partial_sums import Rows
from megatron_prism.runtime.world import values_of

__all__ = ["PATCHES"]


def _rows(embedding: Any, tokens: torch.Tensor) -> Rows | None:
    """What the embedding's sum over tp is complete with; None if nothing is missing or known.

    A weight that is not this rank's whole partition (DTensor, 0.19's gtp_remat) is not known here.
    """
    weight = embedding.weight
    if type(weight) is not torch.nn.Parameter or getattr(embedding, "gtp_remat_size", 1) > 1:
        return None
    if weight.shape[0] != embedding.num_embeddings_per_partition:
        return None
    # [b, s] is looked up, and [s, b, h] reduced and scattered
    order = tokens.transpose(0, 1) if embedding.reduce_scatter_embeddings else tokens
    return Rows(weight, order)


def _whole_lookup(module: ModuleType, context: Context) -> None:
    """Only data of the call's answer changes: gradients go where the local mask lets them."""
    if context.meta:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, input_: torch.Tensor) -> Any:
            values = values_of(self.tp_group)
            rows = _rows(self, input_) if values is not None else None
            if values is None or rows is None:
                return original(self, input_)
            with values.of_parts(rows):
                return original(self, input_)

        return call

    context.replace(module.VocabParallelEmbedding, "forward", make)


PATCHES: tuple[Patch, ...] = (
    Patch(
        "whole-lookup",
        "megatron.core.tensor_parallel.layers",
        "tokens of virtual ranks' vocabulary would be zeros, whose gradients explode",
        "core/tensor_parallel/layers.py:289 @0.16.1; :359 @0.19.0",
        _whole_lookup,
        targets=("VocabParallelEmbedding.forward",),
    ),
)
