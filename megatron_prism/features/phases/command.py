"""``prism phases``: do training and generating on the same GPUs fit, one after the other."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_prism.cli.command import (
    ALLOC,
    DEVICE,
    HEADROOM,
    LIMIT,
    PROGRAMS,
    Command,
    HelpGroup,
)
from megatron_prism.cli.memory_arguments import limit_of, warn_absent
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import UsageError


def phases(args: argparse.Namespace) -> Answer:
    """Do training and generating fit on the same GPUs, and what stays on these in between?

    prism phases DIR rl.yaml --limit 80GB
    prism phases --limit 80GB rl.yaml torchrun --nproc-per-node 8 train.py <its arguments>

    DIR has slices of the training job.  The file is a list of phases:

      - train                             an iteration of the job
      - offload: torch_memory_saver       all segments of its allocator, or
      - offload: {with: copies, parts: [gradients, optimizer], destroy_groups: true}
      - generate: {weights: 15GiB, cache: 40GiB, sleep: 1, stays: 1GiB}
      - reload

    Exit status 1: a phase exceeds the limit.
    """
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.phases.phases import phases as follow_phases
    from megatron_prism.features.phases.steps import read_steps

    steps = read_steps(args.file)
    limit = limit_of(args.limit, args.headroom)
    # the verdict is about a limit: without one no phase could fail
    if limit is None:
        raise UsageError("how much memory has a GPU?", fix="--limit 80GB")
    # slices of some stages answer for these; the ranks without one are named
    programs = open_programs(args.programs, partial=True)
    warn_absent(programs)
    device = None if args.device == "none" else args.device
    job = follow_phases(programs, steps, limit, alloc_conf=args.alloc or "", device=device)
    return Answer(
        job.to_json, lambda: print(job.to_text(), end=""), job.to_rows, status=int(not job.fits)
    )


COMMANDS = {
    "phases": Command(
        phases,
        (
            PROGRAMS,
            (("file",), {"metavar": "FILE", "type": Path, "help": "a YAML list of phases"}),
            LIMIT,
            HEADROOM,
            ALLOC,
            DEVICE,
        ),
        group=HelpGroup.ASK,
        programs=0,
        shows_progress=True,
    ),
}
