"""Eight real processes of a small job over gloo, each writing down what it asks torch.distributed.

No virtual world and no recorder: the public functions of torch.distributed are wrapped before
Megatron is imported.  Reads a pickled list of recipes, prints a JSON line per recipe: one list of
calls per rank, of the last iteration.  What gloo lacks (averages, reduce-scatter, coalescing) is
computed by other gloo calls, and the call that was asked for is what is written down.
"""

import contextlib
import json
import pickle
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import forks

CALLS = []
OPEN = []  # collectives of the open coalescing manager
LIST = {}  # not empty while calls are written down
BUSY = []  # not empty inside a wrapper: torch >= 2.13 calls the public name again from within
REDUCE = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg", dist.ReduceOp.MAX: "max",
          dist.ReduceOp.MIN: "min"}  # fmt: skip
NAMES = """
    all_reduce broadcast reduce all_gather all_gather_into_tensor _all_gather_base barrier
    reduce_scatter_tensor _reduce_scatter_base all_to_all_single isend irecv send recv
""".split()
ORIGINAL = {name: getattr(c10d, name) for name in NAMES if hasattr(c10d, name)}


def note(name, group, ins=(), outs=(), op=None, root=None, peer=None, async_op=False):
    if not LIST:
        return
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    tensors = [*ins, *outs]
    entry = {
        "name": name,
        "group": group.group_desc,
        "ranks": ranks,
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        "in": sum(t.numel() for t in ins) if ins else -1,
        "out": sum(t.numel() for t in outs) if outs else -1,
        "reduce": REDUCE[op.op if hasattr(op, "op") else op] if op is not None else "",
        "root": -1 if root is None else ranks.index(root),
        "peer": None if peer is None else peer,
        "async": bool(async_op),
    }
    (OPEN[-1] if OPEN else CALLS).append(entry)


def global_rank(group, inside):
    return dist.get_process_group_ranks(group or dist.group.WORLD)[inside]


class Finished:
    """The handle of a call that this module has computed itself."""

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True


def finished(async_op):
    return Finished() if async_op else None


def reduced(tensor, op, group):
    """All-reduce in place, averages by a sum."""
    average = op == dist.ReduceOp.AVG
    ORIGINAL["all_reduce"](tensor, dist.ReduceOp.SUM if average else op, group=group)
    if average:
        tensor.div_(dist.get_world_size(group))


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    note("all_reduce", group, [tensor], [tensor], op, async_op=async_op)
    reduced(tensor, op, group)
    return finished(async_op)


def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
    note("reduce_scatter", group, [input], [output], op, async_op=async_op)
    whole = input.clone()
    reduced(whole, op, group)
    output.copy_(
        whole.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)].view_as(output)
    )
    return finished(async_op)


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    note("all_gather", group, [input_tensor], [output_tensor], async_op=async_op)
    parts = [torch.empty_like(input_tensor) for _ in range(dist.get_world_size(group))]
    ORIGINAL["all_gather"](parts, input_tensor.clone(), group=group)
    output_tensor.copy_(torch.cat([p.view(-1) for p in parts]).view_as(output_tensor))
    return finished(async_op)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    note("all_gather", group, [tensor], tensor_list, async_op=async_op)
    return ORIGINAL["all_gather"](tensor_list, tensor, group=group, async_op=async_op)


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None,
                      async_op=False):  # fmt: skip
    note("all_to_all", group, [input], [output], async_op=async_op)
    return ORIGINAL["all_to_all_single"](
        output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op
    )


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    root = (
        dist.get_process_group_ranks(group or dist.group.WORLD)[group_src] if src is None else src
    )
    note("broadcast", group, [tensor], [tensor], root=root, async_op=async_op)
    return ORIGINAL["broadcast"](tensor, root, group=group, async_op=async_op)


def reduce(tensor, dst=None, op=dist.ReduceOp.SUM, group=None, async_op=False, group_dst=None):
    root = (
        dist.get_process_group_ranks(group or dist.group.WORLD)[group_dst] if dst is None else dst
    )
    note("reduce", group, [tensor], [tensor], op, root=root, async_op=async_op)
    return ORIGINAL["reduce"](tensor, root, op, group=group, async_op=async_op)


