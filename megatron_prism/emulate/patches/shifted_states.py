"""States of a distributed optimizer that Megatron saves in the wrong place.

Megatron before 0.20 strips the padding behind each bucket when it gathers states for
--dist-ckpt-optim-fully-reshardable, and then looks for each parameter as if the padding were there.
Behind a padded bucket all states are shifted, and the last ones are zeros.  Loading is right.

Source: core/optimizer/distrib_optimizer.py:1791 @0.19.0 (NVIDIA/Megatron-LM#5077 corrects it)
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_prism.core.jobs.megatron_source import megatron_release

if TYPE_CHECKING:
    import torch

_CORRECTED = (0, 20)  # release of megatron-core


def shifted_states(optimizer: object, job: Namespace) -> dict[str, int]:
    """Find the parameters whose states the job saves in the wrong place.

    Args:
        optimizer: of the job: a distributed one, several in a chain, or another.
        job: the job's arguments.

    Returns:
        Name of a parameter -> by how many elements its states are shifted.
    """
    # states are saved by buckets, or by a release that is corrected
    if not getattr(job, "dist_ckpt_optim_fully_reshardable", False) or _is_corrected():
        return {}
    shifts: dict[str, int] = {}
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        names = dict(_names(part))
        for buffer in getattr(part, "buffers", ()):
            padding = _padding_before(buffer)
            for parameter, (_, _, bucket) in buffer.param_index_map.items():
                # what lies behind padding is shifted by it
                name = names.get(parameter, "")
                if name and padding[bucket]:
                    shifts[name] = padding[bucket]
    return shifts


def _is_corrected() -> bool:
    """Return whether this Megatron finds the states."""
    numbers = []
    for word in megatron_release().split(".")[:2]:
        # a release that nobody can read counts as a new one
        if not word.isdecimal():
            return True
        numbers.append(int(word))
    return tuple(numbers) >= _CORRECTED


def _names(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, str]]:
    """Yield the parameters that a rank saves, and what the model calls them."""
    for chunk in getattr(optimizer, "model_chunks", ()):
        for name, parameter in chunk.named_parameters():
            plain_name = name
            while plain_name.startswith("module."):
                plain_name = plain_name.removeprefix("module.")
            # the last stage's copy of tied embeddings; the first stage saves its own
            is_copy = getattr(parameter, "shared_embedding", False)
            if not (is_copy and plain_name.startswith("output_layer.")):
                yield parameter, plain_name


def _padding_before(buffer: Any) -> list[int]:
    """Return how many elements of padding are stripped before each bucket of a buffer."""
    padding = [0]
    for bucket in buffer.buckets:
        padding.append(padding[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
    return padding
