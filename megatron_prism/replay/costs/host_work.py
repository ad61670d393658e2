"""How long copies between device and host take, and what the host's operators compute there.

A job that offloads its optimizer copies gradients to the host, steps there and copies parameters
back; the device waits for all of it.  Offloaded activations are copied by another stream, beside
the kernels of a segment.  A note has the bytes of each kind (``HOST_WORK``).
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_prism.core.programs.ops import HOST_COPY_BESIDE, HOST_COPY_UNPINNED, ON_HOST
from megatron_prism.replay.costs.machine import Machine

# bytes per second of a copy of pinned memory, by the generation of PCI Express that a GPU's boards
# have: 3 of V100, 4 of A100, 5 since then.  That of Hopper is measured in both directions from
# 32 MiB on (benchmarks/results/h200_host_work.json), the others are in proportion to the standards
_COPY_RATE = {"volta": 13e9, "ampere": 27e9, "hopper": 55e9, "blackwell": 55e9}
_UNPINNED_RATE = 8e9  # to the device, there as well
# bytes per second that torch's fused Adam reads and writes in a stock job on eight threads there,
# whose iterations offload_half and offload_base of benchmarks/results/h200_fourteen_alone.json
# compare.  By itself it reaches 2.3 times as many, and on one thread 3.9 times fewer
_OF_ALL = 33e9
_OF_ONE_THREAD = _OF_ALL / 3.9


class HostWork(NamedTuple):
    """ns of what a segment does on the host, and copies to it or from it.

    waited: while the device waits.
    beside: on another stream, while kernels run.
    """

    waited: int = 0
    beside: int = 0


def host_work(kind: str, threads: str, num_bytes: int, machine: Machine) -> HostWork:
    """Say how long one entry of a note takes.

    Args:
        kind: one of ``HOST_WORK``.
        threads: of the host's operators, as the note has it; "" or 0: all of the rank's cores.
        num_bytes: that are copied, or that the operators read and write.
        machine: which GPU.
    """
    if kind == ON_HOST:
        rate = _OF_ALL
        if threads.isdigit() and int(threads):
            rate = min(_OF_ALL, int(threads) * _OF_ONE_THREAD)
        return HostWork(waited=round(1e9 * num_bytes / rate))
    if kind == HOST_COPY_UNPINNED:
        return HostWork(waited=round(1e9 * num_bytes / _UNPINNED_RATE))
    copy_rate = machine.host_rate or _COPY_RATE[machine.generation]
    took_ns = round(1e9 * num_bytes / copy_rate)
    if kind == HOST_COPY_BESIDE:
        return HostWork(beside=took_ns)
    return HostWork(waited=took_ns)


def copies_beside(note: str) -> bool:
    """Whether a segment copies between device and host on a stream of its own."""
    return note.startswith(HOST_COPY_BESIDE)
