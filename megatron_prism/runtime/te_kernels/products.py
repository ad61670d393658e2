"""Products of cuBLASLt: the output, what is cast afterwards, the bias's gradient, gelu's input."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.quantization import create, kind_of, parts, sizes
from megatron_prism.runtime.te_kernels.table import (
    TABLE,
    Quantizer,
    Values,
    dtype_of,
    kernel,
    new,
    refuse,
)


def _shape(a: Values, transposed: bool, b: Values, b_transposed: bool) -> list[int]:
    """getGemmOutputShape (gemm.cpp:41 @v2.18): C++ counts columns first, so the product is B A."""
    a, b = sizes(a), sizes(b)
    return [*([b[-1]] if b_transposed else b[:-1]), prod(a[:-1]) if transposed else a[-1]]


def _flops(a: Values, transposed: bool, shape: Sequence[int]) -> int:
    of_a = sizes(a)
    return 2 * prod(shape) * (of_a[-1] if transposed else prod(of_a[:-1]))


@kernel()
def generic_gemm(
    A: Values, transa: bool, B: Values, transb: bool, out: Values, quantizer: Quantizer,
    dtype: object, bias: object, bias_dtype: object, gelu: bool, gelu_in: object, grad: bool,
    *rest: object, **more: object,
) -> tuple[Values, ...]:  # fmt: skip
    """gemm.cpp:144 @v2.18"""
    if more.get("comm_overlap") is not None:
        refuse("generic_gemm with userbuffers")
    shape = _shape(A, transa, B, transb)
    wide = dtype_of(dtype) if dtype is not None else A.dtype
    if out is None:
        out = create(quantizer, shape, wide)
    in_fp8 = kind_of(quantizer) == "delayed" and not isinstance(A, Tensor)
    cast = new(shape, wide) if quantizer is not None and not in_fp8 else None
    dbias = new(sizes(B)[-1], wide) if grad and bias is not None else None
    kept = gelu_in if grad else new(shape, wide) if gelu else None
    name = "gemm_wgrad" if transb else "gemm"
    fused(name, _flops(A, transa, shape), *(parts(t)[0] for t in (B, A, out)))
    if cast is not None:
        fused("fp8_quantize", 0, cast, *parts(out))
    return out, dbias, None if grad else kept, more.get("extra_output")


@kernel()
def te_general_grouped_gemm(
    A: Sequence[Values], transa: bool, B: Sequence[Values], transb: bool, out: Values,
    dtype: object, counts: Sequence[int], bias: Values, *rest: object,
) -> Values:  # fmt: skip
    """gemm.cpp:468 @v2.18"""
    shapes = [_shape(a, transa, b, transb) for a, b in zip(A, B, strict=True)]
    if out is None:
        out = [new(shape, dtype_of(dtype)) for shape in shapes]
    flops = sum(_flops(a, transa, shape) for a, shape in zip(A, shapes, strict=True))
    fused("grouped_gemm", flops, *(parts(t)[0] for t in (*A, *B, *out)))
    return bias


TABLE["get_num_cublas_streams"] = lambda: 4  # common/util/multi_stream.cpp:50 @v2.9
TABLE["get_cublasLt_version"] = lambda: 130000
TABLE["get_cudnn_version"] = lambda: 91200
TABLE["get_stream_priority_range"] = lambda *device: (0, -5)
TABLE["device_supports_multicast"] = lambda *device: False
TABLE["ubuf_built_with_mpi"] = lambda: False
TABLE["is_non_tn_fp8_gemm_supported"] = lambda: False  # from compute capability 10.0 on
