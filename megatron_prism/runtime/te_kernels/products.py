"""Products of cuBLASLt: the output, what is cast afterwards, the bias's gradient, gelu's input."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from megatron_prism.runtime.devices.kernels import fused, launched_with
from megatron_prism.runtime.devices.moe_dispatch import loads
from megatron_prism.runtime.te_kernels.product_shapes import unseen_share
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

# a kernel of CUTLASS for all experts on Hopper (common/gemm/cublaslt_gemm.cu,
# nvte_multi_tensor_gemm @v2.10); else cuBLASLt has a product for each
_ONE_KERNEL = "NVTE_USE_CUTLASS_GROUPED_GEMM"


def _shape(a: Values, transposed: bool, b: Values, b_transposed: bool) -> list[int]:
    """Return the output's shape (getGemmOutputShape, gemm.cpp:41 @v2.18).

    C++ counts columns first, so the product is B A.
    """
    a_shape = sizes(a)
    b_shape = sizes(b)
    columns = a_shape[-1]
    if transposed:
        columns = prod(a_shape[:-1])
    if b_transposed:
        return [b_shape[-1], columns]
    return [*b_shape[:-1], columns]


def _flops(a: Values, transposed: bool, shape: Sequence[int]) -> int:
    """Count a multiplication and an addition for each term of each element of the output."""
    a_shape = sizes(a)
    terms = prod(a_shape[:-1])
    if transposed:
        terms = a_shape[-1]
    return 2 * prod(shape) * terms


def _read(tensor: Values) -> Tensor | None:
    """Return what the kernel reads; FP8 is kept as bytes."""
    data = parts(tensor)[0]
    if data is not None and data.dtype == torch.uint8:
        return data.view(torch.float8_e4m3fn)
    return data


def _is_scaled_by_blocks(operand: Values) -> bool:
    """Whether blocks of an operand in FP8 have scales of their own: other kernels multiply them."""
    return type(operand).__name__.startswith("Float8Blockwise")


def _product(
    a: Tensor, transa: bool, b: Tensor, transb: bool, out: Tensor, accumulate: bool
) -> Tensor:
    """Multiply in the operands' type, or in that of ``out`` if it is wider."""
    # cuBLAS counts in columns: in rows it is the second operand times the first
    left = b.reshape(-1, b.shape[-1])
    right = a.reshape(-1, a.shape[-1])
    operand_type = torch.promote_types(left.dtype, right.dtype)
    wide_type = torch.promote_types(operand_type, out.dtype)
    left = left.to(wide_type)
    right = right.to(wide_type)
    if transb:
        left = left.t()
    if transa:
        right = right.t()
    product = (left @ right).view(out.shape)
    if accumulate:
        product = product + out
    return product


def _epilogue(
    product: Tensor,
    bias: Tensor | None,
    gelu: bool,
    gelu_in: Tensor | None,
    kept_input: Tensor | None,
) -> Tensor:
    """Add the bias and apply gelu.

    Args:
        product: of the operands.
        bias: of the forward.
        gelu: whether there is one.
        gelu_in: its input, in backward.
        kept_input: where its input is kept, in forward.
    """
    if bias is not None:
        product = product + bias
    # backward
    if gelu and gelu_in is not None:
        grad = product.view(gelu_in.shape)
        return torch.ops.aten.gelu_backward(grad, gelu_in, approximate="tanh")
    # forward
    if kept_input is not None:
        kept_product = product
        product = fill(kept_input, lambda: kept_product)
    if gelu:
        return functional.gelu(product, approximate="tanh")
    return product


@kernel()
def generic_gemm(
    A: Values,
    transa: bool,
    B: Values,
    transb: bool,
    out: Values,
    quantizer: Quantizer,
    dtype: object,
    bias: Tensor | None,
    bias_dtype: object,
    gelu: bool,
    gelu_in: Values,
    grad: bool,
    workspace: object = None,
    size: int = 0,
    accumulate: bool = False,
    *rest: object,
    **more: object,
) -> tuple[Values, ...]:
    """Multiply two matrices (gemm.cpp:144 @v2.18)."""
    # userbuffers overlap products with communication, which has no stand-in
    if more.get("comm_overlap") is not None:
        refuse("generic_gemm with userbuffers")
    shape = _shape(A, transa, B, transb)
    # operands in FP8 may have no type of torch's
    if dtype is not None:
        out_type = dtype_of(dtype)
    else:
        out_type = A.dtype
    if out is None:
        out = create(quantizer, shape, out_type)

    # an output in FP8 of wider operands is cast by a kernel of its own
    casts_inside = kind_of(quantizer) == "delayed" and not isinstance(A, Tensor)
    uncast = None
    if quantizer is not None and not casts_inside:
        uncast = new(shape, out_type)
    # backward gives the bias's gradient, forward keeps gelu's input
    bias_grad = None
    if grad and bias is not None:
        bias_grad = new(sizes(B)[-1], out_type)
    kept_input = None
    if grad:
        kept_input = gelu_in
    elif gelu:
        kept_input = new(shape, out_type)

    name = "gemm"
    if transb:
        name = "gemm_wgrad"
    if _is_scaled_by_blocks(A):
        name += "_block"
    operands = [_read(B), _read(A), _read(out)]
    fused(name, _flops(A, transa, shape), *operands)
    if uncast is not None:
        fused("fp8_quantize", 0, uncast, *parts(out))
    elif quantizer is None:

        def value() -> Tensor:
            product = _product(A, transa, B, transb, out, accumulate)
            if grad:
                return _epilogue(product, None, gelu, gelu_in, None)
            return _epilogue(product, bias, gelu, None, kept_input)

        fill(out, value)
    if bias_grad is not None and quantizer is None:
        fill(bias_grad, lambda: wide(B).sum(0))
    new_gelu_in = kept_input
    if grad:
        new_gelu_in = None
    return out, bias_grad, new_gelu_in, more.get("extra_output")


