"""Recurrences of mamba-ssm and flash-linear-attention, on tensors that have values.

Solved for all tokens at once, in float32, differentiable by autograd; memory grows with the square
of the length.  Source: mamba_ssm 2.3 ops/triton/ssd_combined.py:ssd_chunk_scan_combined_ref; fla
0.4 ops/gated_delta_rule/naive.py.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    """Mamba 2's scan of ``x`` [batch, length, heads, size]; steps [batch, length, heads] are
    positive, b and c [batch, length, groups, states].
    """
    b, c = (_heads(one).repeat_interleave(x.shape[2] // one.shape[2], dim=1) for one in (b, c))
    scores = c @ b.mT * _decay(steps * a)
    out = (scores @ _heads(x * steps[..., None])).transpose(1, 2)
    if d is not None:
        out = out + x * (d if d.dim() == 2 else d[:, None])
    return (out if gate is None else out * silu(gate.float())).to(x.dtype)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Linear attention with a gated delta rule: q, k [batch, length, heads, size], v […, width].

    What a token adds to the state lacks what the state has of its key: a triangular system.
    """
    keys, rates, decay = _heads(k), _heads(beta[..., None]), _decay(g)
    inside = (rates * (keys @ keys.mT) * decay).tril(-1)
    added = torch.linalg.solve_triangular(
        inside, rates * _heads(v), upper=False, unitriangular=True
    )
    scores = _heads(q) @ keys.mT * decay * k.shape[-1] ** -0.5
    return (scores @ added).transpose(1, 2).to(v.dtype)


def _heads(values: torch.Tensor) -> torch.Tensor:
    """[batch, length, heads, …] as [batch, heads, length, …]."""
    return values.float().transpose(1, 2)


def _decay(log: torch.Tensor) -> torch.Tensor:
    """What is left at each token (row) of each before it: [batch, heads, length, length]."""
    whole = log.float().transpose(1, 2).cumsum(-1)
    return (whole[..., None] - whole[..., None, :]).tril().exp().tril()
