"""The flags of pacing: ``--prism-pace`` and ``--prism-slow``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line.job_flags import AttachOrder, JobFlags, ParsedFlags, value
from megatron_prism.features.pacing.options import PaceOptions

if TYPE_CHECKING:
    from megatron_prism.emulate.rank.session import Run, Session


def read_options(parsed: ParsedFlags) -> PaceOptions | None:
    """Read the flags of pacing.  UsageError for slow ranks that nobody feels, or a capture."""
    folder, slow = parsed.args.prism_pace, parsed.args.prism_slow or ""
    # a slow virtual rank that answers at once is not slow
    if folder is None and slow:
        raise UsageError(
            "--prism-slow is felt only while virtual ranks are paced", fix="add --prism-pace DIR"
        )
    if folder is None:
        return None
    if parsed.flag_is_set("prism_capture"):
        raise UsageError(
            "--prism-capture keeps what a rank does alone, and --prism-pace makes it wait",
            fix="capture without --prism-pace, which captures what it lacks",
        )
    return PaceOptions(folder, slow)


def attach(run: Run, session: Session, options: PaceOptions) -> None:
    """Pace the virtual ranks of ``run``; ranks that other features make slow are slow, too."""
    from megatron_prism.features.pacing import pace

    pace.add_to(run, session, options)


JOB_FLAGS = (
    JobFlags(
        flags={
            "--prism-pace": value(
                "virtual ranks answer when they would, by the slices in DIR (captured if missing)"
            ),
            "--prism-slow": value(
                "with --prism-pace: virtual ranks slower by FACTOR, 'pp=3:1.2;17:2'", "SEL:FACTOR"
            ),
        },
        read=read_options,
        attach=attach,
        place=AttachOrder.PACING,
        section="pacing",
    ),
)
