"""general_gemm, which Megatron calls for the router (pytorch/cpp_extensions/gemm.py @v2.9)."""

from __future__ import annotations

import torch

from megatron_prism.runtime.devices.work import fused
from megatron_prism.runtime.te.base import get_workspace
from megatron_prism.runtime.te.unsupported import refuse

__all__ = ["general_gemm"]


def general_gemm(
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    workspace: object = None,
    out_dtype: torch.dtype | None = None,
    quantization_params: object = None,
    gelu: object = None,
    gelu_in: object = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: object = None,
    **rest: object,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """(op(B) @ op(A), gradient of the bias, None, None); ``layout`` is op(A) then op(B).

    ``T`` means that A, stored [n, k], is used as [k, n]; likewise for B.  With ``grad`` the bias is
    not added: its gradient is the sum of B's rows.
    """
    if gelu or ub is not None or quantization_params is not None or alpha != 1.0:
        refuse("general_gemm with gelu, userbuffers, quantisation or alpha")
    get_workspace(A)
    left = B.t() if layout[1] == "T" else B
    right = A.t() if layout[0] == "T" else A
    dtype = out_dtype or (out.dtype if out is not None else A.dtype)
    db = B.new_empty(B.shape[-1]) if grad and bias is not None else None
    if A.is_meta:
        shape = (*left.shape[:-1], right.shape[-1])
        out = out if out is not None else A.new_empty(shape, dtype=dtype)
        fused("gemm", 2 * left.numel() * right.shape[-1], left, right, out)
        return out, db, None, None
    wide = torch.promote_types(dtype, torch.promote_types(A.dtype, B.dtype))
    product = left.to(wide) @ right.to(wide)
    if db is not None:
        db.copy_(B.reshape(-1, B.shape[-1]).sum(0))
    elif bias is not None:
        product = product + bias
    if out is None:
        return product.to(dtype), db, None, None
    out.add_(product) if accumulate else out.copy_(product)
    return out, db, None, None
