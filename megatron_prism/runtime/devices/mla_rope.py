"""Megatron's kernels for the rotary embedding of multi-latent attention, without a GPU.

Its autograd functions stay as they are, and so do their allocations; only the four triton kernels
that they launch are stood in for (core/fusions/fused_mla_yarn_rope_apply.py @0.16.1 and @0.19.0).
Called as ``kernel[grid](…)`` with the arguments of the real ones: on tensors with values the same
sums, on shapes nothing but what the kernel would have read and written.  All work in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_prism.runtime.devices import work

__all__ = ["KERNELS"]


class _Kernel:
    """``kernel[grid](tensors…, numbers…)``."""

    def __init__(self, name: str, run: Callable[..., None]) -> None:
        self.name, self.run = name, run

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self

    def __call__(self, *args: object) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if tensors[0].is_meta:
            work.fused(self.name, 0, *tensors)
        else:
            with torch.no_grad():
                self.run(*args)


def _tokens(
    total: int, batch: int | None, starts: torch.Tensor | None, cp_rank: int, cp_size: int
) -> torch.Tensor:
    """int64 [total]: the place in its sequence of each row; of packed sequences under context
    parallelism a rank holds an early and a late part of each."""
    rows = torch.arange(total)
    if starts is None:
        assert batch is not None
        return rows // batch
    found = torch.empty(total, dtype=torch.int64)
    bounds = [int(start) // cp_size for start in starts.tolist()]
    for first, last in zip(bounds, bounds[1:], strict=False):
        length = last - first
        place = torch.arange(length)
        if cp_size > 1:
            late = place - length // 2 + (2 * cp_size - cp_rank - 1) * length // 2
            place = torch.where(place < length // 2, place + cp_rank * length // 2, late)
        found[first:last] = place
    return found


def _halves(table: torch.Tensor, tokens: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Left and right half of the rows of cos or sin, [total, 1, width / 2] each."""
    rows = table.reshape(-1, width)[tokens.to(table.device)].unsqueeze(1)
    return rows[..., : width // 2], rows[..., width // 2 :]


def _turned(
    pairs: torch.Tensor, cos: tuple[torch.Tensor, ...], sin: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Interleaved pairs, rotated, as two halves."""
    one, other = pairs[..., 0::2], pairs[..., 1::2]
    return torch.cat([one * cos[0] - other * sin[0], other * cos[1] + one * sin[1]], dim=-1)


def _turned_back(
    halves: torch.Tensor, cos: tuple[torch.Tensor, ...], sin: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """The gradient: two halves as interleaved pairs."""
    left, right = halves.chunk(2, dim=-1)
    one, other = left * cos[0] + right * sin[1], right * cos[1] - left * sin[0]
    return torch.stack([one, other], dim=-1).flatten(-2)


def _query(turn: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """The kernel of the query, which turns the last part of each head in place: there or back."""

    def run(
        q: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        head: int,
        width: int,
        heads: int,
        batch: int | None,
        count: int | None,
        starts: torch.Tensor | None,
        *more: int,
    ) -> None:
        tokens = _tokens(len(q), batch, starts, *more[-2:])
        turned = _halves(cos, tokens, width), _halves(sin, tokens, width)
        q[..., head:] = turn(q[..., head:], *turned)

    return run


def _forward_kv(
    kv: torch.Tensor,
    shared: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    width: int,
    k_dim: int,
    v_dim: int,
    heads: int,
    batch: int | None,
    count: int | None,
    starts: torch.Tensor | None,
    *more: int,
) -> None:
    tokens = _tokens(len(kv), batch, starts, *more[-2:])
    table = _halves(cos, tokens, width), _halves(sin, tokens, width)
    key[..., :k_dim], value[...] = kv[..., :k_dim], kv[..., k_dim:]
    key[..., k_dim:] = _turned(shared.reshape(len(kv), 1, width), *table)


def _backward_kv(
    dk: torch.Tensor,
    dv: torch.Tensor,
    d_kv: torch.Tensor,
    d_shared: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    width: int,
    k_dim: int,
    v_dim: int,
    heads: int,
    batch: int | None,
    count: int | None,
    starts: torch.Tensor | None,
    *more: int,
) -> None:
    tokens = _tokens(len(dk), batch, starts, *more[-2:])
    table = _halves(cos, tokens, width), _halves(sin, tokens, width)
    d_kv[..., :k_dim], d_kv[..., k_dim:] = dk[..., :k_dim], dv
    summed = dk[..., k_dim:].float().sum(dim=1, keepdim=True).to(d_shared.dtype)
    d_shared[...] = _turned_back(summed, *table).reshape(d_shared.shape)


KERNELS = {
    f"rotary_{name}_kernel": _Kernel(f"rotary_{name}_kernel", run)
    for name, run in (
        ("fwd_q", _query(_turned)),
        ("bwd_q", _query(_turned_back)),
        ("fwd_kv", _forward_kv),
        ("bwd_kv", _backward_kv),
    )
}
