"""``prism memory``: record, check, diff, explain and update the peaks of every class of ranks.

In : programs that were captured, baselines.  Out: a page of text, JSON or GitHub annotations.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import arguments, snapshot
from megatron_prism.cli.output import (
    check_outputs,
    console,
    exact,
    print_table,
    write_data,
    write_outputs,
)
from megatron_prism.core import units
from megatron_prism.core.errors import UnitError, UsageError

if TYPE_CHECKING:
    from megatron_prism.core.program import Program, Programs
    from megatron_prism.memory.baseline import (
        Baseline,
        Change,
        ClassMemoryFigures,
        DrawnFigures,
        Draws,
    )

_SHOWN = 8  # origins of a growth


def describe(change: Change) -> str:
    """A few lines about one class."""
    head = f"{change.name} (ranks {change.ranks}): {change.what}"
    before, after = change.before or 0, change.after or 0  # None is said otherwise
    if change.what == "appeared":
        return f"{head}: {exact(after)}, and the baseline has no such class"
    if change.what == "vanished":
        return f"{head}: the baseline has {exact(before)}"
    grown = after - before
    if change.what == "leaks":
        return "\n".join([f"{head} {after:,} B an iteration", *_origins(change)])
    if change.what == "over":
        return (
            f"{head} the limit: {change.level} {exact(after)} (modelled), "
            f"{exact(grown)} above {exact(before)}"
        )
    lines = [f"{head} {grown:+,} B: {exact(before)} -> {exact(after)}"]
    if change.moved:
        lines.append(f"  peak moved: {change.moved}")
    if change.by_kind:
        lines.append("  " + ", ".join(f"{k} {v:+,} B" for k, v in change.by_kind.items()))
    return "\n".join([*lines, *_origins(change)])


def _origins(change: Change) -> list[str]:
    return [
        f"  {g.num_bytes:+15,} B  {g.kind:5}  {g.site or '?'}  {g.module}"
        for g in sorted(change.origins, key=lambda g: -abs(g.num_bytes))[:_SHOWN]
    ]


def annotation(change: Change, path: str) -> str:
    """``::error file=…,line=…::``: what GitHub shows beside the line that grew."""
    site = next((g.site for g in change.origins if g.num_bytes > 0 and g.site), "")
    file, _, line = site.rpartition(":")
    if file.startswith(("core/", "training/")):
        file = f"megatron/{file}"
    place = f"file={file},line={line}" if line.isdigit() else f"file={path}"
    text = describe(change).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::error {place},title=prism memory {json.dumps(change.name)[1:-1]}::{text}"


ACTIONS = ("record", "check", "diff", "explain", "update")
_DRAWS = ("draws", "routing", "capacity", "limit")
_KEYS = {
    "record": ("alloc", "device", *_DRAWS),
    "check": ("baseline", "tol", "limit", "headroom", "leak", "device"),
    "diff": (),
    "explain": ("class", "top", "alloc", "device", "oom", *_DRAWS),
    "update": ("baseline", "device"),
}
_PLACES = {"record": 1, "check": 1, "diff": 2, "explain": 1, "update": 1}


def memory(args: argparse.Namespace) -> int:
    """Every rank's peak memory, and a baseline that guards it.

    prism memory record DIR -o memory.json [alloc=expandable_segments:True] [device=h200]
    prism memory check DIR baseline=memory.json [tol=0] [limit=80GiB] [headroom=4GiB] [leak=1MiB]
    prism memory diff OLD NEW           two baselines or programs; --force: of different jobs
    prism memory explain DIR [class=pp=0] [top=12] [limit=80GiB] [--html FILE]
                                        -o FILE.pickle: for pytorch.org/memory_viz
    prism memory record|explain DIR … draws=500 routing=zipf:1 [capacity=1.25] [limit=80GiB]
    prism memory update DIR baseline=memory.json
    prism memory explain SNAPSHOT       a real process (torch.cuda.memory._snapshot, .gz, .xz)
    prism memory diff SNAPSHOT DIR      beside the slices of its job
    prism memory diff EARLIER LATER     two snapshots of one process: what it holds more, by line
    prism memory explain DIR oom="Tried to allocate 17.58 GiB …"   which request of the job it was

    Exit status 1: a class grew beyond tol, appeared, vanished, exceeds limit - headroom,
    or leaves more than leak (1 MiB) behind after an iteration.  --github annotates.
    Allocated bytes are guarded; reserved is modelled and reported.  limit is held against device
    bytes, or against reserved where those are unknown.  device= is a shipped calibration of
    context, libraries and NCCL (default h200), a file of benchmarks/tools/device_memory.py, or
    none.  draws= iterations of an MoE job captured on tier meta get routing=: uniform, zipf:A, or a
    folder of --prism-record; capacity= drops what is beyond that factor.
    """
    places, settings = _words(args.action, args.settings)
    if args.out is not None and args.action not in ("record", "explain"):
        raise UsageError(f"-o has no effect on memory {args.action}", fix="prism memory explain")
    if args.html is not None and args.action != "explain":
        raise UsageError(f"--html has no effect on memory {args.action}", fix="memory explain")
    if args.github and args.action not in ("check", "diff"):
        raise UsageError(f"--github has no effect on memory {args.action}", fix="memory check")
    return _RUN[args.action](args, places, settings)


def _words(action: str, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(paths, settings)."""
    places: list[str] = []
    keys = dict.fromkeys(_KEYS[action], arguments.name)
    settings = arguments.read(words, keys, f"memory {action}", names=places)
    if len(places) != _PLACES[action]:
        wanted = "OLD NEW" if action == "diff" else "DIR"
        raise UsageError(
            f"prism memory {action} takes {_PLACES[action]} path(s), not {len(places)}",
            fix=f"prism memory {action} {wanted}",
        )
    return places, settings


