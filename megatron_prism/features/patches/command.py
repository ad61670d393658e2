"""``prism patches``: what an emulated job changes in Megatron, and whether this release has it."""

from __future__ import annotations

import argparse
from collections import Counter

from megatron_prism.cli.command import Command, HelpGroup, option
from megatron_prism.cli.output import Answer, console, print_table
from megatron_prism.core.errors import UsageError


def patches(args: argparse.Namespace) -> Answer:
    """List what an emulated job changes in Megatron, and what this release lacks.

    prism patches
    prism patches --megatron Megatron-LM      of a checkout; nothing of it is run

    A patch protects (the real job's files), enables (a job does not run without it, or is wrong) or
    speeds up.  Exit status 1 if a target is missing that a job does not start without.
    """
    from megatron_prism.core.jobs.megatron_source import UNKNOWN, megatron_release
    from megatron_prism.emulate import patch
    from megatron_prism.emulate.patches import PATCHES

    # the installed Megatron, or a checkout that is read and not run
    roots = None
    message = "megatron-core is not installed"
    if args.megatron is not None:
        roots = [args.megatron]
        message = f"there is no megatron.core in {args.megatron}"
    release = megatron_release(roots)
    if release == UNKNOWN:
        fix = "--megatron CHECKOUT, the folder that holds megatron/core"
        raise UsageError(message, fix=fix)
    statuses = patch.statuses(PATCHES, roots)
    rows = [
        {
            "patch": status.patch.name,
            "purpose": status.patch.purpose,
            "state": status.state,
            "target": f"{status.patch.module}:{status.target}",
            "why": status.why,
            "reason": status.patch.reason,
            "read_at": status.patch.source,
        }
        for status in statuses
    ]

    def page() -> None:
        cells = []
        for row in rows:
            target = f"{row['target']}  {row['why']}"
            cells.append((row["patch"], row["purpose"], row["state"], target))
        print_table(("patch", "purpose", "state", "target"), cells)
        counts = Counter(status.state for status in statuses)
        listed = ", ".join(f"{counts[state]} {state}" for state in patch.STATES)
        console().print(f"\nmegatron-core {release}: {listed}")

    value = {"schema": "prism.patches/1", "megatron_core": release, "targets": rows}
    missing = any(status.fatal for status in statuses)
    return Answer(lambda: value, page, lambda: rows, status=int(missing))


COMMANDS = {
    "patches": Command(
        patches,
        (option("megatron", str, "DIR", "a checkout of Megatron-LM"),),
        group=HelpGroup.MAINTAIN,
    ),
}
