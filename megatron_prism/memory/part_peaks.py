"""Peaks of the parts of a process's life, in the source of slices.

The parts are those of ``emulate.rank.monitor.PARTS``.  A part that did not run is absent, which
is not the same as 0 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_prism.core.programs.slices import ASSUMED_PARTS, MEMORY_PARTS, of_ranks

_PARTS = re.compile(r"[a-z:_,\d]+")
_PART = re.compile(r"([a-z_]+):(\d{1,16})(?:,|$)")
_NAMES = re.compile(r"[a-z_]+(?:,[a-z_]+)*")


def as_text(peaks: Mapping[str, int]) -> str:
    """Write the parts of one rank without spaces.

    Args:
        peaks: part -> the most that is allocated in it, bytes.
    """
    entries = [f"{name.replace(' ', '_')}:{num_bytes}" for name, num_bytes in peaks.items()]
    return ",".join(entries)


@dataclass(frozen=True)
class PartPeaks:
    """The parts of one rank's process.

    Args:
        peaks: part -> the most that is allocated in it, bytes.
        assumed: the parts that ran on an assumption.
    """

    peaks: Mapping[str, int]
    assumed: tuple[str, ...] = ()


def of_source(source: Mapping[str, str]) -> dict[int, PartPeaks]:
    """Read the parts of every captured rank.

    Args:
        source: what slices say of their job; a file may lie.

    Returns:
        Rank -> its parts; a rank whose slice does not say it is absent.
    """
    texts = of_ranks(source)
    ranks = {}
    for rank, text in texts.get(MEMORY_PARTS, {}).items():
        if not _PARTS.fullmatch(text):
            continue
        peaks = {}
        for name, num_bytes in _PART.findall(text):
            peaks[name.replace("_", " ")] = int(num_bytes)
        names = texts.get(ASSUMED_PARTS, {}).get(rank, "")
        assumed: list[str] = []
        if _NAMES.fullmatch(names):
            assumed = names.replace("_", " ").split(",")
        ranks[rank] = PartPeaks(peaks, tuple(assumed))
    return ranks


def names_as_text(names: Iterable[str]) -> str:
    """Write names of parts without spaces."""
    return ",".join(name.replace(" ", "_") for name in sorted(names))
