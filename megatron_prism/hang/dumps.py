"""What is in a Flight Recorder dump?  The values that the reader makes and the analyses read.

``pg_status`` and entries count from 1; sequence numbers are per group, as ProcessGroupNCCL counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

__all__ = ["Dump", "DumpSet", "Entry", "Group", "Status"]


@dataclass(frozen=True, slots=True)
class Group:
    """One process group: its name, Megatron's group_desc, its global ranks in group order."""

    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """Last call of a group that this rank enqueued, saw start (-1: unknown) and saw complete."""

    enqueued: int
    started: int
    completed: int


class Entry(NamedTuple):  # made by the million: a frozen dataclass takes four times as long
    """One call.  ``op`` is a name of ``collectives.TABLE`` or the recorder's own word.

    seq : place among the group's collectives, or for sends and receives among those
    to  : group rank of the other side of a send or receive, else -1
    ``numbers`` are the elements of (inputs, outputs), ``dtypes`` the recorder's words
    """

    record: int
    group: str
    desc: str
    op: str
    seq: int
    calls: int  # collectives of the group up to here, also for sends and receives
    to: int
    numbers: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, ...]
    state: str
    done: bool
    site: str
    timeout_ms: int
    created_ns: int

    @property
    def pair(self) -> bool:
        """Whether it is a send or a receive."""
        return self.to >= 0

    @property
    def launch(self) -> tuple[str, bool, int]:
        """What all that is issued in one batch has in common."""
        return self.group, self.pair, self.seq


@dataclass(frozen=True, slots=True)
class Dump:
    """One rank's dump; ``notes`` says what it lacks.

    ids     : this rank's number of a group -> the group's name, as its calls say
    unnamed : numbers of which it does not say whose they are -> their counters
    written_ns : when its file was written, by the clock of its calls; 0 if that is not known
    """

    rank: int
    version: str
    groups: Mapping[str, Group]
    status: Mapping[str, Status]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    ids: Mapping[str, str] = field(default_factory=dict)
    unnamed: Mapping[str, Status] = field(default_factory=dict)
    written_ns: int = 0


@dataclass(frozen=True)
class DumpSet:
    """The dumps of a folder by rank, and files that could not be read (rank -> why)."""

    dumps: Mapping[int, Dump]
    unreadable: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def listed(self) -> Mapping[str, Counter[Group]]:
        """Group name -> how many dumps list which members, of those that list any."""
        same: Counter[tuple[str, int]] = Counter()  # mostly one object: hashing its ranks is slow
        objects: dict[int, Group] = {}
        for dump in self.dumps.values():
            for name, group in dump.groups.items():
                if group.ranks:
                    same[name, id(group)] += 1
                    objects[id(group)] = group
        found: dict[str, Counter[Group]] = defaultdict(Counter)
        for (name, number), count in same.items():
            found[name][objects[number]] += count
        return found
