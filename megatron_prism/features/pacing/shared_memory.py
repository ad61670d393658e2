"""Memory that all local ranks of one host map, through which they know of each other's calls.

A file in /dev/shm, page-locked and mapped into every device: the ends of interactions, who came to
them when, and the words with which ``prism_ping`` compares clocks.  Its name travels through the
processes' store, and it has no name any more once all of them have it open.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_prism.core.errors import PrismError, UsageError

if TYPE_CHECKING:
    from torch import distributed as dist

    from megatron_prism.features.pacing.answer_times import AnswerTimes

AREA = 8  # words of each process with which clocks are compared
_FOLDER = Path("/dev/shm")
_ALIGN = 256


def layout(
    ring: int, interactions: int, seats: int, processes: int
) -> dict[str, tuple[int, np.ndarray]]:
    """name -> (bytes from the beginning, an empty array of what is there); ``size`` is the end."""
    arrays: dict[str, np.ndarray] = {
        "end": np.empty((ring, interactions), np.int64),
        "tag": np.empty((ring, interactions), np.int32),
        "here": np.empty((ring, seats), np.int64),
        "seen": np.empty((ring, seats), np.int32),
        "gone": np.empty(1, np.int32),
        "area": np.empty((processes, AREA), np.int64),
    }
    places: dict[str, tuple[int, np.ndarray]] = {}
    size = 0
    for name, array in arrays.items():
        places[name] = (size, array)
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    places["size"] = (size, np.empty(0))
    return places


def seats(table: AnswerTimes, launches: list[list[int]], process: int) -> dict[str, np.ndarray]:
    """Per member of ``launches``, one after the other: whose arrivals its interaction waits for.

    A seat is a row of ``table.member``: a local rank in an interaction.  ``mine`` [members] is this
    process's own, ``with`` [members + 1] slices ``whom``, the seats of other local ranks.
    """
    seats_of_interaction: dict[int, list[int]] = {}
    for seat, interaction in enumerate(table.of.tolist()):
        seats_of_interaction.setdefault(interaction, []).append(seat)
    owner = table.member.tolist()
    own_seats: list[int] = []
    awaited_seats: list[int] = []
    starts = [0]
    for interaction in itertools.chain.from_iterable(launches):
        members = seats_of_interaction[interaction]
        own_seats += [seat for seat in members if owner[seat] == process][:1]
        awaited_seats += [seat for seat in members if owner[seat] != process]
        starts.append(len(awaited_seats))
    return {
        "mine": np.array(own_seats, dtype=np.int32),
        "with": np.array(starts, dtype=np.int32),
        "whom": np.array(awaited_seats, dtype=np.int32),
    }


def meet(store: dist.Store, processes: int, where: str) -> None:
    """Go on when every local process has come here."""
    key = f"prism/pace/{where}"
    if store.add(key, 1) == processes:
        store.set(f"{key}/all", "1")
    store.wait([f"{key}/all"])


def _make_file(size: int) -> tuple[int, str]:
    """(descriptor, name) of a new file of ``size`` bytes, all of them there.

    UsageError if there is no room: a file with holes would end the process when it is written to.
    """
    handle, name = tempfile.mkstemp(prefix="prism-", dir=_FOLDER)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        os.close(handle)
        os.unlink(name)
        message = f"several paced ranks share {size:,} bytes in /dev/shm: {error.strerror}"
        fix = "make it larger (docker run --shm-size), or run each rank alone, without torchrun"
        raise UsageError(message, fix=fix) from error
    return handle, name


class Shared:
    """This process's view of the memory.

    process, processes : which of how many
    places             : ``layout``
    table              : what all must have alike, in a word
    base               : the host's address; ``map`` has the device's
    """

    def __init__(
        self,
        store: dist.Store,
        process: int,
        processes: int,
        places: dict[str, tuple[int, np.ndarray]],
        table: str,
    ) -> None:
        self.process, self.processes, self.places = process, processes, places
        self._store = store
        size = places["size"][0]
        if not _FOLDER.is_dir():
            message = "several paced ranks share memory in /dev/shm, and there is none"
            raise UsageError(message, fix="run each rank alone, without torchrun")
        # the first process makes the file and tells its name
        if process == 0:
            handle, name = _make_file(size)
            store.set("prism/pace/file", f"{name} {table}")
        else:
            name = store.get("prism/pace/file").decode().split()[0]
            handle = os.open(name, os.O_RDWR)
        # the last one to open the file removes its name, so that it goes with the processes
        if store.add("prism/pace/open", 1) == processes:
            os.unlink(name)
        # numbers of interactions in the shared memory are those of one table
        if store.get("prism/pace/file").decode().split()[1] != table:
            os.close(handle)
            message = f"local rank {process} has another table of releases than local rank 0"
            raise PrismError(message, fix="give all local ranks the same slices and the same flags")
        self._map = mmap.mmap(handle, size)
        os.close(handle)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.gone = np.frombuffer(self._map, np.int32, 1, places["gone"][0])

    def meet(self, where: str) -> None:
        """Go on when every local process has come here."""
        meet(self._store, self.processes, where)

    def map(self, map_host: Callable[[int, int], int]) -> dict[str, int]:
        """name -> the device's address; ``map_host`` takes a host address and a size."""
        base = map_host(self.base, self.places["size"][0])
        return {name: base + at for name, (at, _) in self.places.items()}

    def array(self, name: str) -> np.ndarray:
        """A copy of what is there now."""
        at, like = self.places[name]
        values = np.frombuffer(self._map, like.dtype, like.size, at)
        return values.reshape(like.shape).copy()

    def leave(self, iteration: int) -> None:
        """Nobody shall wait for ``iteration`` or earlier ones."""
        self.gone[0] = max(int(self.gone[0]), iteration + 1)
