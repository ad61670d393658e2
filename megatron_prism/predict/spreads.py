"""How much do durations vary?  Spreads of the factors on computing and calls, from a data file or
fitted to what was recorded.

Every factor has median 1 and, unless its distribution is known, is lognormal; a spread is the
standard deviation of its logarithm, about the relative deviation for small ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_prism.core import data_file
from megatron_prism.core.errors import UsageError
from megatron_prism.predict.distribution import Distribution, probabilities

__all__ = ["PARTS", "Variability", "variability"]

FOLDER = Path(__file__).with_name("variability")
PARTS = ("gpu", "step", "segment", "host", "call", "network")
CHANCES = ("slow_gpu", "slow_network")
_OPTIONAL = {"segment", "host", *CHANCES}
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
    gpu: float
    step: float
    call: float
    network: float
    source: str
    segment: float = 0.0
    host: float = 0.0
    slow_gpu: tuple[float, float] = (0.0, 1.0)
    slow_network: tuple[float, float] = (0.0, 1.0)
    shapes: Mapping[str, Distribution] = field(default_factory=dict)
    calls_by: float = 1.0

    def of(self, part: str) -> Distribution:
        """The distribution of the factor of one of PARTS."""
        given = self.shapes.get(part)
        return given or Distribution("lognormal", (0.0, getattr(self, part)))

    def without(self, *parts: str) -> Variability:
        """The same, but these parts do not vary."""
        kept = {name: shape for name, shape in self.shapes.items() if name not in parts}
        none: dict[str, Any] = {name: (0.0, 1.0) if name in CHANCES else 0.0 for name in parts}
        by = 0.0 if "call" in parts else self.calls_by
        return dataclasses.replace(self, shapes=kept, calls_by=by, **none)

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
        goes with ``gpu``, ``slow_network`` with ``network``."""
        chances = [getattr(self, f"slow_{part}") for part in parts if f"slow_{part}" in CHANCES]
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


def variability(name: str | os.PathLike[str]) -> Variability:
    """The spreads of that name or in that file.  UsageError says what is wrong with them."""
    own = ("shapes", "calls_by")  # not a file's
    names = [one.name for one in dataclasses.fields(Variability) if one.name not in own]
    path, fields = data_file.read(name, FOLDER, "variability", names, _OPTIONAL)
    for part in PARTS:
        value = fields.get(part, 0.0)
        if not _number(value) or not 0 <= value <= 1:
            raise UsageError(f"{path}: {part} is {value!r}", fix="a spread is from 0 to 1")
    for part in CHANCES:
        value = fields.setdefault(part, [0.0, 1.0])
        good = isinstance(value, list) and len(value) == 2 and all(map(_number, value))
        if not good or not 0 <= value[0] < 1 or not 0 < value[1] <= 1000:
            raise UsageError(f"{path}: {part} is {value!r}", fix="[chance below 1, factor]")
        fields[part] = tuple(map(float, value))
    return Variability(**fields)


def _number(value: object) -> bool:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return good and math.isfinite(value)  # type: ignore[arg-type]
