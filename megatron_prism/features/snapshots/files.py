"""Memory snapshots of real processes, as ``prism fit`` and ``prism compare`` take them."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import what_ifs as cli_what_ifs
from megatron_prism.cli.file_answers import FileAnswer
from megatron_prism.cli.memory_output import print_holdings, say
from megatron_prism.cli.output import Answer, exact, print_table
from megatron_prism.core import units
from megatron_prism.core.errors import UsageError

if TYPE_CHECKING:
    from megatron_prism.features.snapshots.snapshot import Snapshot
    from megatron_prism.memory.peaks import HeldMemory, Peak


_NAME = re.compile(r"\.(?:pickle|pkl)(?:\.gz|\.xz)?$", re.IGNORECASE)
_SHOWN = 8  # segments


def is_snapshot(path: str) -> bool:
    """Whether its name is one of a snapshot's, or it is a folder of them."""
    return bool(snapshots(path))


def snapshots(path: str) -> list[str]:
    """The snapshots that ``path`` names, by rank."""
    if os.path.isdir(path):
        names = (str(one) for one in Path(path).iterdir() if _NAME.search(one.name))
        return sorted(names, key=lambda name: [(int(part), "") if part.isdigit() else (0, part)
                                               for part in re.split(r"(\d+)", name)])  # fmt: skip
    return [path] if _NAME.search(path) else []


def compared(paths: Sequence[str], beside: Callable[[Snapshot], Any]) -> Any:
    """What ``beside`` says of snapshots if the last path is no snapshot, else what their processes
    hold more than in earlier ones: folders have one of each rank.
    """
    from megatron_prism.features.snapshots import snapshot

    *first, last = [[(name, snapshot.read(name)) for name in snapshots(path)] for path in paths]
    if not all(first):
        raise UsageError("snapshots come first", fix="prism compare SNAPSHOT SLICES")
    answers: dict[str, Any] = {}
    if last:
        series: dict[str, list[Snapshot]] = {}
        folders = any(len(each) > 1 for each in (*first, last))
        for name, taken in itertools.chain(*first, last):
            whose = Path(name).name if taken.rank is None else f"rank {taken.rank}"
            series.setdefault(whose if folders else "", []).append(taken)
        answers |= {k: snapshot.grown(*each) for k, each in series.items() if len(each) > 1}
    else:
        answers |= {Path(name).name: beside(taken) for name, taken in itertools.chain(*first)}
    if not answers:
        raise UsageError("the folders have no rank in common", fix="rank0.pickle … in each")
    return snapshot.RankedSnapshots(answers) if len(answers) > 1 else next(iter(answers.values()))


def name_snapshots(paths: Sequence[str]) -> bool:
    """Whether one of the paths is a snapshot or a folder of them."""
    return any(is_snapshot(path) for path in paths)


def fit(
    args: argparse.Namespace, paths: Sequence[str], what_ifs: Sequence[Sequence[str]]
) -> Answer:
    """Answer ``prism fit SNAPSHOT``."""
    return explain(paths[0], args.top)


def compare(
    args: argparse.Namespace, paths: Sequence[str], what_ifs: Sequence[Sequence[str]]
) -> Answer:
    """Answer ``prism compare SNAPSHOT SLICES`` and ``prism compare EARLIER LATER``."""
    from megatron_prism.features.snapshots import comparers

    @functools.cache
    def slices() -> Any:  # of one job for all ranks
        return cli_what_ifs.open_side(paths[-1], what_ifs[-1], args.machine, args.calibration)

    found = compared(paths, lambda taken: comparers.compare(taken, slices()))
    return Answer(
        found.to_json,
        lambda: print(found.to_text(), end=""),
        found.to_rows,
        next=f"prism fit {paths[-1]}",
        status=int(args.exit_code and not getattr(found, "same", False)),
        html=found.to_html,
    )


