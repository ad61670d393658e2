"""Kernels that take rows by themselves: norms, softmax, rotary embedding, activations, dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.quantization import (
    PROCESSORS,
    cast_into,
    computed,
    create,
    kind_of,
    parts,
    sum_in_blocks,
)
from megatron_prism.runtime.te_kernels.table import (
    TABLE,
    Kernel,
    Quantizer,
    Values,
    dtype_of,
    kernel,
    new,
    rows_of,
    since,
)

# Kernels of backward in bf16 (ln_bwd_semi_cuda_kernel.cu, rmsnorm_bwd_semi_cuda_kernel.cu @v2.20):
# width -> (blocks that fit on a processor of an H100, blocks of a row).  How many fit follows from
# registers and was measured (h100_layer_memory.json); 768 and 2,304 to 65,536 as their neighbours.
_TUNED: dict[bool, dict[int, tuple[int, int]]] = {  # is it RMSNorm
    False: {768: (3, 1), 1024: (2, 1), 1536: (5, 1), 2048: (4, 1), 2304: (4, 1), 3072: (3, 1),
            3840: (2, 1), 4096: (2, 1), 5120: (2, 1), 6144: (1, 1), 8192: (2, 2), 10240: (2, 2),
            12288: (3, 4), 12800: (3, 5), 15360: (2, 4), 16384: (2, 4), 18432: (2, 4),
            20480: (2, 4), 24576: (1, 4), 25600: (2, 5), 30720: (1, 4), 32768: (1, 4),
            40960: (1, 4), 49152: (1, 8), 65536: (1, 8)},
    True: {512: (6, 1), 768: (4, 1), 1024: (3, 1), 2048: (5, 1), 4096: (3, 1), 8192: (2, 1)},
}  # fmt: skip
_GENERAL = {  # of up to so many columns -> blocks on a processor, rows at once
    False: {128: (10, 4), 512: (4, 4), 1024: (2, 4), 2048: (4, 1), 4096: (2, 1)},
    True: {128: (12, 4), 512: (6, 4), 1024: (3, 4), 2048: (5, 1), 4096: (3, 1)},
}


def _blocks(rms: bool, rows: int, width: int) -> int:
    """Blocks that add up the weights' gradients, each for itself in fp32."""
    if width in _TUNED[rms]:
        fit, of_a_row = _TUNED[rms][width]
        return PROCESSORS * fit // of_a_row
    kernels = _GENERAL[rms]
    columns = min((size for size in kernels if size >= width), default=max(kernels))
    fit, at_once = kernels[columns]
    return min(-(-rows // at_once), PROCESSORS * fit // -(-width // columns))


def _sum_in_blocks(rms: bool, x: Tensor) -> None:
    width = x.shape[-1]
    new((1 if rms else 2) * _blocks(rms, rows_of(x.shape), width) * width, torch.float32)


def _normed(x: Tensor, quantizer: Quantizer, out: Values, dtype: object) -> Values:
    out = computed("norm", x.shape, dtype_of(dtype), quantizer, out)
    fused("norm", 0, x, *parts(out)[:1])
    return out


@kernel()
def layernorm_fwd(
    x: Tensor, weight: object, bias: object, eps: float, out: Values, quantizer: Quantizer,
    dtype: object, *rest: object,
) -> tuple[Values, Tensor, Tensor]:  # fmt: skip
    """normalization.cpp:61 @v2.18"""
    mean, deviation = (new(rows_of(x.shape), torch.float32) for _ in range(2))
    return _normed(x, quantizer, out, dtype), mean, deviation


@kernel()
def rmsnorm_fwd(
    x: Tensor, weight: object, eps: float, out: Values, quantizer: Quantizer, dtype: object,
    *rest: object,
) -> tuple[Values, None, Tensor]:  # fmt: skip
    """normalization.cpp:305 @v2.18"""
    deviation = new(rows_of(x.shape), torch.float32)
    return _normed(x, quantizer, out, dtype), None, deviation


@kernel()
def layernorm_bwd(
    grad: Tensor,
    x: Tensor,
    mean: object,
    deviation: object,
    weight: Tensor,
    *more: object,
) -> tuple[Tensor, ...]:
    """normalization.cpp:13 @v2.18"""
    grad, x = grad.contiguous(), x.contiguous()
    out = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    _sum_in_blocks(False, x)
    fused("layer_norm_backward", 0, grad, x, x)
    return out


@kernel()
def rmsnorm_bwd(
    grad: Tensor, x: Tensor, deviation: object, weight: Tensor, *more: object
) -> tuple[Tensor, ...]:
    """normalization.cpp:216 @v2.18"""
    grad, x = grad.contiguous(), x.contiguous()
    out = torch.empty_like(x), torch.empty_like(weight)
    _sum_in_blocks(True, x)
    fused("norm_backward", 0, grad, x, x)
    return out


@kernel()
def rmsnorm_bwd_add(
    grad: Tensor, x: Tensor, add: Tensor, deviation: object, weight: Tensor,
    *more: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    """normalization.cpp:259 @v2.18"""
    add = add.contiguous()
    return rmsnorm_bwd(grad, x, deviation, weight)


_SOFTMAX = ("scaled", "scaled_masked", "scaled_upper_triang_masked",
            "scaled_aligned_causal_masked")  # fmt: skip


@kernel(*(f"{name}_softmax_forward" for name in _SOFTMAX))
def softmax(scores: Tensor, *rest: object) -> Tensor:
    """softmax.cpp:11, :66, :129, :181 @v2.18"""
    out = new(scores.shape, scores.dtype)
    fused("masked_softmax", 0, scores, out)
    return out


@kernel(*(f"{name}_softmax_backward" for name in _SOFTMAX))
def softmax_backward(grad: Tensor, results: Tensor, scale: object) -> Tensor:
    """softmax.cpp:40, :103, :152, :210 @v2.18: over the gradient, from 2.19 on beside it"""
    grad, results = grad.contiguous(), results.contiguous()
    out = new(grad.shape, grad.dtype) if since(2, 19) else grad
    fused("masked_softmax_backward", 0, grad, results, grad)
    return out


@kernel("fused_rope_forward", "fused_rope_backward")
def rope(x: Tensor, *rest: object) -> Tensor:
    """apply_rope.cpp:12, :165 @v2.18"""
    out = new(x.shape, x.dtype)
    fused("rope", 0, x, x)
    return out


@kernel()
def fused_qkv_rope_forward(
    qkv: Tensor,
    q_freqs: object,
    k_freqs: object,
    starts: object,
    splits: list[int],
    *more: object,
) -> tuple[Tensor, ...]:
    """apply_rope.cpp:106 @v2.18"""
    *rows, groups, _ = qkv.shape
    q, k, v = splits
    shapes = [*rows, groups * q // k, k], [*rows, groups, k], [*rows, groups, v]
    out = tuple(new(shape, qkv.dtype) for shape in shapes)
    fused("rope", 0, qkv, *out)
    return out


@kernel()
def fused_qkv_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q_freqs: object, k_freqs: object,
    splits: list[int], *more: object,
) -> Tensor:  # fmt: skip
    """apply_rope.cpp:263 @v2.18"""
    width = sum(t.shape[2] for t in (dq, dk, dv)) * dq.shape[3]
    out = new([*dq.shape[:2], width // sum(splits), sum(splits)], dq.dtype)
    fused("rope", 0, dq, dk, dv, out)
    return out


def _activation(name: str, gated: bool) -> Kernel:
    def run(x: Tensor, quantizer: Quantizer = None, *rest: object, **options: object) -> Values:
        """activation.cpp:18 @v2.18"""
        x = x.contiguous()
        shape = [*x.shape[:-1], x.shape[-1] // (2 if gated else 1)]
        out = computed("activation", shape, x.dtype, quantizer)
        fused(name, 0, x, *parts(out)[:1])
        return out

    return run


def _activation_backward(name: str) -> Kernel:
    def run(
        grad: Tensor,
        x: Tensor,
        quantizer: Quantizer = None,
        *rest: object,
        **options: object,
    ) -> Values:
        """activation.cpp:129 @v2.18"""
        grad, x = grad.contiguous(), x.contiguous()
        out = computed("activation", x.shape, x.dtype, quantizer)
        fused(f"{name}_back", 0, grad, x, *parts(out)[:1])
        return out

    return run


def _activation_and_bias(name: str) -> Kernel:
    def run(grad: Tensor, x: Tensor, quantizer: Quantizer = None) -> tuple[Values, Any]:
        """bias.cpp:108 @v2.18"""
        grad, x = grad.contiguous(), x.contiguous()
        out = create(quantizer, x.shape, grad.dtype)
        dbias = new(x.shape[-1], grad.dtype)
        fused(f"{name}_back", 0, grad, x, *parts(out)[:1])
        if kind_of(quantizer) in ("delayed", "mx"):
            sum_in_blocks(x, quantizer, of_activation=True)
        else:  # one after the other
            amax = new(1, torch.float32) if kind_of(quantizer) == "current" else None
            high = new(x.shape, grad.dtype)
            torch.sum(high.reshape(-1, x.shape[-1]), 0, out=dbias)
            cast_into(out, high, quantizer, amax)
        return dbias, out

    return run


_PLAIN, _GATED = "gelu qgelu relu srelu silu", "glu geglu qgeglu reglu sreglu swiglu"
for _name in f"{_PLAIN} {_GATED}".split():
    TABLE[_name] = _activation(_name, _name in _GATED.split())
    TABLE[f"d{_name}"] = _activation_backward(_name)
for _name in _PLAIN.split():
    TABLE[f"dbias_d{_name}"] = _activation_and_bias(_name)
TABLE["clamped_swiglu"] = _activation("swiglu", True)
TABLE["clamped_dswiglu"] = _activation_backward("swiglu")


@kernel()
def swap_first_dims(x: Tensor, out: Tensor | None = None) -> Tensor:
    """transpose.cpp:263 @v2.18"""
    x = x.contiguous()
    out = new([x.shape[1], x.shape[0], *x.shape[2:]], x.dtype) if out is None else out
    fused("copy_", 0, x, out)
    return out


@kernel()
def dropout_fwd(x: Values, probability: float, out: Values = None) -> list[Tensor]:
    """dropout.cpp:22 @v2.18: a bit an element is the mask"""
    source = parts(x)[0]
    assert source is not None
    out = new(source.shape, x.dtype) if out is None else out
    mask = new(source.numel() // 8)
    fused("native_dropout", 0, source, out, mask)
    return [out, mask]


@kernel()
def dropout_bwd(
    grad: Tensor, mask: Tensor, probability: float, out: Tensor | None = None
) -> Tensor:
    """dropout.cpp:73 @v2.18"""
    out = torch.empty_like(grad) if out is None else out
    fused("native_dropout_backward", 0, grad, mask, out)
    return out
