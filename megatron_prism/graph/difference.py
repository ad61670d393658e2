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

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program

_EVENTS = frozenset({"record", "wait", "host_wait", "mark"})
_FIELDS_OF_CALLS = ("dtype", "reduce", "num_in", "num_out", "peer", "root", "splits", "shape")
_FIELDS_OF_COMPUTE = ("flops",)
_NOT_SHOWN = {"peer": 0, "splits": None}  # values that say that a call has no such field
_HIDDEN = ("", -1)  # values that a text leaves out


@dataclass(frozen=True)
class ComparedOp:
    """An op, or a tensor that a call delivered.

    Attributes:
        step: The step of the iteration, as ``2F0``.
        name: What the op is, with its group.
        fields: What must be equal.
        about: What is shown besides: the line of code.
    """

    step: str
    name: str
    fields: Mapping[str, object]
    about: str = ""

    @staticmethod
    def of_program(program: Program) -> list[ComparedOp]:
        """List calls and computing of ``program``, in order."""
        return [_row(op) for op in program if op.name not in _EVENTS]

    def __str__(self) -> str:
        """Write step, name, fields and the line of code in one line."""
        shown = [f"{key}={value}" for key, value in self.fields.items() if value not in _HIDDEN]
        words = (self.step, self.name, *shown, self.about)
        return " ".join(word for word in words if word)


def _row(op: Op) -> ComparedOp:
    """Describe an op by what must be equal in another run."""
    keys: tuple[str, ...] = _FIELDS_OF_CALLS
    if op.name == "compute":
        keys = _FIELDS_OF_COMPUTE
    fields = {}
    for key in keys:
        value = getattr(op, key)
        if key in _NOT_SHOWN and value == _NOT_SHOWN[key]:
            continue
        fields[key] = value
    name = op.name
    if op.group:
        name = f"{op.name} of {op.group}"
    about = ""
    if op.site:
        about = f"at {op.site}"
    return ComparedOp(op.label, name, fields, about)


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs A and B of one rank differ first.

    Attributes:
        rank: The rank.
        counts: Rows of A and of B.
        at: How many rows are alike before the first that differ.
        first: The first two rows that differ; None where a run has ended.
        differ: In what they differ: step, name or fields.
        only: (name, how many more A has than B; negative: B than A).
    """

    rank: int
    counts: tuple[int, int]
    at: int
    first: tuple[ComparedOp | None, ComparedOp | None]
    differ: tuple[str, ...]
    only: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, object]:
        """Give plain values; null where a run has ended."""
        first: dict[str, str | None] = {}
        for side, row in zip("ab", self.first, strict=True):
            first[side] = None
            if row is not None:
                first[side] = str(row)
        return {
            "rank": self.rank,
            "rows": list(self.counts),
            "alike": self.at,
            "first": first,
            "differ": list(self.differ),
            "more_in_a": {name: surplus for name, surplus in self.only if surplus > 0},
            "more_in_b": {name: -surplus for name, surplus in self.only if surplus < 0},
        }

    def to_text(self) -> str:
        """Show the first rows that differ, and of which ops one run has more."""
        count_a, count_b = self.counts
        lines = [
            f"rank {self.rank}: {count_a:,} ops in A, {count_b:,} in B; "
            f"the first {self.at:,} are alike",
            f"first difference: {', '.join(self.differ)}",
        ]
        for side, row in zip("AB", self.first, strict=True):
            text = "nothing: it has ended"
            if row is not None:
                text = str(row)
            lines.append(f"  {side}  {text}")
        for name, surplus in self.only:
            side = "A"
            if surplus < 0:
                side = "B"
            lines.append(f"  {side} has {abs(surplus):,} more  {name}")
        return "\n".join(lines) + "\n"


def difference(
    rank: int, a: Sequence[ComparedOp], b: Sequence[ComparedOp], norm: float = 0.0
) -> FirstDifference | None:
    """Find where two runs differ first; None if nowhere.

    Args:
        rank: The rank.
        a: The rows of run A.
        b: The rows of run B.
        norm: By which part of the larger norm the norms of a row's values may differ; 0: the
            values must be equal.
    """
    num_alike = 0
    for row_a, row_b in zip(a, b, strict=False):
        if row_a != row_b and _differing_fields(row_a, row_b, norm):
            break
        num_alike += 1
    if num_alike == len(a) == len(b):
        return None

    first_a = _row_at(a, num_alike)
    first_b = _row_at(b, num_alike)
    if first_a is None or first_b is None:
        differ = ["one has ended"]
    else:
        differ = _differing_fields(first_a, first_b, norm)
    return FirstDifference(
        rank=rank,
        counts=(len(a), len(b)),
        at=num_alike,
        first=(first_a, first_b),
        differ=tuple(differ),
        only=_surplus(a, b),
    )


def _row_at(rows: Sequence[ComparedOp], place: int) -> ComparedOp | None:
    """Give a row; None behind the last."""
    if place < len(rows):
        return rows[place]
    return None


def _surplus(a: Iterable[ComparedOp], b: Iterable[ComparedOp]) -> tuple[tuple[str, int], ...]:
    """Count what one run has more often: (name, how many more A has than B), by name."""
    surplus = Counter(_unnumbered(row.name) for row in a)
    surplus.subtract(Counter(_unnumbered(row.name) for row in b))
    return tuple((name, count) for name, count in sorted(surplus.items()) if count)


def _unnumbered(name: str) -> str:
    """Cut the number from the name of a delivered tensor."""
    return name.partition(" #")[0]


def _differing_fields(a: ComparedOp, b: ComparedOp, norm: float) -> list[str]:
    """List step, name and fields in which two rows differ; lines of code are not compared.

    Args:
        a: A row of run A.
        b: A row of run B.
        norm: As in ``difference``.
    """
    differing = [key for key in ("step", "name") if getattr(a, key) != getattr(b, key)]
    # of another call every field would differ
    if a.name != b.name:
        return differing
    keys = list(dict.fromkeys([*a.fields, *b.fields]))
    if norm and "norm" in a.fields and "norm" in b.fields:
        # the norm stands for the values
        keys = [key for key in keys if key not in ("norm", "values")]
        norm_a = float(str(a.fields["norm"]))
        norm_b = float(str(b.fields["norm"]))
        largest = max(abs(norm_a), abs(norm_b))
        # a norm that is no number differs, too
        is_close = abs(norm_a - norm_b) <= norm * largest
        if not is_close:
            differing.append("norm")
    differing += [key for key in keys if a.fields.get(key) != b.fields.get(key)]
    return differing
