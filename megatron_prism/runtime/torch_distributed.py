"""The functions of ``torch.distributed`` that a virtual world replaces.

=====================  ===========================================================================
new_group              a PrismGroup, or NON_GROUP_MEMBER before any work is done for non-members
_new_group_with_tag    the same for copies of new_group (``from … import new_group``, as DeviceMesh
                       has one): torch < 2.13 would wait for all ranks to meet at a store
all_gather_object      one exchange among the local members, copies for the virtual ones: pickling
gather_object          65,536 equal objects takes seconds (facts: 5.4 s), and a virtual source has
broadcast_object_list  no bytes to unpickle
scatter_object_list
batch_isend_irecv      keeps what is batched together: sends and receives between local members go
                       to NCCL as one group, else they deadlock on one stream
=====================  ===========================================================================
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.process_group import PrismGroup


class Positions(Mapping[int, int]):
    """Global rank -> group rank of evenly spaced ranks; as a dict 65,536 of them take 9 MB."""

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks

    def __getitem__(self, rank: int) -> int:
        try:
            return self._ranks.index(int(rank))
        except ValueError:
            raise KeyError(rank) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def items(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        return zip(self._ranks, range(len(self._ranks)), strict=True)  # c10d only walks over it


def replace_functions(changes: ProcessChanges) -> None:
    """Replace the functions of the table above."""

    def replace(name: str, function: Callable[..., Any]) -> None:
        function.__name__ = name
        function.__doc__ = getattr(c10d, name).__doc__
        changes.set(c10d, name, function)
        # torch.distributed hands on most functions of its module
        if hasattr(dist, name):
            changes.set(dist, name, function)

    for name, answer in _ANSWERS.items():
        replace(name, _if_virtual(getattr(c10d, name), answer))
    replace("batch_isend_irecv", _batch(c10d.batch_isend_irecv))


def _if_virtual(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, or ``answer(group, arguments)`` where its group is virtual.  It is not if the
    job took the virtual world down and made a real one.
    """
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        virtual = _virtual(bound.arguments.get("group"))
        # a group of the job's own, or of the host's
        if virtual is None:
            return original(*args, **kwargs)
        return answer(virtual, SimpleNamespace(**bound.arguments))

    return call


def _new_group(default: PrismGroup, arguments: SimpleNamespace) -> Any:
    world: Any = default.world
    ranks = arguments.ranks
    if ranks is not None:
        # every rank makes every group; those outside get torch's own mark
        if world.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        # torch < 2.13 has no sort_ranks
        ranks = sorted(ranks) if getattr(arguments, "sort_ranks", True) else list(ranks)
        if min(ranks) < 0 or max(ranks) >= world.size or len(set(ranks)) != len(ranks):
            raise ValueError(f"group ranks must be distinct and in [0, {world.size}): {ranks}")
    group = world.build_group(ranks, None, arguments.group_desc, arguments.backend)
    register(group, arguments.backend or ("nccl" if world.backend == "nccl" else "gloo"))
    return group


def describe(group: PrismGroup, backend: str) -> None:
    """What torch.distributed knows of the group's members and backend."""
    state, ranks = c10d._world, group.ranks
    places: dict[int, int] | Positions
    places = Positions(ranks) if isinstance(ranks, range) else {r: i for i, r in enumerate(ranks)}
    state.pg_map[group] = (str(backend), dist.HashStore())
    state.pg_group_ranks[group] = places  # type: ignore[assignment] # asked for places only
    state.pg_backend_config[group] = f"cpu:{backend},cuda:{backend}"


def register(group: PrismGroup, backend: str) -> None:
    """Make a new group known to torch.distributed, as _new_process_group_helper does."""
    state = c10d._world
    describe(group, backend)
    name = GroupName(group.group_name)
    state.pg_names[group] = name
    tag = f"ptd:{group.group_name}"
    state.tags_to_pg.setdefault(tag, []).append(group)
    state.tags_to_pg.setdefault("", []).append(group)
    state.pg_to_tag[group] = tag
    c10d._register_process_group(name, group)


