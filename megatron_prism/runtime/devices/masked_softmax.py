"""What stands in for the CUDA softmax kernels of Megatron's local attention, without a CUDA device?

``FusedScaleMaskSoftmax`` asks for three of them by default (core/fusions/fused_softmax.py:36, 86,
132 @0.16.1).  A kernel scales, masks and normalises in fp32, and allocates its result alone; the
backward one writes over the gradient that it gets.  What is saved in between Megatron decides.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable

import torch

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices.work import fused

__all__ = ["add_modules"]

_MASKED = -10000.0  # as the kernels have it
_WARP, _THREADS = 32, 128


def _softmax(scores: torch.Tensor, mask: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
    """Probabilities of scores ``[…, queries, keys]`` in their type; ``mask`` is true where none."""
    if scores.is_meta:
        out = torch.empty_like(scores)
        fused("masked_softmax", 0, scores, out)
        return out
    wide = scores.float() * float(scale)
    if mask is not None:
        wide = wide.masked_fill(mask, _MASKED)
    return torch.softmax(wide, dim=-1).to(scores.dtype)


def _causal(scores: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scores.is_meta:
        return _softmax(scores, None, scale)
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return _softmax(scores, ones.triu(1), scale)


def _plain(scores: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _softmax(scores, None, scale)


def _backward(grad: torch.Tensor, results: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    grad = grad.contiguous()
    if grad.is_meta:
        fused("masked_softmax_backward", 0, grad, results, grad)
        return grad
    wide, found = grad.float(), results.float()
    inner = (wide * found).sum(-1, keepdim=True)
    return grad.copy_(found * (wide - inner) * float(scale))


def _batches_per_block(queries: int, keys: int, batches: int, heads: int) -> int:
    """How many rows a block of 128 threads takes: two a warp where a row is short."""
    power = 1 << max(0, keys - 1).bit_length()
    return _THREADS // min(power, _WARP) * (2 if power <= 128 else 1)


_MODULES: dict[str, dict[str, Callable[..., object]]] = {
    "scaled_upper_triang_masked_softmax_cuda": {"forward": _causal},
    "scaled_masked_softmax_cuda": {
        "forward": _softmax,
        "get_batch_per_block": _batches_per_block,
    },
    "scaled_softmax_cuda": {"forward": _plain},
}


def add_modules(changes: ProcessChanges) -> str:
    """Put them into ``sys.modules``; says what they are.  Real ones would want a device."""
    for name, functions in _MODULES.items():
        module = types.ModuleType(name, "A stand-in of megatron_prism.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(functions, backward=_backward)
        changes.set_item(sys.modules, name, module)
    return "apex's masked softmax: a softmax, which keeps its result alone"
