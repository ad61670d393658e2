"""Moves: what the pacing kernel would write is what the answers write, byte for byte."""

import ctypes

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_prism.features.pacing.moves import ADDED, COPY, KINDS, move_of
from megatron_prism.runtime.answers import OneLocalMember
from megatron_prism.runtime.values import PartialLookup, Values

N, P, K = 4, 2, 24


class Group:
    """What moves ask of a PrismGroup."""

    _sequence = False

    def __init__(self, policy="mirror", ring=None):
        self._n, self._p, self._values, self.ring = N, P, Values(policy), ring

    def _ring(self, tensor):
        return self.ring


def carried_out(move):
    """The kernel's contract in Python: ``to[i] = scale * source[i % period]``, or a sum."""
    if move.kind >= ADDED:
        dtype = {kind: dtype for dtype, kind in KINDS.items()}[move.kind - ADDED]
        chunks = bytearray(ctypes.string_at(move.source, move.period * move.scale))
        total = torch.frombuffer(chunks, dtype=dtype).view(move.scale, -1).sum(0)
        assert total.nbytes == move.size
        ctypes.memmove(move.to, total.view(torch.uint8).numpy().tobytes(), move.size)
        return
    source = ctypes.string_at(move.source, move.period)
    words = bytearray(source[i % move.period] for i in range(move.size))
    if move.kind != COPY:
        dtype = {kind: dtype for dtype, kind in KINDS.items()}[move.kind]
        scaled = torch.frombuffer(words, dtype=dtype).clone().mul_(move.scale)
        words = bytearray(scaled.view(torch.uint8).numpy().tobytes())
    ctypes.memmove(move.to, bytes(words), move.size)


def some(*shape, dtype=torch.float32):
    values = torch.randn(*shape) * 7
    return values.to(dtype) if dtype != torch.bool else values > 0


def with_op(kind, op):
    opts = kind()
    opts.reduceOp = op
    return opts


DTYPES = [*KINDS, torch.uint8, torch.bool]
OPS = ["SUM", "AVG", "MAX", "MIN", "PRODUCT"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_reductions(dtype, op):
    reduce_op = getattr(dist.ReduceOp, op)
    tensor = some(3, K, dtype=dtype)
    move = move_of["allreduce"](Group(), [tensor], with_op(c10d.AllreduceOptions, reduce_op))
    whole = some(N * K, dtype=dtype)
    out = torch.empty(K, dtype=dtype)
    scattered = move_of["_reduce_scatter_base"](
        Group(), out, whole, with_op(c10d.ReduceScatterOptions, reduce_op)
    )
    if op == "PRODUCT" or (op == "SUM" and dtype not in KINDS):
        assert move is scattered is None
        return
    expected, chunk = tensor.clone(), torch.empty_like(out)
    OneLocalMember(N, P).reduced(expected, op.lower(), Values())
    OneLocalMember(N, P).reduce_scatter(chunk, whole, op.lower(), Values())
    carried_out(move)
    carried_out(scattered)
    assert torch.equal(tensor, expected)
    assert torch.equal(out, chunk)
    assert move.payload == tensor.nbytes
    assert scattered.payload == scattered.seen == whole.nbytes


def test_gathers():
    out, shard = torch.zeros(N * K), some(K)
    expected = out.clone()
    OneLocalMember(N, P).all_gather(expected, shard, Values())
    carried_out(move_of["_allgather_base"](Group(), out, shard))
    assert torch.equal(out, expected)
    out = some(N * K)
    before, inside = out.clone(), out[P * K : (P + 1) * K]
    carried_out(move_of["_allgather_base"](Group(), out, inside))
    assert torch.equal(out, before)


def test_coalesced_calls_of_one_tensor_are_that_tensors():
    """Megatron coalesces the buckets of a group, and there is mostly one."""
    total = with_op(c10d.ReduceScatterOptions, dist.ReduceOp.SUM)
    whole, out, shard = some(N * K), torch.empty(K), some(K)
    inside = whole[P * K : (P + 1) * K]  # gradients are reduced in place
    for method, single, outs, ins, opts in (
        ("reduce_scatter_tensor_coalesced", "_reduce_scatter_base", out, whole, (total,)),
        ("reduce_scatter_single_coalesced", "reduce_scatter_single", inside, whole, (total,)),
        ("allgather_into_tensor_coalesced", "_allgather_base", whole, shard, ()),
        ("all_gather_single_coalesced", "all_gather_single", whole, inside, ()),
    ):
        expected = move_of[single](Group(), outs, ins, *opts)
        assert move_of[method](Group(), [outs], [ins], *opts) == expected
        assert move_of[method](Group(), [outs, outs], [ins, ins], *opts) is None
    total = with_op(c10d.AllreduceCoalescedOptions, dist.ReduceOp.SUM)
    assert move_of["allreduce_coalesced"](Group(), [whole], total).scale == N
    assert move_of["allreduce_coalesced"](Group(), [whole, out], total) is None


@pytest.mark.parametrize("rows", [5, 8, 20])
def test_exchanges(rows):
    out, source = torch.zeros(rows, 3), some(8, 3)
    expected = out.clone()
    OneLocalMember(N, P).all_to_all(expected, source, [], [])
    carried_out(move_of["alltoall_base"](Group(), out, source, [], []))
    assert torch.equal(out, expected)
    assert move_of["alltoall_base"](Group(), out, source, [rows], [8]) is None or rows == 8


def test_sends_are_read_and_a_ring_is_left_to_its_answers():
    tensor = some(K)
    move = move_of["send"](Group(), [tensor], 1, 0)
    assert (move.size, move.read, move.seen, move.payload) == (0, tensor.data_ptr(), 96, 96)
    assert move_of["send"](Group(ring=object()), [tensor], 1, 0) is None


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("allreduce", ([torch.zeros(4, 4).t()[:2]], c10d.AllreduceOptions())),
        ("allreduce", ([torch.zeros(4), torch.zeros(4)], c10d.AllreduceOptions())),
        ("_allgather_base", (torch.zeros(16)[::2], torch.zeros(2))),
        ("_allgather_base", (torch.zeros(8), torch.zeros(2, dtype=torch.bfloat16))),
        ("_allgather_base", (torch.zeros(9), torch.zeros(2))),
        ("_reduce_scatter_base", (torch.zeros(2), torch.zeros(9), c10d.ReduceScatterOptions())),
        ("alltoall_base", (torch.zeros(4), torch.zeros(0), [], [])),
    ],
)
def test_what_takes_more_is_left_to_the_answers(method, args):
    assert move_of[method](Group(), *args) is None


