"""The virtual world that this process plays a rank of: its groups, and a count of its traffic.

``start(...)`` brings ``torch.distributed`` up with the ``prism`` backend as global rank ``rank`` of
``size``; from then on every ``dist.new_group`` makes a PrismGroup, at no cost for groups that this
rank is not in.  ``stop()`` undoes it.  One virtual world per process, as for torch.distributed.

With k processes (torchrun) the k ranks in ``local_ranks`` are local: groups with several of them
get a real c10d group (NCCL on GPUs, gloo elsewhere) over a store that the processes share.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from megatron_prism.core.errors import UsageError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.programs.collectives import BY_NAME
from megatron_prism.runtime import torch_distributed
from megatron_prism.runtime.answers import PartiallyLocalGroup
from megatron_prism.runtime.listeners import CallListener, overriding
from megatron_prism.runtime.process_group import PrismGroup
from megatron_prism.runtime.values import Values

# (group description, its size, collective, how many places further the other end is, of a batch)
Way = tuple[str, int, str, int, bool]


@dataclass(frozen=True)
class TrafficRow:
    """``bytes`` is the message size summed over calls (see ``Collective.payload``)."""

    group: str
    group_size: int
    op: str
    calls: int
    bytes: int


class TrafficCounter:
    """Counts of calls and bytes by (group description, group size, collective)."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, int, str]] = Counter()
        self._bytes: Counter[tuple[str, int, str]] = Counter()
        self._ends: dict[tuple[str, int, str], tuple[int, int]] = {}  # smallest and largest call
        self._ways: dict[Way, None] = {}
        self.batched = False  # several messages are being issued together

    def add(self, group: str, group_size: int, op: str, num_bytes: int, distance: int = 0) -> None:
        """Count one call that moved a message of ``num_bytes``; of sends and receives ``distance``
        says how many places further in the group the other end is.
        """
        if distance:
            self._ways[group, group_size, op, distance, self.batched] = None
        key = group, group_size, op
        self._calls[key] += 1
        self._bytes[key] += num_bytes
        smallest, largest = self._ends.get(key, (num_bytes, num_bytes))
        self._ends[key] = min(smallest, num_bytes), max(largest, num_bytes)

    def collectives(self) -> Counter[str]:
        """Description -> NCCL's collectives that were counted so far."""
        calls_of_group: Counter[str] = Counter()
        for (group, _, op), calls in list(self._calls.items()):
            calls_of_group[group] += (
                calls if BY_NAME[op].kind == "group" and BY_NAME[op].nccl else 0
            )
        return calls_of_group

    def calls_to_others(self) -> int:
        """How many calls with another member were counted so far; another thread may ask."""
        return sum(calls for (_, size, _), calls in list(self._calls.items()) if size > 1)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """The messages that are counted inside are issued together."""
        before, self.batched = self.batched, True
        try:
            yield
        finally:
            self.batched = before

    def ways(self) -> tuple[Way, ...]:
        """With whom messages went, in the order of the first."""
        return tuple(self._ways)

    def sizes(self) -> list[tuple[str, int, str, int]]:
        """(group, its size, collective, bytes) of the smallest and of the largest call of each."""
        rows = []
        for key, ends in self._ends.items():
            # one row where all calls have the same size
            rows += [(*key, size) for size in sorted(set(ends))]
        return rows

    def rows(self) -> list[TrafficRow]:
        """All rows, largest traffic first, ties by name so that two runs print the same."""
        rows = [TrafficRow(*key, calls, self._bytes[key]) for key, calls in self._calls.items()]
        return sorted(rows, key=lambda r: (-r.bytes, -r.calls, r.group, r.group_size, r.op))

    def copy(self) -> TrafficCounter:
        """Its counts so far, for ``since``."""
        return self.since(TrafficCounter())

    def repeat(self, calls: TrafficCounter) -> None:
        """Count ``calls``, which were counted before, once more."""
        self._calls.update(calls._calls)
        self._bytes.update(calls._bytes)

    def since(self, earlier: TrafficCounter) -> TrafficCounter:
        """What was counted after ``earlier`` was copied from this tally."""
        delta = TrafficCounter()
        delta._calls = self._calls - earlier._calls
        delta._bytes = self._bytes - earlier._bytes
        return delta


_TIMEOUT = timedelta(minutes=10)
_world: VirtualWorld | None = None

