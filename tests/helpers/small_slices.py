"""A folder of slices of a small made-up world."""

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program
from megatron_prism.core.programs.slices import SliceStore
from megatron_prism.core.world import World

TP, PP = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"
WORLD = World(8, tp=2, pp=2)
SOURCE = {"megatron_core": "0.16.1", "tier": "meta", "settings": "abc"}


def program(rank, ns=100, **changes):
    first = rank < 4
    other = Op("send", PP, "bf16", num_in=4, peer=1) if first else Op(
        "recv", PP, "bf16", num_out=4, peer=-1
    )  # fmt: skip
    reduce = {"num_in": 4, "num_out": 4, "reduce": "sum", **changes}
    label = {"phase": "forward", "microbatch": 0}
    ops = [Op("compute", ns=ns, **label), Op("all_reduce", TP, "bf16", **reduce, **label), other]
    return Program.from_ops(rank, ops)


def store_in(folder, ranks=(0, 4), source=SOURCE, world=WORLD):
    store = SliceStore(folder, world, source)
    store.prepare(False)
    for rank in ranks:
        store.put(program(rank))
    return store
