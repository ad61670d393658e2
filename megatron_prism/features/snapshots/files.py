"""Memory snapshots of real processes, as ``prism fit`` and ``prism compare`` take them."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import what_ifs as cli_what_ifs
from megatron_prism.cli.file_answers import FileAnswer
from megatron_prism.cli.memory_output import print_holdings, say
from megatron_prism.cli.output import Answer, exact, print_table
from megatron_prism.core import units
from megatron_prism.core.errors import UsageError

if TYPE_CHECKING:
    from megatron_prism.features.snapshots.snapshot import FailedRequest, Snapshot, SnapshotGrowth
    from megatron_prism.memory.peaks import HeldMemory, Peak


_NAME = re.compile(r"\.(?:pickle|pkl)(?:\.gz|\.xz)?$", re.IGNORECASE)
_MAX_SEGMENTS = 8  # segments whose sizes are said


def is_snapshot(path: str) -> bool:
    """Tell whether a name is one of a snapshot's, or of a folder with snapshots."""
    return bool(snapshots(path))


def snapshots(path: str) -> list[str]:
    """Return the snapshots that a path names, by rank."""
    if os.path.isdir(path):
        names = [str(file) for file in Path(path).iterdir() if _NAME.search(file.name)]
        return sorted(names, key=_by_numbers)
    return [path] if _NAME.search(path) else []


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Order names by the numbers in them: rank 2 comes before rank 10."""
    parts: list[tuple[int, str]] = []
    for part in re.split(r"(\d+)", name):
        parts.append((int(part), "") if part.isdigit() else (0, part))
    return parts


@dataclass(frozen=True)
class _NamedSnapshot:
    """A snapshot and the name of its file."""

    name: str
    snapshot: Snapshot

    @property
    def file(self) -> str:
        """The name without folders."""
        return Path(self.name).name

    @property
    def peak(self) -> Peak:
        """Its peak."""
        from megatron_prism.memory.peaks import known_peak

        return known_peak(self.snapshot.program)


def _read(path: str) -> list[_NamedSnapshot]:
    """Read the snapshots that a path names."""
    from megatron_prism.features.snapshots import snapshot

    return [_NamedSnapshot(name, snapshot.read(name)) for name in snapshots(path)]


def compared(paths: Sequence[str], beside: Callable[[Snapshot], Any]) -> Any:
    """Compare snapshots with each other or with something else.

    Args:
        paths: Snapshots, or folders that have one of each rank; the last may be of something else.
        beside: Says how a snapshot compares with the last path, where that is no snapshot.

    Returns:
        What ``beside`` says, else what processes hold more than in earlier snapshots.
    """
    from megatron_prism.features.snapshots.snapshot import RankedSnapshots

    *earlier, last = [_read(path) for path in paths]
    # only the last path may be something else
    if not all(earlier):
        raise UsageError("snapshots come first", fix="prism compare SNAPSHOT SLICES")
    # the last path is a snapshot, too, or what each of the others is compared with
    answers: dict[str, Any] = {}
    if last:
        answers |= _growth_of_processes([*earlier, last])
    else:
        for named in itertools.chain.from_iterable(earlier):
            answers[named.file] = beside(named.snapshot)
    if not answers:
        raise UsageError("the folders have no rank in common", fix="rank0.pickle … in each")
    if len(answers) > 1:
        return RankedSnapshots(answers)
    return next(iter(answers.values()))


def _growth_of_processes(
    folders: Sequence[Sequence[_NamedSnapshot]],
) -> dict[str, SnapshotGrowth]:
    """Return what each process holds more; without folders there is one process."""
    from megatron_prism.features.snapshots.snapshot import grown

    has_folders = any(len(folder) > 1 for folder in folders)
    series_of_process: dict[str, list[Snapshot]] = {}
    for named in itertools.chain.from_iterable(folders):
        process = ""
        # snapshots of one process come one a path, those of several a folder a moment
        if has_folders:
            process = named.file
            if named.snapshot.rank is not None:
                process = f"rank {named.snapshot.rank}"
        series_of_process.setdefault(process, []).append(named.snapshot)
    answers: dict[str, SnapshotGrowth] = {}
    for process, series in series_of_process.items():
        if len(series) > 1:
            answers[process] = grown(*series)
    return answers


def name_snapshots(paths: Sequence[str]) -> bool:
    """Tell whether one of the paths is a snapshot or a folder of them."""
    return any(is_snapshot(path) for path in paths)


def fit(
    args: argparse.Namespace, paths: Sequence[str], what_ifs: Sequence[Sequence[str]]
) -> Answer:
    """Answer ``prism fit SNAPSHOT``.

    Raises:
        UsageError: What-ifs of a real process, which are of slices alone.
    """
    if what_ifs[0]:
        raise UsageError(
            f"a snapshot is of a real process: there is no {what_ifs[0][0]} of it",
            fix=f"prism fit SLICES {what_ifs[0][0]}",
        )
    return explain(paths[0], args.top)


def compare(
    args: argparse.Namespace, paths: Sequence[str], what_ifs: Sequence[Sequence[str]]
) -> Answer:
    """Answer ``prism compare SNAPSHOT SLICES`` and ``prism compare EARLIER LATER``."""
    from megatron_prism.features.snapshots import comparers

    @functools.cache
    def slices() -> Any:  # of one job for all ranks
        return cli_what_ifs.open_side(paths[-1], what_ifs[-1], args.machine, args.calibration)

    answer = compared(paths, lambda snapshot: comparers.compare(snapshot, slices()))
    return Answer(
        answer.to_json,
        lambda: print(answer.to_text(), end=""),
        answer.to_rows,
        next=f"prism fit {paths[-1]}",
        status=int(args.exit_code and not getattr(answer, "same", False)),
        html=answer.to_html,
    )


def explain(path: str, top: int) -> Answer:
    """Say where the memory of a process went, from its snapshot.

    Of several snapshots it is the one that needs most.

    Args:
        path: The snapshot, or a folder of them.
        top: How many origins of the peak.
    """
    from megatron_prism.features.snapshots.report import render_snapshot
    from megatron_prism.memory.peaks import difference

    processes = _read(path)
    peaks = [process.peak for process in processes]
    ran_out = [process.snapshot.failed is not None for process in processes]
    places = range(len(processes))
    largest_place = max(places, key=lambda place: (ran_out[place], peaks[place].num_bytes))
    largest, peak = processes[largest_place], peaks[largest_place]
    smallest_peak = min(peaks, key=lambda peak: peak.num_bytes)
    differ = difference(smallest_peak.holdings, peak.holdings)[:top]
    rows = [asdict(holding) for holding in peak.holdings[:top]]
    figures = _figures(largest.snapshot, peak)
    # several processes: each one's figures, and what differs between the smallest and the largest
    value = {"schema": "prism.memory_snapshot/1", **figures, "top": rows}
    if len(processes) > 1:
        ranks: dict[str, object] = {}
        for process, process_peak in zip(processes, peaks, strict=True):
            ranks[process.file] = _figures(process.snapshot, process_peak)
        value["ranks"] = ranks
        value["differ"] = [asdict(holding) for holding in differ]

    def page() -> None:
        if len(processes) > 1:
            _print_ranks(processes, peaks, differ)
        _print_snapshot(largest.file, largest.snapshot, peak)
        print_holdings(peak.holdings[:top])

    return Answer(
        lambda: value,
        page,
        lambda: rows,
        next=_next_command(largest),
        status=int(any(ran_out)),
        html=lambda: render_snapshot(largest.file, largest.snapshot),
    )


def _next_command(named: _NamedSnapshot) -> str:
    """Say what to type next."""
    failed = named.snapshot.failed
    if failed is None:
        capture = "prism capture -o SLICES -- the job's line"
        return f"prism compare {named.name} SLICES  ({capture})"
    # into what it could have, on the slices of its job
    room = named.snapshot.reserved + failed.device_free
    return f"prism fit SLICES --device none --limit {room}B  (which tries what frees memory)"


def _print_ranks(
    processes: Sequence[_NamedSnapshot], peaks: Sequence[Peak], differ: Sequence[HeldMemory]
) -> None:
    rows: list[tuple[str, ...]] = []
    for process, peak in zip(processes, peaks, strict=True):
        reserved = f"{process.snapshot.reserved:,}"
        state = "" if process.snapshot.failed is None else "out of memory"
        rows.append((process.file, f"{peak.num_bytes:,}", peak.op.label, reserved, state))
    print_table(("snapshot", "peak", "in", "reserved at the end", ""), rows)
    say("the largest peak has more than the smallest:" if differ else "all peaks are alike")
    print_holdings(differ)


def _print_snapshot(name: str, snapshot: Snapshot, peak: Peak) -> None:
    since = "its first request" if snapshot.whole else "later"
    last = snapshot.iterations[-1]
    iterations = f"iterations 1 to {last}" if last else "no iteration"
    say(f"{name}: {iterations}, history since {since}")
    if snapshot.failed is not None:
        _print_failed(snapshot, snapshot.failed)
    text = f"peak {exact(peak.num_bytes)}"
    if last:
        iteration = snapshot.iterations[peak.index]
        text += f" in iteration {iteration}, {peak.op.label}, {peak.site}"
    say(text)
    sizes = [f"{kind} {units.format_bytes(size)}" for kind, size in peak.by_kind.items() if size]
    say("  " + ", ".join(sizes))
    _print_reserved(snapshot)
    say(f"  at the end {exact(snapshot.reserved)}, {_free(snapshot)}")


def _print_reserved(snapshot: Snapshot) -> None:
    """Say what was reserved at most, and how far the allocator's rules give the same."""
    most = snapshot.peak_reserved
    # without a history nobody knows
    if most is None:
        return
    text = f"reserved {exact(most)} at most"
    if snapshot.whole:
        modelled = "the same"
        if most != snapshot.modelled:
            modelled = f"{exact(snapshot.modelled)} of its requests"
        text += f": the allocator's rules say {modelled}"
    say(text)
    if snapshot.unknown:
        say(f"  {snapshot.unknown}")
    only_real, only_modelled = snapshot.segments
    _print_segments("the process", only_real)
    _print_segments("the rules", only_modelled)


