"""``prism reshard``: does a checkpoint fit the job's new layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_prism.cli import arguments
from megatron_prism.cli.command import Command, HelpGroup, option
from megatron_prism.cli.output import Answer, console
from megatron_prism.core.errors import UsageError


def reshard(args: argparse.Namespace) -> Answer:
    """Does a checkpoint fit another layout of the job, and what does loading it take?

    prism reshard CHECKPOINT -- torchrun --nnodes 16 --nproc-per-node 8 pretrain_gpt.py …
    prism reshard CHECKPOINT --read-rate 20GB torchrun …

    CHECKPOINT is a folder that has .metadata (format torch_dist), or a job's --save folder.  Only
    its metadata are read.  Megatron's own loading runs on shapes: which tensors map, which are
    missing or of another shape or type, what each rank reads from how many files, and whether the
    optimizer's states continue.  --read-rate is the file system's bandwidth for all ranks together.

    Of up to 8 ranks all are planned, of more one of each stage and expert-parallel rank; --ranks
    plans others.  Exit status 1: Megatron refuses the checkpoint.
    """
    from megatron_prism.features.reshard.ranks import reshard as plan_reading

    if not args.job:
        raise UsageError("reshard into which job?", fix="prism reshard CHECKPOINT -- torchrun …")
    # seconds would be without end
    if args.read_rate == 0:
        raise UsageError("a file system that reads nothing", fix="--read-rate 20GB")
    plan = plan_reading(
        args.checkpoint,
        args.job,
        args.ours,
        console(stderr=True),
        ranks=args.ranks,
        read_rate=args.read_rate,
    )
    return Answer(
        plan.to_json,
        lambda: print(plan.to_text(), end=""),
        plan.to_rows,
        status=int(not plan.loads),
    )


COMMANDS = {
    "reshard": Command(
        reshard,
        (
            (("checkpoint",), {"metavar": "CHECKPOINT", "type": Path, "help": "a folder"}),
            option("ranks", arguments.name, "RANKS", "ranks to plan: 0-7, pp=3"),
            option("read-rate", arguments.size, "20GB", "bandwidth of the file system, per second"),
        ),
        group=HelpGroup.ASK,
        job=True,
        shows_progress=True,
    ),
}
