"""How long does a call take once everybody has come?  Measured tables first, then a model.

In : a collective, its message size, its group's shape on the machine.  Out: ns and a provenance.

The model is NCCL's own estimate of its algorithms and protocols (``nccl``), on the machine's rates.
Groups that span nodes pay the network's rate and latency between nodes; several ranks of a node
share the work of crossing it rail by rail.
"""

from __future__ import annotations

import bisect
import itertools
import os
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_prism.core import guards
from megatron_prism.core.errors import UsageError
from megatron_prism.replay.costs import nccl
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.costs.overlap_factors import Overlap, read_rows

if TYPE_CHECKING:
    from megatron_prism.core.data_file import Row

__all__ = ["METHOD", "Calibration", "Shape", "modelled", "read_calibration"]

FORMAT = 1
METHOD = 2  # of measuring calls on GPUs; 2: among computing, before: back to back
_MOST = 1 << 50  # bytes or ns of a call; more is no measurement


@dataclass(frozen=True)
class Shape:
    """A group on the machine: its ranks, and how many of them share a node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans, if it is spread evenly."""
        return -(-self.size // self.per_node)


@dataclass(frozen=True)
class Calibration:
    """Collective times measured on some machine.

    points : (collective, ranks, of them per node) -> ascending (message bytes, ns)
    source : where and when
    host   : (collective, or ``message``; asynchronous) -> ns that NCCL keeps the host for a call
    again  : the same right after another call, with what it needs in the CPU's caches
    overlap: collective -> how much it and computing slow each other down
    path   : the file, which may have samples of single calls; "" if there is none
    """

    points: dict[tuple[str, int, int], tuple[tuple[int, int], ...]] = field(default_factory=dict)
    source: str = ""
    host: dict[tuple[str, bool], int] = field(default_factory=dict)
    again: dict[tuple[str, bool], int] = field(default_factory=dict)
    overlap: dict[str, Overlap] = field(default_factory=dict)
    path: str = ""

    def host_ns(self, name: str, asynchronous: bool, default: int, again: bool = False) -> int:
        """ns of the host for a call, ``again``: right after another one; of one that was not
        measured the median of the others."""
        key = "message" if name in ("send", "recv") else name, asynchronous
        for table in (self.again, self.host) if again else (self.host,):
            if table:
                return table.get(key) or round(statistics.median(table.values()))
        return default

    def look_up(
        self, name: str, size: int, num_bytes: int, per_node: int | None = None
    ) -> int | None:
        """ns, interpolated between measured sizes; None if such a group was not measured.

        ``per_node``: how many of its ranks share a node; None: all of them.

        Below the smallest size its time, above the largest the rate of the last two.
        """
        points = self.points.get(
            ("send" if name == "recv" else name, size, size if per_node is None else per_node)
        )
        if not points:
            return None
        place = bisect.bisect_left(points, (num_bytes, 0))
        if place == 0 or len(points) == 1:
            return points[0][1]
        low, high = points[place - 1 : place + 1] if place < len(points) else points[-2:]
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return max(1, round(low[1] + slope * (num_bytes - low[0])))


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """What ``prism calibrate`` wrote.  UsageError for anything else."""
    try:
        stored = guards.read_json(path)
        if stored.get("format") != FORMAT:
            raise ValueError(f"format {stored.get('format')!r}, this release reads {FORMAT}")
        points: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        for row in _rows(stored, "collectives"):
            ranks = int(row["ranks"])
            key = (row["op"], ranks, int(row.get("per_node", ranks)))
            point = (int(row["bytes"]), int(row["ns"]))
            if not isinstance(key[0], str) or min(key[1:]) < 1:
                raise ValueError(f"{key[0]!r} among {ranks}, {key[2]} of them per node")
            if not 0 < min(point) <= max(point) < _MOST:
                raise ValueError(f"{key[0]} of {point[0]} bytes takes {point[1]} ns")
            points.setdefault(key, []).append(point)
        table = {key: tuple(sorted(set(values))) for key, values in points.items()}
        for (name, size, _), values in table.items():
            for (one, ns), (other, more) in itertools.pairwise(values):
                if one == other:
                    what = f"{name} of {one} bytes among {size} takes {ns} ns and {more} ns"
                    raise ValueError(f"it contradicts itself: {what}")
        rows, source = _rows(stored, "overlap"), str(stored["source"])
        overlap = read_rows(rows)
        if rows and not overlap:
            source += "; its overlap was measured in an earlier way and is left out"
        if _rows(stored, "host") and stored.get("method") != METHOD:  # of GPUs, by prism calibrate
            source += "; its calls were measured back to back, which is too quick among computing"
        return Calibration(
            table, source, *_host(_rows(stored, "host")), overlap, path=os.fspath(path)
        )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", fix="prism calibrate") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{path} is no calibration of ours: {what}", fix="write it again: prism calibrate"
        ) from error


def _rows(stored: Row, name: str) -> list[Row]:
    """The rows of that name, none in files of earlier releases."""
    rows = stored.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{name} is no list of rows")
    return rows


def _host(
    rows: list[Row],
) -> tuple[dict[tuple[str, bool], int], dict[tuple[str, bool], int]]:
    """(collective, asynchronous) -> ns of the host, and right after another call."""
    found, again = {}, {}
    for row in rows:
        name, asynchronous = row["op"], row["asynchronous"]
        if not isinstance(name, str) or not isinstance(asynchronous, bool):
            raise ValueError(f"a call of the host is {name!r}, asynchronous {asynchronous!r}")
        found[name, asynchronous] = _ns_of(row, "ns")
        if "again" in row:  # earlier releases did not measure it
            again[name, asynchronous] = _ns_of(row, "again")
    return found, again


def _ns_of(row: Row, column: str) -> int:
    ns = int(row[column])
    if not 0 < ns < 1 << 40:
        raise ValueError(f"the host takes {ns} ns for {row['op']}")
    return ns


def modelled(name: str, shape: Shape, num_bytes: int, machine: Machine) -> int:
    """ns of one call of ``num_bytes`` (message size as nccl-tests counts it)."""
    if shape.size == 1:
        return 0
    per_node = min(shape.per_node, shape.size)
    return round(machine.call_ns + nccl.best(name, shape.size, per_node, num_bytes, machine))