def _virtual(group: Any) -> PrismGroup | None:
    """The PrismGroup behind ``group`` (None: the world), or None if it is somebody else's."""
    group = c10d._get_default_group() if group is None else group
    return group if isinstance(group, PrismGroup) else None


def _exchange(group: PrismGroup, obj: Any) -> list[Any]:
    """``obj`` of every member of ``group``, by group rank: local ones real, virtual ones copies."""
    mixed, real = group._mixed, group.real
    # no other member runs: all say what this one says
    if real is None:
        return [obj] * group.size()
    size = torch.zeros(real.size(), dtype=torch.int64, device=group.world.device)
    payload, _ = c10d._object_to_tensor(obj, torch.device("cpu"), None)
    # lengths first; then one table of bytes, as wide as the longest object
    size[real.rank()] = payload.numel()
    real.allreduce([size]).wait()
    sizes = size.tolist()
    table = torch.zeros(real.size(), max(sizes), dtype=torch.uint8, device=group.world.device)
    table[real.rank(), : payload.numel()] = payload.to(table.device)
    real.allreduce([table]).wait()  # rows of the others are zero, so the sum is the gather
    objects = [
        c10d._tensor_to_object(row.cpu(), n, None) for row, n in zip(table, sizes, strict=True)
    ]
    objects[real.rank()] = obj
    # a virtual member says what its mirror says
    return objects if mixed is None else [objects[index] for index in mixed.mirrors]


def _count(group: PrismGroup, *ops: str) -> None:
    """The calls that torch makes of an exchange: sizes first, then objects."""
    for op in ops:
        group._count(group.desc, group.size(), op, 0)


def _all_gather_object(group: PrismGroup, arguments: SimpleNamespace) -> None:
    # a copy per call, not per slot: callers may edit what they get, but equal slots are never
    # edited apart by Megatron (optimizer param-group keys, RNG states)
    arguments.object_list[:] = _exchange(group, copy.deepcopy(arguments.obj))
    _count(group, "all_gather", "all_gather")


def _gather_object(group: PrismGroup, arguments: SimpleNamespace) -> None:
    objects = _exchange(group, arguments.obj)
    if arguments.object_gather_list is not None:
        arguments.object_gather_list[:] = objects
    _count(group, "all_gather", "gather")


def _root(group: PrismGroup, arguments: SimpleNamespace) -> int:
    """The source's place in the group: global rank 0 if nobody names one."""
    src = 0 if arguments.src is None and arguments.group_src is None else arguments.src
    return c10d._canonicalize_group_rank(group, src, arguments.group_src)


def _broadcast_object_list(group: PrismGroup, arguments: SimpleNamespace) -> None:
    root = _root(group, arguments)
    arguments.object_list[:] = _exchange(group, list(arguments.object_list))[root]
    _count(group, "broadcast", "broadcast")


def _scatter_object_list(group: PrismGroup, arguments: SimpleNamespace) -> None:
    root = _root(group, arguments)
    everyone = _exchange(group, arguments.scatter_object_input_list)
    if everyone[root] is None:
        message = f"virtual rank {group.ranks[root]} has no objects to scatter on {group.desc}"
        raise UnsupportedError(message, fix="make the source a local rank with --prism-ranks")
    arguments.scatter_object_output_list[0] = everyone[root][group.rank()]
    _count(group, "broadcast", "scatter", "scatter")


_ANSWERS = {
    "_new_group_with_tag": _new_group,
    "new_group": _new_group,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
}


def _batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        virtual = _virtual(p2p_op_list[0].group) if p2p_op_list else None
        if virtual is None:
            return original(p2p_op_list)
        world: Any = virtual.world
        with world.batch():
            # without a real group nothing is sent; gloo has no blocks of calls
            if virtual.real is None or world.backend != "nccl":
                return original(p2p_op_list)
            virtual.real._start_coalescing(world.device)
            works = original(p2p_op_list)
            done = virtual.real._end_coalescing(world.device)
            return [*works, done] if done is not None else works

    return batch_isend_irecv
