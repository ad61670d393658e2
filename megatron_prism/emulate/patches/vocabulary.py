"""Patches of the vocabulary-parallel embedding and loss."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_prism.emulate.patch import Patch, PatchContext
from megatron_prism.runtime.partial_sums import LocalVocabularySum, PartialLookup
from megatron_prism.runtime.world import values_of


def labels_of_locals(
    labels: torch.Tensor, owners: list[int], rows: int, sequence: bool
) -> torch.Tensor:
    """``labels`` [b, s] as a network has them whose virtual members are ``owners``' mirrors.

    owners   : for each member of the group the local member that it is or mirrors
    rows     : of the vocabulary that one member holds; padding (no label of any member) becomes a
               label, which Megatron's loss mask leaves out as before
    sequence : whether members hold stretches of the sequence: mirrored ones come with their labels

    Two kernels if one member is local, and no copy from the host, which would wait for the device.
    """
    if sequence and labels.shape[-1] % len(owners) == 0:
        stretches = labels.chunk(len(owners), -1)
        labels = torch.cat([stretches[owner] for owner in owners], -1)
    places = labels.remainder(rows)
    mapped = places + rows * owners[0]
    for member, owner in enumerate(owners):
        if owner != owners[0]:
            its = (labels >= rows * member) & (labels < rows * (member + 1))
            mapped = torch.where(its, places + rows * owner, mapped)
    return mapped


def _mirrored_labels(module: ModuleType, context: PatchContext) -> None:
    """The network that mirrors make up is trained on labels that it can learn."""
    if context.meta:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, labels: torch.Tensor, logits: torch.Tensor) -> Any:
            values = values_of(self.tp_group)
            if values is None:
                return original(self, labels, logits)
            owners, sequence = self.tp_group.owners(), bool(self.config.sequence_parallel)
            labels = labels_of_locals(labels, owners, logits.shape[-1], sequence)
            with values.of_parts(LocalVocabularySum()):
                return original(self, labels, logits)

        return call

    context.replace(module.LanguageModule, "compute_language_model_loss", make)


_LOSS: tuple[Patch, ...] = (
    Patch(
        "mirrored-labels",
        "megatron.core.models.common.language_module.language_module",
        "labels of virtual ranks' vocabulary teach nothing; those of mirrored tokens contradict",
        "core/models/common/language_module/language_module.py:128 @0.16.1; :155 @0.19.0",
        _mirrored_labels,
        targets=("LanguageModule.compute_language_model_loss",),
    ),
)


def _rows(embedding: Any, tokens: torch.Tensor) -> PartialLookup | None:
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
    return PartialLookup(weight, order)


def _whole_lookup(module: ModuleType, context: PatchContext) -> None:
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
    *_LOSS,
)
