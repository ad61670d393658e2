"""What Transformer Engine's triton kernels write on tier cpu: permutations, and the cross entropy.

Each function here takes a kernel's arguments as attributes with the kernel's own names
(common/triton/permutation.py, cross_entropy.py @v2.20; pytorch/triton @v2.9).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

COMPUTED: dict[str, Callable[[SimpleNamespace], None]] = {}


def _kernel(*names: str) -> Callable[[Callable[[SimpleNamespace], None]], None]:
    """Register a function as what the kernels of these names compute; its own name is None then."""

    def enter(function: Callable[[SimpleNamespace], None]) -> None:
        for name in names:
            COMPUTED[name] = function

    return enter


# -- tokens and experts ----------------------------------------------------------------------------
@_kernel("_row_id_map_pass_1_kernel")
def _row_map(a: SimpleNamespace) -> None:
    """All three passes: for each token its rows, at ``experts`` on their experts, then how many."""
    chosen = a.routing_map_ptr.bool()
    table = a.row_id_map_ptr
    tokens, experts = chosen.shape
    # rows of one expert follow those of the expert before it, tokens in order
    rows_by_expert = chosen.t().reshape(-1).cumsum(0).view(experts, tokens) - 1
    rows = rows_by_expert.t().masked_fill(~chosen, -1)
    # a token's copies stand in front, as the kernels read them: -1 is the smallest
    latest_first = rows.sort(1, descending=True)
    table[:, :experts] = latest_first.values
    table[:, experts:-1] = latest_first.indices
    table[:, -1] = chosen.sum(1)


@_kernel("_row_id_map_pass_2_kernel", "_row_id_map_pass_3_kernel")
def _nothing(a: SimpleNamespace) -> None:
    """The first pass has written it."""


def _pairs(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """(token, expert, row) of every copy of a token."""
    table = a.row_id_map_ptr.long()
    experts = table.shape[1] // 2
    copies_of_token = table[:, -1:]
    # of the slots of a token as many are used as it has experts
    is_copy = torch.arange(experts) < copies_of_token
    token, slot = is_copy.nonzero(as_tuple=True)
    row = table[token, slot]
    expert = table[token, experts + slot]
    pads = getattr(a, "pad_offsets_ptr", None)
    if pads is not None:  # rows of an expert are filled up to a multiple: later experts move on
        row = row + pads[expert]
    return token, expert, row


@_kernel("_permute_kernel")
def _permute(a: SimpleNamespace) -> None:
    token, expert, row = _pairs(a)
    copies = a.input_ptr[token]
    if a.probs_ptr is not None:
        probs = a.probs_ptr[token, expert]
        a.permuted_probs_ptr[row] = probs
        # a copy of probability 0 is padding of the router
        unwanted = (probs == 0)[:, None]
        copies = copies.masked_fill(unwanted, 0)
    a.output_ptr[row] = copies


@_kernel("_unpermute_kernel")
def _unpermute(a: SimpleNamespace) -> None:
    token, expert, row = _pairs(a)
    copies = a.input_ptr[row].float()
    if a.merging_probs_ptr is not None:
        probs = a.merging_probs_ptr[token, expert].float()
        copies = copies * probs[:, None]
    # summed in fp32, whatever the type of the output
    total = torch.zeros(a.output_ptr.shape)
    total.index_add_(0, token, copies)
    a.output_ptr.copy_(total)
    if a.permuted_probs_ptr is not None:
        unpermuted = a.unpermuted_probs_ptr.zero_()
        unpermuted[token, expert] = a.permuted_probs_ptr[row]


@_kernel("_unpermute_bwd_with_merging_probs_kernel")
def _unpermute_backward(a: SimpleNamespace) -> None:
    token, expert, row = _pairs(a)
    grad = a.fwd_output_grad_ptr[token].float()
    probs = a.merging_probs_ptr[token, expert].float()
    input_grad = a.fwd_input_grad_ptr
    input_grad[row] = (grad * probs[:, None]).to(input_grad.dtype)
    # how much a copy would add to the loss: its output times the gradient
    grad_of_probs = (grad * a.fwd_input_ptr[row].float()).sum(-1)
    probs_grad = a.merging_probs_grad_ptr.zero_()
    probs_grad[token, expert] = grad_of_probs.to(probs_grad.dtype)


@_kernel("_make_chunk_sort_map_kernel")
def _chunk_map(a: SimpleNamespace) -> None:
    """Where each row goes."""
    target_rows = a.dst_rows_ptr
    # rows in the order in which their chunks are sorted
    chunks = torch.arange(len(target_rows)).split(a.split_sizes_ptr.tolist())
    rows = torch.cat([chunks[chunk] for chunk in a.sorted_indices_ptr.tolist()])
    target_rows[rows] = torch.arange(len(rows), dtype=target_rows.dtype)


@_kernel("_sort_chunks_by_map_kernel")
def _sort_chunks(a: SimpleNamespace) -> None:
    target_rows = a.row_id_map_ptr.long()
    pairs = [(a.output_ptr, a.input_ptr)]
    # probabilities move as their tokens do
    if a.probs_ptr is not None:
        pairs.append((a.permuted_probs_ptr, a.probs_ptr))
    for out, source in pairs:
        # forward scatters rows, backward gathers them
        if a.FORWARD:
            out[target_rows] = source
        else:
            out.copy_(source[target_rows])


# -- the loss --------------------------------------------------------------------------------------
def _facts(a: SimpleNamespace) -> Tensor:
    """[rows, 4]: largest logit, sum of exponents over it, the target's logit, sum of logits."""
    logits = _logits(a.X_ptr)
    largest = logits.amax(-1)
    # targets count through the whole vocabulary; this rank has a part of it
    local, is_local = _local_targets(a.Y_ptr.reshape(-1), getattr(a, "rank", 0) * a.n_cols, logits)
    target_logit = logits.gather(1, local)[:, 0].masked_fill(~is_local, float("-inf"))
    # over the largest, so that no exponent overflows
    exponents = (logits - largest[:, None]).exp()
    return torch.stack([largest, exponents.sum(-1), target_logit, logits.sum(-1)], -1)


