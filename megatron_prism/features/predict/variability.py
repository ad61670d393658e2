"""Spreads of computing, calls and hosts: from a data file, or fitted to what was recorded.

Every factor has median 1 and, unless its distribution is known, is lognormal; a spread is the
standard deviation of its logarithm, about the relative deviation for small ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.ops import CODE
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.units import format_percent
from megatron_prism.features.predict.distributions import (
    FEWEST,
    KINDS,
    Distribution,
    fit,
    probabilities,
)
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

    Attributes:
        kind: int64 [matched calls], index into ``shapes``; -1: nothing was sampled.
        shapes: Distributions of the factor, median 1.
        source: In words.
    """

    kind: np.ndarray
    shapes: tuple[Distribution, ...]
    source: str


@dataclass(frozen=True)
class _MeasuredCall:
    """A call whose price was measured.

    Attributes:
        call: Number of the matched call.
        cell: As ``costs.prices`` looked it up.
        num_bytes: Of its message.
    """

    call: int
    cell: Cell
    num_bytes: int


def call_spread(
    graph: WorldGraph, prices: Prices, machine: Machine, path: str | os.PathLike[str]
) -> CallSpread | None:
    """Return the spreads that a calibration knows of the calls of a world.

    Args:
        graph: The world.
        prices: Of its calls.
        machine: On which they were priced.
        path: The calibration.

    Returns:
        None if the calibration kept no samples, or of no call of this world.

    Raises:
        UsageError: The file has samples that are none.
        PrismError: A cell has fewer than five samples, or times that are not above 0.
    """
    # cell -> bytes of a message -> samples in ns; the file has been read as a calibration before
    samples_of_cell: dict[Cell, dict[int, Sequence[float]]] = defaultdict(dict)
    for row in stored(path).collectives:
        if row.samples is not None:
            samples_of_cell[row.op, row.ranks, row.of_node][row.bytes] = row.samples
    if not samples_of_cell:
        return None

    shape_of_size: dict[tuple[Cell, int], int] = {}
    shapes: list[Distribution] = []
    kind = np.full(len(graph.matched_calls), -1, dtype=np.int64)
    for measured in _measured_calls(graph, prices, machine):
        samples = samples_of_cell.get(measured.cell)
        if not samples:
            continue
        size = _nearest(samples, measured.num_bytes)
        key = (measured.cell, size)
        if key not in shape_of_size:
            shape_of_size[key] = len(shapes)
            name, ranks, _ = measured.cell
            text = f"{name} of {size:,} bytes among {ranks}"
            shapes.append(_of_median_1(fit(samples[size], text, _ENOUGH_SAMPLES)))
        kind[measured.call] = shape_of_size[key]
    if not shapes:
        return None
    return CallSpread(kind, tuple(shapes), _source_of_calls(kind, shapes, prices))


def _nearest(sizes: Iterable[int], num_bytes: int) -> int:
    """Return the size whose ratio to a size is nearest to 1."""
    return min(sizes, key=lambda size: abs(math.log(size / max(1, num_bytes))))


def _of_median_1(shape: Distribution) -> Distribution:
    """Return the same distribution over its own median."""
    if shape.kind == "lognormal":
        return dataclasses.replace(shape, numbers=(0.0, shape.numbers[1]))
    median = float(shape.at(np.zeros(1))[0])
    if shape.kind == "gamma":
        numbers = (shape.numbers[0], shape.numbers[1] / median)
        return dataclasses.replace(shape, numbers=numbers)
    return dataclasses.replace(shape, numbers=tuple(number / median for number in shape.numbers))


