"""What Transformer Engine's triton kernels write on tier cpu: permutations, and the cross entropy.

``arguments`` of a kernel are named as its own (common/triton/permutation.py, cross_entropy.py
@v2.20; pytorch/triton @v2.9).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

COMPUTED: dict[str, Callable[[SimpleNamespace], None]] = {}


def _kernel(*names: str) -> Callable[[Callable[[SimpleNamespace], None]], None]:
    return lambda function: COMPUTED.update(dict.fromkeys(names, function))


# -- tokens and experts ----------------------------------------------------------------------------
@_kernel("_row_id_map_pass_1_kernel")
def _row_map(a: SimpleNamespace) -> None:
    """All three passes: for each token its rows, at ``experts`` on their experts, then how many."""
    chosen, out = a.routing_map_ptr.bool(), a.row_id_map_ptr
    tokens, experts = chosen.shape
    rows = chosen.t().reshape(-1).cumsum(0).view(experts, tokens).t() - 1
    ordered = rows.masked_fill(~chosen, -1).sort(1, descending=True)
    out[:, :experts], out[:, experts:-1] = ordered.values, ordered.indices
    out[:, -1] = chosen.sum(1)


@_kernel("_row_id_map_pass_2_kernel", "_row_id_map_pass_3_kernel")
def _nothing(a: SimpleNamespace) -> None:
    """The first pass has written it."""


def _pairs(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """(token, expert, row) of every copy of a token."""
    table = a.row_id_map_ptr.long()
    experts = table.shape[1] // 2
    token, slot = (torch.arange(experts) < table[:, -1:]).nonzero(as_tuple=True)
    expert, row = table[token, experts + slot], table[token, slot]
    pads = getattr(a, "pad_offsets_ptr", None)
    return token, expert, row if pads is None else row + pads[expert]


@_kernel("_permute_kernel")
def _permute(a: SimpleNamespace) -> None:
    token, expert, row = _pairs(a)
    copies = a.input_ptr[token]
    if a.probs_ptr is not None:
        probs = a.probs_ptr[token, expert]
        a.permuted_probs_ptr[row] = probs
        copies = copies.masked_fill((probs == 0)[:, None], 0)
    a.output_ptr[row] = copies


@_kernel("_unpermute_kernel")
def _unpermute(a: SimpleNamespace) -> None:
    token, expert, row = _pairs(a)
    copies = a.input_ptr[row].float()
    if a.merging_probs_ptr is not None:
        copies = copies * a.merging_probs_ptr[token, expert].float()[:, None]
    total = torch.zeros(a.output_ptr.shape).index_add(0, token, copies)
    a.output_ptr.copy_(total)
    if a.permuted_probs_ptr is not None:
        a.unpermuted_probs_ptr.zero_()[token, expert] = a.permuted_probs_ptr[row]


@_kernel("_unpermute_bwd_with_merging_probs_kernel")
def _unpermute_backward(a: SimpleNamespace) -> None:
    token, expert, row = _pairs(a)
    grad, probs = a.fwd_output_grad_ptr[token].float(), a.merging_probs_ptr[token, expert].float()
    a.fwd_input_grad_ptr[row] = (grad * probs[:, None]).to(a.fwd_input_grad_ptr.dtype)
    of_probs = (grad * a.fwd_input_ptr[row].float()).sum(-1)
    to = a.merging_probs_grad_ptr
    to.zero_()[token, expert] = of_probs.to(to.dtype)


@_kernel("_make_chunk_sort_map_kernel")
def _chunk_map(a: SimpleNamespace) -> None:
    """Where each row goes."""
    chunks = torch.arange(len(a.dst_rows_ptr)).split(a.split_sizes_ptr.tolist())
    rows = torch.cat([chunks[i] for i in a.sorted_indices_ptr.tolist()])
    a.dst_rows_ptr[rows] = torch.arange(len(rows), dtype=a.dst_rows_ptr.dtype)


@_kernel("_sort_chunks_by_map_kernel")
def _sort_chunks(a: SimpleNamespace) -> None:
    to = a.row_id_map_ptr.long()
    pairs = ((a.output_ptr, a.input_ptr), (a.permuted_probs_ptr, a.probs_ptr))
    for out, source in pairs[: 1 if a.probs_ptr is None else 2]:
        if a.FORWARD:
            out[to] = source
        else:
            out.copy_(source[to])


# -- the loss --------------------------------------------------------------------------------------
def _facts(a: SimpleNamespace) -> Tensor:
    """[rows, 4]: largest logit, sum of exponents over it, the target's logit, sum of logits."""
    x, start = _logits(a.X_ptr), getattr(a, "rank", 0) * a.n_cols
    top = x.amax(-1)
    local = a.Y_ptr.reshape(-1) - start
    at = x.gather(1, local.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    here = (local >= 0) & (local < x.shape[1])
    target = at.masked_fill(~here, float("-inf"))
    return torch.stack([top, (x - top[:, None]).exp().sum(-1), target, x.sum(-1)], -1)


def _logits(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()


def _together(parts: Tensor) -> Tensor:
    """Facts of the whole vocabulary, of those of its parts [ranks, rows, 3 or 4]."""
    top = parts[..., 0].amax(0)
    total = (parts[..., 1] * (parts[..., 0] - top).exp()).sum(0)
    return torch.stack([top, total, parts[..., 2].amax(0), parts[..., -1].sum(0)], -1)


def _loss(a: SimpleNamespace, facts: Tensor, width: int) -> Tensor:
    smooth, lse = a.label_smoothing, facts[:, 0] + facts[:, 1].log()
    loss = (1 - smooth) * (lse - facts[:, 2])
    if smooth:
        loss = loss + smooth * (lse - facts[:, 3] / width)
    return loss.masked_fill(a.Y_ptr.reshape(-1) == a.ignore_idx, 0.0)


def _gradient(a: SimpleNamespace, logits: Tensor, facts: Tensor, count: Tensor | int) -> Tensor:
    x, y, smooth = _logits(logits), a.Y_ptr.reshape(-1), a.label_smoothing
    world, rank = a.world_size, a.rank
    grad = (x - facts[:, :1]).exp() / facts[:, 1:2] - smooth / (x.shape[1] * world)
    local = y - rank * x.shape[1]
    here = ((local >= 0) & (local < x.shape[1])).float()
    grad.scatter_add_(1, local.clamp(0, x.shape[1] - 1)[:, None], (smooth - 1) * here[:, None])
    grad = grad.masked_fill((y == a.ignore_idx)[:, None], 0.0)
    return (grad / count if a.reduce_loss else grad).view(logits.shape)


def _keep(a: SimpleNamespace) -> None:
    if a.COPY_INPUT:
        a.saved_input_ptr.copy_(a.X_ptr)
    if a.COUNT_NON_IGNORE:
        a.n_non_ignore.add_((a.Y_ptr != a.ignore_idx).sum())


@_kernel("cross_entropy_forward_kernel")
def _forward(a: SimpleNamespace) -> None:
    facts = _facts(a)
    a.stats_ptr.copy_(facts[:, :2])
    a.loss_ptr.copy_(_loss(a, facts, a.n_cols))
    _keep(a)


@_kernel("cross_entropy_tp_pre_kernel")
def _forward_part(a: SimpleNamespace) -> None:
    a.local_data_ptr.copy_(_facts(a))
    _keep(a)


@_kernel("cross_entropy_tp_post_kernel")
def _forward_whole(a: SimpleNamespace) -> None:
    facts = _together(a.gathered_data_ptr.view(a.world_size, -1, 4))
    a.stats_ptr.copy_(facts[:, :2])
    a.loss_ptr.copy_(_loss(a, facts, a.n_cols * a.world_size))


@_kernel("cross_entropy_backward_kernel")
def _backward(a: SimpleNamespace) -> None:
    count = a.n_non_ignore_ptr if a.reduce_loss else 1
    grad = _gradient(a, a.saved_input_ptr, a.stats_ptr, count)
    scale = a.grad_output_ptr.float().reshape(-1, 1, 1)
    rows = grad.view(-1, 1, grad.shape[-1]) * scale
    a.saved_input_ptr.copy_(rows.view(grad.shape))


@_kernel("online_softmax_kernel")
def _online(a: SimpleNamespace) -> None:
    """Until 2.19: three facts a row, and in later ones how many targets count."""
    a.m_d_X_y_ptr.view(-1, 3).copy_(_facts(a)[:, :3])
    if hasattr(a, "ignore_idx"):
        a.n_non_ignore.add_((a.Y_ptr != a.ignore_idx).sum())


@_kernel("cross_entropy_kernel")
def _both(a: SimpleNamespace) -> None:
    """Until 2.19: the loss, and its gradient over the logits."""
    facts = _together(a.m_d_X_y_ptr.view(a.world_size, -1, 3))
    facts[:, 3] = _logits(a.X_ptr).sum(-1)  # of this rank's part alone, as theirs
    a.loss_ptr.copy_(_loss(a, facts, a.n_cols * a.world_size))
    a.X_ptr.copy_(_gradient(a, a.X_ptr, facts, a.n_non_ignore))


@_kernel("element_mul_kernel")
def _scaled(a: SimpleNamespace) -> None:
    rows = a.X_ptr.reshape(-1, 1, a.X_ptr.shape[-1])
    a.X_ptr.copy_((rows * a.grad_output_ptr.reshape(-1, 1, 1)).view(a.X_ptr.shape))
