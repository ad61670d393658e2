"""flash-attn 2 on shapes: Transformer Engine takes it where cuDNN is switched off.

Its functions return and keep what those of the package do, which cannot be installed without nvcc.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.te_kernels.attention import announce, is_deterministic, rounded
from megatron_prism.runtime.te_kernels.table import new

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads

_VERSION = "2.8.1"
_PROCESSORS = 132  # of a Hopper GPU


def _size(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """(sequences, rows of queries, of keys) of [b, s, h, d], or of packed rows [t, h, d]."""
    return (q.shape[0], q.shape[1], k.shape[1]) if q.dim() == 4 else (1, len(q), len(k))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, None, Tensor]:  # fmt: skip
    """mha_fwd, mha_varlen_fwd (csrc/flash_attn/flash_api.cpp @2.8): out, statistics, probabilities
    for tests, random state."""
    out = new([*q.shape[:-1], v.shape[-1]], q.dtype)
    batch, rows, _ = size = _size(q, k)
    heads = q.shape[-2]
    statistics = new([batch, heads, rows] if q.dim() == 4 else [heads, rows], torch.float32)
    state = new(2, torch.int64)
    announce("attention", 2, (q, k, v), out, size, causal, window, dropout)
    return out, statistics, None, state


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, dropout: float,
    causal: bool, window: tuple[int, int],
) -> Tensor:  # fmt: skip
    """mha_bwd (flash_api.cpp @2.8): a number a row; the gradient of the queries in fp32, several
    times where sums have one order; with grouped heads the keys' and values' of every head."""
    batch, rows, columns = size = _size(q, k)
    heads, width = q.shape[-2:]
    padded, broad = rounded(rows, 128), rounded(width, 32 if width <= 128 else 64)
    number = new([batch, heads, padded], torch.float32)
    copies = -(-_PROCESSORS // (batch * heads)) if is_deterministic() else 1
    taken = [new([copies, batch, heads, padded, broad], torch.float32)]
    if k.shape[-2] != heads:
        taken += [new([batch, columns, heads, t.shape[-1]], q.dtype) for t in (k, v)]
    announce("attention_backward", 5, (q, k, v), grad, size, causal, window, dropout)
    return number


class _Attention(torch.autograd.Function):
    """FlashAttnFunc, FlashAttnVarlenFunc (flash_attn/flash_attn_interface.py @2.8)."""

    @staticmethod
    def forward(
        ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor,
        lengths: Sequence[Tensor], options: tuple[float, bool, tuple[int, int]],
    ) -> Tensor:  # fmt: skip
        out, statistics, _, state = _forward(q, k, v, *options)
        ctx.save_for_backward(q, k, v, out, statistics, *lengths, state)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Grads:
        q, k, v, *_ = ctx.saved_tensors
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        _backward(grad.contiguous(), q, k, v, *ctx.options)
        return (*grads, None, None)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
    softmax_scale: object = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    **rest: object,
) -> Tensor:  # fmt: skip
    """[b, s, h, d]"""
    return _Attention.apply(q, k, v, (), (dropout_p, causal, window_size))


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: object = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    **rest: object,
) -> Tensor:  # fmt: skip
    """[t, h, d]"""
    lengths = (cu_seqlens_q, cu_seqlens_k)
    return _Attention.apply(q, k, v, lengths, (dropout_p, causal, window_size))


def _window(options: dict[str, Any]) -> tuple[int, int]:
    left, right = options.get("window_size_left", -1), options.get("window_size_right", -1)
    return options.get("window_size", (left, right))


def _raw_forward(q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: Any
                 ) -> tuple[Tensor, Tensor, None, Tensor]:  # fmt: skip
    """_flash_attn_forward, _flash_attn_varlen_forward: what context parallelism calls."""
    return _forward(q, k, v, options.get("dropout_p", 0.0), options["causal"], _window(options))


def _raw_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor,
                  *rest: object, **options: Any) -> Tensor:  # fmt: skip
    """_flash_attn_backward, _flash_attn_varlen_backward: into the gradients that it is given."""
    dropout = options.get("dropout_p", 0.0)
    return _backward(grad, q, k, v, dropout, options["causal"], _window(options))


_INTERFACE: dict[str, object] = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "_flash_attn_forward": _raw_forward,
    "_flash_attn_varlen_forward": _raw_forward,
    "_flash_attn_backward": _raw_backward,
    "_flash_attn_varlen_backward": _raw_backward,
}
_MODULES: dict[str, dict[str, object]] = {
    "flash_attn": {"__version__": _VERSION, "__path__": []},
    "flash_attn.flash_attn_interface": _INTERFACE,
    "flash_attn_2_cuda": {"varlen_bwd": _raw_backward},
}


def add_modules(changes: ProcessChanges) -> None:
    """Put the package into ``sys.modules``, and its version among those that are installed."""
    for name, contents in _MODULES.items():
        module = types.ModuleType(name, "A stand-in of megatron_prism.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(contents)
        changes.set_item(sys.modules, name, module)
    version = importlib.metadata.version

    def with_ours(name: str) -> str:
        return _VERSION if name in ("flash-attn", "flash_attn") else version(name)

    changes.set(importlib.metadata, "version", with_ours)
