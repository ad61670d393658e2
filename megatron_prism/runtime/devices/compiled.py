"""What would torch.compile make of a function on a GPU?  One kernel, on tier ``meta``.

Megatron's small fusions (bias and gelu, swiglu, bias and dropout) are compiled functions.  Without
a device they run op by op; live bytes see only what is left afterwards, and the recorder is told of
one kernel that reads the arguments and writes the results.  Functions with matrix products in them,
and backward passes that autograd writes, are recorded as they run.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import work
from megatron_prism.runtime.devices.live_bytes import LiveBytes

__all__ = ["replace_compile"]


P = ParamSpec("P")
R = TypeVar("R")
_live: LiveBytes | None = None


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
        if work.meter is None:
            return function(*args, **kwargs)
        with work.meter.held() as kernels:
            out = function(*args, **kwargs)
            if len(kernels) > 1 and not any(flops for _, flops, _, _ in kernels):
                kernels.clear()
                results = out if isinstance(out, tuple | list) else (out,)
                tensors = [t for t in (*args, *kwargs.values(), *results)
                           if isinstance(t, torch.Tensor)]  # fmt: skip
                work.fused(function.__name__, 0, *tensors)
        return out

    return run
