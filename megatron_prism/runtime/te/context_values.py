"""What does a rank compute of an attention whose sequence is spread over ranks?

Plain torch in fp32, block by block: one block is this rank's queries against the keys of one rank.
A sequence is dealt in 2n chunks, rank r holding chunks r and 2n-1-r.  Tensors are [s, b, h, d].
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

__all__ = ["block_gradients", "dropout_seed", "forward_values", "positions"]


Pair = tuple[torch.Tensor, torch.Tensor]  # k and v of one rank


def positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Where in the sequence the ``length`` rows of ``rank`` stand."""
    half = length // 2
    chunk = torch.arange(half)
    return torch.cat([chunk + rank * half, chunk + (2 * size - 1 - rank) * half])


def dropout_seed(o: SimpleNamespace) -> int | None:
    """Drawn once from the job's stream: forward and backward walk the blocks in other orders."""
    return int(torch.randint(1 << 62, ())) if o.dropout else None


def _kept(
    scores: torch.Tensor, o: SimpleNamespace, seed: int | None, theirs: int
) -> torch.Tensor | float:
    """What dropout multiplies the probabilities of one block by."""
    if seed is None:
        return 1.0
    generator = torch.Generator().manual_seed(seed + theirs)
    keep = torch.rand(scores.shape, generator=generator) >= o.dropout
    return keep / (1.0 - o.dropout)


def _scores(
    q: torch.Tensor, k: torch.Tensor, o: SimpleNamespace, mine: int, theirs: int, size: int
) -> torch.Tensor:
    """fp32 [b, h, sq, sk] of this rank's queries and rank ``theirs``' keys, masked."""
    many = q.shape[2] // k.shape[2]
    keys = k.float().repeat_interleave(many, dim=2)
    scores = torch.einsum("sbhd,tbhd->bhst", q.float(), keys) * o.scale
    if "causal" in o.mask_type:
        later = (
            positions(k.shape[0], theirs, size)[None] > (positions(q.shape[0], mine, size)[:, None])
        )
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def forward_values(
    q: torch.Tensor, blocks: Sequence[Pair], o: SimpleNamespace, rank: int, seed: int | None = None
) -> Pair:
    """(out [s, b, h, d], statistics [b, h, s]) over ``blocks[origin] = (k, v)``."""
    size = len(blocks)
    scores = [_scores(q, k, o, rank, i, size) for i, (k, _) in enumerate(blocks)]
    lse = torch.cat(scores, dim=-1).logsumexp(-1)
    out: torch.Tensor | float = 0.0
    for i, (score, (_, v)) in enumerate(zip(scores, blocks, strict=True)):
        values = v.float().repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        probs = (score - lse[..., None]).exp() * _kept(score, o, seed, i)
        out = out + torch.einsum("bhst,tbhd->sbhd", probs, values)
    assert isinstance(out, torch.Tensor)
    return out.to(q.dtype), lse


def block_gradients(
    q: torch.Tensor,
    kv: Pair,
    out: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    o: SimpleNamespace,
    ranks: tuple[int, int, int],
    seed: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of one block in fp32, given the statistics of the whole row.

    ranks : this rank, the rank whose k and v these are, ranks in all
    """
    k, v = kv
    groups, many = k.shape[2], q.shape[2] // k.shape[2]
    probs = (_scores(q, k, o, *ranks) - lse[..., None]).exp()
    kept = _kept(probs, o, seed, ranks[1])
    g = grad.float()
    delta = (g * out.float()).sum(-1).permute(1, 2, 0)[..., None]
    values, keys = (t.float().repeat_interleave(many, dim=2) for t in (v, k))
    dscores = probs * (torch.einsum("sbhd,tbhd->bhst", g, values) * kept - delta) * o.scale
    dq = torch.einsum("bhst,tbhd->sbhd", dscores, keys)
    dk = torch.einsum("bhst,sbhd->tbhd", dscores, q.float())
    dv = torch.einsum("bhst,sbhd->tbhd", probs * kept, g)
    fold = [t.unflatten(2, (groups, many)).sum(3) for t in (dk, dv)]
    return dq, fold[0], fold[1]
