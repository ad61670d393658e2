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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.process_group import PrismGroup

__all__ = ["describe", "register", "replace_functions"]


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


def replace_functions(world: Any, changes: ProcessChanges) -> None:
    """Replace the functions of the table above for ``world`` (a VirtualWorld)."""

    def replace(name: str, function: Callable[..., Any]) -> None:
        function.__name__ = name
        function.__doc__ = getattr(c10d, name).__doc__
        changes.set(c10d, name, function)
        if hasattr(dist, name):
            changes.set(dist, name, function)

    tagged = _new_group_with_tag(world, c10d._new_group_with_tag)
    replace("_new_group_with_tag", tagged)
    replace("new_group", _new_group(tagged))
    for name, make in _OBJECTS.items():
        replace(name, make(getattr(c10d, name)))
    replace("batch_isend_irecv", _batch(c10d.batch_isend_irecv))


def _new_group_with_tag(world: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group_with_tag(
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        backend_options: Any = None,
        pg_tag: str | None = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
        sort_ranks: bool = True,
    ) -> Any:
        if _virtual(None) is None:  # the job took the virtual world down and made a real one
            settings = {} if sort_ranks else {"sort_ranks": False}  # torch >= 2.13
            return original(
                ranks,
                timeout,
                backend,
                backend_options,
                pg_tag,
                use_local_synchronization,
                group_desc,
                device_id,
                **settings,
            )
        if ranks is not None:
            if world.rank not in ranks:
                return dist.GroupMember.NON_GROUP_MEMBER
            ranks = sorted(ranks) if sort_ranks else list(ranks)
            if min(ranks) < 0 or max(ranks) >= world.size or len(set(ranks)) != len(ranks):
                raise ValueError(f"group ranks must be distinct and in [0, {world.size}): {ranks}")
        group = world.build_group(ranks, None, group_desc, backend)
        register(group, backend or ("nccl" if world.backend == "nccl" else "gloo"))
        return group

    return new_group_with_tag


def _new_group(tagged: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
        sort_ranks: bool = True,
    ) -> Any:
        return tagged(
            ranks,
            timeout,
            backend,
            pg_options,
            None,
            use_local_synchronization,
            group_desc,
            device_id,
            sort_ranks,
        )

    return new_group


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
    if real is None:
        return [obj] * group.size()
    size = torch.zeros(real.size(), dtype=torch.int64, device=group.world.device)
    payload, _ = c10d._object_to_tensor(obj, torch.device("cpu"), None)
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
    return objects if mixed is None else [objects[index] for index in mixed.mirrors]


def _all_gather_object(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        virtual = _virtual(group)
        if virtual is None:
            original(object_list, obj, group)
            return
        # a copy per call, not per slot: callers may edit what they get, but equal slots are
        # never edited apart by Megatron (optimizer param-group keys, RNG states)
        object_list[:] = _exchange(virtual, copy.deepcopy(obj))
        virtual._count(virtual.desc, virtual.size(), "all_gather", 0)

    return all_gather_object


def _gather_object(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather_object(
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        virtual = _virtual(group)
        if virtual is None:
            original(obj, object_gather_list, dst, group, group_dst)
            return
        objects = _exchange(virtual, obj)
        if object_gather_list is not None:
            object_gather_list[:] = objects
        virtual._count(virtual.desc, virtual.size(), "gather", 0)

    return gather_object


def _broadcast_object_list(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        virtual = _virtual(group)
        if virtual is None:
            original(object_list, src, group, device, group_src)
            return
        root = c10d._canonicalize_group_rank(virtual, src, group_src)
        object_list[:] = _exchange(virtual, list(object_list))[root]
        virtual._count(virtual.desc, virtual.size(), "broadcast", 0)

    return broadcast_object_list


def _scatter_object_list(original: Callable[..., Any]) -> Callable[..., Any]:
    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        virtual = _virtual(group)
        if virtual is None:
            original(scatter_object_output_list, scatter_object_input_list, src, group, group_src)
            return
        root = c10d._canonicalize_group_rank(virtual, src, group_src)
        everyone = _exchange(virtual, scatter_object_input_list)
        if everyone[root] is None:
            raise UnsupportedError(
                f"scatter_object_list from virtual rank {virtual.ranks[root]} on {virtual.desc}: "
                "it holds no objects",
                fix="make the source a local rank with --prism-ranks",
            )
        scatter_object_output_list[0] = everyone[root][virtual.rank()]
        virtual._count(virtual.desc, virtual.size(), "scatter", 0)

    return scatter_object_list


_OBJECTS = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
}


def _batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        virtual = _virtual(p2p_op_list[0].group) if p2p_op_list else None
        real = virtual.real if virtual is not None else None
        if virtual is None:
            return issue(p2p_op_list, virtual, real)
        with virtual.world.batch():
            return issue(p2p_op_list, virtual, real)

    def issue(p2p_op_list: list[Any], virtual: Any, real: Any) -> list[Any]:
        if real is None or virtual.world.backend != "nccl":
            return original(p2p_op_list)
        device = virtual.world.device
        real._start_coalescing(device)
        works = original(p2p_op_list)
        done = real._end_coalescing(device)
        return [*works, done] if done is not None else works

    return batch_isend_irecv
