"""``prism compare``: two jobs, a job and what was recorded of it, or two recordings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli import snapshot, what_ifs
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import PrismError, UsageError

if TYPE_CHECKING:
    from megatron_prism.ask.compare import Answer as Compared
    from megatron_prism.ask.compare import Job
    from megatron_prism.graph.difference import ComparedOp

_PAYLOADS = "payload-*.bin"  # of a recording


def compare(args: argparse.Namespace) -> Answer:
    """What differs between A and B: time with its interval, memory by part, sizes, ops.

    prism compare A B                       slices or programs of two jobs, releases, layouts
    prism compare A slow=517:1.2            A without and with what-ifs, as prism replay has them
    prism compare A,dp=64 B,dp=32           what-ifs of each
    prism compare A moved=b200              on two machines
    prism compare A torchrun --nnodes 128 … pretrain_gpt.py …     a launch line, captured now
    prism compare memory.json A             a baseline of prism memory and the peaks of now
    prism compare rank*.json.gz A           traces of a real job and its slices
    prism compare SNAPSHOT A                a memory snapshot of a real process and its slices
    prism compare EARLIER … LATER           snapshots of one process: what grows each time, by line
    prism compare RANKS/ A                  a folder with a snapshot of each rank, of both kinds
    prism compare job/ alone/ --norm 1e-3   recordings (--prism-payload): what calls delivered, by
                                            norm; without --norm by every bit

    What is unknown of a machine (its host, kernels, calls) is the same for both, so the interval of
    the difference is narrower than those of the times.  Of traces: how many calls are paired, and
    from 95 % on the parts of every traced rank's iteration, predicted and real.  --exit-code ends
    with status 1 if anything differs.
    """
    paths, words = list[str](), list[list[str]]()
    for word in args.paths:
        path, own = what_ifs.split(word)
        if not path and len(paths) == 1 and not words[0]:
            path = paths[0]  # the same job without and with them
        if path or not paths:
            paths.append(path)
            words.append(own)
        else:
            words[-1] += own
    if len(paths) < 2 or "" in paths:
        raise UsageError("compare what with what?", fix="prism compare A B")
    if any(os.path.isdir(path) and any(Path(path).glob(_PAYLOADS)) for path in paths):
        return _recordings(args, paths)
    answer, problem = _compared(args, paths, words), None
    try:
        getattr(answer, "compared", None)  # of traces
    except PrismError as error:
        problem = error

    def page() -> None:
        print(answer.to_text(), end="")
        if not any(map(snapshot.is_snapshot, paths)) and not paths[-1].endswith(".json"):
            print(what_ifs.machine_note(what_ifs.open_job(paths[-1], True), args.machine), end="")

    return Answer(
        answer.to_json,
        page,
        answer.to_rows,
        next=f"prism fit {paths[-1]}",
        status=int(args.exit_code and not getattr(answer, "same", False)),
        html=getattr(answer, "to_html", None),
        trace=getattr(answer, "to_chrome_trace", None),
        problem=problem,
    )


def _compared(args: argparse.Namespace, paths: list[str], words: list[list[str]]) -> Compared:
    from megatron_prism.ask.compare import compare as compare_jobs
    from megatron_prism.memory import baseline

    how = {"machine": args.machine, "calibration": args.calibration}

    def job(path: str, own: Sequence[str]) -> Job:
        if path.endswith(".json") and not own:
            return baseline.load(path)
        if own:
            return what_ifs.priced(what_ifs.open_job(path), own, "compare", **how)
        return what_ifs.open_job(path, partial=True)

    if any(map(snapshot.is_snapshot, paths)):
        slices = cache(lambda: job(paths[-1], words[-1]))  # of one job for all ranks
        return snapshot.compared(paths, lambda taken: compare_jobs(taken, slices()))
    b = job(paths[-1], words[-1])
    traces = len(paths) > 2 or _is_trace(paths[0])
    a = paths[:-1] if traces else job(paths[0], words[0])
    names = (" ".join([paths[0], *words[0]]), " ".join([paths[-1], *words[-1]]))
    return compare_jobs(a, b, names=names, **how)


def _is_trace(path: str) -> bool:
    """Whether it is no file of ours: neither programs, nor a baseline."""
    from megatron_prism.memory.baseline import SCHEMA

    place = Path(path)
    if place.is_dir():
        return not any(place.glob("*.prism"))
    try:
        with open(path, "rb") as file:
            head = file.read(1 << 16)
    except OSError:
        return False
    if place.suffix == ".json":
        return SCHEMA.encode() not in head and SCHEMA.encode() not in _tail(place)
    return not head.startswith(b"PK") and b"prism-program" not in head


def _tail(place: Path) -> bytes:
    with place.open("rb") as file:
        file.seek(max(0, place.stat().st_size - (1 << 16)))
        return file.read()


def _recordings(args: argparse.Namespace, paths: Sequence[str]) -> Answer:
    """What calls of two recordings delivered, op by op; exit status 1 if it differs."""
    from megatron_prism.core.world import format_ranks
    from megatron_prism.graph.difference import difference

    runs = [_run(path) for path in paths]
    if len(runs) != 2 or not all(runs):
        raise UsageError("a recording is compared with another one",
                         fix="prism compare RECORDING RECORDING")  # fmt: skip
    both = sorted(runs[0].keys() & runs[1].keys())
    if not both:
        ranks = (format_ranks(sorted(run)) for run in runs)
        raise UsageError(f"the recordings are of ranks {', and '.join(ranks)}: none is in both",
                         fix="record a rank of both")  # fmt: skip
    compared = {rank: difference(rank, runs[0][rank](), runs[1][rank](), args.norm)
                for rank in both}  # fmt: skip
    differences = [one for one in compared.values() if one is not None]
    rows = [one.to_json() for one in differences]

    def page() -> None:
        print("\n".join(one.to_text() for one in differences), end="")
        if alike := [rank for rank, one in compared.items() if one is None]:
            print(f"alike: rank{'s' * (len(alike) > 1)} {format_ranks(alike)}")

    return Answer(lambda: {"ranks": both, "differences": rows}, page, lambda: rows,
                  status=int(bool(rows)))  # fmt: skip


def _run(path: str) -> dict[int, Callable[[], list[ComparedOp]]]:
    """Rank -> what reads its rows."""
    from megatron_prism.emulate import payloads

    ranks = [int(one.stem.rpartition("-")[2]) for one in sorted(Path(path).glob(_PAYLOADS))]
    return {rank: partial(payloads.rows_of, Path(path), rank) for rank in ranks}
