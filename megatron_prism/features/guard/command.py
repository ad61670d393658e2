"""``prism memory``: record, check and update the peaks of every class of ranks.

In : programs that were captured, baselines.  Out: a page of text, JSON or GitHub annotations.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli import arguments
from megatron_prism.cli.command import (
    ALLOC,
    DEVICE,
    DRAWS,
    HEADROOM,
    LIMIT,
    PROGRAMS,
    Command,
    HelpGroup,
    file_option,
    option,
)
from megatron_prism.cli.memory_arguments import draws_of, limit_of, warn_absent
from megatron_prism.cli.output import Answer, check_outputs, exact
from megatron_prism.core.columns import folded
from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import counted
from megatron_prism.features.snapshots.files import snapshots

if TYPE_CHECKING:
    from megatron_prism.memory.job_peaks import MemoryReport
    from megatron_prism.memory.peak_changes import Change

_SHOWN = 8  # origins of a growth


def describe(change: Change) -> str:
    """A few lines about one class."""
    head = f"{change.name} (ranks {change.ranks}): {change.what}"
    bytes_before = change.before or 0
    bytes_after = change.after or 0
    before, after = exact(bytes_before), exact(bytes_after)
    grown = bytes_after - bytes_before
    # a class without its counterpart, and a limit, are said in one line
    match change.what:
        case "appeared":
            return f"{head}: {after}, and the baseline has no such class"
        case "vanished":
            return f"{head}: the baseline has {before}"
        case "over":
            level = f"{change.level} {after} (modelled)"
            return f"{head} the limit: {level}, {exact(grown)} above {before}"
        case "leaks":
            lines = [f"{head} {change.after:,} B an iteration"]
        case _:
            lines = [f"{head} {grown:+,} B: {before} -> {after}"]
    # a real run was recorded beside the baseline, so that the emulation's error is known
    if change.real is not None and change.before is not None:
        off = change.before - change.real
        lines.append(
            f"  a real run had {exact(change.real)}: the emulation was {off:+,} B off, "
            f"the commit's are {grown:+,} B"
        )
    if change.resized:
        lines.append(f"  {change.resized}")
    if change.moved:
        lines.append(f"  peak moved: {change.moved}")
    if change.by_kind:
        kinds = [f"{kind} {num_bytes:+,} B" for kind, num_bytes in change.by_kind.items()]
        lines.append("  " + ", ".join(kinds))
    largest_first = sorted(change.origins, key=lambda origin: -abs(origin.num_bytes))
    for origin in largest_first[:_SHOWN]:
        site = origin.site or "?"
        lines.append(f"  {origin.num_bytes:+15,} B  {origin.kind:5}  {site}  {origin.module}")
    return "\n".join(lines)


ACTIONS = ("record", "check", "update")


def memory(args: argparse.Namespace) -> Answer:
    """Guard every rank's peak memory by a baseline, as in CI; whether a job fits: prism fit.

    prism memory record DIR -o memory.json [--alloc expandable_segments:True] [--device h200]
    prism memory record DIR -o memory.json --draws 500 --routing zipf:1 [--capacity 1.25]
    prism memory check DIR --baseline memory.json [--tol 0] [--limit 80GB] [--headroom 4GiB]
    prism memory record DIR -o memory.json --real SNAPSHOT     a real run's peak beside it
    prism memory update DIR --baseline memory.json

    Exit status 1: a class grew beyond --tol, appeared, vanished, exceeds --limit less --headroom,
    or leaves more than --leak (1 MiB) behind after an iteration.
    Allocated bytes are guarded; reserved is modelled and reported.  --limit is held against device
    bytes, or against reserved where those are unknown.  --device is a shipped calibration of
    context, libraries and NCCL (default h200), a file of benchmarks/tools/device_memory.py, or
    none.
    """
    if snapshots(args.programs):
        message = f"{args.programs} is a snapshot, which says nothing of other ranks"
        raise UsageError(
            message, fix=f"prism memory record SLICES --real {args.programs} -o memory.json"
        )
    if args.action == "record":
        return _record(args)
    # check and update write the baseline that they read, or none
    for flag, value in (("-o", args.out), ("--real", args.real)):
        if value:
            message = f"{flag} has no effect on memory {args.action}"
            raise UsageError(message, fix="prism memory record")
    if not args.baseline:
        fix = f"prism memory {args.action} {args.programs} --baseline FILE, or prism fit"
        raise UsageError(f"prism memory {args.action} needs a baseline", fix=fix)
    return _compare(args)


def _measure(args: argparse.Namespace, alloc: str) -> MemoryReport:
    """Measure the memory of the slices, beside real snapshots of the same job."""
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.guard import baseline
    from megatron_prism.features.snapshots import snapshot
    from megatron_prism.memory import job_peaks, peaks

    programs = open_programs(args.programs, partial=True)
    warn_absent(programs)
    device = None if args.device == "none" else args.device
    report = job_peaks.peak_memory(programs, alloc_conf=alloc, device=device, draws=draws_of(args))
    for path_or_folder in args.real or ():
        for path in snapshots(path_or_folder):
            real = snapshot.read(path)
            real_peak = peaks.known_peak(real.program)
            baseline.add_real(report, programs.world, real.rank, real_peak.num_bytes)
    return report


def _record(args: argparse.Namespace) -> Answer:
    """Write a baseline."""
    from megatron_prism.features.guard import baseline

    if not args.out:
        raise UsageError("a baseline needs a file to write", fix="-o FILE.json")
    check_outputs([Path(args.out)], args.force, [args.programs])
    report = _measure(args, args.alloc or "")
    path = baseline.save(report, args.out, force=args.force)
    return Answer(
        lambda: json.loads(path.read_text(encoding="utf-8")),
        lambda: print(f"{report.to_text()}wrote {args.out}"),
        report.to_rows,
    )


def _compare(args: argparse.Namespace) -> Answer:
    """Check, or update, which takes any job's."""
    from megatron_prism.features.guard import baseline
    from megatron_prism.memory import peak_changes

    # what an update writes is the next bound: nothing is tolerated, and any job is taken
    is_check = args.action == "check"
    tolerance = 0
    limit = None
    leak: int | None = None  # the usual bound
    if is_check:
        tolerance = args.tol
        limit = limit_of(args.limit, args.headroom)
        leak = args.leak

    before = baseline.load(args.baseline)  # a file that is no baseline is not replaced
    after = _measure(args, before.job.get("alloc_conf", ""))
    changes = peak_changes.compare(
        before,
        after,
        tol_bytes=tolerance,
        limit=limit,
        leak_bytes=leak,
        any_job=not is_check,
    )
    if not is_check:
        baseline.save(after, args.baseline, force=True)
    failures = sum(change.fails for change in changes)
    is_over = any(change.what == "over" for change in changes)

    def rows() -> list[dict[str, object]]:
        return [{**asdict(change), "fails": change.fails} for change in changes]

    def value() -> dict[str, object]:
        return {
            "schema": "prism.memory_changes/1",
            "against": str(args.baseline),
            "failures": failures,
            "changes": rows(),
        }

    def page() -> None:
        _print_changes(args.baseline, changes, failures)
        if not is_check:
            print(f"updated {args.baseline}")
        elif limit is not None and not is_over:
            print(f"every class fits into {exact(limit)} ({_held(after)}, modelled)")

    next_command = ""
    if is_over:
        next_command = f"prism fit {args.programs} --limit {args.limit}"
    status = int(is_check and failures > 0)
    return Answer(value, page, rows, next_command, status)


