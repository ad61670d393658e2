"""Traces of a real job and its slices on a command line: ``prism compare TRACE… SLICES``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_prism.cli import what_ifs as cli_what_ifs
from megatron_prism.cli.file_answers import FileAnswer
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import PrismError

_HEAD_BYTES = 1 << 16  # of a file, to know what it is


def are_traces(paths: Sequence[str]) -> bool:
    """Whether the first path is no file of ours; of several, all but the last are traces."""
    return len(paths) > 2 or _is_trace(paths[0])


def _is_trace(path: str) -> bool:
    """Whether ``path`` holds neither programs nor what a feature's reader recognizes."""
    place = Path(path)
    if place.is_dir():
        return not any(place.glob("*.prism"))
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False

    # JSON may be another feature's; slices are archives, or text that names itself
    if place.suffix == ".json":
        return cli_what_ifs.job_reader(path) is None
    return not head.startswith(b"PK") and b"prism-program" not in head


def compare_traces(
    args: argparse.Namespace, paths: Sequence[str], what_ifs: Sequence[Sequence[str]]
) -> Answer:
    """Hold the traces against the replay of the slices, which come last."""
    from megatron_prism.features.traces import comparers
    from megatron_prism.replay.pricing import pricer

    *trace_paths, slices_path = paths
    machine, calibration = args.machine, args.calibration
    slices = cli_what_ifs.open_side(slices_path, what_ifs[-1], machine, calibration)
    comparison: Any = comparers.compare(trace_paths, slices, pricer(machine, calibration))

    # times that are not compared are a problem, said once all that could be paired is out
    problem = None
    try:
        _ = comparison.compared
    except PrismError as error:
        problem = error

    def page() -> None:
        print(comparison.to_text(), end="")
        job = cli_what_ifs.open_job(slices_path, partial=True)
        print(cli_what_ifs.machine_note(job, machine), end="")

    is_same = getattr(comparison, "same", False)
    return Answer(
        comparison.to_json,
        page,
        comparison.to_rows,
        next=f"prism fit {slices_path}",
        status=int(args.exit_code and not is_same),
        html=comparison.to_html,
        trace=comparison.to_chrome_trace,
        problem=problem,
    )


FILE_ANSWERS = (FileAnswer("compare", are_traces, compare_traces, asked_last=True),)