def _print_segments(side: str, sizes: Sequence[int]) -> None:
    """Say which segments one side has alone, if any."""
    if sizes:
        shown = ", ".join(map(units.format_bytes, sizes[:_MAX_SEGMENTS]))
        count = units.counted(len(sizes), "segment")
        say(f"  {count} at the end of {side} alone: {shown}")


def _figures(snapshot: Snapshot, peak: Peak) -> dict[str, object]:
    """Return what ``prism fit SNAPSHOT --json`` says; bytes."""
    failed: dict[str, object] | None = None
    if snapshot.failed is not None:
        failed = {**asdict(snapshot.failed), "fits_expandable": snapshot.fits_expandable()}
    free, largest_free = snapshot.free
    return {
        "peak_allocated": peak.num_bytes,
        "by_category": peak.by_kind,
        "iteration": snapshot.iterations[peak.index],
        "step": peak.op.label,
        "site": peak.site,
        "peak_reserved": snapshot.peak_reserved,
        "modelled_reserved": snapshot.modelled,
        "reserved": snapshot.reserved,
        "free": free,
        "largest_free": largest_free,
        "whole": snapshot.whole,
        "failed": failed,
    }


def _free(snapshot: Snapshot) -> str:
    free, largest = map(units.format_bytes, snapshot.free)
    return f"{free} of it in free blocks, the largest {largest}"


def _print_failed(snapshot: Snapshot, failed: FailedRequest) -> None:
    """Say what did not fit, and why."""
    place = f"iteration {failed.iteration}, {failed.label} {failed.site}"
    say(f"out of memory in {place}: {failed.size:,} B do not fit")
    reserved = units.format_bytes(snapshot.reserved)
    left = units.format_bytes(failed.device_free)
    say(f"  {reserved} reserved, {_free(snapshot)}; the device has {left} left")
    if snapshot.fits_expandable():
        setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        say(f"  fragmentation: the same requests fit with {setting}")
    else:
        say("  size: the same requests do not fit with expandable segments either")
    if failed.iteration == 1:
        say("  the optimizer's states do not exist yet: later iterations need more")


FILE_ANSWERS = (
    FileAnswer("fit", name_snapshots, fit),
    FileAnswer("compare", name_snapshots, compare),
)
