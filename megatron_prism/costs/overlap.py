"""By how much do computing and a call slow each other down while both run?  As measured.

In : the ``overlap`` rows of a calibration (``prism calibrate``).  Out: factors for a call.  Rows
that were measured in another way are not used: their clocks differed between alone and together, a
call's wait for room counted as slowness, or nothing ran side by side.  A factor below 1 is noise
and counts as 1, and one of few rounds is left out: in the others computing did not outlast the
call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["METHOD", "Overlap", "read_rows"]

METHOD = 2  # of measuring; goes up when rows of before are not to be used any more

_MOST = 100.0  # times slower: what is more is no measurement
_SHARE = 0.5  # of the rounds of the row that has most of them


@dataclass(frozen=True)
class Overlap:
    """Factors of one kind of call.

    points : ascending (message bytes, factor of computing, factor of the call); each the mean of
             the kinds of computing that were measured (products, additions)
    """

    points: tuple[tuple[int, float, float], ...]

    def factors(self, num_bytes: int) -> tuple[float, float]:
        """(of computing, of the call) at the measured size that is nearest by ratio."""
        near = min(self.points, key=lambda p: abs(math.log(p[0] / max(1, num_bytes))))
        return max(1.0, near[1]), max(1.0, near[2])


def read_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Overlap]:
    """Collective -> factors.  ValueError for a factor that cannot be."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    known = [row for row in rows if row.get("method") == METHOD]
    enough = _SHARE * max((float(row.get("rounds", 0)) for row in known), default=0)
    for row in known:
        pair, size = (float(row["compute"]), float(row["call"])), int(row["bytes"])
        if size <= 0 or not all(0 < value < _MOST for value in pair):
            what = (
                f"{row['op']} of {size} bytes slows {row['kind']} by {pair[0]}, itself by {pair[1]}"
            )
            raise ValueError(f"{what}: no factors of an overlap")
        if float(row.get("rounds", enough)) < enough:
            continue
        found.setdefault(str(row["op"]), {}).setdefault(size, []).append(pair)
    return {
        name: Overlap(
            tuple(
                (size, *(sum(column) / len(pairs) for column in zip(*pairs, strict=True)))
                for size, pairs in sorted(sizes.items())
            )  # type: ignore[misc] - two columns
        )
        for name, sizes in found.items()
    }
