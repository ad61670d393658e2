"""Attention over a sequence that is spread over ranks (ring and all-to-all).

Line numbers are of pytorch/attention/dot_product_attention/context_parallel.py @v2.9.

``p2p``        keys and values go round a ring (1060): n-1 messages of k and v in forward, n in
               backward: k and v, then both with their gradients, at last the gradients alone
               (2149-2178).  Saved: q, the k and v received last, out, fp32 softmax statistics
               (1785-1795).  All n received buffers live through forward.
``all_gather`` k and v are gathered (2587) and only the own ones saved, with a copy of each half of
               the output (2837-2848).
``a2a``        heads are spread instead of rows (3094), and attention is that of one rank.
``a2a+p2p``    heads over the first group, rows over the ring of the second (1106).  In backward out
               and its gradient are spread anew (2113); releases after v2.9 keep out spread.

A causal sequence is dealt in 2n chunks, rank r holding chunks r and 2n-1-r.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.distributed import (
    gather_along_first_dim,
    group_rank,
    group_size,
    reduce_scatter_along_first_dim,
)
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads, Group, Groups

Change = Callable[[torch.Tensor], torch.Tensor]


def _order(size: int, device: torch.device) -> torch.Tensor:
    """Arrived chunk at each place of the sequence: 0 2 4 .. 5 3 1."""
    ids = [*range(0, 2 * size, 2), *range(2 * size - 1, 0, -2)]
    return torch.tensor(ids, dtype=torch.int32, device=device)


def _order_back(size: int, device: torch.device) -> torch.Tensor:
    """Chunk of the sequence that leaves at each place: 0 last 1 last-but-one .."""
    ids = [i for rank in range(size) for i in (rank, 2 * size - 1 - rank)]
    return torch.tensor(ids, dtype=torch.int32, device=device)


def _exchange(
    tensors: list[torch.Tensor], prepare: Change, finish: Change, group: Group
) -> list[torch.Tensor]:
    inputs, outputs = list(tensors), list(tensors)
    works: list[dist.Work] = []
    for i in range(len(inputs) + 2):
        if 0 < i <= len(inputs):
            outputs[i - 1] = torch.empty_like(inputs[i - 1])
            work = dist.all_to_all_single(outputs[i - 1], inputs[i - 1], group=group, async_op=True)
            works.append(work)
        if i > 1:
            works[i - 2].wait()
            outputs[i - 2] = finish(outputs[i - 2])
        if i < len(inputs):
            inputs[i] = prepare(inputs[i])
    return outputs


def to_heads(tensors: list[torch.Tensor], form: str, group: Group) -> list[torch.Tensor]:
    """All rows of this rank's share of the heads."""
    size, dim = group_size(group), form.index("s")
    ids = _order(size, tensors[0].device)
    for t in tensors:
        if t.shape[-2] % size:
            refuse(f"{t.shape[-2]} attention heads over {size} context-parallel ranks")

    def prepare(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-2, (size, -1)).movedim(-3, 0).contiguous()

    def finish(x: torch.Tensor) -> torch.Tensor:
        x = x.movedim(0, dim).contiguous()
        x = x.view(*x.shape[:dim], 2 * size, -1, *x.shape[dim + 2 :])
        return torch.index_select(x, dim, ids).flatten(dim, dim + 1)

    return _exchange(tensors, prepare, finish, group)


