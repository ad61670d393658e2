"""The flags of faults: which to make happen, and against what calls are checked."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_prism.core.errors import UsageError, refuse
from megatron_prism.core.files import check_writable
from megatron_prism.core.programs.call_selector import CallSelector
from megatron_prism.emulate.command_line.job_flags import (
    AttachOrder,
    JobFlags,
    ParsedFlags,
    switch,
    value,
)
from megatron_prism.features.faults.options import FaultOptions
from megatron_prism.features.hang.fault_plan import Fault, load_plan, parse

if TYPE_CHECKING:
    from megatron_prism.emulate.rank.session import Run, Session


def read_options(parsed: ParsedFlags) -> FaultOptions | None:
    """Read the faults and the checks.  UsageError for a fault of a rank that nobody plays here."""
    args, world, local_ranks = parsed.args, parsed.world, parsed.local_ranks
    faults = _planned_faults(parsed)
    programs = args.prism_world
    # with programs to compare with, calls are checked unless --prism-mismatch says otherwise
    policy = args.prism_mismatch or ("off" if programs is None else "strict")
    strict, seed = policy != "off", args.prism_fault_seed or 0
    refuse(
        (
            programs is not None and str(programs).isdecimal() and not programs.exists(),
            f"--prism-world {programs}: there is no such folder of programs",
            f"--prism-world-size {programs}",
        ),
        (
            args.prism_check_order and (programs is None or not strict),
            "--prism-check-order compares with the programs of the world",
            "--prism-world DIR (prism capture)",
        ),
        (
            args.prism_fault_dry_run and not faults,
            "--prism-fault-dry-run without a fault",
            "--prism-fault drop@rank=0",
        ),
        (
            args.prism_fault_seed is not None and not faults,
            "--prism-fault-seed without a fault",
            "--prism-fault drop@rank=0",
        ),
    )
    _check_truth(args, bool(faults))
    for fault in faults:
        # a fault of a virtual rank is felt only through what it does to its peers
        virtual_ranks = set(fault.ranks(world, seed)) - set(local_ranks)
        if virtual_ranks:
            calls_are_compared = strict and programs is not None
            _check_virtual(fault, min(virtual_ranks), parsed, calls_are_compared)
    # nothing to compare with: no programs, and no second local rank
    if strict and programs is None and len(local_ranks) < 2:
        raise UsageError(
            "one local rank, and nothing to compare its calls with",
            fix="--prism-world DIR (prism capture), or several local ranks",
        )
    if not (faults or strict):
        return None
    return FaultOptions(
        faults,
        seed,
        args.prism_fault_dry_run,
        programs,
        strict,
        args.prism_check_order,
        policy,
        args.prism_fault_truth,
    )


def _planned_faults(parsed: ParsedFlags) -> tuple[Fault, ...]:
    """Read the faults of the flags, which win over ``PRISM_FAULT``, and of the plan's file."""
    texts = parsed.args.prism_fault
    if texts is None:
        texts = [text for text in parsed.env.get("PRISM_FAULT", "").split(";") if text]
    faults = tuple(parse(text) for text in texts)
    if parsed.args.prism_fault_plan:
        faults += load_plan(parsed.args.prism_fault_plan)
    return faults


def _check_truth(args: argparse.Namespace, faults_are_planned: bool) -> None:
    """UsageError if the file for what was injected cannot be written."""
    truth = args.prism_fault_truth
    if truth is None:
        return
    folder = truth.absolute().parent
    refuse(
        (
            not faults_are_planned or args.prism_fault_dry_run,
            "--prism-fault-truth says what was injected, and nothing is",
            "--prism-fault drop@rank=0, no --prism-fault-dry-run",
        ),
        (
            not folder.is_dir(),
            f"cannot write {truth}: {truth.parent} is no folder",
            f"mkdir -p {truth.parent}",
        ),
        (truth.is_dir(), f"{truth} is a folder", f"--prism-fault-truth {truth / 'truth'}"),
        (
            truth.exists() and not args.prism_force,
            f"{truth} exists and is not overwritten",
            "--prism-force",
        ),
    )
    check_writable(folder, "--prism-fault-truth FILE")


def _check_virtual(fault: Fault, rank: int, parsed: ParsedFlags, calls_are_compared: bool) -> None:
    """UsageError for a fault of a virtual rank that no local rank would feel.

    Args:
        fault: the fault.
        rank: a virtual rank that it hits.
        parsed: the job's flags.
        calls_are_compared: whether calls are checked against the programs of the world.
    """
    # it changes times alone
    if fault.only_time:
        _check_paced(fault, parsed)
    elif fault.kind == "env":
        raise UsageError(
            f"{fault}: programs do not say what a variable changes on a virtual rank",
            fix=f"--prism-ranks {rank}",
        )
    elif not calls_are_compared:
        raise UsageError(
            f"{fault}: rank {rank} is virtual here and answers at once",
            fix="--prism-world DIR says what it would do (prism capture), or run it with "
            f"--prism-ranks {rank}",
        )


def _check_paced(fault: Fault, parsed: ParsedFlags) -> None:
    """UsageError: a virtual rank that is late is felt only where virtual ranks take their time."""
    slow_rank = fault.select.rank
    if fault.kind == "slow" and parsed.flag_is_set("prism_pace"):
        # a paced rank is slow from the first iteration to the last, and in all calls
        if fault.select != CallSelector(slow_rank):
            raise UsageError(
                f"{fault}: a paced rank is slow in every iteration",
                fix=f"slow@rank={slow_rank}:factor=1.5",
            )
        return
    if fault.kind == "slow":
        fix = f"--prism-pace DIR --prism-slow {slow_rank}:{fault.factor('factor', 2):g}"
    else:
        fix = f"prism hang DIR fault={fault} says what it costs"
    raise UsageError(f"{fault}: virtual ranks answer at once, however late they are", fix=fix)


def attach(run: Run, session: Session, options: FaultOptions) -> None:
    """Add the guard of calls to ``run``, which injects the faults and checks the calls."""
    from megatron_prism.features.faults import call_guard

    call_guard.add_to(run, options)


JOB_FLAGS = (
    JobFlags(
        flags={
            "--prism-fault": value(
                "make a fault happen: drop@rank=37,iter=2,group=tp,nth=3 (repeatable)",
                "KIND@SEL",
                action="append",
            ),
            "--prism-fault-plan": value("a list of faults as a file", "YAML"),
            "--prism-fault-seed": value("draws the ranks of rank=any:K (default 0)", "N"),
            "--prism-fault-dry-run": switch(
                "say which call every fault would hit, and make none happen"
            ),
            "--prism-fault-truth": value(
                "write what was injected, a JSON line per fault: the truth that verdicts are "
                "scored with",
                "FILE",
            ),
            "--prism-world": value(
                "programs of the whole job (prism capture): every call is checked against them"
            ),
            "--prism-mismatch": {
                "choices": ("strict", "nccl", "gloo", "off"),
                "help": "strict: stop at a call that peers would not make (default with "
                "--prism-world); nccl, gloo: only where that library would hang or abort, else "
                "warn",
            },
            "--prism-check-order": switch(
                "also stop where this rank leaves the order of its own program in --prism-world"
            ),
        },
        read=read_options,
        attach=attach,
        place=AttachOrder.FAULTS,
    ),
)
