"""Price a job of any kind under one machine and one calibration."""

from __future__ import annotations

from collections.abc import Callable

from megatron_prism.core.programs.program import Programs
from megatron_prism.replay.priced_graph import CalibrationLike, MachineLike, PricedGraph, price


def pricer(
    machine: MachineLike | None = None, calibration: CalibrationLike | None = None
) -> Callable[[object], PricedGraph | None]:
    """Return a function that prices programs.

    Args:
        machine: of the programs, as ``price`` takes it.
        calibration: of the machine, as ``price`` takes it.

    Returns:
        A function of a job: programs are priced, a priced graph stays as it is, and other values
        are None.
    """

    def priced(job: object) -> PricedGraph | None:
        if isinstance(job, Programs):
            return price(job, machine=machine, calibration=calibration)
        if isinstance(job, PricedGraph):
            return job
        return None

    return priced
