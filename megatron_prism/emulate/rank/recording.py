"""``--prism-record`` and ``--prism-values recorded:``: values that steer the program.

In : the options.  Out: a recorder or a replayer of control values, which follows the calls and the
training of the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import check_writable
from megatron_prism.runtime.recorded_values import ValueRecorder, ValueReplayer

if TYPE_CHECKING:
    from megatron_prism.emulate.command_line.options import Options
    from megatron_prism.emulate.rank.session import Run, Session


def add_to(run: Run, session: Session) -> None:
    """Record the control values of ``run``, or give back those of a recording."""
    options = run.options
    num_virtual = options.world.size - len(options.ranks)
    run.recording = _control_values(options, num_virtual)
    if run.recording is not None:
        run.follow_calls(run.recording)
        run.follow_training(run.recording)
        run.on_arguments.append(run.recording.is_of)
    # no other process may record the same rank
    if options.record is not None:
        run.places.append(options.record / f"rank-{options.rank:06d}")


def _control_values(options: Options, num_virtual: int) -> ValueRecorder | ValueReplayer | None:
    """Make the recorder or the replayer of control values.

    Args:
        options: of the run; they name a recording to make or to replay.
        num_virtual: ranks of the world that have no process.

    Returns:
        None where calls are recorded and ranks are virtual: their control values mean nothing.

    Raises:
        UsageError: this tier, or virtual ranks, have no values to record.
    """
    records_calls = any(asked.options.records_calls for asked in options.asked_features)
    # shapes have no values to keep
    if options.tier == "meta":
        needs_all = options.record is not None and not records_calls and num_virtual
        more = f", with every rank local (torchrun --nproc-per-node {options.world.size})"
        raise UsageError(
            "tier meta has no values to record or replay",
            fix=f"use --prism-tier cuda or cpu{more if needs_all else ''}",
        )
    header = {"world": str(options.world)}
    if options.record is None:
        assert options.recorded is not None, "one of both"
        return ValueReplayer(options.recorded, options.rank, header)
    # calls alone are recorded: control values of virtual ranks mean nothing
    if records_calls and num_virtual:
        return None
    if options.recorded or num_virtual:
        raise UsageError(
            f"--prism-record needs every rank of the world to be local, {len(options.ranks)} of "
            f"{options.world.size} are: virtual ranks say nothing worth keeping",
            fix=f"torchrun --nproc-per-node {options.world.size}, without --prism-values",
        )
    check_writable(options.record, "--prism-record PATH")
    return ValueRecorder(options.record, options.rank, header)
