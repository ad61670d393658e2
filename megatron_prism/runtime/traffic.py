"""How much communication did this rank take part in?  Counted per group and collective.

Input: one call of :meth:`Tally.add` per collective from the backend.  Output: rows of
``(group description, collective, calls, bytes)``, and with whom messages went.  Cheap enough to be
always on (one dict update).
It does not know about time, order or streams: that is the recorder's job (slices).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Row", "Tally", "Way"]

# (group description, its size, collective, how many places further the other end is, of a batch)
Way = tuple[str, int, str, int, bool]


@dataclass(frozen=True)
class Row:
    """``bytes`` is the message size summed over calls (see ``Collective.payload``)."""

    group: str
    group_size: int
    op: str
    calls: int
    bytes: int


class Tally:
    """Counts of calls and bytes by (group description, group size, collective)."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, str], list[int]] = {}
        self._ways: dict[Way, None] = {}
        self.batched = False  # several messages are being issued together

    def add(self, group: str, group_size: int, op: str, num_bytes: int, distance: int = 0) -> None:
        """Count one call that moved a message of ``num_bytes``; of sends and receives ``distance``
        says how many places further in the group the other end is."""
        if distance:
            self._ways[group, group_size, op, distance, self.batched] = None
        entry = self._counts.get((group, group_size, op))
        if entry is None:
            self._counts[group, group_size, op] = [1, num_bytes, num_bytes, num_bytes]
            return
        entry[0] += 1
        entry[1] += num_bytes
        if num_bytes > entry[3]:
            entry[3] = num_bytes
        elif num_bytes < entry[2]:
            entry[2] = num_bytes

    def calls_to_others(self) -> int:
        """How many calls with another member were counted so far; another thread may ask."""
        return sum(entry[0] for (_, size, _), entry in list(self._counts.items()) if size > 1)

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
        return [
            (*key, size) for key, entry in self._counts.items() for size in sorted(set(entry[2:]))
        ]

    def rows(self) -> list[Row]:
        """All rows, largest traffic first, ties by name so that two runs print the same."""
        rows = [Row(*key, entry[0], entry[1]) for key, entry in self._counts.items()]
        return sorted(rows, key=lambda r: (-r.bytes, -r.calls, r.group, r.group_size, r.op))

    def copy(self) -> Tally:
        """An independent snapshot."""
        other = Tally()
        other._counts = {key: list(value) for key, value in self._counts.items()}
        other._ways = dict(self._ways)
        return other

    def since(self, earlier: Tally) -> Tally:
        """What was added after ``earlier`` was copied from this tally."""
        delta = Tally()
        for key, (calls, size, *ends) in self._counts.items():
            before = earlier._counts.get(key, (0, 0))
            if calls != before[0]:
                delta._counts[key] = [calls - before[0], size - before[1], *ends]
        return delta
