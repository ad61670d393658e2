"""Tokens on their way to experts, as shapes: even shares, permutation, DeepEP and HybridEP.

Shapes have no routing, so every expert gets its even share.  DeepEP and HybridEP write into the
memory of other GPUs and size what they receive by the routing, for which the host waits.  Each
exchange is a call of the group that says what crosses: a token goes once to each node that has
experts of it, and there once to each such rank.  Assumed: the libraries' own buffers are outside of
torch's allocator, and a handle is the routing map of all ranks for the local experts with a row
number for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed as dist

from megatron_prism.runtime.devices import cuda
from megatron_prism.runtime.devices.kernels import differentiable, fused

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Grads

_NODE = 8  # GPUs of a node, assumed
_copies = 1  # of a token, in the group
counts = {"made_up": False}  # of tokens: by the stand-in for the dispatcher's copy to the host


def set_copies(copies: int) -> None:
    """How many experts of the group a token goes to, in the dispatch that follows."""
    global _copies
    _copies = copies


Shape = Sequence[int]
Rows = tuple[int, int]  # that a rank sends, if each node gets one copy, and each rank


def _nodes(group: dist.ProcessGroup) -> int:
    return len({rank // _NODE for rank in dist.get_process_group_ranks(group)})


def _rows(tokens: int, copies: int, group: dist.ProcessGroup) -> Rows:
    """Of ``tokens`` with ``copies`` experts each at even loads (DeepEP, README @v1.2: a node
    forwards its copy over NVLink).
    """
    places = _nodes(group), group.size()
    nodes, ranks = (round(tokens * n * (1 - (1 - 1 / n) ** copies)) for n in places)
    return nodes, ranks


def _exchange(op: str, like: torch.Tensor, rows: Rows, group: dist.ProcessGroup) -> None:
    """A ``dispatch`` or ``combine``, from and to memory that is not the allocator's."""
    if group.size() > 1:
        sides = [like.new_empty(1).expand(number, like.shape[-1]) for number in rows]
        getattr(group, op)(*(sides[::-1] if op == "dispatch" else sides)).wait()


def _to_experts(x: torch.Tensor, shape: Shape, sent: Rows, group: dist.ProcessGroup) -> Any:
    _exchange("dispatch", x, sent, group)
    out = x.new_empty(shape)
    fused("dispatch", 0, out, out)
    return out


def _to_tokens(x: torch.Tensor, shape: Shape, sent: Rows, group: dist.ProcessGroup) -> Any:
    fused("combine", 0, x, x)
    _exchange("combine", x, sent, group)
    return x.new_empty(shape)


@differentiable
def _dispatch(
    x: torch.Tensor,
    probs: torch.Tensor,
    shapes: tuple[int, Shape, Rows],
    handle: tuple[torch.Tensor, ...],
    group: dist.ProcessGroup,
) -> Any:
    """``rows`` of tokens and probabilities arrive; the handle lives as long as the graph."""
    rows, of_probs, sent = shapes
    x_shape, probs_shape = x.shape, probs.shape

    def backward(grad: torch.Tensor, grad_probs: torch.Tensor, kept: object = handle) -> Grads:
        out = _to_tokens(grad, x_shape, sent, group)
        return out, grad_probs.new_empty(probs_shape), None, None, None

    out = _to_experts(x, (rows, x.shape[-1]), sent, group)
    return (out, probs.new_empty(of_probs)), (), backward


@differentiable
def _combine(x: torch.Tensor, handle: DispatchHandle) -> Any:
    rows = x.shape
    out = _to_tokens(x, (handle.tokens, x.shape[-1]), handle.sent, handle.group)
    return out, (), lambda grad: (_to_experts(grad, rows, handle.sent, handle.group), None)


class DispatchHandle(tuple[torch.Tensor, ...]):
    """What a dispatch leaves for its combine; the last entry says whether tokens were dropped."""

    tokens: int
    sent: Rows
    group: dist.ProcessGroup


def _handle(x: torch.Tensor, local: int, sent: Rows, group: dist.ProcessGroup) -> DispatchHandle:
    # as large as if all tokens of all ranks came
    every = x.shape[0] * group.size()
    handle = DispatchHandle(
        (
            x.new_empty(every, local, dtype=torch.bool),
            x.new_empty(every, local, dtype=torch.int32),
            x.new_empty(x.shape[0], group.size(), dtype=torch.int32),
            x.new_zeros(1, dtype=torch.int32),
        )
    )
    handle.tokens, handle.sent, handle.group = x.shape[0], sent, group
    return handle


