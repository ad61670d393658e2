"""Recurrences of mamba-ssm and flash-linear-attention, on tensors that have values.

Solved for all tokens at once, in float32, differentiable by autograd; memory grows with the square
of the length.  Source: mamba_ssm 2.3 ops/triton/ssd_combined.py:ssd_chunk_scan_combined_ref; fla
0.4 ops/gated_delta_rule/naive.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def scan(
    x: Tensor,
    steps: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    gate: Tensor | None,
) -> Tensor:
    """Mamba 2's scan of ``x`` [batch, length, heads, size]; steps [batch, length, heads] are
    positive, b and c [batch, length, groups, states].
    """
    heads = x.shape[2]
    # a linear attention: the decay between two tokens takes the place of softmax
    decay = _decay(steps * a)
    keys = _shared_by_heads(b, heads)
    queries = _shared_by_heads(c, heads)
    scores = queries @ keys.mT * decay
    added = _heads(x * steps[..., None])
    out = (scores @ added).transpose(1, 2)
    if d is not None:  # a number for each column of a head, or for each head
        factor = d if d.dim() == 2 else d[:, None]
        out = out + x * factor
    if gate is not None:
        out = out * silu(gate.float())
    return out.to(x.dtype)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Linear attention with a gated delta rule: q, k [batch, length, heads, size], v […, width].

    What a token adds to the state lacks what the state has of its key: a triangular system.
    """
    keys = _heads(k)
    rates = _heads(beta[..., None])
    decay = _decay(g)
    # row by row, later tokens depend on earlier ones: a triangular matrix is solved
    earlier = (rates * (keys @ keys.mT) * decay).tril(-1)
    wanted = rates * _heads(v)
    added = torch.linalg.solve_triangular(earlier, wanted, upper=False, unitriangular=True)
    scores = _heads(q) @ keys.mT * decay * k.shape[-1] ** -0.5
    out = (scores @ added).transpose(1, 2)
    return out.to(v.dtype)


def _heads(values: Tensor) -> Tensor:
    """[batch, length, heads, …] as [batch, heads, length, …]."""
    return values.float().transpose(1, 2)


def _shared_by_heads(of_groups: Tensor, heads: int) -> Tensor:
    """[batch, heads, length, states] of [batch, length, groups, states]; heads share a group."""
    heads_of_group = heads // of_groups.shape[2]
    return _heads(of_groups).repeat_interleave(heads_of_group, dim=1)


def _decay(log: Tensor) -> Tensor:
    """What is left at each token (row) of each before it: [batch, heads, length, length]."""
    since_start = log.float().transpose(1, 2).cumsum(-1)
    between = since_start[..., None] - since_start[..., None, :]
    return between.tril().exp().tril()
