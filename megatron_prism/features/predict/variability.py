"""Spreads of computing, calls and hosts: from a data file, or fitted to what was recorded.

Every factor has median 1 and, unless its distribution is known, is lognormal; a spread is the
standard deviation of its logarithm, about the relative deviation for small ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import CODE
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.units import format_percent
from megatron_prism.features.predict.distributions import FEWEST, Distribution, fit, probabilities
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.costs import Prices, machine
from megatron_prism.replay.costs.collectives import stored
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.costs.prices import shape_of

_MEASURED = "measured: calls"  # how the provenance of such a price begins
_ENOUGH_SAMPLES = 24  # of a call that stand for themselves: one outlier widens fewer by far
Cell = tuple[str, int, int]  # collective, ranks, of them per node


@dataclass(frozen=True)
class CallSpread:
    """Which distribution the factor of each call has.

    kind   : int64 [matched calls], index into ``shapes``; -1: nothing was sampled
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
    cells = defaultdict[Cell, dict[int, Sequence[float]]](dict)  # by message bytes, in ns
    for row in stored(path).collectives:  # the file has been read as a calibration before
        if row.samples is not None:
            cells[row.op, row.ranks, row.of_node][row.bytes] = row.samples
    used: dict[tuple[Cell, int], int] = {}
    shapes: list[Distribution] = []
    kind = np.full(len(graph.matched_calls), -1, dtype=np.int64)
    for place, cell, size in _calls(graph, prices, machine) if cells else ():
        known = cells.get(cell)
        if not known:
            continue
        nearest = min(known, key=lambda num_bytes: abs(math.log(num_bytes / max(1, size))))
        key = cell, nearest
        if key not in used:
            used[key] = len(shapes)
            what = f"{cell[0]} of {nearest:,} bytes among {cell[1]}"
            shapes.append(_of_median_1(fit(known[nearest], what, _ENOUGH_SAMPLES)))
        kind[place] = used[key]
    if not shapes:
        return None
    return CallSpread(kind, tuple(shapes), _said(kind, shapes, prices))


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
    """(matched call, cell, message bytes) of every call whose price was measured, the cell as
    ``costs.prices`` looked it up.
    """
    measured = np.array([source.startswith(_MEASURED) for source in prices.sources])
    chosen = np.flatnonzero(measured[prices.collective_source] & (prices.collective_ns > 0))
    calls, entries = graph.call_kinds, graph.matched_calls.start[chosen]
    cells = []
    for kind in calls.kinds:
        shape, name = shape_of(kind, machine), "send" if kind.is_pair else kind.name
        cells.append(("exchange" if kind.exchange else name, shape.size, shape.per_node))
    each = zip(chosen.tolist(), calls.of[entries].tolist(), calls.num_bytes[entries].tolist(),
               strict=True)  # fmt: skip
    return [(call, cells[kind], size) for call, kind, size in each]


def _said(kind: np.ndarray, shapes: Sequence[Distribution], prices: Prices) -> str:
    """What draws of calls rest on."""
    total = max(1, int(prices.collective_ns.sum()))
    share = int(prices.collective_ns[kind >= 0].sum()) / total
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
        f"spreads up to {format_percent(widest.spread)})"
    )
    wide = sum("widened" in one.note for one in shapes)
    return f"{said}; {wide} that no candidate fits, widened" if wide else said


FOLDER = Path(__file__).with_name("variability")
PARTS = ("gpu", "step", "segment", "host", "call", "network")
_Spread = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Slow = tuple[  # chance, factor
    Annotated[float, msgspec.Meta(ge=0, lt=1)], Annotated[float, msgspec.Meta(gt=0, le=1000)]
]
_STEPS = 4001  # of the table of a product's quantiles


