"""Hosts whose index somebody measured: what is known of a host before anybody measures it.

Every host counts once, with the median of its readings: a host that was read often would otherwise
stand for many.  An index is of ``prism calibrate --host``, 1.0 of the reference host
(``host_index``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class HostKind(Enum):
    """Whose a host is; the value stands in answers."""

    NVIDIA = "NVIDIA's hosts"
    RENTED = "rented ones"
    OWN = "idle ones of one's own"


@dataclass(frozen=True)
class MeasuredHost:
    """One host.

    Attributes:
        kind: whose it is.
        index: the median of its readings.
        source: what it has, when it was read, and all readings or where they are.
    """

    kind: HostKind
    index: float
    source: str


MEASURED_HOSTS = (
    # nobody outside can run a benchmark on NVIDIA's hosts: 37 of its functional tests say by their
    # times how fast the hosts of two periods were (docs/measurements.md)
    MeasuredHost(HostKind.NVIDIA, 0.60, "8 x H100, April 2026, by 37 functional tests"),
    MeasuredHost(HostKind.NVIDIA, 0.89, "8 x H100, the later recording, 1.49 times as long"),
    # the reference host is read as 1 by definition
    MeasuredHost(HostKind.OWN, 1.00, "AMD EPYC, two cores, idle, 2026-11-24"),
    # virtual machines with lent GPUs.  ``captured.json.gz`` has calibrations and slices of four
    MeasuredHost(HostKind.RENTED, 1.87, "2 x H100, 2026-11-24, first sitting of captured.json.gz"),
    MeasuredHost(HostKind.RENTED, 1.33, "2 x H100, 2026-11-24, second sitting of captured.json.gz"),
    MeasuredHost(HostKind.RENTED, 1.33, "1 x H100, functional tests of captured.json.gz"),
    MeasuredHost(HostKind.RENTED, 0.87, "2 x H100, 2026-11-26, captured.json.gz: hot_*, python_*"),
    MeasuredHost(HostKind.RENTED, 1.65, "2 x H100, 2026-11-25: 0.91 to 1.94 in eight readings"),
    MeasuredHost(HostKind.RENTED, 1.75, "2 x H100, at their power limit: 1.74, 1.77"),
    MeasuredHost(
        HostKind.RENTED, 1.45, "2 x H200, 2026-11-26: 0.96 to 1.90 in pauses of four runs"
    ),
    MeasuredHost(HostKind.RENTED, 1.82, "1 x H100, calibrated alone"),
    MeasuredHost(HostKind.RENTED, 1.21, "1 x H100, 2026-11-28: 1.48 and 0.93 four minutes apart"),
    MeasuredHost(HostKind.RENTED, 1.50, "2 x H200, 2026-11-28: 1.57, 1.43"),
)


def indices_of_kind(kind: HostKind) -> list[float]:
    """Collect the indices of the measured hosts of one kind, the fastest first."""
    return sorted(host.index for host in MEASURED_HOSTS if host.kind == kind)