def barrier(group=None, async_op=False, device_ids=None):
    note("barrier", group, async_op=async_op)
    return ORIGINAL["barrier"](group=group, async_op=async_op)


def pair(name, way, is_async):
    def call(tensor, other=None, group=None, tag=0, *, dst=None, src=None, **more):
        peer = next((p for p in (other, dst, src) if p is not None), None)
        if peer is None:
            inside = more.get("group_dst", more.get("group_src"))
            peer = global_rank(group, inside)
        ins, outs = ([tensor], []) if way == "send" else ([], [tensor])
        note(way, group, ins, outs, peer=peer, async_op=is_async)
        if way == "send":  # Megatron frees what it sends at once, which is safe on a stream only
            tensor = tensor.detach().clone()
        return ORIGINAL[name](tensor, peer, group=group, tag=tag)

    return call


@contextlib.contextmanager
def coalescing_manager(group=None, device=None, async_ops=False):
    """One call of many tensors, as NCCL makes it; here one after the other."""
    OPEN.append([])

    class Manager:
        def wait(self):
            return True

    yield Manager()
    entries = OPEN.pop()
    if entries:
        both = {key: sum(e[key] for e in entries) for key in ("in", "out")}
        CALLS.append({**entries[0], **both, "async": bool(async_ops)})


def outermost(name, function):
    def call(*args, **kwargs):
        if BUSY:
            return ORIGINAL[name](*args, **kwargs)
        BUSY.append(name)
        try:
            return function(*args, **kwargs)
        finally:
            BUSY.pop()

    return call


def wrap():
    ours = {
        "all_reduce": all_reduce,
        "reduce_scatter_tensor": reduce_scatter_tensor,
        "_reduce_scatter_base": reduce_scatter_tensor,
        "all_gather_into_tensor": all_gather_into_tensor,
        "_all_gather_base": all_gather_into_tensor,
        "all_gather": all_gather,
        "all_to_all_single": all_to_all_single,
        "broadcast": broadcast,
        "reduce": reduce,
        "barrier": barrier,
        "isend": pair("isend", "send", True),
        "irecv": pair("irecv", "recv", True),
        "send": pair("send", "send", False),
        "recv": pair("recv", "recv", False),
    }
    dist._coalescing_manager = c10d._coalescing_manager = coalescing_manager
    for name, function in ours.items():
        wrapped = outermost(name, function)
        for module in (dist, c10d):
            if hasattr(module, name):
                setattr(module, name, wrapped)


def run(recipe, rank, store_file):
    """The calls of ``rank`` in the last iteration of ``recipe``."""
    from megatron_prism.core.process_changes import ProcessChanges
    from megatron_prism.emulate.jobs.recipe_script import RankJob
    from megatron_prism.emulate.rank.monitor import TrainingMonitor
    from megatron_prism.runtime import devices as tiers

    size = recipe.world.size
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_file, size), rank=rank, world_size=size
    )
    monitor = TrainingMonitor()
    tier = tiers.prepare("cpu", ProcessChanges())
    job = RankJob(recipe, monitor, tier)
    for iteration in range(recipe.train_iters):
        if iteration == recipe.train_iters - 1:
            LIST["on"] = True
        job.iterate(iteration)
    LIST.clear()
    losses = [entry.losses.get("lm loss") for entry in monitor.iterations]
    return {"calls": CALLS, "losses": losses, "moved": monitor.has_moved()}


def main():
    recipes = pickle.load(sys.stdin.buffer)
    wrap()
    forks.prepare("cpu")
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as folder:
            started = [
                forks.fork(lambda rank=rank: run(recipe, rank, f"{folder}/store"))  # noqa: B023
                for rank in range(recipe.world.size)
            ]
            print(json.dumps([forks.wait(*child) for child in started]), flush=True)


if __name__ == "__main__":
    main()
