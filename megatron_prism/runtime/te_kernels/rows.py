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
    scratch((1 if rms else 2) * _blocks(rms, rows_of(x.shape), width) * width, torch.float32)


def _hat(x: Tensor, mean: Tensor | None, deviation: Tensor) -> Tensor:
    return (wide(x) - (0 if mean is None else mean[:, None])) * deviation[:, None]


def _gamma(weight: Tensor, centered: bool) -> Tensor:
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
    mean = None if bias is None else fill(new(rows, torch.float32), lambda: wide(x).mean(-1))

    def inverse() -> Tensor:
        centre = 0 if mean is None else mean[:, None]
        return ((wide(x) - centre).square().mean(-1) + eps).rsqrt()

    def value() -> Tensor:
        normed = _hat(x, mean, deviation) * _gamma(weight, centered)
        return normed if bias is None else normed + bias.float()

    deviation = fill(new(rows, torch.float32), inverse)
    out = computed("norm", x.shape, dtype_of(dtype), quantizer, value, out)
    fused("norm", 0, x, *parts(out)[:1])
    return out, mean, deviation


@kernel()
def layernorm_fwd(x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> tuple[Values, ...]:
    """normalization.cpp:61 @v2.18"""
    return norm(x, weight, *rest, bias=bias)


@kernel("rmsnorm_bwd")
def norm_gradients(
    grad: Tensor,
    x: Tensor,
    deviation: Tensor,
    gamma: Tensor,
    margin: int = 0,
    centered: bool = False,
    mean: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """normalization.cpp:216 @v2.18: of the input, of gamma, and with a mean of beta"""
    grad, x = grad.contiguous(), x.contiguous()
    out = [torch.empty_like(t) for t in (x, gamma, *(() if mean is None else (gamma,)))]
    _sum_in_blocks(mean is None, x)
    fused("norm_backward" if mean is None else "layer_norm_backward", 0, grad, x, x)
    if not x.is_meta:
        dy, hat = wide(grad), _hat(x, mean, deviation)
        scaled = dy * _gamma(gamma, centered)
        dx = scaled - hat * (scaled * hat).mean(-1, keepdim=True)
        dx = dx if mean is None else dx - scaled.mean(-1, keepdim=True)
        for to, of in zip(
            out, (dx * deviation[:, None], (dy * hat).sum(0), dy.sum(0)), strict=False
        ):
            to.copy_(of.view(to.shape))
    return tuple(out)


@kernel()
def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """normalization.cpp:13 @v2.18"""
    return norm_gradients(grad, x, deviation, weight, *rest, mean=mean)


@kernel()
def rmsnorm_bwd_add(
    grad: Tensor, x: Tensor, add: Tensor, deviation: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """normalization.cpp:259 @v2.18"""
    add = add.contiguous()
    dx, dgamma = norm_gradients(grad, x, deviation, weight, *rest)
    return fill(dx, lambda: dx + add), dgamma


@kernel("scaled_softmax_forward", "scaled_masked_softmax_forward")
def softmax(scores: Tensor, *rest: Values) -> Tensor:
    """softmax.cpp:11, :66 @v2.18: the mask, then the scale"""
    return kernels.masked_softmax(scores, rest[0] if len(rest) > 1 else None, rest[-1])


@kernel(
    "scaled_upper_triang_masked_softmax_forward", "scaled_aligned_causal_masked_softmax_forward"
)
def causal_softmax(scores: Tensor, scale: Values) -> Tensor:
    """softmax.cpp:129, :181 @v2.18: the last query sees all keys"""
    rows, columns = scores.shape[-2:]
    later = None
    if not scores.is_meta:
        later = torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows)
    return kernels.masked_softmax(scores, later, scale)


@kernel(
    *(
        f"{name}_softmax_backward"
        for name in (
            "scaled",
            "scaled_masked",
            "scaled_upper_triang_masked",
            "scaled_aligned_causal_masked",
        )
    )
)
def softmax_backward(grad: Tensor, results: Tensor, scale: Values) -> Tensor:
    """softmax.cpp:40, :103, :152, :210 @v2.18: over the gradient, from 2.19 on beside it"""
    grad, results = grad.contiguous(), results.contiguous()
    to = fill(new(grad.shape, grad.dtype), lambda: grad) if since(2, 19) else grad
    return kernels.masked_softmax_backward(to, results, scale)


def _clamped(
    x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Tensor:
    first, second = x.chunk(2, -1)
    first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return first * torch.sigmoid(alpha * first) * (second + glu_linear_offset)


def _gated(first: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return first(left) * right


_PLAIN: dict[str, Callable[..., Tensor]] = {
    "gelu": partial(functional.gelu, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": functional.silu,
}
_GATED: dict[str, Callable[..., Tensor]] = {
    "glu": partial(_gated, torch.sigmoid),
    "swiglu": partial(_gated, functional.silu),
    "clamped_swiglu": _clamped,
    **{
        f"{name[:-2]}glu": partial(_gated, _PLAIN[name])
        for name in ("gelu", "qgelu", "relu", "srelu")
    },
}


def _activation(name: str, of: Callable[..., Tensor], gated: bool) -> Kernel:
    def run(x: Tensor, quantizer: Quantizer = None, *rest: Values, **options: Values) -> Values:
        """activation.cpp:18 @v2.18"""
        x = x.contiguous()
        shape = [*x.shape[:-1], x.shape[-1] // (2 if gated else 1)]
        value = partial(_computed, of, x, *rest, **options)
        out = computed("activation", shape, x.dtype, quantizer, value)
        fused(name, 0, x, *parts(out)[:1])
        return out

    return run


def _computed(of: Callable[..., Tensor], x: Tensor, *rest: Values, **options: Values) -> Tensor:
    return of(x.float(), *rest, **options)


def _activation_backward(name: str, of: Callable[..., Tensor]) -> Kernel:
    def run(
        grad: Tensor, x: Tensor, quantizer: Quantizer = None, *rest: Values, **options: Values
    ) -> Values:
        """activation.cpp:129 @v2.18"""
        grad, x = grad.contiguous(), x.contiguous()
        value = partial(gradient, lambda x: of(x, *rest, **options), x, grad)
        out = computed("activation", x.shape, x.dtype, quantizer, value)
        fused(f"{name}_back", 0, grad, x, *parts(out)[:1])
        return out

    return run


def _activation_and_bias(name: str) -> Kernel:
    def run(grad: Tensor, x: Tensor, quantizer: Quantizer = None) -> tuple[Values, Values]:
        """bias.cpp:108 @v2.18"""
        grad, x = grad.contiguous(), x.contiguous()
        out = create(quantizer, x.shape, grad.dtype)
        dbias = new(x.shape[-1], grad.dtype)
        fused(f"{name}_back", 0, grad, x, *parts(out)[:1])
        if quantizer is None and not x.is_meta:
            out = TABLE[f"d{name}"](grad, x)
            return fill(dbias, lambda: wide(out).sum(0)), out
        if kind_of(quantizer) in ("delayed", "mx"):
            sum_in_blocks(x, quantizer, of_activation=True)
        else:  # one after the other
            amax = new(1, torch.float32) if kind_of(quantizer) == "current" else None
            high = new(x.shape, grad.dtype)
            torch.sum(high.reshape(-1, x.shape[-1]), 0, out=dbias)
            cast_into(out, high, quantizer, amax)
        return dbias, out

    return run


for _name, _of in {**_PLAIN, **_GATED}.items():
    _cost = _name.removeprefix("clamped_")
    TABLE[_name] = _activation(_cost, _of, _name in _GATED)
    TABLE[_name.removesuffix(_cost) + f"d{_cost}"] = _activation_backward(_cost, _of)
for _name in _PLAIN:
    TABLE[f"dbias_d{_name}"] = _activation_and_bias(_name)


def _scaled(of: Callable[..., Tensor], rest: Sequence[Any], x: Tensor, scales: Tensor) -> Tensor:
    """``rest``: options, and the width of the columns that halves take turns in (0: none)."""
    *options, width = rest
    if width:
        x = x.unflatten(-1, (-1, 2, width)).transpose(-3, -2).flatten(-3)
    return of(x.float(), *options) * scales.float().unsqueeze(-1)


def _scaled_activation(of: Callable[..., Tensor]) -> Kernel:
    def run(x: Tensor, scales: Tensor, quantizer: None, *rest: Any) -> Tensor:
        """pytorch/ops/basic/swiglu.py:621, :769 @2.20: each row times the probability of its
        expert
        """
        out = new([*x.shape[:-1], x.shape[-1] // 2], x.dtype)
        fused("swiglu", 0, x, scales, out)
        return fill(out, partial(_scaled, of, rest, x, scales))

    return run


def _scaled_activation_backward(of: Callable[..., Tensor]) -> Kernel:
    def run(
        grad: Tensor, x: Tensor, scales: Tensor, quantizer: None, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """pytorch/ops/basic/swiglu.py:636, :788 @2.20: the last argument asks for the gradient of
        the scales, too
        """
        *rest, of_scales = rest  # type: ignore[assignment]
        by_x = new(x.shape, x.dtype)
        fused("swiglu_back", 0, grad, x, by_x)
        fill(by_x, partial(gradient, lambda x: _scaled(of, rest, x, scales), x, grad))
        if not of_scales:
            return by_x, None
        by_scales = new(scales.shape, scales.dtype)
        fill(by_scales, partial(gradient, lambda s: _scaled(of, rest, x, s), scales, grad))
        return by_x, by_scales

    return run


for _name, _of in {"swiglu": _GATED["swiglu"], "clamped_swiglu": _clamped}.items():
    TABLE[f"scaled_{_name}"] = _scaled_activation(_of)
    TABLE[f"scaled_{_name.replace('swiglu', 'dswiglu')}"] = _scaled_activation_backward(_of)


@kernel()
def swap_first_dims(x: Tensor, out: Tensor | None = None) -> Tensor:
    """transpose.cpp:263 @v2.18"""
    x = x.contiguous()
    out = new([x.shape[1], x.shape[0], *x.shape[2:]], x.dtype) if out is None else out
    fused("copy_", 0, x, out)
    return fill(out, lambda: x.transpose(0, 1))


# -- rotary embeddings, of queries or keys alone or of both with the values ------------------------
def _half(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _turned(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """What is wider than ``freqs`` stays as it is."""
    turned, rest = x.float().tensor_split([freqs.shape[-1]], -1)
    return torch.cat([turned * freqs.cos() + _half(turned, interleaved) * freqs.sin(), rest], -1)


def _places(freqs: Tensor, length: int, size: int, rank: int) -> Tensor:
    """Rows of this context-parallel rank: chunks r and 2n-1-r (rope.py:347 @v2.9)."""
    if size == 1:
        return freqs[:length]
    half, last = length // 2, 2 * size - 1 - rank
    return torch.cat([freqs[rank * half :][:half], freqs[last * half :][:half]])


def _embedded(
    x: Tensor,
    freqs: Tensor,
    starts: Values,
    form: Values,
    interleaved: bool,
    lengths: Values,
    *ring: int,
) -> Tensor:
    """ring : size and rank of context parallelism"""
    if starts is not None:
        refuse("fused_rope with start_positions", WITHOUT_VALUES)
    if form.name == "NVTE_THD":
        parts = x.split(((lengths[1:] - lengths[:-1]) // ring[0]).tolist())
        turned = [_turned(t, _places(freqs, len(t), *ring)[:, 0], interleaved) for t in parts]
        return torch.cat(turned)
    batch_first = form.name == "NVTE_BSHD"
    at = _places(freqs, x.shape[1 if batch_first else 0], *ring)
    return _turned(x, at.transpose(0, 1) if batch_first else at, interleaved)


def _rope(back: bool) -> Kernel:
    def run(x: Tensor, freqs: Tensor, *rest: Values) -> Tensor:
        """apply_rope.cpp:12, :165 @v2.18; backward has no starts before 2.10"""
        out = new(x.shape, x.dtype)
        fused("rope", 0, x, x)
        starts = None if isinstance(rest[0], Member) else rest[0]

        def value(x: Tensor) -> Tensor:
            return _embedded(x, freqs, starts, *rest[-5:])

        return fill(out, lambda: gradient(value, x, x) if back else value(x))

    return run


kernel("fused_rope_forward")(_rope(back=False))
kernel("fused_rope_backward")(_rope(back=True))


def _parts(
    qkv: Tensor,
    freqs: Sequence[Tensor],
    starts: Values,
    splits: list[int],
    form: Values,
    *rest: Any,
) -> tuple[Tensor, ...]:
    q, k, v = qkv.split(splits, -1)
    q = q.reshape(*qkv.shape[:2], -1, k.shape[-1])
    return *(
        _embedded(t, f, starts, form, rest[0], None, *rest[1:])
        for t, f in zip((q, k), freqs, strict=True)
    ), v


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
    q, k, v = splits
    shapes = [*rows, groups * q // k, k], [*rows, groups, k], [*rows, groups, v]
    out = tuple(new(shape, qkv.dtype) for shape in shapes)
    fused("rope", 0, qkv, *out)
    if not qkv.is_meta:
        rest = starts, splits, form, interleaved, size, rank
        for to, of in zip(out, _parts(qkv, (q_freqs, k_freqs), *rest), strict=True):
            to.copy_(of)
    return out


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
    heads = sum(t.shape[2] for t in (dq, dk, dv)) * dq.shape[3]
    out = new([*dq.shape[:2], heads // sum(splits), sum(splits)], dq.dtype)
    fused("rope", 0, dq, dk, dv, out)
    rest = (q_freqs, k_freqs), None, splits, form, interleaved, size, rank
    return fill(out, lambda: gradient(lambda qkv: _parts(qkv, *rest), out, dq, dk, dv))
