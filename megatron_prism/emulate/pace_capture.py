"""Which slices does pacing lack?  They are captured first, one rank per stage.

By running this very command line once for each; what is there is used as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.core import programs, slices
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.selectors import format_ranks

if TYPE_CHECKING:
    from torch import distributed as dist

    from megatron_prism.core.world import World
    from megatron_prism.emulate.options import Options

__all__ = ["capture_missing", "missing_ranks"]

CAPTURE_STEPS = 12  # of a capture: two warm up, nine count, the last ends them


def missing_ranks(folder: Path, world: World) -> list[int]:
    """The first rank of every stage of which ``folder`` has no slice."""
    there = slices.SliceStore(folder, world, {}).ranks() if folder.is_dir() else []
    stages = {world.coordinates(rank).pp for rank in there}
    return [world.rank_at(pp=stage) for stage in world.stages if stage not in stages]


def _at_pace(folder: Path) -> bool:
    """Whether the first slice in ``folder`` was recorded among paced ranks."""
    paths = sorted(folder.glob("slice-*.prism"))
    return bool(paths) and programs.load(paths[0]).source.get(slices.PEERS) == slices.PACED


def capture_missing(options: Options, job: Sequence[str], store: dist.Store | None = None) -> None:
    """Run ``job``, the script and its own arguments, once for every missing rank, recording it.

    PrismError if one fails; what was captured until then is kept.  Of several local processes the
    first captures, the others wait at ``store``.
    """
    if options.process:
        assert store is not None, "several local processes share a store"
        store.wait(["prism/pace/captured"], timedelta(days=1))
        return
    _capture_all(options, job)
    if store is not None:
        store.set("prism/pace/captured", "1")


def _capture_all(options: Options, job: Sequence[str]) -> None:
    folder = options.pace
    assert folder is not None, "--prism-pace names the folder"
    missing = missing_ranks(folder, options.world)
    if missing and _at_pace(folder):
        raise UsageError(
            f"{folder} holds slices that were recorded at pace, but none of ranks "
            f"{format_ranks(missing)}",
            fix=f"--prism-ranks {missing[0]} --prism-capture {folder} --prism-pace FIRST, "
            "where FIRST are the slices that these were paced by",
        )
    for number, rank in enumerate(missing, 1):
        _say(
            f"capturing rank {rank:,} for {folder}: "
            f"{number} of {len(missing)} ({format_ranks(missing)})"
        )
        words = [
            sys.executable, "-m", "megatron_prism", "run",
            "--prism-world-size", str(options.world.size), "--prism-ranks", str(rank),
            "--prism-capture", str(folder), "--prism-tier", options.tier,
            "--prism-values", options.values, "--",
            *job, "--train-iters", str(CAPTURE_STEPS),
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k not in _LAUNCHER}
        environment["PRISM_ARGS"] = ""
        log = folder.with_name(f"{folder.name}-rank-{rank}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as out:
            status = subprocess.run(words, stdout=out, stderr=out, env=environment).returncode
        if status:
            raise PrismError(
                f"capturing rank {rank} ended with status {status}", fix=f"look at {log}"
            )
        log.unlink(missing_ok=True)


_LAUNCHER = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
     "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
)  # fmt: skip


def _say(line: str) -> None:
    sys.stderr.write(f"prism: {line}\n")
    sys.stderr.flush()