@kernel()
def te_general_grouped_gemm(
    A: Sequence[Values],
    transa: bool,
    B: Sequence[Values],
    transb: bool,
    out: Values,
    dtype: object,
    counts: Sequence[int],
    bias: Values,
    bias_dtype: object = None,
    single: bool = False,
    gelu_in: object = None,
    grad: bool = False,
    workspace: object = None,
    size: int = 0,
    accumulate: bool = False,
    *rest: object,
) -> Values:
    """Multiply the matrices of each expert (gemm.cpp:468 @v2.18)."""
    shapes = [_shape(a, transa, b, transb) for a, b in zip(A, B, strict=True)]
    if out is None:
        out = [new(shape, dtype_of(dtype)) for shape in shapes]
    flops_of_experts = [_flops(a, transa, shape) for a, shape in zip(A, shapes, strict=True)]
    # operands of the first expert that has tokens say what kind of products they are
    busy = next((number for number, flops in enumerate(flops_of_experts) if flops), 0)
    # operands that say what the products are, and all others
    shown, others = list[Values](), list[Values]()
    for tensors in (B, A, out):
        place = min(busy, len(tensors) - 1)
        for number, tensor in enumerate(tensors):
            (shown if number == place else others).append(_read(tensor))
    fused("grouped_gemm", sum(flops_of_experts), *shown, *others)
    _launch_of_each_expert(counts, flops_of_experts, shown[0])
    if not out[0].is_meta:
        _multiply_experts(A, transa, B, transb, out, shapes, bias, single, grad, accumulate)
    return bias


def _launch_of_each_expert(
    counts: Sequence[int], flops_of_experts: Sequence[int], first: Tensor | None
) -> None:
    """Count the launches of a grouped product behind the first one.

    An expert without tokens has none.

    Args:
        counts: tokens of each expert.
        flops_of_experts: of the product of each expert.
        first: operand of the first product.
    """
    if os.environ.get(_ONE_KERNEL, "0") not in ("", "0"):
        return
    launches = sum(1 for flops in flops_of_experts if flops)
    unseen = 0.0
    # in FP8 each expert's tokens are padded, so few shapes differ
    is_padded = first is not None and first.dtype == torch.float8_e4m3fn
    if loads.vary and not is_padded:
        unseen = launches * unseen_share(sum(counts) / len(counts))
    launched_with(max(launches - 1, 0), unseen)


def _multiply_experts(
    A: Sequence[Values],
    transa: bool,
    B: Sequence[Values],
    transb: bool,
    out: Values,
    shapes: Sequence[Sequence[int]],
    bias: Values,
    single: bool,
    grad: bool,
    accumulate: bool,
) -> None:
    """Fill the outputs of all experts, and the gradients of their biases.

    Args:
        A: of each expert.
        transa: whether A is transposed.
        B: of each expert.
        transb: whether B is transposed.
        out: of each expert, or ``single``: one with the rows of all.
        shapes: of each expert's output.
        bias: of each expert, without elements where there is none.
        single: whether ``out`` is one tensor.
        grad: whether this is a backward.
        accumulate: whether the product is added to what ``out`` holds.
    """
    outputs = out
    # one output has the rows of all experts
    if single:
        rows = [shape[0] for shape in shapes]
        outputs = out[0].split(rows)
    for a, b, output, expert_bias in zip(A, B, outputs, bias, strict=True):
        product = _product(a, transa, b, transb, output, accumulate)
        # forward adds the bias, backward sums up its gradient
        has_bias = bool(expert_bias.numel())
        if has_bias and not grad:
            product = product + expert_bias
        output.copy_(product)
        if has_bias and grad:
            expert_bias.copy_(wide(b).sum(0))


TABLE["get_num_cublas_streams"] = lambda: 4  # common/util/multi_stream.cpp:50 @v2.9
TABLE["get_cublasLt_version"] = lambda: 130000
TABLE["get_cudnn_version"] = lambda: 91200
TABLE["get_stream_priority_range"] = lambda *device: (0, -5)
TABLE["device_supports_multicast"] = lambda *device: False
TABLE["ubuf_built_with_mpi"] = lambda: False
TABLE["is_non_tn_fp8_gemm_supported"] = lambda: False  # from compute capability 10.0 on
