"""What virtual members contribute is what gloo adds up and gathers if their processes do just that.

Of n members j holds rows j*R to (j+1)*R of a table, looks its tokens up there and leaves zeros for
the others (written out in ``lookup``; Megatron's own in ``megatron/test_embedding.py``).  The
oracle is a plain gloo group in which the process of each virtual rank does so with the table of the
local rank that it mirrors; the sums must agree bitwise, on every local rank.  Likewise sums to
which virtual ranks give zeros, and counts of experts, which they give as seen from their own place.
"""

import json
import pathlib
import tempfile
import traceback

import pytest
import torch
from helpers.collective_cases import NUM_PROCESSES, TIMEOUT, WORLDS, mirrored
from torch import distributed as dist
from torch import multiprocessing

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import torch_distributed, virtual_world
from megatron_prism.runtime.values import (
    BalancedExpertCounts,
    LocalVocabularySum,
    PartialLookup,
    Values,
)

R, WIDTH, DTYPES = 5, 3, (torch.float32, torch.bfloat16)

pytestmark = pytest.mark.ci  # real processes, a minute


def table(member, dtype):
    return (torch.arange(R * WIDTH).view(R, WIDTH) + 1000 * (member + 1)).to(dtype)


def lookup(tokens, member, start, dtype):
    """What a member that holds rows ``start`` to ``start + R`` gives to the sum."""
    mine = (tokens >= start) & (tokens < start + R)
    rows = table(member, dtype)[torch.where(mine, tokens - start, 0)]
    return rows * mine.unsqueeze(1)


def sums(group, n, part):
    """The sum of everybody's ``part`` [n * k, WIDTH] by both ways in which Megatron makes it."""
    whole, chunk = part.clone(), torch.full((part.shape[0] // n, WIDTH), 99, dtype=part.dtype)
    dist.all_reduce(whole, group=group)
    dist.reduce_scatter_tensor(chunk, part, group=group)
    return whole, chunk


def counts(member, position, n):
    """What goes to 2 experts of each of n ranks from ``position``, a mirror of ``member``."""
    seen = [(expert + 2 * (position - member)) % (2 * n) for expert in range(2 * n)]
    return torch.tensor([100 * member + expert for expert in seen])


def gathered_and_once(group, n, shard, summand):
    out = torch.empty(n * len(shard), dtype=shard.dtype)
    dist.all_gather_into_tensor(out, shard, group=group)
    total = summand.clone()
    dist.all_reduce(total, group=group)
    return out, total


def transposed(group, n, rank):
    """<gathered x, w> and <x, reduced and scattered w> of this rank, in whole numbers."""
    x, w = torch.arange(4.0) + 3 * rank, torch.arange(4.0 * n).square() % 11 + rank
    gathered, scattered = torch.empty(4 * n), torch.empty(4)
    dist.all_gather_into_tensor(gathered, x, group=group)
    dist.reduce_scatter_tensor(scattered, w, group=group)
    return (gathered @ w).item(), (x @ scattered).item()


def compare(rank, store):
    """What is wrong, one line each, how often both agreed, and the products of ``transposed``."""
    gloo = {n: dist.new_group(range(n)) for n in range(1, NUM_PROCESSES + 1)}
    wrong, agreed, products = [], 0, []
    tries = [
        (n, local, policy, dtype)
        for n, local in WORLDS
        for policy in ("mirror", "noise")
        for dtype in DTYPES
    ]
    changes = ProcessChanges()
    for number, (n, local, policy, dtype) in enumerate(tries):
        if rank >= n:
            continue
        tokens = (torch.arange(4 * n) * 7 + number) % (n * R)
        member, start = mirrored(n, local)[rank], rank * R
        expected = sums(gloo[n], n, lookup(tokens, member, start, dtype))
        summand = table(rank, dtype) % 7 * (rank in local)  # exact in any order
        expected += gathered_and_once(gloo[n], n, counts(member, rank, n), summand)
        if rank not in local:
            continue
        prefix, cpu = dist.PrefixStore(f"world {number}", store), torch.device("cpu")
        world = virtual_world.VirtualWorld(n, rank, local, Values(policy), cpu, prefix)
        group = world.build_group(range(n), f"parts_{number}", "TENSOR_MODEL_PARALLEL_GROUP")
        if group.has_virtual != (len(local) < n):
            wrong.append(f"rank {rank} of {n}, local {local}: has_virtual {group.has_virtual}")
        changes.undo()  # of the world before
        torch_distributed.replace_functions(changes)
        torch_distributed.register(group, "gloo")
        with world.values.of_parts(PartialLookup(table(rank, dtype), tokens)):
            got = sums(group, n, lookup(tokens, rank, start, dtype))
        with world.values.of_parts(BalancedExpertCounts(2 * n, 2)):
            got += gathered_and_once(group, n, counts(rank, rank, n), summand)[:1]
        with world.values.of_parts(LocalVocabularySum()):
            got += gathered_and_once(group, n, counts(rank, rank, n), summand)[1:]
        products.append((f"{local} of {n} {policy} {dtype}", *transposed(group, n, rank)))
        names = ("all_reduce", "reduce_scatter", "counts", "once")
        for name, mine, theirs in zip(names, got, expected, strict=True):
            if torch.equal(mine, theirs):
                agreed += 1
            else:
                wrong.append(f"{name} {dtype} {policy} local={local} of {n}: {mine} not {theirs}")
    return wrong, agreed, products


def run(rank, folder):
    store = dist.FileStore(f"{folder}/store", NUM_PROCESSES)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_PROCESSES, timeout=TIMEOUT
    )
    virtual_world._TIMEOUT = TIMEOUT
    try:
        found = compare(rank, store)
    except Exception:  # the parent wants to know, whatever it is
        found = [traceback.format_exc()], 0, []
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
def test_contributions_are_what_gloo_adds_up():
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(folder,), nprocs=NUM_PROCESSES)
        found = [json.loads(path.read_text()) for path in pathlib.Path(folder).glob("*.json")]
    assert [line for wrong, *_ in found for line in wrong] == []
    local_ranks = sum(len(local) for _, local in WORLDS)
    assert sum(agreed for _, agreed, _ in found) == 4 * 2 * len(DTYPES) * local_ranks
    total = {}
    for label, gathered, scattered in (line for *_, products in found for line in products):
        if "noise" not in label:
            one, other = total.get(label, (0, 0))
            total[label] = one + gathered, other + scattered
    assert len(total) == len(set(WORLDS)) * len(DTYPES)
    assert all(one == other for one, other in total.values()), total
