"""Stand-ins for kernels of Apex and others, and what Megatron's triton kernels compute on tier cpu.

``COMPUTED`` has those of multi-latent attention's rotary embedding, which work in place; arguments
are named as their own (core/fusions/fused_mla_yarn_rope_apply.py @0.16.1, @0.19.0, and under other
names @0.20).
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatron_prism.core.process_changes import ProcessChanges

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads
    from megatron_prism.runtime.recorder.shapes_meter import Meter

Computed = Callable[[types.SimpleNamespace], None]  # of a launch's arguments by their names
meter: Meter | None = None


def fused(name: str, flops: int, *tensors: torch.Tensor | None) -> None:
    """One kernel ``name``: ``flops``, and ``tensors`` are what it reads and writes once."""
    if meter is not None:
        read_and_written = [tensor for tensor in tensors if tensor is not None]
        traffic_bytes = sum(tensor.numel() * tensor.element_size() for tensor in read_and_written)
        meter.add(name, int(flops), traffic_bytes, read_and_written)


def launched_with(launches: int, unseen: float) -> None:
    """Say of the kernel that was just counted how its operator launches it.

    Args:
        launches: that C++ makes behind the first one, in the same call.
        unseen: of all of them, how many products have a shape that the library has not kept.
    """
    if meter is not None:
        meter.launched_with(launches, unseen)


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, forward: Callable[..., Any], *inputs: Any) -> Any:
        out, saved, ctx.back = forward(*inputs)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> Grads:
        return None, *ctx.back(*grads, *ctx.saved_tensors)


def differentiable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function of kernels ``forward``, which autograd knows.

    ``forward(*inputs)`` returns what comes out, the tensors that are saved, and the backward: a
    function of the gradients and the saved tensors, which returns a gradient or None for each
    input, and holds no tensor.
    """

    @functools.wraps(forward)
    def call(*inputs: Any) -> Any:
        return _Kernels.apply(forward, *inputs)

    return call


_MASKED = -10000.0  # as the kernels have it
_WARP, _THREADS = 32, 128


def masked_softmax(
    scores: torch.Tensor, mask: torch.Tensor | None, scale: torch.Tensor
) -> torch.Tensor:
    """Probabilities of scores ``[…, queries, keys]`` in their type; ``mask`` is true where none."""
    # shapes: one fused kernel counts
    if scores.is_meta:
        out = torch.empty_like(scores)
        fused("masked_softmax", 0, scores, out)
        return out
    wide = scores.float() * float(scale)
    if mask is not None:
        wide = wide.masked_fill(mask, _MASKED)
    return torch.softmax(wide, dim=-1).to(scores.dtype)