def test_sums_of_parts_are_left_to_the_answers():
    group, out, whole = Group(), some(4, 3), some(4 * N, 3)
    total = with_op(c10d.AllreduceOptions, dist.ReduceOp.SUM)
    largest = with_op(c10d.AllreduceOptions, dist.ReduceOp.MAX)
    scattered = with_op(c10d.ReduceScatterOptions, dist.ReduceOp.SUM)
    with group._values.of_parts(PartialLookup(some(5, 3), torch.arange(4))):
        assert move_of["allreduce"](group, [out], total) is None
        assert move_of["_reduce_scatter_base"](group, out, whole, scattered) is None
        assert move_of["allreduce"](group, [out], largest) is not None
    assert move_of["allreduce"](group, [out], total).scale == N


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_chunks_of_sequences_are_added_up(dtype):
    group, out, whole = Group(), torch.empty(K, dtype=dtype), some(N * K, dtype=dtype)
    group._sequence = True
    total = with_op(c10d.ReduceScatterOptions, dist.ReduceOp.SUM)
    find, expected = move_of["_reduce_scatter_base"], torch.empty_like(out)
    OneLocalMember(N, P).reduce_scatter(expected, whole, "sum", Values(), sequence=True)
    move = find(group, out, whole, total)
    carried_out(move)
    assert torch.equal(out, expected)
    assert move.payload == whole.nbytes
    assert move.seen == 0  # all of it is read to be added
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.AVG):  # no sums
        assert find(group, out, whole, with_op(c10d.ReduceScatterOptions, op)).kind == COPY
    inside = whole[P * K : (P + 1) * K]  # the answers do not add up over themselves either
    assert find(group, inside, whole, total).kind < ADDED
    counts = torch.ones(N * K, dtype=torch.int64)
    assert find(group, counts[:K].clone(), counts, total).scale == N


def test_noise_is_left_to_the_answers():
    noise = Group("noise")
    total = with_op(c10d.AllreduceOptions, dist.ReduceOp.SUM)
    assert move_of["allreduce"](noise, [some(4)], total) is None
    assert move_of["_allgather_base"](noise, some(16), some(4)) is None
    whole = torch.ones(4, dtype=torch.int64)
    assert move_of["allreduce"](noise, [whole], total).scale == N
