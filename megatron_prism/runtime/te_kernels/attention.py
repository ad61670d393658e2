"""Fused attention (cuDNN on Hopper), and the kernels of packed and spread sequences.

What attention computes is in ``attention_values``, for flash-attn too.  Arguments are told apart by
what they are, since each release adds some: Q, K and V follow the two first tensors, which are
cumulated lengths.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.attention_values import Attention
from megatron_prism.runtime.te_kernels.quantization import create, kind_of, parts
from megatron_prism.runtime.te_kernels.table import (
    SHAPES_ONLY,
    TABLE,
    Values,
    dtype_of,
    kernel,
    member,
    new,
    scratch,
    since,
)

_ALIGNED = 256  # bytes beside every plan's own (benchmarks/results/snapshots)


def _call(args: Sequence[Values], scale: float, dropout: float, count: int) -> Attention:
    """count : tensors that follow the lengths: q, k, v; backward also the output, its gradient"""
    first = next(i for i, a in enumerate(args) if isinstance(a, Tensor))
    tensors, rest = tuple(args[first + 2 : first + 2 + count]), args[first + 2 + count :]
    left, right = next(a for a in args if isinstance(a, (tuple, list)))
    layout, mask, bias = (member(f"NVTE_{kind}", args)
                          for kind in ("QKV_Layout", "Mask_Type", "Bias_Type"))  # fmt: skip
    return Attention(layout, mask, bias, scale, dropout, (left, right),
                     (args[first], args[first + 1]), tensors, tuple(rest))  # fmt: skip


def _statistics(call: Attention) -> Tensor:
    q, (batch, rows, _) = call.tensors[0], call.size
    packed = call.form == "thd"
    return new([rows, q.shape[1], 1] if packed else [batch, q.shape[-2], rows, 1], torch.float32)


def announce(call: Attention, name: str, products: int, out: Tensor | None) -> None:
    """One kernel of ``products`` matrix products a head (2 forward, 5 backward).

    A causal mask halves them; a window leaves as many keys a query as it is wide; packed sequences
    count as if they saw each other, an upper bound.  Dropout and a fixed order of sums are in the
    kernel's name.
    """
    (q, k, v, *_), (batch, rows, columns), (left, right) = call.tensors, call.size, call.window
    causal = "causal" in call.mask
    pairs = batch * rows * columns // (2 if causal else 1)
    if left >= 0:
        width = left + 1 + (0 if causal else columns if right < 0 else right)
        pairs = min(pairs, batch * rows * width)
    name += "_dropout" * bool(call.dropout)
    name += "_deterministic" * (products > 2 and is_deterministic())
    flops = products * q.shape[-2] * pairs * (q.shape[-1] + v.shape[-1])
    fused(name, flops, *parts(q), *parts(k), *parts(v), out)


def is_deterministic() -> bool:
    """Whether gradients are summed in one order (dot_product_attention.py,
    DotProductAttention.__init__ @v2.9)."""
    asked = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
    return asked or torch.are_deterministic_algorithms_enabled()


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@kernel()
def fused_attn_fwd(*args: Values) -> list[Values]:
    """attention.cpp:114 @v2.18: out, statistics, (largest logits,) state, (bias,) (offset)"""
    call = _call(args, args[3], args[4], 3)
    q, k, v = call.tensors
    dtype, _, _, _, _, s_quantizer, o_quantizer, bias, offset, _, _, largest, *_ = call.rest
    create(s_quantizer, [0], torch.float32)
    out = create(o_quantizer, [*q.shape[:-1], v.shape[-1]], dtype)
    state = new(2, torch.int64)
    kept = [_statistics(call) for _ in range(2 if largest else 1)]
    scratch(_ALIGNED)
    announce(call, "attention", 2, parts(out)[0])
    more = [t if isinstance(t, Tensor) else None for t in (bias, offset)]
    if not q.is_meta:
        call.forward(out, kept, state, *more)
        if largest and not since(2, 14):  # the largest first, and a sum of exponents over it
            kept = [kept[1], (kept[0] - kept[1]).exp()]
    return [out, *kept, state, *(t for t in more if t is not None)]


@kernel()
def fused_attn_bwd(*args: Values) -> list[Values]:
    """attention.cpp:323 @v2.18: gradients of q, k, v, the bias and the softmax offset"""
    call = _call(args, args[2], args[3], 5)
    q, k, v, _, grad = call.tensors
    at, kept = next((i, a) for i, a in enumerate(call.rest) if isinstance(a, list))
    *of_scores, of_grads = call.rest[at + 3 : at + 6]  # quantizers; kept: statistics, state, …
    for quantizer in of_scores:
        create(quantizer, [0], torch.float32)
    delayed = kind_of(of_grads) == "delayed"
    dtype = torch.uint8 if delayed else call.rest[0]
    grads: list[Values] = list(_gradients(call.layout, dtype, q, k, v))
    if delayed:
        grads = [create(of_grads, g.shape, q.dtype, lambda *_, g=g: g) for g in grads]
    dbias = new(kept[-1].shape, q.dtype) if call.biased else None
    offset = member("NVTE_Softmax_Type", args) != "vanilla_softmax"
    doffset = new([1, q.shape[-2], 1, 1], torch.float32) if offset else None
    scratch(_workspace(call))
    announce(call, "attention_backward", 5, parts(grad)[0])
    if not q.is_meta:
        of_bias = kept[2] if call.biased else None, dbias
        of_sink = kept[-1] if offset else None, doffset
        call.backward(grads, kept[0], kept[1], of_bias, of_sink)
    return [*grads, dbias, doffset]


def _gradients(layout: str, dtype: torch.dtype, q: Tensor, *kv: Tensor) -> list[Tensor]:
    """Three tensors, or parts of one or two where the layout has q, k and v so
    (attention.cpp:384 @v2.18)."""
    groups, found = layout.split("_"), []
    owners = {1: [(q, *kv)], 2: [(q,), kv], 3: [(q,), kv[:1], kv[1:]]}[len(groups)]
    for group, tensors in zip(groups, owners, strict=True):
        shape, count = list(tensors[0].shape), len(tensors)
        if count == 1:
            found.append(new(shape, dtype))
            continue
        at = len(shape) - len(group.partition(str(count))[2])
        shape.insert(at, count)
        found += new(shape, dtype).unbind(at)
    return found


def _workspace(call: Attention) -> int:
    """Bytes of one backward (cudnn-frontend, scaled_dot_product_flash_attention.h,
    get_fe_workspace_size_node @1.32): gradients of the queries in fp32 and a sum a row, or the
    parts of a fixed order, which a bias's gradient takes, too; with grouped heads keys' and values'
    gradients of every head."""
    q, k, v = call.tensors[:3]
    batch, rows, columns = call.size
    heads, size = q.shape[-2:]
    whole = batch * heads
    taken = 4 * whole * rows * (size + 1)
    if (is_deterministic() or call.biased) and call.form != "thd":
        taken = 2 * whole * rounded(rows, 64) * rounded(columns, 128) + 4 * whole * rows
    if k.shape[-2] != heads:
        taken += q.element_size() * whole * columns * (k.shape[-1] + v.shape[-1])
    return taken + _ALIGNED


@kernel()
def get_fused_attn_backend(*args: Values) -> Values:
    """attention.cpp:43 @v2.18: what cuDNN 9 takes on Hopper (nvte_get_fused_attn_backend,
    common/fused_attn/fused_attn.cpp); from 2.19 on of one object, with the reason of a refusal"""
    from transformer_engine_torch import (  # type: ignore[import-not-found]
        NVTE_Fused_Attn_Backend,
    )

    if len(args) == 1:
        (of,) = args
        rest: Sequence[Values] = (of.dropout, of.num_attn_heads, of.num_gqa_groups, of.max_seqlen_q,
                of.max_seqlen_kv, of.head_dim_qk, of.head_dim_v, of.window_size_left,
                of.window_size_right)  # fmt: skip
        dtype, mask = of.qkv_dtype, of.attn_mask_type.name.lower()
    else:
        dtype, mask, rest = args[1], member("NVTE_Mask_Type", args), args[7:]
    dropout, _, _, rows, columns, *sizes, left, right = rest[:9]
    windowed = left != -1 or right not in (-1, 0)
    fits = dtype_of(dtype) in (torch.float16, torch.bfloat16) and "arbitrary" not in mask
    fits = fits and all(size % 8 == 0 and size <= 256 for size in sizes)
    fits = fits and not (windowed and (dropout or rows > columns))
    name = "NVTE_F16_arbitrary_seqlen" if fits else "NVTE_No_Backend"
    if dtype_of(dtype) == torch.uint8 and set(sizes) == {128} and not (windowed or rows % 128):
        name = "NVTE_FP8"
    answer = NVTE_Fused_Attn_Backend[name]
    why = "no row of our table" if name == "NVTE_No_Backend" else ""
    return (answer, why) if len(args) == 1 else answer


# -- packed sequences, spread over ranks -----------------------------------------------------------
@kernel(values=False)
def thd_read_half_tensor(x: Tensor, lengths: Tensor, half: int) -> Tensor:
    """attention.cpp:792 @v2.18"""
    shape, dim = list(x.shape), 0 if x.dim() == 3 else 1
    shape[dim] //= 2
    out = new(shape, x.dtype)
    fused("copy_", 0, out, out)
    return out


@kernel(values=False)
def thd_get_partitioned_indices(lengths: object, tokens: Values, size: int, rank: int) -> Tensor:
    """attention.cpp:957 @v2.18"""
    return new(int(tokens) // size, torch.int32)


@kernel(values=False)
def thd_read_second_half_lse(
    statistics: Tensor, lengths: object, packed: bool, tokens: int
) -> Tensor:
    """attention.cpp:876 @v2.18"""
    return torch.zeros([*statistics.shape[:-1], tokens], device=statistics.device)


def _corrected(*args: object, **options: object) -> None:
    """attention.cpp:832, :925, :942 @v2.18: the first two tensors are read, the first written"""
    to, of = (a for a in args[:2] if isinstance(a, Tensor))
    fused("add_", 0, to, of, to)


_IN_PLACE = ("thd_out_correction", "thd_second_half_lse_correction", "thd_grad_correction")
TABLE.update(dict.fromkeys(_IN_PLACE, _corrected))
SHAPES_ONLY.update(_IN_PLACE)


@kernel("thd_sequence_order_to_cp_rank_order", "thd_cp_rank_order_to_sequence_order", values=False)
def reordered(x: Tensor, *rest: object) -> Tensor:
    """attention.cpp:978 @v2.18"""
    x = x.contiguous()
    out = torch.empty_like(x)
    fused("index_select", 0, x, out)
    return out


@kernel(values=False)
def fa_prepare_fwd(qkv: Tensor) -> Tensor:
    """attention.cpp:611 @v2.18: q, a third of [s, b, h, 3 d], to all three [3, b, s, h, d]"""
    rows, batch, heads, size = qkv.shape
    out = new([3, batch, rows, heads, size], qkv.dtype)
    fused("copy_", 0, out, out)
    return out


@kernel(values=False)
def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """attention.cpp:632 @v2.18"""
    batch, rows, heads, size = q.shape
    out = new([rows, batch, heads, 3 * size], q.dtype)
    fused("copy_", 0, out, out)
    return out


@kernel(values=False)
def convert_thd_to_bshd(x: Tensor, lengths: object, batch: int, rows: int) -> Tensor:
    """attention.cpp:1052 @v2.18"""
    out = new([batch, rows, *x.shape[1:]], x.dtype)
    fused("copy_", 0, x, out)
    return out


@kernel(values=False)
def convert_bshd_to_thd(x: Tensor, lengths: object, tokens: int) -> Tensor:
    """attention.cpp:1072 @v2.18"""
    out = new([tokens, *x.shape[2:]], x.dtype)
    fused("copy_", 0, x, out)
    return out
