"""Multi-tensor kernels, which write into the tensors of their lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.table import (
    SHAPES_ONLY,
    TABLE,
    Values,
    fill,
    kernel,
    new,
)

Lists = Sequence[Sequence[Tensor]]


def adam(chunk: int, flag: object, lists: Lists, *rest: Values) -> None:
    """multi_tensor/adam.cpp:11, :25, :39, :54, :73 @v2.18: reads the gradient, and writes the rest
    of what it reads
    """
    for grad, parameter, *states in zip(*lists, strict=False):
        fused("adam", 0, parameter, parameter, grad, *states, *states)
        if not parameter.is_meta:
            _step(grad, parameter, *states, *rest)


TABLE.update(
    dict.fromkeys(
        (
            f"multi_tensor_adam{kind}"
            for kind in ("", "_param_remainder", "_fp8", "_capturable", "_capturable_master")
        ),
        adam,
    )
)
SHAPES_ONLY.update(
    f"multi_tensor_adam_{kind}" for kind in ("fp8", "capturable", "capturable_master")
)


def _step(grad: Tensor, p: Tensor, m: Tensor, v: Tensor, *rest: Values) -> None:
    """The last of ``rest`` are numbers; before them may be fp32 of ``p``, or its 16 low bits."""
    *master, lr, beta1, beta2, eps, step, decoupled, corrected, decay = rest
    low = master[0] if master and master[0].dtype == torch.int16 else None
    wide = _joined(p, low) if low is not None else (master[0] if master else p).float()
    first, second = (1 - b**step if corrected else 1.0 for b in (beta1, beta2))
    g = grad.float() + (0 if decoupled else decay * wide)
    m.copy_(m.float().lerp(g, 1 - beta1))
    v.copy_(v.float() * beta2 + (1 - beta2) * g * g)
    change = (m.float() / first) / ((v.float() / second).sqrt() + eps)
    wide = wide - lr * (change + (decay * wide if decoupled else 0))
    if low is not None:
        _split_into(wide, p, low)
        return
    for to in (p, *master):
        to.copy_(wide)


def _joined(p: Tensor, low: Tensor) -> Tensor:
    """fp32 from bf16 and its 16 low bits."""
    high = p.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + low.to(torch.int32)).view(torch.float32)


def _split_into(wide: Tensor, p: Tensor, low: Tensor) -> None:
    """Write bf16 and remainder so that ``_joined`` gives ``wide`` again."""
    bits = wide.contiguous().view(torch.int32)
    rest = ((bits + 0x8000) & 0xFFFF) - 0x8000
    low.copy_(rest)
    p.copy_(((bits - rest) >> 16).to(torch.int16).view(torch.bfloat16))


@kernel("multi_tensor_scale", "multi_tensor_scale_tensor")
def scale(chunk: int, flag: Tensor, lists: Lists, factor: Values) -> None:
    """multi_tensor/scale.cpp:11, :21 @v2.18: the flag tells of infinities"""
    for source, to in zip(*lists, strict=True):
        fused("multi_tensor_scale", 0, source, to)
        if not to.is_meta:
            to.copy_(source * factor)
            flag.masked_fill_(~torch.isfinite(to).all(), 1)


@kernel()
def multi_tensor_sgd(chunk: int, flag: object, lists: Lists, *numbers: Values) -> None:
    """multi_tensor/sgd.cpp:11 @v2.18: gradient, parameter, momentum, and perhaps a copy"""
    for grad, p, momentum, *copies in zip(*lists, strict=True):
        fused("sgd", 0, grad, p, momentum, *copies)
        if not p.is_meta:
            decay, keep, damp, rate, nesterov, first, after, factor = numbers
            g = grad.float() * factor + (0 if after else decay * p)
            momentum.copy_(g if first else momentum * keep + (1 - damp) * g)
            g = (g + keep * momentum if nesterov else momentum) if keep else g
            p.sub_(rate * (g + (decay * p if after else 0)))
            for to in copies:
                to.copy_(p)


@kernel()
def multi_tensor_l2norm(
    chunk: int, flag: object, lists: Lists, each: bool = False
) -> tuple[Tensor, Tensor]:
    """multi_tensor/l2norm.cpp:11 @v2.18"""
    tensors = lists[0]
    temporaries = [new(320, torch.float32)]
    norm = new(1, torch.float32)
    if each:
        most = max(-(-tensor.numel() // chunk) for tensor in tensors)
        temporaries.append(new(len(tensors) * most, torch.float32))
    of_each = new(len(tensors) if each else 0, torch.float32)
    fused("multi_tensor_l2norm", 0, *tensors)
    if not norm.is_meta:
        norms = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors])
        fill(norm, lambda: torch.linalg.vector_norm(norms))
        of_each.copy_(norms[: len(of_each)])
    return norm, of_each
