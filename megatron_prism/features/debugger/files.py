"""Recordings of what calls delivered (``--prism-payload``), as ``prism compare`` takes them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli.file_answers import FileAnswer
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import UsageError

if TYPE_CHECKING:
    from megatron_prism.graph.difference import ComparedOp

_PAYLOADS = "payload-*.bin"  # files of a recording


def has_recording(paths: Sequence[str]) -> bool:
    """Whether one of the paths is a folder with a recording."""
    return any(os.path.isdir(path) and any(Path(path).glob(_PAYLOADS)) for path in paths)


def compare_recordings(
    args: argparse.Namespace, paths: Sequence[str], what_ifs: Sequence[Sequence[str]]
) -> Answer:
    """Compare op by op what calls of two recordings delivered; exit status 1 if it differs."""
    from megatron_prism.core.world import format_ranks
    from megatron_prism.graph.difference import difference

    runs = [_readers_by_rank(path) for path in paths]
    if len(runs) != 2 or not all(runs):
        raise UsageError(
            "a recording is compared with another one", fix="prism compare RECORDING RECORDING"
        )
    ranks_of_both = sorted(runs[0].keys() & runs[1].keys())
    # a rank is compared with itself in the other run
    if not ranks_of_both:
        ranks = (format_ranks(sorted(run)) for run in runs)
        raise UsageError(
            f"the recordings are of ranks {', and '.join(ranks)}: none is in both",
            fix="record a rank of both",
        )
    differences, equal_ranks = [], []
    for rank in ranks_of_both:
        first = difference(rank, runs[0][rank](), runs[1][rank](), args.norm)
        if first is None:
            equal_ranks.append(rank)
        else:
            differences.append(first)
    rows = [first.to_json() for first in differences]

    def page() -> None:
        print("\n".join(first.to_text() for first in differences), end="")
        if equal_ranks:
            print(f"alike: rank{'s' * (len(equal_ranks) > 1)} {format_ranks(equal_ranks)}")

    return Answer(
        lambda: {"ranks": ranks_of_both, "differences": rows},
        page,
        lambda: rows,
        status=int(bool(rows)),
    )


def _readers_by_rank(path: str) -> dict[int, Callable[[], list[ComparedOp]]]:
    """Map each rank of a recording to what reads its rows."""
    from megatron_prism.features.debugger import payloads

    ranks = [int(file.stem.rpartition("-")[2]) for file in sorted(Path(path).glob(_PAYLOADS))]
    return {rank: partial(payloads.rows_of, Path(path), rank) for rank in ranks}


FILE_ANSWERS = (FileAnswer("compare", has_recording, compare_recordings),)
