"""Kernels that take rows by themselves: norms, softmax, activations, rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_prism.runtime.devices import kernels
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
    WITHOUT_VALUES,
    Kernel,
    Member,
    Quantizer,
    Values,
    dtype_of,
    fill,
    gradient,
    kernel,
    new,
    refuse,
    rows_of,
    scratch,
    since,
    wide,
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
    """Count the blocks that add up the weights' gradients, each for itself in fp32."""
    if width in _TUNED[rms]:
        blocks_on_processor, blocks_of_row = _TUNED[rms][width]
        return PROCESSORS * blocks_on_processor // blocks_of_row
    # other widths take the smallest general kernel that holds a row, else several of the largest
    general = _GENERAL[rms]
    wide_enough = [columns for columns in general if columns >= width]
    columns = min(wide_enough) if wide_enough else max(general)
    blocks_on_processor, rows_at_once = general[columns]
    blocks_of_all_rows = -(-rows // rows_at_once)
    parts_of_row = -(-width // columns)
    return min(blocks_of_all_rows, PROCESSORS * blocks_on_processor // parts_of_row)


def _ask_for_sums_of_blocks(rms: bool, x: Tensor) -> None:
    """Ask for the partial sums of backward: of gamma, and of beta where the norm has one."""
    width = x.shape[-1]
    rows = rows_of(x.shape)
    # of gamma, and of beta where there is a bias
    sums = 1 if rms else 2
    scratch(sums * _blocks(rms, rows, width) * width, torch.float32)


def _normed(x: Tensor, mean: Tensor | None, inverse_deviation: Tensor) -> Tensor:
    """Return rows of mean 0, where a mean is given, and deviation 1, in fp32."""
    centered = wide(x)
    if mean is not None:
        centered = centered - mean[:, None]
    return centered * inverse_deviation[:, None]


def _gamma(weight: Tensor, centered: bool) -> Tensor:
    """Return the factor of each column; a ``centered`` weight is stored less 1."""
    return weight.float() + float(centered)


@kernel("rmsnorm_fwd")
def norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Values,
    quantizer: Quantizer,
    dtype: object,
    margin: int = 0,
    centered: bool = False,
    bias: Tensor | None = None,
) -> tuple[Values, Tensor | None, Tensor]:
    """normalization.cpp:305 @v2.18: what comes out, mean (with a bias), inverse deviation"""
    rows = rows_of(x.shape)
    mean = None
    if bias is not None:  # LayerNorm; RMSNorm has neither bias nor mean
        mean = fill(new(rows, torch.float32), lambda: wide(x).mean(-1))

    def inverse_of_deviation() -> Tensor:
        centered_rows = wide(x) if mean is None else wide(x) - mean[:, None]
        variance = centered_rows.square().mean(-1)
        return (variance + eps).rsqrt()

    def value() -> Tensor:
        scaled = _normed(x, mean, inverse_deviation) * _gamma(weight, centered)
        if bias is None:
            return scaled
        return scaled + bias.float()

    inverse_deviation = fill(new(rows, torch.float32), inverse_of_deviation)
    out = computed("norm", x.shape, dtype_of(dtype), quantizer, value, out)
    data_of_out = parts(out)[:1]
    fused("norm", 0, x, *data_of_out)
    return out, mean, inverse_deviation


@kernel()
def layernorm_fwd(x: Tensor, weight: Tensor, bias: Tensor, *options: Any) -> tuple[Values, ...]:
    """normalization.cpp:61 @v2.18"""
    return norm(x, weight, *options, bias=bias)


@kernel("rmsnorm_bwd")
def norm_gradients(
    grad: Tensor,
    x: Tensor,
    inverse_deviation: Tensor,
    gamma: Tensor,
    margin: int = 0,
    centered: bool = False,
    mean: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """normalization.cpp:216 @v2.18: of the input, of gamma, and with a mean of beta"""
    grad = grad.contiguous()
    x = x.contiguous()
    rms = mean is None
    gradients = [torch.empty_like(x), torch.empty_like(gamma)]
    if not rms:
        gradients.append(torch.empty_like(gamma))
    _ask_for_sums_of_blocks(rms, x)
    fused("norm_backward" if rms else "layer_norm_backward", 0, grad, x, x)
    if x.is_meta:
        return tuple(gradients)

    dy = wide(grad)
    normed = _normed(x, mean, inverse_deviation)
    scaled = dy * _gamma(gamma, centered)
    # the deviation depends on x: what changes it is taken out of the gradient
    dx = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
    if not rms:  # the mean depends on x, too
        dx = dx - scaled.mean(-1, keepdim=True)
    values = [dx * inverse_deviation[:, None], (dy * normed).sum(0), dy.sum(0)]
    for gradient_of, value in zip(gradients, values, strict=False):
        gradient_of.copy_(value.view(gradient_of.shape))
    return tuple(gradients)


@kernel()
def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, inverse_deviation: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """normalization.cpp:13 @v2.18"""
    return norm_gradients(grad, x, inverse_deviation, weight, *options, mean=mean)


@kernel()
def rmsnorm_bwd_add(
    grad: Tensor, x: Tensor, add: Tensor, inverse_deviation: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """normalization.cpp:259 @v2.18"""
    add = add.contiguous()
    dx, dgamma = norm_gradients(grad, x, inverse_deviation, weight, *options)
    fill(dx, lambda: dx + add)
    return dx, dgamma


@kernel("scaled_softmax_forward", "scaled_masked_softmax_forward")
def softmax(scores: Tensor, *mask_and_scale: Values) -> Tensor:
    """softmax.cpp:11, :66 @v2.18: the mask, then the scale"""
    *masks, scale = mask_and_scale
    mask = masks[0] if masks else None
    return kernels.masked_softmax(scores, mask, scale)


@kernel(
    "scaled_upper_triang_masked_softmax_forward", "scaled_aligned_causal_masked_softmax_forward"
)
def causal_softmax(scores: Tensor, scale: Values) -> Tensor:
    """softmax.cpp:129, :181 @v2.18: the last query sees all keys"""
    queries, keys = scores.shape[-2:]
    later_keys = None
    if not scores.is_meta:
        # with more keys than queries the first query sees the keys before it, too
        every_pair = torch.ones(queries, keys, dtype=torch.bool)
        later_keys = every_pair.triu(1 + keys - queries)
    return kernels.masked_softmax(scores, later_keys, scale)


@kernel(
    "scaled_softmax_backward",
    "scaled_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_backward",
)
def softmax_backward(grad: Tensor, results: Tensor, scale: Values) -> Tensor:
    """softmax.cpp:40, :103, :152, :210 @v2.18: over the gradient, from 2.19 on beside it"""
    grad = grad.contiguous()
    results = results.contiguous()
    into = grad
    # an allocation that earlier releases do not have
    if since(2, 19):
        into = fill(new(grad.shape, grad.dtype), lambda: grad)
    return kernels.masked_softmax_backward(into, results, scale)


def _clamped(
    x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Tensor:
    """SwiGLU of GPT-OSS: both halves are bounded, and the linear one is shifted."""
    gate, linear = x.chunk(2, -1)
    gate = gate.clamp(max=limit)
    linear = linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + glu_linear_offset)


def _gated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the activated left half of the columns times the right half."""
    left, right = x.chunk(2, -1)
    return activation(left) * right


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


_PLAIN: dict[str, Callable[..., Tensor]] = {
    "gelu": partial(functional.gelu, approximate="tanh"),
    "qgelu": _quick_gelu,
    "relu": torch.relu,
    "srelu": _squared_relu,
    "silu": functional.silu,
}
_GATED: dict[str, Callable[..., Tensor]] = {
    "glu": partial(_gated, torch.sigmoid),
    "swiglu": partial(_gated, functional.silu),
    "clamped_swiglu": _clamped,
    "geglu": partial(_gated, _PLAIN["gelu"]),
    "qgeglu": partial(_gated, _PLAIN["qgelu"]),
    "reglu": partial(_gated, _PLAIN["relu"]),
    "sreglu": partial(_gated, _PLAIN["srelu"]),
}


def _activation(name: str, activate: Callable[..., Tensor], gated: bool) -> Kernel:
    """Make the kernel of an activation, which costs know as ``name``."""

    def run(x: Tensor, quantizer: Quantizer = None, *numbers: Values, **options: Values) -> Values:
        """activation.cpp:18 @v2.18"""
        x = x.contiguous()
        columns = x.shape[-1]
        # half of the columns are gates
        if gated:
            columns //= 2
        value = partial(_activated, activate, x, *numbers, **options)
        out = computed("activation", [*x.shape[:-1], columns], x.dtype, quantizer, value)
        data_of_out = parts(out)[:1]
        fused(name, 0, x, *data_of_out)
        return out

    return run


def _activated(
    activate: Callable[..., Tensor], x: Tensor, *numbers: Values, **options: Values
) -> Tensor:
    """Return the activation of ``x`` in fp32."""
    return activate(x.float(), *numbers, **options)


def _activation_backward(name: str, activate: Callable[..., Tensor]) -> Kernel:
    """Make the kernel of an activation's gradient."""

    def run(
        grad: Tensor, x: Tensor, quantizer: Quantizer = None, *numbers: Values, **options: Values
    ) -> Values:
        """activation.cpp:129 @v2.18"""
        grad = grad.contiguous()
        x = x.contiguous()

        def activated(x: Tensor) -> Tensor:
            return activate(x, *numbers, **options)

        value = partial(gradient, activated, x, grad)
        out = computed("activation", x.shape, x.dtype, quantizer, value)
        data_of_out = parts(out)[:1]
        fused(f"{name}_back", 0, grad, x, *data_of_out)
        return out

    return run


def _activation_and_bias(name: str) -> Kernel:
    """Make the kernel of the gradients of an activation and of the bias in front of it."""

    def run(grad: Tensor, x: Tensor, quantizer: Quantizer = None) -> tuple[Values, Values]:
        """bias.cpp:108 @v2.18"""
        grad = grad.contiguous()
        x = x.contiguous()
        out = create(quantizer, x.shape, grad.dtype)
        dbias = new(x.shape[-1], grad.dtype)
        data_of_out = parts(out)[:1]
        fused(f"{name}_back", 0, grad, x, *data_of_out)
        # values without a cast: gradient first, then its sum over the rows
        if quantizer is None and not x.is_meta:
            out = TABLE[f"d{name}"](grad, x)
            return fill(dbias, lambda: wide(out).sum(0)), out
        scaling = kind_of(quantizer)
        if scaling in ("delayed", "mx"):
            # one kernel casts and adds up
            sum_in_blocks(x, quantizer, of_activation=True)
            return dbias, out
        # other scalings take the gradient in high precision first, then its sum, then the cast;
        # without a scaling only its shapes are needed here, and nothing is cast
        amax = new(1, torch.float32) if scaling == "current" else None
        high_precision = new(x.shape, grad.dtype)
        torch.sum(high_precision.reshape(-1, x.shape[-1]), 0, out=dbias)
        cast_into(out, high_precision, quantizer, amax)
        return dbias, out

    return run


def _enter_activations() -> None:
    """Enter forward, backward, and backward with a bias's gradient of each activation."""
    for name, activate in {**_PLAIN, **_GATED}.items():
        # costs know a clamped activation by the name of the plain one
        cost = name.removeprefix("clamped_")
        prefix = name.removesuffix(cost)
        TABLE[name] = _activation(cost, activate, name in _GATED)
        TABLE[f"{prefix}d{cost}"] = _activation_backward(cost, activate)
    for name in _PLAIN:
        TABLE[f"dbias_d{name}"] = _activation_and_bias(name)


_enter_activations()


def _scaled(
    activate: Callable[..., Tensor], options: Sequence[Any], x: Tensor, scales: Tensor
) -> Tensor:
    """Return the activation of each row times its scale, in fp32.

    Args:
        activate: of rows in fp32.
        options: of ``activate``; last the width of the columns that halves take turns in, 0 where
            the left half is all in front.
        x: [rows, columns].
        scales: [rows].
    """
    *numbers, interleaved_width = options
    if interleaved_width:
        # bring the halves, which take turns, into the order of the activation
        blocks = x.unflatten(-1, (-1, 2, interleaved_width))
        x = blocks.transpose(-3, -2).flatten(-3)
    return activate(x.float(), *numbers) * scales.float().unsqueeze(-1)


def _scaled_activation(activate: Callable[..., Tensor]) -> Kernel:
    """Make the kernel of an activation whose rows are scaled."""

    def run(x: Tensor, scales: Tensor, quantizer: None, *options: Any) -> Tensor:
        """pytorch/ops/basic/swiglu.py:621, :769 @2.20: each row times the probability of its
        expert
        """
        out = new([*x.shape[:-1], x.shape[-1] // 2], x.dtype)
        fused("swiglu", 0, x, scales, out)
        return fill(out, partial(_scaled, activate, options, x, scales))

    return run


def _scaled_activation_backward(activate: Callable[..., Tensor]) -> Kernel:
    """Make the kernel of its gradients."""

    def run(
        grad: Tensor, x: Tensor, scales: Tensor, quantizer: None, *options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """pytorch/ops/basic/swiglu.py:636, :788 @2.20: the last argument asks for the gradient of
        the scales, too
        """
        *numbers, wants_scales = options
        dx = new(x.shape, x.dtype)
        fused("swiglu_back", 0, grad, x, dx)

        def of_x(x: Tensor) -> Tensor:
            return _scaled(activate, numbers, x, scales)

        def of_scales(scales: Tensor) -> Tensor:
            return _scaled(activate, numbers, x, scales)

        fill(dx, partial(gradient, of_x, x, grad))
        # scales that need no gradient
        if not wants_scales:
            return dx, None
        dscales = new(scales.shape, scales.dtype)
        fill(dscales, partial(gradient, of_scales, scales, grad))
        return dx, dscales

    return run


TABLE["scaled_swiglu"] = _scaled_activation(_GATED["swiglu"])
TABLE["scaled_dswiglu"] = _scaled_activation_backward(_GATED["swiglu"])
TABLE["scaled_clamped_swiglu"] = _scaled_activation(_clamped)
TABLE["scaled_clamped_dswiglu"] = _scaled_activation_backward(_clamped)


@kernel()
def swap_first_dims(x: Tensor, out: Tensor | None = None) -> Tensor:
    """transpose.cpp:263 @v2.18"""
    x = x.contiguous()
    if out is None:
        first, second, *inner = x.shape
        out = new([second, first, *inner], x.dtype)
    fused("copy_", 0, x, out)
    return fill(out, lambda: x.transpose(0, 1))


# -- rotary embeddings, of queries or keys alone or of both with the values ------------------------
def _quarter_turned(x: Tensor, interleaved: bool) -> Tensor:
    """Turn each pair of columns by 90 degrees; pairs are neighbours, or of the two halves."""
    if interleaved:
        even_columns, odd_columns = x[..., ::2], x[..., 1::2]
        return torch.stack([-odd_columns, even_columns], -1).flatten(-2)
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


def _turned(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """Turn the columns that ``freqs`` has; columns beyond stay as they are."""
    columns, unturned = x.float().tensor_split([freqs.shape[-1]], -1)
    turned = columns * freqs.cos() + _quarter_turned(columns, interleaved) * freqs.sin()
    return torch.cat([turned, unturned], -1)


def _freqs_of_rank(freqs: Tensor, length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Select the rows of a context-parallel rank: chunks r and 2n-1-r (rope.py:347 @v2.9)."""
    if cp_size == 1:
        return freqs[:length]
    # an early and a late chunk, so that causal attention costs each rank the same
    chunk = length // 2
    late_start = (2 * cp_size - 1 - cp_rank) * chunk
    early = freqs[cp_rank * chunk :][:chunk]
    late = freqs[late_start:][:chunk]
    return torch.cat([early, late])


def _embedded(
    x: Tensor,
    freqs: Tensor,
    starts: Values,
    form: Values,
    interleaved: bool,
    lengths: Values,
    *context: int,
) -> Tensor:
    """Return ``x`` with its rotary embedding, in fp32.

    Args:
        x: queries or keys, as ``form`` lays them out.
        freqs: [rows, 1, 1, columns], angles.
        starts: where sequences start, which is refused here; None: at 0.
        form: NVTE_SBHD, NVTE_BSHD or NVTE_THD.
        interleaved: whether pairs of columns are neighbours.
        lengths: cumulated, of packed sequences over all context-parallel ranks.
        context: size and rank of context parallelism.

    Raises:
        UnsupportedError: there are ``starts``.
    """
    if starts is not None:
        refuse("fused_rope with start_positions", WITHOUT_VALUES)
    if form.name == "NVTE_THD":
        # each packed sequence starts at angle 0, and this rank has its share of the rows
        rows_of_sequences = (lengths[1:] - lengths[:-1]) // context[0]
        turned = []
        for sequence in x.split(rows_of_sequences.tolist()):
            angles = _freqs_of_rank(freqs, len(sequence), *context)[:, 0]
            turned.append(_turned(sequence, angles, interleaved))
        return torch.cat(turned)
    # sequences are the second dimension of x, but the first of the angles
    if form.name == "NVTE_BSHD":
        angles = _freqs_of_rank(freqs, x.shape[1], *context)
        return _turned(x, angles.transpose(0, 1), interleaved)
    return _turned(x, _freqs_of_rank(freqs, x.shape[0], *context), interleaved)


def _rope(back: bool) -> Kernel:
    """Make the kernel that turns queries or keys, or turns their gradients ``back``."""

    def run(x: Tensor, freqs: Tensor, *arguments: Values) -> Tensor:
        """apply_rope.cpp:12, :165 @v2.18; backward has no starts before 2.10"""
        out = new(x.shape, x.dtype)
        fused("rope", 0, x, x)
        # without starts the first argument is the form, a member of an enumeration
        has_starts = not isinstance(arguments[0], Member)
        starts = arguments[0] if has_starts else None

        def embedded(x: Tensor) -> Tensor:
            return _embedded(x, freqs, starts, *arguments[-5:])

        if back:
            # turning is linear: the gradient of x at x turns it back
            return fill(out, lambda: gradient(embedded, x, x))
        return fill(out, lambda: embedded(x))

    return run


kernel("fused_rope_forward")(_rope(back=False))
kernel("fused_rope_backward")(_rope(back=True))


def _embedded_parts(
    qkv: Tensor,
    freqs: Sequence[Tensor],
    starts: Values,
    splits: list[int],
    form: Values,
    interleaved: bool,
    *context: int,
) -> tuple[Tensor, ...]:
    """Split [rows, rows, groups, q + k + v] into q, k and v; q and k are turned."""
    q_freqs, k_freqs = freqs
    q, k, v = qkv.split(splits, -1)
    # a group has several query heads side by side
    q = q.reshape(*qkv.shape[:2], -1, k.shape[-1])
    turned_q = _embedded(q, q_freqs, starts, form, interleaved, None, *context)
    turned_k = _embedded(k, k_freqs, starts, form, interleaved, None, *context)
    return turned_q, turned_k, v


@kernel()
def fused_qkv_rope_forward(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    starts: Values,
    splits: list[int],
    form: Values = None,
    interleaved: bool = False,
    size: int = 1,
    rank: int = 0,
) -> tuple[Tensor, ...]:
    """apply_rope.cpp:106 @v2.18"""
    *rows, groups, _ = qkv.shape
    q_columns, k_columns, v_columns = splits
    q = new([*rows, groups * q_columns // k_columns, k_columns], qkv.dtype)
    k = new([*rows, groups, k_columns], qkv.dtype)
    v = new([*rows, groups, v_columns], qkv.dtype)
    fused("rope", 0, qkv, q, k, v)
    if not qkv.is_meta:
        freqs = (q_freqs, k_freqs)
        values = _embedded_parts(qkv, freqs, starts, splits, form, interleaved, size, rank)
        for out, value in zip((q, k, v), values, strict=True):
            out.copy_(value)
    return q, k, v


@kernel()
def fused_qkv_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    splits: list[int],
    form: Values = None,
    interleaved: bool = False,
    size: int = 1,
    rank: int = 0,
) -> Tensor:
    """apply_rope.cpp:263 @v2.18"""
    # sizes of the joined tensor follow from its parts
    heads = dq.shape[2] + dk.shape[2] + dv.shape[2]
    columns_of_group = sum(splits)
    groups = heads * dq.shape[3] // columns_of_group
    out = new([*dq.shape[:2], groups, columns_of_group], dq.dtype)
    fused("rope", 0, dq, dk, dv, out)

    def embedded(qkv: Tensor) -> tuple[Tensor, ...]:
        freqs = (q_freqs, k_freqs)
        return _embedded_parts(qkv, freqs, None, splits, form, interleaved, size, rank)

    return fill(out, lambda: gradient(embedded, out, dq, dk, dv))