@dataclass(frozen=True)
class Variability:
    """Spreads.

    gpu     : between GPUs (spatial): a rank computes slower or faster for the whole run
    step    : of a rank from iteration to iteration (temporal)
    call    : of a call; one draw for all that take part (shared)
    network : of all calls of an iteration together, a regime (shared)
    segment : of single compute segments
    host    : of a rank's host from iteration to iteration, where slices know its time
    slow_gpu, slow_network : (chance, factor) of a GPU (for the whole run) or the network (for an
              iteration) to be that much slower on top
    shapes  : part -> its distribution, where samples say more than a spread
    calls_by : how much of the deviation of calls counts that were sampled one by one
    """

    name: str
    gpu: _Spread
    step: _Spread
    call: _Spread
    network: _Spread
    source: str
    segment: _Spread = 0.0
    host: _Spread = 0.0
    slow_gpu: _Slow = (0.0, 1.0)
    slow_network: _Slow = (0.0, 1.0)
    shapes: Mapping[str, Distribution] = field(default_factory=dict)
    calls_by: float = 1.0

    def of(self, part: str) -> Distribution:
        """The distribution of the factor of one of PARTS."""
        given = self.shapes.get(part)
        return given or Distribution("lognormal", (0.0, getattr(self, part)))

    def scaled(self, part: str, factor: float) -> Variability:
        """The same, with ``factor`` times the spread of one of PARTS about its median."""
        one = self.of(part)
        if one.kind == "lognormal":
            numbers = (one.numbers[0], factor * one.numbers[1])
            shape = dataclasses.replace(one, numbers=numbers)
        else:
            middle, values = one.at(np.zeros(1)), one.at(np.linspace(-3.5, 3.5, 2001))
            weights = probabilities(np.linspace(-3.5, 3.5, 2001))
            even = np.interp((np.arange(1000) + 0.5) / 1000, weights, values)
            numbers = tuple((middle + factor * (even - middle)).tolist())
            shape = Distribution("empirical", numbers)
        shapes = {**self.shapes, part: shape}
        more = {part: factor * getattr(self, part)}
        if part == "call":
            more["calls_by"] = factor * self.calls_by
        return dataclasses.replace(self, shapes=shapes, **more)

    def curve(self, *parts: str) -> tuple[np.ndarray, np.ndarray]:
        """(standard normal scores, values) of the product of these parts' factors; ``slow_gpu``
        goes with ``gpu``, ``slow_network`` with ``network``.
        """
        chances = [getattr(self, f"slow_{part}") for part in parts if part in ("gpu", "network")]
        scores = np.linspace(-8, 8, _STEPS)
        if all(self.of(part).kind == "lognormal" for part in parts) and not any(
            chance for chance, _ in chances
        ):
            numbers = np.array([self.of(part).numbers for part in parts])
            return scores, np.exp(numbers[:, 0].sum() + math.hypot(*numbers[:, 1]) * scores)
        values = self.of(parts[0]).at(scores)
        for part in parts[1:]:
            values = _product(scores, values, self.of(part).at(scores))
        for chance, factor in chances:
            values = _mixed(scores, values, chance, factor)
        return scores, values


