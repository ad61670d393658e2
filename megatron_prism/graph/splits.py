"""Does every member of an all-to-all, or of an uneven gather, send what the others expect?  Row by
row, pair by pair.

In : programs and classes whose FIFOs agree.  Out: (group, entry, (sender, receiver), sentence) for
the first disagreement of each entry.  Only groups in which some call has explicit splits are
looked at, and only one group of each arrangement of classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from megatron_prism.core.membership import Membership
from megatron_prism.core.ops import CODE, IS_COLLECTIVE
from megatron_prism.core.program import Program
from megatron_prism.core.programs import Programs
from megatron_prism.graph.classes import Classes

__all__ = ["check_splits"]

_GATHER = CODE["all_gather"]


def check_splits(
    programs: Programs, classes: Classes, groups: Mapping[str, Membership]
) -> Iterator[tuple[str, int, tuple[int, int], str]]:
    """Disagreements between what i sends to j and what j expects from i."""
    explicit = {
        program.strings[code]
        for program in programs.programs
        for code in np.unique(program.ops["group"][program.ops["splits"] >= 0])
    }
    for name in sorted(explicit):
        for ranks in _arrangements(groups[name], classes.of):
            table = [_Fifo(programs.of(int(rank)), name) for rank in ranks]
            yield from _compare(name, ranks, table)


def _arrangements(group: Membership, of: np.ndarray) -> Iterator[np.ndarray]:
    """One group of each arrangement of classes by position."""
    seen: set[bytes] = set()
    for index in range(len(group.start) - 1):
        ranks = group.members[group.start[index] : group.start[index + 1]]
        key = of[ranks].tobytes()
        if key not in seen:
            seen.add(key)
            yield ranks


class _Fifo:
    """The collectives of one program in one group, their splits in elements."""

    def __init__(self, program: Program, name: str) -> None:
        found = program.groups().get(name, np.empty(0, dtype=np.int64))
        self.indices = found[IS_COLLECTIVE[program.ops["name"][found]]]
        self.program = program

    def broken(self, number: int) -> str | None:
        """In words, why the splits cannot be those of the tensor; None if they can."""
        row = self.program.ops[self.indices[number]]
        gathers = row["name"] == _GATHER
        for side, name in enumerate(("num_in", "num_out") if row["splits"] >= 0 else ()):
            total, rows = int(row[name]), self.program.splits[row["splits"]][side]
            whole = rows[0] if gathers and side == 0 and rows else sum(rows)
            if total >= 0 and (total != whole if gathers or not whole else total % whole):
                what = ("sends", "receives")[side]
                return f"{what} {total} elements and gives {whole} rows of them to its members"
        return None

    def elements(self, number: int, side: int) -> np.ndarray | None:
        """Elements to (side 0) or from (side 1) every member; None if the call does not say."""
        row = self.program.ops[self.indices[number]]
        if row["splits"] < 0:
            return None
        rows = np.array(self.program.splits[row["splits"]][side], dtype=np.int64)
        if row["name"] == _GATHER:  # elements, and everybody gets the same
            return rows
        total = int(row["num_in"] if side == 0 else row["num_out"])
        whole = int(rows.sum())
        return rows * (total // whole) if whole else rows


def _compare(
    name: str, ranks: np.ndarray, table: list[_Fifo]
) -> Iterator[tuple[str, int, tuple[int, int], str]]:
    for number in range(min(len(fifo.indices) for fifo in table)):
        broken = [(r, text) for r, fifo in zip(ranks, table, strict=True)
                  if (text := fifo.broken(number))]  # fmt: skip
        if broken:
            rank, text = broken[0]
            yield name, number, (int(ranks[0]), int(rank)), f"rank {rank} {text}"
            continue
        sides = [fifo.elements(number, way) for way in (0, 1) for fifo in table]
        known = [side for side in sides if side is not None and len(side) == len(ranks)]
        if len(known) < len(sides):
            yield from _incomplete(name, number, ranks, sides)
            continue
        sent, wanted = np.stack(known[: len(table)]), np.stack(known[len(table) :]).T
        if not np.array_equal(sent, wanted):
            i, j = map(int, np.argwhere(sent != wanted)[0])
            text = (
                f"rank {ranks[i]} sends {sent[i, j]} elements to rank {ranks[j]}, which expects "
                f"{wanted[i, j]}"
            )
            yield name, number, (int(ranks[i]), int(ranks[j])), text


def _incomplete(
    name: str, number: int, ranks: np.ndarray, sides: list[np.ndarray | None]
) -> Iterator[tuple[str, int, tuple[int, int], str]]:
    """Splits of the wrong length are an error; absent ones say nothing."""
    for place, side in enumerate(sides):
        if side is not None and len(side) != len(ranks):
            rank = int(ranks[place % len(ranks)])
            text = f"rank {rank} gives {len(side)} splits for a group of {len(ranks)}"
            yield name, number, (int(ranks[0]), rank), text
            return