def _logits(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()


def _local_targets(targets: Tensor, start: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(column of each target [rows, 1], bounded; bool [rows], whether it is among ``logits``)."""
    columns = logits.shape[1]
    local = targets - start
    is_local = (local >= 0) & (local < columns)
    return local.clamp(0, columns - 1)[:, None], is_local


def _together(parts: Tensor) -> Tensor:
    """Facts of the whole vocabulary, of those of its parts [ranks, rows, 3 or 4]."""
    largest_of_part, sum_of_part, target_of_part = parts[..., 0], parts[..., 1], parts[..., 2]
    largest = largest_of_part.amax(0)
    # each part's sum is over its own largest logit
    exponents = sum_of_part * (largest_of_part - largest).exp()
    # -inf in all parts but the one that has the target
    target_logit = target_of_part.amax(0)
    return torch.stack([largest, exponents.sum(0), target_logit, parts[..., -1].sum(0)], -1)


def _loss(a: SimpleNamespace, facts: Tensor, width: int) -> Tensor:
    """fp32 [rows]; 0 of targets that do not count."""
    largest, exponents, target_logit, sum_of_logits = facts.unbind(-1)
    log_of_sum = largest + exponents.log()
    smoothing = a.label_smoothing
    loss = (1 - smoothing) * (log_of_sum - target_logit)
    if smoothing:
        loss = loss + smoothing * (log_of_sum - sum_of_logits / width)
    ignored = a.Y_ptr.reshape(-1) == a.ignore_idx
    return loss.masked_fill(ignored, 0.0)


def _gradient(a: SimpleNamespace, logits: Tensor, facts: Tensor, count: Tensor | int) -> Tensor:
    """Gradient of the loss over this rank's logits."""
    x = _logits(logits)
    targets = a.Y_ptr.reshape(-1)
    smoothing = a.label_smoothing
    columns = x.shape[1]
    largest, exponents = facts[:, :1], facts[:, 1:2]
    # softmax less the smoothed target: smoothing over all columns, the rest at the target
    grad = (x - largest).exp() / exponents
    grad = grad - smoothing / (columns * a.world_size)
    local, is_local = _local_targets(targets, a.rank * columns, x)
    grad.scatter_add_(1, local, (smoothing - 1) * is_local.float()[:, None])
    ignored = (targets == a.ignore_idx)[:, None]
    grad = grad.masked_fill(ignored, 0.0)
    # the mean over targets that count
    if a.reduce_loss:
        grad = grad / count
    return grad.view(logits.shape)


def _keep(a: SimpleNamespace) -> None:
    """Write what backward needs, where the kernel is asked to."""
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