def _measure(path: str, settings: Mapping[str, str], draws: Draws | None = None) -> Baseline:
    from megatron_prism.core.world import format_ranks
    from megatron_prism.memory import nccl_buffers
    from megatron_prism.memory.baseline import peak_memory

    device = settings.get("device", nccl_buffers.DEFAULT)
    known = None if device == "none" else device
    alloc = settings.get("alloc", "")
    programs = _open(path)
    if programs.absent:
        said = format_ranks(programs.absent)
        print(f"prism: ranks {said} are left out: their stages have no slice", file=sys.stderr)
    return peak_memory(programs, alloc_conf=alloc, device=known, draws=draws)


def _open(path: str) -> Programs:
    """The programs at ``path``, of some stages at least."""
    from megatron_prism.core.slices import open_programs

    return open_programs(path, partial=True)


def _draws(settings: Mapping[str, str]) -> Draws | None:
    """What is to be drawn; UsageError for words that need ``draws`` without it."""
    if "draws" not in settings:
        if given_in := [key for key in _DRAWS if key in settings]:
            raise UsageError(f"{given_in[0]} belongs to draws", fix="draws=500 routing=zipf:1")
        return None
    from megatron_prism.memory import routing
    from megatron_prism.memory.baseline import Draws

    try:
        count = arguments.count(1, 100_000, "draws=500")(settings["draws"])
        capacity = settings.get("capacity")
        factor = None if capacity is None else arguments.number("capacity=1.25")(capacity)
    except UnitError as error:
        raise UsageError(error.message, fix=error.fix) from None
    if factor is not None and factor <= 0:
        raise UsageError(f"capacity={factor:g} leaves no token", fix="capacity=1.25")
    law = routing.law(settings.get("routing", "uniform"))
    return Draws(law, count, factor, limit_of(settings))