def _causal(scores: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scores.is_meta:
        return masked_softmax(scores, None, scale)
    every_pair = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    return masked_softmax(scores, every_pair.triu(1), scale)


def _plain(scores: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return masked_softmax(scores, None, scale)


def masked_softmax_backward(
    grad: torch.Tensor, results: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of a scaled masked softmax from its results, in place of ``grad``."""
    grad = grad.contiguous()
    if grad.is_meta:
        fused("masked_softmax_backward", 0, grad, results, grad)
        return grad
    # the gradient of softmax: what each share gains less what its whole row gains
    wide_grad = grad.float()
    shares = results.float()
    gain_of_row = (wide_grad * shares).sum(-1, keepdim=True)
    return grad.copy_(shares * (wide_grad - gain_of_row) * float(scale))


def batches_per_block(queries: int, keys: int, batches: int, heads: int) -> int:
    """How many rows a block of 128 threads takes: two a warp where a row is short."""
    padded_keys = 1 << max(0, keys - 1).bit_length()
    warps_of_rows = _THREADS // min(padded_keys, _WARP)
    return warps_of_rows * (2 if padded_keys <= 128 else 1)


@differentiable
def _transform(x: torch.Tensor, scale: float) -> Any:
    return _transformed(x, scale), (), lambda grad: (_transformed(grad, scale), None)


def transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``scale`` times ``x`` times the Hadamard matrix of its last dimension."""
    return _transform(x, scale)


def _transformed(x: torch.Tensor, scale: float) -> torch.Tensor:
    size = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # shapes alone: log2(size) steps, each of which adds or subtracts every element once
    if x.is_meta:
        steps = max(size - 1, 1).bit_length()
        fused("hadamard", x.numel() * steps, x, out)
        return out
    # values: the transform needs a power of two, so rows are padded with zeros
    padded_size = 1 << max(size - 1, 0).bit_length()
    padded = torch.nn.functional.pad(x.float(), (0, padded_size - size))
    rows = padded.reshape(-1, padded_size)
    # each step adds and subtracts elements that lie ``distance`` apart
    distance = 1
    while distance < padded_size:
        pairs = rows.view(-1, padded_size // (2 * distance), 2, distance)
        sums = pairs.sum(2)
        differences = pairs[:, :, 0] - pairs[:, :, 1]
        rows = torch.stack([sums, differences], 2).view(-1, padded_size)
        distance *= 2
    scaled = rows[:, :size] * scale
    return out.copy_(scaled.view_as(x))


def _accumulate(inputs: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    """inputs ``[tokens, in]``, grad ``[tokens, out]``, main_grad ``[out, in]`` of its own type."""
    if not main_grad.is_meta:
        product = grad.t() @ inputs
        main_grad.add_(product.to(main_grad.dtype))
        return
    flops = 2 * grad.numel() * inputs.shape[1]
    if grad.dtype == torch.float32:
        # with torch's handle of cuBLAS, whose settings decide between fp32 and TF32
        fused("mm", flops, grad.t(), inputs, main_grad)
    else:
        fused("gemm_wgrad", flops, grad, inputs, main_grad)


_SOFTMAX: dict[str, Callable[..., object]] = {
    "backward": masked_softmax_backward,
    "get_batch_per_block": batches_per_block,
}
_MODULES: dict[str, dict[str, Callable[..., object]]] = {
    "scaled_upper_triang_masked_softmax_cuda": {"forward": _causal, **_SOFTMAX},
    "scaled_masked_softmax_cuda": {"forward": masked_softmax, **_SOFTMAX},
    "scaled_softmax_cuda": {"forward": _plain, **_SOFTMAX},
    "fused_weight_gradient_mlp_cuda": {
        "wgrad_gemm_accum_fp32": _accumulate,
        "wgrad_gemm_accum_fp16": _accumulate,
    },
}


def add_packages(
    changes: ProcessChanges,
    packages: Mapping[str, Mapping[str, object]],
    kind: type[types.ModuleType] = types.ModuleType,
) -> None:
    """Put packages into ``sys.modules``, by name with what they contain.  Real ones would want a
    device.
    """
    for name, contents in packages.items():
        module = kind(name, "A stand-in of megatron_prism.")
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update(contents)
        changes.set_item(sys.modules, name, module)
        # a sub-module is also an attribute of its package
        parent, _, leaf = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], leaf, module)


def add_modules(changes: ProcessChanges) -> str:
    """Put Apex's kernels into ``sys.modules``; says what they are."""
    add_packages(changes, _MODULES)
    return "apex's kernels: a softmax that keeps its result alone, a product that is added"


def _tokens(
    total: int, batch: int | None, starts: torch.Tensor | None, cp_rank: int, cp_size: int
) -> torch.Tensor:
    """int64 [total]: the place in its sequence of each row; of packed sequences under context
    parallelism a rank holds an early and a late part of each.
    """
    if starts is None:  # [rows, batch]: sequences take turns
        assert batch is not None
        return torch.arange(total) // batch
    places = torch.empty(total, dtype=torch.int64)
    bounds = [int(start) // cp_size for start in starts.tolist()]
    for first, last in zip(bounds, bounds[1:], strict=False):
        length = last - first
        place = torch.arange(length)
        # of 2 * cp_size chunks a rank has cp_rank and 2 * cp_size - 1 - cp_rank, as causal
        # attention is then balanced
        if cp_size > 1:
            half = length // 2
            early = place + cp_rank * length // 2
            late = place - half + (2 * cp_size - cp_rank - 1) * length // 2
            place = torch.where(place < half, early, late)
        places[first:last] = place
    return places


def _halves(table: torch.Tensor, tokens: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Left and right half of the rows of cos or sin, [total, 1, width / 2] each."""
    all_rows = table.reshape(-1, width)
    rows = all_rows[tokens.to(table.device)].unsqueeze(1)
    half = width // 2
    return rows[..., :half], rows[..., half:]


def _turned(
    pairs: torch.Tensor,
    cos: tuple[torch.Tensor, ...],
    sin: tuple[torch.Tensor, ...],
    paired: bool = False,
) -> torch.Tensor:
    """Interleaved pairs, rotated, as two halves, or ``paired`` as they were."""
    cos_left, cos_right = cos
    sin_left, sin_right = sin
    even_columns, odd_columns = pairs[..., 0::2], pairs[..., 1::2]
    left = even_columns * cos_left - odd_columns * sin_left
    right = odd_columns * cos_right + even_columns * sin_right
    # paired: a column stays beside its partner
    if paired:
        return torch.stack([left, right], dim=-1).flatten(-2)
    return torch.cat([left, right], dim=-1)


def _turned_back(
    turned: torch.Tensor,
    cos: tuple[torch.Tensor, ...],
    sin: tuple[torch.Tensor, ...],
    paired: bool = False,
) -> torch.Tensor:
    """The gradient of ``_turned``, as interleaved pairs."""
    cos_left, cos_right = cos
    sin_left, sin_right = sin
    # the gradient has the layout of the forward's result
    if paired:
        left, right = turned[..., 0::2], turned[..., 1::2]
    else:
        left, right = turned.chunk(2, dim=-1)
    even_columns = left * cos_left + right * sin_right
    odd_columns = right * cos_right - left * sin_left
    return torch.stack([even_columns, odd_columns], dim=-1).flatten(-2)


def _query(turn: Callable[..., torch.Tensor]) -> Computed:
    """The kernel of the query, which turns the last part of each head in place: there or back."""

    def run(a: types.SimpleNamespace) -> None:
        x = _first(a, "Q", "DO")
        tokens = _first(a, "position_ids")  # since 0.20 places in packed sequences may be given
        if tokens is None:
            tokens = _tokens(len(x), a.batch_size, a.cu_seqlens_q, a.cp_rank, a.cp_size)
        sin = -a.SIN if _first(a, "INVERSE") else a.SIN
        cos_halves = _halves(a.COS, tokens, a.emb_dim)
        sin_halves = _halves(sin, tokens, a.emb_dim)
        paired = bool(_first(a, "REMOVE_INTERLEAVING"))
        unturned_columns = _first(a, "qk_head_dim", "nope_dim")
        last_part = x[..., unturned_columns:]
        x[..., unturned_columns:] = turn(last_part, cos_halves, sin_halves, paired)

    return run


def _first(a: types.SimpleNamespace, *names: str) -> Any:
    """The argument of the first of ``names`` that this release has; None without any."""
    for name in names:
        if hasattr(a, name):
            return getattr(a, name)
    return None


Table = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]  # halves of cos and of sin


def _kv(turn: Callable[..., None], *names: str) -> Computed:
    """The kernel of keys and values: four tensors, there or back."""

    def run(a: types.SimpleNamespace) -> None:
        tensors = [getattr(a, name) for name in names]
        tokens = _tokens(len(tensors[0]), a.batch_size, a.cu_seqlens_kv, a.cp_rank, a.cp_size)
        table = _halves(a.COS, tokens, a.emb_dim), _halves(a.SIN, tokens, a.emb_dim)
        turn(tensors, a.k_dim, table, bool(_first(a, "REMOVE_INTERLEAVING")))

    return run


def _forward_kv(tensors: list[torch.Tensor], k_dim: int, table: Table, paired: bool) -> None:
    kv, shared, key, value = tensors
    key[..., :k_dim] = kv[..., :k_dim]
    value[...] = kv[..., k_dim:]
    # heads share what is turned
    shared_rows = shared.reshape(len(kv), 1, -1)
    key[..., k_dim:] = _turned(shared_rows, *table, paired)


def _backward_kv(tensors: list[torch.Tensor], k_dim: int, table: Table, paired: bool) -> None:
    dk, dv, d_kv, d_shared = tensors
    d_kv[..., :k_dim] = dk[..., :k_dim]
    d_kv[..., k_dim:] = dv
    sum_of_heads = dk[..., k_dim:].float().sum(dim=1, keepdim=True)
    turned_back = _turned_back(sum_of_heads.to(d_shared.dtype), *table, paired)
    d_shared[...] = turned_back.reshape(d_shared.shape)


_query_forward, _query_backward = _query(_turned), _query(_turned_back)
_kv_forward = _kv(_forward_kv, "KV", "K_POS_EMB", "O_KEY", "O_VALUE")
_kv_backward = _kv(_backward_kv, "dK", "dV", "dKV", "dEMB")
COMPUTED = {
    "rotary_fwd_q_kernel": _query_forward,
    "rotary_bwd_q_kernel": _query_backward,
    "rotary_fwd_kv_kernel": _kv_forward,
    "rotary_bwd_kv_kernel": _kv_backward,
    # their names since 0.20
    "_mla_rope_fwd_inplace_kernel": _query_forward,
    "_mla_rope_bwd_inplace_kernel": _query_backward,
    "_mla_rope_fwd_kv_split_kernel": _kv_forward,
    "_mla_rope_bwd_kv_split_kernel": _kv_backward,
}
