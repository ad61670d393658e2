"""Measured factors by which computing and a call slow each other down.

In : the ``overlap`` rows of a calibration (``prism calibrate``).  Out: factors for a call beside
each of two kinds of computing: products, which fill the GPU, and what takes its memory's rate (they
differ: a gather of 64 MiB takes 1.1 times as long beside products, 1.9 times beside additions).
Rows that were measured in another way are not used: their clocks differed between alone and
together, a call's wait for room counted as slowness, or nothing ran side by side.  A factor below 1
is noise and counts as 1, and one of few rounds is left out: in the others computing did not outlast
the call.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from megatron_prism.core import foreign

__all__ = ["KINDS", "METHOD", "OverlapFactors", "read_rows"]

KINDS = ("gemm", "memory")  # of computing: products, and additions
METHOD = 2  # of measuring; goes up when rows of before are not to be used any more

_SHARE = 0.5  # of the rounds of the row that has most of them
_Factor = Annotated[float, msgspec.Meta(gt=0, lt=100)]  # what is more is no measurement


class _OverlapRow(msgspec.Struct):
    """One measured pair of factors, of computing and of the call."""

    op: str
    bytes: foreign.PositiveInt
    kind: Literal["gemm", "memory"]
    compute: _Factor
    call: _Factor
    rounds: float | None = None
    method: int | None = None


@dataclass(frozen=True)
class OverlapFactors:
    """Factors of one kind of call.

    points : kind of computing -> ascending (message bytes, factor of computing, of the call)
    """

    points: Mapping[str, tuple[tuple[int, float, float], ...]]

    def factors(self, num_bytes: int, kind: str) -> tuple[float, float]:
        """(of computing, of the call), between two measured sizes by ratio, beyond them those of
        the nearest; of a kind that was not measured those of the other."""
        known = self.points.get(kind) or next(iter(self.points.values()))
        at = bisect.bisect_left(known, (num_bytes,))
        low, high = known[max(0, at - 1)], known[min(at, len(known) - 1)]
        part = 0.0 if low == high else math.log(num_bytes / low[0]) / math.log(high[0] / low[0])
        found = (a + part * (b - a) for a, b in zip(low[1:], high[1:], strict=True))
        compute, call = (max(1.0, factor) for factor in found)
        return compute, call


def read_rows(rows: Iterable[Mapping[str, object]]) -> dict[str, OverlapFactors]:
    """Collective -> factors.  ValueError for rows that are none, or two of the same call."""
    found: dict[str, dict[str, dict[int, tuple[float, float]]]] = {}
    ours = [row for row in rows if row.get("method") == METHOD]
    known = foreign.shaped(ours, list[_OverlapRow])
    enough = _SHARE * max((row.rounds or 0 for row in known), default=0)
    for row in known:
        if (enough if row.rounds is None else row.rounds) < enough:
            continue
        pair, sizes = (row.compute, row.call), found.setdefault(row.op, {}).setdefault(row.kind, {})
        if sizes.setdefault(row.bytes, pair) != pair:
            what = f"{row.op} of {row.bytes} bytes beside {row.kind}"
            raise ValueError(f"it contradicts itself: {what} has two pairs of factors")
    return {
        name: OverlapFactors(
            {
                kind: tuple((size, *pair) for size, pair in sorted(sizes.items()))
                for kind, sizes in kinds.items()
            }
        )
        for name, kinds in found.items()
    }
