"""Two runs of one rank, op by op: where they are no longer alike.

In : ops of programs, or what two recordings keep of delivered calls, as rows of fields.  Out: the
first rows that differ, in which fields, and what one run has that the other lacks.  Events, times,
lines of code and memory are not compared: they differ between releases of Megatron that do the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_prism.core.ops import Op
from megatron_prism.core.program import Program

_EVENTS = frozenset({"record", "wait", "host_wait", "mark"})
_OF_CALLS = ("group", "dtype", "reduce", "num_in", "num_out", "peer", "root", "splits", "shape")
_OF_COMPUTING = ("flops",)


@dataclass(frozen=True)
class ComparedOp:
    """An op, or a tensor that a call delivered.

    step, name : ``2F0``; what it is, with its group
    fields     : what must be equal
    about      : what is shown besides: the line of code
    """

    step: str
    name: str
    fields: Mapping[str, object]
    about: str = ""

    def __str__(self) -> str:
        shown = [f"{key}={value}" for key, value in self.fields.items() if value not in ("", -1)]
        return " ".join(filter(None, (self.step, self.name, *shown, self.about)))


def rows_of(program: Program) -> list[ComparedOp]:
    """Calls and computing of ``program``, in order."""
    return [_row(op) for op in program if op.name not in _EVENTS]


def _row(op: Op) -> ComparedOp:
    keys = _OF_COMPUTING if op.name == "compute" else _OF_CALLS
    fields = {key: getattr(op, key) for key in keys if key != "group"}
    usual = {"peer": 0, "splits": None}
    fields = {key: value for key, value in fields.items() if value != usual.get(key, object())}
    name = f"{op.name} of {op.group}" if op.group else op.name
    return ComparedOp(op.label, name, fields, f"at {op.site}" if op.site else "")


@dataclass(frozen=True)
class FirstDifference:
    """Of one rank.

    counts : rows of A and of B
    at     : how many are alike before the first that differ
    first  : those two; None where a run has ended
    differ : step, name or fields in which they do
    only   : (name, how many more A has than B; negative: B than A)
    """

    rank: int
    counts: tuple[int, int]
    at: int
    first: tuple[ComparedOp | None, ComparedOp | None]
    differ: tuple[str, ...]
    only: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, object]:
        """Plain values; null where a run has ended."""
        shown = [None if row is None else str(row) for row in self.first]
        return {
            "rank": self.rank,
            "rows": list(self.counts),
            "alike": self.at,
            "first": dict(zip("ab", shown, strict=True)),
            "differ": list(self.differ),
            "more_in_a": {name: n for name, n in self.only if n > 0},
            "more_in_b": {name: -n for name, n in self.only if n < 0},
        }

    def to_text(self) -> str:
        """The first that differ, and how often which kind of op is there once more."""
        a, b = self.counts
        lines = [
            f"rank {self.rank}: {a:,} ops in A, {b:,} in B; the first {self.at:,} are alike",
            f"first difference: {', '.join(self.differ)}",
        ]
        lines += [
            f"  {side}  {'nothing: it has ended' if row is None else row}"
            for side, row in zip("AB", self.first, strict=True)
        ]
        lines += [f"  {'A' if n > 0 else 'B'} has {abs(n):,} more  {name}" for name, n in self.only]
        return "\n".join(lines) + "\n"


def difference(
    rank: int, a: Sequence[ComparedOp], b: Sequence[ComparedOp], norm: float = 0.0
) -> FirstDifference | None:
    """Where ``a`` and ``b`` differ first, None if nowhere.

    norm : a row that knows the ``norm`` of its values differs by more than this part of it; at 0 by
           any of its values
    """
    at = 0
    for row, its in zip(a, b, strict=False):
        if row != its and _differ(row, its, norm):
            break
        at += 1
    if at == len(a) == len(b):
        return None
    first = (a[at] if at < len(a) else None, b[at] if at < len(b) else None)
    one, other = first
    differ = ["one has ended"] if one is None or other is None else _differ(one, other, norm)
    more = Counter(row.name.partition(" #")[0] for row in a)  # delivered tensors are numbered
    more.subtract(Counter(row.name.partition(" #")[0] for row in b))
    only = tuple((name, n) for name, n in sorted(more.items()) if n)
    return FirstDifference(rank, (len(a), len(b)), at, first, tuple(differ), only)


def _differ(a: ComparedOp, b: ComparedOp, norm: float) -> list[str]:
    """step, name and fields in which two rows differ; lines of code are not."""
    found = [key for key in ("step", "name") if getattr(a, key) != getattr(b, key)]
    if "name" in found:  # of another call every field would differ
        return found
    keys: Iterable[str] = dict.fromkeys([*a.fields, *b.fields])
    if norm and "norm" in a.fields and "norm" in b.fields:
        keys = [key for key in keys if key not in ("norm", "values")]
        x, y = float(str(a.fields["norm"])), float(str(b.fields["norm"]))
        if not abs(x - y) <= norm * max(abs(x), abs(y)):
            found.append("norm")
    return found + [key for key in keys if a.fields.get(key) != b.fields.get(key)]