def _even(total: int, experts: int, multiple: int = 1) -> torch.Tensor:
    """Copies of tokens per local expert, on the host; each is rounded up to ``multiple``."""
    counts = torch.full((experts,), total // experts, dtype=torch.int64, device="cpu")
    counts[: total % experts] += 1
    return -(-counts // multiple) * multiple


def hybrid_ep_dispatch(
    x: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor,
    group: dist.ProcessGroup,
    num_local_experts: int,
    *,
    num_permuted_tokens: int | None = None,
    pad_multiple: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor, DispatchHandle]:
    """Tokens ``[rows, hidden]`` of all ranks, in the order of the local experts; the routing map is
    gathered first (DeepEP csrc/hybrid_ep/executor/executor.cu @hybrid-ep).
    """
    every = routing_map
    # between nodes NCCL gathers the routing maps first
    if _nodes(group) > 1:
        every = routing_map.new_empty(group.size() * x.shape[0], routing_map.shape[-1])
        dist.all_gather_into_tensor(every, routing_map, group=group)
    fused("scan_routing_map", 0, every)
    # without a bound on the rows the host waits for how many come
    if num_permuted_tokens is None:
        cuda.host_waits("token counts")
    counts = _even(x.shape[0] * _copies, num_local_experts, pad_multiple or 1)
    rows = int(counts.sum()) if num_permuted_tokens is None else int(num_permuted_tokens)
    sent = _rows(x.shape[0], _copies, group)
    handle = _handle(x, num_local_experts, sent, group)
    out, chosen = _dispatch(x, probs, (rows, (rows,), sent), handle, group)
    return out, chosen, None, counts, handle


def hybrid_ep_combine(
    x: torch.Tensor, handle: DispatchHandle, *args: object, **options: object
) -> object:
    """The experts' output back at its tokens."""
    return _combine(x, handle)


def fused_dispatch(
    x: torch.Tensor,
    token_indices: torch.Tensor,
    token_probs: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    *args: object,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, DispatchHandle]:
    """DeepEP's: a token arrives once at a rank, however many of its experts are there."""
    copies, local = token_indices.shape[-1], num_experts // group.size()
    rows = x.shape[0] * min(copies, group.size())
    sent = _rows(x.shape[0], copies, group)
    # the host allocates the output, so it waits for the counts
    cuda.host_waits("token counts")
    handle = _handle(x, local, sent, group)
    shapes = (rows, (rows, copies), sent)
    out, probs = _dispatch(x.contiguous(), token_probs, shapes, handle, group)
    indices = token_indices.new_empty(rows, copies)
    counts = _even(x.shape[0] * copies, local).int()  # whose values tier meta keeps
    return out, indices, probs, counts, handle


def fused_combine(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    handle: DispatchHandle,
    *args: object,
    **options: object,
) -> tuple[object, None]:
    """Return the tokens that come back to their ranks, and no event."""
    return _combine(x, handle), None


@differentiable
def indices_to_multihot(indices: torch.Tensor, probs: torch.Tensor, experts: int) -> Any:
    """Experts of each token ``[rows, copies]`` as a map and probabilities ``[rows, experts]``."""
    shape = probs.shape
    out = probs.new_empty(shape[0], experts, dtype=torch.float32)
    chosen = indices.new_empty(out.shape, dtype=torch.bool)
    fused("indices_to_multihot", 0, indices, probs, out, chosen)
    return (chosen, out), (indices,), lambda _, grad, indices: (None, grad.new_empty(shape), None)


@dataclass(frozen=True)
class Splits:
    """Token counts of one MoE layer on the host (numbers of token copies).

    sent, received   : to and from each expert-parallel rank, ``[ep]``
    received_tp      : from each expert-tensor-parallel rank, ``[tp]``
    table            : for each local expert by source rank, ``[tp * ep, local]``
    per_local_expert : ``[local]``
    """

    total: int
    sent: np.ndarray
    received: np.ndarray
    received_tp: np.ndarray
    table: torch.Tensor
    per_local_expert: torch.Tensor


class ExpertLoads:
    """How many copies of tokens this rank's experts get in each call of an iteration.

    A call is (which dispatcher, its how-manieth turn); one that a backward makes again has the turn
    of the first.

    vary  : whether an expert gets other numbers of tokens each time
    more  : (layer, turn) -> copies beyond the even share, of each expert from each source rank
    shape : (copies that a rank sends, experts, experts of a token, source ranks) of the last call
    """

    def __init__(self) -> None:
        self.vary = False
        self.more: Callable[[int, int], int] | None = None
        self.shape = (0, 0, 0, 0)
        self.start()

    def start(self) -> None:
        """An iteration begins."""
        self.calls: dict[tuple[int, int], int] = {}
        self._layers: dict[int, int] = {}
        self._turns: Counter[tuple[int, bool]] = Counter()

    def add(self, dispatcher: object, here: np.ndarray, ways: int) -> np.ndarray:
        """A call of ``dispatcher``; ``here`` [local] are the even shares from each of ``ways``
        ranks.  Returns those that its experts get.
        """
        layer = self._layers.setdefault(id(dispatcher), len(self._layers))
        again = torch._C._current_graph_task_id() >= 0  # recomputed inside a backward
        turn = self._turns[layer, again]
        self._turns[layer, again] += 1
        # a rank with all experts gets every copy that a source has, however tokens are routed
        has_all_experts = len(here) == self.shape[1]
        if self.more is not None and not has_all_experts:
            here = np.maximum(here + self.more(layer, turn), 0)
        self.calls[layer, turn] = int(here.sum()) * ways
        return here

    def turns(self) -> Counter[tuple[int, bool]]:
        """How many calls there were, by dispatcher and whether a backward made them again."""
        return self._turns.copy()

    def repeat(self, first: Counter[tuple[int, bool]], behind: Counter[tuple[int, bool]]) -> None:
        """The calls between two moments happen again."""
        for key in behind:
            layer, _ = key
            for turn in range(first[key], behind[key]):
                now = self._turns[key]
                self.calls[layer, now] = self.calls[layer, turn]
                self._turns[key] += 1

    def turns_since(
        self, first: Counter[tuple[int, bool]], behind: Counter[tuple[int, bool]]
    ) -> dict[int, int]:
        """Return of each layer that forwards called between two moments its turns since the first
        of them.
        """
        turns: dict[int, int] = {}
        for key, count in behind.items():
            layer, again = key
            before = first[key]
            # backwards make the calls of their forwards again
            if again:
                continue
            if count > before:
                now = self._turns[key]
                turns[layer] = now - before
        return turns

    def table(self) -> np.ndarray:
        """``Program.routes`` of what has run since ``start``."""
        rows = [(*key, rows, 0) for key, rows in self.calls.items()]
        return np.array([self.shape, *rows] if rows else [], dtype=np.int64).reshape(-1, 4)


loads = ExpertLoads()


def follow(config: object) -> None:
    """Let the loads of what follows be those of a job (its TransformerConfig)."""
    loads.vary = counts_vary(config)


def counts_vary(config: object) -> bool:
    """Say whether an expert of a job gets other numbers of tokens each time, over a wide range.

    A router that an auxiliary loss alone keeps from favouring experts sends them from none to
    several times their share.  Loads of random routing are even but for noise, those of a router
    that nothing keeps from it are all tokens or none, and a capacity makes all loads equal.

    Args:
        config: TransformerConfig of Megatron.
    """
    # random routing: even but for noise
    if getattr(config, "moe_router_force_load_balancing", False):
        return False
    # the bias moves tokens to experts that have few
    if getattr(config, "moe_router_enable_expert_bias", False):
        return False
    # every expert's input is padded to its capacity
    if getattr(config, "moe_pad_expert_input_to_capacity", False):
        return False
    kinds = getattr(config, "moe_router_load_balancing_type", "none")
    weights = getattr(config, "moe_aux_loss_coeff", 0.0)
    # Megatron takes one kind and weight, or lists of both
    if isinstance(kinds, str):
        kinds = [kinds]
    if not isinstance(weights, (list, tuple)):
        weights = [weights] * len(kinds)
    for kind, weight in zip(kinds, weights, strict=False):
        if kind.endswith("aux_loss") and weight:
            return True
    return False


def balanced_splits(
    dispatcher: object,
    total: int,
    num_experts: int,
    local: Sequence[int],
    ep_size: int,
    tp_size: int,
    topk: int,
) -> Splits:
    """Every expert gets its even share of ``total`` copies, the first ones take the remainder;
    this rank's get what ``loads`` says.
    """
    counts = _even(total, num_experts).numpy()
    loads.shape = (total, num_experts, topk, ep_size * tp_size)
    local_counts = loads.add(dispatcher, counts[list(local)], ep_size * tp_size)
    return Splits(
        total=total,
        sent=counts.reshape(ep_size, -1).sum(axis=1),
        received=np.full(ep_size, local_counts.sum()),
        received_tp=np.full(tp_size, local_counts.sum() * ep_size),
        table=torch.from_numpy(np.tile(local_counts, (tp_size * ep_size, 1))),
        per_local_expert=torch.from_numpy(local_counts * tp_size * ep_size),
    )


@differentiable
def masked_select(values: torch.Tensor, mask: torch.Tensor, count: int) -> Any:
    """Stands in for ``values.masked_select(mask)`` where ``count`` entries of ``mask`` are true: it
    saves the mask, and indices of 8 bytes pass, two an entry.
    """
    where = mask.new_empty(count, mask.dim(), dtype=torch.int64)
    out = values.new_empty(count)
    fused("masked_select", 0, values, mask, where, out)
    return out, (mask,), _masked_select_backward


def _masked_select_backward(grad: torch.Tensor, mask: torch.Tensor) -> Grads:
    into = torch.zeros(mask.shape, dtype=grad.dtype, device=grad.device)
    fused("masked_select_backward", 0, grad, mask, into)
    return into, None, None


def permute_shapes(
    tokens: torch.Tensor, probs: torch.Tensor | None, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Stands in for the masked selection of moe_utils.permute @0.16.1 on shapes.

    tokens ``[t, hidden]`` become ``[num_out_tokens, hidden]``; probs ``[t, experts]`` become
    ``[num_out_tokens]``.  Saved for backward: the index, as there.
    """
    index = torch.empty(num_out_tokens, dtype=torch.int64, device=tokens.device)
    chosen = None if probs is None else probs.T.contiguous().view(-1).index_select(0, index)
    return tokens.index_select(0, index), chosen, index
