"""Attention over a sequence that is spread over ranks.

``p2p`` passes keys and values round a ring: n-1 messages of k and v together in forward; in
backward the same plus their gradients, one round behind (pytorch/attention/dot_product_attention/
context_parallel.py, AttnFuncWithCPAndKVP2P @v2.9).  Saved: q, the k and v received last, out, fp32
softmax statistics (context_parallel.py:1785-1795).  All n received buffers live through forward.
``all_gather`` gathers k and v, and saves only the own ones (context_parallel.py:2837).

A causal sequence is dealt in 2n chunks, rank r holding chunks r and 2n-1-r.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from megatron_prism.tiers.virtual_te.comm import (
    gather_along_first_dim,
    group_rank,
    group_size,
    reduce_scatter_along_first_dim,
)
from megatron_prism.tiers.virtual_te.unsupported import refuse

__all__ = ["gathered_attention", "ring_attention"]


def _rows_first(t: torch.Tensor, form: str) -> torch.Tensor:
    """[s, b, h, d], for either layout."""
    return t.transpose(0, 1) if form == "bshd" else t


def _positions(length: int, rank: int, size: int) -> torch.Tensor:
    half = length // 2
    chunk = torch.arange(half)
    return torch.cat([chunk + rank * half, chunk + (2 * size - 1 - rank) * half])


def _scores(q: torch.Tensor, k: torch.Tensor, o: Any, mine: int, theirs: int, size: int) -> Any:
    """fp32 [b, h, sq, sk] of this rank's queries and rank ``theirs``' keys, masked."""
    many = q.shape[2] // k.shape[2]
    keys = k.float().repeat_interleave(many, dim=2)
    scores = torch.einsum("sbhd,tbhd->bhst", q.float(), keys) * o.scale
    if "causal" in o.mask_type:
        later = (
            _positions(k.shape[0], theirs, size)[None]
            > (_positions(q.shape[0], mine, size)[:, None])
        )
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _forward_values(q: Any, blocks: list[Any], o: Any, rank: int) -> tuple[Any, Any]:
    """(out [s, b, h, d], statistics [b, h, s]) over ``blocks[origin] = (k, v)``."""
    size = len(blocks)
    scores = [_scores(q, k, o, rank, i, size) for i, (k, _) in enumerate(blocks)]
    lse = torch.cat(scores, dim=-1).logsumexp(-1)
    out = 0.0
    for score, (k, v) in zip(scores, blocks, strict=True):
        values = v.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        out = out + torch.einsum("bhst,tbhd->sbhd", (score - lse[..., None]).exp(), values)
    return out.to(q.dtype), lse


def _block_gradients(
    q: Any, k: Any, v: Any, out: Any, grad: Any, lse: Any, o: Any, ranks: tuple[int, int, int]
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of one block in fp32, given the statistics of the whole row."""
    groups, many = k.shape[2], q.shape[2] // k.shape[2]
    probs = (_scores(q, k, o, *ranks) - lse[..., None]).exp()
    g = grad.float()
    delta = (g * out.float()).sum(-1).permute(1, 2, 0)[..., None]
    values, keys = (t.float().repeat_interleave(many, dim=2) for t in (v, k))
    dscores = probs * (torch.einsum("sbhd,tbhd->bhst", g, values) - delta) * o.scale
    dq = torch.einsum("bhst,tbhd->sbhd", dscores, keys)
    dk = torch.einsum("bhst,sbhd->tbhd", dscores, q.float())
    dv = torch.einsum("bhst,sbhd->tbhd", probs, g)
    fold = [t.unflatten(2, (groups, many)).sum(3) for t in (dk, dv)]
    return dq, fold[0], fold[1]


def _exchange(send: torch.Tensor, to: int, recv: torch.Tensor, source: int, group: Any) -> None:
    """One ring step, both messages in one batch (flash_attn_p2p_communicate @v2.9)."""
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, send, to, group), dist.P2POp(dist.irecv, recv, source, group)]
    )
    for work in works:
        work.wait()


