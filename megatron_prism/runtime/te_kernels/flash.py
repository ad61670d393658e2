"""flash-attn 2: Transformer Engine takes it where cuDNN is switched off.

Its functions return and keep what those of the package do, which cannot be installed without nvcc.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.te_kernels.attention import announce, is_deterministic, rounded
from megatron_prism.runtime.te_kernels.attention_values import Attention
from megatron_prism.runtime.te_kernels.table import Values, new

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads

_VERSION = "2.8.1"
_PROCESSORS = 132  # of a Hopper GPU


def _attention(
    tensors: tuple[Tensor, ...], lengths: Sequence[Tensor], scale: float | None, dropout: float,
    causal: bool, window: tuple[int, int],
) -> Attention:  # fmt: skip
    """Of [b, s, h, d], or of packed rows [t, h, d]; the last query sees all keys."""
    form = "bshd" if tensors[0].dim() == 4 else "thd"
    mask = "causal_bottom_right" if causal else "no_mask_bottom_right"
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else scale
    return Attention(f"{form}_{form}_{form}", mask, "", scale, dropout, window, lengths, tensors)


def _forward(call: Attention) -> tuple[Tensor, Tensor, None, Tensor]:
    """mha_fwd, mha_varlen_fwd (csrc/flash_attn/flash_api.cpp @2.8): out, statistics, probabilities
    for tests, random state."""
    q, k, v = call.tensors
    out = new([*q.shape[:-1], v.shape[-1]], q.dtype)
    (batch, rows, _), heads, packed = call.size, q.shape[-2], call.form == "thd"
    statistics = new([heads, rows] if packed else [batch, heads, rows], torch.float32)
    state = new(2, torch.int64)
    announce(call, "attention", 2, out)
    if not out.is_meta:
        call.forward(out, [_with_one(statistics, packed)], state)
    return out, statistics, None, state


def _with_one(statistics: Tensor, packed: bool) -> Tensor:
    return (statistics.t() if packed else statistics).unsqueeze(-1)


def _backward(
    call: Attention, grads: Sequence[Tensor], statistics: Tensor, state: Tensor | None
) -> Tensor:
    """mha_bwd (flash_api.cpp @2.8): a number a row; the gradient of the queries in fp32, several
    times where sums have one order; with grouped heads the keys' and values' of every head."""
    q, k, v, _, grad = call.tensors
    batch, rows, columns = call.size
    heads, width = q.shape[-2:]
    padded, broad = rounded(rows, 128), rounded(width, 32 if width <= 128 else 64)
    number = new([batch, heads, padded], torch.float32)
    announce(call, "attention_backward", 5, grad)
    if not q.is_meta:
        call.backward(grads, _with_one(statistics, call.form == "thd"), state)
        return number
    copies = -(-_PROCESSORS // (batch * heads)) if is_deterministic() else 1
    taken = [new([copies, batch, heads, padded, broad], torch.float32)]
    if k.shape[-2] != heads:
        taken += [new([batch, columns, heads, t.shape[-1]], q.dtype) for t in (k, v)]
    return number


class _Attention(torch.autograd.Function):
    """FlashAttnFunc, FlashAttnVarlenFunc (flash_attn/flash_attn_interface.py @2.8)."""

    @staticmethod
    def forward(
        ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor,
        lengths: Sequence[Tensor], options: tuple[Values, ...],
    ) -> Tensor:  # fmt: skip
        out, statistics, _, state = _forward(_attention((q, k, v), lengths, *options))
        ctx.save_for_backward(q, k, v, out, statistics, *lengths, state)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Grads:
        q, k, v, out, statistics, *lengths, state = ctx.saved_tensors
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        tensors = (q, k, v, out, grad.contiguous())
        _backward(_attention(tensors, lengths, *ctx.options), grads, statistics, state)
        return (*grads, None, None)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), **rest: object,
) -> Tensor:  # fmt: skip
    """[b, s, h, d]"""
    return _Attention.apply(q, k, v, (), (softmax_scale, dropout_p, causal, window_size))


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), **rest: object,
) -> Tensor:  # fmt: skip
    """[t, h, d]"""
    lengths = (cu_seqlens_q, cu_seqlens_k)
    return _Attention.apply(q, k, v, lengths, (softmax_scale, dropout_p, causal, window_size))


def _raw(tensors: tuple[Tensor, ...], lengths: Sequence[object], options: dict[str, Values]
         ) -> Attention:  # fmt: skip
    left, right = options.get("window_size_left", -1), options.get("window_size_right", -1)
    packed = [t for t in lengths if isinstance(t, Tensor)][:2]
    return _attention(tensors, packed, options.get("softmax_scale"), options.get("dropout_p", 0.0),
                      options["causal"], options.get("window_size", (left, right)))  # fmt: skip


def _raw_forward(q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: Values
                 ) -> tuple[Tensor, Tensor, None, Tensor]:  # fmt: skip
    """_flash_attn_forward, _flash_attn_varlen_forward: what context parallelism calls."""
    return _forward(_raw((q, k, v), rest, options))


def _raw_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor,
                  *rest: Values, **options: Values) -> Tensor:  # fmt: skip
    """_flash_attn_backward, _flash_attn_varlen_backward: into the gradients that it is given."""
    call = _raw((q, k, v, out, grad), rest[3:], options)
    return _backward(call, rest[:3], statistics, options.get("rng_state"))


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
