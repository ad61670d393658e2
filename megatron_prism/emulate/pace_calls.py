"""Which calls does pacing expect of a rank, and what would NCCL take of GPU and host for each?

In : the rank's program, the table of releases, sizes of groups, perhaps a calibration.  Out: every
call in order of issue, and which launch of the table ends which interactions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from megatron_prism.core.ops import IS_COLLECTIVE, IS_PAIR, NAMES
from megatron_prism.core.program import Program
from megatron_prism.replay.costs.collectives import Calibration
from megatron_prism.replay.costs.host import call_ns
from megatron_prism.replay.release import Releases

if TYPE_CHECKING:
    from megatron_prism.runtime.pacing.pacer import Call

__all__ = ["calls_of", "expected", "nccl_blocks"]

_LARGE = 1 << 18  # bytes: answering takes a few us from here on


def expected(
    program: Program,
    table: Releases,
    process: int,
    group_sizes: Mapping[str, int],
    calibration: Calibration | None = None,
) -> tuple[list[Call], list[list[int]]]:
    """(every call of the program in order, per launch the interactions that it ends).

    ``calibration`` knows how long NCCL keeps the host for a call.
    """
    from megatron_prism.runtime.pacing.pacer import Call

    ops = program.ops
    mine = table.member == process
    interaction = dict(zip(table.op[mine].tolist(), table.of[mine].tolist(), strict=True))
    sizes = np.maximum(program.bytes_in, program.bytes_out)
    launches: list[list[int]] = []
    batches: dict[int, int] = {}
    calls = []
    hosts = call_ns(program, calibration or Calibration(), 0)
    for i in calls_of(program):
        launch, batch = -1, int(ops["batch"][i])
        if i in interaction:
            launch = batches.get(batch, -1)
            if launch < 0:
                launch = len(launches)
                launches.append([])
                if batch >= 0:
                    batches[batch] = launch
            launches[launch].append(interaction[i])
        group, name = program.strings[ops["group"][i]], NAMES[ops["name"][i]]
        blocks = nccl_blocks(name, max(0, int(sizes[i])), group_sizes[group])
        large = sizes[i] >= _LARGE and name != "send"
        host = int(hosts[i]) if launch >= 0 else 0
        calls.append(Call(name, group, launch, blocks, large, host))
    return calls, launches


def calls_of(program: Program) -> list[int]:
    """Its communications, as indices of its ops."""
    names = program.ops["name"]
    found: list[int] = np.flatnonzero(IS_COLLECTIVE[names] | IS_PAIR[names]).tolist()
    return found


def nccl_blocks(op: str, num_bytes: int, size: int) -> int:
    """How many thread blocks NCCL runs for a call, and so how many SMs it takes from computing.

    Fits what the profiler saw on 4 x H200 over NVLink (NCCL 2.28.9, NVLS off, 2026-11-21): 24 for
    collectives from 1 MiB on, one per 4 KiB of each rank's share below; 8 for a message of 64 KiB
    and more, 16 from 256 MiB; 4 to 32 for an all-to-all of 4.
    """
    if op in ("send", "recv"):
        return 16 if num_bytes >= 1 << 28 else max(1, min(8, num_bytes >> 13))
    if op == "all_to_all":
        return max(size, min(32, num_bytes >> 13))
    return max(1, min(24, num_bytes // (size << 12)))