def _check(o: Any, q: torch.Tensor) -> None:
    if o.form == "thd" and not q.is_meta:
        refuse("packed sequences with context parallelism on real values", "use --prism-tier meta")
    if o.dropout and not q.is_meta:
        refuse("attention dropout with context parallelism", "--attention-dropout 0")
    if o.mask_type == "arbitrary":
        refuse("an arbitrary mask with context parallelism")


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, o: Any, group: Any, ranks: Any) -> torch.Tensor:
        size, me = group_size(group), group_rank(group)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.shapes = (k.shape, v.shape)
        buffers = [torch.cat([k.view(-1), v.view(-1)])]
        for _ in range(size - 1):
            buffers.append(torch.empty_like(buffers[-1]))
            _exchange(buffers[-2], ranks[(me + 1) % size], buffers[-1], ranks[me - 1], group)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        rows = q.numel() // q.shape[-1]
        lse = q.new_empty(rows, dtype=torch.float32)
        if not q.is_meta:
            blocks: list[Any] = [None] * size
            for step, buffer in enumerate(buffers):
                blocks[(me - step) % size] = _pair(buffer, ctx.shapes, o.form)
            rows_out, lse = _forward_values(_rows_first(q, o.form), blocks, o, me)
            out.copy_(_rows_first(rows_out, o.form))
        ctx.save_for_backward(q, buffers[-1], out, lse)
        ctx.o, ctx.group, ctx.ranks = o, group, ranks
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, kv, out, lse = ctx.saved_tensors
        o, group, ranks = ctx.o, ctx.group, ctx.ranks
        size, me = group_size(group), group_rank(group)
        to, source = ranks[me - 1], ranks[(me + 1) % size]
        grad, dq, dkv = grad.contiguous(), q.new_empty(q.shape), torch.zeros_like(kv)
        total = 0.0
        for step in range(size):
            held = kv  # of rank me + 1 + step
            if step < size - 1:
                kv = torch.empty_like(held)
                _exchange(held, to, kv, source, group)
            if step:
                arrived = torch.empty_like(dkv)
                _exchange(dkv, to, arrived, source, group)
                dkv = arrived
            if not q.is_meta:
                k, v = _pair(held, ctx.shapes, o.form)
                args = [_rows_first(t, o.form) for t in (q, out, grad)]
                part, dk, dv = _block_gradients(
                    args[0], k, v, args[1], args[2], lse, o, (me, (me + 1 + step) % size, size)
                )
                total = total + part
                flat = [_rows_first(t, o.form).reshape(-1) for t in (dk, dv)]
                dkv = dkv + torch.cat(flat).to(dkv.dtype)
        if not q.is_meta:
            dq.copy_(_rows_first(total, o.form))
        sizes = [s.numel() for s in ctx.shapes]
        dk, dv = (t.view(s) for t, s in zip(dkv.split(sizes), ctx.shapes, strict=True))
        return dq, dk, dv, None, None, None


def _pair(buffer: torch.Tensor, shapes: Any, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = buffer.split([s.numel() for s in shapes])
    return _rows_first(k.view(shapes[0]), form), _rows_first(v.view(shapes[1]), form)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, o: Any, group: Any) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.o, ctx.group = o, group
        everyone = _gather(k, v, o, group)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.numel() // q.shape[-1], dtype=torch.float32)
        if not q.is_meta:
            rows = _rows_first(q, o.form)
            rows_out, lse = _forward_values(rows, everyone, o, group_rank(group))
            out.copy_(_rows_first(rows_out, o.form))
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        o, group = ctx.o, ctx.group
        me, size = group_rank(group), group_size(group)
        everyone = _gather(k, v, o, group)
        grad, dq = grad.contiguous(), q.new_empty(q.shape)
        rows_k, rows_v = (_rows_first(t, o.form) for t in (k, v))
        dk, dv = (t.new_empty(size * t.shape[0], *t.shape[1:]) for t in (rows_k, rows_v))
        if not q.is_meta:
            args, total = [_rows_first(t, o.form) for t in (q, out, grad)], 0.0
            for i, (block_k, block_v) in enumerate(everyone):
                part, part_k, part_v = _block_gradients(
                    args[0], block_k, block_v, args[1], args[2], lse, o, (me, i, size)
                )
                total = total + part
                dk.chunk(size)[i].copy_(part_k)
                dv.chunk(size)[i].copy_(part_v)
            dq.copy_(_rows_first(total, o.form))
        dk, dv = (
            _rows_first(reduce_scatter_along_first_dim(t, group)[0], o.form) for t in (dk, dv)
        )
        return dq, dk, dv, None, None


def _gather(k: torch.Tensor, v: torch.Tensor, o: Any, group: Any) -> list[Any]:
    size = group_size(group)
    all_k, all_v = (
        gather_along_first_dim(_rows_first(t, o.form).contiguous(), group)[0] for t in (k, v)
    )
    return list(zip(all_k.chunk(size), all_v.chunk(size), strict=True))


def ring_attention(q: Any, k: Any, v: Any, o: Any, group: Any, ranks: Any) -> torch.Tensor:
    """Keys and values go round the ring of ``ranks``."""
    _check(o, q)
    ranks = ranks if ranks is not None else dist.get_process_group_ranks(group)
    return _Ring.apply(q, k, v, o, group, ranks)


def gathered_attention(q: Any, k: Any, v: Any, o: Any, group: Any, ranks: Any) -> torch.Tensor:
    """Keys and values are gathered."""
    _check(o, q)
    return _Gathered.apply(q, k, v, o, group)
