"""Which flags make a job hang on purpose, or stop it where it would?  Faults and the rendezvous.

``FLAGS`` are part of ``flags.FLAGS``; ``options`` turns what was given into HangOptions, or None.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_prism.core.artefact import check_writable
from megatron_prism.core.errors import UsageError
from megatron_prism.core.selectors import format_ranks
from megatron_prism.core.world import World
from megatron_prism.hang.fault_files import load_plan
from megatron_prism.hang.fault_plan import Fault, parse

__all__ = ["FLAGS", "HangOptions", "options", "slow"]

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
        "default": None,
        "metavar": "N",
        "help": "draws the ranks of rank=any:K (default 0)",
    },
    "--prism-fault-dry-run": {
        "action": "store_true",
        "help": "say which call every fault would hit, and make none happen",
    },
    "--prism-fault-truth": {
        "default": None,
        "metavar": "FILE",
        "help": "write what was injected, a JSON line per fault: the truth that verdicts are "
        "scored with",
    },
    "--prism-world": {
        "default": None,
        "metavar": "DIR",
        "help": "programs of the whole job (prism capture): every call is checked against them",
    },
    "--prism-rendezvous": {
        "default": None,
        "choices": ("strict", "nccl", "gloo", "off"),
        "help": "strict: stop at a call that peers would not make (default with --prism-world); "
        "nccl, gloo: only where that library would hang or abort, else warn",
    },
    "--prism-sanitize": {
        "action": "store_true",
        "help": "also stop where this rank leaves the order of its own program in --prism-world",
    },
}


@dataclass(frozen=True)
class HangOptions:
    """faults: the plan; programs: folder or file of the world's programs; strict: check calls;
    policy: strict, or let through what nccl or gloo lets through; truth: file for what was
    injected."""

    faults: tuple[Fault, ...]
    seed: int
    dry_run: bool
    programs: Path | None
    strict: bool
    sanitize: bool = False
    policy: str = "strict"
    truth: Path | None = None


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
    policy = args.prism_rendezvous or ("off" if programs is None else "strict")
    strict = policy != "off"
    if args.prism_sanitize and (programs is None or not strict):
        raise UsageError("--prism-sanitize compares with the programs of the world",
                         fix="--prism-world DIR (prism capture)")  # fmt: skip
    seed = args.prism_fault_seed or 0
    for given, flag in ((args.prism_fault_dry_run, "--prism-fault-dry-run"),
                        (args.prism_fault_seed is not None, "--prism-fault-seed")):  # fmt: skip
        if given and not faults:
            raise UsageError(f"{flag} without a fault", fix="--prism-fault drop@rank=0")
    truth = Path(args.prism_fault_truth) if args.prism_fault_truth else None
    if truth is not None:
        if not faults or args.prism_fault_dry_run:
            raise UsageError("--prism-fault-truth says what was injected, and nothing is",
                             fix="--prism-fault drop@rank=0, no --prism-fault-dry-run")  # fmt: skip
        if not truth.absolute().parent.is_dir():
            raise UsageError(
                f"cannot write {truth}: {truth.parent} is no folder", fix=f"mkdir -p {truth.parent}"
            )
        check_writable(truth.absolute().parent, "--prism-fault-truth FILE")
        if truth.is_dir():
            raise UsageError(f"{truth} is a folder", fix=f"--prism-fault-truth {truth / 'truth'}")
        if truth.exists() and not args.prism_force:
            raise UsageError(f"{truth} exists and is not overwritten", fix="--prism-force")
    for fault in faults:
        virtual = set(fault.ranks(world, seed)) - set(local)
        if virtual and fault.only_time:
            _check_paced(fault, args)
        elif virtual and fault.kind == "env":
            raise UsageError(f"{fault}: programs do not say what a variable changes on a virtual "
                             "rank", fix=f"--prism-ranks {min(virtual)}")  # fmt: skip
        elif virtual and (programs is None or not strict):
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
    return HangOptions(faults, seed, args.prism_fault_dry_run, programs, strict,
                       args.prism_sanitize, policy, truth)  # fmt: skip


def slow(found: HangOptions | None, world: World, local: tuple[int, ...]) -> str:
    """Virtual ranks that a fault makes slow, in the words of ``--prism-slow``."""
    parts = []
    for fault in found.faults if found is not None else ():
        virtual = set(fault.ranks(world, found.seed)) - set(local)  # type: ignore[union-attr]
        if fault.kind == "slow" and virtual:
            parts.append(f"{format_ranks(virtual)}:{fault.factor('factor', 2):g}")
    return ";".join(parts)


def _check_paced(fault: Fault, args: argparse.Namespace) -> None:
    """UsageError: a virtual rank that is late is felt only where virtual ranks take their time."""
    if fault.kind == "slow" and args.prism_pace:
        if len(fault.select) > 1:
            raise UsageError(f"{fault}: a paced rank is slow in every iteration",
                             fix=f"slow@rank={fault.select['rank']}:factor=1.5")  # fmt: skip
        return
    if fault.kind == "slow":
        how = f"--prism-pace DIR --prism-slow {fault.select['rank']}:{fault.factor('factor', 2):g}"
    else:
        how = f"prism hang DIR fault={fault} says what it costs"
    raise UsageError(f"{fault}: virtual ranks answer at once, however late they are", fix=how)
