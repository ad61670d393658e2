"""How fast a host issues work, by a benchmark or by a trace of the job that runs on it.

In : a file of ``prism calibrate --host``, or traces of torch.profiler.  Out: HostIndex.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from megatron_prism.core import foreign

VERSION = 1  # of the benchmark; goes up when an index means something else
# part -> (ns of a unit on the reference host, weight).  The reference is an idle AMD EPYC of two
# cores, Python 3.11, torch 2.13, 2026-11-24; weights are rounded shares of a train step of Megatron
# under a profiler: half operators and autograd, the rest its own Python, calls to C and locks.
REFERENCE = {
    "dispatch": (20_000.0, 0.3),
    "autograd": (900_000.0, 0.3),
    "python": (1_500.0, 0.25),
    "launches": (2_400.0, 0.1),
    "lock": (1_000.0, 0.05),
}


_Times = Annotated[float, msgspec.Meta(gt=0, lt=1e4)]


@dataclass(frozen=True)
class HostIndex:
    """How fast a host issues work, as it is written and read.

    index  : times as long as the reference host; 2: half as fast
    spread : of single measurements, as a part of the index
    parts  : part of the benchmark -> times as long as the reference host
    source : processor, versions, date
    """

    index: _Times
    spread: Annotated[float, msgspec.Meta(ge=0, lt=1e4)]
    parts: Mapping[str, _Times]
    source: str
    version: int = VERSION

    @classmethod
    def of(cls, ns: Mapping[str, float], spread: Mapping[str, float], source: str) -> HostIndex:
        """From the median ns of a unit of every part, and how much they spread."""
        parts = {name: ns[name] / base for name, (base, _) in REFERENCE.items()}
        index = math.exp(sum(w * math.log(parts[name]) for name, (_, w) in REFERENCE.items()))
        spreads = sum(w * spread[name] for name, (_, w) in REFERENCE.items())
        return cls(index, spreads, parts, source)

    def to_json(self) -> str:
        """What ``read_host_index`` reads."""
        return json.dumps({"host_index": asdict(self)}, indent=1) + "\n"


# Operators of a trace -> median ns on the reference host, the first that a trace has often enough.
# 40 traced iterations of five jobs on two H200, the benchmark before each of them, torch 2.11: per
# job within 3 % of the first, 18 % of the second, which waits where the device is far behind
TRACED = {"aten::empty": 5_300.0, "cudaLaunchKernel": 8_700.0}
_ENOUGH, _WINDOW = 100, 50  # events of a trace; of what one median is taken
_ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")
_MOST = 1 << 31  # bytes of a trace, unpacked


def read_host_index(path: str | os.PathLike[str]) -> HostIndex:
    """What ``prism calibrate --host`` wrote, the index in a whole calibration, or the index of the
    host in a trace of torch.profiler, or in a folder of them.  UsageError.
    """
    place = Path(path)
    names = ("*.json", "*.json.gz")
    files = [place]
    if place.is_dir():
        files = sorted(itertools.chain.from_iterable(map(place.glob, names)))
    fix = "a file of prism calibrate --host -o HOST.json, or traces of torch.profiler"
    with foreign.reading(path, "an index of a host", fix):
        if not files:
            raise ValueError(f"it has neither of {' and '.join(names)}")
        texts = (foreign.read_unpacked(file, _MOST) for file in files)
        contents = [msgspec.json.decode(text, type=_File, strict=False) for text in texts]
        stored = contents[0].host_index
        if len(contents) == 1 and stored is not None:
            if stored.version != VERSION:
                raise ValueError(
                    f"its host index is of version {stored.version}, this release compares "
                    f"version {VERSION}"
                )
            return stored
        return _of_traces([content.traceEvents for content in contents], place.name)


def _of_traces(traces: Sequence[Sequence[_Event]], source: str) -> HostIndex:
    """The median of what operators of the traces take; each trace counts alike."""
    alone = [_alone(events) for events in traces]
    for name, base in TRACED.items():
        # of each trace, times as a share of the reference host's
        shares = [took[name] * 1000 / base for took in alone if len(took[name]) >= _ENOUGH]
        if not shares:
            continue
        index = float(np.median([np.median(times) for times in shares]))
        window_medians = list[float]()
        for times in shares:
            for first in range(0, len(times), _WINDOW):
                window_medians.append(float(np.median(times[first : first + _WINDOW])))
        low, high = np.quantile(window_medians, [0.1, 0.9])
        return HostIndex(index, float((high - low) / 2 / index), {name: index}, source)
    raise ValueError(f"it has no {_ENOUGH} events of {' or '.join(TRACED)}")


def _alone(events: Sequence[_Event]) -> dict[str, np.ndarray]:
    """Operator of ``TRACED`` -> us of each that calls nothing which the trace has."""
    # by thread and begin; of several that begin together the longest, which calls the others
    calls = list[tuple[str, float, float, str]]()
    for event in events:
        if event.cat in _ON_HOST and event.ts is not None and event.dur:
            calls.append((str(event.tid), event.ts, -event.dur, str(event.name)))
    calls.sort()
    took: dict[str, list[float]] = {name: [] for name in TRACED}
    for call, following in itertools.zip_longest(calls, calls[1:]):
        thread, begin, minus_duration, name = call
        end = begin - minus_duration
        if name in took and (not following or following[:2] >= (thread, end)):
            took[name].append(-minus_duration)
    return {name: np.array(times) for name, times in took.items()}


class _Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str | int | None = ""
    ts: float | None = None
    dur: float | None = None
    tid: int | str | None = None


class _File(msgspec.Struct):
    host_index: HostIndex | None = None
    traceEvents: list[_Event] = []
