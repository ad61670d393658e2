"""How much does each call vary?  Samples that ``prism calibrate`` kept, for the calls they are of.

In : a WorldGraph, its Prices, and the calibration's file.  Out: CallSpread: a distribution of the
factor of every call whose price was measured among as many ranks; calls of a size in between take
the nearest measured size.  The factor of a call is one draw, for all that take part.

Samples are of one sitting, seconds long: regimes that last longer (``network``) are not in them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_prism.core import guards
from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import NAMES
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.predict.distribution import Distribution, fit
from megatron_prism.replay.costs import Prices
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.costs.prices import _both_ways, _shape

__all__ = ["CallSpread", "call_spread"]

_MEASURED = "measured: calls"  # how the provenance of such a price begins
_MOST_NS = 1 << 50  # of a call: two weeks; NaN is not below it
_MOST = 4096  # samples of a cell that are looked at
_ENOUGH = 24  # samples of a call that may stand for themselves: one outlier widens fewer by far
Cell = tuple[str, int, int]  # collective, ranks, of them per node


@dataclass(frozen=True)
class CallSpread:
    """Which distribution the factor of each call has.

    kind   : int64 [rendezvous], index into ``shapes``; -1: nothing was sampled
    shapes : distributions of the factor, median 1
    source : in words
    """

    kind: np.ndarray
    shapes: tuple[Distribution, ...]
    source: str


def call_spread(
    graph: WorldGraph, prices: Prices, machine: Machine, path: str | os.PathLike[str]
) -> CallSpread | None:
    """The spreads that the calibration ``path`` knows; None if it kept no samples, or of no call
    of this world.

    UsageError for samples that are none, PrismError for cells of fewer than five, or with times
    that are not above 0.
    """
    cells = _cells(path)
    used: dict[tuple[Cell, int], int] = {}
    shapes: list[Distribution] = []
    kind = np.full(len(graph.rendezvous), -1, dtype=np.int64)
    for place, cell, size in _calls(graph, prices, machine) if cells else ():
        known = cells.get(cell)
        if not known:
            continue
        nearest = min(known, key=lambda num_bytes: abs(math.log(num_bytes / max(1, size))))
        key = cell, nearest
        if key not in used:
            used[key] = len(shapes)
            what = f"{cell[0]} of {nearest:,} bytes among {cell[1]}"
            shapes.append(_of_median_1(fit(known[nearest], what, _ENOUGH)))
        kind[place] = used[key]
    if not shapes:
        return None
    return CallSpread(kind, tuple(shapes), _said(kind, shapes, prices))


def _cells(path: str | os.PathLike[str]) -> dict[Cell, dict[int, Sequence[float]]]:
    """cell -> message bytes -> samples in ns; the file has been read as a calibration before."""
    found: dict[Cell, dict[int, Sequence[float]]] = {}
    for row in guards.read_json(path)["collectives"]:
        samples = row.get("samples")
        if samples is None:
            continue
        if not _numbers(samples):
            raise UsageError(
                f"{path}: samples of {row['op']} of {row['bytes']} bytes are no list of up to "
                f"{_MOST:,} times in ns",
                fix="write it again: prism calibrate",
            )
        cell = row["op"], int(row["ranks"]), int(row.get("per_node", row["ranks"]))
        found.setdefault(cell, {})[int(row["bytes"])] = samples
    return found


def _numbers(samples: Any) -> bool:
    return (
        isinstance(samples, list)
        and len(samples) <= _MOST
        and all(type(one) in (int, float) and abs(one) < _MOST_NS for one in samples)
    )


def _of_median_1(one: Distribution) -> Distribution:
    """The same distribution over its own median."""
    middle = float(one.at(np.zeros(1))[0])
    numbers = one.numbers
    if one.kind == "lognormal":
        numbers = (0.0, numbers[1])
    elif one.kind == "gamma":
        numbers = (numbers[0], numbers[1] / middle)
    else:
        numbers = tuple(number / middle for number in numbers)
    return dataclasses.replace(one, numbers=numbers)


def _calls(graph: WorldGraph, prices: Prices, machine: Machine) -> list[tuple[int, Cell, int]]:
    """(rendezvous, cell, message bytes) of every call whose price was measured, the cell as
    ``costs.prices`` looked it up."""
    meet, found = graph.rendezvous, []
    measured = [source.startswith(_MEASURED) for source in prices.sources]
    chosen = np.flatnonzero(np.array(measured)[prices.meeting_source] & (prices.meetings > 0))
    firsts = meet.start[chosen]
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    sizes: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for place, index, op in zip(
        chosen.tolist(), meet.classes[firsts].tolist(), meet.ops[firsts].tolist(), strict=True
    ):
        program = graph.program_list[index]
        if index not in sizes:
            sizes[index] = np.maximum(program.bytes_in, program.bytes_out), _both_ways(program)
        row = program.ops[op]
        key = index, int(row["name"]), int(row["group"]), int(row["peer"])
        name = NAMES[key[1]]
        if key not in known:
            shape = _shape(graph, program, index, name, key[2], key[3], machine)
            known[key] = shape.size, shape.per_node
        table = "exchange" if sizes[index][1][op] else "send" if name == "recv" else name
        found.append((place, (table, *known[key]), int(sizes[index][0][op])))
    return found


def _said(kind: np.ndarray, shapes: Sequence[Distribution], prices: Prices) -> str:
    """What draws of calls rest on."""
    total = max(1, int(prices.meetings.sum()))
    share = int(prices.meetings[kind >= 0].sum()) / total
    few, many = min(one.samples for one in shapes), max(one.samples for one in shapes)
    each = f"{few}" if few == many else f"{few} to {many}"
    kinds = ", ".join(
        f"{count} {name}"
        for name in ("normal", "gamma", "lognormal", "empirical")
        if (count := sum(one.kind == name for one in shapes))
    )
    widest = max(shapes, key=lambda one: one.spread)
    said = (
        f"samples of the calibration for {100 * share:.0f} % of the calls' time: {len(shapes)} "
        f"cells of {each} samples ({kinds}; KS at most {max(o.distance for o in shapes):.2f}; "
        f"spreads up to {100 * widest.spread:.2g} %)"
    )
    wide = sum("widened" in one.note for one in shapes)
    return f"{said}; {wide} that no candidate fits, widened" if wide else said