def size(given: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Bytes that ``key`` was given.  UsageError for what is no size."""
    if given.get(key) is None:
        return default
    try:
        found = (units.parse_limit if key == "limit" else units.parse_bytes)(given[key])
    except UnitError as error:
        raise UsageError(f"{key}={given[key]}: {error.message}", fix=error.fix) from None
    if found < 0:
        raise UsageError(f"{key}={given[key]} is below 0", fix=f"{key}=64MiB")
    return found


def limit_of(given: Mapping[str, Any]) -> int | None:
    """``limit`` - ``headroom``, None without a limit."""
    limit = None if given.get("limit") is None else size(given, "limit")
    headroom = size(given, "headroom")
    if headroom and limit is None:
        raise UsageError("headroom is taken from a limit", fix="limit=80GiB headroom=4GiB")
    if limit is not None and headroom >= max(limit, 1):
        raise UsageError("headroom leaves nothing of the limit", fix="limit=80GiB headroom=4GiB")
    return None if limit is None else limit - headroom


def _named(settings: dict[str, str], action: str) -> str:
    if "baseline" not in settings:
        fix = f"memory {action} DIR baseline=FILE"
        raise UsageError(f"prism memory {action} needs a baseline", fix=fix)
    return settings["baseline"]


def _record(args: argparse.Namespace, places: list[str], settings: dict[str, str]) -> int:
    from megatron_prism.memory import baseline as memory_baseline

    if args.out is None:
        raise UsageError("a baseline needs a file to write", fix="-o FILE.json")
    check_outputs([Path(args.out)], args.force, places)
    made = _measure(places[0], settings, _draws(settings))
    path = memory_baseline.save(made, args.out, force=args.force)
    if write_data(args, json.loads(path.read_text(encoding="utf-8")), _rows(made)):
        return 0
    _overview(made)
    console().print(f"wrote {args.out}")
    return 0


def _check(args: argparse.Namespace, places: list[str], settings: dict[str, str]) -> int:
    from megatron_prism.memory import baseline as memory_baseline

    tol, limit = size(settings, "tol"), limit_of(settings)
    leak = size(settings, "leak", memory_baseline.LEAK)
    path = _named(settings, "check")
    before = memory_baseline.load(path)
    alloc = before.job.get("alloc_conf", "")
    after = _measure(places[0], {**settings, "alloc": alloc})
    changes = memory_baseline.compare(before, after, tol_bytes=tol, limit=limit, leak_bytes=leak)
    status = _report(args, changes, path, _runs_out(places[0], changes, after))
    if limit is not None and not args.json and all(change.what != "over" for change in changes):
        known = all(one.get("peak_device") is not None for one in after.classes.values())
        what = "device bytes" if known else "reserved bytes only, device is unknown"
        print(f"every class fits into {exact(limit)} ({what}, modelled)")
    return status


def _runs_out(path: str, changes: list[Change], now: Baseline) -> dict[str, str]:
    """Where every class that is over its limit would run out, by class."""
    over = [change for change in changes if change.what == "over"]
    if not over:
        return {}
    from megatron_prism.memory import allocator, peaks

    programs = _open(path)
    settings = allocator.Settings.parse(now.job.get("alloc_conf", ""))
    found = {}
    for change in over:
        one = now.classes[change.name]
        device = one.get("peak_device")
        beyond = 0
        if change.level == "device" and device is not None:
            beyond = device - one["peak_reserved"]
        place = peaks.overflow(
            programs.of(_first_rank(change.ranks)), (change.before or 0) - beyond, settings
        )
        if place is None:
            found[change.name] = "  fits if the allocator gives its cache back in time"
            continue
        found[change.name] = (
            f"  runs out {place.where}: {place.size:,} B do not fit beside "
            f"{exact(place.reserved)} reserved"
        )
        program = programs.of(_first_rank(change.ranks))
        found[change.name] += _advice(program, now, (change.after or 0) - (change.before or 0))
    return found


def _advice(program: Program, now: Baseline, missing: int = 0) -> str:
    """Lines on what recomputation frees at the peak, and what decides then; "" if nothing.

    missing : bytes above the limit
    """
    from megatron_prism.memory import allocator, remedies

    settings = allocator.Settings.parse(now.job.get("alloc_conf", ""))
    lines = []
    for one in remedies.remedies(program, now.job, settings):
        enough = f", which {'is' if one.reserved >= missing else 'is not'} enough"
        lines.append(
            f"\n  {one.words}\n    frees {units.format_bytes(one.freed)}"
            f"{enough if missing else ''}; then {exact(one.peak.num_bytes)} in "
            f"{one.peak.op.label} {one.peak.op.name} {one.peak.site}".rstrip()
        )
    return "".join(lines)


def _diff(args: argparse.Namespace, places: list[str], settings: dict[str, str]) -> int:
    from megatron_prism.memory import baseline as memory_baseline

    if all(map(snapshot.is_snapshot, places)):
        return snapshot.growth(args, *places)
    if snapshot.is_snapshot(places[0]):
        return snapshot.diff(args, places[0], _open(places[1]))
    old, new = map(_either, places)
    changes = memory_baseline.compare(old, new, any_job=args.force)
    for key in sorted({*old.job, *new.job}):
        if old.job.get(key) != new.job.get(key) and not args.json:
            print(f"{key}: {old.job.get(key, 'unknown')} -> {new.job.get(key, 'unknown')}")
    return _report(args, changes, places[0])


def _either(path: str) -> Baseline:
    """A baseline, or programs that are measured now."""
    from megatron_prism.memory import baseline as memory_baseline

    if Path(path).suffix == ".json":
        return memory_baseline.load(path)
    return _measure(path, {})


def _update(args: argparse.Namespace, places: list[str], settings: dict[str, str]) -> int:
    from megatron_prism.memory import baseline as memory_baseline

    path = _named(settings, "update")
    before = memory_baseline.load(path)  # a file that is no baseline is not replaced
    alloc = before.job.get("alloc_conf", "")
    after = _measure(places[0], {**settings, "alloc": alloc})
    changes = memory_baseline.compare(before, after, any_job=True)
    _report(args, changes, path)
    memory_baseline.save(after, path, force=True)
    if not args.json:
        print(f"updated {path}")
    return 0


def _first_rank(ranks: str) -> int:
    return int(re.split(r"\D", ranks, maxsplit=1)[0])


def _write_snapshot(
    args: argparse.Namespace, path: str, classes: Mapping[str, ClassMemoryFigures]
) -> None:
    """What pytorch.org/memory_viz shows of the one class."""
    from megatron_prism.core.files import whole_file
    from megatron_prism.memory import peaks

    if len(classes) > 1:
        fix = f"class={next(iter(classes))} -o {args.out}"
        raise UsageError("a snapshot is of one class", fix=fix)
    check_outputs([Path(args.out)], args.force, [path])
    (one,) = classes.values()
    program = _open(path).of(_first_rank(one["ranks"]))
    with whole_file(args.out, force=args.force) as file:
        pickle.dump(peaks.viz_snapshot(program), file)
    print(f"wrote {args.out}: open it at https://pytorch.org/memory_viz", file=sys.stderr)


def _explain(args: argparse.Namespace, places: list[str], settings: dict[str, str]) -> int:
    from megatron_prism.report.memory import render_html

    top = settings.get("top", "12")
    if not re.fullmatch(r"[0-9]{1,9}", top):
        raise UsageError(f"top={top} is no number", fix="top=12")
    check_outputs([args.html], args.force, places)
    if snapshot.is_snapshot(places[0]):
        return snapshot.explain(args, places[0], int(top))
    if "oom" in settings:
        return snapshot.explain_error(args, _open(places[0]).programs[0], settings["oom"], int(top))
    limit = limit_of(settings)
    drawn = _draws(settings) if "draws" in settings or limit is None else None
    made = _measure(places[0], settings, drawn)
    chosen = settings.get("class")
    if chosen is not None and chosen not in made.classes:
        raise UsageError(f"there is no class {chosen}", fix=f"use {', '.join(made.classes)}")
    names = list(made.classes) if chosen is None else [chosen]
    made = replace(made, classes={name: made.classes[name] for name in names})
    if args.out is not None:
        _write_snapshot(args, places[0], made.classes)
    programs = _open(places[0])
    write_outputs(args.force, (args.html, lambda: render_html(programs, made, limit)))
    if write_data(args, made.to_json(), _rows(made)):
        return 0
    _overview(made)
    if limit is not None:
        most = max(one.get("peak_device") or one["peak_reserved"] for one in made.classes.values())
        words = "left below" if most <= limit else "above"
        print(f"{units.format_bytes(abs(limit - most))} {words} the limit of {exact(limit)}")
    for name in names:
        one, at = made.classes[name], made.classes[name]["at"]
        print(f"\n{name}: {exact(one['peak_allocated'])} in {at['step']} {at['op']} {at['site']}")
        kinds = (f"{k} {units.format_bytes(v)}" for k, v in one["by_category"].items() if v)
        print("  " + ", ".join(kinds), end="")
        print(_advice(programs.of(_first_rank(one["ranks"])), made))
        least, most = one["reserved_between"]
        if least < most:
            print(
                f"  reserved {exact(least)} if the device keeps up with the host, else up to "
                f"{exact(most)}"
            )
        rows = [
            (f"{h['num_bytes']:,}", str(h["count"]), h["kind"], h["site"], h["module"])
            for h in one["top"][: int(top)]
        ]
        print_table(("  bytes", "tensors", "kind", "site", "module"), rows)
    return 0


def _rows(made: Baseline) -> list[dict[str, object]]:
    """A row for every class, without the lists of its tensors."""
    kept = ["count", "ranks", "peak_allocated", "peak_reserved", "nccl", "peak_device"]
    if any("drawn" in one for one in made.classes.values()):
        kept.append("drawn")
    return [
        {"class": name, **{key: one.get(key) for key in kept}, "at": one["at"]}
        for name, one in made.classes.items()
    ]


def _bytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else units.format_bytes(num_bytes)


def _overview(made: Baseline) -> None:
    console().print(made.job["world"])
    rows = [
        (name, f"{one['count']:,}", units.format_bytes(one["peak_allocated"]),
         units.format_bytes(one["peak_reserved"]), _bytes(one.get("nccl")),
         _bytes(one.get("peak_device")), one["at"]["step"], one["ranks"])
        for name, one in made.classes.items()
    ]  # fmt: skip
    head = ("class", "ranks", "allocated", "reserved", "NCCL", "device", "peak in", "which")
    print_table(head, rows)
    for name, one in made.classes.items():
        least, most = one.get("nccl_between") or (0, 0)
        if least < most:
            print(f"{name}: NCCL {units.format_bytes(least)} to {units.format_bytes(most)}, "
                  "estimated: connections between hosts")  # fmt: skip
        if drawn := one.get("drawn"):
            print(_drawn(name, drawn))
    for level, source in made.provenance.items():
        print(f"  {level.removeprefix('peak_'):<10} {source}")


def _drawn(name: str, drawn: DrawnFigures) -> str:
    """Two lines about the peaks of drawn iterations."""
    capacity = "" if drawn["capacity"] is None else f", capacity {drawn['capacity']:g}"
    levels = (f"{word} {units.format_bytes(size)}" for word, size in (
        ("p50", drawn["p50"]), ("p95", drawn["p95"]), ("at most", drawn["most"])))  # fmt: skip
    text = (
        f"{name}: routing {drawn['law']}{capacity}, {drawn['draws']:,} iterations: allocated "
        f"{', '.join(levels)}"
    )
    if drawn["over"] is None or drawn["group"] is None:
        return text
    return (
        f"{text}\n  over the limit in an iteration: {100 * drawn['over']:.1f} % of the ranks, "
        f"{100 * drawn['group']:.1f} % of the groups that share the experts"
    )


def _report(
    args: argparse.Namespace,
    changes: list[Change],
    path: str,
    runs_out: dict[str, str] | None = None,
) -> int:
    failed = [change for change in changes if change.fails]
    shown = [asdict(change) | {"fails": change.fails} for change in changes]
    out = {name: text.strip() for name, text in (runs_out or {}).items()}
    value = {"schema": "prism.memory_changes/1", "against": path, "failures": len(failed),
             "changes": shown, "runs_out": out}  # fmt: skip
    if write_data(args, value, shown):
        return 1 if failed else 0
    for change in changes:
        if change.what != "same":
            print(describe(change))
            if change.what == "over" and runs_out:
                print(runs_out[change.name])
            if args.github and change.fails:
                print(annotation(change, path))
    if any(change.what == "shrunk" for change in changes) and not failed:
        print(f"smaller than {path}: prism memory update keeps it that way")
    print(f"{len(failed)} failure{'s'[len(failed) == 1 :]}" if failed else "no class grew")
    return 1 if failed else 0


_RUN = {
    "record": _record,
    "check": _check,
    "diff": _diff,
    "explain": _explain,
    "update": _update,
}
