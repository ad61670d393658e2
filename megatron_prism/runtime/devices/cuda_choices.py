"""Make torch choose on tier ``meta`` as it does on a GPU.

* ``rms_norm``: torch >= 2.9 has a fused kernel on CUDA (``aten::_fused_rms_norm``), which keeps its
  input and one number a row; elsewhere the same call is a row of small ones, whose fp32 copies of
  the input stay alive until backward: 93 MB a layer 4,096 wide, of 2,048 tokens
* ``dropout``: on CUDA one kernel that keeps a mask of bool; elsewhere a product with a mask of the
  input's type, two or four times the bytes (aten/src/ATen/native/Dropout.cpp)
* optimizers of ``torch.optim`` take all parameters at once on CUDA (``foreach``): AdamW then holds
  a temporary of every one, 4 bytes each, where the loop of other devices holds one at a time
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import kernels
from megatron_prism.runtime.devices.live_bytes import LiveBytes

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext

__all__ = ["choose_as_cuda", "replace_compile"]


P = ParamSpec("P")
R = TypeVar("R")
_live: LiveBytes | None = None
_library: torch.library.Library | None = None


def replace_compile(live: LiveBytes, changes: ProcessChanges) -> None:
    """Replace ``torch.compile``; what was compiled before stays as it is."""
    changes.set(sys.modules[__name__], "_live", live)
    changes.set(torch, "compile", _compile)


def _compile(model: object = None, **options: object) -> object:
    if model is None:
        return functools.partial(_compile, **options)
    return _as_one_kernel(model) if isinstance(model, types.FunctionType) else model


def _as_one_kernel(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _live.inside() if _live is not None else contextlib.nullcontext():
            return one(*args, **kwargs)

    def one(*args: P.args, **kwargs: P.kwargs) -> R:
        if kernels.meter is None:
            return function(*args, **kwargs)
        with kernels.meter.held() as held:
            out = function(*args, **kwargs)
            if len(held) > 1 and not any(flops for _, flops, _, _ in held):
                held.clear()
                results = out if isinstance(out, tuple | list) else (out,)
                tensors = [t for t in (*args, *kwargs.values(), *results)
                           if isinstance(t, torch.Tensor)]  # fmt: skip
                kernels.fused(function.__name__, 0, *tensors)
        return out

    return run


def choose_as_cuda(changes: ProcessChanges) -> None:
    """Choose as on CUDA until ``changes`` are undone."""
    _rms_norm(changes)
    _dropout(changes)
    _foreach(changes)


def _dropout(changes: ProcessChanges) -> None:
    """Replace ``aten::dropout`` on meta, whoever calls it, except in inference mode."""

    def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not train or p == 0 or not x.numel():
            return x
        return torch.native_dropout(x, p, train)[0] if p < 1 else x * torch.zeros_like(x[:0].sum())

    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", dropout, "AutogradMeta")
    changes.set(sys.modules[__name__], "_library", library)  # or it goes with its name
    changes.on_undo(library._destroy)


def _foreach(changes: ProcessChanges) -> None:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "meta"]
    for module in (optimizer, _foreach_utils):
        if hasattr(module, "_get_foreach_kernels_supported_devices"):
            changes.set(module, "_get_foreach_kernels_supported_devices", lambda: devices)


def _rms_norm(changes: ProcessChanges) -> None:
    """Replace ``torch.nn.functional.rms_norm`` where CUDA would have the fused kernel."""
    if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        return
    original = torch.nn.functional.rms_norm

    def rms_norm(
        input: torch.Tensor,  # noqa: A002 - torch's name
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        mixed = weight is not None and weight.dtype != input.dtype
        if not input.is_meta or mixed or input.is_complex():
            return original(input, normalized_shape, weight, eps)
        return _FusedRMSNorm.apply(input, weight, len(normalized_shape))

    changes.set(torch.nn.functional, "rms_norm", rms_norm)


class _FusedRMSNorm(torch.autograd.Function):
    """Shapes only: out and one fp32 number a row."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: torch.Tensor, weight: torch.Tensor | None, dims: int
    ) -> torch.Tensor:
        rows = torch.empty((*x.shape[:-dims], *[1] * dims), dtype=torch.float32, device=x.device)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.save_for_backward(x, weight, rows)
        kernels.fused("_fused_rms_norm", 0, x, weight, out, rows)
        return out

    @staticmethod
    def backward(
        ctx: AutogradContext, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, rows = ctx.saved_tensors
        into = torch.empty_like(x)
        of_weight = None if weight is None else torch.empty_like(weight)
        kernels.fused("_fused_rms_norm_backward", 0, grad, x, weight, rows, into, of_weight)
        return into, of_weight, None
