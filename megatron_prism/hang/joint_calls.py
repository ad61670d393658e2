"""Which calls of a group need a closer look?  Those that are not alike on all who made them.

In : State.  Out: per group an iterator of ``{rank: its entries of one call}``, by sequence number.
A thousand dumps hold millions of entries and nearly all are alike, so they are compared as numbers.
What is left out cannot be odd: one entry per rank, the same operation, dtypes and sizes on all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_prism.hang.dumps import Entry
from megatron_prism.hang.outstanding import State

__all__ = ["SIZED", "signature", "suspects"]

SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "barrier")
Calls = dict[int, list[Entry]]


Sign = tuple[str, tuple[str, ...], object]  # operation, dtypes, shape
Signature = tuple[Sign, ...]


def signature(entries: list[Entry]) -> Signature:
    """What must be alike."""
    return tuple((e.op, e.dtypes, e.numbers if e.op in SIZED else ()) for e in entries)


def suspects(state: State) -> Iterator[Iterator[Calls]]:
    """Per group, in the order of first calls: calls that differ, come in batches, or whose sizes
    only fit in sum (all_to_all)."""
    ranks = [rank for rank, dump in state.dumps.items() if dump.entries]
    if not ranks:
        return
    rows, signs, names = _rows(state, ranks)
    real = np.array([name in state.groups for name in names])
    talk = np.array([op != "coalesced" for op, *_ in signs])
    keep = np.flatnonzero(real[rows["group"]] & talk[rows["sign"]] & (rows["to"] < 0))
    order = keep[np.lexsort((rows["seq"][keep], rows["group"][keep]))]  # then by rank, as issued
    found = rows[order]
    first = np.flatnonzero(_new(found["group"]) | _new(found["seq"]))
    size = np.diff(first, append=len(found))
    alike = _alike(signs)[found["sign"]]
    total = np.array([op == "all_to_all" for op, *_ in signs])[found["sign"]]
    again = ~_new(found["rank"])
    again[first] = False
    odd = (alike != np.repeat(alike[first], size)) | total | again
    chosen = np.flatnonzero(np.logical_or.reduceat(odd, first)) if len(first) else first
    groups = found["group"][first[chosen]]
    numbers, begins = np.unique(rows["group"][keep], return_index=True)
    for number in numbers[np.argsort(begins)]:
        runs = chosen[groups == number]
        yield (_calls(state, ranks, rows["place"], order[first[r] : first[r] + size[r]],
                      rows["rank"]) for r in runs)  # fmt: skip


def _new(column: np.ndarray) -> np.ndarray:
    """Where a value differs from the one before it."""
    return np.concatenate([np.ones(min(1, len(column)), bool), column[1:] != column[:-1]])


_ROW = np.dtype([("group", "i4"), ("sign", "i4"), ("rank", "i4"), ("place", "i4"), ("to", "i8"),
                 ("seq", "i8")])  # fmt: skip


def _rows(state: State, ranks: list[int]) -> tuple[np.ndarray, list[Sign], list[str]]:
    """(a row per entry, what its sign says, the name of its group); rank is a place in ranks."""
    names: dict[str, int] = {}
    signs: dict[Sign, int] = {}
    rows = np.empty(sum(len(state.dumps[rank].entries) for rank in ranks), _ROW)
    end = 0
    for number, rank in enumerate(ranks):
        entries = zip(*state.dumps[rank].entries, strict=True)
        columns = dict(zip(Entry._fields, entries, strict=True))
        begin, end = end, end + len(columns["op"])
        mine = rows[begin:end]
        mine["group"] = [names.setdefault(g, len(names)) for g in columns["group"]]
        said = zip(columns["op"], columns["dtypes"], columns["numbers"], strict=True)
        mine["sign"] = [signs.setdefault(s, len(signs)) for s in said]
        mine["rank"], mine["place"] = number, np.arange(end - begin)
        mine["to"], mine["seq"] = columns["to"], columns["seq"]
    return rows, list(signs), list(names)


def _alike(signs: list[Sign]) -> np.ndarray:
    """Per sign the first one that must be taken for the same: sizes do not always count."""
    first: dict[tuple[object, ...], int] = {}
    return np.array([i if op in SIZED else first.setdefault((op, dtypes), i)
                     for i, (op, dtypes, _) in enumerate(signs)])  # fmt: skip


def _calls(
    state: State, ranks: list[int], places: np.ndarray, rows: np.ndarray, owners: np.ndarray
) -> Calls:
    found: Calls = {}
    for row in rows.tolist():
        rank = ranks[owners[row]]
        found.setdefault(rank, []).append(state.dumps[rank].entries[places[row]])
    return found
