"""The SM clock of a GPU while iterations are timed, which kernels at the power limit follow.

NVML is asked by a thread of its own, every ``PERIOD_S``; a question takes some ten us of the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import NamedTuple

from megatron_prism.core.programs.gpu_state import GpuState

PERIOD_S = 0.02


class Sample(NamedTuple):
    """``at`` in ns of ``time.time_ns``; MHz, W, whether power or heat slows it down, degrees C."""

    at: int
    mhz: int
    watts: float
    limited: bool
    celsius: int


class ClockSampler:
    """Samples a device from construction to ``stop``.

    ask : one sample
    most_mhz, limit_watts : the device's own
    """

    def __init__(self, ask: Callable[[], Sample], most_mhz: int, limit_watts: float) -> None:
        self.samples: list[Sample] = []
        self._ask, self._most, self._limit = ask, most_mhz, limit_watts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prism-clock", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(Exception):  # a device that stops answering; what is there counts
            while not self._stop.wait(PERIOD_S):
                self.samples.append(self._ask())

    def join(self, seconds: float) -> None:
        """Wait until no sample is taken any more."""
        self._thread.join(seconds)

    def stop(self) -> None:
        """No sample is taken any more when this returns."""
        self._stop.set()
        self.join(10)

    def state(self, spans: Sequence[tuple[int, int]]) -> GpuState | None:
        """What the samples inside of ``spans`` (ns of ``time.time_ns``) have on average; None
        without any.
        """
        inside = []
        for sample in self.samples:
            # samples between the spans are of other work
            if any(begin <= sample.at < end for begin, end in spans):
                inside.append(sample)
        if not inside:
            return None
        return GpuState(
            round(fmean(sample.mhz for sample in inside)),
            self._most,
            round(fmean(sample.watts for sample in inside)),
            round(self._limit),
            round(fmean(sample.limited for sample in inside), 2),
            round(fmean(sample.celsius for sample in inside)),
        )


def sampler(device: int) -> ClockSampler | None:
    """Of CUDA device ``device``; None where NVML does not answer for it."""
    try:
        import pynvml
        import torch

        handle = torch.cuda._get_pynvml_handler(device)
        # reasons for a slow clock: power, the hardware's own brake, heat
        slowed = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonHwSlowdown
        slowed |= pynvml.nvmlClocksEventReasonSwThermalSlowdown

        def ask() -> Sample:
            return Sample(
                time.time_ns(),
                pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                bool(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & slowed),
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            )

        # a first sample: a device that does not answer raises here, not in the middle of a run
        ask()
        max_mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        return ClockSampler(ask, max_mhz, pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000)
    except Exception:  # a device without NVML, or a release that lacks one of these
        return None