def _product(scores: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Values at ``scores`` of the product of two independent factors, given theirs."""
    weights = np.diff(probabilities(scores), prepend=0.0)
    used = np.flatnonzero(weights > 1e-18)
    grid = np.geomspace(one[0] * other[0], one[-1] * other[-1], _STEPS)
    chance = np.zeros(_STEPS)
    width = max(1, len(used) // 400)
    for i in used[::width].tolist():
        weight, value = weights[i : i + width].sum(), other[min(i + width // 2, used[-1])]
        chance += weight * probabilities(np.interp(grid / value, one, scores))
    found: np.ndarray = np.interp(probabilities(scores), chance / chance[-1], grid)
    return found


def _mixed(scores: np.ndarray, values: np.ndarray, chance: float, factor: float) -> np.ndarray:
    """Values at ``scores`` if with ``chance`` they are ``factor`` times as large."""
    if not chance:
        return values
    low, high = min(values[0], factor * values[0]), max(values[-1], factor * values[-1])
    grid = np.geomspace(low, high, 4 * _STEPS)
    below = (1 - chance) * probabilities(np.interp(grid, values, scores))
    below += chance * probabilities(np.interp(grid / factor, values, scores))
    found: np.ndarray = np.interp(probabilities(scores), below, grid)
    return found


def read_variability(name: str | os.PathLike[str]) -> Variability:
    """The spreads of that name or in that file.  UsageError says what is wrong with them."""
    return machine.read(name, FOLDER, "a file of spreads", Variability)


_SHARE = 0.95  # of a rank's time: the longest segments that make it up are looked at
_WAITS = 0.05  # of a segment's time: waiting less than that for the host is no waiting
_ENOUGH_ITERATIONS = 40  # iterations that may stand for themselves
_RANKS = 5  # of the same ops: fewer say nothing of the spread between GPUs


def is_timed(programs: Programs) -> bool:
    """Whether the slices have the times of enough iterations to fit anything to."""
    return sum(len(one.samples) for one in programs.programs if len(one.samples) > 1) >= FEWEST


def fitted(programs: Programs, other: Variability) -> Variability:
    """``other``, with what the slices' samples say instead.

    PrismError if no slice has two timed iterations, or if there are samples that cannot be.
    """
    timed = [one for one in programs.programs if len(one.samples) > 1]
    if not timed:
        what = "the slices hold no repeated times (iterations on a GPU or the cpu tier are timed)"
        fix = "--variability public, or capture more iterations: --train-iters 14"
        raise PrismError(what, fix=fix)
    for one in timed:
        if (one.samples < 0).any() or not one.samples.sum(axis=1).all():
            what = f"rank {one.rank} has an iteration of no time, or a negative one"
            raise PrismError(what, fix="capture that rank again")
    shapes: dict[str, Distribution] = {}
    found = [_of_device(one) for one in timed]
    own = [one for one in found if one.share >= _WAITS]
    enough = sum(len(one.samples) for one in own) >= FEWEST
    if enough or len(own) == len(found):  # that there are too few iterations is said below
        factors = np.concatenate([_steps(one) for one in own])
        shapes["step"] = _centred(fit(factors, "an iteration's factor", _ENOUGH_ITERATIONS))
        parts = [_segments(one) for one in own]
        shapes["segment"] = _centred(fit(np.concatenate(parts), "a segment's factor"))
    gpu, how = _between(programs, own, other)
    hosts = [_widened(one.hosts / one.hosts.mean(), len(one.hosts))
             for one in timed if len(one.hosts) > 1 and one.hosts.all()]  # fmt: skip
    if sum(map(len, hosts)) >= FEWEST:
        shapes["host"] = _centred(fit(np.concatenate(hosts), "a host's factor", _ENOUGH_ITERATIONS))
    from_other = "calls and network" if "step" in shapes else "device, calls and network"
    said = (
        f"fitted to {sum(len(one.samples) for one in timed)} timed iterations of {len(timed)} "
        f"ranks ({'; '.join(f'{part}: {shape}' for part, shape in shapes.items())}; gpu: {how}); "
        f"{from_other}: {other.name}"
    )
    left = 1 - float(np.mean([one.share for one in found]))
    if left > 0.005:
        said += f"; without {100 * left:.0f} % of the time, in which the device waits for the host"
    spreads: dict[str, Any] = {part: shape.spread for part, shape in shapes.items()}
    return dataclasses.replace(
        other,
        name="slices",
        source=f"{said} ({other.source})",
        gpu=gpu,
        slow_gpu=(0.0, 1.0),
        shapes={**other.shapes, **shapes},
        **spreads,
    )


@dataclasses.dataclass(frozen=True)
class _Device:
    """What a rank's samples say of its device.

    samples : int64 [iterations, segments], single waits replaced by what the rest lets expect
    kept    : bool [segments], in which the device usually does not wait for the host
    waited  : bool [iterations, segments], in which it did all the same
    share   : of the time, in which it does not
    """

    program: Program
    samples: np.ndarray
    kept: np.ndarray
    waited: np.ndarray
    share: float


def _of_device(program: Program) -> _Device:
    """Which samples are the device's own."""
    compute = program.ops["name"] == CODE["compute"]
    ns, host = program.ops["ns"][compute], program.ops["host"][compute]
    typical = np.median(program.samples, axis=0)
    kept = (host < 0) | (ns + 1 >= (1 - _WAITS) * typical)  # both are rounded
    kept &= typical > 0
    if not kept.any():
        return _Device(program, program.samples, kept, program.samples < 0, 0.0)
    usual = typical * np.median(
        program.samples[:, kept] / typical[kept], axis=1, keepdims=True
    )  # [iterations, segments]
    waited = (program.samples > (1 + _WAITS) * usual) & (host >= 0)
    samples = np.where(waited, usual.round(), program.samples).astype(np.int64)
    share = program.samples[kept & ~waited].sum() / max(1, program.samples.sum())
    return _Device(program, samples, kept, waited, float(share))


def _steps(one: _Device) -> np.ndarray:
    """Factors of whole iterations about 1."""
    totals = one.samples[:, one.kept].sum(axis=1).astype(float)
    return _widened(totals / totals.mean(), len(totals))


def _segments(one: _Device) -> np.ndarray:
    """Factors of the long segments about 1, iterations' own factors taken out; those that did not
    wait.
    """
    samples, waited = one.samples[:, one.kept], one.waited[:, one.kept]
    means = samples.mean(axis=0)
    longest = np.argsort(-means, kind="stable")
    enough = int(np.searchsorted(np.cumsum(means[longest]), _SHARE * means.sum())) + 1
    chosen = longest[:enough]
    totals = samples.sum(axis=1, keepdims=True) / samples.sum(axis=1).mean()
    ratios = samples[:, chosen] / means[chosen] / totals
    found: np.ndarray = _widened(ratios, len(samples))[~waited[:, chosen]]
    return found


def _widened(ratios: np.ndarray, iterations: int) -> np.ndarray:
    return np.maximum(1 + (ratios - 1) * math.sqrt(iterations / (iterations - 1)), 1e-3)


def _centred(one: Distribution) -> Distribution:
    """The same about a mean of 1; a few hundred quantiles stand for many samples."""
    if one.kind != "empirical":
        return one
    values = np.asarray(one.numbers)
    if len(values) > 1001:
        values = np.quantile(values, (np.arange(1001) + 0.5) / 1001)
    return dataclasses.replace(one, numbers=tuple((values / values.mean()).tolist()))


def _between(programs: Programs, own: list[_Device], other: Variability) -> tuple[float, str]:
    """(spread between GPUs, where it is from), of segments that none of the ranks waits in."""
    timed = [one for one in programs.programs if len(one.samples) > 1]
    if len(programs.programs) == programs.world.size == len(timed):
        return 0.0, "every rank has times of its own"
    alike: dict[bytes, list[_Device]] = {}
    for one in own:
        ops = one.program.ops
        alike.setdefault(ops["name"].tobytes() + ops["num_in"].tobytes(), []).append(one)
    ratios: list[float] = []
    for group in alike.values():
        kept = np.logical_and.reduce([one.kept for one in group])
        means = np.array([one.samples[:, kept].sum(axis=1).mean() for one in group])
        if len(group) >= _RANKS and means.all():
            ratios += (means / means.mean()).tolist()
    if not ratios:
        return other.gpu, f"{other.name}, as fewer than {_RANKS} ranks run the same"
    found = fit(ratios, "a GPU's factor")
    return found.spread, str(found)