def _measured_calls(graph: WorldGraph, prices: Prices, machine: Machine) -> list[_MeasuredCall]:
    """Return the calls whose price was measured."""
    is_measured = np.array([source.startswith(_MEASURED) for source in prices.sources])
    takes_time = prices.collective_ns > 0
    chosen = np.flatnonzero(is_measured[prices.collective_source] & takes_time)
    call_kinds = graph.call_kinds
    cells: list[Cell] = []
    for kind in call_kinds.kinds:
        shape = shape_of(kind, machine)
        name = "send" if kind.is_pair else kind.name
        if kind.exchange:
            name = "exchange"
        cells.append((name, shape.size, shape.per_node))

    # a call has the kind and the size of its first member's
    first_entries = graph.matched_calls.start[chosen]
    kinds = call_kinds.of[first_entries].tolist()
    sizes = call_kinds.num_bytes[first_entries].tolist()
    measured: list[_MeasuredCall] = []
    for call, kind_number, size in zip(chosen.tolist(), kinds, sizes, strict=True):
        measured.append(_MeasuredCall(call, cells[kind_number], size))
    return measured


def _source_of_calls(kind: np.ndarray, shapes: Sequence[Distribution], prices: Prices) -> str:
    """Say what draws of calls rest on."""
    total_ns = max(1, int(prices.collective_ns.sum()))
    share = int(prices.collective_ns[kind >= 0].sum()) / total_ns
    counts = [shape.samples for shape in shapes]
    fewest, most = min(counts), max(counts)
    samples = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    kinds: list[str] = []
    for name in KINDS:
        count = sum(shape.kind == name for shape in shapes)
        if count:
            kinds.append(f"{count} {name}")
    largest_distance = max(shape.distance for shape in shapes)
    largest_spread = max(shape.spread for shape in shapes)
    text = (
        f"samples of the calibration for {100 * share:.0f} % of the calls' time: {len(shapes)} "
        f"cells of {samples} samples ({', '.join(kinds)}; KS at most {largest_distance:.2f}; "
        f"spreads up to {format_percent(largest_spread)})"
    )
    widened = sum("widened" in shape.note for shape in shapes)
    if widened:
        text += f"; {widened} that no candidate fits, widened"
    return text


FOLDER = Path(__file__).with_name("variability")
PARTS = ("gpu", "step", "segment", "host", "call", "network")
_Spread = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Slow = tuple[  # chance, factor
    Annotated[float, msgspec.Meta(ge=0, lt=1)], Annotated[float, msgspec.Meta(gt=0, le=1000)]
]
_STEPS = 4001  # of the table of a product's quantiles


_MAX_SCORE = 3.5  # of samples that stand for a distribution: beyond it lies a draw of 4,000
_STAND_INS = 1000  # such samples


@dataclass(frozen=True)
class Variability:
    """Spreads.

    Attributes:
        name: Of the spreads.
        gpu: Between GPUs (spatial): a rank computes slower or faster for the whole run.
        step: Of a rank from iteration to iteration (temporal).
        call: Of a call; one draw for all that take part (shared).
        network: Of all calls of an iteration together, a regime (shared).
        source: Where they are from.
        segment: Of single compute segments.
        host: Of a rank's host from iteration to iteration, where slices know its time.
        slow_gpu: (chance, factor) of a GPU, for the whole run, to be that much slower on top.
        slow_network: The same of the network, for an iteration.
        shapes: Part -> its distribution, where samples say more than a spread.
        calls_by: How much of the deviation of calls counts that were sampled one by one.
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
        """Return the distribution of the factor of one of PARTS."""
        shape = self.shapes.get(part)
        if shape is not None:
            return shape
        return Distribution("lognormal", (0.0, getattr(self, part)))

    def scaled(self, part: str, factor: float) -> Variability:
        """Return the same, with ``factor`` times the spread of one of PARTS about its median."""
        shape = self.of(part)
        if shape.kind == "lognormal":
            numbers: tuple[float, ...] = (shape.numbers[0], factor * shape.numbers[1])
            scaled_shape = dataclasses.replace(shape, numbers=numbers)
        else:
            median = shape.at(np.zeros(1))
            scores = np.linspace(-_MAX_SCORE, _MAX_SCORE, 2001)
            chances = (np.arange(_STAND_INS) + 0.5) / _STAND_INS
            values = np.interp(chances, probabilities(scores), shape.at(scores))
            numbers = tuple((median + factor * (values - median)).tolist())
            scaled_shape = Distribution("empirical", numbers)
        changes = {part: factor * getattr(self, part)}
        if part == "call":
            changes["calls_by"] = factor * self.calls_by
        return dataclasses.replace(self, shapes={**self.shapes, part: scaled_shape}, **changes)

    def curve(self, *parts: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the distribution of the product of these parts' factors.

        ``slow_gpu`` goes with ``gpu``, ``slow_network`` with ``network``.

        Returns:
            Standard normal scores, and the values there.
        """
        shapes = [self.of(part) for part in parts]
        slowdowns = [getattr(self, f"slow_{part}") for part in parts if part in _MAY_BE_SLOW]
        has_slowdown = any(chance for chance, _ in slowdowns)
        scores = np.linspace(-_LARGEST_SCORE, _LARGEST_SCORE, _STEPS)

        # the product of lognormal factors is one
        if all(shape.kind == "lognormal" for shape in shapes) and not has_slowdown:
            numbers = np.array([shape.numbers for shape in shapes])
            spread = math.hypot(*numbers[:, 1])
            return scores, np.exp(numbers[:, 0].sum() + spread * scores)
        values = shapes[0].at(scores)
        for shape in shapes[1:]:
            values = _product(scores, values, shape.at(scores))
        for chance, factor in slowdowns:
            values = _mixed(scores, values, chance, factor)
        return scores, values


