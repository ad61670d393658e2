"""What changes between two reports of a job's peak memory.

In : two ``MemoryReport``s.  Out: Changes, by class.  One-sided: growth of allocated bytes beyond
the tolerance fails, shrinking does not; reserved is reported and not guarded, since it is modelled.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.slices import OF_RANKS
from megatron_prism.core.units import counted
from megatron_prism.memory.job_peaks import ClassMemoryFigures, MemoryReport, needed
from megatron_prism.memory.peaks import KINDS

LEAK = 1 << 20  # bytes that an iteration may leave behind


@dataclass(frozen=True)
class Growth:
    """Bytes that one origin holds more (or fewer) at the peak than before."""

    kind: str
    module: str
    site: str
    num_bytes: int


@dataclass(frozen=True)
class Change:
    """One class against its baseline.

    what    : grown, shrunk, same, appeared, vanished, over (its limit: ``level``), leaks
    before  : peak of allocated bytes in the baseline, None if the class appeared
    by_kind : bytes per kind, after - before, where they differ
    origins : the same per origin, largest growth first
    moved   : "1B2 -> O" if the peak is at another step
    resized : "2 -> 8 ranks" if the class has another number of them
    real    : peak of a real run of what the baseline is of, None if it has none
    """

    what: str
    name: str
    ranks: str
    before: int | None
    after: int | None
    by_kind: Mapping[str, int]
    origins: tuple[Growth, ...]
    moved: str = ""
    level: str = "allocated"
    real: int | None = None
    resized: str = ""

    @property
    def fails(self) -> bool:
        return self.what in ("grown", "appeared", "vanished", "over", "leaks")


def compare(
    before: MemoryReport,
    after: MemoryReport,
    *,
    tol_bytes: int = 0,
    limit: int | None = None,
    leak_bytes: int | None = None,
    any_job: bool = False,
) -> list[Change]:
    """Every class of both, in the order of their ranks.

    tol_bytes : growth that is still no failure
    limit     : bytes that device memory may not exceed; where it is unknown, reserved memory
    leak_bytes: what an iteration may leave behind (the last losses are a few bytes); None: ``LEAK``
    any_job   : compare although arguments, versions or tier differ; else UsageError
    """
    if leak_bytes is None:
        leak_bytes = LEAK
    if not any_job:
        _same_job(before.job, after.job)
    changes = []
    for name in dict.fromkeys([*after.classes, *before.classes]):
        old, new = before.classes.get(name), after.classes.get(name)
        changes.append(_change(name, old, new, tol_bytes))
        # it vanished: there is nothing to hold against limits
        if new is None:
            continue
        if (new.get("growth") or 0) > leak_bytes:
            origins = []
            for origin in new["growth_top"]:
                kind, module, site = origin["kind"], origin["module"], origin["site"]
                origins.append(Growth(kind, module, site, origin["num_bytes"]))
            left = tuple(origins)
            changes.append(Change("leaks", name, new["ranks"], 0, new["growth"], {}, left))
        size = needed(new)
        if limit is not None and size > limit:
            level = "device"
            # without a calibration of NCCL and context only the allocator's bytes are known
            if new.get("peak_device") is None:
                level = "reserved"
            over = Change("over", name, new["ranks"], limit, size, {}, (), level=level)
            changes.append(over)
    return changes


def _same_job(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    differ = []
    for key in sorted({*before, *after}):
        # what a rank measured of itself is no part of the job
        if key in OF_RANKS:
            continue
        if key in job_settings.KEYS:
            differ += job_settings.differences(key, before.get(key), after.get(key, ""))
        elif before.get(key) != after.get(key):
            differ.append(f"{key} {before.get(key, 'unknown')}, now {after.get(key, 'unknown')}")
    if differ:
        message = f"the baseline is of another job, the two are not comparable: {'; '.join(differ)}"
        fix = "prism memory update takes the new one, prism compare A B shows both"
        raise UsageError(message, fix=fix)


def _change(
    name: str, old: ClassMemoryFigures | None, new: ClassMemoryFigures | None, tol_bytes: int
) -> Change:
    # only one of the two has the class
    if old is None:
        assert new is not None
        return Change("appeared", name, new["ranks"], None, new["peak_allocated"], {}, ())
    if new is None:
        return Change("vanished", name, old["ranks"], old["peak_allocated"], None, {}, ())
    before, after = old["peak_allocated"], new["peak_allocated"]
    if after == before:
        verdict = "same"
    elif after < before:
        verdict = "shrunk"
    elif after - before <= tol_bytes:
        verdict = "tolerated"
    else:
        verdict = "grown"
    by_kind = {}
    for kind in KINDS:
        change = new["by_category"].get(kind, 0) - old["by_category"].get(kind, 0)
        if change:
            by_kind[kind] = change
    moved = resized = ""
    old_step, new_step = old["at"]["step"], new["at"]["step"]
    if old_step != new_step:
        moved = f"{old_step} -> {new_step}"
    if old["count"] != new["count"]:
        resized = f"{old['count']} -> {counted(new['count'], 'rank')}"
    return Change(
        verdict,
        name,
        new["ranks"],
        before,
        after,
        by_kind,
        _growths(old, new),
        moved,
        real=old.get("real"),
        resized=resized,
    )


def _growths(old: ClassMemoryFigures, new: ClassMemoryFigures) -> tuple[Growth, ...]:
    """What each origin holds more; a line that only moved within its file is the same origin."""
    exact: Counter[tuple[str, str, str]] = Counter()
    for sign, side in ((-1, old), (1, new)):
        for origin in side["top"]:
            place = origin["kind"], origin["module"], origin["site"]
            exact[place] += sign * origin["num_bytes"]
    lines: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for (kind, module, site), size in exact.items():
        file = re.sub(r":\d+$", "", site)
        lines.setdefault((kind, module, file), []).append((size, site))
    # origins below the top are told as a sum
    growths = []
    of_smaller = new["smaller"] - old["smaller"]
    if of_smaller:
        growths.append(Growth("other", "smaller ones", "", of_smaller))
    for (kind, module, _), sizes_and_sites in lines.items():
        size = sum(size for size, _ in sizes_and_sites)
        # lines of a file that cancel out have only moved
        if size:
            # the line that grew most; among lines that shrank, the first
            _, site = max(sizes_and_sites, key=lambda size_and_site: max(size_and_site[0], -1))
            growths.append(Growth(kind, module, site, size))
    return tuple(sorted(growths, key=lambda g: (-g.num_bytes, g.kind, g.module, g.site)))
