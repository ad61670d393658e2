"""Multi-tensor kernels, which write into the tensors of their lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.table import TABLE, Values, kernel, new

Lists = Sequence[Sequence[Tensor]]


def adam(chunk: int, flag: object, lists: Lists, *rest: object) -> None:
    """multi_tensor/adam.cpp:11, :25, :39, :54, :73 @v2.18: reads the gradient, and writes the rest
    of what it reads"""
    for grad, parameter, *states in zip(*lists, strict=False):
        fused("adam", 0, parameter, parameter, grad, *states, *states)


TABLE.update(dict.fromkeys(
    (f"multi_tensor_adam{kind}" for kind in (
        "", "_param_remainder", "_fp8", "_capturable", "_capturable_master")), adam))  # fmt: skip


def _each(name: str) -> Values:
    def run(chunk: int, flag: object, lists: Lists, *rest: object) -> None:
        """multi_tensor/scale.cpp:11, :21, sgd.cpp:11 @v2.18"""
        for tensors in zip(*lists, strict=True):
            fused(name, 0, *tensors)

    return run


TABLE["multi_tensor_scale"] = TABLE["multi_tensor_scale_tensor"] = _each("multi_tensor_scale")
TABLE["multi_tensor_sgd"] = _each("sgd")


@kernel("multi_tensor_l2norm", "multi_tensor_unscale_l2norm")
def l2norm(chunk: int, flag: object, lists: Lists, *rest: object) -> tuple[Tensor, Tensor]:
    """multi_tensor/l2norm.cpp:11, :55 @v2.18: the norm of all, and that of each if asked for"""
    tensors, each = lists[0], bool(rest) and rest[-1] is True
    temporaries = [new(320, torch.float32)]
    norm = new(1, torch.float32)
    if each:
        most = max(-(-tensor.numel() // chunk) for tensor in tensors)
        temporaries.append(new(len(tensors) * most, torch.float32))
    of_each = new(len(tensors) if each else 0, torch.float32)
    fused("multi_tensor_l2norm", 0, *tensors)
    return norm, of_each