def to_rows(tensors: list[torch.Tensor], form: str, group: Group) -> list[torch.Tensor]:
    """This rank's rows of all heads."""
    size, dim = group_size(group), form.index("s")
    ids = _order_back(size, tensors[0].device)

    def prepare(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(dim, (2 * size, -1)).movedim(dim, 0).contiguous()
        return torch.index_select(x, 0, ids).unflatten(0, (size, 2))

    def finish(x: torch.Tensor) -> torch.Tensor:
        x = x.movedim(0, -3).movedim(0, dim).contiguous()
        return x.flatten(-3, -2).flatten(dim, dim + 1)

    return _exchange(tensors, prepare, finish, group)


class ToHeads(torch.autograd.Function):
    """Three tensors at once, so that their gradients leave in the same order."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        form: str,
        group: Group,
    ) -> tuple[torch.Tensor, ...]:
        ctx.form, ctx.group = form, group
        return tuple(to_heads([q, k, v], form, group))

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> Grads:
        return (*to_rows(list(grads), ctx.form, ctx.group), None, None)


class FromHeads(torch.autograd.Function):
    """The output's way back."""

    @staticmethod
    def forward(ctx: AutogradContext, out: torch.Tensor, form: str, group: Group) -> torch.Tensor:
        ctx.form, ctx.group = form, group
        return to_rows([out], form, group)[0]

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        return to_heads([grad], ctx.form, ctx.group)[0], None, None


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


def announce_attention(
    name: str,
    products: int,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    out: torch.Tensor,
    o: SimpleNamespace,
) -> None:
    """One kernel of ``products`` matrix products per head (2 forward, 5 backward) on ``meta``.

    A causal mask halves them; a window leaves as many keys a query as it is wide.  Ranks of a
    context-parallel ring hold the first and the last part of the sequence each, so that every block
    costs half a full one (Megatron's load balancing).  Dropout and a fixed order of sums are in the
    kernel's name.
    """
    if not q.is_meta or k is None or v is None:
        return
    heads, size = q.shape[-2], q.shape[-1]
    if o.form == "thd":
        pairs = q.shape[0] * k.shape[0]  # an upper bound: sequences do not see each other
    else:
        sequence, batch = o.form.index("s"), o.form.index("b")
        pairs = q.shape[batch] * q.shape[sequence] * k.shape[sequence]
    if "causal" in o.mask_type:
        pairs //= 2
    left, right = getattr(o, "window", (-1, -1))
    if left >= 0:
        causal = "causal" in o.mask_type
        width = left + 1 + (0 if causal else k.shape[0] if right < 0 else right)
        queries = q.shape[0] if o.form == "thd" else q.shape[0] * q.shape[1]
        pairs = min(pairs, queries * width)
    if getattr(o, "dropout", 0):
        name += "_dropout"
    if products > 2:
        name += "_deterministic" * is_deterministic()
        q.new_empty(_workspace(q, k, v, o), dtype=torch.uint8)
    fused(name, products * heads * pairs * (size + v.shape[-1]), q, k, v, out)


_PROCESSORS = 132  # of a Hopper GPU


def _workspace(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: SimpleNamespace) -> int:
    """Bytes that one backward takes from torch's allocator while it runs.

    cuDNN on Hopper: the gradient of q in fp32, or where sums have one order that of the softmax,
    whole and in tiles; and one number a row (cudnn-frontend, scaled_dot_product_flash_attention.h,
    get_fe_workspace_size_node @1.32).  flash-attn: the first, once for so many blocks of processors
    where sums have one order (csrc/flash_attn/flash_api.cpp, mha_bwd @2.8); rows in tiles of 128.
    Gradients of k and v are there for every head of q first.
    """
    heads, size = q.shape[-2:]
    if o.form == "thd":  # how long the sequences are, nobody knows
        batch, rows, columns = 1, q.shape[0], k.shape[0]
    else:
        sequence, batch = o.form.index("s"), q.shape[o.form.index("b")]
        rows, columns = q.shape[sequence], k.shape[sequence]
    whole, flash = batch * heads, getattr(o, "kernel", "") == "flash"
    fixed = is_deterministic() and o.form != "thd"
    if flash:
        rows, size = _up(rows, 128), _up(size, 32 if size <= 128 else 64)
    copies = -(-_PROCESSORS // whole) if flash and fixed else 1
    taken = 4 * whole * rows * (copies * size + 1)
    if fixed and not flash:
        taken = 2 * whole * _up(rows, 64) * _up(columns, 128) + 4 * whole * rows
    if k.shape[-2] != heads:
        taken += q.element_size() * whole * columns * (k.shape[-1] + v.shape[-1])
    return taken


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def is_deterministic() -> bool:
    """Whether gradients are summed in one order (dot_product_attention.py,
    DotProductAttention.__init__ @v2.9)."""
    asked = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
    return asked or torch.are_deterministic_algorithms_enabled()


COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def context_size(group: Groups) -> int:
    """Ranks over which a sequence is spread; ``group`` is one group or a list of two."""
    size = 1
    for one in group if isinstance(group, (list, tuple)) else [group]:
        size *= group_size(one)
    return size


def _rows_first(t: torch.Tensor, form: str) -> torch.Tensor:
    """[s, b, h, d], for either layout."""
    return t.transpose(0, 1) if form == "bshd" else t


def _in_batches(size: int) -> bool:
    """Whether a step's two messages are one batch (1112): a ring of two before Blackwell."""
    old = not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0)
    return bool(int(os.getenv("NVTE_BATCH_MHA_P2P_COMM", "0"))) or (old and size == 2)


class _Neighbours:
    """The ring as one rank sees it: ``step`` starts both messages, even ranks send first (59)."""

    def __init__(self, group: Group, ranks: Sequence[int], heads: Group) -> None:
        self.group, self.ranks = group, ranks
        self.size, self.me = group_size(group), group_rank(group)
        self.spread, self.offset = group_size(heads), group_rank(heads)
        self.batched = _in_batches(self.size)

    def _at(self, place: int) -> int:
        return self.ranks[place % self.size * self.spread + self.offset]

    def step(self, send: torch.Tensor, recv: torch.Tensor, way: int) -> list[dist.Work]:
        """Handles of: ``send`` to the neighbour ``way`` (1 or -1) along, ``recv`` from the other"""
        calls = [
            (dist.isend, send, self._at(self.me + way)),
            (dist.irecv, recv, self._at(self.me - way)),
        ]
        if self.me % 2:
            calls.reverse()
        if self.batched:
            return dist.batch_isend_irecv([dist.P2POp(*call, self.group) for call in calls])
        works = [call(tensor, peer, self.group) for call, tensor, peer in calls]
        return [work for work in works if work is not None]  # all: this rank is a member


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _pair(
    buffer: torch.Tensor, shapes: Sequence[torch.Size], form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = buffer.split([s.numel() for s in shapes])
    return _rows_first(k.view(shapes[0]), form), _rows_first(v.view(shapes[1]), form)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: SimpleNamespace,
        ring: _Neighbours,
        heads: Group,
    ) -> torch.Tensor:
        if heads is not None:
            q, k, v = to_heads([q, k, v], o.form, heads)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.shapes, ctx.seed = (k.shape, v.shape), None
        buffers, works = [torch.cat([k.view(-1), v.view(-1)])], list[dist.Work]()
        for _ in range(ring.size - 1):
            _wait(works)
            buffers.append(torch.empty_like(buffers[-1]))
            works = ring.step(buffers[-2], buffers[-1], 1)
            announce_attention("attention", 2, q, k, v, q, o)
        _wait(works)
        announce_attention("attention", 2, q, k, v, q, o)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.numel() // q.shape[-1], dtype=torch.float32)
        if not q.is_meta:
            ctx.seed = dropout_seed(o)
            blocks: list[Pair] = [(q, q)] * ring.size  # each is set below
            for step, buffer in enumerate(buffers):
                blocks[(ring.me - step) % ring.size] = _pair(buffer, ctx.shapes, o.form)
            rows_out, lse = forward_values(_rows_first(q, o.form), blocks, o, ring.me, ctx.seed)
            out.copy_(_rows_first(rows_out, o.form))
        if heads is not None:
            (out,) = to_rows([out], o.form, heads)
        ctx.save_for_backward(q, buffers[-1], out, lse)
        ctx.o, ctx.ring, ctx.heads = o, ring, heads
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        q, kv, out, lse = ctx.saved_tensors
        o, ring, heads = ctx.o, ctx.ring, ctx.heads
        grad, dq = grad.contiguous(), torch.empty_like(q)
        buffers = [kv.new_empty(2, *kv.shape) for _ in range(2)]  # [k and v, their gradients]
        buffers[0][0].copy_(kv)
        if heads is not None:
            out, grad = to_heads([out, grad], o.form, heads)
        rows_q, *rows = (_rows_first(t, o.form) for t in (q, out, grad))
        total: torch.Tensor | float = 0.0
        for step in range(ring.size):
            held, other = buffers[step % 2], buffers[(step + 1) % 2]
            # gradients of k and v travel one step behind them
            parts = slice(1 if step == ring.size - 1 else 0, 1 if step == 0 else 2)
            works = ring.step(*_same(held[parts], other[parts]), -1)
            mine: Sequence[torch.Tensor] | None = None
            k, v = (kv.new_empty(shape) for shape in ctx.shapes) if q.is_meta else (None, None)
            announce_attention("attention_backward", 5, q, k, v, grad, o)
            if not q.is_meta:
                origin = (ring.me + 1 + step) % ring.size
                kv_here, places = _pair(held[0], ctx.shapes, o.form), (ring.me, origin, ring.size)
                part, *mine = block_gradients(
                    rows_q, kv_here, rows[0], rows[1], lse, o, places, ctx.seed
                )
                total = total + part
            _wait(works)
            if mine is not None:
                flat = torch.cat([_rows_first(t, o.form).reshape(-1) for t in mine])
                other[1].copy_(flat if step == 0 else other[1] + flat)
        if isinstance(total, torch.Tensor):
            dq.copy_(_rows_first(total, o.form))
        sizes = [s.numel() for s in ctx.shapes]
        dkv = buffers[ring.size % 2][1].split(sizes)
        grads = [dq, *(t.view(s) for t, s in zip(dkv, ctx.shapes, strict=True))]
        if heads is not None:
            grads = to_rows(grads, o.form, heads)
        return (*grads, None, None, None)


def _same(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """A message of one part has no leading dimension (2160)."""
    return [t[0] if t.shape[0] == 1 else t for t in tensors]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: SimpleNamespace,
        group: Group,
    ) -> torch.Tensor:
        q = q.contiguous()
        k, v = (_rows_first(t, o.form).contiguous() for t in (k, v))
        ctx.o, ctx.group, ctx.seed = o, group, None
        everyone = _gather(k, v, group)
        for _ in everyone:
            announce_attention("attention", 2, q, k, v, q, o)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.numel() // q.shape[-1], dtype=torch.float32)
        if not q.is_meta:
            ctx.seed, rows = dropout_seed(o), _rows_first(q, o.form)
            rows_out, lse = forward_values(rows, everyone, o, group_rank(group), ctx.seed)
            out.copy_(_rows_first(rows_out, o.form))
        halves = [t.clone() for t in out.chunk(2, o.form.index("s"))]
        ctx.save_for_backward(q, k, v, *halves, lse)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        q, k, v, *halves, lse = ctx.saved_tensors
        o, group = ctx.o, ctx.group
        me, size = group_rank(group), group_size(group)
        grad, dq = grad.contiguous(), q.new_empty(q.shape)
        dk, dv = (t.new_empty(size * t.shape[0], *t.shape[1:]) for t in (k, v))
        everyone = _gather(k, v, group)
        for _ in everyone:
            announce_attention("attention_backward", 5, q, k, v, grad, o)
        if not q.is_meta:
            out = torch.cat(halves, o.form.index("s"))
            rows = [_rows_first(t, o.form) for t in (q, out, grad)]
            total = torch.zeros_like(rows[0], dtype=torch.float32)
            for i, block in enumerate(everyone):
                part, part_k, part_v = block_gradients(
                    rows[0], block, rows[1], rows[2], lse, o, (me, i, size), ctx.seed
                )
                total = total + part
                dk.chunk(size)[i].copy_(part_k)
                dv.chunk(size)[i].copy_(part_v)
            dq.copy_(_rows_first(total, o.form))
        dk, dv = (
            _rows_first(reduce_scatter_along_first_dim(t, group)[0], o.form).contiguous()
            for t in (dk, dv)
        )
        return dq, dk, dv, None, None


def _gather(k: torch.Tensor, v: torch.Tensor, group: Group) -> list[Pair]:
    size = group_size(group)
    all_k, all_v = (gather_along_first_dim(t, group)[0] for t in (k, v))
    return list(zip(all_k.chunk(size), all_v.chunk(size), strict=True))


def _check(o: SimpleNamespace, q: torch.Tensor, kind: str) -> None:
    if o.form == "thd" and kind != "p2p":
        refuse(f"packed sequences with context parallelism of type {kind!r}", "--cp-comm-type p2p")
    if o.form == "thd" and not q.is_meta:
        refuse("packed sequences with context parallelism on real values", "use --prism-tier meta")
    if "padding" in o.mask_type and not q.is_meta:
        refuse("a padding mask with context parallelism on real values", "use --prism-tier meta")
    if o.mask_type == "arbitrary":
        refuse("an arbitrary mask with context parallelism")


def context_attention(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    o: SimpleNamespace,
    group: Groups,
    ranks: Sequence[int] | None,
    kind: str,
    whole: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attention of rows that are spread over ``group``, in the layout of q.

    group : a process group; for ``a2a+p2p`` the group of heads and the group of rows
    ranks : global ranks of all members, in the order of the sequence
    whole : attention of one rank that has all rows, ``whole(q, k, v, mask, o)``
    """
    heads: Group = None
    if isinstance(group, (list, tuple)):  # kind "a2a+p2p"
        heads, group = group
        if group_size(heads) == 1:
            heads, kind = None, "p2p"
        elif group_size(group) == 1:
            heads, group, kind = None, heads, "a2a"
    _check(o, qkv[0], kind)
    if kind == "all_gather":
        return _Gathered.apply(*qkv, o, group)
    if kind == "a2a":
        return FromHeads.apply(whole(*ToHeads.apply(*qkv, o.form, group), None, o), o.form, group)
    ranks = ranks if ranks is not None else dist.get_process_group_ranks(group)
    return _Ring.apply(*qkv, o, _Neighbours(group, ranks, heads), heads)
