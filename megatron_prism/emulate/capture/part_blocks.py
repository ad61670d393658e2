"""Peaks of the parts of a process's life as torch counts allocated bytes: by blocks.

A block may be larger than its tensor: sizes are rounded, and up to 1 MiB of a large segment is not
split off.  Where the history of requests ends, later parts have what tensors of then lack.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron_prism.memory import allocator

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.live_bytes import LiveBytes


def block_peaks(live: LiveBytes) -> dict[str, int]:
    """Return part -> the most that is allocated in it, bytes.

    Args:
        live: tensors of the run, and its requests.
    """
    history = live.history
    if live.earlier is not None:
        history, _ = live.earlier
    settings = allocator.Settings.of_environment(os.environ)
    if history is None or settings is None:
        return dict(live.parts)

    rows = history.rows()
    state, peaks = allocator.allocated_by_span(rows.tolist(), history.spans, settings)
    # blocks that live on are larger than their tensors by so much
    beyond_tensors = state.allocated - int(rows[:, 1].sum())
    ordered = {}
    for name, tensor_bytes in live.parts.items():
        ordered[name] = peaks.get(name, tensor_bytes + beyond_tensors)
    return ordered
