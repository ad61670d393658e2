"""The rotary embedding, of queries or keys alone or of both with the values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.enumerations import Member
from megatron_prism.runtime.te_kernels.table import Values, fill, kernel, new, refuse


def _half(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _turned(x: Tensor, freqs: Tensor, interleaved: bool, back: bool) -> Tensor:
    """What is wider than ``freqs`` stays as it is."""
    turned, sin = x[..., : freqs.shape[-1]].float(), freqs.sin()
    half = -_half(turned * sin, interleaved) if back else _half(turned, interleaved) * sin
    return torch.cat([turned * freqs.cos() + half, x[..., freqs.shape[-1] :].float()], -1)


def _places(freqs: Tensor, length: int, size: int, rank: int) -> Tensor:
    """Rows of this context-parallel rank: chunks r and 2n-1-r (rope.py:347 @v2.9)."""
    if size == 1:
        return freqs[:length]
    half, last = length // 2, 2 * size - 1 - rank
    return torch.cat([freqs[rank * half :][:half], freqs[last * half :][:half]])


def _embedded(
    x: Tensor, freqs: Tensor, starts: Values, form: Values, lengths: Values, ring: Sequence[int],
    how: tuple[bool, bool],
) -> Tensor:  # fmt: skip
    """ring : size and rank of context parallelism; how : interleaved, and back"""
    if starts is not None:
        refuse("fused_rope with start_positions, with values")
    if form.name == "NVTE_THD":
        parts = x.split(((lengths[1:] - lengths[:-1]) // ring[0]).tolist())
        turned = [_turned(t, _places(freqs, len(t), *ring)[:, 0], *how) for t in parts]
        return torch.cat(turned)
    batch_first = form.name == "NVTE_BSHD"
    at = _places(freqs, x.shape[1 if batch_first else 0], *ring)
    return _turned(x, at.transpose(0, 1) if batch_first else at, *how)


def _rope(name: str, back: bool) -> None:
    def run(x: Tensor, freqs: Tensor, *rest: Values) -> Tensor:
        """apply_rope.cpp:12, :165 @v2.18; backward has no starts before 2.10"""
        out = new(x.shape, x.dtype)
        fused("rope", 0, x, x)
        starts = None if isinstance(rest[0], Member) else rest[0]
        form, interleaved, lengths, *ring = rest[-5:]
        how = interleaved, back
        return fill(out, lambda: _embedded(x, freqs, starts, form, lengths, ring, how))

    kernel(name)(run)


_rope("fused_rope_forward", back=False)
_rope("fused_rope_backward", back=True)


@kernel()
def fused_qkv_rope_forward(
    qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, starts: Values, splits: list[int],
    form: Values = None, interleaved: bool = False, size: int = 1, rank: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """apply_rope.cpp:106 @v2.18"""
    *rows, groups, _ = qkv.shape
    q, k, v = splits
    shapes = [*rows, groups * q // k, k], [*rows, groups, k], [*rows, groups, v]
    out = tuple(new(shape, qkv.dtype) for shape in shapes)
    fused("rope", 0, qkv, *out)
    if not qkv.is_meta:
        rest = starts, form, None, (size, rank), (interleaved, False)
        first, second, third = qkv.split(splits, -1)
        fill(out[0], lambda: _embedded(first.reshape(shapes[0]), q_freqs, *rest))
        fill(out[1], lambda: _embedded(second, k_freqs, *rest))
        fill(out[2], lambda: third)
    return out


@kernel()
def fused_qkv_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q_freqs: Tensor, k_freqs: Tensor, splits: list[int],
    form: Values = None, interleaved: bool = False, size: int = 1, rank: int = 0,
) -> Tensor:  # fmt: skip
    """apply_rope.cpp:263 @v2.18"""
    heads = sum(t.shape[2] for t in (dq, dk, dv)) * dq.shape[3]
    out = new([*dq.shape[:2], heads // sum(splits), sum(splits)], dq.dtype)
    fused("rope", 0, dq, dk, dv, out)

    def value() -> Tensor:
        rest = None, form, None, (size, rank), (interleaved, True)
        parts = [_embedded(dq, q_freqs, *rest), _embedded(dk, k_freqs, *rest), dv.float()]
        return torch.cat([t.reshape(*out.shape[:3], -1) for t in parts], -1)

    return fill(out, value)
