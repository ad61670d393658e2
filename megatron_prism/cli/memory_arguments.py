"""Arguments and warnings of the commands that measure a job's memory."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from megatron_prism.core.errors import UsageError

if TYPE_CHECKING:
    from megatron_prism.core.programs.program import Programs
    from megatron_prism.memory.job_peaks import Draws


def warn_absent(programs: Programs) -> None:
    """Say which ranks have no slice."""
    from megatron_prism.core.world import format_ranks

    if programs.absent:
        ranks = format_ranks(programs.absent)
        print(f"prism: ranks {ranks} are left out: their stages have no slice", file=sys.stderr)


def limit_of(limit: str | None, headroom: int | None = None) -> int | None:
    """Return the bytes of a limit that headroom leaves; None without a limit.

    Args:
        limit: as typed: ``80GB`` is what a card sold as such has.
        headroom: bytes that stay free.

    Raises:
        UsageError: it leaves nothing, or there is no limit to take it from.
    """
    from megatron_prism.replay.costs.machine import usable_memory

    if limit is None:
        if headroom:
            raise UsageError("headroom is taken from a limit", fix="--limit 80GB --headroom 4GiB")
        return None
    num_bytes, _ = usable_memory(limit, headroom=headroom or 0)
    return num_bytes


def draws_of(args: argparse.Namespace) -> Draws | None:
    """What is to be drawn; UsageError for words that need ``--draws`` without it."""
    from megatron_prism.memory import routing
    from megatron_prism.memory.job_peaks import Draws

    # draws alone take a routing and a capacity
    if args.draws is None:
        for key in ("routing", "capacity"):
            if getattr(args, key) is not None:
                raise UsageError(f"--{key} belongs to --draws", fix="--draws 500 --routing zipf:1")
        return None
    if args.capacity is not None and args.capacity <= 0:
        raise UsageError(f"--capacity {args.capacity:g} leaves no token", fix="--capacity 1.25")
    limit = None
    # without one headroom is taken from the machine's memory
    if args.limit is not None:
        limit = limit_of(args.limit, args.headroom)
    return Draws(routing.law(args.routing or "uniform"), args.draws, args.capacity, limit)
