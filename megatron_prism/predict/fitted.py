"""What do the timed iterations of slices say about variation?  Spreads fitted to them.

In : Programs with ``samples``, and a Variability for what slices cannot say.  Out: Variability.

Temporal: an iteration of a rank over the rank's mean (``step``), its segments over their own means
once that is taken out (``segment``), and what its host takes over its mean (``host``).  Spatial:
ranks that run the same ops on GPUs of their own (``gpu``); nothing if every rank of the world was
captured, because then each rank's own times are its GPU's.  Calls and the network come from the
other Variability: a captured rank's peers are virtual.  Means of few iterations stand for the
truth, so deviations are widened by n / (n - 1).

Where slices tell the host's time from the kernels', only segments count in which the device did not
wait for the host: gaps vary with the host, and prices have the host's time apart.  A segment that
usually is none of these may still have waited in one iteration, so times are left out that are
longer than the rest of that iteration says by more than ``_WAITS``.  A device that is that slow in
one segment and quick in the next is lost with them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import CODE
from megatron_prism.core.program import Program
from megatron_prism.core.programs import Programs
from megatron_prism.predict.distribution import FEWEST, Distribution, fit
from megatron_prism.predict.spreads import Variability

__all__ = ["fitted", "is_timed"]

_SHARE = 0.95  # of a rank's time: the longest segments that make it up are looked at
_WAITS = 0.05  # of a segment's time: waiting less than that for the host is no waiting
_ENOUGH = 40  # iterations that may stand for themselves
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
        raise PrismError(
            "the slices hold no repeated times (only iterations on a GPU or the cpu tier are "
            "timed, a job of few iterations has one, and earlier releases kept the median)",
            fix="variability=public, or capture more iterations: --train-iters 14",
        )
    for one in timed:
        if (one.samples < 0).any() or not one.samples.sum(axis=1).all():
            raise PrismError(
                f"rank {one.rank} has an iteration of no time, or a negative one",
                fix="capture that rank again",
            )
    shapes: dict[str, Distribution] = {}
    found = [_of_device(one) for one in timed]
    own = [one for one in found if one.share >= _WAITS]
    enough = sum(len(one.samples) for one in own) >= FEWEST
    if enough or len(own) == len(found):  # that there are too few iterations is said below
        factors = np.concatenate([_steps(one) for one in own])
        shapes["step"] = _centred(fit(factors, "an iteration's factor", _ENOUGH))
        parts = [_segments(one) for one in own]
        shapes["segment"] = _centred(fit(np.concatenate(parts), "a segment's factor"))
    gpu, how = _between(programs, own, other)
    hosts = [_widened(one.hosts / one.hosts.mean(), len(one.hosts))
             for one in timed if len(one.hosts) > 1 and one.hosts.all()]  # fmt: skip
    if sum(map(len, hosts)) >= FEWEST:
        shapes["host"] = _centred(fit(np.concatenate(hosts), "a host's factor", _ENOUGH))
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
    wait."""
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
