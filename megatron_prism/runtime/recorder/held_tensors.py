"""Tensors that objects of a model keep from one microbatch until the next has others.

A dispatcher of tokens keeps its routing map as an attribute: the forward of the next microbatch
puts another one there, and the old one is freed in the middle of that forward.  A step that is
written down again (``repeats``) must free it at the same place, and leave one of its own.

``find`` lists such tensors of a model chunk.  ``Watch`` says where a step that runs replaces them:
stand-ins hold the tensors, and their end is the place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.live_bytes import LiveBytes

_DEPTH = 3  # objects in objects of a module: a dispatcher and what it communicates with
_MOST_ITEMS = 64  # of a container that is looked into
_OUTSIDE = 1 << 62  # address of what has no memory on the device
_PLAIN = (
    *(str, bytes, int, float, bool, type(None), type, ModuleType),
    *(torch.dtype, torch.device, torch.Size),
)
Container = dict[Hashable, object]  # the attributes of an object, or a dictionary among them


@dataclass(frozen=True)
class Holder:
    """One place that holds a tensor: an entry of a container."""

    container: Container
    name: Hashable

    @property
    def identity(self) -> tuple[int, Hashable]:
        """What tells it from other places."""
        return id(self.container), self.name

    @property
    def tensor(self) -> object:
        """What is there now."""
        return self.container.get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Replace what is there."""
        self.container[self.name] = tensor


@dataclass(frozen=True)
class Held:
    """A storage that objects of a model hold.

    Attributes:
        number: Its running number.
        num_bytes: Its size.
        holders: Where tensors of it are.
    """

    number: int
    num_bytes: int
    holders: tuple[Holder, ...]

    @property
    def places(self) -> frozenset[tuple[int, Hashable]]:
        """What tells it from other storages of the same objects."""
        return frozenset(holder.identity for holder in self.holders)


def find(model: torch.nn.Module, live: LiveBytes, first: int) -> list[Held]:
    """List the storages that objects of ``model`` hold, by their numbers.

    Args:
        model: A model chunk.
        live: Who counts storages.
        first: The running number from which on they are listed.
    """
    holders: dict[int, list[Holder]] = {}
    sizes: dict[int, int] = {}
    for holder in _holders(model):
        tensor = holder.tensor
        assert isinstance(tensor, torch.Tensor)
        counted = live.counted(tensor)
        # not of the device
        if counted is None:
            continue
        number, num_bytes = counted
        # older storages are listed elsewhere
        if number >= first:
            holders.setdefault(number, []).append(holder)
            sizes[number] = num_bytes
    return [Held(number, sizes[number], tuple(holders[number])) for number in sorted(holders)]


def _holders(model: torch.nn.Module) -> Iterator[Holder]:
    """List where attributes of modules and of their helpers hold plain tensors."""
    seen: set[int] = set()
    for module in model.modules():
        yield from _in_container(cast(Container, vars(module)), seen, _DEPTH)


def _in_container(container: Container, seen: set[int], depth: int) -> Iterator[Holder]:
    """The same of one dictionary, and of the objects in it."""
    if id(container) in seen:
        return
    seen.add(id(container))
    for name, value in list(container.items()):
        if type(value) is torch.Tensor:
            yield Holder(container, name)
        elif isinstance(value, (*_PLAIN, torch.Tensor, torch.nn.Module)) or not depth:
            # modules have their own turn
            continue
        elif isinstance(value, dict):
            if len(value) <= _MOST_ITEMS:
                yield from _in_container(value, seen, depth - 1)
        elif not callable(value) and hasattr(value, "__dict__"):
            yield from _in_container(cast(Container, vars(value)), seen, depth - 1)


@dataclass(frozen=True)
class StepMoment:
    """A moment of an iteration: how much of everything there was before it.

    Attributes:
        history: Rows of the history of requests.
        launches: Kernels.
        ops: Ops that were recorded.
        memory: Changes of memory that were recorded.
        stream: Number of the current stream, 0 for the default one.
    """

    history: int
    launches: int
    ops: int
    memory: int
    stream: int


class _Ended(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a stand-in's storage that knows whom to tell."""

    __slots__ = ("stand_in",)
    stand_in: StandIn


class StandIn:
    """What is put in the place of a held storage.

    Attributes:
        held: The storage that it stands for.
        end: When the last tensor of it went; None while there is one.
    """

    def __init__(self, held: Held, here: Callable[[], StepMoment]) -> None:
        self.held = held
        self.end: StepMoment | None = None
        self._here = here
        # the original tensors live until then
        self._originals: list[torch.Tensor] = []
        self._made: list[weakref.ref[torch.Tensor]] = []
        with _disable_current_modes():
            storage = torch.empty(
                held.num_bytes, dtype=torch.uint8, device="meta"
            ).untyped_storage()
            storage.address = _OUTSIDE  # type: ignore[attr-defined]
            for holder in held.holders:
                original = holder.tensor
                assert isinstance(original, torch.Tensor)
                stand_in = look_alike(original, storage)
                self._originals.append(original)
                self._made.append(weakref.ref(stand_in))
                holder.put(stand_in)
        self._ended = _Ended(storage, _note_end)
        self._ended.stand_in = self

    def note_end(self) -> None:
        """Note that the last tensor has gone, and let the original ones go."""
        self.end = self._here()
        self._originals.clear()

    def restore(self) -> bool:
        """Put the original tensors back; False if some of the places hold others by now."""
        all_restored = True
        for holder, original, stand_in in zip(
            self.held.holders, self._originals, self._made, strict=True
        ):
            # the job has put another tensor there meanwhile
            if holder.tensor is stand_in():
                holder.put(original)
            else:
                all_restored = False
        return all_restored


def _note_end(ended: weakref.ref[torch.UntypedStorage]) -> None:
    assert isinstance(ended, _Ended)
    ended.stand_in.note_end()


def look_alike(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Make a tensor that sees ``storage`` as ``tensor`` sees its own; without modes."""
    copy = torch.empty(0, dtype=tensor.dtype, device="meta")
    copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    vars(copy).update(vars(tensor))
    return copy


class Watch:
    """Stand-ins for all that a model holds, while a step runs."""

    def __init__(self, held: Sequence[Held], here: Callable[[], StepMoment]) -> None:
        """Put them in place.

        Args:
            held: What they stand for.
            here: Says what the moment is.
        """
        self._stand_ins = [StandIn(storage, here) for storage in held]

    def finish(self) -> list[StandIn] | None:
        """Return those that have gone, and restore the others; None if one has gone in part."""
        gone: list[StandIn] = []
        all_restored = True
        for stand_in in self._stand_ins:
            if stand_in.end is not None:
                gone.append(stand_in)
            elif not stand_in.restore():
                all_restored = False
        return gone if all_restored else None
