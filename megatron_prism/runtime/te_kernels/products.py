"""Products of cuBLASLt: the output, what is cast afterwards, the bias's gradient, gelu's input."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.quantization import create, kind_of, parts, sizes
from megatron_prism.runtime.te_kernels.table import (
    TABLE,
    Quantizer,
    Values,
    dtype_of,
    fill,
    kernel,
    new,
    refuse,
    wide,
)


def _shape(a: Values, transposed: bool, b: Values, b_transposed: bool) -> list[int]:
    """getGemmOutputShape (gemm.cpp:41 @v2.18): C++ counts columns first, so the product is B A."""
    a, b = sizes(a), sizes(b)
    return [*([b[-1]] if b_transposed else b[:-1]), prod(a[:-1]) if transposed else a[-1]]


def _flops(a: Values, transposed: bool, shape: Sequence[int]) -> int:
    of_a = sizes(a)
    return 2 * prod(shape) * (of_a[-1] if transposed else prod(of_a[:-1]))


def _read(tensor: Values) -> Tensor | None:
    """What the kernel reads; FP8 is kept as bytes."""
    data = parts(tensor)[0]
    is_fp8 = data is not None and data.dtype == torch.uint8
    return data.view(torch.float8_e4m3fn) if is_fp8 else data  # type: ignore[union-attr]


def _product(
    a: Tensor, transa: bool, b: Tensor, transb: bool, out: Tensor, accumulate: bool
) -> Tensor:
    """In the operands' type, or in that of ``out`` if it is wider."""
    left, right = (t.reshape(-1, t.shape[-1]) for t in (b, a))
    kind = torch.promote_types(torch.promote_types(left.dtype, right.dtype), out.dtype)
    left, right = left.to(kind), right.to(kind)
    made = (left.t() if transb else left) @ (right.t() if transa else right)
    return made.view(out.shape) + out if accumulate else made


def _epilogue(
    product: Tensor, bias: Tensor | None, gelu: bool, gelu_in: Tensor | None, kept: Tensor | None
) -> Tensor:
    """``gelu_in`` backward, ``kept`` forward."""
    product = product if bias is None else product + bias
    if gelu and gelu_in is not None:
        return torch.ops.aten.gelu_backward(
            product.view(gelu_in.shape), gelu_in, approximate="tanh")  # fmt: skip
    if kept is not None:
        product = fill(kept, lambda: product)
    return functional.gelu(product, approximate="tanh") if gelu else product


@kernel()
def generic_gemm(
    A: Values, transa: bool, B: Values, transb: bool, out: Values, quantizer: Quantizer,
    dtype: object, bias: Tensor | None, bias_dtype: object, gelu: bool, gelu_in: Values, grad: bool,
    workspace: object = None, size: int = 0, accumulate: bool = False, *rest: object,
    **more: object,
) -> tuple[Values, ...]:  # fmt: skip
    """gemm.cpp:144 @v2.18"""
    if more.get("comm_overlap") is not None:
        refuse("generic_gemm with userbuffers")
    shape = _shape(A, transa, B, transb)
    kind = dtype_of(dtype) if dtype is not None else A.dtype
    if out is None:
        out = create(quantizer, shape, kind)
    in_fp8 = kind_of(quantizer) == "delayed" and not isinstance(A, Tensor)
    cast = new(shape, kind) if quantizer is not None and not in_fp8 else None
    dbias = new(sizes(B)[-1], kind) if grad and bias is not None else None
    kept = gelu_in if grad else new(shape, kind) if gelu else None
    name = "gemm_wgrad" if transb else "gemm"
    fused(name, _flops(A, transa, shape), *(_read(t) for t in (B, A, out)))
    if cast is not None:
        fused("fp8_quantize", 0, cast, *parts(out))
    elif quantizer is None:
        fill(out, lambda: _epilogue(_product(A, transa, B, transb, out, accumulate),
                                    None if grad else bias, gelu, gelu_in if grad else None,
                                    None if grad else kept))  # fmt: skip
    if dbias is not None and quantizer is None:
        fill(dbias, lambda: wide(B).sum(0))
    return out, dbias, None if grad else kept, more.get("extra_output")


@kernel()
def te_general_grouped_gemm(
    A: Sequence[Values], transa: bool, B: Sequence[Values], transb: bool, out: Values,
    dtype: object, counts: Sequence[int], bias: Values, bias_dtype: object = None,
    single: bool = False, gelu_in: object = None, grad: bool = False, workspace: object = None,
    size: int = 0, accumulate: bool = False, *rest: object,
) -> Values:  # fmt: skip
    """gemm.cpp:468 @v2.18"""
    shapes = [_shape(a, transa, b, transb) for a, b in zip(A, B, strict=True)]
    if out is None:
        out = [new(shape, dtype_of(dtype)) for shape in shapes]
    flops = sum(_flops(a, transa, shape) for a, shape in zip(A, shapes, strict=True))
    fused("grouped_gemm", flops, *(_read(t) for t in (*A, *B, *out)))
    if not out[0].is_meta:
        places = out[0].split([shape[0] for shape in shapes]) if single else out
        for a, b, to, of in zip(A, B, places, bias, strict=True):
            one = of if of.numel() else None
            product = _product(a, transa, b, transb, to, accumulate)
            to.copy_(product if grad or one is None else product + one)
            if grad and one is not None:
                one.copy_(wide(b).sum(0))
    return bias


TABLE["get_num_cublas_streams"] = lambda: 4  # common/util/multi_stream.cpp:50 @v2.9
TABLE["get_cublasLt_version"] = lambda: 130000
TABLE["get_cudnn_version"] = lambda: 91200
TABLE["get_stream_priority_range"] = lambda *device: (0, -5)
TABLE["device_supports_multicast"] = lambda *device: False
TABLE["ubuf_built_with_mpi"] = lambda: False
TABLE["is_non_tn_fp8_gemm_supported"] = lambda: False  # from compute capability 10.0 on
