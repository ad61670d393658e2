"""Baselines of a job's memory: written and read.

In : a ``MemoryReport``.  Out: JSON that a person reviews (sorted keys, whole bytes, one value a
line).  Baselines of another job, version or tier are never compared.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import write_whole
from megatron_prism.core.world import World
from megatron_prism.memory.job_peaks import (
    ClassMemoryFigures,
    MemoryReport,
    Text,
)
from megatron_prism.memory.peaks import KINDS

SCHEMA = "prism.mem-baseline/1"


def add_real(report: MemoryReport, world: World, rank: int | None, num_bytes: int) -> None:
    """Keep the peak of a real process of ``rank`` with its class; UsageError if it has none, or is
    not known and there are several.
    """
    if rank is None and len(report.classes) > 1:
        raise UsageError("the snapshot's name says no rank", fix="name it rank0.pickle, or so")
    for figures in report.classes.values():
        # without a rank there is one class, whose rank it is
        if rank is None or rank in world.select(figures["ranks"]):
            # of several snapshots the one that needs most
            figures["real"] = max(figures.get("real", 0), num_bytes)
            return
    raise UsageError(f"no slice stands for rank {rank}", fix="a snapshot of this very job")


def save(baseline: MemoryReport, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write it, whole or not at all; UsageError if the place is taken."""
    value = {
        "schema": SCHEMA,
        "job": baseline.job,
        "classes": baseline.classes,
        "provenance": baseline.provenance,
    }
    return write_whole(path, json.dumps(value, indent=1, sort_keys=True) + "\n", force=force)


def load(path: str | os.PathLike[str]) -> MemoryReport:
    """What ``save`` wrote.  UsageError for anything else."""
    fix = f"write it again: prism memory record PROGRAMS -o {path} --force"
    absent = f"prism memory record PROGRAMS -o {path}"
    with foreign.reading(path, "a baseline of memory", fix, absent=absent):
        stored = foreign.read_json(path, _Stored)
        for name, figures in stored.classes.items():
            _check(name, figures)
    report = MemoryReport(stored.job, stored.classes)
    device = stored.provenance.get("peak_device")
    # an earlier release did not say what device bytes are made of
    if device is not None:
        report = replace(report, device=device)
    return report


class _Stored(msgspec.Struct):
    schema: Literal["prism.mem-baseline/1"]
    job: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    classes: Annotated[dict[Text, ClassMemoryFigures], msgspec.Meta(min_length=1)]
    provenance: dict[str, str] = {}


def _check(name: str, figures: ClassMemoryFigures) -> None:
    """ValueError unless the figures add up."""
    bytes_of_kind, peak_bytes = figures["by_category"], figures["peak_allocated"]
    # an earlier release knew fewer categories: what it wrote adds up without the others
    unknown = sorted(set(bytes_of_kind) - set(KINDS))
    if unknown:
        text = f"classes {name!r}: its categories {', '.join(unknown)} are none of"
        raise ValueError(f"{text} {', '.join(KINDS)}")
    # the peak is divided twice: by category, and by the lines that hold most
    bytes_of_lines = sum(entry["num_bytes"] for entry in figures["top"]) + figures["smaller"]
    if sum(bytes_of_kind.values()) != peak_bytes or bytes_of_lines != peak_bytes:
        raise ValueError(f"classes {name!r}: its parts do not add up to {peak_bytes}")
