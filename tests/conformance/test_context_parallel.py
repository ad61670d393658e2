"""Attention over context-parallel ranks is attention of the whole sequence, and says what TE says.

Four gloo processes, all of them local ranks of one world, hold the chunks that Megatron's
get_batch_on_this_cp_rank deals (rank r of n: chunks r and 2n-1-r).  The oracle of the values is
torch's attention and autograd on the whole sequence; the expected messages are read from
Transformer Engine's context_parallel.py @v2.9 and written out by hand.
"""

import itertools
import json
import pathlib
import tempfile
import traceback
import warnings
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.nn.functional import scaled_dot_product_attention

from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.listeners import CallListener
from megatron_prism.runtime.te.attention import DotProductAttention
from megatron_prism.runtime.values import Values

NUM_PROCESSES = 4
ROWS, BATCH, HEADS, GROUPS, WIDTH = 16, 2, 8, 4, 8  # of the whole sequence
KINDS = [*itertools.product(["p2p", "all_gather", "a2a"], [2, 4]), ("p2p", 3), ("a2a+p2p", 4)]
CASES = [
    (kind, size, form, mask)
    for (kind, size), form, mask in itertools.product(
        KINDS, ["sbhd", "bshd"], ["causal", "no_mask"]
    )
]


def shard(whole, rank, size, dim):
    """What rank ``rank`` of ``size`` holds (megatron/core/utils.py, get_batch_on_this_cp_rank)."""
    chunks = whole.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def whole_sequence(rows, mask):
    """Inputs, output, gradient of the output and gradients of the inputs, [s, b, h, d]."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(rows, BATCH, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    order = (t.permute(1, 2, 0, 3) for t in inputs)
    out = scaled_dot_product_attention(*order, is_causal=mask == "causal", enable_gqa=True)
    out = out.permute(2, 0, 1, 3)
    grad = torch.randn_like(out)
    return [*(t.detach() for t in inputs), out.detach(), grad], torch.autograd.grad(
        out, inputs, grad
    )


def laid_out(tensor, form):
    return tensor.transpose(0, 1).contiguous() if form == "bshd" else tensor.contiguous()


def groups_of(kind, size):
    """(cp_group of TE, global ranks, this process' rank in the sequence) or None outside."""
    me = dist.get_rank()
    if me >= size:
        return None
    ranks = list(range(size))
    if kind != "a2a+p2p":
        return dist.new_group(ranks, group_desc="CONTEXT_PARALLEL_GROUP"), ranks, me
    heads = [dist.new_group(pair, group_desc="HEADS") for pair in ([0, 1], [2, 3])]
    rows = [dist.new_group(pair, group_desc="CONTEXT_PARALLEL_GROUP") for pair in ([0, 2], [1, 3])]
    return [heads[me // 2], rows[me % 2]], ranks, me


def one(kind, size, form, mask):
    """(largest error, [op, group, peer-free shape of what is sent or received]) of this process."""
    where = groups_of(kind, size)
    if where is None:
        return None
    group, ranks, me = where
    rows = ROWS if size != 3 else 12
    tensors, wanted = whole_sequence(rows, mask)
    mine = [laid_out(shard(t, me, size, 0), form) for t in tensors]
    calls = []

    class Seen(CallListener):
        def observe(self, group, op, inputs, outputs):
            calls.append([op, group.desc, list((inputs or outputs)[0].shape)])

    virtual_world.current().listen(Seen())
    module = DotProductAttention(
        HEADS, WIDTH, qkv_format=form, attn_mask_type=mask, cp_group=group,
        cp_global_ranks=ranks, cp_comm_type=kind,
    )  # fmt: skip
    inputs = [t.requires_grad_() for t in mine[:3]]
    out = module(*inputs)
    num_forward = len(calls)
    grads = torch.autograd.grad(out, inputs, mine[4].flatten(-2))
    virtual_world.current().listen()
    got = [out.detach().unflatten(-1, (HEADS, WIDTH)), *grads]
    right = [mine[3], *(laid_out(shard(t, me, size, 0), form) for t in wanted)]
    error = max(float((a - b).abs().max()) for a, b in zip(got, right, strict=True))
    return {"error": error, "forward": calls[:num_forward], "backward": calls[num_forward:]}


def run(rank, folder):
    """Entry point of one process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    virtual_world._TIMEOUT = timedelta(seconds=60)
    path = pathlib.Path(folder)
    store = dist.FileStore(str(path / "store"), NUM_PROCESSES)
    everyone = tuple(range(NUM_PROCESSES))
    virtual_world.start(
        virtual_world.VirtualWorld(
            NUM_PROCESSES, rank, everyone, Values(rank=rank), torch.device("cpu"), store
        )
    )
    results = {}
    for case in CASES:
        try:
            results[" ".join(map(str, case))] = one(*case)
        except Exception:
            results[" ".join(map(str, case))] = {"failed": traceback.format_exc()}
            break  # the others wait for this one in vain
    (path / f"result_{rank}.json").write_text(json.dumps(results))
    virtual_world.stop()


@pytest.fixture(scope="module")
def results():
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(folder,), nprocs=NUM_PROCESSES)
        return [
            json.loads(pathlib.Path(folder, f"result_{rank}.json").read_text())
            for rank in range(NUM_PROCESSES)
        ]


def of(results, case):
    """What the members of the case's group found, in the order of their ranks."""
    found = [result[" ".join(map(str, case))] for result in results[: case[1]]]
    assert not [one["failed"] for one in found if "failed" in one]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_ranks_together_compute_the_whole_attention(results, case):
    assert max(one["error"] for one in of(results, case)) < 2e-5


RING = "CONTEXT_PARALLEL_GROUP"
N = 2 * GROUPS * WIDTH * BATCH * ROWS  # elements of k and v of the whole sequence


def steps(rank, *shapes):
    """Sends and receives of a ring: even ranks send first."""
    ops = ["send", "recv"] if rank % 2 == 0 else ["recv", "send"]
    return [[op, RING, list(shape)] for shape in shapes for op in ops]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_ring_of_two_sends_what_te_sends(results, rank):
    found = of(results, ("p2p", 2, "sbhd", "causal"))[rank]
    assert found["forward"] == steps(rank, (N // 2,))
    assert found["backward"] == steps(rank, (N // 2,), (N // 2,))


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_in_a_ring_of_four_gradients_travel_with_keys_and_values(results, rank):
    part = N // 4
    found = of(results, ("p2p", 4, "sbhd", "causal"))[rank]
    assert found["forward"] == steps(rank, (part,), (part,), (part,))
    assert found["backward"] == steps(rank, (part,), (2, part), (2, part), (part,))


@pytest.mark.slow
def test_what_gathering_says(results):
    kv, all_kv = ([rows, BATCH, GROUPS, WIDTH] for rows in (ROWS // 2, ROWS))
    gathers = [["all_gather", RING, kv]] * 2
    scatters = [["reduce_scatter", RING, all_kv]] * 2
    for form in ("sbhd", "bshd"):  # rows first, whatever the layout
        for found in of(results, ("all_gather", 2, form, "causal")):
            assert found["forward"] == gathers
            assert found["backward"] == gathers + scatters


def spread(heads, *names, group=RING, size=2):
    """All-to-alls of ``names``: out and q have all heads, k and v the groups of heads."""
    share = {"q": HEADS, "k": GROUPS, "v": GROUPS, "o": HEADS}
    shape = {name: [size, ROWS // 2, BATCH, heads // size, WIDTH] for name, heads in share.items()}
    back = {n: [s[0], 2, s[1] // 2, *s[2:]] for n, s in shape.items()}
    return [["all_to_all", group, (shape if heads else back)[name]] for name in names]


@pytest.mark.slow
def test_what_spreading_heads_says(results):
    for found in of(results, ("a2a", 2, "sbhd", "causal")):
        assert found["forward"] == spread(True, *"qkv") + spread(False, "o")
        assert found["backward"] == spread(True, "o") + spread(False, *"qkv")


@pytest.mark.slow
def test_what_spreading_both_says(results):
    for rank, found in enumerate(of(results, ("a2a+p2p", 4, "sbhd", "causal"))):
        ops = [(op, group) for op, group, _ in found["forward"]]
        a2a, place = ("all_to_all", "HEADS"), rank // 2
        step = [(op, RING) for op, _, _ in steps(place, ())]
        assert ops == [a2a] * 3 + step + [a2a]
        ops = [(op, group) for op, group, _ in found["backward"]]
        assert ops == [a2a] * 2 + step * 2 + [a2a] * 3
        sizes = {tuple(shape) for op, _, shape in found["backward"] if op == "send"}
        assert sizes == {(N // 4,)}  # half of the heads of half of the rows
