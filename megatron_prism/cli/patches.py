"""``prism patches``: what an emulated job changes in Megatron, and whether this release has it."""

from __future__ import annotations

import argparse

from megatron_prism.cli.output import console, print_table, write_data
from megatron_prism.core.errors import UsageError
from megatron_prism.core.megatron_source import UNKNOWN, megatron_release


def patches(args: argparse.Namespace) -> int:
    """List what an emulated job changes in Megatron, and what this release lacks.

    prism patches
    prism patches --megatron Megatron-LM      of a checkout; nothing of it is run

    A patch protects (the real job's files), enables (a job does not run without it, or is wrong) or
    speeds up.  Exit status 1 if a target is missing that a job does not start without.
    """
    from megatron_prism.emulate import patch
    from megatron_prism.emulate.patches import PATCHES

    roots = None if args.megatron is None else [args.megatron]
    release = megatron_release(roots)
    if release == UNKNOWN:
        where = args.megatron or "here"
        raise UsageError(
            f"there is no megatron.core in {where}" if roots else "megatron-core is not installed",
            fix="--megatron CHECKOUT, the folder that holds megatron/core",
        )
    found = patch.statuses(PATCHES, roots)
    missing = [one for one in found if one.fatal]
    rows = [
        {"patch": one.patch.name, "purpose": one.patch.purpose, "state": one.state,
         "target": f"{one.patch.module}:{one.target}", "why": one.why,
         "reason": one.patch.reason, "read_at": one.patch.source}
        for one in found
    ]  # fmt: skip
    if write_data(
        args, {"schema": "prism.patches/1", "megatron_core": release, "targets": rows}, rows
    ):
        return 1 if missing else 0
    head = ("patch", "purpose", "state", "target")
    shown = [(r["patch"], r["purpose"], r["state"], f"{r['target']}  {r['why']}") for r in rows]
    print_table(head, shown)
    counts = {state: sum(one.state == state for one in found) for state in patch.STATES}
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    console().print(f"\nmegatron-core {release}: {said}")
    return 1 if missing else 0
