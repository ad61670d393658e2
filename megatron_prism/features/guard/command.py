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
from megatron_prism.core.errors import refuse
from megatron_prism.features.snapshots.files import snapshots

if TYPE_CHECKING:
    from megatron_prism.memory.job_peaks import MemoryReport
    from megatron_prism.memory.peak_changes import Change

_SHOWN = 8  # origins of a growth


def describe(change: Change) -> str:
    """A few lines about one class."""
    head = f"{change.name} (ranks {change.ranks}): {change.what}"
    before, after = exact(change.before or 0), exact(change.after or 0)
    grown = (change.after or 0) - (change.before or 0)
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
    if change.real is not None and change.before is not None:
        off = change.before - change.real
        lines.append(
            f"  a real run had {exact(change.real)}: the emulation was {off:+,} B off, "
            f"the commit's are {grown:+,} B"
        )
    if change.moved:
        lines.append(f"  peak moved: {change.moved}")
    if change.by_kind:
        lines.append("  " + ", ".join(f"{k} {v:+,} B" for k, v in change.by_kind.items()))
    for g in sorted(change.origins, key=lambda g: -abs(g.num_bytes))[:_SHOWN]:
        lines.append(f"  {g.num_bytes:+15,} B  {g.kind:5}  {g.site or '?'}  {g.module}")
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
    record = args.action == "record"
    fix = f"prism memory {args.action} {args.programs} --baseline FILE, or prism fit"
    refuse(
        (
            snapshots(args.programs),
            f"{args.programs} is a snapshot, which says nothing of other ranks",
            f"prism memory record SLICES --real {args.programs} -o memory.json",
        ),
        (
            args.out and not record,
            f"-o has no effect on memory {args.action}",
            "prism memory record",
        ),
        (
            args.real and not record,
            f"--real has no effect on memory {args.action}",
            "prism memory record",
        ),
        (not record and not args.baseline, f"prism memory {args.action} needs a baseline", fix),
        (record and not args.out, "a baseline needs a file to write", "-o FILE.json"),
    )
    return _record(args) if record else _compare(args)


def _measure(args: argparse.Namespace, alloc: str) -> MemoryReport:
    from megatron_prism.core.slices import open_programs
    from megatron_prism.features.guard import baseline
    from megatron_prism.features.snapshots import snapshot
    from megatron_prism.memory import job_peaks, peaks

    programs = open_programs(args.programs, partial=True)
    warn_absent(programs)
    known = None if args.device == "none" else args.device
    report = job_peaks.peak_memory(programs, alloc_conf=alloc, device=known, draws=draws_of(args))
    for path in (one for given in args.real or () for one in snapshots(given)):
        taken = snapshot.read(path)
        baseline.add_real(
            report, programs.world, taken.rank, peaks.known_peak(taken.program).num_bytes
        )
    return report


def _record(args: argparse.Namespace) -> Answer:
    from megatron_prism.features.guard import baseline

    check_outputs([Path(args.out)], args.force, [args.programs])
    after = _measure(args, args.alloc or "")
    path = baseline.save(after, args.out, force=args.force)
    return Answer(
        lambda: json.loads(path.read_text(encoding="utf-8")),
        lambda: print(f"{after.to_text()}wrote {args.out}"),
        after.to_rows,
    )


def _compare(args: argparse.Namespace) -> Answer:
    """Check, or update, which takes any job's."""
    from megatron_prism.features.guard import baseline
    from megatron_prism.memory import peak_changes

    check = args.action == "check"
    limit = limit_of(args.limit, args.headroom) if check else None
    before = baseline.load(args.baseline)  # a file that is no baseline is not replaced
    after = _measure(args, before.job.get("alloc_conf", ""))
    leak = peak_changes.LEAK if args.leak is None or not check else args.leak
    changes = peak_changes.compare(
        before,
        after,
        tol_bytes=args.tol if check else 0,
        limit=limit,
        leak_bytes=leak,
        any_job=not check,
    )
    failed = [change for change in changes if change.fails]
    rows = [asdict(change) | {"fails": change.fails} for change in changes]
    value = {
        "schema": "prism.memory_changes/1",
        "against": str(args.baseline),
        "failures": len(failed),
        "changes": rows,
    }
    if not check:
        baseline.save(after, args.baseline, force=True)
    known = all(one.get("peak_device") is not None for one in after.classes.values())
    over = any(change.what == "over" for change in changes)

    def page() -> None:
        _print(args, changes)
        if not check:
            print(f"updated {args.baseline}")
        elif limit is not None and not over:
            what = "device bytes" if known else "reserved bytes only, device is unknown"
            print(f"every class fits into {exact(limit)} ({what}, modelled)")

    words = f"prism fit {args.programs} --limit {args.limit}" if over else ""
    return Answer(lambda: value, page, lambda: rows, words, int(check and bool(failed)))


def _print(args: argparse.Namespace, changes: list[Change]) -> None:
    failed = [change for change in changes if change.fails]
    for change in changes:
        if change.what != "same":
            print(*folded(describe(change)), sep="\n")
    if any(change.what == "shrunk" for change in changes) and not failed:
        print(f"smaller than {args.baseline}: prism memory update keeps it that way")
    print(f"{len(failed)} failure{'s'[len(failed) == 1 :]}" if failed else "no class grew")


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
