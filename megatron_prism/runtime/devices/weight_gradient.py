"""What stands in for apex's ``fused_weight_gradient_mlp_cuda`` where there is no CUDA device?

Megatron's own layers ask for it unless ``--no-gradient-accumulation-fusion`` (on by default), the
output layer of the last stage also beside Transformer Engine.  The kernel adds ``grad.T @ inputs``
to the weight's ``main_grad`` and allocates nothing (core/tensor_parallel/layers.py:679 @0.19.0).
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices.work import fused

__all__ = ["add_module"]

NAME = "fused_weight_gradient_mlp_cuda"


def _accumulate(inputs: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    """inputs ``[tokens, in]``, grad ``[tokens, out]``, main_grad ``[out, in]`` of its own type."""
    if main_grad.is_meta:
        fused("gemm_wgrad", 2 * grad.numel() * inputs.shape[1], grad, inputs, main_grad)
    else:
        main_grad.add_((grad.t() @ inputs).to(main_grad.dtype))


def add_module(changes: ProcessChanges) -> str:
    """Put it into ``sys.modules``; says what it is.  A real one would want a device."""
    module = types.ModuleType(NAME, "A stand-in of megatron_prism.")
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    module.wgrad_gemm_accum_fp32 = _accumulate  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = _accumulate  # type: ignore[attr-defined]
    changes.set_item(sys.modules, NAME, module)
    return "apex's fused weight gradient: a product that is added"