def explain(path: str, top: int) -> Answer:
    """Where the memory of a process went, from its snapshot; of several, of the one that needs
    most.
    """
    from megatron_prism.features.snapshots import snapshot
    from megatron_prism.features.snapshots.report import render_snapshot
    from megatron_prism.memory import peaks

    every = {name: snapshot.read(name) for name in snapshots(path)}
    tops = {name: peaks.known_peak(taken.program) for name, taken in every.items()}
    largest = max(tops, key=lambda name: (every[name].failed is not None, tops[name].num_bytes))
    taken, peak = every[largest], tops[largest]
    least = tops[min(tops, key=lambda name: tops[name].num_bytes)]
    differ = peaks.difference(least.holdings, peak.holdings)[:top]
    rows = [asdict(one) for one in peak.holdings[:top]]
    value = {"schema": "prism.memory_snapshot/1", **_figures(taken, peak), "top": rows}
    if len(every) > 1:
        value["ranks"] = {Path(name).name: _figures(every[name], tops[name]) for name in every}
        value["differ"] = [asdict(one) for one in differ]

    after = f"prism compare {largest} SLICES  (prism capture -o SLICES -- the job's line)"
    if taken.failed is not None:  # into what it could have, on the slices of its job
        room = taken.reserved + taken.failed.device_free
        after = f"prism fit SLICES --device none --limit {room}B  (which tries what frees memory)"

    def page() -> None:
        if len(every) > 1:
            _print_ranks(every, tops, differ)
        _print_snapshot(Path(largest).name, taken, peak)
        print_holdings(peak.holdings[:top])

    return Answer(
        lambda: value,
        page,
        lambda: rows,
        next=after,
        status=int(any(one.failed is not None for one in every.values())),
        html=lambda: render_snapshot(Path(largest).name, taken),
    )


def _print_ranks(
    every: Mapping[str, Snapshot], tops: Mapping[str, Peak], differ: Sequence[HeldMemory]
) -> None:
    rows = [(Path(name).name, f"{top.num_bytes:,}", top.op.label, f"{every[name].reserved:,}",
             "out of memory" if every[name].failed else "")
            for name, top in tops.items()]  # fmt: skip
    print_table(("snapshot", "peak", "in", "reserved at the end", ""), rows)
    say("the largest peak has more than the smallest:" if differ else "all peaks are alike")
    print_holdings(differ)


def _print_snapshot(name: str, taken: Snapshot, peak: Peak) -> None:
    since = "its first request" if taken.whole else "later"
    last = taken.iterations[-1]
    say(f"{name}: {f'iterations 1 to {last}' if last else 'no iteration'}, history since {since}")
    if taken.failed is not None:
        _print_failed(taken)
    when = f" in iteration {taken.iterations[peak.index]}, {peak.op.label}, {peak.site}"
    say(f"peak {exact(peak.num_bytes)}{when if last else ''}")
    say("  " + ", ".join(f"{k} {units.format_bytes(v)}" for k, v in peak.by_kind.items() if v))
    most = taken.peak_reserved
    if most is not None:
        same = "the same" if most == taken.modelled else f"{exact(taken.modelled)} of its requests"
        rules = f": the allocator's rules say {same}" if taken.whole else ""
        say(f"reserved {exact(most)} at most{rules}")
        if taken.unknown:
            say(f"  {taken.unknown}")
        for whose, sizes in zip(("the process", "the rules"), taken.segments, strict=True):
            if sizes:
                listed = ", ".join(map(units.format_bytes, sizes[:_SHOWN]))
                count = units.counted(len(sizes), "segment")
                say(f"  {count} at the end of {whose} alone: {listed}")
    say(f"  at the end {exact(taken.reserved)}, {_free(taken)}")


def _figures(taken: Snapshot, peak: Peak) -> dict[str, object]:
    failed = None if taken.failed is None else {
        **asdict(taken.failed), "fits_expandable": taken.fits_expandable()}  # fmt: skip
    return {"peak_allocated": peak.num_bytes, "by_category": peak.by_kind,
            "iteration": taken.iterations[peak.index], "step": peak.op.label, "site": peak.site,
            "peak_reserved": taken.peak_reserved, "modelled_reserved": taken.modelled,
            "reserved": taken.reserved, "free": taken.free[0], "largest_free": taken.free[1],
            "whole": taken.whole, "failed": failed}  # fmt: skip


def _free(taken: Snapshot) -> str:
    free, largest = map(units.format_bytes, taken.free)
    return f"{free} of it in free blocks, the largest {largest}"


def _print_failed(taken: Snapshot) -> None:
    failed = taken.failed
    assert failed is not None
    say(f"out of memory in iteration {failed.iteration}, {failed.label} {failed.site}: "
          f"{failed.size:,} B do not fit")  # fmt: skip
    say(f"  {units.format_bytes(taken.reserved)} reserved, {_free(taken)}; the device has "
          f"{units.format_bytes(failed.device_free)} left")  # fmt: skip
    if taken.fits_expandable():
        say("  fragmentation: the same requests fit with "
              "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")  # fmt: skip
    else:
        say("  size: the same requests do not fit with expandable segments either")
    if failed.iteration == 1:
        say("  the optimizer's states do not exist yet: later iterations need more")


FILE_ANSWERS = (
    FileAnswer("fit", name_snapshots, fit),
    FileAnswer("compare", name_snapshots, compare),
)
