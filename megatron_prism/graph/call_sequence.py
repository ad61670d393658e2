"""What must the members of a group call alike, and how do two of them differ?

In : the collectives of two members in one group.  Out: the kind of their first disagreement, where
it is, and what probably happened.  Whose fault it is, and the picture, are ``matching``'s affair.
``unsound`` looks at one program by itself first: waits and batches that say nothing.
"""

from __future__ import annotations

import numpy as np

from megatron_prism.core.ops import CODE, DTYPE_NAMES, IS_COLLECTIVE, IS_PAIR, NAMES, REDUCE
from megatron_prism.core.program import Program

__all__ = ["diagnose", "signature", "unsound"]

_FIELDS = ("operation", "dtype", "shape", "reduce op", "root", "coalescing")
_COUNT_IN = [CODE[n] for n in ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "send")]
_COUNT_OUT = [CODE[n] for n in ("reduce_scatter", "scatter", "recv")]
_SILENT = [CODE[n] for n in ("grad_sync", "param_sync", "mark")]  # may stand in a batch
_AHEAD = 3  # entries that must agree again for a finding to be called missing, not different


def unsound(program: Program) -> tuple[str, int, str] | None:
    """(kind, op, what is wrong with it) of the first op that means nothing; None if all do."""
    ops = program.ops
    names, handles, batches = ops["name"], ops["handle"], ops["batch"]
    calls = IS_COLLECTIVE[names] | IS_PAIR[names]
    found = []
    makers = np.flatnonzero((calls | (names == CODE["record"])) & (handles >= 0))
    known, first = np.unique(handles[makers], return_index=True)
    begun = np.append(makers[first], len(ops))
    waits = np.flatnonzero(names == CODE["wait"])
    place = np.searchsorted(known, handles[waits])
    there = np.append(known, -2)[place] == handles[waits]
    lost = waits[~(there & (begun[place] < waits))]
    if lost.size:
        text = f"it waits for handle {handles[lost[0]]}, which no op before it has"
        found.append(("handle", int(lost[0]), text))
    stray = np.flatnonzero(~calls & (batches >= 0))
    if stray.size:
        text = f"{NAMES[names[stray[0]]]} is no call and cannot be in a batch"
        found.append(("batch", int(stray[0]), text))
    busy = np.flatnonzero(~np.isin(names, _SILENT))
    number = np.where(calls[busy], batches[busy], -1)
    new = np.flatnonzero(np.diff(number, prepend=-2))
    new = new[number[new] >= 0]
    again = np.delete(new, np.unique(number[new], return_index=True)[1])
    if again.size:
        text = f"batch {number[again[0]]} was over: give this one another number"
        found.append(("batch", int(busy[again[0]]), text))
    return min(found, key=lambda one: one[1], default=None)


def signature(program: Program, indices: np.ndarray) -> np.ndarray:
    """What the other members must call alike, int64 [k, 6]: the columns of _FIELDS."""
    ops = program.ops[indices]
    names = ops["name"]
    count = np.where(np.isin(names, _COUNT_IN), ops["num_in"], 0)
    count = np.where(np.isin(names, _COUNT_OUT), ops["num_out"], count)
    count = np.where(ops["splits"] >= 0, 0, count)  # uneven: compared pair by pair
    batch = ops["batch"]
    joined = np.concatenate(([False], (batch[1:] == batch[:-1]) & (batch[1:] >= 0)))
    columns = (names, ops["dtype"], count, ops["reduce"], ops["root"], joined[: len(ops)])
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1)


def diagnose(
    a: np.ndarray, b: np.ndarray, ranks: tuple[int, int]
) -> tuple[str, tuple[int, int], str]:
    """(kind, (entry, entry), what probably happened) of two FIFOs that differ."""
    both = min(len(a), len(b))
    differ = np.flatnonzero((a[:both] != b[:both]).any(axis=1))
    k = int(differ[0]) if differ.size else both
    if k == both:
        return _shorter(a, b, k, ranks)
    if sorted(map(tuple, a[k:])) == sorted(map(tuple, b[k:])):
        return "order", (k, k), f"rank {ranks[1]} makes the same calls in another order"
    if _same(a[k + 1 :], b[k:]) and not _same(a[k + 1 :], b[k + 1 :]):
        return "missing", (k, k), f"rank {ranks[1]} never calls {_call(a[k])} #{k}"
    if _same(a[k:], b[k + 1 :]) and not _same(a[k + 1 :], b[k + 1 :]):
        return "missing", (k, k), f"rank {ranks[1]} calls {_call(b[k])} and rank {ranks[0]} never"
    fields = [f for f, x, y in zip(_FIELDS, a[k], b[k], strict=True) if x != y]
    shown = "; ".join(_differ(f, a[k], b[k], ranks) for f in fields)
    return fields[0], (k, k), shown


def _shorter(
    a: np.ndarray, b: np.ndarray, k: int, ranks: tuple[int, int]
) -> tuple[str, tuple[int, int], str]:
    more, less = (0, 1) if len(a) > len(b) else (1, 0)
    row = (a, b)[more][k]
    left = abs(len(a) - len(b))
    what = f"rank {ranks[less]} stops {left} calls before rank {ranks[more]}, at {_call(row)}"
    return "missing", (k, k), what


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    n = min(_AHEAD, len(x), len(y))
    return n > 0 and np.array_equal(x[:n], y[:n])


def _call(row: np.ndarray) -> str:
    words = [NAMES[row[0]], DTYPE_NAMES[row[1]]]
    return " ".join(word for word in words if word)


def _differ(field: str, x: np.ndarray, y: np.ndarray, ranks: tuple[int, int]) -> str:
    column = _FIELDS.index(field)
    texts: dict[str, tuple[str, ...]] = {
        "operation": NAMES,
        "dtype": DTYPE_NAMES,
        "reduce op": REDUCE,
    }
    known = texts.get(field)
    shown = [str(known[v[column]]) if known else str(int(v[column])) for v in (x, y)]
    unit = " elements" if field == "shape" else ""
    return f"{field}: {shown[0]}{unit} on rank {ranks[0]}, {shown[1]}{unit} on rank {ranks[1]}"
