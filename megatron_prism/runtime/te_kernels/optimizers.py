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


TABLE["multi_tensor_adam"] = adam
TABLE["multi_tensor_adam_param_remainder"] = adam
for _name in (
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
):
    TABLE[_name] = adam
    SHAPES_ONLY.add(_name)


def _step(grad: Tensor, p: Tensor, m: Tensor, v: Tensor, *arguments: Values) -> None:
    """The last of ``arguments`` are numbers; before them may be fp32 of ``p``, or its 16 low bits.

    Args:
        grad: the gradient of ``p``.
        p: the parameter, written.
        m: first moment, written.
        v: second moment, written.
        arguments: (a copy of ``p``,) rate, beta1, beta2, epsilon, step, whether weight decay is
            decoupled (AdamW), whether moments are corrected by their step, weight decay.
    """
    *masters, lr, beta1, beta2, eps, step, decoupled, corrected, decay = arguments
    # the parameter in fp32: of its two halves, of its copy, or of itself
    low = None
    if masters and masters[0].dtype == torch.int16:
        low = masters[0]
        wide = _joined(p, low)
    elif masters:
        wide = masters[0].float()
    else:
        wide = p.float()

    # the step of Adam; AdamW's decay does not go through the moments
    first_correction = second_correction = 1.0
    if corrected:
        first_correction = 1 - beta1**step
        second_correction = 1 - beta2**step
    gradient = grad.float()
    if not decoupled:
        gradient = gradient + decay * wide
    m.copy_(m.float().lerp(gradient, 1 - beta1))
    v.copy_(v.float() * beta2 + (1 - beta2) * gradient * gradient)
    deviation = (v.float() / second_correction).sqrt()
    change = (m.float() / first_correction) / (deviation + eps)
    if decoupled:
        change = change + decay * wide
    wide = wide - lr * change

    # write back in the form in which it came
    if low is not None:
        _split_into(wide, p, low)
        return
    p.copy_(wide)
    for master in masters:
        master.copy_(wide)


def _joined(p: Tensor, low: Tensor) -> Tensor:
    """fp32 from bf16 and its 16 low bits."""
    high = p.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + low.to(torch.int32)).view(torch.float32)


def _split_into(wide: Tensor, p: Tensor, low: Tensor) -> None:
    """Write bf16 and remainder so that ``_joined`` gives ``wide`` again."""
    bits = wide.contiguous().view(torch.int32)
    # the remainder is signed, from -0x8000 to 0x7fff: bf16 is rounded to nearest
    remainder = ((bits + 0x8000) & 0xFFFF) - 0x8000
    low.copy_(remainder)
    high = (bits - remainder) >> 16
    p.copy_(high.to(torch.int16).view(torch.bfloat16))


@kernel("multi_tensor_scale", "multi_tensor_scale_tensor")
def scale(chunk: int, flag: Tensor, lists: Lists, factor: Values) -> None:
    """multi_tensor/scale.cpp:11, :21 @v2.18: the flag tells of infinities"""
    for source, scaled in zip(*lists, strict=True):
        fused("multi_tensor_scale", 0, source, scaled)
        if not scaled.is_meta:
            scaled.copy_(source * factor)
            all_finite = torch.isfinite(scaled).all()
            flag.masked_fill_(~all_finite, 1)


@kernel()
def multi_tensor_sgd(chunk: int, flag: object, lists: Lists, *numbers: Values) -> None:
    """multi_tensor/sgd.cpp:11 @v2.18: gradient, parameter, momentum, and perhaps a copy"""
    for grad, p, momentum, *copies in zip(*lists, strict=True):
        fused("sgd", 0, grad, p, momentum, *copies)
        if not p.is_meta:
            _sgd_step(grad, p, momentum, *numbers)
            for copy in copies:
                copy.copy_(p)


def _sgd_step(
    grad: Tensor,
    p: Tensor,
    momentum: Tensor,
    decay: float,
    keep: float,
    damp: float,
    rate: float,
    nesterov: bool,
    first: bool,
    decay_after: bool,
    factor: float,
) -> None:
    """Write ``p`` and ``momentum``.

    Args:
        grad: the gradient of ``p``.
        p: the parameter.
        momentum: its moving sum of gradients.
        decay: weight decay.
        keep: share of the momentum that stays.
        damp: share of the gradient that does not enter the momentum.
        rate: the learning rate.
        nesterov: whether the step looks ahead by the momentum.
        first: whether there is no momentum yet.
        decay_after: whether weights decay beside the momentum, not through it.
        factor: of the gradient.
    """
    step = grad.float() * factor
    # L2 regularisation: decay enters the momentum
    if not decay_after:
        step = step + decay * p
    momentum.copy_(step if first else momentum * keep + (1 - damp) * step)
    if keep:
        step = step + keep * momentum if nesterov else momentum
    # decoupled decay
    if decay_after:
        step = step + decay * p
    p.sub_(rate * step)


@kernel()
def multi_tensor_l2norm(
    chunk: int, flag: object, lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """multi_tensor/l2norm.cpp:11 @v2.18"""
    tensors = lists[0]
    temporaries = [new(320, torch.float32)]
    norm = new(1, torch.float32)
    # a partial sum for each chunk of the longest tensor, of every tensor
    if per_tensor:
        most_chunks = max(-(-tensor.numel() // chunk) for tensor in tensors)
        temporaries.append(new(len(tensors) * most_chunks, torch.float32))
    tensor_norms = new(len(tensors) if per_tensor else 0, torch.float32)
    fused("multi_tensor_l2norm", 0, *tensors)
    if not norm.is_meta:
        norms = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors])
        fill(norm, lambda: torch.linalg.vector_norm(norms))
        tensor_norms.copy_(norms[: len(tensor_norms)])
    return norm, tensor_norms
