"""The state of a GPU while it was measured, as slices keep it: ``gpu_clock`` of a source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

GPU_CLOCK = "gpu_clock"  # of a source: "RANK=1702/1980MHz,671/700W,0.93,58C …"
_STATE = re.compile(
    r"(\d{1,9})=(\d{2,4})/(\d{2,4})MHz,(\d{1,4})/(\d{1,4})W,([01]\.?\d{0,2}),(\d{1,3})C(?!\S)"
)


class GpuState(NamedTuple):
    """On average of the timed iterations.

    mhz, most_mhz    : SM clock, and the highest that the device has
    watts, limit_watts : power, and its limit
    limited          : share of the time in which power or heat lowered the clock
    celsius          : temperature
    """

    mhz: int
    most_mhz: int
    watts: int
    limit_watts: int
    limited: float
    celsius: int

    def __str__(self) -> str:
        power = f"{self.watts}/{self.limit_watts}W"
        return f"{self.mhz}/{self.most_mhz}MHz,{power},{self.limited:g},{self.celsius}C"


def states_of(source: Mapping[str, str]) -> dict[int, GpuState]:
    """Rank -> state of the GPU that captured it, as far as the slices say; a file may lie."""
    found = {}
    for match in _STATE.finditer(source.get(GPU_CLOCK, "")):
        rank, mhz, most, watts, limit, limited, celsius = match.groups()
        # a clock of 0, or a share above 1, was never measured
        if int(mhz) and float(limited) <= 1:
            state = GpuState(
                int(mhz), int(most), int(watts), int(limit), float(limited), int(celsius)
            )
            found[int(rank)] = state
    return found
