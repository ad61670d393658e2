"""Which flags make a job hang on purpose, or stop it where it would?  Faults and the rendezvous.

``FLAGS`` are part of ``flags.FLAGS``; ``options`` turns what was given into HangOptions, or None.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_prism.errors import UsageError
from megatron_prism.fault_plan import Fault, load_plan, parse
from megatron_prism.world import World

__all__ = ["FLAGS", "HangOptions", "options"]

FLAGS: dict[str, dict[str, Any]] = {
    "--prism-fault": {
        "action": "append",
        "default": None,
        "metavar": "KIND@SEL",
        "help": "make a fault happen: drop@rank=37,iter=2,group=tp,nth=2 (repeatable)",
    },
    "--prism-fault-plan": {
        "default": None,
        "metavar": "YAML",
        "help": "a list of faults as a file",
    },
    "--prism-fault-seed": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "draws the ranks of rank=any:K (default 0)",
    },
    "--prism-fault-dry-run": {
        "action": "store_true",
        "help": "say which call every fault would hit, and make none happen",
    },
    "--prism-world": {
        "default": None,
        "metavar": "DIR",
        "help": "programs of the whole job (prism capture): every call is checked against them",
    },
    "--prism-rendezvous": {
        "default": None,
        "choices": ("strict", "nccl", "off"),
        "help": "strict: stop at a call that peers would not make (default with --prism-world); "
        "nccl: only where NCCL would hang, else warn",
    },
    "--prism-sanitize": {
        "action": "store_true",
        "help": "also stop where this rank leaves the order of its own program in --prism-world",
    },
}


@dataclass(frozen=True)
class HangOptions:
    """faults: the plan; programs: folder or file of the world's programs; strict: check calls;
    nccl: let through what NCCL lets through."""

    faults: tuple[Fault, ...]
    seed: int
    dry_run: bool
    programs: Path | None
    strict: bool
    sanitize: bool = False
    nccl: bool = False


def options(
    args: argparse.Namespace, env: Mapping[str, str], world: World, local: tuple[int, ...]
) -> HangOptions | None:
    """What was asked for, or None.  UsageError for a fault of a rank that nobody plays here."""
    texts = args.prism_fault
    if texts is None:  # the flag wins over the environment
        texts = [t for t in env.get("PRISM_FAULT", "").split(";") if t]
    faults = tuple(parse(text) for text in texts)
    if args.prism_fault_plan:
        faults += load_plan(args.prism_fault_plan)
    programs = Path(args.prism_world) if args.prism_world else None
    strict = args.prism_rendezvous in ("strict", "nccl") or (programs is not None
                                                   and args.prism_rendezvous is None)  # fmt: skip
    if args.prism_sanitize and (programs is None or not strict):
        raise UsageError("--prism-sanitize compares with the programs of the world",
                         fix="--prism-world DIR (prism capture)")  # fmt: skip
    if args.prism_fault_dry_run and not faults:
        raise UsageError("--prism-fault-dry-run without a fault", fix="--prism-fault drop@rank=0")
    for fault in faults:
        virtual = set(fault.ranks(world, args.prism_fault_seed)) - set(local)
        if virtual and (programs is None or not strict):
            raise UsageError(
                f"{fault}: rank {min(virtual)} is virtual here and answers at once",
                fix="--prism-world DIR says what it would do (prism capture), or run it with "
                f"--prism-ranks {min(virtual)}",
            )
    if strict and programs is None and len(local) < 2:
        raise UsageError(
            "one local rank, and nothing to compare its calls with",
            fix="--prism-world DIR (prism capture), or several local ranks",
        )
    if not (faults or strict):
        return None
    return HangOptions(faults, args.prism_fault_seed, args.prism_fault_dry_run, programs, strict,
                       args.prism_sanitize, args.prism_rendezvous == "nccl")  # fmt: skip
