"""Peaks of the parts of a process's life, in the source of slices.

The parts are those of ``emulate.monitor.PARTS``.  A part that did not run is absent, which is not
the same as 0 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_prism.core.slices import MEMORY_PARTS, of_ranks

_PARTS = re.compile(r"[a-z:_,\d]+")
_PART = re.compile(r"([a-z_]+):(\d{1,16})(?:,|$)")


def as_text(peaks: Mapping[str, int]) -> str:
    """Write the parts of one rank without spaces.

    Args:
        peaks: part -> the most that is allocated in it, bytes.
    """
    entries = [f"{name.replace(' ', '_')}:{num_bytes}" for name, num_bytes in peaks.items()]
    return ",".join(entries)


def of_source(source: Mapping[str, str]) -> dict[int, dict[str, int]]:
    """Read the parts of every captured rank.

    Args:
        source: what slices say of their job; a file may lie.

    Returns:
        Rank -> part -> bytes; a rank whose slice does not say it is absent.
    """
    ranks = {}
    for rank, text in of_ranks(source).get(MEMORY_PARTS, {}).items():
        if not _PARTS.fullmatch(text):
            continue
        peaks = {}
        for name, num_bytes in _PART.findall(text):
            peaks[name.replace("_", " ")] = int(num_bytes)
        ranks[rank] = peaks
    return ranks
