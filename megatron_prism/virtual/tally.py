"""How much communication did this rank take part in?  Counted per group and collective.

Input: one call of :meth:`Tally.add` per collective from the backend.  Output: rows of
``(group description, collective, calls, bytes)``.  Cheap enough to be always on (one dict update).
It does not know about time, order or streams: that is the recorder's job (slices).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Row", "Tally"]


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

    def add(self, group: str, group_size: int, op: str, num_bytes: int) -> None:
        """Count one call that moved a message of ``num_bytes``."""
        entry = self._counts.get((group, group_size, op))
        if entry is None:
            self._counts[group, group_size, op] = [1, num_bytes]
        else:
            entry[0] += 1
            entry[1] += num_bytes

    def rows(self) -> list[Row]:
        """All rows, largest traffic first, ties by name so that two runs print the same."""
        rows = [Row(g, n, op, calls, size) for (g, n, op), (calls, size) in self._counts.items()]
        return sorted(rows, key=lambda r: (-r.bytes, -r.calls, r.group, r.group_size, r.op))

    def copy(self) -> Tally:
        """An independent snapshot."""
        other = Tally()
        other._counts = {key: list(value) for key, value in self._counts.items()}
        return other

    def since(self, earlier: Tally) -> Tally:
        """What was added after ``earlier`` was copied from this tally."""
        delta = Tally()
        for key, (calls, size) in self._counts.items():
            before = earlier._counts.get(key, (0, 0))
            if calls != before[0]:
                delta._counts[key] = [calls - before[0], size - before[1]]
        return delta
