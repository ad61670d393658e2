"""The flags of the debugger: where a rank stops, and which calls' payloads are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line.job_flags import (
    AttachOrder,
    JobFlags,
    ParsedFlags,
    recorded_folder,
    value,
)
from megatron_prism.features.debugger.options import PayloadOptions, StopOptions

if TYPE_CHECKING:
    from megatron_prism.emulate.rank.session import Run, Session


def read_stops(parsed: ParsedFlags) -> StopOptions | None:
    """Read where the rank stops.  UsageError for a debugger without a place to stop."""
    args = parsed.args
    if args.prism_debugger and not (args.prism_stop or args.prism_watch):
        raise UsageError(
            "--prism-debugger without a place to stop",
            fix="--prism-break CALL, or --prism-watch nan",
        )
    # no place to stop, and nothing to watch
    if args.prism_stop is None and args.prism_watch is None:
        return None
    return StopOptions(args.prism_stop or "", args.prism_watch, args.prism_debugger)


def read_payloads(parsed: ParsedFlags) -> PayloadOptions | None:
    """Read which payloads are kept.  UsageError for payloads without a recording."""
    args = parsed.args
    if args.prism_payload is not None:
        if args.prism_record is None:
            raise UsageError(
                "--prism-payload says what a recording keeps", fix="--prism-record DIR"
            )
        return PayloadOptions(calls=args.prism_payload)
    folder = recorded_folder(args.prism_values)
    # a run that records gives nothing back
    if folder is not None and args.prism_record is None:
        return PayloadOptions(replay_from=folder)
    return None


def attach_stops(run: Run, session: Session, options: StopOptions) -> None:
    """Add the debugger and the watch of values to ``run``."""
    from megatron_prism.features.debugger import debugger

    debugger.add_to(run, session, options)


def attach_payloads(run: Run, session: Session, options: PayloadOptions) -> None:
    """Add the recorder or the replayer of payloads to ``run``."""
    from megatron_prism.features.debugger import payloads

    payloads.add_to(run, options)


JOB_FLAGS = (
    JobFlags(
        flags={
            "--prism-break": value(
                "stop this rank at a call, in a debugger: '1B2 all_reduce group=tp nth=3', '2F0', "
                "'@mappings.py:31 after' (as prism show prints calls); where several ranks are "
                "local: 'rank=4 2F0; rank=5 2F0'",
                "CALL",
                dest="prism_stop",
            ),
            "--prism-debugger": value(
                "pdb (default), or debugpy:[HOST:]PORT, to which an editor attaches", "WHICH"
            ),
            "--prism-watch": value(
                "stop at the first operator whose result has nan, inf, or norm>X: which module, "
                "phase, microbatch and line",
                "VALUE",
            ),
        },
        read=read_stops,
        attach=attach_stops,
        place=AttachOrder.DEBUGGER,
    ),
    JobFlags(
        flags={
            "--prism-payload": value(
                "calls of which --prism-record also keeps the results: all, or calls as "
                "--prism-break names them, with ; between them",
                "CALLS",
            ),
        },
        read=read_payloads,
        attach=attach_payloads,
        place=AttachOrder.PAYLOADS,
    ),
)
