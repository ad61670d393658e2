"""Attention over context-parallel ranks is attention of the whole sequence, in fp32 too.

Four gloo processes, all of them local ranks of one world, hold the chunks that Megatron's
get_batch_on_this_cp_rank deals (rank r of n: chunks r and 2n-1-r).  The oracle of the values is
torch's attention and autograd on the whole sequence.
"""

import itertools
import json
import os
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

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices, virtual_world
from megatron_prism.runtime.values import Values

pytestmark = pytest.mark.ci  # real processes, a minute
NUM_PROCESSES = 4
ROWS, BATCH, HEADS, GROUPS, WIDTH = 16, 2, 8, 4, 12  # of the whole sequence; no width of cuDNN
KINDS = [*itertools.product(["p2p", "all_gather", "a2a"], [2, 4]), ("p2p", 3), ("a2a+p2p", 4)]
CASES = [
    (kind, size, form, mask, back_end)
    for (kind, size), form, mask, back_end in itertools.product(
        KINDS, ["sbhd", "bshd"], ["causal", "no_mask"], ["FUSED", "FLASH"]
    )
    if back_end == "FUSED" or size == 2
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


def one(kind, size, form, mask, back_end):
    """The largest error of this process."""
    where = groups_of(kind, size)
    if where is None:
        return None
    group, ranks, me = where
    rows = ROWS if size != 3 else 12
    tensors, wanted = whole_sequence(rows, mask)
    mine = [laid_out(shard(t, me, size, 0), form) for t in tensors]
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    for name in ("FUSED", "FLASH"):
        os.environ[f"NVTE_{name}_ATTN"] = str(int(name == back_end))
    dot_product_attention._attention_backends["backend_selection_requires_update"] = True
    module = DotProductAttention(
        HEADS, WIDTH, num_gqa_groups=GROUPS, qkv_format=form, attn_mask_type=mask, cp_group=group,
        cp_global_ranks=ranks, cp_comm_type=kind, cp_stream=torch.cuda.Stream(),
    )  # fmt: skip
    inputs = [t.requires_grad_() for t in mine[:3]]
    out = module(*inputs)
    grads = torch.autograd.grad(out, inputs, mine[4].flatten(-2))
    got = [out.detach().unflatten(-1, (HEADS, WIDTH)), *grads]
    right = [mine[3], *(laid_out(shard(t, me, size, 0), form) for t in wanted)]
    return {"error": max(float((a - b).abs().max()) for a, b in zip(got, right, strict=True))}


def run(rank, folder):
    """Entry point of one process."""
    torch.set_num_threads(1)
    devices.prepare("cpu", ProcessChanges())
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