_MAY_BE_SLOW = ("gpu", "network")
_LARGEST_SCORE = 8


def _product(scores: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return values at ``scores`` of the product of two independent factors, given theirs."""
    weights = np.diff(probabilities(scores), prepend=0.0)
    likely = np.flatnonzero(weights > 1e-18)
    grid = np.geomspace(left[0] * right[0], left[-1] * right[-1], _STEPS)

    # sum over slices of the right factor, each of which stands for its middle
    chance = np.zeros(_STEPS)
    width = max(1, len(likely) // 400)
    for first in likely[::width].tolist():
        weight = weights[first : first + width].sum()
        value = right[min(first + width // 2, likely[-1])]
        chance += weight * probabilities(np.interp(grid / value, left, scores))
    values: np.ndarray = np.interp(probabilities(scores), chance / chance[-1], grid)
    return values


def _mixed(scores: np.ndarray, values: np.ndarray, chance: float, factor: float) -> np.ndarray:
    """Return values at ``scores`` if with ``chance`` they are ``factor`` times as large."""
    if not chance:
        return values
    low = min(values[0], factor * values[0])
    high = max(values[-1], factor * values[-1])
    grid = np.geomspace(low, high, 4 * _STEPS)
    below = (1 - chance) * probabilities(np.interp(grid, values, scores))
    below += chance * probabilities(np.interp(grid / factor, values, scores))
    mixed: np.ndarray = np.interp(probabilities(scores), below, grid)
    return mixed


def read_variability(name: str | os.PathLike[str]) -> Variability:
    """Read the spreads of that name or in that file.

    Raises:
        UsageError: Says what is wrong with them.
    """
    return machine.read(name, FOLDER, "a file of spreads", Variability)


_SHARE = 0.95  # of a rank's time: the longest segments that make it up are looked at
_WAITS = 0.05  # of a segment's time: waiting less than that for the host is no waiting
_LEAST_SHARE = 0.05  # of a device's time without waits: with less its samples are of the host
_ENOUGH_ITERATIONS = 40  # iterations that may stand for themselves
_RANKS = 5  # of the same ops: fewer say nothing of the spread between GPUs


def is_timed(programs: Programs) -> bool:
    """Tell whether the slices have the times of enough iterations to fit anything to."""
    return _iterations(_timed(programs)) >= FEWEST


def _timed(programs: Programs) -> list[Program]:
    """Return the programs of ranks with two timed iterations and more."""
    return [program for program in programs.programs if len(program.samples) > 1]


def _iterations(timed: Iterable[Program]) -> int:
    return sum(len(program.samples) for program in timed)


def fitted(programs: Programs, defaults: Variability) -> Variability:
    """Return spreads as the slices' samples say, and the defaults' where these say nothing.

    Args:
        programs: With samples.
        defaults: Shipped spreads, or those of another job.

    Raises:
        PrismError: No slice has two timed iterations, or there are samples that cannot be.
    """
    timed = _timed(programs)
    _check_timed(timed)
    shapes: dict[str, Distribution] = {}

    # devices: those that nearly always wait for their host say how the host varies
    devices = [_device(program) for program in timed]
    busy_devices = [device for device in devices if device.share >= _LEAST_SHARE]
    has_enough = _iterations(device.program for device in busy_devices) >= FEWEST
    # where no device waits for its host, fitting says itself that there are too few iterations
    if has_enough or len(busy_devices) == len(devices):
        steps = np.concatenate([_step_factors(device) for device in busy_devices])
        segments = np.concatenate([_segment_factors(device) for device in busy_devices])
        shapes["step"] = _centred(fit(steps, "an iteration's factor", _ENOUGH_ITERATIONS))
        shapes["segment"] = _centred(fit(segments, "a segment's factor"))
    gpu = _between_gpus(programs, busy_devices, defaults)

    # hosts
    hosts = _host_factors(timed)
    # to fewer nothing can be fitted: the spread of the defaults stays
    if len(hosts) >= FEWEST:
        shapes["host"] = _centred(fit(hosts, "a host's factor", _ENOUGH_ITERATIONS))

    # what was fitted, and what is left to the defaults
    left = "device, calls and network"
    if "step" in shapes:
        left = "calls and network"
    parts = "; ".join(f"{part}: {shape}" for part, shape in shapes.items())
    source = (
        f"fitted to {_iterations(timed)} timed iterations of {len(timed)} ranks ({parts}; "
        f"gpu: {gpu.source}); {left}: {defaults.name}"
    )
    waiting_share = 1 - float(np.mean([device.share for device in devices]))
    # a smaller share would be written as 0 %
    if waiting_share > 0.005:
        percent = f"{100 * waiting_share:.0f} %"
        source += f"; without {percent} of the time, in which the device waits for the host"
    spreads: dict[str, Any] = {part: shape.spread for part, shape in shapes.items()}
    return dataclasses.replace(
        defaults,
        name="slices",
        source=f"{source} ({defaults.source})",
        gpu=gpu.spread,
        slow_gpu=(0.0, 1.0),
        shapes={**defaults.shapes, **shapes},
        **spreads,
    )


def _check_timed(timed: Sequence[Program]) -> None:
    """Raise PrismError if nothing is timed, or if there are times that cannot be."""
    if not timed:
        text = "the slices hold no repeated times (iterations on a GPU or the cpu tier are timed)"
        fix = "--variability public, or capture more iterations: --train-iters 14"
        raise PrismError(text, fix=fix)
    for program in timed:
        has_negative = (program.samples < 0).any()
        if has_negative or not program.samples.sum(axis=1).all():
            text = f"rank {program.rank} has an iteration of no time, or a negative one"
            raise PrismError(text, fix="capture that rank again")


@dataclasses.dataclass(frozen=True)
class _Device:
    """What a rank's samples say of its device.

    Attributes:
        program: Of the rank.
        samples: int64 [iterations, segments] ns, single waits replaced by what the rest lets
            expect.
        is_own: bool [segments], in which the device usually does not wait for the host.
        waited: bool [iterations, segments], in which it did all the same.
        share: Of the time, in which it does not.
    """

    program: Program
    samples: np.ndarray
    is_own: np.ndarray
    waited: np.ndarray
    share: float


def _device(program: Program) -> _Device:
    """Tell which samples are the device's own."""
    is_segment = program.ops["name"] == CODE["compute"]
    ns = program.ops["ns"][is_segment]
    host = program.ops["host"][is_segment]
    typical = np.median(program.samples, axis=0)

    # of a segment without the host's time nothing tells otherwise; both times are rounded
    is_own = (host < 0) | (ns + 1 >= (1 - _WAITS) * typical)
    is_own &= typical > 0
    # the device waits for its host in every segment: no time is its own
    if not is_own.any():
        nowhere = np.zeros(program.samples.shape, bool)
        return _Device(program, program.samples, is_own, nowhere, 0.0)

    # an iteration's own pace, by segments in which nothing waits: [iterations, segments]
    pace = np.median(program.samples[:, is_own] / typical[is_own], axis=1, keepdims=True)
    expected = typical * pace
    waited = (program.samples > (1 + _WAITS) * expected) & (host >= 0)
    samples = np.where(waited, expected.round(), program.samples).astype(np.int64)
    own_ns = program.samples[is_own & ~waited].sum()
    share = own_ns / max(1, program.samples.sum())
    return _Device(program, samples, is_own, waited, float(share))


def _step_factors(device: _Device) -> np.ndarray:
    """Return factors of whole iterations about 1."""
    totals = device.samples[:, device.is_own].sum(axis=1).astype(float)
    return _widened(totals / totals.mean(), len(totals))


def _segment_factors(device: _Device) -> np.ndarray:
    """Return factors of the long segments about 1, of those that did not wait.

    Iterations' own factors are taken out.
    """
    samples = device.samples[:, device.is_own]
    waited = device.waited[:, device.is_own]
    means = samples.mean(axis=0)
    longest = np.argsort(-means, kind="stable")
    enough = int(np.searchsorted(np.cumsum(means[longest]), _SHARE * means.sum())) + 1
    chosen = longest[:enough]
    pace = samples.sum(axis=1, keepdims=True) / samples.sum(axis=1).mean()
    ratios = samples[:, chosen] / means[chosen] / pace
    factors: np.ndarray = _widened(ratios, len(samples))[~waited[:, chosen]]
    return factors


def _host_factors(timed: Iterable[Program]) -> np.ndarray:
    """Return factors of hosts about 1, of each rank whose host was timed."""
    factors = [np.empty(0)]
    for program in timed:
        if len(program.hosts) > 1 and program.hosts.all():
            factors.append(_widened(program.hosts / program.hosts.mean(), len(program.hosts)))
    return np.concatenate(factors)


def _widened(ratios: np.ndarray, iterations: int) -> np.ndarray:
    """Widen ratios to a mean of few values, which lies among them, about 1."""
    correction = math.sqrt(iterations / (iterations - 1))
    return np.maximum(1 + (ratios - 1) * correction, 1e-3)


_MAX_SAMPLES = 1001  # that stand for a distribution


def _centred(shape: Distribution) -> Distribution:
    """Return the same about a mean of 1; a few hundred quantiles stand for many samples."""
    if shape.kind != "empirical":
        return shape
    values = np.asarray(shape.numbers)
    if len(values) > _MAX_SAMPLES:
        values = np.quantile(values, (np.arange(_MAX_SAMPLES) + 0.5) / _MAX_SAMPLES)
    return dataclasses.replace(shape, numbers=tuple((values / values.mean()).tolist()))


@dataclass(frozen=True)
class _GpuSpread:
    """Spread between GPUs, and where it is from."""

    spread: float
    source: str


def _between_gpus(programs: Programs, own: Sequence[_Device], other: Variability) -> _GpuSpread:
    """Find the spread between GPUs, by segments that none of the ranks waits in."""
    ranks = programs.world.size
    # a spread on top of these would count the difference between GPUs twice
    if len(programs.programs) == ranks == len(_timed(programs)):
        return _GpuSpread(0.0, "every rank has times of its own")
    # ranks whose programs have the same ops compute the same
    devices_of_ops: dict[bytes, list[_Device]] = {}
    for device in own:
        ops = device.program.ops
        key = ops["name"].tobytes() + ops["num_in"].tobytes()
        devices_of_ops.setdefault(key, []).append(device)
    ratios: list[float] = []
    for devices in devices_of_ops.values():
        is_own_of_all = np.logical_and.reduce([device.is_own for device in devices])
        means = np.array(
            [device.samples[:, is_own_of_all].sum(axis=1).mean() for device in devices]
        )
        if len(devices) >= _RANKS and means.all():
            ratios += (means / means.mean()).tolist()
    if not ratios:
        return _GpuSpread(other.gpu, f"{other.name}, as fewer than {_RANKS} ranks run the same")
    shape = fit(ratios, "a GPU's factor")
    return _GpuSpread(shape.spread, str(shape))