Observer = Callable[[PrismGroup, str, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class VirtualWorld:
    """A world of ``size`` ranks seen from global rank ``rank``.

    local_ranks : global ranks that have a process, ascending; the i-th process runs the i-th
    store       : c10d store shared by the local processes; None if there is one process only
    device      : where the local tensors live (``cuda``, ``cpu`` or ``meta``)
    backend     : backend of real groups, ``nccl`` or ``gloo``
    tally       : counts every call
    listeners   : who follows the calls, the outermost first (a guard before a recorder or pacer)
    patient     : real groups wait for a local rank that stands in a debugger
    """

    def __init__(
        self,
        size: int,
        rank: int,
        local_ranks: Sequence[int],
        values: Values,
        device: torch.device,
        store: dist.Store | None = None,
        backend: str = "gloo",
        tally: TrafficCounter | None = None,
        listeners: Sequence[CallListener] = (),
        patient: bool = False,
    ) -> None:
        self.size, self.rank = size, rank
        self.local_ranks = tuple(sorted(local_ranks))
        self.values = values
        self.device = device
        self.shapes_only = device.type == "meta"
        self.store = store
        self.backend = backend
        self.timeout = timedelta(days=30) if patient else _TIMEOUT
        self.tally = TrafficCounter() if tally is None else tally
        self.listen(*listeners)
        self.changes = ProcessChanges()  # while this world is up
        self._num_real: dict[str, int] = {}
        self._num_groups = 0

    def listen(self, *listeners: CallListener) -> None:
        """Have ``listeners`` follow the calls from here on, instead of those before.

        Raises ValueError if a listener that makes calls without handing them on is not the last
        such one.
        """
        callers = overriding(listeners, CallListener, "record")
        if any(not getattr(caller, "hands_on", False) for caller in callers[:-1]):
            raise ValueError(f"only the last listener may keep calls to itself: {callers}")
        self.listeners: tuple[CallListener, ...] = tuple(listeners)
        # what a call looks at: who makes it (None: nobody), and who sees the answer
        self.caller: CallListener | None = callers[0] if callers else None
        self.observers: tuple[Observer, ...] = tuple(
            listener.observe for listener in overriding(listeners, CallListener, "observe")
        )
        self._after = dict(zip(map(id, callers), callers[1:], strict=False))

    def after(self, caller: CallListener) -> CallListener | None:
        """The listener that makes the call after ``caller``, or None if it is the last."""
        return self._after.get(id(caller))

    def unrecorded(self, answer: Callable[[], None]) -> None:
        """Do what stands for virtual ranks and is no call; a recorder leaves it out."""
        for listener in reversed(overriding(self.listeners, CallListener, "unrecorded")):
            answer = partial(listener.unrecorded, answer)
        answer()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """What is issued inside are messages of one call."""
        with contextlib.ExitStack() as together:
            together.enter_context(self.tally.batch())
            for listener in overriding(self.listeners, CallListener, "batch"):
                together.enter_context(listener.batch())
            yield

    def __repr__(self) -> str:
        return f"<virtual world: rank {self.rank} of {self.size}, local {self.local_ranks}>"

    def build_group(
        self,
        ranks: Sequence[int] | None,
        name: str | None,
        desc: str | None,
        backend: str | None = None,
    ) -> PrismGroup | None:
        """The group of global ``ranks`` (None: all), or None if this rank is not one of them.

        ``backend`` is what the caller asked for; groups of ``gloo`` carry host tensors on every
        tier.
        """
        if ranks is None:
            ranks = range(self.size)
        # torch gives no group to a rank that is no member
        elif self.rank not in ranks:
            return None
        self._num_groups += 1
        name = name or f"prism_{self._num_groups}"
        ranks = _compact(ranks)
        desc = desc or "undefined"
        return PrismGroup(self, ranks, ranks.index(self.rank), name, desc, backend)

    def connect(
        self, group: PrismGroup, backend: str | None = None
    ) -> tuple[dist.ProcessGroup | None, PartiallyLocalGroup | None]:
        """(real group of the local members or None, answers for a mixed group or None)."""
        if len(self.local_ranks) < 2 or self.shapes_only:
            return None, None
        # in group order, which is not ascending under new_group(sort_ranks=False)
        local = sorted(set(self.local_ranks) & set(group.ranks), key=group.ranks.index)
        if len(local) < 2:
            return None, None
        nccl = self.backend == "nccl" and backend != "gloo"
        real = self._real_group(local, group.desc, nccl)
        # gloo lacks averages, bools and lists (all-to-all), so its groups answer through Mixed too
        if len(local) == len(group.ranks) and nccl:
            return real, None
        positions = [group.ranks.index(rank) for rank in local]
        return real, PartiallyLocalGroup(
            real, positions, len(group.ranks), group.ranks.index(self.rank)
        )

    def _real_group(self, local: Sequence[int], desc: str, nccl: bool) -> dist.ProcessGroup:
        """A c10d group of the processes that run ``local``.

        The store prefix is made of the members, the description and how many such groups this
        process made: every member makes its groups in Megatron's order, so the prefixes agree.
        """
        # one rank alone has no store, and needs no real group
        if self.store is None:
            message = f"{len(self.local_ranks)} local ranks need a store to find each other"
            fix = f"start with torchrun --nproc-per-node {len(self.local_ranks)}"
            raise UsageError(message, fix=fix)
        key = f"{desc}:{','.join(map(str, local))}"
        count = self._num_real[key] = self._num_real.get(key, 0) + 1
        tag = hashlib.sha1(f"{key}:{count}".encode()).hexdigest()[:16]
        store = dist.PrefixStore(f"prism/{tag}/", self.store)
        index = local.index(self.rank)
        pg = dist.ProcessGroup(store, index, len(local))
        if nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            kind, device = dist.ProcessGroup.BackendType.NCCL, torch.device("cuda")
            backend: Any = dist.ProcessGroupNCCL(store, index, len(local), options)
        else:
            kind, device = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
            backend = dist.ProcessGroupGloo(store, index, len(local), timeout=self.timeout)
        backend._set_sequence_number_for_group()
        pg._set_default_backend(kind)
        pg._register_backend(device, kind, backend)
        pg._set_group_name(GroupName(f"prism_real_{tag}"))
        return pg


def _compact(ranks: Sequence[int]) -> Sequence[int]:
    """The same ranks as a range if they are evenly spaced: a list of 65,536 takes 2.6 MB."""
    if isinstance(ranks, range) or len(ranks) < 3:
        return ranks
    even = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
    return even if len(even) == len(ranks) and list(even) == list(ranks) else ranks


def current() -> VirtualWorld | None:
    """The virtual world of this process, or None if it has none."""
    return _world


def values_of(group: Any) -> Values | None:
    """What virtual members of ``group`` hold; None if it has none, is somebody else's, or delivers
    what real members did.
    """
    has_virtual = isinstance(group, PrismGroup) and group.has_virtual
    return group.world.values if has_virtual and not group.world.values.replays(group) else None


def start(world: VirtualWorld) -> VirtualWorld:
    """Bring torch.distributed up as ``world.rank`` of ``world.size`` without touching a store.

    Raises UsageError if torch.distributed is up already, or the rank is not in the world.
    """
    global _world
    if dist.is_initialized():
        message = "torch.distributed is already initialised, so this world cannot be virtual"
        fix = "start the virtual world before anything calls init_process_group"
        raise UsageError(message, fix=fix)
    if not 0 <= world.rank < world.size or world.rank not in world.local_ranks:
        message = f"rank {world.rank} is not a local rank of a world of {world.size}"
        raise UsageError(message, fix=f"choose ranks between 0 and {world.size - 1}")
    if _world is not None:  # the job itself took torch.distributed down
        _world.changes.undo()
    _world = world
    _register_backend(world.changes)
    _keep_settings(world.changes)
    torch_distributed.replace_functions(world.changes)
    barrier = os.environ.pop("TORCH_DIST_INIT_BARRIER", None)  # it would wait for all ranks
    try:
        # HashStore: init_process_group wants a store, and nothing ever reads it
        dist.init_process_group(
            "prism", store=dist.HashStore(), rank=world.rank, world_size=world.size
        )
    except BaseException:
        stop()
        raise
    finally:
        if barrier is not None:
            os.environ["TORCH_DIST_INIT_BARRIER"] = barrier
    default = dist.group.WORLD
    assert isinstance(default, PrismGroup), default
    # Megatron asks get_backend() by name (straggler detector, signal handler): answer as the real
    # job would.  The group itself still says that it is prism.
    torch_distributed.describe(default, world.backend)
    return world


def _keep_settings(changes: ProcessChanges) -> None:
    """Undo what init_process_group sets and destroy_process_group leaves."""
    hook, backend = sys.excepthook, c10d._backend
    changes.on_undo(lambda: setattr(sys, "excepthook", hook))
    changes.on_undo(lambda: setattr(c10d, "_backend", backend))


def _register_backend(changes: ProcessChanges) -> None:
    """Make the backend ``prism`` known to torch, which has no function that forgets one."""
    backend = dist.Backend

    def forget() -> None:
        delattr(backend, "PRISM")
        backend.backend_list.remove("prism")
        del backend.backend_type_map["prism"], backend.backend_capability["prism"]
        del backend._plugins["PRISM"]
        devices = backend.default_device_backend_map
        for device in [device for device, name in devices.items() if name == "prism"]:
            del devices[device]

    backend.register_backend(
        "prism", lambda options, _: _create_default(options), True, ["cpu", "cuda"]
    )
    changes.on_undo(forget)


def _create_default(options: Any) -> PrismGroup:
    assert _world is not None
    group = _world.build_group(None, options.group_id, "default_pg")
    assert group is not None
    return group


def stop() -> None:
    """Take torch.distributed down and undo the patches; harmless if there is no virtual world."""
    global _world
    if _world is None:
        return
    if dist.is_initialized() and isinstance(dist.group.WORLD, PrismGroup):
        dist.destroy_process_group()
    world, _world = _world, None
    world.changes.undo()