def _held(report: MemoryReport) -> str:
    """Say which bytes are held against a limit."""
    for figures in report.classes.values():
        if figures.get("peak_device") is None:
            return "reserved bytes only, device is unknown"
    return "device bytes"


def _print_changes(baseline_file: str, changes: list[Change], failures: int) -> None:
    for change in changes:
        if change.what != "same":
            print(*folded(describe(change)), sep="\n")
    if failures:
        print(counted(failures, "failure"))
        return
    # the next growth up to the old peak would pass
    if any(change.what == "shrunk" for change in changes):
        print(f"smaller than {baseline_file}: prism memory update keeps it that way")
    print("no class grew")


COMMANDS = {
    "memory": Command(
        memory,
        (
            (("action",), {"choices": ACTIONS}),
            PROGRAMS,
            file_option("--baseline", "baseline to check against, or to update"),
            option(
                "real",
                arguments.name,
                "SNAPSHOT",
                "memory snapshot of a real run of the job",
                action="append",
            ),
            option("tol", arguments.size, "1MiB", "growth that is tolerated", default=0),
            LIMIT,
            HEADROOM,
            option("leak", arguments.size, "1MiB", "bytes that an iteration may leave behind"),
            ALLOC,
            DEVICE,
            *DRAWS,
            (("-o", "--out"), {"metavar": "FILE", "help": "baseline to record"}),
        ),
        group=HelpGroup.MAINTAIN,
        programs=1,
        shows_progress=True,
    ),
}
